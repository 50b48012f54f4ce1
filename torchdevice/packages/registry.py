"""Packages that are stood in for, and the dotted names of their functions and classes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from torchdevice.calls import traced
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.thread_state import refuse, state
from torchdevice.packages import scripted

T = TypeVar("T")


class Package(NamedTuple):
    """One package that is stood in for.

    Attributes:
        distribution: Its name in ``importlib.metadata``.
        version: The release whose documentation the stand-in follows. Programs read it, for example
            as ``__version__``.
        files: The files of this folder that have its functions.
        needed: Whether it cannot be installed here; Triton can where it has wheels.
        is_inner: Whether it is the compiled part of a package whose Python can be installed.
    """

    distribution: str
    version: str
    files: tuple[str, ...]
    needed: bool = True
    is_inner: bool = False


PACKAGES: dict[str, Package] = {
    "flash_attn": Package(
        "flash-attn",
        "2.8.3",
        (
            "flash_attention",
            "rotary_embedding",
            "normalization",
            "residual_normalization",
            "cross_entropy",
            "fused_dense",
            "attention_modules",
        ),
    ),
    "flash_attn_interface": Package("flash-attn-3", "3.0.0", ("flash_attention_3",)),
    "xformers": Package(
        "xformers", "0.0.32", ("xformers_attention", "gated_linear_unit", "xformers_operators")
    ),
    "causal_conv1d": Package("causal-conv1d", "1.5.2", ("causal_convolution",)),
    "mamba_ssm": Package(
        "mamba-ssm",
        "2.2.5",
        (
            "selective_scan",
            "state_space_duality",
            "gated_normalization",
            "mamba_block",
            "mamba2_block",
            "mamba_models",
        ),
    ),
    "torch_scatter": Package("torch-scatter", "2.1.2", ("scattering",)),
    "torch_sparse": Package("torch-sparse", "0.6.18", ("sparse_products",)),
    "MultiScaleDeformableAttention": Package(
        "MultiScaleDeformableAttention", "1.0", ("deformable_attention",)
    ),
    "mmcv._ext": Package("mmcv", "2.2.0", ("detection_kernels",), is_inner=True),
    "detectron2._C": Package("detectron2", "0.6", ("detection_kernels",), is_inner=True),
    "apex": Package(
        "apex", "0.1", ("apex_modules", "apex_optimizers", "apex_parallel", "multi_tensor")
    ),
    "amp_C": Package("apex", "0.1", ("multi_tensor",), is_inner=True),
    "pynvml": Package("nvidia-ml-py", "12.570.86", ("nvml",)),
    "triton": Package("triton", "3.5.0", ("triton_without_wheel",), needed=sys.platform != "linux"),
}
"""Name of a package, as programs import it -> its stand-in."""


class Name(NamedTuple):
    """One function, class or value of a package.

    Attributes:
        value: The object that the program gets.
        fidelity: How close it comes to the package's own.
        note: What is different, in a few words; empty for an exact one.
    """

    value: Any
    fidelity: Fidelity
    note: str


MODULES: dict[str, dict[str, Name]] = {}
"""Dotted name of a module -> its names, of the packages that were asked for so far."""


def package_of(module: str) -> str | None:
    """Return the package of a module that is stood in for; None where there is none."""
    first, dot, rest = module.partition(".")
    inner = f"{first}{dot}{rest.partition('.')[0]}"
    return next((name for name in (inner, first) if name in PACKAGES), None)


def names_of(module: str) -> dict[str, Name] | None:
    """Return the names of a module of a package; None where the module is not stood in for."""
    package = package_of(module)
    if package is None:
        return None
    for file in PACKAGES[package].files:
        importlib.import_module(f"{__package__}.{file}")
    found = MODULES.get(module)
    if found is None and any(other.startswith(f"{module}.") for other in MODULES):
        return {}  # a package that only has modules
    return found


def stands_in(names: str, fidelity: Fidelity = Fidelity.EXACT, note: str = "") -> Callable[[T], T]:
    """Register a function or a class by its dotted names in packages, with spaces between.

    Each call is reported at the program's line. A program that pickles a function or an instance of
    a class pickles the first name, which is the package's own.

    Args:
        names: The dotted names.
        fidelity: How close it comes to the package's own.
        note: What is different, in a few words.
    """

    def register(value: Any) -> Any:
        first = names.split()[0]
        value.__module__ = first.rpartition(".")[0]
        called = _reporting_class(value, first, fidelity, note) if isinstance(value, type) else None
        called = called or _reporting(value, first, fidelity, note)
        for each in names.split():
            module, _, name = each.rpartition(".")
            MODULES.setdefault(module, {})[name] = Name(called, fidelity, note)
        return called

    return register


def refuses(names: str, remedy: str) -> None:
    """Register a package's functions or classes without a stand-in: calls of them raise.

    Args:
        names: The dotted names, with spaces between.
        remedy: What to use instead.
    """
    for each in names.split():

        def refusing(*args: Any, each: str = each, **kwargs: Any) -> NoReturn:
            refuse(each, remedy)

        module, _, refusing.__name__ = each.rpartition(".")
        refusing.__doc__ = f"Raise: nothing stands in for it. {remedy}"
        MODULES.setdefault(module, {})[refusing.__name__] = Name(
            refusing, Fidelity.UNSUPPORTED, remedy
        )


def has(names: str, value: Any) -> None:
    """Register a value, such as an alias or a class of types, by its dotted names."""
    for each in names.split():
        module, _, name = each.rpartition(".")
        MODULES.setdefault(module, {})[name] = Name(value, Fidelity.EXACT, "")


def _reporting(function: Any, name: str, fidelity: Fidelity, note: str) -> Any:
    done = note or "torch's operators"

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        report(name, done, fidelity)
        return function(*args, **kwargs)

    scripted.called_by_scripts(function, called)
    return called


def _reporting_class(kind: Any, name: str, fidelity: Fidelity, note: str) -> Any:
    """Let the constructor of a class report itself. The class stays the same object."""
    done, construct = note or "torch's operators", kind.__init__
    _REPORTING.add(kind)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Once, by the requested class of the package, and not by its base classes.
        if next(each for each in type(self).__mro__ if each in _REPORTING) is kind:
            report(name, done, fidelity)
        construct(self, *args, **kwargs)

    kind.__init__ = __init__
    if issubclass(kind, torch.nn.Module):
        scripted.module_in_scripts(kind)
    return kind


_REPORTING: set[type] = set()
"""The classes whose constructors report themselves."""


@traced.with_nothing_in_place
def report(name: str, done: str, fidelity: Fidelity) -> None:
    """Report a use of a stand-in at the program's line. A program may keep it beyond its scope.

    Raises:
        FidelityError: The scope is strict, and the stand-in may compute other numbers.
    """
    context = state.context
    if context is not None:
        context.report(name, done, fidelity)


unseen = torch._C.DisableTorchFunction
"""A block in which a scope does not see how a function looks at the shapes, dtypes and devices of
tensors.

Each look that it sees takes longer than the whole block.
"""

_NOTHING = contextlib.nullcontext()


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Run a function outside autocast, which does not see inside a package's own kernel."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def in_autocast_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as autocast gives it to a kernel that a package casts for itself."""
    if not torch._C._is_any_autocast_enabled():
        return tensor
    kind = tensor.device.type
    # Autocast leaves float64 alone.
    if tensor.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute: float32, or a wider one."""
    return torch.promote_types(dtype, torch.float32)


def widened(*given: torch.Tensor | None) -> list[Any]:
    """Return tensors in the dtype in which kernels compute on the first one."""
    with unseen():
        wide = wide_dtype(given[0].dtype)  # type: ignore[union-attr]
        fits = [each is None or each.dtype is wide for each in given]
    if all(fits):
        return list(given)
    return [
        each if fit else each.to(wide)  # type: ignore[union-attr]
        for each, fit in zip(given, fits, strict=True)
    ]


def computes_again(*given: torch.Tensor | None) -> bool:
    """Return whether part of a computation on these tensors may be recomputed for gradients.

    ``torch.utils.checkpoint`` keeps such a part by hooks, which the transforms of ``torch.func``
    refuse.
    """
    # Dynamo cannot trace the question, and has no tensors of torch.func at this place.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.is_grad_enabled()
    return not any(
        torch._C._functorch.is_functorch_wrapped_tensor(each) for each in given if each is not None
    )


def on_simulated_gpu() -> bool:
    """Return whether this thread runs on a simulated GPU, where packages' own refusals hold."""
    context = state.context
    return context is not None and context.runtime.supplied.is_gpu


# Dynamo traces the functions as part of a program. All files are named at once, because it asks for
# them only once.
traced.OTHERS.update(
    str(Path(__file__).with_name(f"{file}.py"))
    for file in (
        "registry",
        "attention",
        "kernel_refusals",
        "extension_refusals",
        *(file for package in PACKAGES.values() for file in package.files),
    )
)
