"""torch's database of modules and optimizers, spelled for CUDA, acts as on the plain CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sweeping import choose, difference_from_each, identical, results_on_cpu
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

import torchdevice


def _inputs(info: Any, device: str) -> list[Any]:
    torch.manual_seed(5)
    return info.module_inputs_func(
        info, device=device, dtype=torch.float32, requires_grad=False, training=True
    )


def _run_module(info: Any, module_input: Any, device: str) -> Any:
    torch.manual_seed(6)
    arguments = module_input.constructor_input
    module = info.module_cls(*arguments.args, **arguments.kwargs)
    module = module.cuda() if device == "cuda" else module
    module.train()
    forward = module_input.forward_input
    if forward is None:
        return None
    args, kwargs = torch.utils._pytree.tree_map(
        lambda x: _placed(x, device), (forward.args, forward.kwargs)
    )
    result = module(*args, **kwargs)
    outputs = [
        t
        for t in torch.utils._pytree.tree_leaves(result)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if outputs:
        sum(o.abs().sum() for o in outputs).backward()
    return result, [p.grad for p in module.parameters()], list(module.state_dict().values())


def _placed(value: Any, device: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().clone()
    return value.to("cuda") if device == "cuda" else value


FUSED_BY_ACCELERATORS = (
    torch.nn.RNN,
    torch.nn.LSTM,
    torch.nn.GRU,
    torch.nn.LSTMCell,
    torch.nn.GRUCell,
)
"""On an accelerator torch runs these modules by other operators than on a CPU, which add in another
order.
"""


@pytest.mark.filterwarnings("ignore")
def test_every_module_gives_the_same_bits(
    target: str, kind: str, sweep: tuple[bool, int], capsys: pytest.CaptureFixture[str]
) -> None:
    modules = choose(module_db, sweep, 30)
    compared, differences, empty = 0, [], []
    for info in modules:
        before = compared
        for plain in _inputs(info, "cpu"):
            try:
                expected = results_on_cpu(
                    target, lambda plain=plain, info=info: _run_module(info, plain, "cpu")
                )
            except Exception:  # this configuration does not run on the plain CPU
                continue
            with torchdevice.portable(target):
                actual = _run_module(info, plain, "cuda")
                difference = difference_from_each(expected, actual, kind)
            if kind != "cpu" and info.module_cls in FUSED_BY_ACCELERATORS:
                torch.testing.assert_close(actual, expected[0], check_device=False)
                difference = ""
            compared += 1
            if difference:
                differences.append(f"{info.name}: {difference}")
        if compared == before:
            empty.append(info.name)
    with capsys.disabled():
        print(
            f"\nmodule_db on {target}: {len(modules)} of {len(module_db)} modules, {compared} "
            "configurations compared"
        )
        for name in empty:
            print(f"  nothing to compare: {name}: no configuration runs on the plain CPU")
        if kind != "cpu":
            print(
                "  close, not identical: "
                f"{', '.join(cls.__name__ for cls in FUSED_BY_ACCELERATORS)}: fused cells"
            )
    assert differences == []
    assert compared >= len(modules)


IMPLEMENTATIONS = ("default", "foreach", "fused", "capturable")


def _options(info: Any, base: dict[str, Any], implementation: str) -> dict[str, Any] | None:
    if implementation == "default":
        return dict(base)
    if implementation == "capturable":
        supports = "capturable" in info.supported_impls or "capturable" in _constructor_names(info)
    else:
        supports = implementation in info.supported_impls
    return {**base, implementation: True} if supports else None


def _constructor_names(info: Any) -> set[str]:
    import inspect

    return set(inspect.signature(info.optim_cls.__init__).parameters)


def _train(info: Any, options: dict[str, Any], device: str) -> Any:
    torch.manual_seed(8)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=False)
    )
    data = torch.randn(6, 4)
    if device == "cuda":
        model, data = model.cuda(), data.to("cuda")
    parameters = list(model.parameters())
    if info.optim_cls.__name__ == "Muon":
        parameters = [p for p in parameters if p.ndim == 2]
    if info.only_supports_sparse_grads:
        table = torch.nn.Embedding(8, 3, sparse=True)
        table = table.cuda() if device == "cuda" else table
        parameters = list(table.parameters())
    optimizer = info.optim_cls(parameters, **options)
    for step in range(4):
        if step == 2:
            # Save the optimizer's state and load it into a new optimizer.
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = info.optim_cls(parameters, **options)
            optimizer.load_state_dict(state)

        def closure(optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            if info.only_supports_sparse_grads:
                loss = table(torch.tensor([1, 2, 5], device=device)).square().sum()
            else:
                loss = model(data).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return [p.detach().clone() for p in parameters]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("info", optim_db, ids=lambda info: info.optim_cls.__name__)
@pytest.mark.filterwarnings("ignore")
def test_every_optimizer_trains_the_same(
    target: str, kind: str, info: Any, implementation: str
) -> None:
    """The state is saved and loaded midway; ``capturable`` is compared with the default."""
    compared = 0
    for configuration in info.optim_inputs_func(device="cpu"):
        options = _options(info, configuration.kwargs, implementation)
        if options is None or "foreach" in configuration.kwargs:
            continue
        plain = {k: v for k, v in options.items() if k != "capturable"}
        try:
            expected = _train(info, plain, "cpu")
        except (RuntimeError, ValueError, TypeError) as refused:
            with torchdevice.portable(target), pytest.raises(type(refused)):
                _train(info, options, "cuda")
            continue
        with torchdevice.portable(target):
            actual = _train(info, options, "cuda")
            difference = identical(expected, actual, kind)
        if implementation == "capturable":
            # The plain CPU refuses ``capturable``, whose arithmetic rounds unlike the default's.
            torch.testing.assert_close(actual, expected, check_device=False)
        else:
            if difference and kind != "cpu" and implementation == "default":
                # Where an accelerator is in use, some optimizers take "foreach" by default.
                expected = _train(info, {**plain, "foreach": True}, "cpu")
                with torchdevice.portable(target):
                    difference = identical(expected, actual, kind)
            assert difference == "", (configuration.desc, options)
        compared += 1
    supported = _options(info, {}, implementation) is not None
    assert compared > 0 or not supported
