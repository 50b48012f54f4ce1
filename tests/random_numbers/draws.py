"""Calls that draw numbers on a device, from a generator or from that of the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

DRAWN: dict[str, Callable[[torch.Generator | None], torch.Tensor]] = {
    "rand": lambda g: torch.rand(3000, device="cuda", generator=g),
    "randn": lambda g: torch.randn(3000, device="cuda", generator=g),
    "randint": lambda g: torch.randint(9, (3000,), device="cuda", generator=g),
    "randperm": lambda g: torch.randperm(300, device="cuda", generator=g),
    "random_": lambda g: torch.empty(300, device="cuda").random_(generator=g),
    "exponential_": lambda g: torch.empty(300, device="cuda").exponential_(2.0, generator=g),
    "cauchy_": lambda g: torch.empty(300, device="cuda").cauchy_(1, 2, generator=g),
    "geometric_": lambda g: torch.empty(300, device="cuda").geometric_(0.3, generator=g),
    "log_normal_": lambda g: torch.empty(300, device="cuda").log_normal_(generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((300,), 0.3, device="cuda"), generator=g),
    "bernoulli p": lambda g: torch.bernoulli(torch.empty(300, device="cuda"), 0.3, generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(30, device="cuda"), 20, generator=g),
    "normal": lambda g: torch.normal(torch.ones(300, device="cuda"), 2.0, generator=g),
    "normal of both": lambda g: torch.normal(
        torch.ones(9, device="cuda"), torch.ones(9, device="cuda"), generator=g
    ),
    "complex": lambda g: torch.randn(300, device="cuda", dtype=torch.complex64, generator=g),
}
