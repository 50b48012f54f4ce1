"""What torch does with functions, done with every stand-in: gradients of gradients, and transforms.

The cases are held against the registry: a stand-in without one fails a test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from references import drawn
from torch.utils import _pytree

import torchdevice
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.packages import registry

pytestmark = [
    pytest.mark.one_engine,
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # vmap of torch's attention
]


class Case(NamedTuple):
    """A stand-in as a function of tensors in float64.

    Attributes:
        name: The first dotted name of the stand-in.
        function: The function.
        shapes: The shapes of its tensors.
        reads: Whether it reads values, such as the lengths of sequences. vmap cannot map it, and a
            compiled program breaks there.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    reads: bool = False

    def draw(self) -> tuple[torch.Tensor, ...]:
        """Return tensors for the function."""
        return tuple(drawn(*shape) for shape in self.shapes)

    def results(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the floating-point tensors among the results."""
        leaves = _pytree.tree_leaves(self.function(*given))
        return tuple(
            each for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point()
        )

    def total(self, *given: torch.Tensor) -> torch.Tensor:
        """Return one number of all results."""
        return sum(each.double().square().sum() for each in self.results(*given))  # type: ignore[return-value]


def of(name: str) -> Any:
    """Return what a program gets by a dotted name."""
    module, _, last = name.rpartition(".")
    names = registry.names_of(module)
    assert names is not None
    return names[last].value


def calls(name: str, *shapes: tuple[int, ...], reads: bool = False, **fixed: Any) -> Case:
    """Return the case of a function with tensors of these shapes and fixed arguments."""
    return Case(name, functools.partial(of(name), **fixed), shapes, reads)


def copies(name: str, *shapes: tuple[int, ...], **fixed: Any) -> Case:
    """Return the case of a function that writes its first argument."""
    function = functools.partial(of(name), **fixed)
    return Case(name, lambda x, *rest: function(x.clone(), *rest), shapes)


def module(name: str, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Case:
    """Return the case of a module as a function of its input and its parameters."""
    made = of(name)(*args, **kwargs).double()
    parameters = dict(made.named_parameters())

    def function(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        return torch.func.functional_call(made, dict(zip(parameters, weights, strict=True)), (x,))

    return Case(name, function, (shape, *(tuple(each.shape) for each in parameters.values())))


def rotated(name: str) -> Case:
    """Return the case of a module that rotates its input in place."""
    made = of(name)(6)
    return Case(name, lambda x: made(x.clone()), (QKV,))


def bounds(*numbers: int) -> torch.Tensor:
    """Return the bounds of sequences."""
    return torch.tensor(numbers, dtype=torch.int32)


ROWS, WEIGHT = (3, 6), (6,)
Q, KV, QKV = (2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 3, 2, 8)
SEQUENCES = {
    "cu_seqlens_q": bounds(0, 3, 7),
    "cu_seqlens_k": bounds(0, 3, 7),
    "max_seqlen_q": 4,
    "max_seqlen_k": 4,
    "causal": True,
    "reads": True,
}
ANGLES = torch.outer(torch.arange(5), torch.tensor([1.0, 0.3, 0.1])).double()
TABLES = {"cos": ANGLES.cos(), "sin": ANGLES.sin()}


def attentions() -> Iterator[Case]:
    """Yield the cases of attention."""
    masks = "xformers.ops.fmha.attn_bias"
    for base in ("flash_attn.flash_attn_interface", "flash_attn_interface"):
        yield calls(f"{base}.flash_attn_func", Q, KV, KV)
        yield calls(f"{base}.flash_attn_func", Q, KV, KV, window_size=(2, 1), softcap=2.0)
        yield calls(f"{base}.flash_attn_qkvpacked_func", QKV)
        yield calls(f"{base}.flash_attn_varlen_func", (7, 4, 8), (7, 2, 8), (7, 2, 8), **SEQUENCES)
    base = "flash_attn.flash_attn_interface"
    yield calls(f"{base}.flash_attn_kvpacked_func", Q, (2, 5, 2, 2, 8))
    yield calls(f"{base}.flash_attn_varlen_kvpacked_func", (7, 4, 8), (7, 2, 2, 8), **SEQUENCES)
    yield calls(
        f"{base}.flash_attn_varlen_qkvpacked_func",
        (7, 3, 2, 8),
        cu_seqlens=bounds(0, 3, 7),
        max_seqlen=4,
        reads=True,
    )
    yield calls("flash_attn.flash_attn_triton.flash_attn_func", Q, Q, Q, (4, 5, 5))
    for kind in ("FlashSelfAttention", "SelfAttention"):
        yield module(f"flash_attn.modules.mha.{kind}", QKV)
    for kind in ("FlashCrossAttention", "CrossAttention"):
        name = f"flash_attn.modules.mha.{kind}"
        yield Case(name, of(name)(), (Q, (2, 5, 2, 4, 8)))
    yield module("flash_attn.modules.mha.MHA", (2, 3, 8), 8, 2, rotary_emb_dim=2)
    yield calls("flash_attn_interface.flash_attn_combine", (3, *Q), (3, 2, 5, 4))
    name = "xformers.ops.fmha.memory_efficient_attention"
    yield calls(name, Q, Q, Q)
    yield calls(name, Q, Q, Q, attn_bias=of(f"{masks}.LowerTriangularMask")())
    yield calls(name, Q, Q, Q, (2, 4, 5, 5))
    sequences = of(f"{masks}.BlockDiagonalMask").from_seqlens([3, 4])
    yield calls(name, (1, 7, 4, 8), (1, 7, 4, 8), (1, 7, 4, 8), attn_bias=sequences)


def rotations_and_padding() -> Iterator[Case]:
    """Yield the cases of rotary embeddings and of tokens without padding."""
    rotary, padding = "flash_attn.layers.rotary", "flash_attn.bert_padding"
    yield calls(f"{rotary}.apply_rotary_emb", Q, **TABLES)
    yield calls(f"{rotary}.apply_rotary_emb_torch", Q, **TABLES)
    yield calls(f"{rotary}.rotate_half", Q)
    yield copies(f"{rotary}.apply_rotary_emb_qkv_", QKV, **TABLES)
    yield copies(f"{rotary}.apply_rotary_emb_kv_", (2, 5, 2, 2, 8), **TABLES)
    yield rotated(f"{rotary}.RotaryEmbedding")
    few, places = torch.tensor([2, 0]), torch.tensor([0, 1, 3, 4, 5])
    yield calls(f"{padding}.index_first_axis", (4, 2, 3), indices=few)
    yield calls(f"{padding}.index_put_first_axis", (2, 3), indices=few, first_axis_dim=4)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    yield calls(f"{padding}.unpad_input", (2, 3, 4), attention_mask=mask, reads=True)
    yield calls(f"{padding}.pad_input", (5, 4), indices=places, batch=2, seqlen=3)


def norms() -> Iterator[Case]:
    """Yield the cases of normalizations."""
    for kind in ("layer_norm.dropout_add_layer_norm", "rms_norm.dropout_add_rms_norm"):
        fixed = {"dropout_p": 0.0, "epsilon": 1e-5}
        yield calls(f"flash_attn.ops.{kind}", ROWS, ROWS, WEIGHT, WEIGHT, **fixed)
        yield calls(
            f"flash_attn.ops.{kind}_parallel_residual", ROWS, ROWS, ROWS, *[WEIGHT] * 4, **fixed
        )
        some = {"x0_subset": torch.tensor([0, 1, 2]), "out_subset": torch.tensor([1, 0, 2])}
        yield calls(
            f"flash_attn.ops.{kind}_subset",
            (2, 6),
            ROWS,
            WEIGHT,
            WEIGHT,
            **fixed,
            **some,
            out_numrows=2,
        )
    yield calls("flash_attn.ops.rms_norm.rms_norm", ROWS, WEIGHT, epsilon=1e-5)
    for kind in ("layer_norm.DropoutAddLayerNorm", "rms_norm.DropoutAddRMSNorm"):
        yield module(f"flash_attn.ops.{kind}", ROWS, 6)
    for base in ("flash_attn.ops.triton", "mamba_ssm.ops.triton"):
        yield calls(f"{base}.layer_norm.layer_norm_fn", ROWS, WEIGHT, WEIGHT, ROWS)
        yield calls(f"{base}.layer_norm.rms_norm_fn", ROWS, WEIGHT, WEIGHT, ROWS)
    gated, apex = "mamba_ssm.ops.triton.layernorm_gated", "apex.normalization.fused_layer_norm"
    for kind in ("layernorm_fn", "rmsnorm_fn"):
        yield calls(f"{gated}.{kind}", ROWS, WEIGHT, WEIGHT, ROWS, group_size=3)
    yield calls("xformers.ops.rms_norm", ROWS, WEIGHT)
    yield copies("xformers.ops.rms_norm_add", ROWS, ROWS, WEIGHT)
    yield calls(f"{apex}.fused_layer_norm", ROWS, normalized_shape=WEIGHT)
    yield calls(f"{apex}.fused_rms_norm", ROWS, normalized_shape=WEIGHT)
    yield calls(f"{apex}.fused_layer_norm_affine", ROWS, WEIGHT, WEIGHT, normalized_shape=WEIGHT)
    yield calls(f"{apex}.fused_rms_norm_affine", ROWS, WEIGHT, normalized_shape=WEIGHT)
    modules = (
        "flash_attn.ops.rms_norm.RMSNorm",
        "flash_attn.ops.triton.layer_norm.RMSNorm",
        "mamba_ssm.ops.triton.layer_norm.RMSNorm",
        f"{gated}.LayerNorm",
        f"{gated}.RMSNorm",
        "xformers.ops.RMSNorm",
        f"{apex}.FusedLayerNorm",
        f"{apex}.FusedRMSNorm",
        f"{apex}.MixedFusedLayerNorm",
        f"{apex}.MixedFusedRMSNorm",
    )
    for name in modules:
        yield module(name, ROWS, 6)
    yield module("apex.parallel.SyncBatchNorm", (4, 3, 2), 3, track_running_stats=False)


def dense_layers() -> Iterator[Case]:
    """Yield the cases of linear maps, losses and choices of rows."""
    dense = "flash_attn.ops.fused_dense"
    yield calls("flash_attn.ops.activations.swiglu", ROWS, ROWS)
    yield calls(f"{dense}.fused_dense_func", ROWS, (4, 6), (4,))
    yield module(f"{dense}.FusedDense", ROWS, 6, 4)
    yield module(f"{dense}.FusedMLP", ROWS, 6, 8)
    yield module("flash_attn.modules.mlp.Mlp", ROWS, 6, 5)
    yield module("flash_attn.modules.mlp.GatedMlp", ROWS, 6, 5, multiple_of=1)
    yield calls("xformers.ops.swiglu", ROWS, (5, 6), (5,), (5, 6), (5,), (6, 5), (6,))
    yield module("xformers.ops.SwiGLU", ROWS, 6, 5)
    labels, smoothing = torch.tensor([1, -100, 3]), {"label_smoothing": 0.1}
    name = "flash_attn.ops.triton.cross_entropy.cross_entropy_loss"
    losses = functools.partial(of(name), labels=labels, lse_square_scale=0.2, **smoothing)
    yield Case(name, lambda x: losses(x)[0], (ROWS,))
    name = "flash_attn.losses.cross_entropy.CrossEntropyLoss"
    loss = of(name)(lse_square_scale=0.2, **smoothing)
    yield Case(name, lambda x: loss(x, labels), (ROWS,))
    yield calls("xformers.ops.unbind", (2, 3, 4), dim=1)
    name, few = "xformers.ops.index_select_cat", torch.tensor([1, 0])
    chosen = of(name)
    yield Case(name, lambda a, b: chosen([a, b], [few, few]), ((3, 2), (4, 3)))
    name = "xformers.ops.scaled_index_add"
    added = of(name)
    shapes = (3, 2, 4), (2, 2, 4), (4,)
    yield Case(name, lambda x, source, scale: added(x.clone(), few, source, scale, 0.5), shapes)


def state_spaces() -> Iterator[Case]:
    """Yield the cases of causal convolutions and state spaces."""
    yield calls("causal_conv1d.causal_conv1d_fn", (2, 4, 7), (4, 3), (4,), activation="silu")
    base, combined = "mamba_ssm.ops.selective_scan_interface", "mamba_ssm.ops.triton.ssd_combined"
    scan, convolved, split = (
        of(f"{base}.selective_scan_fn"),
        of(f"{base}.mamba_inner_fn"),
        of(f"{combined}.mamba_split_conv1d_scan_combined"),
    )
    shapes = (2, 3, 7), (2, 3, 7), (3, 4), (2, 4, 7), (2, 4, 7), (3,), (2, 3, 7), (3,)
    for kind in ("fn", "ref"):
        name = f"{base}.selective_scan_{kind}"
        scan = functools.partial(of(name), delta_softplus=True)
        yield Case(name, lambda u, dt, a, *rest, scan=scan: scan(u, dt, -a.exp(), *rest), shapes)

    def inner(*given: torch.Tensor) -> Any:
        *weights, a, d, bias = given
        return convolved(*weights, None, -a.exp(), None, None, d, bias)

    shapes = (1, 8, 5), (4, 1, 3), (4,), (2 + 6, 4), (4, 2), (3, 4), (4, 3), (4,), (4,)
    yield Case(f"{base}.mamba_inner_fn", inner, shapes)
    yield module("mamba_ssm.Mamba", (1, 5, 4), 4, d_state=3, d_conv=3)
    sizes = {"d_state": 4, "headdim": 8, "chunk_size": 4}
    yield module("mamba_ssm.Mamba2", (1, 5, 8), 8, **sizes)
    name = f"{combined}.mamba_chunk_scan_combined"
    dual = functools.partial(of(name), chunk_size=4, dt_softplus=True)
    shapes = (1, 6, 2, 3), (1, 6, 2), (2,), (1, 6, 1, 4), (1, 6, 1, 4)
    yield Case(name, lambda x, dt, a, b, c: dual(x, dt, -a.exp(), b, c), shapes)
    shapes = (1, 6, 22), (14, 3), (14,), (2,), (2,), (2,)
    yield Case(
        f"{combined}.mamba_split_conv1d_scan_combined",
        lambda *given: split(*given[:4], -given[4].exp(), given[5], 4, headdim=3),
        shapes,
    )
    name = "mamba_ssm.modules.block.Block"
    yield module(name, (1, 3, 4), 4, _Mixer, _Mixer, fused_add_norm=True)


class _Mixer(torch.nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, size)

    def forward(self, x: torch.Tensor, inference_params: Any = None) -> torch.Tensor:
        return super().forward(x)


def scatterings() -> Iterator[Case]:
    """Yield the cases of reductions by index and of sparse matrices."""
    index, places = torch.tensor([0, 0, 2, 1]), {"indptr": torch.tensor([0, 2, 2, 4])}
    coordinates = {"index": torch.tensor([0, 0, 1, 2])}
    for kind in ("sum", "add", "mul", "mean", "min", "max"):
        yield calls(f"torch_scatter.scatter.scatter_{kind}", (3, 4), index=index)
    yield calls("torch_scatter.scatter.scatter", (3, 4), index=index, reduce="mean")
    pairs = torch.tensor([0, 0, 1, 1])
    for kind in ("std", "logsumexp", "softmax", "log_softmax"):
        yield calls(f"torch_scatter.scatter_{kind}", (3, 4), index=pairs)
    for form, given in (("csr", places), ("coo", coordinates)):
        for kind in ("sum", "add", "mean", "min", "max"):
            yield calls(f"torch_scatter.segment_{kind}_{form}", (4, 3), **given)
        yield calls(f"torch_scatter.segment_{form}", (4, 3), **given)
        yield calls(f"torch_scatter.gather_{form}", (3, 2), **given)
    edges = torch.tensor([[0, 0, 1], [1, 0, 1]])
    multiplied, product = of("torch_sparse.spmm"), of("torch_sparse.spspmm")
    shapes = (3,), (2, 4)
    yield Case("torch_sparse.spmm", lambda v, matrix: multiplied(edges, v, 2, 2, matrix), shapes)
    for kind in ("coalesce", "transpose"):
        changed = of(f"torch_sparse.{kind}")
        yield Case(
            f"torch_sparse.{kind}",
            lambda value, changed=changed: changed(edges, value, 2, 2),
            ((3,),),
            reads=True,
        )
    yield Case(
        "torch_sparse.spspmm",
        lambda a, b: product(edges, a, edges, b, 2, 2, 2),
        ((3,), (3,)),
        reads=True,
    )


CASES = [
    *attentions(),
    *rotations_and_padding(),
    *norms(),
    *dense_layers(),
    *state_spaces(),
    *scatterings(),
]

WITHOUT_GRADIENTS = {
    "flash_attn.flash_attn_interface.flash_attn_with_kvcache",
    "flash_attn_interface.flash_attn_with_kvcache",
    "flash_attn.ops.triton.rotary.apply_rotary",
    "xformers.ops.fmha.memory_efficient_attention_forward",
    "xformers.ops.memory_efficient_attention_forward_requires_grad",
    "causal_conv1d.causal_conv1d_update",
    "causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states",
    "mamba_ssm.ops.triton.selective_state_update.selective_state_update",
    "mamba_ssm.utils.generation.InferenceParams",
    "mamba_ssm.models.config_mamba.MambaConfig",
    "apex.parallel.convert_syncbn_model",
    "apex.parallel.LARC",
    "torch_scatter.utils.broadcast",
    "torch_sparse.eye",
    "MultiScaleDeformableAttention.ms_deform_attn_forward",
    "MultiScaleDeformableAttention.ms_deform_attn_backward",
}
"""Stand-ins for functions that write a state, choose, or compute no gradients by themselves."""

WITHOUT_TENSORS = (
    *("pynvml", "triton", "mmcv._ext", "detectron2._C", "amp_C"),
    *("apex.optimizers", "apex.multi_tensor_apply"),
)
"""Packages of which no function of tensors has gradients, by the beginnings of their names."""


def declared() -> set[str]:
    """Return the first names of the functions and modules that are not refused."""
    for package in registry.PACKAGES:
        registry.names_of(package)
    first: dict[int, str] = {}
    for place, names in registry.MODULES.items():
        if place.startswith(WITHOUT_TENSORS):
            continue
        for name, each in names.items():
            computes = each.fidelity in (Fidelity.EXACT, Fidelity.APPROXIMATE)
            if computes and callable(each.value) and not _chooses(each.value):
                first.setdefault(id(each.value), f"{place}.{name}")
    return set(first.values())


def _chooses(value: Any) -> bool:
    """Return whether a stand-in is a mask or a kernel of attention, which a program passes on."""
    masks = of("xformers.ops.AttentionBias"), of("xformers.ops.AttentionOp")
    return isinstance(value, type) and issubclass(value, masks)


def test_each_stand_in_has_a_case() -> None:
    assert declared() == {case.name for case in CASES} | WITHOUT_GRADIENTS


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    torch.manual_seed(0)
    with torchdevice.portable(target="cpu") as found:
        yield found


by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def gradients(case: Case, given: tuple[torch.Tensor, ...], function: Any = None) -> Any:
    """Return the gradients of a number of the results, which :meth:`Case.total` computes."""
    found = (function or case.total)(*given)
    return torch.autograd.grad(found, given, allow_unused=True, materialize_grads=True)


@pytest.mark.sampled(8)
@by_case
def test_gradients_and_theirs(case: Case) -> None:
    given = case.draw()
    assert torch.autograd.gradcheck(case.results, given, fast_mode=True)
    try:
        assert torch.autograd.gradgradcheck(case.results, given, fast_mode=True)
    except RuntimeError as error:
        # torch's fused attention has no second derivatives, as the packages' own has none.
        assert "flash_attention_for_cpu_backward is not implemented" in str(error)
        assert "attention" in case.name or "flash_attn" in case.name


@pytest.mark.sampled(8)
@by_case
def test_a_second_call_and_torch_func(case: Case) -> None:
    given = case.draw()
    expected = gradients(case, given)
    torch.testing.assert_close(gradients(case, given), expected)
    by_func = torch.func.grad(case.total, tuple(range(len(given))))(*given)
    torch.testing.assert_close(by_func, expected)
    if not case.reads:
        two = [torch.stack([each.detach(), 0.9 * each.detach()]) for each in given]
        alone = zip(*(case.results(*(each[n] for each in two)) for n in (0, 1)), strict=True)
        torch.testing.assert_close(
            torch.vmap(case.results)(*two), tuple(torch.stack(each) for each in alone)
        )


@pytest.mark.sampled(8)
@by_case
@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_compile(case: Case) -> None:
    given = case.draw()
    expected = gradients(case, given)
    # Lengths that are read break the program, and torch's own layer of SyncBatchNorm does.
    whole = not case.reads and case.name != "apex.parallel.SyncBatchNorm"
    compiled = torch.compile(case.total, backend="aot_eager", fullgraph=whole)
    torch.testing.assert_close(gradients(case, given, compiled), expected)


@pytest.mark.sampled(8)
@by_case
def test_autocast(case: Case) -> None:
    given = case.draw()
    single = [each.detach().float().requires_grad_() for each in given]
    with torch.autocast("cuda", torch.bfloat16):
        total = case.total(*single)
    found = torch.autograd.grad(total, single, allow_unused=True, materialize_grads=True)
    # Of rows that are normalized without a weight the total hardly depends on the input, so that
    # the gradient is that of roundings.
    least = 0.05 * total.detach().abs()
    for one, expected in zip(found, gradients(case, given), strict=True):
        assert one.dtype is torch.float32
        assert (one - expected).norm() <= 0.05 * max(expected.norm(), least) + 1e-5


def test_a_tensor_that_is_not_mapped_is_not_rotated_in_place() -> None:
    x, tables = drawn(2, 3, 2, 8), drawn(2, 3, 4)
    with torchdevice.portable(target="cpu"):
        rotate = of("flash_attn.layers.rotary.apply_rotary_emb")
        with pytest.raises(RuntimeError, match="Map it too, or rotate it with inplace=False"):
            torch.vmap(lambda cos: rotate(x, cos, cos, inplace=True))(tables)
        assert torch.vmap(lambda cos: rotate(x, cos, cos))(tables).shape == (2, *x.shape)
