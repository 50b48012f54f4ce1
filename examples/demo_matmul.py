"""Matrix multiplication, timed with CUDA events."""

import torch

torch.backends.cuda.matmul.allow_tf32 = True
stream = torch.cuda.Stream()

for n in (64, 256, 512):
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(n, n, device="cuda", dtype=dtype)
        b = torch.randn(n, n, device="cuda", dtype=dtype)
        for _ in range(2):
            a @ b
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(5):
                c = a @ b
            end.record()
        torch.cuda.current_stream().wait_stream(stream)
        end.synchronize()
        milliseconds = start.elapsed_time(end) / 5
        print(
            f"{n:4d} {str(dtype):15s} {milliseconds:8.3f} ms {2 * n**3 / milliseconds / 1e6:8.1f} "
            "GFLOP/s"
        )
