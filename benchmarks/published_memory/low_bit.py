"""Fine-tuning timm's ViTs on an RTX 4070 Ti SUPER with torchao's low-bit and CPU optimizers.

Source: https://github.com/pytorch/ao at commit 03cf0ade,
``torchao/prototype/low_bit_optim/README.md``. The steps are those of
``benchmarks/benchmark_low_bit_adam.py``, which prints gigabytes with two digits. Its images are 224
pixels wide. The table of Adam is older than that script's AdamW, which is fused:
``torch.optim.Adam`` is planned, as in pull request 482.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.published_memory.rows import Row

TITLE = "ViTs with torchao's optimizers"

_README = "https://github.com/pytorch/ao/blob/03cf0ade/torchao/prototype/low_bit_optim/README.md"

SOURCE = f"[torchao]({_README})"

IMPORTS = ("timm", "torchao.optim", "bitsandbytes")
"""What takes long to import."""

VERSIONS: dict[str, str] = {}

_GPU, _CAPABILITY = "RTX 4070 Ti SUPER", (8, 9)


def _stepping(
    model: Any, optimizer: Any, batch: int, images: torch.dtype, autocast: bool
) -> Callable[[], object]:
    def steps() -> object:
        for _ in range(3):
            pictures = torch.randn(batch, 3, 224, 224).to(images)
            labels = torch.zeros(batch, dtype=torch.long)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                loss = torch.nn.functional.cross_entropy(model(pictures.cuda()), labels.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    return steps


def _adam(name: str) -> Any:
    if name == "PyTorch":
        return torch.optim.Adam
    if name == "bitsandbytes, 8 bits":
        import bitsandbytes

        return bitsandbytes.optim.Adam8bit
    from torchao import optim

    return {"8 bits": optim.Adam8bit, "float8": optim.AdamFp8, "4 bits": optim.Adam4bit}[name]


def _tuned(checkout: Path, *, adam: str) -> Callable[[], object]:
    import timm

    model = timm.create_model("vit_huge_patch14_224.orig_in21k", num_classes=45).cuda()
    optimizer = _adam(adam)(model.parameters(), lr=1e-4)
    return _stepping(model, optimizer, 8, torch.float32, autocast=True)


def _offloaded(checkout: Path, *, offload: bool, gradients: bool) -> Callable[[], object]:
    import timm
    from torchao.optim import CPUOffloadOptimizer

    model = timm.create_model("vit_giant_patch14_dinov2.lvd142m", num_classes=45, img_size=224)
    model.set_grad_checkpointing()
    model.bfloat16().cuda()
    adam: Any = functools.partial(torch.optim.AdamW, fused=True)
    if offload:
        adam = functools.partial(
            CPUOffloadOptimizer, optimizer_class=adam, offload_gradients=gradients
        )
    optimizer = adam(model.parameters(), lr=1e-4, weight_decay=0)
    return _stepping(model, optimizer, 32, torch.bfloat16, autocast=False)


def _row(
    case: str, gigabytes: float, work: Callable[[Path], Callable[[], object]], why: str = ""
) -> Row:
    return Row(case, _GPU, round(gigabytes * 1e9), 10**7, work, _CAPABILITY, why=why)


def _low_bit(adam: str, gigabytes: float, why: str = "") -> Row:
    return _row(
        f"ViT-H, Adam: {adam}, 8 images", gigabytes, functools.partial(_tuned, adam=adam), why
    )


_OTHER_BATCH = (
    "ViT-H: torchao's pull request 478 gives 12.98, 8.31, 8.32 and 7.72 GB of the same runs for 4 "
    "images. For 4 images "
    "the plans of 8-bit and 4-bit states are 18 to 19 % lower. The rows follow torchao's page, "
    "which says 8."
)

_CONSTANT = (
    "The three runs of ViT-g took 38 to 48 MB more than their plans, whatever the optimizer keeps "
    "on the GPU. The "
    "cause is not known."
)


def _giant(
    adam: str, gigabytes: float, *, offload: bool, gradients: bool = False, why: str = ""
) -> Row:
    work = functools.partial(_offloaded, offload=offload, gradients=gradients)
    return _row(f"ViT-g, bfloat16, checkpointed, {adam}, 32 images", gigabytes, work, why)


ROWS = [
    _low_bit("PyTorch", 12.94),
    _low_bit("bitsandbytes, 8 bits", 8.31),
    _low_bit("8 bits", 8.31),
    _low_bit("float8", 8.32),
    _low_bit("4 bits", 7.72, _OTHER_BATCH),
    _giant("AdamW", 9.82, offload=False),
    _giant("AdamW on the CPU", 5.24, offload=True),
    _giant("AdamW and gradients on the CPU", 4.01, offload=True, gradients=True, why=_CONSTANT),
]
