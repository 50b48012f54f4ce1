"""Data on its way to the accelerator and back: loaders, pinning, copies, saved files."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OUT_OF_TREE, plain_torch
from processes import run_program
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchdevice

pytestmark = pytest.mark.usefixtures("cuda")


class Numbers(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # A worker process inherits the scope by fork. CUDA fails there if the parent has used it.
        device = "cpu" if torch.cuda._is_in_bad_fork() else "cuda"
        return {"x": torch.full((3,), float(index), device=device).cpu(), "y": torch.tensor(index)}


class TestLoader:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_pinned_without_noise(self, workers: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader = DataLoader(
                Numbers(),
                batch_size=4,
                pin_memory=True,
                num_workers=workers,
                persistent_workers=workers > 0,
            )
            for _ in range(2):
                seen = []
                for batch in loader:
                    assert batch["x"].is_pinned()
                    seen += batch["x"].cuda(non_blocking=True)[:, 0].tolist()
                assert seen == [float(n) for n in range(12)]
        del loader

    def test_a_batch_type_with_its_own_pin_memory(self) -> None:
        class Batch:
            def __init__(self, items: list[Any]):
                self.x = torch.stack([item[0] for item in items])

            def pin_memory(self) -> Batch:
                self.x = self.x.pin_memory()
                return self

        loader = DataLoader(
            TensorDataset(torch.arange(6.0)), batch_size=3, collate_fn=Batch, pin_memory=True
        )
        assert all(batch.x.is_pinned() for batch in loader)

    def test_shuffled_with_a_cuda_default_device_generator(self) -> None:
        loader = DataLoader(
            TensorDataset(torch.arange(8)),
            shuffle=True,
            generator=torch.Generator("cuda").manual_seed(0),
        )
        scope = torchdevice.current()
        assert scope is not None
        if scope.runtime.target == "cpu":
            assert sorted(int(x) for (x,) in loader) == list(range(8))
        else:  # as on a GPU, where the sampler draws on the CPU
            with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator"):
                list(loader)


class TestPinning:
    @pytest.mark.usefixtures("no_collections")
    def test_tensor(self) -> None:
        x = torch.ones(4)
        assert not x.is_pinned()
        assert x.pin_memory().is_pinned() and x.pin_memory("cuda").is_pinned()

    def test_factory(self) -> None:
        for pinned in (
            torch.empty(3, pin_memory=True),
            torch.zeros(3, pin_memory=True),
            torch.ones(2).new_empty((2,), pin_memory=True),
        ):
            assert pinned.is_pinned() and pinned.device.type == "cpu"
        assert not torch.empty(3, pin_memory=False).is_pinned()

    def test_storage(self) -> None:
        assert torch.ones(2).untyped_storage().nbytes() == 8


class TestCopies:
    """On a CPU target a move copies where CUDA copies and the program could tell the difference."""

    def test_moving_to_the_cpu_copies(self) -> None:
        weight = torch.ones(3, device="cuda")
        for snapshot in (weight.cpu(), weight.to("cpu"), weight.detach().cpu()):
            assert snapshot.data_ptr() != weight.data_ptr()
        best = {name: value.cpu() for name, value in {"w": weight}.items()}
        weight.add_(1)
        assert best["w"].tolist() == [1.0] * 3

    def test_numpy_memory_is_copied(self) -> None:
        frame = np.zeros(3, np.float32)
        on_device = [
            torch.from_numpy(frame).cuda(),
            torch.from_numpy(frame).to("cuda"),
            torch.from_numpy(frame).to(torch.device("cuda")),
        ]
        frame[:] = 7
        assert [t.tolist() for t in on_device] == [[0.0] * 3] * 3

    @pytest.mark.usefixtures("no_collections")
    def test_pinned_staging_buffer_is_copied(self) -> None:
        staging = torch.zeros(3).pin_memory()
        first = staging.to("cuda", non_blocking=True)
        staging.fill_(5)
        assert first.tolist() == [0.0] * 3

    def test_gradients_flow_through_the_copies(self) -> None:
        x = torch.ones(3, device="cuda", requires_grad=True)
        x.cpu().sum().backward()
        assert x.grad is not None and x.grad.tolist() == [1.0] * 3

    def test_module_cpu(self) -> None:
        model = torch.nn.Linear(2, 2).cuda()
        parameters = list(model.parameters())
        assert model.cpu() is model
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))

    def test_non_blocking_and_copy(self) -> None:
        x = torch.ones(3, device="cuda")
        assert x.to("cuda", copy=True).data_ptr() != x.data_ptr()
        assert torch.equal(x.to("cpu", non_blocking=True), torch.ones(3))
        assert x.copy_(torch.zeros(3), non_blocking=True).tolist() == [0.0] * 3

    def test_an_operator_with_a_dtype_in_the_place_of_a_device(self) -> None:
        x = torch.zeros(3, device="cuda")
        converted = torch.ops.aten.to(x, torch.float16)
        converted += 1
        assert (
            converted.dtype is torch.float16
            and converted.device == x.device
            and x.tolist() == [0.0] * 3
        )

    def test_what_has_no_memory_of_its_own(self, kind: str) -> None:
        x = torch.eye(3).to_sparse()
        moved = torch.as_tensor(x, dtype=torch.float16, device="cuda")
        assert (
            moved.is_sparse
            and moved.device.type == kind
            and torch.equal(moved.to_dense().cpu(), torch.eye(3).half())
        )


def tagged_cuda(value: Any, path: Path, tag: str = "cuda:0") -> Path:
    """Write a CUDA machine's file in the present format: pickled storages have ``tag``."""
    buffer = io.BytesIO()
    with plain_torch():
        original = torch.serialization.location_tag
        torch.serialization.location_tag = lambda storage: tag
        try:
            torch.save(value, buffer)
        finally:
            torch.serialization.location_tag = original
    path.write_bytes(buffer.getvalue())
    with zipfile.ZipFile(path) as archive:
        assert any(
            tag.encode() in archive.read(name)
            for name in archive.namelist()
            if name.endswith("data.pkl")
        )
    return path


class TestLoad:
    @pytest.mark.parametrize("tag", ["cuda", "cuda:0", "mps", "xpu:0"])
    @pytest.mark.parametrize(
        "map_location",
        [
            None,
            "cuda",
            "cuda:0",
            "cpu",
            torch.device("cuda", 0),
            torch.device("cpu"),
            {"cuda:0": "cuda:0", "cuda": "cuda:0", "mps": "cuda", "xpu:0": "cpu"},
            lambda storage, location: storage,
            lambda storage, location: storage.cuda(0),
            lambda storage, location: storage.cuda(),
            lambda storage, location: None,
        ],
        ids=lambda value: getattr(value, "__name__", str(value)),
    )
    def test_map_location(self, map_location: Any, tag: str, tmp_path: Path) -> None:
        path = tagged_cuda({"w": torch.arange(4.0), "path": "cuda:0"}, tmp_path / "x.pt", tag)
        scope = torchdevice.current()
        assert scope is not None
        if (
            map_location is None
            and scope.runtime.supplied.location_tag == "cuda"
            and not tag.startswith("cuda")
        ):
            # As on a GPU.
            with pytest.raises(RuntimeError, match=r"not recognized: mps|torch\.xpu\.is_available"):
                torch.load(path, weights_only=True)
            return
        for _ in range(2):
            loaded = torch.load(path, map_location=map_location, weights_only=True)
            assert loaded["w"].tolist() == [0.0, 1.0, 2.0, 3.0] and loaded["path"] == "cuda:0"

    @pytest.mark.parametrize("tag", ["cuda", "cuda:0", "cpu"])
    def test_a_device_made_in_the_scope(self, tag: str, kind: str, tmp_path: Path) -> None:
        path = tagged_cuda({"w": torch.arange(4.0)}, tmp_path / "x.pt", tag)
        for device in (torch.device("cuda"), torch.device("cuda:0")):
            loaded = torch.load(path, map_location=device, weights_only=True)["w"]
            assert loaded.device.type == kind and loaded.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert torch.load(path, map_location=torch.device("cpu"))["w"].device.type == "cpu"

    def test_memory_mapped(self, tmp_path: Path) -> None:
        path = tagged_cuda({"w": torch.arange(4.0)}, tmp_path / "x.pt")
        assert torch.load(path, map_location="cuda", mmap=True)["w"].tolist() == [
            0.0,
            1.0,
            2.0,
            3.0,
        ]

    def test_weights_only_stays_in_force(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> Any:
                return (print, ("executed",))

        path = tmp_path / "x.pt"
        torch.save({"e": Evil()}, path)
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            torch.load(path, map_location="cuda")

    def test_loading_without_a_scope_raises_torchs_own_error(self, tmp_path: Path) -> None:
        path = tagged_cuda(torch.ones(1), tmp_path / "x.pt")
        with (
            plain_torch(),
            pytest.raises(RuntimeError, match="deserialize object on a CUDA device"),
        ):
            torch.load(path)

    def test_location_tags_of_files_saved_in_a_scope(self, tmp_path: Path, kind: str) -> None:
        """A real target saves its own file; a simulated device saves the file of a CUDA machine."""
        path = tmp_path / "x.pt"
        torch.save({"w": torch.ones(2, device="cuda")}, path)
        with plain_torch():
            assert torch.load(path, map_location="cpu")["w"].tolist() == [1.0, 1.0]
            if kind in ("cpu", OUT_OF_TREE):
                assert torch.load(path)["w"].device.type == kind
            else:
                # Of a Mac's file torch says on another machine that it does not know the device.
                told = (
                    "not recognized: mps"
                    if kind == "mps"
                    else r"on a CUDA device but torch\.cuda\.is_available"
                )
                with pytest.raises(RuntimeError, match=told):
                    torch.load(path)

    def test_training_is_resumed_to_the_same_numbers(self, tmp_path: Path) -> None:
        def steps(model: Any, optimizer: Any, count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                noise = torch.randn(4, 3, device="cuda")
                model(noise).square().mean().backward()
                optimizer.step()

        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        steps(model, optimizer, 2)
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.cuda.get_rng_state(),
            "all": torch.cuda.get_rng_state_all(),
        }
        torch.save(checkpoint, tmp_path / "c.pt")
        steps(model, optimizer, 2)

        other = torch.nn.Linear(3, 3).cuda()
        resumed = torch.optim.AdamW(other.parameters())
        loaded = torch.load(tmp_path / "c.pt", map_location="cuda")
        other.load_state_dict(loaded["model"])
        resumed.load_state_dict(loaded["optimizer"])
        torch.cuda.set_rng_state(loaded["rng"].cpu())
        steps(other, resumed, 2)
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )


class TestSafetensors:
    @pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, "cpu"])
    def test_load_file(self, device: Any, tmp_path: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        save_file({"w": torch.arange(3.0, device="cuda")}, tmp_path / "x.safetensors")
        assert load_file(tmp_path / "x.safetensors", device=device)["w"].tolist() == [0.0, 1.0, 2.0]
        with safe_open(tmp_path / "x.safetensors", framework="pt", device=device) as file:
            assert file.get_tensor("w").tolist() == [0.0, 1.0, 2.0]


def test_pickling_and_deepcopy() -> None:
    import copy

    x = torch.ones(2, device="cuda")
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    model = torch.nn.Linear(2, 2).cuda()
    assert torch.equal(copy.deepcopy(model).weight, model.weight)


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.one_engine
def test_options_reach_workers_however_they_start(target: str, kind: str, tmp_path: Path) -> None:
    """A worker that raises is named."""
    program = """
        import torch

        class Seen(torch.utils.data.Dataset):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                return torch.cuda.get_device_capability()[0], torch.ones(1, device="cuda").device.type

        class Failing(Seen):
            def __getitem__(self, index):
                raise ValueError("no")

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                loaded = torch.utils.data.DataLoader(Seen(), num_workers=1, multiprocessing_context=method)
                print(method, [(capability.item(), *kind) for capability, kind in loaded])
                try:
                    list(torch.utils.data.DataLoader(Failing(), num_workers=1, multiprocessing_context=method))
                except ValueError as error:
                    print(str(error).splitlines()[0])
    """
    done = run_program(tmp_path, program, options=["--target", target, "--capability", "9.0"])
    expected = []
    for method in ("fork", "spawn", "forkserver"):
        expected += [
            f"{method} [(9, {kind!r}), (9, {kind!r})]",
            "Caught ValueError in DataLoader worker process 0.",
        ]
    assert done.stdout.splitlines() == expected, done.stderr[-2000:]
