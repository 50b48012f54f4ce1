"""airbench's training of a smaller network on 512 images: ``airbench_small.py``, unseeded."""

import torch
from airbench import CifarLoader, make_net94, train94

torch.manual_seed(0)
loader = CifarLoader(
    "cifar10", train=True, batch_size=64, aug={"flip": True, "translate": 2}, altflip=True
)
net = train94(
    loader,
    epochs=1,
    learning_rate=0.5,
    whiten_bias_epochs=1,
    tta_level=0,
    make_net=lambda: make_net94({"block1": 16, "block2": 16, "block3": 16}),
)
