"""Converts between CPU tensors and tensors of the simulated device that share their memory.

DLPack exports a tensor's memory, shape and strides without a copy, in a documented C structure that
names the device. Writing another device there before the structure is imported gives a plain
``torch.Tensor`` on that device, with the same memory. The imported tensor keeps the exported one
alive.

Source: ``DLManagedTensor`` of ATen/dlpack.h. Its second field is the device: two 32-bit integers,
type and index.
"""

from __future__ import annotations

import ctypes

import torch

from torchdevice.errors import NoValueError
from torchdevice.kernel.lowlevel.object_fields import offset_of
from torchdevice.kernel.torch_internals import data_ptr

_export = torch._C._to_dlpack


_import = torch._C._from_dlpack


_CPU = 1


_EXTENSION = 12
"""``_CPU`` is ``kDLCPU``, ``_EXTENSION`` is ``kDLExtDev``, which torch imports as PrivateUse1."""


_NAME = b"dltensor"


_DEVICE = ctypes.sizeof(ctypes.c_void_p)  # after `void* data`, the first field


_capsule = ctypes.pythonapi.PyCapsule_New


_capsule.restype = ctypes.py_object


_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


# No word of a new capsule has these by accident: they differ, and are too large for sizes.
_ADDRESSES = (1 << 40) + 8, (1 << 41) + 16


# They are never imported, so nobody reads these addresses.
_examples = [_capsule(each, _NAME, None) for each in _ADDRESSES]


# The words of a capsule: two of the object's head, pointer, name, context.
_POINTER = offset_of("PyCapsule", [*map(id, _examples)], _ADDRESSES, 5)
"""Where a capsule holds its pointer: ``PyCapsule_GetPointer`` by ctypes takes half of the time of a
relabelling.
"""


# 2^45 words of 8 bytes cover 2^48 bytes: the user addresses of x86-64 and arm64.
_words = (ctypes.c_uint64 * (1 << 45)).from_address(0)
"""The memory of this process, by words: an item takes a fifth of the time of a ctypes object for
one address.
"""


def on_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor of simulated device ``index`` in the memory of a strided CPU tensor."""
    capsule = _export(tensor)
    # `>> 3` makes the index of a word of 8 bytes from an address. The inner word is the address of
    # the DLPack structure; the outer one holds the type of the device in its low half, its index in
    # the high one.
    _words[_words[id(capsule) + _POINTER >> 3] + _DEVICE >> 3] = _EXTENSION | index << 32
    # The import takes the structure over and renames the capsule, so it cannot be used twice.
    return _import(capsule)


_VALUES, _STRIDES = 0, 32
"""The offsets of two further fields in bytes: the address of the values, and that of the strides.
"""


def without_values(tensor: torch.Tensor, address: int, index: int) -> torch.Tensor:
    """Return a tensor of simulated device ``index``, shaped like another, without memory.

    Nothing may read or write its values, which have an address that no process has.
    """
    # Strides of 0, so that the stand-in needs memory for one element, whatever its shape.
    stand_in = torch.empty_strided(
        tensor.shape, (0,) * tensor.dim(), dtype=tensor.dtype, device="cpu"
    )
    capsule = _export(stand_in)
    # The address of the structure, from the capsule.
    start = _words[id(capsule) + _POINTER >> 3]
    # The first field, the address of the values.
    _words[start + _VALUES >> 3] = address
    _words[start + _DEVICE >> 3] = _EXTENSION | index << 32
    # The strides are an array of int64 elsewhere; `>> 3` turns its address into an index of words.
    strides = _words[start + _STRIDES >> 3] >> 3
    for dimension, stride in enumerate(tensor.stride()):
        # DLPack counts strides in elements, as torch does.
        _words[strides + dimension] = stride
    return _import(capsule)


_NOWHERE = 1 << 51  # beyond the 2^47 or 2^48 bytes of user addresses
"""Addresses from here on are those of tensors without values."""


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor in a simulated tensor's memory, without conjugate and negative bits.

    Raises:
        NoValueError: The tensor has no values.
    """
    # Such an address must not reach a CPU kernel, which would end the process.
    if data_ptr(tensor) >= _NOWHERE:
        raise NoValueError("a copy to the CPU")
    capsule = _export(tensor)
    # The index of the CPU is 0, so the whole word is the type.
    _words[_words[id(capsule) + _POINTER >> 3] + _DEVICE >> 3] = _CPU
    return _import(capsule)
