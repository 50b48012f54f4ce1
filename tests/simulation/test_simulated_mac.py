"""MPS's runtime on a simulated Mac: the outer scope is the Mac, the inner a CUDA program."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import plain_torch
from planted_bugs import begin_group, end_group
from torch.distributed import tensor as dtensor
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.testing import assert_close

import torchdevice
from torchdevice.errors import PortabilityWarning, TargetUnavailableError
from torchdevice.kernel.devices.mps_runtime import MpsRuntime
from torchdevice.kernel.fidelity import Fidelity


@pytest.fixture
def mac() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate("mps", written_for="mps", memory="64MiB") as scope:
        torch.mps.empty_cache()
        yield scope


@pytest.fixture
def portable(mac: torchdevice.Scope) -> Iterator[torchdevice.Scope]:
    with torchdevice.portable("mps") as scope:
        yield scope


def test_tensors_say_that_they_are_on_mps(portable: torchdevice.Scope) -> None:
    x = torch.ones(2, device="cuda")
    assert x.device == torch.device("mps", 0) == torch.device("cuda") == portable.target
    assert x.is_mps and not x.is_cuda and isinstance(portable.runtime, MpsRuntime)
    assert torch.zeros(1, device=x.device).is_mps and torch.zeros(1, device="mps").is_mps
    assert "device='mps:0'" in repr(x) and torch.nn.Linear(2, 2).cuda().weight.device.type == "mps"


def test_who_parses_a_device_as_modules_do_gets_that_of_tensors(
    portable: torchdevice.Scope,
) -> None:
    module = torch.nn.Linear(2, 2)
    device, *_ = torch._C._nn._parse_to("cuda:0")
    assert device == torch.ones(1, device="cuda").device == module.to(device).weight.device


class TestProcessGroups:
    def test_torch_finds_streams_in_the_module_of_a_tensors_device(
        self, portable: torchdevice.Scope
    ) -> None:
        """``torch.mps`` has none."""
        device = torch.ones(1, device="cuda").device
        assert _FSDPDeviceHandle.from_device(device) is torch.cuda
        assert torch.distributed.device_mesh._get_device_handle(device.type) is torch.cuda
        assert torch._utils._get_device_module(device.type) is torch.cuda
        assert torch.distributed.get_default_backend_for_device(device) == "nccl"

    @pytest.mark.parametrize("devices", [1, 2])
    def test_inputs_are_moved_and_shards_are_drawn(
        self, mac: torchdevice.Scope, devices: int
    ) -> None:
        with torchdevice.portable("mps", devices=devices):
            begin_group()
            try:
                last = devices - 1
                module = torch.nn.Linear(2, 2).cuda(last)
                parallel = torch.nn.parallel.DistributedDataParallel(
                    module, device_ids=[last], output_device=last
                )
                assert parallel(torch.ones(1, 2)).is_mps
                mesh = torch.distributed.init_device_mesh("cuda", (1,))
                drawn = dtensor.zeros(4, device_mesh=mesh, placements=[dtensor.Shard(0)]).normal_()
                assert drawn.to_local().is_mps and drawn.to_local().count_nonzero() == 4
            finally:
                end_group()


def test_a_program_is_shown_its_own_device_where_it_asks_for_that(mac: torchdevice.Scope) -> None:
    with torchdevice.portable("mps", identity="program"):
        x = torch.ones(2, device="cuda")
        assert x.is_cuda and not x.is_mps and x.device == torch.device("cuda", 0)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(("identity", "accelerator"), [("target", "mps"), ("program", "cuda")])
def test_a_tensor_that_cannot_be_pinned_is_named_as_the_program_sees_it(
    mac: torchdevice.Scope, identity: Any, accelerator: str
) -> None:
    with torchdevice.portable("mps", identity=identity):
        x = torch.ones(2, device="cuda")
        with pytest.raises(
            RuntimeError,
            match=f"^cannot pin 'torch.{accelerator}.FloatTensor' only dense CPU tensors",
        ):
            x.pin_memory()


def test_a_scope_without_a_target_finds_the_mac(mac: torchdevice.Scope) -> None:
    with torchdevice.portable() as scope:
        assert isinstance(scope.runtime, MpsRuntime)
    with torchdevice.portable("cpu"), torchdevice.portable("mps") as inner:
        assert torch.ones(1, device="cuda").is_mps and isinstance(inner.runtime, MpsRuntime)


def test_a_program_for_the_mac_is_left_alone_there(mac: torchdevice.Scope) -> None:
    with torchdevice.portable("mps", written_for="mps") as scope:
        assert torch.ones(1, device="mps").is_mps and scope.runtime is mac.runtime


def test_a_scope_is_on_the_machine_around_it() -> None:
    scope = torchdevice.portable("mps")
    for _ in range(2):
        with torchdevice.simulate("mps", written_for="mps"), scope:
            assert torch.ones(1, device="cuda").is_mps
        with pytest.raises(TargetUnavailableError), scope:
            pass


@pytest.mark.usefixtures("no_collections")
def test_figures_are_those_of_the_mac(portable: torchdevice.Scope) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 << 20
    assert (
        torch.cuda.get_device_properties(0).total_memory
        == 64 << 20
        == torch.mps.recommended_max_memory()
    )
    del x
    assert (
        torch.cuda.memory_allocated() == before
        and torch.cuda.max_memory_allocated() == before + (4 << 20)
    )


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("how", ["created", "moved", "before backward"])
def test_a_peak_nobody_asked_for_is_known(portable: torchdevice.Scope, how: str) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if how == "before backward":
        leaf = torch.ones(1 << 20, device="cuda", requires_grad=True)
        leaf.exp().sum().backward()  # exp keeps its result until backward
        del leaf
        wanted = 2 * (4 << 20)
    else:
        torch.ones(1 << 20).cuda() if how == "moved" else torch.ones(1 << 20, device="cuda")
        wanted = 4 << 20
    assert torch.cuda.max_memory_allocated() - before >= wanted


def test_memory_that_runs_out_is_cudas_error(portable: torchdevice.Scope) -> None:
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"^CUDA out of memory\. MPS backend out of memory"
    ):
        torch.empty(15 << 20, device="cuda")[None].clone()
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"^CUDA out of memory\. Invalid buffer size: 128\.00 MiB"
    ):
        torch.empty(32 << 20, device="cuda")
    assert torch.empty(4, device="cuda").is_mps


def test_events_have_a_time_in_either_order(portable: torchdevice.Scope) -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    last.record()
    torch.cuda.synchronize()
    assert first.elapsed_time(last) == -last.elapsed_time(first) > 0


def test_operators_that_mps_lacks_run_on_the_cpu(portable: torchdevice.Scope) -> None:
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.eigvals(x.cuda())
    assert values.is_mps and torch.equal(values.cpu(), torch.linalg.eigvals(x))
    (entry,) = portable.journal.degraded
    assert (
        "eigvals" in entry.requested
        and entry.fidelity is Fidelity.FELL_BACK
        and entry.bytes
        and entry.seconds
    )
    with (
        torchdevice.portable("mps", strict=True),
        pytest.raises(NotImplementedError, match="for the MPS device"),
    ):
        torch.linalg.eigvals(x.cuda())


def test_other_devices_keep_their_operators(portable: torchdevice.Scope) -> None:
    """Registrations for the Mac hold for other threads' simulated devices too."""
    with torchdevice.simulate("cuda") as scope:
        assert torch.linalg.eigvals(torch.eye(2, device="cuda")).is_cuda
        assert not scope.journal.degraded


def test_float64_is_float32(portable: torchdevice.Scope) -> None:
    with pytest.warns(PortabilityWarning, match=r"mps has no torch\.float64"):
        assert torch.ones(2, device="cuda", dtype=torch.float64).dtype is torch.float32
    with (
        torchdevice.portable("mps", float64="error"),
        pytest.raises(TypeError, match="MPS framework doesn't support"),
    ):
        torch.ones(2, device="cuda", dtype=torch.float64)
    with torch.autocast("cuda", dtype=torch.float64):
        assert (
            torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
        ).dtype is torch.float32


def test_a_checkpoint_keeps_random_numbers(portable: torchdevice.Scope) -> None:
    """torch asks ``torch.mps`` for missing names, else numbers change (127676, 194478)."""
    seen: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.nn.functional.dropout(x))
        return seen[-1] * x

    x = torch.ones(64, device="cuda", requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2 and torch.equal(seen[0].detach(), seen[1].detach())


def test_storages_move(portable: torchdevice.Scope) -> None:
    assert torch.UntypedStorage(4).cuda().device.type == "mps"


@pytest.mark.parametrize("backend", ["gloo", None])
def test_gloo_has_no_mps(mac: torchdevice.Scope, backend: str | None) -> None:
    x, on_cpu = torch.ones(2, device="mps"), torch.ones(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group(backend=backend)
        for collective in (dist.all_reduce, functools.partial(dist.broadcast, src=0)):
            with pytest.raises(
                RuntimeError, match=r"^No backend type associated with device type mps$"
            ):
                collective(x, group=group)
        dist.all_reduce(on_cpu, group=group)
        assert on_cpu.tolist() == [1, 1]
    finally:
        end_group()


def test_threads_and_saved_files(portable: torchdevice.Scope, tmp_path: Any) -> None:
    found: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: found.append(torch.linalg.eigvals(torch.eye(2, device="cuda")))
    )
    thread.start()
    thread.join()
    assert found[0].is_mps
    torch.save(found[0].real, tmp_path / "x.pt")
    assert (
        torch.load(tmp_path / "x.pt").is_mps
        and torch.load(tmp_path / "x.pt", map_location="cuda").is_mps
    )
    with plain_torch():
        assert torch.load(tmp_path / "x.pt", map_location="cpu").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_cuda_build_on_a_simulated_mac_has_no_cuda(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(torch._C), "_cuda_getDeviceCount", lambda: 0)  # as in builds with CUDA
    with torchdevice.simulate("mps", written_for="mps", engine=engine):
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        with pytest.raises(AssertionError, match=r"^Torch not compiled with CUDA enabled$"):
            torch.cuda.init()
    assert torch._C._cuda_getDeviceCount() == 0


@pytest.mark.parametrize(("saved", "loads"), [("cuda", False), ("mps", True)])
def test_a_checkpoint_of_another_accelerator(saved: str, loads: bool) -> None:
    file = io.BytesIO()
    with torchdevice.simulate("mps" if saved == "mps" else "cuda"):
        torch.save(torch.ones(2, device=saved), file)
    for options in ({}, {"map_location": "mps"}, {"map_location": {"cuda:0": "mps"}}):
        file.seek(0)
        with torchdevice.simulate("mps", written_for="mps"):
            if options or loads:
                assert torch.load(file, **options).device.type == "mps"
            else:
                with pytest.raises(
                    RuntimeError, match=r"^Attempting to deserialize object on a CUDA device"
                ):
                    torch.load(file)


QUANTILES: dict[str, Any] = {
    "a number": lambda x, like: torch.quantile(x, 0.3),
    "a dimension": lambda x, like: x.quantile(0.3, 1, keepdim=True),
    "several": lambda x, like: torch.quantile(x, torch.tensor([0.2, 0.9], device=like), dim=0),
    "lower": lambda x, like: x.quantile(torch.tensor(0.4, device=like), interpolation="lower"),
    "without NaN": lambda x, like: torch.nanquantile(x, torch.tensor([0.5], device=like), 1),
    "a method without NaN": lambda x, like: x.nanquantile(0.5),
    "a result": lambda x, like: torch.quantile(x, 0.5, 1, out=torch.empty(2, device=like)),
    "compiled": lambda x, like: torch.compile(
        lambda rows: rows.quantile(0.4, 1) * 2, backend="eager"
    )(x),
}


@pytest.mark.parametrize("name", QUANTILES)
def test_quantiles_are_ranked_in_float32(name: str, mac: torchdevice.Scope) -> None:
    """Some releases of torch rank in float64 on each device whose type is not MPS."""
    values = torch.tensor([[3.0, 1.0, 2.0], [float("nan"), 5.0, 4.0]])
    assert_close(
        QUANTILES[name](values.to("mps"), "mps").cpu(),
        QUANTILES[name](values, "cpu"),
        equal_nan=True,
    )


def test_gradients_of_quantiles(mac: torchdevice.Scope) -> None:
    gradients = []
    for device in ("cpu", "mps"):
        x = torch.tensor([[3.0, 1.0, 2.0], [6.0, 5.0, 4.0]], device=device, requires_grad=True)
        x.quantile(0.3, 1).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    assert_close(*gradients)


def test_quantiles_of_more_elements_than_float32_counts(mac: torchdevice.Scope) -> None:
    with pytest.raises(RuntimeError, match=r"quantile\(\) input tensor is too large"):
        torch.zeros(1, device="mps").expand((1 << 24) + 1).quantile(0.5)
