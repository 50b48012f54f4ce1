"""Calls functions that need a real GPU, and prints the result or the error of each."""

import torch


def attempt(name, function):
    try:
        function()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        print(f"{name}: works")


KERNEL = "template <typename T> T twice(T x) { return x + x; }"

x = torch.ones(4, device="cuda")
attempt("a raw stream pointer", lambda: torch.cuda.Stream().cuda_stream)
attempt("a wrapped stream", lambda: torch.cuda.ExternalStream(1))
attempt("raw memory", lambda: torch.cuda.caching_allocator_alloc(1024))
attempt("a memory pool", lambda: torch.cuda.MemPool())
attempt("a raw graph", lambda: torch.cuda.CUDAGraph().raw_cuda_graph())
attempt("a cuBLAS handle", lambda: torch.cuda.current_blas_handle())
attempt("a kernel in CUDA C++", lambda: torch.cuda.jiterator._create_jit_fn(KERNEL)(x))
attempt("an event for another process", lambda: torch.cuda.Event(interprocess=True).ipc_handle())
attempt("an ordinary sum", lambda: x.sum().item())
