"""Quantized tensors of the device: torch's own, whose integers are on the device, with the operators that CUDA has.

Torch makes quantized tensors for devices whose allocator is in C++ only, and DLPack does not know them. So an empty
quantized CPU tensor gets the dispatch keys and the device of the simulated one, and then the storage of a tensor of
integers that is on the device. Operators run on a quantized CPU tensor that shares the memory.

Source: ``at::QTensorImpl`` and ``c10::TensorImpl``; the operators of CUDA are those of torch's native_functions.yaml.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._C import DispatchKey
from torch.utils import _pytree as pytree

from torchdevice.core import thread_state
from torchdevice.devices.parameter_data import keys_of
from torchdevice.errors import NotSupportedError
from torchdevice.lowlevel.dlpack_alias import on_device
from torchdevice.lowlevel.object_fields import contents, place_of
from torchdevice.simulation import policy
from torchdevice.simulation.allocator.storages import fresh, memory_of, set_storage
from torchdevice.simulation.kernels import device_mismatch
from torchdevice.simulation.kernels.cpu_kernels import aliased, index_of, without_mode
from torchdevice.simulation.kernels.handwritten_kernels import count_copy
from torchdevice.simulation.kernels.overloads import overload_of, shadowed
from torchdevice.simulation.profiles import missing_on_cuda, quantized_operators_of_cuda

_aten = torch.ops.aten

_CPU = torch.device("cpu")

_INTEGERS = {torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32}
"""The dtypes that CUDA has, with those of the integers within."""

MAKING = (
    "quantize_per_tensor",
    "quantize_per_tensor.tensor_qparams",
    "quantize_per_tensor.tensors",
    "quantize_per_tensor_dynamic",
    "quantize_per_channel",
    "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
    "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized",
    "empty_quantized",
)
"""The operators that make quantized tensors."""

_OF_METADATA = (
    *("q_scale", "q_zero_point", "q_per_channel_axis", "qscheme", "as_strided", "view", "_reshape_alias", "unfold"),
    *("squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze", "set_.source_Storage_storage_offset"),
)
"""Operators whose kernel for the CPU reads no memory, and serves tensors of the device too."""

_PARAMETERS = ("q_per_channel_scales", "q_per_channel_zero_points")

_RUN_WHOLE = ("_to_copy", "copy_", "empty_strided")
"""Further operators for which torch would run a composite kernel, or one for tensors that are not quantized."""

_EMPTY = "empty.memory_format"


def register(aten: torch.library.Library) -> torch.library.Library:
    """Register the kernels with torch. Return the library of the fallback."""
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(without_mode(_run), "QuantizedPrivateUse1")
    for name in filter(_is_present, MAKING):
        aten.impl(name, without_mode(functools.partial(_run, overload_of(name))), "PrivateUse1")
    for name in filter(_is_present, _OF_METADATA):
        aten.impl(name, functools.partial(overload_of(name)._op_dk, DispatchKey.QuantizedCPU), "QuantizedPrivateUse1")
    for name in filter(_is_present, _PARAMETERS):
        aten.impl(name, functools.partial(_parameters, overload_of(name)), "QuantizedPrivateUse1")
    for name in filter(_is_present, shadowed("QuantizedCPU").union(MAKING, _RUN_WHOLE).difference(_OF_METADATA)):
        aten.impl(name, without_mode(functools.partial(_run, overload_of(name))), "QuantizedPrivateUse1")
    aten.impl(_EMPTY, _refuse_empty, "QuantizedPrivateUse1")
    return fallback


def _refuse_empty(*args: Any, **kwargs: Any) -> NoReturn:
    """Torch begins arithmetic by such a tensor, before it finds that no kernel serves quantized tensors of CUDA."""
    raise NotSupportedError(
        "a quantized tensor without a scale", "Dequantize the operands of arithmetic, or use torch.quantize_per_tensor."
    )


def _is_present(name: str) -> bool:
    """Return whether the installed torch has an operator: torch announces that it will drop quantized tensors."""
    base, _, overload = name.partition(".")
    return hasattr(getattr(_aten, base, None), overload or "default")


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the CPU, through the active recorders, if any, or raise CUDA's error for it."""
    _check(op)
    return policy.looked_at(op, functools.partial(_run_on_cpu, op), args, kwargs)


def _check(op: Any) -> None:
    context = thread_state.state.context
    if policy.stands_for_mps() or (context is not None and context.options.compute == "meta"):
        raise NotSupportedError("a quantized tensor", "Quantize on the CPU, or use fake quantization.")
    namespace, _, name = op.name().partition("::")
    present = namespace == "aten" and (name in MAKING or name in _RUN_WHOLE or name in quantized_operators_of_cuda())
    if not present and policy.stands_for_cuda():
        raise NotImplementedError(missing_on_cuda(op.name(), "QuantizedCUDA"))


_COPIES = {_aten._to_copy.default: 0, _aten.copy_.default: 1}
"""The operators that copy between devices, with the place of the source among their arguments."""


def _run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    index = max((index_of(each) for each in leaves), default=-1)
    device = kwargs.get("device")
    if index < 0:
        policy.check_scope()
    if device is not None:
        index = -1 if device.type == "cpu" else device.index or 0
        kwargs = {**kwargs, "device": _CPU}
    if len({index_of(each) for each in leaves}) > 1 and op is not _aten.copy_.default:
        device_mismatch.check(op, args, kwargs)
    aliases = {id(each): _alias(each) for each in leaves}
    given = {id(aliases[id(each)]): each for each in leaves}
    on_cpu, named = pytree.tree_map_only(torch.Tensor, lambda each: aliases[id(each)], (args, kwargs))
    result = op(*on_cpu, **named)
    if op is _aten.copy_.default and args[0].is_quantized and index_of(args[0]) >= 0:
        _take_parameters(args[0], aliases[id(args[0])])

    def wrap(each: torch.Tensor) -> torch.Tensor:
        if index < 0 or id(each) in given:
            return given.get(id(each), each)
        return _fresh(each, index) if each.is_quantized else fresh(each, index)

    wrapped = pytree.tree_map_only(torch.Tensor, wrap, result)
    if op in _COPIES:
        count_copy(args[_COPIES[op]], wrapped)
    return wrapped


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares the memory of a tensor, which is itself where that is on the CPU."""
    if index_of(tensor) < 0:
        return tensor
    return _with_memory(tensor, memory_of(_integers_of(tensor))) if tensor.is_quantized else aliased(tensor)


def _parameters(op: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return scales or zero points, which CUDA has on the device."""
    return fresh(op._op_dk(DispatchKey.QuantizedCPU, tensor).clone(), index_of(tensor))


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _fresh(result: torch.Tensor, index: int) -> torch.Tensor:
    """Return a quantized tensor of device ``index`` in the memory of a quantized CPU tensor without other users."""
    if result.dtype not in _INTEGERS:
        raise NotSupportedError(
            f"a quantized tensor of {result.dtype}", "Use torch.quint8, torch.qint8 or torch.qint32."
        )
    integers = torch.empty(0, dtype=_INTEGERS[result.dtype], device="cpu")
    set_storage(integers, result.untyped_storage(), result.storage_offset(), result.shape, result.stride())
    return _with_memory(result, fresh(integers, index))


def _integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the integers of a quantized tensor of a device, on that device and in the same memory."""
    integers = on_device(torch.empty(0, dtype=_INTEGERS[tensor.dtype], device="cpu"), index_of(tensor))
    return set_storage(integers, tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _with_memory(like: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parameters of a quantized one, in the memory of integers and on their device."""
    made = _without_memory(like)
    if index_of(integers) >= 0:
        _move(made, index_of(integers))
    storage, offset = integers.untyped_storage(), integers.storage_offset()
    return set_storage(made, storage, offset, integers.shape, integers.stride())


def _without_memory(like: torch.Tensor) -> torch.Tensor:
    """Return a quantized CPU tensor with the parameters of another."""

    def of(name: str) -> Any:
        return overload_of(name)._op_dk(DispatchKey.QuantizedCPU, like)

    options: dict[str, Any] = {"dtype": like.dtype, "device": "cpu"}
    if like.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch._empty_affine_quantized([0], scale=of("q_scale"), zero_point=of("q_zero_point"), **options)
    scales, zero_points = of("q_per_channel_scales"), of("q_per_channel_zero_points")
    return torch._empty_per_channel_affine_quantized(
        [0] * like.dim(), scales=scales, zero_points=zero_points, axis=of("q_per_channel_axis"), **options
    )


_set_data: Callable[..., None] = torch._C.TensorBase.data.__set__


def _take_parameters(tensor: torch.Tensor, own: torch.Tensor) -> None:
    """Give a tensor of a device the scale and zero point of ``own``, its CPU tensor, to which was copied."""
    _set_data(tensor, _with_memory(own, _integers_of(tensor)))


def _move(tensor: torch.Tensor, index: int) -> None:
    """Let an empty CPU tensor and its storage be on a device."""
    in_tensor, in_storage, keys = _places()
    here = [_TYPE, index]
    contents(tensor._cdata + in_tensor, 2)[:] = here
    contents(tensor.untyped_storage()._cdata + in_storage, 2)[:] = here
    keys_of(tensor).value ^= keys


_TYPE = torch._C._autograd.DeviceType.PrivateUse1.value


@functools.cache
def _places() -> tuple[int, int, int]:
    """Return where a tensor and a storage have their device, and by which dispatch keys CPU and device differ."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        host = torch.empty(1, dtype=torch.uint8, device="cpu")
        tensors = [on_device(host, 0), on_device(host, 1), host]
    devices = [bytes((_TYPE, 0)), bytes((_TYPE, 1)), b"\0\xff"]
    storages = [each.untyped_storage() for each in tensors]
    return (
        place_of("c10::TensorImpl::device_opt_", [each._cdata for each in tensors], devices, 24),
        place_of("c10::StorageImpl::data_ptr_.device_", [each._cdata for each in storages], devices, 9),
        keys_of(tensors[0]).value ^ keys_of(host).value,
    )
