"""Prints what a program usually asks about its GPU."""

import torch

print("available:", torch.cuda.is_available(), "devices:", torch.cuda.device_count())
print(
    "CUDA",
    torch.version.cuda,
    "cuDNN",
    torch.backends.cudnn.version(),
    "NCCL",
    torch.cuda.nccl.version(),
)
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    print(
        f"{i}: {p.name}, {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB, "
        f"{p.multi_processor_count} processors"
    )
print(
    "current:",
    torch.cuda.current_device(),
    torch.cuda.get_device_name(),
    torch.cuda.get_device_capability(),
)
print("bfloat16:", torch.cuda.is_bf16_supported(), "architectures:", torch.cuda.get_arch_list())

x = torch.ones(4 * 2**20, device="cuda")
free, total = torch.cuda.mem_get_info()
print(f"free {free / 2**30:.1f} of {total / 2**30:.1f} GiB")
print(
    f"allocated {torch.cuda.memory_allocated() / 2**20:.0f} MiB, reserved "
    f"{torch.cuda.memory_reserved() / 2**20:.0f} MiB"
)
del x
torch.cuda.empty_cache()
print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
print(torch.cuda.memory_summary(abbreviated=True))
