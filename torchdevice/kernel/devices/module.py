"""Devices with a module of their own that follows torch's convention: CUDA, XPU, PrivateUse1.

torch refuses ``tensor.data = value`` between the CPU and an out-of-tree backend, and CUDA allows
it. ``Module.to`` and FSDP rely on it to keep parameters the same objects: an optimizer that was
made before the move would otherwise train parameters that the module no longer has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch

from torchdevice.errors import NotSupportedError
from torchdevice.kernel import torch_internals
from torchdevice.kernel.devices.device_memory import Memory
from torchdevice.kernel.devices.runtime import Mark, Runtime, TorchSupport, device_of
from torchdevice.kernel.lowlevel.object_fields import offset_of, word_at

_WORDS = 24
"""The words of a tensor that are looked at."""


def _is_compatible(context: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``torch._has_compatible_shallow_copy_type``, asked by ``Module.to`` before it sets ``data``.

    :func:`_set_data` makes the assignment possible.
    """
    return func(*args, **kwargs) or _changes_kind(context.device_type, *args)


def _set_data(context: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``tensor.data = value``.

    Torch compares the dispatch keys of the two before it gives the tensor all that the value has,
    its keys too. So the tensor gets them first.
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
    """Return whether one tensor is on the CPU, the other on a backend, and neither is a wrapper."""
    with torch._C.DisableTorchFunction():
        if {one.device.type, other.device.type} != {"cpu", device_type}:
            return False
        return not any(_keys(each).has(torch._C.DispatchKey.Python) for each in (one, other))


REWRITERS = {
    torch._has_compatible_shallow_copy_type: _is_compatible,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
}


class ModuleRuntime(Runtime):
    """A device with a module that follows torch's convention: CUDA, XPU, any PrivateUse1.

    The convention is that of ``torch.cuda`` and ``torch.xpu``; a backend that leaves a function out
    gets a clear error when a program needs it.
    """

    takes_device_ids = True
    is_asynchronous = True
    is_integrated = False

    def __init__(self, device_type: str):
        self.device_type = device_type
        # torch.accelerator asks an out-of-tree backend's C++ code, which may lack what the
        # backend's module has.
        self._is_in_tree = device_type in ("cuda", "xpu")
        self.support = TorchSupport(
            makes_kernels=self._is_in_tree, is_torch_accelerator=self._is_in_tree
        )

    @property
    def rewriters(self) -> Mapping[Any, Any]:
        return {} if self._is_in_tree else REWRITERS

    def obstacle(self, gm: torch.fx.GraphModule, context: Any) -> str:
        # Takes long, and is imported already where a graph is compiled.
        from torch._inductor.codegen import common

        torch_internals.check("later", "torch._inductor.codegen.common")
        common.init_backend_registration()
        self.compiles = common.get_scheduling_for_device(self.device_type) is not None
        return super().obstacle(gm, context)

    @functools.cached_property
    def pins_memory(self) -> bool:  # type: ignore[override]
        """Whether the backend has an allocator of page-locked memory, used by torch in C++."""
        with torch._C.DisableTorchFunction():
            try:
                torch.ops.aten.empty.memory_format(
                    [1], device=device_of("cpu", None), pin_memory=True
                )
            except NotImplementedError:
                return False
        return True

    @property
    def module(self) -> Any:
        """The module, for example ``torch.xpu``."""
        return getattr(torch, self.device_type, None)

    def _named(self, name: str) -> Any:
        found = getattr(self.module, name, None)
        if not found:  # absent, or an empty tuple of generators
            kind = self.device_type
            raise NotSupportedError(
                f"torch.{kind}.{name}", f"The {kind!r} backend does not provide it."
            )
        return found

    def _call(self, name: str, *args: Any) -> Any:
        return self._named(name)(*args)

    def is_available(self) -> bool:
        return self.module is not None and self._call("is_available")

    def device_count(self) -> int:
        return self._call("device_count")

    def name(self, index: int) -> str:
        return self._call("get_device_name", index)

    def total_memory(self, index: int) -> int:
        return self._call("get_device_properties", index).total_memory

    def free_memory(self, index: int) -> int:
        return self._call("mem_get_info", index)[0]

    def memory(self, index: int) -> Memory:
        names = (
            "memory_allocated",
            "memory_reserved",
            "max_memory_allocated",
            "max_memory_reserved",
        )
        return Memory(*(self._call(name, index) for name in names))

    def reset_peak_memory(self, index: int) -> None:
        self._call("reset_peak_memory_stats", index)

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        self._call("set_per_process_memory_fraction", 1.0 if fraction is None else fraction, index)
        return True

    def empty_cache(self) -> None:
        self._call("empty_cache")

    def synchronize(self, index: int) -> None:
        self._call("synchronize", index)

    def mark(self, index: int, *, timing: bool) -> Mark:
        event = self.module.Event(enable_timing=timing)
        event.record(self._call("current_stream", index))
        return event

    def default_generator(self, index: int) -> torch.Generator:
        if hasattr(self.module, "init"):
            self._call("init")
        return self._named("default_generators")[index]

    def multiprocessor_count(self) -> int:
        properties = self._call("get_device_properties", 0)
        return int(
            getattr(properties, "multi_processor_count", 0)
            or getattr(properties, "gpu_eu_count", 1)
        )

    def supports_bfloat16(self) -> bool:
        function = getattr(self.module, "is_bf16_supported", None)
        return True if function is None else function()

    def out_of_memory(self, error: BaseException) -> str | None:
        text = str(error)
        found = _SAYS_OUT_OF_MEMORY.match(text) if isinstance(error, RuntimeError) else None
        return None if found is None else text[found.end() :].strip()


_SAYS_OUT_OF_MEMORY = re.compile(r"(?:\w+:? ){,2}out of memory\b[.:,]?", re.IGNORECASE)
"""How errors of backends' allocators begin: ``XPU out of memory. Tried to allocate 2.00 GiB``."""
