"""``verify=``: planted faults of the simulated device are found, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import math
import os
import re
import runpy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.console
import tiny_models
import torch
from faults import FAULTS, Fault, planted, planted_in_cpu
from places import ROOT, TESTS
from processes import run_program
from sweeping import shuffled
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import torchdevice
from torchdevice.errors import DivergenceError, DivergenceWarning
from torchdevice.report import Report
from torchdevice.report.discrepancies import findings_of
from torchdevice.simulation.allocator.storages import fresh, memory_of


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs be written to a folder of the test."""
    monkeypatch.chdir(tmp_path)


def line() -> int:
    """Return the number of the caller's line."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def found(scope: torchdevice.Scope) -> list[Any]:
    return list(findings_of(scope.journal))


def one_more(right: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel whose first element is wrong by one."""
    result = right(*args, **kwargs)
    memory_of(result).view(-1)[0] += 1
    return result


def train(steps: int = 2) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Dropout(0.3), torch.nn.GELU()
    )
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x = torch.randn(4, 8, device="cuda")
        loss = torch.nn.functional.cross_entropy(model(x), torch.randint(4, (4,), device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_a_right_device_is_found_right(target: str) -> None:
    with torchdevice.portable(target):
        expected = train()
    with torchdevice.portable(target, verify=True) as scope:
        assert train() == expected
    findings = findings_of(scope.journal)
    assert not found(scope) and {name for each in findings.left_out.values() for name in each} <= {
        "aten::lift_fresh"
    }
    assert (
        findings.compared["aten::addmm"] == 2
        and findings.compared["aten::native_layer_norm_backward"] == 2
    )
    # The CPU draws other numbers in float64; for a simulated device it draws the same.
    assert (findings.random["aten::bernoulli_.float"] == 2) is (target == "cpu")


def test_a_wrong_operator_is_found_at_its_line() -> None:
    with planted("mm", one_more), torchdevice.simulate(verify=True) as scope:
        x = torch.ones(3, 3, device="cuda")
        with pytest.warns(DivergenceWarning, match="1 of 9 elements differ, most at") as warned:
            here = line() + 1
            x @ x.t()
        x + x
    (finding,) = found(scope)
    assert (finding.operator, finding.kind, finding.count, finding.error) == (
        "aten::mm",
        "values",
        1,
        1.0,
    )
    assert (
        (finding.site.file, finding.site.line)
        == (__file__, here)
        == (warned[0].filename, warned[0].lineno)
    )
    assert finding.arguments == (
        "self: float32[3, 3], strides (3, 1), offset 0, on simulated:0",
        "mat2: float32[3, 3], strides (1, 3), offset 0, on simulated:0",
    )


def marked(program: Any) -> int:
    """Return the number of the line of a function that is marked."""
    lines, first = inspect.getsourcelines(program)
    return first + next(i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_planted_faults_are_found_at_the_right_line(fault: Fault) -> None:
    with torchdevice.simulate(verify=True) as scope:
        torch.manual_seed(0)  # outside a scope it does not seed the device
        fault.program()
        assert not found(scope)
        with planted(fault.operator, fault.kernel), warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)
            fault.program()
    findings = {each.key: each for each in found(scope)}
    assert [(each.operator, each.kind) for each in findings.values()] == [
        (f"aten::{fault.operator}", fault.kind)
    ]
    (finding,) = findings.values()
    assert (finding.site.file, finding.site.line) == (
        fault.program.__code__.co_filename,
        marked(fault.program),
    )
    shows_the_fault(finding.script, fault)


def shows_the_fault(script: str, fault: Fault) -> None:
    """Run the program of a finding, with the fault and without it."""
    with planted(fault.operator, fault.kernel), pytest.raises(AssertionError):
        runpy.run_path(script)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script)
    assert (
        printed.getvalue()
        == f"aten::{fault.operator} gives the same on simulated:cuda:1 and the CPU\n"
    )


def in_half(x: torch.Tensor) -> torch.Tensor:
    """A kernel of ``exp`` that computes float32 in half precision."""
    result = torch.ops.aten.exp.out(
        x.half() if x.dtype == torch.float32 else x.clone(), out=x.new_empty(0)
    )
    return result.to(x.dtype)


def test_a_cpu_is_compared_with_float64(capsys: pytest.CaptureFixture[str]) -> None:
    with planted_in_cpu("exp", in_half):
        with torchdevice.portable("cpu", verify=True) as scope, pytest.warns(DivergenceWarning):
            here = line() + 1
            torch.linspace(0, 1, 9, device="cuda")[1:].exp()
        (finding,) = found(scope)
        assert (finding.operator, finding.kind, finding.site.line) == ("aten::exp", "values", here)
        with pytest.raises(AssertionError, match="8 / 8"):
            runpy.run_path(finding.script)
    runpy.run_path(finding.script)
    assert capsys.readouterr().out == "aten::exp gives the same on cpu and in float64\n"


def cancelled(n: int) -> torch.Tensor:
    """Return numbers whose sum is the sum of what rounding leaves of them."""
    x = torch.rand(n, device="cuda") * 1000
    return torch.cat([x, -x.flip(0)])


def hilbert(n: int) -> torch.Tensor:
    """Return a matrix whose inverse depends on the last bits of its numbers."""
    index = torch.arange(1.0, n + 1, device="cuda")
    return 1 / (index[:, None] + index - 1)


def products(n: int) -> torch.Tensor:
    a, b = torch.rand(n, device="cuda") * 1000, torch.rand(n, device="cuda") * 1000
    return torch.addcmul(-(a * b), a, b)


@pytest.mark.parametrize(
    "program",
    [
        lambda: cancelled(5000).sum(),
        lambda: cancelled(5000).cumsum(0),
        lambda: cancelled(3000).view(1, -1) @ torch.ones(6000, 3, device="cuda"),
        lambda: torch.linalg.inv(hilbert(5)),
        lambda: products(50),
    ],
    ids=["sum", "cumsum", "matrix product", "inverse", "pointwise"],
)
def test_what_rounding_explains_is_not_found(program: Any) -> None:
    torch.manual_seed(0)
    with torchdevice.portable("cpu", verify=True) as scope:
        program()
    assert not found(scope) and findings_of(scope.journal).compared


def test_a_reduction_in_half_precision_is_more_than_rounding() -> None:
    def in_half(right: Any, x: Any, **kwargs: Any) -> Any:
        return fresh(memory_of(x).half().sum().float(), 0)

    torch.manual_seed(0)
    with (
        planted("sum", in_half),
        torchdevice.simulate(verify=True) as scope,
        pytest.warns(DivergenceWarning),
    ):
        (torch.rand(10000) - 0.5).cuda().sum()
    (finding,) = found(scope)
    assert finding.error > finding.allowed > 1e-5


def test_what_is_found_again_at_a_line_is_told_once() -> None:
    with (
        planted("mm", one_more),
        torchdevice.simulate(verify=True) as scope,
        pytest.warns(DivergenceWarning) as warned,
    ):
        x = torch.ones(3, 3, device="cuda")
        for _ in range(3):
            x @ x
        x @ x
    assert [finding.count for finding in found(scope)] == [3, 1] and len(warned) == 2


def test_a_strict_scope_raises_at_the_operator() -> None:
    with planted("mm", one_more), torchdevice.simulate(verify=True, strict=True):
        x = torch.ones(3, 3, device="cuda")
        with pytest.raises(DivergenceError, match="aten::mm") as raised:
            here = line() + 1
            x @ x
    assert raised.value.finding.site.line == here == raised.traceback[0].lineno + 1


def test_a_sample_is_every_nth_call_of_each_operator() -> None:
    with torchdevice.simulate(verify=True, verify_sample=0.25) as scope:
        x = torch.ones(3, 3, device="cuda")
        for _ in range(9):
            x + x, x @ x
    compared = findings_of(scope.journal).compared
    assert compared["aten::add.Tensor"] == compared["aten::mm"] == 3


def test_only_operators_that_are_named_are_looked_at() -> None:
    with torchdevice.simulate(verify=True, verify_only="mm,add.Tensor") as scope:
        x = torch.ones(3, 3, device="cuda")
        x + x, x @ x, x * x, x.add(x, alpha=2), x.exp()
    assert findings_of(scope.journal).compared == {"aten::mm": 1, "aten::add.Tensor": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify_only": "mn"}, "verify_only='mn' is no operator"),
        ({"verify_only": "mm.wrong"}, "verify_only='mm.wrong' is no operator"),
        ({"asynchronous": True}, "verify and asynchronous=True exclude each other"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_on_entry(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        torchdevice.simulate(verify=True, **options).__enter__()
    assert torchdevice.current() is None


def modes() -> list[Any]:
    return list(_python_dispatch._get_current_dispatch_mode_stack())


def flags() -> tuple[bool, ...]:
    return (
        _python_dispatch.is_in_torch_dispatch_mode(),
        _python_dispatch.is_in_any_mode_without_ignore_compile_internals(),
    )


def test_nothing_is_left_on_the_stack_of_modes() -> None:
    class Mine(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    before = flags()
    scope = torchdevice.simulate(verify=True)
    with scope, scope, torchdevice.portable("cpu", verify=True):
        assert len(modes()) == 2
    mine = Mine()
    scope.__enter__()
    mine.__enter__()
    scope.__exit__(None, None, None)
    assert modes() == [mine]
    mine.__exit__(None, None, None)
    assert modes() == [] and flags() == before
    with pytest.raises(ZeroDivisionError), scope:
        1 / 0  # noqa: B018
    assert modes() == [] and flags() == before


def test_scopes_of_threads_leave_torchs_flags_as_they_were() -> None:
    before, entered, leave = flags(), threading.Event(), threading.Event()

    def other() -> None:
        with torchdevice.portable("cpu", verify=True):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with torchdevice.portable("cpu", verify=True):
        thread.start()
        entered.wait(60)
    leave.set()
    thread.join()
    assert flags() == before


def test_threads_are_looked_at() -> None:
    with (
        planted("mm", one_more),
        torchdevice.simulate(verify=True) as scope,
        pytest.warns(DivergenceWarning),
    ):
        thread = threading.Thread(
            target=lambda: torch.ones(3, 3, device="cuda") @ torch.ones(3, 3, device="cuda")
        )
        thread.start()
        thread.join()
    (finding,) = found(scope)
    assert finding.site.file == __file__


def test_a_scope_inside_is_not_looked_at() -> None:
    with torchdevice.simulate(verify=True) as scope:
        with torchdevice.portable("cpu"):
            torch.ones(3, device="cuda") + 1
        assert not findings_of(scope.journal).compared


def test_memory_figures_are_those_without() -> None:
    def peak() -> tuple[int, int]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        x = torch.ones(1 << 12, device="cuda")
        (x * 2).sum()
        return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before

    with torchdevice.simulate():
        expected = peak()
    with torchdevice.simulate(verify=True):
        assert peak() == expected


# ---- lines of backward ---------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.exp()  # here


def hooked(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.exp()  # here


def by_function() -> None:
    Doubled.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()


def by_hook() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    x.register_hook(hooked)
    x.sum().backward()


def by_forward() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x.sin()  # here
    y.sum().backward()


@pytest.mark.parametrize(
    ("program", "marks", "operator"),
    [
        (by_function, Doubled.backward, "exp"),
        (by_hook, hooked, "exp"),
        (by_forward, by_forward, "cos"),
    ],
)
def test_the_line_of_an_operator_of_backward(program: Any, marks: Any, operator: str) -> None:
    with (
        planted(operator, one_more),
        torchdevice.simulate(verify=True) as scope,
        pytest.warns(DivergenceWarning),
    ):
        program()
    (finding,) = found(scope)
    assert (finding.operator, finding.site.line) == (f"aten::{operator}", marked(marks))
    assert (finding.backward is not None) is (program is by_forward)


def test_the_line_of_backward_where_that_of_forward_is_not_known() -> None:
    with torchdevice.simulate() as plain:
        y = torch.ones(3, device="cuda", requires_grad=True).sin().sum()
        with (
            planted("cos", one_more),
            torchdevice.simulate(verify=True) as scope,
            pytest.warns(DivergenceWarning),
        ):
            here = line() + 1
            y.backward()
    (finding,) = found(scope)
    assert finding.site.line == finding.backward.line == here and not found(plain)


# ---- random numbers ------------------------------------------------------------------------------


def beyond(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A kernel that draws a number which is far too large, and numbers of no other meaning."""
    return x.zero_().index_fill_(0, torch.tensor([1]), 9.0)


@pytest.mark.parametrize(
    ("operator", "program"),
    [
        ("bernoulli_.float", lambda: torch.empty(4, device="cuda").bernoulli_(0.5)),
        ("uniform_", lambda: torch.empty(4, device="cuda").uniform_(2, 3)),
        ("exponential_", lambda: -torch.empty(4, device="cuda").exponential_()),
    ],
)
def test_random_numbers_of_a_cpu_are_compared_by_their_range(operator: str, program: Any) -> None:
    with torchdevice.portable("cpu", verify=True) as scope:
        program()
        state = torch.get_rng_state()
        program()
        assert not torch.equal(state, torch.get_rng_state()) and not found(scope)
    assert findings_of(scope.journal).random == {f"aten::{operator}": 2}
    wrong = beyond if operator != "exponential_" else lambda x, *args, **kwargs: beyond(x).neg_()
    with planted_in_cpu(operator, wrong), torchdevice.portable("cpu", verify=True) as scope:
        with pytest.warns(DivergenceWarning, match="has numbers from"):
            program()
    (finding,) = found(scope)
    assert (finding.operator, finding.kind, finding.script) == (f"aten::{operator}", "range", "")


@pytest.mark.parametrize(
    ("number", "size", "kind"),
    [(math.nan, 4, "NaN"), (-math.inf, 4, "inf"), (1e9, 4, None), (math.nan, 0, None)],
)
def test_random_numbers_of_any_size_are_finite(number: float, size: int, kind: str | None) -> None:
    drawn = iter([number])  # by the program; the reference draws from a normal distribution

    def normal(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x.fill_(next(drawn, 0.5))

    with planted_in_cpu("normal_", normal), torchdevice.portable("cpu", verify=True) as scope:
        with (
            pytest.warns(DivergenceWarning, match="is not finite")
            if kind
            else contextlib.nullcontext()
        ):
            torch.zeros(size, device="cuda").normal_()
    assert [each.kind for each in found(scope)] == ([kind] if kind else [])


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(9, dtype=torch.complex64, device="cuda"),
        lambda: torch.rand(9, dtype=torch.bfloat16, device="cuda"),
        lambda: torch.randint_like(torch.ones(9, device="cuda"), 3),
        lambda: torch.randint(-4, -2, (9,), dtype=torch.float32, device="cuda"),
        lambda: torch.randperm(9, dtype=torch.float32, device="cuda"),
        lambda: torch.ones(3, 4, device="cuda").multinomial(2),
        lambda: torch.empty(9, device="cuda").random_(2, 5),
    ],
)
@pytest.mark.parametrize("random", ["cpu", "cuda"])
def test_random_numbers_of_every_kind_are_in_their_range(
    random: str, draw: Callable[[], torch.Tensor]
) -> None:
    """The CPU draws neither its own numbers in float64, nor those of a GPU."""
    with torchdevice.portable(
        "cpu" if random == "cpu" else "simulated:h100", verify=True, random=random
    ) as scope:
        draw()
    assert not found(scope) and sum(findings_of(scope.journal).random.values()) == 1


def test_numbers_are_drawn_as_without(target: str) -> None:
    def drawn() -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(5)
        torch.manual_seed(3)
        given = torch.randn(4, device="cuda", generator=generator)
        return [
            each.cpu()
            for each in (given, torch.rand(4, device="cuda"), torch.randperm(9, device="cuda"))
        ]

    with torchdevice.portable(target):
        expected = drawn()
    with torchdevice.portable(target, verify=True) as scope:
        assert all(torch.equal(one, other) for one, other in zip(drawn(), expected, strict=True))
    assert not found(scope)


# ---- programs of every kind ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_backward_raises_what_it_raises_without() -> None:
    """A function mode that saw backward's operators would compute in the CPU's dtype."""
    with torchdevice.portable("cpu", verify=True):
        x = torch.full((2,), 0.5, dtype=torch.complex32, device="cuda", requires_grad=True)
        with pytest.raises(NotImplementedError, match="div_cpu"):
            x.sgn().real.sum().backward()


def test_a_module_is_traced(target: str) -> None:
    with torchdevice.portable(target, verify=True):
        layer, x = torch.nn.Conv1d(2, 3, 3).cuda(), torch.ones(1, 2, 8, device="cuda")
        assert torch.equal(torch.jit.trace(layer, x)(x), layer(x)) and modes()


def transforms(x: torch.Tensor) -> None:
    torch.func.vmap(lambda row: (row * x[0]).sum())(x)
    torch.func.hessian(lambda row: (row**3).sum())(x[0])
    torch.func.functionalize(lambda each: each.add_(1))(x.clone())


def forward_gradients(x: torch.Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        (torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)) * 2).sin().abs().pow(2)


def checkpoints(x: torch.Tensor) -> None:
    checkpoint(torch.sin, x.requires_grad_(), use_reentrant=False).sum().backward()


def conjugates(x: torch.Tensor) -> None:
    z = torch.complex(x, x).conj()
    (z * 2).imag.sum()
    z.t() @ z


def overlapping(x: torch.Tensor) -> None:
    x.unfold(0, 2, 1).sum()
    x.as_strided((3, 3), (1, 1)).exp()
    x.expand(2, 4, 3) * 2
    torch.mul(x, 2, out=x)


def normalized(x: torch.Tensor) -> None:
    layer = torch.nn.BatchNorm1d(3).cuda()
    layer(x.requires_grad_()).sum().backward()


PROGRAMS = [transforms, forward_gradients, checkpoints, conjugates, overlapping, normalized]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_nothing_is_found_in_what_torch_does_with_tensors(target: str, program: Any) -> None:
    with torchdevice.portable(target, verify=True) as scope:
        program(torch.rand(4, 3, device="cuda"))
    assert not found(scope) and findings_of(scope.journal).compared


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_is_compared() -> None:
    with torchdevice.simulate(verify=True, strict=True) as scope:
        for dtype in (torch.complex32, torch.float8_e5m2, torch.bfloat16, torch.uint16, torch.bool):
            torch.zeros(3, device="cuda").to(dtype).clone()
    assert not any(findings_of(scope.journal).left_out.values())


def test_what_is_no_plain_tensor_is_counted() -> None:
    with torchdevice.simulate(verify=True, strict=True) as scope:
        x = torch.eye(3, device="cuda").to_sparse()
        (x + x).to_dense()
    assert findings_of(scope.journal).left_out["odd"]["aten::add.Tensor"] == 1


# ---- architectures -------------------------------------------------------------------------------

ARCHITECTURES = 1
"""How many architectures of transformers a sample has."""


@pytest.mark.one_engine
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_found_in_architectures(target: str, sweep: tuple[bool, int]) -> None:
    transformers = pytest.importorskip("transformers", reason="install with the [hf] extra")
    transformers.logging.set_verbosity_error()
    from test_transformers import exercise  # here, because its file is skipped without transformers

    looked_at = []
    for family, name in shuffled(tiny_models.all_names(), sweep):
        if not sweep[0] and len(looked_at) >= ARCHITECTURES:
            break
        try:
            tiny = tiny_models.build(family, name)
            exercise(copy.deepcopy(tiny), None)
        except Exception:  # does not build tiny, or does not run on the plain CPU
            continue
        with torchdevice.portable(target, verify=True) as scope:
            exercise(tiny, "cuda")
        assert not found(scope), name
        looked_at.append(name)
        assert findings_of(scope.journal).compared.total() > 100
    assert len(looked_at) >= (150 if sweep[0] else ARCHITECTURES)


# ---- what is said --------------------------------------------------------------------------------


@pytest.fixture
def with_a_finding() -> torchdevice.Scope:
    """A scope that has found a wrong product, twice at one line."""
    with (
        planted("mm", one_more),
        torchdevice.simulate(verify=True) as scope,
        pytest.warns(DivergenceWarning),
    ):
        x = torch.ones(3, 3, device="cuda")
        for _ in range(2):
            x @ x
    return scope


def test_a_report_has_the_findings(with_a_finding: torchdevice.Scope) -> None:
    report = with_a_finding.report()
    text = str(report)
    assert "verified 3 calls of 2 operators: 1 finding" in text
    assert "values, 2 calls\n  aten::mm: the result: 1 of 9 elements differ" in text
    page = report.to_html()
    assert (
        "Compared with the CPU" in page and "aten::mm: the result: 1 of 9 elements differ" in page
    )
    printed = io.StringIO()
    rich.console.Console(file=printed, width=200).print(report)
    assert "aten::mm: the result" in printed.getvalue()
    again = Report.from_dict(json.loads(report.to_json()))
    assert again == report and again.findings[0].site.file == __file__


def test_reports_of_processes_are_joined(with_a_finding: torchdevice.Scope) -> None:
    report = with_a_finding.report()
    both = report.joined([Report.from_dict(report.to_dict())])
    assert [finding.count for finding in both.findings] == [4]
    assert both.verified["compared"] == {"aten::ones": 2, "aten::mm": 4}


def test_a_report_without_verify_says_nothing_of_it() -> None:
    with torchdevice.simulate() as scope:
        train(1)
    assert "verified" not in str(scope.report()) and "Compared" not in scope.report().to_html()


def test_findings_are_written_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    with (
        planted("mm", one_more),
        torchdevice.simulate(verify=os.fspath(file)),
        pytest.warns(DivergenceWarning),
    ):
        x = torch.ones(3, 3, device="cuda")
        x @ x
        assert len(json.loads(file.read_text())["findings"]) == 1
        x + x
    written = json.loads(file.read_text())
    assert written["verified"]["compared"] == {
        "aten::ones": 1,
        "aten::mm": 1,
        "aten::add.Tensor": 1,
    }
    assert Path(written["findings"][0]["script"]).parent == tmp_path / "found"


PROGRAM = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import multiprocessing
import torch
from faults import FAULTS, planted

def wrong():
    fault = next(each for each in FAULTS if each.name == "swapped operands")
    with planted(fault.operator, fault.kernel):
        for _ in range(2):
            torch.ones(3, device="cuda") - torch.zeros(3, device="cuda")

if __name__ == "__main__":
    wrong()
    child = multiprocessing.get_context("fork").Process(target=wrong)
    child.start()
    child.join()
"""


def test_a_run_says_what_all_its_processes_found(tmp_path: Path) -> None:
    ran = run_program(
        tmp_path,
        PROGRAM,
        options=["--target", "simulated:mps", "--verify=found.json"],
        PYTHONPATH=str(TESTS / "support"),
    )
    assert ran.returncode == 0, ran.stderr
    assert (
        "program.py:12: DivergenceWarning: aten::sub.Tensor: the result: 3 of 3 elements differ"
        in ran.stderr
    )
    assert "torchdevice: verified 12 calls of 3 operators: 1 finding" in ran.stderr
    (finding,) = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert (finding["operator"], finding["count"], finding["site"]["line"]) == (
        "aten::sub.Tensor",
        4,
        12,
    )


PAGE = (ROOT / "docs" / "report.md").read_text().partition("## Comparing with the CPU")[2]


def test_the_example_of_the_page_gives_what_the_page_says() -> None:
    program, script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1:3]
    names: dict[str, Any] = {}
    with (
        torchdevice.simulate("mps", written_for="mps", verify=True) as scope,
        pytest.warns(DivergenceWarning),
    ):
        try:
            exec(compile(program, "tied.py", "exec"), names)
        finally:
            names["device"]._destroy()
    (finding,) = found(scope)
    assert f"tied.py:18: DivergenceWarning: {finding}\n" in PAGE
    written = Path(finding.script).read_text()
    assert re.sub(r"Found by .*,", "", written) == re.sub(r"Found by .*,", "", script)
