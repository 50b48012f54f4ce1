"""Denoising models of diffusers on an L40S, by its own benchmarks.

Source: https://github.com/huggingface/diffusers at commit 3c7506b2, ``benchmarks/``, which runs on
an AWS g6e and publishes its figures as a data set. A run loads a model, casts it by layers where
the case says so, and calls it. The inputs are those of the benchmarks. The sizes of LTX-Video are
those of ``scripts/convert_ltx_to_diffusers.py``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.published_memory.rows import Row

TITLE = "FLUX.1, LTX-Video and Stable Diffusion XL, by diffusers' benchmarks"

_FIGURES = "https://huggingface.co/datasets/diffusers/benchmarks/blob/7b8aaacf/collated_results.csv"

SOURCE = f"[diffusers]({_FIGURES})"

IMPORTS = ("transformers",)
"""What takes long to import."""

VERSIONS: dict[str, str] = {}

_GPU, _CAPABILITY = "L40S", (8, 9)

_FLUX, _LTX, _SDXL = "FLUX.1-dev", "LTX-Video 0.9.7", "Stable Diffusion XL"

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    _FLUX: ("FluxTransformer2DModel", {"guidance_embeds": True}),
    _LTX: (
        "LTXVideoTransformer3DModel",
        {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
    ),
    _SDXL: (
        "UNet2DConditionModel",
        {
            "sample_size": 128,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (320, 640, 1280),
            "cross_attention_dim": 2048,
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
}
"""Model -> its class, and what it is made with."""

_INPUTS = {_FLUX: "benchmarking_flux", _LTX: "benchmarking_ltx", _SDXL: "benchmarking_sdxl"}
"""Model -> the benchmark that makes its inputs."""


def _called(checkout: Path, *, name: str, cast: bool) -> Callable[[], object]:
    sys.path[:0] = [str(checkout / "src"), str(checkout / "benchmarks")]
    import diffusers

    kind, options = _MODELS[name]
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**options).to(torch.bfloat16).eval()
    benchmark: Any = importlib.import_module(_INPUTS[name])

    def steps() -> object:
        model.to_empty(device="cuda")
        if cast:
            model.enable_layerwise_casting(
                storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16
            )
        inputs = benchmark.get_input_dict(device="cuda", dtype=torch.bfloat16)
        outputs = None
        with torch.no_grad():
            for _ in range(2):
                outputs = model(**inputs)
        return model, outputs

    return steps


_OLDER = (
    "Stable Diffusion XL kept in float8 is of June 2025, in the data set's commit 5f28ce6c, which "
    "has the same figure of the model in bfloat16."
)


def _row(name: str, gibibytes: float, *, cast: bool = False, why: str = "") -> Row:
    return Row(
        f"{name}, bfloat16{', kept in float8' * cast}",
        _GPU,
        round(gibibytes * 2**30),
        round(0.01 * 2**30),
        functools.partial(_called, name=name, cast=cast),
        _CAPABILITY,
        why=why,
    )


ROWS = [
    _row(_FLUX, 22.64),
    _row(_FLUX, 22.19, cast=True),
    _row(_LTX, 25.22),
    _row(_LTX, 24.38, cast=True),
    _row(_SDXL, 5.05),
    _row(_SDXL, 4.89, cast=True, why=_OLDER),
]
