"""Experiments of ``torchdevice doctor --selftest`` that decide on a real Mac what torch's tables leave open.

docs/mps.md says which decision waits for each. They run outside scopes, on MPS as torch has it, except where a fallback
is looked for. On another target there is nothing to decide.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchdevice import activation
from torchdevice.fallback.missing_operators import VARIABLE
from torchdevice.mps_workarounds.table import FAULTS

_MPS = "mps"


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _renormalized(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.zeros(1, dtype=torch.long, device=x.device), x, max_norm=1.0)


LACKING: dict[str, Callable[[torch.Tensor], Any]] = {
    "linalg_svd": torch.linalg.svd,
    "embedding_renorm_": _renormalized,
    "linalg_eig": torch.linalg.eig,
    "linalg_eigh": lambda x: torch.linalg.eigh(x @ x.t()),
    "linalg_qr": torch.linalg.qr,
    "linalg_lu_solve": lambda x: torch.linalg.lu_solve(x, torch.arange(1, 5, dtype=torch.int32, device=x.device), x),
    "mode": torch.mode,
}
"""Operators of which torch's tables do not say for sure whether MPS has them."""


def _grad_of_solve(device: str) -> torch.Tensor:
    x = (_numbers(4, 4) + 4 * torch.eye(4)).to(device).requires_grad_()
    torch.linalg.solve(x, torch.ones(4, device=device)).sum().backward()
    assert x.grad is not None
    return x.grad


def _in_place(name: str) -> Callable[[str], torch.Tensor]:
    def call(device: str) -> torch.Tensor:
        x, ones = _numbers(2, 3).to(device).t(), torch.ones(3, 2, device=device)
        return getattr(x, name)(ones, ones)

    return call


def _strided_linear(device: str) -> torch.Tensor:
    x, weight = _numbers(6, 4).to(device).t(), _numbers(5, 6).to(device)
    return torch.nn.functional.linear(x, weight)


def _mixed_layer_norm(device: str) -> torch.Tensor:
    x, weight = _numbers(3, 4).to(device).half(), torch.full((4,), 1.5).to(device)
    return torch.nn.functional.layer_norm(x, (4,), weight)


def _strided_attention(device: str) -> torch.Tensor:
    q, k, v = (each.transpose(-1, -2).to(device).transpose(-1, -2) for each in _numbers(3, 1, 2, 4, 8))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


GUARDED: dict[str, Callable[[str], torch.Tensor]] = {
    "addcmul_": _in_place("addcmul_"),
    "addcdiv_": _in_place("addcdiv_"),
    "_scaled_dot_product_attention_math_for_mps": _strided_attention,
    "linear": _strided_linear,
    "native_layer_norm": _mixed_layer_norm,
    "_linalg_solve_ex": _grad_of_solve,
}
"""Operator with a guard -> a call that the fault, where it is present, makes wrong. In the words of known_faults."""


def decide() -> Iterator[tuple[str, str]]:
    """Yield a question and its answer, for each experiment. The machine has MPS."""
    for name, call in LACKING.items():
        yield f"does MPS have {name}?", _has(call)
    known = {name for fault in FAULTS for name in fault.operators}
    for name, wrong in GUARDED.items():
        if name in known:
            yield f"is the wrong result of {name} present here?", _is_present(wrong)
    yield "does a device's index matter in x.device?", str(torch.ones(1, device=_MPS).device)


def _has(call: Callable[[torch.Tensor], Any]) -> str:
    if VARIABLE in os.environ:
        return f"unknown, because {VARIABLE} is set"
    try:
        call(_numbers(4, 4).to(_MPS))
    except NotImplementedError:
        with activation.portable(_MPS):
            call(_numbers(4, 4).to("cuda"))
        return "no; in a scope it runs on the CPU"
    except Exception as error:
        return f"it raises {type(error).__name__}: {str(error).splitlines()[0]}"
    return "yes"


def _is_present(wrong: Callable[[str], torch.Tensor]) -> str:
    try:
        found, expected = wrong(_MPS).detach().cpu(), wrong("cpu").detach()
    except Exception as error:
        return f"it raises {type(error).__name__}: {str(error).splitlines()[0]}"
    return "no" if torch.allclose(found, expected, rtol=1e-3, atol=1e-4) else "yes"
