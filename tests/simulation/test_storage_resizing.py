"""Storages of simulated devices: views, resizes, files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import plain_torch

import torchdevice
from torchdevice.kernel.devices import cpu_memory


def _through_a_file(value: Any, folder: Path) -> Any:
    torch.save(value, folder / "value.pt")
    return torch.load(folder / "value.pt", weights_only=False)


class TestStorages:
    def test_views_share_and_resizes_do_not_lose(self, devices: torchdevice.Scope) -> None:
        x = torch.arange(6.0, device="cuda")
        view = x.view(2, 3)[1]
        view += 10
        assert x.tolist() == [0.0, 1.0, 2.0, 13.0, 14.0, 15.0]
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        x.resize_(8)
        assert x[:6].tolist() == [0.0, 1.0, 2.0, 13.0, 14.0, 15.0] and x.shape == (8,)
        out = torch.empty(0, device="cuda")
        torch.add(x[:2], 1, out=out)
        assert out.tolist() == [1.0, 2.0]
        y = torch.empty(0, device="cuda").set_(x.untyped_storage(), 3, (2,), (1,))
        assert y.tolist() == [13.0, 14.0]
        assert torch.empty(2, 3, 4, 5, device="cuda").to(
            memory_format=torch.channels_last
        ).stride() == (60, 1, 15, 3)

    def test_tensors_are_set_to_other_memory_as_on_the_cpu(
        self, devices: torchdevice.Scope
    ) -> None:
        def found(device: str) -> list[tuple[Any, ...]]:
            source = torch.arange(6.0, device=device)
            storage = source.untyped_storage()
            given = [
                (),
                (storage,),
                (storage, 1, (2, 2)),
                (source,),
                (source, 1, (2,), (2,)),
                (source[1:],),
            ]
            made = [torch.zeros(6, device=device).set_(*each) for each in given]
            same = [source.is_set_to(each) for each in (*made, source, source.clone())]
            return [same, *((each.tolist(), each.stride(), each.storage_offset()) for each in made)]

        assert found("cuda") == found("cpu")

    def test_a_tensor_that_has_the_size_keeps_its_strides(self, devices: torchdevice.Scope) -> None:
        """A kernel of torch compares sizes before all else, so a transposed matrix stays one."""

        def layout(x: torch.Tensor) -> tuple[Any, ...]:
            sizes = tuple(x.shape), x.stride(), x.storage_offset(), x.untyped_storage().nbytes()
            return *sizes, x.tolist()

        def found(device: str) -> list[Any]:
            x = torch.arange(24.0, device=device)
            images = x.view(2, 3, 2, 2).to(memory_format=torch.channels_last)
            given = [x[:6].view(2, 3).t(), x[2:8:2], images, x[:3, None].expand(3, 4)]
            of_tensors = [layout(each.resize_(each.shape)) for each in given]
            of_tensors += [layout(each.resize_as_(each.clone())) for each in given]
            spelled = x[:6].view(2, 3).t().resize_(3, 2, memory_format=torch.contiguous_format)
            errors = []
            for size, layouts in (((-1, 3), None), ((6,), torch.preserve_format)):
                with pytest.raises(RuntimeError) as error:
                    torch.ones(6, device=device).resize_(size, memory_format=layouts)
                errors.append(str(error.value))
            return [*of_tensors, layout(spelled), errors]

        assert found("cuda") == found("cpu")

    @pytest.mark.usefixtures("no_collections")
    def test_a_storage_is_resized_in_place(self, devices: torchdevice.Scope) -> None:
        x = torch.arange(1000.0, device="cuda:1")
        view, storage, before = x[10:13], x.untyped_storage(), torch.cuda.memory_allocated(1)
        blocks = torch.cuda.memory_stats(1)["allocation.all.current"]
        assert storage.resizable()
        storage.resize_(0)
        assert (storage.nbytes(), x.data_ptr(), before - torch.cuda.memory_allocated(1)) == (
            0,
            0,
            4096,
        )
        storage.resize_(4000)
        torch.add(torch.ones(1000, device="cuda:1"), 1, out=x)
        assert view.tolist() == [2.0] * 3 and x.sum().item() == 2000 and x.get_device() == 1
        storage.resize_(8000)
        whole = torch.empty(0, device="cuda:1").set_(storage, 0, (2000,), (1,))
        assert torch.cuda.memory_allocated(1) - before == 4096
        assert whole[:1000].tolist() == [2.0] * 1000
        whole.fill_(3)
        assert view.tolist() == [3.0] * 3
        storage.resize_(0)
        del x, view, whole, storage
        assert torch.cuda.memory_allocated(1) == before - 4096
        assert torch.cuda.memory_stats(1)["allocation.all.current"] == blocks - 1

    @pytest.mark.usefixtures("no_collections")
    def test_a_storage_that_was_empty_grows(self, devices: torchdevice.Scope) -> None:
        before = torch.cuda.memory_allocated()
        x = torch.empty(0, device="cuda")
        x.untyped_storage().resize_(12)
        x.set_(x.untyped_storage(), 0, (3,), (1,)).fill_(1)
        view = x[1:]
        x.resize_(100).fill_(2)
        assert view.tolist() == [2.0, 2.0]
        assert torch.cuda.memory_allocated() - before == 512

    def test_a_storage_does_not_grow_beyond_the_limit(self) -> None:
        with torchdevice.simulate("cuda", memory="4MiB"):
            x = torch.ones(3, device="cuda")
            with pytest.raises(torch.OutOfMemoryError):
                x.untyped_storage().resize_(2 << 20)
            assert x.tolist() == [1.0] * 3

    @pytest.mark.usefixtures("no_collections")
    def test_a_freed_storage_returns_the_hosts_memory(self, devices: torchdevice.Scope) -> None:
        size = 256 << 20
        resident = psutil.Process().memory_info
        storage = torch.ones(size, dtype=torch.uint8, device="cuda").untyped_storage()
        for _ in range(3):
            before = resident().rss
            storage.resize_(0)
            cpu_memory.trim_heap()  # malloc keeps what it took from free memory of its heap
            assert before - resident().rss > size // 2
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).fill_(1)

    def test_copies_and_files(self, devices: torchdevice.Scope, tmp_path: Path) -> None:
        base = torch.arange(4.0, device="cuda:1")
        value = {"a": base, "b": base[1:], "c": torch.nn.Linear(2, 2).to("cuda:1")}
        clone = pickle.loads(pickle.dumps(value))
        assert clone["b"].tolist() == [1.0, 2.0, 3.0] and clone["c"].weight.get_device() == 1
        for clone in (copy.deepcopy(value), _through_a_file(value, tmp_path)):
            assert clone["a"].get_device() == clone["c"].weight.get_device() == 1
            clone["a"] += 1
            assert clone["b"].tolist() == [2.0, 3.0, 4.0] and base.tolist() == [0.0, 1.0, 2.0, 3.0]
        torch.save({"a": base}, tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt")["a"].get_device() == 1
        assert torch.load(tmp_path / "x.pt", map_location="cuda:0")["a"].get_device() == 0
        assert not torch.load(tmp_path / "x.pt", map_location="cpu")["a"].is_cuda
        with plain_torch(), pytest.raises(RuntimeError, match="on a CUDA device but"):
            torch.load(tmp_path / "x.pt")

    def test_sparse(self, devices: torchdevice.Scope) -> None:
        x = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        sparse = x.cuda().to_sparse()
        assert (
            sparse.is_sparse
            and sparse.is_cuda
            and torch.equal((sparse + sparse).to_dense().cpu(), x * 2)
        )
        assert torch.equal(torch.sparse.mm(sparse, x.cuda()).cpu(), x @ x)
        table = torch.nn.Embedding(5, 2, sparse=True).cuda()
        for _ in range(2):
            table(torch.tensor([1, 1, 3], device="cuda")).sum().backward()
        assert table.weight.grad is not None and table.weight.grad._nnz() == 6
        assert table.weight.grad.to_dense()[:, 0].tolist() == [0.0, 4.0, 0.0, 2.0, 0.0]
        torch.optim.SGD(table.parameters(), lr=0.1).step()
