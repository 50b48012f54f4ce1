"""PyTorch's tests of ``torch.distributed``, which its wheel has, for NCCL with two ranks.

:mod:`benchmarks.torch_tests` runs this file as it runs the files of a checkout.
"""

from __future__ import annotations

import os
import tempfile

# The ranks import this file, too, and keep what the first process has set.
os.environ.update(
    {
        "BACKEND": "nccl",
        "WORLD_SIZE": "2",
        "TEMP_DIR": tempfile.mkdtemp(),
        "INIT_METHOD": "env://",
        **os.environ,
    }
)

from torch.testing._internal.distributed import distributed_test


class TestDistributedOnCUDA(
    distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
):
    """The NCCL tests that PyTorch's ``test_distributed_spawn.py`` makes."""

    def setUp(self) -> None:
        """Start the ranks."""
        super().setUp()
        self._spawn_processes()
