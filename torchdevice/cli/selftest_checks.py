"""What ``torchdevice doctor --selftest`` runs: small programs written for CUDA, one for each feature.

Each runs in a scope of its own and fails by an exception. Numbers are compared with those of the CPU.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable

import torch
from torch.nn import functional

CHECKS: dict[str, Callable[[], None]] = {}
"""Feature -> the program that uses it."""


def _checks(feature: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[feature] = function
        return function

    return register


def _expect(is_so: object, what: str) -> None:
    """Raise where something is not so; not ``assert``, which ``python -O`` leaves out."""
    if not is_so:
        raise AssertionError(what)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found.detach().cpu(), expected.detach().cpu(), rtol=tolerance, atol=tolerance)


@_checks("torch.cuda is available")
def _available() -> None:
    _expect(torch.cuda.is_available() and torch.cuda.device_count() >= 1, "no device is available")
    _expect(torch.cuda.get_device_name() and torch.cuda.get_device_properties(0).total_memory > 0, "no properties")


@_checks("device arguments")
def _arguments() -> None:
    kinds = {
        torch.ones(2, device="cuda").device.type,
        torch.ones(2).cuda().device.type,
        torch.ones(2).to(0).device.type,
        torch.nn.Linear(2, 2).to("cuda:0").weight.device.type,
        torch.zeros_like(torch.ones(2, device=torch.device("cuda"))).device.type,
    }
    _expect(len(kinds) == 1, f"tensors are on {sorted(kinds)}")


@_checks("operators")
def _operators() -> None:
    x = _numbers(4, 6)
    for function in (
        torch.exp,
        torch.tanh,
        functional.gelu,
        lambda x: x @ x.t(),
        lambda x: x.softmax(-1),
        torch.cumsum,
    ):
        arguments = (1,) if function is torch.cumsum else ()
        _same(function(x.cuda(), *arguments), function(x, *arguments))


@_checks("views and in-place writes")
def _views() -> None:
    x, there = _numbers(4, 6), _numbers(4, 6).cuda()
    for each in (x, there):
        each.t()[1:3].mul_(2)
        each[::2, 1] = 7.0
    _same(there, x)


@_checks("writes to tensors that are not contiguous")
def _strided_writes() -> None:
    ones = torch.ones(3, 2)
    x, there = _numbers(2, 3).t(), _numbers(2, 3).cuda().t()
    _same(there.addcmul_(ones.cuda(), ones.cuda()), x.addcmul_(ones, ones))
    _same(there.addcdiv_(ones.cuda(), ones.cuda()), x.addcdiv_(ones, ones))


@_checks("backward")
def _backward() -> None:
    x, there = _numbers(4, 4).requires_grad_(), _numbers(4, 4).cuda().requires_grad_()
    for each in (x, there):
        functional.layer_norm(each @ each, (4,)).square().sum().backward()
    _expect(x.grad is not None and there.grad is not None, "there is no gradient")
    _same(there.grad, x.grad, 1e-3)  # type: ignore[arg-type]


@_checks("convolution and pooling")
def _convolution() -> None:
    x, weight = _numbers(2, 3, 8, 8), _numbers(4, 3, 3, 3)
    _same(
        functional.max_pool2d(functional.conv2d(x.cuda(), weight.cuda()), 2),
        functional.max_pool2d(functional.conv2d(x, weight), 2),
        1e-3,
    )


@_checks("attention")
def _attention() -> None:
    q, k, v = _numbers(3, 2, 4, 6, 8)
    attend = functional.scaled_dot_product_attention
    _same(attend(q.cuda(), k.cuda(), v.cuda(), is_causal=True), attend(q, k, v, is_causal=True), 1e-3)
    strided = [each.transpose(1, 2) for each in (q, k, v)]
    _same(attend(*(each.cuda() for each in strided)), attend(*strided), 1e-3)


@_checks("linear algebra")
def _linear_algebra() -> None:
    x = _numbers(4, 4)
    _same(torch.linalg.solve(x.cuda(), x[0].cuda()), torch.linalg.solve(x, x[0]), 1e-3)
    _same(torch.linalg.svdvals(x.cuda()), torch.linalg.svdvals(x), 1e-3)
    _same(torch.linalg.pinv(x.cuda()), torch.linalg.pinv(x), 1e-2)
    _expect(int(torch.linalg.matrix_rank(x.cuda())) == 4, "matrix_rank is wrong")


@_checks("training")
def _training() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
    optimizer, x = torch.optim.Adam(model.parameters(), 0.05), _numbers(16, 4).cuda()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    _expect(losses[-1] < losses[0] / 2, f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}")


@_checks("autocast and gradient scaling")
def _autocast() -> None:
    model, x = torch.nn.Linear(4, 1).cuda(), _numbers(8, 4).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
    before = model.weight.detach().clone()
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    _expect(not torch.equal(before.cpu(), model.weight.detach().cpu()), "the weights did not change")


@_checks("bfloat16")
def _bfloat16() -> None:
    if torch.cuda.is_bf16_supported():
        x = _numbers(4, 4)
        _same((x.cuda().bfloat16() @ x.cuda().bfloat16()).float(), x @ x, 0.1)


@_checks("streams and events")
def _events() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    torch.cuda.current_stream().synchronize()
    end.record()
    torch.cuda.synchronize()
    _expect(end.query() and start.elapsed_time(end) >= 0, "an event is not done")


@_checks("memory figures and peaks")
def _memory() -> None:
    size = 64 << 20
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    del kept
    _expect(grown >= size * 0.9, f"{size} bytes were allocated, and the figure grew by {grown}")
    _expect(torch.cuda.max_memory_allocated() - before >= size * 0.9, "the peak was missed")
    free, total = torch.cuda.mem_get_info()
    _expect(0 < free <= total, f"{free} of {total} bytes are free")


@_checks("out of memory is CUDA's error")
def _out_of_memory() -> None:
    try:
        torch.empty(1 << 60, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return
    raise AssertionError("2^60 bytes were allocated")


@_checks("random numbers")
def _random() -> None:
    def drawn() -> torch.Tensor:
        torch.manual_seed(3)
        return torch.rand(4, device="cuda").cpu()

    _expect(torch.equal(drawn(), drawn()), "one seed gave two sequences")
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda").cpu()
    torch.cuda.set_rng_state(state)
    _expect(torch.equal(first, torch.rand(4, device="cuda").cpu()), "a restored state gave other numbers")
    generators = [torch.Generator("cuda").manual_seed(1) for _ in range(2)]
    one, other = (torch.rand(4, device="cuda", generator=each).cpu() for each in generators)
    _expect(torch.equal(one, other), "equal generators gave other numbers")


@_checks("checkpoints of activations")
def _checkpoint() -> None:
    seen: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(functional.dropout(x))
        return seen[-1] * x

    x = torch.ones(64, device="cuda", requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    _expect(torch.equal(seen[0].detach().cpu(), seen[1].detach().cpu()), "dropout was recomputed with other numbers")


@_checks("float64")
def _float64() -> None:
    found = torch.ones(3, dtype=torch.float64).cuda() * 2
    _expect(found.is_floating_point() and found.tolist() == [2.0] * 3, "a float64 tensor lost its values")
    _expect(torch.ones(3, device="cuda").double().sum().item() == 3.0, "double() lost the values")


@_checks("complex numbers and FFT")
def _complex() -> None:
    x = _numbers(8)
    _same(torch.fft.irfft(torch.fft.rfft(x.cuda())), x)


@_checks("copies, pinned and asynchronous")
def _copies() -> None:
    x = _numbers(1 << 16)
    there = x.pin_memory().to("cuda", non_blocking=True)
    back = there.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    _expect(torch.equal(back, x), "the copy differs")


@_checks("saved files")
def _files() -> None:
    file = io.BytesIO()
    x = _numbers(3).cuda()
    torch.save({"x": x}, file)
    for location in ("cuda", "cpu", None):
        file.seek(0)
        _same(torch.load(file, map_location=location)["x"], x)


@_checks("threads")
def _threads() -> None:
    kinds: list[str] = []
    thread = threading.Thread(target=lambda: kinds.append(torch.ones(1, device="cuda").device.type))
    thread.start()
    thread.join()
    _expect(kinds == [torch.ones(1, device="cuda").device.type], "a thread was outside the scope")


@_checks("torch.accelerator")
def _accelerator() -> None:
    _expect(torch.accelerator.is_available() and torch.accelerator.device_count() >= 1, "there is no accelerator")
    torch.accelerator.synchronize()
    torch.accelerator.current_stream().synchronize()
