"""A device's answers without a bug: values, states, allocator's figures, refusals.

``python -m benchmarks.conformance`` asks a device, and ``tests/test_conformance.py`` asks the
simulated one. Every answer is made of strings, numbers, lists and dictionaries with keys that are
strings.
"""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sweeping import samples_of
from torch import nn
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.utils import _pytree as pytree

FACTS: dict[str, Callable[[], dict[str, Any]]] = {}

OK = "ok"

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


def fact(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    FACTS[function.__name__] = function
    return function


def answers(name: str) -> dict[str, Any]:
    """Ask the device for a fact."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.init()
        return FACTS[name]()


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ended(call: Callable[[], Any], *, waits: bool = True) -> str:
    """Return a call's error's class and text, or "ok"; also if the device errs later."""
    try:
        call()
        if waits:
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return OK


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda")


@fact
def conversions() -> dict[str, Any]:
    """Integers from floating point, as text, since JSON's numbers end at 2**53."""
    numbers = [
        float("nan"),
        float("inf"),
        -float("inf"),
        1e20,
        -1e20,
        300.0,
        -1.0,
        7e4,
        -7e4,
        3e9,
        -3e9,
        1e19,
        2.0**63,
    ]
    return {
        f"{short(one)} to {short(other)}": str(
            torch.tensor(numbers).to(one).cuda().to(other).tolist()
        )
        for one, other in itertools.product(FLOATS, (*INTEGERS, *UNSIGNED))
    }


@fact
def integers_by_zero() -> dict[str, Any]:
    calls: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
        "//": lambda a, b: a // b, "%": lambda a, b: a % b, "fmod": torch.fmod, "gcd": torch.gcd,
        "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "<< 70": lambda a, b: a << 70,
        ">> 70": lambda a, b: a >> 70, "// scalar": lambda a, b: a // 0, "% scalar": lambda a, b: a % 0,
    }  # fmt: skip
    found = {}
    for dtype, (name, call) in itertools.product(INTEGERS, calls.items()):
        a = torch.tensor([0, 1, 7, 100], dtype=dtype, device="cuda")
        a = a if dtype is torch.uint8 else torch.cat([a, -a])
        found[f"{short(dtype)} {name}"] = str(call(a, torch.zeros_like(a)).tolist())
    return found


@fact
def indices_of_ties() -> dict[str, Any]:
    def of(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers, device="cuda")

    nan = float("nan")
    return {
        "argmax": of(3, 3, 2).argmax().item(), "argmax of NaN": of(1, nan, nan).argmax().item(),
        "median": of(1, 1, 2, 2).median(0).indices.item(), "mode": of(1, 1, 2, 2).mode().indices.item(),
        "kthvalue": of(1, 1, 1, 2).kthvalue(2).indices.item(), "cummax": of(1, 1, 1, 2).cummax(0).indices.tolist(),
        "max": of(1, 1, 0).max(0).indices.item(), "topk": of(1, 1, 1, 1).topk(2).indices.tolist(),
        "sort": of(1, 1, 0, 1).sort().indices.tolist(), "min": of(1, 0, 0).min(0).indices.item(),
    }  # fmt: skip


@fact
def generators() -> dict[str, Any]:
    """By how much kernels move the offset on, and what the states look like."""
    found: dict[str, Any] = {}
    calls: dict[str, Callable[[int], Any]] = {
        "rand": lambda n: torch.rand(n, device="cuda"), "randn": lambda n: torch.randn(n, device="cuda"),
        "randint": lambda n: torch.randint(9, (n,), device="cuda"), "dropout": lambda n: F.dropout(ones(n)),
        "bernoulli": lambda n: ones(n).bernoulli(0.5), "exponential": lambda n: ones(n).exponential_(),
        "randperm": lambda n: torch.randperm(n, device="cuda"), "double": lambda n: ones(n).double().uniform_(),
        "multinomial": lambda n: torch.multinomial(ones(n), 2), "poisson": lambda n: torch.poisson(ones(n)),
    }  # fmt: skip
    for (name, call), count in itertools.product(calls.items(), (2, 1000, 10**6, 10**7)):
        torch.cuda.manual_seed(5)
        call(count)
        found[f"{name} {count}"] = torch.cuda.get_rng_state().tolist()
    torch.cuda.manual_seed(2**40 + 3)
    generator = torch.Generator("cuda")
    found["seed"] = [torch.cuda.get_rng_state().tolist(), torch.cuda.initial_seed()]
    found["new"] = [
        generator.get_state().tolist(),
        generator.initial_seed(),
        generator.get_offset(),
    ]
    found["state of the host"] = ended(lambda: generator.set_state(torch.get_rng_state()))
    found["eight bytes"] = ended(lambda: generator.set_state(torch.zeros(8, dtype=torch.uint8)))
    found["offset"] = [
        ended(lambda: generator.set_offset(6)),
        ended(lambda: generator.set_offset(8)),
    ]
    found["of the host"] = ended(lambda: torch.rand(2, device="cuda", generator=torch.Generator()))
    found["for the host"] = ended(lambda: torch.rand(2, generator=generator))
    return found


FIGURES = (
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "segment",
    "allocation",
)

SETTINGS = (
    "", "max_split_size_mb:200", "roundup_power2_divisions:4", "garbage_collection_threshold:0.6",
    "expandable_segments:True",
)  # fmt: skip


def _of_allocator(setting: str) -> dict[str, Any]:
    """The allocator's figures while a program with a fixed seed takes and frees memory."""
    if setting:
        torch.cuda.memory._set_allocator_settings(setting)
    draw, kept, steps = random.Random(7), list[torch.Tensor](), list[Any]()
    for step in range(120):
        if kept and draw.random() < 0.45:
            kept.pop(draw.randrange(len(kept)))
        else:
            size = int(2 ** draw.uniform(3, 27 if draw.random() < 0.5 else 15))
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        if step % 60 == 59:
            torch.cuda.empty_cache()
        stats = torch.cuda.memory_stats()
        steps.append([stats[f"{name}.all.current"] for name in FIGURES])
    stats = torch.cuda.memory_stats()
    return {
        "steps": steps,
        "peaks": [stats[f"{name}.all.peak"] for name in FIGURES],
        "others": [stats["num_alloc_retries"], stats["num_device_alloc"], stats["num_device_free"]],
        "segments": sorted(
            [each["total_size"], each["allocated_size"], len(each["blocks"])]
            for each in torch.cuda.memory_snapshot()
        ),
    }


for _setting in SETTINGS:
    FACTS[f"allocator {_setting}".strip()] = functools.partial(_of_allocator, _setting)


@fact
def attention() -> dict[str, Any]:
    """Which of the kernels of attention take what, as "fec": flash, memory-efficient, cuDNN."""
    kernels = {
        "f": can_use_flash_attention,
        "e": can_use_efficient_attention,
        "c": can_use_cudnn_attention,
    }
    variants = ("plain", "causal", "mask", "float mask", "dropout", "gradient", "groups", "one key")
    found = {}
    for dtype, width, variant in itertools.product(
        FLOATS, (4, 8, 40, 64, 100, 128, 136, 192, 256, 264), variants
    ):
        q = ones(2, 4, 16, width, dtype=dtype)
        k = ones(
            2,
            2 if variant == "groups" else 4,
            1 if variant == "one key" else 16,
            width,
            dtype=dtype,
        )
        q.requires_grad_(variant == "gradient")
        mask = {"mask": ones(16, 16).bool(), "float mask": ones(16, 16, dtype=dtype)}.get(variant)
        params = SDPAParams(
            q, k, k, mask, 0.1 * (variant == "dropout"), variant == "causal", variant == "groups"
        )
        found[f"{short(dtype)} {width} {variant}"] = "".join(
            n for n, takes in kernels.items() if takes(params)
        )
    return found


@fact
def two_dtypes() -> dict[str, Any]:
    """How layers end whose input and weights have two dtypes."""
    layers: dict[str, Callable[[torch.dtype, torch.dtype], Any]] = {
        "batch norm without statistics": lambda x, w: F.batch_norm(
            ones(2, 4, 3, 3, dtype=x), None, None, ones(4, dtype=w), ones(4, dtype=w), training=True
        ),
        "layer norm": lambda x, w: F.layer_norm(ones(2, 4, dtype=x), (4,), ones(4, dtype=w), ones(4, dtype=w)),
        "group norm": lambda x, w: F.group_norm(ones(2, 4, 3, dtype=x), 2, ones(4, dtype=w), ones(4, dtype=w)),
        "rms norm": lambda x, w: F.rms_norm(ones(2, 4, dtype=x), (4,), ones(4, dtype=w)),
        "convolution": lambda x, w: F.conv2d(ones(1, 4, 3, 3, dtype=x), ones(4, 4, 1, 1, dtype=w)),
        "linear": lambda x, w: F.linear(ones(2, 4, dtype=x), ones(4, 4, dtype=w)),
        "bias": lambda x, w: F.linear(ones(2, 4, dtype=x), ones(4, 4, dtype=x), ones(4, dtype=w)),
        "bmm": lambda x, w: torch.bmm(ones(2, 4, 4, dtype=x), ones(2, 4, 4, dtype=w)),
        "prelu": lambda x, w: F.prelu(ones(2, 4, dtype=x), ones(4, dtype=w)),
        "binary cross entropy": lambda x, w: F.binary_cross_entropy(ones(4, dtype=x), ones(4, dtype=w)),
        "cross entropy": lambda x, w: F.cross_entropy(
            ones(2, 4, dtype=x), torch.tensor([0, 1], device="cuda"), ones(4, dtype=w)
        ),
        "embedding bag": lambda x, w: F.embedding_bag(
            torch.tensor([[0, 1]], device="cuda"), ones(4, 4, dtype=x), mode="sum",
            per_sample_weights=ones(1, 2, dtype=w),
        ),
        "grid sample": lambda x, w: F.grid_sample(ones(1, 1, 4, 4, dtype=x), ones(1, 2, 2, 2, dtype=w)),
        "lerp": lambda x, w: torch.lerp(ones(4, dtype=x), ones(4, dtype=x), ones(4, dtype=w)),
    }  # fmt: skip
    found = {}
    for x, w in itertools.product(FLOATS, repeat=2):
        for name, call in layers.items():
            found[f"{name} {short(x)} {short(w)}"] = ended(functools.partial(call, x, w))
        for statistics, on in itertools.product(FLOATS, (False, True)):
            given = [ones(4, dtype=each) for each in (statistics, statistics, w, w)]
            with torch.backends.cudnn.flags(enabled=on):
                name = (
                    f"batch norm {short(x)} {short(w)} {short(statistics)}{' cudnn' if on else ''}"
                )
                found[name] = ended(
                    lambda x=x, given=given: F.batch_norm(ones(2, 4, 3, 3, dtype=x), *given)
                )
    return found


@fact
def grids() -> dict[str, Any]:
    """How many heads and batches the kernels of attention take."""
    found = {}
    kernels = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
    for (name, kernel), shape in itertools.product(
        kernels.items(), ((1, 65_535), (1, 65_536), (65_536, 1))
    ):
        x = ones(*shape, 1, 8, dtype=torch.float16)
        with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, kernel)):
            found[f"{name} {shape}"] = ended(lambda x=x: F.scaled_dot_product_attention(x, x, x))
    return found


@fact
def deterministic() -> dict[str, Any]:
    """What `torch.use_deterministic_algorithms` refuses."""
    index, x = torch.tensor([0, 1, 1], device="cuda"), ones(1, 2, 4, 4).requires_grad_()

    def back(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
        return lambda: call(x).sum().backward()

    calls: dict[str, Callable[[], Any]] = {
        "bincount": index.bincount, "bincount with weights": lambda: index.bincount(ones(3)),
        "histc": lambda: ones(4).histc(4), "cumsum": lambda: ones(4).cumsum(0), "median": lambda: ones(4).median(0),
        "kthvalue": lambda: ones(4).kthvalue(1), "put": lambda: ones(4).put_(index, ones(3)),
        "put accumulated": lambda: ones(4).put_(index, ones(3), True),
        "index_add": lambda: ones(4).index_add_(0, index, ones(3)),
        "scatter_add": lambda: ones(4).scatter_add_(0, index, ones(3)),
        "scatter_reduce": lambda: ones(4).scatter_reduce_(0, index, ones(3), "mean"),
        "index_put": lambda: ones(4).index_put_((index,), ones(3), True),
        "nll_loss2d": lambda: F.nll_loss(ones(1, 2, 2, 2), torch.zeros(1, 2, 2, device="cuda").long()),
        "ctc": lambda: F.ctc_loss(
            ones(4, 1, 3).requires_grad_().log_softmax(2), torch.tensor([[1]], device="cuda"), [4], [1]
        ).backward(),
        "adaptive_avg_pool2d": back(lambda x: F.adaptive_avg_pool2d(x, 2)),
        "adaptive_max_pool2d": back(lambda x: F.adaptive_max_pool2d(x, 2)),
        "max_pool3d": back(lambda x: F.max_pool3d(x[None], 2)),
        "avg_pool3d": back(lambda x: F.avg_pool3d(x[None], 2)),
        "fractional_max_pool2d": back(lambda x: F.fractional_max_pool2d(x, 2, 2)),
        **{
            mode: back(functools.partial(F.interpolate, scale_factor=2, mode=mode))
            for mode in ("bilinear", "nearest", "bicubic")
        },
        **{mode: back(functools.partial(F.pad, pad=(1, 1, 1, 1), mode=mode)) for mode in ("reflect", "replicate")},
        "grid_sample": back(lambda x: F.grid_sample(x, ones(1, 2, 2, 2))),
        "embedding_bag": lambda: (
            F.embedding_bag(index, ones(4, 4).requires_grad_(), index[:1], mode="max").sum().backward()
        ),
        "max_unpool2d": lambda: F.max_unpool2d(
            ones(1, 1, 2, 2), torch.tensor([[[[0, 1], [2, 3]]]], device="cuda"), 2
        ),
    }  # fmt: skip
    torch.use_deterministic_algorithms(True)
    try:
        return {name: ended(call) for name, call in calls.items()}
    finally:
        torch.use_deterministic_algorithms(False)


def captured() -> dict[str, Callable[[], Any]]:
    """Return what one may do while a graph is captured, each under a name."""
    x = ones(4)
    index = torch.tensor([0, 1, 1, 2], device="cuda")
    matrix = torch.eye(3, device="cuda")
    mask, host, pinned = x > 0, torch.empty(4), torch.empty(4, pin_memory=True)
    event = torch.cuda.Event()
    generator = torch.Generator("cuda")
    linalg = torch.linalg
    cuda = torch.cuda
    recorded = cuda.Event(enable_timing=True)
    event.record()
    recorded.record()
    weights, log = ones(4, 4), ones(4, 1, 3).log_softmax(2)
    lstm, rows = nn.LSTM(4, 4).cuda(), ones(3, 2, 4)
    for first in (
        linalg.inv,
        linalg.qr,
        linalg.svd,
        linalg.eigh,
        linalg.det,
        torch.fft.fft,
        linalg.eig,
    ):
        first(matrix @ matrix)  # libraries take memory at their first call
    lstm(rows)
    return {
        "item": lambda: x[0].item(), "tolist": x.tolist, "cpu": x.cpu, "print": lambda: str(x),
        "to the host, not blocking": lambda: x.to("cpu", non_blocking=True), "bool": lambda: bool(x.sum() > 0),
        "to pinned memory": lambda: pinned.copy_(x), "of pinned memory": lambda: x.copy_(pinned),
        "to pinned memory, not blocking": lambda: pinned.copy_(x, non_blocking=True),
        "of pinned memory, not blocking": lambda: x.copy_(pinned, non_blocking=True),
        "of the host": lambda: x.copy_(host), "of the host, not blocking": lambda: x.copy_(host, non_blocking=True),
        "tensor": lambda: torch.tensor([1.0], device="cuda"), "as_tensor": lambda: torch.as_tensor(host, device="cuda"),
        "nonzero": x.nonzero, "mask": lambda: x[mask], "set by a mask": lambda: x.__setitem__(mask, 1.0),
        "where": lambda: torch.where(mask), "masked_select": lambda: x.masked_select(mask), "unique": index.unique,
        "unique_consecutive": index.unique_consecutive, "bincount": index.bincount,
        "bincount of a length": lambda: index.bincount(minlength=4), "argwhere": lambda: torch.argwhere(mask),
        "repeat_interleave": lambda: x.repeat_interleave(index), "repeat": lambda: x.repeat_interleave(2),
        "repeat_interleave of a length": lambda: x.repeat_interleave(index, output_size=4),
        "equal": lambda: torch.equal(x, x), "equal to another": lambda: torch.equal(x, x + 0),
        "allclose": lambda: torch.allclose(x, x), "list as index": lambda: x[[0, 1]],
        "index of the host": lambda: x[torch.tensor([0, 1])], "scalar of the host": lambda: x + torch.tensor(1.0),
        "full of a value": lambda: torch.full((2,), x[0]), "one_hot": lambda: F.one_hot(index),
        "one_hot of a number": lambda: F.one_hot(index, 4),
        "empty_cache": cuda.empty_cache, "mem_get_info": cuda.mem_get_info, "memory_allocated": cuda.memory_allocated,
        "manual_seed": lambda: cuda.manual_seed(0), "rand": lambda: torch.rand(4, device="cuda"),
        "rand of a generator": lambda: torch.rand(4, device="cuda", generator=generator),
        "new generator": lambda: torch.Generator("cuda"), "get_rng_state": cuda.get_rng_state,
        "set_rng_state": lambda: cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8)),
        "randperm": lambda: torch.randperm(9, device="cuda"), "multinomial": lambda: torch.multinomial(x, 2),
        "bernoulli": lambda: torch.bernoulli(x), "normal": lambda: torch.normal(x, x),
        "poisson": lambda: torch.poisson(x),
        "synchronize": cuda.synchronize, "stream synchronize": lambda: cuda.current_stream().synchronize(),
        "stream query": lambda: cuda.current_stream().query(), "other synchronize": lambda: cuda.Stream().synchronize(),
        "other query": lambda: cuda.Stream().query(), "default query": lambda: cuda.default_stream().query(),
        "event synchronize": event.synchronize, "event query": event.query,
        "event wait": lambda: cuda.current_stream().wait_event(event), "event record": lambda: cuda.Event().record(),
        "elapsed_time": lambda: recorded.elapsed_time(recorded),
        "record_stream": lambda: x.record_stream(cuda.Stream()),
        "pin_memory": host.pin_memory, "pinned": lambda: torch.empty(5, pin_memory=True),
        "large": lambda: torch.empty(2**28, device="cuda"), "set_device": lambda: cuda.set_device(0),
        "inv": lambda: linalg.inv(matrix), "inv_ex": lambda: linalg.inv_ex(matrix),
        "cholesky": lambda: linalg.cholesky(matrix), "cholesky_ex": lambda: linalg.cholesky_ex(matrix),
        "solve": lambda: linalg.solve(matrix, matrix), "solve_ex": lambda: linalg.solve_ex(matrix, matrix),
        "lstsq": lambda: linalg.lstsq(matrix, matrix), "svd": lambda: linalg.svd(matrix),
        "eigh": lambda: linalg.eigh(matrix), "eig": lambda: linalg.eig(matrix), "qr": lambda: linalg.qr(matrix),
        "det": lambda: linalg.det(matrix), "slogdet": lambda: linalg.slogdet(matrix),
        "lu_factor": lambda: linalg.lu_factor(matrix), "pinv": lambda: linalg.pinv(matrix),
        "matrix_rank": lambda: linalg.matrix_rank(matrix), "cond": lambda: linalg.cond(matrix),
        "matrix_exp": lambda: linalg.matrix_exp(matrix), "matrix_power": lambda: linalg.matrix_power(matrix, 2),
        "histc": lambda: x.histc(4), "histc of limits": lambda: x.histc(4, 0, 1), "quantile": lambda: x.quantile(0.5),
        "median": x.median, "topk": lambda: x.topk(2), "sort": x.sort, "kthvalue": lambda: x.kthvalue(2),
        "cdist": lambda: torch.cdist(matrix, matrix), "cov": lambda: torch.cov(matrix), "to_sparse": x.to_sparse,
        "ctc_loss": lambda: F.ctc_loss(log, torch.tensor([[1]], device="cuda"), torch.tensor([4]), torch.tensor([1])),
        "embedding_bag": lambda: F.embedding_bag(index, weights, index[:1]), "fft": lambda: torch.fft.fft(x),
        "combinations": lambda: torch.combinations(x), "isin": lambda: torch.isin(index, index),
        "searchsorted": lambda: torch.searchsorted(x, x), "linspace": lambda: torch.linspace(0, 1, 4, device="cuda"),
        "arange": lambda: torch.arange(4, device="cuda"),
        "triu_indices": lambda: torch.triu_indices(3, 3, device="cuda"),
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0), "lstm": lambda: lstm(rows),
        "nested": lambda: torch.nested.nested_tensor([x, x]), "from_dlpack": lambda: torch.from_dlpack(x),
    }  # fmt: skip


@fact
def captures() -> dict[str, Any]:
    """How a call ends while a graph is captured, and how the capture then ends, by mode."""
    calls, found, kept = captured(), dict[str, Any](), []
    for mode, (name, call) in itertools.product(
        ("global", "thread_local", "relaxed"), calls.items()
    ):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode=mode)
            found[f"{mode}: {name}"] = [
                ended(step, waits=False) for step in (call, graph.capture_end)
            ]
        # A capture that followed a deleted graph was spoiled before its call, on an H200.
        kept.append(graph)
        torch.cuda.synchronize()
    return found


PARTS = 12
"""Into how many facts the operators are divided, for processes that run side by side."""


def _of_operators(part: int) -> dict[str, Any]:
    """Operators that refuse torch's samples which the CPU takes, by dtype."""
    from torch.testing._internal.common_methods_invocations import op_db

    def on_device(value: torch.Tensor | torch.device) -> Any:
        return value.to("cuda") if isinstance(value, torch.Tensor) else torch.device("cuda")

    found = {}
    for op, dtype in itertools.product(
        op_db[part::PARTS], (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
    ):
        if op.name.startswith("jit"):
            continue
        torch.manual_seed(0)
        random.seed(0)
        ends = set()
        try:
            for sample in itertools.islice(samples_of(op, dtype), 4):
                args, kwargs = (sample.input, *sample.args), sample.kwargs
                if ended(functools.partial(op, *args, **kwargs)) == OK:
                    args, kwargs = pytree.tree_map_only(
                        (torch.Tensor, torch.device), on_device, (args, kwargs)
                    )
                    ends.add(ended(functools.partial(op, *args, **kwargs))[:200])
        except Exception as error:
            ends.add(f"no samples: {type(error).__name__}")
        found[f"{op.name}.{op.variant_test_name} {short(dtype)}"] = sorted(ends)
    # What all samples do is said by its absence.
    return {name: ends for name, ends in found.items() if ends != [OK]} | {"asked": len(found)}


for _part in range(PARTS):
    FACTS[f"operators {_part}"] = functools.partial(_of_operators, _part)
