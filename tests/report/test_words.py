"""Reports, warnings, errors, findings use names users know, and whole sentences."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import pytest
import torch

import torchdevice
from torchdevice.check.kernel_rules import _third_person
from torchdevice.check.target import Target, _public_names
from torchdevice.report.content import Content, Process

OURS = re.compile(
    r"\b_cuda|\b_nccl|'simulated'|\bsimulated "
    r"has|PrivateUse1|rangePush|torchdevice\.(core|cuda|sim)"
)
"""Names of this package, and private ones of torch, that no program contains."""


def _anything() -> None:
    """Ask for much that is not exact on one target or another."""
    x = torch.ones(2, 2, device="cuda:1")
    torch.cuda.set_sync_debug_mode(0)
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.mark("b")
    torch.cuda.utilization()
    torch.cuda.memory_allocated()
    torch.cuda.ipc_collect()
    torch.cuda.get_arch_list()
    torch.backends.cudnn.benchmark_limit = 3
    torch.backends.cuda.preferred_blas_library("cublas")
    torch.cuda.tunable.enable(False)
    x.record_stream(torch.cuda.current_stream())
    with torch.autocast("cuda", dtype=torch.float16):
        x @ x
    torch.linalg.eig(x)
    x.double()
    torch.compile(lambda x: x + 1, mode="reduce-overhead")(x)


CALLS = (
    _anything,
    lambda: torch.cuda.temperature(),
    lambda: torch.cuda.current_blas_handle(),
    lambda: torch.cuda.change_current_allocator(None),
    lambda: torch.ones(1, device="cuda:1000"),
    lambda: torch.cuda.set_device(99),
    lambda: torch.Generator("cuda").set_state(torch.ones(3)),
    lambda: torch.cuda.gds.gds_register_buffer(None),
    lambda: torch.ones(2, device="cuda") + torch.ones(3, device="cuda"),
    lambda: torch.cuda.Stream().cuda_stream,
    lambda: torch.cuda.nccl.all_reduce([torch.ones(1, device="cuda")]),
    lambda: torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }"),
)


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda", "simulated:mps"])
@pytest.mark.parametrize("options", [{}, {"strict": True}, {"float64": "cpu"}], ids=str)
def test_what_a_scope_says_has_names_that_users_know(target: str, options: dict) -> None:
    torch._dynamo.reset()
    said = []
    with (
        warnings.catch_warnings(record=True) as caught,
        torchdevice.portable(target, **options) as scope,
    ):
        warnings.simplefilter("always")
        for call in CALLS:
            try:
                call()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    rows = [f"{row.asked} -> {row.done}" for row in scope.report().rows]
    said += [*rows, *(str(each.message) for each in caught), str(scope.report())]
    assert len(rows) >= 1 and len(said) > len(CALLS) / 2
    assert "\n".join(text for text in said if OURS.search(text)) == ""


def test_a_warning_says_the_way_out_in_the_way_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for way, remedy in (
        ("", 'Use float64="cpu" or float64="error" to change that.'),
        ("run", "Use --float64 cpu or --float64 error to change that."),
        ("pytest", "Use --torchdevice-float64=cpu or --torchdevice-float64=error to change that."),
        ("variable", "Use TORCHDEVICE_FLOAT64=cpu or TORCHDEVICE_FLOAT64=error to change that."),
    ):
        scope = torchdevice.simulate("mps")
        scope.__enter__(way)
        try:
            with pytest.warns(torchdevice.errors.PortabilityWarning) as caught:
                torch.ones(1, device="cuda").double()
        finally:
            scope.__exit__(None, None, None)
        assert (
            str(caught[0].message) == f"mps has no torch.float64; torch.float32 is used. {remedy}"
        )


@pytest.mark.parametrize("target", ["cpu", "mps", "cuda", "simulated:cuda"])
def test_findings_of_names_are_sentences(target: str) -> None:
    for name in _public_names():
        found = Target.named(target).fidelity(name)
        if found is not None:
            said = _third_person(found[2].split(". ")[0])
            assert re.match(r"(is|has|gives|hands out|[a-z]+s( (or|and) [a-z]+s)?)\b", said), (
                f"{name} {said}"
            )
            assert not re.search(r"\b(or|and) (set|return|select)\b", said), f"{name} {said}"


def test_ranks_are_folded() -> None:
    from torchdevice.report import formatting

    def said(*names: str) -> str:
        processes = [Process(f"rank {number}", number, calls=1) for number in range(9)]
        report = Content(("a.py",), "cpu", "cuda", {}, (), tuple(processes))
        return formatting.processes(SimpleNamespace(processes=list(names)), report)  # type: ignore[arg-type]

    assert said("rank 1", "rank 0", "rank 2") == "ranks 0-2"
    assert said("rank 0", "rank 2") == "ranks 0, 2"
    assert said("rank 3") == "rank 3"
    assert said("main", "rank 3", "rank 4") == "ranks 3-4, main"
