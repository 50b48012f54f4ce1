"""Features: abilities of a scope beyond changing a program's device, each in its own folder.

The folders of the kernel, of calls and of torch's modules know no feature. ``scope/features.py``
lists a record for each, with the names of the modules that have the feature's options, patches,
targets and the like. A module is imported where a scope first needs it. So the folder of a feature
can be deleted, and scopes that do not ask for it work as before.

Other distributions add records by entry points in the group ``torchdevice.features``. An entry
point names a :class:`Feature`, such as ``example = "example_device.record:FEATURE"``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchdevice.kernel.options import Options, Record, Target

if TYPE_CHECKING:
    from torchdevice.kernel.context import Context
    from torchdevice.kernel.devices.runtime import Runtime


class Targets:
    """The targets of a feature: names that are no device types of torch, and their runtimes.

    A feature's class overrides ``known``, ``exists`` and ``runtime`` at least. The other methods,
    but ``corrected``, are given names for which ``answers`` is true.
    """

    def known(self) -> Iterable[str]:
        """Return the names, without numbers of devices, for lists and hints."""
        return ()

    def answers(self, name: str) -> bool:
        """Return whether a name is written as those of the feature are."""
        return self.exists(name)

    def exists(self, name: str) -> bool:
        """Return whether a name that is written so has a device."""
        raise NotImplementedError

    def runtime(self, name: str, options: Record) -> tuple[Runtime, Record]:
        """Return the runtime of a name that exists, and the options with what the target implies.

        Raises:
            ValueError: The name and the options contradict each other.
        """
        raise NotImplementedError

    def facts(self, name: str) -> Target:
        """Return the facts that options must agree with."""
        return Target()

    def without_count(self, name: str) -> str:
        """Return a name without the number of devices."""
        return name

    def has_too_few(self, name: str, ranks: int, written_for: object) -> bool:
        """Return whether a host has more ranks than a target has devices, and could have more.

        Args:
            name: The name, which exists.
            ranks: The number of the host's ranks.
            written_for: The accelerator of the program, where it was named.
        """
        return False

    def corrected(self, name: str) -> str:
        """Return the name that was probably meant by one of no target; else the name itself."""
        return name

    def machine(self, name: str, options: Options) -> Context | None:
        """Return the context of a machine that the program runs on, if the name means one."""
        return None

    def runtime_on(self, machine: Context, options: Record) -> tuple[Runtime, Record]:
        """Return the runtime of a scope on a machine of the feature, and its options."""
        raise NotImplementedError


def _always(options: Options) -> bool:
    return True


class Feature(NamedTuple):
    """A feature. It gives what it has, each by the name of a module.

    Attributes:
        name: The package with the feature's modules.
        options: The module that declares the feature's options, in a class ``RECORD``.
        patches: The modules that register patches on import, as the files of torch's modules do,
            or that list some as ``PATCHES``.
        threads: The module with ``enter_thread(entry)``, ``leave_thread(entry)`` or both. They are
            called for each entry of a scope whose options want the feature, and can be repeated.
            ``leave_thread`` is called also for an entry that an error or an interrupt left half
            done.
        wanted: Whether options ask for ``threads``.
        targets: The module with the feature's :class:`Targets`, an object ``TARGETS``.
        prefix: How the names of these targets begin. The module is imported for such a name.
        command: The module whose ``add(commands)`` adds a command to the command line, given what
            ``add_subparsers`` of argparse returned. The command's default ``action`` takes the
            parsed arguments and returns the exit status.
        distribution: The installed distribution that has the feature; "" for this package.
    """

    name: str
    options: str = ""
    patches: tuple[str, ...] = ()
    threads: str = ""
    wanted: Callable[[Options], object] = _always
    targets: str = ""
    prefix: str = ""
    command: str = ""
    distribution: str = ""

    def is_present(self) -> bool:
        """Return whether the feature's folder is there. Nothing is imported of it."""
        return importlib.util.find_spec(self.name) is not None

    def call(self, name: str, argument: Any) -> Any:
        """Call a function of ``threads``, which is imported; None if it lacks the function."""
        function = _member(self, self.threads, name)
        return None if function is None else function(argument)

    def answering(self) -> Targets:
        """Return the feature's targets, whose module is imported."""
        found: Targets = _member(self, self.targets, "TARGETS")
        return found

    def imported(self, module: str) -> ModuleType:
        """Return a module of the feature.

        Raises:
            ImportError: It cannot be imported. The message names the feature's distribution.
        """
        try:
            return importlib.import_module(module)
        except Exception as error:
            if not self.distribution:
                raise
            raise broken(self.name, self.distribution, error) from error


def is_there(module: str) -> bool:
    """Return whether the folder of a feature's module is there. Nothing is imported of it."""
    return importlib.util.find_spec(module.rpartition(".")[0]) is not None


def broken(name: str, distribution: str, error: Exception) -> ImportError:
    """Return the error for a feature of another distribution that cannot be imported."""
    return ImportError(
        f"The feature {name!r} of the distribution {distribution!r} cannot be imported: "
        f"{type(error).__name__}: {error}. Repair or uninstall {distribution!r}."
    )


@functools.cache
def _member(feature: Feature, module: str, name: str) -> Any:
    return getattr(feature.imported(module), name, None)
