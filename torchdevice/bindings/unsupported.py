"""Names that have no honest equivalent: raw pointers, handles, allocators. Each raises and names the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torchdevice._journal import Fidelity
from torchdevice.bindings import supplies
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_POINTER = "It hands out a CUDA pointer or handle. Use torch tensors and functions instead."
_POOL = (
    "Memory pools and pluggable allocators replace CUDA's allocator. Leave them out; tensors are allocated as usual."
)
_TRACE = "CUDA's allocator history is not recorded. Use torch.profiler with profile_memory=True."
_KERNEL = "It compiles or launches CUDA code. Use a torch function, or a CPU implementation."
_TUNABLE = "TunableOp tunes GPU matrix products. Leave it off."

REMEDIES = {
    **dict.fromkeys(
        (
            "_cuda_getCurrentBlasHandle",
            "_cuda_getCurrentSolverHandle",
            "_cuda_getCurrentRawStream",
            "_cuda_getStreamFromExternal",
            "_cuda_cudaCachingAllocator_raw_alloc",
            "_cuda_cudaCachingAllocator_raw_delete",
            "_cuda_busy_wait_for_flag",
            "_cuda_clear_flag",
        ),
        _POINTER,
    ),
    **dict.fromkeys(
        (
            "_cuda_beginAllocateCurrentStreamToPool",
            "_cuda_changeCurrentAllocator",
            "_cuda_checkPoolLiveAllocations",
            "_cuda_cudaHostAllocator",
            "_cuda_customAllocator",
            "_cuda_getAllocator",
            "_cuda_getCheckpointState",
            "_cuda_setCheckpointPoolState",
        ),
        _POOL,
    ),
    **dict.fromkeys(
        (
            "_cuda_allocationTraceback",
            "_cuda_annotateMemory",
            "_cuda_attach_out_of_memory_observer",
            "_cuda_isHistoryEnabled",
            "_cuda_memorySnapshot",
            "_cuda_record_memory_history",
            "_cuda_record_memory_history_legacy",
            "_cuda_getMemoryMetadata",
            "_cuda_setMemoryMetadata",
        ),
        _TRACE,
    ),
    "_cuda_jiterator_compile_and_launch_kernel": _KERNEL,
    **dict.fromkeys(
        (
            "_cuda_record_untuned_enable",
            "_cuda_record_untuned_is_enabled",
            "_cuda_tunableop_enable",
            "_cuda_tunableop_is_enabled",
            "_cuda_tunableop_tuning_enable",
            "_cuda_tunableop_tuning_is_enabled",
        ),
        _TUNABLE,
    ),
}


def _refusing(name: str, remedy: str) -> None:
    def refuse(scope: Scope, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupportedError(f"torch._C.{name}", remedy)

    supplies(name, Fidelity.UNSUPPORTED, note=remedy)(refuse)


for _name, _remedy in REMEDIES.items():
    _refusing(_name, _remedy)
