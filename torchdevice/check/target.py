"""A target's treatment of the names, dtypes and operators in a source.

Torch is imported when the first of them is looked up, because the tables are those that the package
works with.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.python import data_files
from torchdevice.simulation import model_lookup

if TYPE_CHECKING:
    from torchdevice.kernel.fidelity import Fidelity
    from torchdevice.simulation.profiles import Profile


class Target(NamedTuple):
    """A device that stands in, as far as a source can be judged by it.

    Attributes:
        name: The value of ``--target``.
        column: The target's column in the table of public names.
        native: The accelerator whose programs need nothing there; or empty.
        profile_name: The profile with the gaps of the device; or empty.
        folds: Whether an ordinal beyond the last device means the first device.
        devices: How many devices there are.
        plain_graphs: Whether compiled graphs run operator by operator, because Inductor makes no
            code for it.
    """

    name: str
    column: str
    native: str = ""
    profile_name: str = ""
    folds: bool = True
    devices: int = 1
    plain_graphs: bool = False

    @classmethod
    def named(cls, name: str) -> Target:
        """Return a target by its name. It need not be available here.

        Raises:
            UnknownTargetError: There is no such target.
        """
        name = model_lookup.named(name)
        if name in _REAL:
            return _REAL[name]
        from torchdevice.scope import target_selection
        from torchdevice.simulation import targets

        if name in model_lookup.SIMULATED_MAC:
            return MAC._replace(name=name, plain_graphs=True)
        target_selection.check_exists(name)
        profile, devices = targets.profile(name)
        return cls(
            name,
            "simulated",
            "",
            profile.name,
            profile.single,
            devices,
            plain_graphs=profile.lacks_anything,
        )

    @property
    def profile(self) -> Profile | None:
        """The profile with the gaps of the device; None where it lacks nothing."""
        from torchdevice.simulation import profiles

        return profiles.find(self.profile_name) if self.profile_name else None

    def reports(self, families: Collection[str]) -> bool:
        """Return whether tensors report one of these accelerators that programs are written for."""
        return self.native in families or not (self.native or self.name in _REAL)

    @property
    def refuses_operators(self) -> bool:
        """Whether an operator that the device lacks raises; otherwise it runs on the CPU."""
        return self.profile is not None and self.profile.refuses

    def fidelity(self, name: str) -> tuple[str, Fidelity, str] | None:
        """Return the public name for a dotted name of torch, with its fidelity and its effect.

        Returns None for a name that the table does not contain, and for one that the target has
        itself.
        """
        of_backend = name.startswith(f"torch.backends.{self.native}.")
        if of_backend or name.split(".")[1:2] == [self.native]:
            return None
        known = _known_name(name)
        if known is None:
            return None
        declared = _public_names()[known]
        fidelity, note = declared.on.get(self.column, (declared.fidelity, ""))
        return known, fidelity, note or declared.note

    def lacks_dtype(self, name: str) -> bool:
        """Return whether the device cannot hold tensors of a dtype, given by its dotted name."""
        return self.profile is not None and torch_object(name) in self.profile.unsupported_dtypes

    def missing(self, name: str) -> str | None:
        """Return the operator a public torch name needs and the device lacks, else None."""
        needed = _needed_operators()
        forward, backward = (needed[of].get(name) for of in ("forward", "backward"))
        return self._missing(forward) or self._missing_by_name(name) or self._missing(backward)

    def _missing(self, operator: str | None) -> str | None:
        """Return an operator of the made table, if the installed torch lacks it too."""
        from torchdevice.simulation.profiles import missing_operators

        backends = self.profile.backends if self.profile is not None and operator else ()
        lacked = any(
            str(operator).removeprefix("aten::") in missing_operators(backend)
            for backend in backends
        )
        return operator if lacked else None

    def _missing_by_name(self, name: str) -> str | None:
        """Return the operator that has the name of a public function."""
        from torchdevice.simulation.profiles import missing_functions

        for module, prefix in _PREFIXES.items():
            operator = f"{prefix}{name[len(module) :]}"
            for backend in (
                self.profile.backends
                if self.profile is not None and name.startswith(module)
                else ()
            ):
                if operator in missing_functions(backend):
                    return f"aten::{missing_functions(backend)[operator]}"
        return None

    def refused_by_tests(self, name: str) -> bool:
        """Return whether torch's tests expect a function to fail on the device for some inputs."""
        return (
            self.profile is not None
            and bool(self.profile.backends)
            and name in _needed_operators()["tests"]
        )


_PREFIXES = {
    "torch.linalg.": "linalg_",
    "torch.special.": "special_",
    "torch.fft.": "fft_",
    "torch.nn.functional.": "",
}
_PREFIXES |= {"torch.Tensor.": "", "torch.": ""}
"""The beginning of public names -> that of the operators of the same name."""


@functools.cache
def _needed_operators() -> Mapping[str, Any]:
    """Return operators without an MPS kernel that names need: at all, or just for gradients.

    ``"tests"`` are the names that torch's own tests expect to fail on MPS in float32.

    ``docs/make_mps_operators.py`` makes the table.
    """
    return data_files.read(__file__, "mps_operators.json")


_REAL: Mapping[str, Target] = {
    # A simulated profile with the name of an accelerator lists what the accelerator lacks.
    **{family: Target(family, family, family, family) for family in FAMILIES},
    "cpu": Target("cpu", "cpu"),
}


MAC = _REAL["mps"]


def torch_object(name: str) -> Any:
    """Return the object of a dotted name of torch, or None if torch has no such name."""
    import torch

    try:
        return operator.attrgetter(name.partition(".")[2])(torch)
    except AttributeError:
        return None


def _public_names() -> Mapping[str, Any]:
    from torchdevice.check.public_names import PUBLIC_NAMES

    return PUBLIC_NAMES


@functools.cache
def _by_last_word() -> Mapping[str, list[tuple[str, str]]]:
    """Return public names by last word: word -> module and name, the innermost module first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(_public_names(), key=len, reverse=True):
        module, _, word = name.rpartition(".")
        found.setdefault(word, []).append((module, name))
    return found


@functools.cache
def _known_name(name: str) -> str | None:
    """Return the name in the table that a dotted name spells, or whose attribute it is.

    ``torch.cuda.memory.memory_allocated`` is ``torch.cuda.memory_allocated``,
    ``torch.backends.cuda.matmul.allow_tf32`` belongs to ``torch.backends.cuda.matmul``, and a flag
    of a module to the function ``flags`` that sets it.
    """
    known = _public_names()
    parts = name.split(".")
    # The longest name first; "torch.cuda" alone is a module.
    for length in range(len(parts), 2, -1):
        spelled, word = ".".join(parts[:length]), parts[length - 1]
        if spelled in known:
            return spelled
        for module, candidate in _by_last_word().get(word, ()):
            if not spelled.startswith(f"{module}."):
                continue
            if torch_object(spelled) is torch_object(candidate):
                return candidate
    flags = f"{name.rpartition('.')[0]}.flags"
    if flags in known and parts[-1] in inspect.signature(torch_object(flags)).parameters:
        return flags
    return None
