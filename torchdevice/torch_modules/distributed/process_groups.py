"""Process groups: gloo replaces NCCL, and ``get_backend()`` still returns ``"nccl"``."""

from __future__ import annotations

import datetime
import functools
import os
import types
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchdevice.calls.mode import of_this_thread
from torchdevice.kernel import thread_state, torch_internals
from torchdevice.kernel.bindings import REPLACED, replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import Replaced, per_context, subclass_in_place_of
from torchdevice.torch_modules.distributed import flight_recorder

# As a text, nothing waits for it in a build without it.
_C10D: Any = dist.distributed_c10d if dist.is_available() else "torch.distributed.distributed_c10d"

_replaces = functools.partial(replaces, _C10D, native_to="cuda", by_value=True)
# torch's builds for Macs have no NCCL, and a program that is written for MPS gets their error.
_replaces("is_nccl_available")(lambda context, original: context.program != "mps")

FAKE_RANKS = "ranks of a plan"
"""Setting of a context: the :class:`FakeRanks` of this process. The other ranks do not exist."""


class FakeRanks(NamedTuple):
    """A rank of several.

    Attributes:
        rank: Its number.
        size: The number of ranks.
        folder: Where the plans of all ranks leave the shapes that they send to each other; None
            where the others are not planned.
    """

    rank: int
    size: int
    folder: str | None = None


# `kProcessGroupNCCLDefaultTimeout` of ProcessGroupNCCL.hpp.
_NCCL_TIMEOUT = datetime.timedelta(minutes=10)


class _Asked(NamedTuple):
    """The program's arguments for a group.

    Attributes:
        names: The backends, as it spelled them.
        can_split: Whether it named the device of the rank, without which torch splits no group.
    """

    names: str
    can_split: bool


# Weak: destroyed groups end.
_asked_for: weakref.WeakKeyDictionary[Any, _Asked] = weakref.WeakKeyDictionary()
"""Process group -> the program's arguments, where another backend stands in."""


def _stand_in(context: Context, backend: Any) -> tuple[Any, str | None]:
    """Return the backend to use, and the text with which the program asked for another one."""
    from torchdevice.torch_modules.distributed import nccl_on_gloo

    names = str(backend).lower() if backend is not None else ""
    is_cpu = context.runtime.shares_host_memory
    if ("fake" in names and not is_cpu) or FAKE_RANKS in context.settings:
        # torch lists the device types of its fake groups by name.
        return f"cpu:fake,{context.device_type}:fake", names or None
    if context.program == "mps" and "nccl" in names:
        return backend, None  # which torch refuses
    if "nccl" in names:
        context.report(f"process group {names!r}", "gloo", Fidelity.APPROXIMATE)
        return nccl_on_gloo.register("nccl and gloo" if "gloo" in names else "nccl"), names
    if "gloo" in names and not is_cpu:
        return nccl_on_gloo.register("gloo"), names
    return backend, None


@_replaces("init_process_group")
def _init_process_group(
    context: Context,
    original: Any,
    backend: Any = None,
    *args: Any,
    device_id: Any = None,
    **kwargs: Any,
) -> None:
    # Without a name torch makes both, for a machine that has CUDA.
    unnamed = "gloo" if context.program == "mps" else "cpu:gloo,cuda:nccl"
    used, asked = _stand_in(context, unnamed if backend is None else backend)
    options = _without_nccl_options(asked, kwargs)
    if FAKE_RANKS in context.settings:
        ranks = context.settings[FAKE_RANKS]
        args, kwargs = (), {"rank": ranks.rank, "world_size": ranks.size}
    # As torch does for a backend of the name "fake" alone. As an argument by position the store is
    # the fifth.
    if "fake" in str(used) and len(args) < 5 and kwargs.get("store") is None:
        torch_internals.check("later", "torch.testing._internal.distributed.fake_pg")
        from torch.testing._internal.distributed.fake_pg import FakeStore

        kwargs["store"] = FakeStore()
    # Not `device_id`, which makes NCCL connect at once.
    original(used, *args, **kwargs)
    _remember(
        dist.distributed_c10d._get_default_group(), asked, options, can_split=device_id is not None
    )


@_replaces("new_group")
def _new_group(
    context: Context,
    original: Any,
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    *args: Any,
    device_id: Any = None,
    **kwargs: Any,
) -> Any:
    used, asked = _stand_in(context, backend)
    if backend is None and dist.is_initialized():
        # A new group without a backend takes the default group's, and answers the same name.
        asked = _asked_of(None)
    options = _without_nccl_options(asked, kwargs)
    group = original(ranks, timeout, used, *args, **kwargs)
    _remember(group, asked, options)
    if not kwargs.get("use_local_synchronization"):
        _count_division(None)
    return group


def _count_division(parent: Any) -> None:
    """Count a group split from another's communicator, as torch does if it knows the device."""
    default = dist.distributed_c10d._get_default_group()
    asked, counts = _asked_for.get(default), getattr(parent or default, "counts", None)
    if asked is not None and asked.can_split and counts is not None:
        counts["split"] += 1


def _without_nccl_options(asked: str | None, kwargs: dict[str, Any]) -> Any:
    """Take the options of NCCL, whose class gloo refuses, out of the arguments, and return them."""
    return kwargs.pop("pg_options", None) if asked is not None and "nccl" in asked else None


def _remember(
    group: Any, asked: str | None, options: Any = None, *, can_split: bool = False
) -> None:
    # Not where this rank is no member.
    if asked is not None and isinstance(group, dist.ProcessGroup):
        _asked_for[group] = _Asked(asked, can_split)
        if "nccl" in asked and hasattr(group, "gloo"):
            group.gloo.nccl_options = options or ProcessGroupNCCL.Options()


def _asked_of(group: Any) -> str | None:
    found = _asked_for.get(group or dist.distributed_c10d._get_default_group())
    return None if found is None else found.names


@_replaces("get_backend")
def _get_backend(context: Context, original: Any, group: Any = None) -> Any:
    found, asked = original(group), _asked_of(group)
    if asked is None:
        return found
    return dist.Backend("nccl" if "nccl" in asked else asked)


@_replaces("get_backend_config")
def _get_backend_config(context: Context, original: Any, group: Any = None) -> str:
    found, asked = original(group), _asked_of(group)
    return found if asked is None else str(dist.distributed_c10d.BackendConfig(dist.Backend(asked)))


@_replaces("_get_process_group_uid", optional=True)
def _uid(context: Context, original: Any, pg: Any) -> int:
    """``_get_process_group_uid``: groups of NCCL are numbered as they are made."""
    if _asked_of(pg) is None:
        return original(pg)
    return list(dist.distributed_c10d._world.pg_map).index(pg)


@_replaces("_get_default_timeout")
def _get_default_timeout(context: Context, original: Any, backend: Any) -> datetime.timedelta:
    """Builds without NCCL lack its time-out."""
    return _NCCL_TIMEOUT if backend in ("nccl", "nccl_on_gloo") else original(backend)


@replaces("torch._C._distributed_c10d:ProcessGroup", "_get_backend", native_to="cuda")
def _get_backend_of(context: Context, original: Any, self: Any, device: torch.device) -> Any:
    """``ProcessGroup._get_backend``: a fake group in C++ has one for the target's device."""
    return original(self, context.redirect(device) or device)


@replaces("torch._C._distributed_c10d:ProcessGroup", "barrier", native_to="cuda")
def _barrier(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``ProcessGroup.barrier``: redirect the device of its options, where torch makes a tensor."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, dist.distributed_c10d.BarrierOptions) and each.device is not None:
            each.device = context.redirect(each.device) or each.device
    return original(self, *args, **kwargs)


@_replaces("split_group")
def _split_group(
    context: Context,
    original: Any,
    parent_pg: Any = None,
    split_ranks: Any = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
    **kwargs: Any,
) -> Any:
    """Make this rank's part of a split group by new gloo connections; NCCL divides its own."""
    parent: Any = parent_pg or dist.distributed_c10d._get_default_group()
    asked = _asked_for.get(dist.distributed_c10d._get_default_group())
    if asked is None or not asked.can_split or not split_ranks:
        return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **kwargs)
    group_desc = group_desc or f"{parent.group_desc}:split:{parent.gloo.comm_split_count()}"
    _count_division(parent)
    for ranks in split_ranks:
        if parent.rank() in ranks:
            members = [dist.get_global_rank(parent, rank) for rank in sorted(ranks)]
            options = pg_options or parent.gloo.options
            return dist.new_group(
                members,
                timeout,
                pg_options=options,
                use_local_synchronization=True,
                group_desc=group_desc,
            )
    return None


@_replaces("batch_isend_irecv")
def _batch(context: Context, original: Any, p2p_op_list: Any) -> list[Any]:
    """``batch_isend_irecv``: NCCL starts a batch together, and has one work for all of it."""
    group: Any = getattr(next(iter(p2p_op_list), None), "group", None) or dist.group.WORLD
    if "nccl" not in (_asked_of(group) or "") or not hasattr(group, "batch"):
        return original(p2p_op_list)  # type: ignore[no-any-return]
    group._start_coalescing(None)
    try:
        original(p2p_op_list)
    finally:
        work = group._end_coalescing(None)
    return [work]


@_replaces("get_default_backend_for_device")
def _default_backend(context: Context, original: Any, device: Any) -> str:
    """``get_default_backend_for_device``: the accelerator's backend for the target."""
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    is_target = context.devices.is_targets_type(kind) and not context.runtime.shares_host_memory
    return original(
        context.devices.of_program(0) if is_target or kind == context.program else device
    )


@_replaces("_maybe_attach_flight_recorder", optional=True)  # torch 2.15 and later
def _attach_flight_recorder(
    context: Context, original: Any, group: Any, *args: Any, **kwargs: Any
) -> None:
    """Omit groups written in Python: torch 2.15's recorder looks for C++ backends in groups."""
    from torchdevice.torch_modules.distributed.nccl_on_gloo import NcclOnGloo

    if not isinstance(group, NcclOnGloo):
        original(group, *args, **kwargs)


class ProcessGroupNCCL:
    """NCCL's class. It makes groups of the class that stands in for it."""

    class Options:
        """Settings for NCCL, which gloo does not read."""

        def __init__(self, is_high_priority_stream: bool = False):
            self.is_high_priority_stream = is_high_priority_stream
            self.config = types.SimpleNamespace()

    def __new__(
        cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None
    ) -> Any:
        """Return a group.

        Args:
            store: The store of its ranks' rendezvous.
            rank: The rank of this process.
            size: The number of ranks.
            options: Settings of NCCL, or a time-out in their place.
            timeout: How long a rank waits for the others, by default 10 minutes.
        """
        from torchdevice.torch_modules.distributed import nccl_on_gloo

        given = options if isinstance(options, datetime.timedelta) else timeout
        return nccl_on_gloo.create("nccl", store, rank, size, given or _NCCL_TIMEOUT)


def _new_nccl(cls: type, *args: Any, **kwargs: Any) -> Any:
    context = thread_state.state.context
    stands_in = context is not None and "cuda" in context.names.stood_for
    return (ProcessGroupNCCL if stands_in else _OF_BUILD)(*args, **kwargs)


_OF_BUILD: Any = getattr(_C10D, "ProcessGroupNCCL", None)
_IN_SCOPE = ProcessGroupNCCL if _OF_BUILD is None else subclass_in_place_of(_OF_BUILD, _new_nccl)


def _hash_tensors(tensors: Sequence[torch.Tensor]) -> int:
    """Return a hash of tensors' bytes, which torch logs for sent objects in detailed debugging."""
    return functools.reduce(
        lambda found, each: zlib.crc32(each.cpu().numpy().tobytes(), found), tensors, 0
    )


# For the functions of torch, and programs, that name these where NCCL is available.
_IN_C = getattr(torch._C, "_distributed_c10d", None)
for _module, _name, _made in (
    (_C10D, "ProcessGroupNCCL", _IN_SCOPE),
    (dist, "ProcessGroupNCCL", _IN_SCOPE),
    (_IN_C, "_hash_tensors", _hash_tensors),
    (getattr(dist, "constants", None), "default_pg_nccl_timeout", _NCCL_TIMEOUT),
    (_IN_C, "_dump_nccl_trace", flight_recorder.dump_pickle),
    (_IN_C, "_dump_nccl_trace_json", flight_recorder.dump_json),
):
    if dist.is_available() and (_module is not _IN_C or not hasattr(_module, _name)):
        REPLACED.append(Replaced(_module, _name, lambda _, made=_made: made, may_be_absent=True))
    elif dist.is_available():  # a build with NCCL, whose functions ask for a driver
        replaces(_module, _name, native_to="cuda")(
            lambda _, original, *args, made=_made, **kwargs: made(*args, **kwargs)
        )


@replaces(
    "torch.distributed.checkpoint.filesystem:_OverlappingCpuLoader", "__init__", native_to="cuda"
)
def _init_loader(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """``_OverlappingCpuLoader``, which moves only tensors of type ``"cuda"`` to the CPU to save."""
    original(self, *args, **kwargs)
    # On a CPU target nothing has to be taken to the CPU.
    if not context.runtime.shares_host_memory:
        self.device_type = context.shown_as or context.device_type


@replaces("torch.distributed.fsdp._flat_param:FlatParamHandle", "flat_param_to", native_to="cuda")
def _move_flat_parameter(
    context: Context, original: Any, self: Any, *args: Any, **kwargs: Any
) -> None:
    """``FlatParamHandle.flat_param_to``: FSDP frees memory of parameters it moves to the CPU."""
    if context.runtime.shares_host_memory:
        # The "moved" parameter keeps its memory, so FSDP would free the parameter itself.
        self.flat_param.data = self.flat_param.detach().clone()
    original(self, *args, **kwargs)


def _device_handle(context: Context, original: Any, cls: type, device: Any) -> Any:
    """``_FSDPDeviceHandle.from_device``: the program's module; ``torch.cpu`` streams do little."""
    if context.devices.is_targets(device):
        return getattr(torch, context.program)
    return original(cls, device)


@replaces("torch.distributed.fsdp._common_utils:_FSDPDeviceHandle", "from_device", makes=True)
def _make_from_device(original: Any) -> Any:
    return classmethod(per_context(original.__func__, _device_handle, native_to="cuda"))


@replaces("torch.distributed.device_mesh", "_get_device_handle", native_to="cuda", by_value=True)
@replaces(torch._utils, "_get_device_module", native_to="cuda", by_value=True)
def _module_of_type(context: Context, original: Any, device_type: str = "cuda") -> Any:
    """``_get_device_handle`` and its twin: the program's module, as ``torch.mps`` lacks streams."""
    if context.runtime.support.lacks_in_module and context.devices.is_targets_type(device_type):
        return getattr(torch, context.program)
    return original(device_type)


@replaces(
    "torch.distributed.device_mesh:DeviceMesh", "_setup_world_group_and_device", native_to="cuda"
)
def _set_up_mesh(context: Context, original: Any, self: Any) -> Any:
    """``DeviceMesh``, which chooses this rank's device if the program has not used CUDA yet.

    torch asks ``torch.cuda.is_initialized()``, which is true in scopes.
    """
    # Read before torch's own set-up, which uses the accelerator.
    chosen, count = context.driver.is_initialized, context.devices.count
    group = original(self)
    # As torch does: the launcher's variable first, else by the rank.
    index = int(os.environ.get("LOCAL_RANK", dist.get_rank() % max(1, count)))
    kind = self._device_type
    of_accelerator = kind == context.program or context.devices.is_targets_type(kind)
    if of_accelerator and not chosen and index < count:
        context.thread.select(index)
    return group


@replaces("torch.distributed.device_mesh:DeviceMesh", "device_type", makes=True)
def _device_type(original: Any) -> property:
    """Replace ``DeviceMesh.device_type``: torch's code, where no mode works, gets the target's."""

    def device_type(mesh: Any) -> str:
        found: str = original.fget(mesh)
        context = thread_state.answering()
        if context is None or found not in context.names.families:
            return found
        of_program = (
            of_this_thread() is not None and not torch_internals.is_torch_function_all_disabled()
        )
        return found if of_program else context.device_type

    return property(device_type, doc=original.__doc__)
