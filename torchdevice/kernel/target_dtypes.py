"""The dtypes that a target lacks, and how a scope's options treat them."""

from __future__ import annotations

from torchdevice.kernel.devices.runtime import HALF, Runtime
from torchdevice.kernel.options import Options


class TargetDtypes:
    """The dtypes of a target.

    Args:
        options: The options of the scope.
        runtime: The target.

    Attributes:
        unsupported: Dtypes that the target cannot hold.
        float64: The option of that name, or its default for the target and the program.
        keeps_doubles: Whether tensors in those dtypes are kept on the CPU.
        lines_warned_of: File and line of each line of the program that was warned of such a dtype.
        fits_conversions: Whether conversions and moves of tensors must be fitted to the target.
        in_float32: Dtypes whose matrix products are computed in float32, which is faster on the
            target.
    """

    def __init__(self, options: Options, runtime: Runtime):
        self.unsupported = runtime.unsupported_dtypes
        # A program for an accelerator other than CUDA gets that one's error, as without a scope.
        program = "cuda" if options.written_for == "any" else options.written_for
        natively = runtime.supplied.location_tag == program != Options.written_for
        self.float64 = options.float64 or ("error" if natively else "float32")
        # A target that holds float64 ignores the option.
        self.keeps_doubles = self.float64 not in ("float32", "error") and bool(self.unsupported)
        self.lines_warned_of: set[tuple[str, int]] = set()
        self.fits_conversions = bool(self.unsupported) or runtime.blocking_copies_only
        if options.half_products == "auto":
            self.in_float32 = runtime.slow_product_dtypes
        elif options.half_products == "float32" and runtime.shares_host_memory:
            self.in_float32 = HALF
        else:
            self.in_float32 = frozenset()
