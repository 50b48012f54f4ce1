"""A block of Mamba, as its README uses it, with random weights."""

import torch
from mamba_ssm import Mamba

torch.manual_seed(0)
model = Mamba(d_model=16, d_state=16, d_conv=4, expand=2).to("cuda")
y = model(torch.randn(2, 8, 16).to("cuda"))
print(f"mean {y.mean().item():.6f}")
