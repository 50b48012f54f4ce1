"""Programs for Apple's MPS, on CPU, simulated devices and, with recorded calls, on CUDA."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import run_program, run_python

import torchdevice
from torchdevice.errors import NotSupportedError
from torchdevice.kernel.devices import module as module_runtime
from torchdevice.kernel.devices import registry
from torchdevice.scope import target_selection

MAC = "simulated:mps"
SIMULATES = torch._C._get_privateuse1_backend_name() != "privateuseone"
NEEDS_GPU = pytest.mark.skipif(
    SIMULATES or not torch.cuda.is_available(), reason="needs a GPU, and --targets cuda"
)
GPU = pytest.param("cuda", marks=NEEDS_GPU)
TARGETS = ("cpu", "simulated:cuda", MAC, GPU)

pytestmark = pytest.mark.parametrize("target", TARGETS)


@pytest.fixture
def mps(target: str) -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target, written_for="mps") as scope:
        yield scope


@pytest.fixture
def kind(target: str) -> str:
    """The target's own device type, also of the Mac in the box, which is ``mps`` by default."""
    return target.partition(":")[0]


def test_what_is_available(mps: torchdevice.Scope, target: str) -> None:
    assert torch.backends.mps.is_available() and torch.backends.mps.is_built()
    assert torch.mps.is_available() and torch.mps.device_count() == 1
    assert torch.cuda.is_available() == (target == "cuda") == (torch.cuda.device_count() > 0)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None and accelerator.type == "mps"
    assert torch.get_device_module("mps") is torch.mps is torch.get_device_module()
    assert torch.backends.mps.is_macos_or_newer(13, 3) and not torch.backends.mps.is_macos_or_newer(
        99, 0
    )
    assert not torch._C._mps_is_in_bad_fork()
    assert torch.backends.mps.get_name() and torch.backends.mps.get_core_count() >= 1


def test_nothing_of_it_stays(target: str) -> None:
    for _ in range(2):
        with torchdevice.portable(target, written_for="mps"):
            assert (
                torch.backends.mps.is_available()
                and torch.mps._get_default_mps_generator() is not None
            )
        assert not torch.backends.mps.is_available() and not torch.backends.mps.is_built()
        assert torch.mps._default_mps_generator is None
        with torchdevice.portable(target):
            assert (
                torch.backends.mps.is_available() == (target == MAC) and torch.cuda.is_available()
            )


@pytest.mark.usefixtures("no_collections")
def test_mps_is_another_device_until_it_is_used(target: str) -> None:
    device = torch.device("mps")
    with torchdevice.portable(target, written_for="any"):
        x = torch.ones(1, device="cuda")
        assert (
            device.type == "mps"
            and x.device != device
            and x.device == torch.ones(1, device=device).device
        )
        assert torch.Generator(device).device == x.device
        assert torch.mps.current_allocated_memory() >= 0
        assert torch.backends.mps.is_available() == (target == MAC)

        @torch.compile(backend="eager", fullgraph=True)
        def compiled(x: torch.Tensor) -> torch.Tensor:
            return (
                x + 1
                if x.device == torch.device("mps")
                else torch.zeros_like(x, device=torch.device("mps"))
            )

        assert compiled(x).tolist() == [0.0] and compiled(x).device == x.device


def test_a_training_loop(mps: torchdevice.Scope, kind: str) -> None:
    device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("mps")
    x, y = torch.randn(32, 8).to("mps"), torch.randn(32, 1, device="mps:0")
    losses = []
    for _ in range(20):
        with torch.autocast(device_type="mps", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and x.device.type == kind
    torch.mps.synchronize()
    torch.mps.empty_cache()


def test_random_numbers(mps: torchdevice.Scope) -> None:
    for seed in (torch.mps.manual_seed, torch.manual_seed):
        seed(5)
        first = torch.rand(4, device="mps")
        state = torch.mps.get_rng_state()
        second = torch.rand(4, device="mps")
        seed(5)
        assert torch.equal(first, torch.rand(4, device="mps"))
        torch.mps.set_rng_state(state)
        assert torch.equal(second, torch.rand(4, device="mps"))
    generator = torch.Generator(device="mps").manual_seed(1)
    numbers = torch.rand(3, device="mps", generator=generator)
    assert torch.equal(numbers, torch.rand(3, device="mps", generator=generator.manual_seed(1)))


@pytest.mark.usefixtures("no_collections")
def test_memory(mps: torchdevice.Scope, target: str) -> None:
    before = torch.mps.current_allocated_memory()
    # Beyond what malloc takes from memory that was freed before.
    kept = torch.ones(1 << 24, device="mps")
    assert torch.mps.current_allocated_memory() - before >= kept.nbytes * 0.9
    current = torch.mps.current_allocated_memory()  # first: the process grows between the two calls
    assert torch.mps.driver_allocated_memory() >= current
    assert torch._C._mps_maxBufferLength() == torch.mps.recommended_max_memory() > kept.nbytes
    with pytest.raises(ValueError, match="Invalid fraction value"):
        torch.mps.set_per_process_memory_fraction(3.0)
    if target != "cpu":
        torch.mps.set_per_process_memory_fraction(1e-9)
        with pytest.raises(RuntimeError, match=r"^(CUDA|MPS backend) out of memory"):
            torch.ones(8 << 20, device="mps")
        torch.mps.set_per_process_memory_fraction(0.0)
        torch.ones(8 << 20, device="mps")


def test_events(mps: torchdevice.Scope) -> None:
    start, end = torch.mps.Event(enable_timing=True), torch.mps.event.Event(enable_timing=True)
    assert start.query()
    start.synchronize()  # returns at once: the event is not recorded
    start.record()
    torch.ones(300, 300, device="mps") @ torch.ones(300, 300, device="mps")
    end.record()
    end.wait()
    end.synchronize()
    assert end.query() and 0 < start.elapsed_time(end) < 60_000
    with pytest.raises(RuntimeError, match="not created with argument 'enable_timing=True'"):
        torch.mps.Event().elapsed_time(end)
    with pytest.raises(RuntimeError, match="was not recorded after start event"):
        end.elapsed_time(start)


def test_an_event_outlives_its_scope(target: str, recwarn: pytest.WarningsRecorder) -> None:
    with torchdevice.portable(target, written_for="mps"):
        event = torch.mps.Event()
    del event  # torch's own release would raise here, unseen
    assert not recwarn.list


@pytest.mark.skipif(
    not hasattr(torch.mps, "Stream"), reason="torch 2.14 and later have streams of MPS"
)
def test_there_is_one_stream(mps: torchdevice.Scope) -> None:
    only = torch.mps.current_stream()
    assert only == torch.mps.default_stream()
    with torch.mps.stream(only), torch.mps.stream(None):
        assert torch.ones(2, device="mps").sum() == 2
    with pytest.raises(NotSupportedError, match="in one order"):
        torch.mps.Stream()


def test_functions_that_need_metal_raise(mps: torchdevice.Scope) -> None:
    with pytest.raises(NotSupportedError, match="needs Metal"):
        torch.mps.compile_shader("kernel void f() {}")
    with torch.mps.profiler.profile(mode="interval", wait_until_completed=True):
        torch.ones(2, device="mps")


def test_float64(mps: torchdevice.Scope, target: str) -> None:
    """Programs for MPS expect its error for float64; a target that has float64 provides it."""
    x = torch.ones(2, dtype=torch.float64)
    if target == MAC:
        with pytest.raises(TypeError, match="doesn't support float64"):
            x.to("mps")
    else:
        assert x.to("mps").dtype is torch.float64


def test_saved_files(mps: torchdevice.Scope, kind: str, tmp_path: Path) -> None:
    torch.save(torch.ones(3, device="mps"), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", map_location="mps").device.type == kind
    assert torch.load(tmp_path / "x.pt", map_location=torch.device("mps")).tolist() == [1.0] * 3


SCRIPT = """
    import torch
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    x = torch.ones(3, device=device)
    torch.mps.synchronize()
    print(device, x.device.type, torch.cuda.is_available(), float(x.sum()))
"""


@pytest.mark.sampled(1)
def test_the_command_and_the_environment(target: str, kind: str, tmp_path: Path) -> None:
    expected = f"mps {kind} {target == 'cuda'} 3.0"
    ran = run_program(tmp_path, SCRIPT, options=["--target", target, "--written-for", "mps"])
    assert ran.stdout.strip() == expected, ran.stderr
    environment = {
        "TORCHDEVICE": "1",
        "TORCHDEVICE_TARGET": target,
        "TORCHDEVICE_WRITTEN_FOR": "mps",
    }
    ran = run_python("-c", textwrap.dedent(SCRIPT), cwd=tmp_path, **environment)
    assert ran.stdout.strip() == expected, ran.stderr


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has a GPU, on which the tests above run"
)
class TestOnCuda:
    """CUDA looks available without a GPU. Its calls are recorded and not carried out."""

    @pytest.fixture(autouse=True)
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Cuda(module_runtime.ModuleRuntime):
            def is_available(self) -> bool:
                return True

            def device_count(self) -> int:
                return 2

            def default_generator(self, index: int) -> torch.Generator:
                return torch.default_generator

            def name(self, index: int) -> str:
                return "a GPU"

        native = Cuda("cuda")
        monkeypatch.setattr(
            target_selection,
            "runtime",
            lambda kind: native if kind == "cuda" else registry.runtime(kind),
        )

    def test_mps_is_cuda_and_cuda_is_torchs_own(self, target: str) -> None:
        own = {
            name: vars(torch._C).get(name)
            for name in ("_cuda_getDevice", "_cuda_init", "_accelerator_setStream")
        }
        stream_class = torch.cuda.Stream.__new__
        with torchdevice.portable("cuda", written_for="mps") as scope:
            assert not scope._resolved().names.is_native
            assert [str(scope._resolved().redirect(d)) for d in ("mps", "mps:0")] == ["cuda:0"] * 2
            assert torch.device("mps") == torch.device("cuda:0")
            assert (
                scope._resolved().redirect("cuda:1") is None
                and scope._resolved().redirect("cpu") is None
            )
            assert torch.backends.mps.is_available() and torch.backends.mps.get_name() == "a GPU"
            for name, value in own.items():
                assert getattr(torch._C, name, None) is value
            assert not hasattr(torch.cuda._tls, "is_initializing")
            with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA|cuda"):
                torch.ones(2, device="mps")
            with pytest.raises((AssertionError, RuntimeError, AttributeError)):
                torch.cuda.current_device()
        assert torch.cuda.Stream.__new__ is stream_class

    def test_a_cuda_program_needs_nothing(self, target: str) -> None:
        with torchdevice.portable("cuda") as scope:
            assert (
                scope._resolved().names.is_native
                and not torch.overrides._get_current_function_mode_stack()
            )


def test_what_a_program_is_written_for_is_checked(target: str) -> None:
    with pytest.raises(ValueError, match="written_for='metal' is not known"):
        torchdevice.portable(target, written_for="metal")  # type: ignore[call-overload]
