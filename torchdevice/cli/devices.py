"""``torchdevice devices``: what can stand in, and what of it is here."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

from torchdevice.cli import columns
from torchdevice.cli.usage_errors import refusals
from torchdevice.foundation.environment import SWITCH

_EXAMPLES = """examples:
  torchdevice devices
  torchdevice devices --json
  torchdevice run --target simulated:cuda train.py"""


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "devices",
        help="list what can stand in, as --target takes it",
        description="List what can stand in, as --target takes it.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print data")
    parser.set_defaults(action=_devices)


def _devices(options: argparse.Namespace) -> int:
    os.environ.pop(SWITCH, None)  # or torch, when it is imported now, would show what a scope shows
    with refusals():
        rows = [dict(zip(("target", "available", "count", "name"), row, strict=True)) for row in _rows()]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    columns.show([(row["target"], "available" if row["available"] else "not available", row["name"]) for row in rows])
    return 0


def _rows() -> Iterator[tuple[str, bool, int, str]]:
    """Yield the target, whether it is there, the number of devices and the name."""
    from torchdevice import target_selection
    from torchdevice.devices import device_models
    from torchdevice.devices.registry import runtime
    from torchdevice.simulation.profiles import PROFILES

    for target in target_selection.target_names():
        found = runtime(target)
        there = found.is_available()
        yield target, there, found.device_count() if there else 0, found.name(0) if there else ""
    for profile in PROFILES.values():
        many = "" if profile.single else f", several as {target_selection.SIMULATED}:{profile.name}:2"
        name = f"real values in CPU memory, by the rules of the profile {profile.name!r}{many}"
        yield f"{target_selection.SIMULATED}:{profile.name}", True, 1, name
    for model in device_models.MODELS:
        name = f"the profile 'cuda' with the figures of a {device_models.MODELS[model].properties['name']}"
        yield f"{target_selection.SIMULATED}:{model}", True, 1, name
