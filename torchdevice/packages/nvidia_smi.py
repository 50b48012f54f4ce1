"""Output of ``nvidia-smi`` for simulated GPUs: programs' queries, and the plain table.

The file is run as a script of its own, without torch. The devices are those with which the run
began, so the memory in use is what CUDA's context takes. What would have to be measured is
``[N/A]``, as for a GPU that does not support it.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import Any

VARIABLE = "TORCHDEVICE_SMI"
"""The variable with the devices, as JSON."""

_READINGS = (
    "utilization.",
    "temperature.",
    "power.",
    "clocks.",
    "clocks_",
    "fan.",
    "ecc.",
    "pcie.",
    "encoder.",
)
_SETTINGS = (
    "pstate",
    "persistence_mode",
    "display_",
    "compute_mode",
    "mig.",
    "vbios_version",
    "serial",
    "gpu_serial",
    "accounting",
)
"""The beginnings of fields that would have to be measured, and of those that describe a board."""

_NOT_MEASURED = "[N/A]"

_MIB = 2**20

_UNITS = {
    "memory.": "MiB",
    "utilization.": "%",
    "fan.speed": "%",
    "power.draw": "W",
    "power.limit": "W",
    "clocks.sm": "MHz",
    "clocks.mem": "MHz",
    "clocks.current.": "MHz",
}
"""The beginning of a field -> the unit in its column's head, also where no value has one."""


class UsageError(Exception):
    """The arguments are not among those that are stood in for."""


def _unit(field: str) -> str:
    """Return the unit of a field; nothing for a field without one."""
    return next((unit for start, unit in _UNITS.items() if field.startswith(start)), "")


def value_of(field: str, device: dict[str, Any]) -> str:
    """Return the text of a field of ``--query-gpu``, without its unit.

    Raises:
        UsageError: There is no such field.
    """
    used = device["used"] // _MIB
    total = device["total"] // _MIB
    texts = {
        "index": device["index"],
        "name": device["name"],
        "gpu_name": device["name"],
        "uuid": device["uuid"],
        "gpu_uuid": device["uuid"],
        "pci.bus_id": device["bus"],
        "gpu_bus_id": device["bus"],
        "driver_version": device["driver"],
        "compute_cap": device["capability"],
        "count": device["count"],
        "memory.total": total,
        "memory.used": used,
        "memory.free": total - used,
        "memory.reserved": 0,  # nothing is reserved, as nvml.py has it
        "timestamp": datetime.datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3],
    }
    if field in texts:
        return str(texts[field])
    if field.startswith(_READINGS + _SETTINGS):
        return _NOT_MEASURED
    raise UsageError(f"torchdevice's nvidia-smi has no field {field!r}.")


def query(fields: list[str], devices: list[dict[str, Any]], words: list[str]) -> list[str]:
    """Return the lines of ``--query-gpu`` in the format ``csv`` with further words."""
    with_units = "nounits" not in words
    lines = []
    if "noheader" not in words:
        lines.append(", ".join(map(_head, fields)))
    for device in devices:
        cells = []
        for field in fields:
            text = value_of(field, device)
            if with_units and text != _NOT_MEASURED and _unit(field):
                text += f" {_unit(field)}"
            cells.append(text)
        lines.append(", ".join(cells))
    return lines


def _head(field: str) -> str:
    return f"{field} [{_unit(field)}]" if _unit(field) else field


def log(devices: list[dict[str, Any]], *, is_whole: bool) -> list[str]:
    """Return the lines of ``-q``, or of ``-q -d MEMORY``, which has the memory alone.

    What is not simulated, such as BAR1 memory, temperature and power, has no line.
    """
    first = devices[0]
    lines = [
        "",
        "==============NVSMI LOG==============",
        "",
        _line(0, "Driver Version", first["driver"]),
        _line(0, "CUDA Version", first["cuda"]),
        "",
        _line(0, "Attached GPUs", first["count"]),
    ]
    for each in devices:
        used, total = each["used"] // _MIB, each["total"] // _MIB
        lines.append(f"GPU {each['bus']}")
        if is_whole:
            lines.append(_line(4, "Product Name", each["name"]))
            lines.append(_line(4, "GPU UUID", each["uuid"]))
        lines += [
            "    FB Memory Usage",
            _line(8, "Total", f"{total} MiB"),
            _line(8, "Used", f"{used} MiB"),
            _line(8, "Free", f"{total - used} MiB"),
        ]
    return lines


def tree(devices: list[dict[str, Any]]) -> list[str]:
    """Return the lines of ``-q -x``: the elements of :func:`log`, and load as not available."""
    # Here: every scope imports this file, perhaps beside a file of the program with this name.
    from xml.etree import ElementTree

    first = devices[0]
    root = ElementTree.Element("nvidia_smi_log")
    _add(root, {"driver_version": first["driver"], "cuda_version": first["cuda"]})
    _add(root, {"attached_gpus": first["count"]})
    for each in devices:
        used, total = each["used"] // _MIB, each["total"] // _MIB
        gpu = ElementTree.SubElement(root, "gpu", id=each["bus"])
        _add(gpu, {"product_name": each["name"], "uuid": each["uuid"]})
        memory = ElementTree.SubElement(gpu, "fb_memory_usage")
        _add(memory, {"total": f"{total} MiB", "used": f"{used} MiB"})
        _add(memory, {"free": f"{total - used} MiB"})
        load = ElementTree.SubElement(gpu, "utilization")
        _add(load, {"gpu_util": "N/A", "memory_util": "N/A"})
    ElementTree.indent(root, "\t")
    text = ElementTree.tostring(root, encoding="unicode")
    return ['<?xml version="1.0" ?>', *text.splitlines()]


def _add(parent: Any, texts: dict[str, Any]) -> None:
    """Add an element for each text."""
    for name, text in texts.items():
        child = parent.makeelement(name, {})
        child.text = str(text)
        parent.append(child)


def _line(indent: int, name: str, value: Any) -> str:
    return f"{' ' * indent + name:<42}: {value}"


def listed(devices: list[dict[str, Any]]) -> list[str]:
    """Return the lines of ``-L``."""
    return [f"GPU {each['index']}: {each['name']} (UUID: {each['uuid']})" for each in devices]


def versions(device: dict[str, Any]) -> list[str]:
    """Return the lines of ``--version``."""
    texts = {
        "NVIDIA-SMI version": device["driver"],
        "NVML version": device["driver"],
        "DRIVER version": device["driver"],
        "CUDA Version": device["cuda"],
    }
    return [f"{name:<20}: {text}" for name, text in texts.items()]


def table(devices: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the plain table."""
    rule = "+" + "-" * 77 + "+"
    first = devices[0]
    head = (
        f"| NVIDIA-SMI {first['driver']}    Driver Version: {first['driver']}    CUDA Version: "
        f"{first['cuda']}"
    )
    lines = [rule, f"{head:<78}|", rule]
    for each in devices:
        memory = f"{each['used'] // _MIB}MiB / {each['total'] // _MIB}MiB"
        lines.append(
            f"| {each['index']:>3}  {each['name'][:29]:<29} {each['bus']:>16} | {memory:>21} |"
        )
    return [
        *lines,
        rule,
        f"| {'Processes are not measured: torchdevice simulates these GPUs.':<75} |",
        rule,
    ]


def parsed(words: list[str]) -> dict[str, str]:
    """Return the arguments by name; ``--name=value`` and ``--name value`` mean the same."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word, _, text = rest.pop(0).partition("=")
        word = _SHORT.get(word, word)
        if word in _REFUSED:
            raise UsageError(f"torchdevice's nvidia-smi has no {word!r}: {_REFUSED[word]}")
        if word not in _WITH_VALUE + _ALONE:
            raise UsageError(f"torchdevice's nvidia-smi does not know {word!r}.")
        if word in _WITH_VALUE and not text:
            text = rest.pop(0) if rest else ""
        found[word] = text
    return found


_WITH_VALUE = ("--id", "--query-gpu", "--format", "--query-compute-apps", "--display")
_ALONE = ("--list-gpus", "--query", "--xml-format", "--version")
_SHORT = {
    "-i": "--id",
    "-L": "--list-gpus",
    "-q": "--query",
    "-d": "--display",
    "-x": "--xml-format",
    "-l": "--loop",
    "-lms": "--loop-ms",
}

_CONNECTIONS = (
    "connections are not simulated. Ask torch.cuda.can_device_access_peer, or leave it out."
)
_ONCE = "its figures do not change. Call it once."
_LOAD = "load is not measured. Ask --query-gpu for memory, or leave it out."
_REFUSED = {
    "topo": _CONNECTIONS,
    "nvlink": _CONNECTIONS,
    "--loop": _ONCE,
    "--loop-ms": _ONCE,
    "dmon": _LOAD,
    "pmon": _LOAD,
}
"""Arguments that are refused -> the reason, and the remedy."""


def chosen(devices: list[dict[str, Any]], wanted: str) -> list[dict[str, Any]]:
    """Return the devices that ``--id`` names by numbers or identifiers.

    Raises:
        UsageError: One is not there.
    """
    found: list[dict[str, Any]] = []
    for name in wanted.split(","):
        matching = [
            each
            for each in devices
            if name.strip() in (str(each["index"]), each["uuid"], each["bus"])
        ]
        if not matching:
            raise UsageError(f"No devices were found for {name.strip()!r}.")
        found += matching
    return found


def lines_for(words: list[str], devices: list[dict[str, Any]]) -> list[str]:
    """Return the output for some arguments."""
    given = parsed(words)
    if "--id" in given:
        devices = chosen(devices, given["--id"])
    formats = [word.strip() for word in given.get("--format", "").split(",")]
    if "--query-gpu" in given:
        if "csv" not in formats:
            raise UsageError("Give --format=csv, which is the only one for queries.")
        return query([field.strip() for field in given["--query-gpu"].split(",")], devices, formats)
    if "--query-compute-apps" in given:
        if "noheader" in formats:
            return []
        return [", ".join(given["--query-compute-apps"].split(","))]
    if "--query" in given:
        return _queried(given, devices)
    if "--version" in given:
        return versions(devices[0])
    return listed(devices) if "--list-gpus" in given else table(devices)


def _queried(given: dict[str, str], devices: list[dict[str, Any]]) -> list[str]:
    """Return the output of ``-q`` with other arguments."""
    part = given.get("--display", "").upper()
    if part not in ("", "MEMORY"):
        raise UsageError(
            f"torchdevice's nvidia-smi has no part {part!r}. Give -d MEMORY, or no -d."
        )
    if "--xml-format" in given:
        return tree(devices)
    return log(devices, is_whole=not part)


def main() -> int:
    """Print the output for the arguments, and return the exit status."""
    try:
        print("\n".join(lines_for(sys.argv[1:], json.loads(os.environ[VARIABLE]))))
    except UsageError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
