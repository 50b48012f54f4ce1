"""What a program sees of torch in a scope, by its own modes and by everything that it can reach.

A mode sees the calls that it sees without a scope, and nothing that a program reads on simulated
devices names their type, a class of this package, or the CPU's device where CUDA's belongs.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

import torchdevice

nn, F = torch.nn, torch.nn.functional

# ---- modes ---------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    """Notes the functions that it sees, and the text of their arguments other than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.texts: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(resolve_name(func) or func.__name__))
        self.texts.append(
            str([value for value in args if not isinstance(value, torch.Tensor)]) + str(kwargs)
        )
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Notes the operators that it sees, and their keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.texts: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        self.texts.append(str(kwargs))
        return func(*args, **(kwargs or {}))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2 * torch.ones(2, device=x.device)


def ones(device: str, *shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape or (2, 2), device=device, **options)


def trained(device: str, step: Callable[[nn.Module], Any]) -> None:
    model = nn.Linear(2, 2).to(device)
    model(ones(device)).sum().backward()
    step(model)


def saved(device: str) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(ones(device), file)
    file.seek(0)
    return file


def by_default(device: str) -> None:
    with torch.device(device):
        torch.ones(2)
    torch.set_default_device(device)
    try:
        torch.zeros(2)
    finally:
        torch.set_default_device(None)


PROGRAMS: dict[str, Callable[[str], Any]] = {
    "a factory": ones,
    "a factory without a device": lambda d: torch.ones(3),
    "a device": lambda d: torch.device(d),
    "an ordinal": lambda d: torch.device(d, 0) if d == "cuda" else torch.device(d),
    "to": lambda d: torch.ones(3).to(d),
    "to and back": lambda d: ones(d).cpu(),
    "to a dtype": lambda d: ones(d).to(torch.float16),
    "to another": lambda d: torch.ones(3).to(ones(d)),
    "type_as": lambda d: torch.ones(3).type_as(ones(d)),
    "type": lambda d: (ones(d).type(), torch.ones(1).type(torch.float64)),
    "double": lambda d: ones(d).double(),
    "clone": lambda d: ones(d).clone(),
    "copy_": lambda d: ones(d).copy_(torch.ones(2, 2)),
    "a read": lambda d: (ones(d).device, ones(d).is_cuda, ones(d, 1).item()),
    "a storage": lambda d: ones(d).untyped_storage().device,
    "likes": lambda d: (torch.zeros_like(ones(d)), ones(d).new_ones(3), ones(d).new_tensor([1.0])),
    "data": lambda d: (torch.tensor([1, 2], device=d), torch.as_tensor([1, 2], device=d)),
    "from meta": lambda d: torch.empty_like(torch.ones(2, device="meta"), device=d),
    "a module": lambda d: nn.Linear(2, 2).to(d).half(),
    "an empty module": lambda d: nn.Linear(2, 2, device="meta").to_empty(device=d),
    "a lazy module": lambda d: nn.LazyLinear(2).to(d)(ones(d)),
    "a forward": lambda d: nn.Linear(2, 2).to(d)(ones(d)),
    "layers": lambda d: nn.BatchNorm1d(2).to(d)(F.conv1d(ones(d, 2, 2, 2), ones(d, 2, 2, 1))),
    "products": lambda d: (
        ones(d) @ ones(d),
        torch.mm(ones(d), ones(d)),
        torch.bmm(ones(d, 1, 2, 2), ones(d, 1, 2, 2)),
    ),
    "attention": lambda d: F.scaled_dot_product_attention(*[ones(d, 1, 2, 3, 4)] * 3),
    "backward": lambda d: (ones(d, 3, requires_grad=True) * 2).sum().backward(),
    "a custom function": lambda d: Cube.apply(ones(d, 2, requires_grad=True)).sum().backward(),
    "sgd": lambda d: trained(
        d, lambda model: torch.optim.SGD(model.parameters(), foreach=False).step()
    ),
    "clipping": lambda d: trained(
        d, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    ),
    "operators": lambda d: (
        torch.ops.aten.ones.default([2], device=d),
        torch.ops.aten.add(ones(d), 1),
    ),
    "save": saved,
    "load": lambda d: torch.load(saved("cpu"), map_location=d),
    "a pickle": lambda d: pickle.loads(pickle.dumps(ones(d))),
    "a copy": lambda d: copy.deepcopy(ones(d)),
    "text": lambda d: repr(ones(d)),
    "a generator": lambda d: torch.randn(3, generator=torch.Generator(d), device=d),
    "a default device": by_default,
    "autocast": lambda d: torch.autocast(d, torch.bfloat16)(
        lambda: torch.softmax(ones(d) @ ones(d), 0)
    )(),
    "a scaler": lambda d: torch.amp.GradScaler(d).scale(ones(d)),
    "dlpack": lambda d: torch.from_dlpack(torch.ones(2)),
    "numpy": lambda d: ones(d).cpu().numpy(),
    "a mask": lambda d: ones(d)[ones(d) > 0],
    "transforms": lambda d: (
        torch.func.grad(lambda x: x.sum())(ones(d)),
        torch.vmap(lambda x: x + 1)(ones(d)),
    ),
    "a range": lambda d: torch.arange(3, device=d),
    "a nested tensor": lambda d: torch.nested.nested_tensor([torch.ones(2)], device=d),
    "a sparse tensor": lambda d: torch.sparse_coo_tensor([[0]], [1.0], (2,), device=d),
    "a subclass": lambda d: nn.Parameter(ones(d)) * nn.Buffer(ones(d)),
}

BY_DEVICE = {"attention", "dlpack", "layers", "save", "load", "a pickle", "a copy", "numpy"}
"""Programs for which torch, or the kernels of the device, run other operators on an accelerator
than on the CPU.
"""

COPIES = {"aten._to_copy.default", "aten.clone.default"}
"""Copies between the accelerator and the CPU, which a program on the CPU alone does not make."""


def seen(device: str, mode: type[Functions] | type[Operators]) -> dict[str, Functions | Operators]:
    found = {}
    for name, program in PROGRAMS.items():
        torch.manual_seed(0)
        found[name] = mode()
        with warnings.catch_warnings(), found[name]:
            warnings.simplefilter("ignore")
            program(device)
    return found


@pytest.mark.parametrize("mode", [Functions, Operators])
@pytest.mark.parametrize("place", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_the_modes_of_a_program_see_the_calls_of_the_program(
    engine: str, place: str, mode: Any
) -> None:
    plain = seen("cpu", mode)
    with torchdevice.portable(place, engine=engine):
        found = seen("cuda", mode)
    left_out = COPIES if mode is Operators else set()
    for name in PROGRAMS:
        if not (name in BY_DEVICE and mode is Operators):
            expected, got = (
                [call for call in of[name].names if call not in left_out] for of in (plain, found)
            )
            assert got == expected, name
        assert plain[name].names or mode is Operators
        assert "simulated" not in " ".join(found[name].texts).lower(), name


@pytest.mark.parametrize("place", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_what_a_mode_calls_is_rewritten(engine: str, place: str) -> None:
    class Replacing(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.zeros:
                assert kwargs == {"device": "cuda"}
                return torch.full(*args, 7.0, device="cuda:0")
            return func(*args, **(kwargs or {}))

    class ReplacingOperators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.zeros.default:
                return torch.full(*args, 7.0, device="cuda:0")
            return func(*args, **(kwargs or {}))

    with torchdevice.portable(place, engine=engine):
        device = torch.ones(1, device="cuda").device
        for mode in (Replacing(), ReplacingOperators()):
            with mode, mode:
                made = torch.zeros((2,), device="cuda")
            assert (made.device, made.tolist()) == (device, [7.0, 7.0])
            assert "__torch_dispatch__" not in vars(mode)


# ---- everything that can be reached --------------------------------------------------------------


def raised(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def roots() -> Iterator[tuple[str, Any]]:
    """Yield what a program makes on the accelerator, with a name."""
    x = ones("cuda", requires_grad=True)
    y = (x * 2).sum()
    y.backward()
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(ones("cuda")).sum().backward()
    optimizer.step()
    yield "tensor", x
    yield "result", y
    yield "function", y.grad_fn
    yield "module", model
    yield "optimizer", optimizer
    yield "state", model.state_dict()
    yield "generator", torch.Generator("cuda")
    yield "default generator", torch.cuda.default_generators[0]
    yield "device", torch.device("cuda")
    yield "storage", x.untyped_storage()
    yield "stream", torch.cuda.current_stream()
    yield "event", torch.cuda.Event()
    yield "accelerator", torch.accelerator.current_accelerator()
    with FakeTensorMode():
        yield "fake", ones("cuda")
    graph = make_fx(lambda x: x + torch.ones(2, device="cuda"))(ones("cuda"))
    yield "graph", graph
    yield (
        "nodes",
        [(node.op, str(node.target), node.args, node.kwargs) for node in graph.graph.nodes],
    )
    yield "sparse", torch.eye(2, device="cuda").to_sparse()
    yield "nested", torch.nested.nested_tensor([torch.ones(2)], device="cuda")
    yield "exported", torch.export.export(model, (ones("cuda"),))
    yield "scaler", torch.amp.GradScaler("cuda")
    yield "autocast", torch.autocast("cuda")
    yield "captured", torch.cuda.CUDAGraph()
    yield "pool", torch.cuda.MemPool()
    yield (
        "figures",
        (torch.cuda.memory_stats(), torch.cuda.memory_snapshot(), torch.cuda.memory_summary()),
    )
    yield "legacy", torch.cuda.FloatTensor([1.0])
    yield "packed", nn.utils.rnn.pack_sequence([ones("cuda")])
    yield "lazy", nn.LazyLinear(2).cuda()
    yield "error of two devices", raised(lambda: x + torch.ones(2, 2))
    yield "error of an ordinal", raised(lambda: torch.ones(1, device="cuda:9"))
    yield "error of memory", raised(lambda: torch.empty(1 << 50, device="cuda"))
    yield "error of numpy", raised(lambda: x.detach().numpy())
    yield "error of a layout", raised(lambda: torch.eye(2, device="cuda").to_sparse().dim_order())


HOST = {"cpu", "numpy", "tolist", "data_ptr", "get_state", "seed", "stack", "fake_device", "cache"}
"""Names whose values are the host's by their meaning, and of torch's own inside of fake tensors."""

NOT_CALLED = {
    "bernoulli",
    "multinomial",
    "backward",
    "synchronize",
    "share_memory",
    "pin_memory",
    "abort",
    "release",
    "to_sparse_csr",
}
"""Methods that need other values, end something, or share parts of a sparse tensor."""

TYPED = {"stream", "event", "captured", "pool", "figures", "error of memory"}
"""Objects whose types have names of this package, which ``isinstance`` does not show."""


def complaints(root: str, path: str, value: Any) -> Iterator[str]:
    text = value if isinstance(value, str) else repr(value)
    text += "" if root in TYPED else f" {type(value).__module__}.{type(value).__qualname__}"
    for word in ("simulated", "torchdevice"):
        # A missing kernel's error lists the files that registered others.
        if word in text.lower() and "registered at" not in text:
            yield f"{path}: {text[:300]}"
    if isinstance(value, torch.device) and value.type == "cpu":
        yield f"{path}: {value}"


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's public attributes, and the results or errors of plain methods."""
    if isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif type(value).__module__ != "builtins":
        for name in dir(value):
            # Methods that end in "_" write.
            if (
                not name.startswith("_")
                and not name.endswith("_")
                and name not in HOST | NOT_CALLED
            ):
                yield f".{name}", result_of(value, name)


def result_of(value: Any, name: str) -> Any:
    try:
        found = getattr(value, name)
        if (
            isinstance(found, (types.BuiltinMethodType, types.MethodType))
            and found.__self__ is value
        ):
            found = found()
    except Exception as error:
        return error
    return (
        None
        if isinstance(found, (type, types.FunctionType, types.MethodType, types.ModuleType))
        else found
    )


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_nothing_that_a_program_can_reach_names_another_device(engine: str) -> None:
    found: list[str] = []
    with (
        torchdevice.simulate(engine=engine),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for root, value in roots():
            reached = [(root, value)]
            for name, first in members(value):
                reached.append((f"{root}{name}", first))
                if isinstance(first, (list, tuple, dict)):
                    reached += [(f"{root}{name}{key}", second) for key, second in members(first)]
            found += (each for path, here in reached for each in complaints(root, path, here))
            if root not in TYPED and root not in ("generator", "default generator"):
                with contextlib.suppress(Exception):  # what cannot be pickled
                    found += complaints(
                        root, f"pickled {root}", pickle.dumps(value).decode("latin-1")
                    )
            assert len(reached) > (10 if isinstance(value, (torch.Tensor, nn.Module)) else 0)
    assert found == []
