"""A model on two GPUs: its first half on one, its second on the other. Batches are moved ahead,
activations between.
"""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torchdevice import Prefetcher, ToDevice

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
arguments = parser.parse_args()
torch.manual_seed(0)

model = nn.Sequential(
    nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()).to("cuda:0"),
    ToDevice("cuda:0", "cuda:1"),
    nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to("cuda:1"),
)
print(model[1])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

# Two spirals: which one is a point on?
turn = torch.rand(2048) * 5
label = torch.randint(0, 2, (2048,))
angle = turn + label * torch.pi
points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 5 + 0.02 * torch.randn(2048, 2)
loader = DataLoader(TensorDataset(points, label), batch_size=64, shuffle=True, pin_memory=True)

to_last = ToDevice("cuda:0", "cuda:1")
for epoch in range(1, arguments.epochs + 1):
    right = torch.zeros((), device="cuda:1")
    for batch in Prefetcher(loader, "cuda:0"):
        points, label = batch[0], to_last(batch[1])
        scores = model(points)
        loss = nn.functional.cross_entropy(scores, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += (scores.argmax(1) == label).sum()
    print(f"epoch {epoch}: loss {loss.item():.3f}, {right.item() / 2048:.1%} right")

for index in range(torch.cuda.device_count()):
    print(f"cuda:{index} holds {torch.cuda.memory_allocated(index) / 1e6:.2f} MB")
