"""The native kernels give the values, shapes, errors and side effects of the kernels in Python."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import run_python
from sweeping import samples_of
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import torchdevice
from torchdevice.errors import NativeKernelsError, RaceError
from torchdevice.native import building
from torchdevice.simulation.kernels import pipeline

pytestmark = [pytest.mark.one_engine, pytest.mark.usefixtures("native_kernels")]

WAYS = ("never", "always")


def facts(tensor: torch.Tensor, *, values: bool = True, writes: bool = True) -> Any:
    """Return everything that a program sees of a tensor."""
    found: tuple[Any, ...] = (
        str(tensor.device),
        tensor.dtype,
        tensor.shape,
        tensor.layout,
        tensor.requires_grad,
    )
    if tensor.layout is torch.strided:
        found += (tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        found += (tensor._version,) if writes else ()
        found += (tensor.is_inference(), tensor.is_conj(), tensor.is_neg())
    if not values:
        return found
    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return (
        *found,
        plain.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).tolist(),
    )


def outcome(call: Any, sample: Any, *, values: bool) -> dict[str, Any]:
    """Return what a program sees of a call, its gradients, and the random state after it."""
    torch.manual_seed(7)
    given = tree_map(
        lambda each: (
            each.detach().to("cuda").requires_grad_(each.requires_grad)
            if isinstance(each, torch.Tensor)
            else each
        ),
        (sample.input, sample.args, sample.kwargs),
    )
    options = {name: "cuda" if name == "device" else value for name, value in given[2].items()}
    try:
        result = call(given[0], *given[1], **options)
        leaves = tree_leaves(result)
        results = [each for each in leaves if isinstance(each, torch.Tensor)]
        found: dict[str, Any] = {"results": [facts(each, values=values) for each in results]}
        found["others"] = repr([each for each in leaves if not isinstance(each, torch.Tensor)])
        wanted = [
            each
            for each in tree_leaves(given)
            if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        roots = [each for each in results if each.requires_grad and each.layout is torch.strided]
        if wanted and roots:
            sums = [each.abs().sum() if each.is_complex() else each.sum() for each in roots]
            gradients = torch.autograd.grad(sums, wanted, allow_unused=True)
            # Autograd adds gradients in place where nobody else has them, which it cannot know of
            # storages of Python.
            found["gradients"] = [
                None if each is None else facts(each, writes=False) for each in gradients
            ]
    except Exception as error:
        found = {"error": (type(error), str(error))}
    found["numbers"] = torch.cuda.get_rng_state().tolist(), torch.get_rng_state().tolist()
    return found


UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}

NUMBERED = {"linalg.lstsq": "plain CPU itself gives different bits by the alignment of its input"}


@pytest.mark.sampled(60)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    "op",
    [op for op in op_db if op.dtypes and op.name not in NUMBERED],
    ids=lambda op: op.formatted_name,
)
def test_an_operator_of_torchs_database_is_the_same_both_ways(op: Any) -> None:
    dtypes = [
        dtype for dtype in (torch.float32, torch.int64, torch.complex64) if dtype in op.dtypes
    ]
    for dtype in dtypes or [sorted(op.dtypes, key=str)[0]]:
        differentiates = dtype.is_floating_point and op.supports_autograd
        samples = list(samples_of(op, dtype, requires_grad=differentiates))
        for sample in samples[:6]:
            found = []
            for native in WAYS:
                with torchdevice.simulate(native=native), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found.append(outcome(op, sample, values=op.name not in UNINITIALISED))
            assert found[0] == found[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: x + torch.ones(4),
        lambda x, i: x + torch.ones(3, device="cuda"),
        lambda x, i: torch.ones(4, device="cuda:1") + x,
        lambda x, i: x @ x,
        lambda x, i: x.view(5),
        lambda x, i: x[i + 9],
        lambda x, i: torch.nn.functional.embedding(i + 99, x[:, None]),
        lambda x, i: x.index_add_(0, i + 9, x[:1]),
        lambda x, i: x.scatter_(0, i + 9, x[:1]),
        lambda x, i: torch.nn.functional.nll_loss(x[None], i + 9),
        lambda x, i: x[:3].copy_(x[1:]).add_(x[1:]),
        lambda x, i: torch.add(x[1:], 1, out=x[:3]),
        lambda x, i: x.expand(2, 4).add_(1),
        lambda x, i: torch.cat([x, x.cpu()]),
        lambda x, i: torch._foreach_add([x, x], [x.cpu(), x]),
        lambda x, i: x.bernoulli_(generator=torch.Generator()),
        lambda x, i: torch.add(x, x, out=torch.empty(2, dtype=torch.int32, device="cuda")),
        lambda x, i: torch.linalg.inv(torch.zeros(3, 3, device="cuda")),
        lambda x, i: torch.histc(x.half()),
        lambda x, i: x.to(torch.complex64).sort(),
        lambda x, i: torch.bincount(x),
    ],
)
def test_an_error_is_the_same_both_ways(call: Any) -> None:
    found = []
    for native in WAYS:
        with (
            torchdevice.simulate(count=2, native=native),
            warnings.catch_warnings(record=True) as given,
        ):
            warnings.simplefilter("always")
            x, i = torch.arange(4.0, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
            try:
                said: Any = call(x, i)
            except Exception as error:
                said = type(error), str(error)
            # CUDA's own errors last: the device is lost, or it is not.
            try:
                after: Any = x.sum().item()
            except Exception as error:
                after = type(error), str(error)
            shown = said if isinstance(said, tuple) else str(said)
            found.append((shown, after, [(each.category, str(each.message)) for each in given]))
    assert found[0] == found[1]


class TestOut:
    @pytest.mark.usefixtures("no_collections")
    @pytest.mark.parametrize("size", [0, 2, 4, 9])
    @pytest.mark.parametrize("of", [torch.zeros, torch.empty])
    def test_it_gets_the_shape_and_keeps_its_storage(self, size: int, of: Any) -> None:
        found = []
        for native in WAYS:
            with torchdevice.simulate(native=native), warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                x = torch.arange(4.0, device="cuda")
                out = of(size, device="cuda")
                alias, version = out.view(-1), out._version
                assert torch.mul(x, 2, out=out) is out
                same = out.untyped_storage().data_ptr() == alias.untyped_storage().data_ptr()
                allocated = torch.cuda.memory_allocated()
                values = (
                    out.tolist(),
                    out.shape,
                    out.untyped_storage().nbytes(),
                    out._version - version,
                )
                found.append((values, same, allocated, [str(each.message) for each in given]))
        assert found[0] == found[1]

    def test_a_lists_writes_are_counted(self) -> None:
        for native in WAYS:
            with torchdevice.simulate(native=native):
                x = [torch.ones(2, device="cuda"), torch.ones(3, device="cuda")]
                torch._foreach_add_(x, 1)
                assert [each._version for each in x] == [1, 1]


def test_an_interrupt_comes_between_calls() -> None:
    """Ctrl-C ends a loop of kernels, and leaves the device as it should be."""
    script = """
import signal, torch, torchdevice
signal.signal(signal.SIGALRM, signal.default_int_handler)
with torchdevice.simulate(native="always"):
    x = torch.ones(4, device="cuda")
    before = torch.cuda.memory_allocated()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        while True:
            y = (x + x).relu_()
            z = torch.cat([x, y]).sum()
    except KeyboardInterrupt:
        y = z = None
    assert torch.cuda.memory_allocated() == before == 512, torch.cuda.memory_allocated()
    assert (x + x).tolist() == [2, 2, 2, 2]
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "ended\n", done.stderr


def test_an_error_of_a_hook_leaves_backward() -> None:
    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("from the hook")

    with torchdevice.simulate(native="always"):
        x = torch.ones(4, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(refuse)
        with pytest.raises(ValueError, match="from the hook"):
            y.sum().backward()
        (x * 3).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3, 3, 3, 3]


def test_two_threads_compute_at_once() -> None:
    """No kernel holds the GIL: during a long kernel, another thread makes progress."""
    progress = 0
    during: list[int] = []
    with torchdevice.simulate(count=2, native="always"):
        matrix = torch.ones(1500, 1500, device="cuda:1")
        small = torch.ones(4, device="cuda:0")
        matrix @ matrix  # the kernel is made by Python at its first call
        small + small
        ready, end = threading.Event(), threading.Event()

        def compute() -> None:
            ready.wait()
            before = progress
            matrix @ matrix @ matrix
            during.append(progress - before)
            end.set()

        thread = threading.Thread(target=compute)
        thread.start()
        ready.set()
        while not end.is_set():
            small + small
            progress += 1
        thread.join()
    assert during[0] > 10


@pytest.fixture
def restless() -> Iterator[None]:
    """Let threads change places at almost every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.usefixtures("restless")
def test_many_threads_have_exact_figures() -> None:
    for _ in range(12):
        with torchdevice.simulate(count=2, native="always"):
            failed: list[BaseException] = []

            def work(index: int, failed: list[BaseException] = failed) -> None:
                try:
                    held = [torch.ones(200 + each, device=f"cuda:{index}") for each in range(50)]
                    for _ in range(20):
                        held = [each + 1 for each in held]
                        torch.cuda.memory_stats(index)
                    assert [each[0].item() for each in held] == [21] * 50
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=work, args=(each % 2,)) for each in range(6)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            gc.collect()
            assert not failed
            assert [torch.cuda.memory_allocated(each) for each in range(2)] == [0, 0]


class TestKernelsStay:
    """A kernel in C++ is put once: another thread may be between its look-up and the kernel."""

    OPERATORS = (
        "aten::add.Tensor",
        "aten::view",
        "aten::empty.memory_format",
        "aten::mm",
        "aten::copy_",
    )

    def kernels(self) -> list[str]:
        return [torch._C._dispatch_dump_table(each) for each in self.OPERATORS]

    def compute(self) -> torch.Tensor:
        x = torch.ones(2, 2, device="cuda")
        (x + x).view(4)
        return (x @ x).cpu()

    def test_the_dispatcher_stays_as_the_first_scope_left_it(self) -> None:
        with torchdevice.simulate(native="always"):
            self.compute()
        after = self.kernels()
        with (
            pytest.raises(ValueError, match="of the program"),
            torchdevice.simulate(native="always"),
        ):
            self.compute()
            raise ValueError("of the program")
        assert self.kernels() == after

    def test_a_scope_without_them_runs_those_in_python(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torchdevice.simulate(native="always"):
            expected = self.compute()
        made: list[torch.Tensor] = []
        fresh = pipeline.fresh
        monkeypatch.setattr(
            pipeline, "fresh", lambda tensor, index: made.append(tensor) or fresh(tensor, index)
        )
        with torchdevice.simulate(native="always"):
            assert torch.equal(self.compute(), expected) and not made
        with torchdevice.simulate(native="never"):
            assert torch.equal(self.compute(), expected) and made

    def test_another_thread_keeps_python(self) -> None:
        with torchdevice.simulate(native="always"):
            x = torch.ones(2, device="cuda")
            x + x
            found: list[Any] = []

            def outside() -> None:
                with torchdevice.simulate(native="never"):
                    y = torch.ones(2, device="cuda")
                    found.append((y + y).tolist())

            thread = threading.Thread(target=outside)
            thread.start()
            thread.join()
            assert found == [[2, 2]]


class TestOption:
    def test_always_needs_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # This process has loaded them, and what is loaded serves on.
        monkeypatch.setattr(building, "is_built", lambda: False)
        with pytest.raises(NativeKernelsError, match=r"not built.*'torchdevice native build'"):
            torchdevice.simulate(native="always").__enter__()
        with torchdevice.simulate(native="auto"):
            assert torch.ones(2, device="cuda").tolist() == [1, 1]

    def test_a_build_without_a_compiler_says_so(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(NativeKernelsError, match="no C\\+\\+ compiler 'no-such-compiler'"):
            building.build()
        assert list(building.folder().iterdir()) == []

    def test_a_compiler_that_fails_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(NativeKernelsError, match="the compiler 'false' failed"):
            building.build()
        assert list(building.folder().iterdir()) == []

    def test_clean_removes_what_was_built(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        other = building.folder() / "other"
        other.parent.mkdir()
        building.path().write_bytes(b"")
        other.write_bytes(b"")
        assert building.clean() == [building.path()]
        assert list(other.parent.iterdir()) == [other]

    def test_clean_removes_what_a_killed_build_left(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        compiler = tmp_path / "compiler"
        compiler.write_text('#!/bin/sh\nkill -9 "$PPID"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        ran = run_python("-m", "torchdevice", "native", "build")
        assert ran.returncode == -signal.SIGKILL, ran.stderr
        (left,) = building.folder().iterdir()
        assert building.clean() == [left] and list(building.folder().iterdir()) == []


def test_races_and_recorders_run_in_python() -> None:
    with torchdevice.simulate(native="always", races="error"):
        x = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)
        with pytest.raises(RaceError):
            x.add_(1)


def test_a_kernel_that_a_scope_registered_ends_with_it() -> None:
    """An operator first called while a scope has a kernel in front of the simulated one."""
    script = """
import torch, torchdevice

def step():
    x = torch.arange(6.0).reshape(2, 3).to("cuda").requires_grad_()
    torch.nn.functional.layer_norm(x, (3,)).square().sum().backward()
    return x.cumsum(0).tolist(), x.grad.tolist(), torch.combinations(x.detach()[0]).tolist()

found = []
for _ in range(2):
    with torchdevice.simulate("mps", written_for="mps", native="always"), torchdevice.portable("mps"):
        found.append(step())
for native in ("always", "always", "never"):
    with torchdevice.simulate(native=native):
        found.append(step())
print(all(each == found[0] for each in found))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "True\n", done.stderr[-2000:]
