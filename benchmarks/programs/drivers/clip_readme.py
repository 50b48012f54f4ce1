"""The example of CLIP's README, with weights from a file: ``clip_readme.py WEIGHTS IMAGE``."""

import sys

import clip
import torch
from PIL import Image

device = "cuda" if torch.cuda.is_available() else "cpu"
model, preprocess = clip.load(sys.argv[1], device=device)
image = preprocess(Image.open(sys.argv[2])).unsqueeze(0).to(device)
text = clip.tokenize(["a diagram", "a dog", "a cat"]).to(device)
with torch.no_grad():
    logits_per_image, _ = model(image, text)
    probs = logits_per_image.softmax(dim=-1).cpu().numpy()
print("Label probs:", " ".join(f"{value:.4f}" for value in probs[0]))
