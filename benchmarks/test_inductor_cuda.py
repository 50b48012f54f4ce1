"""PyTorch's TorchInductor tests for CUDA: a checkout's ``test/inductor/test_torchinductor.py``.

That file makes them for CUDA only where Triton compiles for a GPU, which a simulated one does not
have.
"""

from __future__ import annotations

from inductor import test_torchinductor  # type: ignore[import-not-found]


class GPUTests(test_torchinductor.TestCase):  # type: ignore[misc]
    """The tests that PyTorch makes for CUDA under this name."""

    common = test_torchinductor.check_model_gpu
    device = "cuda"


test_torchinductor.copy_tests(test_torchinductor.CommonTemplate, GPUTests, "cuda")
