"""Page-locked memory, streams and events, and files of devices that are not there."""

from __future__ import annotations

import io
import re
import warnings

import pytest
import torch

import torchdevice


def test_the_data_loader_pins(devices: torchdevice.Scope) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=1)
    batches = [batch[0] for batch in loader]
    assert all(batch.is_pinned() and not batch.is_cuda for batch in batches)
    assert torch.cat([batch.cuda(non_blocking=True) for batch in batches]).tolist() == list(
        range(8)
    )


def test_streams_and_events(devices: torchdevice.Scope) -> None:
    x = torch.zeros(1000, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()) as stream:
        for _ in range(50):
            x += 1
        end.record(stream)
    torch.cuda.current_stream().wait_event(end)
    torch.cuda.synchronize()
    assert end.query() and start.elapsed_time(end) > 0 and x.sum().item() == 50_000
    buffer = io.BytesIO()
    torch.save(x, buffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.record_stream(torch.cuda.Stream())


@pytest.mark.parametrize("engine", ["mode", "wrap"])
class TestCudaRefuses:
    @pytest.mark.usefixtures("no_collections")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
    def test_to_pin_its_own_memory(self, engine: str, dtype: torch.dtype) -> None:
        with torchdevice.simulate(engine=engine):
            x = torch.ones(2, dtype=dtype, device="cuda")
            expected = f"cannot pin '{x.type()}' only dense CPU tensors can be pinned"
            with pytest.raises(RuntimeError, match=re.escape(expected)):
                x.pin_memory()
            for make in (torch.ones, torch.empty, torch.rand):
                with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
                    make(2, device="cuda", pin_memory=True)
            assert torch.ones(2, pin_memory=True).is_pinned() and x.cpu().pin_memory().is_pinned()

    def test_a_file_of_a_device_that_is_not_there(self, engine: str) -> None:
        with torchdevice.simulate(count=8, engine=engine):
            file = io.BytesIO()
            torch.save({"x": torch.arange(3.0, device="cuda:7")}, file)
        expected = (
            "Attempting to deserialize object on CUDA device 7 but torch.cuda.device_count() is 2. "
            "Please use "
            "torch.load with map_location to map your storages to an existing device."
        )
        with torchdevice.simulate(count=2, engine=engine):
            file.seek(0)
            with pytest.raises(RuntimeError, match=re.escape(expected)):
                torch.load(file)
            for place in ("cuda:1", "cpu", {"cuda:7": "cuda:1"}):
                file.seek(0)
                assert torch.load(file, map_location=place)["x"].tolist() == [0.0, 1.0, 2.0]
