"""torch's own test case, and the tests that torch makes for each device type.

The test case looks after each test for modes that the test left on the stack. It compares the length of the stack with
that in ``setUp``, or with 0 where a class's ``setUp`` does not call torch's, and takes off what is too much. The modes
of scopes are not counted: a scope may be entered around all tests, or in a test and left by a cleanup, which runs after
the comparison. For ``torch/testing/_internal/common_utils.py`` and ``common_device_type.py``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torchdevice.core.context import Context
from torchdevice.core.importing import WhenImported
from torchdevice.core.patching import Patch, replaced_function
from torchdevice.core.thread_state import state

_INTERNAL = "torch.testing._internal"

_LENGTH = "_prev_torch_function_mode_stack_len"


def _set_up(context: Context, original: Any, self: Any) -> None:
    original(self)
    setattr(self, _LENGTH, getattr(self, _LENGTH) - len(state.stacked))


def _tear_down(context: Context, original: Any, self: Any) -> None:
    setattr(self, _LENGTH, getattr(self, _LENGTH) + len(state.stacked))
    original(self)


def _test_bases(context: Context, original: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Leave out-of-tree accelerators out: the one that the program is written for is there, and stands for them."""
    out_of_tree = original.__globals__["PrivateUse1TestBase"]
    return [base for base in original(*args, **kwargs) if base is not out_of_tree]


def _patches_of_test_case(module: ModuleType) -> list[Patch]:
    if not hasattr(module.TestCase, _LENGTH):  # up to torch 2.12 at the latest
        return []
    return [
        replaced_function(module.TestCase, "setUp", _set_up),
        replaced_function(module.TestCase, "tearDown", _tear_down),
    ]


def _patches_of_device_types(module: ModuleType) -> list[Patch]:
    return [replaced_function(module, "get_desired_device_type_test_bases", _test_bases)]


def patches() -> list[Patch]:
    """Return the patches of modules that programs import themselves."""
    # The modules ask at import whether there is CUDA, and leave tests out where there is none.
    return [
        WhenImported(f"{_INTERNAL}.common_utils", _patches_of_test_case, sees_scope=True),
        WhenImported(f"{_INTERNAL}.common_device_type", _patches_of_device_types, sees_scope=True),
    ]
