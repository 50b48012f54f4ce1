"""Which dtypes torch's functions return: recorded over a program, and compared between targets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

import torchdevice

Dtypes = list[str]


def dtypes_of(result: Any) -> Dtypes:
    """Return the dtypes of the tensors of a result, in their order."""
    return [
        str(leaf.dtype) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)
    ]


class Recorded(TorchFunctionMode):
    """Records each torch function that returns tensors, and their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Dtypes]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        found = dtypes_of(result)
        if found:
            self.calls.append((resolve_name(func) or str(func), found))
        return result


def record(program: Callable[[], object], target: str, **options: Any) -> list[tuple[str, Dtypes]]:
    """Run a CUDA program on a target, and return its calls with their results' dtypes.

    With ``engine="wrap"`` a mode would also see what wrappers call.
    """
    with torchdevice.portable(target, engine="mode", **options):
        torch.manual_seed(0)
        with Recorded() as recorded:
            program()
    return recorded.calls


def differences(program: Callable[[], object]) -> list[str]:
    """Return calls whose dtypes differ between CPU and simulated GPU, autocast in bfloat16."""
    on_cpu = record(program, "cpu", autocast="bfloat16", half_products="target")
    simulated = record(program, "simulated:cuda", identity="target")
    named = [name for name, _ in on_cpu], [name for name, _ in simulated]
    assert named[0] == named[1], "the program has called other functions"
    return [
        f"{name}: {', '.join(one)} on the CPU, {', '.join(other)} on the simulated GPU"
        for (name, one), (_, other) in zip(on_cpu, simulated, strict=True)
        if one != other
    ]


@contextmanager
def autocast_of(kind: str, lower: torch.dtype) -> Iterator[None]:
    """Switch torch's own autocast of a device type on, also where the machine lacks the device."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, lower)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def of_torch(
    kind: str, function: Callable[..., Any], inputs: Any, lower: torch.dtype
) -> Dtypes | None:
    """Return dtypes of torch's autocast kernels for a device type, on valueless tensors.

    Returns:
        None where torch refuses the call, or needs the device or values for it.
    """
    fake = FakeTensorMode()

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=kind)

    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs each refusal with its stack
    try:
        with autocast_of(kind, lower), fake:
            args, kwargs = pytree.tree_map(made, inputs)
            return dtypes_of(function(*args, **kwargs))
    except Exception:
        return None
    finally:
        logging.disable(disabled)
