"""A program's view of a scope: the target, the reported answers, the thread's current device and streams.

A scope makes a :class:`Context` when it is entered (``scope/scope.py``). Everything else in this package works through
the context. The context itself knows no patch, no supplied name and no engine.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torchdevice.errors import FidelityError
from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.devices.current_streams import CurrentStreams
from torchdevice.kernel.devices.device_strings import Spelling, ordinal_of, parse
from torchdevice.kernel.devices.runtime import HALF, Runtime, device_of
from torchdevice.kernel.devices.sparse_parts import plain_parts
from torchdevice.kernel.devices.stream_order import Stream, StreamObserver
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.journal.journal import Entry, Journal
from torchdevice.kernel.options import Options, spelled
from torchdevice.kernel.python.logs import logger, warn_once
from torchdevice.kernel.python.uncaught_errors import add_note

# Enough for every spelling of a program; the limit keeps one that makes texts without end from filling memory.
_MAX_REDIRECTS = 4096

_EXACT = Fidelity.EXACT  # reading a member of an enumeration takes longer than a global name

_HASHED = frozenset({str, torch.device, int})
"""Types whose equal values mean equal devices: True equals 1, and is no device."""


Join = Callable[["Context", bool], AbstractContextManager[Any]]
"""Returns what another thread enters to join a context; the bool sends that thread to the CPU."""

Action = Callable[[], object]
"""Puts something in force, or sets it aside."""


class ThreadValues(threading.local):
    """The values that each thread has in a scope, as CUDA keeps a current device and current streams per thread.

    Attributes:
        device_index: The ordinal of the current device.
        device_text: That ordinal as text. Dynamo guards on the text, because it may make an int symbolic.
        streams: Ordinal -> id of the current stream.
        entered_streams: The values to restore at the end of each ``with stream`` block.
        capture: The capture of a graph in progress, if any.
        at_exit: Functions to call when the thread leaves the scope.
        at_return: Functions to call when the thread is back in the scope, as at each step of a decorated generator.
        forced_cpu: Whether the rest of the scope was sent to the CPU.
        moving_module: How many moves of modules are in progress.
        redirects: The cache of :meth:`Context.redirect`, emptied when the current device or ``forced_cpu`` changes.
    """

    def __init__(self) -> None:
        self.device_index = 0
        self.device_text = "0"
        self.streams = CurrentStreams()
        self.entered_streams: list[Any] = []
        self.capture: Any = None
        self.at_exit: list[Callable[[], None]] = []
        self.at_return: list[Callable[[], None]] = []
        self.forced_cpu = False
        self.moving_module = 0
        self.redirects: dict[Any, tuple[torch.device, str, str] | None] = {}

    def select(self, index: int) -> None:
        """Make a device current."""
        if index != self.device_index:
            self.device_index = index
            self.device_text = str(index)
            self.redirects.clear()

    def stream(self) -> Stream:
        """Return the current stream of the current device."""
        return self.device_index, self.streams.get(self.device_index, 0)


class WhileInside:
    """What a program has put in force in a scope, set aside while the thread is out of it.

    A thread also leaves a scope between two steps of a decorated generator.

    Args:
        thread: The thread's values in the scope.
        enter: Puts it in force.
        leave: Sets it aside.
        is_over: Returns whether it has ended while it was set aside.
    """

    def __init__(self, thread: ThreadValues, enter: Action, leave: Action, is_over: Callable[[], bool] = bool):
        self._thread, self._enter, self._leave, self._is_over = thread, enter, leave, is_over

    def begin(self) -> None:
        """Put it in force, until :meth:`end`."""
        self._enter()
        self._thread.at_exit.append(self._pause)

    def end(self) -> None:
        """Set it aside for good."""
        if self._pause in self._thread.at_exit:
            self._thread.at_exit.remove(self._pause)
            self._leave()
        elif self._resume in self._thread.at_return:
            self._thread.at_return.remove(self._resume)

    def _pause(self) -> None:
        self._leave()
        self._thread.at_return.append(self._resume)

    def _resume(self) -> None:
        if not self._is_over():
            self.begin()


_FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
    "the 'spawn' start method"
)


class Context:
    """A program's view of a scope.

    Args:
        options: The options of the scope.
        runtime: The target.
        journal: Counts what is rewritten and supplied.
        join: Lets another thread join the context.

    Attributes:
        device_type: The target's device type, as torch itself reports it.
        family: The device type whose names in torch are the target's own, such as ``torch.mps``.
        asks: Whether each kernel of a simulated device must ask ``policy`` before it runs.
        machine: The devices that a scope on simulated devices works on, see ``simulation/machine.py``; else None.
        features: What the scope's options ask for beyond running the program, see ``kernel/feature.py``.
        policy: The checks before kernels of simulated devices, see ``simulation/policy.py``; else None.
        answered_by: The context that answers for these names, on a simulated machine; None where torch itself does.
        program: The accelerator that the program is written for.
        families: The accelerators whose names and devices are there for the program.
        stood_for: Those of them that are not the target's own.
        float64: The option of that name, or its default for the target and the program.
        is_native: Whether the target is what the program is written for, so that it needs nothing from this package.
        unsupported_dtypes: Dtypes that the target cannot hold.
        keeps_doubles: Whether tensors in those dtypes are kept on the CPU.
        lines_warned_of: File and line of each line of the program that was warned of such a dtype.
        fits_conversions: Whether conversions and moves of tensors must be fitted to the target.
        redirects_only: Whether a call that names a device needs no more than the device, and perhaps its side marked.
        has_several_devices: Whether ``devices=`` shows the program several accelerators.
        folds_devices: Whether one device with a memory of its own is several of those accelerators.
        product_dtypes: Dtypes whose matrix products are computed in float32, which is faster on the target.
        way: How the user entered the scope, see :func:`torchdevice.kernel.options.spelled`.
        shown_as: The device type that tensors of the target report; None for the type that torch reports.
        key: The target, every option and the number of devices as text, on which compiled code is guarded.
        supplied_values: Values of supplied names that do not change in this context, kept when they are first read.
        written_values: Values that the program has set in the place of supplied names.
        settings: The values that the program set and reads back, by name.
        streams: The last streams that were made, by class, id and ordinal.
        stream_handles: Handle -> stream, of the streams that were made, where streams have handles.
        stream_observers: Told of each call that orders work.
        out_of_memory_observers: Called when memory runs out, with the ordinal, the bytes that were asked for, the bytes
            of the device and those that are free.
        entries: The active entries of this context, in all threads.
        user: The id of the process that was the first to use the accelerator; None before one has.
    """

    way = ""
    asks = False
    features: tuple[Any, ...] = ()
    machine: Any = None
    policy: Any = None
    user: int | None = None
    _initialized = False
    _device_count: int | None = None

    def __init__(self, options: Options, runtime: Runtime, journal: Journal, join: Join):
        self.options = options
        self.runtime = runtime
        self.journal = journal
        self.device_type = runtime.device_type
        self.family = runtime.family
        self.answered_by: Context | None = runtime.supplied.answered_by
        # "any" is CUDA for everything that must have one answer, such as which accelerator is available.
        anyone = options.written_for == "any"
        self.program = "cuda" if anyone else options.written_for
        self.families = frozenset(FAMILIES if anyone else (options.written_for,))
        self.stood_for = self.families - {self.family}
        self.is_native = runtime.family == options.written_for
        self.shown_as = self.program if options.identity == "program" else runtime.supplied.shown_as
        self.unsupported_dtypes = runtime.unsupported_dtypes
        # A program for another accelerator than CUDA gets that one's error there, as without this package.
        natively = runtime.supplied.location_tag == self.program != Options.written_for
        self.float64 = options.float64 or ("error" if natively else "float32")
        # A target that holds float64 ignores the option.
        self.keeps_doubles = self.float64 not in ("float32", "error") and bool(runtime.unsupported_dtypes)
        self.lines_warned_of: set[tuple[str, int]] = set()
        self.fits_conversions = bool(runtime.unsupported_dtypes) or runtime.blocking_copies_only
        self.has_several_devices = (options.devices or 1) > 1
        # `devices=` on a target with as many devices of its own folds nothing.
        own_memory = self.has_several_devices and not runtime.shares_host_memory
        self.folds_devices = own_memory and (options.devices or 1) > runtime.device_count()
        self.redirects_only = runtime.has_peaks and not self.fits_conversions and not self.folds_devices
        in_float32 = HALF if options.half_products == "float32" and runtime.shares_host_memory else frozenset()
        self.product_dtypes = runtime.slow_product_dtypes if options.half_products == "auto" else in_float32
        self.thread = ThreadValues()
        self._shown: dict[torch.device, torch.device] = {}
        self.supplied_values: dict[Any, Any] = {}
        self.written_values: dict[Any, Any] = {}
        self.settings: dict[Any, Any] = {}
        self.streams: dict[tuple[type, int, int], Any] = {}
        self.stream_handles: dict[int, Stream] = {}
        self.stream_observers: list[StreamObserver] = []
        self.out_of_memory_observers: list[Callable[[int, int, int, int], None]] = []
        self.entries: set[object] = set()
        self.registered_memory: dict[int, int] = {}
        self._join = join
        self._pinned: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._pinned_memory: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._bound: dict[Any, Any] = {}
        # Computes `key`, which compiled code needs before anybody has asked for the number of devices.
        self.count_devices_again()

    def in_another_thread(self) -> AbstractContextManager[Any]:
        """Return what a thread enters to join this context, on the CPU if this thread was sent to the CPU."""
        return self._join(self, self.thread.forced_cpu)

    # ---- initialisation ----------------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether the program has used the accelerator in this process, or has chosen one of them."""
        # The process is compared too: a forked child inherits both values, and has not used the accelerator itself.
        # Last, because it is a call.
        return self._initialized and self.user == os.getpid()

    def initialize(self) -> None:
        """Note that the program has used the accelerator in this process, and check what CUDA checks at first use.

        Raises:
            RuntimeError: The process was forked from one that had used the accelerator. The text is torch's.
            ValueError: Settings in the environment are wrong, see :meth:`SuppliedDevice.initialize`.
        """
        if self._initialized and self.user == os.getpid():  # as `is_initialized` does it, without its frame
            return
        if self.is_in_bad_fork:
            raise RuntimeError(_FORKED)
        self.runtime.supplied.initialize()
        # Before `_initialized`, which is read together with the process id that this sets.
        self.touch()
        self._initialized = True
        # From here on the number is fixed, as in CUDA: a later change of the variable has no effect.
        self._device_count = self.count_devices_again()
        if self.policy is not None:
            self.policy.settle()

    def touch(self) -> None:
        """Note that the program has called the accelerator's driver, after which a fork of the process cannot."""
        if self.user is None:
            self.user = os.getpid()

    @property
    def is_in_bad_fork(self) -> bool:
        """Whether this process was forked from one that had used the accelerator, which then does not work here."""
        # The comparison of process ids comes last, because it is a call and the others are attributes.
        return self.user is not None and not self.runtime.supplied.shared_by_processes and self.user != os.getpid()

    # ---- devices -----------------------------------------------------------------------------------------------------

    @property
    def target(self) -> torch.device:
        """The device that stands in for the program's current accelerator."""
        return self.device(self.thread.device_index)

    @property
    def device_count(self) -> int:
        """How many accelerators the program sees.

        ``CUDA_VISIBLE_DEVICES`` limits the number under ``devices=`` and on simulated devices. The variable counts
        until the program first uses the accelerator, as in CUDA, because programs set it before.
        """
        if self._device_count is not None:
            return self._device_count
        count = self.count_devices_again()
        if self.is_initialized:
            self._device_count = count
        return count

    def count_devices_again(self) -> int:
        """Return how many accelerators there are, and let the next read of ``device_count`` count them again."""
        self._device_count = None
        count = self.options.devices or max(1, self.runtime.device_count())
        if self.options.devices is not None or not self.runtime.supplied.folds_ordinals:
            # Those before the first that is not there.
            ordinals = visible_ordinals()
            there = itertools.takewhile(lambda ordinal: ordinal < count, ordinals or ())
            count = count if ordinals is None else len(list(there))
        self.key = f"{self.runtime.target} {self.options.key} visible={count}"
        return count

    def device(self, index: int) -> torch.device:
        """Return the target's device for one of the program's ordinals."""
        return self.runtime.device(self.target_index(index))

    def target_index(self, index: int) -> int:
        """Return the index of the target's device for one of the program's ordinals."""
        return index if index and index < self.runtime.device_count() else 0

    def is_targets(self, device: torch.device) -> bool:
        """Return whether a device is the target's, as torch reports it or, in traced code, as the program sees it."""
        return self.is_targets_type(device.type)

    def is_targets_type(self, kind: str) -> bool:
        """Return whether a device type is the target's, as torch names it or as the program sees it."""
        return kind in (self.device_type, self.shown_as)

    def program_device(self, index: int) -> torch.device:
        """Return the device that the program would spell for one of its ordinals."""
        return device_of(self.program, index)

    def shown(self, device: torch.device) -> torch.device:
        """Return a device as tensors on it report it."""
        known = self._shown.get(device)
        if known is None:
            known = device
            if self.shown_as is not None and device.type == self.device_type:
                # Devices such as meta have no index, but tensors of an accelerator always report one.
                known = device_of(self.shown_as, device.index or 0)
            self._shown[device] = known
        return known

    def redirect(self, value: Any, above: int = 2) -> torch.device | None:
        """Return the device to use for a device argument, or None if the argument needs no rewrite.

        Args:
            value: The argument.
            above: The number of innermost callers of the journal that belong to this package, with this function.
        """
        # Subclasses of these types may compare as they like, so the class is compared exactly.
        known: Any = self.thread.redirects.get(value, ()) if value.__class__ in _HASHED else ()
        if not known:
            return None if known is None else self._redirect_new(value)
        device, requested, done = known
        # An empty text marks a device of the target's own name, which is no replacement to report.
        if requested:
            self.journal.record(requested, done, _EXACT, above=above)
        return device

    def _redirect_new(self, value: Any) -> torch.device | None:
        """Resolve an argument that this thread has not seen yet, or whose answer is reported each time."""
        if not self.runtime.supplied.torch_knows_current:
            spells = value.index is None and value.type if isinstance(value, torch.device) else value
            if spells.__class__ is str and spells == self.device_type:  # the target, without an index
                return self.target
        spelling = parse(value)
        if spelling is None or not (spelling.accelerator in self.stood_for or ordinal_of(value) is not None):
            # None, or for a spelling of the target's own name on a simulated machine its device there.
            own = None
            on_machine = spelling is not None and spelling.accelerator == self.family != self.device_type
            if spelling is not None and on_machine and not self.thread.forced_cpu:
                own = self.device(self.thread.device_index if spelling.index is None else spelling.index)
            self._remember(value, None if own is None else (own, "", ""))
            return own
        folded = spelling.index is not None and spelling.index >= self.device_count
        # Once in the process, and only when a device is first asked for: a program that never does gets no notice.
        if self.runtime.degraded_notice:
            warn_once(self.runtime.degraded_notice)
        forced = self.thread.forced_cpu
        device = torch.device("cpu") if forced else self.device(self.ordinal(spelling))
        if forced or not folded:  # folding is reported as such
            done = str(self.shown(device))
            self.journal.record(str(value), done, Fidelity.EXACT)
            self._remember(value, (device, str(value), done))
        return device

    def _remember(self, value: Any, answer: tuple[torch.device, str, str] | None) -> None:
        # True and 1 hash alike, hence the exact class; see `_HASHED`.
        redirects = self.thread.redirects
        if value.__class__ in _HASHED and len(redirects) < _MAX_REDIRECTS:
            redirects[value] = answer

    def ordinal(self, spelling: Spelling) -> int:
        """Return which of the program's accelerators a spelling means.

        Raises:
            torch.AcceleratorError: ``devices`` were advertised, and the ordinal is beyond the last of them. The text
                is CUDA's.
            RuntimeError: ``CUDA_VISIBLE_DEVICES`` hides all of them.
        """
        # An empty `CUDA_VISIBLE_DEVICES` comes first: then not even ordinal 0 exists.
        if not self.device_count:
            raise RuntimeError("No CUDA GPUs are available")  # torch's own text
        if spelling.index is None:
            return self.thread.device_index
        if spelling.index < self.device_count:
            return spelling.index
        if not self.accepts(spelling.index):
            raise self._no_such_device(spelling.index)
        self.report(str(spelling), str(self.shown(self.device(0))), Fidelity.APPROXIMATE)
        return 0

    def _no_such_device(self, index: int) -> torch.AcceleratorError:
        error = torch.AcceleratorError("CUDA error: invalid device ordinal")
        more = spelled("devices", index + 1, self.way)
        if self.options.devices is None:  # the target says how many, and its own name is not the program's
            more = f"a target that ends in ':{index + 1}'"
        add_note(error, f"The program has {self.device_count} device(s). For more, use {more}.")
        return error

    def accepts(self, index: int) -> bool:
        """Return whether an ordinal is one of the program's accelerators, or is folded onto the first."""
        folds = self.options.devices is None and self.runtime.supplied.folds_ordinals
        return index >= 0 and (folds or index < self.device_count)

    def force_cpu(self) -> torch.device:
        """Send the rest of this scope to the CPU in this thread, until the thread leaves the scope."""
        self.thread.forced_cpu = True
        self.thread.redirects.clear()  # their answers were the accelerator
        return torch.device("cpu")

    def tell(self, event: str, *values: Any) -> None:
        """Tell the observers of streams of a call that orders work: ``event`` is their method."""
        for observer in [*self.stream_observers]:  # one that ends takes itself out
            getattr(observer, event)(*values)

    # ---- values ------------------------------------------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember that the program pinned this tensor, on a target that needs no page-locked memory."""
        self._pinned[tensor] = True
        # A view is another object with the same storage, so both are kept: the tensor for subclasses without a storage.
        for part in plain_parts(tensor):
            self._pinned_memory[part.untyped_storage()] = True
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the program pinned this tensor, or a tensor of whose memory it is a view."""
        # The usual case, without a lookup by a tensor's identity.
        if not (self._pinned.data or self._pinned_memory.data or self.registered_memory):
            return False
        if tensor in self._pinned:
            return True
        parts = plain_parts(tensor)  # torch too asks the values of a sparse tensor, which come last
        if not parts or parts[-1].untyped_storage() in self._pinned_memory:
            return bool(parts)
        address = parts[-1].data_ptr() if self.registered_memory and parts[-1].is_cpu else -1
        # What the program registered with the CUDA runtime.
        return any(start <= address < start + size for start, size in self.registered_memory.items())

    # ---- reports -----------------------------------------------------------------------------------------------------

    def report(self, requested: str, done: str, fidelity: Fidelity) -> bool:
        """Record that ``done`` was done in place of ``requested``.

        Returns:
            True the first time at a line of the program.

        Raises:
            FidelityError: The scope is strict and the difference matters. Hints with nothing to do are let pass.
        """
        entry = self.note(requested, done, fidelity)
        # The count is 1 only right after the first record at a line.
        return entry is not None and entry.count == 1

    def note(self, requested: str, done: str, fidelity: Fidelity) -> Entry | None:
        """Like :meth:`report`, but return the journal's entry, for its time and bytes; None if the journal is full."""
        if self.options.strict and fidelity.changes_numbers:
            raise FidelityError(requested, done)
        entry = self.journal.record(requested, done, fidelity)
        if entry is not None and entry.count == 1:
            # A library's line is where the call is, the program's line is where the user looks.
            through = f", asked for by {entry.library.file}:{entry.library.line}" if entry.library else ""
            where = f"{entry.site.file}:{entry.site.line}{through}"
            logger.info("%s -> %s (%s) at %s", requested, done, fidelity.value, where)
        return entry

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a supplied function with this context as its first argument, the same object each time."""
        found = self._bound.get(function)
        # Kept, because torch and programs compare functions by identity.
        if found is None:
            found = self._bound[function] = functools.wraps(function)(functools.partial(function, self))
        return found

    def start_thread(self) -> None:
        """Run ``thread.at_return``, which restores what this thread had in the context when it last left."""
        while self.thread.at_return:
            # Removed before it runs: a step that is interrupted does not run a second time on a state it has half
            # restored.
            self.thread.at_return.pop(0)()

    def finish_thread(self) -> None:
        """Undo what this thread did in the context. Called when the thread's last entry was left."""
        thread = self.thread
        if thread.forced_cpu:
            thread.forced_cpu = False
            thread.redirects.clear()
        while thread.at_exit:
            # The last one registered is the first one undone, as with nested blocks.
            thread.at_exit.pop()()
        # Other threads may still be in the context, and read these values.
        if not self.entries:
            self.written_values.clear()
            self.user, self._initialized = None, False

    def __repr__(self) -> str:
        return f"<Context target={self.runtime.target!r}>"


_parse_visible_devices = torch.cuda._parse_visible_devices


def visible_ordinals() -> list[int] | None:
    """Return the ordinals in ``CUDA_VISIBLE_DEVICES``, as torch's parser reads them; None where it is not set.

    UUIDs name no simulated device.
    """
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return None
    try:
        return [each for each in _parse_visible_devices() if isinstance(each, int)]
    except ValueError:  # a sign without a number, which the parser takes for one
        return []
