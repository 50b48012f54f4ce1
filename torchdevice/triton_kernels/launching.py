"""A launch: its arguments as Triton specialises them, an operator of torch, and the instances of the grid in turn.

The operator is that of ``engines/host_functions.py``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torchdevice.core.context import Context
from torchdevice.cuda.device_queries import properties_of
from torchdevice.engines import host_functions
from torchdevice.engines.rewriters import native_device
from torchdevice.errors import KernelRaceError, RaceWarning, UninitializedReadError
from torchdevice.foundation.fidelity import Fidelity
from torchdevice.foundation.logs import logger
from torchdevice.foundation.per_thread import having
from torchdevice.journal.callers import program_line, warn_at
from torchdevice.simulation import policy
from torchdevice.simulation.refusals.cuda_errors import ILLEGAL_ADDRESS, cuda_error
from torchdevice.triton_kernels import triton_internals as triton
from torchdevice.triton_kernels.driver import target_of
from torchdevice.triton_kernels.kernel_functions import as_jit, function_of, running, tensor_of
from torchdevice.triton_kernels.memory_checks import Memory, Races
from torchdevice.triton_kernels.numpy_builder import DivergedError, NumpyBuilder
from torchdevice.triton_kernels.triton_internals import TensorDescriptor, core, type_of

_set_eval_frame = importlib.import_module("torch._C._dynamo.eval_frame").set_eval_frame
_LIMITS = (2**31 - 1, 65535, 65535)
"""The largest grid of CUDA."""

_ELEMENTS, _FIRST, _INSTANCES = 2**18, 64, 1024
"""How many elements the blocks of a group may have, and how many instances the first group and the others."""

_DEPTH = 6
"""How often a group may part before its instances run one by one."""

_SECONDS = 10.0
"""How often a long launch says how far it is."""


class Launch:
    """One launch of a kernel.

    Args:
        context: The scope.
        kernel: The kernel.
        args: Its arguments.
        kwargs: Its keyword arguments, and options such as ``num_warps``.
    """

    def __init__(self, context: Context, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.context, self.kernel = context, kernel
        kwargs["debug"] = kwargs.get("debug", kernel.debug) or triton.knobs.runtime.debug
        for hook in kernel.pre_run_hooks:
            hook(*args, **kwargs)
        self.backend = triton.make_backend(target_of(context))
        binder = triton.binder_of(kernel.signature, kernel.params, self.backend)
        self.bound, self.specialization, given = binder(*args, **kwargs)
        self.options, signature, constants, attributes = triton.pack_args(
            kernel, self.backend, given, self.bound, self.specialization, given
        )
        source = triton.ASTSource(kernel, signature, constants, attributes)
        compiled = context.settings.setdefault(Compiled, {})
        if (key := (source.hash(), self.options)) not in compiled:
            compiled[key] = Compiled(source, self.backend, self.options)
        self.compiled = compiled[key]
        self.grid: tuple[int, ...] = (1, 1, 1)
        self.instance: tuple[int, ...] = (0, 0, 0)

    def check_shared(self, size: int) -> None:
        """Raise Triton's error, by its own figure, where a product may need more shared memory than the device has.

        Args:
            size: The bytes of its blocks.
        """
        limit = properties_of(self.context, self.context.thread.device_index).shared_memory_per_block_optin
        if self.context.policy and size > limit and self.compiled.shared > limit:
            raise triton.OutOfResources(self.compiled.shared, limit, "shared memory")

    def start(self, grid: Any) -> None:
        """Run the grid, after what CUDA checks at a launch."""
        grid = tuple(int(each) for each in (grid(self.bound) if callable(grid) else grid))
        self.grid = (*grid, 1, 1, 1)[:3]
        if any(size > limit or size < 0 for size, limit in zip(self.grid, _LIMITS, strict=True)):
            raise RuntimeError(
                f"Triton Error [CUDA]: invalid argument: the grid {self.grid} is beyond CUDA's {_LIMITS}."
            )
        if all(self.grid):
            host_functions.call(self.context, self.run, list(self._storages().values()))

    def _storages(self) -> dict[int, torch.Tensor]:
        """Return a tensor that covers each storage, by the storage's address, and note which arguments have it."""
        found: dict[int, torch.Tensor] = {}
        self._names: dict[int, list[str]] = {}
        for position, (name, value) in enumerate(self.bound.items()):
            for tensor in _pointers(value):
                self._check_device(tensor, position)
                with torch._C.DisableTorchFunction():
                    storage = tensor.untyped_storage()
                    if size := storage.nbytes() // tensor.itemsize:
                        found[storage.data_ptr()] = tensor.detach().as_strided((size,), (1,), 0)
                        self._names.setdefault(storage.data_ptr(), []).append(name)
        return found

    def _check_device(self, tensor: torch.Tensor, position: int) -> None:
        """Raise what Triton and CUDA raise for memory that the current device cannot use."""
        runtime = self.context.runtime
        if runtime.shares_host_memory or runtime.runs_on_host():
            return
        device = native_device(tensor)
        if device.type != self.context.device_type:
            if not tensor.is_pinned():
                raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")
        elif device != self.context.target:
            current = self.context.thread.device_index
            self.fault(
                f"is launched on cuda:{current}, the current device, and argument {position} is on "
                f"cuda:{device.index}. Launch it under torch.cuda.device(tensor.device)"
            )

    # ---- the grid ----------------------------------------------------------------------------------------------------

    def run(self, wholes: list[torch.Tensor]) -> None:
        """Run all instances on CPU tensors that cover the storages."""
        races = Races(self._report_race) if self.context.options.races else None
        memory = Memory(self, races)
        places = {
            address: memory.place(" or ".join(map(repr, dict.fromkeys(names))), whole)
            for (address, names), whole in zip(self._names.items(), wholes, strict=True)
        }
        builder = NumpyBuilder(memory, self.options)
        # NumPy warns of what a GPU computes silently: infinities, NaN, integers that wrap.
        with having(running, semantic=triton.TritonSemantic(builder)), np.errstate(all="ignore"):
            args, kwargs = self._converted(places)
            self._run_instances(builder, races, args, kwargs)

    def _run_instances(self, builder: NumpyBuilder, races: Races | None, args: list[Any], kwargs: Any) -> None:
        """Run the instances in groups."""
        function, memory = function_of(self.kernel), builder.memory
        x, y, z = self.grid
        total, done, told = x * y * z, 0, time.monotonic()
        # glibc keeps blocks of the size of one that was freed. It would map and clear an operation's arrays anew.
        np.empty(_ELEMENTS * 64, np.uint8)
        builder.set_grid_dim(x, y, z)
        self._whole = races is None
        while done < total:
            # The first group shows how large a block is, also to later launches.
            known = self.compiled.largest
            size = (min(max(_ELEMENTS // known, 1), _INSTANCES) if known else _FIRST) if self._whole else 1
            # x is the innermost, in the order in which CUDA begins the blocks.
            numbers = np.arange(done, min(done + size, total))
            group = np.stack([numbers % x, numbers // x % y, numbers // (x * y)], axis=1).astype(np.int32)
            if races is not None:
                races.instance = done
            self._run_group(builder, lambda: function(*args, **kwargs), group)
            done += len(group)
            self.compiled.largest = max(known, memory.largest)
            if time.monotonic() - told > _SECONDS:
                told = time.monotonic()
                logger.warning("Triton kernel %s: %d of %d instances", self.kernel.__name__, done, total)

    def _run_group(self, builder: NumpyBuilder, call: Callable[[], Any], group: Any, depth: int = 0) -> None:
        """Run instances together; where a condition parts them, undo what they did and run each part."""
        builder.group, memory = group, builder.memory
        memory.logs = [] if len(group) > 1 else None
        self.instance = tuple(group[0].tolist())
        try:
            call()
            builder.show_printed()
            return
        except DivergedError as error:
            builder.printed.clear()
            values = error.values
            memory.undo()
        parts = np.unique(values)
        if len(parts) > len(group) // 2 or depth == _DEPTH:
            # Nearly each goes its own way, and so will those to come.
            self._whole = False
            parts, values = np.arange(len(group)), np.arange(len(group))
        for part in parts:
            self._run_group(builder, call, group[values == part], depth + 1)

    def place(self) -> str:
        """Return the kernel, the line of it that runs, and the instance."""
        file = self.kernel.fn.__code__.co_filename
        line = f"{file}:{_line_in(file)}"
        return f"The Triton kernel {self.kernel.__name__!r}, {line}, instance {self.instance} of {self.grid}"

    def fault(self, what: str, instance: Any = (0, 0, 0)) -> None:
        """Raise CUDA's error for an illegal address, after which a simulated device runs nothing."""
        self.instance = tuple(map(int, instance))
        note = f"{self.place()} {what}."
        if self.context.policy is not None:
            policy.lose(note, ILLEGAL_ADDRESS)
        raise cuda_error(ILLEGAL_ADDRESS, note)

    def are_allocated(self, addresses: Any, size: int) -> Any:
        """Return for addresses that are no argument's whether a tensor has them: kernels may read pointers from memory.

        Args:
            addresses: The addresses, which may lie in several tensors.
            size: The bytes at each.
        """
        runtime = self.context.runtime
        if runtime.shares_host_memory:
            return addresses > _ZERO_PAGE  # the process's memory, of which nobody keeps a list
        blocks = runtime.blocks(self.context.thread.device_index) if self.context.policy is not None else []
        spans = sorted((each.address, each.address + each.requested) for each in blocks)
        first, end = np.array(spans or [(0, 0)], np.uint64).T
        which = np.searchsorted(first, addresses, "right") - 1
        return (first[which] <= addresses) & (addresses + np.uint64(size) <= end[which])

    def report_unwritten(self, what: str, instance: Any) -> None:
        """Raise the error for reading what nothing has written."""
        self.instance = tuple(map(int, instance))
        raise UninitializedReadError(f"{self.place()} {what}. Write the memory first, or make it by torch.zeros.")

    def _report_race(self, what: str, number: int) -> None:
        x, y, _ = self.grid
        other = "several" if number < 0 else str((number % x, number // x % y, number // (x * y)))
        text = f"{self.place()} {what}: {other}. Nothing orders instances but atomics. Let each write its own elements."
        if self.context.options.races == "error":
            raise KernelRaceError(text)
        warn_at(program_line(), RaceWarning(text), RaceWarning)

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def _converted(self, places: Mapping[int, int]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as the kernel sees them: constants as they are, pointers and scalars as tensors."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        parameters = self.kernel.signature.parameters.values()
        for parameter, (kind, *_), value in zip(parameters, self.specialization, self.bound.values(), strict=True):
            made = self._value(kind, value, places)
            if parameter.kind is parameter.VAR_POSITIONAL:
                args.extend(made)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = made
            else:
                args.append(made)
        return args, kwargs

    def _value(self, kind: Any, value: Any, places: Mapping[int, int]) -> Any:
        if isinstance(kind, tuple):
            made = [
                core.constexpr(inner) if each == "constexpr" else self._value(each, inner, places)
                for each, inner in zip(kind, value, strict=True)
            ]
            return type(value)(*made) if hasattr(value, "_fields") else core.tuple(made)
        if kind == "constexpr":
            return value.value if isinstance(value, core.constexpr) else value
        if isinstance(value, TensorDescriptor):
            sizes = [tensor_of(size, core.int32) for size in value.shape]
            strides = [*(tensor_of(stride, core.int64) for stride in value.strides[:-1]), 1]
            base = self._pointer(f"*{kind.partition('<')[2].partition('[')[0]}", value.base, places)
            return running.semantic.make_tensor_descriptor(base, sizes, strides, value.block_shape, value.padding)
        if kind[0] == "*":
            return self._pointer(kind, value, places)
        return tensor_of(value, type_of(kind, None))

    def _pointer(self, kind: str, value: Any, places: Mapping[int, int]) -> Any:
        (tensor,) = _pointers(value)
        with torch._C.DisableTorchFunction():
            first = places.get(tensor.untyped_storage().data_ptr(), 0)
            address = first + tensor.storage_offset() * tensor.itemsize
        return tensor_of(address, type_of(kind, None))


_ZERO_PAGE = 65535


def _pointers(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (TensorDescriptor, triton.TensorWrapper)):
        yield from _pointers(value.base)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _pointers(each)


def _line_in(file: str) -> int:
    """Return the line of a file that runs."""
    frames = traceback.walk_stack(sys._getframe())
    return next((line for frame, line in frames if frame.f_code.co_filename == file), 0)


def run(context: Context, original: Any, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """``JITFunction.run``."""
    if context.runtime.makes_triton_code:
        return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
    # Dynamo would trace the frames below a graph break, which are those of the interpreter.
    before = _set_eval_frame(None)
    try:
        context.report(f"the Triton kernel {kernel.__name__}", "Triton's interpreter, in NumPy", Fidelity.EXACT)
        launch = Launch(context, as_jit(kernel), args, kwargs)
        if warmup:
            return launch.compiled.kernel
        launch.start(grid)
        return launch.compiled
    finally:
        _set_eval_frame(before)


class Compiled:
    """A kernel for types and constants, which Triton compiles where the program looks at it. This needs no GPU.

    Args:
        source: The kernel, in which Triton's compiler finds what it refuses.
        backend: Triton's backend for the device that the scope shows.
        options: The backend's options.

    Attributes:
        largest: The largest number of elements that an instance is known to access at once; 0 before the first launch.
    """

    def __init__(self, source: Any, backend: Any, options: Any):
        self._source, self._backend, self._options = source, backend, options
        self.largest = 0
        self._mlir = triton.ir.context()
        triton.ir.load_dialects(self._mlir)
        backend.load_dialects(self._mlir)
        functions = backend.get_codegen_implementation(options)
        self._module = source.make_ir(backend.target, options, functions, backend.get_module_map(), self._mlir)

    @functools.cached_property
    def kernel(self) -> Any:
        """The compiled kernel."""
        return triton.compile_kernel(self._source, target=self._backend.target, options=self._options.__dict__)

    @functools.cached_property
    def shared(self) -> int:
        """The shared memory in bytes. Triton knows it before ``ptxas``, which may take minutes for large blocks."""
        stages: dict[str, Any] = {}
        figures = {**self._options.__dict__}
        self._backend.add_stages(stages, self._options, self._source.language)
        for name in ("ttir", "ttgir", "llir"):
            self._module = stages[name](self._module, figures)
        return figures["shared"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


run._torchdynamo_disable = True  # type: ignore[attr-defined]  # in compiled code, a launch ends the graph


def run_tuned(context: Context, original: Any, tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """``Autotuner.run``: the first configuration that the device can run. An interpreter's times say nothing."""
    if context.runtime.makes_triton_code:
        return original(tuner, *args, **kwargs)
    named = tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    context.report("triton.autotune", "the first configuration", Fidelity.INERT)
    configs = tuner.prune_configs(kwargs)
    tuner.nargs = None
    for config in configs:
        tuner.best_config = config
        if config.pre_hook is not None:
            config.pre_hook({**named, **kwargs, **config.all_kwargs()})
        with contextlib.suppress(triton.OutOfResources):
            return tuner.fn.run(*args, **kwargs, **config.all_kwargs())
    return tuner.fn.run(*args, **kwargs, **config.all_kwargs())


def launcher(source: Any, metadata: Any) -> Callable[..., None]:
    """Return what a kernel that ``warmup`` compiled is launched by: ``driver.launcher_cls``."""
    # The stream, the function, the packed metadata, that of the launch and two hooks come before the arguments.
    return lambda *grid_and_rest: source.fn.run(*grid_and_rest[9:], grid=grid_and_rest[:3], warmup=False)
