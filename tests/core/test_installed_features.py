"""Features of other distributions: entry points add options, targets and what enters threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from processes import run_torch_python

pytestmark = pytest.mark.one_engine

FILES = {
    "record.py": """
from torchdevice.kernel.feature import Feature

FEATURE = Feature(
    "example_device",
    options="example_device.options",
    threads="example_device.threads",
    wanted=lambda options: options.loudness > 1,
    targets="example_device.targets",
    prefix="example",
    command="example_device.command",
)
""",
    "options.py": '''
import dataclasses

from torchdevice.kernel.options import Options, literal, option


@dataclasses.dataclass(frozen=True)
class ExampleOptions(Options):
    """Options.

    Attributes:
        loudness: How loud a thread is.
    """

    loudness: int = option(1, lambda name, value: int(value), parse=literal)


RECORD = ExampleOptions
''',
    "threads.py": """
def enter_thread(entry):
    print("enters at", entry.context.options.loudness)


def leave_thread(entry):
    print("leaves")
""",
    "command.py": """
def add(commands):
    found = commands.add_parser("measure", help="measure the device")
    found.set_defaults(action=lambda options: print("measured") or 3)
""",
    "targets.py": """
from torchdevice.kernel.devices.registry import runtime
from torchdevice.kernel.feature import Targets


class ExampleTargets(Targets):
    def known(self):
        return ["example:large"]

    def exists(self, name):
        return name in self.known()

    def runtime(self, name, options):
        print("finds", name)
        return runtime("cpu"), options


TARGETS = ExampleTargets()
""",
}

SHOWN = "print(torch.ones(1, device='cuda').device)"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with a distribution that has a feature. Programs that run there find it."""
    package, metadata = tmp_path / "example_device", tmp_path / "example_device-1.0.dist-info"
    for folder in (package, metadata):
        folder.mkdir()
    (package / "__init__.py").touch()
    for name, text in FILES.items():
        (package / name).write_text(text)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: example-device\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[torchdevice.features]\nexample = example_device.record:FEATURE\n"
    )
    return tmp_path


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_torch_python(*arguments, cwd=folder, **variables)


def test_a_scope_has_the_option_the_target_and_the_thread(installed: Path) -> None:
    program = f"""
import torch, torchdevice
with torchdevice.portable("example:large", loudness=3):
    {SHOWN}
with torchdevice.portable("cpu"):
    {SHOWN}
"""
    done = run(installed, "-c", program)
    assert done.stdout.splitlines() == [
        *("finds example:large", "enters at 3", "cpu", "leaves", "cpu")
    ], done.stderr


def test_the_command_line_and_variables_have_them_too(installed: Path) -> None:
    command = ("-m", "torchdevice", "run", "--target", "example:large")
    program = ("-c", f"import torch; {SHOWN}")
    shown = {"finds example:large", "enters at 2", "cpu"}
    done = run(installed, *command, "--loudness", "2", *program)
    assert shown <= {*done.stdout.splitlines()}, done.stderr
    done = run(installed, *command, *program, TORCHDEVICE_LOUDNESS="2")
    assert shown <= {*done.stdout.splitlines()}, done.stderr


def test_the_command_line_has_its_command(installed: Path) -> None:
    done = run(installed, "-m", "torchdevice", "measure")
    assert (done.stdout, done.returncode) == ("measured\n", 3), done.stderr


def test_an_unknown_name_gets_the_known_one_as_a_hint(installed: Path) -> None:
    program = "import torchdevice; torchdevice.portable('example:larger').__enter__()"
    done = run(installed, "-c", program)
    assert "'example:larger' is not a target. Did you mean 'example:large'?" in done.stderr


@pytest.mark.parametrize("broken", ["record.py", "options.py", "threads.py", "targets.py"])
def test_a_broken_feature_is_named_with_its_distribution(installed: Path, broken: str) -> None:
    (installed / "example_device" / broken).write_text("import missing_module")
    program = "import torchdevice; torchdevice.portable('example:large', loudness=2).__enter__()"
    done = run(installed, "-c", program)
    last = done.stderr.strip().splitlines()[-1]
    assert "of the distribution 'example-device' cannot be imported" in last
    why = "ModuleNotFoundError: No module named 'missing_module'"
    assert f"{why}. Repair or uninstall 'example-device'." in last


def test_a_point_that_names_no_record_is_refused(installed: Path) -> None:
    (installed / "example_device" / "record.py").write_text("FEATURE = 'example_device'")
    done = run(installed, "-c", "import torchdevice; torchdevice.portable")
    assert "TypeError: 'example_device.record:FEATURE' is a str, not a Feature" in done.stderr
