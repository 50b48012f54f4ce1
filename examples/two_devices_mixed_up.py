"""A mistake that a CPU does not show: a sum of tensors that are on two devices."""

import torch

weights = torch.ones(2, device="cuda:0")
inputs = torch.ones(2, device="cuda:1")
print(weights + inputs)
