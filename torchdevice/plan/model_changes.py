"""Changes of a model in a plan: LoRA's adapters, and activations recomputed in backward."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from torchdevice.plan.model_words import RANK


def has_peft() -> bool:
    """Return whether PEFT is installed, which :func:`with_adapters` needs."""
    return importlib.util.find_spec("peft") is not None


def with_adapters(model: Any) -> Any:
    """Return a model with PEFT's LoRA on all linear layers but the output's, unless adapted."""
    import peft

    if isinstance(model, peft.PeftModel):
        return model
    targets: Any = "all-linear"
    if not hasattr(model, "get_output_embeddings"):
        targets = [
            name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)
        ]
    kind = getattr(getattr(model, "config", None), "model_type", "")
    excluded = [*_UNADAPTED.get(kind, ()), *_computing_otherwise(model)]
    # Older releases lack this parameter.
    more: dict[str, Any] = {"exclude_modules": excluded} if excluded else {}
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, **more)
    adapted: Any = peft.get_peft_model(model, config)
    return adapted


def _computing_otherwise(model: torch.nn.Module) -> Iterator[str]:
    """Yield the names of layers of transformers' that are linear by their class alone, such as a
    router that returns several tensors. PEFT takes them for linear ones.
    """
    for name, each in model.named_modules():
        kind = type(each)
        if (
            isinstance(each, torch.nn.Linear)
            and kind.__module__.startswith("transformers.models.")
            and kind.forward is not torch.nn.Linear.forward
            and not _gives_outputs(each)
        ):
            yield name


def _gives_outputs(layer: torch.nn.Linear) -> bool:
    """Return whether a layer makes one tensor of its outputs from one of its inputs."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    values = {name: torch.empty_like(each, device="meta") for name, each in tensors}
    given = torch.empty(1, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        found = torch.func.functional_call(layer, values, (given,))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False  # it takes other arguments, or tensors of more dimensions
    return isinstance(found, torch.Tensor) and found.shape == (1, layer.out_features)


_OF_MAMBA = ["out_proj", "conv1d"]

_UNADAPTED = dict.fromkeys(
    ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"), _OF_MAMBA
)
"""Architecture -> the modules that PEFT refuses to adapt, because kernels of Mamba read weights.

Source: ``_check_lora_target_modules_mamba`` in ``peft/tuners/tuners_utils.py``.
"""


def checkpoint(model: Any) -> bool:
    """Let a model compute its activations again in the backward pass; return whether it can."""
    # The first from 5.20 on.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        enable = getattr(model, name, None)
        if enable is not None:
            enable()
            return True
    return False
