"""``tensor.data = value`` between the CPU and an out-of-tree backend, which torch refuses and CUDA allows.

``Module.to`` and FSDP rely on it to keep parameters the same objects: an optimizer that was made before the move would
otherwise train parameters that the module no longer has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchdevice.lowlevel.object_fields import offset_of, word_at

_WORDS = 24
"""The words of a tensor that are looked at."""


def _is_compatible(context: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``torch._has_compatible_shallow_copy_type``, which ``Module.to`` asks before it sets ``parameter.data``.

    :func:`_set_data` makes the assignment possible.
    """
    return func(*args, **kwargs) or _changes_kind(context.device_type, *args)


def _set_data(context: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``tensor.data = value``.

    Torch compares the dispatch keys of the two before it gives the tensor all that the value has, its keys too. So the
    tensor gets them first.
    """
    tensor, value = args
    if not isinstance(value, torch.Tensor) or not _changes_kind(context.device_type, tensor, value):
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        keys = word_at(tensor._cdata + _offset_of_keys())
        before, keys.value = keys.value, _keys(value).raw_repr()
        try:
            func(*args, **kwargs)
        except BaseException:
            keys.value = before
            raise


_keys = torch._C._dispatch_keys


@functools.cache
def _offset_of_keys() -> int:
    """Return the offset of the dispatch keys in a tensor, in bytes."""
    tensors = [torch.empty(0, device="cpu"), torch.empty(0, device="meta")]
    values = [_keys(each).raw_repr() for each in tensors]
    return offset_of("c10::TensorImpl::key_set_", [each._cdata for each in tensors], values, _WORDS)


def _changes_kind(device_type: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether one of two tensors is on the CPU and the other on a backend, and neither dispatches to Python."""
    with torch._C.DisableTorchFunction():
        if {one.device.type, other.device.type} != {"cpu", device_type}:
            return False
        return not any(_keys(each).has(torch._C.DispatchKey.Python) for each in (one, other))


REWRITERS = {torch._has_compatible_shallow_copy_type: _is_compatible, torch.Tensor.data.__set__: _set_data}
