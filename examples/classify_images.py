"""Train a small convolutional network to tell circles, squares and crosses apart.

python classify_images.py [--epochs 3]
"""

import argparse

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Drawings of 32 x 32 pixels with noise, made when they are read."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = np.random.default_rng(self.seed * 100_000 + index)
        label = int(rng.integers(3))
        cy, cx, r = rng.integers(10, 22), rng.integers(10, 22), rng.integers(5, 9)
        y, x = np.mgrid[:32, :32]
        if label == 0:
            drawing = (y - cy) ** 2 + (x - cx) ** 2 <= r**2
        elif label == 1:
            drawing = (abs(y - cy) <= r) & (abs(x - cx) <= r)
        else:
            drawing = ((abs(y - cy) <= 1) & (abs(x - cx) <= r)) | (
                (abs(x - cx) <= 1) & (abs(y - cy) <= r)
            )
        image = drawing.astype(np.float32) + 0.3 * rng.standard_normal((32, 32), dtype=np.float32)
        return torch.from_numpy(image)[None], label


def network():
    def block(i, o):
        return nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )

    return nn.Sequential(
        block(1, 16), block(16, 32), block(32, 32), nn.Flatten(), nn.Dropout(0.1), nn.Linear(512, 3)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpu", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    cudnn.benchmark = True
    torch.cuda.set_device(args.gpu)
    model = nn.DataParallel(network()).cuda()
    model = model.to(memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss().cuda(args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler = torch.cuda.amp.GradScaler()
    train = DataLoader(Shapes(1200, 1), batch_size=64, shuffle=True, num_workers=2, pin_memory=True)
    test = DataLoader(Shapes(300, 2), batch_size=100, num_workers=0, pin_memory=True)

    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros(1, device="cuda")
        for images, labels in train:
            images = images.cuda(args.gpu, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.cuda(args.gpu, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.amp.autocast():
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        schedule.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in test:
                predicted = model(images.cuda(non_blocking=True)).argmax(1).cpu()
                correct += (predicted == labels).sum().item()
        print(
            f"epoch {epoch + 1}: loss {total.item() / len(train):.3f}, accuracy "
            f"{correct / len(test.dataset):.1%}, "
            f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB peak"
        )
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
