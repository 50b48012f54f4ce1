"""DeepSpeed's tutorial on a small network, in one process: ``deepspeed_zero.py STAGE``."""

import os
import sys

import deepspeed
import torch

stage = int(sys.argv[1])
rank = int(os.environ["LOCAL_RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": stage},
    "steps_per_print": 1000,
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
torch.manual_seed(1 + rank)
inputs = torch.randn(8, 16).to(engine.device, torch.bfloat16)
labels = torch.randint(4, (8,)).to(engine.device)
for _ in range(10):
    loss = torch.nn.functional.cross_entropy(engine(inputs).float(), labels)
    engine.backward(loss)
    engine.step()
if rank == 0:
    print(f"stage {stage}: loss {loss.item():.5f}")
