"""Mistakes in kernels end with an error on a simulated GPU, their correct twins do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import torchdevice
from torchdevice.errors import KernelRaceError, RaceWarning, UninitializedReadError

triton = pytest.importorskip("triton", reason="Triton is not installed")

import example_kernels as kernels  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.compiler.errors import CompilationError  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

ILLEGAL = (torch.AcceleratorError, "an illegal memory access was encountered")
UNWRITTEN = (
    UninitializedReadError,
    "lanes that the mask lets through read what nothing has written",
)


class Planted(NamedTuple):
    """A mistake, with its twin.

    Attributes:
        run: Makes the mistake, or does it right where its argument is True.
        error: The class and a part of the text of the error.
        note: What the note says, where there is one.
        options: The options of the scope.
    """

    run: Callable[[bool], Any]
    error: tuple[type[BaseException], str]
    note: str = ""
    options: dict[str, Any] = {}


def ones(n: int, device: str = "cuda") -> torch.Tensor:
    return torch.ones(n, device=device)


def copy(
    n: int = 100,
    size: int = 100,
    stride: int = 1,
    masked: bool = True,
    blocks: int = 4,
    out: int = 128,
) -> None:
    kernels.copied[(blocks,)](ones(size), ones(out), n, stride, MASKED=masked, BLOCK=32)


def on(device: int, *tensors: torch.Tensor) -> None:
    with torch.cuda.device(device):
        kernels.copied[(4,)](*tensors, 100, 1, MASKED=True, BLOCK=32)


def begun(count: int) -> torch.Tensor:
    tensor = torch.empty(100, dtype=torch.bfloat16, device="cuda")
    tensor[:count] = 1
    return tensor


def freed(right: bool) -> None:
    tensor = ones(32)
    pointers, out = torch.tensor([tensor.data_ptr()]).cuda(), ones(32)
    if not right:
        del tensor
    kernels.by_pointers[(1,)](pointers, out, 1, (), N=32)


def multiplied(kernel: Any, size: int = 64, **options: Any) -> torch.Tensor:
    a, b = (torch.eye(size, dtype=torch.float16, device="cuda") for _ in "ab")
    kernel[(1,)](a, b, out := torch.zeros(size, size, device="cuda"), **options)
    return out


PLANTED = {
    "no mask": Planted(
        lambda right: copy(masked=right),
        ILLEGAL,
        "reads 4 bytes at offset 400 of the 400 bytes of argument 'x'",
    ),
    "a mask by the wrong size": Planted(
        lambda right: copy(n=100 if right else 101), ILLEGAL, "(1 of 5 lanes"
    ),
    "a stride that is too large": Planted(
        lambda right: copy(stride=1 if right else 2), ILLEGAL, "'x'"
    ),
    "a store beyond the output": Planted(
        lambda right: copy(out=100 if right else 99), ILLEGAL, "writes 4 bytes at offset 396"
    ),
    "an offset below 0": Planted(
        lambda right: kernels.shifted[(1,)](ones(32), ones(32), 32, 0 if right else -1, BLOCK=32),
        ILLEGAL,
        "offset -4 ",
    ),
    "a grid with a block too many": Planted(
        lambda right: copy(size=128, n=128, masked=False, blocks=4 if right else 5),
        ILLEGAL,
        "instance (4, 0, 0) of (5, 1, 1)",
    ),
    "a tensor of the host": Planted(
        lambda right: on(0, ones(100, "cuda" if right else "cpu"), ones(100)),
        (ValueError, "cannot be accessed from Triton (cpu tensor?)"),
    ),
    "a tensor of another device": Planted(
        lambda right: on(0, ones(100, f"cuda:{1 - right}"), ones(100)), ILLEGAL, "is on cuda:1"
    ),
    "a launch on another device": Planted(
        lambda right: on(int(right), ones(100, "cuda:1"), ones(100, "cuda:1")),
        ILLEGAL,
        "is launched on cuda:0",
    ),
    "a pointer to freed memory": Planted(freed, ILLEGAL, "which is no tensor's on the device"),
    "a sum without an atomic": Planted(
        lambda right: kernels.summed[(4,)](
            ones(128), torch.zeros(1, device="cuda"), ATOMIC=right, BLOCK=32
        ),
        (KernelRaceError, "another instance writes"),
        options={"races": "error"},
    ),
    "a histogram without an atomic": Planted(
        lambda right: kernels.histogram[(4,)](
            torch.arange(128, device="cuda") % 7,
            torch.zeros(7, device="cuda"),
            ATOMIC=right,
            BLOCK=32,
        ),
        (KernelRaceError, "which another instance writes: (0, 0, 0)"),
        options={"races": "error"},
    ),
    "neighbours read in place": Planted(
        lambda right: (
            lambda x: kernels.neighbours[(4,)](x, ones(128) if right else x, 128, BLOCK=32)
        )(ones(128)),
        (KernelRaceError, "argument 'x' or 'out', which another instance"),
        options={"races": "error"},
    ),
    "blocks that overlap": Planted(
        lambda right: kernels.strided[(4,)](ones(128), 128, 32 if right else 16, BLOCK=32),
        (
            KernelRaceError,
            "writes element 16 of argument 'out', which another instance writes: (0, 0, 0)",
        ),
        options={"races": "error"},
    ),
    "an input of torch.empty": Planted(
        lambda right: on(0, (torch.zeros if right else torch.empty)(100, device="cuda"), ones(100)),
        UNWRITTEN,
        options={"uninitialized": "error"},
    ),
    "an input of which a half is written": Planted(
        lambda right: on(0, begun(100 if right else 50), ones(100)),
        (UninitializedReadError, "instance (1, 0, 0) of (4, 1, 1) reads 2 bytes at offset 100"),
        options={"uninitialized": "error"},
    ),
    "an atomic on torch.empty": Planted(
        lambda right: kernels.summed[(4,)](
            ones(128),
            (torch.zeros if right else torch.empty)(1, device="cuda"),
            ATOMIC=True,
            BLOCK=32,
        ),
        (
            UninitializedReadError,
            "updates 4 bytes at offset 0 of the 4 bytes of argument 'out' (1 of 1 lanes",
        ),
        options={"uninitialized": "error"},
    ),
    "a copy of torch.empty": Planted(
        lambda right: on(0, begun(100 if right else 0).clone(), ones(100)),
        UNWRITTEN,
        options={"uninitialized": "error"},
    ),
    "a failed tl.device_assert": Planted(
        lambda right: kernels.asserted[(1,)](ones(1), LIMIT=2 if right else 1, debug=True),
        (torch.AcceleratorError, "device-side assert triggered"),
        "too large",
    ),
    "a grid beyond CUDA's limits": Planted(
        lambda right: kernels.ranged[(1, 1 if right else 65536)](ones(32), N=32),
        (RuntimeError, r"Triton Error \[CUDA\]: invalid argument"),
    ),
    "a range that is no power of 2": Planted(
        lambda right: kernels.ranged[(1,)](ones(32), N=32 if right else 24),
        (CompilationError, "power of 2"),
    ),
    "a condition of several elements": Planted(
        lambda right: kernels.conditional[(1,)](ones(32), ones(1), N=32, WHOLE=not right),
        (CompilationError, "more than one value is ambiguous"),
    ),
    "shapes that do not fit": Planted(
        lambda right: kernels.shapes[(1,)](ones(32), ones(32), N=32, M=32 if right else 16),
        (CompilationError, "incompatible"),
    ),
    "a product too small for the tensor cores": Planted(
        lambda right: kernels.dotted[(1,)](ones(1024), ones(1024), N=32 if right else 4),
        (CompilationError, "should have"),
    ),
    "a float8 that the GPU has not": Planted(
        lambda right: kernels.through[(1,)](
            ones(32), ones(32), N=32, DTYPE=tl.float8e5 if right else tl.float8e4nv
        ),
        (CompilationError, "not supported in this architecture"),
    ),
    "a failed tl.static_assert": Planted(
        lambda right: kernels.statically[(1,)](ones(1), LIMIT=2 if right else 1),
        (CompilationError, "too large"),
    ),
    "more shared memory than the device has": Planted(
        lambda right: multiplied(kernels.large_product, N=32 if right else 64, STEPS=1),
        (OutOfResources, "out of resource: shared memory, Required: 16384, Hardware limit: 10000"),
        options={"properties": {"shared_memory_per_block_optin": 10_000}},
    ),
    **{
        what: Planted(
            lambda right, what=what: kernels.refused[(1,)](
                ones(32), N=32, WHAT="nothing" if right else what
            ),
            (CompilationError, text),
        )
        for what, text in {
            "a global variable": "Cannot access global variable SCALE",
            "a block for noinline": "marked noinline, but was called with non-scalar argument",
            "a loop that changes a shape": "Loop-carried variable total has initial type",
            "a list": "at ",
        }.items()
    },
    "an option that does not exist": Planted(
        lambda right: kernels.ranged[(1,)](
            ones(32), N=32, **{"num_warps" if right else "warps": 4}
        ),
        (KeyError, "unrecognised"),
    ),
}
"""Mistakes by name."""


def run(planted: Planted, right: bool) -> BaseException | None:
    with torchdevice.simulate(count=2, **planted.options):
        try:
            planted.run(right)
        except Exception as error:
            return error
    return None


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_and_its_twin(name: str) -> None:
    planted = PLANTED[name]
    error = run(planted, False)
    kind, text = planted.error
    with pytest.raises(
        kind,
        match=text
        if "\\" in text
        else text.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?"),
    ):
        raise error or AssertionError("the mistake was not found")
    assert planted.note in "".join(getattr(error, "__notes__", [planted.note]))
    assert run(planted, True) is None


def test_the_note_names_kernel_line_and_instance() -> None:
    with torchdevice.simulate():
        with pytest.raises(torch.AcceleratorError) as caught:
            copy(masked=False)
    (note,) = caught.value.__notes__
    line = next(
        i
        for i, text in enumerate(Path(kernels.__file__).read_text().splitlines(), 1)
        if "tl.load(x + at * stride))" in text
    )
    assert note.startswith(
        f"The Triton kernel 'copied', {kernels.__file__}:{line}, instance (3, 0, 0) of (4, 1, 1) "
        "reads"
    )


def test_a_simulated_gpu_runs_nothing_after_an_illegal_access() -> None:
    with torchdevice.simulate():
        x = ones(4)
        with pytest.raises(torch.AcceleratorError):
            copy(masked=False)
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            x + 1
    with torchdevice.simulate():
        assert (ones(4) + 1).sum().item() == 8


def test_a_cpu_target_looks_at_addresses_too_and_goes_on() -> None:
    with torchdevice.portable("cpu"):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            copy(masked=False)
        copy()


def test_a_race_can_be_a_warning() -> None:
    total = math.nan
    with torchdevice.simulate(races="warn"):
        out = torch.zeros(1, device="cuda")
        with pytest.warns(RaceWarning, match="which another instance"):
            kernels.summed[(4,)](ones(128), out, ATOMIC=False, BLOCK=32)
        total = out.item()
    assert total == 128  # the instances run one after the other


def test_a_lock_orders_instances() -> None:
    with torchdevice.simulate(races="error"):
        lock, count = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        kernels.locked[(10,)](lock, count)
        assert count.item() == 10


def test_shared_memory_beyond_the_device_models() -> None:
    """By Triton's figure for the kernel that ``warmup`` compiles for the model's capability."""
    args = [torch.float16, torch.float16, torch.float32]
    with torchdevice.simulate("a100"):
        compiled = kernels.large_product.warmup(*args, N=64, STEPS=4, num_stages=4, grid=(1,))
        compiled._init_handles()
        assert compiled.n_regs > 0
        shared = compiled.metadata.shared
    with torchdevice.simulate("a100", properties={"shared_memory_per_block_optin": shared - 1}):
        compiled = kernels.large_product.warmup(*args, N=64, STEPS=4, num_stages=4, grid=(1,))
        with pytest.raises(OutOfResources, match=f"shared memory, Required: {shared}"):
            compiled._init_handles()


def test_autotune_takes_a_configuration_that_fits() -> None:
    for limit, chosen in ((16 << 10, 64), (10_000, 32)):
        with torchdevice.simulate(properties={"shared_memory_per_block_optin": limit}):
            multiplied(kernels.tuned_product)
            assert kernels.tuned_product.best_config.kwargs == {"N": chosen}
    with torchdevice.simulate(properties={"shared_memory_per_block_optin": 1024}):
        with pytest.raises(OutOfResources):
            multiplied(kernels.tuned_product)


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_tritons_compiler_reads_a_kernel_once(
    target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once per specialization: it prints at compilation, not from the instances."""
    with torchdevice.portable(target):
        for size in (32, 32, 64, 32):
            kernels.refused[(4,)](torch.zeros(64, device="cuda"), N=size, WHAT="nothing")
    assert capfd.readouterr().out.splitlines() == ["compiled for 32", "compiled for 64"]
