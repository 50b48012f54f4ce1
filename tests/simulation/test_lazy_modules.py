"""Lazy modules: all of torch's database in lazy form, and moves of torch's lazy modules."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from sweeping import choose, difference_from_each, results_on_cpu, samples_of
from test_module_sweep import FUSED_BY_ACCELERATORS
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import torchdevice


class InLazyForm(LazyModuleMixin, nn.Module):
    """A module whose parameters and buffers get their shapes and values at the first call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.values: list[tuple[nn.Module, str, torch.Tensor]] = []
        for owner in list(module.modules()):
            for name, value in owner._parameters.items():
                if value is not None:
                    self.values.append((owner, name, value.detach().clone()))
                    owner._parameters[name] = UninitializedParameter(
                        value.requires_grad, None, value.dtype
                    )
            for name, value in owner._buffers.items():
                if value is not None:
                    self.values.append((owner, name, value.detach().clone()))
                    owner._buffers[name] = UninitializedBuffer(False, None, value.dtype)

    def has_uninitialized_params(self) -> bool:
        return any(map(is_lazy, (*self.parameters(), *self.buffers())))

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> None:
        for owner, name, value in self.values:
            lazy: Any = getattr(owner, name)
            lazy.materialize(value.shape)
            with torch.no_grad():
                lazy.copy_(value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _moved(module: nn.Module, device: str) -> nn.Module:
    """Return a module after casts and, on the device, moves between it and the CPU."""
    if device == "cpu":
        return module.half().double().float()
    return (
        module.cuda()
        .half()
        .cpu()
        .to("cuda:0")
        .double()
        .to(torch.device("cuda"))
        .cpu()
        .float()
        .cuda()
    )


def _result(info: Any, module_input: Any, device: str) -> Any:
    torch.manual_seed(6)
    arguments, forward = module_input.constructor_input, module_input.forward_input
    module = _moved(
        InLazyForm(info.module_cls(*arguments.args, **arguments.kwargs)), device
    ).train()
    assert {each.device.type for each in module.parameters()} <= {
        torch.empty(0, device=device).device.type
    }
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda each: each.detach().clone().to(device), (forward.args, forward.kwargs)
    )
    result = module(*args, **kwargs)
    leaves = [
        each
        for each in pytree.tree_leaves(result)
        if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    if leaves:
        sum(each.abs().sum() for each in leaves).backward()
    assert not any(map(is_lazy, module.parameters()))
    return result, [each.grad for each in module.parameters()], list(module.state_dict().values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_every_module_in_lazy_form_gives_the_same_bits(
    target: str, kind: str, engine: str, sweep: tuple[bool, int]
) -> None:
    chosen = [
        info
        for info in choose(module_db, sweep, 30)
        if not issubclass(info.module_cls, LazyModuleMixin)
    ]
    compared, differences = set(), []
    for info in chosen:
        torch.manual_seed(5)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        )
        for plain in inputs[:3]:
            try:
                expected = results_on_cpu(
                    target, lambda plain=plain, info=info: _result(info, plain, "cpu")
                )
            except Exception:
                # This configuration does not run lazily, or not at all, on the plain CPU.
                continue
            compared.add(info.name)
            with torchdevice.portable(target, engine=engine):
                actual = _result(info, plain, "cuda")
                difference = difference_from_each(expected, actual, kind)
            if kind != "cpu" and info.module_cls in FUSED_BY_ACCELERATORS:
                torch.testing.assert_close(actual, expected[0], check_device=False)
            elif difference:
                differences.append(f"{info.name}: {difference}")
    assert differences == []
    assert len(compared) > 0.8 * len(chosen)


LAZY = {
    "LazyLinear": (lambda **options: nn.LazyLinear(3, **options), (2, 4)),
    "LazyConv2d": (lambda **options: nn.LazyConv2d(3, 2, **options), (2, 4, 5, 5)),
    "LazyConvTranspose1d": (lambda **options: nn.LazyConvTranspose1d(3, 2, **options), (2, 4, 5)),
    "LazyBatchNorm1d": (lambda **options: nn.LazyBatchNorm1d(**options), (2, 4)),
    "LazyInstanceNorm2d": (
        lambda **options: nn.LazyInstanceNorm2d(affine=True, **options),
        (2, 4, 5, 5),
    ),
}


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("name", LAZY)
class TestMovesOfLazyModules:
    """torch's lazy modules keep device and dtype in every move, before they have a shape."""

    @pytest.fixture(autouse=True)
    def in_scope(self, target: str, engine: str) -> Any:
        with torchdevice.portable(
            target, engine=engine, devices=2 if target.startswith("simulated") else None
        ):
            yield

    def check(
        self, name: str, module: nn.Module, device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = LAZY[name][1]
        expected = torch.empty(0, device=device).device
        for each in (*module.parameters(), *module.buffers()):
            assert is_lazy(each) <= (each.device == expected)
            assert not (is_lazy(each) and each.is_floating_point()) or each.dtype is dtype
        result = module(torch.ones(shape, device=device, dtype=dtype))
        assert result.device == expected and result.dtype is dtype
        assert not any(map(is_lazy, (*module.parameters(), *module.buffers())))

    def test_moves(self, name: str) -> None:
        make = LAZY[name][0]
        self.check(name, make().cuda(), "cuda")
        self.check(name, make().cuda().cpu(), "cpu")
        self.check(name, make(device="cuda").cpu(), "cpu")
        self.check(name, make(device="cpu").cuda().to("cpu").to("cuda:0"), "cuda")
        self.check(name, make().cuda().double(), "cuda", torch.float64)
        self.check(name, make().cuda().half().float(), "cuda")
        if torch.cuda.device_count() > 1:
            self.check(name, make().cuda().to("cuda:1"), "cuda:1")
            self.check(name, make(device="cuda:1").cuda(0), "cuda:0")

    def test_copies_and_states(self, name: str) -> None:
        make = LAZY[name][0]
        module = make().cuda()
        if not list(module.buffers()):  # torch copies no lazy buffer
            self.check(name, copy.deepcopy(module), "cuda")
        other = make()
        other.load_state_dict(module.state_dict())
        self.check(name, other, "cpu")
        saved = io.BytesIO()
        torch.save(module.state_dict(), saved)
        saved.seek(0)
        module.load_state_dict(torch.load(saved, weights_only=False))
        self.check(name, module, "cuda")
        late = make().cuda()
        late.load_state_dict(module.state_dict())
        assert all(map(torch.equal, late.state_dict().values(), module.state_dict().values()))

    def test_in_data_parallel(self, name: str) -> None:
        make, shape = LAZY[name]
        module = make().cuda()
        module(torch.ones(shape, device="cuda"))  # torch replicates no lazy module
        parallel = nn.DataParallel(module)
        assert parallel(torch.ones(4, *shape[1:], device="cuda")).shape[0] == 4


class Disguised(torch.Tensor):
    """A tensor whose class has no shape, strides and dtype that anybody may read from Python."""

    def _none(self) -> Any:
        raise AssertionError("the program's own property was read")

    shape = dtype = property(_none)
    stride = _none  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


def _disguised(value: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor,
        lambda each: each.as_subclass(Disguised) if each.layout is torch.strided else each,
        value,
    )


@pytest.mark.one_engine
@pytest.mark.filterwarnings("ignore")
def test_kernels_read_tensors_as_torch_does(sweep: tuple[bool, int]) -> None:
    """Simulated kernels read a tensor as torch's do, not through its class's methods."""
    differences, compared = [], 0
    for op in choose(op_db, sweep, 60):
        torch.manual_seed(3)
        for given in list(samples_of(op, torch.float32))[:2] if torch.float32 in op.dtypes else ():
            arguments = given.input, given.args, given.kwargs
            try:
                torch.manual_seed(4)
                first, args, kwargs = _disguised(arguments)
                op(first, *args, **kwargs)
            except Exception:  # Python code of torch reads it
                continue
            with torchdevice.simulate("cuda"):
                first, args, kwargs = moved = pytree.tree_map_only(
                    torch.Tensor, torch.Tensor.cuda, arguments
                )
                try:
                    op(first, *args, **kwargs)
                except Exception:
                    continue
                first, args, kwargs = _disguised(moved)
                try:
                    op(first, *args, **kwargs)
                    compared += 1
                except Exception as error:
                    differences.append(f"{op.formatted_name}: {error!r}")
    assert differences == []
    assert compared > 60
