"""``torch.nn.DataParallel`` and ``DistributedDataParallel`` on a target whose tensors are CPU tensors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from torchdevice._journal import Fidelity
from torchdevice._patching import Patch, replaced_function

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _available_device_type(scope: Scope, original: Any) -> str | None:
    """None makes ``DataParallel`` run the module itself, once: there are no replicas to scatter to."""
    if scope.runtime.is_torch_accelerator:
        return original()
    scope.report("DataParallel", "the module, once", Fidelity.APPROXIMATE)
    return None


def _init_ddp(
    scope: Scope,
    original: Any,
    self: Any,
    module: Any,
    device_ids: Any = None,
    output_device: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """A module on the CPU must not name devices."""
    if not scope.runtime.takes_device_ids:
        device_ids = output_device = None
    original(self, module, device_ids, output_device, *args, **kwargs)


def patches() -> list[Patch]:
    """Return the patches of both wrappers."""
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")  # a function shadows it as an attribute
    return [
        replaced_function(data_parallel, "_get_available_device_type", _available_device_type, family="cuda"),
        replaced_function(DistributedDataParallel, "__init__", _init_ddp, family="cuda"),
    ]
