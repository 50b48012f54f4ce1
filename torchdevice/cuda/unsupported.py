"""Names without an equivalent on a stand-in device: raw pointers, handles, allocators. Each raises with a remedy."""

from __future__ import annotations

from typing import Any, NoReturn

from torchdevice.core import thread_state
from torchdevice.core.bindings import supplied_function
from torchdevice.core.context import Context
from torchdevice.foundation.fidelity import Fidelity

POINTER = "It hands out a CUDA pointer or handle. Use torch tensors and functions instead."


POOL = (
    "Memory pools and pluggable allocators replace the accelerator's allocator. Leave them out; tensors are allocated "
    "as usual."
)


def refusing(name: str, remedy: str, *, native_to: str = "cuda") -> None:
    """Supply a function of ``torch._C`` that raises with a remedy."""

    def refuse(context: Context, *args: Any, **kwargs: Any) -> NoReturn:
        thread_state.refuse(f"torch._C.{name}", remedy)

    supplied_function(name, Fidelity.UNSUPPORTED, note=remedy, native_to=native_to)(refuse)


for _remedy, _names in {
    POINTER: "_cuda_getCurrentBlasHandle _cuda_getCurrentSolverHandle _cuda_busy_wait_for_flag _cuda_clear_flag",
    POOL: "_cuda_changeCurrentAllocator _cuda_cudaHostAllocator _cuda_customAllocator _cuda_getAllocator",
    "It compiles or launches CUDA code. Use a torch function, or a CPU implementation.": (
        "_cuda_jiterator_compile_and_launch_kernel"
    ),
    "NCCL's communicators need CUDA. Use torch.distributed, or torch.cuda.nccl without communicators.": (
        "_nccl_init_rank _nccl_unique_id"
    ),
    "hipBLASLt is a library of ROCm. Check torch.version.hip before this call.": "_cuda_getHipblasltVersion",
}.items():
    for _name in _names.split():
        refusing(_name, _remedy)
