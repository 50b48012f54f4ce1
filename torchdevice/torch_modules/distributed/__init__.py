"""Process groups, collectives and distributed tensors, for ``torch/distributed``."""

import torch

from torchdevice.kernel import torch_internals

if torch.distributed.is_available():
    torch_internals.check("later", "torch._C._distributed_c10d")
    torch_internals.check("later", "torch.distributed.distributed_c10d")
    if torch.distributed.rpc.is_available():
        torch_internals.check("later", "torch.distributed.rpc")
