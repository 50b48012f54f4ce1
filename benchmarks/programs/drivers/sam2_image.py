"""A mask of one image point by SAM 2's README, random weights: ``sam2_image.py [cpu]``."""

import sys

import numpy as np
import torch
from sam2.build_sam import build_sam2
from sam2.sam2_image_predictor import SAM2ImagePredictor

device = sys.argv[1] if sys.argv[1:] else "cuda"
torch.manual_seed(0)
predictor = SAM2ImagePredictor(
    build_sam2("configs/sam2.1/sam2.1_hiera_t.yaml", None, device=device)
)
image = np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8)
with torch.inference_mode():
    predictor.set_image(image)
    masks, scores, _ = predictor.predict(
        point_coords=np.array([[40, 30]]), point_labels=np.array([1])
    )
print(f"scores: {' '.join(f'{score:.5f}' for score in scores)}, {int(masks.sum())} pixels")
