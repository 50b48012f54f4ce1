"""What programs read on simulated devices (``identity="program"``) names no other type."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint
from sweeping import samples_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import torchdevice
from torchdevice.torch_modules.apis import autocast_lists

ENGINES = ("mode", "wrap")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- kernels that call operators above autograd --------------------------------------------------

ABOVE_AUTOGRAD = {"scaled_dot_product_attention"}.union(
    name.partition(".")[0] for name in autocast_lists.policies()
)
"""Operators whose kernels for the device call others, which save tensors."""


def samples(operator: Any) -> Iterator[Callable[[], Any]]:
    """Yield calls of an operator on the device."""
    for sample in list(samples_of(operator, torch.float32, requires_grad=True))[:3]:

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.detach().to("cuda").requires_grad_(value.requires_grad)

        there = sample.transform(moved)
        yield lambda there=there: operator(there.input, *there.args, **there.kwargs)


def operators_above_autograd() -> list[Any]:
    found = [
        op
        for op in op_db
        if op.aten_name in ABOVE_AUTOGRAD or op.name.split(".")[-1] in ABOVE_AUTOGRAD
    ]
    return [op for op in found if op.supports_autograd and torch.float32 in op.dtypes]


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.parametrize("identity", ["program", "target"])
def test_hooks_on_saved_tensors_see_the_scopes_device(engine: str, identity: str) -> None:
    seen: dict[str, int] = {}
    expected = "cuda:0" if identity == "program" else "simulated:0"

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[str(tensor.device)] = seen.get(str(tensor.device), 0) + 1
        return tensor

    with torchdevice.simulate(engine=engine, identity=identity), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in operators_above_autograd():
            for call in samples(operator):
                for cast in (False, True):
                    with (
                        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                        torch.autocast("cuda", dtype=torch.bfloat16, enabled=cast),
                        # Dtypes that torch cannot mix under autocast.
                        contextlib.suppress(RuntimeError),
                    ):
                        call()
    assert seen.keys() == {expected} and seen[expected] > 100


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": lambda: torch.ones(4, 4, dtype=torch.bool, device="cuda").tril()},
    "bias": {"attn_mask": lambda: torch.zeros(4, 4, device="cuda", requires_grad=True)},
    "dropout": {"dropout_p": 0.5},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_recomputed(engine: str, name: str, cast: bool, reentrant: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        options = {
            key: value() if callable(value) else value for key, value in ATTENTION[name].items()
        }
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cast):
            return torch.nn.functional.scaled_dot_product_attention(
                q * 2, k * 2, k, **options
            ).float()

    with torchdevice.simulate(engine=engine):
        found = []
        for way in (lambda q, k: checkpoint(attend, q, k, use_reentrant=reentrant), attend):
            torch.manual_seed(0)
            q = torch.randn(1, 4, 4, 8, device="cuda", requires_grad=True)
            k = torch.randn(
                1, 2 if name == "grouped" else 4, 4, 8, device="cuda", requires_grad=True
            )
            way(q, k).sum().backward()
            found.append((q.grad, k.grad))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gpt2_with_gradient_checkpointing(engine: str, reentrant: bool, attention: str) -> None:
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=64,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=1,
    )
    config._attn_implementation = attention

    def gradients(device: str, checkpointing: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).to(device).train()
        if checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
        x = torch.arange(16, device=device).view(2, 8)
        torch.manual_seed(1)
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        return [
            parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None
        ]

    with torchdevice.simulate(engine=engine), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with_it, without = gradients("cuda", True), gradients("cuda", False)
    assert len(with_it) > 20 and all(map(torch.equal, with_it, without))


# ---- everything that names a device --------------------------------------------------------------


class Program:
    """What a program reads; ``device`` is its last one, as text."""

    def __init__(self, accelerator: str, count: int):
        self.accelerator, self.index = accelerator, count - 1
        self.device = f"{accelerator}:{self.index}"

    def x(self, *shape: int) -> torch.Tensor:
        return torch.ones(*(shape or (3,)), device=self.device)

    def saved(self, value: Any, **options: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file, **options)
        return file.getvalue()

    def linear(self) -> torch.nn.Linear:
        return torch.nn.Linear(2, 2).to(self.device)

    def checkpointed(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one process alone
            torch.distributed.checkpoint.save({"x": self.x()}, checkpoint_id=folder, no_dist=True)
            return b"".join(path.read_bytes() for path in Path(folder).iterdir())

    def profiled(self) -> str:
        with torch.profiler.profile() as profile:
            self.x() + 1
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(trace))
            return profile.key_averages().table() + trace.read_text()

    def default(self, device: Any) -> Any:
        torch.set_default_device(device)
        try:
            return torch.get_default_device(), torch.ones(1).device
        finally:
            torch.set_default_device(None)

    def stepped(self) -> Any:
        model = self.linear()
        optimizer = torch.optim.Adam(model.parameters())
        model(self.x(1, 2)).sum().backward()
        optimizer.step()
        return self.saved(optimizer.state_dict()) + str(optimizer.state).encode()

    def exported(self) -> Any:
        class Adding(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + torch.ones(3, device=x.device)

        exported = torch.export.export(Adding(), (self.x(),))
        assert exported.module()(self.x()).tolist() == [2.0] * 3
        return str(exported)

    def compiled(self) -> Any:
        return torch.compile(
            lambda x: (x + 1, x.device, str(x.device), x.is_cuda), backend="eager"
        )(self.x())


READ: dict[str, Callable[[Program], Any]] = {
    "an ordinal as a device": lambda p: torch.device(p.index),
    "a device of text": lambda p: torch.device(p.device),
    "a device of text and ordinal": lambda p: torch.device(p.accelerator, p.index),
    "a device of a device": lambda p: torch.device(torch.device(p.device)),
    "a tensor's device": lambda p: p.x().device,
    "a tensor on an ordinal": lambda p: torch.ones(1, device=p.index).device,
    "a tensor moved to an ordinal": lambda p: torch.ones(1).to(p.index).device,
    "a storage's device": lambda p: p.x().untyped_storage().device,
    "a typed storage's device": lambda p: p.x().storage().device,
    "a generator's device": lambda p: torch.Generator(p.device).device,
    "the default device": lambda p: p.default(p.device)[0],
    "the default device by ordinal": lambda p: p.default(p.index)[0],
    "what the default device makes": lambda p: p.default(p.index)[1],
    "a pickled device": lambda p: pickle.loads(pickle.dumps(torch.device(p.index))),
    "a compiled read": lambda p: p.compiled()[1],
    "an export's device": lambda p: (
        torch.export.export(p.linear(), (p.x(1, 2),)).module()(p.x(1, 2)).device
    ),
}
"""What must be the program's device."""

WRITTEN: dict[str, Callable[[Program], Any]] = {
    "text": lambda p: (
        f"{p.x().device} {p.x().device!r} {p.x()} {p.x(2000)!r} {torch.nn.Parameter(p.x())}"
    ),
    "type": lambda p: p.x().type(),
    "storages": lambda p: (p.x().untyped_storage(), p.x().storage(), p.x().storage().type()),
    "generators": lambda p: (torch.Generator(p.device), pickle.dumps(torch.Generator(p.device))),
    "accelerator": lambda p: (
        torch.accelerator.current_accelerator(),
        torch.accelerator.current_device_index(),
    ),
    "streams": lambda p: (torch.Stream(p.device), torch.Event(p.accelerator)),
    "pickles": lambda p: pickle.dumps(
        (p.x(), torch.nn.Parameter(p.x()), p.x().device, torch.device(p.index))
    ),
    "a pickled storage": lambda p: pickle.dumps(p.x().untyped_storage()),
    "a saved module": lambda p: p.saved(p.linear()),
    "a saved state": lambda p: p.saved(p.linear().state_dict()),
    "a saved state in the old form": lambda p: p.saved(
        p.linear().state_dict(), _use_new_zipfile_serialization=False
    ),
    "an optimizer": Program.stepped,
    "a profile": Program.profiled,
    "a distributed checkpoint": Program.checkpointed,
    "autocast": lambda p: (
        torch.autocast(p.x().device.type).device,
        torch.amp.GradScaler(p.accelerator).__dict__,
    ),
    "a traced graph": lambda p: make_fx(lambda x: x + torch.ones(3, device=p.device))(p.x()).code,
    "an exported program": Program.exported,
    "a compiled program": Program.compiled,
    "a copy": lambda p: (copy.deepcopy(p.x()), p.x().as_subclass(torch.nn.Buffer)),
    "transforms": lambda p: torch.func.grad(lambda x: (repr(x), x.sum())[1])(p.x()),
    "nodes": lambda p: (p.x().requires_grad_() * 2).grad_fn._input_metadata,  # type: ignore[union-attr]
    "checkpointing": lambda p: torch.utils.checkpoint._infer_device_type(p.x()),
    "a module of torch": lambda p: torch.get_device_module(p.x().device),
    "a parsed device": lambda p: torch._C._nn._parse_to(p.device)[0],
    "a module of nn": lambda p: (p.linear(), list(p.linear().parameters())),
}
"""What must not name another device type."""


def _backward_after_a_write(p: Program) -> None:
    y = p.x().requires_grad_() * 2
    z = y * y
    y.add_(1)
    z.sum().backward()


def _gradient_elsewhere(p: Program) -> None:
    p.x().requires_grad_().grad = torch.ones(3)


FAILING: dict[str, Callable[[Program], Any]] = {
    "add": lambda p: p.x() + torch.ones(3),
    "mm": lambda p: torch.mm(p.x(2, 2), torch.ones(2, 2)),
    "numpy": lambda p: p.x().numpy(),
    "an array": lambda p: numpy.asarray(p.x()),
    "tensor_split": lambda p: torch.tensor_split(p.x(4), torch.tensor([1], device=p.device)),
    "tensor_split of a tensor": lambda p: p.x(4).tensor_split(torch.tensor([1], device=p.device)),
    "a generator": lambda p: torch.randn(3, generator=torch.Generator(), device=p.device),
    "a gradient": _gradient_elsewhere,
    "a write before backward": _backward_after_a_write,
    "no kernel": lambda p: torch.ops.aten._nnz(p.x()),
    "quantized": lambda p: torch.ops.aten.dequantize.self(p.x().to(torch.int8)),
    "embedding_bag": lambda p: torch.nn.functional.embedding_bag(
        torch.tensor([0]), p.x(2, 2), torch.tensor([0])
    ),
    "an LSTM": lambda p: torch.nn.LSTM(2, 2).to(p.device)(torch.ones(1, 2)),
    "an LSTM on the CPU": lambda p: torch.nn.LSTM(2, 2)(p.x(1, 2)),
    "a GRU": lambda p: torch.nn.GRU(2, 2)(p.x(1, 2)),
    "a packed sequence": lambda p: torch.nn.utils.rnn.pack_padded_sequence(
        p.x(2, 2, 2), torch.tensor([2, 1], device=p.device)
    ),
    "batch norm": lambda p: torch.nn.BatchNorm1d(3)(p.x(2, 3)),
    "convolution": lambda p: torch.nn.Conv1d(1, 1, 1)(p.x(1, 1, 3)),
    "where": lambda p: torch.where(torch.ones(3) > 0, p.x(), torch.ones(3)),
    "stack": lambda p: torch.stack([p.x(), torch.ones(3)]),
    "out": lambda p: torch.add(p.x(), 1, out=torch.empty(3)),
}
"""What raises, naming devices."""


@pytest.fixture(params=["cuda", "mps"])
def program(request: pytest.FixtureRequest, engine: str) -> Iterator[Program]:
    accelerator, count = request.param, 2 if request.param == "cuda" else 1
    with torchdevice.simulate(accelerator, count, written_for=accelerator, engine=engine):
        yield Program(accelerator, count)


def named(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else f"{value!r} {value}"


@pytest.mark.parametrize("name", READ)
def test_a_device_that_is_read_is_the_programs(program: Program, name: str) -> None:
    device = READ[name](program)
    assert device == torch.device(program.accelerator, program.index)
    assert (str(device), device.type) == (program.device, program.accelerator)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_names_no_other_device(program: Program, name: str) -> None:
    if name == "a distributed checkpoint" and program.accelerator == "mps":
        pytest.xfail(
            "torch asks torch.mps for a stream, as soon as an out-of-tree backend is there"
        )
    assert "simulated" not in named(WRITTEN[name](program)).lower()


@pytest.mark.parametrize("name", FAILING)
def test_an_error_names_no_other_device(program: Program, name: str) -> None:
    try:
        FAILING[name](program)
    except Exception as error:
        assert "simulated" not in str(error).lower(), error
    else:
        assert name in ("embedding_bag", "quantized"), "nothing was raised"


def test_the_words_are_cudas() -> None:
    with (
        torchdevice.simulate(),
        pytest.raises(RuntimeError, match=r"inplace operation: \[torch\.cuda\.FloatTensor \[3"),
    ):
        _backward_after_a_write(Program("cuda", 1))


class TestIdentity:
    def test_reads_say_cuda(self, devices: torchdevice.Scope) -> None:
        x = torch.zeros(2, device="cuda:1")
        assert x.device == torch.device("cuda:1") and x.is_cuda and x.get_device() == 1
        assert (
            torch.device(1) == x.device
            and torch.zeros(1, device=torch.device(1)).device == x.device
        )
        assert x.type() == "torch.cuda.FloatTensor"
        assert repr(x) == "tensor([0., 0.], device='cuda:1')"
        assert str(torch.nn.Parameter(x)).endswith("device='cuda:1', requires_grad=True)")
        assert torch.Generator("cuda:1").device == torch.device("cuda:1")
        assert not torch.zeros(1).is_cuda and torch.zeros(1).device.type == "cpu"

    def test_storages_and_texts_say_cuda(self, devices: torchdevice.Scope) -> None:
        x, second = torch.ones(2, device="cuda:1"), torch.device("cuda:1")
        storage = x.untyped_storage()
        assert (
            storage.device
            == x.storage().device
            == torch.UntypedStorage(4, device="cuda:1").device
            == second
        )
        assert storage.is_cuda and x.storage().is_cuda and storage.get_device() == 1
        assert "device=cuda:1" in repr(storage) and "device=cuda:1" in repr(x.storage())
        assert f"{x.device} {x}" == "cuda:1 tensor([1., 1.], device='cuda:1')"
        assert (
            torch.Generator("cuda:1").clone_state().device
            == torch.cuda.default_generators[1].device
            == second
        )
        assert (
            not torch.UntypedStorage(4).is_cuda
            and torch.ones(1).untyped_storage().device.type == "cpu"
        )

    @pytest.mark.parametrize("identity", ["program", "target"])
    def test_work_with_storages(self, identity: str) -> None:
        with torchdevice.simulate(count=2, identity=identity):
            x = torch.arange(3.0, device="cuda:1")
            storage = x.untyped_storage()
            for copied in (
                storage.clone(),
                copy.deepcopy(storage),
                storage.cpu().to(device=torch.device("cuda:1")),
            ):
                assert (
                    copied.device == x.device
                    and torch.empty(0, device="cuda:1").set_(copied).numel() == 3
                )
            assert storage.to(device=torch.device("cuda:1")) is storage
            assert storage.cpu().device.type == "cpu"
            assert torch.tensor(x.storage(), device="cuda:1").tolist() == [0, 1, 2]
            assert torch.tensor(torch.ones(2, device="cuda").storage()).tolist() == [1, 1]
            first = torch.ones(2, device="cuda").untyped_storage()
            assert torch.cuda.FloatStorage(wrap_storage=first).tolist() == [1, 1]
            file = io.BytesIO()
            torch.save(x, file)
        assert b"cuda:1" in file.getvalue()

    def test_identity_target_says_simulated(self) -> None:
        with torchdevice.simulate(identity="target"):
            x = torch.zeros(2, device="cuda")
            assert str(x.device) == "simulated:0" and not x.is_cuda and "simulated:0" in repr(x)
            assert str(x.untyped_storage().device) == "simulated:0" and "simulated:0" in f"{x}"
            assert x.type() == "torch.simulated.FloatTensor"
