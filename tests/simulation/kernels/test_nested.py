"""Nested tensors on simulated devices: the values of the CPU, bit for bit."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nested import nested_tensor
from torch.nn import functional

import torchdevice
from torchdevice.errors import NoValueError


@pytest.fixture(autouse=True)
def torchs_prototype_is_not_announced() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        yield


@pytest.fixture
def cuda() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate(count=2) as scope:
        yield scope


LENGTHS = (2, 3, 1)


def parts(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 4, generator=generator).to(dtype) for n in LENGTHS]


def nested(device: str, seed: int = 0, **options: Any) -> torch.Tensor:
    return nested_tensor([part.to(device) for part in parts(seed)], **options)


def plain(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def values(result: Any) -> list[Any]:
    """Return a result's parts: numbers, and each tensor's shape, dtype and numbers."""
    if isinstance(result, (list, tuple)):
        return [values(each) for each in result]
    if not isinstance(result, torch.Tensor):
        return [result]
    if result.is_nested:
        return [values(each) for each in result.unbind()]
    return [tuple(result.shape), result.dtype, result.detach().cpu().numpy().tobytes()]


def masked() -> torch.Tensor:
    return torch.tensor([[n > at for at in range(max(LENGTHS))] for n in LENGTHS])


def written(x: torch.Tensor) -> torch.Tensor:
    x.unbind()[1].fill_(7)
    x.mul_(2)
    x[0].add_(1)
    return x


def gradients(x: torch.Tensor) -> list[Any]:
    x = x.detach().requires_grad_()
    weight = plain(5, 4).to(x.device).requires_grad_()
    norm = nn.LayerNorm(5).to(x.device)
    y = norm(functional.linear(x, weight))
    padded = torch.nested.to_padded_tensor(torch.softmax(functional.gelu(y), -1) * y, 0.5)
    padded.square().sum().backward()
    return [x.grad, weight.grad, norm.weight.grad]


def gradients_of_parts(x: torch.Tensor) -> list[Any]:
    leaves = [part.detach().requires_grad_() for part in x.unbind()]
    made = torch.nested.as_nested_tensor(leaves)
    product = torch.matmul(made, made.transpose(1, 2))
    torch.cat([each.flatten() for each in product.unbind()]).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def attended(x: torch.Tensor) -> torch.Tensor:
    heads = x.reshape(len(LENGTHS), -1, 2, 2).transpose(1, 2).contiguous()
    return functional.scaled_dot_product_attention(heads, heads, heads)


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "unbind": lambda x: x.unbind(),
    "select": lambda x: [x[0], x[-1], x.select(2, 1)],
    "padded": lambda x: [torch.nested.to_padded_tensor(x, 1.5), x.to_padded_tensor(0.0, (3, 4, 5))],
    "linear": lambda x: functional.linear(x, plain(5, 4).to(x.device), plain(5).to(x.device)),
    "matmul": lambda x: [torch.matmul(x, x.transpose(1, 2)), torch.bmm(x.transpose(1, 2), x)],
    "softmax": lambda x: [torch.softmax(x, -1), functional.softmax(x.transpose(1, 2), -1)],
    "layer_norm": lambda x: functional.layer_norm(
        x, (4,), plain(4).to(x.device), plain(4).to(x.device), 1e-3
    ),
    "activations": lambda x: [
        x.relu(),
        functional.gelu(x),
        functional.silu(x),
        x.tanh(),
        x.abs(),
        x.neg(),
        x.sgn(),
    ],
    "arithmetic": lambda x: [x + x, x * x, x * 2, x / 3, x - x, x.add_(x), x > 0, x.isnan()],
    "views": lambda x: [
        x.transpose(1, 2),
        x.chunk(2, -1),
        x.unsqueeze(2),
        x.reshape(3, -1, 2, 2),
        x.narrow(0, 0, 3),
    ],
    "copies": lambda x: [
        x.clone(),
        x.transpose(1, 2).contiguous(),
        x.double(),
        x.half(),
        x.detach(),
    ],
    "likes": lambda x: [torch.zeros_like(x), torch.ones_like(x), torch.empty_like(x).fill_(3)],
    "sum": lambda x: torch.sum(x, -1, keepdim=True),
    "cat": lambda x: torch.cat([x, x]),
    "written": written,
    "values": lambda x: [x.values(), x.numel(), x.size(0), x.dim(), x._nested_tensor_size()],
    "from a mask": lambda x: torch._nested_tensor_from_mask(
        plain(3, 3, 4).to(x.device), masked().to(x.device)
    ),
    "embedding": lambda x: functional.embedding(
        nested_tensor([torch.tensor([1, 0]), torch.tensor([2])], device=x.device),
        plain(3, 4).to(x.device),
    ),
    "attention": attended,
    # One head of four numbers: GPUs have no fused kernel for heads of two, and compose there.
    "heads": lambda x: nn.MultiheadAttention(4, 1, batch_first=True).to(x.device)(
        *[x.to_padded_tensor(0.0)] * 3, key_padding_mask=~masked().to(x.device), need_weights=False
    ),
    "gradients": gradients,
    "gradients of parts": gradients_of_parts,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_values_of_the_cpu(cuda: torchdevice.Scope, name: str) -> None:
    torch.manual_seed(0)
    expected = values(OPERATIONS[name](nested("cpu")))
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        x = nested(device)
        made = OPERATIONS[name](x)
        assert values(made) == expected
        for each in made if isinstance(made, (list, tuple)) else [made]:
            assert (
                not isinstance(each, torch.Tensor)
                or each.device == torch.device(device)
                or name == "values"
            )


def test_devices(cuda: torchdevice.Scope) -> None:
    x = nested("cuda:1")
    assert x.device == torch.device("cuda:1") and x.is_cuda and x.is_nested and x.get_device() == 1
    assert (
        nested_tensor(parts(), device="cuda:1").device
        == torch.nested.as_nested_tensor(x.unbind()).device
        == x.device
    )
    assert x.to("cuda:0").device == nested("cpu").cuda().device == torch.device("cuda:0")
    assert (
        values(x.to("cuda:0"))
        == values(x.cpu())
        == values(nested("cpu").copy_(x))
        == values(nested("cpu"))
    )
    assert x.cpu().device == torch.device("cpu") and values(nested("cuda:0", 1).copy_(x)) == values(
        x
    )
    assert repr(x).count("device='cuda:1'") == len(LENGTHS) + 1
    for other in ("cuda:0", "cpu"):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            _ = x + nested(other)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert values(torch.load(file, weights_only=False)) == values(x)
    empty = nested_tensor([], device="cuda")
    assert empty.size(0) == 0 and empty.cpu().size(0) == 0


@pytest.mark.usefixtures("no_collections")
def test_memory(cuda: torchdevice.Scope) -> None:
    before = torch.cuda.memory_allocated()
    x = nested_tensor([torch.ones(1 << 18), torch.ones(1 << 18)], device="cuda")
    view = x.unbind()[0]
    assert torch.cuda.memory_allocated() - before == 2 << 20
    y = x * 2
    assert torch.cuda.memory_allocated() - before == 4 << 20
    del x, y
    assert torch.cuda.memory_allocated() - before == 2 << 20 and view.sum() == 1 << 18


def test_random_numbers(cuda: torchdevice.Scope) -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        x = nested("cuda")
        drawn.append(values([functional.dropout(x, 0.5), torch.randn_like(x), x.normal_()]))
    assert drawn[0] == drawn[1] and drawn[0][0] != values(nested("cuda"))


def test_after_the_scope() -> None:
    with torchdevice.simulate():
        x = nested("cuda")
    assert values(x * 2) == values(nested("cpu") * 2) and values(x.cpu()) == values(nested("cpu"))
    assert "device='simulated:0'" in repr(x)


def test_what_cuda_lacks(cuda: torchdevice.Scope) -> None:
    with pytest.raises(NotImplementedError, match=r"Could not run 'aten::exp'"):
        torch.exp(nested("cuda"))
    with pytest.raises(RuntimeError, match="must be contiguous to get buffer"):
        nested("cuda").chunk(2, -1)[1].relu()


@pytest.mark.parametrize("options", [{"races": "error"}, {"verify": True}, {"asynchronous": True}])
def test_other_options(options: dict[str, Any]) -> None:
    with torchdevice.simulate(**options):
        assert values(nested("cuda").relu() * 2) == values(nested("cpu").relu() * 2)


def test_the_jagged_layout(cuda: torchdevice.Scope) -> None:
    def step(device: str) -> list[Any]:
        x = nested(device, layout=torch.jagged, requires_grad=True)
        y = functional.layer_norm(functional.linear(x, plain(4, 4).to(device)), (4,))
        heads = y.unflatten(-1, [2, 2]).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
        attended.values().square().sum().backward()
        assert x.device.type == y.device.type == torch.device(device).type
        return values([attended.values(), x.grad.values(), x.to_padded_tensor(0.0), y.unbind()])

    assert step("cuda") == step("cpu")


# ---- the fast path of nn.TransformerEncoder, which makes nested tensors --------------------------


def encoded(device: str, enable_nested_tensor: bool = True) -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=enable_nested_tensor).eval()
    x, mask = torch.randn(3, 3, 8), ~masked()
    model, x, mask = model.to(device), x.to(device), mask.to(device)
    with torch.no_grad():
        return model(x, src_key_padding_mask=mask)


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_an_encoder(target: str, engine: str) -> None:
    """It takes torch's fast path, with 0 at padded places, unless it is disabled."""
    fast, slow = encoded("cpu"), encoded("cpu", enable_nested_tensor=False)
    padded = ~masked()
    assert not fast[padded].any() and slow[padded].all()
    with torchdevice.portable(target, engine=engine):
        assert values(encoded("cuda")) == values(fast)
        assert values(encoded("cuda", enable_nested_tensor=False)) == values(slow)
        # A mode of the program's, which keeps torch from the fast path on CUDA too.
        with torch.device("cuda"):
            assert encoded("cuda")[padded.to("cuda")].all()


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_heads_of_a_nested_tensor(target: str, engine: str) -> None:
    def attended(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        heads, x = nn.MultiheadAttention(4, 2, batch_first=True).eval().to(device), nested(device)
        with torch.no_grad():
            return heads(x, x, x, need_weights=False)[0]

    expected = values(attended("cpu"))
    with torchdevice.portable(target, engine=engine):
        assert values(attended("cuda")) == expected


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_compiled_encoder(engine: str) -> None:
    """Dynamo takes the path that it takes without a scope, and makes one graph."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torchdevice.portable("cpu", engine=engine), torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), layer(x))


class Counted(torch.Tensor):
    """A subclass whose calls torch hands over."""


def test_subclasses_and_modes_of_the_program_are_seen(cuda: torchdevice.Scope) -> None:
    asked = torch.overrides.has_torch_function
    x = torch.ones(2).cuda()
    assert asked((x,)) is False and asked((x, x.as_subclass(Counted))) is True
    with torch.device("cuda"):
        assert asked((x,)) is True
    assert torch.ones(1, device="cuda").device.type == "cuda"  # the scope is still there


def test_an_encoder_without_values() -> None:
    with torchdevice.simulate(compute="meta"):
        assert (
            encoded("cuda").shape == encoded("cuda", enable_nested_tensor=False).shape == (3, 3, 8)
        )
        x = nested("cuda")
        assert x.to(torch.float64).unbind()[1].shape == (3, 4) and "size=(3, 4)" in repr(x)
        with pytest.raises(NoValueError, match="aten::linear"):
            functional.linear(x, plain(5, 4).cuda())
        with pytest.raises(NoValueError, match="aten::_nested_tensor_from_mask"):
            torch._nested_tensor_from_mask(plain(3, 3, 4).cuda(), masked().cuda())
