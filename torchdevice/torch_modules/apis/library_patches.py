"""Code of libraries that knows the device type ``"cuda"`` only, or arrays of its own only.

Lightning raises where a device that it made as ``torch.device("cuda")`` is not of the type
``"cuda"``, and accelerate leaves mixed precision off there. Both keep the target's device, which
the tensors of the scope report too. Only the functions that check see the program's device.

The simulator of CUDA in numba takes NumPy arrays. It gets tensors as such.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchdevice.calls import host_functions, moves
from torchdevice.calls.rewriters import native_device
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import later, replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import Patch, Replaced, replaced_function
from torchdevice.kernel.python.per_thread import PerThread, having


def _as_program(context: Context, device: Any) -> Any:
    """Return the program's spelling for a device of the target, and any other device unchanged."""
    if not isinstance(device, torch.device) or not context.devices.is_targets(device):
        return device
    if (
        context.runtime.shares_host_memory
        and moves.side_meant(context, device, None) is not moves.Side.DEVICE
    ):
        return device
    return context.devices.of_program(
        context.thread.device_index if device.index is None else device.index
    )


# ---- Lightning -----------------------------------------------------------------------------------


def _setup_device(context: Context, original: Any, self: Any, device: torch.device) -> None:
    original(self, _as_program(context, device))


for _package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
    _class = f"{_package}.accelerators.cuda:CUDAAccelerator"
    replaces(_class, "setup_device", native_to="cuda", sees_scope=True)(_setup_device)


# ---- accelerate ----------------------------------------------------------------------------------


_checking = PerThread(is_on=False)


@replaces("accelerate.accelerator:Accelerator", "__init__", native_to="cuda", sees_scope=True)
@replaces(
    "accelerate.accelerator",
    "get_mixed_precision_context_manager",
    native_to="cuda",
    sees_scope=True,
)
def _while_checking(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of accelerate in which the device of its state is the program's."""
    with having(_checking, is_on=True):
        return original(*args, **kwargs)


class _DeviceOfState:
    """``device`` of accelerate's states, kept in their dictionary; a check sees the program's."""

    def __get__(self, state: Any, owner: type) -> Any:
        if state is None or "device" not in vars(state):
            # As without the attribute; Python then calls __getattr__ of a state.
            raise AttributeError("device")
        device = vars(state)["device"]
        context = thread_state.state.context
        return _as_program(context, device) if _checking.is_on and context is not None else device

    def __set__(self, state: Any, device: Any) -> None:
        vars(state)["device"] = device

    def __delete__(self, state: Any) -> None:
        del vars(state)["device"]


@later("accelerate.state", sees_scope=True)
def _patches_of_state(module: Any) -> list[Patch]:
    attribute, states = _DeviceOfState(), (module.PartialState, module.AcceleratorState)
    return [
        Replaced(owner, "device", lambda original: attribute, may_be_absent=True)
        for owner in states
    ]


# ---- numba, with NUMBA_ENABLE_CUDASIM=1 ----------------------------------------------------------


_interface: Any = torch.Tensor.__cuda_array_interface__


class _AsCuda:
    """Reads as a tensor does, except that it is on CUDA."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def array_interface(tensor: torch.Tensor) -> dict[str, Any]:
    """Return ``Tensor.__cuda_array_interface__``, or raise torch's error for one on CUDA."""
    with torch._C.DisableTorchFunction():
        return _interface.fget(_AsCuda(tensor))  # type: ignore[no-any-return]


def _is_cuda_array(context: Context, original: Any, obj: Any) -> bool:
    """``numba.cuda.is_cuda_array``, which the simulator lacks."""
    is_of_target = isinstance(obj, torch.Tensor) and native_device(obj).type == context.device_type
    return is_of_target and bool(array_interface(obj))


def _as_cuda_array(context: Context, original: Any, obj: Any, sync: bool = True) -> Any:
    """``numba.cuda.as_cuda_array``, which the simulator lacks: its array, for a tensor."""
    if not _is_cuda_array(context, None, obj):
        raise TypeError("*obj* doesn't implement the cuda array interface.")
    memory = context.runtime.supplied.host_alias(obj)
    if memory is None:
        thread_state.refuse("numba.cuda.as_cuda_array", "Give the tensor itself to the kernel.")
    array = _array(memory)
    array.tensor = obj
    return array


def _array(memory: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        return sys.modules["numba.cuda.simulator.cudadrv.devicearray"].FakeCUDAArray(memory.numpy())


@replaces(
    "numba.cuda.simulator.kernel:FakeCUDAKernel", "__call__", native_to="cuda", sees_scope=True
)
def _launch(context: Context, original: Any, kernel: Any, *args: Any) -> Any:
    """Run a kernel on tensors' memory, which the simulator would index via torch per element."""
    given = [getattr(each, "tensor", each) for each in args]
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    if not all(_is_cuda_array(context, None, each) for each in tensors):
        raise ValueError(f"Cannot determine Numba type of {torch.Tensor}")
    if not tensors:
        return original(kernel, *args)

    def run(memory: list[torch.Tensor]) -> None:
        arrays = map(_array, memory)
        original(
            kernel, *(next(arrays) if isinstance(each, torch.Tensor) else each for each in given)
        )

    host_functions.call(context, run, tensors)


@later("numba.cuda", sees_scope=True)
def _patches_of_numba(module: Any) -> list[Patch]:
    own = {"is_cuda_array": _is_cuda_array, "as_cuda_array": _as_cuda_array}
    lacked = [name for name in own if not hasattr(module, name)]
    return [
        replaced_function(module, name, own[name], native_to="cuda", may_be_absent=True)
        for name in lacked
    ]
