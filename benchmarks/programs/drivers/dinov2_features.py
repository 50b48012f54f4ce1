"""The features of a DINOv2 backbone with random weights, as its README loads it."""

import torch

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.hub.load(".", "dinov2_vits14", source="local", pretrained=False).to(device)
images = torch.rand(2, 3, 70, 70).to(device)
with torch.inference_mode():
    features = model(images)
print(f"features: {features.abs().mean().item():.6f}")
