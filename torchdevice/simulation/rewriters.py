"""Rewriters of torch functions that need another call on a simulated device. :data:`TABLE` joins the mode's table."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.nn import functional
from torch.utils.dlpack import DLDeviceType

from torchdevice.context import Context
from torchdevice.engines.rewriters import with_device_keyword
from torchdevice.fidelity import Fidelity
from torchdevice.on_cpu.doubles import HostDouble
from torchdevice.simulation import enforcement
from torchdevice.simulation.allocator import has_no_values, meaning
from torchdevice.simulation.fields import field, offset_of
from torchdevice.torch_internals import require

_WORDS = 24
"""The words of a tensor that are looked at."""


def _repr(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """``Tensor.__repr__`` and ``__format__``, which compute in float64 and name the device."""
    with enforcement.lifted():  # the device may lack float64
        text = _without_values(args[0]) if _has_no_values(args[0]) else func(*args, **kwargs)
    named = f"device='{context.shown_as}:"
    return text.replace(f"device='{enforcement.KIND}:", named) if context.shown_as is not None else text


def _has_no_values(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        try:
            return tensor.layout is torch.strided and not tensor.is_nested and has_no_values(tensor.untyped_storage())
        except NotImplementedError:  # a wrapper of functorch has no storage
            return False


def _without_values(tensor: torch.Tensor) -> str:
    """Return what stands for a tensor without values, as torch writes one of its meta device."""
    with torch._C.DisableTorchFunction():
        shown = {"device": f"'{tensor.device}'", "size": tuple(tensor.shape), "dtype": tensor.dtype}
        return f"tensor(..., {', '.join(f'{name}={value}' for name, value in shown.items())})"


def _seen(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function. It has a rewriter so that each engine handles it and rewords its error as CUDA's."""
    return func(*args, **kwargs)


def _is_compatible(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``torch._has_compatible_shallow_copy_type``, which ``Module.to`` asks before it sets ``parameter.data``.

    :func:`_set_data` makes the assignment possible.
    """
    return func(*args, **kwargs) or _changes_kind(*args)


def _set_data(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``tensor.data = value``, which torch refuses between the CPU and an out-of-tree backend.

    CUDA allows it, and ``Module.to`` and FSDP rely on it to keep parameters the same objects. Torch compares the
    dispatch keys of the two before it gives the tensor all that the value has, its keys too. So the tensor gets them
    first.
    """
    tensor, value = args
    if not isinstance(value, torch.Tensor) or not _changes_kind(tensor, value):
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        keys = field(tensor._cdata, _offset_of_keys())
        before, keys.value = keys.value, _keys(value)
        try:
            func(*args, **kwargs)
        except BaseException:
            keys.value = before
            raise


def _keys(tensor: torch.Tensor) -> int:
    return require(torch._C, "_dispatch_keys")(tensor).raw_repr()


@functools.cache
def _offset_of_keys() -> int:
    """Return the offset of the dispatch keys in a tensor, in bytes."""
    tensors = [torch.empty(0, device="cpu"), torch.empty(0, device="meta")]
    return offset_of("c10::TensorImpl::key_set_", [each._cdata for each in tensors], [*map(_keys, tensors)], _WORDS)


def _share_memory(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``Tensor.share_memory_``, which does nothing for an out-of-tree backend and is therefore reported."""
    context.report("Tensor.share_memory_", "nothing: other processes get copies", Fidelity.APPROXIMATE)
    return func(*args, **kwargs)


def _is_shared(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``Tensor.is_shared``, which CUDA answers with True for each of its tensors."""
    with torch._C.DisableTorchFunction():
        return args[0].device.type == enforcement.KIND or func(*args)


def _sparse_coo_tensor(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.sparse_coo_tensor``, which asks for an empty tensor on a device without its index."""
    asked = kwargs.get("device")
    device = asked if asked is None else context.redirect(asked) or asked
    with meaning(getattr(device, "index", None) or 0):
        return with_device_keyword(context, func, args, kwargs)


_OF_BATCHES = (torch.batch_norm, functional.batch_norm, torch.instance_norm, functional.instance_norm)


def _of_batch(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Batch normalisation. Of an empty batch torch keeps statistics in float64 on an out-of-tree backend.

    Nobody reads these statistics. On MPS they are float32 (ATen/AccumulateType.h), so a device without float64 does not
    refuse them.
    """
    given = args[0] if args else kwargs["input"]
    with enforcement.lifted() if given.numel() == 0 else contextlib.nullcontext():
        return func(*args, **kwargs)


def _dlpack_device(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """``Tensor.__dlpack_device__``: an extension, which torch takes back and other libraries refuse."""
    with torch._C.DisableTorchFunction():
        device = args[0].device
    return (DLDeviceType.kDLExtDev, device.index) if device.type == enforcement.KIND else func(*args, **kwargs)


def _changes_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, HostDouble) or isinstance(other, HostDouble):
        return False
    with torch._C.DisableTorchFunction():
        kinds = {one.device.type, other.device.type}
    return kinds == {"cpu", enforcement.KIND}


_NAMING_DEVICES = (
    torch.Tensor.numpy,
    torch.Tensor.set_,
    torch.Tensor.grad.__set__,  # type: ignore[union-attr]
    torch.Tensor.tensor_split,
    torch.tensor_split,
    torch.lstm,
    torch.gru,
    torch.rnn_tanh,
    torch.rnn_relu,
    torch._pack_padded_sequence,
)


TABLE = {
    torch.Tensor.__repr__: _repr,
    torch.Tensor.__format__: _repr,
    **dict.fromkeys(_NAMING_DEVICES, _seen),
    require(torch, "_has_compatible_shallow_copy_type"): _is_compatible,
    torch.Tensor.data.__set__: _set_data,
    torch.sparse_coo_tensor: _sparse_coo_tensor,
    **dict.fromkeys(_OF_BATCHES, _of_batch),
    torch.Tensor.__dlpack_device__: _dlpack_device,
    torch.Tensor.is_shared: _is_shared,
    torch.Tensor.share_memory_: _share_memory,
}
