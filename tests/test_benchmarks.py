"""The benchmark command prints the requested figures; values depend on the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from places import ROOT, benchmark
from processes import run_python

import torchdevice
from torchdevice import check

package_speed = benchmark("package_speed")

pytestmark = pytest.mark.one_engine


def test_a_case_as_a_table_and_as_json(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ran = run_python(
        "-m", "benchmarks", "--rounds", "3", "--only", "x.device", "--json", str(figures), cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert "do-nothing mode" in ran.stdout and "cpu target" in ran.stdout
    timings = json.loads(figures.read_text())["cases"]["x.device"]
    assert set(timings) == {
        "bare",
        "do-nothing mode",
        "torch.device",
        "cpu target",
        "cpu target, wrap",
    }
    assert all(lower <= median <= upper and lower > 0 for median, lower, upper in timings.values())


@pytest.mark.sampled(2, of="measurements")
def test_moves_against_a_bare_to(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ("--transfers", "--rounds", "3", "--only", "4 elements", "--json", str(figures))
    ran = run_python("-m", "benchmarks", *arguments, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(figures.read_text())["transfers"]
    assert len(found) == 6 and all(
        set(timings) == {"x.to(device)", "ToDevice"} for timings in found.values()
    )


@pytest.mark.sampled(2, of="measurements")
def test_half_precision_against_float32(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ran = run_python(
        "-m",
        "benchmarks",
        "--half",
        "--rounds",
        "3",
        "--only",
        "linear",
        "--json",
        str(figures),
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    (timings,) = json.loads(figures.read_text())["half precision"].values()
    dtypes = {"float32", "float16", "bfloat16"}
    assert set(timings) == dtypes | {f"{name}, products by torch" for name in dtypes - {"float32"}}


@pytest.mark.sampled(2, of="measurements")
def test_what_verify_costs(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ran = run_python(
        "-m",
        "benchmarks",
        "--verify",
        "--rounds",
        "3",
        "--only",
        "x.view(2, 2), cpu",
        "--json",
        str(figures),
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    (timings,) = json.loads(figures.read_text())["verify"].values()
    conditions = {
        "without verify",
        "verify",
        "every tenth call",
        "every hundredth call",
        "only addmm",
    }
    assert timings.keys() == conditions


@pytest.mark.sampled(2, of="measurements")
def test_stand_ins_against_torchs_operators(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ("--packages", "--rounds", "3", "--only", "16 rows", "--json", str(figures))
    ran = run_python("-m", "benchmarks", *arguments, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    (timings,) = json.loads(figures.read_text())["packages"].values()
    assert timings.keys() == {package_speed.BY_TORCH, package_speed.BY_STAND_IN}


@pytest.mark.parametrize("name", package_speed.CASES)
def test_a_stand_in_computes_what_it_is_measured_against(name: str) -> None:
    with torchdevice.portable("cpu"):
        by_torch, by_stand_in = package_speed.CASES[name]()
        torch.testing.assert_close(by_stand_in(), by_torch(), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2, of="measurements")
def test_random_numbers_of_a_gpu(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ("--random", "--rounds", "3", "--only", "exponential_", "--json", str(figures))
    ran = run_python("-m", "benchmarks", *arguments, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(figures.read_text())["random"]
    dtypes = ("float32", "float64", "float16", "bfloat16")
    counts = ("10,000", "100,000", "1,000,000")
    assert set(found) == {f"exponential_, {dtype}, {count}" for dtype in dtypes for count in counts}
    assert (
        all({"torch's CPU", "Python"} <= set(timings) for timings in found.values())
        and "| ns a number |" in ran.stdout
    )


@pytest.mark.sampled(2, of="measurements")
def test_growth_is_measured_and_drawn(tmp_path: Path) -> None:
    plot, figures = tmp_path / "growth.svg", tmp_path / "figures.json"
    arguments = ("--growth", "--most", "2", "--plot", str(plot), "--json", str(figures))
    ran = run_python("-m", "benchmarks", *arguments, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(figures.read_text())["growth"]
    assert set(found) == {"ranks", "call sites", "nested scopes", "threads", "parameters"}
    assert set(found["ranks"]) == {"1", "2"} and plot.read_text().count("<polyline") == len(found)
    assert all(
        microseconds > 0 for curve in found.values() for microseconds, _, _ in curve.values()
    )


@pytest.mark.sampled(2, of="measurements")
def test_a_soak_is_watched_and_drawn(tmp_path: Path) -> None:
    plot, figures = tmp_path / "soak.svg", tmp_path / "figures.json"
    arguments = ("--soak", "--minutes", "0.001", "--plot", str(plot), "--json", str(figures))
    ran = run_python("-m", "benchmarks", *arguments, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    samples = json.loads(figures.read_text())["soak"]
    assert all(
        resident > objects > descriptors > 0 for _, _, resident, objects, descriptors in samples
    )
    assert (
        plot.read_text().count("<polyline") == 3 and "descriptors." in ran.stdout.splitlines()[-1]
    )


@pytest.mark.sampled(0)
def test_instructions_are_counted_where_valgrind_is() -> None:
    ran = run_python("-m", "benchmarks", "--instructions", "--only", "ordinary", cwd=ROOT)
    if shutil.which("valgrind") is None:
        assert ran.returncode == 1 and "valgrind is not installed" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    bare, nothing, _, ours, wrapped = (
        int(count.replace(",", "")) for count in ran.stdout.split("elements")[1].split()
    )
    assert bare < nothing and ours < 1.05 * nothing and wrapped < 1.02 * bare


SLOW_ADD = (
    "import torch\nadd = torch.add\ntorch.add = lambda *x: [add(*x) for _ in "
    "range(20)][0]\nprint('hello')\n"
)


@pytest.mark.sampled(2, of="measurements")
def test_peers_against_a_program_edited_by_hand(tmp_path: Path) -> None:
    for name, text in (("mpsify", SLOW_ADD), ("torchada", "raise ImportError('no GPU of ours')\n")):
        (tmp_path / f"{name}.py").write_text(text)
    ways = ("mpsify", "torchada", "TorchDevice")
    sources = [part for name in ways[:2] for part in ("--peer-source", f"{name}={tmp_path}")]
    figures = tmp_path / "figures.json"
    arguments = (*sources, "--rounds", "3", "--only", "operator", "--json", str(figures))
    ran = run_python(
        "-m", "benchmarks", "--peers", *ways, *arguments, "--peer-repeats", "1", cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert (
        "| torchada | fails (2) | fails (2) |" in ran.stdout
        and "2. ImportError: no GPU of ours" in ran.stdout
    )
    found = json.loads(figures.read_text())["peers"]
    assert "--peer-source TorchDevice=FOLDER" in found["TorchDevice"]["error"]
    if torch.cuda.is_available():
        return
    with pytest.raises((AssertionError, RuntimeError)) as refused:  # by the build of torch
        torch.ones(1, device="cuda")
    first_sentence = str(refused.value).partition(".")[0]
    slow = found["mpsify"]
    expected = f"{refused.type.__name__}: {first_sentence}"
    assert slow["import"] > 1 and slow["ordinary operator"].startswith(expected)
    assert slow["ordinary operator, cpu"] > 2


PLATFORMS = """
import sys
from pathlib import Path
from benchmarks import platforms

platforms.ROOT, platforms.TESTS = Path(sys.argv[1]), ("test_it.py",)
platforms.PAGE, platforms.FIGURES = Path(sys.argv[1], "page.md"), Path(sys.argv[1], "figures.json")
platforms.ROOT.mkdir(exist_ok=True)
made = ["--make", sys.argv[1], "--environments", "0.1:9"]
sys.exit(platforms.main([sys.executable, "/nowhere/python", *made, *sys.argv[2:]]))
"""


@pytest.mark.sampled(2, of="measurements")
def test_platforms_are_compared(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--engine')\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_good(): ...\ndef test_bad(): assert 0\ndef test_left(): "
        "pytest.skip('x is absent')\n"
    )
    kept = tmp_path / "rows.json"
    ran = run_python(
        "-c", PLATFORMS, str(tmp_path), "--write", "--rows", str(kept), "--engine", "both", cwd=ROOT
    )
    lines = ran.stdout.splitlines()
    version = f"| {platform.python_version()} | {torch.__version__} |"
    day = datetime.date.today().isoformat()
    assert ran.returncode == 1, ran.stdout + ran.stderr
    for line, engine in zip(lines[2:4], ("mode", "wrap"), strict=True):
        assert line.startswith(
            f"{version} {engine} | a part | {day} | 1 | 1 `test_bad` | 1 (1) |"
        ), line
    assert lines[4].startswith(
        "| /nowhere/python | cannot be started: No such file or directory |  | nothing |  | 0 |"
    )
    assert "1. x is absent" in lines
    assert "left out: Python 0.1 with torch 9" in ran.stderr
    page = (tmp_path / "page.md").read_text()
    assert all(line in page for line in lines[2:4]) and "nowhere" not in page
    assert lines[2].endswith(
        f"| {platform.system()} {platform.machine()}, {os.cpu_count()} processors |"
    )
    joined = run_python(
        "-c", PLATFORMS, str(tmp_path / "made again"), "--join", str(kept), cwd=ROOT
    )
    assert joined.returncode == 1 and joined.stdout == ran.stdout, joined.stderr
    assert (tmp_path / "made again" / "page.md").read_text() == page


def test_a_run_replaces_that_of_the_same_environment_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms = benchmark("platforms")
    monkeypatch.setattr(platforms, "FIGURES", tmp_path / "figures.json")
    rows = [
        platforms.Row(
            python, torch, engine, "a part", "2026-01-01", 5, ["test_it"], {"no x": 2}, 1.5
        )
        for python, torch in (
            ("3.9.7", "2.10.0+cpu"),
            ("3.10.1", "2.9.1"),
            ("3.10.1", "2.10.0+cpu"),
        )
        for engine in ("mode", "wrap")
    ]
    assert platforms.record(rows[::-1]) == rows
    later = rows[3]._replace(ran="the whole", passed=9)
    assert platforms.record([later, platforms.Row("/python", "cannot be started")]) == [
        *rows[:3],
        later,
        *rows[4:],
    ]


def test_supported_releases_in_which_nothing_ran_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = benchmark("platforms")
    monkeypatch.setattr(platforms, "ENVIRONMENTS", ("3.10:2.10.0", "3.13:2.14.1", "3.14:2.15.0"))
    rows = [platforms.Row("3.10.13", "2.10.0+cu128"), platforms.Row("3.13.0", "2.15.0+cpu")]
    assert platforms._missing(rows) == "Nothing has run on Python 3.14 or torch 2.14.1 yet."
    assert platforms._missing([*rows, platforms.Row("3.14.1", "2.14.0")]) == ""


def test_what_cannot_be_installed_for_the_tests_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other requirements are installed: a Python without one wheel runs all other tests."""
    platforms = benchmark("platforms")
    pip = tmp_path / "pip"
    pip.write_text(
        "#!/usr/bin/env python3\nimport sys\n"
        "if sys.argv[1] == '-c': print('absent>=1\\nhypothesis>=6')\n"
        "else: print('asked', sys.argv[-1]); sys.exit('[test]' in sys.argv[-1] or 'absent' in "
        "sys.argv[-1])\n"
    )
    pip.chmod(0o755)
    platforms._install_tests_needs([str(pip), "install"], "3.14:2.15.0")
    said = capfd.readouterr()
    assert said.err == "left out: absent>=1 in 3.14:2.15.0, and the tests that need it\n"
    assert said.out.splitlines()[1:] == ["asked absent>=1", "asked hypothesis>=6"]


def test_the_page_of_platforms_is_that_of_the_record(tmp_path: Path) -> None:
    platforms = benchmark("platforms")
    rows = platforms.read(platforms.FIGURES)
    footer = platforms.FOOTER.format(missing=platforms._missing(rows))
    assert platforms.PAGE.read_text().endswith(platforms.table(rows) + footer)


PREDICTED = """
import torch
name = "cuda"
x = torch.ones(3).to(name)
y = x.double()
if len(x) > 3:
    torch.mode(x)
z = torch.zeros(2, **{"dtype": torch.float64, "device": "cuda"})
torch.linalg.eig(torch.eye(2).to(x.device))
"""


def test_what_was_predicted_of_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = benchmark("predicted")
    clone = tmp_path / "me+mine"
    clone.mkdir()
    (clone / "program.py").write_text(PREDICTED)
    git = ["git", "-C", str(clone), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    listed = tmp_path / "list.txt"
    listed.write_text(
        f"me/mine {commit} program.py  # seen\n{predicted._HELD_OUT}\nme/mine {commit} +program.py "
        "'a b'\n"
    )
    monkeypatch.setattr(predicted, "PROGRAMS", listed)
    seen, held_out = predicted.programs()
    assert held_out == seen._replace(path="+program.py", arguments=["a b"], held_out=True)
    row = predicted.measure(seen, tmp_path, 60, tmp_path / "kept")
    assert row["ended"] == "ran to its end"  # linalg_eig, which a Mac lacks, ran on the CPU
    assert row["wrong"] == []
    assert row["figures"] == {
        "handled right": 1,  # line 4
        "handled predicted": 2,  # and line 8, of which the finding of the dtype speaks
        # Lines 5 and 9; a dtype in a dict, as in line 8, need not reach torch where it stands.
        "degraded right": 2,
        "degraded predicted": 3,
    }


def test_what_an_event_shows_of_a_finding(tmp_path: Path) -> None:
    against = benchmark("against_report")
    (tmp_path / "a.py").write_text(
        "import torch\nx.to('cuda')\nx.double()\n@torch.compile\ndef f(): pass\nf()\n"
    )
    findings = {
        each.line: each
        for each in check.check_file(str(tmp_path / "a.py"), check.Target.named("simulated:mps"))
    }
    move, double, graph = (findings[line] for line in (2, 3, 4))

    def shows(finding: check.Finding, line: int, said: str, degraded: bool) -> tuple[bool, bool]:
        event = against.Event(finding.path, line, "", said, degraded)
        return against.covers(finding, event), against.predicts(finding, event)

    assert shows(move, 2, "a -> b", False) == shows(double, 3, "a -> b", True) == (True, True)
    assert shows(move, 2, "a -> b", True) == (False, False) and shows(
        double, 3, "a -> b", False
    ) == (True, False)
    assert shows(move, 3, "a -> b", False) == (False, False)
    # A graph is compiled where its function is called.
    assert shows(graph, 6, "torch.compile with inductor -> x", True) == (True, True)
    assert shows(graph, 6, "a -> b", True) == (False, False)


def test_the_figures_of_the_page_are_of_the_list() -> None:
    predicted = benchmark("predicted")
    rows = json.loads(predicted.FIGURES.read_text())
    assert [{name: row[name] for name in predicted.Program._fields} for row in rows] == [
        each._asdict() for each in predicted.programs()
    ]
    assert len(rows) >= 40


def test_bugs_are_counted_under_another_simulation() -> None:
    """Each program runs in a fork: what ends it does not end the count."""
    import corpus

    module = benchmark("bugs_elsewhere")

    def program(correct: bool) -> None:
        if not correct:
            raise RuntimeError("Expected a 'cuda' device")

    def ends(correct: bool) -> None:
        os._exit(3)

    case = corpus.Case("shapes", "torch", "2.10", "Expected a 'cuda'", program, {})
    assert module.run(case, False, 60) == (True, True, "RuntimeError: Expected a 'cuda' device")
    assert module.run(case, True, 60) == (False, False, "")
    assert module.run(case._replace(error="another text"), False, 60)[:2] == (True, False)
    assert module.run(case._replace(program=ends), False, 60) == (
        True,
        False,
        "the process ended with 3",
    )
