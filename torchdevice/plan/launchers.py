"""The program behind a launcher: ``torchrun --nproc-per-node 4 train.py`` is one of four ranks.

torchrun and accelerate read their own words, and accelerate its own configuration, in a process in
which nothing is started. There :func:`main` runs instead of the function that would start the
ranks. This process has as many simulated GPUs as the plan, which launchers count.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""The modules of launchers. Each has a function ``main`` that reads ``sys.argv``."""

_COMMANDS = {
    "torchrun": "torch.distributed.run",
    "accelerate-launch": "accelerate.commands.launch",
    "accelerate launch": "accelerate.commands.launch",
}

_PYTHON = re.compile(r"python(3(\.[0-9]+t?)?)?(\.exe)?")

LOCAL_RANK = "${local_rank}"
"""The rank of a machine among the words of a program, as torchrun spells it."""


class Launch(NamedTuple):
    """The processes that a launcher would start.

    Attributes:
        words: The program. :data:`LOCAL_RANK` in them stands for the rank on its machine.
        variables: The variables of the environment that the launcher sets for all ranks.
        machines: How many machines there are; 0 for a program that is no rank.
        on_machine: How many ranks each machine has.
    """

    words: list[str]
    variables: dict[str, str]
    machines: int = 0
    on_machine: int = 1


_OF_DEEPSPEED = ("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch")

_NOT_DEEPSPEED = (
    "{} starts ranks with DeepSpeed's engine, which a plan does not run. Plan the script without "
    "that engine, as one of N ranks: 'torchdevice plan --world-size N SCRIPT'. Of a script with a "
    "Trainer or an Accelerator '--change fsdp:N' plans FSDP, which divides a model as ZeRO-3 does."
)


def launcher_of(words: Sequence[str]) -> list[str] | None:
    """Return the module and the words of the launcher that a command line names; None for none.

    Raises:
        ValueError: Its programs cannot be planned.
    """
    words = [*words]
    if len(words) > 1 and _PYTHON.fullmatch(os.path.basename(words[0])):
        del words[0]
    if words[0] == "-m":
        _refuse(words[1:2])
        return words[1:] if len(words) > 1 and words[1] in _MODULES else None
    if os.path.isfile(words[0]) and not os.path.dirname(words[0]):
        return None  # a script of this name in the current folder
    name = os.path.basename(words[0]).removesuffix(".exe")
    _refuse([name])
    for number in (1, 2):
        module = _COMMANDS.get(" ".join([name, *words[1:number]]))
        if module is not None and importlib.util.find_spec(module.partition(".")[0]) is not None:
            return [module, *words[number:]]
    return None


def _refuse(names: Sequence[str]) -> None:
    for name in names:
        if name in _OF_DEEPSPEED:
            raise ValueError(_NOT_DEEPSPEED.format(name))


def read(launcher: Sequence[str], devices: int) -> Launch:
    """Return the launch that a launcher's words describe.

    Args:
        launcher: Its module and its words, see :func:`launcher_of`.
        devices: The number of GPUs that the plan has; 0 where nothing names it.

    Raises:
        SystemExit: It refuses its words, or the process that reads them failed.
        ValueError: It starts no program, or nobody knows how many ranks.
    """
    command = [sys.executable, "-m", __spec__.name, str(devices), *launcher]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    if not done.stdout:
        raise ValueError(
            f"{launcher[0]} starts no process of Python on this machine. Name the program itself, "
            "with --world-size N."
        )
    found: dict[str, Any] = json.loads(done.stdout)
    if "refused" in found:
        raise ValueError(found["refused"])
    return Launch(**found)


def main() -> None:
    """Let a launcher read its words, and print the processes that it would start."""
    named, module, *words = sys.argv[1:]
    devices = int(named)
    started: list[Launch | str] = []
    before = dict(os.environ)

    def noting(read: Callable[[Any], Launch | str]) -> Callable[[Any], None]:
        def start(args: Any) -> None:
            if not args.no_python:  # else it starts a program that is none of Python
                started.append(read(args))

        return start

    torchrun: Any = importlib.import_module("torch.distributed.run")
    # Before the import of others, which take the function from there.
    torchrun.run = noting(lambda args: _of_torchrun(torchrun, args, before, devices))
    launcher: Any = importlib.import_module(module)
    activation = importlib.import_module("torchdevice.scope.activation")
    sys.argv = [module, *words]
    if hasattr(launcher, "simple_launcher"):
        launcher.simple_launcher = noting(lambda args: _of_accelerate(args, before))
        named_so = "accelerate launch --use_deepspeed"
        launcher.deepspeed_launcher = lambda args: started.append(_NOT_DEEPSPEED.format(named_so))
        # It starts ranks on GPUs only where it finds more than one GPU.
        devices = devices or launcher.launch_command_parser().parse_args().num_processes
    with (
        contextlib.redirect_stdout(sys.stderr),
        activation.simulate("cuda", devices=max(devices or 1, 1)),
    ):
        launcher.main()
    for each in started:
        print(json.dumps({"refused": each} if isinstance(each, str) else each._asdict()))


_COUNTED = {"cpu": "this machine's processors"}
"""A word for torchrun's ``--nproc-per-node`` -> the things it counts, if not GPUs."""


def _of_torchrun(torchrun: Any, args: Any, before: Mapping[str, str], devices: int) -> Launch | str:
    """Return torchrun's launch, or the reason why it is not known.

    Source: ``config_from_args`` in ``torch/distributed/run.py``.
    """
    least, most = torchrun.parse_min_max_nnodes(args.nnodes)
    if least != most:
        return (
            f"torchrun's --nnodes {args.nnodes} is a range, and a plan holds for one number of "
            "ranks. Write one number."
        )
    each = str(args.nproc_per_node)
    counted = _COUNTED.get(each)
    if counted is not None:
        return f"torchrun's --nproc-per-node {each} counts {counted}. Write the number of ranks."
    if not each.isdecimal() and not devices:
        return (
            f"torchrun's --nproc-per-node {each} counts GPUs. Name them, as in '--target "
            "simulated:cuda:4', or write the number."
        )
    local = [] if torchrun.get_use_env(args) else [f"--local-rank={LOCAL_RANK}"]
    words = [args.training_script, *local, *args.training_script_args]
    return Launch(
        ["-m", *words] if args.module else words,
        _set_since(before, os.environ),
        most,
        torchrun.determine_local_world_size(each),
    )


def _of_accelerate(args: Any, before: Mapping[str, str]) -> Launch:
    """Return the one process that ``accelerate launch`` would start."""
    launching = importlib.import_module("accelerate.utils.launch")
    words, variables = launching.prepare_simple_launcher_cmd_env(args)
    # Without the interpreter, which a plan takes for granted.
    return Launch(words[words[0] == sys.executable :], _set_since(before, variables))


def _set_since(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    # The plan's GPUs are those that the ranks see, so it leaves out which of a machine they are.
    return {
        name: value
        for name, value in now.items()
        if before.get(name) != value and name != "CUDA_VISIBLE_DEVICES"
    }


if __name__ == "__main__":
    main()
