"""Programs for NCCL with several processes, as torchrun starts them."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted_frames import frames_of
from places import PROGRAMS
from processes import free_port, run_command, run_torch_python

import torchdevice
from torchdevice.kernel import thread_state
from torchdevice.scope import activation
from torchdevice.tools.cli import main, programs
from torchdevice.torch_modules.distributed import nccl_group, process_groups


def torchrun(
    target: str, program: Path, *arguments: str, options: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in two processes, on two devices if the target is simulated."""
    devices = f"{target}:2" if target == "simulated:cuda" else target
    return run_command(
        "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options, str(program), *arguments,
        TORCHDEVICE_TARGET=devices, **environment,
    )  # fmt: skip


@pytest.mark.one_engine
@pytest.mark.parametrize("there", [True, False])
def test_a_build_without_process_groups_gets_no_patches_of_them(there: bool) -> None:
    code = f"import torch.distributed as dist; dist.is_available = lambda: {there}; "
    code += (
        "from torchdevice.scope import installed; from torchdevice.kernel.bindings import "
        "REPLACED; "
    )
    code += "owners = [getattr(each, 'owner', 0) for each in REPLACED]; "
    code += (
        "print(dist in owners, any('init_process' in str(getattr(each, '_function', '')) for each "
        "in REPLACED))"
    )
    done = run_torch_python("-c", code)
    assert done.stdout.split() == [str(there)] * 2, done.stderr


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "another dtype": (
        lambda: dist.reduce_scatter_tensor(ones(3, dtype=torch.float16), ones(3)),
        TypeError,
        "input tensor must be the same type as the output tensor.",
    ),
    "another size": (
        lambda: dist.reduce_scatter_tensor(ones(2), ones(3)),
        ValueError,
        "input tensor must be the same size as output size times world size",
    ),
    "sizes of parts": (
        lambda: dist.all_to_all_single(ones(3), ones(3), [3], [2]),
        RuntimeError,
        "Split sizes doesn't match total dim 0 size",
    ),
    "integers of 16 bits": (
        lambda: dist.all_reduce(ones(3, dtype=torch.int16)),
        TypeError,
        "Input tensor data type is not supported for NCCL process group: Short",
    ),
    "integers of 16 bits that are moved": (
        lambda: dist.broadcast(ones(3, dtype=torch.uint16), 0),
        TypeError,
        "Input tensor data type is not supported for NCCL process group: UInt16",
    ),
    "bits": (
        lambda: dist.all_reduce(ones(3), op=dist.ReduceOp.BAND),
        ValueError,
        "Cannot use ReduceOp.BAND with NCCL",
    ),
    "a mean of bools": (
        lambda: dist.all_reduce(ones(3, dtype=torch.bool), op=dist.ReduceOp.AVG),
        TypeError,
        "Cannot use ReduceOp.AVG with boolean inputs",
    ),
    "a greatest complex number": (
        lambda: dist.reduce(ones(3, dtype=torch.complex64), 0, op=dist.ReduceOp.MAX),
        RuntimeError,
        "does not support ReduceOp.MAX on complex tensors",
    ),
    "sparse": (
        lambda: dist.broadcast(ones(2, 2).to_sparse(), 0),
        ValueError,
        "Tensors must be CUDA and dense",
    ),
    "without memory": (
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
        RuntimeError,
        "No backend type associated with device type meta",
    ),
}
"""What NCCL refuses of a group of any size, and its words."""


# From torch 2.13 on.
@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_scatter_tensor` is deprecated")
class TestGroupOfOneRank:
    """A group in this process."""

    @pytest.fixture(autouse=True)
    def group(self, cuda: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        # torch keeps the name of the last group's backend after the group has ended.
        monkeypatch.setattr(dist.distributed_c10d, "_backend", dist.distributed_c10d._backend)
        dist.init_process_group(
            "nccl", store=dist.HashStore(), rank=0, world_size=1, pg_options=nccl_options()
        )
        yield dist.distributed_c10d._get_default_group()
        if dist.is_initialized():
            dist.destroy_process_group()

    @pytest.mark.parametrize("case", REFUSED)
    def test_what_nccl_refuses_is_refused_in_its_words(self, case: str) -> None:
        call, kind, said = REFUSED[case]
        with pytest.raises(kind, match=re.escape(said)):
            call()

    def test_floats_of_8_bits_are_moved_and_not_added(self, kind: str) -> None:
        if kind == "mps":
            pytest.skip("a Mac has none")
        values = ones(3, dtype=torch.float8_e4m3fn)
        dist.broadcast(values, 0)
        with pytest.raises(RuntimeError, match="Float8 dtypes are not"):
            dist.all_reduce(values)

    def test_tensors_on_the_cpu_are_those_of_gloo(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refused = pytest.raises(
            RuntimeError, match="No backend type associated with device type cpu"
        )
        with contextlib.nullcontext() if kind == "cpu" else refused:
            dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        for values in (torch.ones(2), ones(2)):
            dist.all_reduce(values)
            assert values.tolist() == [1, 1]

    def test_work_that_has_finished(self, group: Any) -> None:
        values = ones(3)
        work = dist.all_reduce(values, async_op=True)
        assert work.wait() and work.is_completed() and work.get_future().wait() == [values]
        outputs = [[torch.empty(2, device="cuda"), torch.empty(0, device="cuda")]]
        group.allgather_coalesced(outputs, [ones(2), ones(0)]).wait()
        assert [each.tolist() for each in outputs[0]] == [[1, 1], []]
        nothing = ones(0)
        dist.reduce_scatter_tensor(nothing, ones(0))
        assert nothing.shape == (0,)

    def test_what_torch_asks_of_a_group(self, group: Any, kind: str) -> None:
        named = dist.new_group([0], group_desc="mine", pg_options=nccl_options())
        assert (named.group_desc, group.group_desc, dist.get_backend(named)) == (
            "mine",
            "default_pg",
            "nccl",
        )
        before = group._get_sequence_number_for_group()
        dist.all_reduce(ones(2))
        assert group._get_sequence_number_for_group() > before
        assert torch.device("cuda") in group._device_types
        assert dist.get_default_backend_for_device("cuda") == "nccl"
        own = dist.get_default_backend_for_device(torch.device("cuda", 0))
        assert (
            own == ("gloo" if kind == "cpu" else "nccl")
            and dist.get_default_backend_for_device("cpu") == "gloo"
        )
        with pytest.raises(
            ValueError,
            match=r"only implemented for GLOO|requires a group with a CPU-capable backend",
        ):
            dist.monitored_barrier()

    def test_a_group_with_gloo_has_the_monitored_barrier(self, group: Any) -> None:
        dist.monitored_barrier(dist.new_group([0], backend="gloo"))
        with pytest.raises(ValueError, match="CPU-capable backend"):
            group.monitored_barrier()

    @pytest.mark.filterwarnings(
        "ignore:.*_set_pg_timeout:FutureWarning"
    )  # torch 2.14 and later deprecate it
    def test_what_torch_does_to_groups_of_nccl(self, group: Any) -> None:
        """Functions for them name NCCL's class, which builds without NCCL lack."""
        limit = datetime.timedelta(seconds=9)
        dist.distributed_c10d._set_pg_timeout(limit)
        assert group.gloo.options._timeout == limit
        assert not isinstance(group, dist.ProcessGroupNCCL)
        dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(limit)
        dist.distributed_c10d._abort_process_group()
        assert not dist.is_initialized()

    def test_a_checkpoint_is_written_and_read_on_the_device(self, tmp_path: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.save({"weights": torch.arange(6.0).cuda()}, checkpoint_id=tmp_path)
        found = {"weights": torch.zeros(6).cuda()}
        checkpoint.load(found, checkpoint_id=tmp_path)
        assert (
            found["weights"].tolist() == [0, 1, 2, 3, 4, 5]
            and found["weights"].device == ones(1).device
        )

    def test_a_recorder_written_in_cpp_is_attached_to_no_group_written_in_python(
        self, group: Any
    ) -> None:
        """torch has it from 2.15 on."""
        attached: list[Any] = []
        for each in (group, group.gloo):
            process_groups._attach_flight_recorder(
                thread_state.state.context, attached.append, each
            )  # type: ignore[arg-type]
        assert attached == [group.gloo]


@pytest.mark.one_engine
@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_collective_takes_few_frames_of_python(
    engine: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_backend", dist.distributed_c10d._backend)
    with torchdevice.portable(target, engine=engine, native="never"):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            values = ones(4)
            for _ in range(3):  # the first of a kind go by torch's operator
                dist.all_reduce(values)
            frames = frames_of(lambda: dist.all_reduce(values))[1:]
        finally:
            dist.destroy_process_group()
    assert 0 < len(frames) <= 40, frames


def nccl_options() -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.cga_cluster_size = 2
    return options


@pytest.mark.one_engine
class TestRanksOnOneDevice:
    """NCCL's refusal, of what all ranks say of their devices."""

    def check(self, of_all: list[int]) -> None:
        def gather(mine: torch.Tensor) -> torch.Tensor:
            return torch.cat([mine + each - of_all[1] for each in of_all])

        with torchdevice.simulate():
            nccl_group.check_devices(1, of_all[1], gather)

    def test_two_ranks_on_one_are_refused(self) -> None:
        self.check([0, 1, 2])
        with pytest.raises(
            dist.DistBackendError, match="rank 1 and rank 2 both on CUDA device 4000"
        ):
            self.check([0, 3, 3])

    def test_devices_are_told_apart_by_machine_and_by_what_is_visible(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        identity = nccl_group._identity
        here = identity(1)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
        assert [identity(1), identity(2)] == [here, here + 1] and identity(0) == here + 2
        monkeypatch.setenv("NCCL_HOSTID", "another")
        assert identity(1) not in (here, here + 1, here + 2)


def assert_succeeded(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.sampled(3, of="programs of two ranks")
@pytest.mark.parametrize("backend", ["nccl", "mesh"])  # a mesh begins the group for CPU tensors too
def test_collectives_do_what_nccl_documents(target: str, backend: str) -> None:
    assert_compared(target, backend)


def assert_compared(target: str, backend: str, **environ: str) -> subprocess.CompletedProcess[str]:
    lacking = ["without-float8"] if target == "simulated:mps" else []
    done = torchrun(target, PROGRAMS / "collectives.py", backend, *lacking, **environ)
    assert_succeeded(done)
    assert done.stdout.count("24 cases") == 2, done.stdout
    return done


@pytest.mark.sampled(3, of="programs of two ranks")
@pytest.mark.one_engine
def test_collectives_while_torch_debugs_in_detail(target: str) -> None:
    """torch logs hashes of sent NCCL objects then, which only NCCL builds can make."""
    done = assert_compared(target, "nccl", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert "_object_to_tensor size" in done.stderr


@pytest.mark.sampled(2, of="training in ranks")
@pytest.mark.parametrize(
    "name",
    ["test_ops", "test_script", "test_sync", "test_ddp_comm_hook", "test_distributed_data_loop"],
)
@pytest.mark.one_engine
def test_accelerates_own_tests(target: str, name: str) -> None:
    if name == "test_distributed_data_loop":
        pytest.importorskip("torchdata", reason="install with the [test] extra")
    (accelerate,) = find_spec("accelerate").submodule_search_locations  # type: ignore[union-attr]
    script = Path(accelerate, "test_utils", "scripts", f"{name}.py")
    done = torchrun(target, script, ACCELERATE_DEBUG_MODE="1")
    if name == "test_sync" and "Gradients not in sync" in done.stderr:
        # It draws data without a seed, and compares gradients that may be near 0 to five digits.
        done = torchrun(target, script, ACCELERATE_DEBUG_MODE="1")
    assert_succeeded(done)


@pytest.mark.sampled(2, of="training in ranks")
@pytest.mark.parametrize(
    "cases",
    [
        ["data_parallel", "data_parallel_with_unused_parameters", "zero"],
        ["sharded", "sharded_state"],
        ["fully_sharded", "fully_sharded_from_meta", "checkpoints"],
        ["tensor_parallel", "pipeline"],
        ["context_parallel_attention", "attention_of_distributed_tensors"],
    ],
    ids=", ".join,
)
def test_a_model_trained_in_parallel_has_the_losses_of_one_process(
    target: str, cases: list[str]
) -> None:
    assert_done(torchrun(target, PROGRAMS / "parallel_models.py", *cases), cases)


@pytest.mark.sampled(2, of="training in ranks")
def test_batch_norm_is_synchronized(target: str) -> None:
    whole = "synchronized_batch_norm"
    cases = [whole, f"{whole}_of_unequal_parts", f"{whole}_in_a_group_of_one"]
    assert_done(torchrun(target, PROGRAMS / "parallel_models.py", *cases), cases)


def assert_done(done: subprocess.CompletedProcess[str], cases: list[str]) -> None:
    assert_succeeded(done)
    assert all(f"rank {rank}: {case} done" in done.stdout for rank in (0, 1) for case in cases), (
        done.stdout
    )


LAUNCHED = {
    "trainer": ["torchrun", "--standalone", "--nproc-per-node={ranks}", "hf_trainer.py"],
    "accelerate": [
        "accelerate",
        "launch",
        "--multi_gpu",
        "--num_processes={ranks}",
        "hf_accelerate.py",
    ],
    "lightning": ["lightning_trainer.py"],
    "lightning with fsdp": ["lightning_trainer.py"],
}
"""Scripts in the manner of each library, as its users start them with several ranks."""


def losses_in_ranks(folder: Path, library: str, target: str, ranks: int) -> list[list[float]]:
    """Run a library's script in several ranks, and return each rank's losses."""
    *launcher, script = [word.format(ranks=ranks) for word in LAUNCHED[library]]
    strategy = "fsdp" if library.endswith("fsdp") else "ddp" if ranks > 1 else "auto"
    arguments = [
        str(folder),
        str(8 // ranks),
        *([str(ranks), strategy] if library.startswith("lightning") else []),
    ]
    devices = (
        [f"{target}:{ranks}"] if target == "simulated:cuda" else [target, "--devices", str(ranks)]
    )
    done = run_command(
        "run",
        "--target",
        *devices,
        *(launcher if ranks > 1 else []),
        str(PROGRAMS / script),
        *arguments,
    )
    assert_succeeded(done)
    return [json.loads((folder / f"losses-{rank}").read_text()) for rank in range(ranks)]


def assert_ranks_train_as_one(folder: Path, library: str, target: str, ranks: int) -> None:
    (folder / "one").mkdir()
    (expected,) = losses_in_ranks(folder / "one", library.partition(" ")[0], "cpu", 1)
    for losses in losses_in_ranks(folder, library, target, ranks):
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=1e-5), (
            losses,
            expected,
        )


@pytest.mark.sampled(2, of="training in ranks")
@pytest.mark.one_engine
@pytest.mark.parametrize("library", LAUNCHED)
def test_two_ranks_of_a_library_have_the_losses_of_one(
    target: str, library: str, tmp_path: Path
) -> None:
    assert_ranks_train_as_one(tmp_path, library, target, 2)


@pytest.mark.sampled(0)
@pytest.mark.one_engine
@pytest.mark.parametrize("library", LAUNCHED)
def test_four_ranks_of_a_library_have_the_losses_of_one(
    target: str, library: str, tmp_path: Path
) -> None:
    assert_ranks_train_as_one(tmp_path, library, target, 4)


ON_ONE_DEVICE = """
import os, torch, torch.distributed as dist

dist.init_process_group("nccl")
values = torch.ones(2, device="cuda")
if os.environ["APART"] == "visible":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
try:
    dist.all_reduce(values)
    print(f"sum {values.tolist()}\\n", end="", flush=True)
except dist.DistBackendError as error:
    (note,) = error.__notes__
    assert note.startswith(os.environ["NOTE"]), note
    print(f"refused {str(error).splitlines()[-1]}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.sampled(3, of="programs of two ranks")
@pytest.mark.parametrize("apart", ["no", "visible", "mps"])
def test_two_ranks_on_one_device(tmp_path: Path, apart: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(ON_ONE_DEVICE)
    target = "simulated:mps" if apart == "mps" else "simulated:cuda:2"
    done = run_command(
        "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program),
        TORCHDEVICE_TARGET=target, APART=apart, NOTE="Ranks 0 and 1 both use cuda:0;",
    )  # fmt: skip
    refused = {
        f"Duplicate GPU detected : rank {a} and rank {b} both on CUDA device 1000"
        for a, b in ((0, 1), (1, 0))
    }
    expected = {f"refused {line}" for line in refused} if apart == "no" else {"sum [2.0, 2.0]"}
    assert set(done.stdout.splitlines()) == expected, done.stdout + done.stderr[-4000:]


def assert_losses(folder: Path) -> None:
    found = [json.loads((folder / f"losses-{rank}").read_text()) for rank in (0, 1)]
    assert found[0] == found[1] and torch.allclose(
        torch.tensor(found[0]), losses_of_one_process(), atol=1e-5
    )


@pytest.mark.sampled(1, of="killed ranks")
@pytest.mark.one_engine
def test_a_killed_rank_goes_on_from_its_snapshot(target: str, tmp_path: Path) -> None:
    done = torchrun(target, PROGRAMS / "elastic.py", str(tmp_path), options=["--max-restarts=2"])
    assert_succeeded(done)
    assert "goes on from step 3" in done.stdout and (tmp_path / "killed").exists()
    assert_losses(tmp_path)


@pytest.mark.sampled(1, of="killed ranks")
@pytest.mark.one_engine
def test_a_killed_rank_of_two_agents_goes_on(target: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torchdevice", "run", "--target", target, "-m", "torch.distributed.run", "--nnodes=2",
        "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=two",
        str(PROGRAMS / "elastic.py"), str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as ending:
        agents = [
            ending.enter_context(subprocess.Popen(command, env=environment)) for _ in range(2)
        ]
        for agent in agents:
            ending.callback(agent.kill)
        assert [agent.wait(timeout=250) for agent in agents] == [0, 0]
    assert (tmp_path / "killed").exists()
    assert_losses(tmp_path)


def losses_of_one_process() -> torch.Tensor:
    """Train as tests/programs/elastic.py does."""
    torch.manual_seed(0)
    data = torch.randn(6, 8, 4)
    model = torch.nn.Linear(4, 1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for batch in data:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


IN_RANKS = """
import os, sys, torch, torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("nccl")
total = torch.ones(1, device="cuda")
dist.all_reduce(total)
print(f"{rank} of {total.item():.0f}, {torch.cuda.device_count()} devices, {sys.argv[1:]}{chr(10)}", end="", flush=True)
dist.destroy_process_group()
"""


class TestRanks:
    """``torchdevice run --ranks``, and ``torchdevice run torchrun``."""

    @pytest.mark.sampled(2)
    @pytest.mark.one_engine
    @pytest.mark.parametrize("named", ["script", "module", "torchrun"])
    @pytest.mark.parametrize("devices", [None, "1"])
    def test_a_program_runs_once_for_each_rank(
        self, target: str, named: str, devices: str | None, tmp_path: Path
    ) -> None:
        (tmp_path / "program.py").write_text(IN_RANKS)
        words = ["-m", "program"] if named == "module" else ["program.py"]
        # Two ranks on one simulated device are refused, as on CUDA.
        target = "simulated:mps" if devices and target == "simulated:cuda" else target
        flags = ["--target", target, *(["--devices", devices] if devices else [])]
        if named == "torchrun":
            words = ["torchrun", "--standalone", "--nproc-per-node=2", *words]
        else:
            flags += ["--ranks", "2"]
        done = run_command("run", *flags, *words, "--epochs", "3", cwd=tmp_path)
        count = devices or "2"
        expected = [f"{rank} of 2, {count} devices, ['--epochs', '3']" for rank in (0, 1)]
        assert sorted(done.stdout.splitlines()) == expected, done.stdout + done.stderr[-4000:]

    @pytest.mark.parametrize(
        "words", [["-c", "pass"], ["-"], ["torchrun", "train.py"], ["missing.py"]], ids=" ".join
    )
    def test_what_the_launcher_cannot_start_is_refused(
        self, words: list[str], capsys: pytest.CaptureFixture
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main.main(["run", "--ranks", "2", *words])
        assert ended.value.code == 2
        assert f"--ranks cannot start {words[0]!r} in each rank." in capsys.readouterr().err

    @pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
    def test_a_number_of_ranks_that_is_none_is_refused(
        self, number: str, capsys: pytest.CaptureFixture
    ) -> None:
        with pytest.raises(SystemExit):
            main.main(["run", f"--ranks={number}", "train.py"])
        assert f"{number!r} is not a number of ranks" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("target", "devices", "given"),
        [
            ("cpu", None, 4),
            ("simulated:cuda", None, 4),
            ("simulated", None, 4),
            ("simulated:cuda:2", None, None),
            ("simulated:cuda", 8, 8),
            (None, None, 4),
        ],
    )
    def test_each_rank_has_a_device_where_nothing_says_otherwise(
        self,
        target: str | None,
        devices: int | None,
        given: int | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.delenv("TORCHDEVICE_TARGET", raising=False)
        monkeypatch.delenv("TORCHDEVICE_DEVICES", raising=False)
        options = argparse.Namespace(target=target, devices=devices, ranks=4, rest=["-m", "train"])
        assert programs.launched(options)[-2:] == ["-m", "train"]
        assert options.devices == given

    @pytest.mark.parametrize(
        ("asked", "devices"),
        [
            ({"target": "cpu"}, 4),
            ({"target": "cpu", "devices": 2}, 2),
            ({"target": "simulated:cuda"}, 4),
            ({"target": "simulated:t4:8"}, 8),
            ({"target": "simulated:t4:1"}, 1),
            ({"target": "simulated:mps"}, 4),
            ({"target": "simulated:mps", "written_for": "mps"}, 1),
        ],
    )
    def test_what_torchrun_tells_a_rank_counts_the_devices(
        self, asked: dict[str, Any], devices: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("TORCHDEVICE_TARGET", "TORCHDEVICE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        with activation.Scope(activation.chosen_in_rank(asked)):
            seen = torch.mps if asked.get("written_for") == "mps" else torch.cuda
            assert seen.device_count() == devices
