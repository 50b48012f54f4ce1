"""The public names, for type checkers. ``__init__.py`` reads here in which module each is."""

from typing import Any

from torchdevice import errors as errors
from torchdevice.kernel.devices.device_memory import Memory as Memory
from torchdevice.kernel.devices.device_memory import Stat as Stat
from torchdevice.kernel.devices.module import ModuleRuntime as ModuleRuntime
from torchdevice.kernel.devices.registry import register_runtime as register_runtime
from torchdevice.kernel.devices.runtime import Mark as Mark
from torchdevice.kernel.devices.runtime import Runtime as Runtime
from torchdevice.kernel.fidelity import Fidelity as Fidelity
from torchdevice.kernel.journal.callers import Site as Site
from torchdevice.kernel.journal.journal import Entry as Entry
from torchdevice.kernel.journal.journal import Journal as Journal
from torchdevice.plan.calls import plan as plan
from torchdevice.report import Report as Report
from torchdevice.scope.activation import current as current
from torchdevice.scope.activation import disable as disable
from torchdevice.scope.activation import enable as enable
from torchdevice.scope.activation import portable as portable
from torchdevice.scope.activation import simulate as simulate
from torchdevice.scope.collected_options import Options as Options
from torchdevice.scope.scope import Scope as Scope
from torchdevice.scope.target_selection import TorchDevice as TorchDevice
from torchdevice.transfer import DeviceSpec as DeviceSpec
from torchdevice.transfer import Prefetcher as Prefetcher
from torchdevice.transfer import ToDevice as ToDevice

__all__: list[str]
__version__: str

def load_ipython_extension(ipython: Any) -> None: ...
def unload_ipython_extension(ipython: Any) -> None: ...
