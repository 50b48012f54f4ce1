"""Converts between CPU tensors and tensors of the simulated device that share their memory.

DLPack exports a tensor's memory, shape and strides without a copy, in a documented C structure that names the device.
Writing another device there before the structure is imported gives a plain ``torch.Tensor`` on that device, with the
same memory. The imported tensor keeps the exported one alive.

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


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares memory with a simulated tensor, without conjugate and negative bits."""
    capsule = _export(tensor)
    _device_at(_pointer(capsule, _NAME) + _DEVICE).value = _CPU
    return _import(capsule)
