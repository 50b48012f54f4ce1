"""``torchdevice.plan(...)``: the memory that a function or a model needs of a GPU, in Python."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchdevice.plan import models, peaks
from torchdevice.scope import collected_options
from torchdevice.scope.activation import simulate
from torchdevice.simulation import model_lookup

MEMORY = 1 << 40
"""The memory of the GPU on which is planned, where none is named: 1 TiB."""


def plan(
    what: Callable[..., Any] | torch.nn.Module,
    *args: Any,
    train: bool = False,
    target: str | None = None,
    devices: int | None = None,
    memory: int | str | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Plan a function or a model, and return the data of ``torchdevice plan --json``.

    The call runs without values on a simulated GPU. A function makes what it needs on ``"cuda"``. A
    model and tensors among the arguments are copied there without their values, and stay as they
    are.

    Args:
        what: A function, or a model.
        *args: The arguments of the call.
        train: Train the model for two steps with AdamW, on the sum of its results or on their
            ``loss``.
        target: A model of a GPU, such as ``"t4"``. A call that needs more memory than that does not
            finish. Without it, that of ``TORCHDEVICE_TARGET`` if it is a simulated GPU, else
            ``"cuda"``.
        devices: The number of GPUs. Default: ``TORCHDEVICE_DEVICES``, or 1.
        memory: The memory of each in bytes, or as a text such as ``"24GiB"``. Default:
            ``TORCHDEVICE_MEMORY``, or that of the model; 1 TiB for ``"cuda"``.
        **kwargs: More arguments of the call.

    Returns:
        Among others ``needs``, the bytes that are needed; ``smallest``, the smallest model of a GPU
        that fits; ``devices``, the bytes by kind; and ``fits``, a row for each model. ``finished``
        is False where memory ran out.

    Raises:
        BaseException: The errors of the call, unless memory ran out.
    """
    said = collected_options.from_environment()
    if target is None:
        target = model_lookup.simulated(said.get("target", "")) or "cuda"
    if target == "cuda" and memory is None:
        memory = said.get("memory", MEMORY)
    scope = simulate(target, devices=devices, memory=memory, compute="meta", values="assume")
    name = getattr(what, "__qualname__", type(what).__qualname__)
    found = peaks.Peaks()
    kept = []
    error = None
    with scope:
        found.follow()
        try:
            kept.append(_run(what, args, kwargs, train))
        except torch.OutOfMemoryError as raised:
            error = raised
        finally:
            found.stop()
        # The parameters of what was kept are still there to be counted.
        return {**peaks.data(found, scope.report(), error), "program": name}


def _run(what: Any, args: Any, kwargs: Mapping[str, Any], train: bool) -> Any:
    """Call a function or a model's copy, and return the objects that must live until memory is
    measured.
    """
    if not isinstance(what, torch.nn.Module):
        if train:
            raise TypeError(
                f"train=True is for a model, and {what!r} is a function. Let the function train."
            )
        return what(*args, **kwargs)
    model = _without_values(what)
    args, kwargs = tree_map(_on_gpu, (args, dict(kwargs)))
    if not train:
        with torch.no_grad():
            return model, model(*args, **kwargs)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    for _ in range(models.STEPS):
        _loss(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _without_values(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model on the GPU in which only integers and truth values have values."""
    with torch._C.DisableTorchFunction():
        memo: dict[int, Any] = {}
        for each in (*model.parameters(), *model.buffers()):
            # Such as positions, which are read.
            if not (each.is_floating_point() or each.is_complex()):
                continue
            empty = torch.empty_like(each, device="meta")
            is_parameter = isinstance(each, torch.nn.Parameter)
            memo[id(each)] = (
                torch.nn.Parameter(empty, each.requires_grad) if is_parameter else empty
            )
        copied = copy.deepcopy(model, memo)
    models.materialized(copied, "cuda")
    return copied.to("cuda")


def _on_gpu(value: Any) -> Any:
    return value.to("cuda") if isinstance(value, torch.Tensor) else value


def _loss(result: Any) -> torch.Tensor:
    """Return the loss to train on: ``loss`` of a result, else the sum of its tensors."""
    loss = getattr(result, "loss", None)
    if loss is not None:
        return loss
    parts: list[torch.Tensor] = []
    tree_map(
        lambda each: parts.append(each.sum()) if isinstance(each, torch.Tensor) else None, result
    )
    return sum(parts[1:], parts[0])
