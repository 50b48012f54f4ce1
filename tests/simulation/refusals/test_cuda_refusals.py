"""What CUDA refuses and the CPU does not, on simulated devices that stand for CUDA."""

from __future__ import annotations

import inspect
import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db

import torchdevice
from torchdevice.kernel.devices.scalar_types import scalar_type
from torchdevice.simulation.refusals import device_refusals
from torchdevice.simulation.refusals.device_refusals import GAPS


@pytest.fixture
def cuda() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate(count=2) as scope:
        yield scope


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


# ---- dtypes and operators ------------------------------------------------------------------------


PRODUCTS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x @ x,
    lambda x: torch.mm(x, x),
    lambda x: torch.mm(x, x, out=torch.empty_like(x)),
    lambda x: torch.addmm(x, x, x),
    lambda x: x.clone().addmm_(x, x),
    lambda x: F.linear(x, x),
    lambda x: F.linear(x, x, x[0]),
    lambda x: torch.einsum("ij,jk", x, x),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_products_of_integers(cuda: torchdevice.Scope, dtype: torch.dtype) -> None:
    x = ones(2, 2, dtype=dtype)
    name = scalar_type(dtype)
    for product in PRODUCTS:
        with pytest.raises(
            NotImplementedError, match=rf'^"(addmm|baddbmm)_cuda" not implemented for \'{name}\'$'
        ):
            product(x)
    with pytest.raises(NotImplementedError, match="baddbmm_cuda"):
        torch.bmm(x[None], x[None])
    with pytest.raises(NotImplementedError, match='"dot"'):
        torch.dot(x[0], x[0])
    with pytest.raises(NotImplementedError, match="addmv_impl_cuda"):
        torch.mv(x, x[0])
    with pytest.raises(NotImplementedError, match="max_pool2d_with_indices_out_cuda_frame"):
        F.max_pool2d(x[None, None], 1)
    for product in PRODUCTS:
        product(x.cpu())
        product(x.float())


def test_convolutions_of_integers(cuda: torchdevice.Scope) -> None:
    x, w = ones(1, 2, 4, 4, dtype=torch.long), ones(2, 2, 2, 2, dtype=torch.long)
    kernels = {
        "slow_conv2d_cuda": lambda: F.conv2d(x, w),
        "slow_conv_dilated<>": lambda: F.conv2d(x, w, dilation=2),
        "conv_depthwise2d_forward_cuda": lambda: F.conv2d(x, w[:, :1], groups=2),
        "slow_conv_transpose2d_out_cuda": lambda: F.conv_transpose2d(x, w),
        "slow_conv_transpose3d_out_cuda": lambda: F.conv_transpose3d(x[None], w[..., None]),
    }
    for kernel, convolve in kernels.items():
        with pytest.raises(
            RuntimeError, match=r"^getCudnnDataTypeFromScalarType\(\) not supported for Long$"
        ):
            convolve()
        with (
            torch.backends.cudnn.flags(enabled=False),
            pytest.raises(NotImplementedError, match=f"^\"{kernel}\" not implemented for 'Long'$"),
        ):
            convolve()
    with pytest.raises(NotImplementedError, match="slow_conv_transpose2d_out_cuda"):
        F.conv_transpose2d(x, w, dilation=2, output_padding=1)
    with pytest.raises(RuntimeError, match=r"^GET was unable to find an engine to execute"):
        F.conv2d(x.int(), w.int())


def test_every_gap_names_an_operator_and_dtypes(cuda: torchdevice.Scope) -> None:
    assert len(GAPS) > 15
    for name, dtypes in GAPS.items():
        assert hasattr(torch.ops.aten, name)
        assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in dtypes)
    assert device_refusals._KERNELS.keys() <= GAPS.keys() | device_refusals._FURTHER.keys()


def test_no_gap_contradicts_the_database_of_the_installed_torch() -> None:
    refused = {
        (entry.name, dtype)
        for entry in op_db
        for dtype in entry.supported_dtypes("cuda")
        if str(dtype).removeprefix("torch.") in GAPS.get(entry.name, ())
    }
    assert refused == set()


def test_an_operator_that_only_the_cpu_has(cuda: torchdevice.Scope) -> None:
    with pytest.raises(
        NotImplementedError,
        match=r"^Could not run 'aten::histogram.bin_ct' .* from the 'CUDA' backend",
    ):
        torch.histogram(ones(3), 3)
    torch.histogram(torch.ones(3), 3)


def test_other_profiles_refuse_nothing_of_this() -> None:
    with torchdevice.simulate("mps"):
        x = ones(2, 2, dtype=torch.int64)
        assert (x @ x).tolist() == [[2, 2], [2, 2]]
    with torchdevice.simulate("strict"), pytest.raises(NotImplementedError, match="addmm_cuda"):
        ones(2, 2, dtype=torch.int64) @ ones(2, 2, dtype=torch.int64)
    with torchdevice.portable("cpu"):
        assert (ones(2, 2, dtype=torch.int64) @ ones(2, 2, dtype=torch.int64)).tolist() == [
            [2, 2],
            [2, 2],
        ]


@pytest.mark.usefixtures("no_collections")
def test_pinning_a_tensor_of_the_device(cuda: torchdevice.Scope) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"^cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    ):
        ones(2).pin_memory()
    for make in (torch.zeros, torch.empty, torch.randn):
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            make(2, device="cuda", pin_memory=True)


def test_a_checkpoint_of_a_device_that_is_not_there(cuda: torchdevice.Scope) -> None:
    with torchdevice.simulate(count=8):
        saved = io.BytesIO()
        torch.save(torch.ones(2, device="cuda:7"), saved)
    saved.seek(0)
    expected = (
        "Attempting to deserialize object on CUDA device 7 but torch.cuda.device_count() is 2. "
        "Please use"
    )
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        torch.load(saved)
    saved.seek(0)
    assert torch.load(saved, map_location="cuda:1").device == torch.device("cuda:1")


# ---- deterministic algorithms --------------------------------------------------------------------


def backward_of(
    forward: Callable[[torch.Tensor], torch.Tensor], *shape: int
) -> Callable[[], Callable[[], Any]]:
    """Return a function that runs ``forward`` and returns what runs its backward."""

    def prepare() -> Callable[[], Any]:
        result = forward(torch.rand(shape, device="cuda", requires_grad=True))
        return lambda: result.backward(torch.ones_like(result), retain_graph=True)

    return prepare


def call_of(function: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
    return lambda: function


def interpolated(mode: str, dims: int) -> Callable[[], Callable[[], Any]]:
    return backward_of(
        lambda x: F.interpolate(x, size=(6,) * dims, mode=mode, align_corners=False),
        1,
        2,
        *(4,) * dims,
    )


def _ctc(x: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(x.log_softmax(2), torch.ones(1, 3, dtype=torch.long), [6], [3])


def _embedding_bag(x: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(torch.zeros(2, 2, dtype=torch.long, device="cuda"), x, mode="max")


def _unpool(x: torch.Tensor, dims: int) -> torch.Tensor:
    pooled, indices = getattr(F, f"max_pool{dims}d")(x, 2, return_indices=True)
    return getattr(F, f"max_unpool{dims}d")(pooled, indices, 2)


def _put(accumulate: bool) -> torch.Tensor:
    return ones(3).put_(
        torch.zeros(1, dtype=torch.long, device="cuda"), ones(1), accumulate=accumulate
    )


DOCUMENTED: dict[str, list[Callable[[], Callable[[], Any]]]] = {
    "torch.nn.AvgPool3d": [backward_of(nn.AvgPool3d(2), 1, 2, 4, 4, 4)],
    "torch.nn.AdaptiveAvgPool2d": [backward_of(nn.AdaptiveAvgPool2d(2), 1, 2, 4, 4)],
    "torch.nn.AdaptiveAvgPool3d": [backward_of(nn.AdaptiveAvgPool3d(2), 1, 2, 4, 4, 4)],
    "torch.nn.AdaptiveMaxPool2d": [backward_of(nn.AdaptiveMaxPool2d(2), 1, 2, 4, 4)],
    "torch.nn.FractionalMaxPool2d": [
        backward_of(nn.FractionalMaxPool2d(2, output_size=2), 1, 2, 4, 4)
    ],
    "torch.nn.FractionalMaxPool3d": [
        backward_of(nn.FractionalMaxPool3d(2, output_size=2), 1, 2, 4, 4, 4)
    ],
    "torch.nn.MaxUnpool1d": [call_of(lambda: _unpool(ones(1, 2, 4), 1))],
    "torch.nn.MaxUnpool2d": [call_of(lambda: _unpool(ones(1, 2, 4, 4), 2))],
    "torch.nn.MaxUnpool3d": [call_of(lambda: _unpool(ones(1, 2, 4, 4, 4), 3))],
    "torch.nn.functional.interpolate": [
        interpolated("linear", 1),
        interpolated("bilinear", 2),
        interpolated("bicubic", 2),
        interpolated("trilinear", 3),
    ],
    "torch.nn.ReflectionPad1d": [backward_of(nn.ReflectionPad1d(1), 1, 2, 4)],
    "torch.nn.ReflectionPad3d": [backward_of(nn.ReflectionPad3d(1), 1, 2, 4, 4, 4)],
    "torch.nn.NLLLoss": [
        call_of(
            lambda: F.nll_loss(
                ones(1, 3, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long, device="cuda")
            )
        )
    ],
    "torch.nn.CTCLoss": [backward_of(_ctc, 6, 1, 4)],
    "torch.nn.EmbeddingBag": [backward_of(_embedding_bag, 3, 2)],
    "torch.Tensor.put_": [call_of(lambda: _put(False)), call_of(lambda: _put(True))],
    "torch.histc": [call_of(lambda: ones(3).histc(3))],
    "torch.bincount": [
        call_of(lambda: torch.zeros(2, dtype=torch.long, device="cuda").bincount(ones(2)))
    ],
    "torch.median": [call_of(lambda: ones(3).median(0)), call_of(lambda: ones(3).nanmedian(0))],
    "torch.nn.functional.grid_sample": [
        backward_of(
            lambda x: F.grid_sample(x, torch.zeros(1, 2, 2, 2, device="cuda"), align_corners=False),
            1,
            1,
            3,
            3,
        ),
        backward_of(
            lambda x: F.grid_sample(
                x, torch.zeros(1, 2, 2, 2, 3, device="cuda"), align_corners=False
            ),
            1,
            1,
            3,
            3,
            3,
        ),
    ],
    # Until torch 2.12.
    "torch.nn.MaxPool3d": [backward_of(lambda x: F.max_pool3d(x, 2), 1, 1, 4, 4, 4)],
    "torch.Tensor.scatter_reduce": [
        call_of(
            lambda: ones(3).scatter_reduce(
                0, torch.zeros(1, dtype=torch.long, device="cuda"), ones(1), "prod"
            )
        )
    ],
}
"""What the docstring of ``torch.use_deterministic_algorithms`` says that CUDA refuses -> calls."""

LEFT_OUT = {
    "torch.Tensor.resize_": "of quantized tensors",
    "torch.cumsum": "has a deterministic kernel by now, see device_refusals.py",
    "torch.nn.ReflectionPad2d": "the same",
}


def documented() -> set[str]:
    text = re.split(
        r"will throw a\s+:class:`RuntimeError`", torch.use_deterministic_algorithms.__doc__ or ""
    )[2]
    entries = text.split("In addition, several operations")[0].split("* :")[1:]
    # MPS: since torch 2.15.
    of_cuda = [entry for entry in entries if "MPS tensor" not in entry or "CUDA" in entry]
    return {re.match(r"(?:class|func):`([\w.]+)`", entry)[1] for entry in of_cuda}  # type: ignore[index]


@pytest.fixture
def deterministic() -> Iterator[Callable[..., None]]:
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def test_all_that_is_documented_is_tried() -> None:
    assert documented() - LEFT_OUT.keys() <= DOCUMENTED.keys()


@pytest.mark.parametrize("name", sorted(documented() & DOCUMENTED.keys()))
def test_nondeterministic_kernels(
    cuda: torchdevice.Scope, deterministic: Callable[..., None], name: str
) -> None:
    for prepare in DOCUMENTED[name]:
        call = prepare()
        call()
        deterministic(True)
        with pytest.raises(
            RuntimeError, match=r"does not have a deterministic implementation, but you set"
        ):
            call()
        deterministic(True, warn_only=True)
        with pytest.warns(
            UserWarning, match="does not have a deterministic implementation, but you set"
        ):
            call()
        deterministic(False)


def test_deterministic_kernels(cuda: torchdevice.Scope, deterministic: Callable[..., None]) -> None:
    deterministic(True)
    index = torch.zeros(1, dtype=torch.long, device="cuda")
    ones(3).median(), ones(3).cumsum(0), index.bincount(), ones(3).sum(), ones(3).kthvalue(1)
    ones(3).scatter_reduce(0, index, ones(1), "amax"), ones(3).scatter_add(0, index, ones(1))
    ones(3, dtype=torch.long).histc(3), ones(2, 2) @ ones(2, 2)
    torch.ones(3).cumsum(0)
    F.nll_loss(ones(2, 3), torch.zeros(2, dtype=torch.long, device="cuda"))
    assert all(hasattr(torch.ops.aten, name) for name in device_refusals.OPERATORS)


# ---- assertions of kernels -----------------------------------------------------------------------


def wrong(value: int = 7) -> torch.Tensor:
    return torch.tensor([value], device="cuda")


ASSERTED: dict[str, Callable[[], Any]] = {
    "index": lambda: ones(3)[wrong()],
    "index_negative": lambda: ones(3)[wrong(-4)],
    "index_put": lambda: ones(3).index_put_((wrong(),), ones(1)),
    "setitem": lambda: ones(3).__setitem__(wrong(), 2.0),
    "gather": lambda: ones(3).gather(0, wrong()),
    "take": lambda: ones(3).take(wrong()),
    "put": lambda: ones(3).put_(wrong(), ones(1)),
    "scatter": lambda: ones(3).scatter(0, wrong(), ones(1)),
    "scatter_value": lambda: ones(3).scatter_(0, wrong(), 1.0),
    "scatter_add": lambda: ones(3).scatter_add(0, wrong(), ones(1)),
    "index_select": lambda: ones(3).index_select(0, wrong()),
    "index_add": lambda: ones(3).index_add(0, wrong(), ones(1)),
    "index_copy": lambda: ones(3).index_copy_(0, wrong(), ones(1)),
    "index_fill": lambda: ones(3).index_fill_(0, wrong(), 1.0),
    "embedding": lambda: F.embedding(wrong(), ones(3, 2)),
    "embedding_negative": lambda: nn.Embedding(3, 2, device="cuda")(wrong(-1)),
    "embedding_bag": lambda: F.embedding_bag(wrong()[None], ones(3, 2)),
    "cross_entropy": lambda: F.cross_entropy(ones(1, 3), wrong()),
    "nll_loss2d": lambda: F.nll_loss(ones(1, 3, 1, 1), wrong()[None, None]),
    "multi_margin_loss": lambda: F.multi_margin_loss(ones(1, 3), wrong()),
    "multinomial": lambda: (ones(3) * float("nan")).multinomial(1),
    "multinomial of zeros": lambda: torch.stack([ones(3), ones(3) * 0]).multinomial(1),
    "multinomial of zeros, replaced": lambda: (ones(3) * 0).multinomial(2, replacement=True),
    "bernoulli": lambda: (ones(3) * 2).bernoulli(),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(ones(3) * 2, ones(3)),
    "repeat_interleave": lambda: ones(1).repeat_interleave(wrong(-1)),
    "assert_async": lambda: torch._assert_async(torch.zeros(1, device="cuda")),
    "assert_async with a text": lambda: torch._assert_async(ones(1) * 0, "lengths differ"),
    "assert_async of a graph": lambda: torch.ops.aten._functional_assert_async.msg(
        ones(1) * 0, "lengths", ones(1)
    ),
}


def test_an_assertion_of_several_values_is_the_hosts() -> None:
    with torchdevice.simulate():
        for wrong in (ones(2), ones(0)):
            with pytest.raises(RuntimeError, match="Boolean value of Tensor"):
                torch._assert_async(wrong, "lengths differ")
        assert (ones(3) + 1).sum().item() == 6, "the device lives"


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x + 1,
    "add_": lambda x: x.add_(1),
    "cpu": lambda x: x.cpu(),
    "item": lambda x: x[0].item(),
    "clone": lambda x: x.clone(),
    "copy_": lambda x: x.copy_(torch.ones(3)),
    "to the device": lambda x: torch.ones(3).cuda(),
    "another device": lambda x: torch.ones(3, device="cuda:1"),
    "empty": lambda x: torch.empty(3, device="cuda"),
    "repr": repr,
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "event": lambda x: torch.cuda.Event().record(),
}


@pytest.mark.parametrize("name", sorted(ASSERTED))
def test_a_kernel_asserts(name: str) -> None:
    with torchdevice.simulate():
        x = ones(3)
        with pytest.raises(
            torch.AcceleratorError, match=r"^CUDA error: device-side assert triggered\n"
        ) as caught:
            ASSERTED[name]()
        assert re.search(r"The kernel's assertion was: \w+", "\n".join(caught.value.__notes__))
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            x + 1
    with torchdevice.simulate():
        assert (ones(3) + 1).tolist() == [2, 2, 2]  # another scope has another device


@pytest.mark.parametrize("lengths", [(3, 2), torch.tensor([3, 2])], ids=["ints", "tensor"])
def test_targets_of_ctc_loss(lengths: Any) -> None:
    """The CPU's kernel crashes on a far one. Targets that only fill a row may be anything."""
    probabilities = torch.randn(10, 2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(
        -1
    )
    filled = torch.tensor([[1, 2, 4], [3, 1, -(10**12)]])

    def outcome(device: str, targets: torch.Tensor, times: Any = (10, 10)) -> list[Any]:
        given = probabilities.to(device).detach().requires_grad_()
        lengths_there = lengths.to(device) if isinstance(lengths, torch.Tensor) else lengths
        times = torch.tensor(times, device=device) if isinstance(lengths, torch.Tensor) else times
        loss = torch.nn.functional.ctc_loss(given, targets.to(device), times, lengths_there)
        loss.backward()
        return [loss.item(), given.grad.tolist()]  # type: ignore[union-attr]

    for targets in (filled, torch.tensor([1, 2, 4, 3, 1])):
        with torchdevice.simulate(asynchronous=True):
            assert outcome("cuda", targets) == outcome("cpu", targets)
        wrong = targets.masked_fill(targets == 4, 10**12)
        with torchdevice.simulate():
            for _ in range(2):  # nothing works after that
                with pytest.raises(
                    torch.AcceleratorError,
                    match=r"^CUDA error: an illegal memory access was encount",
                ):
                    outcome("cuda", wrong)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_nothing_works_after_an_assertion(name: str) -> None:
    scope = torchdevice.simulate(count=2)
    with scope:
        x = ones(3)
        with pytest.raises(torch.AcceleratorError):
            ASSERTED["index"]()
        with pytest.raises(
            torch.AcceleratorError, match=r"^CUDA error: device-side assert triggered\n"
        ):
            CALLS[name](x)
        assert x.view(3, 1).shape == (3, 1) and x.device.type == "cuda"  # the host knows that
        torch.ones(3)[torch.tensor([2])] + 1
    with scope:
        assert (ones(3) + 1).tolist() == [2, 2, 2]


def test_what_the_host_checks_is_no_assertion(cuda: torchdevice.Scope) -> None:
    with pytest.raises(IndexError):
        ones(3)[7]
    with pytest.raises(IndexError):
        ones(3).sum(5)
    with pytest.raises(IndexError):
        torch.ones(3)[torch.tensor([7])]
    with pytest.raises(RuntimeError, match="Expected dtype"):
        ones(3).gather(0, ones(1))
    assert (ones(3) + 1).tolist() == [2, 2, 2]


# ---- forks and the allocator's settings ----------------------------------------------------------


def in_child(call: Callable[[], Any]) -> str:
    """Return the error of a call in a forked child, as text; empty if there is none."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            call()
            text = ""
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


REFUSED = (
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
    "multiprocessing, you must use "
)

USES: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.zeros(1, device="cuda"),
    "a tensor with values": lambda: torch.tensor([1.0], device="cuda"),
    "a copy": lambda: torch.ones(1).cuda(),
    "a module": lambda: nn.Linear(1, 1).to("cuda"),
    "current_device": torch.cuda.current_device,
    "set_device": lambda: torch.cuda.set_device(0),
    "synchronize": torch.cuda.synchronize,
    "init": lambda: torch.cuda.init(),
    "properties": lambda: torch.cuda.get_device_properties(0),
    "a stream": torch.cuda.Stream,
}

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@forks
@pytest.mark.parametrize("name", sorted(USES))
def test_a_forked_child_cannot_use_cuda(cuda: torchdevice.Scope, name: str) -> None:
    use = USES[name]
    assert in_child(use) == ""  # the parent has not used it
    assert in_child(lambda: (use(), torch.zeros(1, device="cuda") + 1)) == ""
    use()
    assert in_child(use).startswith(REFUSED)
    assert in_child(lambda: torch.zeros(1, device="cuda")).startswith(REFUSED)
    use()


@forks
def test_what_works_in_a_forked_child(cuda: torchdevice.Scope) -> None:
    x = ones(2)

    def child() -> None:
        assert (
            torch.cuda._is_in_bad_fork()
            and torch._C._cuda_isInBadFork()
            and not torch.cuda.is_initialized()
        )
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and x.shape == (2,)
        torch.manual_seed(0)
        assert (torch.ones(2) + 1).sum() == 4

    assert in_child(child) == ""
    for use in (lambda: x + 1, lambda: x.cpu(), lambda: x.add_(1), lambda: repr(x)):
        assert in_child(use).startswith("AcceleratorError: CUDA error: initialization error\n")
    assert not torch.cuda._is_in_bad_fork() and (x + 1).sum() == 4


@forks
def test_asking_for_availability_counts_as_a_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, refused in (("0", True), ("1", False)):
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", variable)
        with torchdevice.simulate():
            assert torch.cuda.device_count() == 1
            assert in_child(USES["a tensor"]) == ""
            assert torch.cuda.is_available()
            assert in_child(USES["a tensor"]).startswith(REFUSED) is refused


@forks
def test_forks_where_they_do_no_harm() -> None:
    for scope in (torchdevice.portable("cpu"), torchdevice.simulate("mps")):
        with scope:
            ones(1)
            assert in_child(USES["a tensor"]) == "" and in_child(torch.cuda.synchronize) == ""
    with torchdevice.simulate():
        ones(1)
    with torchdevice.simulate():
        assert in_child(USES["a tensor"]) == ""


def test_the_text_is_torchs() -> None:
    source = re.sub(r'"\s+"', "", inspect.getsource(torch.cuda._lazy_init))
    assert REFUSED.partition(": ")[2] in source


SETTINGS = {
    "malloc_fraction=0.5": "Unrecognized key 'malloc_fraction=0.5' in CUDA allocator config",
    "expandable_segments:True,nonsense:1": "Unrecognized key 'nonsense' in CUDA allocator config",
    "max_split_size_mb:5": "max_split_size_mb too small",
    "expandable_segments:maybe": "Expected 'True' or 'False'",
    "garbage_collection_threshold:2": "garbage_collect_threshold",
    "backend:mine": "Unknown allocator backend",
}


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_of_the_allocator(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for text, message in SETTINGS.items():
        monkeypatch.setenv(variable, text)
        with torchdevice.simulate():
            for use in (USES["a tensor"], USES["init"]):
                with pytest.raises((ValueError, RuntimeError), match=message):
                    use()
        with torchdevice.simulate("mps"):
            ones(1)
    accepted = "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:4],backend:native"
    for text in (accepted, "pinned_use_cuda_host_register:True", ""):
        monkeypatch.setenv(variable, text)
        with torchdevice.simulate(), warnings.catch_warnings():
            ones(1)
