"""cuDNN, for ``torch/backends/cudnn``: it is reported as available, and computes nothing but on a simulated GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.backends.cudnn import rnn

from torchdevice.core import Context, replaces, supplied_function, thread_state


class _BenchmarkLimit:
    """``torch.backends.cudnn.benchmark_limit``, which a build without cuDNN lacks. The value is stored per context."""

    def __get__(self, module: Any, owner: type) -> int | None:
        if module is None:
            return None  # the class attribute of torch in a build without cuDNN
        in_scope = thread_state.state.for_cuda is not None
        return torch._C._cuda_get_cudnn_benchmark_limit() if in_scope else vars(module).get("benchmark_limit")

    def __set__(self, module: Any, limit: int) -> None:
        if thread_state.state.for_cuda is not None:
            torch._C._cuda_set_cudnn_benchmark_limit(limit)
        else:
            vars(module)["benchmark_limit"] = limit


CUDNN = 91002
"""cuDNN 9.10.2 as ``torch.backends.cudnn.version()`` packs it: 10,000 x major + 100 x minor + patch."""


def _asks_of(kernel: str) -> None:
    note = f"Return whether CUDA's kernel {kernel!r} could compute attention; False where no CUDA is simulated."

    @supplied_function(f"_can_use_{kernel}_attention", note=note)
    def can_use(context: Context, params: Any, debug: bool = False) -> bool:
        return context.runtime.can_use_attention(kernel, params, debug)


for _kernel in ("cudnn", "flash", "mem_efficient"):
    _asks_of(_kernel)


if vars(type(torch.backends.cudnn)).get("benchmark_limit") is None:
    replaces(type(torch.backends.cudnn), "benchmark_limit", makes=True)(lambda _: _BenchmarkLimit())


@replaces(torch.backends.cudnn, "is_acceptable", native_to="cuda")
def _is_acceptable(context: Context, original: Any, tensor: torch.Tensor) -> bool:
    """Return False also for a tensor that reports CUDA, but is on no simulated GPU: no cuDNN could compute with it."""
    known = tensor.dtype in torch.backends.cudnn.CUDNN_TENSOR_DTYPES
    return context.runtime.has_handles and torch._C._get_cudnn_enabled() and known and not tensor.is_cpu


# Modules ask this for weights that are on cuDNN.
replaces(torch, "_use_cudnn_rnn_flatten_weight", native_to="cuda")(lambda *_: True)

_MODES = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")  # in the order of cuDNN's cudnnRNNMode_t
replaces(rnn, "get_cudnn_mode", native_to="cuda")(lambda _, original, mode: _MODES.index(mode))
replaces(torch.backends.cudnn, "version", native_to="cuda")(lambda *_: CUDNN)
