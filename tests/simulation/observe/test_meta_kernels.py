"""``simulate(compute="meta")``: shapes, memory and errors without values."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.errors import NoValueError
from torchdevice.simulation.simulated_runtime import SimulatedRuntime

MIB = 1 << 20


def step_of_gpt2(**options: Any) -> tuple[int, int]:
    """Return the peak and the final memory of two training steps of a tiny GPT-2, in bytes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=320,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    with torchdevice.simulate(**options):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.device("cuda"):
            model = transformers.GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.arange(4 * 32, device="cuda").view(4, 32)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def test_a_training_step_takes_the_memory_of_one_with_values() -> None:
    assert step_of_gpt2(compute="meta") == step_of_gpt2()


def peak_of_layers(memory: str) -> int:
    """Return the peak of a training step of 64 GiB of parameters in GiB, as far as it gets."""
    size = 1 << 16  # 16 GiB for each layer
    with torchdevice.simulate(memory=memory, compute="meta"):
        torch.cuda.reset_peak_memory_stats()
        try:
            layers = [torch.nn.Linear(size, size, bias=False, device="cuda") for _ in range(4)]
            optimizer = torch.optim.AdamW([layer.weight for layer in layers], foreach=False)
            torch.nn.Sequential(*layers)(torch.zeros(1, size, device="cuda")).sum().backward()
            optimizer.step()
        except torch.cuda.OutOfMemoryError as error:
            assert "Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 160.00 GiB" in str(
                error
            )
        return torch.cuda.max_memory_allocated() >> 30


@pytest.mark.parametrize(
    ("shape", "dtype", "statistics"),
    [
        ((8, 1024, 4), torch.float32, 0),
        ((8, 1024, 4, 4), torch.float32, 0),
        ((8, 1024), torch.float32, 2 * 4096),
        ((8, 1024, 4, 4), torch.bfloat16, 2 * 4096),
    ],
)
def test_a_batch_norm_that_trains_nothing_keeps_what_its_kernel_on_cuda_does(
    shape: tuple[int, ...], dtype: torch.dtype, statistics: int
) -> None:
    """cuDNN's keeps no statistics; torch's own, of two dimensions and bfloat16, keeps both."""
    with torchdevice.simulate(compute="meta"):
        norm = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
        layer = norm[len(shape)](1024).cuda().to(dtype).eval()
        x = torch.rand(shape, device="cuda", dtype=dtype)
        before = torch.cuda.memory_allocated()
        y = layer(x)
        assert torch.cuda.memory_allocated() - before == y.nbytes + statistics


def test_a_model_larger_than_this_machine() -> None:
    """Weights, gradients, two AdamW states, with temporaries; also where they do not fit."""
    assert peak_of_layers("320GiB") in range(4 * 64, 4 * 64 + 50)
    assert 128 <= peak_of_layers("160GiB") <= 160


def sparse(indices: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    """Return a sparse matrix, unchecked, as that takes values; torch warns otherwise."""
    return torch.sparse_coo_tensor(indices, values, (size, size), check_invariants=False)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "if": lambda x: bool(x.sum() > 0),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", non_blocking=True),
    "tolist": lambda x: x.tolist(),
    "copy to the CPU": lambda x: torch.empty(4, 4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x[0].long(), dim=0),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "to_sparse": lambda x: x.to_sparse(),
    "to_sparse_csr": lambda x: x.to_sparse_csr(),
    "empty sparse": lambda x: torch.empty(4, 4, layout=torch.sparse_coo, device="cuda"),
    "coalesce": lambda x: sparse(x[:2].long(), x[0], 9).coalesce(),
    "product with a sparse tensor": lambda x: sparse(x[:2].long(), x[0], 4) @ x,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_values_is_refused(name: str) -> None:
    with torchdevice.simulate(compute="meta"):
        x = torch.ones(4, 4, device="cuda")
        with pytest.raises(
            NoValueError, match=r"needs the values of a tensor.*leave out compute\."
        ) as caught:
            REFUSED[name](x)
        assert caught.value.operator.startswith("aten::")


@pytest.mark.parametrize("shape", [(4, 4), (1,)])
def test_files_and_other_scopes_get_no_values(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with torchdevice.simulate(compute="meta"):
        x = torch.ones(shape, device="cuda")
        with pytest.raises(NoValueError):
            torch.save(x, tmp_path / "x.pt")
    with torchdevice.simulate(), pytest.raises(NoValueError, match="'aten::add' needs the values"):
        x.add(1)
    with pytest.raises(NoValueError):
        x.add(1)
    assert x.shape == shape and x.t().shape == shape


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("begin", [0, 10])
def test_a_result_in_the_memory_of_an_argument_has_its_storage(begin: int) -> None:
    with torchdevice.simulate(compute="meta"):
        x = torch.ones(300, device="cuda")[begin:50]
        before = torch.cuda.memory_allocated()
        same, _ = torch.native_dropout(x, 0.5, False)
        assert (
            same.data_ptr() == x.data_ptr()
            and same.untyped_storage()._cdata == x.untyped_storage()._cdata
        )
        assert same.shape == x.shape and torch.cuda.memory_allocated() - before == 512  # the mask


def test_numbers_of_tokens_keep_their_values() -> None:
    with torchdevice.simulate(compute="meta"):
        tokens = torch.tensor([[3, 4, 0, 0]]).to("cuda")
        mask = tokens != 0
        assert mask.sum().item() == 2 and mask.any() and tokens[mask].tolist() == [3, 4]
        assert torch.nonzero(mask).cpu().shape == (2, 2) and repr(tokens).startswith(
            "tensor([[3, 4, 0, 0]]"
        )
        tokens[0, 1:] = torch.rand(3, device="cuda").argsort()
        with pytest.raises(NoValueError):
            tokens.tolist()
        lengths = torch.tensor([2, 1]).cuda()
        assert torch.repeat_interleave(lengths, lengths).tolist() == [2, 2, 1]
        assert torch.repeat_interleave(torch.ones(2, 3).cuda(), lengths, dim=0).shape == (3, 3)
        torch._foreach_add_([lengths], 1)
        counts = sparse(torch.zeros(2, 2, dtype=torch.long).cuda(), lengths, 2)
        assert counts.to_dense().tolist() == [[5, 0], [0, 0]]
        assert (
            tokens.shape == (1, 4)
            and repr(tokens) == "tensor(..., device='cuda:0', size=(1, 4), dtype=torch.int64)"
        )


@pytest.mark.usefixtures("no_collections")
def test_shapes_views_and_errors_are_those_of_values() -> None:
    with torchdevice.simulate(compute="meta", count=2):
        x = torch.randn(6, 8, device="cuda", requires_grad=True)
        y = torch.nn.functional.scaled_dot_product_attention(
            *[x.view(1, 2, 6, 4)] * 3, is_causal=True
        )
        y.sum().backward()
        assert (
            x.grad is not None
            and x.grad.shape == (6, 8)
            and x.grad.device == torch.device("cuda", 0)
        )
        before = torch.cuda.memory_allocated()
        views = [x.detach().t()[1:], x.detach()[:, ::2], x.detach().expand(3, 6, 8)]
        assert torch.cuda.memory_allocated() == before and views[1].stride() == (8, 2)
        assert views[0].contiguous().stride() == (6, 1)
        with pytest.raises(
            RuntimeError, match=r"must have same reduction dim|shapes cannot be multiplied"
        ):
            x @ x
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + torch.ones(8)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + torch.ones(8, device="cuda:1")
        assert x.to("cuda:1").device.index == 1 and (x + torch.tensor(2.0)).shape == (6, 8)
        out = torch.empty(0, device="cuda")
        assert torch.add(x.detach(), 1, out=out) is out and out.shape == (6, 8)
        assert out.resize_(20, 20).shape == (20, 20) and out.untyped_storage().nbytes() == 1600
        assert out.resize_(5, 5).shape == (5, 5) and out.untyped_storage().nbytes() == 1600
        assert torch.mul(out, 2, out=out) is out and out.shape == (5, 5)
        out.untyped_storage().resize_(0)
        assert out.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_modules_give_the_shapes_of_values(kind: str, bias: bool) -> None:
    """torch fuses their cells on accelerators, for some by operators that have no meta kernel."""

    def shapes(**options: Any) -> list[torch.Size]:
        with torchdevice.simulate(**options):
            module = getattr(torch.nn, kind)(3, 4, bias=bias).cuda()
            x = torch.ones(2, 3, device="cuda", requires_grad=True)
            result = module(x)
            first = result[0] if isinstance(result, tuple) else result
            first.sum().backward()
            assert x.grad is not None
            return [first.shape, x.grad.shape, *(each.grad.shape for each in module.parameters())]

    assert shapes(compute="meta") == shapes()


@pytest.mark.parametrize(
    ("compute", "shapes"),
    [
        (lambda x: torch.geqrf(x), [(3, 3), (3,)]),
        (lambda x: torch.binomial(x, x), [(3, 3)]),
        (lambda x: torch.fake_quantize_per_tensor_affine(x, 1.0, 0, 0, 255), [(3, 3)]),
    ],
    ids=["geqrf", "binomial", "fake_quantize"],
)
def test_operators_without_a_meta_kernel_give_shapes(
    compute: Callable[..., Any], shapes: list[Any]
) -> None:
    with torchdevice.simulate(compute="meta", count=2):
        results = compute(torch.ones(3, 3, device="cuda:1"))
        found = results if isinstance(results, tuple) else (results,)
        assert [tuple(each.shape) for each in found] == shapes
        assert all(each.device == torch.device("cuda", 1) for each in found)


@pytest.mark.usefixtures("no_collections")
def test_memory_comes_back() -> None:
    with torchdevice.simulate(compute="meta"):
        before = torch.cuda.memory_allocated()
        x = torch.empty(1 << 30, device="cuda")
        assert torch.cuda.memory_allocated() == before + (4 << 30)
        place = x.data_ptr() >> 51  # where no process has memory
        x.untyped_storage().resize_(0)
        assert torch.cuda.memory_allocated() == before
        x.untyped_storage().resize_(1 << 20)
        assert x.data_ptr() >> 51 == place > 0
        assert torch.cuda.memory_allocated() == before + MIB
        with pytest.raises(NoValueError):
            x[0].item()
        del x
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cpu", "compute": "meta"}, "compute='meta' needs a simulated device"),
        (
            {"target": "simulated:cuda", "compute": "fake"},
            "compute='fake' is not known. Use 'meta', or leave",
        ),
        (
            {"target": "simulated:cuda", "compute": "meta", "asynchronous": True},
            "asynchronous=True is about values",
        ),
        (
            {"target": "simulated:cuda", "compute": "meta", "verify": True},
            "verify=True is about values",
        ),
    ],
)
def test_options_that_contradict_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)), torchdevice.portable(**options):
        pass


@pytest.mark.usefixtures("no_collections")
def test_compiled_code_computes_no_values_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code reads memory, so it is not made, not for a graph's constants either."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Inductor was called")

    monkeypatch.setattr(SimulatedRuntime, "compile_graph", staticmethod(refuse))
    with torchdevice.simulate(memory="64GiB", compute="meta") as scope:
        before = torch.cuda.memory_allocated()
        weight = torch.rand(1 << 15, 1 << 15, device="cuda", requires_grad=True)  # 4 GiB
        scale = torch.rand(1 << 15, device="cuda")

        @torch.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            return (x @ weight).relu() * scale * torch.tensor(2.0, device="cuda")

        step(torch.rand(8, 1 << 15, device="cuda")).sum().backward()
        assert weight.grad is not None and weight.grad.shape == weight.shape
        assert torch.cuda.memory_allocated() - before >= 8 << 30
        with pytest.raises(NoValueError):
            weight.grad.sum().item()
        assert any("compute='meta' computes none" in str(entry) for entry in scope.journal.entries)


class Marked(torch.nn.Parameter):
    """A parameter of the program's own class, which torch prints by its name."""


def printed(x: torch.Tensor) -> list[str]:
    """Return the texts of tensors that are made of one, and of what holds it."""
    weight = torch.nn.Parameter(x)
    return [
        repr(x),
        str(x),
        f"{x}",
        f"{x[0, 0]:.3f}",
        f"{x[0]!r:>3}",
        repr(x.detach().T),
        repr([x]),
        repr(weight),
        repr(Marked(x)),
        repr(torch.nn.ParameterList([weight])),
        repr(x[:0]),
    ]


SHOWN = [
    "tensor(..., device='D:0', size=(2, 3))",
    "tensor(..., device='D:0', size=(2, 3))",
    "tensor(..., device='D:0', size=(2, 3))",
    "tensor(..., device='D:0', size=())",
    "tensor(..., device='D:0', size=(3,))",
    "tensor(..., device='D:0', size=(3, 2))",
    "[tensor(..., device='D:0', size=(2, 3))]",
    "Parameter containing:\ntensor(..., device='D:0', size=(2, 3), requires_grad=True)",
    "Parameter containing:\nParameter(Marked(..., device='D:0', size=(2, 3), requires_grad=True))",
    "ParameterList(  (0): Parameter containing: [torch.float32 of size 2x3 (D:0)])",
    "tensor([], device='D:0', size=(0, 3))",
]


def test_what_is_printed_in_the_scope_and_after_it() -> None:
    with torchdevice.simulate(compute="meta"):
        x = torch.ones(2, 3, device="cuda")
        others = [x.to(torch.int64), x.to(torch.complex64), (x.requires_grad_() * 2).half()]
        x = x.detach()
        assert printed(x) == [text.replace("D:", "cuda:") for text in SHOWN]
        in_scope = [*map(repr, others), *map(str, others)]
    assert printed(x) == [text.replace("D:", "simulated:") for text in SHOWN]
    assert [*map(repr, others), *map(str, others)] == [
        text.replace("cuda", "simulated") for text in in_scope
    ]
    assert in_scope[:3] == [
        "tensor(..., device='cuda:0', size=(2, 3), dtype=torch.int64)",
        "tensor(..., device='cuda:0', size=(2, 3), dtype=torch.complex64)",
        "tensor(..., device='cuda:0', size=(2, 3), dtype=torch.float16,\n       "
        "grad_fn=<ToCopyBackward0>)",
    ]
    with torchdevice.simulate(), torch.device("cuda"):
        assert printed(x) == [text.replace("D:", "cuda:") for text in SHOWN]
        assert (
            f"{torch.tensor(2.5):.2f} {torch.ones(2)}" == "2.50 tensor([1., 1.], device='cuda:0')"
        )
    with torchdevice.portable("cpu"):
        assert str(x) == SHOWN[0].replace("D:", "simulated:")


AFTERWARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "_local_scalar_dense": lambda x: x[0, 0].item(),
    "_to_copy": lambda x: x.tolist(),
    "sum": lambda x: x.sum(),
    "equal": lambda x: torch.equal(x, x),
    "mul_": lambda x: x.mul_(2),
    "cat": lambda x: torch.cat([x, x]),
    "addmm": lambda x: torch.nn.functional.linear(x, x, x[:, 0]),
}
"""Operator -> a call that needs values."""


@pytest.mark.parametrize("name", AFTERWARDS)
def test_errors_name_the_operator_after_the_scope(name: str) -> None:
    with torchdevice.simulate(compute="meta"):
        x = torch.ones(2, 3, device="cuda")
    with pytest.raises(
        NoValueError, match=f"'aten::{name}' needs the values of a tensor"
    ) as caught:
        AFTERWARDS[name](x)
    assert caught.value.operator == f"aten::{name}"
    for save in (pickle.dumps, lambda x: torch.save(x, io.BytesIO()), copy.deepcopy):
        with pytest.raises(RuntimeError, match=r"needs the values|no scope on a simulated device"):
            save(x)
