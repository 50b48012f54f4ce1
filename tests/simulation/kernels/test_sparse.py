"""Compressed sparse tensors (CSR, CSC, BSR, BSC), simulated and CPU's, equal to the bit."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sweeping
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

import torchdevice
from torchdevice.errors import RaceError
from torchdevice.simulation import machine

DEVICE = "cuda:1"

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
}


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with warnings.catch_warnings(), torchdevice.simulate(count=2):
        warnings.simplefilter("ignore")  # torch calls these layouts a beta
        yield


def parts(s: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if s.layout in (torch.sparse_csr, torch.sparse_bsr):
        return s.crow_indices(), s.col_indices(), s.values()
    return s.ccol_indices(), s.row_indices(), s.values()


def saved(s: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(s, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def gradients(s: torch.Tensor, d: torch.Tensor) -> Any:
    s, d = s.detach().requires_grad_(), d.detach().requires_grad_()
    (s @ d).square().sum().backward()
    return s.grad, d.grad


def gradient_of_conversion(s: torch.Tensor, d: torch.Tensor) -> Any:
    d = d.detach().requires_grad_()
    d.to_sparse_csr().to_dense().square().sum().backward()
    return d.grad


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "itself": lambda s, d: s,
    "parts": lambda s, d: parts(s),
    "facts": lambda s, d: (
        s._nnz(),
        s.sparse_dim(),
        s.dense_dim(),
        s.layout,
        s.is_sparse_csr,
        s.is_sparse,
    ),
    "constructed": lambda s, d: torch.sparse_compressed_tensor(*parts(s), s.shape, layout=s.layout),
    "constructed from lists": lambda s, d: torch.sparse_compressed_tensor(
        *(part.tolist() for part in parts(s)), s.shape, layout=s.layout, device=d.device
    ),
    "refused by the check": lambda s, d: torch.sparse_compressed_tensor(
        parts(s)[0], parts(s)[1] + 7, parts(s)[2], s.shape, layout=s.layout, check_invariants=True
    ),
    "empty": lambda s, d: torch.empty(4, 6, layout=s.layout, device=d.device).shape,
    "to dense": lambda s, d: s.to_dense(),
    "to cpu": lambda s, d: s.cpu(),
    "to coo": lambda s, d: s.to_sparse(),
    "to csr": lambda s, d: s.to_sparse_csr(),
    "to csc": lambda s, d: s.to_sparse_csc(),
    "to double": lambda s, d: s.double(),
    "to the other device and back": lambda s, d: s.to("cuda:0" if s.is_cuda else "cpu").to(
        s.device
    ),
    "clone": lambda s, d: s.clone(),
    "detach": lambda s, d: s.detach(),
    "saved": lambda s, d: saved(s),
    "zeros_like": lambda s, d: torch.zeros_like(s),
    "empty_like": lambda s, d: torch.empty_like(s).shape,
    "matmul": lambda s, d: s @ d,
    "sparse.mm": lambda s, d: torch.sparse.mm(s, d),
    "vector": lambda s, d: s @ d[:, 0],
    "dense by sparse": lambda s, d: d @ s,
    "sparse by sparse": lambda s, d: s @ d.to_sparse_csr(),
    "addmm": lambda s, d: torch.addmm(torch.ones(4, 4, device=d.device), s, d),
    "sampled_addmm": lambda s, d: torch.sparse.sampled_addmm(s, d.t() * 2, d[:, :3].repeat(1, 2)),
    "linear": lambda s, d: torch.nn.functional.linear(d.t(), s),
    "add": lambda s, d: s + s,
    "add another": lambda s, d: s + s.clone(),
    "times itself": lambda s, d: s * s,
    "times a number": lambda s, d: s * 2.5,
    "negative": lambda s, d: -s,
    "sin": lambda s, d: s.sin(),
    "relu": lambda s, d: torch.relu(s),
    "abs": lambda s, d: torch.abs(s),
    "sum": lambda s, d: s.sum(),
    "transposed": lambda s, d: s.t(),
    "selected": lambda s, d: s[1],
    "times in place": lambda s, d: s.clone().mul_(2),
    "filled": lambda s, d: s.clone().fill_(1.0),
    "zeroed": lambda s, d: s.clone().zero_(),
    "copied into": lambda s, d: s.clone().copy_(s * 3),
    "written into by out": lambda s, d: torch.sin(s, out=s.clone()),
    "mask": lambda s, d: torch.ones(4, 6, device=d.device).sparse_mask(s),
    "gradients": gradients,
    "gradient of a conversion": gradient_of_conversion,
}


def outcome(use: Callable[..., Any], s: torch.Tensor, d: torch.Tensor) -> Any:
    """Return a use's result on the CPU, or its error's text without backends' names."""
    try:
        return use(s, d)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


@pytest.mark.parametrize("name", USES)
def test_a_use(name: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 6) * (torch.rand(4, 6) > 0.5), torch.randn(6, 4)
    worked = 0
    for make in LAYOUTS.values():
        expected = outcome(USES[name], make(a), b)
        for sparse in (make(a.to(DEVICE)), make(a).to(DEVICE)):
            found = outcome(USES[name], sparse, b.to(DEVICE))
            for each in pytree.tree_leaves(found):
                if isinstance(each, torch.Tensor):
                    assert (
                        each.device.type == "cpu"
                        if name == "to cpu"
                        else each.device == torch.device(DEVICE)
                    )
            assert not sweeping.identical(expected, found, "cuda")
        worked += not isinstance(expected, str)
    assert worked or name == "refused by the check"


KINDS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


@pytest.mark.parametrize("layout", KINDS, ids=str)
@pytest.mark.parametrize(
    "use", [lambda s, v: s @ v, lambda s, v: s.clone(), lambda s, v: s.to_dense()]
)
@pytest.mark.parametrize("waits", [True, False])
def test_races_of_sparse_tensors_are_found(layout: torch.layout, use: Any, waits: bool) -> None:
    with torchdevice.simulate(races="error"):
        vectors = torch.ones(4, 2, device="cuda")
        matrix = torch.eye(4, device="cuda").to_sparse(layout=layout)
        side = torch.cuda.Stream()
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with (
            torch.cuda.stream(side),
            contextlib.nullcontext() if waits else pytest.raises(RaceError, match="to_sparse"),
        ):
            use(matrix, vectors)


def test_what_sparse_tensors_have_in_common_is_not_written() -> None:
    """``detach`` and ``coalesce`` of a coalesced tensor return the memory that they are given."""
    with torchdevice.simulate(races="error"):
        matrix = torch.eye(4, device="cuda").to_sparse()
        streams = [torch.cuda.Stream() for _ in range(2)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for stream in streams:
            with torch.cuda.stream(stream):
                assert (
                    matrix.detach().coalesce() is not matrix
                    and matrix.coalesce().to_dense().shape == (4, 4)
                )
        with torch.cuda.stream(streams[0]):
            matrix.mul_(2)
        with torch.cuda.stream(streams[1]), pytest.raises(RaceError, match="mul_"):
            matrix.to_dense()


EVERY_LAYOUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    **LAYOUTS,
}

PLACES = torch.tensor(
    [[0.0, 0, 0, 2, 0, 0], [0, 0, 3, 0, 0, 0], [0, 0, 0, 0, 4, 0], [5, 0, 0, 0, 0, 6]]
)


def all_parts(s: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (s._indices(), s._values()) if s.is_sparse else parts(s)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("make", EVERY_LAYOUT.values(), ids=EVERY_LAYOUT)
@pytest.mark.parametrize("road", ["to", "copy_"])
def test_copies_of_sparse_tensors_to_the_host_are_done(
    make: Callable[[torch.Tensor], torch.Tensor], road: str
) -> None:
    """Garbage indices would end the process: torch's kernels do not check them."""
    with torchdevice.simulate(asynchronous=True):
        there, right = make(PLACES).cuda(), make(PLACES)
        into = make(PLACES * 7).pin_memory()
        host = (
            there.to("cpu", non_blocking=True)
            if road == "to"
            else into.copy_(there, non_blocking=True)
        )
        assert host.device.type == "cpu" and host.layout == right.layout
        assert all(
            torch.equal(*each) for each in zip(all_parts(host), all_parts(right), strict=True)
        )


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("make", EVERY_LAYOUT.values(), ids=EVERY_LAYOUT)
def test_copies_of_sparse_tensors_to_the_device_are_done(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with torchdevice.simulate(asynchronous=True):
        locked = make(PLACES).pin_memory()
        assert locked.is_pinned() and all(each.is_pinned() for each in all_parts(locked))
        there, side = locked.to("cuda", non_blocking=True), torch.cuda.Stream()
        all_parts(locked)[-1].fill_(7)
        with torch.cuda.stream(side):
            assert torch.equal((there * 2).to_dense().cpu(), PLACES * 2)


@pytest.mark.usefixtures("no_collections")
def test_indices_in_flight_are_valid_where_they_are_read_too_early() -> None:
    with torchdevice.simulate(asynchronous=True):
        given = [part.pin_memory() for part in parts(torch.eye(4).to_sparse_csr())]
        crow, columns, values = (part.to("cuda", non_blocking=True) for part in given)
        matrix, side = torch.sparse_csr_tensor(crow, columns, values, (4, 4)), torch.cuda.Stream()
        with torch.cuda.stream(side):
            assert matrix.to_dense().cpu().shape == (4, 4)


@pytest.mark.parametrize("make", EVERY_LAYOUT.values(), ids=EVERY_LAYOUT)
def test_copies_of_pageable_sparse_tensors_are_done(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with torchdevice.simulate(asynchronous=True):
        source = make(PLACES)
        there = source.to("cuda", non_blocking=True)
        all_parts(source)[-1].fill_(7)
        machine.current().copies.clear()
        assert torch.equal(there.cpu().to_dense(), PLACES)
        assert machine.current().copies == {("simulated:0", "cpu"): len(all_parts(source))}


def test_what_cuda_lacks_for_sparse_tensors_is_refused() -> None:
    with torchdevice.simulate():
        matrix, vectors = torch.eye(4).to_sparse_csr().cuda(), torch.ones(4, 2, device="cuda")
        assert torch.equal(torch.sparse.mm(matrix, vectors), vectors) and matrix.sum(
            [1], keepdim=True
        ).shape == (4, 1)
        with pytest.raises(
            NotImplementedError,
            match="'aten::_sparse_mm_reduce_impl' with arguments from the 'SparseCsrCUDA'",
        ):
            torch.sparse.mm(matrix, vectors, "mean")


def test_a_lost_device_refuses_sparse_tensors_too() -> None:
    with torchdevice.simulate():
        matrix = torch.eye(4, device="cuda").to_sparse()
        with pytest.raises(torch.AcceleratorError):
            torch.ones(2, device="cuda")[torch.tensor([7], device="cuda")]
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            matrix * 2


def test_printing_names_the_device() -> None:
    x = torch.eye(2)
    assert f"device='{DEVICE}'" in str(x.to(DEVICE).to_sparse_csr())
    text = str(x.to(DEVICE).to_sparse_csr()).replace(f" device='{DEVICE}',", "")
    assert text.split() == str(x.to_sparse_csr()).split()


def test_values_share_the_memory_of_their_tensor() -> None:
    s = torch.eye(3, device=DEVICE).to_sparse_csr()
    s.values().mul_(5)
    assert s.to_dense().tolist() == (torch.eye(3) * 5).tolist()


@pytest.mark.usefixtures("no_collections")
def test_memory_is_counted_and_freed() -> None:
    x = torch.eye(128, device=DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    s = x.to_sparse_csr()
    sizes = [-(-part.nbytes // 512) * 512 for part in parts(s)]
    assert torch.cuda.memory_allocated(DEVICE) - before == sum(sizes) > 0
    del s
    assert torch.cuda.memory_allocated(DEVICE) == before


@pytest.mark.parametrize(
    "make", [*LAYOUTS.values(), lambda x: x.to_sparse()], ids=[*LAYOUTS, "coo"]
)
def test_tensors_on_two_devices_are_refused(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.eye(4)
    for one, other in ((DEVICE, "cpu"), (DEVICE, "cuda:0"), ("cuda:0", "cpu")):
        with pytest.raises(RuntimeError, match="same device"):
            make(x.to(one)) @ x.to(other)


# ---- torch's samples of sparse operators ---------------------------------------------------------

SAMPLES = [
    (op, layout)
    for op in op_db
    for layout in (
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    )
    if op.supports_sparse_layout(layout) and torch.float32 in op.dtypes
]


def samples(op: OpInfo, layout: torch.layout) -> Iterator[tuple[Any, Any]]:
    """Return arguments in a layout, converted from dense ones if torch has no samples."""
    try:
        found = list(op.sample_inputs_sparse(layout, "cpu", torch.float32))
    except NotImplementedError:
        block = {"blocksize": (1, 1)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
        dims = (1, 2, 3) if layout is torch.sparse_coo else (2,)
        dense = [
            each for each in sweeping.samples_of(op, torch.float32) if each.input.dim() in dims
        ]
        for sample in dense:
            sample.input = sample.input.to_sparse(layout=layout, **block)
        found = dense
    return (
        ((each.input, *each.args), each.kwargs) for each in found if "device" not in each.kwargs
    )


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("op", "layout"), SAMPLES, ids=lambda each: str(getattr(each, "full_name", each))
)
def test_torchs_samples(op: OpInfo, layout: torch.layout) -> None:
    torch.manual_seed(0)
    compared = 0
    for args, kwargs in itertools.islice(samples(op, layout), 8):
        expected = outcome(lambda s, d: op(*s, **d), args, kwargs)
        there = pytree.tree_map_only(torch.Tensor, lambda each: each.to(DEVICE), (args, kwargs))
        found = outcome(lambda s, d: op(*s, **d), *there)
        assert not sweeping.identical(expected, found, "cuda"), (args, kwargs, expected, found)
        compared += 1
    assert compared


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_leaves_the_coo_tensor_as_it_is(layout: str) -> None:
    """The indices of the result may be those of the argument, in the middle of their memory."""
    dense = torch.eye(4) + torch.arange(4.0).diag(0)
    on_cpu, s = dense.to_sparse(), dense.to(DEVICE).to_sparse()
    shares = [part.untyped_storage().data_ptr() == on_cpu._indices().untyped_storage().data_ptr()
              for part in parts(LAYOUTS[layout](on_cpu))]  # fmt: skip
    before = repr(s)
    converted = LAYOUTS[layout](s)
    indices = s._indices().untyped_storage()
    assert [
        part.untyped_storage().data_ptr() == indices.data_ptr() for part in parts(converted)
    ] == shares
    assert repr(s) == before and torch.equal(s.cpu().to_dense(), dense)
    del s, indices
    assert torch.equal(converted.to_dense().cpu(), dense)
    del converted
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) == 0


HALVES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "csr and a matrix": lambda x, y: x.to_sparse_csr() @ y,
    "csc and a matrix": lambda x, y: x.to_sparse_csc() @ y,
    "csr and a vector": lambda x, y: x.to_sparse_csr() @ y[0],
    "csr, added": lambda x, y: torch.addmm(y, x.to_sparse_csr(), y),
    "csr, in place": lambda x, y: y.clone().addmm_(x.to_sparse_csr(), y),
    "csr, given a result": lambda x, y: torch.mm(x.to_sparse_csr(), y, out=torch.empty_like(y)),
    "two of csr": lambda x, y: (x.to_sparse_csr() @ x.to_sparse_csr()).to_dense(),
    "two of coo": lambda x, y: (x.to_sparse() @ x.to_sparse()).to_dense(),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("product", HALVES)
def test_a_product_in_half_precision_is_rounded_once(product: str, dtype: torch.dtype) -> None:
    """cuSPARSE has these products, and the CPU has none."""
    x, y = (
        torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for seed in (0, 1)
    )
    x = x.relu()
    found = HALVES[product](x.to(DEVICE), y.to(DEVICE))
    assert found.dtype is dtype and found.device == torch.device(DEVICE)
    assert torch.equal(found.cpu(), HALVES[product](x.float(), y.float()).to(dtype))


def test_a_product_of_coo_and_a_matrix_in_half_precision_is_refused() -> None:
    """CUDA's kernel for it has none of these dtypes."""
    x = torch.eye(4, device=DEVICE, dtype=torch.float16)
    with pytest.raises(
        NotImplementedError, match="\"addmm_sparse_cuda\" not implemented for 'Half'"
    ):
        x.to_sparse() @ x
