"""Registers the simulated device with torch: its device type, its device module and its kernels.

This is done once in a process, and torch cannot undo it. Nothing of it is used unless a tensor of
the device exists.

``torch.multiprocessing`` sends tensors of the device to other processes as values in shared memory.
CUDA shares the tensor's memory. Here the receiver gets a copy on its own device with that ordinal,
so the sender does not see what the receiver writes.
"""

from __future__ import annotations

import functools
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing.reductions

from torchdevice.calls import interruptions
from torchdevice.calls.error_texts import raise_out_of_memory, reword
from torchdevice.calls.lacking import missing_operators, mps_guards
from torchdevice.calls.lacking.missing_operators import composite, of_aten, overload_of, shadowed
from torchdevice.errors import BackendTakenError, ScopeError
from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.lowlevel import page_locked
from torchdevice.kernel.python import forks, garbage_collection
from torchdevice.kernel.python.logs import warn_once
from torchdevice.native import building
from torchdevice.simulation import device_guard, policy, serving, storage_resizing, torch_functions
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.kernels import handwritten_kernels, layouts, recurrent_networks
from torchdevice.simulation.kernels.pipeline import Pipeline, fallback, kernel_of, refusals_of
from torchdevice.simulation.policy import DEVICE_TYPE
from torchdevice.simulation.refusals.cuda_rules import COMPOSED
from torchdevice.simulation.refusals.refusal_rules import guarded
from torchdevice.torch_modules.apis import autocast_lists

_reduce_tensor = torch.multiprocessing.reductions.reduce_tensor


def share_with_processes() -> None:
    """Let ``torch.multiprocessing`` pickle the device's tensors in all threads of the process."""
    # A queue pickles in a thread of its own, where no scope need be active.
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        if tensor.device.type != policy.DEVICE_TYPE:
            return _reduce_tensor(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            return _reduce_tensor(tensor.cpu())  # which torch refuses
        if policy.stands_for_mps():
            raise RuntimeError("_share_filename_: only available on CPU")
        context = thread_state.state.context
        if context is not None:
            entry = context.report(
                "a tensor for another process", "a copy of it", Fidelity.APPROXIMATE
            )
            if entry is not None:
                entry.bytes += tensor.nbytes
        values, index = tensor.detach().cpu(), tensor.device.index
        return _received, (
            values,
            index,
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
        )


def _received(
    values: torch.Tensor, index: int, requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    context = thread_state.state.context
    if context is None:
        raise ScopeError(
            "a tensor of a simulated device was sent to a process in which no scope is active. "
            "Start the process in a scope, or after enable(propagate=True)."
        )
    tensor = values.to(context.devices.at(index))
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


_registered: list[bool] = []
"""Not empty once the device is registered."""

_lock = forks.lock(globals())

_TAKES_AUTOGRAD = (
    "outside simulated scopes backward() of tensors on {} fails from now on in this process, with "
    "an internal error of torch's. Simulate in a process of its own, or hide the real device "
    "(CUDA_VISIBLE_DEVICES='' for CUDA)."
)


class Module:
    """``torch.simulated``, the device module torch requires. In a scope, see ``torch.cuda``."""

    def is_available(self) -> bool:
        """Return whether a scope on the simulated device is active in this thread."""
        return _scope() is not None

    is_initialized = is_available
    """Also while a compiler works, whose fake tensors are then on the current device, and not on
    the first.
    """

    def device_count(self) -> int:
        """Return the number of devices of the active scope, 0 without one."""
        context = _scope()
        return context.runtime.device_count() if context is not None else 0

    def current_device(self) -> int:
        """Return the index of this thread's current device."""
        context = _scope()
        return context.thread.device_index if context is not None else 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast accepts."""
        return [torch.float16, torch.bfloat16]

    def device(self, device: Any) -> Any:
        """Return a context manager that makes a device current; ``torch.mps`` has none."""
        return torch.accelerator.device_index(
            torch.accelerator._utils._get_device_index(device, optional=True)
        )

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: ``torch.manual_seed`` also seeds in a scope, by ``torch.cuda``."""

    def _is_in_bad_fork(self) -> bool:
        context = _scope()
        return context is not None and context.driver.is_in_bad_fork

    def __getattr__(self, name: str) -> Any:
        context = _scope()
        if context is None:
            raise AttributeError(
                f"torch.{DEVICE_TYPE} has no {name!r} where no scope on a simulated device is "
                "active"
            )
        return getattr(getattr(torch, context.program), name)


def _scope() -> Context | None:
    context = thread_state.answering()
    return context if context is not None and context.device_type == DEVICE_TYPE else None


def register() -> None:
    """Register the simulated device with torch, unless it is registered already.

    Raises:
        BackendTakenError: Another out-of-tree backend is registered; torch has room for one.
    """
    if not _registered:
        # On one line: an interrupt between two lines would leave the lock held.
        with _lock: _register()  # noqa: E701  # fmt: skip


def _register() -> None:
    if _registered:  # another thread was faster
        return
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone" or hasattr(torch, name):
        raise BackendTakenError(name)
    setup = torch.utils.backend_registration._setup_privateuseone_for_python_backend
    with garbage_collection.paused(), thread_state.suspended(), torch._C.DisableTorchFunction():
        # torch's autograd finds streams only of the registered accelerator (pytorch issue 161129).
        if torch.accelerator.device_count():
            warn_once(_TAKES_AUTOGRAD.format(torch.accelerator.current_accelerator()))
        setup(DEVICE_TYPE, Module(), device_guard.Hooks(), device_guard.Guard())
        _guard_storage()
        storage_resizing.register()
        page_locked.register()
        share_with_processes()
        torch_functions.show_texts()
        _register_kernels()
        interruptions.handles_calls(__file__)


def _guard_storage() -> None:
    """Replace two storage constructors, which crash on this device, until the process ends."""
    original = torch.UntypedStorage.__new__
    guarded = functools.update_wrapper(functools.partial(new_storage, original), original)
    torch.UntypedStorage.__new__ = guarded  # type: ignore[method-assign]
    empty: Any = functools.wraps(torch.UntypedStorage.new)(
        lambda self: type(self)(0, device=self.device)
    )
    torch.UntypedStorage.new = empty  # type: ignore[method-assign]


def new_storage(original: Any, cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Make a storage like ``torch.UntypedStorage.__new__``, also on this device."""
    if device is None:
        return original(cls, *args, **kwargs)
    with torch._C.DisableTorchFunction():
        device = torch.device(device)
        if device.type != DEVICE_TYPE:
            return original(cls, *args, device=device, **kwargs)
        policy.check_scope()
        size = args[0] if args else kwargs.get("size", 0)
        make: Any = torch.empty if isinstance(size, int) else torch.tensor
        context = _scope()
        try:
            memory = make(size, dtype=torch.uint8)
        except RuntimeError as error:
            if context is not None:
                raise_out_of_memory(context, error)
            raise
        device = (context and context.redirect(device)) or device
        return storages.fresh(memory, device.index or 0).untyped_storage()


def _put(name: str, kernel: Any, key: str) -> None:
    registered_kernels.put(f"aten::{name}", kernel, key, __file__)


def _register_kernels() -> None:
    registered_kernels.put_fallback(run_any, "PrivateUse1", __file__)
    for name, kernel in handwritten_kernels.SPECIAL.items():
        _put(name, Pipeline(name, kernel).run, "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        _put("scaled_dot_product_attention", handwritten_kernels.attend, key)
        for name in (*recurrent_networks.OPERATORS, *COMPOSED):
            op = overload_of(name)
            kernel = op.decompose if name in COMPOSED else recurrent_networks.kernel_of(op)
            _put(name, guarded(refusals_of(op), kernel), key)
    _put("_cudnn_rnn_flatten_weight", recurrent_networks.flatten, "PrivateUse1")
    for name in ("_convolution", "_convolution.deprecated"):
        _put(name, handwritten_kernels.convolve, "AutogradPrivateUse1")
    for name in sorted(_named().difference(handwritten_kernels.SPECIAL, layouts.MAKING)):
        _put(name, kernel_of(name), "PrivateUse1")
    _put("embedding", _in_programs_words("embedding", "CompositeExplicitAutograd"), "PrivateUse1")
    compositions = {
        name: _holding_doubles(overload_of(name).decompose) for name in _COMPOSED_IN_FLOAT64
    }
    for name in _SHOWING_TENSORS:
        compositions[name] = _in_programs_words(name, "CompositeImplicitAutograd")
    for name, kernel in compositions.items():
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            _put(name, kernel, key)
    layouts.register_nested()
    layouts.register_quantized()
    non_functional = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
    pinv = functools.partial(torch.ops.aten.linalg_pinv.atol_rtol_tensor._op_dk, non_functional)
    _put("linalg_pinv.atol_rtol_tensor", _holding_doubles(pinv), "PrivateUse1")
    layouts.register_sparse()
    # Those in C++ go over those in Python before there is a tensor of the device, whichever kernels
    # the scope wants: a scope that another thread enters later may want the others.
    building.trouble()  # loads them where they are built
    serving.put_in_place()
    _registered.append(True)


def serve_autocast() -> None:
    """Register CUDA's autocast lists, unless done before: most programs never need them."""
    # On one line: see `register`.
    with _lock: _register_casts()  # noqa: E701  # fmt: skip


def _register_casts() -> None:
    if not _casts:
        with garbage_collection.paused(), thread_state.suspended(), torch._C.DisableTorchFunction():
            autocast_lists.register(DEVICE_TYPE, "AutocastPrivateUse1")
            _casts.append(True)


_casts: list[bool] = []
"""Not empty once CUDA's lists are registered."""


def _named() -> set[str]:
    """Return operators that need their own kernel: torch would mostly run a composite instead.

    Those that are known to be wrong on MPS, or that only backward calls, need one too: scopes put
    theirs in front.
    """
    whole = of_aten(composite())
    found = shadowed("CPU").union(_FREQUENT)
    found.update(name for name in whole if name.startswith("_foreach_") or name in _RUN_WHOLE)
    found.update(of_aten(mps_guards.guarded_on("CPU")), of_aten(missing_operators.operators("CPU")))
    return found


_WHOLE = (
    "abs convolution_backward empty_like kaiser_window kaiser_window.periodic kaiser_window.beta"
)

_RUN_WHOLE = frozenset(_WHOLE.split())
"""Composite operators that take another path on the CPU than on an out-of-tree device, or that
printing needs.
"""


_FREQUENT = ("as_strided", "view", "_reshape_alias", "zero_")
"""Operators that most views, or `torch.zeros`, are made of. A kernel of their own takes less time
than the fallback.
"""


_COMPOSED_IN_FLOAT64 = [
    *(
        f"linalg_matrix_rank{overload}"
        for overload in ("", ".tol_tensor", ".atol_rtol_tensor", ".atol_rtol_float")
    ),
    *(f"linalg_pinv{overload}" for overload in ("", ".rcond_tensor", ".atol_rtol_float")),
]
"""Composite operators that make tolerances in float64, where torch's own for MPS have float32."""


_SHOWING_TENSORS = ("istft", "tensor_split.tensor_indices_or_sections")
"""Composite operators, besides ``embedding``, whose errors name the device or type of an argument.
"""


def _in_programs_words(name: str, key: str) -> Any:
    """Return torch's own composition of an operator, whose errors name the program's device."""
    # Not ``decompose``, which prefers a composition in Python with other errors.
    composition = functools.partial(overload_of(name)._op_dk, getattr(torch._C.DispatchKey, key))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            return composition(*args, **kwargs)
        except RuntimeError as error:
            context = thread_state.state.context
            if context is not None:
                reword(context, error)
            raise

    return kernel


def _holding_doubles(composition: Any) -> Any:
    """Return torch's own composition of an operator, with tolerances in float64."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with policy.being("holds_doubles"), torch._C.DisableTorchFunction():
            return composition(*args, **kwargs)

    return kernel


run_any = fallback(kernel_of)
"""Runs an operator that has no registered kernel."""
