"""The record of options: each is declared once, for calls, flags, variables and pages."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from processes import run_command, run_python

import torchdevice
from torchdevice.check import Target
from torchdevice.scope import activation
from torchdevice.scope import collected_options as record
from torchdevice.scope.collected_options import Options

sys.path.append(str(ROOT / "docs"))
import make_options

pytestmark = pytest.mark.one_engine


@dataclasses.dataclass(frozen=True)
class Extended(Options):
    """The record of options with one more option.

    Attributes:
        flavour: How it
            tastes.
    """

    flavour: str = record.choice("plain", "plain", "sweet")


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make :class:`Extended` the record of options."""
    monkeypatch.setattr(record, "Options", Extended)
    record.declarations.cache_clear()
    yield
    record.declarations.cache_clear()


@pytest.mark.usefixtures("extended")
class TestOneMore:
    """An option that is added to the record appears in every way to give options."""

    def test_as_a_keyword_with_its_default_and_its_check(self) -> None:
        assert record.chosen({}).flavour == "plain"
        assert record.chosen({"flavour": "sweet"}).flavour == "sweet"
        with pytest.raises(
            ValueError, match=r"flavour='sour' is not known. Use 'plain' or 'sweet'"
        ):
            record.chosen({"flavour": "sour"})

    def test_in_signature_and_documentation(self) -> None:
        @record.takes_options()
        def portable(**options: Any) -> None:
            """Run.

            Args:
                **options: See below.
            """

        assert inspect.signature(portable).parameters["flavour"].default == "plain"
        found = portable.__doc__ or ""
        assert (
            found.index("flavour: How it tastes.") - found.rindex("\n", 0, found.index("flavour:"))
            > 4
        )
        assert "See below" not in found

    def test_in_a_docstring_that_python_has_indented_less(self) -> None:
        """Python 3.13 takes the common indentation out of docstrings."""

        def portable(**options: Any) -> None: ...

        portable.__doc__ = "Run.\n\nArgs:\n    **options: See below.\n\nMore."
        lines = (record.takes_options()(portable).__doc__ or "").splitlines()
        assert (
            "    flavour: How it tastes." in lines
            and lines[:3] == ["Run.", "", "Args:"]
            and lines[-1] == "More."
        )

    def test_as_a_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHDEVICE_FLAVOUR", "sweet")
        assert record.chosen({}).flavour == "sweet"
        assert record.chosen({"flavour": "plain"}).flavour == "plain"
        monkeypatch.setenv("TORCHDEVICE_FLAVOUR", "sour")
        with pytest.raises(ValueError, match=r"TORCHDEVICE_FLAVOUR='sour'.*unset the variable"):
            record.chosen({})

    @pytest.mark.parametrize("flag", [record.flag_of, record.pytest_flag_of])
    def test_as_a_flag(self, flag: Any) -> None:
        parser = argparse.ArgumentParser()
        record.add_flags(parser.add_argument, flag)
        assert (
            vars(parser.parse_args([flag("flavour"), "sweet"]))[
                flag("flavour")[2:].replace("-", "_")
            ]
            == "sweet"
        )
        assert "How it tastes. (variable: TORCHDEVICE_FLAVOUR)" in " ".join(
            parser.format_help().split()
        )
        with pytest.raises(SystemExit):
            parser.parse_args([flag("flavour"), "sour"])

    def test_for_child_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variables = record.to_environment(Extended(flavour="sweet"))
        assert variables["TORCHDEVICE_FLAVOUR"] == "sweet"

    def test_in_the_key_and_on_the_page(self) -> None:
        assert Extended(flavour="sweet").key != Extended().key
        (section,) = (
            each for each in make_options.page().split("\n### ") if each.startswith("flavour\n")
        )
        spelled = (
            "flavour=",
            "--flavour",
            "--torchdevice-flavour",
            "TORCHDEVICE_FLAVOUR",
            "'plain'",
        )
        assert "How it tastes." in section and all(f"`{each}`" in section for each in spelled)


OTHER_VALUES: dict[str, Any] = {
    "target": "simulated:cuda",
    "devices": 4,
    "identity": "program",
    "strict": True,
    "float64": "error",
    "autocast": "float32",
    "half_products": "float32",
    "capability": (9, 0),
    "memory": 1 << 30,
    "context": 1 << 20,
    "properties": {"name": "a GPU", "total_memory": 1 << 29},
    "written_for": "mps",
    "races": "warn",
    "uninitialized": "error",
    "asynchronous": True,
    "random": "cpu",
    "platform": "host",
    "compute": "meta",
    "values": "assume",
    "verify": True,
    "verify_sample": 0.25,
    "verify_only": ("mm", "addcmul_"),
    "engine": "wrap",
    "native": "never",
    "packages": "absent",
}


def test_an_option_of_simulated_devices_without_a_target_names_what_is_missing() -> None:
    with pytest.raises(
        ValueError, match=r"races='error' needs a simulated device, and no target was given\. Use"
    ):
        with torchdevice.portable(races="error"):
            pass


def test_every_option_is_in_the_key() -> None:
    assert OTHER_VALUES.keys() == record.declarations().keys()
    keys = {record.Options(**{name: value}).key for name, value in OTHER_VALUES.items()}
    assert len({*keys, record.Options().key}) == len(OTHER_VALUES) + 1


def test_what_children_are_told_is_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(**OTHER_VALUES)
    for name, value in record.to_environment(options).items():
        monkeypatch.setenv(name, value or "")
    assert OTHER_VALUES.keys() == record.declarations().keys()
    assert record.chosen({}) == options


def test_variables_are_read_once_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    from_environment = record.from_environment
    monkeypatch.setattr(
        record, "from_environment", lambda *args: read.append(1) or from_environment(*args)
    )
    monkeypatch.setenv("TORCHDEVICE_TARGET", "simulated:t4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    options = activation.chosen_in_rank({})
    assert (options.target, options.devices) == ("simulated:t4", 2)
    assert len(read) == 1


def test_the_command_takes_every_option() -> None:
    parser = argparse.ArgumentParser()
    record.add_flags(parser.add_argument)
    words = []
    for name, value in OTHER_VALUES.items():
        words.append(record.flag_of(name))
        if value is not True:
            words.append(record.declarations()[name].show(value))
    assert Options(**vars(parser.parse_args(words))) == Options(**OTHER_VALUES)


@pytest.mark.parametrize("way_in", [torchdevice.portable, torchdevice.enable, torchdevice.simulate])
def test_signatures_have_every_option(way_in: Any) -> None:
    own = {"simulate": {"target", "devices"}}.get(way_in.__name__, set())
    parameters = inspect.signature(way_in).parameters
    assert record.declarations().keys() - own <= parameters.keys()
    assert all(f"{name}: " in way_in.__doc__ for name in record.declarations().keys() - own)
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


PROGRAM = """
import torch, torchdevice
options = torchdevice.current().options
print(options.strict, options.devices, options.float64, options.capability, torch.cuda.device_count())
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["run", "import torch"])
def test_variables_reach_a_program(tmp_path: Path, way: str) -> None:
    (tmp_path / "p.py").write_text(PROGRAM)
    variables = {
        "TORCHDEVICE_TARGET": "cpu",
        "TORCHDEVICE_STRICT": "1",
        "TORCHDEVICE_DEVICES": "4",
        "TORCHDEVICE_FLOAT64": "error",
        "TORCHDEVICE_CAPABILITY": "9.0",
    }
    if way == "run":
        result = run_command("run", "p.py", cwd=tmp_path, **variables)
    else:
        result = run_python("p.py", cwd=tmp_path, TORCHDEVICE="1", **variables)
    assert result.stdout == "True 4 error (9, 0) 4\n", result.stderr


def test_variables_reach_a_scope_in_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDEVICE_STRICT", "yes")
    assert torchdevice.portable("cpu").options.strict and torchdevice.simulate().options.strict
    assert not torchdevice.portable("cpu", strict=False).options.strict


def test_a_variable_that_contradicts_the_target_of_a_call_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the process's; ``simulate()`` and ``portable("cpu")`` in it still work."""
    monkeypatch.setenv("TORCHDEVICE_IDENTITY", "program")
    monkeypatch.setenv("TORCHDEVICE_MEMORY", "1GiB")
    monkeypatch.setenv("TORCHDEVICE_DEVICES", "4")
    with torchdevice.portable("cpu"):
        import torch

        assert torch.cuda.device_count() == 4 and not torch.ones(1, device="cuda").is_cuda
    with torchdevice.simulate(count=2):
        assert torch.cuda.device_count() == 2 and torch.ones(1, device="cuda").is_cuda
        assert torch.cuda.mem_get_info()[1] == 1 << 30


def test_a_message_writes_sizes_with_their_unit() -> None:
    quoted = torchdevice.simulate("t4,l4", context="300MiB").options.quoted
    assert quoted("context") == "context='300MiB'" and quoted("races") == "races=None"
    assert quoted("memory") == "memory=('15633680957', '22534MiB')", (
        "of each device; not every figure is a round one"
    )
    assert torchdevice.simulate(memory="1536MiB").options.quoted("memory") == "memory='1536MiB'"
    assert torchdevice.simulate(context=0).options.quoted("context") == "context='0'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cpu", "identity": "program"}, "identity='program' needs a target"),
        ({"target": "cpu", "memory": "8GiB"}, "memory='8GiB' needs a simulated device"),
        (
            {"target": "simulated:cuda:2", "devices": 4},
            "devices=4 contradicts target='simulated:cuda:2'",
        ),
    ],
)
def test_what_a_call_says_and_contradicts_its_target_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        torchdevice.portable(**options).__enter__()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devices": 0}, ValueError, "devices=0 is not a number of devices"),
        ({"devices": True}, ValueError, "devices=True is not a number of devices"),
        (
            {"devices": 129},
            ValueError,
            "devices=129 is not a number of devices. Use an int from 1 to 128",
        ),
        ({"identity": "mps"}, ValueError, "identity='mps' is not known"),
        ({"strict": "no"}, TypeError, "strict='no' is not a bool"),
        ({"capability": (True, False)}, ValueError, "is not a compute capability"),
        ({"capability": (-1, 0)}, ValueError, "is not a compute capability"),
        ({"capability": 8.0}, ValueError, "is not a compute capability"),
        ({"memory": "80 potatoes"}, ValueError, "'80 potatoes' is not a size"),
        ({"memory": 0}, ValueError, "memory=0 is not a number of bytes"),
        ({"properties": 5}, TypeError, "properties=5 is not a mapping"),
        ({"properties": {"total_memory": "80GB"}}, TypeError, "'80GB' is not of type int"),
        ({"properties": {"total_memory": -1}}, ValueError, "-1 is below 0"),
        ({"properties": {"speed": 1}}, ValueError, "'speed'.*cannot be set"),
        ({"written_for": ["cuda"]}, ValueError, r"written_for=\['cuda'\] is not known"),
        ({"verify": "findings.txt"}, ValueError, "verify='findings.txt' is neither True nor"),
        ({"verify": "/nowhere/at/all.json"}, ValueError, "is in a folder that is not there"),
        ({"verify_sample": 0}, ValueError, "verify_sample=0 is not a fraction"),
        ({"verify_sample": True}, ValueError, "verify_sample=True is not a fraction"),
        ({"verify_only": ("mm", 3)}, ValueError, r"verify_only=\('mm', 3\) names no operators"),
        ({"verify_only": "mm,,add"}, ValueError, "verify_only='mm,,add' names no operators"),
        ({"engine": "fast"}, ValueError, "engine='fast' is not known"),
        ({"target": 3}, TypeError, "target=3 is not a device type"),
        ({"colour": "red"}, TypeError, "'colour' is not an option"),
    ],
)
def test_a_bad_value_is_refused_at_the_call(
    options: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        torchdevice.portable(**options)


@pytest.mark.parametrize("arguments", [("cuda:2:2",), (4,), ("cuda", 0), ("cuda", True)])
def test_simulate_refuses_what_it_would_misread(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="is not"):
        torchdevice.simulate(*arguments)


@pytest.mark.usefixtures("no_collections")
def test_sizes_as_people_write_them() -> None:
    sizes = {
        "1024": 1024,
        "8G": 8 << 30,
        "8 GiB": 8 << 30,
        "1.5kb": 1536,
        "2T": 2 << 40,
        "512 B": 512,
    }
    assert {text: Options(context=text).context for text in sizes} == sizes
    with pytest.raises(
        ValueError, match=r"memory=8 is less than 1 MiB. Name the unit, as in '8GiB'."
    ):
        Options(memory=8)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("A100", "simulated:a100"),
        ("a100:2", "simulated:a100:2"),
        ("Simulated:T4:3", "simulated:t4:3"),
        ("simulated", "simulated"),
        ("strict", "simulated:strict"),
        ("CUDA", "cuda"),
        ("cuda:2", "cuda:2"),
        ("npu", "npu"),
    ],
)
def test_targets_have_one_grammar(given: str, meant: str) -> None:
    assert Options(given).target == meant
    assert torchdevice.portable(given).options == torchdevice.portable(meant).options
    if meant not in ("cuda:2", "npu"):  # which are no targets
        assert Target.named(given) == Target.named(meant)
    simulated = meant if meant.startswith("simulated") else f"simulated:{meant}"
    assert torchdevice.simulate(given).options.target == simulated


def test_the_number_of_devices_has_one_name() -> None:
    assert (
        torchdevice.simulate("a100", devices=2).options.target
        == torchdevice.simulate("a100", 2).options.target
        == "simulated:a100:2"
    )
    with pytest.warns(DeprecationWarning, match="is now simulate.devices=2."):
        assert torchdevice.simulate("cuda", count=2).options.target == "simulated:cuda:2"
    with pytest.raises(TypeError, match="got devices=2 and count=3, its old name"):
        torchdevice.simulate("cuda", 2, count=3)
    with pytest.raises(ValueError, match="devices=2 contradicts profile='cuda:3'"):
        torchdevice.simulate("cuda:3", 2)
    with pytest.raises(TypeError, match="Did you mean devices="):
        torchdevice.portable("simulated:cuda", count=2)
    with pytest.raises(
        torchdevice.errors.UnknownTargetError, match="Did you mean 'simulated:cuda:2'"
    ):
        torchdevice.portable("cuda:2").__enter__()


@pytest.mark.parametrize("name", record.declarations())
def test_a_default_is_what_its_check_returns(name: str) -> None:
    default = getattr(Options, name)
    checked = record.declarations()[name].check(default)
    assert checked == default and type(checked) is type(default)
