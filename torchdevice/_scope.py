"""The scope: what ``portable``, ``enable`` and the others make, and the one place where everything meets.

Entering a scope resolves its target, puts the patches in (if this is the first active scope of the process), puts the
mode on this thread's stack (if this is the first of the thread) and makes the scope the thread's innermost. Leaving
undoes exactly that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.weak import WeakIdKeyDictionary

from torchdevice import _active, _entry_points, _propagation, _rewriters, _target, _tracing
from torchdevice._decorating import decorated
from torchdevice._installed import INSTALLATION
from torchdevice._journal import Fidelity, Journal, configure_logging, logger, user_frame
from torchdevice._mode import DeviceMode, of_this_thread
from torchdevice._patching import Installation, acquire_all, release_all
from torchdevice._runtimes import Runtime
from torchdevice._spelling import ACCELERATORS, Spelling, parse
from torchdevice.bindings import device, history
from torchdevice.errors import AnotherPatcherError, FidelityError, PortabilityWarning, ScopeError
from torchdevice.shims import tensor_types

F = TypeVar("F", bound=Callable[..., Any])

_MAX_REDIRECTS = 4096

_OTHER_PATCHERS = ("torch_npu.contrib.transfer_to_npu", "torchada", "TorchDevice", "mpsify", "ipex_to_cuda")

_FALLBACK_DTYPES = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class _PerThread(threading.local):
    """What each thread has of its own in a scope, as CUDA keeps a current device and current streams per thread."""

    def __init__(self) -> None:
        self.device_index = 0
        self.streams: dict[int, int] = {}
        self.entered_streams: list[tuple[int, int, int]] = []
        self.capture: Any = None
        self.at_exit: list[Callable[[], None]] = []
        self.depth = 0


class Scope(contextlib.AbstractContextManager["Scope"]):
    """Programs written for one accelerator run on another while this is active. Made by :func:`portable`.

    Usable with ``with``, as a decorator, again and again, and inside itself.

    Attributes:
        identity: ``"target"`` if tensors report the device they are on, ``"cuda"`` if they say cuda.
        strict: Whether what would be approximate, ignored or downgraded raises.
        advertised_devices: The number of devices the program was told of, or None for as many as there are.
        float64: ``"float32"`` or ``"error"``: what becomes of float64 where the target lacks it.
        capability: The CUDA compute capability that the stand-in answers.
        memory: Bytes of memory of each simulated device, or None for no limit.
        properties: Fields of ``torch.cuda.get_device_properties`` that answer something else than the target's.
        written_for: The accelerator that the program is told is available: ``"cuda"``, ``"mps"`` or ``"xpu"``.
        engine: ``"mode"`` or ``"wrap"``: how torch's calls are seen. Inside another scope, that one's is used.
        kind: The runtime's, ``""`` before the first entry.
        known: What supplied names are in this scope, as far as they were asked for and stay the same.
        journal: What was rewritten and supplied, by call site.
    """

    def __init__(
        self,
        target: str | torch.device | None = None,
        *,
        devices: int | None = None,
        identity: Literal["target", "cuda"] = "target",
        strict: bool = False,
        float64: Literal["float32", "error"] = "float32",
        capability: tuple[int, int] = (8, 0),
        memory: int | None = None,
        properties: Mapping[str, Any] | None = None,
        written_for: Literal["cuda", "mps", "xpu"] = "cuda",
        engine: Literal["mode", "wrap"] | None = None,
    ):
        _check_options(devices, identity, float64, capability, memory)
        _check_properties(properties, written_for)
        self._requested_target = target
        self.advertised_devices = devices
        self.identity = identity
        self.strict = strict
        self.float64 = float64
        self.capability = tuple(capability)
        self.memory = memory
        self.properties = dict(properties or {})
        self.written_for = written_for
        self.engine = _engine(engine)
        self.journal = Journal()
        self.thread = _PerThread()
        self._runtime: Runtime | None = None
        self._visible_devices: int | None = None
        self._forced_cpu_by: int | None = None
        self._redirects: dict[Any, tuple[torch.device, str, str] | None] = {}
        self._pinned: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._bound: dict[Any, Any] = {}
        self.kind = ""
        self.known: dict[Any, Any] = {}
        self.table: _rewriters.Table = {}
        # The method, not the table: Dynamo would guard on the table's length, which grows by what is seen.
        self.find: Any = self.table.get
        self.key = ""
        self.unsupported_dtypes: frozenset[torch.dtype] = frozenset()
        self.settings: dict[Any, Any] = {}
        self.streams: dict[tuple[type, int, int], Any] = {}

    # ---- what it stands for ------------------------------------------------------------------------------------------

    @property
    def runtime(self) -> Runtime:
        """What the target can do. Resolved at the first entry."""
        if self._runtime is None:
            self._resolve()
        assert self._runtime is not None
        return self._runtime

    @property
    def target(self) -> torch.device:
        """The device that stands in for the program's current accelerator."""
        return self.device(self.thread.device_index)

    @property
    def device_count(self) -> int:
        """How many accelerators the program sees.

        Where their number is the scope's to say, ``CUDA_VISIBLE_DEVICES`` shapes it, read when it is first asked for:
        programs set the variable before they first use CUDA.
        """
        if self._visible_devices is None:
            count = self.advertised_devices or max(1, self.runtime.device_count())
            fixed = self.advertised_devices is not None or not self.runtime.folds_ordinals
            self._visible_devices = _visible(os.environ.get("CUDA_VISIBLE_DEVICES"), count) if fixed else count
        return self._visible_devices

    @property
    def is_native(self) -> bool:
        """Whether the target is what the program is written for, so that it needs nothing from us."""
        return self.runtime.kind == self.written_for

    def device(self, index: int) -> torch.device:
        """Return the target's device for one of the program's ordinals."""
        return self.runtime.device(index if index < self.runtime.device_count() else 0)

    def _resolve(self) -> None:
        self._visible_devices = None
        runtime = _target.resolve(self._requested_target, devices=self.advertised_devices, memory=self.memory)
        if runtime is self._runtime:
            return
        if self.identity == "cuda" and runtime.shares_host_memory:
            raise ValueError(
                f"identity='cuda' needs a target whose tensors can be told from CPU tensors, and {runtime.kind!r} "
                f"is not one. Use identity='target', or a target such as 'mps', 'xpu' or a simulated device."
            )
        self._runtime = runtime
        self.unsupported_dtypes = runtime.unsupported_dtypes
        self._redirects.clear()
        self._bound.clear()
        self.known.clear()
        self.kind = runtime.kind
        self.table, self.find = _table(self.identity == "cuda", runtime)
        self.key = f"{runtime.target} {self.identity} {self.float64} {self.advertised_devices} {self.strict}"
        if runtime.kind == "cpu":
            _say_once("no accelerator is in use: what the program asks of CUDA runs on the CPU")

    # ---- device arguments --------------------------------------------------------------------------------------------

    def redirect(self, value: Any) -> torch.device | None:
        """Return the device to use for a device argument, or None if the argument is to be left alone."""
        try:
            known = self._redirects[value]
        except KeyError:
            return self._redirect_new(value)
        except TypeError:  # unhashable, so no device
            return None
        if known is None:
            return None
        device, requested, done = known
        self.journal.record(requested, done, Fidelity.EXACT, above=3)
        return device

    def _redirect_new(self, value: Any) -> torch.device | None:
        """Resolve an argument seen for the first time, or whose answer may change: no index, or one that is folded."""
        spelling = parse(value)
        if spelling is None or (spelling.family == self.runtime.kind and not isinstance(value, int)):
            self._remember(value, None)
            return None
        folded = spelling.index is not None and spelling.index >= self.device_count
        forced = self._forced_cpu_by is not None
        device = torch.device("cpu") if forced else self.device(self.ordinal(spelling))
        if forced or not folded:  # folding is reported as such
            self.journal.record(str(value), str(device), Fidelity.EXACT)
        if forced or not (folded or (spelling.index is None and device.index is not None)):
            self._remember(value, (device, str(value), str(device)))
        return device

    def _remember(self, value: Any, known: tuple[torch.device, str, str] | None) -> None:
        if len(self._redirects) < _MAX_REDIRECTS:
            self._redirects[value] = known

    def ordinal(self, spelling: Spelling) -> int:
        """Return which of the program's accelerators a spelling means.

        Raises:
            torch.AcceleratorError: ``devices`` were advertised, and it is none of them; worded as CUDA words it.
            RuntimeError: ``CUDA_VISIBLE_DEVICES`` hides all of them.
        """
        if not self.device_count:
            raise RuntimeError("No CUDA GPUs are available")  # torch's words
        if spelling.index is None:
            return self.thread.device_index
        if spelling.index < self.device_count:
            return spelling.index
        if not self.accepts(spelling.index):
            raise invalid_ordinal(spelling.index, self.device_count)
        self.report(str(spelling), str(self.device(0)), Fidelity.APPROXIMATE)
        return 0

    def accepts(self, index: int) -> bool:
        """Return whether an ordinal is one of the program's accelerators, or is folded onto the first."""
        folds = self.advertised_devices is None and self.runtime.folds_ordinals
        return index >= 0 and (folds or index < self.device_count)

    def current_spelling(self, family: str) -> torch.device | str:
        """Return how the program would spell its current accelerator of that family."""
        return f"{family}:{self.thread.device_index}"

    def force_cpu(self) -> torch.device:
        """Send the rest of this scope to the CPU, until this thread leaves it."""
        self._forced_cpu_by = threading.get_ident()
        self._redirects.clear()
        return torch.device("cpu")

    # ---- values ------------------------------------------------------------------------------------------------------

    def fit_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return a dtype that the target can hold, or let torch complain under ``float64="error"``."""
        fitting = _FALLBACK_DTYPES.get(dtype)
        if dtype not in self.unsupported_dtypes or fitting is None or self.float64 == "error":
            return dtype
        if self.report(str(dtype), str(fitting), Fidelity.APPROXIMATE):
            warnings.warn(
                f"{self.runtime.kind} has no {dtype}; {fitting} is used. Use float64='error' to be told where.",
                PortabilityWarning,
                stacklevel=2,
            )
        return fitting

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember that the program pinned this tensor, on a target that needs no page-locked memory."""
        self._pinned[tensor] = True
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the program pinned this tensor."""
        return bool(self._pinned.data) and tensor in self._pinned

    def is_borrowed(self, tensor: torch.Tensor) -> bool:
        """Return whether somebody may rewrite the tensor's memory: NumPy, a file mapping, a pinned staging buffer."""
        if self.is_pinned(tensor):
            return True
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return False
        try:
            return not tensor.untyped_storage().resizable()
        except (RuntimeError, ValueError):  # no storage: a tensor subclass, a functorch wrapper, a lazy parameter
            return False

    def legacy_dtype(self, wanted: Any) -> torch.dtype | None:
        """Return the dtype of a legacy type such as ``torch.cuda.HalfTensor`` or its name, else None."""
        return tensor_types.dtype_of(wanted)

    def legacy_type_name(self, name: str) -> str:
        """Return what ``Tensor.type()`` answers: the truth, or CUDA's name under ``identity="cuda"``."""
        prefix = f"torch.{self.runtime.kind}."
        return f"torch.cuda.{name[len(prefix) :]}" if self.identity == "cuda" and name.startswith(prefix) else name

    # ---- reports -----------------------------------------------------------------------------------------------------

    def report(self, requested: str, done: str, fidelity: Fidelity) -> bool:
        """Note that something is not exactly what was asked for.

        Returns:
            True the first time at a line of the program.

        Raises:
            FidelityError: The scope is strict and it matters: hints with nothing to do are let pass.
        """
        if self.strict and fidelity is Fidelity.APPROXIMATE:
            raise FidelityError(requested, done)
        frame = user_frame()
        first = self.journal.record(requested, done, fidelity, frame)
        if first:
            logger.info(
                "%s -> %s (%s) at %s:%d", requested, done, fidelity.value, frame.f_code.co_filename, frame.f_lineno
            )
        return first

    def reword(self, error: BaseException) -> None:
        """Raise CUDA's out-of-memory error if ``error`` is the target's own; name the device as tensors do."""
        if self.identity == "cuda":
            _rename_device(error, self.runtime.kind)
        if isinstance(error, torch.OutOfMemoryError):
            history.ran_out(self, error)
            return
        size = self.runtime.out_of_memory(error)
        if size is not None:
            as_cuda = torch.OutOfMemoryError(f"CUDA out of memory. {size}({self.runtime.kind} stands in.)")
            history.ran_out(self, as_cuda)
            raise as_cuda from error

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a supplied function with this scope as its first argument, the same object each time."""
        found = self._bound.get(function)
        if found is None:
            found = self._bound[function] = functools.wraps(function)(functools.partial(function, self))
        return found

    # ---- entering and leaving ----------------------------------------------------------------------------------------

    def __enter__(self) -> Scope:
        state = _active.state
        if not state.entered:
            _refuse_other_patchers()
            configure_logging()
        if not self.thread.depth:  # inside itself, it keeps its target
            self._resolve()
        runtime = self.runtime
        runtime.begin()
        try:
            state.entered.append(self._activation(runtime))
        except BaseException:
            runtime.end()
            raise
        _active.make_current(None if self.is_native else self)
        self.thread.depth += 1
        return self

    def _activation(self, runtime: Runtime) -> Activation:
        """Put everything in place in this thread; nothing, where nothing is needed."""
        if self.is_native and _active.state.scope is None:
            return Activation(self, runtime, None, ())
        mode = of_this_thread()
        wraps = self.engine == "wrap" if mode is None else mode is _active.state.mode
        wrapped = _entry_points.needed(runtime, says_cuda=self.identity == "cuda") if wraps else ()
        installations = (INSTALLATION, *wrapped)
        acquire_all(installations)
        try:
            return Activation(self, runtime, _serving(self, mode), installations)
        except BaseException:
            release_all(installations)
            raise

    def __exit__(self, *exc_info: object) -> None:
        entered = _active.state.entered
        positions = [i for i, activation in enumerate(entered) if activation.scope is self]
        if not positions:
            raise ScopeError(
                f"{self!r} was left in a thread where it was not entered. Enter it with 'with' or enable()."
            )
        innermost = positions[-1] == len(entered) - 1
        self._leave(entered.pop(positions[-1]))
        if not innermost:
            raise ScopeError(
                f"{self!r} was left before a scope entered after it. Leave scopes in the reverse order of entry; "
                f"it has been left, and the later one is still active."
            )

    def _leave(self, activation: Activation) -> None:
        state = _active.state
        innermost = state.entered[-1].scope if state.entered else None
        _active.make_current(innermost if innermost is not None and not innermost.is_native else None)
        self.thread.depth -= 1
        if self.thread.depth == 0 and self._forced_cpu_by == threading.get_ident():
            self._forced_cpu_by = None
            self._redirects.clear()
        try:
            while self.thread.depth == 0 and self.thread.at_exit:
                self.thread.at_exit.pop()()
        finally:
            try:
                if activation.mode is not None:
                    _settle_mode(activation.mode)
            finally:
                release_all(activation.installations)
                activation.runtime.end()

    @overload
    def __call__(self, function: F) -> F: ...
    @overload
    def __call__(self, function: Any) -> Any: ...
    def __call__(self, function: Any) -> Any:
        """Decorate a function, method, generator, coroutine or asynchronous generator."""
        return decorated(self, function)

    def __repr__(self) -> str:
        kind = self._runtime.target if self._runtime else self._requested_target or "to be chosen"
        return f"<torchdevice.Scope target={str(kind)!r}>"


_tracing.in_place_of(Scope.redirect)(lambda self, value: _tracing.redirect(self.key, value))
_tracing.in_place_of(Scope.fit_dtype)(lambda self, dtype: _tracing.fit_dtype(self.key, dtype))
_tracing.in_place_of(Scope.report)(
    lambda self, requested, done, fidelity: _tracing.report(self.key, requested, done, fidelity.value)
)
_tracing.in_place_of(Scope.is_borrowed)(lambda self, tensor: False)  # whose memory it will be is not known


class Activation:
    """One entry of a scope in a thread: the scope, the device it was entered on, and what was put in place for it."""

    __slots__ = ("installations", "mode", "runtime", "scope")

    def __init__(
        self, scope: Scope, runtime: Runtime, mode: DeviceMode | None, installations: tuple[Installation, ...]
    ):
        self.scope = scope
        self.runtime = runtime
        self.mode = mode
        self.installations = installations


def _serving(scope: Scope, mode: DeviceMode | None) -> DeviceMode:
    """Return this thread's mode, switched to ``scope``; make one if there is none, on the stack or beside it.

    There is none although a scope is active inside a torch function that is being handled, such as ``backward``.
    """
    if mode is not None:
        mode.scope = scope
        return mode
    mode = DeviceMode(scope)
    if scope.engine == "wrap":
        _active.state.mode = mode
    else:
        _push_mode(mode)
    return mode


def _settle_mode(mode: DeviceMode) -> None:
    """Switch a mode to the innermost scope it still serves, or take it away if it serves none."""
    state = _active.state
    served = [activation.scope for activation in state.entered if activation.mode is mode]
    if served:
        mode.scope = served[-1]
        return
    if state.mode is mode:
        state.mode = None
        return
    above = []
    while stack := _get_current_function_mode_stack():
        top = stack[-1]
        _pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def _rename_device(error: BaseException, kind: str) -> None:
    if error.args and isinstance(error.args[0], str) and f"{kind}:" in error.args[0]:
        error.args = (error.args[0].replace(f"{kind}:", "cuda:"), *error.args[1:])


_tables: dict[tuple[bool, str], tuple[_rewriters.Table, Any]] = {}


def _table(says_cuda: bool, runtime: Runtime) -> tuple[_rewriters.Table, Any]:
    """Return the table of rewriters for a kind of scope, and its ``get``.

    Both are shared: what one scope learns serves the others, and compiled code finds the same objects in them.
    """
    kind = runtime.kind if runtime.rewriters else ""
    found = _tables.get((says_cuda, kind))
    if found is None:
        reads = _rewriters.READS if says_cuda else {}
        extended = says_cuda or kind
        table = {**_rewriters.TABLE, **reads, **runtime.rewriters} if extended else _rewriters.TABLE
        found = _tables[says_cuda, kind] = table, table.get
        _tracing.number([*table.values(), *_rewriters.CLASSES])
    return found


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _refuse_other_patchers() -> None:
    for name in _OTHER_PATCHERS:
        if name in sys.modules:
            raise AnotherPatcherError(name)


def _visible(variable: str | None, count: int) -> int:
    """Return how many of ``count`` devices ``CUDA_VISIBLE_DEVICES`` leaves: CUDA stops at the first that is none."""
    if variable is None:
        return count
    ordinals = [part.strip() for part in variable.split(",")]
    valid = itertools.takewhile(lambda ordinal: ordinal.isdigit() and int(ordinal) < count, ordinals)
    return len(list(valid))


def invalid_ordinal(index: int, count: int) -> torch.AcceleratorError:
    """Return CUDA's error for an ordinal that does not exist."""
    error = torch.AcceleratorError("CUDA error: invalid device ordinal")
    if hasattr(error, "add_note"):
        error.add_note(
            f"cuda:{index} was asked for and {count} device(s) are advertised. Raise devices= in portable()."
        )
    return error


def _check_options(devices: Any, identity: Any, float64: Any, capability: Any, memory: Any) -> None:
    if devices is not None and (not isinstance(devices, int) or isinstance(devices, bool) or devices < 1):
        raise ValueError(f"devices={devices!r} is not a number of devices. Use an int of 1 or more, or None.")
    if identity not in ("target", "cuda"):
        raise ValueError(f"identity={identity!r} is not known. Use 'target' or 'cuda'.")
    if float64 not in ("float32", "error"):
        raise ValueError(f"float64={float64!r} is not known. Use 'float32' or 'error'.")
    valid = isinstance(capability, tuple) and len(capability) == 2 and all(isinstance(n, int) for n in capability)
    if not valid:
        raise ValueError(f"capability={capability!r} is not a compute capability. Use a pair such as (8, 0).")
    if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory < 1):
        raise ValueError(f"memory={memory!r} is not a number of bytes. Use an int of 1 or more, or None.")


def _engine(engine: Any) -> str:
    chosen = engine if engine is not None else os.environ.get("TORCHDEVICE_ENGINE") or "mode"
    if chosen not in ("mode", "wrap"):
        raise ValueError(f"engine={chosen!r} is not known. Use 'mode' or 'wrap', or set TORCHDEVICE_ENGINE to one.")
    return str(chosen)


def _check_properties(properties: Any, written_for: Any) -> None:
    if written_for not in ACCELERATORS:
        raise ValueError(f"written_for={written_for!r} is not known. Use 'cuda', 'mps' or 'xpu'.")
    unknown = set(properties or ()) - device.SETTABLE
    if unknown:
        raise ValueError(
            f"properties has {sorted(unknown)!r}, which cannot be set. Use fields of "
            f"torch.cuda.get_device_properties: {', '.join(sorted(device.SETTABLE))}; capability= sets major and minor."
        )


class _Enabled(NamedTuple):
    """One :func:`enable` in force: its scope, and the environment to restore."""

    scope: Scope
    environment: dict[str, str | None]


_enabled: list[_Enabled] = []


@overload
def portable(target: F, /) -> F: ...
@overload
def portable(
    target: str | torch.device | None = None,
    *,
    devices: int | None = None,
    identity: Literal["target", "cuda"] = "target",
    strict: bool = False,
    float64: Literal["float32", "error"] = "float32",
    capability: tuple[int, int] = (8, 0),
    memory: int | None = None,
    properties: Mapping[str, Any] | None = None,
    written_for: Literal["cuda", "mps", "xpu"] = "cuda",
    engine: Literal["mode", "wrap"] | None = None,
) -> Scope: ...
def portable(target: Any = None, **options: Any) -> Any:
    """Run programs written for one accelerator on another.

    Use as ``with torchdevice.portable():``, as ``@torchdevice.portable`` or as ``@torchdevice.portable(...)``.

    Args:
        target: The device that stands in: ``"cpu"``, ``"mps"``, ``"xpu"``, a PrivateUse1 backend's name, ``"cuda"``, a
            ``torch.device``, or None for ``TORCHDEVICE_TARGET`` and then the best there is.
        devices: How many accelerators the program sees; an ordinal beyond them raises CUDA's "invalid device ordinal".
            None: as many as the target has, and higher ordinals are folded onto device 0.
        identity: ``"cuda"`` lets tensors of the target say they are on cuda.
        strict: Raise :class:`~torchdevice.errors.FidelityError` instead of approximating.
        float64: What becomes of float64 on a target that lacks it: ``"float32"`` with a warning, or torch's own
            ``"error"``.
        capability: The CUDA compute capability that ``torch.cuda.get_device_capability()`` answers.
        memory: Bytes of memory of each simulated device, or None for no limit.
        properties: What fields of ``torch.cuda.get_device_properties()`` answer instead of what is measured, such as
            ``{"name": "NVIDIA A100-SXM4-80GB", "total_memory": 80 << 30}``.
        written_for: Which accelerator the program is told is available. ``"mps"`` runs programs written for Apple's
            on CUDA and elsewhere. Spellings of all of them are rewritten whatever it is.
        engine: ``"mode"`` sees every torch call; ``"wrap"`` only what can carry a device, so that other calls cost
            nothing. None: ``TORCHDEVICE_ENGINE``, or ``"mode"``. What each misses and costs is in docs/performance.md.

    Returns:
        A :class:`Scope`, or the decorated function.

    Raises:
        UnknownTargetError: On entry, if the target is no device type.
        TargetUnavailableError: On entry, if it is not available here.
        EngineUnavailableError: On entry, if ``engine="wrap"`` cannot be had in this Python.
        ValueError: If an option has an unknown value.
    """
    if callable(target) or isinstance(target, (staticmethod, classmethod)):
        return Scope(**options)(target)
    return Scope(target, **options)


def simulate(
    profile: str = "cuda",
    count: int = 1,
    *,
    memory: int | None = None,
    identity: Literal["target", "cuda"] = "target",
    strict: bool = False,
    float64: Literal["float32", "error"] = "float32",
    capability: tuple[int, int] = (8, 0),
    properties: Mapping[str, Any] | None = None,
    written_for: Literal["cuda", "mps", "xpu"] = "cuda",
    engine: Literal["mode", "wrap"] | None = None,
) -> Scope:
    """Run programs on simulated accelerators: real values in CPU memory, on devices of their own.

    The same as ``portable(target=f"simulated:{profile}:{count}", ...)``. What the device is registered with in
    torch stays for the life of the process.

    Args:
        profile: ``"cuda"``; ``"mps"``, with the dtypes and operators that Metal has; or ``"strict"``, where nothing
            runs that one of the two lacks.
        count: How many devices there are.
        memory: Bytes of memory of each, beyond which ``torch.cuda.OutOfMemoryError`` is raised; None for no limit.
        identity: ``"cuda"`` lets tensors of the device say they are on cuda.
        strict: As for :func:`portable`.
        float64: As for :func:`portable`.
        capability: As for :func:`portable`.
        properties: As for :func:`portable`.
        written_for: As for :func:`portable`.
        engine: As for :func:`portable`.

    Returns:
        A :class:`Scope`, for ``with`` and as a decorator.

    Raises:
        UnknownTargetError: On entry, if there is no such profile.
        BackendTakenError: On entry, if another out-of-tree backend is registered with torch in this process.
        ValueError: If an option has an unknown value.
    """
    return Scope(
        f"{_target.SIMULATED}:{profile}",
        devices=None if count == 1 else count,
        memory=memory,
        identity=identity,
        strict=strict,
        float64=float64,
        capability=capability,
        properties=properties,
        written_for=written_for,
        engine=engine,
    )


def enable(target: str | torch.device | None = None, *, propagate: bool = False, **options: Any) -> Scope:
    """Activate a scope for the rest of the process: this thread and the ones it starts, until :func:`disable`.

    Args:
        target: As for :func:`portable`.
        propagate: Also set ``TORCHDEVICE=1`` and its companions in the environment until then, so that Python
            processes started meanwhile activate themselves when they import torch.
        **options: As for :func:`portable`.

    Returns:
        The scope.
    """
    scope = Scope(target, **options)
    scope.__enter__()
    _enabled.append(_Enabled(scope, _propagation.to_children(scope) if propagate else {}))
    return scope


def disable() -> None:
    """Undo the last :func:`enable`.

    Raises:
        ScopeError: None is in force, or it was made in another thread, or a scope entered after it is still active.
    """
    if not _enabled:
        raise ScopeError("disable() was called without enable(). Call enable() first.")
    scope = _enabled[-1].scope
    if not any(activation.scope is scope for activation in _active.state.entered):
        raise ScopeError("disable() was called in another thread than enable(). Call it where enable() was called.")
    _propagation.restore(_enabled.pop().environment)
    scope.__exit__(None, None, None)


def current() -> Scope | None:
    """Return the innermost active scope of this thread, or None."""
    entered = _active.state.entered
    return entered[-1].scope if entered else None
