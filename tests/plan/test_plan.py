"""``torchdevice plan``: what a program needs of a GPU's memory, by what it is for."""

from __future__ import annotations

import collections
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command
from torch.optim import optimizer as optimizers

import torchdevice
from torchdevice.plan import peaks as peaks_module
from torchdevice.plan.peaks import COLUMNS, GRADIENTS, KINDS, OTHER, STATE, WEIGHTS, Peaks

pytestmark = pytest.mark.one_engine

PROGRAMS = Path(__file__).parents[1] / "programs"
MIB = 1 << 20


@pytest.fixture
def peaks() -> Any:
    """Follow the memory of a scope with two devices."""
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    before = [dict(each) for each in hooks]
    with torchdevice.simulate(compute="meta", values="assume", count=2) as scope:
        found = Peaks()
        found.follow()
        yield found
        found.stop()
        context = scope._context
        assert (
            found not in context.observers.kernels
            and found not in context.devices.machine.observers
        )
    assert [dict(each) for each in hooks] == before


class Half(torch.nn.Module):
    """A frozen and a trained layer of 4 MiB each, with an activation of 1 MiB between them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(1024, 1024, bias=False).requires_grad_(False)
        self.trained = torch.nn.Linear(1024, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x))


def steps(model: torch.nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("no_collections")
def test_kinds_are_those_of_the_program(peaks: Peaks) -> None:
    model = Half().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    steps(model, torch.rand(256, 1024, device="cuda"), optimizer)
    kinds = peaks.kinds(0)
    assert (kinds[WEIGHTS], kinds[GRADIENTS], kinds[STATE]) == (8 * MIB, 4 * MIB, 8 * MIB)
    assert sum(kinds.values()) == peaks.devices[0].allocated == torch.cuda.max_memory_allocated()
    assert peaks.devices[0].reserved == torch.cuda.max_memory_reserved()
    assert peaks.devices[0].sites[0].function == "steps"


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("remembered", [1 << 17, 8])
def test_memory_over_time(peaks: Peaks, remembered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks_module, "_REMEMBERED", remembered)
    peaks._ended = collections.deque(maxlen=remembered)
    model = Half().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    steps(model, torch.rand(256, 1024, device="cuda"), optimizer)
    kinds = peaks.kinds(0)
    columns = peaks.timeline(0)
    assert len(columns) == COLUMNS and all(
        len(each) == len(KINDS) and min(each) >= 0 for each in columns
    )
    # The last column may begin before the last block was given back.
    assert sum(columns[-1]) >= torch.cuda.memory_allocated() > 0
    if remembered > 8:
        assert max(columns, key=sum) == [kinds[kind] for kind in KINDS], (
            "the peak is a moment of the picture"
        )
        assert columns[0][1:] == [0, 0, 0] and columns[0][0] > 0, "the first tensors are weights"
    else:
        assert columns[0][0] == kinds[WEIGHTS], (
            "what still lives was there before the picture begins"
        )


def test_progress(
    peaks: Peaks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchdevice.tools.cli import plan

    monkeypatch.setattr(peaks_module, "_BETWEEN", 2)
    monkeypatch.setattr(plan._Progress, "every", 0)
    peaks.progress = plan._Progress().show
    kept = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    lines = capsys.readouterr().err.splitlines()
    assert len(kept) == 4 and len(lines) == 2
    assert (
        lines[1]
        == "torchdevice: 0 s, 2 blocks of memory, 2.00 MiB at the peak so far (Ctrl-C shows the "
        "plan)"
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_an_error_of_a_thread(error: type[Exception]) -> None:
    def work() -> None:
        kept = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        if error is ValueError:
            raise ValueError("no data")
        kept.repeat(64)  # 2 GiB

    before = threading.excepthook
    with torchdevice.simulate(compute="meta", values="assume", memory="1GiB") as scope:
        found = Peaks()
        found.follow()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")  # the program goes on
        said = peaks_module.data(found, scope.report(), None)
        found.stop()
    assert threading.excepthook is before and kept.numel() == MIB
    assert not said["finished"] and said["smallest"] is None
    line = work.__code__.co_firstlineno + (3 if error is ValueError else 4)
    assert said["ended"] == f"a thread ended by {error.__name__} at test_plan.py:{line}"
    if error is torch.OutOfMemoryError:
        assert said["at least"] == (32 * 65) * MIB + said["context"] <= said["needs"]


def test_workspaces_of_products(peaks: Peaks) -> None:
    x = torch.ones(4, 4, device="cuda", requires_grad=True)
    assert not peaks.devices[0].handles
    y = x @ x
    assert peaks.devices[0].handles == {False}
    y.sum().backward()
    assert peaks.devices[0].handles == {False, True}
    torch.ones(4, 4, device="cpu") @ torch.ones(4, 4, device="cpu")
    assert list(peaks.devices) == [0]


def test_a_device_without_blocks_left(peaks: Peaks) -> None:
    torch.zeros(MIB, dtype=torch.uint8, device="cuda:1")
    peaks.kinds(1)
    columns = peaks.timeline(1)
    assert max(map(sum, columns)) == MIB and sum(columns[0]) == MIB


@pytest.mark.usefixtures("no_collections")
def test_a_peak_that_is_over_is_kept(peaks: Peaks) -> None:
    kept = torch.nn.Parameter(
        torch.zeros(MIB, dtype=torch.uint8, device="cuda:1"), requires_grad=False
    )
    held = [torch.zeros(MIB, dtype=torch.uint8, device="cuda:1") for _ in range(3)]
    del held
    torch.cuda.reset_peak_memory_stats(1)
    later = [torch.zeros(MIB, dtype=torch.uint8, device="cuda:1") for _ in range(2)]
    kept.add(1)  # what it is for is known after the peak
    assert (
        peaks.kinds(1) == {WEIGHTS: MIB, OTHER: 3 * MIB} and peaks.devices[1].allocated == 4 * MIB
    )
    assert len(later) == 2 and 0 not in peaks.devices


def test_reserved_memory_that_is_given_back_was_needed(peaks: Peaks) -> None:
    x = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    assert peaks.devices[0].reserved == 64 * MIB and x.is_cuda


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop", "LBFGS"])
def test_states_of_other_optimizers(peaks: Peaks, kind: str) -> None:
    model = Half().cuda()
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)([model.trained.weight], **more)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = model(torch.rand(256, 1024, device="cuda")).sum()
        found.backward()
        return found

    for _ in range(2):
        optimizer.step(loss)
    held = [
        each
        for state in optimizer.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor)
    ]
    assert peaks.kinds(0)[WEIGHTS] == 8 * MIB
    assert peaks.kinds(0)[STATE] >= max(each.nbytes for each in held) > 0


def test_parts_of_tensors_of_other_classes(peaks: Peaks) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    one, other = (torch.zeros(MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    weight = torch.nn.Parameter(TwoTensor(one, other), requires_grad=False)
    peaks._mark([weight], WEIGHTS)
    assert peaks.kinds(0)[WEIGHTS] == 2 * MIB


def test_tensors_of_compilers_are_left_alone(peaks: Peaks) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    with FakeTensorMode():
        fake = torch.nn.Parameter(torch.zeros(4, device="cpu"))
    assert peaks.kinds(0) == {OTHER: MIB} and fake.shape == (4,) and kept.is_cuda


def planned(*words: str) -> Any:
    """Return what the command prints as data."""
    done = run_command("plan", "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("program", "arguments", "library"),
    [
        ("hf_trainer.py", ["4"], "transformers"),
        ("hf_accelerate.py", ["4"], "accelerate"),
        ("lightning_trainer.py", ["4", "1", "auto"], "lightning"),
    ],
)
def test_programs_run_to_their_end(
    program: str, arguments: list[str], library: str, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    plan = planned(str(PROGRAMS / program), str(tmp_path), *arguments)
    assert list(tmp_path.glob("losses-*")), "the program did not come to its last line"
    (device,) = plan["devices"]
    kinds = [device[kind] for kind in (WEIGHTS, GRADIENTS, STATE, OTHER)]
    assert all(kinds) and device["fragments"] > 0
    assert sum(kinds) + device["workspaces"] + device["fragments"] == device["peak"]
    assert device["workspaces"] == 2 * 8_519_680, "of the forward and the backward pass"
    assert plan["versions"]["torch"] == torch.__version__ and plan["versions"][library]
    assert str(PROGRAMS / program) in device["lines"][0]
    assert plan["error"] is None and plan["fits"][0]["fits"] == "yes"
    read = [each for each in plan["assumed"] if each["operator"] == "item()"]
    assert read and all(str(PROGRAMS / program) in each["lines"][0] for each in read)


RANKS = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 8, "nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)])
if sys.argv[1] == "DDP":
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
else:
    for each in (*model, model):
        fully_shard(each)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.rand(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
total = torch.ones(1, device="cuda")
dist.all_reduce(total, group=dist.new_group([0, 1]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.sampled(3, of="plans of programs")
@pytest.mark.parametrize(("way", "shards", "gradients"), [("DDP", 1, 16), ("FSDP2", 8, 2)])
def test_a_rank_of_many(way: str, shards: int, gradients: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    plan = planned("--world-size", "8", str(script), way)
    assert plan["error"] is None
    (device,) = plan["devices"]
    assert device["weights"] % MIB == 0 and device["optimizer state"] <= 2 * 16 * MIB // shards
    # FSDP2 has its shards, and the layers that it has gathered.
    assert 16 * MIB // shards <= device["weights"] <= (16 + 16 * (shards > 1)) * MIB
    assert 0 < device["gradients"] <= gradients * MIB


SCRIPT = """
import torch
print("said by the program")
layers = [torch.nn.Linear(32768, 32768, bias=False, device="cuda") for _ in range(4)]
if layers[0].weight.sum() > 0:
    print("never")
{}
"""


@pytest.mark.sampled(3, of="plans of programs")
def test_what_fits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(""))
    plan = planned(str(script))
    assert plan["devices"][0]["weights"] == 16 << 30 == plan["devices"][0]["peak"] - 2 * MIB
    fits = {each["model"]: each["fits"] for each in plan["fits"]}
    assert fits["t4"] == "no" and fits["rtx4090"] == fits["h100"] == "yes"
    assert plan["assumed"] == [{"lines": [f"{script}:5"], "operator": "item()", "value": "False"}]


SEEN = """
import torch
devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(*devices, torch.cuda.mem_get_info()[1] >> 30, sep=",")
"""
GPU = "simulated cuda device {}"


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ([], {"DEVICES": "2"}, [GPU.format(0), GPU.format(1), "1024"]),
        ([], {"MEMORY": "8GiB"}, [GPU.format(0), "8"]),
        ([], {"TARGET": "t4", "DEVICES": "2"}, ["Tesla T4", "Tesla T4", "14"]),
        ([], {"TARGET": "cpu"}, [GPU.format(0), "1024"]),
        (["--devices", "1"], {"DEVICES": "2"}, [GPU.format(0), "1024"]),
        (["--target", "t4"], {"TARGET": "a100:2", "MEMORY": "8GiB"}, ["Tesla T4", "8"]),
    ],
)
def test_variables_choose_the_device_where_no_flag_does(
    flags: list[str], variables: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(SEEN)
    named = {f"TORCHDEVICE_{name}": value for name, value in variables.items()}
    result = run_command("plan", *flags, "program.py", cwd=tmp_path, **named)
    assert result.stdout.splitlines()[0] == ",".join(expected), result.stderr


@pytest.mark.parametrize("flags", [[], ["--target", "t4"]])
def test_a_launcher_counts_the_devices_of_a_variable(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SEEN)
    words = ("torchrun", "--nproc-per-node", "gpu", "program.py")
    result = run_command("plan", *flags, *words, cwd=tmp_path, TORCHDEVICE_DEVICES="2")
    assert "program.py, rank 0 of 2" in result.stdout, result.stderr


@pytest.mark.sampled(3, of="plans of programs")
def test_a_program_that_fails_is_planned_up_to_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format("raise ValueError('no data')"))
    command = [sys.executable, "-m", "torchdevice", "plan", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: no data\n")
    assert "said by the program\ntorchdevice: plan of train.py" in done.stdout
    assert (
        "The program did not finish: ValueError at train.py:7.\nIt needs at least 16.50 GiB."
        in done.stdout
    )
    assert "peak of cuda:0 at  train.py:5" in done.stdout and "16.00 GiB" in done.stdout


FAILING = {
    "an error before the large part": (
        "raise ValueError",
        "",
        {"t4": "unknown", "rtx4090": "unknown", "h100": "unknown"},
    ),
    "an error behind a part": (
        "x = torch.empty(5 << 30, device='cuda')\nraise ValueError",
        "",
        {"t4": "no", "h100": "unknown"},
    ),
    "memory": (
        "torch.empty(20 << 30, dtype=torch.uint8, device='cuda')",
        "simulated:t4",
        {"t4": "no", "rtx4090": "unknown", "h100": "unknown"},
    ),
    "memory of a large one": (
        "torch.empty(90 << 30, dtype=torch.uint8, device='cuda')",
        "simulated:h100",
        dict.fromkeys(("t4", "h100"), "no"),
    ),
    "an exit with a status": (
        "import sys\nx = torch.empty(5 << 30, device='cuda')\nsys.exit(3)",
        "",
        {"t4": "no", "h100": "unknown"},
    ),
    "an exit with a text": (
        "import sys\nx = torch.empty(1, device='cuda')\nsys.exit('no data')",
        "",
        {"t4": "unknown", "h100": "unknown"},
    ),
    "memory at a limit": (
        "torch.empty(30 << 30, dtype=torch.uint8, device='cuda')",
        "--memory=24GiB",
        {"rtx4090": "no", "h100": "unknown"},
    ),
    "memory that no GPU known here has": (
        "torch.empty(999 << 30, dtype=torch.uint8, device='cuda')",
        "simulated:t4",
        dict.fromkeys(("t4", "rtx4090", "h100", "b200"), "no"),
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_program_that_does_not_finish_proves_no_yes(name: str) -> None:
    code, target, expected = FAILING[name]
    flag = [f"--target={target}"] if target.startswith("simulated") else [target] if target else []
    program = ["-c", f"import torch\n{code}"]
    done = run_command("plan", *flag, "--json", *program)
    plan = json.loads(done.stdout)
    assert done.returncode == (3 if name == "an exit with a status" else 1) and not plan["finished"]
    found = {each["model"]: each["fits"] for each in plan["fits"]}
    assert found | expected == found and "yes" not in found.values()
    if name == "memory":
        done = run_command("plan", *flag, *program)
        assert done.returncode == 1
        assert "did not finish: OutOfMemoryError" in done.stdout and " yes " not in done.stdout
        assert (done.stdout + done.stderr).count("CUDA out of memory.") == 1


def test_an_exit_without_a_status_finishes() -> None:
    plan = planned("-c", "import sys, torch\nx = torch.ones(1, device='cuda')\nsys.exit(0)")
    assert plan["finished"] and {each["fits"] for each in plan["fits"]} == {"yes"}


def test_the_status_of_a_program_that_gave_up_is_shown() -> None:
    done = run_command("plan", "-c", "import sys\nsys.exit('no data')")
    assert done.returncode == 1 and done.stderr == "no data\n"
    assert "The program did not finish: exit status 1 at <string>:2.\n" in done.stdout
    assert "asked for no memory" not in done.stdout


def test_weights_that_cannot_be_had(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "def from_pretrained(name):\n    raise OSError('no connection')\nfrom_pretrained('model')\n"
    )
    done = run_command("plan", str(program))
    assert "A plan needs no weights" in done.stdout and "HF_HUB_OFFLINE=1" in done.stdout


@pytest.mark.sampled(3, of="plans of programs")
def test_the_picture_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(""))
    for ending in ("html", "json"):
        command = [
            sys.executable,
            "-m",
            "torchdevice",
            "plan",
            "--target",
            "simulated:cuda:2",
            f"--report=r.{ending}",
        ]
        done = subprocess.run(
            [*command, "train.py"], capture_output=True, text=True, timeout=300, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    page = (tmp_path / "r.html").read_text()
    (caption,) = re.findall("<figcaption>(.*)</figcaption>", page)
    assert caption == "cuda:0: 16 GiB at the peak, 16 GiB with fragments, at train.py:5"
    assert "<p>It needs 16.50 GiB, with 512.00 MiB for CUDA itself. The smallest GPU" in page
    drawn = re.findall('<polygon class="([a-z-]+)" points="([^"]*)"', page)
    assert [kind for kind, _ in drawn] == [kind.replace(" ", "-") for kind in reversed(KINDS)]
    for _, points in drawn:
        places = [tuple(map(float, each.split(","))) for each in points.split()]
        assert len(places) == COLUMNS + 2 and all(
            0 <= x <= COLUMNS and 0 <= y <= 100 for x, y in places
        )
    assert min(y for _, y in places) < 1, "the weights alone reach the top"
    report = torchdevice.Report.from_dict(json.loads((tmp_path / "r.json").read_text()))
    assert (
        report.plan["devices"][0]["weights"] == 16 << 30
        and len(report.plan["over time"]["cuda:0"]) == COLUMNS
    )


@pytest.mark.sampled(3, of="plans of programs")
def test_no_picture_where_no_memory_was_asked_for(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torchdevice",
        "plan",
        "--report=r.html",
        "-c",
        "import torch; torch.zeros(2)",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0 and "The program asked for no memory of a GPU." in done.stdout, (
        done.stderr
    )
    page = (tmp_path / "r.html").read_text()
    assert "<figure" not in page and "NVIDIA" not in page, "nothing is known of what fits"


LOOP = """
import torch
x = torch.zeros(1 << 20, device="cuda")
print("looping", flush=True)
while True:
    pass
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("flags", [(), ("--fits", "t4")])
def test_the_plan_is_shown_though_ctrl_c_was_pressed_twice(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    # A shell lets a command in the background ignore the signal, and tests may be in one.
    start = "import os, signal, sys; signal.signal(2, signal.default_int_handler); "
    start += "os.execv(sys.executable, [sys.executable, '-m', 'torchdevice', *sys.argv[1:]])"
    command = [sys.executable, "-c", start, "plan", *flags, "loop.py"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **piped, text=True, cwd=tmp_path) as process:
        lines = iter(process.stdout.readline, "")
        assert "looping\n" in lines
        process.send_signal(signal.SIGINT)
        next(line for line in lines if line.startswith("Traceback"))
        process.send_signal(signal.SIGINT)
        printed = "".join(lines)
    assert "The program did not finish: KeyboardInterrupt at loop.py:" in printed
    assert "It needs at least 516.00 MiB" in printed and "Exception ignored" not in printed


@pytest.mark.parametrize("flags", [(), ("--world-size", "4")])
def test_the_number_of_gpus_needs_no_target(flags: tuple[str, ...]) -> None:
    program = "import torch; torch.ones(8, device='cuda:2'); print(torch.cuda.device_count())"
    done = run_command("plan", "--devices", "3", *flags, "-c", program)
    assert done.returncode == 0 and done.stdout.startswith("3\n"), done.stderr
    assert "peak of cuda:2 at" in done.stdout


def test_a_program_that_ends_without_a_plan() -> None:
    done = run_command("plan", "--fits", "t4", "-c", "import os; os._exit(0)")
    assert done.returncode == 1 and "the program ended without a plan" in done.stderr
    done = run_command("plan")
    assert done.returncode == 2 and "or --model NAME" in done.stderr


@pytest.mark.parametrize(("flags", "status"), [((), 0), (("--fits", "t4"), 1)])
def test_a_change_that_was_not_made_is_named(flags: tuple[str, ...], status: int) -> None:
    program = "import torch; torch.zeros(9, device='cuda')"
    done = run_command("plan", *flags, "--change", "lora+8-bit", "-c", program)
    assert done.returncode == status, done.stderr
    assert "The plan is without lora and 8-bit: the program hands no model" in done.stdout
    assert ("Failed: The plan is without " in done.stdout) is bool(status)
