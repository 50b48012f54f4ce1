"""Rewriters of torch functions that need another call on a simulated device. :data:`TABLE` joins the mode's table."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import functional
from torch.utils.dlpack import DLDeviceType

from torchdevice.core import Context
from torchdevice.devices import parameter_data
from torchdevice.engines import rewriters
from torchdevice.engines.destructors import dropping
from torchdevice.engines.rewriters import with_device_keyword
from torchdevice.foundation.fidelity import Fidelity
from torchdevice.foundation.torch_texts import text
from torchdevice.simulation import device_generators, policy, printing
from torchdevice.simulation.allocator.storages import meaning
from torchdevice.torch_apis.library_patches import array_interface


def _repr(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """``Tensor.__repr__`` and ``__format__``, which compute in float64 and name the device."""
    with policy.being("lifted"):  # the device may lack float64
        shown = func(*args, **kwargs)
    named = f"device='{context.shown_as}:"
    return shown.replace(f"device='{policy.DEVICE_TYPE}:", named) if context.shown_as is not None else shown


def _seen(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function. It has a rewriter so that each engine handles it and rewords its error as CUDA's."""
    return func(*args, **kwargs)


def _share_memory(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``Tensor.share_memory_``, which does nothing for an out-of-tree backend and is therefore reported.

    Raises:
        RuntimeError: The device stands for MPS, which shares no memory. The text is torch's.
    """
    if policy.stands_for_mps() and rewriters.native_device(args[0]).type == policy.DEVICE_TYPE:
        raise RuntimeError("_share_filename_: only available on CPU")
    context.report("Tensor.share_memory_", "nothing: other processes get copies", Fidelity.APPROXIMATE)
    return func(*args, **kwargs)


def _is_shared(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``Tensor.is_shared``, which CUDA answers with True for each of its tensors."""
    return rewriters.native_device(args[0]).type == policy.DEVICE_TYPE or func(*args)


def _sparse_coo_tensor(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.sparse_coo_tensor``, which asks for an empty tensor on a device without its index."""
    asked = kwargs.get("device")
    device = asked if asked is None else context.redirect(asked) or asked
    with meaning(getattr(device, "index", None) or 0):
        return with_device_keyword(context, func, args, kwargs)


def _compressed_tensor(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.sparse_csr_tensor`` and the like, of which MPS has none.

    Raises:
        NotImplementedError: The device stands for MPS. The text is torch's (aten/src/ATen/native/sparse).
    """
    made = with_device_keyword(context, func, args, kwargs)
    device = rewriters.native_device(made)
    if policy.stands_for_mps() and device.type == policy.DEVICE_TYPE:
        raise NotImplementedError(text("compressed on MPS", device=policy.spelled(device.index)))
    return made


_OF_BATCHES = (torch.batch_norm, functional.batch_norm, torch.instance_norm, functional.instance_norm)


def _of_batch(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Batch normalisation. Of an empty batch torch keeps statistics in float64 on an out-of-tree backend.

    The statistics of an empty batch are never used. On MPS they are float32 (ATen/AccumulateType.h), so a device
    without float64 does not refuse them.
    """
    given = args[0] if args else kwargs["input"]
    with policy.being("lifted") if given.numel() == 0 else contextlib.nullcontext():
        return func(*args, **kwargs)


def _pad(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.nn.functional.pad``, which replicates by other operators on CUDA where it is to be deterministic."""
    named = {**dict(zip(("input", "pad", "mode"), args, strict=False)), **kwargs}
    if named.get("mode") == "replicate" and torch.are_deterministic_algorithms_enabled() and policy.stands_for_cuda():
        return torch._decomp.decompositions._replication_pad(named["input"], named["pad"])
    return func(*args, **kwargs)


def _dlpack_device(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """``Tensor.__dlpack_device__``: an extension, which torch takes back and other libraries refuse."""
    device = rewriters.native_device(args[0])
    return (DLDeviceType.kDLExtDev, device.index) if device.type == policy.DEVICE_TYPE else func(*args, **kwargs)


def _array_interface(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """``Tensor.__cuda_array_interface__``, with the address of ``data_ptr()``, where the device stands for CUDA."""
    if not policy.stands_for_cuda() or rewriters.native_device(args[0]).type != policy.DEVICE_TYPE:
        return func(*args, **kwargs)
    return array_interface(args[0])


def _drawn(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Call a function that takes a generator. One of the device may not draw for the CPU.

    Raises:
        RuntimeError: It would. The text is torch's (aten/src/ATen/core/Generator.h).
    """
    generator = kwargs.get("generator")
    if generator is not None and device_generators.is_of_device(generator) and _is_for_cpu(context, args, kwargs):
        kind = generator.device.type if context.shown_as is None else context.shown_as
        raise RuntimeError(f"Expected a 'cpu' device type for generator but found {kind!r}")
    return with_device_keyword(context, func, args, kwargs)


rewriters.NAMING.add(_drawn)


def _is_for_cpu(context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = next((each for each in (kwargs.get("out"), *args) if isinstance(each, torch.Tensor)), None)
    if given is not None:
        return rewriters.native_device(given).type == "cpu"
    asked = kwargs.get("device")
    device = torch.get_default_device() if asked is None else asked
    return context.redirect(device) is None and torch.device(device).type == "cpu"


_OF_TENSORS = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ bernoulli multinomial"


def _named(owner: Any, names: str) -> tuple[Any, ...]:
    return tuple(getattr(owner, name) for name in names.split())


_DRAWING = (
    *_named(torch, "rand randn randint randperm normal bernoulli multinomial"),
    *_named(torch.Tensor, _OF_TENSORS),
)
"""Functions that programs pass a generator."""


def _set_data(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``tensor.data = value``, which may let a storage end."""
    set_data = parameter_data.REWRITERS[func]
    set_data(context, lambda *args: dropping(context, func, args, {}), args, kwargs)


_NAMING_DEVICES = (
    *_named(torch.Tensor, "numpy set_ tensor_split"),
    *_named(torch, "tensor_split lstm gru rnn_tanh rnn_relu _pack_padded_sequence"),
)


_COMPRESSED = _named(
    torch, "sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor"
)

TABLE = {
    torch.Tensor.__repr__: _repr,
    printing.formatted: _repr,
    **dict.fromkeys(_NAMING_DEVICES, _seen),
    torch.Tensor.grad.__set__: dropping,  # type: ignore[union-attr]
    **parameter_data.REWRITERS,
    torch.Tensor.data.__set__: _set_data,
    **dict.fromkeys(_DRAWING, _drawn),
    vars(torch.Tensor)["__cuda_array_interface__"].__get__: _array_interface,
    torch.sparse_coo_tensor: _sparse_coo_tensor,
    **dict.fromkeys(_COMPRESSED, _compressed_tensor),
    **dict.fromkeys(_OF_BATCHES, _of_batch),
    functional.pad: _pad,
    torch.Tensor.__dlpack_device__: _dlpack_device,
    torch.Tensor.is_shared: _is_shared,
    torch.Tensor.share_memory_: _share_memory,
}

# CUDA refuses attention of which no enabled backend is capable. Another device takes its own.
TABLE_OF_CUDA = {**TABLE, torch._C._nn.scaled_dot_product_attention: None}
