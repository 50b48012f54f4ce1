"""apex: normalizations against the formula, optimizers against torch's own, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import same_with_gradients

import torchdevice

pytestmark = pytest.mark.one_engine


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target="cpu") as found:
        yield found


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [8, (3, 8)])
@pytest.mark.parametrize("is_rms", [False, True])
def test_normalizations(affine: bool, shape: Any, is_rms: bool) -> None:
    from apex.normalization import FusedLayerNorm, FusedRMSNorm

    module = (FusedRMSNorm if is_rms else FusedLayerNorm)(
        shape, eps=1e-3, elementwise_affine=affine
    ).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    over = (-1,) if shape == 8 else (-2, -1)
    centred = x if is_rms else x - x.mean(over, keepdim=True)
    expected = centred / ((centred**2).mean(over, keepdim=True) + 1e-3).sqrt()
    if affine:
        expected = expected * module.weight
        expected = expected if is_rms else expected + module.bias
    same_with_gradients(module(x), expected, (x, *module.parameters()))
    with pytest.raises(RuntimeError, match="does not end in normalized_shape"):
        module(x[..., :4])


def test_mixed_normalizations_return_the_dtype_of_the_weight() -> None:
    from apex.normalization import FusedLayerNorm, MixedFusedRMSNorm

    x = torch.randn(2, 8, dtype=torch.bfloat16)
    assert (
        MixedFusedRMSNorm(8)(x).dtype == torch.float32
        and FusedLayerNorm(8)(x).dtype == torch.bfloat16
    )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_normalizations_in_autocast(name: str, affine: bool) -> None:
    # apex casts all tensors by itself, so that the kernel gets rounded ones.
    from apex import normalization

    x = torch.randn(16, 32, 16, device="cuda")
    plain = getattr(torch.nn, name)((32, 16), eps=1e-5, elementwise_affine=affine).cuda()
    for kind in ("Fused", "MixedFused") if affine else ("Fused",):
        fused = getattr(normalization, kind + name)((32, 16), elementwise_affine=affine).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            found = fused(x)
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found, plain(x.bfloat16().float()).bfloat16())


def trained(make: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a parameter after five steps of an optimizer."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64).to(dtype))
    target = torch.randn(4, 3, dtype=torch.float64).to(dtype)
    optimizer = make([parameter])
    for _ in range(5):
        optimizer.zero_grad()
        ((parameter - target) ** 3).abs().sum().backward()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(decay: float, decoupled: bool) -> None:
    from apex.optimizers import FusedAdam

    own: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
    expected = trained(lambda given: own(given, lr=0.05, betas=(0.8, 0.9), weight_decay=decay))
    found = trained(
        lambda given: FusedAdam(
            given, 0.05, True, (0.8, 0.9), adam_w_mode=decoupled, weight_decay=decay
        )
    )
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], amsgrad=True)


def test_adam_keeps_moments_and_master_weights_in_float32() -> None:
    from apex.optimizers import FusedAdam

    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = FusedAdam([parameter], lr=1e-4, master_weights=True)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(
        parameter.detach().float(), torch.full((2,), 0.99), atol=4e-3, rtol=0
    )
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "dampening": 0.3},
    ],
)
def test_sgd(options: dict[str, Any]) -> None:
    from apex.optimizers import FusedSGD

    expected = trained(lambda given: torch.optim.SGD(given, 0.05, weight_decay=0.01, **options))
    torch.testing.assert_close(
        trained(lambda given: FusedSGD(given, 0.05, weight_decay=0.01, **options)), expected
    )


def test_sgd_keeps_the_momentum_in_the_dtype_of_the_parameter() -> None:
    from apex.optimizers import FusedSGD

    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = FusedSGD([parameter], lr=0.5, momentum=0.5)
    for _ in range(2):
        parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"].dtype is torch.float16
    assert parameter.tolist() == [1 - 0.5 * 0.25 - 0.5 * 0.375] * 2


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adagrad(decay: float) -> None:
    from apex.optimizers import FusedAdagrad

    expected = trained(
        lambda given: torch.optim.Adagrad(given, 0.05, weight_decay=decay, eps=1e-10)
    )
    torch.testing.assert_close(
        trained(lambda given: FusedAdagrad(given, 0.05, weight_decay=decay)), expected
    )


def gradients_of_steps(count: int) -> list[list[torch.Tensor]]:
    """Return gradients of two parameters for some steps, of which the last are small."""
    torch.manual_seed(1)
    shapes = (4, 3), (5,)
    return [
        [torch.randn(shape, dtype=torch.float64) / (1 + step**2) for shape in shapes]
        for step in range(count)
    ]


def stepped(make: Any, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return two parameters after four steps of an optimizer with given gradients."""
    torch.manual_seed(0)
    given = [torch.nn.Parameter(torch.randn(4, 3).to(dtype)), torch.nn.Parameter(torch.ones(5))]
    parameters = [torch.nn.Parameter(each.detach().to(dtype)) for each in given]
    optimizer = make(parameters)
    for gradients in gradients_of_steps(4):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    return [each.detach() for each in parameters]


def lamb(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: list[tuple[torch.Tensor, torch.Tensor]],
    step: int,
    *,
    decay: float = 0.01,
    decoupled: bool = True,
    averaging: bool = True,
    corrected: bool = True,
    nvlamb: bool = False,
) -> None:
    """Take one step of the published algorithm, by element: lr 0.05, betas 0.8 and 0.9, norm 1."""
    total = sum(float(each) ** 2 for gradient in gradients for each in gradient.flatten()) ** 0.5
    scale = max(total, 1.0)
    for w, g, (m, v) in zip(weights, gradients, moments, strict=True):
        changes = []
        for place in range(w.numel()):
            each = float(g.flatten()[place]) / scale
            weight = float(w.flatten()[place])
            each += 0.0 if decoupled else decay * weight
            first = m.view(-1)[place] * 0.8 + (0.2 if averaging else 1.0) * each
            second = v.view(-1)[place] * 0.9 + 0.1 * each**2
            m.view(-1)[place], v.view(-1)[place] = first, second
            if corrected:
                first, second = first / (1 - 0.8**step), second / (1 - 0.9**step)
            change = first / (second**0.5 + 1e-6)
            changes.append(float(change) + (decay * weight if decoupled else 0.0))
        lengths = [sum(x**2 for x in values) ** 0.5 for values in (w.flatten().tolist(), changes)]
        ratio = lengths[0] / lengths[1] if (decay or nvlamb) and all(lengths) else 1.0
        w.view(-1)[:] = w.view(-1) - 0.05 * ratio * torch.tensor(changes, dtype=w.dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": 0.0},
        {"decay": 0.0, "nvlamb": True},
        {"decoupled": False, "averaging": False},
        {"corrected": False},
    ],
)
def test_lamb(options: dict[str, Any]) -> None:
    from apex.optimizers import FusedLAMB

    names = {
        "decay": "weight_decay",
        "decoupled": "adam_w_mode",
        "averaging": "grad_averaging",
        "corrected": "bias_correction",
        "nvlamb": "use_nvlamb",
    }
    given = {names[name]: value for name, value in options.items()}
    found = stepped(lambda parameters: FusedLAMB(parameters, 0.05, betas=(0.8, 0.9), **given))
    weights = [each.clone() for each in stepped(lambda parameters: torch.optim.SGD(parameters, 0))]
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in weights]
    for step, gradients in enumerate(gradients_of_steps(4), 1):
        lamb(weights, gradients, moments, step, **options)
    torch.testing.assert_close(found, weights)


def test_lamb_rounds_the_moments_of_half_precision_once() -> None:
    from apex.optimizers import FusedLAMB

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(64).half())
    optimizer = FusedLAMB([parameter], betas=(0.8, 0.9), max_grad_norm=1e4)
    mean, square = torch.zeros(64), torch.zeros(64)
    for gradient in torch.randn(2, 64).half():
        parameter.grad = gradient.clone()
        optimizer.step()
        mean = (0.8 * mean + 0.2 * gradient.float()).half().float()
        square = (0.9 * square + 0.1 * gradient.float().square()).half().float()
    state = optimizer.state[parameter]
    assert torch.equal(state["exp_avg"].float(), mean)
    assert torch.equal(state["exp_avg_sq"].float(), square)


def novograd(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    kept: list[dict[str, Any]],
    step: int,
    *,
    decay: float = 0.0,
    inside: bool = False,
    norm: int = 2,
    from_zero: bool = False,
) -> None:
    """Take one step of the published algorithm: lr 0.05, betas 0.8 and 0.9."""
    for w, g, state in zip(weights, gradients, kept, strict=True):
        numbers = [abs(each) for each in g.flatten().tolist()]
        length = max(numbers) if norm == 0 else sum(x**2 for x in numbers) ** 0.5
        if step == 1:
            state["mean"], state["norm"] = torch.zeros_like(w), 0.0 if from_zero else length
        if norm == 0:
            state["norm"] = 0.9 * state["norm"] + 0.1 * length
        else:
            state["norm"] = (0.9 * state["norm"] ** 2 + 0.1 * length**2) ** 0.5
        divisor = state["norm"] / (1 - 0.9**step) ** 0.5 + 1e-8
        given = g / divisor + decay * w if inside else g
        state["mean"] = 0.8 * state["mean"] + 0.2 * given
        change = state["mean"] / (1 - 0.8**step)
        w.copy_(w - 0.05 * (change if inside else change / divisor + decay * w))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": 0.1},
        {"decay": 0.1, "inside": True},
        {"norm": 0},
        {"from_zero": True},
        {"norm": 0, "from_zero": True},
    ],
)
def test_novograd(options: dict[str, Any]) -> None:
    from apex.optimizers import FusedNovoGrad

    names = {
        "decay": "weight_decay",
        "inside": "reg_inside_moment",
        "norm": "norm_type",
        "from_zero": "init_zero",
    }
    given = {names[name]: value for name, value in options.items()}
    found = stepped(lambda parameters: FusedNovoGrad(parameters, 0.05, betas=(0.8, 0.9), **given))
    weights = [each.clone() for each in stepped(lambda parameters: torch.optim.SGD(parameters, 0))]
    kept: list[dict[str, Any]] = [{} for _ in weights]
    for step, gradients in enumerate(gradients_of_steps(4), 1):
        novograd(weights, gradients, kept, step, **options)
    torch.testing.assert_close(found, weights)


@pytest.mark.parametrize("clip", [False, True])
def test_larc(clip: bool) -> None:
    from apex.parallel.LARC import LARC

    def make(parameters: Any) -> Any:
        own = torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.1)
        return LARC(own, 0.01, clip=clip)

    found = stepped(make)
    weights = [each.clone() for each in stepped(lambda parameters: torch.optim.SGD(parameters, 0))]
    speeds = [torch.zeros_like(each) for each in weights]
    for gradients in gradients_of_steps(4):
        for w, g, speed in zip(weights, gradients, speeds, strict=True):
            size, slope = (sum(x**2 for x in each.flatten().tolist()) ** 0.5 for each in (w, g))
            factor = 0.01 * size / (slope + 0.1 * size + 1e-8)
            if clip:
                factor = min(factor / 0.05, 1)
            speed.copy_(0.9 * speed + factor * (g + 0.1 * w))
            w.sub_(0.05 * speed)
    torch.testing.assert_close(found, weights)


def test_larc_in_a_warm_up_that_begins_with_a_rate_of_0() -> None:
    from apex.parallel import LARC

    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    inner = torch.optim.SGD([parameter], 0.0, momentum=0.9, weight_decay=0.5)
    parameter.grad = torch.tensor([1.0, 2.0])
    LARC(inner).step()
    assert parameter.tolist() == [3.0, 4.0]
    assert inner.state[parameter]["momentum_buffer"].tolist() == [2.5, 4.0]


def test_larc_is_the_optimizer_inside() -> None:
    from apex.parallel import LARC

    parameter = torch.nn.Parameter(torch.zeros(2))
    inner = torch.optim.SGD([parameter], 0.5, weight_decay=0.25)
    optimizer = LARC(inner)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.tolist() == [-0.5, -0.5] and optimizer.param_groups is inner.param_groups
    optimizer.load_state_dict(optimizer.state_dict())
    assert inner.param_groups[0]["weight_decay"] == 0.25 and optimizer.state is inner.state
    optimizer.zero_grad()
    assert parameter.grad is None and repr(optimizer) == repr(inner)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: (_ for _ in ()).throw(RuntimeError("closure")))
    assert inner.param_groups[0]["weight_decay"] == 0.25


def test_batch_normalization_with_channels_last_and_a_relu() -> None:
    from apex.parallel import SyncBatchNorm

    layer = SyncBatchNorm(3, channel_last=True, fuse_relu=True).eval()
    x, z = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    torch.testing.assert_close(layer(x, z), (x / (1 + 1e-5) ** 0.5 + z).relu())


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedNovoGrad"])
def test_optimizers_of_layers_in_half_precision(name: str) -> None:
    import apex.optimizers

    kind = getattr(apex.optimizers, name)
    wide, narrow = (
        stepped(lambda given: kind(given, 0.05), dtype) for dtype in (torch.float32, torch.float16)
    )
    torch.testing.assert_close([each.float() for each in narrow], wide, atol=5e-3, rtol=5e-3)
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = kind([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    again = kind([parameter])
    again.load_state_dict(optimizer.state_dict())
    again.step()
    assert again.state[parameter]["exp_avg"].dtype is torch.float16
    assert again.param_groups[0]["step"] == 2
    stepped(lambda given: kind(given, 0.05), torch.bfloat16)
    with torchdevice.simulate("a100"), pytest.raises(RuntimeError, match="only support fp16"):
        stepped(lambda given: kind(given, 0.05), torch.bfloat16)
    with pytest.raises(RuntimeError, match="AMSGrad"):
        kind([parameter], amsgrad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_scaler_leaves_unscaling_to_an_adam_that_can(dtype: torch.dtype) -> None:
    from apex.optimizers import FusedAdam

    parameter = torch.nn.Parameter(torch.ones(2, dtype=dtype, device="cuda"))
    optimizer = FusedAdam([parameter], lr=0.125, capturable=True, master_weights=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale((parameter * 3).sum()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of steps that take a scaler
        scaler.step(optimizer)
    assert parameter.grad.tolist() == [3, 3] and parameter.tolist() == [0.875, 0.875]
    scaler.update()
    parameter.grad.fill_(float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.875, 0.875] and scaler.get_scale() == 2.0
    with pytest.raises(RuntimeError, match="FusedAdam has been updated"):
        optimizer.step(grads=[parameter.grad])


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
@pytest.mark.parametrize("target", ["cpu", "simulated:a100"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_graph_repeats_the_steps_of_an_adam_that_can(target: str, scaled: bool) -> None:
    from torchdevice.packages.apex_optimizers import FusedAdam

    def losses(is_graph: bool) -> list[float]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 4, device="cuda"))
        optimizer = FusedAdam([weight], lr=0.1, capturable=True, betas=(0.5, 0.9))
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=2, enabled=scaled)
        factor = torch.ones((), device="cuda")

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = weight.square().sum()
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        found = [step().item()]
        graph, loss = torch.cuda.CUDAGraph(), torch.zeros(())
        if is_graph:
            with torch.cuda.graph(graph):
                loss = step()
        for number in range(4):
            factor.fill_(float("inf") if number == 1 and scaled else 1.0)
            if is_graph:
                graph.replay()
            else:
                loss = step()
            found.append(loss.item())
        assert optimizer.param_groups[0]["step"].item() == (4 if scaled else 5)
        return found

    with torchdevice.portable(target=target):
        repeated = losses(is_graph=True)
        assert repeated == pytest.approx(losses(is_graph=False))
        assert (repeated[3] == repeated[2]) is scaled
        assert repeated[4] < repeated[3]


def test_what_torch_has_had_since_is_refused_with_its_name() -> None:
    from apex import amp
    from apex.optimizers import FusedMixedPrecisionLamb

    with pytest.raises(
        torchdevice.errors.NotSupportedError, match=r"apex.amp.initialize.*GradScaler"
    ):
        amp.initialize(None, None, opt_level="O1")
    with pytest.raises(torchdevice.errors.NotSupportedError, match="FusedLAMB with"):
        FusedMixedPrecisionLamb([])


class TestListsOfTensors:
    """``amp_C`` by ``multi_tensor_applier``."""

    def test_norms(self) -> None:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(2)]
        flag = torch.zeros(1, dtype=torch.int32)
        norm = amp_C.multi_tensor_l2norm
        whole, each = multi_tensor_applier(norm, flag, [tensors], True)
        torch.testing.assert_close(whole, torch.cat([x.flatten() for x in tensors]).norm()[None])
        torch.testing.assert_close(each, torch.stack([x.norm() for x in tensors]))
        assert multi_tensor_applier(norm, flag, [tensors])[1].numel() == 0 and not flag
        tensors[1][2] = torch.nan
        assert multi_tensor_applier(norm, flag, [tensors])[0].isnan() and flag == 1

    def test_scaling_writes_all_and_notes_an_overflow(self) -> None:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        given = [torch.randn(3).half(), torch.tensor([1.0, torch.inf]).half()]
        out, flag = [torch.empty(3), torch.empty(2)], torch.zeros(1, dtype=torch.int32)
        multi_tensor_applier(amp_C.multi_tensor_scale, flag, [given[:1], out[:1]], 0.5)
        torch.testing.assert_close(out[0], given[0].float() / 2)
        assert flag == 0
        multi_tensor_applier(amp_C.multi_tensor_scale, flag, [given, out], 0.25)
        assert flag == 1 and out[1][0] == 0.25 and out[1][1].isinf()

    @pytest.mark.parametrize(("checked", "is_noted"), [(-1, True), (0, False), (1, True)])
    def test_sums(self, checked: int, is_noted: bool) -> None:
        import amp_C

        x, y, out = [torch.randn(3)], [torch.tensor([1.0, torch.nan, 2.0])], [torch.empty(3)]
        flag = torch.zeros(1, dtype=torch.int32)
        amp_C.multi_tensor_axpby(2048, flag, [x, y, out], 2.0, -1.0, checked)
        torch.testing.assert_close(out[0], 2 * x[0] - y[0], equal_nan=True)
        assert bool(flag) is is_noted

    def test_what_a_gpu_refuses(self) -> None:
        with torchdevice.simulate("cuda"):
            import amp_C

            flag = torch.zeros(1, dtype=torch.int32, device="cuda")
            x = torch.randn(3, 4, device="cuda")
            for lists, message in (
                ([[x], [x]], "tensor_lists.size\\(\\) != depth"),
                ([[]], "is not > 0"),
                ([[x.T]], "A tensor was not contiguous."),
                ([[x.cpu()]], "A tensor was not cuda."),
                ([[x.double()]], "\"multi_tensor_l2norm_cuda\" not implemented for 'Double'"),
            ):
                with pytest.raises(RuntimeError, match=message):
                    amp_C.multi_tensor_l2norm(2048, flag, lists)
            with pytest.raises(RuntimeError, match="expected scalar type Int but found Long"):
                amp_C.multi_tensor_l2norm(2048, flag.long(), [[x]])

    def test_optimizers_are_refused_by_name(self) -> None:
        import amp_C

        with pytest.raises(torchdevice.errors.NotSupportedError, match="Use apex\\.optimizers"):
            amp_C.multi_tensor_adam(2048, None, [])
