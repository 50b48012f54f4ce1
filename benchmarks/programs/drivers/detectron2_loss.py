"""Three steps of detectron2's RetinaNet, random weights and image: ``detectron2_loss.py [cpu]``."""

import sys

import torch
from detectron2 import model_zoo
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage

torch.manual_seed(0)
config = model_zoo.get_config("COCO-Detection/retinanet_R_50_FPN_1x.yaml")
config.MODEL.WEIGHTS = ""
config.MODEL.DEVICE = sys.argv[1] if sys.argv[1:] else "cuda"
config.SOLVER.BASE_LR = 1e-7
model = build_model(config)
optimizer = build_optimizer(config, model)
objects = Instances((96, 128))
objects.gt_boxes = Boxes(torch.tensor([[10.0, 20.0, 60.0, 80.0]]))
objects.gt_classes = torch.tensor([7])
image = (torch.rand(3, 96, 128) * 255).byte()
with EventStorage():
    for _ in range(3):
        losses = model([{"image": image, "instances": objects}])
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"total_loss: {loss.item():.5f}")
