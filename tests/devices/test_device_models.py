"""Models of simulated devices: their figures, and models that a user describes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT, benchmark, page_maker
from processes import run_python

import torchdevice
from torchdevice.errors import UnknownTargetError
from torchdevice.simulation.gpu_models import GPUS
from torchdevice.simulation.model_lookup import MODELS, canonical, known_name

device_models, make_gpus = benchmark("device_models"), page_maker("make_gpus")

pytestmark = pytest.mark.one_engine

PAGE = ROOT / "docs" / "simulation.md"

MODELS_PAGE = ROOT / "docs" / "gpus.md"

MINE = {
    "capability": [8, 6],
    "memory": "10GiB",
    "properties": {"name": "mine", "multi_processor_count": 46},
    "unsupported_dtypes": ["float64"],
    "missing_operators": ["_fft_r2c"],
}


def row(model: str) -> str:
    properties = torch.cuda.get_device_properties(0)
    memory = f"{torch.cuda.mem_get_info()[1] / 2**30:.2f} GiB"
    return f"| `{model}` | {properties.name} | {properties.major}.{properties.minor} | {memory} |"


@pytest.mark.parametrize("model", MODELS)
def test_the_figures_are_those_of_the_page(model: str) -> None:
    # Without values: a model may have as much memory as the machine, and glibc then takes it from
    # the heap, which may keep it. Linux forks no process of that size.
    with torchdevice.simulate(model, devices=2, compute="meta") as scope:
        assert row(model) in MODELS_PAGE.read_text()
        assert torch.cuda.device_count() == 2 and scope.runtime.target == f"simulated:{model}:2"
        assert torch.cuda.get_device_capability(1) == MODELS[model].capability
        assert torch.ones(1, device="cuda:1").is_cuda
        with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(torch.cuda.mem_get_info()[1] + 1, dtype=torch.uint8, device="cuda")


def test_the_file_has_no_problems() -> None:
    assert list(device_models.problems(GPUS)) == []
    changed = {
        "t4": GPUS["t4"]._replace(memory="17GiB", capability=(7, 9), aliases=("A100",)),
        "l4": GPUS["l4"]._replace(memory="22GiB"),
        "v100": GPUS["v100"]._replace(memory="20GiB"),
        "h100": GPUS["h100"]._replace(of_memory=""),
    }
    found = list(device_models.problems({**GPUS, **changed}))
    starts = [
        "'a100' is the name of 2 models",
        "t4: The capability (7, 9) has",
        "v100: Memory of 20.00 GiB does not go",
    ]
    starts += [
        "l4: Memory of 22528 MiB is not what the rule derives of 23034MiB",
        "h100: A figure has no source",
    ]
    assert [any(each.startswith(start) for each in found) for start in starts] == [
        True
    ] * 5 and len(found) == 5


def test_the_page_is_up_to_date() -> None:
    assert make_gpus.page() == MODELS_PAGE.read_text(), "run python docs/make_gpus.py"


@pytest.mark.parametrize(
    ("said", "model"),
    [
        ("A100-80GB", "a100-80gb"),
        ("RTX 3090", "rtx3090"),
        ("nvidia geforce rtx 4070 ti super", "rtx4070tisuper"),
        ("V100_16GB", "v100"),
        ("A100-1G.5GB", "a100-1g.5gb"),
        ("CUDA", "cuda"),
        ("t5", "t5"),
    ],
)
def test_names_of_models(said: str, model: str) -> None:
    assert known_name(said) == model
    assert canonical(f"simulated:{said}:2") == f"simulated:{model}:2"


def test_each_name_that_torch_prints_means_a_model() -> None:
    for name, model in MODELS.items():
        assert (
            MODELS[known_name(model.properties["name"])].properties["name"]
            == model.properties["name"]
        )
        assert known_name(name) == name


def test_a_target_in_any_spelling() -> None:
    with torchdevice.portable("simulated:A100-80GB:2") as scope:
        assert (
            scope.runtime.target == "simulated:a100-80gb:2"
            and scope.options.target == scope.runtime.target
        )
        assert torch.cuda.get_device_name() == "NVIDIA A100-SXM4-80GB"
    with torchdevice.simulate("RTX 3090"):
        assert torch.cuda.get_device_properties(0).max_threads_per_multi_processor == 1536


@pytest.mark.usefixtures("no_collections")
def test_cuda_takes_a_part_of_a_model() -> None:
    with torchdevice.simulate("t4"):
        free, total = torch.cuda.mem_get_info()
        assert (total - free, total) == (1 << 29, torch.cuda.get_device_properties(0).total_memory)
    # The call's memory is the program's alone, and so is that of a device without a name.
    for options in ({"profile": "t4", "memory": "1GiB"}, {"memory": "1GiB"}):
        with torchdevice.simulate(**options):
            assert torch.cuda.mem_get_info() == (1 << 30, 1 << 30)
    with torchdevice.simulate("t4", context=0):
        free, total = torch.cuda.mem_get_info()
        assert free == total


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("compute", [None, "meta"])
def test_the_context_is_missing_where_memory_is_asked_for(compute: Any) -> None:
    with torchdevice.simulate(memory="64MiB", context="24MiB", compute=compute):
        assert torch.cuda.mem_get_info() == (40 << 20, 64 << 20)
        kept = torch.zeros(40 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info()[0] == 0
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
            torch.zeros(2 << 20, dtype=torch.uint8, device="cuda")
        assert (
            "which 0 bytes is free. Including non-PyTorch memory, this process has 64.00 MiB"
            in str(caught.value)
        )
        torch.cuda.set_per_process_memory_fraction(0.5)
        del kept
        torch.cuda.empty_cache()
        torch.zeros(30 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(
        ValueError, match=r"context=-1 is not a number of bytes. Use an int of 0 or more"
    ):
        torchdevice.simulate(context=-1)


def test_a_t4_has_no_bfloat16_and_less_threads() -> None:
    with torchdevice.simulate("t4"):
        assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        assert torch.cuda.get_device_properties(0).max_threads_per_multi_processor == 1024
    with torchdevice.simulate("a100"):
        assert torch.cuda.is_bf16_supported(including_emulation=False)


def float8_product() -> torch.Tensor:
    x = torch.ones(16, 16, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    out = torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.float32)
    return torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.float32, out=torch.empty_like(out))


@pytest.mark.parametrize("model", MODELS)
def test_products_of_float8_need_capability_8_9(model: str) -> None:
    with torchdevice.simulate(model):
        if MODELS[model].capability >= (8, 9):
            assert float8_product().tolist() == [[16.0] * 16] * 16
            return
        with pytest.raises(
            RuntimeError, match=r"^torch\._scaled_mm is only supported on CUDA devices with "
        ):
            float8_product()


def test_products_of_float8_go_by_the_option_and_by_the_profile() -> None:
    with torchdevice.simulate("a100", capability=(9, 0)):
        float8_product()
    with (
        torchdevice.simulate("mps"),
        pytest.raises(TypeError, match="Float8_e4m3fn to the MPS backend"),
    ):
        float8_product()


def test_an_option_comes_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDEVICE_MEMORY", "2GiB")
    # (8, 0) is the default of the option, and is given all the same.
    with torchdevice.simulate("h100", capability=(8, 0), properties={"name": "other"}):
        assert (
            torch.cuda.get_device_capability() == (8, 0) and torch.cuda.get_device_name() == "other"
        )
        assert torch.cuda.mem_get_info()[1] == 2 << 30
    with torchdevice.portable("simulated:h100", memory="1GiB"):
        assert torch.cuda.mem_get_info()[1] == 1 << 30 and torch.cuda.get_device_capability() == (
            9,
            0,
        )


def described(way: str, folder: Path) -> Any:
    """Return a model as a dict, as JSON, or as the TOML of the page."""
    if way == "dict":
        return MINE
    if way == "json":
        (folder / "mine.json").write_text(json.dumps(MINE))
    else:
        (block,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
        (folder / "mine.toml").write_text(block)
    return f"mine.{way}"


WAYS = ["dict", "json", *(["toml"] if sys.version_info >= (3, 11) else [])]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_ones_own(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope = torchdevice.simulate(described(way, tmp_path), count=2)
    monkeypatch.chdir("/")
    with scope:
        assert torch.cuda.get_device_name() == "mine" and torch.cuda.get_device_capability() == (
            8,
            6,
        )
        assert torch.cuda.mem_get_info(1)[1] == 10 << 30
        assert torch.cuda.get_device_properties(0).multi_processor_count == 46
        with pytest.warns(torchdevice.errors.PortabilityWarning, match="float64"):
            assert torch.ones(1, dtype=torch.float64, device="cuda").dtype == torch.float32
        with pytest.raises(
            NotImplementedError,
            match="Could not run 'aten::_fft_r2c' with arguments from the 'CUDA'",
        ):
            torch.fft.rfft(torch.ones(4, device="cuda"))
        program = (
            "import torch; assert torch.cuda.get_device_name() == 'mine' and "
            "torch.cuda.device_count() == 2"
        )
        assert run_python("-c", program, **children(scope)).returncode == 0


def children(scope: torchdevice.Scope) -> dict[str, str]:
    """Return the variables of a child of a scope."""
    from torchdevice.scope import collected_options as options

    return {
        name: value
        for name, value in options.to_environment(scope.options).items()
        if value is not None
    }


def test_every_way_in(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(MINE))
    (tmp_path / "test_it.py").write_text(
        "import pytest, torch\n"
        "def test_flag():\n    assert torch.cuda.get_device_name() == 'mine' and "
        "torch.cuda.device_count() == 3\n"
        "@pytest.mark.torchdevice('a100:2')\n"
        "def test_mark():\n    assert 'A100' in torch.cuda.get_device_name() and "
        "torch.cuda.device_count() == 2\n"
    )
    flag = "--torchdevice=simulated:mine.json:3"
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", flag, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout


FILES = {
    "deep.json": "[" * 100_000,
    "deep.toml": f"base = {'[' * 5000}{']' * 5000}",
    "number.json": '{"unsupported_dtypes": 3}',
    "numbers.json": '{"missing_operators": [1, 2]}',
    "text.json": '{"unsupported_dtypes": "float64"}',
    "figure.json": '{"properties": 5}',
    "size.json": '{"memory": "lots"}',
    "kind.json": '{"properties": {"name": 3}}',
    "dtype.json": '{"unsupported_dtypes": ["nope"]}',
}


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("t5", UnknownTargetError, "Did you mean 'simulated:t4'?"),
        ("gpu", UnknownTargetError, "Did you mean 'simulated:cuda'?"),
        ("nvidia", UnknownTargetError, "Did you mean 'simulated:cuda'?"),
        (
            "missing.toml",
            ValueError,
            r"missing.toml' cannot be read: No such file or directory\. Name a file",
        ),
        ("cut-off.json", ValueError, r"'cut-off.json' cannot be parsed: Expecting value"),
        (
            "cut-off.toml",
            ValueError,
            "cut-off.toml' cannot be (parsed: Invalid value|read: Python 3.10)",
        ),
        (
            {"memmory": 1},
            ValueError,
            "has 'memmory', which is not known. Use keys among base, capability",
        ),
        (
            {"base": "tpu"},
            ValueError,
            "base='tpu' is not a profile. Use one of 'cuda', 'mps', 'strict'",
        ),
        ({"base": ["cuda"]}, ValueError, r"base=\['cuda'\], which is not the name of a profile"),
        ("latin-1.toml", ValueError, "'latin-1.toml' is not UTF-8: .*Write the file in UTF-8"),
        ("deep.json", ValueError, "'deep.json' cannot be parsed: maximum recursion depth exceeded"),
        (
            "deep.toml",
            ValueError,
            "'deep.toml' cannot be (parsed: (maximum rec|TOML inline)|read: Python 3.10)",
        ),
        (
            "number.json",
            ValueError,
            "number.json has unsupported_dtypes=3, which is not a list .*Write unsupp",
        ),
        (
            "numbers.json",
            ValueError,
            r"numbers.json has missing_operators=\[1, 2\], which is not a list of names",
        ),
        (
            "text.json",
            ValueError,
            "text.json has unsupported_dtypes='float64', which is not a list",
        ),
        (
            "figure.json",
            ValueError,
            "figure.json has properties=5, which is not a table of figures",
        ),
        ("size.json", ValueError, "size.json: memory='lots' is not a size. Use a number of bytes"),
        (
            "kind.json",
            ValueError,
            r"kind.json: properties\['name'\]=3 is not of type str. Use a value of that type",
        ),
        (
            "dtype.json",
            ValueError,
            "dtype.json: unsupported_dtypes has 'nope', which is not a dtype. Use names",
        ),
        ({"capability": 8}, ValueError, "capability=8 is not a compute capability"),
        ({"memory": "much"}, ValueError, "memory='much' is not a size"),
        ({"properties": {"colour": "green"}}, ValueError, "which cannot be set"),
        ({"unsupported_dtypes": ["float65"]}, ValueError, "has 'float65', which is not a dtype"),
        (4, ValueError, "profile=4 is not the name of a profile"),
    ],
    ids=str,
)
def test_bad_models(
    model: Any,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cut-off.json").write_text('{"base": ')
    Path("cut-off.toml").write_text("base = ")
    Path("latin-1.toml").write_bytes(b"base = '\xe9'")
    for name, text in FILES.items():
        Path(name).write_text(text)
    with pytest.raises(error, match=message), torchdevice.simulate(model):
        pass
