"""The memory of simulated devices at their peak, by what it is for, and the GPUs that have so much.

Blocks are counted as the allocator gives them out. The purpose of a block is known at its first
use: a parameter when it is an argument of an operator, gradients and states when an optimizer
steps, or at the end. That may come after the peak.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchdevice.kernel import thread_state
from torchdevice.kernel.devices.device_memory import Block
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.journal.callers import Site, caller_frame, program_frame, site_of
from torchdevice.kernel.python.uncaught_errors import last_place
from torchdevice.kernel.stand_ins import tensors
from torchdevice.plan import fitting, other_processes, workspaces
from torchdevice.plan.lost_errors import LostErrors
from torchdevice.report import Report, formatting, source
from torchdevice.simulation import model_lookup
from torchdevice.simulation.observe.assumed_values import ASSUMED, FEWEST, MOST, SKIPS, STEPS
from torchdevice.torch_modules.distributed.process_groups import FAKE_RANKS, FakeRanks

if TYPE_CHECKING:
    from torchdevice.plan.traffic import Traffic

WEIGHTS = "weights"
GRADIENTS = "gradients"
STATE = "optimizer state"
OTHER = "activations"

KINDS = (WEIGHTS, GRADIENTS, STATE, OTHER)

_PARAMETER = torch.nn.Parameter

_REMEMBERED = 1 << 17
"""How many blocks that have ended are kept for the picture: a plan need not end."""

_BETWEEN = 1024
"""How many blocks come and go between two reports of progress."""

COLUMNS = 240
"""How many moments a picture shows."""


@dataclass(slots=True)
class _Held:
    """A block in use, or one that was. Times count blocks given out and given back."""

    device: int
    size: int
    born: int
    kind: str = OTHER
    died: int | None = None


@dataclass
class Peak:
    """The memory of one device at the moment when the most of it was in use.

    Attributes:
        allocated: The bytes in use then.
        reserved: The most bytes that the allocator had of the driver; the figure of nvidia-smi
            without the context.
        sites: The line of the program that asked for the last block, and that of a library where
            that asked for it.
        handles: Of which threads there is a handle of cuBLAS: of the backward pass (True), and of
            the others (False).
    """

    allocated: int = 0
    reserved: int = 0
    sites: tuple[Site, ...] = ()
    handles: set[bool] = field(default_factory=set)
    _now: int = 0
    _segments: int = 0
    _born: int = 0
    _freed: list[_Held] = field(default_factory=list)


class Peaks(Observer):
    """Follows the memory of a context's devices, by observing blocks and operators.

    Attributes:
        devices: Index -> the peak of the device.
        context: The bytes that CUDA's context takes of a GPU.
        limit: The bytes of memory that a device has; of several models the least.
        capabilities: The compute capability of each device.
        progress: Gets the progress now and then: the number of blocks that came and went, the most
            bytes in use, and the present work.
        doing: Returns what is done, for the progress; empty for the program.
        traffic: The traffic of a rank of several.
        ran_out: Line of the program -> how often memory ran out there.
        gave_up: Whether the program has asked for no memory since it ran out.
        refused: The most bytes of a device that would have been in use where memory ran out.
        lost: The errors that ended a part of the program, such as a thread.
        placed: The lines that ask for memory, as :func:`sites_here`, while others do it for them.
    """

    context: Any = model_lookup.CONTEXT
    limit = 0
    capabilities: tuple[tuple[int, int], ...] = ()
    progress: Callable[[int, int, str], None] | None = None
    doing: Callable[[], str] = str

    traffic: Traffic | None = None
    placed: tuple[Site, ...] | None = None
    _followed: Any = None

    def __init__(self) -> None:
        self.devices: dict[int, Peak] = {}
        self.ran_out: Counter[Site] = Counter()
        self.gave_up = False
        self.refused = 0
        self.lost = LostErrors()
        self._held: dict[int, _Held] = {}
        self._ended: deque[_Held] = deque(maxlen=_REMEMBERED)
        self._clock = itertools.count()
        self._undo: list[Callable[[], object]] = []

    def follow(self, ranks: FakeRanks | None = None) -> None:
        """Follow the devices of this thread's scope until :meth:`stop` is called, or the process
        ends.

        Args:
            ranks: Which rank this process is, and of how many. The others do not run.
        """
        context = thread_state.state.context
        assert context is not None
        self._followed = context
        if context.options.context is not None:
            self.context = context.options.context
        indices = range(context.devices.count)
        self.limit = min(map(context.runtime.total_memory, indices), default=0)
        self.capabilities = tuple(context.devices.figure("capability", index) for index in indices)
        if ranks is not None:
            # Here, because they need distributed.
            from torchdevice.plan.traffic import Traffic
            from torchdevice.torch_modules.distributed import fake_works

            fake_works.give_results()
            context.settings[FAKE_RANKS] = ranks
            self.traffic = Traffic()
            self._undo.append(self.traffic.follow(context))
        self._undo.append(context.observers.add(self))
        self._undo.append(self.lost.follow())
        for register in (
            optimizers.register_optimizer_step_pre_hook,
            optimizers.register_optimizer_step_post_hook,
        ):
            self._undo.append(register(self._stepped).remove)

    def stop(self) -> None:
        """Follow the devices no more. The scope must still be active."""
        while self._undo:
            self._undo.pop(0)()

    @property
    def chosen_workspace(self) -> int | None:
        """The bytes of a workspace of cuBLAS that the program chose."""
        return None if self._followed is None else workspaces.chosen(self._followed)

    def kinds(self, index: int) -> Counter[str]:
        """Return the bytes of each kind at the peak of a device."""
        there = [each for each in gc.get_objects() if issubclass(type(each), _PARAMETER)]
        self._mark((each.grad for each in there if each.grad is not None), GRADIENTS)
        self._mark(there, WEIGHTS)
        peak, found = self.devices[index], Counter[str]()
        held = [each for each in self._held.values() if each.device == index]
        for each in held + peak._freed:
            if each.born <= peak._born:
                found[each.kind] += each.size
        return found

    def timeline(self, index: int) -> list[list[int]]:
        """Return the bytes per kind on a device over time, in columns. Call :meth:`kinds` first.

        A column shows the moment of its span at which the most memory was in use.
        """
        # Blocks before those remembered are unknown, so the picture begins after them.
        begin = self._ended[0].died or 0 if len(self._ended) == _REMEMBERED else 0
        span = next(self._clock) - begin
        blocks = [each for each in (*self._ended, *self._held.values()) if each.device == index]
        changes = [(each.born, each.kind, each.size) for each in blocks]
        changes += [(each.died, each.kind, -each.size) for each in blocks if each.died is not None]
        in_use = dict.fromkeys(KINDS, 0)
        columns: list[list[int]] = []
        by_column = itertools.groupby(
            sorted(changes), lambda each: max(0, each[0] - begin) * COLUMNS // span
        )
        for column, changed in by_column:
            columns += [list(in_use.values())] * (column - len(columns))
            most = list(in_use.values())
            for _, kind, change in changed:
                in_use[kind] += change
                most = max(most, list(in_use.values()), key=sum)
            columns.append(most)
        return columns + [list(in_use.values())] * (COLUMNS - len(columns))

    # ---- blocks ----------------------------------------------------------------------------------

    def allocated(self, block: Block) -> None:
        peak = self.devices.setdefault(block.device, Peak())
        held = self._held[block.address] = _Held(block.device, block.size, next(self._clock))
        peak._now += block.size
        self.gave_up = False
        if self.progress is not None and held.born % _BETWEEN == 0:
            most = max(each.allocated for each in self.devices.values())
            self.progress(held.born, most, self.doing())
        if peak._now > peak.allocated:
            peak.allocated, peak._born = peak._now, held.born
            peak.sites = self.placed or sites_here()
            peak._freed.clear()

    def freed(self, address: int) -> None:
        held = self._held.pop(address, None)
        if held is not None:
            held.died = next(self._clock)
            self._ended.append(held)
            peak = self.devices[held.device]
            peak._now -= held.size
            if held.born <= peak._born:
                peak._freed.append(held)

    def segment_changed(self, action: str, segment: Block, stream: int) -> None:
        peak = self.devices.setdefault(segment.device, Peak())
        peak._segments += (
            segment.size if action in ("segment_alloc", "segment_map") else -segment.size
        )
        peak.reserved = max(peak.reserved, peak._segments)

    def memory_ran_out(self, ordinal: int, wanted: int, total: int, free: int) -> None:
        self.ran_out[(self.placed or sites_here())[0]] += 1
        self.gave_up = True
        self.refused = max(self.refused, wanted + self.devices.setdefault(ordinal, Peak())._now)

    # ---- what they are for -----------------------------------------------------------------------

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator, and note parameters among its arguments and uses of cuBLAS."""
        if op.overloadpacket in workspaces.PRODUCTS:
            self._product(args)
        for each in tensors((args, kwargs)):
            # Most products are given a view of a parameter.
            if isinstance(each, _PARAMETER) or isinstance(each._base, _PARAMETER):
                self._mark([each], WEIGHTS)
        return kernel(*args, **kwargs)

    def _product(self, args: Iterable[Any]) -> None:
        with torch._C.DisableTorchFunction():
            index = next((each.get_device() for each in args if isinstance(each, torch.Tensor)), -1)
        if index >= 0:
            self.devices.setdefault(index, Peak()).handles.add(workspaces.in_backward())

    def _stepped(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._mark(tensors(list(optimizer.state.values())), STATE)
        self._mark((each.grad for each in parameters if each.grad is not None), GRADIENTS)
        self._mark(parameters, WEIGHTS)

    def _mark(self, found: Iterable[torch.Tensor], kind: str) -> None:
        with torch._C.DisableTorchFunction():
            for each in _parts(found):
                # Not on a device; a compiler's tensor.
                with contextlib.suppress(KeyError, RuntimeError):
                    self._held[each.untyped_storage().data_ptr()].kind = kind


def sites_here() -> tuple[Site, ...]:
    """Return the line of the program that asks for memory, and that of a library that does."""
    caller = caller_frame()
    program = program_frame(caller)[0] or caller
    return tuple(map(site_of, dict.fromkeys((program, caller))))


def _parts(found: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield strided tensors: themselves, and those that tensors of other classes consist of."""
    for each in found:
        if is_traceable_wrapper_subclass(each):
            # A DTensor's mesh is one, too.
            inner = (getattr(each, name) for name in each.__tensor_flatten__()[0])
            yield from _parts(part for part in inner if isinstance(part, torch.Tensor))
        elif each.layout is torch.strided:
            yield each


def data(peaks: Peaks, report: Report, error: BaseException | None) -> dict[str, Any]:
    """Return a plan as data for JSON.

    Args:
        peaks: The memory of the devices.
        report: What the program asked for, by line.
        error: The error that ended the program early: an exception that nobody caught, or the
            ``SystemExit`` of a status that is not 0.
    """
    devices = [_device(peaks, index) for index in sorted(peaks.devices)]
    others = other_processes.of(report)
    # Two of each: a step of training has so many.
    of_cublas = 2 * max(map(workspaces.size, peaks.capabilities), default=0)
    least = max(
        fitting.at_least(devices, peaks.context),
        other_processes.least(others, peaks.context),
        _refused(peaks, error) + peaks.context,
    )
    # Refused memory is in no peak.
    need = max(other_processes.most(devices, others, peaks.context, of_cublas), least)
    index = max(peaks.devices, key=lambda each: _peak(peaks, each), default=None)
    if index is None or peaks.chosen_workspace is not None:
        more = None  # they are as large on every GPU
    else:
        more = fitting.Workspaces(len(peaks.devices[index].handles), peaks.capabilities[index])
    evidence = _evidence(peaks, error, devices, others)
    fits = [*fitting.fits(need, least, more, evidence=evidence)]
    assumed = [*_assumed(report)]
    return {
        "program": formatting.program(report),
        "finished": _is_finished(peaks, error, others),
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "ended": _ended(peaks, error, others),
        "advice": _advice(error),
        "ran out": [
            {"lines": [f"{site.file}:{site.line}"], "times": times}
            for site, times in peaks.ran_out.items()
        ],
        "devices": devices,
        "other processes": others,
        "traffic": None if peaks.traffic is None else peaks.traffic.data(),
        "context": peaks.context,
        "needs": need,
        "at least": least,
        "smallest": (fitting.smallest(fits) or {}).get("model"),
        "fits": fits,
        "macs": [*fitting.macs(need, least, evidence=evidence)],
        "versions": versions(),
        "assumed": assumed,
        "bound": next((_BOUNDS[each["value"]] for each in assumed if each["value"] in _BOUNDS), ""),
    }


def _evidence(
    peaks: Peaks, error: BaseException | None, devices: list[Any], others: list[dict[str, Any]]
) -> fitting.Evidence:
    """Return the evidence of a plan, which depends on the end of its program."""
    used = devices or any(each["devices"] for each in others)
    finished = _is_finished(peaks, error, others)
    return fitting.Evidence(
        finished=finished and bool(used),
        too_little=peaks.limit if _refused(peaks, error) else 0,
        adapted_to=peaks.limit if peaks.ran_out and finished else 0,
        is_range=bool(others),
    )


def _refused(peaks: Peaks, error: BaseException | None) -> int:
    """Return the bytes that were refused where the program or a part of it ended, or asked for no
    more, then.
    """
    ended = peaks.gave_up or isinstance(error, torch.OutOfMemoryError)
    ended = ended or any(each.ran_out for each in peaks.lost.found())
    return peaks.refused if ended else 0


def _is_finished(
    peaks: Peaks, error: BaseException | None, others: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether a program came to its end with all its parts and processes, and not because
    memory ran out.
    """
    whole = error is None and not peaks.gave_up and not peaks.lost.found()
    return whole and all(each["ended"] for each in others)


def _ended(peaks: Peaks, error: BaseException | None, others: Sequence[Mapping[str, Any]]) -> str:
    """Describe the early end of a program; empty if it finished."""
    if error is not None:
        place = last_place(error)
        # The program of --model is this package's, and no line of the user's.
        if not place or place.startswith("<frozen "):
            return _named(error)
        return f"{_named(error)} at {place}"
    lost = peaks.lost.found()
    if lost:
        return str(lost[0])
    if peaks.gave_up:
        *_, last = peaks.ran_out
        place = source.short(f"{last.file}:{last.line}")
        return f"memory ran out at {place}, and the program asked for no more"
    missing = [each["name"] for each in others if not each["ended"]]
    return f"{' and '.join(missing)} did not finish" if missing else ""


_BOUNDS = {MOST: "upper", STEPS: "upper", FEWEST: "lower", SKIPS: "lower"}
"""The assumption about values that memory depends on -> the bound that the plan then is."""


def _assumed(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the assumptions about values, with their lines."""
    for row in report.rows:
        if row.done.startswith(ASSUMED):
            yield {
                "lines": [f"{each.file}:{each.line}" for each in (row, *row.libraries[:1])],  # type: ignore[attr-defined]
                "operator": row.asked,
                "value": row.done.removeprefix(ASSUMED),
            }


_LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "lightning",
    "diffusers",
    "deepspeed",
    "bitsandbytes",
)
"""Libraries whose versions need different memory for the same program."""


def versions() -> dict[str, str]:
    """Return the versions of the program's imported libraries, for which a plan holds."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return {name: str(version) for name, version in found.items() if version}


def _named(error: BaseException) -> str:
    """Return the class of an error; for the end of a program, its status."""
    if isinstance(error, SystemExit):
        return f"exit status {error.code if isinstance(error.code, int) else 1}"
    return type(error).__name__


def _advice(error: BaseException | None) -> str:
    """Return advice on an error, if a plan can do without the failed request."""
    if type(error).__name__ in _OF_LAUNCHERS:
        return _WITHOUT_LAUNCHER
    if not isinstance(error, OSError):
        return ""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _WITHOUT_WEIGHTS if "from_pretrained" in names else ""


_OF_LAUNCHERS = ("ChildFailedError", "ProcessRaisedException")
"""The errors of torchrun and of ``torch.multiprocessing.spawn`` for a rank that failed."""

_WITHOUT_LAUNCHER = (
    "Ranks that exchange tensors are planned without a launcher, each as one of several: "
    "'torchdevice plan --world-size N SCRIPT'."
)

_WITHOUT_WEIGHTS = (
    "A plan needs no weights: use 'torchdevice plan --model NAME', or make the model of its "
    "configuration (AutoModel.from_config) under torch.device('cuda'); HF_HUB_OFFLINE=1 saves the "
    "retries without a network."
)


def _workspaces(peaks: Peaks, index: int) -> int:
    size = peaks.chosen_workspace
    if size is None:
        size = workspaces.size(peaks.capabilities[index])
    return len(peaks.devices[index].handles) * size


def _peak(peaks: Peaks, index: int) -> int:
    """Return the bytes that a device needs at its peak, with the workspaces."""
    return peaks.devices[index].reserved + _workspaces(peaks, index)


def _device(peaks: Peaks, index: int) -> dict[str, Any]:
    peak, kinds = peaks.devices[index], peaks.kinds(index)
    return {
        "device": f"cuda:{index}",
        **{kind: kinds[kind] for kind in KINDS},
        "workspaces": _workspaces(peaks, index),
        "fragments": peak.reserved - peak.allocated,
        "peak": _peak(peaks, index),
        "lines": [f"{site.file}:{site.line}" for site in peak.sites],
    }
