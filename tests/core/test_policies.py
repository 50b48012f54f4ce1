"""Device properties and their option, flags of CUDA's libraries, enabled attention backends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import run_program
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import torchdevice
from torchdevice.errors import FidelityError
from torchdevice.kernel.fidelity import Fidelity

FIELDS_OF_CUDA = """
    name major minor total_memory multi_processor_count uuid is_integrated is_multi_gpu_board warp_size clock_rate
    max_threads_per_multi_processor max_threads_per_block regs_per_multiprocessor shared_memory_per_block
    shared_memory_per_block_optin shared_memory_per_multiprocessor memory_clock_rate memory_bus_width L2_cache_size
    pci_bus_id pci_device_id pci_domain_id gcnArchName
"""
"""Of ``_CudaDeviceProperties`` in a CUDA build of torch 2.15."""


class TestProperties:
    def test_every_field_of_torchs_own_type(self, cuda: torchdevice.Scope) -> None:
        properties = torch.cuda.get_device_properties(0)
        own = vars(torch._C).get("_CudaDeviceProperties")
        names = (
            [n for n in dir(own) if n[0] != "_"]
            if isinstance(own, type)
            else FIELDS_OF_CUDA.split()
        )
        for name in {*names, *FIELDS_OF_CUDA.split()}:
            assert hasattr(properties, name), name
        assert isinstance(properties, torch._C._CudaDeviceProperties)
        assert isinstance(properties, torch.cuda._CudaDeviceProperties)
        assert repr(properties).startswith("_CudaDeviceProperties(name=")
        assert properties == torch.cuda.get_device_properties("cuda")

    def test_they_can_be_set(self, target: str) -> None:
        wanted = {
            "name": "NVIDIA A100-SXM4-80GB",
            "total_memory": 80 << 30,
            "multi_processor_count": 108,
        }
        with torchdevice.portable(target, properties=wanted, capability=(9, 0)):
            properties = torch.cuda.get_device_properties()
            assert {name: getattr(properties, name) for name in wanted} == wanted
            assert (
                (properties.major, properties.minor) == torch.cuda.get_device_capability() == (9, 0)
            )
            assert torch.cuda.get_device_name() == wanted[
                "name"
            ] and torch.cuda.get_arch_list() == ["sm_90"]
            assert torch.cuda.mem_get_info()[1] == 80 << 30 >= torch.cuda.mem_get_info()[0]
        with torchdevice.portable(target):
            assert torch.cuda.get_device_name() != wanted["name"]

    @pytest.mark.usefixtures("no_collections")
    def test_simulated_memory_is_the_total_memory_of_the_properties(self) -> None:
        with torchdevice.simulate(memory=1 << 30):
            assert (
                torch.cuda.get_device_properties(0).total_memory
                == 1 << 30
                == torch.cuda.mem_get_info()[1]
            )

    @pytest.mark.parametrize("bad", [{"major": 9}, {"colour": "green"}, {"name": "x", "minor": 1}])
    def test_fields_that_cannot_be_set_are_refused(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"cannot be set\. Use fields of"):
            torchdevice.portable("cpu", properties=bad)

    def test_started_processes_inherit_properties(self, tmp_path: Any) -> None:
        program = """
            import subprocess, sys, torch
            code = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.major)"
            scope = __import__("torchdevice").enable(
                "cpu", propagate=True, properties={"name": "a GPU"}, capability=(9, 0)
            )
            print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
            __import__("torchdevice").disable()
        """
        assert "a GPU 9" in run_program(tmp_path, program, options=["--target", "cpu"]).stdout

    @pytest.mark.parametrize(
        ("variable", "value", "message"),
        [
            ("TORCHDEVICE_CAPABILITY", "nine", "is not a compute capability"),
            ("TORCHDEVICE_PROPERTIES", "{", "is not a mapping"),
            pytest.param(
                "TORCHDEVICE_PROPERTIES",
                '{"name": ' + "[" * 100_000,
                "is not a mapping",
                id="nested",
            ),
            ("TORCHDEVICE_PROPERTIES", '{"name": {"a": 1}}', "is not of type str"),
            ("TORCHDEVICE_MEMORY", "much", "is not a size"),
        ],
    )
    def test_a_bad_variable_is_named_in_the_error(
        self, variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from torchdevice.scope import collected_options as options

        monkeypatch.setenv("TORCHDEVICE", "1")
        monkeypatch.setenv(variable, value)
        with pytest.raises(ValueError, match=message):
            options.from_environment()


BACKENDS = [
    [SDPBackend.FLASH_ATTENTION],
    [SDPBackend.EFFICIENT_ATTENTION],
    [SDPBackend.CUDNN_ATTENTION],
    [SDPBackend.MATH],
    [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
]


class Operators(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_cpu() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable("cpu") as scope:
        yield scope


class TestAttention:
    @pytest.mark.parametrize(
        "backends", BACKENDS, ids=lambda chosen: "+".join(each.name for each in chosen)
    )
    @pytest.mark.parametrize(
        "options", [{}, {"dropout_p": 0.5}, {"is_causal": True}, {"attn_mask": True}], ids=str
    )
    def test_disabled_backends_fall_back_to_the_targets(
        self, on_cpu: torchdevice.Scope, backends: list[SDPBackend], options: dict[str, Any]
    ) -> None:
        """A simulated device refuses what CUDA refuses: tests/simulation/refusals/test_rules.py."""
        attend = torch.nn.functional.scaled_dot_product_attention
        q = torch.rand(1, 2, 8, 16, device="cuda", requires_grad=True)
        if "attn_mask" in options:
            options = {"attn_mask": torch.ones(8, 8, dtype=torch.bool, device="cuda")}
        torch.manual_seed(0)
        with sdpa_kernel(backends):
            enabled = (
                torch.backends.cuda.math_sdp_enabled(),
                torch.backends.cuda.flash_sdp_enabled(),
            )
            chosen = attend(q, q, q, **options)
            assert enabled == (
                torch.backends.cuda.math_sdp_enabled(),
                torch.backends.cuda.flash_sdp_enabled(),
            )
        chosen.sum().backward()
        assert q.grad is not None and chosen.shape == q.shape
        if "dropout_p" not in options:
            assert torch.allclose(chosen, attend(q, q, q, **options), atol=1e-6)

    def test_the_fallback_is_reported_and_flags_stay(self) -> None:
        with torchdevice.portable("cpu") as scope:
            q = torch.rand(1, 2, 8, 16, device="cuda")
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), Operators() as operators:
                torch.nn.functional.scaled_dot_product_attention(q, q, q)
                assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in operators.seen
                assert not torch.backends.cuda.math_sdp_enabled()
            assert torch.backends.cuda.math_sdp_enabled()
            found = [
                entry for entry in scope.journal.entries if "scaled_dot_product" in entry.requested
            ]
            assert len(found) == 1 and found[0].fidelity is Fidelity.APPROXIMATE

    def test_strict_refuses(self) -> None:
        q = torch.rand(1, 2, 8, 16)
        with torchdevice.portable("cpu", strict=True), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            with pytest.raises(FidelityError, match="scaled_dot_product_attention"):
                torch.nn.functional.scaled_dot_product_attention(q.cuda(), q.cuda(), q.cuda())

    def test_wrong_shapes_raise_torchs_error(self, cuda: torchdevice.Scope) -> None:
        q = torch.rand(1, 2, 8, 16, device="cuda")
        with pytest.raises(RuntimeError, match=r"(?s)size|shape|dimension"):
            torch.nn.functional.scaled_dot_product_attention(q, q[..., :3], q)

    def test_by_the_mps_profile_as_on_a_mac(self) -> None:
        with torchdevice.simulate("mps"):
            q = torch.rand(1, 2, 8, 16, device="cuda")
            # MPS lacks the kernel, and torch takes the math backend.
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape


FLAGS: list[tuple[str, Any]] = [
    ("torch.backends.cuda.matmul.allow_tf32", True),
    ("torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction", False),
    ("torch.backends.cuda.matmul.allow_fp16_accumulation", True),
    ("torch.backends.cudnn.allow_tf32", False),
    ("torch.backends.cudnn.benchmark", True),
    ("torch.backends.cudnn.benchmark_limit", 3),
    ("torch.backends.cudnn.deterministic", True),
    ("torch.backends.cuda.cufft_plan_cache.max_size", 7),
    ("torch.backends.cuda.cufft_plan_cache[0].max_size", 9),
]


class TestFlags:
    def test_plan_caches_are_those_of_the_scope(self) -> None:
        before = list(torch.backends.cuda.cufft_plan_cache.caches)
        for count in (1, 3):
            with torchdevice.portable("cpu", devices=count):
                last = torch.backends.cuda.cufft_plan_cache[count - 1]
                last.max_size = 7
                assert (
                    torch.backends.cuda.cufft_plan_cache[count - 1].max_size == last.max_size == 7
                )
                with pytest.raises(RuntimeError, match=f"0 <= device index < {count}"):
                    torch.backends.cuda.cufft_plan_cache[count]
        assert torch.backends.cuda.cufft_plan_cache.caches == before

    @pytest.mark.parametrize(("flag", "value"), FLAGS, ids=[flag for flag, _ in FLAGS])
    def test_flags_are_stored_and_read_back(
        self, cuda: torchdevice.Scope, flag: str, value: Any
    ) -> None:
        owner, _, name = flag.rpartition(".")
        holder = eval(owner, {"torch": torch})
        before = getattr(holder, name)
        # torch's test utilities, perhaps imported by another test, forbid changes of cuDNN's flags.
        with getattr(torch.backends, "__allow_nonbracketed_mutation")():
            try:
                setattr(holder, name, value)
                assert getattr(holder, name) == value
            finally:
                setattr(holder, name, before)

    def test_float32_matmul_precision_sets_allow_tf32(self, cuda: torchdevice.Scope) -> None:
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("high")
            assert torch.backends.cuda.matmul.allow_tf32 is True
        finally:
            torch.set_float32_matmul_precision(before)

    def test_preferred_linalg_library(self, cuda: torchdevice.Scope) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in ("cusolver", "magma", "default"):
                assert torch.backends.cuda.preferred_linalg_library(name).name.lower() == name
        with pytest.raises(RuntimeError, match="Unknown input value"):
            torch.backends.cuda.preferred_linalg_library("best")

    @pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
    def test_tensors_of_simulated_gpus_alone_are_acceptable_to_cudnn(self, target: str) -> None:
        """Elsewhere a recurrent network would flatten its weights for a cuDNN that is not there."""
        with torchdevice.portable(target):
            lstm = torch.nn.LSTM(4, 5, 2).cuda()
            output, _ = lstm(torch.rand(3, 2, 4, device="cuda"))
            lstm.flatten_parameters()
            assert torch.backends.cudnn.is_acceptable(output) is (target == "simulated:cuda")
            assert not torch.backends.cudnn.is_acceptable(torch.rand(2))


# ---- private names, as libraries use them --------------------------------------------------------


def _restored_like_megatron(device: int = -1) -> None:
    """Megatron-LM and DeepSpeed put a state back in a call that CUDA's initialisation may delay."""
    from torch import _C
    from torch.cuda import _lazy_call
    from torch.cuda import device as device_ctx_manager

    state = torch.cuda.get_rng_state()
    expected = torch.rand(3, device="cuda")
    # No torch that is supported has this name, by which they put a state back in old ones.
    assert not hasattr(_C, "_cuda_setRNGState")

    def restore() -> None:
        with device_ctx_manager(device):
            torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)

    _lazy_call(restore)
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def _initialised_like_apex() -> None:
    torch.cuda._lazy_init()
    assert (
        torch.cuda._initialized
        and not torch.cuda._is_in_bad_fork()
        and not torch._C._cuda_isInBadFork()
    )
    assert torch.cuda._is_compiled() and torch.cuda._get_device_index("cuda", optional=True) == 0


def _cleared_like_lightning() -> None:
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _counted_like_accelerate() -> None:
    from unittest import mock

    with mock.patch.dict("os.environ", {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        assert torch.cuda.is_available()
    assert torch.cuda._parse_visible_devices() is not None


def _launched_like_bitsandbytes() -> None:
    assert torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()) == 0
    assert torch.cuda.current_stream().cuda_stream == 0


def _measured_like_deepspeed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.cuda.memory_cached() >= 0 and torch.cuda.max_memory_cached() >= 0
        torch.cuda.reset_max_memory_allocated()
        torch.cuda.reset_max_memory_cached()
    assert torch.cuda.default_stream() == torch.cuda.current_stream()
    generator = torch.cuda.default_generators[0]
    assert (
        torch.cuda._get_generator(torch.device("cuda")).initial_seed() == generator.initial_seed()
    )
    torch.cuda._sleep(100)


LIBRARIES: list[Callable[[], None]] = [
    _restored_like_megatron,
    _initialised_like_apex,
    _cleared_like_lightning,
    _counted_like_accelerate,
    _launched_like_bitsandbytes,
    _measured_like_deepspeed,
]


@pytest.mark.parametrize("use", LIBRARIES, ids=lambda use: use.__name__.strip("_"))
def test_private_names_that_libraries_use(cuda: torchdevice.Scope, use: Callable[[], None]) -> None:
    use()
