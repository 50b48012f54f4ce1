"""A program's view of a scope: the target, its reported answers, and per-thread devices, streams.

A scope makes a :class:`Context` when it is entered (``scope/scope.py``). Everything else in this
package works through the context. The context itself knows no patch, no supplied name and no
engine.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchdevice.errors import FidelityError
from torchdevice.kernel.devices.device_strings import Spelling, ordinal_of, parse
from torchdevice.kernel.devices.made_streams import MadeStreams
from torchdevice.kernel.devices.observer import Observer, Observers
from torchdevice.kernel.devices.runtime import Runtime, device_of
from torchdevice.kernel.driver_use import DriverUse
from torchdevice.kernel.entries import Entries
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.journal.journal import Entry, Journal
from torchdevice.kernel.options import Options, PerDevice, of_device, spelled
from torchdevice.kernel.pinned_memory import PinnedMemory
from torchdevice.kernel.program_names import ProgramNames
from torchdevice.kernel.python.environment import keys_of, set_of
from torchdevice.kernel.python.logs import logger, warn_once
from torchdevice.kernel.python.uncaught_errors import add_note
from torchdevice.kernel.supplied_members import SuppliedMembers
from torchdevice.kernel.target_dtypes import TargetDtypes
from torchdevice.kernel.thread_values import ThreadValues

# Enough for every spelling of a program. The limit keeps endless new texts from filling memory.
_MAX_REDIRECTS = 4096

_EXACT = Fidelity.EXACT  # reading a member of an enumeration takes longer than a global name

_HASHED = frozenset({str, torch.device, int})
"""Types whose equal values mean equal devices: True equals 1, and is no device."""


Join = Callable[["Context", bool], AbstractContextManager[Any]]
"""Returns the context manager of a thread that joins a context; the bool sends that thread to the
CPU.
"""


class ProgramDevices:
    """The accelerators that the program sees, and the target's device for each.

    Args:
        context: The context of the program.

    Attributes:
        machine: The devices that a scope on simulated devices works on, see
            ``simulation/machine.py``; else None.
        key: The target, every option and the number of devices as text, on which compiled code is
            guarded.
        are_several: Whether ``devices=`` shows the program several accelerators.
        are_folded: Whether one device with a memory of its own is several of those accelerators.
        redirects_only: Whether a call that names a device needs no more than the device, and
            perhaps its side marked.
    """

    machine: Any = None

    def __init__(self, context: Context):
        self._context = context
        self._options = context.options
        self._runtime = context.runtime
        self._thread = context.thread
        self._count: int | None = None
        self._visible: tuple[int, ...] = ()
        self._shown: dict[torch.device, torch.device] = {}
        runtime, devices = context.runtime, context.options.devices or 1
        self.are_several = devices > 1
        # `devices=` on a target with as many devices of its own folds nothing.
        own_memory = self.are_several and not runtime.shares_host_memory
        self.are_folded = own_memory and devices > runtime.device_count()
        self.redirects_only = (
            runtime.has_peaks and not context.dtypes.fits_conversions and not self.are_folded
        )
        # Computes `key`, which compiled code needs before anybody asks for the device count.
        self.count_again()

    @property
    def current(self) -> torch.device:
        """The device that stands in for the program's current accelerator."""
        return self.at(self._thread.device_index)

    @property
    def count(self) -> int:
        """How many accelerators the program sees.

        ``CUDA_VISIBLE_DEVICES`` limits the number under ``devices=`` and on simulated devices. The
        variable counts until the program first uses the accelerator, as in CUDA, because programs
        set it before.
        """
        if self._count is not None:
            return self._count
        count = self.count_again()
        if self._context.driver.is_initialized:
            self._count = count
        return count

    def fix_count(self) -> None:
        """Count the accelerators for the last time in this process."""
        self._count = self.count_again()

    def count_again(self) -> int:
        """Return the number of accelerators, and let the next read of ``count`` recount."""
        self._count, self._visible = None, ()
        count = self._options.devices or max(1, self._runtime.device_count())
        if self._options.devices is not None or not self._runtime.supplied.folds_ordinals:
            # Those before the first that is not there.
            ordinals = visible_ordinals()
            self._visible = tuple(
                itertools.takewhile(lambda ordinal: ordinal < count, ordinals or ())
            )
            count = count if ordinals is None else len(self._visible)
        self.key = f"{self._runtime.target} {self._options.key} visible={count}"
        return count

    def figure(self, name: str, index: int) -> Any:
        """Return the value of an option for one of the program's ordinals."""
        value = getattr(self._options, name)
        if isinstance(value, PerDevice):
            return of_device(value, self.machine_number(index))
        return value

    def machine_number(self, index: int) -> int:
        """Return the machine's number of an ordinal that ``CUDA_VISIBLE_DEVICES`` renumbers."""
        exists = index < self.count  # the first read of the variable
        return self._visible[index] if exists and self._visible else index

    def at(self, index: int) -> torch.device:
        """Return the target's device for one of the program's ordinals."""
        return self._runtime.device(self.target_index(index))

    def target_index(self, index: int) -> int:
        """Return the index of the target's device for one of the program's ordinals."""
        return index if index and index < self._runtime.device_count() else 0

    def is_targets(self, device: torch.device) -> bool:
        """Return whether a device is the target's, as torch or (traced) the program names it."""
        return self.is_targets_type(device.type)

    def is_targets_type(self, kind: str) -> bool:
        """Return whether a device type is the target's, as torch or the program names it."""
        return kind in (self._context.device_type, self._context.shown_as)

    def of_program(self, index: int) -> torch.device:
        """Return the device that the program would spell for one of its ordinals."""
        return device_of(self._context.program, index)

    def shown(self, device: torch.device) -> torch.device:
        """Return a device as tensors on it report it."""
        known = self._shown.get(device)
        if known is None:
            known = device
            if self._context.shown_as is not None and device.type == self._context.device_type:
                # Devices such as meta have no index; an accelerator's tensors always have one.
                known = device_of(self._context.shown_as, device.index or 0)
            self._shown[device] = known
        return known

    def ordinal(self, spelling: Spelling) -> int:
        """Return which of the program's accelerators a spelling means.

        Raises:
            torch.AcceleratorError: ``devices`` were advertised, and the ordinal is beyond the last
                of them. The text is CUDA's.
            RuntimeError: ``CUDA_VISIBLE_DEVICES`` hides all of them.
        """
        # An empty `CUDA_VISIBLE_DEVICES` comes first: then not even ordinal 0 exists.
        if not self.count:
            raise RuntimeError("No CUDA GPUs are available")  # torch's own text
        if spelling.index is None:
            return self._thread.device_index
        if spelling.index < self.count:
            return spelling.index
        if not self.accepts(spelling.index):
            raise self._no_such_device(spelling.index)
        self._context.report(str(spelling), str(self.shown(self.at(0))), Fidelity.APPROXIMATE)
        return 0

    def _no_such_device(self, index: int) -> torch.AcceleratorError:
        error = torch.AcceleratorError("CUDA error: invalid device ordinal")
        more = spelled("devices", index + 1, self._context.entries.way)
        # The target says how many, and its own name is not the program's.
        if self._options.devices is None:
            more = f"a target that ends in ':{index + 1}'"
        add_note(error, f"The program has {self.count} device(s). For more, use {more}.")
        return error

    def accepts(self, index: int) -> bool:
        """Return whether an ordinal is one of the program's, or is folded onto the first."""
        folds = self._options.devices is None and self._runtime.supplied.folds_ordinals
        return index >= 0 and (folds or index < self.count)


class Context:
    """A program's view of a scope.

    Args:
        options: The options of the scope.
        runtime: The target.
        journal: Counts rewritten and supplied calls.
        join: Lets another thread join the context.

    Attributes:
        device_type: The target's device type, as torch itself reports it.
        program: The accelerator that the program is written for.
        shown_as: The device type that tensors of the target report; None for the type that torch
            reports.
        policy: The checks before kernels of simulated devices, see ``simulation/policy.py``; else
            None.
        names: The accelerators whose names in torch the program may use.
        dtypes: The dtypes that the target lacks or is slow with.
        thread: The values that each thread has.
        driver: The program's use of the driver.
        entries: How threads are in the context.
        devices: The accelerators that the program sees.
        supplied: The values of supplied names.
        settings: The values that the program set and reads back, by name.
        streams: The streams that the program has made.
        observers: The observers of the program's work.
        pinned: The host memory that the program pinned.
    """

    policy: Any = None

    def __init__(self, options: Options, runtime: Runtime, journal: Journal, join: Join):
        self.options = options
        self.runtime = runtime
        self.journal = journal
        self.device_type = runtime.device_type
        # "any" is CUDA wherever there must be one answer, such as the available accelerator.
        self.program = "cuda" if options.written_for == "any" else options.written_for
        self.shown_as = self.program if options.identity == "program" else runtime.supplied.shown_as
        self.names = ProgramNames(options, runtime)
        self.dtypes = TargetDtypes(options, runtime)
        self.thread = ThreadValues()
        self.driver = DriverUse(runtime.supplied, self._begin)
        self.entries = Entries(functools.partial(join, self))
        self.devices = ProgramDevices(self)
        self.supplied = SuppliedMembers(self)
        self.settings: dict[Any, Any] = {}
        self.streams = MadeStreams()
        self.observers = Observers(self._watch_memory, self._settle)
        self.pinned = PinnedMemory()

    def _begin(self) -> None:
        """Called at the first use of the accelerator."""
        # A later change of `CUDA_VISIBLE_DEVICES` has no effect, as in CUDA.
        self.devices.fix_count()
        self._settle()

    def _settle(self) -> None:
        """Let the policy decide again what its kernels must ask."""
        if self.policy is not None:
            self.policy.settle()

    def _watch_memory(self, observer: Observer) -> Callable[[], None]:
        return self.runtime.supplied.watch_allocations(observer, self)

    def redirect(self, value: Any, above: int = 2) -> torch.device | None:
        """Return the device to use for a device argument, or None if the argument needs no rewrite.

        Args:
            value: The argument.
            above: The number of innermost callers of the journal that belong to this package, with
                this function.
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
        """Resolve an argument that is new to this thread, or whose answer is always reported."""
        torch_knows_current = self.runtime.supplied.torch_knows_current
        if not torch_knows_current and _names_without_index(value, self.device_type):
            return self.devices.current
        spelling = parse(value)
        if spelling is None:
            self._remember(value, None)
            return None
        if spelling.accelerator not in self.names.stood_for and ordinal_of(value) is None:
            own = self._on_machine(spelling)
            self._remember(value, None if own is None else (own, "", ""))
            return own
        folded = spelling.index is not None and spelling.index >= self.devices.count
        # Once in the process, and only when a device is first asked for: a program that never does
        # gets no notice.
        if self.runtime.degraded_notice:
            warn_once(self.runtime.degraded_notice)
        forced = self.thread.forced_cpu
        device = torch.device("cpu") if forced else self.devices.at(self.devices.ordinal(spelling))
        if forced or not folded:  # folding is reported as such
            done = str(self.devices.shown(device))
            self.journal.record(str(value), done, Fidelity.EXACT)
            self._remember(value, (device, str(value), done))
        return device

    def _on_machine(self, spelling: Spelling) -> torch.device | None:
        """Return a simulated machine's device for the target's own spelling; None elsewhere."""
        on_machine = spelling.accelerator == self.names.family != self.device_type
        if not on_machine or self.thread.forced_cpu:
            return None
        return self.devices.at(
            self.thread.device_index if spelling.index is None else spelling.index
        )

    def _remember(self, value: Any, answer: tuple[torch.device, str, str] | None) -> None:
        # True and 1 hash alike, hence the exact class; see `_HASHED`.
        redirects = self.thread.redirects
        if value.__class__ in _HASHED and len(redirects) < _MAX_REDIRECTS:
            redirects[value] = answer

    def report(self, requested: str, done: str, fidelity: Fidelity) -> Entry | None:
        """Record that ``done`` was done in place of ``requested``.

        Returns:
            The journal's entry, whose count is 1 the first time at a line of the program; None if
            the journal is full.

        Raises:
            FidelityError: The scope is strict and the difference matters. Hints with nothing to do
                are let pass.
        """
        if self.options.strict and fidelity.changes_numbers:
            raise FidelityError(requested, done)
        entry = self.journal.record(requested, done, fidelity)
        if entry is not None and entry.count == 1:
            # A library's line is where the call is, the program's line is where the user looks.
            if entry.library:
                through = f", asked for by {entry.library.file}:{entry.library.line}"
            else:
                through = ""
            where = f"{entry.site.file}:{entry.site.line}{through}"
            logger.info("%s -> %s (%s) at %s", requested, done, fidelity.value, where)
        return entry

    def __repr__(self) -> str:
        return f"<Context target={self.runtime.target!r}>"


def _names_without_index(value: Any, device_type: str) -> bool:
    """Return whether a device argument is a device type alone, without an index."""
    if isinstance(value, torch.device):
        return value.index is None and value.type == device_type
    return value.__class__ is str and value == device_type


_parse_visible_devices = torch.cuda._parse_visible_devices


_VISIBLE_DEVICES = keys_of(["CUDA_VISIBLE_DEVICES"])


def visible_ordinals() -> list[int] | None:
    """Return the ordinals of ``CUDA_VISIBLE_DEVICES`` as torch parses them; None if it is not set.

    UUIDs name no simulated device.
    """
    if "CUDA_VISIBLE_DEVICES" not in set_of(_VISIBLE_DEVICES):
        return None
    try:
        return [each for each in _parse_visible_devices() if isinstance(each, int)]
    except ValueError:  # a sign without a number, which the parser takes for one
        return []
