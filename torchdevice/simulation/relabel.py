"""Converts between CPU tensors and tensors of the simulated device that share their memory.

DLPack exports a tensor's memory, shape and strides without a copy, in a documented C structure that names the device.
Writing another device there before the structure is imported gives a plain ``torch.Tensor`` on that device, with the
same memory. The imported tensor keeps the exported one alive.

Source: ``DLManagedTensor`` of ATen/dlpack.h. Its second field is the device: two 32-bit integers, type and index.
"""

from __future__ import annotations

import ctypes

import torch

from torchdevice.errors import NoValueError
from torchdevice.torch_internals import require

_export = require(torch._C, "_to_dlpack")


_import = require(torch._C, "_from_dlpack")


_CPU = 1


_EXTENSION = 12
"""``_CPU`` is ``kDLCPU``, ``_EXTENSION`` is ``kDLExtDev``, which torch imports as PrivateUse1."""


_NAME = b"dltensor"


_DEVICE = ctypes.sizeof(ctypes.c_void_p)


_device_at = ctypes.c_int64.from_address


_pointer = ctypes.pythonapi.PyCapsule_GetPointer


_pointer.restype = ctypes.c_void_p


_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def on_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor of simulated device ``index`` that shares memory with a strided CPU tensor."""
    capsule = _export(tensor)
    _device_at(_pointer(capsule, _NAME) + _DEVICE).value = _EXTENSION | index << 32
    return _import(capsule)


_POINTER, _STRIDES = 0, 32
"""The offsets of two further fields in bytes: the address of the values, and that of the strides."""


def without_values(tensor: torch.Tensor, address: int, index: int) -> torch.Tensor:
    """Return a tensor of simulated device ``index`` with the dtype, shape and strides of another, and no memory.

    Nothing may read or write its values, which have an address that no process has.
    """
    stand_in = torch.empty_strided(tensor.shape, (0,) * tensor.dim(), dtype=tensor.dtype, device="cpu")
    capsule = _export(stand_in)
    start = _pointer(capsule, _NAME)
    _device_at(start + _POINTER).value = address
    _device_at(start + _DEVICE).value = _EXTENSION | index << 32
    strides = _device_at(start + _STRIDES).value
    for dimension, stride in enumerate(tensor.stride()):
        _device_at(strides + dimension * _DEVICE).value = stride
    return _import(capsule)


_NOWHERE = 1 << 51
"""Addresses from here on are those of tensors without values."""


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares memory with a simulated tensor, without conjugate and negative bits.

    Raises:
        NoValueError: The tensor has no values.
    """
    if tensor.data_ptr() >= _NOWHERE:
        raise NoValueError("a copy to the CPU")
    capsule = _export(tensor)
    _device_at(_pointer(capsule, _NAME) + _DEVICE).value = _CPU
    return _import(capsule)
