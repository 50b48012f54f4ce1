"""torch's own test case, and the tests that torch makes for each device type.

The test case looks after each test for modes that the test left on the stack. It compares the
length of the stack with that in ``setUp``, or with 0 where a class's ``setUp`` does not call
torch's, and takes off what is too much. The modes of scopes are not counted: a scope may be entered
around all tests, or in a test and left by a cleanup, which runs after the comparison. For
``torch/testing/_internal/common_utils.py`` and ``common_device_type.py``.
"""

from __future__ import annotations

from typing import Any

from torchdevice.kernel.bindings import later, replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.thread_state import state

_UTILS = "torch.testing._internal.common_utils:TestCase"

_LENGTH = "_prev_torch_function_mode_stack_len"
"""The attribute of a test case, which torch has since 2.13."""


# The modules ask at import whether there is CUDA, and leave tests out where there is none.
for _module in ("torch._dynamo.test_case", "torch._inductor.test_case"):
    later(_module, sees_scope=True)


@replaces(_UTILS, "setUp", sees_scope=True)
def _set_up(context: Context, original: Any, self: Any) -> None:
    original(self)
    _count(self, -len(state.stacked))


@replaces(_UTILS, "tearDown", sees_scope=True)
def _tear_down(context: Context, original: Any, self: Any) -> None:
    _count(self, len(state.stacked))
    original(self)


def _count(test: Any, modes: int) -> None:
    if hasattr(test, _LENGTH):
        setattr(test, _LENGTH, getattr(test, _LENGTH) + modes)


@replaces(
    "torch.testing._internal.common_device_type",
    "get_desired_device_type_test_bases",
    sees_scope=True,
)
def _test_bases(context: Context, original: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Omit out-of-tree accelerators: the one the program is written for stands for them."""
    out_of_tree = original.__globals__["PrivateUse1TestBase"]
    return [base for base in original(*args, **kwargs) if base is not out_of_tree]
