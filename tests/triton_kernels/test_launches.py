"""Launches: ways to kernels in a scope, what is undone, and their place in torch."""

from __future__ import annotations

import gc
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from logs import logged
from processes import run_python

import torchdevice

triton = pytest.importorskip("triton", reason="Triton is not installed")

import example_kernels as kernels  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from torchdevice.triton_kernels import launching, memory_checks  # noqa: E402

TARGETS = ["cpu", "simulated:cuda"]


def added(n: int = 100) -> None:
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    out = torch.empty_like(x)
    kernels.add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, 0.5, BLOCK=32)
    assert torch.equal(out, x + 0.5 * y)


@pytest.mark.parametrize("target", [*TARGETS, "simulated:mps"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_kernel_runs_in_a_scope_only(target: str, engine: Any) -> None:
    with torchdevice.portable(target, engine=engine):
        added()
    with pytest.raises(RuntimeError, match="0 active drivers"):
        x = torch.zeros(4)
        kernels.copied[(1,)](x, x, 4, 1, MASKED=True, BLOCK=16)


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_of_the_scope(target: str) -> None:
    offset = tl.constexpr(3)  # a kernel may use constants of the function around it

    with torchdevice.portable(target):

        @triton.jit
        def shifted(x, out, N: tl.constexpr):
            at = tl.arange(0, N)
            tl.store(out + at, tl.load(x + at) + offset)

        x = torch.arange(16, device="cuda")
        out = torch.empty_like(x)
        shifted[(1,)](x, out, N=16)
        assert torch.equal(out, x + 3)


@pytest.mark.parametrize("interpreted", [False, True])
def test_a_kernel_decorated_while_the_variable_was_set(
    interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpreted)
    kernel = triton.jit(kernels.copied.fn)
    assert isinstance(kernel, InterpretedFunction) is interpreted
    with torchdevice.simulate():
        x, out = torch.randn(40, device="cuda"), torch.zeros(40, device="cuda")
        kernel[(2,)](x, out, 40, 1, MASKED=True, BLOCK=32)
        assert torch.equal(out, x)


def names(*modules: Any) -> dict[str, dict[str, Any]]:
    return {repr(module): dict(vars(module)) for module in modules}


def test_nothing_of_triton_or_of_the_kernels_module_differs_after_a_scope() -> None:
    kinds = (
        triton.runtime.JITFunction,
        triton.runtime.Autotuner,
        type(driver),
        tl.tensor,
        tl.dtype,
    )
    modules = (kernels, tl, tl.core, tl.math, tl.standard, triton.compiler.compiler, *kinds)
    with torchdevice.simulate():
        added()  # imports what is imported late
    before, tuned = names(*modules), dict(vars(kernels.tuned))
    with torchdevice.simulate():
        added()
        x = torch.randn(64, device="cuda")
        kernels.tuned[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, torch.empty_like(x), 64)
    after = names(*modules)
    assert before == after
    assert not kernels.tuned.cache and vars(kernels.tuned).keys() - tuned.keys() <= {
        "nargs",
        "best_config",
    }
    assert not kernels.add.device_caches


def test_threads_without_a_scope_see_tritons_own() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(tl.tensor.__add__)
        try:
            driver.active.get_current_target()
        except RuntimeError as error:
            seen.append(error)

    with torchdevice.simulate():
        thread = threading.Thread(target=look)
        # A thread inherits the scope in which it is started, unless it is started from outside.
        with torchdevice.kernel.thread_state.suspended():
            thread.start()
        thread.join()
    assert "0 active drivers" in str(seen[1])


def test_threads_run_kernels_at_the_same_time() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                added(200)
        except BaseException as error:
            failed.append(error)

    with torchdevice.simulate():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not failed


def test_the_driver_answers_for_the_device_of_the_scope() -> None:
    with torchdevice.simulate("h100"):
        active = driver.active
        assert (active.get_current_target().backend, active.get_current_target().arch) == (
            "cuda",
            90,
        )
        assert (
            active.get_active_torch_device() == torch.device("cuda:0")
            and active.get_current_device() == 0
        )
        assert (
            active.get_device_capability() == (9, 0) and active.get_device_interface() is torch.cuda
        )
        properties = active.utils.get_device_properties(active.get_active_torch_device().index)
        assert (
            properties["max_shared_mem"] == 227 << 10 and properties["multiprocessor_count"] == 132
        )
        with torch.cuda.stream(torch.cuda.Stream()):
            assert active.get_current_stream(0) == torch.cuda.current_stream().cuda_stream != 0
    with torchdevice.portable("cpu", capability=(7, 5)):
        assert (
            driver.active.get_current_target().arch == 75
            and driver.active.get_current_stream(0) == 0
        )


@pytest.mark.parametrize("target", TARGETS)
def test_autotune_takes_the_first_configuration(target: str) -> None:
    with torchdevice.portable(target):
        for n in (128, 100):
            x = torch.randn(n, device="cuda")
            out = torch.empty_like(x)
            kernels.tuned[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
            assert torch.equal(out, x + 1) and kernels.tuned.best_config.kwargs == {"BLOCK": 32}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rep", "fewest", "most"), [(0.001, 1, 1), (1000.0, 9, 100_000)])
def test_a_kernel_is_timed(target: str, rep: float, fewest: int, most: int) -> None:
    """A call as long as ``rep`` is not repeated; shorter ones are, as by Triton."""
    for options in ({}, {"quantiles": [0, 0.5]}, {"return_mode": "all"}):
        calls: list[Any] = []
        with torchdevice.portable(target):
            times = triton.testing.do_bench(
                lambda calls=calls: calls.append(added()), warmup=1, rep=rep, **options
            )
        assert all(each > 0 for each in (times if options else [times]))
        assert fewest <= len(calls) <= most


def test_warmup_compiles_and_what_it_returns_can_be_launched() -> None:
    with torchdevice.simulate():
        compiled = kernels.softmax.warmup(
            torch.float32, torch.float32, 100, 100, BLOCK=128, grid=(1,)
        )
        assert ".target sm_80" in compiled.asm["ptx"]
        x = torch.randn(7, 100, device="cuda")
        out = torch.empty_like(x)
        compiled[(7, 1, 1)](out, x, 100, 100, 128)
        torch.testing.assert_close(out, x.softmax(-1))


@pytest.mark.parametrize("target", TARGETS)
def test_a_pool_of_threads_compiles(target: str) -> None:
    with torchdevice.portable(target), ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool):
        x, out = torch.ones(32, device="cuda"), torch.zeros(32, device="cuda")
        waiting = pool.submit(threading.Event().wait, 1)
        kernels.copied.warmup(x, out, 32, 1, MASKED=True, BLOCK=32, grid=(1,))
        assert waiting.running(), "a warmup waits for nothing"
        kernels.copied[(1,)](x, out, 32, 1, MASKED=True, BLOCK=32)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["rectangle", "triangle", "hole", "nothing"])
def test_masks_that_end_in_the_middle_of_rows_and_of_columns(kind: str, turned: bool) -> None:
    with torchdevice.simulate():
        x = torch.arange(27 * 21, device="cuda").view(27, 21)
        out = torch.zeros_like(x)
        given = (x.T.contiguous(), out.T.contiguous()) if turned else (x, out)
        kernels.with_edges[(4, 3)](*given, 27, 21, N=8, KIND=kind, TURNED=turned)
        i, j = torch.arange(27, device="cuda")[:, None], torch.arange(21, device="cuda")
        inside = {"triangle": i >= j, "hole": (j != 3) & (i >= 0), "nothing": j + i < 0}.get(
            kind, j + i >= 0
        )
        assert torch.equal(given[1].T if turned else given[1], torch.where(inside, x + 1, 0))


def test_a_mask_that_ends_too_late_is_found() -> None:
    with torchdevice.simulate():
        x = torch.zeros(27, 21, device="cuda")
        with pytest.raises(
            RuntimeError, match=r"instance \(3, 0, 0\) of \(4, 3, 1\) reads 4 bytes at offset 2268"
        ):
            kernels.with_edges[(4, 3)](
                x, torch.zeros_like(x), 27, 21, N=8, KIND="too far", TURNED=False
            )


def test_a_grid_without_instances_runs_none() -> None:
    with torchdevice.simulate():
        out = torch.zeros(32, device="cuda")
        kernels.ranged[(0,)](out, N=32)
        assert not out.any()


def of_a_library(name: str) -> Any:
    """An operator with a default and a launching CUDA kernel; returns its library too."""
    library = torch.library.Library(name, "DEF")
    library.define("op(Tensor x, Tensor y) -> Tensor")
    library.impl("op", lambda x, y: x - y, "CompositeExplicitAutograd")
    library.impl("op", launched, "CUDA")
    library._register_fake("op", lambda x, y: torch.empty_like(x))
    return getattr(torch.ops, name).op, library


def with_a_default_kernel(name: str) -> Any:
    op = torch.library.custom_op(f"{name}::op", mutates_args=())(subtracted)
    op.register_kernel("cuda", launched)
    op.register_fake(lambda x, y: torch.empty_like(x))
    return op, None


def for_cuda_only(name: str) -> Any:
    op = torch.library.custom_op(f"{name}::op", mutates_args=(), device_types="cuda")(launched)
    op.register_fake(lambda x, y: torch.empty_like(x))
    return op, None


def subtracted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x - y


def launched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    kernels.add[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](
        x, y, out, x.numel(), 0.5, BLOCK=32
    )
    return out


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("writes", [False, True])
def test_compiled_code_calls_an_operator_that_launches(writes: bool, target: str) -> None:
    """Inductor's code has tensors of the host, on simulated devices too."""

    def written(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(launched(x, y))

    name = f"torchdevice_compiled_{writes}_{target.partition(':')[0]}::op"
    op = torch.library.custom_op(name, mutates_args=("y",) if writes else ())(
        written if writes else launched
    )
    op.register_fake((lambda x, y: None) if writes else (lambda x, y: torch.empty_like(x)))
    with torchdevice.portable(target):
        x, y = torch.randn(100, device="cuda"), torch.randn(100, device="cuda")
        expected = launched(x * 2, y) + 1

        @torch.compile
        def compiled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result = op(x * 2, y)
            return (y if writes else result) + 1

        assert torch.equal(compiled(x, y), expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize(
    "make", [of_a_library, with_a_default_kernel, for_cuda_only], ids=lambda make: make.__name__
)
def test_the_kernel_of_an_operator_for_cuda_launches(make: Any, engine: Any, target: str) -> None:
    """It runs even if the operator has a default kernel, which serves host tensors."""
    name = f"torchdevice_{make.__name__}_{engine}_{target.partition(':')[0]}"
    with torchdevice.portable(target, engine=engine):
        op, _kept = make(name)
        x, y = torch.randn(100, device="cuda", requires_grad=True), torch.randn(100, device="cuda")
        wanted = (x + 0.5 * y).detach()
        assert torch.equal(op(x, y).detach(), wanted)
        assert torch.equal(
            torch.compile(lambda x, y: op(x, y) * 1, backend="aot_eager")(x.detach(), y), wanted
        )
        if target != "cpu" and make is not for_cuda_only:
            assert torch.equal(op(x.detach().cpu(), y.cpu()), (x - y).detach().cpu())


@pytest.mark.parametrize("target", TARGETS)
def test_operators_by_triton_op(target: str) -> None:
    with torchdevice.portable(target):

        @torch.library.triton_op(
            f"torchdevice_tests::plus_one_{target.partition(':')[0]}", mutates_args={}
        )
        def plus_one(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            torch.library.wrap_triton(kernels.tuned)[
                lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)
            ](x, out, x.numel())
            return out

        x = torch.randn(100, device="cuda")
        assert torch.equal(plus_one(x), x + 1)


class PlusOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernels.tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()  # an expanded tensor has one element in memory
        out = torch.empty_like(grad)
        kernels.add[(triton.cdiv(grad.numel(), 32),)](grad, grad, out, grad.numel(), 0.5, BLOCK=32)
        return out


@pytest.mark.parametrize("target", [*TARGETS, "simulated:mps"])
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_calls_kernels_in_one_graph(backend: str, target: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernels.softmax[(x.shape[0],)](out, x + 1, x.shape[1], x.shape[1], BLOCK=128)
        return out * 2

    with logged("torch._dynamo", logging.WARNING) as messages, torchdevice.portable(target):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for columns in (100, 90, 80):  # Dynamo makes the second graph for all sizes
            x = torch.randn(7, columns, device="cuda")
            torch.testing.assert_close(compiled(x), (x + 1).softmax(-1) * 2)
        leaf = torch.randn(100, device="cuda", requires_grad=True)
        torch.compile(lambda x: PlusOne.apply(x), backend=backend, fullgraph=True)(
            leaf
        ).sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, 1.5))
    # Before torch 2.12 Dynamo takes numbers for constants, and a constant has no `to`, on CUDA too.
    if torch.__version__ >= "2.12":
        assert not [each for each in messages if "Encountered an exception" in each], (
            "Dynamo asks what a kernel writes"
        )


CACHED = """
import sys, torch, torchdevice, triton, example_kernels as kernels

def copied(x, out):
    kernels.copied[(1,)](x, out, 32, 1, MASKED=True, BLOCK=32)

def tuned(x, out):
    kernels.tuned[(1,)](x, out, 32)

with torchdevice.portable("cpu"):
    for launch in (copied, tuned)[int(sys.argv[1]):]:
        x, out = torch.ones(32, device="cuda"), torch.zeros(32, device="cuda")
        torch.compile(launch, fullgraph=True)(x, out)
        print(out[0].item())
"""


def test_code_with_a_launch_is_not_kept_for_other_processes(tmp_path: Path) -> None:
    """It has the number of a kernel, by which another process may mean another one."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(torchdevice.__file__).parents[1])])
    runs = [
        run_python("-c", CACHED, skipped, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), PYTHONPATH=path)
        for skipped in "01"
    ]
    assert [each.stdout.split() for each in runs] == [["1.0", "2.0"], ["2.0"]], runs[1].stderr


def test_a_captured_graph_runs_the_kernel_again() -> None:
    with torchdevice.simulate():
        x = torch.randn(7, 100, device="cuda")
        out = torch.zeros(7, 100, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels.softmax[(7,)](out, x, 100, 100, BLOCK=128)
        assert not out.any()
        x.copy_(torch.randn(7, 100))
        graph.replay()
        torch.testing.assert_close(out, x.softmax(-1))


def test_streams_order_kernels() -> None:
    """A launch is an operator, so that a copy in flight and a race between streams are seen."""
    with torchdevice.simulate(races="error"):
        x, out = torch.ones(100, device="cuda"), torch.zeros(100, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            with pytest.raises(torchdevice.errors.RaceError, match="nothing orders"):
                kernels.copied[(4,)](x, out, 100, 1, MASKED=True, BLOCK=32)


def test_autograd_does_not_count_the_writes_of_a_kernel() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            out = torch.empty_like(x)
            kernels.add[(1,)](x, x, out, x.numel(), 1.0, BLOCK=128)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            out = torch.empty_like(x)
            grad = grad.contiguous()  # an expanded tensor has one element in memory
            kernels.add[(1,)](grad, grad, out, x.numel(), 1.0, BLOCK=128)
            return out

    with torchdevice.simulate():
        x = torch.randn(100, device="cuda", requires_grad=True)
        Double.apply(x).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2))


def test_kernels_without_values() -> None:
    with torchdevice.simulate(compute="meta"):
        x = torch.randn(100, device="cuda")
        kernels.copied[(4,)](x, torch.empty_like(x), 100, 1, MASKED=True, BLOCK=32)


def test_views_of_one_storage() -> None:
    with torchdevice.simulate():
        x = torch.arange(64.0, device="cuda")
        kernels.copied[(1,)](x[1::2], x[:8], 8, 2, MASKED=True, BLOCK=16)
        assert x[:8].tolist() == [1, 3, 5, 7, 9, 11, 13, 15]


def addresses_one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the accesses of which each address was looked at."""
    seen: list[str] = []
    original = memory_checks.Memory.addresses

    def noted(self: Any, pointers: Any, active: Any, size: int, access: str, group: Any) -> Any:
        seen.append(access)
        return original(self, pointers, active, size, access, group)

    monkeypatch.setattr(memory_checks.Memory, "addresses", noted)
    return seen


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_blocks_of_whole_rows_and_columns(
    target: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block contiguous along an axis is read and written by rows, others by element."""
    seen = addresses_one_by_one(monkeypatch)
    with torchdevice.portable(target):
        for rows, columns, by_rows in ((32, 16, True), (32, 13, False), (29, 16, False)):
            whole = torch.randint(0, 2, (columns, 2, rows)).to(dtype)
            for x in (
                whole[:, 0].to("cuda").T,
                whole[:, 1].T.contiguous().to("cuda"),
                whole.to("cuda")[:, 1].T,
            ):
                out = torch.zeros(columns + 1, rows, dtype=dtype, device="cuda")[1:].T
                seen.clear()
                kernels.doubled_block[(4,)](
                    x, out, rows, columns, x.stride(), out.stride(), M=8, N=16, num_warps=1
                )
                assert torch.equal(out, (x * 2).to(dtype))
                # Triton casts pointers to bool.
                assert not by_rows or not seen or dtype == torch.bool


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [16, 11, 1, 0])
def test_rows_that_end_before_their_block(
    columns: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = addresses_one_by_one(monkeypatch)
    with torchdevice.portable(target):
        x, out = torch.randn(300, columns, device="cuda"), torch.zeros(300, 16, device="cuda")
        before = x.clone()
        kernels.doubled_rows[(300,)](x, out, columns, N=16)
        expected = torch.arange(300.0, device="cuda")[:, None].expand(300, 16).clone()
        expected[:, :columns] = before
        assert torch.equal(out, expected * 2) and torch.equal(x, before * 3)
    assert bool(seen) is not columns


def test_offsets_that_wrap() -> None:
    """A sum of two int32 wraps before it is added to a pointer, as on a GPU."""
    for start, offset in ((2**31 - 4, -4 * 2**31), (-5, -20)):
        with torchdevice.simulate():
            x, out = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
            with pytest.raises(torch.AcceleratorError) as caught:
                kernels.beyond_int32[(1,)](x, out, start, N=4)
        assert f"reads 4 bytes at offset {offset} " in caught.value.__notes__[0]


@triton.jit
def parting(x, out, N: tl.constexpr):
    """Each instance adds up as many numbers as its own says, unless that number is odd."""
    number = tl.program_id(0)
    count = tl.load(x + number)
    total = tl.zeros((1,), tl.float32)
    tl.store(out + number, -1.0)
    if count % 2 == 0:
        for i in range(count):
            total += i
        tl.store(out + number + tl.arange(0, 1), total)


def test_instances_that_go_different_ways() -> None:
    """Instances run together. If a condition parts them, they are undone and rerun apart."""
    counts = torch.randint(0, 9, (300,), dtype=torch.int32)
    expected = [-1.0 if n % 2 else n * (n - 1) / 2 for n in counts.tolist()]
    with torchdevice.simulate():
        out = torch.zeros(300, device="cuda")
        parting[(300,)](counts.cuda(), out, N=1)
        assert out.tolist() == expected


@triton.jit
def looping(bounds, out, length, N: tl.constexpr, STEP: tl.constexpr):
    number = tl.program_id(0)
    first, last = tl.load(bounds + 2 * number), tl.load(bounds + 2 * number + 1)
    turn = 0
    for i in tl.range(first, last, STEP):
        tl.store(out + number * length + turn + tl.arange(0, N), i)
        turn += 1  # noqa: SIM113  # kernels have no enumerate


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("step", [1, 3, -2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_loops_with_bounds_of_their_own(target: str, step: int, dtype: torch.dtype) -> None:
    """Instances whose loops have other bounds count as in Python, also without any turn."""
    bounds = torch.randint(-20, 20, (200, 2)).to(dtype)
    with torchdevice.portable(target):
        out = torch.full((200, 64), 99, dtype=dtype, device="cuda")
        looping[(200,)](bounds.cuda(), out, 64, N=1, STEP=step)
        for (first, last), row in zip(bounds.tolist(), out.tolist(), strict=True):
            expected = list(range(first, last, step))
            assert row == expected + [99] * (64 - len(expected))


@triton.jit
def persistent(x, out, rows, N: tl.constexpr):
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        tl.store(out + row * N + tl.arange(0, N), tl.load(x + row * N + tl.arange(0, N)) * 2)


def sizes_of_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    groups = []
    original = launching.Launch._run_group

    def counted(self: Any, builder: Any, call: Any, group: Any, depth: int = 0) -> None:
        groups.append(len(group))
        original(self, builder, call, group, depth)

    monkeypatch.setattr(launching.Launch, "_run_group", counted)
    return groups


@triton.jit
def in_python(x, out, n, N: tl.constexpr):
    number, at = tl.program_id(0), tl.arange(0, N)
    count = min(n - number * N, N)
    assert count == N, "the last block is smaller"
    inside = not (at >= count)
    values = tl.load(x + number * N + at, mask=inside, other=0)
    tl.store(out + number * N + at, max(number, 2) * values if number >= 0 else values)


@pytest.mark.parametrize("target", TARGETS)
def test_what_tritons_compiler_makes_of_python(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``min``, ``max``, ``not`` part no instances; ``assert`` is the device's, for debugging."""
    groups = sizes_of_groups(monkeypatch)
    with torchdevice.portable(target):
        x = torch.randn(60, device="cuda")
        for n in (64, 60):
            out = torch.zeros(64, device="cuda")
            given = torch.nn.functional.pad(x, (0, 4))
            in_python[(4,)](given[:n], out, n, N=16)
            assert torch.equal(
                out, given * torch.tensor([2.0, 2, 2, 3], device="cuda").repeat_interleave(16)
            )
        assert groups == [4, 4]
        in_python[(4,)](given, out, 64, N=16, debug=True)
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            in_python[(4,)](x, out, 60, N=16, debug=True)


def test_instances_whose_loops_have_as_many_turns_stay_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A persistent kernel's loop begins at the instance: 48 instances of 3 turns, 16 of 2."""
    groups = sizes_of_groups(monkeypatch)
    with torchdevice.portable("cpu"):
        x = torch.randn(176, 8, device="cuda")
        out = torch.empty_like(x)
        persistent[(64,)](x, out, 176, N=8)
        assert torch.equal(out, x * 2)
    assert groups == [64, 16, 48]


@triton.jit
def ticket(counter, out):
    mine = tl.atomic_add(counter, 1)
    if mine % 2 == 0:
        tl.store(out + mine, tl.program_id(0))
    else:
        tl.store(out + mine, -1)


def test_an_atomic_is_undone_too() -> None:
    with torchdevice.simulate():
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        out = torch.zeros(50, dtype=torch.int32, device="cuda")
        ticket[(50,)](counter, out)
        assert counter.item() == 50
        assert (
            sorted(out[::2].tolist()) == sorted(set(out[::2].tolist())) and (out[1::2] == -1).all()
        )


def test_a_long_launch_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchdevice.triton_kernels import launching

    monkeypatch.setattr(launching, "_SECONDS", 0.0)
    with logged() as messages, torchdevice.simulate():
        x = torch.zeros(32 * 3000, device="cuda")
        kernels.copied[(3000,)](x, x, x.numel(), 1, MASKED=True, BLOCK=32)
    assert any("of 3000 instances" in each for each in messages)


def test_another_version_of_triton_is_named() -> None:
    from torchdevice.triton_kernels import triton_internals

    with pytest.raises(
        torchdevice.errors.TritonVersionError,
        match=f"triton {triton.__version__} has no 'triton.language.nothing'",
    ):
        triton_internals._require("language", "nothing")


def test_the_page_has_the_table() -> None:
    from test_features import FEATURES

    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    assert "\n".join(f"| {name} | {fidelity} |" for name, fidelity in FEATURES.items()) in page


@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_without_tensors_prints(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with torchdevice.portable(target):
        kernels.without_tensors[(2,)](N=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("pid")]
    assert lines == [f"pid ({i}, 0, 0) idx ({j}) at: {i + j}" for i in range(2) for j in range(2)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_pointer_is_printed_in_hexadecimal(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with torchdevice.portable(target):
        kernels.printing_pointers[(1,)](torch.ones(2, device="cuda"), N=2)
    first, second = (
        int(line.partition("at: 0x")[2], 16) for line in capsys.readouterr().out.splitlines()
    )
    assert second == first + 4


@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_returns_the_compiled_kernel(target: str) -> None:
    """It is loaded, as on a GPU, so that it has figures of registers. It can be launched again."""
    with torchdevice.portable(target):
        x = torch.zeros(32, device="cuda")
        launched = kernels.ranged[(1,)](x, N=32)
        assert x.all() and isinstance(launched, triton.compiler.CompiledKernel)
        assert launched.n_regs > 0 and launched.n_spills == 0
        assert (
            launched.metadata.num_warps == 4
            and launched.name == "ranged"
            and len(launched.hash) == 64
        )
        assert ".target sm_80" in launched.asm["ptx"]
        with pytest.raises(AttributeError, match="nothing"):
            _ = launched.nothing
        x.zero_()
        launched[(1, 1, 1)](x, 32)
        assert x.all()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_collecting_and_inspecting_a_kernel_compiles_nothing(
    target: str, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python collects anywhere, and Triton's ``__del__`` reads attributes of compiled kernels."""
    asked: list[Any] = []
    compile_kernel = launching.triton.compile_kernel
    monkeypatch.setattr(launching.triton, "compile_kernel", lambda *args, **kw: asked.append(args))
    with torchdevice.portable(target):
        launched = [kernels.ranged[(1,)](torch.zeros(32, device="cuda"), N=32)]
        assert not hasattr(launched[0], "__wrapped__")
        kernels.ranged.device_caches.clear()
        if inside:
            launched.clear()
            gc.collect()
    launched.clear()
    gc.collect()
    assert not asked
    monkeypatch.setattr(launching.triton, "compile_kernel", compile_kernel)
    ended: list[Any] = []
    hook = getattr(triton.knobs.runtime, "kernel_unload_hook", None)
    with torchdevice.portable(target):
        loaded = kernels.ranged[(1,)](torch.zeros(32, device="cuda"), N=32)
        assert loaded.n_regs > 0
        if hook is not None:
            hook.add(lambda module, function, name, group, digest: ended.append(name))
        kernels.ranged.device_caches.clear()
        del loaded
        gc.collect()
    if hook is not None:  # Triton 3.7 and later
        hook.calls.clear()
        assert ended == ["ranged"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_that_the_program_compiles(target: str) -> None:
    with torchdevice.portable(target):
        source = triton.compiler.ASTSource(
            kernels.ranged, {"out": "*fp32", "N": "constexpr"}, {(1,): 32}
        )
        compiled = triton.compile(source, target=driver.active.get_current_target())
        x = torch.zeros(64, device="cuda")
        compiled[(1, 1, 1)](x, 32)
        assert x[:32].all() and not x[32:].any()
    del compiled
    gc.collect()  # without a driver; what __del__ raises fails the test


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_kernel_keeps_for_a_device_is_of_the_scope(target: str) -> None:
    x = torch.zeros(32)
    for _ in range(2):
        with torchdevice.portable(target):
            assert not kernels.ranged.device_caches
            for each in (x.cuda(), x.cuda(), x.cuda().long()):
                kernels.ranged[(1,)](each, N=32)
            assert len(kernels.ranged.device_caches[0][0]) == 2
            kernels.ranged.device_caches.clear()
            assert not kernels.ranged.device_caches
    assert not kernels.ranged.device_caches


@pytest.mark.parametrize("target", TARGETS)
def test_hooks_of_triton_are_called(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the cache once for each specialization, those of a launch at each one."""
    called: list[Any] = []
    refuses = False

    def of_cache(*, fn: Any, compile: Any, is_manual_warmup: bool, **others: Any) -> bool:
        called.append(
            (fn.name, compile["signature"]["out"], compile["constants"][1,], is_manual_warmup)
        )
        return refuses

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", of_cache)
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **given: called.append("compiled")
    )
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    added = [
        lambda metadata, when=when: called.append((when, metadata.get()["name"]))
        for when in ("enter", "exit")
    ]
    with torchdevice.portable(target):
        x = torch.zeros(64, device="cuda")
        launched = [kernels.ranged[(1,)](x, N=size) for size in (32, 64, 32)]
        assert launched[0] is launched[2] is not launched[1]
        assert called == [
            ("ranged", "*fp32", 32, False),
            "compiled",
            ("ranged", "*fp32", 64, False),
            "compiled",
        ]
        called.clear()
        try:
            for hook, each in zip(hooks, added, strict=True):
                hook.add(each)
            kernels.ranged[(1,)](x, N=32)
        finally:
            for hook, each in zip(hooks, added, strict=True):
                hook.remove(each)
        assert called == [("enter", "ranged"), ("exit", "ranged")]
        called.clear()
        x.zero_()
        refuses = True
        assert kernels.ranged[(1,)](x, N=16) is None and not x.any()
        assert kernels.ranged.run(x, N=16, grid=(1,), warmup=True) is None
        refuses = False
        assert (
            kernels.ranged.run(x, N=16, grid=(1,), warmup=True).metadata.shared == 0 and not x.any()
        )
        assert [each[-1] for each in called] == [False, True, True, "d"]


def test_a_condition_of_a_block_with_one_element() -> None:
    with torchdevice.simulate(), pytest.warns(UserWarning, match="multidimensional Tensor"):
        for given, left in ((1, 1), (2, 0)):
            x = torch.tensor([given], device="cuda")
            kernels.of_one_element[(1,)](x)
            assert x.item() == left


@pytest.mark.parametrize("target", TARGETS)
def test_instances_with_pointers_to_several_tensors(target: str) -> None:
    with torchdevice.portable(target):
        # Other tensors lie between these.
        sources = [torch.full((32,), i, dtype=torch.float32, device="cuda") for i in range(60)]
        pointers = torch.tensor([each.data_ptr() for each in sources[::-2]], device="cuda")
        out = torch.zeros(30 * 32, device="cuda")
        kernels.by_own_pointer[(30,)](pointers, out, N=32)
        assert torch.equal(out, torch.cat(sources[::-2]))


@pytest.mark.parametrize("target", TARGETS)
def test_the_drivers_device_is_that_of_tensors(target: str) -> None:
    with torchdevice.portable(target):
        device = driver.active.get_active_torch_device()
        assert (
            torch.zeros(1, device=device).device == torch.zeros(1, device="cuda").device == device
        )
