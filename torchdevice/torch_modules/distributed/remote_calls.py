"""``torch.distributed.rpc``: other workers' requests run in the scope, and tensors of the target
travel as those of the CPU.

Threads of C++ run the requests, which no thread of Python has started. They know two kinds of
tensors, the CPU's and CUDA's, so the device maps between workers are applied here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchdevice.kernel.bindings import REPLACED, replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import ReplacedItem, per_context
from torchdevice.kernel.python.per_thread import PerThread, having
from torchdevice.kernel.thread_state import state

_rpc: Any = None
_api: Any = None
_options: Any = None
_registry: Any = None
if dist.rpc.is_available():
    _rpc = dist.rpc
    _api = _rpc.api
    _options, _registry = _rpc.options, _rpc.backend_registry

_WORKER = "worker of torch.distributed.rpc"
"""Setting of a context: the :class:`_Worker` of this process."""

_CALLED_BY_AGENT = ("_run_function", "serialize", "deserialize")
"""The functions of ``rpc.internal`` that torch reads once, for the first request."""

_request = PerThread(destination=None)
"""The worker that this thread is asking; None while it does not ask."""

_ONLY_CPU = (
    "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU "
    "before sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to "
    "explicitly configure device mapping. {kind} device mapping is not available for destination "
    "{destination}"
)
"""The words of ``getDevicesForTensors`` in ``tensorpipe_agent.cpp``."""


class _Worker(NamedTuple):
    """This process, as a worker.

    Attributes:
        name: Its name.
        agent: The object with the worker's device maps for torch. Kept, because torch keeps only
            the part of it that is C++.
        sending: Another worker -> ordinal of a device here -> ordinal there, for requests to it.
        answered: Another worker -> ordinal there -> ordinal here, for its answers to them.
        asked: Another worker -> ordinal there -> ordinal here, for requests from it.
    """

    name: str
    agent: Any
    sending: Mapping[str, Mapping[int, int]]
    answered: Mapping[str, Mapping[int, int]]
    asked: Mapping[str, Mapping[int, int]]


# ---- a worker's life -----------------------------------------------------------------------------


@replaces(_rpc, "init_rpc")
def _begin(context: Context, original: Any, *args: Any, **kwargs: Any) -> None:
    """Begin a worker whose threads enter the scope for each request."""
    internal = _rpc.internal
    of_scope: dict[str, Any] = {
        name: _in_scope(context, getattr(internal, name)) for name in _CALLED_BY_AGENT
    }
    agent = functools.partial(_agent, context, _rpc.TensorPipeAgent)
    with having(internal, **of_scope), having(_rpc, TensorPipeAgent=agent):
        original(*args, **kwargs)
        # Torch reads the functions for the first request, which a single worker has not had yet.
        _api.rpc_sync(_api.get_worker_info().name, _nothing)


def _nothing() -> None:
    """The first request, which does nothing."""


def _in_scope(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    forced_cpu = context.thread.forced_cpu

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not context.entries.active:  # the worker has outlived the scope
            return function(*args, **kwargs)
        with context.entries.join(forced_cpu):
            return function(*args, **kwargs)

    return run


def _agent(
    context: Context,
    kind: Any,
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    options: Any,
    reverse_device_maps: Mapping[str, Any],
    devices: Any,
) -> Any:
    """Make the agent without device maps, which it would apply to CUDA's devices."""

    class Agent(kind):  # type: ignore[misc]
        def _get_device_map(self, worker: Any) -> Any:
            return options.device_maps.get(worker.name, {})

    plain = options
    if options.device_maps or options.devices:
        plain = _rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=options.num_worker_threads,
            rpc_timeout=options.rpc_timeout,
            init_method=options.init_method,
        )
    agent = Agent(store, name, rank, world_size, plain, {}, [])
    sending = _by_ordinals(options.device_maps)
    asked = _inverted(_by_ordinals(reverse_device_maps))
    context.settings[_WORKER] = _Worker(name, agent, sending, _inverted(sending), asked)
    return agent


def _by_ordinals(device_maps: Mapping[str, Mapping[Any, Any]]) -> dict[str, dict[int, int]]:
    return {
        worker: {here.index or 0: there.index or 0 for here, there in devices.items()}
        for worker, devices in device_maps.items()
    }


def _inverted(maps: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, int]]:
    return {
        worker: {there: here for here, there in ordinals.items()}
        for worker, ordinals in maps.items()
    }


@replaces(_api, "shutdown", by_value=True)
def _end(context: Context, original: Any, *args: Any, **kwargs: Any) -> None:
    """End the worker."""
    original(*args, **kwargs)
    context.settings.pop(_WORKER, None)


# ---- requests and answers ------------------------------------------------------------------------


def _ask(context: Context, original: Any, to: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Ask another worker. A function of torch runs there as one of Python, which sees the scope."""
    if torch.jit._builtins._find_builtin(func) is not None:
        func = functools.partial(func)
    with having(_request, destination=_api._to_worker_info(to).name):
        return original(to, func, *args, **kwargs)


replaces(_api, "_invoke_rpc")(_ask)
replaces(_api, "remote", by_value=True)(_ask)


def _send(context: Context, original: Any, tensor: torch.Tensor) -> Any:
    """Let a tensor of the target travel as one of the CPU, with the ordinal of its device."""
    worker: _Worker | None = context.settings.get(_WORKER)
    if worker is None or context.runtime.shares_host_memory or tensor.get_device() < 0:
        return original(tensor)
    ordinal, destination = tensor.get_device(), _request.destination
    if destination is not None:
        _mapped(worker.sending, destination, ordinal, destination, "Request")
    _, (place,) = original(tensor.cpu())
    return _receive, (place, ordinal, worker.name, destination is not None)


def _receive(place: int, ordinal: int, sender: str, is_request: bool) -> torch.Tensor:
    """Return a tensor that has come as one of the CPU."""
    tensor: torch.Tensor = _rpc.internal._InternalRPCPickler._tensor_receiver(place)
    context: Context | None = state.context
    worker: _Worker | None = None if context is None else context.settings.get(_WORKER)
    if worker is None:
        return tensor
    if is_request:
        found = worker.asked[sender][ordinal]
    else:
        found = _mapped(worker.answered, sender, ordinal, worker.name, "Response")
    return tensor.to(f"cuda:{found}")


def _mapped(
    maps: Mapping[str, Mapping[int, int]], other: str, ordinal: int, destination: str, kind: str
) -> int:
    """Return the ordinal of the device to which a tensor goes.

    Raises:
        RuntimeError: No device map has the tensor's device.
    """
    said = _ONLY_CPU.format(kind=kind, destination=destination)
    if other not in maps:
        raise RuntimeError(f"{said}, but found tensor on device: cuda:{ordinal}")
    if ordinal not in maps[other]:
        raise RuntimeError(
            f"{said} for device cuda:{ordinal} but received a tensor on that device."
        )
    return maps[other][ordinal]


if _rpc is not None:
    REPLACED.append(
        ReplacedItem(
            _rpc.internal._internal_rpc_pickler._dispatch_table,
            torch.Tensor,
            lambda original: per_context(original, _send),
        )
    )


# ---- options of a worker -------------------------------------------------------------------------


@replaces(_options, "_to_device_map")
def _to_device_map(context: Context, original: Any, device_map: Any) -> Any:
    """Return a device map; none where all devices are the CPU."""
    return {} if context.runtime.shares_host_memory else original(device_map)


@replaces(_options, "_to_device_list")
def _to_device_list(context: Context, original: Any, devices: Any) -> list[torch.device]:
    """Return the devices of a worker; none where all are the CPU."""
    if context.runtime.shares_host_memory:
        return []
    return [torch.device(each) for each in devices]


@replaces(_registry, "_tensorpipe_validate_devices")
def _are_there(context: Context, original: Any, devices: Any, device_count: int) -> bool:
    """Return whether devices are there, whatever the target calls them."""
    return all((each.index or 0) < device_count for each in devices)
