"""Autocast follows CUDA's lists on every target; torch's CUDA kernels set the dtypes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from conftest import plain_torch
from processes import run_python
from same_dtypes import Dtypes, autocast_of, differences, dtypes_of, of_torch
from sweeping import choose, samples_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import torchdevice
from torchdevice.kernel.devices.registry import runtime
from torchdevice.torch_modules.apis import autocast_lists

LOWER = torch.bfloat16

TARGETS = {"cpu": {"autocast": "bfloat16"}, "simulated:cuda": {"identity": "target"}}
"""The targets, with options that do not depend on the machine's CPU."""

MIXTURES: dict[str, Callable[[int], torch.dtype]] = {
    "lower": lambda position: LOWER,
    "float32": lambda position: torch.float32,
    "mixed": lambda position: (LOWER, torch.float32)[position % 2],
}

LEFT_OUT = {
    "as_strided": "its samples need a storage of their own",
    "ldexp": "torch decomposes it in another way without values",
    "mvlgamma": "torch decomposes it in another way without values",
    "matrix_exp": "its kernel calls listed operators, which a kernel without values does not",
    "torch.ops.aten._safe_softmax.default": (
        "its kernel calls listed operators, which a kernel without values does not"
    ),
    "_softmax_backward_data": (
        "in bfloat16 its CPU kernel returns another dtype than the one without values"
    ),
    "native_batch_norm": "in bfloat16 its CPU kernel returns statistics in bfloat16",
    "_native_batch_norm_legit": "in bfloat16 its CPU kernel returns statistics in bfloat16",
}
"""Operators whose results without values have other dtypes for other reasons than autocast."""

OPERATORS = [
    op
    for op in op_db
    if {LOWER, torch.float32} <= op.supported_dtypes("cuda") and op.name not in LEFT_OUT
]
"""The operators of torch's database that CUDA has in bfloat16."""


class Call(NamedTuple):
    name: str
    function: Callable[..., Any]
    inputs: Any
    """The positional arguments and those by keyword, with CPU tensors."""


def mixed(inputs: Any, dtype_at: Callable[[int], torch.dtype]) -> Any:
    """Return inputs whose float32 tensors have the dtypes of a mixture."""
    position = 0

    def cast(leaf: Any) -> Any:
        nonlocal position
        if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.float32:
            return leaf
        position += 1
        return leaf.to(dtype_at(position))

    return pytree.tree_map(cast, inputs)


def calls(op: Any) -> Iterator[Call]:
    """Yield calls of an operator of torch's database."""
    for sample in list(samples_of(op, torch.float32, requires_grad=False))[:3]:
        inputs = ((sample.input, *sample.args), sample.kwargs)
        for name, dtype_at in MIXTURES.items():
            yield Call(f"{op.formatted_name} {name}", op, mixed(inputs, dtype_at))


def listed() -> Iterator[Call]:
    """Yield the calls by which torch tests its own lists, on a GPU."""
    lists = AutocastTestLists("cpu")
    for name, module in {
        "torch": torch,
        "nn": torch._C._nn,
        "linalg": torch._C._linalg,
        "methods": torch.Tensor,
    }.items():
        for kind in ("fp16", "fp32", "need_autocast_promote"):
            for operator, *given in getattr(lists, f"{name}_{kind}", ()):
                if isinstance(given[0], str):  # an equation of einsum
                    given = [(given[0], *given[1])]
                kwargs = given[1] if len(given) > 1 and isinstance(given[1], dict) else {}
                yield Call(
                    operator,
                    getattr(module, operator),
                    pytree.tree_map(in_lower, (given[0], kwargs)),
                )


def in_lower(leaf: Any) -> Any:
    return (
        leaf.to(LOWER) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float16 else leaf
    )


def found(call: Call) -> Dtypes | str:
    """Return the dtypes of the results of a call under autocast; the text of an error."""
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, call.inputs
    )
    try:
        with torch.autocast("cuda", LOWER):
            return dtypes_of(call.function(*args, **kwargs))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refuses(call: Call) -> bool:
    """Return whether the CPU refuses the dtypes without autocast too, asked of values only."""
    args, kwargs = call.inputs
    try:
        with plain_torch():
            call.function(*args, **kwargs)
    except RuntimeError:
        return True
    return False


def compare(target: str, chosen: list[Call]) -> int:
    """Assert calls' dtypes on a target as in torch's CUDA kernels. Return the number taken."""
    wanted = [of_torch("cuda", call.function, call.inputs, LOWER) for call in chosen]
    taken = [
        (call, dtypes) for call, dtypes in zip(chosen, wanted, strict=True) if dtypes is not None
    ]
    with torchdevice.portable(target, **TARGETS[target]):  # type: ignore[arg-type]
        results = [(call, found(call), dtypes) for call, dtypes in taken]
        wrong = [
            f"{call.name}: {result}, on CUDA {dtypes}"
            for call, result, dtypes in results
            if result != dtypes and not refuses(call)
        ]
    assert not wrong, "\n".join(wrong)
    return len(taken)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_every_operator_of_the_database(target: str, sweep: tuple[bool, int]) -> None:
    operators = choose(OPERATORS, sweep, 12)
    count = compare(target, [call for op in operators for call in calls(op)])
    assert count > 3 * len(operators)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_what_torch_tests_its_lists_with(target: str) -> None:
    assert compare(target, list(listed())) > 60


Tensors = list[torch.Tensor]

PROMOTING: dict[str, tuple[Callable[[Tensors], Any], list[tuple[int, ...]]]] = {
    "addcdiv": (lambda given: torch.addcdiv(*given), [(2, 2)] * 3),
    "addcmul": (lambda given: torch.addcmul(*given), [(2, 2)] * 3),
    "atan2": (lambda given: torch.atan2(*given), [(2, 2)] * 2),
    "bilinear": (lambda given: torch.nn.functional.bilinear(*given), [(2, 2), (2, 2), (2, 2, 2)]),
    "bilinear with a bias": (
        lambda given: torch.nn.functional.bilinear(*given),
        [(2, 2), (2, 2), (2, 2, 2), (2,)],
    ),
    "cross": (lambda given: torch.cross(*given, dim=0), [(3, 2)] * 2),
    "dot": (lambda given: torch.dot(*given), [(3,)] * 2),
    "vdot": (lambda given: torch.vdot(*given), [(3,)] * 2),
    "grid_sampler": (
        lambda given: torch.nn.functional.grid_sample(*given, align_corners=False),
        [(1, 1, 2, 2), (1, 2, 2, 2)],
    ),
    "index_put": (
        lambda given: given[0].index_put(
            [torch.zeros(1, dtype=torch.int64, device="cuda")], given[1]
        ),
        [(2,), (1,)],
    ),
    "tensordot": (lambda given: torch.tensordot(*given, dims=1), [(2, 2)] * 2),
    "scatter_add": (
        lambda given: torch.scatter_add(
            given[0], 0, torch.zeros(2, dtype=torch.int64, device="cuda"), given[1]
        ),
        [(2,)] * 2,
    ),
    "cat": (lambda given: torch.cat(given), [(2,)] * 3),
    "stack": (lambda given: torch.stack(given), [(2,)] * 3),
    "index_copy": (
        lambda given: torch.index_copy(
            given[0], 0, torch.zeros(1, dtype=torch.int64, device=given[0].device), given[1]
        ),
        [(2,), (1,)],
    ),
}
"""What promotes its arguments on CUDA or on the CPU -> the call, and the shapes of the arguments.
"""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

REFUSAL = "Unexpected floating ScalarType in at::autocast::prioritize"


def promoted(name: str, dtypes: tuple[torch.dtype, ...], device: str) -> str:
    """Return a call's dtype, with two dtypes in turn; or autocast's error text."""
    call, shapes = PROMOTING[name]
    given = [
        torch.ones(shape, dtype=dtypes[i % len(dtypes)], device=device)
        for i, shape in enumerate(shapes)
    ]
    try:
        return str(call(given).dtype)
    except RuntimeError as error:
        return "another error" if REFUSAL not in str(error) else REFUSAL


def on_cuda(name: str, dtypes: tuple[torch.dtype, ...], lower: torch.dtype) -> str:
    """Return the same of torch's own kernels for CUDA, on tensors without values."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs each refusal with its stack
    try:
        with autocast_of("cuda", lower), FakeTensorMode():
            return promoted(name, dtypes, "cuda")
    finally:
        logging.disable(disabled)


def test_every_operator_that_promotes_has_its_pairs() -> None:
    header = {
        name for name, macro in autocast_lists.policies().items() if macro == "AT_FORALL_PROMOTE"
    }
    assert header == PROMOTING.keys() - {"bilinear with a bias", "cat", "stack", "index_copy"}


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PROMOTING)
def test_every_pair_of_dtypes_promotes_as_on_cuda(name: str, lower: torch.dtype) -> None:
    wrong, refused = [], 0
    for dtypes in itertools.product(FLOATS, repeat=2):
        wanted = on_cuda(name, dtypes, lower)
        with torchdevice.simulate(), torch.autocast("cuda", lower):
            found = promoted(name, dtypes, "cuda")
        refused += wanted == REFUSAL
        if found != wanted and "another error" not in (wanted, found):
            wrong.append(f"{dtypes}: {found}, on CUDA {wanted}")
    assert not wrong, "\n".join(wrong)
    assert refused or name in ("cat", "stack", "index_copy")


@pytest.mark.parametrize("name", PROMOTING)
def test_no_pair_is_refused_on_a_cpu_that_computes_in_another_dtype(name: str) -> None:
    """Where a CPU computes float16 in bfloat16, arguments may have either."""
    lower, wrong = torch.float16, []
    for dtypes in itertools.product(FLOATS, repeat=2):
        wanted = on_cuda(name, dtypes, lower)
        with torchdevice.portable("cpu", autocast="bfloat16"), torch.autocast("cuda", lower):
            found = promoted(name, dtypes, "cuda")
        known = torch.float32 in dtypes or dtypes == (lower, lower)
        is_other = known and found != wanted and not {"another error", REFUSAL} & {found, wanted}
        if found == REFUSAL or is_other:
            wrong.append(f"{dtypes}: {found}, on CUDA {wanted}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
@pytest.mark.filterwarnings("ignore")
def test_the_lists_on_devices_that_are_not_here(device: str, sweep: tuple[bool, int]) -> None:
    """On valueless tensors torch's kernels for any device run, beside this package's."""
    found = runtime(device)
    own = (
        nullcontext()
        if found.support.autocast_key is None
        else autocast_lists.Region(found, enabled=True)
    )
    wrong = []
    for call in [*listed(), *(call for op in choose(OPERATORS, sweep, 12) for call in calls(op))]:
        wanted = of_torch("cuda", call.function, call.inputs, LOWER)
        if wanted is None or call.name.startswith(CASTS_BATCH_NORM):
            continue
        with own:
            got = of_torch(device, call.function, call.inputs, LOWER)
        if got != wanted and got is not None:
            wrong.append(f"{call.name}: {got}, on CUDA {wanted}")
    assert not wrong, "\n".join(wrong)


CASTS_BATCH_NORM = ("batch_norm", "nn_functional_batch_norm", "nn_functional_instance_norm")
"""What torch's own autocast of MPS computes in float32; CUDA's lists do not have it."""


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_not_a_number_of_sixteen_bits_stays(target: str) -> None:
    with torchdevice.portable(target, **TARGETS[target]), torch.autocast("cuda", LOWER):  # type: ignore[arg-type]
        double = torch.ones(2, 2, dtype=torch.float64).cuda()
        whole = torch.ones(2, dtype=torch.int64).cuda()
        assert (
            double @ double
        ).dtype is double.exp().dtype is torch.float64 and whole.sum().dtype is torch.int64
        assert torch.ones(2, 2, dtype=LOWER).cuda().softmax(0, dtype=LOWER).dtype is LOWER
        with pytest.raises(RuntimeError, match="are unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(torch.ones(2).cuda(), torch.ones(2).cuda())


def test_nothing_of_it_is_outside_the_region() -> None:
    x = torch.ones(2, 2, dtype=LOWER)

    def elsewhere() -> None:
        with autocast_of("cpu", LOWER):
            seen.append(x.exp().dtype)

    seen: list[torch.dtype] = []
    with torchdevice.portable("cpu", autocast="bfloat16"), torch.autocast("cuda", LOWER):
        assert x.exp().dtype is torch.float32
        with torch.autocast("cuda", enabled=False):
            assert x.exp().dtype is LOWER
        with plain_torch():
            thread = Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert x.exp().dtype is torch.float32
    elsewhere()
    assert seen == [LOWER, LOWER]


def test_a_mask_of_a_softmax() -> None:
    with torchdevice.portable("cpu", autocast="bfloat16"), torch.autocast("cuda", LOWER):
        logits = torch.nn.Linear(4, 4).cuda()(torch.randn(4, 4, device="cuda"))
        kept = torch.zeros(4, 4, device="cuda")
        mask = torch.ones(4, dtype=torch.bool, device="cuda")
        kept[mask] = logits.softmax(-1)[mask]
        assert torch.allclose(kept.sum(-1), torch.ones(4, device="cuda"))


# ---- programs ------------------------------------------------------------------------------------


class Llama(torch.nn.Module):
    """A decoder as in public programs: RMSNorm by pow and rsqrt, rotary places, gated MLP."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, width)
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.gate, self.up, self.down = (torch.nn.Linear(width, width) for _ in range(3))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        angles = torch.arange(tokens.shape[1], device=x.device).float()[:, None] * torch.ones(
            q.shape[-1], device=x.device
        )
        q, k = q * angles.cos(), k * angles.cos()
        weights = (q @ k.transpose(-1, -2) / 6).masked_fill(
            torch.ones(8, 8, device=x.device).triu(1).bool(), -1e4
        )
        x = x + self.out(weights.softmax(-1) @ v)
        x = x + self.down(torch.nn.functional.silu(self.gate(self.norm(x))) * self.up(x))
        return self.norm(x) @ self.embedding.weight.T


def language() -> None:
    model = Llama().cuda()
    tokens = torch.arange(16, device="cuda").view(2, 8)
    with torch.autocast("cuda", LOWER):
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1
        )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def vision() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.PReLU(),
        torch.nn.Upsample(scale_factor=2, mode="bilinear"), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(),
        torch.nn.LayerNorm(32), torch.nn.Linear(32, 10),
    ).cuda()  # fmt: skip
    x, y = torch.randn(2, 3, 16, 16, device="cuda"), torch.tensor([1, 2], device="cuda")
    with torch.autocast("cuda", LOWER):
        found = model(x)
        loss = torch.nn.functional.multi_margin_loss(found, y) + torch.nn.functional.smooth_l1_loss(
            found, found * 2
        )
    loss.backward()


def detection() -> None:
    boxes = torch.rand(8, 4, device="cuda")
    with torch.autocast("cuda", LOWER):
        head = torch.nn.Linear(4, 8, device="cuda")(boxes)
        scores, order = head.sigmoid().amax(-1).sort(descending=True)
        kept = torch.zeros(8, device="cuda")
        kept[order] = scores.log_softmax(0).exp()
        areas = (boxes[:, 2] - boxes[:, 0]).abs().sqrt().prod() + torch.cdist(head, head).sum()
        torch.einsum("ij,kj->ik", head, boxes.repeat(1, 2)).cumsum(0).norm() + areas + kept.std()


def recurrent() -> None:
    model, cell = torch.nn.LSTM(8, 8, 2).cuda(), torch.nn.GRUCell(8, 8).cuda()
    with torch.autocast("cuda", LOWER):
        output, (hidden, state) = model(torch.randn(3, 2, 8, device="cuda"))
        cell(output[-1], hidden[0]).softmax(-1).sum() + state.sum()


@pytest.mark.parametrize(
    "program", [language, vision, detection, recurrent], ids=lambda program: program.__name__
)
def test_programs_have_the_same_dtypes_on_a_cpu_as_on_a_simulated_gpu(
    program: Callable[[], object],
) -> None:
    assert differences(program) == []


LIBRARY = """
import torch
library = torch.library.Library("some_library", "DEF")
library.define("op(Tensor x) -> Tensor")
for key in ("CPU", "AutocastCPU"):
    library.impl("op", lambda x: x + 1, key)
with torch.autocast("cuda", torch.bfloat16):
    x = torch.ones(2, 2, device="cuda")
    print((x @ x).dtype, torch.ops.some_library.op(x).tolist())
"""


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_operators_of_a_library_may_have_kernels_for_autocast(target: str) -> None:
    """As torchvision's have. They are read once in a process, at its first region of autocast."""
    ran = run_python(
        "-m", "torchdevice", "run", "--target", target, "--autocast", "bfloat16", "-c", LIBRARY
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "torch.bfloat16 [[2.0, 2.0], [2.0, 2.0]]\n"
