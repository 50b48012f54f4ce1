"""The operator by which functions of this package use tensors' memory."""

from __future__ import annotations

import pytest
from processes import run_python

FAILS_ONCE = """
import torch, torchdevice
from torchdevice.kernel import thread_state
from torchdevice.calls import host_functions
from torchdevice.kernel import registered_kernels

make, left = registered_kernels._make_library, [{turns}]

class Failing:
    def __init__(self, library):
        self.library = library

    def __getattr__(self, name):
        return getattr(self.library, name)

    def {method}(self, *args):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return self.library.{method}(*args)

def make_failing(kind, namespace, *more):
    made = make(kind, namespace, *more)
    return Failing(made) if namespace == "torchdevice_host" else made

registered_kernels._make_library = make_failing

with torchdevice.simulate():
    x = torch.zeros(2, device="cuda")
    call = lambda: host_functions.call(thread_state.state.context, lambda memory: [memory[0].add_(1)].clear(), [x])
    errors = []  # their tracebacks keep what failed alive
    for _ in range(3):
        try:
            call()
        except KeyboardInterrupt as error:
            errors.append(error)
    print(len(errors), x.tolist())
"""


@pytest.mark.one_engine
@pytest.mark.parametrize(("method", "turns"), [("define", 1), ("impl", 1), ("impl", 2)])
def test_a_registration_that_fails_is_made_again(method: str, turns: int) -> None:
    done = run_python("-c", FAILS_ONCE.format(method=method, turns=turns))
    assert done.stdout == "1 [2.0, 2.0]\n", done.stderr
