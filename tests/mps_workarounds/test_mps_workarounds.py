"""Guards of operators wrong on MPS: faults planted in the simulated device, and guarded."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import MetaRuntime
from places import ROOT

import torchdevice
from torchdevice.calls.lacking import mps_guards
from torchdevice.calls.lacking.cpu_fallback import CpuFallback
from torchdevice.calls.lacking.mps_guards import FAULTS
from torchdevice.kernel import registered_kernels
from torchdevice.kernel.registered_kernels import overload

KEY = "PrivateUse1"

MPS = torch._C.DispatchKey.MPS

Kernel = Callable[..., Any]


def right(name: str) -> Kernel:
    """Return a kernel of the simulated device that computes as the CPU."""
    op = overload(f"aten::{name}")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return CpuFallback(op, "simulated", op).call(args, kwargs)

    return kernel


def drops_strided_writes(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        written = kwargs.get("out", args[0])
        return right(name)(*args, **kwargs) if written.is_contiguous() else written

    return kernel


def reads_as_contiguous(name: str) -> Kernel:
    """Take the strides of each argument for those of a contiguous tensor."""

    def misread(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_contiguous():
            return value
        return torch.as_strided(value, value.shape, torch.empty(value.shape, device="cpu").stride())

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return right(name)(
            *map(misread, args), **{key: misread(value) for key, value in kwargs.items()}
        )

    return kernel


def attends(name: str) -> Kernel:
    """Attention that reads as contiguous, and gives each query head the first key head."""

    def kernel(query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
        if key.size(-3) != query.size(-3):
            key, value = (
                each[..., :1, :, :].expand(*query.shape[:-2], *each.shape[-2:])
                for each in (key, value)
            )
        given = [each if each.is_contiguous() else each.flip(-1) for each in (query, key, value)]
        result = torch.nn.functional.scaled_dot_product_attention(
            *(each.cpu() for each in given)
        ).to(query.device)
        return result, result

    return kernel


def mistakes_mixed_dtypes(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        results = right(name)(*args, **kwargs)
        mixed = len({value.dtype for value in args if isinstance(value, torch.Tensor)}) > 1
        return tuple(each * 0 if mixed and each is not None else each for each in results)

    return kernel


def always_wrong(name: str) -> Kernel:
    """Double each result that is not an index."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return tuple(
            each * 2 if each.is_floating_point() else each for each in right(name)(*args, **kwargs)
        )

    return kernel


def gives_zeros(name: str) -> Kernel:
    """Set each result that is not an index to 0, also where the program gave a tensor for it."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        results = right(name)(*args, **kwargs)
        for each in (results,) if isinstance(results, torch.Tensor) else results:
            each.zero_() if each.is_floating_point() else each
        return results

    return kernel


LIMIT = 64


def loses_late_elements(name: str) -> Kernel:
    def kernel(left: torch.Tensor, right_: torch.Tensor, **kwargs: Any) -> Any:
        result = right(name)(left, right_, **kwargs)
        result.view(-1)[LIMIT:] = 0
        return result

    return kernel


def misreads_weights(name: str) -> Kernel:
    """Convolve, and take the strides of the weight for those of a contiguous tensor."""

    def misread(weight: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(
            weight, weight.shape, torch.empty(weight.shape, device="cpu").stride()
        ).cpu()

    def forward(
        x: Any, weight: Any, bias: Any, padding: Any, stride: Any, dilation: Any, groups: int
    ) -> Any:
        rest = bias, stride, padding, dilation, False, [0, 0], groups
        return torch.ops.aten.convolution(x.cpu(), misread(weight), *rest).to(x.device)

    def backward(
        x: Any,
        grad: Any,
        weight: Any,
        padding: Any,
        stride: Any,
        dilation: Any,
        groups: int,
        mask: Any,
    ) -> Any:
        rest = None, stride, padding, dilation, False, [0, 0], groups, mask
        results = torch.ops.aten.convolution_backward(grad.cpu(), x.cpu(), misread(weight), *rest)
        return (*(None if each is None else each.to(x.device) for each in results[:2]), None)

    return backward if name.endswith("backward") else forward


class Planted(NamedTuple):
    operators: tuple[str, ...]
    kernel: Callable[[str], Kernel]
    call: Callable[[str], Any]


def tensor(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).to(device)
    )


def transposed(device: str) -> torch.Tensor:
    return tensor(3, 2, device=device).t()


def with_out(make: Callable[..., Any], device: str) -> torch.Tensor:
    out = tensor(3, 4, device=device).t()[1:]
    return make(
        tensor(3, 3, device=device),
        tensor(3, 3, device=device),
        tensor(3, 3, device=device),
        out=out,
    )


def seeded(device: str, *limits: int) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.zeros(3, 2, device=device).t()
    x.random_(*limits)
    return torch.stack([x.amin() >= 0, x.count_nonzero() > 0])


def attention(heads: int, device: str) -> torch.Tensor:
    query = tensor(2, 5, 4, 8, device=device).transpose(1, 2)
    key, value = (tensor(2, 5, heads, 8, device=device).transpose(1, 2) for _ in range(2))
    if device == "cpu":
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=heads != 4
        )
    attend = torch.ops.aten._scaled_dot_product_attention_math_for_mps
    if heads == 4:
        return attend(query, key, value)[0]
    if all(argument.name != "enable_gqa" for argument in attend.default._schema.arguments):
        pytest.skip(
            "MPS's attention takes no grouped heads in this torch, which repeats them before"
        )
    return attend(query, key, value, enable_gqa=True)[0]


def normalized(device: str) -> list[torch.Tensor]:
    x = tensor(4, 6, device=device, dtype=torch.bfloat16).requires_grad_()
    weight, bias = (tensor(6, device=device).requires_grad_() for _ in range(2))
    result = torch.nn.functional.layer_norm(x, (6,), weight, bias)
    result.float().square().sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return [result.detach(), x.grad, weight.grad, bias.grad]


def solved(device: str) -> list[torch.Tensor]:
    matrix = (tensor(3, 3, device=device) + 3 * torch.eye(3, device=device)).requires_grad_()
    result = torch.linalg.solve(matrix, tensor(3, device=device))
    result.sum().backward()
    assert matrix.grad is not None
    return [result.detach(), matrix.grad]


def product(device: str) -> torch.Tensor:
    return torch.bmm(tensor(6, 4, 3, device=device), tensor(6, 3, 5, device=device))


def product_out(device: str) -> torch.Tensor:
    out = torch.empty(0, device=device)
    assert torch.bmm(tensor(6, 4, 3, device=device), tensor(6, 3, 5, device=device), out=out) is out
    return out


def pooled(device: str) -> torch.Tensor:
    return torch.nn.functional.adaptive_max_pool2d(tensor(2, 5, 5, device=device), 3)


def pooled_out(device: str) -> Any:
    out = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
    return torch.ops.aten.adaptive_max_pool2d.out(
        tensor(2, 5, 5, device=device), [3, 3], out=out[0], indices=out[1]
    )


def embedded(device: str) -> torch.Tensor:
    return torch.nn.functional.embedding(
        torch.tensor([2, 0], device=device), tensor(40, 3, device=device)
    )


def selected(device: str) -> torch.Tensor:
    out = torch.empty(0, device=device)
    return torch.index_select(
        tensor(40, 3, device=device), 0, torch.tensor([2, 0], device=device), out=out
    )


def long_product(name: str, device: str) -> Any:
    """Return an operator's result for factors with sums over too many elements."""
    place, _, overload = name.partition(".")
    lead = () if place in ("mm", "addmm", "addmm_", "linear") else (2,)
    left = tensor(*lead, 17, 70, device=device)
    right_ = tensor(*lead, 70, 17, device=device)
    sum_ = (*lead, 17, 17)
    factors = (left, right_.t().contiguous()) if place == "linear" else (left, right_)
    if place.startswith("add"):
        sum_ = (17, 17)
    given = (tensor(*sum_, device=device), *factors) if "add" in place else factors
    written = {"out": torch.empty(0, device=device)} if overload else {}
    return getattr(torch.ops.aten, place)(*given, **written)


def convolved(device: str) -> torch.Tensor:
    x, weight = tensor(2, 3, 5, 5, device=device), tensor(4, 3, 3, 3, 2, device=device)[..., 1]
    if device == "cpu":
        return torch.nn.functional.conv2d(x, weight, padding=1)
    return torch.ops.aten._mps_convolution(x, weight, None, [1, 1], [1, 1], [1, 1], 1)


def convolved_backward(device: str) -> list[torch.Tensor]:
    x, weight = tensor(2, 3, 5, 5, device=device), tensor(4, 3, 3, 3, 2, device=device)[..., 1]
    grad, places = tensor(2, 4, 5, 5, device=device), ([1, 1], [1, 1], [1, 1])
    if device == "cpu":
        rest = None, *places, False, [0, 0], 1, [True, True, False]
        return list(torch.ops.aten.convolution_backward(grad, x, weight, *rest)[:2])
    return list(
        torch.ops.aten.mps_convolution_backward(x, grad, weight, *places, 1, [True, True, False])[
            :2
        ]
    )


ON_OLD_MACOS = next(fault for fault in FAULTS if fault.macos_before is not None)

LONG_PRODUCTS = [
    name for fault in FAULTS if fault.guard is mps_guards.long_products for name in fault.operators
]

NORM = ("native_layer_norm", "native_layer_norm_backward")
SOLVE = ("_linalg_solve_ex.result", "_linalg_solve_ex")

PLANTED = {
    "addcmul_": Planted(
        ("addcmul_",),
        drops_strided_writes,
        lambda device: transposed(device).addcmul_(
            transposed(device), tensor(2, 3, device=device), value=0.5
        ),
    ),
    "addcdiv_": Planted(
        ("addcdiv_",),
        drops_strided_writes,
        lambda device: transposed(device).addcdiv_(
            transposed(device), tensor(2, 3, device=device).exp()
        ),
    ),
    "addcmul, out": Planted(
        ("addcmul.out",), drops_strided_writes, lambda device: with_out(torch.addcmul, device)
    ),
    "addcdiv, out": Planted(
        ("addcdiv.out",), drops_strided_writes, lambda device: with_out(torch.addcdiv, device)
    ),
    "random_": Planted(("random_",), drops_strided_writes, seeded),
    "random_, to": Planted(
        ("random_.to",), drops_strided_writes, lambda device: seeded(device, 100)
    ),
    "random_, from": Planted(
        ("random_.from",), drops_strided_writes, lambda device: seeded(device, 1, 100)
    ),
    "linear": Planted(
        ("linear",),
        reads_as_contiguous,
        lambda device: torch.nn.functional.linear(
            transposed(device), tensor(3, 4, device=device).t()
        ),
    ),
    "attention": Planted(
        ("_scaled_dot_product_attention_math_for_mps",),
        attends,
        lambda device: attention(4, device),
    ),
    "grouped attention": Planted(
        ("_scaled_dot_product_attention_math_for_mps",),
        attends,
        lambda device: attention(2, device),
    ),
    "layer_norm": Planted(NORM, mistakes_mixed_dtypes, normalized),
    "solve": Planted(SOLVE, always_wrong, solved),
    "pooling": Planted(("adaptive_max_pool2d",), gives_zeros, pooled),
    "pooling, out": Planted(("adaptive_max_pool2d.out",), gives_zeros, pooled_out),
    "embedding": Planted(("index_select",), gives_zeros, embedded),
    "index_select, out": Planted(("index_select.out",), gives_zeros, selected),
    "bmm": Planted(("bmm",), loses_late_elements, product),
    "bmm, out": Planted(("bmm.out",), loses_late_elements, product_out),
    "convolution": Planted(("_mps_convolution",), misreads_weights, convolved),
    "convolution, backward": Planted(
        ("mps_convolution_backward",), misreads_weights, convolved_backward
    ),
    **{
        f"long {name}": Planted((name,), gives_zeros, functools.partial(long_product, name))
        for name in LONG_PRODUCTS
    },
}


@contextlib.contextmanager
def planted(operators: tuple[str, ...], kernel: Callable[[str], Kernel]) -> Iterator[None]:
    """Let the simulated device's kernels of some operators have a fault."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with torchdevice.kernel.thread_state.suspended():
            for name in operators:
                library.impl(name, kernel(name), KEY, allow_override=True)
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def guarded(scope: torchdevice.Scope) -> Iterator[None]:
    """Let a scope on the simulated device have the guards of MPS, all of them."""
    mps_guards.put_for(KEY, FAULTS)
    mps_guards.put_for(KEY, FAULTS)  # as after an interrupt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scope.runtime, "corrected_key", KEY)
        yield


@pytest.fixture
def scope(monkeypatch: pytest.MonkeyPatch) -> Iterator[torchdevice.Scope]:
    monkeypatch.setattr(mps_guards, "MOST_ELEMENTS", LIMIT)
    monkeypatch.setattr(mps_guards, "MOST_COUNTED", LIMIT)
    monkeypatch.setattr(mps_guards, "LONGEST", LIMIT)
    with torchdevice.simulate("mps") as scope:
        # Without guards but those of `guarded`.
        monkeypatch.setattr(scope.runtime, "corrected_key", None)
        yield scope


def equal(one: Any, other: Any) -> bool:
    pairs = [(one, other)] if isinstance(one, torch.Tensor) else zip(one, other, strict=True)
    return all(
        a.dtype is b.dtype and torch.allclose(a.cpu(), b, rtol=1e-2, atol=1e-5) for a, b in pairs
    )


@pytest.mark.filterwarnings("ignore:.*[Oo]verrid")
class TestEachGuard:
    @pytest.mark.parametrize("case", PLANTED.values(), ids=PLANTED)
    def test_the_fault_bites_and_the_guard_mends_it(
        self, case: Planted, scope: torchdevice.Scope
    ) -> None:
        expected = case.call("cpu")
        with planted(case.operators, case.kernel):
            assert not equal(case.call("cuda"), expected)
            with guarded(scope):
                assert equal(case.call("cuda"), expected)
            assert not equal(case.call("cuda"), expected)
        issues = [
            entry
            for entry in scope.journal.entries
            if "pytorch issues" in entry.done or "CPU" in entry.done
        ]
        assert issues and all(entry.site.file == __file__ for entry in issues)

    def test_every_fault_of_the_table_is_planted(self) -> None:
        tried = {name for case in PLANTED.values() for name in case.operators}
        assert tried == {name for fault in FAULTS for name in fault.operators}

    def test_weights_that_never_trained_train(self, scope: torchdevice.Scope) -> None:
        def train(device: str) -> torch.Tensor:
            weight = tensor(3, 2, device=device).t().requires_grad_()
            optimizer = torch.optim.Adam([weight], lr=0.1, foreach=False)
            for _ in range(3):
                optimizer.zero_grad()
                weight.square().sum().backward()
                optimizer.step()
            return weight.detach()

        with planted(("addcmul_", "addcdiv_"), drops_strided_writes):
            assert torch.equal(train("cuda").cpu(), tensor(3, 2, device="cpu").t())
            with guarded(scope):
                assert torch.allclose(train("cuda").cpu(), train("cpu"))

    def test_a_call_without_the_fault_is_the_kernels(self, scope: torchdevice.Scope) -> None:
        x, index = tensor(2, 3, 3, device="cuda"), torch.tensor([1], device="cuda")
        with (
            planted(tuple(name for fault in FAULTS for name in fault.operators), right),
            guarded(scope),
        ):
            before = len(scope.journal.entries)
            (
                x[0].addcmul_(x[0], x[0]),
                x[0].addcdiv_(x[0], x[0]),
                x[1].random_(),
                x[1].random_(3),
                x[1].random_(1, 3),
            )
            (
                torch.addcmul(x, x, x, out=torch.empty_like(x)),
                torch.addcdiv(x, x, x, out=torch.empty_like(x)),
            )
            torch.nn.functional.adaptive_max_pool2d(x, 1), torch.index_select(x, 0, index)
            (
                torch.nn.functional.linear(x, x[0]),
                torch.nn.functional.layer_norm(x, (3,)),
                torch.bmm(x, x),
            )
            assert len(scope.journal.entries) == before


def own_kernels(name: str) -> list[str]:
    """Return torch's registered kernels of an operator, one per line, without ours."""
    return [
        line
        for line in torch._C._dispatch_dump(name).splitlines()
        if "registered_kernels" not in line
    ]


class TestInstallation:
    def test_guards_stay_in_front_and_torchs_tables_are_as_they_were(
        self, meta_target: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(MetaRuntime, "corrected_key", "Meta")
        torchs = own_kernels("aten::addcmul_")
        x = torch.empty(3, 2, device="meta").t()
        with torchdevice.portable("meta") as scope:
            x.addcmul_(x, x)
            assert own_kernels("aten::addcmul_") == torchs
        assert [entry.requested for entry in scope.journal.entries] == ["aten::addcmul_"]
        x.addcmul_(x, x)
        assert own_kernels("aten::addcmul_") == torchs and len(scope.journal.entries) == 1

    def test_what_has_no_kernel_there_has_no_guard(self) -> None:
        mps_guards.put_for("MPS", FAULTS)  # this torch has no kernels for it
        put = {
            by for each in registered_kernels._in_front.values() for by in each.kernels.get(MPS, ())
        }
        assert not put & {fault.done for fault in FAULTS}

    def test_a_thread_outside_scopes_gets_the_kernel(self, scope: torchdevice.Scope) -> None:
        x = transposed("cuda")
        before = x.cpu()
        with planted(("addcmul_",), drops_strided_writes), guarded(scope):
            with torchdevice.kernel.thread_state.suspended():
                torch.ops.aten.addcmul_.default(x, x, x)
            assert torch.equal(x.cpu(), before)

    @pytest.mark.parametrize(
        ("torch_version", "macos", "expected"),
        [
            ("2.13.0", "14.6", True),
            ("2.13.0", "15.1", False),
            ("2.13.0", "15", False),
            ("2.13.0", "", True),
        ],
    )
    def test_versions_decide(
        self, torch_version: str, macos: str, expected: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), ""))
        monkeypatch.setattr(torch, "__version__", torch_version)
        assert (ON_OLD_MACOS in mps_guards.here()) is expected
        assert len(mps_guards.here()) == len(FAULTS) - (not expected)

    def test_a_fault_ends_with_the_torch_that_mends_it(self) -> None:
        mended = ON_OLD_MACOS._replace(torch_before=(2, 14))
        assert mended.is_in((2, 13, 1), None) and not mended.is_in((2, 14, 0), None)

    def test_versions_are_read_as_numbers(self) -> None:
        assert (
            mps_guards.version("2.10.0+cpu") == (2, 10, 0) > (2, 9)
            and mps_guards.version("") is None
        )


NOT_GUARDED = {
    "masked attention": (184180,),
    "a CPU tensor written to a slice": (86975, 108978),
    "isfinite": (183419,),
    "gradients of more than 32K elements": (177116,),
    "backward of stacked LSTMs with dropout": (190056,),
    "an index out of range reads 0 or other memory": (144824,),
    "sparse tensors": (87886, 157238),
    "complex numbers": (188864,),
    "torch.compile": (188970,),
    "indices beyond the end in index_copy_ and its siblings": (189968, 189969, 189970, 189971),
}
"""What is known to be wrong and has no guard -> issues."""


def test_the_page_has_every_fault() -> None:
    page = (ROOT / "docs/mps.md").read_text()
    for fault in FAULTS:
        names = ", ".join(f"`{name}`" for name in fault.operators)
        issues = ", ".join(map(str, fault.issues))
        until = "always" if fault.macos_before is None else f"macOS before {fault.macos_before[0]}"
        if fault.torch_before is not None:
            until = f"torch before {'.'.join(map(str, fault.torch_before))}"
        assert (
            f"| {names} | {fault.what} | {issues} | {fault.guard.__name__.replace('_', ' ')} | "
            f"{until} |" in page
        )
    one_line = " ".join(page.split())
    for what, numbers in NOT_GUARDED.items():
        assert f"{what} ({', '.join(map(str, numbers))})" in one_line
