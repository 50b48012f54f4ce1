"""Linear layers with four-bit weights for plans of QLoRA: ``Linear4bit``'s memory (bitsandbytes).

The weight takes half a byte, and a scale of one byte for each block of 64, because the scales are
quantized too (``bnb_4bit_use_double_quant``), with a float32 for each block of 256 of them. For
each product the weight is written anew in the dtype of the activations, in the forward and in the
backward pass. The layers have no values.

transformers lets bitsandbytes replace its ``Conv1D`` (GPT-2) as well, but not the experts of a
mixture that are one parameter for all: these keep the dtype that PEFT gives them, float32.

Source: ``replace_with_bnb_linear`` in ``transformers/integrations/bitsandbytes.py``, the
documentation of bitsandbytes (``Linear4bit``, ``quantize_4bit``) and the paper on QLoRA, section 3.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

BLOCK, BLOCK_OF_SCALES = 64, 256
"""How many weights have one scale, and how many scales have one float32."""


class _Product(torch.autograd.Function):
    """The product with a weight that exists in the activations' dtype only meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBitLinear) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.written(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        return grad @ ctx.layer.written(grad.dtype), None


class FourBitLinear(torch.nn.Linear):
    """A linear layer with a packed weight. It is a ``torch.nn.Linear``, so that PEFT adapts it.

    Args:
        of: The layer whose sizes, bias and device it has: a linear layer, or transformers'
            ``Conv1D``, which is one with a transposed weight.
    """

    def __init__(self, of: Any):
        torch.nn.Module.__init__(self)
        if isinstance(of, torch.nn.Linear):
            self.out_features, self.in_features = of.weight.shape
        else:
            self.in_features, self.out_features = of.weight.shape
        self.bias = of.bias
        number, device = of.weight.numel(), of.weight.device
        packed = torch.empty((number + 1) // 2, 1, dtype=torch.uint8, device=device)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        scales = -(-number // BLOCK)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device=device))
        self.register_buffer(
            "scales_of_scales", torch.empty(-(-scales // BLOCK_OF_SCALES), device=device)
        )

    def written(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in a dtype."""
        return self.weight.new_empty(self.out_features, self.in_features, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product; under autocast in its dtype."""
        if torch.is_autocast_enabled("cuda"):
            x = x.to(torch.get_autocast_dtype("cuda"))
        elif not x.is_floating_point():
            x = x.float()  # some models cast to the dtype of the weight; it computes in its own
        found: torch.Tensor = _Product.apply(x, self)
        return found if self.bias is None else found + self.bias.to(found.dtype)


def replace(model: Any) -> None:
    """Replace the linear layers of a model of transformers by such layers, but for those that it
    keeps: the output's, tied ones, the last, and those that it wants in float32.
    """
    from transformers.pytorch_utils import Conv1D  # here, because only --model needs it

    kept = _kept(model)
    for place, module in [*model.named_modules()]:
        for name, child in module.named_children():
            whole = f"{place}.{name}".lstrip(".")
            if type(child) in (torch.nn.Linear, Conv1D) and not kept(whole, child):
                setattr(module, name, FourBitLinear(child))


def _kept(model: Any) -> Callable[[str, torch.nn.Module], bool]:
    """Return whether a layer, by its name, is not quantized.

    Source: ``get_modules_to_not_convert`` and ``should_convert_module`` in
    ``transformers/quantizers``.
    """
    output = model.get_output_embeddings()
    uses = Counter(id(each) for part in model.modules() for each in part.parameters(recurse=False))
    *_, (last, _) = model.named_parameters()
    in_float32 = [*(getattr(model, "_keep_in_fp32_modules", None) or ())]

    def keeps(name: str, layer: torch.nn.Module) -> bool:
        return (
            layer is output
            or uses[id(layer.weight)] > 1
            or f"{name}.weight" == last
            or any(
                name.endswith(each) or re.match(rf"(?:{each})(?:(?<=\.)|(?=\.|$))", name)
                for each in in_float32
            )
        )

    return keeps
