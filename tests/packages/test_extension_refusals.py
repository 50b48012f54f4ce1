"""Refusals of the compiled parts of apex, torch_scatter and mmcv, only on simulated GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.packages import registry

pytestmark = pytest.mark.one_engine

HALF, WIDE, BFLOAT16 = torch.float16, torch.float64, torch.bfloat16


def kernel(name: str) -> Callable[..., Any]:
    """Return a kernel of mmcv, as its Python finds it."""
    names = registry.names_of("mmcv._ext")
    assert names is not None
    found: Callable[..., Any] = names[name].value
    return found


# ---- apex ----------------------------------------------------------------------------------------


def normed(**changes: Any) -> torch.Tensor:
    from apex.normalization import fused_layer_norm as norms

    shape = changes.pop("shape", [8])
    device, dtype = changes.pop("device", "cuda"), changes.pop("dtype", torch.float32)
    x = torch.randn(2, 8, device=device).to(dtype)
    size, weights = changes.pop("size", 8), changes.pop("weights", torch.float32)
    weight = torch.ones(size, device=changes.pop("parameters", "cuda")).to(weights)
    if changes.pop("rms", False):
        return norms.fused_rms_norm_affine(x, weight, shape)
    return norms.fused_layer_norm_affine(x, weight, weight, shape)


def mixed(**changes: Any) -> torch.Tensor:
    from apex.normalization import MixedFusedLayerNorm

    module = MixedFusedLayerNorm(8).cuda().to(changes.get("weights", torch.float32))
    return module(torch.randn(2, 8, device="cuda").to(changes.get("dtype", torch.float32)))


def stepped(**changes: Any) -> torch.Tensor:
    from apex import optimizers

    device, dtype = changes.pop("device", "cuda"), changes.pop("dtype", torch.float32)
    values = torch.ones(4, 3, device=device).to(dtype)
    values = values.t() if changes.pop("transposed", False) else values
    parameter = torch.nn.Parameter(values)
    parameter.grad = torch.ones_like(parameter)
    if changes.pop("expanded", False):
        parameter.grad = torch.ones((), device=device).to(dtype).expand(4, 3)
    kind = getattr(optimizers, changes.pop("kind", "FusedAdam"))
    kind([parameter], lr=0.1, **changes).step()
    return parameter.detach()


# ---- torch_scatter -------------------------------------------------------------------------------


def scattered(**changes: Any) -> torch.Tensor:
    import torch_scatter

    name = changes.pop("name", "scatter_max")
    src = torch.ones(4, 3, device=changes.pop("device", "cuda")).to(
        changes.pop("dtype", torch.float32)
    )
    places = {"csr": torch.tensor([0, 1, 4]), "gather_csr": torch.tensor([0, 1, 2, 4, 5])}.get(
        name if name == "gather_csr" else name[-3:], torch.tensor([0, 0, 1, 1])
    )
    index = places.to(changes.pop("index_device", "cuda")).to(changes.pop("index", torch.int64))
    index = index[None, :, None] if changes.pop("deep", False) else index
    more = {} if name.startswith(("segment", "gather")) else {"dim": 0}
    found = getattr(torch_scatter, name)(src, index, **more, **changes)
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


# ---- mmcv ----------------------------------------------------------------------------------------


def kept(**changes: Any) -> torch.Tensor:
    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5]], device="cuda")
    scores = torch.tensor([0.5, 0.6], device=changes.get("device", "cuda"))
    boxes = boxes.to(changes.get("dtype", torch.float32))[: changes.get("boxes", 2)]
    return kernel("nms")(boxes, scores[: len(boxes)], iou_threshold=0.5, offset=0)  # type: ignore[no-any-return]


def softened(**changes: Any) -> torch.Tensor:
    device = changes.get("device", "cpu")
    boxes, scores = torch.ones(2, 4, device=device), torch.ones(2, device=device)
    dets = torch.empty(2, 5, device=device)
    return kernel("softnms")(boxes, scores, dets, 0.3, 0.5, 1e-3, 0, 0).cuda()  # type: ignore[no-any-return]


def matched(**changes: Any) -> torch.Tensor:
    found = kernel("nms_match")(torch.ones(2, 5, device=changes.get("device", "cpu")), 0.5)
    return torch.tensor(found, device="cuda")


def focused(**changes: Any) -> torch.Tensor:
    device, dtype = changes.get("device", "cuda"), changes.get("dtype", torch.float32)
    logits = torch.ones(3, 2, device=device).to(dtype)
    target = torch.tensor([0, 1, 2], device=device).to(changes.get("target", torch.int64))
    weight = torch.ones(2, device=device).to(changes.get("weight", dtype))
    out = torch.empty_like(logits)
    kernel("sigmoid_focal_loss_forward")(logits, target, weight, out, gamma=2.0, alpha=0.25)
    return out


def read(**changes: Any) -> torch.Tensor:
    maps = torch.ones(1, 2, 6, 6, device="cuda").to(changes.get("dtype", torch.float32))
    boxes = torch.tensor([[0.0, 0, 0, 4, 4]], device=changes.get("device", "cuda"))
    boxes = boxes.to(changes.get("boxes", maps.dtype))
    out, empty = maps.new_zeros(1, 2, 2, 2), maps.new_zeros(0)
    kernel("roi_align_forward")(maps, boxes, out, empty, empty, 2, 2, 1.0, 0, 1, True)
    return out


def shared(**changes: Any) -> torch.Tensor:
    one = torch.ones(2, 4, device="cuda").to(changes.get("dtype", torch.float32))
    other = torch.ones(2, 4, device="cuda").to(changes.get("other", one.dtype))
    out = torch.empty(2, 2, device="cuda", dtype=one.dtype)
    kernel("bbox_overlaps")(one, other, out, mode=0, aligned=False, offset=0)
    return out


def deformed(**changes: Any) -> torch.Tensor:
    x = torch.ones(2, 4, 5, 5, device="cuda").to(changes.get("dtype", torch.float32))
    x = x.to(memory_format=changes.get("layout", torch.contiguous_format))
    weight = torch.ones(2, changes.get("planes", 4), 3, 3, device="cuda").to(x.dtype)
    rows = changes.get("rows", 3)
    offset = torch.zeros(2, changes.get("offsets", 18), rows, 3, device=changes.get("on", "cuda"))
    offset = offset.to(changes.get("offset", x.dtype))
    out = x.new_empty(2, 2, 3, 3)
    size = changes.get("kernel", 3)
    numbers = {
        **dict.fromkeys(("dW", "dH", "dilationW", "dilationH", "group"), 1),
        **{"kW": size, "kH": size, "padW": 0, "padH": 0, "im2col_step": 2},
        "deformable_group": changes.get("apart", 1),
    }
    kernel("deform_conv_forward")(x, weight, offset, out, x.new_empty(0), x.new_empty(0), **numbers)
    return out


def modulated(**changes: Any) -> torch.Tensor:
    x = torch.ones(2, 4, 5, 5, device="cuda").to(changes.get("dtype", torch.float32))
    weight = torch.ones(2, changes.get("planes", 4), 3, 3, device="cuda").to(x.dtype)
    offset = torch.zeros(2, 18, 3, 3, device="cuda", dtype=x.dtype)
    mask = torch.ones(2, 9, 3, 3, device="cuda").to(changes.get("mask", x.dtype))
    out, empty = x.new_empty(2, 2, 3, 3), x.new_empty(0)
    size = changes.get("kernel", 3)
    numbers = size, size, 1, 1, 0, 0, 1, 1, 1, 1, False
    kernel("modulated_deform_conv_forward")(
        x, weight, empty, empty, offset, mask, out, empty, *numbers
    )
    return out


def attended(**changes: Any) -> torch.Tensor:
    device, dtype = changes.get("device", "cuda"), changes.get("dtype", torch.float32)
    value = torch.ones(2, 4, 1, 2, device=device).to(dtype)
    sizes, starts = torch.tensor([[2, 2]], device=device), torch.tensor([0], device=device)
    points = torch.zeros(2, 3, 1, 1, 1, 2, device=device).to(changes.get("points", dtype))
    points = points.transpose(0, 1) if changes.get("transposed") else points
    weights = torch.ones(2, 3, 1, 1, 1, device=device).to(dtype)
    sizes = sizes.to(changes.get("sizes", torch.int64)).to(changes.get("on", device))
    given = value, sizes, starts, points, weights
    if changes.get("of") == "DETR":
        import MultiScaleDeformableAttention

        found = MultiScaleDeformableAttention.ms_deform_attn_forward(*given, 2)
    else:
        found = kernel("ms_deform_attn_forward")(*given, im2col_step=2)
    return found  # type: ignore[no-any-return]


NOT_FOUND = "implementation for device"
CASES: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (normed, {"dtype": HALF}, RuntimeError, "expected scalar type Half but found Float"),
    (normed, {"dtype": HALF, "rms": True}, RuntimeError, "expected scalar type Half but found Fl"),
    (normed, {"device": "cpu"}, RuntimeError, "input must be a CUDA tensor"),
    (normed, {"parameters": "cpu"}, RuntimeError, "gamma must be a CUDA tensor"),
    (
        normed,
        {"shape": [4]},
        RuntimeError,
        "Given normalized_shape=[4], expected input with shape [*, 4], but got input of size[2, 8]",
    ),
    (normed, {"size": 4}, RuntimeError, "gamma.sizes().equals(normalized_shape) to be true"),
    (
        normed,
        {"dtype": torch.int32},
        RuntimeError,
        "\"layer_norm_cuda_kernel\" not implemented for 'Int'",
    ),
    (
        normed,
        {"dtype": torch.int32, "rms": True},
        RuntimeError,
        "\"rms_norm_cuda_kernel\" not implemented for 'Int'",
    ),
    (mixed, {"dtype": HALF}, RuntimeError, "expected scalar type Half but found Float"),
    (stepped, {"dtype": WIDE}, RuntimeError, "FusedAdam only support fp16 and fp32."),
    *[
        (stepped, {"dtype": BFLOAT16, "kind": kind}, RuntimeError, f"{kind} only support fp16 and")
        for kind in ("FusedAdagrad", "FusedLAMB", "FusedNovoGrad")
    ],
    (stepped, {"device": "cpu"}, RuntimeError, "expected input to be on cuda"),
    (stepped, {"transposed": True}, RuntimeError, "A tensor was not contiguous."),
    (stepped, {"expanded": True, "kind": "FusedSGD"}, RuntimeError, "A tensor was not contiguous."),
    (stepped, {"master_weights": True}, RuntimeError, "Master weights is currently only supported"),
    *[
        (scattered, {"name": name, "dtype": torch.bool}, NotImplementedError, '"_" not implem')
        for name in ("scatter_min", "segment_max_coo", "segment_csr", "gather_coo", "gather_csr")
    ],
    (scattered, {"index": torch.int32}, RuntimeError, "expected scalar type Long but found Int"),
    (
        scattered,
        {"name": "scatter", "reduce": "mul", "index": torch.int32},
        RuntimeError,
        "expected scalar type Long but found Int",
    ),
    (
        scattered,
        {"index_device": "cpu"},
        RuntimeError,
        'index.device().is_cuda() INTERNAL ASSERT FAILED at "csrc/cuda/scatter_cuda.cu":63, please '
        "report a bug to PyTorch. index must be CUDA tensor",
    ),
    (scattered, {"device": "cpu"}, RuntimeError, "index must be CPU tensor"),
    (
        scattered,
        {"name": "segment_csr", "index_device": "cpu"},
        RuntimeError,
        "indptr must be CUDA tensor",
    ),
    (scattered, {"name": "gather_coo", "deep": True}, RuntimeError, "Input mismatch"),
    (scattered, {"out": torch.ones(2, 3)}, RuntimeError, "optional_out.value() must be CUDA"),
    (kept, {"dtype": HALF}, RuntimeError, "expected scalar type Float but found Half"),
    (
        kept,
        {"device": "cpu"},
        RuntimeError,
        "nms_impl: at param 1, inconsistent device: cpu vs cuda:0",
    ),
    (softened, {"device": "cuda"}, RuntimeError, f"softnms_impl: {NOT_FOUND} cuda:0 not found."),
    (matched, {"device": "cuda"}, RuntimeError, f"nms_match_impl: {NOT_FOUND} cuda:0 not found."),
    (
        focused,
        {"dtype": BFLOAT16},
        NotImplementedError,
        "\"sigmoid_focal_loss_forward_cuda_kernel\" not implemented for 'BFloat16'",
    ),
    (focused, {"device": "cpu"}, RuntimeError, f"{NOT_FOUND} cpu not found."),
    (focused, {"target": torch.int32}, RuntimeError, "expected scalar type Long but found Int"),
    (focused, {"weight": HALF}, RuntimeError, "expected scalar type Float but found Half"),
    (read, {"dtype": HALF, "boxes": torch.float32}, RuntimeError, "type Half but found Float"),
    (read, {"dtype": BFLOAT16}, NotImplementedError, '"roi_align_forward_cuda_kernel" not im'),
    (read, {"device": "cpu"}, RuntimeError, "roi_align_forward_impl: at param 1, inconsistent"),
    (shared, {"other": HALF}, RuntimeError, "expected scalar type Float but found Half"),
    (shared, {"dtype": BFLOAT16}, NotImplementedError, '"bbox_overlaps_cuda_kernel" not implem'),
    (deformed, {"layout": torch.channels_last}, RuntimeError, "input must be contiguous"),
    (deformed, {"on": "cpu"}, RuntimeError, "offset must be a CUDA tensor"),
    (deformed, {"dtype": BFLOAT16}, NotImplementedError, '"deformable_im2col_gpu" not implemen'),
    (deformed, {"offset": HALF}, RuntimeError, "expected scalar type Float but found Half"),
    (deformed, {"planes": 2}, RuntimeError, "invalid number of input planes"),
    (deformed, {"kernel": 2}, RuntimeError, "kernel size should be consistent with weight"),
    (deformed, {"rows": 2}, RuntimeError, "invalid spatial size of offset"),
    (deformed, {"offsets": 36}, RuntimeError, "invalid number of channels of offset"),
    (deformed, {"apart": 3}, RuntimeError, "input channels must divide deformable group size"),
    (modulated, {"planes": 2}, RuntimeError, "Input shape and kernel channels won't match"),
    (modulated, {"kernel": 2}, RuntimeError, "Input shape and kernel shape won't match"),
    (modulated, {"mask": HALF}, RuntimeError, "expected scalar type Float but found Half"),
    (modulated, {"dtype": BFLOAT16}, NotImplementedError, '"modulated_deformable_im2col_gpu"'),
    (attended, {"dtype": BFLOAT16}, NotImplementedError, '"ms_deform_attn_forward_cuda" not'),
    (attended, {"of": "DETR", "dtype": HALF}, NotImplementedError, "not implemented for 'Half'"),
    (attended, {"device": "cpu"}, RuntimeError, f"{NOT_FOUND} cpu not found."),
    (attended, {"points": HALF}, RuntimeError, "expected scalar type Float but found Half"),
    (attended, {"sizes": torch.int32}, RuntimeError, "expected scalar type Long but found Int"),
    (
        attended,
        {"of": "DETR", "transposed": True},
        RuntimeError,
        "sampling_loc tensor has to be contiguous",
    ),
    (attended, {"of": "DETR", "device": "cpu"}, RuntimeError, "Not implemented on the CPU"),
    (attended, {"of": "DETR", "on": "cpu"}, RuntimeError, "spatial_shapes must be a CUDA tensor"),
    (
        attended,
        {"on": "cpu"},
        RuntimeError,
        "ms_deform_attn_impl_forward: at param 1, inconsistent device: cpu vs cuda:0",
    ),
]


@pytest.mark.parametrize(
    ("function", "changes", "kind", "words"),
    CASES,
    ids=[f"{case[0].__name__}-{number}" for number, case in enumerate(CASES)],
)
def test_a_compiled_part_refuses(
    function: Any, changes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with torchdevice.simulate("a100"), pytest.raises(kind, match=re.escape(words)):
        function(**changes)


TAKEN: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *[
        (function, {})
        for function in (
            normed,
            mixed,
            stepped,
            scattered,
            kept,
            softened,
            matched,
            focused,
            read,
            shared,
            deformed,
            modulated,
            attended,
        )
    ],
    (normed, {"dtype": HALF, "weights": HALF}),
    (mixed, {"weights": HALF}),
    (stepped, {"dtype": BFLOAT16}),
    (stepped, {"master_weights": True, "capturable": True, "dtype": HALF}),
    (scattered, {"name": "scatter_sum", "dtype": WIDE}),
    (kept, {"dtype": HALF, "boxes": 0}),
    *[(scattered, {"name": name}) for name in ("segment_csr", "gather_csr", "gather_coo")],
    *[(each, {"dtype": HALF}) for each in (focused, read, shared, deformed, modulated, attended)],
    (attended, {"of": "DETR", "dtype": WIDE}),
]


@pytest.mark.parametrize(
    ("function", "changes"),
    TAKEN,
    ids=[f"{case[0].__name__}-{number}" for number, case in enumerate(TAKEN)],
)
def test_a_compiled_part_takes(function: Any, changes: dict[str, Any]) -> None:
    with torchdevice.simulate("a100"):
        assert function(**changes).is_cuda


@pytest.mark.parametrize("target", ["cpu", "simulated:mps"])
def test_other_targets_have_no_compiled_parts(target: str) -> None:
    with torchdevice.portable(target=target):
        for function, changes in (
            (normed, {"dtype": HALF}),
            (mixed, {"dtype": HALF}),
            (stepped, {"dtype": BFLOAT16, "kind": "FusedLAMB"}),
            (stepped, {"transposed": True}),
            (stepped, {"master_weights": True}),
            (kept, {"dtype": HALF}),
            (softened, {"device": "cuda"}),
            (matched, {"device": "cuda"}),
            (focused, {"dtype": BFLOAT16}),
            (read, {"dtype": HALF, "boxes": torch.float32}),
            (shared, {"other": HALF}),
            (deformed, {"layout": torch.channels_last}),
            (modulated, {"mask": HALF}),
            (attended, {"of": "DETR", "dtype": HALF}),
        ):
            function(**changes)


class TestGradientsOfApexInFloat64:
    """Its layer norm has no kernel for them."""

    @pytest.mark.parametrize("shape", [[8], [2, 8]])
    def test_a_layer_norm_has_none(self, shape: list[int]) -> None:
        with torchdevice.simulate("a100"):
            from apex.normalization import FusedLayerNorm

            module = FusedLayerNorm(shape).cuda().double()
            result = module(torch.randn(2, 8, device="cuda", dtype=WIDE))
            with pytest.raises(RuntimeError, match='"cuComputeGradInput" not implemented for \'D'):
                result.sum().backward()

    def test_a_norm_by_the_mean_square_has_them(self) -> None:
        with torchdevice.simulate("a100"):
            from apex.normalization import FusedRMSNorm

            module = FusedRMSNorm(8).cuda().double()
            module(torch.randn(2, 8, device="cuda", dtype=WIDE)).sum().backward()
            assert module.weight is not None and module.weight.grad is not None

    @pytest.mark.parametrize("target", ["cpu", "simulated:a100"])
    def test_a_layer_norm_on_the_cpu_has_them(self, target: str) -> None:
        with torchdevice.portable(target=target):
            from apex.normalization import FusedLayerNorm

            module = FusedLayerNorm(8).double()
            module(torch.randn(2, 8, dtype=WIDE)).sum().backward()
            assert module.weight is not None and module.weight.grad is not None


def test_a_module_of_apex_on_the_cpu_uses_the_norm_of_torch() -> None:
    with torchdevice.simulate("a100"):
        from apex.normalization import FusedLayerNorm

        module, x = FusedLayerNorm(8), torch.randn(2, 8)
        torch.testing.assert_close(module(x), torch.nn.functional.layer_norm(x, (8,)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_module_of_apex_uses_the_norm_of_torch() -> None:
    with torchdevice.simulate("a100"):
        from apex.normalization import FusedRMSNorm

        module, x = FusedRMSNorm(8).cuda(), torch.randn(2, 8, device="cuda", dtype=HALF)
        traced = torch.jit.trace(module, x, check_trace=False)
        torch.testing.assert_close(
            traced(x), traced(x.float()), check_dtype=False, rtol=0.01, atol=0
        )


def test_an_index_of_too_many_dimensions_is_refused_by_expand() -> None:
    with torchdevice.simulate("a100"), pytest.raises(RuntimeError, match="expand"):
        import torch_scatter

        index = torch.zeros(1, 4, 3, dtype=torch.int64, device="cuda")
        torch_scatter.scatter_max(torch.ones(4, 3, device="cuda"), index, dim=0)


@pytest.mark.parametrize("dtype", [BFLOAT16, WIDE])
def test_sgd_of_apex_leaves_other_dtypes_as_they_are_on_a_gpu(dtype: torch.dtype) -> None:
    with torchdevice.simulate("a100"):
        assert (stepped(kind="FusedSGD", dtype=dtype) == 1).all()
        assert (stepped(kind="FusedSGD", dtype=dtype, transposed=True) == 1).all()
        assert (stepped(kind="FusedSGD") == torch.tensor(0.9)).all()
    with torchdevice.portable(target="cpu"):
        assert (stepped(kind="FusedSGD", dtype=dtype) < 1).all()
