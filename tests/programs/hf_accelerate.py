"""A script for CUDA in accelerate's manner. ``accelerate launch``, or python alone, starts it."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

folder, batch = Path(sys.argv[1]), int(sys.argv[2])

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
assert accelerator.device.type == torch.device("cuda").type
generator = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.randn(32, 8, generator=generator), torch.randn(32, 1, generator=generator)
)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _ in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss).mean().item())
accelerator.wait_for_everyone()
(folder / f"losses-{accelerator.process_index}").write_text(json.dumps(losses))
accelerator.end_training()
