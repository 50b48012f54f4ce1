"""Every operator of torch's database in half precision on a simulated GPU, against float32.

The calls are those of torch's own samples (``torch.testing._internal.common_methods_invocations``),
enlarged along their first dimension to about 100,000 elements where the operator allows that. The
times are processor times.
"""

from __future__ import annotations

import itertools
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo
from torch.utils import _pytree as pytree

import torchdevice
from benchmarks.progress import track

FLOAT32, HALVES = torch.float32, (torch.float16, torch.bfloat16)

ELEMENTS = 100_000

MOST = 3.0
"""The ratio to float32 from which an operator needs a reason."""

_CONVERTED = "float32 and back: the conversions take longer than the kernel in float32"
_SCALAR = (
    "torch's CPU kernel has no vector code for the dtype, nor would float32 and back be faster"
)
_CONVERSION = "a conversion that is none in float32, or that torch does element by element"

REASONS: dict[str, str] = {
    **dict.fromkeys(
        [
            "dot",
            "inner",
            "linalg_norm",
            "linalg_norm_subgradients_at_zero",
            "linalg_vector_norm",
            "logit",
            "masked_norm",
            "nn_functional_tanhshrink",
            "norm_fro",
            "square",
            "vdot",
        ],
        _CONVERTED,
    ),
    **dict.fromkeys(
        [
            "_upsample_bilinear2d_aa",
            "addr",
            "amax",
            "amin",
            "argmax",
            "argmin",
            "flip",
            "frac",
            "nn_functional_avg_pool3d",
            "nn_functional_huber_loss",
            "nn_functional_instance_norm",
            "nn_functional_multi_margin_loss",
            "nn_functional_nll_loss",
            "outer",
            "prod",
            "scatter_add",
            "sgn",
            "stft",
        ],
        _SCALAR,
    ),
    **dict.fromkeys(["bfloat16", "bool", "float", "half"], _CONVERSION),
    "corrcoef": "oneDNN's bfloat16 product of a matrix with a single row",
    "nextafter": "the neighbours of a half number are not those of the float32 number",
    "nn_functional_bilinear": "composed of products by element, each rounded to half",
    "masked_normalize": "composed of several operators, each rounded to half",
    "nn_functional_conv_transpose2d": "oneDNN has no float16 kernel of transposed convolutions",
}
"""Operator -> why it takes more than :data:`MOST` times as long as in float32."""

_SAMPLES = 40
"""How many samples of an operator are looked at."""

_MOST_BYTES = 1 << 30
"""How much memory a call may take."""

_MOST_SECONDS = 0.1
"""How long a call may take in float32. A slower one is not enlarged."""

_ROUNDS, _ENOUGH = 3, 0.002
"""How often a call is timed, and for how many seconds at least."""


class Measured(NamedTuple):
    """The times of an operator.

    Attributes:
        elements: The elements of the largest tensor of the call.
        seconds: Dtype -> the processor time of a call; no entry for a dtype that CUDA refuses.
    """

    elements: int
    seconds: dict[torch.dtype, float]

    def ratio(self, dtype: torch.dtype) -> float:
        """Return the time in a dtype, as a multiple of that in float32; 0 for a refused one."""
        return self.seconds.get(dtype, 0.0) / self.seconds[FLOAT32]


def measure(only: str = "") -> dict[str, Measured]:
    """Return the times of each operator whose name contains ``only``, by name."""
    found: dict[str, Measured] = {}
    _limit_memory()
    operators = [
        op for op in op_db if only in op.formatted_name and {FLOAT32, *HALVES} & set(op.dtypes)
    ]
    with warnings.catch_warnings(), torchdevice.simulate(random="cpu"), torch.no_grad():
        warnings.simplefilter("ignore")
        for op in track(operators, "operators"):
            try:
                call = next(_calls(op), None)
            except RuntimeError:  # a sample that has no place on the device
                continue
            if call is not None:
                found[op.formatted_name] = _timed(op, *call)
    return found


def _limit_memory() -> None:
    """Let calls fail whose enlarged samples have results of gigabytes, such as outer products."""
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + _MOST_BYTES, used + _MOST_BYTES))


def _calls(op: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number of elements and the arguments of a call in float32 that works, at most
    one.
    """
    for given in _candidates(op):
        elements = max((each.numel() for each in _tensors(given)), default=0)
        start = time.process_time()
        try:
            op(*given[0], **given[1])
        except Exception:  # an enlarged sample may be none that the operator takes
            continue
        if elements and time.process_time() - start < _MOST_SECONDS:
            yield elements, given
            return


def _candidates(op: Any) -> Iterator[tuple[Any, Any]]:
    """Yield arguments to try, the large ones first."""
    x = torch.rand(100, ELEMENTS // 100, device="cuda") * 0.8 + 0.1
    if isinstance(op, UnaryUfuncInfo):
        yield (x,), {}
    elif isinstance(op, BinaryUfuncInfo):
        yield (x, x.flip(0)), {}
    elif isinstance(op, ReductionOpInfo):
        yield (x,), {"dim": 1}
    try:
        samples = list(itertools.islice(op.sample_inputs("cpu", FLOAT32), _SAMPLES))
    except Exception:  # some samples need a package that is not installed
        return
    samples = [each for each in samples if isinstance(each.input, torch.Tensor)]
    samples.sort(key=lambda each: -each.input.numel())
    for sample in samples[:3]:
        yield _moved(_enlarged(sample))
    for sample in samples[:3]:
        yield _moved(((sample.input, *sample.args), sample.kwargs))


def _enlarged(sample: Any) -> tuple[Any, Any]:
    """Return the arguments of a sample, with the tensors of its first dimension repeated."""
    given = (sample.input, *sample.args), sample.kwargs
    size = sample.input.shape[0] if sample.input.dim() else 0
    times = max(1, ELEMENTS // max(1, sample.input.numel()))

    def repeated(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == size:
            return value.detach().repeat(times, *[1] * (value.dim() - 1))
        return value

    return pytree.tree_map(repeated, given)  # type: ignore[no-any-return]


def _moved(given: Any) -> Any:
    def moved(value: Any) -> Any:
        return value.detach().cuda() if isinstance(value, torch.Tensor) else value

    return pytree.tree_map(moved, given)


def _tensors(given: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]


def _timed(op: Any, elements: int, given: Any) -> Measured:
    calls: dict[torch.dtype, Callable[[], Any]] = {}
    for dtype in (FLOAT32, *HALVES):
        args, kwargs = pytree.tree_map(
            lambda value, dtype=dtype: (
                value.to(dtype)
                if isinstance(value, torch.Tensor) and value.dtype is FLOAT32
                else value
            ),
            given,
        )
        calls[dtype] = lambda args=args, kwargs=kwargs: op(*args, **kwargs)
    calls = {dtype: call for dtype, call in calls.items() if _works(call)}
    best = dict.fromkeys(calls, float("inf"))
    # Interleaved, so that a slow moment meets all dtypes; the best, because others only add time.
    for _ in range(_ROUNDS):
        for dtype, call in calls.items():
            best[dtype] = min(best[dtype], _seconds(call))
    return Measured(elements, best)


def _works(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:  # CUDA has no kernel for the dtype
        return False
    return True


def _seconds(call: Callable[[], Any]) -> float:
    """Return the processor time of a call, of as many calls as take a few milliseconds."""
    count, start = 0, time.process_time()
    while (spent := time.process_time() - start) < _ENOUGH or not count:
        call()
        count += 1
    return spent / count


def table(measured: dict[str, Measured]) -> str:
    """Return a table in Markdown of the operators beyond :data:`MOST`, with their reasons."""
    slow = {
        name: each
        for name, each in measured.items()
        if any(each.ratio(dtype) > MOST for dtype in HALVES)
    }
    lines = [
        f"{len(measured)} operators, {len(slow)} of them beyond {MOST:.0f} times float32\n",
        "| operator | elements | float32, us | float16 | bfloat16 | reason |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in sorted(slow.items(), key=lambda item: -max(map(item[1].ratio, HALVES))):
        ratios = " | ".join(f"{each.ratio(dtype):.1f}" for dtype in HALVES)
        took = f"{each.seconds[FLOAT32] * 1e6:.0f}"
        reason = REASONS.get(name, "**none**")
        lines.append(f"| {name} | {each.elements:,} | {took} | {ratios} | {reason} |")
    return "\n".join(lines)
