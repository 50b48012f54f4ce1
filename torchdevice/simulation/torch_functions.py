"""Functions of torch that do something else for tensors of a simulated device.

:data:`TABLE` joins the mode's table of rewriters. Texts of tensors without values may also be
printed after their scope, so torch's own functions for texts are replaced for the rest of the
process.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.nn import functional
from torch.utils.dlpack import DLDeviceType

from torchdevice.calls import rewriters
from torchdevice.calls.interruptions import dropping
from torchdevice.calls.rewriters import native_device, with_device_keyword
from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices import module
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.simulation import device_generators, policy
from torchdevice.simulation.allocator.storages import has_no_values, keep_address, meaning
from torchdevice.simulation.policy import DEVICE_TYPE
from torchdevice.torch_modules.apis.library_patches import array_interface
from torchdevice.torch_modules.cuda.capture_rules import not_while_capturing

_shown = torch._tensor_str._str_intern
_contents = torch._tensor_str._tensor_str
_torchs_format = torch.Tensor.__format__


def show_texts() -> None:
    """Let torch print the device's tensors without values, for the rest of the process."""
    torch._tensor_str._str_intern = _text
    torch._tensor_str._tensor_str = _contents_of
    torch.Tensor.__format__ = formatted  # type: ignore[method-assign]


@functools.wraps(_shown)
def _text(inp: torch.Tensor, *, tensor_contents: str | None = None) -> str:
    text = _shown(inp, tensor_contents=tensor_contents)
    if tensor_contents is not None or not inp.numel() or not _lacks_values(inp):
        return text
    shown = f"device='{inp.device}'"
    added = [shown, f"size={tuple(inp.shape)}"]
    # Torch leaves out a dtype that the numbers show.
    if inp.dtype is not torch.get_default_dtype() and "dtype=" not in text:
        added.append(f"dtype={inp.dtype}")
    return text.replace(shown, ", ".join(added), 1)


@functools.wraps(_contents)
def _contents_of(self: torch.Tensor, indent: int) -> str:
    if self.numel() and _lacks_values(self):
        return "..."
    if native_device(self).type == DEVICE_TYPE:
        # Torch asks a GPU which elements are finite; of other devices it copies all.
        not_while_capturing()
    return _contents(self, indent)


@functools.wraps(_torchs_format)
def formatted(self: torch.Tensor, format_spec: str) -> str:
    """``torch.Tensor.__format__`` from the registration of the device on."""
    if self.dim() == 0 and _lacks_values(self):
        context = thread_state.state.context
        if context is None or not (context.options.values or "").startswith("assume"):
            return repr(self)
    return _torchs_format(self, format_spec)


def _lacks_values(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        if (
            tensor.device.type != DEVICE_TYPE
            or tensor.layout is not torch.strided
            or tensor.is_nested
        ):
            return False
        # Not above: it takes long, and printing imports it.
        from torch._subclasses.fake_tensor import FakeTensor

        try:
            return not isinstance(tensor, FakeTensor) and has_no_values(tensor.untyped_storage())
        except NotImplementedError:  # a wrapper of functorch has no storage
            return False


def _repr(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """``Tensor.__repr__`` and ``__format__``, which compute in float64 and name the device."""
    with policy.being("lifted"):  # the device may lack float64
        shown = func(*args, **kwargs)
    named = f"device='{context.shown_as}:"
    if context.shown_as is not None:
        return shown.replace(f"device='{policy.DEVICE_TYPE}:", named)
    return shown


def _seen(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function. Its rewriter makes each engine handle it and reword errors as CUDA's."""
    return func(*args, **kwargs)


def _share_memory(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """``Tensor.share_memory_``, which does nothing for an out-of-tree backend: it is reported.

    Raises:
        RuntimeError: The device stands for MPS, which shares no memory. The text is torch's.
    """
    if policy.stands_for_mps() and rewriters.native_device(args[0]).type == policy.DEVICE_TYPE:
        raise RuntimeError("_share_filename_: only available on CPU")
    context.report(
        "Tensor.share_memory_", "nothing: other processes get copies", Fidelity.APPROXIMATE
    )
    return func(*args, **kwargs)


def _is_shared(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``Tensor.is_shared``, which CUDA answers with True for each of its tensors."""
    return rewriters.native_device(args[0]).type == policy.DEVICE_TYPE or func(*args)


def _sparse_coo_tensor(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """``torch.sparse_coo_tensor``, which asks for an empty tensor on a device without its index."""
    asked = kwargs.get("device")
    device = asked if asked is None else context.redirect(asked) or asked
    with meaning(getattr(device, "index", None) or 0):
        return with_device_keyword(context, func, args, kwargs)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _data_ptr(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """``Tensor.data_ptr``, which shows a program where memory is used again."""
    address: int = func(*args, **kwargs)
    tensor = args[0]
    if address and tensor.__class__ in _PLAIN and native_device(tensor).type == DEVICE_TYPE:
        keep_address(tensor)
    return address


_COMPRESSED_ON_MPS = "Could not run 'new_compressed_tensor' from the '{device}' device.)"


def _compressed_tensor(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """``torch.sparse_csr_tensor`` and the like, of which MPS has none.

    Raises:
        NotImplementedError: The device stands for MPS. The text is torch's
            (aten/src/ATen/native/sparse).
    """
    made = with_device_keyword(context, func, args, kwargs)
    device = rewriters.native_device(made)
    if policy.stands_for_mps() and device.type == policy.DEVICE_TYPE:
        raise NotImplementedError(_COMPRESSED_ON_MPS.format(device=policy.spelled(device.index)))
    return made


_OF_BATCHES = (
    torch.batch_norm,
    functional.batch_norm,
    torch.instance_norm,
    functional.instance_norm,
)


def _of_batch(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Batch norm. For empty batches, torch keeps float64 statistics on out-of-tree backends.

    The statistics of an empty batch are never used. On MPS they are float32
    (ATen/AccumulateType.h), so a device without float64 does not refuse them.
    """
    given = args[0] if args else kwargs["input"]
    with policy.being("lifted") if given.numel() == 0 else contextlib.nullcontext():
        return func(*args, **kwargs)


_QUANTILES = (torch.quantile, torch.nanquantile, torch.Tensor.quantile, torch.Tensor.nanquantile)

_MOST_RANKED = 1 << 24
"""The number of elements that float32 can count one by one."""


def _quantile(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Quantiles. torch 2.14 computes ranks in float64 on every device whose type is not MPS.

    On MPS the ranks are float32 (ATen/native/Sorting.cpp), so a device without float64 does not
    refuse the ranks. With torch 2.14 it still refuses the gradient of ``q``, whose backward pass is
    in float64 too.

    Raises:
        RuntimeError: The device stands for MPS, and more elements are ranked than float32 can
            count.
    """
    given = args[0] if args else kwargs["input"]
    if not policy.stands_for_mps() or rewriters.native_device(given).type != policy.DEVICE_TYPE:
        return func(*args, **kwargs)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    ranked = given.numel() if dim is None or given.dim() == 0 else given.size(dim)
    if ranked > _MOST_RANKED:
        raise RuntimeError("quantile() input tensor is too large")
    with policy.being("lifted"):
        return func(*args, **kwargs)


def _pad(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """``torch.nn.functional.pad``, by other operators if CUDA must replicate deterministically."""
    named = {**dict(zip(("input", "pad", "mode"), args, strict=False)), **kwargs}
    if (
        named.get("mode") == "replicate"
        and torch.are_deterministic_algorithms_enabled()
        and policy.stands_for_cuda()
    ):
        return torch._decomp.decompositions._replication_pad(named["input"], named["pad"])
    return func(*args, **kwargs)


def _dlpack_device(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, int]:
    """``Tensor.__dlpack_device__``: an extension, taken by torch and refused by other libraries."""
    device = rewriters.native_device(args[0])
    if device.type == policy.DEVICE_TYPE:
        return (DLDeviceType.kDLExtDev, device.index)
    return func(*args, **kwargs)


def _array_interface(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """``Tensor.__cuda_array_interface__`` at ``data_ptr()``, if the device stands for CUDA."""
    if not policy.stands_for_cuda() or rewriters.native_device(args[0]).type != policy.DEVICE_TYPE:
        return func(*args, **kwargs)
    return array_interface(args[0])


def _drawn(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Call a function that takes a generator. One of the device may not draw for the CPU.

    Raises:
        RuntimeError: It would. The text is torch's (aten/src/ATen/core/Generator.h).
    """
    generator = kwargs.get("generator")
    if (
        generator is not None
        and device_generators.is_of_device(generator)
        and _is_for_cpu(context, args, kwargs)
    ):
        kind = generator.device.type if context.shown_as is None else context.shown_as
        raise RuntimeError(f"Expected a 'cpu' device type for generator but found {kind!r}")
    return with_device_keyword(context, func, args, kwargs)


rewriters.NAMING.add(_drawn)


def _is_for_cpu(context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = next(
        (each for each in (kwargs.get("out"), *args) if isinstance(each, torch.Tensor)), None
    )
    if given is not None:
        return rewriters.native_device(given).type == "cpu"
    asked = kwargs.get("device")
    device = torch.get_default_device() if asked is None else asked
    return context.redirect(device) is None and torch.device(device).type == "cpu"


_OF_TENSORS = (
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ bernoulli "
    "multinomial"
)


def _named(owner: Any, names: str) -> tuple[Any, ...]:
    return tuple(getattr(owner, name) for name in names.split())


_DRAWING = (
    *_named(torch, "rand randn randint randperm normal bernoulli multinomial"),
    *_named(torch.Tensor, _OF_TENSORS),
)
"""Functions that programs pass a generator."""


def _set_data(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``tensor.data = value``, which may let a storage end."""
    module.REWRITERS[func](context, lambda *args: dropping(context, func, args, {}), args, kwargs)


_NAMING_DEVICES = (
    *_named(torch.Tensor, "numpy set_ tensor_split"),
    *_named(torch, "tensor_split lstm gru rnn_tanh rnn_relu _pack_padded_sequence"),
)


_LAYOUTS = ("compressed", "csr", "csc", "bsr", "bsc")
_COMPRESSED = [getattr(torch, f"sparse_{layout}_tensor") for layout in _LAYOUTS]

TABLE = {
    torch.Tensor.__repr__: _repr,
    formatted: _repr,
    **dict.fromkeys(_NAMING_DEVICES, _seen),
    torch.Tensor.grad.__set__: dropping,  # type: ignore[union-attr]
    **module.REWRITERS,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **dict.fromkeys(_DRAWING, _drawn),
    vars(torch.Tensor)["__cuda_array_interface__"].__get__: _array_interface,
    torch.sparse_coo_tensor: _sparse_coo_tensor,
    **dict.fromkeys(_COMPRESSED, _compressed_tensor),
    **dict.fromkeys(_OF_BATCHES, _of_batch),
    **dict.fromkeys(_QUANTILES, _quantile),
    functional.pad: _pad,
    torch.Tensor.__dlpack_device__: _dlpack_device,
    torch.Tensor.is_shared: _is_shared,
    torch.Tensor.data_ptr: _data_ptr,
    torch.Tensor.share_memory_: _share_memory,
}

# CUDA refuses attention of which no enabled backend is capable. Another device takes its own.
TABLE_OF_CUDA = {**TABLE, torch._C._nn.scaled_dot_product_attention: None}
