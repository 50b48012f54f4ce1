"""Train a character-level transformer with a raw loop: AMP, GradScaler, pinned loader, checkpoint
and resume.

python train_nanogpt.py [--steps 60] [--out runs/nanogpt] [--resume]
"""

import argparse
import contextlib
import math
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

HERE = os.path.dirname(os.path.abspath(__file__))

parser = argparse.ArgumentParser()
parser.add_argument("--text", default=os.path.join(HERE, "data", "harbour.txt"))
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--out", default="runs/nanogpt")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--dtype", default="float16", choices=["float32", "bfloat16", "float16"])
args = parser.parse_args()

device = "cuda:0"
device_type = "cuda" if "cuda" in device else "cpu"
torch.cuda.set_device(device)
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
ctx = (
    contextlib.nullcontext()
    if args.dtype == "float32"
    else torch.amp.autocast(device_type=device_type, dtype=dtype)
)

BLOCK, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.norm(self.blocks(x)))
        return logits, None if targets is None else F.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )


with open(args.text, encoding="utf-8") as f:
    text = f.read()
letters = sorted(set(text))
data = torch.tensor([letters.index(c) for c in text])
starts = torch.arange(0, len(data) - BLOCK - 1, 5)
dataset = TensorDataset(
    torch.stack([data[i : i + BLOCK] for i in starts]),
    torch.stack([data[i + 1 : i + 1 + BLOCK] for i in starts]),
)
loader = DataLoader(
    dataset, batch_size=16, shuffle=True, pin_memory=True, num_workers=2, drop_last=True
)

model = GPT(len(letters)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
scaler = torch.cuda.amp.GradScaler(enabled=(args.dtype == "float16"))
os.makedirs(args.out, exist_ok=True)
path = os.path.join(args.out, "ckpt.pt")
step = 0
if args.resume:
    checkpoint = torch.load(path, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint["scaler"])
    torch.cuda.set_rng_state(checkpoint["rng"].cpu())
    step = checkpoint["step"]
    print(f"resumed at step {step}")

target = step + args.steps
model.train()
t0 = time.time()
while step < target:
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with ctx:
            logits, loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0 or step == target:
            torch.cuda.synchronize()
            print(
                f"step {step}: loss {loss.item():.4f}, {1000 * (time.time() - t0) / 20:.0f} ms, "
                f"{torch.cuda.memory_allocated() / 1e6:.0f} MB, scale {scaler.get_scale():g}"
            )
            t0 = time.time()
            if not math.isfinite(loss.item()):
                raise SystemExit("the loss is not finite")
        if step >= target:
            break

torch.save(
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "rng": torch.cuda.get_rng_state(),
        "step": step,
    },
    path,
)
model.eval()
idx = torch.zeros((1, 1), dtype=torch.long, device=device)
with torch.no_grad(), ctx:
    for _ in range(80):
        logits, _ = model(idx[:, -BLOCK:])
        idx = torch.cat(
            [idx, torch.multinomial(F.softmax(logits[:, -1].float(), dim=-1), 1)], dim=1
        )
print("wrote:", repr("".join(letters[i] for i in idx[0].tolist())))
print("saved", path)
