"""How one piece of memory is a CPU tensor and a tensor of the simulated device.

DLPack hands a tensor's memory, shape and strides over without a copy, in a documented C structure that names the
device. Writing another device there before the structure is taken in again gives a plain ``torch.Tensor`` on that
device, with the same memory. It keeps the tensor it was made from alive.

Source: ``DLManagedTensor`` of ATen/dlpack.h. Its second field is the device: two 32-bit integers, type and index.
"""

from __future__ import annotations

import ctypes

import torch

from torchdevice.torch_internals import require

_export = require(torch._C, "_to_dlpack")


_import = require(torch._C, "_from_dlpack")


_CPU = 1


_EXTENSION = 12
"""``kDLCPU`` and ``kDLExtDev``; torch reads the latter as PrivateUse1."""


_NAME = b"dltensor"


_DEVICE = ctypes.sizeof(ctypes.c_void_p)


_device_at = ctypes.c_int64.from_address


_pointer = ctypes.pythonapi.PyCapsule_GetPointer


_pointer.restype = ctypes.c_void_p


_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def on_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a strided CPU tensor's memory as a tensor of the simulated device ``index``."""
    capsule = _export(tensor)
    _device_at(_pointer(capsule, _NAME) + _DEVICE).value = _EXTENSION | index << 32
    return _import(capsule)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a simulated tensor's memory as a CPU tensor. Conjugate and negative bits are not carried over."""
    capsule = _export(tensor)
    _device_at(_pointer(capsule, _NAME) + _DEVICE).value = _CPU
    return _import(capsule)
