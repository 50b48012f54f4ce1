"""Bugs on GPUs and Macs, from public issues and torch's sources, each with a correct twin.

What a bug breaks is a rule of the device's libraries that no kernel of the CPU has.
``docs/make_planted_bugs.py`` writes how many are caught, and how many correct programs fail, by
class, into ``docs/tested.md``.
"""

from __future__ import annotations

import contextlib
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import planted_bugs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

import torchdevice


class Case(NamedTuple):
    """A bug and its twin.

    Attributes:
        kind: The class of the bug.
        source: The issue, as ``repository#number``, or the file of torch that refuses.
        since: The first release of torch for which it is known to hold, of those that are
            supported.
        error: What the error's text begins with; None where the program finds wrong data itself.
        program: Called with whether it is to be correct.
        options: The options of ``simulate()``.
    """

    kind: str
    source: str
    since: str
    error: str | None
    program: Callable[[bool], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the program."""
        return self.program.__name__

    def run(self, correct: bool, **options: Any) -> BaseException | None:
        """Run the program or its twin in its own scope, and return the error that ended it."""
        with (
            torchdevice.simulate(**{"count": 2, "random": "device", **self.options, **options}),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            try:
                return planted_bugs.error_of(self.program, correct)
            finally:
                planted_bugs.end_group()

    def caught(self, **options: Any) -> bool:
        """Return whether the bug ends as on the real device: with its text, or with wrong data."""
        error = self.run(False, **options)
        return error is not None and self.explains(type(error).__name__, str(error))

    def explains(self, kind: str, text: str) -> bool:
        """Return whether an error matches the real device's, or wrong data if it has none."""
        if self.error is None:
            # The simulation's values are right, and it tells why.
            return kind in ("AssertionError", "GraphRaceError")
        return text.startswith((self.error, *LATER.get(self.error, ())))


LATER = {
    "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'": (
        "expected target dtype to be Long or Byte, but got Int",  # since torch 2.13
        "expected scalar type Long but found Int",  # until torch 2.10
    ),
    "monitored_barrier is only implemented for GLOO backend.": (
        "monitored_barrier requires a group with a CPU-capable backend",  # since torch 2.14
    ),
    # until torch 2.10
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is "
    "pinned.": ("CUDA error: operation not permitted when stream is capturing",),
    "Torch not compiled with CUDA enabled": (
        "PyTorch is not linked with support for cuda devices",
        "Could not run 'aten::empty.memory_format' with arguments from the 'CUDA' backend",
    ),
}
"""What other releases of torch say, or the same one once its C++ has asked for CUDA in the process,
as it does when another test runs a scope.
"""


CASES: list[Case] = []


def case(
    kind: str, source: str, error: str | None = None, since: str = "2.10", **options: Any
) -> Callable[[Callable[[bool], Any]], Callable[[bool], Any]]:
    """Return a decorator that adds a program to ``CASES``."""

    def add(program: Callable[[bool], Any]) -> Callable[[bool], Any]:
        CASES.append(Case(kind, source, since, error, program, options))
        return program

    return add


def rand(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, **{"device": "cuda", **options})


# ---- cuDNN's recurrent networks ------------------------------------------------------------------

RNN = "cuDNN's recurrent networks"

EVALUATING = "cudnn RNN backward can only be called in training mode"


@case(RNN, "pytorch/pytorch#5878", EVALUATING)
def lstm_in_evaluation(correct: bool) -> None:
    model, x = nn.LSTM(4, 4).cuda().train(correct), rand(3, 2, 4, requires_grad=True)
    model(x)[0].sum().backward()


@case(RNN, "pytorch/pytorch#15788", EVALUATING)
def saliency_of_a_gru(correct: bool) -> None:
    model, x = nn.GRU(4, 4).cuda().eval(), rand(3, 2, 4, requires_grad=True)
    with torch.backends.cudnn.flags(enabled=not correct):
        model(x)[0].sum().backward()


@case(RNN, "pytorch/pytorch#37965", EVALUATING)
def one_network_of_several_in_evaluation(correct: bool) -> None:
    actor, critic = nn.Linear(4, 4).cuda(), nn.RNN(4, 4).cuda()
    critic.eval()
    if correct:
        critic.train()
    critic(actor(rand(3, 2, 4)))[0].mean().backward()


@case(RNN, "meta-pytorch/captum#564", EVALUATING)
def gradients_of_packed_sequences(correct: bool) -> None:
    model, x = nn.LSTM(4, 4).cuda().train(correct), rand(3, 2, 4, requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
    model(packed)[0].data.sum().backward()


@case(RNN, "pytorch/pytorch#5261", "the derivative for '_cudnn_rnn_backward' is not implemented")
def gradient_penalty(correct: bool) -> None:
    model, x = nn.LSTM(4, 4).cuda(), rand(3, 2, 4, requires_grad=True)
    with torch.backends.cudnn.flags(enabled=not correct):
        out = model(x)[0]
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


@case(RNN, "pytorch/pytorch#25315", "the derivative for '_cudnn_rnn_backward' is not implemented")
def second_derivative_of_an_rnn(correct: bool) -> None:
    model, x = nn.RNN(4, 4).cuda(), rand(1, 3, 4, requires_grad=True)
    with torch.backends.cudnn.flags(enabled=not correct):
        out = model(x)[0]
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.autograd.grad(first.sum(), x)


@case(RNN, "fastai/fastai2#141", "rnn: hx is not contiguous")
def part_of_a_hidden_state(correct: bool) -> None:
    model, hidden = nn.GRU(4, 4, bidirectional=True).cuda(), rand(2, 6, 4)
    state = hidden[:, :3]
    model(rand(5, 3, 4), state.contiguous() if correct else state)


@case(RNN, "facebookresearch/habitat-lab#901", "rnn: cx is not contiguous")
def cell_state_by_transpose(correct: bool) -> None:
    model, cell = nn.LSTM(4, 4).cuda(), rand(3, 1, 4).transpose(0, 1)
    cell = rand(1, 4, 3).transpose(1, 2)
    model(rand(5, 3, 4), (rand(1, 3, 4), cell.contiguous() if correct else cell))


# ---- attention -----------------------------------------------------------------------------------

ATTENTION = "attention's kernels"

NONE = "No available kernel. Aborting execution."


def attend(backend: Any, *given: torch.Tensor, **options: Any) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*given, **options)


def heads(*shape: int, dtype: torch.dtype = torch.float16, **options: Any) -> torch.Tensor:
    return rand(*(shape or (2, 4, 8, 64)), dtype=dtype, **options)


@case(ATTENTION, "pytorch/pytorch#117354", NONE)
def flash_of_three_dimensions(correct: bool) -> None:
    x = heads(4, 8, 64)
    attend(SDPBackend.FLASH_ATTENTION, *(x[None] if correct else x for _ in range(3)))


@case(ATTENTION, "lucidrains/MEGABYTE-pytorch#6", NONE)
def flash_in_float32(correct: bool) -> None:
    x = heads(dtype=torch.float16 if correct else torch.float32)
    attend(SDPBackend.FLASH_ATTENTION, x, x, x)


@case(ATTENTION, "cuda/sdp_utils.cpp", NONE)
def flash_with_a_mask(correct: bool) -> None:
    x, mask = heads(), torch.ones(8, 8, dtype=torch.bool, device="cuda")
    attend(SDPBackend.FLASH_ATTENTION, x, x, x, attn_mask=None if correct else mask)


@case(ATTENTION, "lucidrains/x-transformers#143", NONE, profile="t4")
def flash_on_a_turing(correct: bool) -> None:
    x = heads()
    attend(
        [SDPBackend.FLASH_ATTENTION, *([SDPBackend.EFFICIENT_ATTENTION] if correct else [])],
        x,
        x,
        x,
    )


@case(ATTENTION, "cuda/sdp_utils.cpp", NONE, profile="t4")
def bfloat16_on_a_turing(correct: bool) -> None:
    x = heads(dtype=torch.float16 if correct else torch.bfloat16)
    attend(SDPBackend.EFFICIENT_ATTENTION, x, x, x)


@case(ATTENTION, "cuda/sdp_utils.cpp", NONE)
def heads_of_320(correct: bool) -> None:
    x = heads(1, 2, 8, 256 if correct else 320)
    attend(SDPBackend.FLASH_ATTENTION, x, x, x)


@case(ATTENTION, "cuda/sdp_utils.cpp", NONE)
def heads_that_are_not_aligned(correct: bool) -> None:
    x = heads(1, 2, 8, 24 if correct else 20)
    attend(SDPBackend.EFFICIENT_ATTENTION, x, x, x)


@case(ATTENTION, "cuda/sdp_utils.cpp", NONE, profile="rtx4090")
def training_of_wide_heads(correct: bool) -> None:
    x = heads(1, 2, 8, 224, requires_grad=not correct)
    attend(SDPBackend.FLASH_ATTENTION, x, x, x)


@case(ATTENTION, "cuda/sdp_utils.cpp", NONE)
def causal_with_a_cache(correct: bool) -> None:
    q, k = heads(1, 2, 4, 64), heads(1, 2, 8, 64)
    attend(SDPBackend.FLASH_ATTENTION, q, k, k, is_causal=not correct)


@case(ATTENTION, "cuda/sdp_utils.cpp", NONE)
def groups_without_being_asked(correct: bool) -> None:
    q, k = heads(1, 8, 8, 64), heads(1, 2, 8, 64)
    attend(
        SDPBackend.FLASH_ATTENTION,
        q,
        k.repeat_interleave(4, 1) if correct else k,
        k.repeat_interleave(4, 1),
    )


@case(ATTENTION, "cuda/sdp_utils.cpp", NONE, since="2.12")  # 2.11 computes it
def dropout_of_cudnn(correct: bool) -> None:
    x = heads()
    attend(SDPBackend.CUDNN_ATTENTION, x, x, x, dropout_p=0.125 if correct else 0.1)


@case(ATTENTION, "cuda/sdp_utils.cpp", NONE)
def deterministic_cudnn(correct: bool) -> None:
    x = heads()
    torch.use_deterministic_algorithms(not correct)
    attend(SDPBackend.CUDNN_ATTENTION, x, x, x)


@case(ATTENTION, "cuda/sdp_utils.cpp")
def asking_what_is_possible(correct: bool) -> None:
    x = heads(dtype=torch.float16 if correct else torch.float32)
    params = torch.backends.cuda.SDPAParams(x, x, x, None, 0.0, False, False)
    assert torch.backends.cuda.can_use_flash_attention(params)


# ---- two dtypes ----------------------------------------------------------------------------------

DTYPES = "two dtypes in one call"


@case(DTYPES, "pytorch/pytorch#38487", "expected scalar type Half but found Float")
def half_input_of_layer_norm(correct: bool) -> None:
    x = rand(2, 4, dtype=torch.float32 if correct else torch.float16)
    nn.LayerNorm(4).cuda()(x)


@case(DTYPES, "cubiq/ComfyUI_IPAdapter_plus#151", "expected scalar type Float but found Half")
def half_weights_of_layer_norm(correct: bool) -> None:
    norm = nn.LayerNorm(4).cuda()
    (norm if correct else norm.half())(rand(2, 4))


@case(DTYPES, "LambdaLabsML/examples#37", "expected scalar type Half but found Float")
def half_input_of_group_norm(correct: bool) -> None:
    x = rand(2, 4, 3, dtype=torch.float32 if correct else torch.float16)
    nn.GroupNorm(2, 4).cuda()(x)


@case(
    DTYPES,
    "cudnn/BatchNorm.cpp",
    "Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 "
    "'weight'; but type "
    "torch.cuda.FloatTensor does not equal torch.cuda.HalfTensor (while checking arguments for "
    "cudnn_batch_norm)",
)
def half_weights_of_batch_norm(correct: bool) -> None:
    net, x = nn.BatchNorm2d(4).cuda(), rand(2, 4, 3, 3)
    # Half numbers with weights in float32 are CUDA's common case.
    net(x.half()) if correct else net.half()(x)


@case(DTYPES, "cuda/Normalization.cu", "Expected weight to have type Float but got BFloat16")
def weights_in_the_other_half(correct: bool) -> None:
    net, x = nn.BatchNorm2d(4).cuda(), rand(2, 4, 3, 3)
    (net.half() if correct else net.bfloat16())(x.half())


@case(DTYPES, "cuda/layer_norm_kernel.cu", "expected scalar type BFloat16 but found Float")
def bfloat16_input_of_layer_norm(correct: bool) -> None:
    norm = nn.LayerNorm(4).cuda()
    (norm.bfloat16() if correct else norm)(rand(2, 4, dtype=torch.bfloat16))


@case(
    DTYPES,
    "Convolution.cpp",
    "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor)",
)
def half_input_of_a_convolution(correct: bool) -> None:
    layer = nn.Conv2d(2, 2, 1, bias=False).cuda()
    (layer.half() if correct else layer)(rand(1, 2, 4, 4).half())


@case(
    DTYPES,
    "Convolution.cpp",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor)",
)
def images_left_on_the_host(correct: bool) -> None:
    x = torch.randn(1, 4, 8, 8)
    nn.Conv2d(4, 4, 5).cuda()(x.cuda() if correct else x)


@case(
    DTYPES,
    "Convolution.cpp",
    "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor)",
)
def convolution_left_on_the_host(correct: bool) -> None:
    layer = nn.Conv2d(2, 2, 1)
    (layer.cuda() if correct else layer)(rand(1, 2, 4, 4))


# ---- shapes of libraries -------------------------------------------------------------------------

SHAPES = "shapes and drivers of libraries"


def int8(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int8, device="cuda")


@case(SHAPES, "cuda/Blas.cpp", "self.size(0) needs to be greater than 16, but got 8")
def int_mm_of_few_rows(correct: bool) -> None:
    torch._int_mm(int8(32 if correct else 8, 16), int8(16, 8))


@case(
    SHAPES,
    "cuda/Blas.cpp",
    "self.size(1) needs to be greater than 0 and a multiple of 8, but got 12",
)
def int_mm_of_odd_rows(correct: bool) -> None:
    inner = 16 if correct else 12
    torch._int_mm(int8(32, inner), int8(inner, 8))


@case(
    SHAPES,
    "cuda/Blas.cpp",
    "mat2.size(1) needs to be greater than 0 and a multiple of 8, but got 10",
)
def int_mm_of_odd_columns(correct: bool) -> None:
    torch._int_mm(int8(32, 16), int8(16, 16 if correct else 10))


def scaled(
    rows: int, inner: int, columns: int, one: torch.dtype, other: torch.dtype
) -> torch.Tensor:
    a, b = rand(rows, inner).to(one), rand(columns, inner).to(other).t()
    scale = torch.ones((), device="cuda")
    return torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16)


E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


@case(
    SHAPES,
    "cuda/ScaledBlas.cpp",
    "Expected trailing dimension of mat1 to be divisible by 16",
    profile="h100",
)
def float8_of_odd_rows(correct: bool) -> None:
    scaled(16, 32 if correct else 24, 16, E4, E4)


@case(SHAPES, "cuda/ScaledBlas.cpp", "mat2 shape (32x24) must be divisible by 16", profile="h100")
def float8_of_odd_columns(correct: bool) -> None:
    scaled(16, 32, 32 if correct else 24, E4, E4)


@case(
    SHAPES,
    "cuda/ScaledBlas.cpp",
    "Multiplication of two Float8_e5m2 matrices is not supported",
    profile="h100",
)
def float8_pair(correct: bool) -> None:
    scaled(16, 32, 16, E4 if correct else E5, E5)


@case(
    SHAPES,
    "cuda/ScaledBlas.cpp",
    "Only multiplication of row-major and column-major matrices",
    profile="h100",
)
def float8_of_two_row_major_matrices(correct: bool) -> None:
    a, b, scale = rand(16, 32).to(E4), rand(32, 16).to(E4), torch.ones((), device="cuda")
    torch._scaled_mm(
        a, b.t().contiguous().t() if correct else b, scale, scale, out_dtype=torch.bfloat16
    )


FFT = (
    "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision"
)


@case(SHAPES, "cuda/CuFFTPlanCache.h", FFT)
def fft_in_half_precision(correct: bool) -> None:
    torch.fft.rfft(rand(4, 8 if correct else 10).half())


@case(SHAPES, "cuda/CuFFTPlanCache.h", FFT)
def fft2_in_half_precision(correct: bool) -> None:
    torch.fft.rfft2(rand(2, 8, 8 if correct else 12).half())


@case(
    SHAPES,
    "BatchLinearAlgebra.cpp",
    "torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA",
)
def least_squares_driver(correct: bool) -> None:
    torch.linalg.lstsq(rand(4, 2), rand(4, 1), driver="gels" if correct else "gelsd")


@case(SHAPES, "BatchLinearAlgebra.cpp")
def least_squares_of_deficient_rank(correct: bool) -> None:
    a = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 7.0 if correct else 6.0]], device="cuda")
    b = torch.tensor([[1.0], [2.0], [4.0]], device="cuda")
    # Of all solutions the CPU's default driver finds the smallest.
    assert torch.linalg.lstsq(a, b).solution.norm() < 10


@case(SHAPES, "BatchLinearAlgebraLib.cpp", "torch.linalg.svd: unknown svd driver gesdd")
def svd_driver_of_lapack(correct: bool) -> None:
    torch.linalg.svd(rand(4, 2), driver="gesvd" if correct else "gesdd")


@case(
    SHAPES,
    "cuda/ScatterGatherKernel.cu",
    "\"cuda_scatter_gather_base_kernel_func\" not implemented for 'Bool'",
)
def reduction_of_bools(correct: bool) -> None:
    x, index = torch.zeros(4, device="cuda"), torch.tensor([0, 1], device="cuda")
    x = x if correct else x.bool()
    x.scatter_reduce(0, index, torch.ones(2, device="cuda").to(x.dtype), "amax")


@case(SHAPES, "cuda/IndexKernel.cu", "CUDA error: device-side assert triggered")
def source_of_masked_scatter_is_short(correct: bool) -> None:
    mask, source = torch.ones(4, dtype=torch.bool, device="cuda"), rand(4 if correct else 2)
    torch.zeros(4, device="cuda").masked_scatter_(mask, source)


@case(
    SHAPES,
    "torch.use_deterministic_algorithms",
    "_bincount_cuda does not have a deterministic implementation",
)
def deterministic_bincount(correct: bool) -> None:
    torch.use_deterministic_algorithms(True)
    index = torch.tensor([0, 1], device="cuda")
    torch.bincount(index, None if correct else torch.ones(2, device="cuda"))


# ---- values --------------------------------------------------------------------------------------

VALUES = "values that CUDA defines otherwise"


@case(VALUES, "CUDA Math API: __float2int_rz")
def large_numbers_as_integers(correct: bool) -> None:
    x = torch.tensor([3e9 if not correct else 3.0], device="cuda")
    assert x.int().item() <= 3  # the CPU's result is negative


@case(VALUES, "CUDA Math API: __float2int_rz")
def nan_as_an_integer(correct: bool) -> None:
    x = torch.tensor([float("nan") if not correct else -1.0], device="cuda")
    assert x.int().item() < 0


@case(VALUES, "CUDA Math API: __float2ll_rz")
def infinity_as_an_integer(correct: bool) -> None:
    x = torch.tensor([float("inf") if not correct else -1.0], device="cuda")
    assert x.long().item() < 0


@case(VALUES, "torch.fmod")
def division_of_integers_by_zero(correct: bool) -> None:
    divisor = torch.tensor([2, 1 if correct else 0], device="cuda")
    quotient = torch.tensor([4, 4], device="cuda") // divisor
    assert (quotient * divisor == 4).all()


# ---- generators ----------------------------------------------------------------------------------

GENERATORS = "generators"

FOR_CPU = "Expected a 'cpu' device type for generator but found 'cuda'"


@case(GENERATORS, "pytorch/pytorch#44714", FOR_CPU)
def generator_of_the_gpu_for_a_split(correct: bool) -> None:
    torch.utils.data.random_split(
        range(4), [2, 2], generator=torch.Generator("cpu" if correct else "cuda")
    )


@case(GENERATORS, "zhang-can/CoLA#10", FOR_CPU)
def generator_of_the_gpu_for_a_loader(correct: bool) -> None:
    generator = torch.Generator("cpu" if correct else "cuda")
    list(torch.utils.data.DataLoader(range(4), shuffle=True, generator=generator))


@case(GENERATORS, "ATen/core/Generator.h", FOR_CPU)
def generator_of_the_gpu_for_the_host(correct: bool) -> None:
    torch.randn(3, device="cuda" if correct else "cpu", generator=torch.Generator("cuda"))


@case(
    GENERATORS,
    "hcnoh/knowledge-tracing-collection-pytorch#1",
    "Expected a 'cuda' device type for generator but",
)
def generator_of_the_host_for_the_gpu(correct: bool) -> None:
    torch.set_default_device("cuda")
    try:
        torch.randperm(4, generator=torch.Generator("cuda" if correct else "cpu"))
    finally:
        torch.set_default_device(None)


@case(GENERATORS, "cuda/CUDAGeneratorImpl.cpp", "RNG state is wrong size")
def state_of_the_host_for_the_gpu(correct: bool) -> None:
    torch.cuda.init()  # before it a state only waits for the GPU
    torch.cuda.set_rng_state(torch.cuda.get_rng_state() if correct else torch.get_rng_state())


@case(GENERATORS, "cuda/CUDAGeneratorImpl.cpp", "offset must be a multiple of 4")
def offset_between(correct: bool) -> None:
    torch.Generator("cuda").set_offset(8 if correct else 6)


@case(GENERATORS, "cuda/DistributionTemplates.h")
def numbers_of_the_host_expected(correct: bool) -> None:
    torch.manual_seed(1)
    one = torch.rand(4, device="cuda").cpu()
    torch.manual_seed(1)
    other = torch.rand(4, device="cuda" if correct else "cpu")
    assert torch.equal(one, other.cpu())


# ---- captures of CUDA graphs ---------------------------------------------------------------------

CAPTURES = "captures of CUDA graphs"

CAPTURING = "CUDA error: operation failed due to a previous error during capture"
"""How the end of a capture reports an earlier error, which is the error's context."""

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"

PAGEABLE = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is "
    "pinned."
)


@contextlib.contextmanager
def capturing(mode: str = "global") -> Iterator[torch.cuda.CUDAGraph]:
    """Capture on a stream of its own, without what ``torch.cuda.graph`` does after an error."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode=mode)
        yield graph
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)


@case(CAPTURES, "docs/source/notes/cuda.rst", NOT_PERMITTED)
def waiting_for_the_device(correct: bool) -> None:
    x = rand(4)
    with capturing():
        x.mul_(2)
        if not correct:
            torch.cuda.synchronize()


@case(CAPTURES, "docs/source/notes/cuda.rst", NOT_PERMITTED)
def waiting_for_the_stream(correct: bool) -> None:
    x = rand(4)
    with capturing():
        x.mul_(2)
        if not correct:
            torch.cuda.current_stream().synchronize()


@case(CAPTURES, "CUDA runtime API: cudaStreamQuery", NOT_PERMITTED)
def asking_the_stream(correct: bool) -> None:
    x = rand(4)
    with capturing():
        x.mul_(2)
        if not correct:
            torch.cuda.current_stream().query()


@case(
    CAPTURES,
    "CUDA runtime API: cudaErrorCapturedEvent",
    "CUDA error: operation not permitted on an event last recorded",
)
def waiting_for_an_event(correct: bool) -> None:
    x, event = rand(4), torch.cuda.Event()
    with capturing():
        x.mul_(2)
        event.record()
        if not correct:
            event.synchronize()


@case(CAPTURES, "CUDA runtime API: cudaStreamBeginCapture", NOT_PERMITTED)
def asking_an_earlier_event(correct: bool) -> None:
    x, event = rand(4), torch.cuda.Event()
    event.record()
    with capturing("relaxed" if correct else "global"):
        x.mul_(2)
        event.query()


@case(CAPTURES, "CUDA runtime API: cudaMemcpyAsync", PAGEABLE)
def a_constant_of_the_host(correct: bool) -> None:
    x, constant = rand(4), torch.tensor([2.0], device="cuda")
    with capturing():
        x.mul_(constant if correct else torch.tensor([2.0], device="cuda"))


@case(CAPTURES, "csarofeen/pytorch#2098", PAGEABLE)
def a_batch_of_the_host(correct: bool) -> None:
    x, batch = rand(4), torch.ones(4)
    batch = batch.pin_memory() if correct else batch
    with capturing():
        x.copy_(batch, non_blocking=True)


@case(CAPTURES, "csarofeen/pytorch#2098", NOT_PERMITTED)
def results_to_the_host(correct: bool) -> None:
    x, host = rand(4), torch.empty(4, pin_memory=True)
    with capturing():
        host.copy_(x, non_blocking=correct)


@case(CAPTURES, "docs/source/notes/cuda.rst", NOT_PERMITTED)
def printing_a_tensor(correct: bool) -> None:
    x = rand(4)
    with capturing():
        x.mul_(2)
        str(x.shape if correct else x)


@case(CAPTURES, "docs/source/notes/cuda.rst", NOT_PERMITTED)
def a_branch_on_a_value(correct: bool) -> None:
    x = rand(4)
    with capturing():
        if correct:
            x.copy_(torch.where(x.sum() > 0, x, -x))
        elif x.sum() > 0:
            x.neg_()


@case(
    CAPTURES,
    "cuda/CUDAGeneratorImpl.cpp",
    "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is "
    "the same",
)
def seeding(correct: bool) -> None:
    x = rand(4)
    if correct:
        torch.cuda.manual_seed(1)
    with capturing():
        if not correct:
            torch.cuda.manual_seed(1)
        F.dropout(x)


@case(CAPTURES, "pytorch/pytorch#83148")
def checkpointing_with_random_state(correct: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(64, device="cuda", requires_grad=True)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin()
        y = checkpoint(F.dropout, x, use_reentrant=False, preserve_rng_state=correct)
        (gradient,) = torch.autograd.grad(y.square().sum() / 2, x)
        graph.capture_end()
    for _ in range(2):
        graph.replay()
        assert torch.equal(y * 2, gradient), "the second forward drops what the first one did"


@case(
    CAPTURES,
    "CUDA runtime API: cudaErrorStreamCaptureUnjoined",
    "CUDA error: capturing stream has unjoined work",
)
def a_side_stream_is_not_joined(correct: bool) -> None:
    x, side = rand(4), torch.cuda.Stream()
    with capturing():
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            x.mul_(2)
        if correct:
            current.wait_stream(side)


@case(
    CAPTURES,
    "CUDA runtime API: cudaErrorStreamCaptureIsolation",
    "CUDA error: dependency created on uncaptured work",
)
def waiting_for_work_outside(correct: bool) -> None:
    x, other = rand(4), torch.cuda.Stream()
    with torch.cuda.stream(other):
        before = torch.cuda.Event()
        before.record()
    if correct:
        before.synchronize()
    with capturing():
        if not correct:
            torch.cuda.current_stream().wait_event(before)
        x.mul_(2)


@case(CAPTURES, "cuda/CUDAGraph.cpp")
def a_kernel_on_a_stream_outside(correct: bool) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    with capturing() as graph:
        current = torch.cuda.current_stream()
        if correct:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            x.add_(1)
        if correct:
            current.wait_stream(side)
        x.mul_(1)
    begin = x[0].item()
    graph.replay()
    assert x[0].item() == begin + 1


@case(CAPTURES, "cuda/CUDAGraph.cpp", "Capture must end on the same stream it began on.")
def ending_on_another_stream(correct: bool) -> None:
    x, graph, one, other = rand(4), torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        graph.capture_begin()
        x.mul_(2)
        if correct:
            graph.capture_end()
    if not correct:
        with torch.cuda.stream(other):
            graph.capture_end()


@case(CAPTURES, "pytorch/pytorch#63269", NOT_PERMITTED)
def sizes_that_depend_on_values(correct: bool) -> None:
    x, repeats = rand(4), torch.tensor([1, 2, 0, 1], device="cuda")
    with capturing():
        x.repeat_interleave(repeats, output_size=4 if correct else None)


@case(CAPTURES, "pytorch/pytorch#159594", "CUDA out of memory.", memory="64MiB")
def memory_that_would_have_to_be_freed(correct: bool) -> None:
    held = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
    del held
    if correct:
        torch.cuda.empty_cache()
    with capturing():
        torch.empty(50 << 20, dtype=torch.uint8, device="cuda").fill_(1)


# ---- assertions of kernels -----------------------------------------------------------------------

ASSERTIONS = "assertions of kernels"

ASSERTED = "CUDA error: device-side assert triggered"


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


@case(ASSERTIONS, "pytorch/pytorch#1204", ASSERTED)
def more_classes_than_outputs(correct: bool) -> None:
    F.cross_entropy(rand(4, 4 if correct else 3), indices(0, 1, 2, 3))


@case(ASSERTIONS, "milesial/Pytorch-UNet#375", ASSERTED)
def mask_with_a_value_that_is_no_class(correct: bool) -> None:
    mask = torch.full((1, 2, 2), 255, device="cuda")
    F.cross_entropy(rand(1, 2, 2, 2), mask, ignore_index=255 if correct else -100).nan_to_num()


@case(ASSERTIONS, "meetps/pytorch-semseg#158", ASSERTED)
def labels_that_begin_at_one(correct: bool) -> None:
    labels = indices(1, 2, 3)
    F.nll_loss(rand(3, 3).log_softmax(1), labels - 1 if correct else labels)


@case(ASSERTIONS, "smartyfh/DST-STAR#7", ASSERTED)
def one_loss_of_several_with_fewer_labels(correct: bool) -> None:
    for classes in (8, 4 if correct else 3):
        F.cross_entropy(rand(2, classes), indices(3, 0))


@case(ASSERTIONS, "cuda/Indexing.cu", ASSERTED)
def token_beyond_the_vocabulary(correct: bool) -> None:
    nn.Embedding(8, 4).cuda()(indices(1, 7 if correct else 8))


@case(ASSERTIONS, "cuda/Loss.cu", ASSERTED)
def probabilities_beyond_one(correct: bool) -> None:
    x = torch.tensor([0.5, 2.0], device="cuda")
    F.binary_cross_entropy(x.sigmoid() if correct else x, torch.ones(2, device="cuda"))


@case(ASSERTIONS, "cuda/MultinomialKernel.cu", ASSERTED)
def sampling_from_scores(correct: bool) -> None:
    scores = torch.tensor([0.5, -2.0], device="cuda")
    torch.multinomial(scores.softmax(0) if correct else scores, 1)


# ---- tensors on two devices ----------------------------------------------------------------------

DEVICES = "tensors on two devices"

TWO = "Expected all tensors to be on the same device, but"


@case(DEVICES, "facebookresearch/detr#524", TWO)
def tokens_left_on_the_host(correct: bool) -> None:
    tokens = torch.tensor([1, 2])
    nn.Embedding(8, 4).cuda()(tokens.cuda() if correct else tokens)


@case(DEVICES, "QwenLM/Qwen#920", TWO, count=2)
def layers_on_two_gpus(correct: bool) -> None:
    hidden = nn.Linear(4, 4).cuda(0)(rand(2, 4))
    nn.Linear(4, 4).cuda(1)(hidden.to("cuda:1") if correct else hidden)


@case(DEVICES, "haoosz/ConceptExpress#5", TWO)
def steps_left_on_the_host(correct: bool) -> None:
    schedule, steps = rand(10), torch.tensor([3, 4])
    schedule.index_select(0, steps.cuda() if correct else steps)


# ---- determinism ---------------------------------------------------------------------------------

DETERMINISM = "kernels that are not deterministic"


def deterministically(correct: bool, module: nn.Module, *shape: int) -> None:
    """Go back through a module where the program asks for deterministic kernels, or does not.

    Some modules have a deterministic forward of their own, which torch chooses where the program
    asks before it.
    """
    y = module(rand(*shape, requires_grad=True))
    torch.use_deterministic_algorithms(not correct)
    y.sum().backward()


@case(
    DETERMINISM,
    "pytorch/pytorch#50198",
    "adaptive_avg_pool2d_backward_cuda does not have a deterministic",
)
def deterministic_adaptive_pooling(correct: bool) -> None:
    deterministically(correct, nn.AdaptiveAvgPool2d(2), 1, 2, 4, 4)


@case(
    DETERMINISM,
    "pytorch/pytorch#59783",
    "adaptive_max_pool2d_backward_cuda does not have a deterministic",
)
def deterministic_maximum_of_a_sentence(correct: bool) -> None:
    deterministically(correct, nn.AdaptiveMaxPool1d(2), 1, 2, 8)


@case(
    DETERMINISM,
    "pytorch/pytorch#107999",
    "upsample_trilinear3d_backward_out_cuda does not have a deterministic",
)
def deterministic_upsampling_of_volumes(correct: bool) -> None:
    deterministically(correct, nn.Upsample(scale_factor=2, mode="trilinear"), 1, 1, 2, 2, 2)


@case(
    DETERMINISM,
    "cuda/ReplicationPadding.cu",
    "replication_pad2d_backward_cuda does not have a deterministic",
)
def deterministic_replication(correct: bool) -> None:
    deterministically(correct, nn.ReplicationPad2d(1), 1, 1, 3, 3)


# ---- Macs ----------------------------------------------------------------------------------------

MACS = "what MPS refuses"

MAC: dict[str, Any] = {"profile": "mps", "written_for": "mps", "count": 1}


def on_mac(
    source: str, error: str, **options: Any
) -> Callable[[Callable[[bool], Any]], Callable[[bool], Any]]:
    return case(MACS, source, error, **{**MAC, **options})


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, device="mps", **options)


FLOAT8 = (
    "Trying to convert Float8_e4m3fn to the MPS backend but it does not have support for that "
    "dtype."
)


@on_mac("zzc0721/torch-performance-test-data#62", FLOAT8)
def float8_made_on_the_device(correct: bool) -> None:
    ones(2).to(torch.float16 if correct else E4)


@on_mac("Comfy-Org/ComfyUI#9263", FLOAT8)
def float8_moved_to_the_device(correct: bool) -> None:
    x = torch.ones(2).to(E4)
    (x.to(torch.bfloat16) if correct else x).to("mps")


@on_mac("mps/EmptyTensor.cpp", FLOAT8)
def float8_allocated_on_the_device(correct: bool) -> None:
    torch.empty(2, dtype=torch.float16 if correct else E4, device="mps")


@on_mac("torch/cuda/__init__.py", "Torch not compiled with CUDA enabled")
def cuda_on_a_mac(correct: bool) -> None:
    x = torch.ones(2)
    x.to("mps") if correct else x.cuda()


@on_mac("torch/cuda/__init__.py", "Torch not compiled with CUDA enabled")
def device_of_cuda_on_a_mac(correct: bool) -> None:
    torch.zeros(2, device="mps" if correct else "cuda")


@on_mac("torch/storage.py", "_share_filename_: only available on CPU")
def shared_memory_of_a_mac(correct: bool) -> None:
    x = ones(2)
    (x.cpu() if correct else x).share_memory_()


@on_mac("mps/operations/RnnOps.mm", "LSTM with projections is not currently supported with MPS.")
def projections_of_an_lstm(correct: bool) -> None:
    nn.LSTM(4, 4, proj_size=0 if correct else 2).to("mps")(ones(2, 1, 4))


@on_mac(
    "pytorch/pytorch#160739", "ConvTranspose 3D with BF16 or FP16 types is not supported on MPS"
)
def transposed_convolution_in_half(correct: bool) -> None:
    dtype = torch.float32 if correct else torch.float16
    nn.ConvTranspose3d(2, 2, 1).to("mps", dtype)(ones(1, 2, 2, 2, 2, dtype=dtype))


@on_mac("pytorch/pytorch#96056", "Adaptive pool MPS: input sizes must be divisible by output sizes")
def pooling_of_odd_sizes(correct: bool) -> None:
    F.adaptive_avg_pool2d(ones(1, 1, 6 if correct else 7, 6), 3)


@on_mac("pytorch/pytorch#190064", "maxima of other windows")  # until torch 2.14
def maximum_pooling_of_odd_sizes(correct: bool) -> None:
    size = 6 if correct else 5
    x = torch.arange(size * size, dtype=torch.float32).reshape(1, 1, size, size)
    pool = nn.AdaptiveMaxPool2d(3)
    assert torch.equal(pool(x.to("mps")).cpu(), pool(x)), "maxima of other windows"


@on_mac("index-tts/index-tts#351", "Output channels > 65536 not supported at the MPS device.")
def many_channels(correct: bool) -> None:
    F.conv1d(ones(1, 1, 1), ones(1 << 16 if correct else (1 << 16) + 1, 1, 1))


@on_mac(
    "native_functions.yaml",
    "The operator 'aten::binomial' is not currently implemented for the MPS device",
)
def binomial_on_a_mac(correct: bool) -> None:
    p = ones(2) / 2
    torch.distributions.Binomial(10, p.cpu() if correct else p).sample()


@on_mac("pytorch/pytorch#129842", "Could not run 'new_compressed_tensor' from the 'mps:0' device.")
def compressed_tensor_made_of_its_parts(correct: bool) -> None:
    rows, columns, values = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2)
    if correct:
        torch.sparse_coo_tensor(torch.stack([columns, columns]), values, (2, 2)).to("mps")
    else:
        torch.sparse_csr_tensor(rows.to("mps"), columns.to("mps"), values.to("mps"))


@on_mac("pytorch/pytorch#166426", "Could not run 'new_compressed_tensor' from the 'mps:0' device.")
def compressed_blocks_made_on_a_mac(correct: bool) -> None:
    made = torch.sparse_bsr_tensor(
        [0, 1], [0], torch.ones(1, 2, 2), device="cpu" if correct else "mps"
    )
    made.to_dense().to("mps")


@on_mac("pytorch/pytorch#130790", "Passed CPU tensor to MPS op")
def weights_that_stayed_on_the_host(correct: bool) -> None:
    net = nn.Linear(2, 2)
    (net.to("mps") if correct else net)(ones(1, 2))


@on_mac("pytorch/pytorch#166615", "index 9 is out of bounds for dimension 0 with size 4")
def index_out_of_range_on_a_mac(correct: bool) -> None:
    ones(4)[torch.tensor([3 if correct else 9], device="mps")]


@on_mac("mps/EmptyTensor.cpp", "Cannot convert a MPS Tensor to float64 dtype")
def float64_on_a_mac(correct: bool) -> None:
    torch.ones(2, dtype=torch.float64).to("mps", torch.float32 if correct else torch.float64)


@on_mac(
    "aten/src/ATen/core/Generator.h", "Expected a 'cpu' device type for generator but found 'mps'"
)
def generator_of_a_mac_for_the_host(correct: bool) -> None:
    torch.randperm(4, generator=torch.Generator("cpu" if correct else "mps"))


@on_mac("thu-ml/tianshou#1237", "Cannot convert a MPS Tensor to float64 dtype")
def observations_of_numpy(correct: bool) -> None:
    observations = torch.from_numpy(np.zeros(2))
    (observations.float() if correct else observations).to("mps")


@on_mac("unit8co/darts#2326", "Cannot convert a MPS Tensor to float64 dtype")
def model_in_float64(correct: bool) -> None:
    nn.Linear(2, 2, dtype=torch.float32 if correct else torch.float64).to("mps")


@on_mac("mps/operations/Convolution.mm", "Output channels > 65536 not supported at the MPS device.")
def many_channels_of_a_layer(correct: bool) -> None:
    nn.Conv2d(1, 1 << 16 if correct else (1 << 16) + 1, 1).to("mps")(ones(1, 1, 1, 1))


# ---- what is known to be wrong -------------------------------------------------------------------

SILENT: set[str] = {
    "maximum_pooling_of_odd_sizes",
    # of the second part
    "linear_layer_of_integers",
    "targets_that_broadcast",  # memory that a kernel takes while it runs is not counted
}
"""Cases that are not found: no rule has them yet, or the simulation's memory is another than a
GPU's.
"""

MENDED_IN_TORCH = {
    "pinned_buffer_as_an_array_on_a_mac": "2.14",
    "binomial_on_a_mac": "2.14",
    "loss_of_speech_on_a_mac": "2.14",
    "least_squares_on_a_mac": "2.14",
}
"""Cases that are no bugs from a release of torch on, which has kernels for MPS."""

SILENT_AT_FIRST: set[str] = {
    # Found since the simulation was mended.
    "distances_in_half_precision",
    "hermitian_factor",
    "sparse_solver",
    "tokens_in_half_precision",
    "graph_in_half_precision",
    "model_quantized_for_the_host",
    "collective_of_16_bit_integers",
    "complex_numbers_of_128_bits",
    "convolution_of_integers",
    "hidden_state_in_float32",
    "hidden_state_made_on_the_host",
    "network_that_was_not_moved",
    "pool_of_a_graph_before_its_capture",
    "rates_below_zero",
    "scores_beyond_the_longest_buffer",
    # Found since the case was: another text than torch 2.13's was expected, or the program broke
    # another rule first.
    "batch_beyond_the_memory_of_a_mac",
    "deterministic_histogram",
    "gradient_copied_from_a_server",
    "grid_of_a_spatial_transformer",
    "labels_of_32_bits",
}
"""Cases of the second part that were not found when they first ran and now are."""

FALSE_ALARMS: set[str] = set()
"""Cases whose correct twins fail."""


@case(RNN, "cudnn/RNN.cpp", "RNN module weights are not part of single contiguous chunk of memory.")
def weights_in_several_pieces(correct: bool) -> None:
    warnings.simplefilter("error")
    model = nn.LSTM(4, 4).cuda()
    if not correct:
        model.weight_hh_l0.data = model.weight_hh_l0.data.clone()
    model(rand(3, 2, 4))


@case(
    ATTENTION,
    "CUDA C++ programming guide: 65,535 blocks in y and z",
    "CUDA error: invalid argument",
)
def more_heads_than_a_grid_has_blocks(correct: bool) -> None:
    x = heads(1, 65_535 if correct else 65_536, 1, 8)
    attend(SDPBackend.EFFICIENT_ATTENTION, x, x, x)


@case(ATTENTION, "pytorch/pytorch#142228", "CUDA error: invalid argument")
def heads_where_the_batch_was_meant(correct: bool) -> None:
    x = rand(65_536, 1, 1, 8) if correct else rand(1, 65_536, 1, 8)
    F.scaled_dot_product_attention(x, x, x)


@case(CAPTURES, "BatchLinearAlgebra.cpp", NOT_PERMITTED)
def a_factor_whose_errors_the_host_reads(correct: bool) -> None:
    x = torch.eye(3, device="cuda")
    torch.linalg.cholesky(x)  # before the capture, so that the library has what it keeps
    with capturing():
        torch.linalg.cholesky_ex(x) if correct else torch.linalg.cholesky(x)


@case(CAPTURES, "TensorAdvancedIndexing.cpp: canDispatchToMaskedFill", NOT_PERMITTED)
def values_of_the_device_where_a_mask_says_so(correct: bool) -> None:
    x, value = rand(4), torch.ones((), device="cuda")
    mask = x > 0
    with capturing():
        x[mask] = 1.0 if correct else value


@case(
    CAPTURES,
    "cuda/CUDAGeneratorImpl.cpp",
    "Cannot call CUDAGeneratorImpl::get_offset during CUDA graph capture",
)
def offset_of_random_numbers_in_a_capture(correct: bool) -> None:
    x, generator = rand(4), torch.cuda.default_generators[0]
    with capturing():
        generator.get_state() if correct else generator.get_offset()
        x.mul_(2)


@case(CAPTURES, "docs/source/notes/cuda.rst", races="error")
def results_of_two_graphs_in_one_pool(correct: bool) -> None:
    pool, x = torch.cuda.graph_pool_handle(), torch.ones(4, device="cuda")
    graphs, kept = [torch.cuda.CUDAGraph() for _ in range(3)], []
    with torch.cuda.graph(graphs[0], pool=pool):
        doubled = x * 2
    with torch.cuda.graph(graphs[1], pool=pool):
        result = doubled + 1
    if correct:
        kept.append(doubled)
    del doubled
    with torch.cuda.graph(graphs[2], pool=pool):
        kept.append(x * 3)  # where the first graph's result was dropped, in the same memory
    for number in (0, 2, 1):
        graphs[number].replay()
    assert result.tolist() == [3, 3, 3, 3]


@on_mac(
    "native_functions.yaml",
    "Could not run 'aten::empty.memory_format' with arguments from the 'SparseCsrMPS'",
)
def compressed_sparse_on_a_mac(correct: bool) -> None:
    x = torch.eye(2)
    (x if correct else x.to_sparse_csr()).to("mps")


@case(
    ATTENTION,
    "cuda/flash_attn/flash_api.cpp",
    "FlashAttention only support fp16 and bf16 data type",
)
def flash_by_its_operator(correct: bool) -> None:
    x = rand(1, 8, 2, 64, dtype=torch.float16 if correct else torch.float32)
    torch.ops.aten._flash_attention_forward(x, x, x, None, None, 8, 8, 0.0, False, False)


@case(
    ATTENTION,
    "torch/nested/_internal/sdpa.py",
    "No viable backend for scaled_dot_product_attention was found.",
)
def flash_of_jagged_tensors(correct: bool) -> None:
    dtype = torch.float16 if correct else torch.float32
    parts = [rand(length, 2, 64, dtype=dtype) for length in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    attend(SDPBackend.FLASH_ATTENTION, x, x, x)


# ---- the second part -----------------------------------------------------------------------------

FIRST_PART = len(CASES)
"""How many cases the first part has. Those below were written down before any of them ran on the
simulation.
"""

LEFT = "tensors that a call left on the host"


@case(LEFT, "pytorch/pytorch#2830", TWO)
def model_moved_after_its_optimizer_was_loaded(correct: bool) -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer = torch.optim.Adam((model.cuda() if correct else model).parameters())
    optimizer.load_state_dict(saved)
    model.cuda().zero_grad()
    model(rand(1, 2)).sum().backward()
    optimizer.step()


@case(LEFT, "FoundationVision/VAR#127", TWO)
def steps_of_a_fused_optimizer(correct: bool) -> None:
    weight = nn.Parameter(rand(2))
    weight.grad = rand(2)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    optimizer.state[weight]["step"] = torch.ones((), device="cuda" if correct else "cpu")
    optimizer.step()


@case(
    LEFT,
    "pytorch/pytorch#51042",
    "stft input and window must be on the same device but got self on cuda:0",
)
def window_of_a_spectrogram(correct: bool) -> None:
    torch.stft(
        rand(64),
        16,
        window=torch.hann_window(16, device="cuda" if correct else "cpu"),
        return_complex=True,
    )


@case(LEFT, "SamsungLabs/rome#27", TWO)
def grid_of_a_spatial_transformer(correct: bool) -> None:
    grid = F.affine_grid(torch.eye(2, 3)[None], [1, 1, 4, 4], align_corners=False)
    F.grid_sample(rand(1, 1, 4, 4), grid.cuda() if correct else grid, align_corners=False)


@case(
    LEFT,
    "WenjieDu/PyPOTS#3",
    "expected self and mask to be on the same device, but got mask on cpu and self on",
)
def causal_mask_made_on_the_host(correct: bool) -> None:
    mask = torch.ones(4, 4, device="cuda" if correct else "cpu").triu(1).bool()
    rand(4, 4).masked_fill(mask, float("-inf"))


@case(
    LEFT,
    "pytorch/pytorch#43227",
    "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor",
)
def lengths_of_sentences_on_the_gpu(correct: bool) -> None:
    lengths = torch.tensor([3, 2], device="cpu" if correct else "cuda")
    nn.utils.rnn.pack_padded_sequence(rand(3, 2, 4), lengths)


@case(LEFT, "teamtomo/torch-cubic-spline-grids#26", "indices should be either on")
def control_points_on_the_host(correct: bool) -> None:
    points = torch.ones(4, device="cuda" if correct else "cpu")
    points[indices(1, 2)]


@case(
    LEFT,
    "Lightning-AI/pytorch-lightning#3738",
    "Input and hidden tensors are not at the same device, found input",
)
def hidden_state_made_on_the_host(correct: bool) -> None:
    hidden = torch.zeros(1, 2, 4, device="cuda" if correct else "cpu")
    nn.GRU(4, 4).cuda()(rand(3, 2, 4), hidden)


@case(
    LEFT,
    "torch/nn/modules/rnn.py",
    "Input and parameter tensors are not at the same device, found input tensor at",
)
def network_that_was_not_moved(correct: bool) -> None:
    model = nn.LSTM(4, 4)
    (model.cuda() if correct else model)(rand(3, 2, 4))


@case(LEFT, "open-mmlab/mmcv#2543", TWO)
def bounds_of_a_condition(correct: bool) -> None:
    x, bounds = rand(2), torch.zeros(2)
    torch.where(x < 0, bounds.cuda() if correct else bounds, x)


@case(LEFT, "cuda/Bucketization.cu", TWO)
def boundaries_on_the_host(correct: bool) -> None:
    boundaries = torch.tensor([0.0, 1.0])
    torch.bucketize(rand(4), boundaries.cuda() if correct else boundaries)


@case(LEFT, "Repeat.cpp", TWO)
def repeats_on_the_host(correct: bool) -> None:
    repeats = torch.tensor([1, 2])
    rand(2, 3).repeat_interleave(repeats.cuda() if correct else repeats, 0)


@case(LEFT, "TensorAdvancedIndexing.cpp", TWO)
def values_put_from_the_host(correct: bool) -> None:
    x, values = rand(4), torch.ones(2)
    x[indices(0, 1)] = values.cuda() if correct else values


@case(
    LEFT,
    "torch/csrc/autograd/python_variable.cpp",
    "attempting to assign a gradient with device type 'cpu' to a tensor with device type 'cuda'",
)
def gradient_copied_from_a_server(correct: bool) -> None:
    weight = nn.Parameter(rand(2))
    weight.grad = torch.ones(2, device="cuda" if correct else "cpu")


class Doubled(torch.autograd.Function):
    """A function of numpy, whose backward may leave the gradient on the host."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, correct: bool) -> torch.Tensor:
        ctx.correct = correct
        return torch.from_numpy(x.detach().cpu().numpy() * 2).to(x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = torch.from_numpy(gradients[0].cpu().numpy() * 2)
        return gradient.to(gradients[0].device) if ctx.correct else gradient, None


@case(
    LEFT,
    "PythonOT/POT#679",
    "Function DoubledBackward returned an invalid gradient at index 0 - expected device cuda:0",
)
def gradient_made_by_numpy(correct: bool) -> None:
    Doubled.apply(rand(2, requires_grad=True), correct).sum().backward()


@case(LEFT, "torch/nn/functional.py: binary_cross_entropy_with_logits", TWO)
def weights_of_the_positive_class(correct: bool) -> None:
    weights = torch.ones(3)
    F.binary_cross_entropy_with_logits(
        rand(2, 3), rand(2, 3), pos_weight=weights.cuda() if correct else weights
    )


@case(LEFT, "cuda/EmbeddingBag.cu", TWO)
def offsets_of_bags(correct: bool) -> None:
    offsets = torch.tensor([0, 2])
    nn.EmbeddingBag(8, 4).cuda()(indices(1, 2, 3), offsets.cuda() if correct else offsets)


@case(LEFT, "cuda/Shape.cu", TWO)
def concatenation_with_the_host(correct: bool) -> None:
    token = torch.zeros(1, 4)
    torch.cat([token.cuda() if correct else token, rand(3, 4)])


@case(LEFT, "torch/cuda/_utils.py", "Expected a cuda device, but got: cpu")
def memory_of_the_host(correct: bool) -> None:
    torch.cuda.init()  # before it nothing is allocated on any device
    torch.cuda.memory_allocated(torch.ones(1, device="cuda" if correct else "cpu").device)


# ---- dtypes that a kernel lacks ------------------------------------------------------------------

LACKING = "dtypes that CUDA's kernels lack"


@case(
    LACKING,
    "rasbt/machine-learning-book#192",
    "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
)
def labels_of_32_bits(correct: bool) -> None:
    labels = indices(0, 1)
    F.cross_entropy(rand(2, 3), labels if correct else labels.int())


@case(
    LACKING,
    "pytorch/pytorch#107412",
    "\"max_pool2d_with_indices_out_cuda_frame\" not implemented for 'Long'",
)
def maxima_of_integers(correct: bool) -> None:
    x = torch.ones(1, 1, 4, 4, device="cuda")
    F.max_pool2d(x if correct else x.long(), 2)


@case(LACKING, "pytorch/pytorch#139115", "\"avg_pool2d_out_cuda_frame\" not implemented for 'Long'")
def means_of_integers(correct: bool) -> None:
    x = torch.ones(1, 1, 4, 4, device="cuda")
    F.avg_pool2d(x if correct else x.long(), 2)


@case(LACKING, "cuda/Blas.cpp", "\"addmv_impl_cuda\" not implemented for 'Long'")
def matrix_of_integers_times_a_vector(correct: bool) -> None:
    dtype = torch.float32 if correct else torch.int64
    torch.mv(
        torch.ones(2, 2, device="cuda", dtype=dtype), torch.ones(2, device="cuda", dtype=dtype)
    )


@case(LACKING, "KyungMinJin/HANet#1", "\"baddbmm_cuda\" not implemented for 'Int'")
def batch_of_integer_matrices(correct: bool) -> None:
    x = torch.ones(1, 2, 2, device="cuda", dtype=torch.float32 if correct else torch.int32)
    torch.bmm(x, x)


@case(
    LACKING,
    "cuda/UpSampleBilinear2d.cu",
    "\"upsample_bilinear2d_out_frame\" not implemented for 'Byte'",
)
def resizing_images_of_bytes(correct: bool) -> None:
    images = torch.ones(1, 3, 4, 4, device="cuda", dtype=torch.uint8)
    F.interpolate(images.float() if correct else images, scale_factor=2, mode="bilinear")


@case(LACKING, "cuda/DistanceKernel.cu", "\"cdist_cuda\" not implemented for 'Half'")
def distances_in_half_precision(correct: bool) -> None:
    x = rand(2, 4, dtype=torch.float32 if correct else torch.float16)
    torch.cdist(x, x, p=1.0)


@case(
    LACKING,
    "Comfy-Org/ComfyUI#7370",
    "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, "
    "Int; but got "
    "torch.cuda.HalfTensor instead",
)
def tokens_in_half_precision(correct: bool) -> None:
    tokens = indices(1, 2)
    nn.Embedding(8, 4).cuda()(tokens if correct else tokens.half())


@case(
    LACKING,
    "pytorch/pytorch#90986",
    "Could not run 'quantized::linear_dynamic' with arguments from the 'CUDA' backend",
)
def model_quantized_for_the_host(correct: bool) -> None:
    model = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8
    )
    model(torch.ones(1, 4) if correct else rand(1, 4))


@case(DTYPES, "cuda/Blas.cpp", "expected scalar type Half but found Float")
def batches_of_two_dtypes(correct: bool) -> None:
    x = rand(1, 2, 2).half()
    torch.bmm(x, rand(1, 2, 2, dtype=torch.float16 if correct else torch.float32))


@case(
    RNN,
    "RNN.h: check_attributes",
    "Input and hidden tensors are not the same dtype, found input tensor with Half and",
)
def hidden_state_in_float32(correct: bool) -> None:
    hidden = torch.zeros(1, 2, 4, device="cuda")
    nn.GRU(4, 4).cuda().half()(rand(3, 2, 4).half(), hidden.half() if correct else hidden)


# ---- sparse tensors and solvers ------------------------------------------------------------------

SPARSE = "sparse tensors and solvers"


@case(
    SPARSE,
    "sparse/cuda/SparseCUDATensorMath.cu",
    "\"addmm_sparse_cuda\" not implemented for 'Half'",
)
def graph_in_half_precision(correct: bool) -> None:
    dtype = torch.float32 if correct else torch.float16
    torch.sparse.mm(torch.eye(4, device="cuda").to(dtype).to_sparse(), rand(4, 2, dtype=dtype))


@case(SPARSE, "sparse/cuda/SparseCUDATensorMath.cu", TWO)
def features_of_a_graph_on_the_host(correct: bool) -> None:
    features = torch.ones(4, 2)
    torch.sparse.mm(
        torch.eye(4, device="cuda").to_sparse(), features.cuda() if correct else features
    )


@case(
    SPARSE,
    "torch/sparse/semi_structured.py",
    "Error original_tensor.shape torch.Size([24, 24]) is not supported!",
)
def pruned_weights_that_are_too_small(correct: bool) -> None:
    size = 128 if correct else 24
    weights = torch.tensor([0.0, 0.0, 1.0, 1.0], device="cuda").half().repeat(size, size // 4)
    torch.sparse.to_sparse_semi_structured(weights)


@case(
    SPARSE,
    "sparse/cuda/SparseBlasImpl.cpp",
    "Calling linear solver with sparse tensors requires compiling PyTorch with",
)
def sparse_solver(correct: bool) -> None:
    a, b = torch.eye(4, device="cuda"), rand(4)
    torch.linalg.solve(a, b) if correct else torch.sparse.spsolve(a.to_sparse_csr(), b)


@case(
    SPARSE,
    "cuda/linalg/BatchLinearAlgebra.cpp",
    "torch.linalg.ldl_solve: complex tensors with hermitian=True flag are",
)
def hermitian_factor(correct: bool) -> None:
    factor, pivots = torch.linalg.ldl_factor(
        torch.eye(2, dtype=torch.complex64), hermitian=not correct
    )
    b = torch.ones(2, 1, dtype=torch.complex64, device="cuda")
    torch.linalg.ldl_solve(factor.cuda(), pivots.cuda(), b, hermitian=not correct)


# ---- mixed precision -----------------------------------------------------------------------------

MIXED = "mixed precision"


def scaled_gradients(
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.amp.GradScaler, torch.optim.SGD]:
    """Return a scaler and an optimizer whose weight has a scaled gradient."""
    scaler = torch.amp.GradScaler("cuda")
    weight = nn.Parameter(torch.ones(2, device="cuda", dtype=dtype))
    scaler.scale(weight.sum()).backward()
    return scaler, torch.optim.SGD([weight], 0.1)


@case(
    MIXED,
    "pytorch/pytorch#61098",
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.",
)
def probabilities_under_autocast(correct: bool) -> None:
    x, target = torch.ones(2, device="cuda") / 2, torch.ones(2, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        F.binary_cross_entropy_with_logits(x, target) if correct else F.binary_cross_entropy(
            x, target
        )


@case(MIXED, "haotian-liu/LLaVA#363", "Attempting to unscale FP16 gradients.")
def weights_in_half_precision_with_a_scaler(correct: bool) -> None:
    scaler, optimizer = scaled_gradients(torch.float32 if correct else torch.float16)
    scaler.unscale_(optimizer)


@case(MIXED, "huggingface/accelerate#328", "No inf checks were recorded for this optimizer.")
def optimizer_of_weights_without_gradients(correct: bool) -> None:
    scaler, optimizer = scaled_gradients()
    other = torch.optim.SGD([nn.Parameter(rand(2))], 0.1)
    scaler.step(optimizer if correct else other)


@case(
    MIXED,
    "torch/amp/grad_scaler.py",
    "unscale_() has already been called on this optimizer since the last update().",
)
def clipping_twice_in_a_step(correct: bool) -> None:
    scaler, optimizer = scaled_gradients()
    scaler.unscale_(optimizer)
    if correct:
        scaler.step(optimizer)
        scaler.update()
    scaler.unscale_(optimizer)


@case(
    MIXED,
    "continue-revolution/sd-webui-animatediff#168",
    "Index put requires the source and destination dtypes match, got Float for the destination and "
    "Half for",
)
def results_under_autocast_put_into_a_buffer(correct: bool) -> None:
    model, buffer = nn.Linear(4, 4).cuda(), torch.zeros(3, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        result = model(rand(2, 4))
        buffer[indices(0, 1)] = result.float() if correct else result


# ---- several GPUs --------------------------------------------------------------------------------

PARALLEL = "NCCL and several GPUs"


@case(
    PARALLEL,
    "pytorch/pytorch#42519",
    "Input tensor data type is not supported for NCCL process group: Short",
)
def collective_of_16_bit_integers(correct: bool) -> None:
    planted_bugs.begin_group()
    dist.all_reduce(torch.ones(2, device="cuda", dtype=torch.int32 if correct else torch.int16))


@case(PARALLEL, "pytorch/pytorch#41362", "Cannot use ReduceOp.BAND with NCCL")
def masks_of_all_ranks(correct: bool) -> None:
    planted_bugs.begin_group()
    dist.all_reduce(indices(1, 2), dist.ReduceOp.MIN if correct else dist.ReduceOp.BAND)


@case(
    PARALLEL,
    "pytorch/pytorch#100243",
    "DistributedDataParallel device_ids and output_device arguments only work with",
)
def distributed_model_on_the_host(correct: bool) -> None:
    planted_bugs.begin_group()
    model = nn.Linear(2, 2)
    nn.parallel.DistributedDataParallel(model.cuda() if correct else model, device_ids=[0])


@case(
    PARALLEL, "open-mmlab/mmsegmentation#2147", "SyncBatchNorm expected input tensor to be on GPU"
)
def batch_of_the_host_for_all_ranks(correct: bool) -> None:
    planted_bugs.begin_group()
    x = torch.ones(2, 3, 4)
    nn.SyncBatchNorm(3).cuda()(x.cuda() if correct else x)


@case(
    PARALLEL,
    "torch/distributed/distributed_c10d.py",
    "monitored_barrier is only implemented for GLOO backend.",
)
def barrier_that_names_the_late_rank(correct: bool) -> None:
    planted_bugs.begin_group()
    dist.barrier() if correct else dist.monitored_barrier()


@case(
    PARALLEL,
    "JDAI-CV/FaceX-Zoo#68",
    "module must have its parameters and buffers on device cuda:0 (device_ids[0]) but",
    count=2,
)
def replicas_of_a_model_on_the_host(correct: bool) -> None:
    model = nn.Linear(2, 2)
    nn.DataParallel(model.cuda() if correct else model)(rand(4, 2))


# ---- workers and page-locked memory --------------------------------------------------------------

WORKERS = "workers and page-locked memory"


@case(WORKERS, "pytorch/pytorch#40403", "Caught RuntimeError in DataLoader worker process 0.")
def batches_moved_in_a_worker(correct: bool) -> None:
    rand(1)
    workers = 0 if correct else 1
    context = None if correct else "fork"
    list(
        DataLoader(
            [1, 2], collate_fn=indices_of, num_workers=workers, multiprocessing_context=context
        )
    )


def indices_of(items: list[int]) -> torch.Tensor:
    return indices(*items)


@case(
    WORKERS,
    "unit8co/darts#436",
    "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
)
def data_of_the_gpu_in_a_loader_that_pins(correct: bool) -> None:
    list(DataLoader(TensorDataset(rand(4, 2)), pin_memory=not correct))


@case(WORKERS, "cuda/EmptyTensor.cpp", "Only dense CPU tensors can be pinned")
def page_locked_memory_of_the_gpu(correct: bool) -> None:
    torch.empty(2, device="cpu" if correct else "cuda", pin_memory=True)


# ---- memory --------------------------------------------------------------------------------------

MEMORY = "memory"

OUT = "CUDA out of memory."


@case(MEMORY, "torch/nn/functional.py: mse_loss", OUT, memory="64MiB")
def targets_that_broadcast(correct: bool) -> None:
    target = rand(4096)
    F.mse_loss(rand(4096, 1), target[:, None] if correct else target)


@case(MEMORY, "docs/source/notes/faq.rst", OUT, memory="64MiB")
def moments_of_adam(correct: bool) -> None:
    weight = nn.Parameter(torch.ones(5 << 20, device="cuda"))
    weight.grad = torch.ones_like(weight)
    (torch.optim.SGD([weight], 0.1) if correct else torch.optim.Adam([weight])).step()


@case(MEMORY, "torch/serialization.py", OUT, memory="64MiB")
def checkpoint_beside_the_model(correct: bool) -> None:
    file, weight = io.BytesIO(), nn.Parameter(torch.ones(6 << 20, device="cuda"))
    torch.save(weight.data, file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu" if correct else "cuda")
    weight.data.copy_(saved)
    weight.sum().backward()


@case(MEMORY, "docs/source/notes/faq.rst", OUT, memory="64MiB")
def result_of_the_last_step(correct: bool) -> None:
    x = torch.ones(5 << 20, device="cuda")
    for _ in range(2):
        result = x * 2 + 1
        if correct:
            del result


@case(MEMORY, "torch/cuda/memory.py", OUT, memory="64MiB")
def part_of_a_shared_gpu(correct: bool) -> None:
    torch.cuda.set_per_process_memory_fraction(0.75 if correct else 0.25)
    torch.empty(40 << 20, dtype=torch.uint8, device="cuda")


# ---- streams and events --------------------------------------------------------------------------

STREAMS = "streams and events"


@case(STREAMS, "docs/source/notes/cuda.rst", asynchronous=True)
def results_that_are_still_on_their_way(correct: bool) -> None:
    # The kernel is loaded, which waits for the device.
    x = torch.ones(64, device="cuda").mul(2).mul(0.5)
    torch.cuda._sleep(10**9)
    host = x.mul(2).to("cpu", non_blocking=True)
    if correct:
        torch.cuda.synchronize()
    assert host.sum().item() == 128


@case(STREAMS, "cuda/CUDAEvent.h", "Both events must be recorded before calculating elapsed time.")
def time_to_an_event_that_was_not_recorded(correct: bool) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    if correct:
        end.record()
    torch.cuda.synchronize()
    begin.elapsed_time(end)


# ---- more captures -------------------------------------------------------------------------------


@case(
    CAPTURES,
    "Lightning-AI/pytorch-lightning#18501",
    "Attempting CUDA graph capture of step() for an instance of Adam",
)
def optimizer_that_is_not_capturable(correct: bool) -> None:
    weight = nn.Parameter(rand(2))
    weight.grad = rand(2)
    optimizer = torch.optim.Adam([weight], capturable=correct)
    with capturing():
        optimizer.step()


@case(
    CAPTURES,
    "torch/cuda/graphs.py",
    "make_graphed_callables does not support the autocast caching.",
)
def graphed_module_under_autocast(correct: bool) -> None:
    with torch.autocast("cuda", dtype=torch.float16, cache_enabled=not correct):
        torch.cuda.make_graphed_callables(nn.Linear(4, 4).cuda(), (rand(2, 4),))


@case(CAPTURES, "Onehot.cpp", NOT_PERMITTED)
def number_of_classes_by_the_labels(correct: bool) -> None:
    labels = indices(0, 3)
    with capturing():
        F.one_hot(labels, 4).mul_(2) if correct else F.one_hot(labels)


@case(CAPTURES, "cuda/Nonzero.cu", NOT_PERMITTED)
def places_that_are_not_zero(correct: bool) -> None:
    x = rand(4)
    with capturing():
        torch.nonzero_static(x, size=4) if correct else x.nonzero()


@case(CAPTURES, "torch/amp/grad_scaler.py", NOT_PERMITTED)
def step_of_a_scaler(correct: bool) -> None:
    scaler, optimizer = scaled_gradients()
    with capturing():
        scaler.unscale_(optimizer) if correct else scaler.step(optimizer)


@case(CAPTURES, "torch/nn/utils/clip_grad.py", NOT_PERMITTED)
def clipping_that_raises(correct: bool) -> None:
    weight = nn.Parameter(rand(2))
    weight.grad = rand(2)
    with capturing():
        nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=not correct)


@case(CAPTURES, "cuda/SummaryOps.cu", PAGEABLE)
def counts_of_tokens(correct: bool) -> None:
    tokens, counts = indices(0, 1, 1), torch.zeros(4, device="cuda")
    with capturing():
        counts.index_add_(0, tokens, torch.ones(3, device="cuda")) if correct else tokens.bincount(
            minlength=4
        )


@case(CAPTURES, "cuda/CUDAGraph.cpp", "This CUDAGraph instance already owns a captured graph.")
def graph_captured_twice(correct: bool) -> None:
    x, graph = rand(4), torch.cuda.CUDAGraph()
    for _ in range(2):
        with torch.cuda.graph(torch.cuda.CUDAGraph() if correct else graph):
            x.mul_(2)


@case(
    CAPTURES,
    "cuda/CUDAGraph.cpp",
    "Called CUDAGraph::pool() without a preceding successful capture.",
)
def pool_of_a_graph_before_its_capture(correct: bool) -> None:
    graph, x = torch.cuda.CUDAGraph(), rand(4)
    if correct:
        with torch.cuda.graph(graph):
            x.mul_(2)
    graph.pool()


@case(CAPTURES, "docs/source/notes/cuda.rst")
def results_kept_over_replays(correct: bool) -> None:
    x, graph, kept = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        result = x * 2
    for value in (1, 2):
        x.fill_(value)
        graph.replay()
        kept.append(result.clone() if correct else result)
    assert [each[0].item() for each in kept] == [2, 4]


# ---- more assertions -----------------------------------------------------------------------------


@case(ASSERTIONS, "pytorch/pytorch#74079", ASSERTED)
def one_class_too_few(correct: bool) -> None:
    F.one_hot(indices(0, 4), 5 if correct else 4).cpu()


@case(ASSERTIONS, "MIC-DKFZ/nnUNet#1435", ASSERTED)
def labels_scattered_into_too_few_planes(correct: bool) -> None:
    torch.zeros(2, 4 if correct else 3, device="cuda").scatter_(
        1, indices(0, 3)[:, None], 1.0
    ).cpu()


@case(ASSERTIONS, "cuda/ScatterGatherKernel.cu", ASSERTED)
def actions_beyond_the_values(correct: bool) -> None:
    rand(2, 4 if correct else 3).gather(1, indices(0, 3)[:, None]).cpu()


@case(ASSERTIONS, "cuda/IndexKernel.cu", ASSERTED)
def positions_beyond_the_table(correct: bool) -> None:
    rand(8, 4)[indices(0, 7 if correct else 8)].cpu()


@case(ASSERTIONS, "cuda/IndexKernel.cu", ASSERTED)
def place_beyond_the_end_of_a_cache(correct: bool) -> None:
    cache = torch.zeros(8, device="cuda")
    cache[indices(7 if correct else 8)] = 1.0
    cache.cpu()


@case(ASSERTIONS, "cuda/Indexing.cu", ASSERTED)
def edges_to_a_node_that_is_not_there(correct: bool) -> None:
    torch.zeros(4, device="cuda").index_add_(
        0, indices(0, 3 if correct else 4), torch.ones(2, device="cuda")
    ).cpu()


@case(ASSERTIONS, "cuda/IndexKernel.cu: take", ASSERTED)
def flat_index_beyond_the_end(correct: bool) -> None:
    rand(2, 2).take(indices(0, 3 if correct else 4)).cpu()


@case(ASSERTIONS, "cuda/DistributionBernoulli.cu", ASSERTED)
def chances_beyond_one(correct: bool) -> None:
    torch.bernoulli(torch.tensor([0.5, 1.0 if correct else 1.5], device="cuda")).cpu()


@case(ASSERTIONS, "pytorch/pytorch#7014", ASSERTED)
def sampling_from_an_infinite_score(correct: bool) -> None:
    torch.multinomial(torch.tensor([1.0, 2.0 if correct else float("inf")], device="cuda"), 1).cpu()


@case(ASSERTIONS, "cuda/Loss.cu", ASSERTED)
def padding_that_is_not_ignored(correct: bool) -> None:
    F.cross_entropy(rand(2, 3), indices(0, -1), ignore_index=-1 if correct else -100).cpu()


@case(ASSERTIONS, "cuda/Indexing.cu", ASSERTED)
def token_of_minus_one(correct: bool) -> None:
    nn.Embedding(8, 4).cuda()(indices(1, 0 if correct else -1)).cpu()


@case(ASSERTIONS, "cuda/Distributions.cu", ASSERTED)
def rates_below_zero(correct: bool) -> None:
    torch.poisson(torch.tensor([0.5, 1.0 if correct else -1.0], device="cuda")).cpu()


# ---- more kernels that are not deterministic -----------------------------------------------------


@case(DETERMINISM, "mittagessen/kraken#479", "ctc_loss_backward_gpu does not have a deterministic")
def deterministic_speech(correct: bool) -> None:
    scores, lengths = rand(6, 1, 5, requires_grad=True).log_softmax(2), torch.tensor([6])
    loss = F.ctc_loss(scores, indices(1, 2)[None], lengths, torch.tensor([2]))
    torch.use_deterministic_algorithms(not correct)
    loss.backward()


@case(
    DETERMINISM,
    "torch.use_deterministic_algorithms",
    "_histc_cuda with floating point input does not have a deterministic",
)
def deterministic_histogram(correct: bool) -> None:
    torch.use_deterministic_algorithms(not correct)
    torch.histc(rand(8), 4, 0, 1)


@case(
    DETERMINISM,
    "torch.use_deterministic_algorithms",
    "median CUDA with indices output does not have a deterministic",
)
def deterministic_median(correct: bool) -> None:
    torch.use_deterministic_algorithms(True)
    rand(2, 5).median() if correct else rand(2, 5).median(1)


@case(
    DETERMINISM,
    "pytorch/pytorch#68959",
    "grid_sampler_2d_backward_cuda does not have a deterministic",
)
def deterministic_warp(correct: bool) -> None:
    x, grid = rand(1, 1, 4, 4, requires_grad=True), torch.zeros(1, 2, 2, 2, device="cuda")
    y = F.grid_sample(x, grid, align_corners=False)
    torch.use_deterministic_algorithms(not correct)
    y.sum().backward()


@case(
    DETERMINISM,
    "torch.use_deterministic_algorithms",
    "max_unpooling2d_forward_out does not have a deterministic",
)
def deterministic_unpooling(correct: bool) -> None:
    x, places = F.max_pool2d(rand(1, 1, 4, 4), 2, return_indices=True)
    torch.use_deterministic_algorithms(not correct)
    F.max_unpool2d(x, places, 2)


@case(
    DETERMINISM,
    "torch.use_deterministic_algorithms",
    "embedding_bag_backward_cuda_max does not have a deterministic",
)
def deterministic_maximum_of_bags(correct: bool) -> None:
    y = nn.EmbeddingBag(8, 4, mode="max").cuda()(indices(1, 2)[None])
    torch.use_deterministic_algorithms(not correct)
    y.sum().backward()


@case(
    DETERMINISM,
    "torch.use_deterministic_algorithms",
    "avg_pool3d_backward_cuda does not have a deterministic",
)
def deterministic_pooling_of_videos(correct: bool) -> None:
    deterministically(correct, nn.AvgPool3d(2), 1, 1, 4, 4, 4)


@case(
    DETERMINISM,
    "torch.use_deterministic_algorithms",
    "upsample_bicubic2d_backward_out_cuda does not have a",
)
def deterministic_bicubic(correct: bool) -> None:
    deterministically(correct, nn.Upsample(scale_factor=2, mode="bicubic"), 1, 1, 4, 4)


@case(
    DETERMINISM,
    "torch.use_deterministic_algorithms",
    "nll_loss2d_forward_out_cuda_template does not have a",
)
def deterministic_segmentation(correct: bool) -> None:
    torch.use_deterministic_algorithms(not correct)
    F.nll_loss(
        rand(1, 3, 2, 2).log_softmax(1), torch.zeros(1, 2, 2, dtype=torch.int64, device="cuda")
    )


# ---- more of Macs --------------------------------------------------------------------------------


def lacking(operator: str) -> str:
    return f"The operator 'aten::{operator}' is not currently implemented for the MPS device"


@on_mac("pytorch/pytorch#160829", lacking("_ctc_loss"))
def loss_of_speech_on_a_mac(correct: bool) -> None:
    scores, lengths = ones(6, 1, 5).log_softmax(2), torch.tensor([6])
    F.ctc_loss(
        scores.cpu() if correct else scores, torch.tensor([[1, 2]]), lengths, torch.tensor([2])
    )


@on_mac("pytorch/pytorch#141287", lacking("linalg_eig"))
def eigenvalues_on_a_mac(correct: bool) -> None:
    x = ones(2, 2)
    torch.linalg.eig(x.cpu() if correct else x)


@on_mac("pytorch/pytorch#178031", lacking("_adaptive_avg_pool3d"))
def pooling_of_videos_on_a_mac(correct: bool) -> None:
    x = ones(1, 1, 4, 4, 4)
    F.adaptive_avg_pool3d(x.cpu() if correct else x, 2)


@on_mac("native_functions.yaml", lacking("multi_margin_loss"))
def margins_of_classes_on_a_mac(correct: bool) -> None:
    x, labels = ones(2, 3), torch.tensor([0, 1])
    F.multi_margin_loss(x.cpu(), labels) if correct else F.multi_margin_loss(x, labels.to("mps"))


@on_mac("native_functions.yaml", lacking("linalg_lstsq.out"))
def least_squares_on_a_mac(correct: bool) -> None:
    a, b = ones(3, 1), ones(3, 1)
    torch.linalg.lstsq(a.cpu(), b.cpu()) if correct else torch.linalg.lstsq(a, b)


@on_mac("pytorch/pytorch#105839", "MPS backend out of memory (MPS allocated:", memory="64MiB")
def batch_beyond_the_memory_of_a_mac(correct: bool) -> None:
    [ones(4 << 20) for _ in range(2 if correct else 5)]


@on_mac("kijai/ComfyUI-SUPIR#151", "Invalid buffer size: ")
def scores_beyond_the_longest_buffer(correct: bool) -> None:
    torch.empty(1 << 10 if correct else 1 << 36, device="mps")


@on_mac("mps/operations/Linear.mm", "MPS device does not support linear for non-float inputs")
def linear_layer_of_integers(correct: bool) -> None:
    x = ones(2, 2)
    x = x if correct else x.long()
    F.linear(x, x)


@on_mac("mps/operations/Convolution.mm", "Convolution is supported only for Floating types")
def convolution_of_integers(correct: bool) -> None:
    x = ones(1, 1, 4, 4)
    x = x if correct else x.long()
    F.conv2d(x, x[..., :2, :2])


@on_mac(
    "mps/operations/Indexing.mm",
    "expected self and mask to be on the same device, but got mask on cpu and self on mps",
)
def causal_mask_that_is_no_buffer(correct: bool) -> None:
    mask = torch.ones(4, 4).triu(1).bool()
    ones(4, 4).masked_fill_(mask.to("mps") if correct else mask, float("-inf"))


@on_mac("pytorch/pytorch#176981", "Trying to convert ComplexDouble to the MPS backend")
def complex_numbers_of_128_bits(correct: bool) -> None:
    ones(2).to(torch.complex64 if correct else torch.complex128)


@on_mac("mps/MPSGeneratorImpl.mm", "RNG state is wrong size")
def state_of_the_host_for_a_mac(correct: bool) -> None:
    torch.mps.set_rng_state(torch.mps.get_rng_state() if correct else torch.get_rng_state())


@on_mac(
    "aten/src/ATen/core/Generator.h", "Expected a 'mps' device type for generator but found 'cpu'"
)
def generator_of_the_host_for_a_mac(correct: bool) -> None:
    torch.randn(2, device="mps", generator=torch.Generator("mps" if correct else "cpu"))


SECOND_PART_END = len(CASES)
"""Where the second part ends. Some texts of the cases below were looked up after they had run."""

# ---- outputs of compiled code, and its capability ------------------------------------------------

COMPILED = "compiled code"

OVERWRITTEN = (
    "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."
)

NO_FLOAT8 = "ValueError: type fp8e4nv not supported in this architecture."


@case(COMPILED, "docs/source/torch.compiler_cudagraph_trees.rst", OVERWRITTEN)
def outputs_of_two_compiled_calls(correct: bool) -> None:
    product = torch.compile(lambda x: x @ x, mode="reduce-overhead")
    x = rand(4, 4)
    first = product(x)
    if correct:
        first = first.clone()
    product(x)
    first.sum().item()


@case(COMPILED, "torch/_inductor/cudagraph_trees.py", OVERWRITTEN)
def outputs_collected_for_an_epoch(correct: bool) -> None:
    model = torch.compile(nn.Linear(4, 2).cuda().eval(), mode="reduce-overhead")
    outputs = []
    with torch.no_grad():
        for _ in range(3):
            output = model(rand(3, 4))
            outputs.append(output.cpu() if correct else output)
    torch.cat(outputs)


@case(COMPILED, "torch/_inductor/cudagraph_trees.py", OVERWRITTEN)
def token_given_to_the_next_step(correct: bool) -> None:
    decode = torch.compile(lambda token: token * 2 + 1, mode="reduce-overhead")
    token = torch.ones(1, device="cuda")
    for _ in range(3):
        token = decode(token.clone() if correct else token)


@case(COMPILED, "torch/_inductor/compile_fx.py: _check_triton_bf16_support", profile="t4")
def bfloat16_compiled_for_turing(correct: bool) -> None:
    torch.compiler.reset()  # Dynamo warns of a function once
    x = rand(4, dtype=torch.float16 if correct else torch.bfloat16)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.compile(lambda x: x.sin() * 2)(x)
    text = "Tesla T4 does not support bfloat16 compilation natively, skipping"
    assert text not in {str(each.message) for each in warned}, "it runs operator by operator"


@case(COMPILED, "triton/language/core.py: to_ir", NO_FLOAT8, profile="a100")
def float8_compiled_for_ampere(correct: bool) -> None:
    dtype = torch.float8_e5m2 if correct else torch.float8_e4m3fn
    torch.compile(lambda x: x.to(dtype))(rand(4))


# ---- derivatives ---------------------------------------------------------------------------------

DERIVATIVES = "derivatives that a kernel lacks"


@case(
    DERIVATIVES,
    "derivatives.yaml: _scaled_dot_product_efficient_attention_backward",
    "derivative for aten::_scaled_dot_product_efficient_attention_backward is not implemented",
)
def gradient_penalty_through_attention(correct: bool) -> None:
    x = rand(1, 2, 8, 16, requires_grad=True)
    backends = [SDPBackend.MATH] if correct else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends):
        y = F.scaled_dot_product_attention(x, x, x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        grad.square().sum().backward()


@case(DERIVATIVES, "derivatives.yaml: _cudnn_rnn", "Trying to use forward AD with _cudnn_rnn")
def forward_mode_through_a_gru(correct: bool) -> None:
    model, x = nn.GRU(4, 4).cuda(), rand(3, 2, 4)
    with torch.backends.cudnn.flags(enabled=not correct):
        torch.func.jvp(lambda x: model(x)[0], (x,), (torch.ones_like(x),))


@on_mac("derivatives.yaml", "derivative for aten::lstm_mps_backward is not implemented")
def gradient_penalty_through_an_lstm_on_a_mac(correct: bool) -> None:
    model = (nn.GRU if correct else nn.LSTM)(4, 4).to("mps")
    x = torch.ones(3, 2, 4, device="mps", requires_grad=True)
    (grad,) = torch.autograd.grad(model(x)[0].square().sum(), x, create_graph=True)
    grad.square().sum().backward()


# ---- more of each kind ---------------------------------------------------------------------------


@case(ASSERTIONS, "MultinomialKernel.cu", ASSERTED)
def sampling_from_no_chance(correct: bool) -> None:
    chances = torch.full((2, 3), 1.0 if correct else 0.0, device="cuda")
    torch.multinomial(chances, 1).cpu()


@case(ASSERTIONS, "native_functions.yaml: _assert_async", ASSERTED)
def assertion_with_a_message(correct: bool) -> None:
    torch._assert_async(torch.tensor(correct, device="cuda"), "the loss is finite")
    torch.cuda.synchronize()


@case(
    LACKING,
    "sparse/cuda/SparseCUDATensorMath.cu: bmm_out_sparse_cuda",
    "\"bmm_sparse_cuda\" not implemented for 'Half'",
)
def batch_of_sparse_products_in_half_precision(correct: bool) -> None:
    dtype = torch.float32 if correct else torch.float16
    x = torch.ones(1, 2, 2, device="cuda", dtype=dtype)
    torch.bmm(x.to_sparse(), x)


@case(
    LACKING,
    "cuda/linalg/BatchLinearAlgebraLib.cpp",
    "\"svd_cuda_gesvdj\" not implemented for 'Half'",
)
def singular_values_in_half_precision(correct: bool) -> None:
    torch.linalg.svdvals(rand(2, 2, dtype=torch.float32 if correct else torch.float16))


@case(
    PARALLEL,
    "distributed/c10d/ProcessGroupNCCL.cpp",
    "ProcessGroupNCCL does not support recvAnysource",
)
def message_from_any_rank(correct: bool) -> None:
    planted_bugs.begin_group()
    received = torch.zeros(2, device="cuda")
    if not correct:
        dist.recv(received)


@on_mac("torch/distributed/distributed_c10d.py", "Distributed package doesn't have NCCL built in")
def nccl_on_a_mac(correct: bool) -> None:
    dist.init_process_group(
        "gloo" if correct else "nccl", store=dist.HashStore(), rank=0, world_size=1
    )


@on_mac("pytorch/pytorch#181374", "can't convert mps:0 device type tensor to numpy.")
def pinned_buffer_as_an_array_on_a_mac(correct: bool) -> None:
    torch.zeros(2, pin_memory=not correct).numpy()


@on_mac("mps/EmptyTensor.cpp", "MPS supports tensors with dimensions <= 16, but got 17.")
def seventeen_dimensions_on_a_mac(correct: bool) -> None:
    torch.ones([1] * (16 if correct else 17), device="mps")


# ---- what each thread, generator and replica has for itself --------------------------------------

OWN = "what a thread, a generator or a replica has for itself"

FOR_DEVICE = "Expected a 'cuda' device type for generator but found 'cpu'"


@case(GENERATORS, "torch/utils/data/sampler.py", FOR_DEVICE)
def default_device_of_the_gpu_and_a_loader(correct: bool) -> None:
    torch.set_default_device("cuda")
    try:
        data = TensorDataset(torch.arange(4.0, device="cpu"))
        generator = torch.Generator("cuda") if correct else None
        next(iter(DataLoader(data, shuffle=True, generator=generator)))
    finally:
        torch.set_default_device(None)


@case(GENERATORS, "torch/random.py")
def seed_of_the_host_alone(correct: bool) -> None:
    seed = torch.manual_seed if correct else torch.default_generator.manual_seed
    draws = []
    for _ in range(2):
        seed(0)
        draws.append(rand(4))
    assert torch.equal(*draws)


@case(GENERATORS, "torch/random.py")
def checkpoint_of_the_hosts_numbers_alone(correct: bool) -> None:
    of_host, of_device = torch.get_rng_state(), torch.cuda.get_rng_state()
    before = rand(4)
    torch.set_rng_state(of_host)
    if correct:
        torch.cuda.set_rng_state(of_device)
    assert torch.equal(before, rand(4))


@case(GENERATORS, "torch/random.py: fork_rng")
def forked_numbers_of_the_host_alone(correct: bool) -> None:
    before = torch.cuda.get_rng_state()
    with torch.random.fork_rng(devices=[0] if correct else []):
        rand(4)
    assert torch.equal(before, torch.cuda.get_rng_state())


@case(OWN, "c10/cuda/CUDAFunctions.cpp: cudaSetDevice")
def device_of_another_thread(correct: bool) -> None:
    places = []

    def load() -> None:
        if correct:
            torch.cuda.set_device(1)
        places.append(torch.ones(2, device="cuda").device.index)

    with torch.cuda.device(1):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert places == [1]


@case(OWN, "c10/cuda/CUDAStream.cpp: current_streams")
def stream_of_another_thread(correct: bool) -> None:
    stream, found = torch.cuda.Stream(), []

    def work() -> None:
        with torch.cuda.stream(stream if correct else None):
            found.append(torch.cuda.current_stream() == stream)

    with torch.cuda.stream(stream):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [True]


class Replicated(nn.Module):
    """Counts its calls, and uses what a replica lacks if it is asked to."""

    def __init__(self, asks: bool = False, states: int = 0):
        super().__init__()
        self.net = nn.GRU(2, 2, batch_first=True)
        self.calls, self._asks, self._states = 0, asks, states
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.seen += 1
        device = next(self.parameters()).device if self._asks else x.device
        return self.net(x, torch.zeros(1, self._states or len(x), 2, device=device))[0]


@case(OWN, "torch/nn/parallel/data_parallel.py")
def calls_that_replicas_count(correct: bool) -> None:
    model = nn.DataParallel(Replicated().cuda())
    model(rand(4, 3, 2))
    # The first replica shares the buffers of the module.
    assert (model.module.seen.item() if correct else model.module.calls) == 1


@case(OWN, "torch/nn/parallel/replicate.py", "Caught StopIteration in replica 0 on device 0.")
def first_parameter_of_a_replica(correct: bool) -> None:
    nn.DataParallel(Replicated(asks=not correct).cuda())(rand(4, 3, 2))


@case(
    OWN,
    "torch/nn/modules/rnn.py: check_hidden_size",
    "Caught RuntimeError in replica 0 on device 0.",
)
def hidden_state_of_the_whole_batch(correct: bool) -> None:
    nn.DataParallel(Replicated(states=0 if correct else 4).cuda())(rand(4, 3, 2))


# ---- places --------------------------------------------------------------------------------------


@case(
    DEVICES,
    "TensorShape.cpp: tensor_split",
    "tensor_split expected tensor_indices_or_sections to be on cpu, but it's on cuda:0",
)
def split_at_places_on_the_gpu(correct: bool) -> None:
    places = torch.tensor([1, 3])
    torch.tensor_split(rand(4), places if correct else places.cuda())


@case(
    DEVICES,
    "torch/nn/utils/convert_parameters.py",
    "Found two parameters on different devices, this is currently not supported.",
)
def vector_of_parameters_on_two_gpus(correct: bool) -> None:
    second = nn.Linear(2, 2).to("cuda:0" if correct else "cuda:1")
    nn.utils.parameters_to_vector([*nn.Linear(2, 2).cuda().parameters(), *second.parameters()])


@case("TorchScript", "torch/jit/_trace.py", "The following operation failed in the TorchScript")
def device_that_a_trace_keeps(correct: bool) -> None:
    place = "cuda" if correct else "cpu"
    example = torch.ones(2, device=place)
    traced = torch.jit.trace(lambda x: x + torch.arange(2, device=x.device), example)
    traced(rand(2))


# ---- several GPUs --------------------------------------------------------------------------------


@case(
    PARALLEL,
    "distributed/c10d/ProcessGroupNCCL.cpp",
    "ProcessGroupNCCL::gather: Incorrect output list size 2.",
)
def gathered_into_a_list_that_is_too_long(correct: bool) -> None:
    planted_bugs.begin_group()
    dist.gather(rand(2), [torch.empty(2, device="cuda") for _ in range(1 if correct else 2)])


@case(
    PARALLEL,
    "distributed/c10d/ProcessGroupNCCL.cpp",
    "ProcessGroupNCCL::scatter: invalid tensor size at index 0 (expected (2), got (3))",
)
def scattered_from_parts_of_another_size(correct: bool) -> None:
    planted_bugs.begin_group()
    dist.scatter(torch.empty(2, device="cuda"), [rand(2 if correct else 3)])


@case(
    PARALLEL,
    "distributed/c10d/ProcessGroupNCCL.cpp",
    "NCCL does not support all_reduce with sparse tensors.",
)
def sparse_gradients_of_an_embedding(correct: bool) -> None:
    planted_bugs.begin_group()
    table = nn.Embedding(4, 2, sparse=not correct).cuda()
    table(indices(1)).sum().backward()
    dist.all_reduce(table.weight.grad)


# ---- mixed precision, captures -------------------------------------------------------------------


class Projection(torch.autograd.Function):
    """A product whose backward gets a gradient in half precision where autocast made the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class CastProjection(Projection):
    """The same, as the notes on autocast say."""

    forward = staticmethod(torch.amp.custom_fwd(Projection.forward, device_type="cuda"))
    backward = staticmethod(torch.amp.custom_bwd(Projection.backward, device_type="cuda"))


@case(
    MIXED,
    "docs/source/notes/amp_examples.rst",
    "expected mat1 and mat2 to have the same dtype, but got: c10::Half != float",
)
def own_function_under_autocast(correct: bool) -> None:
    x, weight = rand(2, 2, requires_grad=True), rand(2, 2, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.float16):
        y = (CastProjection if correct else Projection).apply(x, weight)
    y.sum().backward()


@case(CAPTURES, "docs/source/notes/cuda.rst")
def learning_rate_that_a_graph_keeps(correct: bool) -> None:
    weight = torch.ones(2, device="cuda")
    rate = torch.tensor(0.5, device="cuda") if correct else 0.5
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.sub_(torch.ones(2, device="cuda") * rate)
    rate *= 0
    graph.replay()
    assert weight.tolist() == [1, 1]


@case(CAPTURES, "docs/source/notes/cuda.rst")
def branch_that_a_graph_keeps(correct: bool) -> None:
    x, doubles = torch.ones(1, device="cuda"), torch.ones(1, dtype=torch.bool, device="cuda")
    doubling = True
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if correct:
            y = torch.where(doubles, x * 2, x)
        else:
            y = x * 2 if doubling else x
    doubles.zero_()
    doubling = False
    graph.replay()
    assert y.item() == 1


@case(
    CAPTURES,
    "torch/cuda/graphs.py: make_graphed_callables",
    "Modules must not have hooks registered at the time they are passed.",
)
def hooks_of_a_graphed_module(correct: bool) -> None:
    layer = nn.Linear(2, 2).cuda()
    if not correct:
        layer.register_forward_hook(lambda *given: None)
    torch.cuda.make_graphed_callables(layer, (rand(2, 2, requires_grad=True),))


# ---- memory, assertions, capability --------------------------------------------------------------


@case(MEMORY, "docs/source/notes/faq.rst", "CUDA out of memory.", memory="64MiB")
def losses_with_their_graphs(correct: bool) -> None:
    weight, total = torch.ones(1 << 20, device="cuda", requires_grad=True), 0.0
    for _ in range(20):
        loss = weight.exp().sum()
        total += loss.item() if correct else loss


@case(MEMORY, "docs/source/notes/faq.rst", "CUDA out of memory.", memory="64MiB")
def another_attempt_in_the_handler(correct: bool) -> None:
    def attempt(size: int) -> Any:
        first = torch.empty(size << 20, dtype=torch.uint8, device="cuda")
        return first, torch.empty_like(first)

    failed = False
    try:
        attempt(40)
    except torch.cuda.OutOfMemoryError:
        failed = True
        if not correct:
            attempt(20)  # the error holds the frame, and what it has allocated
    if failed:
        attempt(20)


@case(MEMORY, "docs/source/notes/autograd.rst", "CUDA out of memory.", memory="64MiB")
def evaluation_that_keeps_what_backward_needs(correct: bool) -> None:
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    with torch.set_grad_enabled(not correct):
        for _ in range(20):
            x = x.exp()


@case(ASSERTIONS, "Onehot.cpp: one_hot", ASSERTED)
def class_beyond_the_columns(correct: bool) -> None:
    F.one_hot(indices(0, 3), 4 if correct else 3)


@case(ASSERTIONS, "c10/cuda/CUDAException.cpp", ASSERTED)
def batch_that_is_skipped_after_an_assertion(correct: bool) -> None:
    table = rand(4, 2)
    for token in (1, 3 if correct else 9, 2):
        with contextlib.suppress(IndexError, RuntimeError):
            F.embedding(indices(token), table)
    table.sum().item()


@case(SHAPES, "cuda/ScaledBlas.cpp", "torch._scaled_mm is only supported on CUDA", profile="a100")
def float8_products_of_ampere(correct: bool) -> None:
    if correct:
        rand(16, 16).bfloat16() @ rand(16, 16).bfloat16()
    else:
        scaled(16, 16, 16, E4, E4)


@case(COMPILED, "torch/cuda/__init__.py: is_bf16_supported", profile="t4")
def bfloat16_that_is_emulated(correct: bool) -> None:
    assert torch.cuda.is_bf16_supported(including_emulation=correct)
