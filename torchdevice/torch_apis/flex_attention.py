"""``flex_attention``, which torch allows on a list of devices, and with a gradient on fewer.

Its eager form runs on any device, with a gradient too: it is what CUDA runs where the call is not compiled. Where the
call is compiled and Inductor has no backward for the target, ``compile/dynamo.py`` runs the graph as it is.
For ``torch/nn/attention/flex_attention.py``.
"""

from __future__ import annotations

from typing import Any

from torchdevice.core import Context, per_context, replaces
from torchdevice.engines import traced
from torchdevice.engines.rewriters import native_device
from torchdevice.foundation.fidelity import Fidelity


def _validate_device(context: Context, original: Any, query: Any, key: Any, value: Any) -> None:
    if native_device(query).type != context.device_type:
        original(query, key, value)
    elif any(each.requires_grad for each in (query, key, value)) and not context.runtime.compiles_flex_backward:
        context.report("flex_attention with a gradient", "its eager form", Fidelity.EXACT)


@replaces("torch.nn.attention.flex_attention", "_validate_device", makes=True)
def _make(original: Any) -> Any:
    return traced.with_nothing_in_place(per_context(original, _validate_device))
