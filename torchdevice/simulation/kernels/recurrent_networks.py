"""Recurrent networks as cuDNN's: weights in one piece, one derivative, in training mode only.

cuDNN computes a network where ``torch.backends.cudnn.flags(enabled=False)`` does not forbid it. Its
backward is one operator (aten/src/ATen/native/cudnn/RNN.cpp), which checks the mode and has no
derivative. MPS has an operator for LSTMs whose sequences are not packed, and composes other
networks. Here torch composes all networks of cells.

Recurrent cells, which torch fuses on accelerators only, are formulas of plain tensors. The formulas
are computed on CPU tensors, and on tensors of the meta device where a program runs without values:
torch has no kernels of the CPU for these operators, and meta kernels for some of them only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchdevice.kernel.journal.callers import program_line, warn_at
from torchdevice.kernel.torch_internals import data_ptr
from torchdevice.simulation import policy
from torchdevice.simulation.kernels import derivatives
from torchdevice.simulation.kernels.derivatives import Derivatives, derivatives_of

Results = tuple[Tensor | None, ...]


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm_cell(
    of_input: Tensor,
    of_hidden: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Results:
    """Return hidden state, cell state and activated gates, of shape (batch, 4 * hidden)."""
    ingate, forget, new, out = (
        _with_bias(of_hidden, hidden_bias) + _with_bias(of_input, input_bias)
    ).chunk(4, 1)
    ingate = ingate.sigmoid()
    forget = forget.sigmoid()
    new = new.tanh()
    out = out.sigmoid()
    cy = forget * cell + ingate * new
    return out * cy.tanh(), cy, torch.cat([ingate, forget, new, out], 1)


def _lstm_cell_backward(
    of_hidden: Tensor | None,
    of_cell: Tensor | None,
    old: Tensor,
    cell: Tensor,
    gates: Tensor,
    has_bias: bool,
) -> Results:
    """Return the gradients of the gates before activation, of the cell state and of the bias."""
    of_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
    ingate, forget, new, out = gates.chunk(4, 1)
    tanh = cell.tanh()
    through = of_hidden * out * (1 - tanh * tanh)
    if of_cell is not None:
        through = through + of_cell
    of_ingate = through * new * ingate * (1 - ingate)
    of_forget = through * old * forget * (1 - forget)
    of_new = through * ingate * (1 - new * new)
    of_out = of_hidden * tanh * out * (1 - out)
    grad_gates = torch.cat([of_ingate, of_forget, of_new, of_out], 1)
    return grad_gates, through * forget, grad_gates.sum(0) if has_bias else None


def _gru_cell(
    of_input: Tensor,
    of_hidden: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Results:
    """Return the hidden state and backward's values. Gates have the shape (batch, 3 * hidden)."""
    input_reset, input_update, input_new = _with_bias(of_input, input_bias).chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = _with_bias(of_hidden, hidden_bias).chunk(3, 1)
    reset = (hidden_reset + input_reset).sigmoid()
    update = (hidden_update + input_update).sigmoid()
    new = (input_new + hidden_new * reset).tanh()
    return (hidden - new) * update + new, torch.cat([reset, update, new, hidden, hidden_new], 1)


def _gru_cell_backward(gradient: Tensor, saved: Tensor, has_bias: bool) -> Results:
    """Return gradients of the input's and hidden state's gates, hidden state and both biases."""
    reset, update, new, hidden, hidden_new = saved.chunk(5, 1)
    of_new = gradient * (1 - update) * (1 - new * new)
    of_reset = of_new * hidden_new * (1 - reset) * reset
    of_update = gradient * (hidden - new) * (1 - update) * update
    of_input = torch.cat([of_reset, of_update, of_new], 1)
    of_hidden = torch.cat([of_reset, of_update, of_new * reset], 1)
    of_biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, gradient * update, *of_biases


FORMULAS: dict[str, Callable[..., Results]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
"""Name of an operator -> the function that computes its results."""


OPERATORS = tuple(
    f"{name}.{kind}"
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for kind in ("input", "data")
)

_DTYPES = (torch.float16, torch.float32, torch.float64)


def is_on_cudnn(input: Tensor) -> bool:
    """Return whether cuDNN computes a network on this input, by ``at::cudnn_is_acceptable``."""
    return bool(
        torch._C._get_cudnn_enabled()
        and input.dtype in _DTYPES
        and input.numel()
        and not input.is_cpu
    )


_CUDNN_NETWORKS_TWICE = (
    "the derivative for '_cudnn_rnn_backward' is not implemented. Double backwards is not "
    "supported "
    "for CuDNN RNNs due to limitations in the CuDNN API. To run double backwards, please disable "
    "the CuDNN backend temporarily while running the forward pass of your RNN. For example: \n"
    "with torch.backends.cudnn.flags(enabled=False):\n"
    "    output = model(inputs)"
)


_TWICE = Derivatives(
    "_cudnn_rnn", "_cudnn_rnn_backward", second=(NotImplementedError, _CUDNN_NETWORKS_TWICE)
)

_OF_CUDNN = {
    True: _TWICE,
    False: _TWICE._replace(
        first=(RuntimeError, "cudnn RNN backward can only be called in training mode")
    ),
}
"""Whether a network is in training mode -> its derivatives."""


_CUDNN_WEIGHTS_IN_PIECES = (
    "RNN module weights are not part of single contiguous chunk of memory. This means they need to "
    "be compacted at every call, possibly greatly increasing memory usage. To compact weights "
    "again call flatten_parameters()."
)


def kernel_of(op: Any) -> Callable[..., Any]:
    """Return the kernel of a network above autograd."""
    names = [argument.name for argument in op._schema.arguments]
    train, weights = names.index("train"), names.index("params")
    is_on_mps = op.name() == "aten::lstm.input"

    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            if _are_in_pieces(args[0], args[weights]):
                warn_at(program_line(), UserWarning(_CUDNN_WEIGHTS_IN_PIECES), UserWarning)
            if derivatives.are_asked(args):
                args = _differentiated(args, args[train], is_on_mps)
            return _with_shapes_of(args[names.index("hx")], op.decompose(*args))

    return run


def _with_shapes_of(states: Any, results: Any) -> Any:
    """Return an LSTM's results in its states' shapes: torch 2.10 adds a dimension.

    Its kernel in Python, which ``op.decompose`` calls, takes one out that is not there
    (``torch/_decomp/decompositions.py: one_layer_lstm``).
    """
    if isinstance(states, Tensor) or results[1].dim() == states[0].dim():
        return results
    return results[0], *(
        each.view_as(state) for each, state in zip(results[1:], states, strict=True)
    )


def _differentiated(args: Any, train: bool, is_on_mps: bool) -> Any:
    """Return arguments with the derivatives of the real device's operator for networks, if any."""
    if is_on_cudnn(args[0]) and policy.stands_for_cuda():
        return derivatives.refusing(_OF_CUDNN[train], args)
    if is_on_mps and policy.stands_for_mps():
        return derivatives.refusing(derivatives_of("_lstm_mps", "lstm_mps_backward"), args)
    return args


def _in_order(weights: list[Tensor]) -> list[Tensor]:
    """Return weights in cuDNN's order in memory: all layers' matrices, then the biases."""
    return sorted(weights, key=lambda each: -each.dim())


def flatten(weights: list[Tensor], *rest: Any) -> Tensor:
    """Move weights to one piece of memory: the kernel of ``_cudnn_rnn_flatten_weight``."""
    ordered = _in_order(weights)
    flat = weights[0].new_empty(sum(each.numel() for each in ordered))
    for weight, part in zip(ordered, flat.split([each.numel() for each in ordered]), strict=True):
        weight.set_(part.view_as(weight).copy_(weight))
    return flat


def _are_in_pieces(input: Tensor, weights: list[Tensor]) -> bool:
    """Return whether cuDNN must copy weights. Autocast has done so; tracers' have no memory."""
    real = all(type(each) is torch.nn.Parameter for each in weights)
    # Modules look for weights on CUDA, and flatten no others.
    if not (
        real and is_on_cudnn(input) and policy.stands_for_cuda() and policy.spelled(0) == "cuda:0"
    ):
        return False
    ordered = _in_order(weights)
    places = itertools.accumulate((each.nbytes for each in ordered), initial=data_ptr(ordered[0]))
    return any(data_ptr(each) != place for each, place in zip(ordered, places, strict=False))
