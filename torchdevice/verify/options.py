"""The options of ``verify=``."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torchdevice.kernel.options import Options, Target, literal, option, truth


def _verify(name: str, value: Any) -> bool | str | None:
    if value is None or isinstance(value, bool):
        return value or None
    if not isinstance(value, str) or not value.endswith(".json"):
        raise ValueError(
            f"verify={value!r} is neither True nor the name of a file. Use True, or a text "
            "FILE.json."
        )
    if not os.path.isdir(os.path.dirname(os.path.abspath(value))):
        raise ValueError(
            f"verify={value!r} is in a folder that is not there. Make the folder, or name another "
            "file."
        )
    return os.path.abspath(value)


def _verify_sample(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(
            f"verify_sample={value!r} is not a fraction. Use a number above 0, and 1 for every "
            "call."
        )
    return float(value)


def _verify_only(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else value
    is_list = isinstance(names, (list, tuple))
    if not is_list or not all(isinstance(each, str) and each.strip() for each in names):
        raise ValueError(
            f"verify_only={value!r} names no operators. Use a text such as 'mm,addcmul_', or a "
            "tuple."
        )
    return tuple(each.strip() for each in names) or None


@dataclasses.dataclass(frozen=True)
class VerifyOptions(Options):
    """The options of ``verify=``.

    Attributes:
        verify: Compute every operator of the target on the CPU too (on a CPU target in float64),
            and report those that differ beyond the tolerances of torch.testing. The findings are
            written to FILE.json.
        verify_sample: The fraction of the calls of each operator that verify checks: 0.1 for every
            tenth, and the first.
        verify_only: The operators that verify checks, such as mm,addcmul_. Default: all of torch's.
    """

    verify: bool | str | None = option(
        None,
        _verify,
        parse=lambda text: text if text.endswith(".json") else truth(text),
        show=lambda value: "1" if value is True else value,
        choices=("FILE.json",),
        alone=True,
    )
    verify_sample: float = option(1.0, _verify_sample, parse=literal)
    verify_only: str | tuple[str, ...] | None = option(
        None, _verify_only, show=lambda value: ",".join(value or ())
    )

    def contradictions(self, target: Target) -> dict[str, str]:
        found: dict[str, str] = {}
        # The option of simulated devices, where there are any.
        if self.verify and getattr(self, "compute", None) == "meta":
            found["verify"] = (
                "is about values, and there are none with compute='meta'. Leave one of the two out."
            )
        return {**found, **super().contradictions(target)}


RECORD = VerifyOptions
