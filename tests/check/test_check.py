"""``torchdevice check``: true and false findings of each rule, in sources that never run."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
import textwrap
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies
from processes import run_command, run_fresh_python
from rich.console import Console

from torchdevice.check import RULES, Finding, Target, check_file, check_source, checker, formats
from torchdevice.kernel.python import styled_text
from torchdevice.simulation.profiles import missing_operators
from torchdevice.tools.cli import main

pytestmark = pytest.mark.one_engine


def findings(code: str, target: str = "cpu", rules: set[str] | None = None) -> list[Finding]:
    source = checker.program("program.py", textwrap.dedent(code).encode())
    return check_source(source, Target.named(target), rules)


class Case(NamedTuple):
    """A source, and a rule's findings: a verdict for each line marked with one in a comment.

    Attributes:
        kernels: Operator -> whether MPS has a kernel for it. Elsewhere another release of torch
            finds something else.
    """

    rule: str
    code: str
    target: str = "cpu"
    kernels: Mapping[str, bool] = MappingProxyType({})

    @property
    def expected(self) -> list[tuple[int, str, str]]:
        marked = enumerate(textwrap.dedent(self.code).split("\n"), 1)
        return [
            (line, self.rule, code.split("#:")[1].strip()) for line, code in marked if "#:" in code
        ]


TORCH_NAMES = [
    Case("torch-name", "import torch\ntorch.cuda.synchronize()  #: handled"),
    Case("torch-name", "import torch as th\nth.cuda.synchronize()  #: handled"),
    Case("torch-name", "from torch import cuda\nwait = cuda.synchronize  #: handled"),
    Case("torch-name", "from torch.cuda import synchronize as wait\nwait()  #: handled"),
    Case("torch-name", "import torch\nc = torch.cuda\nc.synchronize()  #: handled"),
    Case("torch-name", "from torch.cuda import *\nsynchronize()  #: handled"),
    Case("torch-name", "import torch.cuda.memory as m\nm.memory_allocated()  #: approximate"),
    Case("torch-name", "import torch\ntorch.cuda.memory_allocated()  #: handled", "simulated:cuda"),
    Case("torch-name", "import torch\ntorch.cuda.get_device_capability()  #: handled"),
    Case("torch-name", "import torch\ntorch.backends.cudnn.benchmark = True  #: approximate"),
    Case("torch-name", "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True  #: handled"),
    Case("torch-name", "import torch\npool = torch.cuda.MemPool()  #: change"),
    Case("torch-name", "import torch\ntorch.cuda.current_blas_handle()  #: change", "mps"),
    Case("torch-name", "import torch\ntorch.mps.empty_cache()  #: handled", "cuda"),
    Case("torch-name", "import torch\nx = [torch.version.cuda for _ in range(2)]  #: handled"),
    Case(
        "torch-name",
        """
        try:
            import torch
        except ImportError:
            torch = None
        torch.cuda.synchronize()  #: handled
        """,
    ),
    Case(
        "torch-name",
        """
        class Model:
            import torch
            def forward(self):
                return torch.cuda.synchronize()
            torch.cuda.synchronize()  #: handled
        """,
    ),
    # What must not be found:
    Case("torch-name", "import torch\ntorch.cuda.synchronize()", "cuda"),
    Case("torch-name", "import torch\ntorch.mps.synchronize()", "mps"),
    Case("torch-name", "torch.cuda.synchronize()"),
    Case("torch-name", "import torch\ndef f(torch):\n    torch.cuda.synchronize()"),
    Case("torch-name", "from mine import cuda\ncuda.synchronize()"),
    Case("torch-name", "import torch\ntorch.cuda.no_such_name()"),
    Case("torch-name", "import torch\ntorch.cuda = 1\ntorch.backends.mkldnn.enabled"),
    Case("torch-name", "import torch\n'torch.cuda.synchronize()'\n# torch.cuda.synchronize()"),
]

DEVICES = [
    Case("device", "x.cuda()  #: handled"),
    Case("device", "model = model.to('cuda')  #: handled"),
    Case("device", "import torch\nd = torch.device('cuda:0' if c else 'cpu')  #: handled"),
    Case("device", "import torch\nx = torch.ones(2, device='cuda')  #: handled", "mps"),
    Case("device", "import torch\nx = torch.load(f, map_location='mps')  #: handled", "cuda"),
    Case("device", "x.to('cuda:1')  #: approximate"),
    Case("device", "x.cuda(1)  #: approximate", "mps"),
    Case("device", "x.cuda(1)  #: handled", "simulated:cuda:2"),
    Case("device", "x.cuda(2)  #: change", "simulated:cuda:2"),
    Case("device", "x.to('cuda:1')  #: approximate", "simulated:mps"),
    Case("device", "x.to(f'cuda:{rank}')  #: handled"),
    Case(
        "device",
        "x.to(rank)  #: handled\nx.to(self.local_rank)  #: handled\nx.to(gpu)  #: "
        "handled\nx.to(0)  #: handled",
    ),
    Case(
        "device",
        "import torch.distributed as d\nr = d.get_rank()\nx.to(r)  #: handled\nx.to(d.get_rank())  "
        "#: handled",
    ),
    Case("device", "x.to(1)  #: approximate\nx.new_zeros(2, device=1)  #: approximate", "mps"),
    Case("device", "x.to(y)\nx.to(True)\nx.to(ranks)\nf(rank)\nx.to(rank)", "cuda"),
    Case("device", "x.to(y)\nx.to(True)\nx.to(ranks)\nf(rank)\nx.to(torch.float32)"),
    Case("device", "x.to('cuda:' + str(rank))  #: handled\nx.to('cuda:%d' % rank)  #: handled"),
    Case("device", "x.to('cuda:{}'.format(rank))  #: handled"),
    Case("device", "DEVICE = 'cuda'  #: handled\nx.to(DEVICE)  #: handled"),
    Case(
        "device",
        "import torch\nD = 'cuda'  #: handled\ndef f():\n    return torch.ones(2, device=D)  #: "
        "handled",
    ),
    Case("device", "def f(x, device='cuda'):  #: handled\n    return x.to(device)  #: handled"),
    Case(
        "device",
        "class A:\n    def f(self):\n        self.d = 'cuda'  #: handled\n        x.to(self.d)  #: "
        "handled",
    ),
    Case("device", "p.add_argument('--device', default='cuda')  #: handled"),
    Case("device", "f({'device': 'cuda'}, ['cuda:0', 'cuda:1'])  #: handled", "simulated:cuda:2"),
    Case("device", "x.type('torch.cuda.FloatTensor')  #: handled"),
    Case("device", "x.to(\n    'cuda'  #: handled\n)"),
    # What must not be found:
    Case("device", "x.to('cuda')", "cuda"),
    Case("device", "x.to('mps')", "mps"),
    Case("device", "x.to('cpu')\nx.to('meta')\nx.cpu()"),
    Case(
        "device",
        "print('cuda')\n'cuda'\nd['cuda']\nx == 'cuda'\nd = {'cuda': 1}\ngetattr(torch, 'cuda')",
    ),
    Case(
        "device",
        "d.startswith('cuda')\nd.split('cuda:')\nraise ValueError('cuda')\nf'is cuda:{x} there?'",
    ),
    Case(
        "device",
        "path = 'data/cuda'\nx.to('CUDA')\nx.to('cuda:x')\nx.to('cuda:01')\nx.cuda\ncuda()",
    ),
    Case("device", "p.add_argument('--backend', choices=['cuda'], default='cuda')"),
    Case("device", "import torch\ntorch.cuda.cuda()\nd = torch.device('cpu')\nx.to(d)"),
    Case("device", "def f(x, device):\n    return x.to(device)"),
    Case("is-cuda", "if x.is_cuda:  #: approximate\n    f(x)"),
    Case("is-cuda", "y = a if x.is_mps else b  #: approximate"),
    Case("is-cuda", "assert x.is_cuda, 'no GPU'  #: change"),
    Case("is-cuda", "assert x.is_cuda, 'no GPU'", "simulated:cuda"),
    Case("device-type", "if x.device.type == 'cuda':\n    f()", "simulated:cuda"),
    Case("is-cuda", "if not x.is_cuda:  #: change\n    raise ValueError"),
    Case("is-cuda", "assert x.is_cuda and y.is_cuda  #: change"),
    Case("is-cuda", "assert not x.is_cuda  #: approximate"),
    Case("is-cuda", "if not x.is_cuda:  #: approximate\n    f(x)"),
    Case("is-cuda", "assert x.is_cuda", "cuda"),
    Case("is-cuda", "x.is_cpu\nis_cuda = 1\nif is_cuda:\n    pass\nx.is_cuda_there"),
    Case("device-type", "if x.device.type == 'cuda':  #: approximate\n    f()"),
    Case("device-type", "if str(x.device) == 'cuda:0':  #: approximate\n    f()"),
    Case("device-type", "if 'cuda' in str(x.device):  #: approximate\n    f()"),
    Case(
        "device-type",
        "import torch\nd = torch.device('cuda')\nt = d.type\nprint(t == 'cuda')  #: approximate",
    ),
    Case("device-type", "assert x.device.type in ('cuda', 'xpu')  #: change"),
    Case("device-type", "if device.type != 'cuda':  #: change\n    raise RuntimeError"),
    Case("device-type", "if x.device.type == 'mps':  #: approximate\n    f()", "cuda"),
    Case("device-type", "if x.device.type == 'cuda':\n    f()", "cuda"),
    Case(
        "device-type",
        "if args.device == 'cuda':\n    f()\nif device == 'cuda':\n    f()\nk.type == 'cuda'",
    ),
    Case("device-type", "if x.device.type == 'cpu':\n    f()\nif x.device == y.device:\n    f()"),
]

OPERATORS = [
    Case("operator", "import torch\ntorch.linalg.eig(x)  #: approximate", "mps"),
    Case("operator", "import torch\ntorch.linalg.eig(x)  #: approximate", "simulated:mps"),
    Case("operator", "import torch\ntorch.linalg.eig(x)  #: change", "simulated:strict"),
    Case(
        "operator",
        "from torch.nn import functional as F\nloss = F.ctc_loss  #: approximate",
        "mps",
        {"_ctc_loss": False},
    ),
    Case(
        "operator", "import torch.nn as nn\nlayer = nn.AdaptiveAvgPool3d(1)  #: approximate", "mps"
    ),
    Case(
        "operator",
        "from torch import linalg as L\nL.eigh(x)  #: approximate",
        "mps",
        {"_linalg_eigh.eigenvalues": False},
    ),
    Case(
        "operator",
        "import torch\nx.geqrf()  #: approximate\ny = torch.ones(2)\ny.take(i)  #: approximate",
        "mps",
        {"geqrf": False, "take": False},
    ),
    Case(
        "operator",
        "import torch\nx = (torch.rand(2) + 1)[0].exp()\nx.mode()  #: approximate",
        "mps",
    ),
    Case(
        "operator",
        "import torch\ntorch.poisson(x)  #: approximate\ntorch.special.ndtri(x)  #: approximate",
        "mps",
        {"poisson": False},
    ),
    Case(
        "operator",
        "import torch\ntorch.logspace(0, 1, 5, device=d)  #: approximate",
        "mps",
        {"logspace.out": False},
    ),
    Case(
        "operator",
        "import torch\ntorch.linalg.solve(a, b)  #: approximate",
        "mps",
        {"linalg_lu_solve.out": False},
    ),
    Case("operator", "import torch\ntorch.linalg.eig(x)\ntorch.nn.CTCLoss()"),
    Case("operator", "import torch\ntorch.linalg.eig(x)\ntorch.nn.CTCLoss()", "simulated:cuda"),
    Case(
        "operator",
        "import torch\ntorch.matmul(a, b)\ntorch.nn.Linear(2, 2)\ntorch.linalg.qr(x)",
        "mps",
        {"linalg_qr.out": True},
    ),
    Case(
        "operator",
        "import numpy as np, torch\nnp.linalg.eig(x)\nx.take(i)\nq.put(x)\ndf.mode()",
        "mps",
    ),
    Case("operator", "import torch\ndef geqrf(self): pass\nx.geqrf()\nx.heaviside", "mps"),
    Case("operator", "x.geqrf()", "mps"),
    Case(
        "operator-tests",
        "import torch.nn.functional as F\nF.adaptive_avg_pool2d(x, 3)  #: approximate",
        "mps",
    ),
    Case(
        "operator-tests", "import torch.nn.functional as F\nF.adaptive_avg_pool2d(x, (1, 1))", "mps"
    ),
    Case("operator-tests", "import torch.nn.functional as F\nF.adaptive_avg_pool2d(x, 3)"),
    Case("operator-tests", "import torch\ntorch.matmul(a, b).to(x)\ntorch.linalg.eig(x)", "mps"),
    Case(
        "dtype",
        "import torch\nx = torch.zeros(2, dtype=torch.float64, device=d)  #: approximate",
        "mps",
    ),
    Case(
        "dtype",
        "import torch\nx = torch.zeros(2, dtype=torch.float64)\ny = x.view(2).cuda()  #: "
        "approximate",
        "mps",
    ),
    Case(
        "dtype",
        "import torch\nx.to(d, torch.float64)  #: approximate\nx.to(d, dtype=torch.double)  #: "
        "approximate",
        "mps",
    ),
    Case(
        "dtype",
        "import torch\nself.x = torch.ones(2, dtype=torch.complex128)\nself.x[0].to(d)  #: "
        "approximate",
        "mps",
    ),
    Case(
        "dtype",
        """
        import numpy as np, torch
        noise = np.random.randn(4) * 2
        torch.from_numpy(noise.reshape(2, 2)).to(device)  #: approximate
        torch.tensor(np.zeros(2))[0].cuda()  #: approximate
        torch.as_tensor(np.zeros(2), device="cuda")  #: approximate
        torch.as_tensor(np.zeros(2), device="cpu")
        """,
        "mps",
    ),
    Case(
        "dtype",
        """
        import numpy as np, torch
        def load():
            return np.zeros(2)
        def moved(array):
            return torch.from_numpy(array).to("cuda")  #: approximate
        def either(array):
            return torch.from_numpy(array).to("cuda")
        def again(array):
            return again(array) if array else torch.from_numpy(array).cuda()
        class Data:
            def values(self):
                return load()
            def batch(self):
                return torch.tensor(self.values()).cuda()  #: approximate
        moved(np.ones(3))
        moved(array=load())
        either(np.ones(3))
        either(np.ones(3, dtype=np.float32))
        torch.from_numpy(load()).cuda()  #: approximate
        torch.from_numpy(other.load()).cuda()
        """,
        "mps",
    ),
    Case(
        "dtype",
        """
        import numpy as np, torch
        torch.from_numpy(np.zeros(2, dtype=np.float32)).cuda()
        torch.from_numpy(np.zeros(2)).float().cuda()
        torch.tensor(np.zeros(2), dtype=torch.float32).cuda()
        torch.from_numpy(np.zeros(2)).to("cuda", torch.float32)
        torch.from_numpy(np.zeros(2)).to("cpu")
        torch.from_numpy(np.arange(2)).cuda()
        torch.zeros(2, dtype=torch.float64)
        torch.from_numpy(unknown).cuda()
        """,
        "mps",
    ),
    Case(
        "dtype",
        """
        import numpy as np, torch
        torch.tensor(np.array([1.0, 2.0])).cuda()  #: approximate
        torch.tensor(np.array([1, 2])).cuda()
        torch.tensor(np.array([1.0], np.float32)).cuda()
        torch.zeros(3, device="cuda").to(torch.float8_e4m3fn)  #: change
        torch.complex(torch.zeros(2, dtype=torch.float64, device="cuda"), x)  #: approximate
        """,
        "mps",
    ),
    Case(
        "mps-arguments",
        """
        import torch
        from torch import nn
        torch.eye(3).cuda().to_sparse_csr()  #: approximate
        torch.sparse_csr_tensor([0, 1], [0], [1.0], device="cuda")  #: approximate
        torch.sparse_csr_tensor([0, 1], [0], [1.0])
        torch.ones(3, device="cuda").share_memory_()  #: change
        torch.ones(3).cuda().share_memory_()  #: change
        torch.ones(3).share_memory_()
        nn.LSTM(3, 4, proj_size=2)  #: approximate
        nn.LSTM(3, 4, proj_size=0)
        nn.LSTM(3, 4)
        nn.ConvTranspose3d(1, 1, 2).half()  #: approximate
        nn.ConvTranspose3d(1, 1, 2).to("cuda", torch.float16)  #: approximate
        nn.ConvTranspose3d(1, 1, 2).cuda().to(torch.float16)  #: approximate
        nn.ConvTranspose3d(1, 1, 2).eval().cuda().half()  #: approximate
        nn.ConvTranspose3d(1, 1, 2, device="cuda", dtype=torch.bfloat16)  #: approximate
        nn.ConvTranspose3d(1, 1, 2).to("cuda", torch.float32)
        nn.ConvTranspose2d(1, 1, 2).half()
        """,
        "mps",
    ),
    Case("mps-arguments", "import torch\ntorch.nn.LSTM(3, 4, proj_size=2)", "simulated:cuda"),
    Case("dtype", "import torch\nx = x.double()  #: approximate", "simulated:mps"),
    Case("dtype", "from torch import cdouble\nx.to(cdouble)  #: approximate", "simulated:strict"),
    Case("dtype", "import torch\ntorch.cuda.DoubleTensor(2)  #: approximate", "mps"),
    Case("dtype", "import torch\nx.type('torch.cuda.DoubleTensor')  #: approximate", "mps"),
    Case("dtype", "import torch\ntorch.set_default_dtype(torch.double)  #: approximate", "mps"),
    Case("dtype", "import torch\nx = torch.zeros(2, dtype=torch.float64).double()"),
    Case(
        "dtype", "import torch\nx = torch.zeros(2, dtype=torch.float64).double()", "simulated:cuda"
    ),
    Case(
        "dtype",
        "import torch, numpy\ntorch.float32\nnumpy.float64\nx.double(2)\nx.double\n'float64'",
        "mps",
    ),
    Case("dtype", "x.double()", "mps"),
    Case(
        "dtype",
        "import torch\nif x.dtype == torch.float64 or y in (torch.double, 1):\n    d = "
        "{torch.float64: 8}",
        "mps",
    ),
    Case(
        "dtype",
        """
        import torch
        class Solver:
            def __init__(self, x, dtype=torch.float64):  #: approximate
                dtype = torch.promote_types(dtype, x.dtype)
                self.step = torch.as_tensor(1, dtype=dtype, device=x.device)  #: approximate
                self.dtype = dtype
                self.size = torch.tensor(1, dtype=self.dtype)
                self.x = x.new_zeros(2, dtype=self.dtype)  #: approximate
                self.y = torch.zeros(2, dtype=self.x.dtype, device=x.device)
                self.z = x.to(dtype)  #: approximate
        """,
        "mps",
    ),
    Case(
        "dtype",
        """
        import torch
        def f(x, dtype):
            torch.finfo(torch.float64), torch.can_cast(x.dtype, to=torch.float64)
            return x.to(dtype), torch.ones(2, dtype=dtype, device=x.device), dtype(x), a.to(a), self.to(self.b)
        dtype = torch.float64 if many else torch.float32  #: approximate
        x.to(dtype)
        """,
        "mps",
    ),
    Case(
        "dtype",
        "import torch\nd = {8: torch.float64}  #: approximate\nx.type(torch.double)  #: "
        "approximate",
        "mps",
    ),
]

SURROUNDINGS = [
    Case("patcher", "import mpsify  #: change"),
    Case("patcher", "def f():\n    import torchada as t  #: change", "simulated:cuda"),
    Case("patcher", "from torch_npu.contrib import transfer_to_npu  #: change", "mps"),
    Case(
        "patcher",
        "import torch_npu\nimport torch_npu.contrib\nfrom . import mpsify\nimport mpsify_tools",
    ),
    Case("patcher", "import mpsify", "cuda"),
    Case("package", "import flash_attn  #: approximate"),
    Case("package", "import transformer_engine  #: change"),
    Case("package", "from flash_attn.bert_padding import pad_input  #: approximate", "mps"),
    Case(
        "package",
        "from nvidia import dali  #: change\nimport numba.cuda as c  #: approximate\nimport cupy, "
        "os  #: change",
    ),
    Case(
        "package",
        "try:\n    import deepspeed  #: approximate\nexcept ImportError:\n    deepspeed = None",
    ),
    Case(
        "package",
        "try:\n    import deepspeed  #: approximate\nexcept (ValueError, ImportError):\n    "
        "deepspeed = None",
    ),
    Case("package", "if find_spec('cupy'):\n    import cupy  #: approximate"),
    Case(
        "package",
        "try:\n    import cupy  #: change\nexcept ValueError:\n    pass\nelse:\n    import cudf  "
        "#: change",
    ),
    Case(
        "package",
        "try:\n    def f():\n        import cupy  #: change\nexcept ImportError:\n    pass",
    ),
    Case("package", "import torch\nif torch.cuda.is_available():\n    import deepspeed  #: change"),
    Case("package", "import triton.language as tl  #: approximate"),
    Case("package", "import flash_attn, triton", "cuda"),
    Case(
        "package",
        "import numba\nimport flash_attn_wrapper\nfrom .triton import kernel\nfrom mine import "
        "apex\nimport nvidia",
    ),
    Case(
        "extension",
        """
        from torch.utils.cpp_extension import CUDAExtension, load, load_inline
        CUDAExtension("a", ["a.cpp", "a.cu"])  #: change
        load(name="a", sources=["a.cpp", "a.cu"])  #: change
        load("a", [os.path.join(here, "a.cu")])  #: change
        load_inline("a", cpp_sources="", cuda_sources="x")  #: change
        load("a", ["a.cpp"], with_cuda=True)  #: change
        """,
    ),
    Case(
        "extension", "import torch.utils.cpp_extension as c\nc.CUDAExtension('a', ['a.cu'])", "cuda"
    ),
    Case(
        "extension",
        "import torch.utils.cpp_extension as c\nc.CppExtension('a', ['a.cpp'])\nc.load('a', "
        "['a.cpp'])",
    ),
    Case(
        "extension",
        "from mine import CUDAExtension, load\nCUDAExtension('a', ['a.cu'])\nload('a', ['a.cu'])",
    ),
    Case("nvidia-smi", "import subprocess\nsubprocess.run(['nvidia-smi', '-q'])  #: change"),
    Case(
        "nvidia-smi",
        "import os\nos.popen('/usr/bin/nvidia-smi -q')  #: change\nos.system('nvcc x.cu')  #: "
        "change",
    ),
    Case("nvidia-smi", "import shutil\nif shutil.which('nvidia-smi'):  #: approximate\n    pass"),
    Case("nvidia-smi", "import subprocess\nsubprocess.run(['nvidia-smi'])", "cuda"),
    Case(
        "nvidia-smi",
        "import subprocess\nsubprocess.run(['ls', "
        "'nvidia-smi'])\nsubprocess.run([])\nprint('nvidia-smi')",
    ),
    Case(
        "nccl",
        "import torch.distributed as dist\ndist.init_process_group('nccl', rank=0)  #: approximate",
    ),
    Case(
        "nccl",
        "import torch\ntorch.distributed.init_process_group(backend='cpu:gloo,cuda:nccl')  #: "
        "approximate",
    ),
    Case("nccl", "b = 'nccl' if gpu else 'gloo'\nstart(backend=b)  #: approximate", "mps"),
    Case(
        "nccl",
        "p.add_argument('--dist-backend', default='nccl')  #: approximate",
        "simulated:cuda:2",
    ),
    Case("nccl", "import torch.distributed as dist\ndist.init_process_group('nccl')", "cuda"),
    Case(
        "nccl",
        "import torch.distributed as "
        "dist\ndist.init_process_group('gloo')\nprint('nccl')\nf('nccl')",
    ),
    Case("compile", "import torch\ntorch.compile(f, mode='reduce-overhead')  #: approximate"),
    Case(
        "compile", "import torch\ng = torch.compile(backend='cudagraphs')(f)  #: approximate", "mps"
    ),
    Case(
        "compile",
        "import torch\ntorch.compile(f, options={'triton.cudagraphs': True})  #: approximate",
    ),
    Case(
        "compile",
        "import torch\n@torch.compile(dynamic=True)  #: approximate\ndef f(): pass",
        "simulated:mps",
    ),
    Case("compile", "import torch\n@torch.compile  #: approximate\ndef f(): pass", "simulated:mps"),
    Case(
        "compile",
        "from torch import compile as c\np = partial(c, dynamic=True)  #: approximate",
        "simulated:mps",
    ),
    Case("compile", "import torch\n@torch.compile\ndef f(): pass\ntorch.compile.__name__"),
    Case(
        "compile",
        "import torch\n@torch.compiler.disable\ndef f(): torch.compile.__name__",
        "simulated:mps",
    ),
    Case(
        "compile",
        "import torch\ntorch.compile(f)\ntorch.compile(f, mode='default', backend='eager')",
    ),
    Case("compile", "import torch\ntorch.compile(f, backend='eager')", "simulated:mps"),
    Case("compile", "import torch\ntorch.compile(f, mode='reduce-overhead')", "cuda"),
    Case("compile", "import re\nre.compile(x, mode='reduce-overhead')"),
    Case(
        "profiler",
        "from torch.profiler import profile\nwith profile() as p:  #: approximate\n    f()",
    ),
    Case(
        "profiler",
        "import torch.profiler as t\nt.profile(activities=[t.ProfilerActivity.CUDA])  #: "
        "approximate",
        "mps",
    ),
    Case(
        "profiler",
        "import torch.profiler as t\na = [t.ProfilerActivity.CUDA]\nt.profile(activities=a)  #: "
        "approximate",
    ),
    Case(
        "profiler", "import torch\ntorch.autograd.profiler.profile(use_cuda=True)  #: approximate"
    ),
    Case("profiler", "from torch.profiler import profile\nprofile()", "cuda"),
    Case(
        "profiler",
        "import torch.profiler as t\nt.profile(activities=[t.ProfilerActivity.CPU])\nprofile()",
    ),
    Case(
        "profiler",
        "import torch\ntorch.autograd.profiler.profile(use_cuda=False)\ntorch.autograd.profiler.profile()",
    ),
]

CASES = [*TORCH_NAMES, *DEVICES, *OPERATORS, *SURROUNDINGS]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.rule}-{case.target}-{case.code.strip()[:50]!r}"
)
def test_a_rule_finds_what_it_should(case: Case) -> None:
    for operator, is_there in case.kernels.items():
        if (operator not in missing_operators("MPS")) is not is_there:
            pytest.skip(
                f"torch {torch.__version__} has {'no' if is_there else 'a'} kernel of MPS for "
                f"{operator}"
            )
    found = findings(case.code, case.target, {case.rule})
    assert sorted({(each.line, each.rule, each.verdict.value) for each in found}) == case.expected


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"syntax"}))
def test_every_rule_has_a_case_and_a_near_miss(rule: str) -> None:
    of_rule = [case for case in CASES if case.rule == rule]
    assert any(case.expected for case in of_rule) and any(not case.expected for case in of_rule)


# ---- files ---------------------------------------------------------------------------------------

CUDA = "import torch\ntorch.cuda.synchronize()\n"


def check(
    paths: Iterable[str], target: Target, rules: Collection[str] | None = None
) -> list[Finding]:
    """Return what is found in files, folders and notebooks."""
    return [
        found for path in checker.found(paths).paths for found in check_file(path, target, rules)
    ]


def checked(*paths: Path, target: str = "cpu") -> list[tuple[str, int, str]]:
    return [
        (Path(each.path).name, each.line, each.rule)
        for each in check(map(str, paths), Target.named(target))
    ]


class TestFiles:
    def test_folders_are_searched(self, tmp_path: Path) -> None:
        for name in (
            "a.py",
            "inner/b.py",
            ".hidden/c.py",
            "__pycache__/d.py",
            "env/lib/e.py",
            "notes.txt",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(CUDA)
        (tmp_path / "env" / "pyvenv.cfg").touch()
        assert checked(tmp_path) == [("a.py", 2, "torch-name"), ("b.py", 2, "torch-name")]
        assert checked(tmp_path / "notes.txt") == [("notes.txt", 2, "torch-name")]

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
    def test_pipes_are_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.py")
        (tmp_path / "b.py").write_text(CUDA)
        assert checked(tmp_path) == [("b.py", 2, "torch-name")]

    def test_a_file_comes_once(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text(CUDA)
        (tmp_path / "b.py").symlink_to("a.py")
        assert checked(tmp_path, tmp_path / "a.py") == [("a.py", 2, "torch-name")]

    def test_links_in_a_circle_end(self, tmp_path: Path) -> None:
        (tmp_path / "inner").mkdir()
        (tmp_path / "inner" / "a.py").write_text(CUDA)
        (tmp_path / "inner" / "up").symlink_to(tmp_path)
        (tmp_path / "self.py").symlink_to("self.py")
        assert checked(tmp_path) == [("a.py", 2, "torch-name"), ("self.py", 1, "syntax")]

    @pytest.mark.skipif(not hasattr(os, "symlink"), reason="this system has no links")
    @pytest.mark.parametrize("name", ["link.py", "link.ipynb", "link"])
    def test_links_that_lead_out_are_said_and_not_followed(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # A name that begins with the other.
        inside, outside = tmp_path / "inside", tmp_path / "insider"
        for folder in (inside, outside):
            folder.mkdir()
            (folder / "a.py").write_text(CUDA)
        (inside / name).symlink_to(outside / "a.py" if "." in name else outside)
        assert checker.found([str(inside)]) == ([str(inside / "a.py")], [str(inside / name)])
        assert checker.found([str(inside), str(outside)]).outside == []  # that is named, too
        assert main.main(["check", "--all", str(inside)]) == 0
        shown, said = capsys.readouterr()
        assert shown.count("a.py") == 1
        assert said.startswith(
            f"torchdevice: not checked: '{inside / name}' leads out of what is checked, to "
        )

    @pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="this system has no such device")
    @pytest.mark.parametrize("path", ["/dev/zero", "pipe", "large.py", "folder.py"])
    def test_only_regular_files_of_a_bounded_size_are_read(self, path: str, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "folder.py").mkdir()
        with (tmp_path / "large.py").open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(checker.UnreadableError, match=r"no regular file|larger than"):
            checker.read(str(tmp_path / path))

    @pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="this system has no such device")
    @pytest.mark.parametrize("place", ["pyproject.toml", "the baseline", "the target"])
    def test_no_file_that_a_project_names_is_read_for_ever(
        self,
        place: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a.py").write_text(CUDA)
        if place == "pyproject.toml":
            with (tmp_path / "pyproject.toml").open("wb") as file:
                file.truncate(1 << 40)
        else:
            key, value = (
                ("baseline", "/dev/zero")
                if place == "the baseline"
                else ("target", "simulated:zero.toml")
            )
            (tmp_path / "zero.toml").symlink_to("/dev/zero")
            (tmp_path / "pyproject.toml").write_text(
                f"[tool.torchdevice.check]\n{key} = '{value}'\n"
            )
        with pytest.raises(SystemExit, match="2"):
            main.main(["check", "."])
        assert "cannot be read" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("data", "line", "said"),
        [
            (b"x = 1\ny = (\n", 2, "cannot be parsed"),
            (b"import torch\nprint 'x'\n", 2, "cannot be parsed as Python 3"),
            (
                b"try:\n    pass\nexcept ValueError, e:\n    pass\n",
                3,
                "cannot be parsed as Python 3",
            ),
            (b"raise ValueError, 'x'\n", 1, "cannot be parsed as Python 3"),
            (b"x = 1\ny = '\xff'\n", 2, "not text in utf-8"),
            (b"# coding: no-such-thing\n", 1, "unknown encoding"),
            (b"x = 1\x00\n", 1, "cannot be parsed"),
            (b"-" * 100_000 + b"1", 1, "cannot be parsed"),
        ],
    )
    def test_what_is_no_python_is_a_finding(
        self, data: bytes, line: int, said: str, tmp_path: Path
    ) -> None:
        (tmp_path / "a.py").write_bytes(data)
        (found,) = check([str(tmp_path)], Target.named("cpu"))
        assert (found.line, found.rule, found.verdict.value) == (
            line,
            "syntax",
            "change",
        ) and said in found.remedy

    def test_a_declared_encoding_and_marks_of_order(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_bytes(
            "# coding: latin-1\nx = 'é'\n".encode("latin-1") + CUDA.encode()
        )
        (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbf" + CUDA.replace("\n", "\r\n").encode())
        assert checked(tmp_path) == [("a.py", 4, "torch-name"), ("b.py", 2, "torch-name")]

    def test_columns_count_characters(self) -> None:
        (found,) = findings("import torch\nx = 'éé'; torch.cuda.synchronize()")
        assert (found.column, found.text) == (11, "x = 'éé'; torch.cuda.synchronize()")

    def test_deep_sources(self) -> None:
        chain = ".a" * 150
        assert findings(f"import torch\nx{chain}\ntorch.cuda.synchronize(){chain}")[-1].line == 3
        assert (
            findings(
                "import torch\n" + "\n".join(f"a{n + 1} = a{n}" for n in range(99)) + "\na99.cuda.x"
            )
            == []
        )
        assert findings("x = x\nx.cuda.y\na = b\nb = a\na.cuda") == []

    @pytest.mark.parametrize(
        ("first", "used", "target"),
        [
            ("'cuda'", "x.to(a9)", "cpu"),
            ("torch.float64", "x.to(d, a9)", "mps"),
            ("torch.ones(2, dtype=torch.float64)", "a9.to(d)", "mps"),
        ],
    )
    def test_the_ways_to_a_value_are_not_multiplied(
        self, first: str, used: str, target: str
    ) -> None:
        steps = "".join(f"a{n + 1} = a{n}\n" * 30 for n in range(9))  # 30 ** 9 ways
        assert findings(f"import torch\na0 = {first}\n{steps}{used}", target, {*RULES})
        among_each_other = "".join(f"a{n} = a{m}\n" for n in range(20) for m in range(20))
        findings(f"import torch\na0 = {first}\n{among_each_other}{used}", target, {*RULES})  # ends


def notebook(*cells: Any, **more: Any) -> str:
    made = [{"cell_type": "code", "outputs": ["torch"], "source": cell} for cell in cells]
    return json.dumps(
        {"cells": [{"cell_type": "markdown", "source": ["x ="]}, *made], **more}, indent=1
    )


def test_a_package_may_import_itself(tmp_path: Path) -> None:
    (tmp_path / "apex" / "inner").mkdir(parents=True)
    (tmp_path / "triton").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    for name in ("apex/inner/a.py", "apex/b.py", "triton/c.py"):
        (tmp_path / name).write_text("import apex.optimizers\nimport triton\n")
    assert sorted(checked(tmp_path)) == [
        ("a.py", 2, "package"),
        ("b.py", 2, "package"),
        ("c.py", 1, "package"),
        ("c.py", 2, "package"),
    ]


class TestNotebooks:
    def test_lines_are_those_of_the_file(self, tmp_path: Path) -> None:
        magic = [
            "%matplotlib inline\n",
            "!pip install x\n",
            "files = !ls\n",
            "?x\n",
            "torch.cuda?\n",
            "x = 1",
        ]
        wait = ["if True:\n", "    %time x\n", "    torch.cuda.synchronize()"]
        text = notebook(
            "import torch", magic, ["%%bash\n", "torch.cuda.synchronize()"], ["%%time\n", *wait]
        )
        (tmp_path / "a.ipynb").write_text(text)
        (found,) = check([str(tmp_path)], Target.named("cpu"))
        (line,) = (
            n
            for n, each in enumerate(text.split("\n"), 1)
            if '    torch.cuda.synchronize()"' in each
        )
        assert (found.line, found.cell, found.text) == (line, 4, "torch.cuda.synchronize()")

    def test_one_text_for_a_cell(self, tmp_path: Path) -> None:
        (tmp_path / "a.ipynb").write_text(
            notebook("import torch\n\ntorch.cuda.synchronize()\n", "")
        )
        (found,) = check([str(tmp_path)], Target.named("cpu"))
        assert (found.cell, found.text) == (1, "torch.cuda.synchronize()")

    def test_the_third_version_of_the_format(self, tmp_path: Path) -> None:
        cell = {"cell_type": "code", "input": ["import torch\n", "torch.cuda.synchronize()"]}
        (tmp_path / "a.ipynb").write_text(json.dumps({"worksheets": [{"cells": [cell]}]}))
        assert checked(tmp_path) == [("a.ipynb", 1, "torch-name")]

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "{}", '{"cells": 1}', '{"cells": [1]}', "[" * 100_000]
    )
    def test_what_is_no_notebook(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "a.ipynb").write_text(text)
        assert checked(tmp_path) == [("a.ipynb", 1, "syntax")]

    def test_a_notebook_without_code(self, tmp_path: Path) -> None:
        (tmp_path / "a.ipynb").write_text('{"cells": []}')
        assert checked(tmp_path) == []


# ---- comments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("torch.cuda.synchronize()  # torchdevice: ignore", 0),
        ("torch.cuda.synchronize()  #torchdevice:ignore[torch-name]", 0),
        ("torch.cuda.synchronize()  # why; torchdevice: ignore[device, torch-name]", 1),
        ("torch.cuda.synchronize()  # why # torchdevice: ignore[device, torch-name]", 0),
        ("torch.cuda.synchronize(  # torchdevice: ignore\n)", 0),
        ("torch.cuda.synchronize()  # torchdevice: ignore[device]", 1),
        ("torch.cuda.synchronize(), '# torchdevice: ignore'", 1),
        ("# torchdevice: ignore\ntorch.cuda.synchronize()", 1),
        ("if torch.cuda.is_available():  # torchdevice: ignore\n    torch.cuda.synchronize()", 1),
    ],
)
def test_a_comment_leaves_a_line_out(code: str, count: int) -> None:
    assert len(findings(f"import torch\n{code}", rules={"torch-name"})) == count


TABLE = """
[tool.torchdevice.check]
target = "mps"
ignore = ["device"]
exclude = ["old"]
per-file-ignores = {"tests/*" = ["torch-name"]}
"""

# ---- the command ---------------------------------------------------------------------------------


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
        status = main.main(["check", *map(str, words)])
        return status, capsys.readouterr().out

    def test_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "a.py"
        path.write_text(CUDA + "torch.cuda.CUDAPluggableAllocator(1, 2, 3)\n")
        status, out = self.run(capsys, path, "--target", "mps")
        assert "--all lists" in out and "torch.cuda.synchronize()" not in out
        status, out = self.run(capsys, path, "--target", "mps", "--all")
        first, *rest = out.split("\n")
        assert status == 1 and first == "torchdevice: 1 file checked for mps"
        assert rest[:2] == ["  must be changed: 1", "  handled: 1"]
        assert (
            f"{path}\n  line 2: handled: " in out
            and "\n      2 | torch.cuda.synchronize()\n" in out
        )
        status, out = self.run(capsys, path, "--ignore", "torch-name")
        assert status == 0 and "nothing in them concerns the target" in out
        path.write_text(CUDA)
        status, out = self.run(capsys, path)
        assert status == 0 and "nothing must be changed" in out

    def test_on_a_mac_what_is_approximate_is_shown(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "a.py").write_text(
            "import numpy as np\nimport torch\ntorch.tensor(np.arange(3.0)).cuda()\n"
        )
        for target in ("mps", "simulated:mps"):
            status, out = self.run(capsys, tmp_path / "a.py", "--target", target)
            assert status == 0 and "  line 3: approximate: Ask for float32" in out
        assert "approximate" not in self.run(capsys, tmp_path / "a.py", "--target", "cpu")[1]

    def test_on_a_terminal(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text(
            CUDA + "x = '[bold]'; torch.cuda.CUDAPluggableAllocator(1, 2, 3)\n"
        )
        found = check([str(tmp_path)], Target.named("mps"))
        console = io.StringIO()
        lines = formats.rendered(found, found, 1, "mps")
        Console(file=console, width=200, force_terminal=True).print(styled_text.coloured(lines))
        plain = re.sub(r"\x1b\[[\d;]*m", "", console.getvalue())
        assert plain != console.getvalue() and plain == f"{styled_text.plain(lines)}\n"

    def test_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.py").write_text(CUDA)
        status, out = self.run(capsys, tmp_path, "--json", "--all")
        (found,) = json.loads(out)
        assert status == 0 and list(found)[:5] == ["path", "line", "rule", "verdict", "remedy"]
        assert (
            found["path"] == str(tmp_path / "a.py") and found["text"] == "torch.cuda.synchronize()"
        )

    def test_sarif(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a é.py").write_text(CUDA + "torch.cuda.CUDAPluggableAllocator(1, 2, 3)\n")
        status, out = self.run(capsys, ".", "--sarif", "--all")
        data = json.loads(out)
        (run,) = data["runs"]
        driver = run["tool"]["driver"]
        assert status == 1 and data["version"] == "2.1.0" and driver["name"] == "torchdevice"
        assert [each["level"] for each in run["results"]] == ["note", "error"]
        for result in run["results"]:
            assert (
                driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
                and result["message"]["text"]
            )
            place = result["locations"][0]["physicalLocation"]
            assert place["artifactLocation"]["uri"] == "a%20%C3%A9.py" and place["region"][
                "startLine"
            ] in (2, 3)
        assert self.run(capsys, tmp_path, "--sarif=out.sarif", "--all") == (1, "")
        assert json.loads((tmp_path / "out.sarif").read_text()) == data

    def test_only_what_must_be_changed_is_shown(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "a.py").write_text(CUDA + "torch.cuda.CUDAPluggableAllocator(1, 2, 3)\n")
        for flag in ("--json", "--sarif"):
            _, out = self.run(capsys, tmp_path, flag)
            assert "CUDAPluggableAllocator" in out and "torch.cuda.synchronize()" not in out

    def test_the_table_of_a_project(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("a.py", "old/b.py", "tests/c.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(
                CUDA + "torch.cuda.CUDAPluggableAllocator(1, 2, 3)\nimport deepspeed\n"
            )
        (tmp_path / "pyproject.toml").write_text(TABLE)
        monkeypatch.chdir(tmp_path / "tests")
        status, out = self.run(capsys, "..")
        assert status == 1 and "2 files checked for mps" in out and "old/b.py" not in out
        assert out.count("CUDAPluggableAllocator(1") == 1 and out.count("import deepspeed") == 2
        status, out = self.run(capsys, "..", "--select", "device", "--target", "cpu")
        assert status == 0 and "checked for cpu" in out

    @pytest.mark.parametrize(
        ("table", "said"),
        [
            (
                "rules = []",
                "'rules' in [tool.torchdevice.check], which is not known. Use keys among target, "
                "select",
            ),
            (
                "select = 'device'",
                "select = 'device' in [tool.torchdevice.check], which is not a list of texts",
            ),
            ("ignore = ['devise']", "there is no rule 'devise' (did you mean 'device'?)"),
            ("per-file-ignores = {a = 1}", "which is not a table of lists of texts"),
            ("baseline = 'none.json'", "No such file or directory"),
            ("target = ", "cannot be parsed"),
        ],
    )
    def test_a_wrong_table(
        self,
        table: str,
        said: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a.py").write_text(CUDA)
        (tmp_path / "pyproject.toml").write_text(f"[tool.torchdevice.check]\n{table}\n")
        with pytest.raises(SystemExit) as ended:
            main.main(["check", "a.py"])
        assert ended.value.code == 2 and said in capsys.readouterr().err

    def test_a_baseline(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        known, program = tmp_path / "known.json", tmp_path / "a.py"
        call = "torch.cuda.CUDAPluggableAllocator(1, 2, 3)\n"
        program.write_text(CUDA + call)
        assert self.run(capsys, program, "--baseline", known, "--write-baseline") == (0, "")
        assert self.run(capsys, program, "--baseline", known)[0] == 0
        program.write_text("# moved\n" + CUDA + call)
        assert self.run(capsys, program, "--baseline", known)[0] == 0
        program.write_text(CUDA + call * 2)
        status, out = self.run(capsys, program, "--baseline", known)
        assert status == 1 and "must be changed: 1" in out
        known.write_text("[1]")
        with pytest.raises(SystemExit):
            self.run(capsys, program, "--baseline", known)

    def test_a_baseline_has_all_that_is_listed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        program, known = tmp_path / "a.py", tmp_path / "known.json"
        program.write_text("import torch\nx = torch.ones(2, dtype=torch.float64, device='cuda')\n")
        words = (program, "--target", "mps", "--baseline", known)
        assert self.run(capsys, *words, "--write-baseline") == (0, "")
        assert "line 2" not in self.run(capsys, *words)[1]

    def test_a_baseline_without_a_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "a.py").write_text(CUDA)
        with pytest.raises(SystemExit):
            main.main(["check", str(tmp_path / "a.py"), "--write-baseline"])
        assert "--write-baseline names no file" in capsys.readouterr().err

    def test_rules_are_listed(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out = self.run(capsys, "--rules")
        assert status == 0 and [
            line for line in out.split("\n") if line and line[0] != " "
        ] == list(RULES)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "which files?"),
            (["no-such-file.py"], "there is no file or folder 'no-such-file.py'"),
            (["."], "no Python file and no notebook is in '.'"),
            (["a.txt", "--target", "abacus"], "'abacus' is not a target"),
            (["a.txt", "--target", "simulated:mps:2"], "the profile has one"),
            (
                ["a.txt", "--select", "torch-nam"],
                "no rule 'torch-nam' (did you mean 'torch-name'?)",
            ),
            (["a.txt", "--sarif", "a.txt"], "'a.txt' is neither FILE.sarif nor FILE.json"),
            (["a.txt", "--sarif=no/such.sarif"], "there is no folder"),
        ],
    )
    def test_what_cannot_be_done(
        self,
        words: list[str],
        said: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "a.txt").write_text(CUDA)
        with pytest.raises(SystemExit) as ended:
            main.main(["check", *words])
        assert ended.value.code == 2 and said in capsys.readouterr().err

    def test_torch_is_imported_only_for_its_tables(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("import torch\nx = 1\n")
        words = "import sys; from torchdevice.tools.cli.main import main; main(['check', 'a.py'])"
        words += "\nprint('torch' in sys.modules)"
        result = run_fresh_python("-c", words, cwd=tmp_path)
        assert result.stdout.endswith("\nFalse\n"), result.stderr

    def test_the_program_is_not_run(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("import torch\ntorch.cuda.synchronize()\nopen('ran', 'w')\n")
        result = run_command("check", "a.py", cwd=tmp_path)
        assert result.returncode == 0 and os.listdir(tmp_path) == ["a.py"], result.stderr


# ---- programs that nobody wrote ------------------------------------------------------------------

WORDS = (
    "torch",
    "x",
    "cuda",
    "device",
    "nn",
    "F",
    "is_cuda",
    "type",
    "double",
    "to",
    "compile",
    "take",
    "os",
    "environ",
)

expressions = strategies.recursive(
    strategies.sampled_from(WORDS)
    | strategies.sampled_from(("'cuda'", "'cuda:1'", "(1)", "None", "f'cuda:{x}'")),
    lambda inner: (
        strategies.builds("{}.{}".format, inner, strategies.sampled_from(WORDS))
        | strategies.builds("({})({}, device={})".format, inner, inner, inner)
        | strategies.builds("({} if {} else {})".format, inner, inner, inner)
        | strategies.builds("({} == {})".format, inner, inner)
        | strategies.builds("({} + {})".format, inner, inner)
        | strategies.builds(
            "[{} for {} in {}]".format, inner, strategies.sampled_from(WORDS), inner
        )
        | strategies.builds(
            "(lambda {}, *a, y={}: {})".format, strategies.sampled_from(WORDS), inner, inner
        )
        | strategies.builds("{{{}: {}}}[{}]".format, inner, inner, inner)
    ),
    max_leaves=8,
)
statements = (
    strategies.builds("{} = {}".format, strategies.sampled_from(WORDS), expressions)
    | strategies.builds("self.{} = {}".format, strategies.sampled_from(WORDS), expressions)
    | strategies.builds("a, *{} = {}".format, strategies.sampled_from(WORDS), expressions)
    | strategies.builds(
        "import torch.{} as {}".format,
        strategies.sampled_from(WORDS),
        strategies.sampled_from(WORDS),
    )
    | strategies.builds(
        "from torch.cuda import {}, synchronize".format, strategies.sampled_from(WORDS)
    )
    | strategies.builds("from torch.nn import *\nglobal {}".format, strategies.sampled_from(WORDS))
    | strategies.builds(
        "try:\n import {}\nexcept (E, {}): pass".format, strategies.sampled_from(WORDS), expressions
    )
    | strategies.builds(
        "def f({}, b={}):\n return {}".format,
        strategies.sampled_from(WORDS),
        expressions,
        expressions,
    )
    | strategies.builds("class A({}):\n assert not {}".format, expressions, expressions)
    | strategies.builds(
        "if {}:  # torchdevice: ignore[{}]\n raise {}".format, expressions, expressions, expressions
    )
    | strategies.builds(
        "match {}:\n case {{'a': {}}}: pass".format, expressions, strategies.sampled_from(WORDS)
    )
    | strategies.builds("os.environ[{}] = {}".format, expressions, expressions)
)

QUICKLY = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@QUICKLY
@given(
    strategies.lists(statements, max_size=8),
    strategies.sampled_from(("cpu", "mps", "cuda", "simulated:cuda:2")),
)
def test_no_program_is_too_strange(lines: list[str], target: str) -> None:
    code = "import torch\n" + "\n".join(lines)
    for found in findings(code, target):
        assert (
            1 <= found.first <= found.line <= found.last <= code.count("\n") + 1
            and found.remedy[-1] == "."
        )


@QUICKLY
@given(
    strategies.binary(max_size=60) | strategies.text(max_size=60).map(str.encode),
    strategies.sampled_from(("py", "ipynb")),
)
def test_no_file_is_too_strange(data: bytes, suffix: str) -> None:
    with tempfile.NamedTemporaryFile(suffix=f".{suffix}") as file:
        file.write(data)
        file.flush()
        for found in check([file.name], Target.named("mps")):
            assert found.line >= 1 and found.to_dict()


def test_sources_of_torch_itself() -> None:
    """Real sources, with everything that Python has."""
    package = Path(torch.__file__).parent
    found = check(
        [str(package / name) for name in ("cuda", "nn/modules", "optim", "_dynamo/utils.py")],
        Target.named("mps"),
    )
    assert {each.rule for each in found} >= {"torch-name", "device", "operator", "dtype"} and len(
        found
    ) > 100
