"""CUDA packages without a stand-in: the text and the remedy of the error that one is missing.

The note is added where an error ends a program under ``run``, leaves a scope, or ends a cell. A
package that is there and fails for want of a GPU raises its own errors, which get a note too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from torchdevice.kernel.python import uncaught_errors
from torchdevice.packages.registry import PACKAGES


class Missing(NamedTuple):
    """One package that needs CUDA.

    Attributes:
        what: A description, in a few words.
        instead: The package to use where there is no CUDA.
        needs_cuda: Whether it has no build without CUDA.
    """

    what: str
    instead: str
    needs_cuda: bool = True


_ARRAYS = "Use torch or NumPy."
_SERVING = "Use the generate() of the transformers library."
_QUANTIZED = (
    "Load the model without quantization, or in 4 bits by bitsandbytes, which has kernels for CPUs."
)
_KERNELS = "torchdevice stands in for a part of its kernels, in a scope without packages='absent'."
_RENDERING = "Render in plain torch, or run this part on a machine with a GPU."

MISSING: dict[str, Missing] = {
    "pycuda": Missing("a binding of the CUDA driver", _ARRAYS),
    "cuda": Missing("NVIDIA's binding of the CUDA driver", "Ask torch.cuda instead."),
    "cudf": Missing("a library of data frames on GPUs", "Use pandas."),
    "cuml": Missing("a library of machine learning on GPUs", "Use scikit-learn."),
    "cugraph": Missing("a library of graphs on GPUs", "Use networkx."),
    "rmm": Missing("a memory manager of GPUs", "Leave it out: torch has its own allocator."),
    "nvidia.dali": Missing("NVIDIA's loader of data on GPUs", "Use torch.utils.data."),
    "nvidia.nvcomp": Missing("a library of compression on GPUs", "Use zlib or zstandard."),
    "tensorrt": Missing("NVIDIA's compiler of networks", "Run the model in torch."),
    "torch_tensorrt": Missing("NVIDIA's compiler of networks for torch", "Use torch.compile."),
    "tensorrt_llm": Missing("NVIDIA's server of language models", _SERVING),
    "transformer_engine": Missing(
        "NVIDIA's library of layers in FP8", "Use the layers of torch.nn."
    ),
    "vllm": Missing("a server of language models", _SERVING, False),
    "sglang": Missing("a server of language models", _SERVING, False),
    "lmdeploy": Missing("a server of language models", _SERVING),
    "flashinfer": Missing(
        "a library of attention kernels", "Use torch.nn.functional.scaled_dot_product_attention."
    ),
    "sageattention": Missing(
        "a library of attention kernels", "Use torch.nn.functional.scaled_dot_product_attention."
    ),
    "flash_mla": Missing(
        "a library of attention kernels", "Use torch.nn.functional.scaled_dot_product_attention."
    ),
    "deepspeed": Missing(
        "a library of training on several GPUs",
        "Use torch.distributed.fsdp, or leave its engine out.",
        False,
    ),
    "deep_gemm": Missing("a library of matrix products in FP8", "Use torch.nn.functional.linear."),
    "torch_cluster": Missing(
        "a library of clustering with compiled kernels", "Use torch.cdist and torch.topk.", False
    ),
    "torch_spline_conv": Missing(
        "a library of spline convolutions with compiled kernels",
        "Use torch_geometric's own.",
        False,
    ),
    "mmcv": Missing(
        "OpenMMLab's library of computer vision", f"Install mmcv-lite. {_KERNELS}", False
    ),
    "detectron2": Missing(
        "Meta's library of object detection", f"Build it with FORCE_CUDA=0. {_KERNELS}", False
    ),
    "spconv": Missing("a library of sparse convolutions", "Use torch.nn.Conv3d on a dense grid."),
    "MinkowskiEngine": Missing(
        "a library of sparse convolutions", "Use torch.nn.Conv3d on a dense grid.", False
    ),
    "torchsparse": Missing(
        "a library of sparse convolutions", "Use torch.nn.Conv3d on a dense grid."
    ),
    "tinycudann": Missing(
        "a library of small networks in CUDA", "Use torch.nn for the network and its encoding."
    ),
    "nvdiffrast": Missing("a rasterizer for GPUs", _RENDERING),
    "diff_gaussian_rasterization": Missing("a rasterizer for GPUs", _RENDERING),
    "simple_knn": Missing("a search of neighbours for GPUs", "Use torch.cdist and torch.topk."),
    "gsplat": Missing("a rasterizer for GPUs", _RENDERING),
    "kaolin": Missing("NVIDIA's library of 3D deep learning", _RENDERING),
    "awq_ext": Missing("the kernels of AutoAWQ", _QUANTIZED),
    "auto_gptq": Missing("a library of quantization with kernels for GPUs", _QUANTIZED),
    "gptqmodel": Missing("a library of quantization with kernels for GPUs", _QUANTIZED),
    "exllamav2": Missing("a library of quantization with kernels for GPUs", _QUANTIZED),
    "apex_C": Missing("the kernels of apex", "Use torch.nn.utils.parameters_to_vector."),
    "fused_layer_norm_cuda": Missing(
        "a kernel of apex", "Use apex.normalization, which is stood in for."
    ),
    "flash_attn_2_cuda": Missing(
        "the kernels of flash_attn", "Use the functions of flash_attn, which are stood in for."
    ),
    "selective_scan_cuda": Missing(
        "the kernels of mamba_ssm", "Use selective_scan_fn, which is stood in for."
    ),
    "causal_conv1d_cuda": Missing(
        "the kernels of causal_conv1d", "Use causal_conv1d_fn, which is stood in for."
    ),
    "fla": Missing(
        "a library of linear attention in Triton",
        "Use the model of the transformers library.",
        False,
    ),
}
"""Name of a package, or of a module of one -> its description. CuPy and Triton are in
``uncaught_errors.py``.
"""


_COMPUTE_NOTHING = (
    "vllm",
    "sglang",
    "lmdeploy",
    "tensorrt_llm",
    "transformer_engine",
    "flashinfer",
    "sageattention",
    "flash_mla",
    "deep_gemm",
)
"""Packages of :data:`MISSING` that compute nothing without a GPU where they are installed, and
raise errors that do not show this.
"""


def note_of(name: str) -> str:
    """Return the note on an error about a package of :data:`MISSING`."""
    missing = MISSING[name]
    if missing.needs_cuda:
        subject = f"{name}, {missing.what}, needs CUDA"
    else:
        subject = f"{name} is {missing.what}"
    return f"{subject}. {missing.instead}"


def _modules_of(package: str) -> str:
    """Return a regular expression of a package's modules, itself among them."""
    return re.escape(package) + r"(\..*)?"


for _name in MISSING:
    uncaught_errors.note_missing(_modules_of(_name), note_of(_name))
for _name in _COMPUTE_NOTHING:
    _note = f"{_name} computes on an NVIDIA GPU only. {MISSING[_name].instead}"
    uncaught_errors.note_raised(_modules_of(_name), _note)
for _name in PACKAGES:
    if _name == "triton" or _name.partition(".")[0] in MISSING:
        # uncaught_errors.py shows how to install Triton. The note on a package in MISSING holds for
        # its compiled part too.
        continue
    _note = (
        f"{_name} needs CUDA. torchdevice stands in for a part of it, which docs/packages.md "
        "lists, in a scope without packages='absent'."
    )
    uncaught_errors.note_missing(_modules_of(_name), _note)
    if _name != "pynvml":  # which needs the driver's library and no kernels
        _note = (
            f"{_name} is installed, and its kernels need an NVIDIA GPU. With packages='instead' "
            "(--packages instead) torchdevice's stand-in takes its place."
        )
        uncaught_errors.note_raised(_modules_of(_name), _note)

# `from flash_attn import name` raises Python's own ImportError, which has only the file's name.
uncaught_errors.note_lacking(
    str(Path(__file__).with_name("finder.py")),
    "This module is torchdevice's stand-in, which has a part of the package. docs/packages.md "
    "lists its names.",
)
