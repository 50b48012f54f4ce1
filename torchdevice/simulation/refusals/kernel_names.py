"""Names of CUDA's kernels in torch's errors for dtypes that neither device has a kernel for.

The names are those of aten/src/ATen/native/cuda and aten/src/ATen/native/sparse/cuda of torch 2.13.
A test looks long ones up in the libraries of builds with CUDA; the compiler keeps no text of short
ones. ``channel_shuffle`` and ``pixel_shuffle`` have no kernel on CUDA, which composes them.
"""

from __future__ import annotations

import re

from torchdevice.simulation import policy

_NOT_IMPLEMENTED = re.compile(r'"([^"]+)" not implemented for ')

_OF_OPERATORS = {
    "_upsample_bilinear2d_aa": "upsample_bilinear2d_out_frame",
    "_upsample_nearest_exact1d": "upsample_nearest1d_out_frame",
    "_upsample_nearest_exact2d": "upsample_nearest2d_out_frame",
    "_upsample_nearest_exact3d": "upsample_nearest3d_out_frame",
    "avg_pool2d": "avg_pool2d_out_cuda_frame",
    "avg_pool3d": "avg_pool3d_out_cuda",
    "equal": "compare_eq_ne_cuda",
    "linalg_ldl_solve": "ldl_solve_kernel",
    "max_pool2d_with_indices": "max_pool2d_with_indices_out_cuda_frame",
    "max_pool3d_with_indices": "max_pool3d_with_indices_out_frame",
    "upsample_bicubic2d": "upsample_bicubic2d_out_frame",
    "upsample_bilinear2d": "upsample_bilinear2d_out_frame",
    "upsample_linear1d": "upsample_linear1d_out_frame",
    "upsample_nearest1d": "upsample_nearest1d_out_frame",
    "upsample_nearest2d": "upsample_nearest2d_out_frame",
    "upsample_nearest3d": "upsample_nearest3d_out_frame",
    "upsample_trilinear3d": "upsample_trilinear3d_out_frame",
}
"""Operator, of those whose CPU kernels share a name -> the name of its kernel on CUDA."""

_SCATTERED = "cuda_scatter_gather_base_kernel_func"

_OF_KERNELS = {
    "GeluKernelImpl": "GeluCUDAKernelImpl",
    "_segment_reduce_cpu": "segment_reduce_cuda",
    "adaptive_avg_pool2d": "adaptive_avg_pool2d_cuda",
    "adaptive_max_pool2d": "adaptive_max_pool2d_cuda",
    "add_stub": "ufunc_add_CUDA",
    "addmm_impl_cpu_": "addmm_cuda",
    "baddbmm": "baddbmm_cuda",
    "baddbmm_with_gemm": "baddbmm_cuda",
    "binary_cross_entropy": "binary_cross_entropy_out_cuda",
    "bmm": "baddbmm_cuda",
    "bmm_sparse_dense": "bmm_sparse_cuda",
    "cholesky_cpu": "cholesky_cusolver",
    "cholesky_solve_cpu": "cholesky_cuda_potrs",
    "cross": "cross_cuda",
    "digamma": "digamma_cuda",
    "exp2": "exp2_cuda",
    "fractional_max_pool2d_out_frame": "fractional_max_pool2d_out_cuda_frame",
    "ge_cpu": "compare_cuda",
    "grid_sampler3d_cpu": "grid_sampler_3d_cuda",
    "grid_sampler_2d_cpu_kernel_impl": "grid_sampler_2d_cuda",
    "gt_cpu": "compare_cuda",
    "im2col_out_cpu": "im2col_out_cuda",
    "index_add_": "index_add",
    "index_reduce_func_exclude_input_init": "index_reduce_func_cuda_exclude_input_init",
    "index_select": "index_select_cuda",
    "ldl_factor_kernel_cpu": "ldl_factor_looped_cusolver",
    "le_cpu": "compare_cuda",
    "lerp_kernel_scalar": "lerp_cuda",
    "lerp_kernel_tensor": "lerp_cuda",
    "linalg_eig_out_cpu": "linalg_eig_cuda",
    "linalg_svd_cpu": "svd_cuda_gesvdj",
    "log_sigmoid_cpu": "log_sigmoid_forward_cuda",
    "log_softmax_kernel_impl": "host_softmax",
    "log_softmax_lastdim_kernel_impl": "host_softmax",
    "lt_cpu": "compare_cuda",
    "lu_cpu": "lu_factor_cusolver",
    "masked_fill": "masked_fill_",
    "masked_scatter": "masked_scatter__cuda",
    "max_all": "max_all_cuda",
    "max_unpool2d": "max_unpooling2d_forward_kernel",
    "max_unpool3d": "max_unpooling3d_forward_kernel",
    "median_cpu": "median_out_impl",
    "median_out": "median_with_indices_impl",
    "min_all": "min_all_cuda",
    "multi_margin_loss_cpu_kernel": "multi_margin_loss_cuda",
    "multilabel_margin_loss_forward_out_frame": "multilabel_margin_loss_forward_kernel",
    "nan_to_num": "nan_to_num_cuda",
    "nll_loss_out_frame": "nll_loss_forward_reduce_cuda_kernel_2d",
    "pdist": "pdist_cuda",
    "polygamma": "polygamma_cuda",
    "pow": "pow_cuda",
    "reflection_pad1d": "reflection_pad1d_out",
    "reflection_pad2d": "reflection_pad2d_out_template",
    "reflection_pad3d": "reflection_pad3d_out_cuda",
    "replication_pad1d": "replication_pad1d_cuda",
    "replication_pad2d": "replication_pad2d_cuda",
    "replication_pad3d": "replication_pad3d_cuda",
    "rrelu_with_noise_out_cpu": "rrelu_with_noise_out_cuda",
    "scatter_gather_scalar_cpu": "cuda_scatter_fill_base_kernel_func",
    "scatter_gather_tensor_cpu": _SCATTERED,
    "scatter_gather_tensor_cpu_reduce_amax": _SCATTERED,
    "scatter_gather_tensor_cpu_reduce_amin": _SCATTERED,
    "scatter_gather_tensor_cpu_reduce_mean": _SCATTERED,
    "searchsorted_out_cpu": "searchsorted_out_cuda",
    "softmax_backward_kernel_impl": "host_softmax_backward",
    "softmax_backward_lastdim_kernel_impl": "host_softmax_backward",
    "softmax_kernel_impl": "host_softmax",
    "softmax_lastdim_kernel_impl": "host_softmax",
    "take_put_cpu": "put_cuda",
    "trigamma": "trigamma_cuda",
    "tril": "triu_tril_cuda_template",
    "triu": "triu_tril_cuda_template",
}
"""The CPU's name of a kernel -> CUDA's, where that is not the CPU's with another ending."""

_ENDING = re.compile(r"(?:_vml|_out)_cpu$|_cpu_out$")


def of_cuda(operator: str, kernel: str) -> str:
    """Return the name of the kernel that CUDA runs for an operator.

    Args:
        operator: The operator, without namespace and overload.
        kernel: The name of the CPU's kernel.
    """
    known = _OF_OPERATORS.get(operator) or _OF_KERNELS.get(kernel)
    if known is not None:
        return known
    return _ENDING.sub("_cuda", kernel).replace("_cpu", "_cuda")


_OF_HOST = re.compile(r"(?<=but got torch\.)(?=\w+Tensor\b)")
"""The place of the device in the name of a tensor's type, which the CPU's leaves out."""

_TYPE_OF_HOST = re.compile(r"\bCPU(?=\w+Type\b)")
"""The device in the name of a tensor's type that torch has no class for."""


def named(operator: str, error: Exception) -> Exception:
    """Return a CPU dtype error with CUDA's names of kernel and type; other errors unchanged."""
    if not policy.stands_for_cuda():
        return error
    text = _TYPE_OF_HOST.sub("CUDA", _OF_HOST.sub("cuda.", str(error)))
    found = _NOT_IMPLEMENTED.match(text)
    if found is not None:
        text = text.replace(found[1], of_cuda(operator, found[1]), 1)
    return error if text == str(error) else type(error)(text)
