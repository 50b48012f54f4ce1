"""Dtypes in which the CPU has a kernel of an operator and CUDA has none.

Made by ``python docs/make_cuda_dtypes.py`` from torch 2.13; do not edit.
"""

from collections.abc import Mapping

GAPS: Mapping[str, tuple[str, ...]] = {
    "_trilinear": ("int16", "int32", "int64", "int8", "uint8"),
    "_upsample_bilinear2d_aa": ("uint8",),
    "addbmm": ("int16", "int32", "int64", "int8", "uint8"),
    "addmm": ("int16", "int32", "int64", "int8", "uint8"),
    "addmv": ("int16", "int32", "int64", "int8", "uint8"),
    "angle": ("bfloat16", "float16"),
    "avg_pool2d": ("int64",),
    "avg_pool3d": ("int64",),
    "baddbmm": ("int16", "int32", "int64", "int8", "uint8"),
    "bmm": ("int16", "int32", "int64", "int8", "uint8"),
    "convolution": ("int64",),
    "dot": ("int16", "int32", "int64", "int8", "uint8"),
    "histc": ("bfloat16", "float16"),
    "igamma": ("bfloat16", "float16"),
    "igammac": ("bfloat16", "float16"),
    "linalg_vector_norm": ("complex32",),
    "max_pool2d_with_indices": ("int16", "int32", "int64", "int8", "uint8"),
    "max_pool3d_with_indices": ("int16", "int32", "int64", "int8", "uint8"),
    "mm": ("int16", "int32", "int64", "int8", "uint8"),
    "mv": ("int16", "int32", "int64", "int8", "uint8"),
    "native_dropout_backward": ("int16", "int32", "int64", "int8", "uint8"),
    "upsample_bicubic2d": ("uint8",),
    "upsample_bilinear2d": ("uint8",),
    "vdot": ("int16", "int32", "int64", "int8", "uint8"),
}
