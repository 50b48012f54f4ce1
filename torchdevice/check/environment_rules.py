"""The rules for a program's environment: packages, extensions, process groups, compilers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from torchdevice.check.names import argument
from torchdevice.check.rule_registry import Found, Verdict, View, names_option, rule, without_trace
from torchdevice.errors import PATCHERS

PACKAGES: Mapping[str, str] = {
    "deepspeed": "run without its engine, or use torch.distributed",
    "transformer_engine": "use the layers of torch.nn",
    "py3nvml": "leave the readings out, or use psutil",
    "nvidia_smi": "leave the readings out, or use psutil",
    "GPUtil": "leave the readings out, or use psutil",
    "gpustat": "leave the readings out, or use psutil",
    "cupy": "use torch or NumPy",
    "cupyx": "use torch or NumPy",
    "pycuda": "use torch or NumPy",
    "cudf": "use pandas",
    "cuml": "use scikit-learn",
    "nvidia.dali": "use torch.utils.data",
    "tensorrt": "choose the library's own fallback",
    "torch_tensorrt": "use torch.compile",
}
"""Packages that run on CUDA only, and the replacement of each."""

INTERPRETED: Mapping[str, str] = {
    "bitsandbytes": "bitsandbytes computes with its own kernels for CPUs.",
    "triton": "Triton's kernels run in NumPy, if Triton is installed. Use small shapes.",
    "numba.cuda": (
        "numba's kernels run in its simulator, with NUMBA_ENABLE_CUDASIM=1. Use small shapes."
    ),
}
"""Packages whose code for CUDA runs elsewhere too, with a remark on each."""

STOOD_IN_FOR: Mapping[str, str] = {
    "amp_C": (
        "The import of amp_C gets a stand-in for its scale, axpby and l2norm. Use apex.optimizers "
        "for its optimizers."
    ),
    "flash_attn": "The import of flash_attn gets a stand-in on torch's operators.",
    "flash_attn_interface": (
        "The import of flash_attn_interface gets a stand-in on torch's operators."
    ),
    "xformers": "The import of xformers gets a stand-in on torch's operators.",
    "torch_sparse": (
        "The import of torch_sparse gets a stand-in on torch's operators, without SparseTensor."
    ),
    "MultiScaleDeformableAttention": (
        "The import of MultiScaleDeformableAttention gets a stand-in on torch's grid_sample."
    ),
    "torch_scatter": "The import of torch_scatter gets a stand-in on torch's operators.",
    "causal_conv1d": "The import of causal_conv1d gets a stand-in on torch's operators.",
    "mamba_ssm": (
        "The import of mamba_ssm gets a stand-in on torch's operators, for its functions and "
        "blocks."
    ),
    "apex": (
        "The import of apex gets a stand-in for its normalizations and optimizers. Use torch.amp "
        "for its amp."
    ),
    "pynvml": (
        "pynvml is stood in for. It has the devices of simulated GPUs, and elsewhere finds no "
        "driver."
    ),
}
"""Packages for which a scope has stand-ins, with a remark on each."""


@rule("package", ast.Import, ast.ImportFrom, of_cuda=True)
def _package(node: ast.Import | ast.ImportFrom, view: View) -> Iterator[Found]:
    """An import of a package that runs on CUDA only, such as `cupy`, in a file that is not the
    package's own. The program must be changed, unless it asks whether the package is there, or goes
    on where the import fails: then it takes that branch, which is approximate. So is an import of a
    package that is stood in for, such as `flash_attn`, and of `triton` or `numba.cuda`, whose
    kernels run in NumPy.
    """
    others = {**INTERPRETED, **STOOD_IN_FOR}
    for name in sorted(name for name in _packages(node, others) if not view.is_inside(name)):
        yield without_trace(others[name])
    for name in sorted(name for name in _packages(node, PACKAGES) if not view.is_inside(name)):
        # By the words of their conditions.
        tests = (ast.unparse(each.test) for each in view.around(node) if isinstance(each, ast.If))
        if view.is_guarded(node) or any(name in test or "find_spec" in test for test in tests):
            yield without_trace(f"The program goes on without {name}, which needs CUDA.")
        else:
            yield Found(
                Verdict.CHANGE,
                f"Import {name} only where CUDA is there: {PACKAGES[name]} elsewhere.",
            )


def _packages(node: ast.Import | ast.ImportFrom, packages: Iterable[str]) -> set[str]:
    """Return those of these packages that a statement imports."""
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    names = [] if getattr(node, "level", 0) else [f"{module}{alias.name}." for alias in node.names]
    return {package for package in packages for name in names if name.startswith(f"{package}.")}


@rule("patcher", ast.Import, ast.ImportFrom, of_cuda=True)
def _patcher(node: ast.Import | ast.ImportFrom, view: View) -> Iterator[Found]:
    """An import of a package that replaces parts of torch for the whole process: `mpsify`,
    `torchada`, `torch_npu.contrib.transfer_to_npu`. It must be removed: in a scope the import
    raises an error.
    """
    for name in sorted(_packages(node, PATCHERS)):
        yield Found(
            Verdict.CHANGE,
            f"Remove the import of {name}: it replaces parts of torch, as a scope does.",
        )


@rule("extension", ast.Call, of_cuda=True)
def _extension(node: ast.Call, view: View) -> Iterator[Found]:
    """An extension in CUDA's C++: `CUDAExtension`, `load` and `load_inline` of
    `torch.utils.cpp_extension` with sources for CUDA. It must be changed: a scope raises an error
    at the call.
    """
    name = view.called(node)
    if not name.startswith("torch.utils.cpp_extension."):
        return
    function = name.rpartition(".")[2]
    if function == "CUDAExtension" or (
        function in ("load", "load_inline") and _has_cuda_sources(node)
    ):
        yield Found(
            Verdict.CHANGE,
            f"Write the extension in plain C++ or in Python: {function} builds code for CUDA.",
        )


def _has_cuda_sources(call: ast.Call) -> bool:
    with_cuda = argument(call, None, "with_cuda")
    is_asked = isinstance(with_cuda, ast.Constant) and with_cuda.value
    if is_asked or argument(call, None, "cuda_sources") is not None:
        return True
    sources = argument(call, 1, "sources")
    texts = (
        (each.value for each in ast.walk(sources) if isinstance(each, ast.Constant))
        if sources is not None
        else ()
    )
    return any(isinstance(text, str) and text.endswith((".cu", ".cuh")) for text in texts)


@rule("nvidia-smi", ast.Call, of_cuda=True)
def _nvidia_smi(node: ast.Call, view: View) -> Iterator[Found]:
    """A call that starts `nvidia-smi` or `nvcc`, which are not there without NVIDIA's driver: the
    program must be changed.
    """
    function = view.called(node)
    if not function.startswith(("subprocess.", "os.system", "os.popen", "shutil.which")):
        return
    first = argument(node, 0, "args")
    words = first.elts[:1] if isinstance(first, (ast.List, ast.Tuple)) and first.elts else [first]
    for text in (text for word in words for text in view.texts(word)):
        found = re.match(r"(?:\S*/)?(nvidia-smi|nvcc)\b", str(text.value))
        if found and function.startswith("shutil."):
            yield without_trace(f"The program takes the branch for a machine without {found[1]}.")
        elif found:
            yield Found(
                Verdict.CHANGE,
                f"Ask torch.cuda instead of starting {found[1]}, which is not there.",
            )


# ---- process groups ------------------------------------------------------------------------------

_GROUPS = (
    "torch.distributed.init_process_group",
    "torch.distributed.new_group",
    "torch.distributed.init_device_mesh",
)


@rule("nccl", ast.Call, of_cuda=True)
def _nccl(node: ast.Call, view: View) -> Iterator[Found]:
    """A process group on NCCL: `init_process_group("nccl")`, `backend="nccl"` of any call, an
    option of the command line whose default it is. gloo takes its place, which is approximate.
    """
    position = 0 if view.called(node) in _GROUPS[:1] else None
    backend = argument(node, position, "backend", "dist_backend", "process_group_backend")
    if (
        backend is None
        and getattr(node.func, "attr", "") == "add_argument"
        and names_option(node, "backend")
    ):
        backend = argument(node, None, "default")
    if any("nccl" in str(text.value).lower() for text in view.texts(backend)):
        yield Found(
            Verdict.APPROXIMATE, "gloo replaces NCCL, and get_backend() still answers 'nccl'."
        )


# ---- compilers -----------------------------------------------------------------------------------

_TRITON_MODES = ("reduce-overhead", "max-autotune")


@rule("compile", ast.Call, ast.Attribute, ast.Name, of_cuda=True)
def _compile(node: ast.Call | ast.Attribute | ast.Name, view: View) -> Iterator[Found]:
    """`torch.compile` with what only code for CUDA heeds: `mode="reduce-overhead"`,
    `mode="max-autotune"`, options of Triton, `backend="cudagraphs"`. It is dropped and reported,
    which is approximate. On a simulated device that lacks operators or dtypes, such as
    `simulated:mps`, the graph runs operator by operator, which is approximate too.
    """
    if not isinstance(node, ast.Call):
        yield from _compiled_by(node, view)
        return
    if view.called(node) != "torch.compile":
        return
    asked = [
        f"mode={text.value!r}"
        for text in view.texts(argument(node, None, "mode"))
        if text.value in _TRITON_MODES
    ]
    backends = [text.value for text in view.texts(argument(node, None, "backend"))]
    asked += ["backend='cudagraphs'"] if "cudagraphs" in backends else []
    options = argument(node, None, "options")
    keys = options.keys if isinstance(options, ast.Dict) else []
    asked += [
        str(key.value)
        for key in keys
        if isinstance(key, ast.Constant) and str(key.value).startswith("triton.")
    ]
    for option in asked:
        yield Found(
            Verdict.APPROXIMATE,
            f"{option} has no effect on {view.target.name}: there is no Triton.",
        )
    if not asked and view.target.plain_graphs and set(backends) <= {"inductor"}:
        yield _by_operator(view)


def _compiled_by(node: ast.Attribute | ast.Name, view: View) -> Iterator[Found]:
    """Yield meanings of `torch.compile` without a call: as decorator, or given to `partial`."""
    parent = view.parent(node)
    is_loaded = isinstance(getattr(node, "ctx", None), ast.Load)
    is_read = is_loaded and not isinstance(parent, ast.Attribute)
    is_called = isinstance(parent, ast.Call) and node is parent.func
    if (
        is_read
        and not is_called
        and view.target.plain_graphs
        and view.dotted(node) == "torch.compile"
    ):
        yield _by_operator(view)


def _by_operator(view: View) -> Found:
    # A report shows the line that calls the function.
    return without_trace(f"The graph runs operator by operator on {view.target.name}.")


_PROFILERS = ("torch.profiler.profile", "torch.autograd.profiler.profile")


@rule("profiler", ast.Call, of_cuda=True)
def _profiler(node: ast.Call, view: View) -> Iterator[Found]:
    """A profiler that records CUDA's activity: `torch.profiler.profile` with
    `ProfilerActivity.CUDA` or without `activities`, `torch.autograd.profiler.profile` with
    `use_cuda` or `use_device="cuda"`. Its columns for CUDA show the times of the target, which is
    approximate.
    """
    name = view.called(node)
    if name not in _PROFILERS:
        return
    activities = argument(node, 0, "activities")
    if name == _PROFILERS[0]:
        asked = activities is None
        if activities is not None:
            words = map(ast.unparse, (activities, *view.values(activities)))
            asked = "CUDA" in "".join(words)
    else:
        named = (argument(node, None, name) for name in ("use_cuda", "use_device"))
        asked = any(
            isinstance(each, ast.Constant) and each.value in (True, "cuda") for each in named
        )
    if asked:
        yield Found(
            Verdict.APPROXIMATE, f"The profiler's times for CUDA are those of {view.target.name}."
        )
