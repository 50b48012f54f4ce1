"""The operators that MPS is known to compute wrongly, as data.

Numbers are those of issues of https://github.com/pytorch/pytorch. A version is given where the issue, or what is known
of it, says which one has the fault. Everywhere else the guard is always on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchdevice.mps_workarounds import guards

Version = tuple[int, ...]


@dataclass(frozen=True)
class Fault:
    """A kernel that gives wrong results.

    Attributes:
        operators: The operators, with overload.
        issues: The issues that report it.
        what: What is wrong, for the report and the documentation.
        guard: What is done instead.
        macos_before: The first version of macOS without the fault; None where none is known.
        torch_before: The first version of torch without the fault; None where none is known.
    """

    operators: tuple[str, ...]
    issues: tuple[int, ...]
    what: str
    guard: guards.Guard
    macos_before: Version | None = None
    torch_before: Version | None = None

    def is_in(self, torch_version: Version, macos_version: Version | None) -> bool:
        """Return whether versions of torch and of macOS may have the fault; an unknown version may."""
        if self.torch_before is not None and torch_version >= self.torch_before:
            return False
        return self.macos_before is None or macos_version is None or macos_version < self.macos_before


FAULTS = (
    Fault(
        ("addcmul_", "addcmul.out", "addcdiv_", "addcdiv.out", "random_", "random_.from", "random_.to"),
        (131736, 139006, 146085),
        "in-place results are not written to tensors that are not contiguous",
        guards.contiguous_output,
        macos_before=(15,),
    ),
    Fault(
        ("_scaled_dot_product_attention_math_for_mps",),
        (181133, 163597, 174861),
        "attention of arguments that are not contiguous, or of grouped heads, is wrong",
        guards.expanded_groups,
    ),
    Fault(("linear",), (161641,), "arguments that are not contiguous give wrong results", guards.contiguous_arguments),
    Fault(
        ("native_layer_norm", "native_layer_norm_backward"),
        (190054,),
        "arguments of several dtypes give wrong results, or end the process in backward",
        guards.one_dtype,
    ),
    Fault(
        ("_linalg_solve_ex", "_linalg_solve_ex.result"),
        (175192,),
        "gradients of linalg.solve are wrong",
        guards.on_the_cpu,
    ),
    Fault(("bmm", "bmm.out"), (197636,), "products of 2^32 elements or more are wrong", guards.in_parts),
)
"""Every known fault with a guard."""

NOT_GUARDED = {
    "masked attention": (184180,),
    "a CPU tensor written to a slice": (86975, 108978),
    "isfinite": (183419,),
    "gradients of more than 32K elements": (177116,),
    "backward of stacked LSTMs with dropout": (190056,),
    "an index out of range reads 0": (144824,),
    "sparse tensors": (87886, 157238),
    "complex numbers": (188864,),
    "torch.compile": (188970,),
}
"""What is known to be wrong and has no guard -> issues."""
