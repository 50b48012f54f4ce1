"""A launch: arguments specialised as by Triton, a torch operator, and the grid's instances.

The operator is that of ``calls/host_functions.py``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torchdevice.calls import host_functions
from torchdevice.calls.rewriters import native_device
from torchdevice.errors import KernelRaceError, RaceWarning, UninitializedReadError
from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.journal.callers import program_line, warn_at
from torchdevice.kernel.patching import Replaced
from torchdevice.kernel.python.logs import logger
from torchdevice.kernel.python.per_thread import having
from torchdevice.simulation import policy
from torchdevice.simulation.refusals.cuda_errors import ILLEGAL_ADDRESS, cuda_error
from torchdevice.torch_modules.cuda.device_queries import properties_of
from torchdevice.triton_kernels import triton_internals as triton
from torchdevice.triton_kernels.kernel_functions import as_jit, function_of, running, tensor_of
from torchdevice.triton_kernels.memory_checks import Memory, Races
from torchdevice.triton_kernels.numpy_builder import DivergedError, NumpyBuilder
from torchdevice.triton_kernels.triton_internals import TensorDescriptor, core, type_of

_set_eval_frame = importlib.import_module("torch._C._dynamo.eval_frame").set_eval_frame
_LIMITS = (2**31 - 1, 65535, 65535)
"""The largest grid of CUDA."""

_ELEMENTS = 2**18
_FIRST = 64
_INSTANCES = 1024
"""How many elements the blocks of a group may have, and how many instances the first group and the
others.
"""

_DEPTH = 6
"""How often a group may part before its instances run one by one."""

_SECONDS = 10.0
"""The seconds between two lines of progress of a long launch."""


class Launch:
    """One launch of a kernel.

    Args:
        context: The scope.
        compiled: The kernel for the types and constants of the arguments.
        args: The arguments, constants among them.
    """

    def __init__(self, context: Context, compiled: Compiled, args: tuple[Any, ...]):
        self.context = context
        self.compiled = compiled
        self.kernel = compiled.src.fn
        self.args = args
        self.grid: tuple[int, ...] = (1, 1, 1)
        self.instance: tuple[int, ...] = (0, 0, 0)

    def check_shared(self, size: int) -> None:
        """Raise Triton's error if a product may need more shared memory than the device has.

        Args:
            size: The bytes of its blocks.
        """
        properties = properties_of(self.context, self.context.thread.device_index)
        limit = properties.shared_memory_per_block_optin
        if self.context.policy and size > limit and self.compiled.shared > limit:
            raise triton.OutOfResources(self.compiled.shared, limit, "shared memory")

    def start(self, grid: Any) -> None:
        """Run the grid, after CUDA's checks of a launch."""
        self.grid = tuple(int(each) for each in grid)
        if any(size > limit or size < 0 for size, limit in zip(self.grid, _LIMITS, strict=True)):
            raise RuntimeError(
                f"Triton Error [CUDA]: invalid argument: the grid {self.grid} exceeds CUDA's "
                f"{_LIMITS}."
            )
        if all(self.grid):
            host_functions.call(self.context, self.run, list(self._storages().values()))

    def _storages(self) -> dict[int, torch.Tensor]:
        """Return a tensor per storage, by its address, and note the arguments that are in it."""
        found: dict[int, torch.Tensor] = {}
        self._names: dict[int, list[str]] = {}
        for position, (name, value) in enumerate(
            zip(self.compiled.src.signature, self.args, strict=True)
        ):
            for tensor in _pointers(value):
                self._check_device(tensor, position)
                with torch._C.DisableTorchFunction():
                    storage = tensor.untyped_storage()
                    if size := storage.nbytes() // tensor.itemsize:
                        found[storage.data_ptr()] = tensor.detach().as_strided((size,), (1,), 0)
                        self._names.setdefault(storage.data_ptr(), []).append(name)
        return found

    def _check_device(self, tensor: torch.Tensor, position: int) -> None:
        """Raise Triton's or CUDA's error for memory that the current device cannot use."""
        runtime = self.context.runtime
        if runtime.shares_host_memory or runtime.supplied.runs_on_host():
            return
        device = native_device(tensor)
        if device.type != self.context.device_type:
            if not tensor.is_pinned():
                raise ValueError(
                    f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)"
                )
        elif device != self.context.devices.current:
            current = self.context.thread.device_index
            where = (
                f"cuda:{current}, the current device, and argument {position} is on "
                f"cuda:{device.index}"
            )
            self.fault(f"is launched on {where}. Launch it under torch.cuda.device(tensor.device)")

    # ---- the grid --------------------------------------------------------------------------------

    def run(self, wholes: list[torch.Tensor]) -> None:
        """Run all instances on CPU tensors that cover the storages."""
        races = Races(self._report_race) if self.context.options.races else None
        memory = Memory(self, races)
        places = {
            address: memory.place(" or ".join(map(repr, dict.fromkeys(names))), whole)
            for (address, names), whole in zip(self._names.items(), wholes, strict=True)
        }
        builder = NumpyBuilder(memory, self.compiled.options)
        # NumPy warns of results that a GPU computes silently: infinities, NaN, integers that wrap.
        with having(running, semantic=triton.TritonSemantic(builder)), np.errstate(all="ignore"):
            bound = self._converted(places)
            call = functools.partial(function_of(self.kernel), *bound.args, **bound.kwargs)
            self._run_instances(builder, races, call)

    def _run_instances(
        self, builder: NumpyBuilder, races: Races | None, call: Callable[[], Any]
    ) -> None:
        """Run the instances in groups."""
        x, y, z = self.grid
        total, done = x * y * z, 0
        told = time.monotonic()
        # glibc keeps blocks of the size of one that was freed. It would map and clear an
        # operation's arrays anew.
        np.empty(_ELEMENTS * 64, np.uint8)
        builder.set_grid_dim(x, y, z)
        self._whole = races is None
        while done < total:
            # The first group shows how large a block is, also to later launches.
            known = self.compiled.largest
            size = 1
            if self._whole:
                size = min(max(_ELEMENTS // known, 1), _INSTANCES) if known else _FIRST
            # x is the innermost, in the order in which CUDA begins the blocks.
            numbers = np.arange(done, min(done + size, total))
            group = np.stack([numbers % x, numbers // x % y, numbers // (x * y)], axis=1).astype(
                np.int32
            )
            if races is not None:
                races.instance = done
            self._run_group(builder, call, group)
            done += len(group)
            self.compiled.largest = max(known, builder.memory.largest)
            if time.monotonic() - told > _SECONDS:
                told = time.monotonic()
                logger.warning(
                    "Triton kernel %s: %d of %d instances", self.kernel.__name__, done, total
                )

    def _run_group(
        self, builder: NumpyBuilder, call: Callable[[], Any], group: Any, depth: int = 0
    ) -> None:
        """Run instances together; if a condition parts them, undo and run each part."""
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
        frames = traceback.walk_stack(sys._getframe())
        line = next((number for frame, number in frames if frame.f_code.co_filename == file), 0)
        return (
            f"The Triton kernel {self.kernel.__name__!r}, {file}:{line}, instance {self.instance} "
            f"of {self.grid}"
        )

    def fault(self, what: str, instance: Any = (0, 0, 0)) -> None:
        """Raise CUDA's error for an illegal address, after which the device runs nothing."""
        self.instance = tuple(map(int, instance))
        note = f"{self.place()} {what}."
        if self.context.policy is not None:
            policy.lose(note, ILLEGAL_ADDRESS)
        raise cuda_error(ILLEGAL_ADDRESS, note)

    def are_allocated(self, addresses: Any, size: int) -> Any:
        """Return a mask of addresses outside the arguments that tensors have: kernels may read
        pointers.

        Args:
            addresses: The addresses, which may lie in several tensors.
            size: The bytes at each.
        """
        runtime = self.context.runtime
        if runtime.shares_host_memory:
            # The process's memory, of which nobody keeps a list, above the zero page.
            return addresses > 65535
        if self.context.policy is not None:
            blocks = runtime.supplied.blocks(self.context.thread.device_index)
        else:
            blocks = []
        spans = sorted((each.address, each.address + each.requested) for each in blocks)
        first, end = np.array(spans or [(0, 0)], np.uint64).T
        which = np.searchsorted(first, addresses, "right") - 1
        return (first[which] <= addresses) & (addresses + np.uint64(size) <= end[which])

    def report_unwritten(self, what: str, instance: Any) -> None:
        """Raise the error of reading unwritten memory."""
        self.instance = tuple(map(int, instance))
        raise UninitializedReadError(
            f"{self.place()} {what}. Write the memory first, or make it by torch.zeros."
        )

    def _report_race(self, what: str, number: int) -> None:
        x, y, _ = self.grid
        other = "several" if number < 0 else str((number % x, number // x % y, number // (x * y)))
        text = (
            f"{self.place()} {what}: {other}. Nothing orders instances but atomics. Let each write "
            "its own elements."
        )
        if self.context.options.races == "error":
            raise KernelRaceError(text)
        warn_at(program_line(), RaceWarning(text), RaceWarning)

    # ---- arguments -------------------------------------------------------------------------------

    def _converted(self, places: Mapping[int, int]) -> inspect.BoundArguments:
        """Return arguments for the kernel: constants unchanged, others as tensors."""
        given = zip(self.compiled.src.signature.items(), self.args, strict=True)
        made = {name: self._value(kind, value, places) for (name, kind), value in given}
        return inspect.BoundArguments(self.kernel.signature, made)  # type: ignore[arg-type]

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
            return running.semantic.make_tensor_descriptor(
                base, sizes, strides, value.block_shape, value.padding
            )
        if kind[0] == "*":
            return self._pointer(kind, value, places)
        return tensor_of(value, type_of(kind, None))

    def _pointer(self, kind: str, value: Any, places: Mapping[int, int]) -> Any:
        (tensor,) = _pointers(value)
        with torch._C.DisableTorchFunction():
            first = places.get(tensor.untyped_storage().data_ptr(), 0)
            address = first + tensor.storage_offset() * tensor.itemsize
        return tensor_of(address, type_of(kind, None))


def _pointers(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (TensorDescriptor, triton.TensorWrapper)):
        yield from _pointers(value.base)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _pointers(each)


OF_SCOPES: dict[str, Callable[[Context, Any], Any]] = {
    "device_caches": lambda context, kernel: collections.defaultdict(kernel.create_binder),
    "compile": lambda context, kernel: functools.partial(Compiled, context),
}
"""The attributes of kernels that each scope has its own of: what a kernel keeps for each device,
and its compiler.
"""


def of_each_scope(name: str) -> Replaced:
    """Return a patch that makes a kernels' attribute per scope; outside, the kernel has its own."""

    def get(kernel: Any) -> Any:
        context = thread_state.state.context
        if context is None or context.runtime.support.makes_kernels:
            return vars(kernel)[name]
        own = context.settings.setdefault(OF_SCOPES[name], {})
        if kernel in own:
            return own[kernel]
        return own.setdefault(kernel, OF_SCOPES[name](context, kernel))

    attribute = property(get, lambda kernel, value: vars(kernel).update({name: value}))
    return Replaced(triton.JITFunction, name, lambda original: attribute, may_be_absent=True)


class OnNoDevice(triton.CompiledKernel):  # type: ignore[misc]
    """A kernel that ends without a driver where a stand-in has loaded it, by the handle 0.

    Triton 3.8 and later unload a kernel when Python collects it: after the scope, in the middle of
    a parse, or at the end of the process. There is no driver then.
    """

    def __del__(self) -> None:
        # Not by attribute, which compiles a kernel that nobody has looked at.
        module = vars(self).get("module")
        if module:
            super().__del__()  # another thread's, on a real device
        elif module is not None:
            hook = getattr(triton.knobs.runtime, "kernel_unload_hook", None)
            if hook is not None:
                hook(module, self.function, self.name, self.metadata_group, self.hash)


class Compiled(OnNoDevice):
    """A kernel for types and constants, compiled, without a GPU, if the program looks at it.

    Args:
        context: The scope.
        src: The kernel, in which Triton's compiler finds what it refuses.
        target: The scope's device as Triton's target.
        options: The options of Triton's backend.

    Attributes:
        largest: The largest number of elements that an instance is known to access at once; 0
            before the first launch.
    """

    def __init__(
        self, context: Context, src: Any, target: Any, options: dict[str, Any], **others: Any
    ):
        self.context = context
        self.src = src
        self.largest = 0
        self.function = self.packed_metadata = None
        self._backend = triton.make_backend(target)
        self.options = self._backend.parse_options(options)
        self._mlir = triton.ir.context()
        triton.ir.load_dialects(self._mlir)
        self._backend.load_dialects(self._mlir)
        functions = self._backend.get_codegen_implementation(self.options)
        self._module = src.make_ir(
            target, self.options, functions, self._backend.get_module_map(), self._mlir
        )

    @functools.cached_property
    def shared(self) -> int:
        """The shared memory in bytes, known before ``ptxas``, which takes minutes for some."""
        stages: dict[str, Any] = {}
        figures = {**self.options.__dict__}
        self._backend.add_stages(stages, self.options, self.src.language)
        for name in ("ttir", "ttgir", "llir"):
            self._module = stages[name](self._module, figures)
        return figures["shared"]

    def compile(self) -> Compiled:
        """Compile the kernel, and return this object."""
        if "metadata" not in vars(self):
            kernel = triton.compile_kernel(
                self.src, target=self._backend.target, options=self.options.__dict__
            )
            vars(self).update(vars(kernel))  # type: ignore[attr-defined]
        return self

    def __getattr__(self, name: str) -> Any:
        # No stage of the compiler sets what copies, pickles and inspects asks for, nor the `result`
        # of a compilation in another thread, for which Triton 3.6 asks each kernel at its launch.
        if name.startswith("__") or name == "result":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # As every kernel that was launched on a GPU, it is loaded, which tells the registers.
        if self.compile().module is None:
            triton.init_handles(self)
        return object.__getattribute__(self, name)

    def run(
        self,
        x: Any,
        y: Any,
        z: Any,
        stream: Any,
        function: Any,
        packed: Any,
        metadata: Any,
        *rest: Any,
    ) -> None:
        """Run the instances: what Triton launches by."""
        enter, leave, *args = rest
        enter(metadata)
        Launch(self.context, self, tuple(args)).start((x, y, z))
        leave(metadata)

    def launch_metadata(self, grid: Any, stream: Any, *args: Any) -> Any:
        """Return the metadata for hooks of a launch, for which the kernel is compiled."""
        hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
        if any(each.calls for each in hooks):
            return super().launch_metadata(grid, stream, *args)
        return None


def run(
    context: Context, original: Any, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> Any:
    """``JITFunction.run``."""
    if context.runtime.support.makes_kernels:
        return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
    if isinstance(kernel, triton.InterpretedFunction):
        return as_jit(kernel).run(*args, grid=grid, warmup=warmup, **kwargs)
    # Dynamo would trace the frames below a graph break, which are those of the interpreter.
    before = _set_eval_frame(None)
    try:
        context.report(
            f"the Triton kernel {kernel.__name__}", "Triton's interpreter, in NumPy", Fidelity.EXACT
        )
        made = original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        return made.compile() if warmup and isinstance(made, Compiled) else made
    finally:
        _set_eval_frame(before)


run._torchdynamo_disable = True  # type: ignore[attr-defined]  # in compiled code, a launch ends the graph


def run_tuned(context: Context, original: Any, tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """``Autotuner.run``: the first configuration that the device can run, without timing."""
    if context.runtime.support.makes_kernels:
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
