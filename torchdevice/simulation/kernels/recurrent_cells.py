"""Recurrent cells, which torch fuses on accelerators only, as formulas of plain tensors.

The formulas are computed on CPU tensors, and on tensors of the meta device where a program runs without values: torch
has no kernels of the CPU for these operators, and meta kernels for some of them only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Results = tuple[torch.Tensor | None, ...]


def _with_bias(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


def _lstm_cell(
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> Results:
    """Return the new hidden state, the new cell state and the activated gates, of shape (batch, 4 * hidden)."""
    gates = _with_bias(of_hidden, hidden_bias) + _with_bias(of_input, input_bias)
    ingate, forget, new, out = gates.chunk(4, 1)
    ingate, forget, new, out = ingate.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    cy = forget * cell + ingate * new
    return out * cy.tanh(), cy, torch.cat([ingate, forget, new, out], 1)


def _lstm_cell_backward(
    of_hidden: torch.Tensor | None,
    of_cell: torch.Tensor | None,
    old: torch.Tensor,
    cell: torch.Tensor,
    gates: torch.Tensor,
    has_bias: bool,
) -> Results:
    """Return the gradients of the gates before activation, of the cell state and of the bias."""
    of_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
    ingate, forget, new, out = gates.chunk(4, 1)
    tanh = cell.tanh()
    through = of_hidden * out * (1 - tanh * tanh)
    if of_cell is not None:
        through = through + of_cell
    grad_gates = torch.cat(
        [
            through * new * ingate * (1 - ingate),
            through * old * forget * (1 - forget),
            through * ingate * (1 - new * new),
            of_hidden * tanh * out * (1 - out),
        ],
        1,
    )
    return grad_gates, through * forget, grad_gates.sum(0) if has_bias else None


def _gru_cell(
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> Results:
    """Return the new hidden state, and the values that backward needs. The gates have shape (batch, 3 * hidden)."""
    input_reset, input_update, input_new = _with_bias(of_input, input_bias).chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = _with_bias(of_hidden, hidden_bias).chunk(3, 1)
    reset, update = (hidden_reset + input_reset).sigmoid(), (hidden_update + input_update).sigmoid()
    new = (input_new + hidden_new * reset).tanh()
    return (hidden - new) * update + new, torch.cat([reset, update, new, hidden, hidden_new], 1)


def _gru_cell_backward(gradient: torch.Tensor, saved: torch.Tensor, has_bias: bool) -> Results:
    """Return the gradients of the input's gates, the hidden state's gates, the hidden state and both biases."""
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
