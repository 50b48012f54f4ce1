"""Texts of tensors without values, which a program may print in their scope and after it."""

from __future__ import annotations

import functools

import torch

from torchdevice.cuda.capture_rules import not_while_capturing
from torchdevice.engines.rewriters import native_device
from torchdevice.simulation.allocator.storages import has_no_values
from torchdevice.simulation.policy import DEVICE_TYPE

_shown = torch._tensor_str._str_intern
_contents = torch._tensor_str._tensor_str
_torchs_format = torch.Tensor.__format__


def register() -> None:
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
    if inp.dtype is not torch.get_default_dtype() and "dtype=" not in text:  # torch leaves out what numbers show
        added.append(f"dtype={inp.dtype}")
    return text.replace(shown, ", ".join(added), 1)


@functools.wraps(_contents)
def _contents_of(self: torch.Tensor, indent: int) -> str:
    if self.numel() and _lacks_values(self):
        return "..."
    if native_device(self).type == DEVICE_TYPE:
        not_while_capturing()  # torch asks a GPU which elements are finite; of other devices it copies all
    return _contents(self, indent)


@functools.wraps(_torchs_format)
def formatted(self: torch.Tensor, format_spec: str) -> str:
    """``torch.Tensor.__format__`` from the registration of the device on."""
    return repr(self) if self.dim() == 0 and _lacks_values(self) else _torchs_format(self, format_spec)


def _lacks_values(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        if tensor.device.type != DEVICE_TYPE or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        from torch._subclasses.fake_tensor import FakeTensor  # not above: it takes long, and printing imports it

        try:
            return not isinstance(tensor, FakeTensor) and has_no_values(tensor.untyped_storage())
        except NotImplementedError:  # a wrapper of functorch has no storage
            return False
