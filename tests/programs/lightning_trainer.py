"""A script for CUDA in Lightning's manner. torchrun, or Lightning itself, starts its ranks."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

folder = Path(sys.argv[1])
batch = int(sys.argv[2])
devices = int(sys.argv[3])
strategy = sys.argv[4]


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )
        self.losses = []

    def training_step(self, batch, index):
        inputs, targets = batch
        assert inputs.device == self.device
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def train_dataloader(self):
        ranks = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        return DataLoader(data, batch, sampler=DistributedSampler(data, **ranks, shuffle=False))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


L.seed_everything(0, verbose=False)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.randn(32, 8, generator=generator), torch.randn(32, 1, generator=generator)
)
trainer = L.Trainer(
    accelerator="cuda",
    devices=devices,
    strategy=strategy,
    max_epochs=2,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model)
(folder / f"losses-{trainer.global_rank}").write_text(json.dumps(model.losses))
