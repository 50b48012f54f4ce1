"""The errors of the compiled parts of apex, torch_scatter and mmcv, in their words.

As ``kernel_refusals``, these hold on simulated GPUs only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import torch

from torchdevice.kernel.devices.scalar_types import scalar_type
from torchdevice.packages.kernel_refusals import expect, is_on_gpu, require
from torchdevice.packages.registry import on_simulated_gpu, unseen


def reads_as(dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> None:
    """Repeat the check of ``Tensor::data_ptr<T>``."""
    for each in tensors:
        require(
            each.dtype == dtype,
            f"expected scalar type {scalar_type(dtype)} but found {scalar_type(each.dtype)}",
        )


def dispatches(kernel: str, dtype: torch.dtype, taken: Sequence[torch.dtype]) -> None:
    """Repeat the check of ``AT_DISPATCH_``."""
    if dtype not in taken:
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{scalar_type(dtype)}'")


# ---- apex ----------------------------------------------------------------------------------------

_OF_NORMS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Sequence[int],
    *,
    is_rms: bool,
    is_mixed: bool,
    of_module: bool,
) -> None:
    """Raise the errors of ``apex.normalization``'s kernels for tensors that autocast has cast.

    Args:
        x: What is normalized.
        weight: The factor, which the kernel calls gamma.
        bias: What is added, which it calls beta.
        shape: The shape of the last dimensions.
        is_rms: Whether it is the normalization by the mean square.
        is_mixed: Whether the result has the dtype of the weight.
        of_module: Whether a module calls it, which uses torch's own norm on the CPU and while
            TorchScript traces it.

    Raises:
        RuntimeError: The kernel would refuse the inputs.
    """
    if not _runs_kernel_of_norm(x, of_module):
        return
    given = {"gamma": weight, "beta": bias}
    for name, each in {"input": x, **given}.items():
        require(each is None or is_on_gpu(each), f"{name} must be a CUDA tensor")
    _check_shape_of_norm(x, shape)
    if not is_mixed:
        _check_shapes_of_parameters(given, shape)
    kernel = "rms_norm_cuda_kernel" if is_rms else "layer_norm_cuda_kernel"
    _check_dtypes_of_norm(kernel, x, weight if is_mixed else None, [weight, bias])


def refuse_gradient_of_norm(
    result: torch.Tensor, x: torch.Tensor, *, is_rms: bool, of_module: bool
) -> None:
    """Let the backward pass of a layer norm in float64 raise an error.

    ``cuda_layer_norm_gradient`` has no kernel for float64 (csrc/layer_norm_cuda_kernel.cu).
    ``cuda_rms_norm_gradient`` and both forward passes have.
    """
    with unseen():
        is_refused = x.dtype == torch.float64 and not is_rms and result.requires_grad
    if is_refused and _runs_kernel_of_norm(x, of_module):
        result.register_hook(_refuse_double)


def _refuse_double(gradient: torch.Tensor) -> NoReturn:
    raise RuntimeError("\"cuComputeGradInput\" not implemented for 'Double'")


def _runs_kernel_of_norm(x: torch.Tensor, of_module: bool) -> bool:
    """Return whether apex would run a kernel of its own, which can refuse its input."""
    if not on_simulated_gpu() or torch.compiler.is_compiling():
        return False
    return not of_module or (is_on_gpu(x) and not torch._C._is_tracing())


def _check_dtypes_of_norm(
    kernel: str,
    x: torch.Tensor,
    like: torch.Tensor | None,
    parameters: Sequence[torch.Tensor | None],
) -> None:
    """Check the dtypes of a normalization, whose result has that of ``like`` or of x."""
    require(x.dtype in _OF_NORMS, f"\"{kernel}\" not implemented for '{scalar_type(x.dtype)}'")
    # For an input in half precision there is no kernel whose result has another dtype.
    is_half = x.dtype.itemsize == 2
    result = x if like is None or is_half else like
    reads_as(result.dtype, [each for each in parameters if each is not None])


def _check_shape_of_norm(x: torch.Tensor, shape: Sequence[int]) -> None:
    whole = tuple(x.shape)
    if not shape or whole[len(whole) - len(shape) :] != tuple(shape):
        sizes = ", ".join(map(str, shape))
        raise RuntimeError(
            f"Given normalized_shape=[{sizes}], expected input with shape [*, {sizes}], but got "
            f"input of size[{', '.join(map(str, whole))}]"
        )


def _check_shapes_of_parameters(
    given: dict[str, torch.Tensor | None], shape: Sequence[int]
) -> None:
    for name, each in given.items():
        fits = each is None or tuple(each.shape) == tuple(shape)
        expect(f"!{name}.defined() || {name}.sizes().equals(normalized_shape)", fits)


def check_optimized(
    optimizer: str, parameter: torch.Tensor, gradient: torch.Tensor, taken: Sequence[torch.dtype]
) -> None:
    """Raise the errors of apex's optimizers and ``multi_tensor_apply`` for a parameter.

    Args:
        optimizer: The name of its class.
        parameter: The parameter.
        gradient: Its gradient.
        taken: The dtypes that the optimizer takes.

    Raises:
        RuntimeError: The kernel would refuse it.
    """
    if not on_simulated_gpu():
        return
    require(parameter.dtype in taken, f"{optimizer} only support fp16 and fp32.")
    require(is_on_gpu(gradient), "expected input to be on cuda")
    for each in (gradient, parameter):
        require(_is_contiguous(each), "A tensor was not contiguous.")


def check_lists(
    kernel: str,
    noop_flag: torch.Tensor,
    lists: Sequence[Sequence[torch.Tensor]],
    depth: int,
    taken: Sequence[torch.dtype],
) -> None:
    """Raise the errors of apex's operations on lists of tensors (csrc/multi_tensor_apply.cuh).

    Args:
        kernel: The name that errors show.
        noop_flag: The flag that the operation may set.
        lists: The lists.
        depth: How many there must be.
        taken: The dtypes that each list may have.

    Raises:
        RuntimeError: The operation would refuse them.
    """
    if not on_simulated_gpu():
        return
    require(len(lists) == depth, "tensor_lists.size() != depth")
    require(len(lists[0]) > 0, "tensor_lists[0].size() is not > 0")
    for dtype in (given[0].dtype for given in lists if given):
        require(dtype in taken, f"\"{kernel}\" not implemented for '{scalar_type(dtype)}'")
    for given in lists:
        require(len(given) == len(lists[0]), "Size mismatch among tensor lists")
        for each, first in zip(given, lists[0], strict=True):
            require(_is_contiguous(each), "A tensor was not contiguous.")
            require(is_on_gpu(each), "A tensor was not cuda.")
            require(each.numel() == first.numel(), "Size mismatch")
    reads_as(torch.int32, [noop_flag])


def _is_contiguous(tensor: torch.Tensor) -> bool:
    layouts = [torch.contiguous_format]
    if tensor.dim() == 4:
        layouts.append(torch.channels_last)
    if tensor.dim() == 5:
        layouts.append(torch.channels_last_3d)
    return any(tensor.is_contiguous(memory_format=each) for each in layouts)


def check_master_weights(master_weights: bool, capturable: bool) -> None:
    """Raise the errors of ``FusedAdam``'s constructor.

    Raises:
        RuntimeError: It has master weights and is not capturable.
    """
    if on_simulated_gpu():
        require(
            capturable or not master_weights,
            "Master weights is currently only supported with the capturable version.",
        )


# ---- torch_scatter -------------------------------------------------------------------------------

_OF_SCATTERING = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


class _Lines(NamedTuple):
    """The lines at which a kernel of release 2.1.2 checks its arguments.

    Attributes:
        file: The name of its file, without what it ends with.
        of_index: Where it checks the device of the index.
        of_out: Where it checks that of the result.
        of_dims: Where it checks the dimensions of the index. That of ``scatter`` always holds.
        of_sizes: Where it checks the shape of the result.
        on_cpu: Where the kernel for CPUs checks the device of the index.
    """

    file: str
    of_index: int
    of_out: int
    of_dims: int
    of_sizes: int
    on_cpu: int


_LINES = {
    "scatter": _Lines("scatter", 63, 65, 68, 79, 12),
    "segment_coo": _Lines("segment_coo", 157, 159, 162, 179, 13),
    "gather_coo": _Lines("segment_coo", 330, 332, 335, 351, 146),
    "segment_csr": _Lines("segment_csr", 102, 104, 107, 123, 13),
    "gather_csr": _Lines("segment_csr", 222, 224, 227, 244, 97),
}


def _asserted(condition: str, holds: bool, file: str, line: int, words: str) -> None:
    """Repeat the check of ``AT_ASSERTM``."""
    require(
        holds,
        f'{condition} INTERNAL ASSERT FAILED at "csrc/{file}":{line}, please report a bug to '
        f"PyTorch. {words}",
    )


def check_scattered(
    kernel: str, src: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None, dim: int
) -> None:
    """Raise the errors of a kernel of torch_scatter. Sums by index are torch's own operator.

    Args:
        kernel: One of those above.
        src: The elements.
        index: The place of each element, or the pointers of segments.
        out: Where to write the result; None for a new tensor.
        dim: The dimension along which elements are reduced, from 0.

    Raises:
        RuntimeError: The kernel would refuse the tensors.
        NotImplementedError: There is no kernel for the dtype.
    """
    if not on_simulated_gpu():
        return
    lines = _LINES[kernel]
    name = "indptr" if kernel.endswith("csr") else "index"
    if not is_on_gpu(src):
        cpu = f"cpu/{lines.file}_cpu.cpp"
        condition = f"{name}.device().is_cpu()"
        _asserted(condition, not is_on_gpu(index), cpu, lines.on_cpu, f"{name} must be CPU tensor")
        return
    cuda = f"cuda/{lines.file}_cuda.cu"
    for given, tensor, line in (
        (name, index, lines.of_index),
        ("optional_out.value()", out, lines.of_out),
    ):
        fits = tensor is None or is_on_gpu(tensor)
        condition = f"{given}.device().is_cuda()"
        _asserted(condition, fits, cuda, line, f"{given} must be CUDA tensor")
    if kernel != "scatter":  # which expands the index first
        fits = src.dim() >= index.dim()
        condition = f"src.dim() >= {name}.dim()"
        _asserted(condition, fits, cuda, lines.of_dims, "Input mismatch")
    if out is not None:
        others = [each for each in range(out.dim()) if each != dim]
        fits = src.dim() == out.dim() and all(src.shape[each] == out.shape[each] for each in others)
        _asserted("src.size(i) == out.size(i)", fits, cuda, lines.of_sizes, "Input mismatch")
    if src.numel() and index.numel():
        reads_as(torch.int64, [index])
        dispatches("_", src.dtype, _OF_SCATTERING)


# ---- mmcv ----------------------------------------------------------------------------------------

_OF_DETECTION = (torch.float64, torch.float32, torch.float16)


def check_kernel(
    registered: str,
    kernel: str,
    *tensors: torch.Tensor,
    same: Sequence[int],
    whole: Sequence[int] = (),
    has_cpu: bool = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise the errors of a kernel of mmcv.

    Args:
        registered: The name in mmcv's table of a device's kernels.
        kernel: The name that errors show.
        tensors: Its arguments that are tensors, which come first.
        same: Which of them it reads as the dtype of the first, or as ``dtype``.
        whole: Which of them it reads as int64.
        has_cpu: Whether there is one for CPUs.
        dtype: The only one that it takes; None for every one that kernels of mmcv take.

    Raises:
        RuntimeError: The kernel would refuse the tensors.
        NotImplementedError: There is no kernel for the dtype.
    """
    if not on_simulated_gpu():
        return
    first = _device(tensors[0])
    for place, each in enumerate(tensors):
        require(
            _device(each) == first,
            f"{registered}: at param {place}, inconsistent device: {_device(each)} vs {first}\n",
        )
    if not is_on_gpu(tensors[0]):
        require(has_cpu, f"{registered}: implementation for device {first} not found.\n")
        return
    if dtype is None:
        dtype = tensors[0].dtype
        dispatches(kernel, dtype, _OF_DETECTION)
    reads_as(dtype, [tensors[each] for each in same])
    reads_as(torch.int64, [tensors[each] for each in whole])


def check_on_cpu(registered: str, tensor: torch.Tensor) -> None:
    """Check that a tensor is on the CPU, for which alone mmcv has this kernel.

    Raises:
        RuntimeError: It is on a GPU.
    """
    if on_simulated_gpu():
        words = f"{registered}: implementation for device {_device(tensor)} not found.\n"
        require(not is_on_gpu(tensor), words)


def _device(tensor: torch.Tensor) -> str:
    return f"cuda:{max(0, tensor.get_device())}" if is_on_gpu(tensor) else "cpu"


def check_whole_memory(tensors: dict[str, torch.Tensor]) -> None:
    """Check that the arguments of mmcv's deformable convolution are contiguous, on one kind of
    device. It is called on simulated GPUs only, as are the two checks below.

    Raises:
        RuntimeError: One is not.
    """
    kind = "CUDA" if is_on_gpu(tensors["input"]) else "CPU"
    for name, each in tensors.items():
        require(is_on_gpu(each) is (kind == "CUDA"), f"{name} must be a {kind} tensor")
        require(each.is_contiguous(), f"{name} must be contiguous")


class Convolution(NamedTuple):
    """The arguments of a deformable convolution that are no tensors: height, then width.

    Attributes:
        kernel: The size of the kernel.
        stride: How far apart results are.
        padding: How many zeros are around the input.
        dilation: How far apart the elements of the kernel are.
        groups: In how many groups channels are.
        deform_groups: How many groups of channels have offsets of their own.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    deform_groups: int

    def results(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the height and width of the result of an input."""
        return tuple(
            (each + 2 * around - (apart * (taps - 1) + 1)) // step + 1
            for each, around, apart, taps, step in zip(
                size, self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        )


def check_deformed(
    x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, how: Convolution
) -> None:
    """Check the shapes and dtypes that the kernel of a deformable convolution refuses.

    Raises:
        RuntimeError: The kernel would refuse the tensors.
        NotImplementedError: There is no kernel for the dtype.
    """
    for holds, words in _of_convolution(x, weight, offset, how):
        require(holds, words)
    if is_on_gpu(x):
        dispatches("deformable_im2col_gpu", x.dtype, _OF_DETECTION)
        reads_as(x.dtype, [offset])


def _of_convolution(
    x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, how: Convolution
) -> Iterator[tuple[bool, str]]:
    """Yield the checks of a deformable convolution's shapes, each with the text of its error.

    The words have the placeholders that the package's have: it does not fill them.
    """
    yield (
        weight.dim() == 4,
        f"4D weight tensor (nOutputPlane,nInputPlane,kH,kW) expected, but got: %s{weight.dim()}",
    )
    yield (
        tuple(weight.shape[2:]) == how.kernel,
        "kernel size should be consistent with weight, but got kH: %d kW: %d weight.size(2): %d, "
        f"weight.size(3): %d{''.join(map(str, (*how.kernel, *weight.shape[2:])))}",
    )
    yield x.dim() == 4, f"3D or 4D input tensor expected but got: %s{x.dim()}"
    planes = weight.shape[1] * how.groups
    rows, columns = how.results(x.shape[2:])
    yield planes % how.deform_groups == 0, "input channels must divide deformable group size"
    sizes = (planes, *x.shape[2:], weight.shape[0], rows, columns)
    yield (
        rows >= 1 and columns >= 1,
        "Given input size: (%ld x %ld x %ld). Calculated output size: (%ld x %ld x %ld). Output "
        f"size is too small{''.join(map(str, sizes))}",
    )
    yield (
        x.shape[1] == planes,
        f"invalid number of input planes, expected: %d, but got: %d{planes}{x.shape[1]}",
    )
    yield (
        x.shape[2] >= how.kernel[0] and x.shape[3] >= how.kernel[1],
        "input image is smaller than kernel",
    )
    yield (
        tuple(offset.shape[2:]) == (rows, columns),
        "invalid spatial size of offset, expected height: %d width: %d, but got height: %d width: "
        f"%d{rows}{columns}{''.join(map(str, offset.shape[2:]))}",
    )
    yield (
        offset.shape[1] == how.deform_groups * 2 * how.kernel[0] * how.kernel[1],
        "invalid number of channels of offset",
    )
    yield offset.shape[0] == x.shape[0], "invalid batch size of offset"


def check_modulated(
    x: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    how: Convolution,
) -> None:
    """Raise the errors of the kernel of a deformable convolution with a mask.

    Raises:
        RuntimeError: The kernel would refuse the tensors.
        NotImplementedError: There is no kernel for the dtype.
    """
    (rows, columns), taps = weight.shape[2:], how.kernel
    require(
        (rows, columns) == taps,
        "Input shape and kernel shape won't match: (%d x %d vs %d x "
        f"%d).{rows}{taps[1]}{rows}{columns}",
    )
    planes = weight.shape[1] * how.groups
    require(
        x.shape[1] == planes,
        f"Input shape and kernel channels won't match: (%d vs %d).{x.shape[1]}{planes}",
    )
    check_kernel(
        "modulated_deformable_im2col_impl",
        "modulated_deformable_im2col_gpu",
        x,
        offset,
        mask,
        same=(1, 2),
    )
