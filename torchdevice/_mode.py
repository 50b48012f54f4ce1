"""The mode: look a torch call up, hand it to its rewriter, or call it as it is. Nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from torchdevice import _active, _rewriters, _tracing

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_UNSEEN = object()


class DeviceMode(TorchFunctionMode):
    """Sees every torch call of a thread. One per thread: nested scopes exchange ``scope`` instead of stacking modes.

    It is on torch's stack, or beside it and asked by wrappers (``_entry_points.py``).

    Attributes:
        scope: The innermost scope of the thread.
    """

    def __init__(self, scope: Scope):
        super().__init__()
        self.scope = scope

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scope = self.scope
        rewriter: Any = scope.find(func, _UNSEEN)
        if rewriter is _UNSEEN:
            rewriter = _rewriters.classify(func, scope.table)
        try:
            if rewriter is None:
                return func(*args, **kwargs) if kwargs else func(*args)
            return rewriter(scope, func, args, kwargs or {})
        except (RuntimeError, TypeError) as error:
            scope.reword(error)
            raise


def of_this_thread() -> DeviceMode | None:
    """Return the mode that sees this thread's calls, beside torch's stack or on it; None while it handles one."""
    if _active.state.mode is not None:
        return _active.state.mode
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceMode)), None)


@_tracing.in_place_of(DeviceMode.__torch_function__)
def _traced(self: DeviceMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The same, as Dynamo traces it: what is compiled does not depend on what is in the table then."""
    rewriter = _tracing.NUMBERED[_tracing.number_of(func)]
    if rewriter is None:
        return func(*args, **kwargs) if kwargs else func(*args)
    return rewriter(self.scope, func, args, kwargs or {})
