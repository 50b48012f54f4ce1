"""Python's ``platform`` on a simulated Mac: a Mac's operating system and processor.

Programs that support Macs split ``platform.mac_ver()[0]`` or compare ``platform.system()``. They
get a Mac's answers. torch, Python's own library and installed packages get the truth: they ask in
order to choose the instructions, compilers and libraries of the computer that runs them (truststore
loads macOS's Security framework). So does everybody with the option ``platform="host"``.
``sys.platform`` is data, and stays as it is.
"""

from __future__ import annotations

import platform
import sys
from types import FrameType
from typing import Any

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.python.library_files import PACKAGE, is_library
from torchdevice.torch_modules.accelerators.mps import MACOS

_SYSTEM = "Darwin"
_MACHINE = "arm64"
_PROCESSOR = "arm"

_DARWIN = f"{MACOS[0] + 9}.{MACOS[1]}.0"
"""The version of the kernel. macOS 11 to 15 have 20 to 24."""

_VERSION = f"{_SYSTEM} Kernel Version {_DARWIN}"

_ASK_THE_HOST = frozenset({"torch", "triton"})
"""Packages that are no part of a program even where they run from a folder of sources."""


def _answers_as_mac(asking: FrameType | None) -> bool:
    """Return whether the program asks, in a thread that is on a simulated Mac."""
    contexts = [entry.context for entry in thread_state.state.entries if entry.context is not None]
    if not any(
        context.runtime.supplied.is_mac and context.options.platform == "target"
        for context in contexts
    ):
        return False
    while asking is not None and asking.f_code.co_filename.startswith(PACKAGE):
        asking = asking.f_back
    if asking is None:
        return True
    package = str(asking.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _ASK_THE_HOST and not is_library(asking.f_code.co_filename)


_MACOS = ".".join(map(str, MACOS))


def _uname_of_mac(host: platform.uname_result) -> platform.uname_result:
    mac = type(host)(_SYSTEM, host.node, _DARWIN, _VERSION, _MACHINE)
    vars(mac)["processor"] = _PROCESSOR  # else asked of this computer when it is first read
    return mac


def _platform_of_mac(terse: bool) -> str:
    """Return the result of ``platform.platform`` on a Mac, in this Python."""
    shown = f"macOS-{_MACOS}"
    if terse:
        return shown
    executable = ("Mach-O",) if sys.version_info >= (3, 13) else ()
    return "-".join((shown, _MACHINE, _PROCESSOR, "64bit", *executable))


def _replace_text(name: str, of_mac: str) -> None:
    """Let a ``platform`` function without arguments return a Mac's text on a simulated Mac."""

    @replaces(platform, name)
    def answer(context: Context, original: Any) -> str:
        return of_mac if _answers_as_mac(sys._getframe()) else original()


_replace_text("system", _SYSTEM)
_replace_text("machine", _MACHINE)
_replace_text("processor", _PROCESSOR)
_replace_text("release", _DARWIN)
_replace_text("version", _VERSION)


@replaces(platform, "platform")
def _platform(context: Context, original: Any, aliased: bool = False, terse: bool = False) -> str:
    # The original keeps its answer for the rest of the process.
    return _platform_of_mac(terse) if _answers_as_mac(sys._getframe()) else original(aliased, terse)


@replaces(platform, "mac_ver")
def _mac_ver(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    if not _answers_as_mac(sys._getframe()):
        return original(*args, **kwargs)
    return _MACOS, ("", "", ""), _MACHINE


@replaces(platform, "uname")
def _uname(context: Context, original: Any) -> Any:
    found = original()
    return _uname_of_mac(found) if _answers_as_mac(sys._getframe()) else found
