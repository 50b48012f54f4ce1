"""A small neural network learns the sine on the GPU, with gradient checkpointing and mixed
precision.
"""

import math

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
torch.set_num_threads(1)  # its tensors are too small to be shared between cores
x = torch.linspace(-math.pi, math.pi, 512, device="cuda").unsqueeze(1)
y = torch.sin(x)

hidden = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()).cuda()
head = nn.Linear(64, 1, device="cuda")
optimizer = torch.optim.Adam([*hidden.parameters(), *head.parameters()], lr=3e-3, foreach=True)
scaler = torch.amp.GradScaler("cuda")

for step in range(1, 301):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        features = checkpoint(hidden, x, use_reentrant=False)
    loss = (head(features.float()) - y).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.5f}")

assert loss.item() < 0.05
with torch.inference_mode():
    print("sin(1) is about", round(head(hidden(torch.ones(1, 1).cuda())).item(), 2))
