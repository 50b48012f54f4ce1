"""Ways in which CUDA programs break without CUDA, a test per row of docs/breakages.md.

Only rows that concern a CPU target have a test. Each test is named after its row.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OUT_OF_TREE, plain_torch
from places import ROOT
from processes import free_port, run_program

import torchdevice
from torchdevice.errors import NotSupportedError

pytestmark = pytest.mark.usefixtures("cuda")

NO_CUDA = (AssertionError, RuntimeError)
"""What plain torch raises: "Torch not compiled with CUDA enabled", or "Found no NVIDIA driver" in a
CUDA build.
"""


def fails_without_a_scope(call: Any) -> None:
    with plain_torch(), pytest.raises((*NO_CUDA, AttributeError, TypeError, ValueError)):
        call()


def test_row_01_moves_and_factories(kind: str) -> None:
    for call in (
        lambda: torch.ones(1).cuda(),
        lambda: torch.nn.Linear(1, 1).cuda(),
        lambda: torch.ones(1).to("cuda"),
        lambda: torch.zeros(1, device="cuda:0"),
        lambda: torch.nn.Linear(1, 1, device="cuda"),
    ):
        fails_without_a_scope(call)
        call()
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(1).device.type == kind
    finally:
        torch.set_default_device(None)


def test_row_02_information_at_import() -> None:
    for call in (
        torch.cuda.get_device_capability,
        lambda: torch.cuda.get_device_properties(0).total_memory,
        lambda: torch.cuda.get_device_name(0),
        torch.cuda.current_device,
    ):
        fails_without_a_scope(call)
        assert call() is not None


def test_row_04_packages_that_need_cuda_are_stood_in_for_where_a_program_imports_them() -> None:
    """Libraries choose kernels by the packages they find, and keep those without them."""
    for name in ("flash_attn", "xformers", "apex", "mamba_ssm"):
        with plain_torch():
            assert importlib.util.find_spec(name) is None
        importlib.import_module(name)
    transformers = pytest.importorskip("transformers", reason="install with the [hf] extra")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=9, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).cuda()
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert model(torch.tensor([[1, 2]], device="cuda")).logits.shape == (1, 2, 9)


@pytest.mark.sampled(1)
def test_row_05_nccl(tmp_path: Path) -> None:
    result = run_program(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("nccl", rank=0, world_size=1)
        assert dist.get_backend() == "nccl" and dist.is_nccl_available()
        x = torch.ones(3, device="cuda")
        dist.all_reduce(x)
        group = dist.new_group([0])
        assert dist.get_backend(group) == "nccl"
        dist.barrier()
        print(x.tolist())
        dist.destroy_process_group()
        """,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
    )
    assert result.stdout.splitlines()[-1] == "[1.0, 1.0, 1.0]", result.stderr


def test_row_06_checkpoints_of_a_cuda_machine(tmp_path: Path) -> None:
    from test_data import tagged_cuda

    path = tagged_cuda({"w": torch.ones(2)}, tmp_path / "x.pt")
    for options in (
        {},
        {"map_location": "cuda"},
        {"map_location": lambda storage, location: storage.cuda(0)},
    ):
        assert torch.load(path, **options)["w"].tolist() == [1.0, 1.0]


def test_row_07_set_device(target: str) -> None:
    fails_without_a_scope(lambda: torch.cuda.set_device(0))
    torch.cuda.set_device(0)
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    with (
        torchdevice.portable(target, devices=2),
        pytest.raises(RuntimeError, match="invalid device ordinal"),
    ):
        torch.cuda.set_device(2)


def test_row_09_autocast_is_not_silently_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (
                torch.nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda")).dtype
                is torch.bfloat16
            )


def test_row_10_libraries_accept_fp16(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="install with the [hf] extra")
    assert transformers.TrainingArguments(str(tmp_path), fp16=True).fp16


def test_row_13_out_of_memory() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\."):
        torch.empty(2**60, dtype=torch.uint8, device="cuda")


def test_row_14_device_count_is_not_zero() -> None:
    assert 64 // torch.cuda.device_count() == 64 and 3 % torch.cuda.device_count() == 0


@pytest.mark.usefixtures("no_collections")
def test_row_17_memory_figures() -> None:
    torch.cuda.reset_peak_memory_stats()
    # On a CPU the figures are the process's. It gets memory of this size from the system, not from
    # what others freed.
    x = torch.ones(2**26, device="cuda")
    allocated = torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_allocated() >= allocated > x.nbytes / 2
    assert torch.cuda.memory_stats()["active_bytes.all.current"] > 0
    assert torch.cuda.mem_get_info()[1] > 0 and torch.cuda.memory_summary()


def test_row_19_bfloat16_is_supported() -> None:
    assert torch.cuda.is_available() and torch.cuda.is_bf16_supported()


@pytest.mark.usefixtures("no_collections")
def test_row_20_pinning() -> None:
    fails_without_a_scope(lambda: torch.ones(1).pin_memory())
    assert torch.ones(1).pin_memory().is_pinned() and torch.empty(1, pin_memory=True).is_pinned()


def test_row_21_generators() -> None:
    fails_without_a_scope(lambda: torch.Generator(device="cuda"))
    generator = torch.Generator(device="cuda").manual_seed(0)
    assert torch.randperm(4, generator=generator, device="cuda").numel() == 4


def test_row_22_streams_and_events() -> None:
    fails_without_a_scope(torch.cuda.Stream)
    stream, start = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        x = torch.randn(300, 300, device="cuda") @ torch.randn(300, 300, device="cuda")
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream())
    end = torch.cuda.Event(enable_timing=True)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_row_23_legacy_types() -> None:
    fails_without_a_scope(lambda: torch.cuda.FloatTensor(2))
    x = torch.cuda.FloatTensor([1.0])
    assert (
        isinstance(x, torch.cuda.FloatTensor)
        and x.type("torch.cuda.HalfTensor").dtype is torch.float16
    )


@pytest.mark.lacked_by(
    OUT_OF_TREE, "failure of numbers without a scope: torch takes them for its ordinals"
)
def test_row_24_ints(kind: str) -> None:
    for call in (lambda: torch.ones(1).to(0), lambda: torch.zeros(1, device=0)):
        fails_without_a_scope(call)
        call()
    assert torch.device(0).type == kind
    assert torch.nn.Linear(1, 1).to(0).weight.device.type == kind


def test_row_25_lightning_finds_a_gpu(kind: str) -> None:
    lightning = pytest.importorskip("lightning", reason="install with the [test] extra")
    for accelerator in ("gpu", "cuda"):
        assert lightning.Fabric(accelerator=accelerator, devices=1).device.type == kind


def test_row_26_device_map(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="install with the [hf] extra")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=9, bos_token_id=1, eos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    for device_map in ("cuda", "auto", {"": 0}):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert {p.device.type for p in model.parameters()} == {kind}


def test_row_33_compile() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x + torch.ones(2, device="cuda")).cuda() * 2

    for backend in ("eager", "aot_eager", "inductor"):
        compiled = torch.compile(f, backend=backend)
        assert compiled(torch.ones(2, device="cuda")).tolist() == [4.0, 4.0]
        torch._dynamo.reset()


@pytest.mark.sampled(1)
def test_row_33_compile_of_operators_not_called_before(tmp_path: Path) -> None:
    result = run_program(
        tmp_path,
        """
        import torch
        compiled = torch.compile(lambda x: (x * 2).atan().erf().cuda(), backend="eager")
        print(compiled(torch.zeros(2, device="cuda")).tolist())
        """,
    )
    assert result.stdout == "[0.0, 0.0]\n", result.stderr[-2000:]


def test_row_34_graphs() -> None:
    x, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        y = x * 2
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [6.0, 6.0] and not torch.cuda.is_current_stream_capturing()
    layer = torch.nn.Linear(2, 2).cuda()
    graphed = torch.cuda.make_graphed_callables(layer, (torch.ones(1, 2, device="cuda"),))
    x = torch.ones(1, 2, device="cuda")
    assert torch.equal(graphed(x), layer(x))


def test_row_35_cuda_extensions_are_refused_by_name() -> None:
    from torch.utils import cpp_extension

    with pytest.raises(OSError, match="the extension 'x' is not supported"):
        cpp_extension.CUDAExtension("x", ["x.cu"])
    with pytest.raises(OSError, match="the extension 'x' is not supported"):
        cpp_extension.load_inline("x", "", with_cuda=True)


def test_row_36_bf16_and_tf32_arguments(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="install with the [hf] extra")
    assert transformers.TrainingArguments(str(tmp_path), bf16=True).bf16
    assert torch.cuda.get_device_capability() >= (8, 0)


def test_row_37_versions() -> None:
    assert torch.version.cuda.split(".")[0].isdigit()
    assert len(torch.cuda.nccl.version()) >= 2 and torch.backends.cudnn.version() >= 8000


def test_row_38_random_state() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(2, device="cuda"))
    assert len(torch.cuda.get_rng_state_all()) == 1
    with torch.random.fork_rng(devices=[0]):
        torch.rand(1)
    with pytest.raises(RuntimeError, match=r"16 bytes is that of a CUDA generator"):
        torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))


def test_row_39_grad_scaler_is_enabled() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.amp.GradScaler("cuda").is_enabled()


def test_row_45_data_parallel(kind: str) -> None:
    model = torch.nn.Linear(2, 2)
    for options in ({}, {"device_ids": [0]}, *([{"device_ids": [0, 1]}] if kind == "cpu" else [])):
        parallel = torch.nn.DataParallel(model, **options).cuda()
        x = torch.ones(3, 2, device="cuda")
        assert torch.equal(parallel(x), model(x))
        assert parallel.module is model
    scope = torchdevice.current()
    reported = scope is not None and any(
        "DataParallel" in entry.requested for entry in scope.journal.degraded
    )
    assert reported == (kind == "cpu")


def test_row_46_second_device(chosen: str, kind: str) -> None:
    """The ordinal is folded onto the first device, unless simulated ones are counted."""
    with torchdevice.portable(devices=None if kind == "cpu" else 2):
        first, second = torch.nn.Linear(2, 2).to("cuda:0"), torch.nn.Linear(2, 2).to("cuda:1")
        assert second(first(torch.ones(1, 2).to("cuda:0")).to("cuda:1")).shape == (1, 2)


def test_row_47_torchscript(tmp_path: Path) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, device="cuda:0")

    def scripted(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return inner(x).to("cuda")
        return torch.zeros(2, device=torch.device("cuda"))

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.to("cuda")) + torch.zeros(2, device="cuda")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = torch.jit.script(scripted)
        ones = torch.ones(2, device="cuda")
        assert function(ones).tolist() == [2.0, 2.0] and function(-ones).tolist() == [0.0, 0.0]
        with plain_torch():
            elsewhere = torch.jit.script(Module())
            torch.jit.save(elsewhere, tmp_path / "m.pt")
        for options in ({}, {"map_location": "cuda"}, {"map_location": torch.device("cuda:0")}):
            loaded = torch.jit.load(tmp_path / "m.pt", **options)
            assert torch.equal(loaded(torch.ones(1, 2)).cpu(), elsewhere.inner(torch.ones(1, 2)))
        traced = torch.jit.trace(
            lambda x: x.cuda() + torch.ones(2, device="cuda"), (torch.ones(2),)
        )
        assert traced(torch.ones(2)).tolist() == [2.0, 2.0]


def test_row_48_nvtx() -> None:
    torch.cuda.nvtx.range_push("forward")
    torch.cuda.nvtx.range_pop()


def test_row_49_utilization() -> None:
    assert 0 <= torch.cuda.utilization() <= 100


def test_row_50_optimizers() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    for options in ({"fused": True}, {"capturable": True}, {"foreach": True}):
        optimizer = torch.optim.AdamW([weight], **options)
        weight.sum().backward()
        optimizer.step()


def test_row_51_guards() -> None:
    assert torch.cuda.is_available()


def test_row_52_a_device_that_was_a_string_stays_one() -> None:
    device = "cuda:0"
    device_type = "cuda" if "cuda" in device else "cpu"
    with torch.autocast(device_type=device_type, dtype=torch.bfloat16):
        assert (
            torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)
        ).dtype is torch.bfloat16


@pytest.mark.usefixtures("no_collections")
def test_row_53_tensors_between_processes(kind: str) -> None:
    import torch.multiprocessing as mp

    context = mp.get_context("fork")
    queue, received = context.Queue(), context.Event()
    process = context.Process(
        target=lambda: (queue.put(torch.ones(2, device="cuda")), received.wait(60))
    )
    process.start()
    arrived = queue.get(timeout=60)
    assert arrived.tolist() == [1.0, 1.0] and arrived.device.type == kind
    received.set()
    process.join()
    if kind == "mps":  # as on a Mac
        with pytest.raises(RuntimeError, match="only available on CPU"):
            torch.ones(2, device="cuda").share_memory_()
    else:
        assert torch.ones(2, device="cuda").share_memory_().is_shared()


@pytest.mark.sampled(1)
def test_row_54_distributed_data_parallel(tmp_path: Path) -> None:
    result = run_program(
        tmp_path,
        """
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp
        from torch.nn.parallel import DistributedDataParallel as DDP

        def worker(rank, world):
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            dist.init_process_group("nccl", rank=rank, world_size=world)
            torch.cuda.set_device(rank)
            torch.manual_seed(0)
            model = DDP(torch.nn.Linear(2, 1).cuda(rank), device_ids=[rank], output_device=rank)
            loss = model(torch.full((4, 2), float(rank + 1)).cuda(rank)).sum()
            loss.backward()
            if rank == 0:
                print(model.module.weight.grad.tolist(), dist.get_backend())
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(worker, args=(2,), nprocs=2)
        """,
        options=["--devices", "2"],
        MASTER_PORT=free_port(),
    )
    assert "[[6.0, 6.0]] nccl" in result.stdout.splitlines(), result.stderr[-2000:]


def test_row_55_flags_are_stored() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = not before
        assert torch.backends.cuda.matmul.allow_tf32 is not before
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    with torch.backends.cudnn.flags(benchmark=True, deterministic=True):
        assert torch.backends.cudnn.benchmark and torch.backends.cudnn.deterministic
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        q = torch.ones(1, 1, 4, 8, device="cuda", dtype=torch.float16)
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape
    assert torch.backends.cuda.cufft_plan_cache.max_size >= 0
    torch.backends.cuda.cufft_plan_cache[0].max_size = 10
    torch.backends.cuda.cufft_plan_cache.clear()
    torch.backends.cuda.preferred_linalg_library("magma")
    torch.backends.cuda.preferred_linalg_library("default")


def test_row_56_profiler() -> None:
    from torch.profiler import ProfilerActivity, profile

    for activities in ([ProfilerActivity.CPU, ProfilerActivity.CUDA], [ProfilerActivity.CUDA]):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*CUDA.*")
            with profile(activities=activities) as profiler:
                torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
        for key in (
            "cuda_time_total",
            "self_cuda_time_total",
            "device_time_total",
            "cpu_time_total",
        ):
            assert "aten::mm" in profiler.key_averages().table(sort_by=key)


def test_row_57_synchronize() -> None:
    fails_without_a_scope(torch.cuda.synchronize)
    torch.cuda.synchronize()
    torch.cuda.synchronize("cuda:0")
    torch.accelerator.synchronize()


def test_row_58_cleaning_up() -> None:
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()


def test_row_63_low_level() -> None:
    for call in (
        lambda: torch.cuda.ExternalStream(1),
        lambda: torch.cuda.memory.CUDAPluggableAllocator("none.so", "alloc", "free"),
    ):
        with pytest.raises(NotSupportedError):
            call()
    torch.cuda._sleep(1000)


def test_row_64_private_names() -> None:
    torch.cuda._lazy_init()
    ran: list[int] = []
    torch.cuda._lazy_call(lambda: ran.append(1))
    assert ran and not torch.cuda._is_in_bad_fork() and not torch._C._cuda_isInBadFork()
    torch.cuda.default_generators[0].set_state(torch.cuda.default_generators[0].get_state())


def test_every_tested_row_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "breakages.md").read_text()
    documented = re.findall(r"^\| (\d+) \|.+\|.+\|.+\|$", page, re.MULTILINE)
    assert documented == [str(row) for row in range(1, len(documented) + 1)]
    tested = {
        str(int(number))
        for number in re.findall(r"^def test_row_(\d+)_", Path(__file__).read_text(), re.MULTILINE)
    }
    assert len(tested) > 40 and tested <= set(documented)
