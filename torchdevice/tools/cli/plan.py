"""``torchdevice plan``: how much memory of a GPU a program needs, and which GPUs have that much."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from torchdevice.kernel.python.byte_sizes import written
from torchdevice.plan import launchers, model_words
from torchdevice.scope import collected_options
from torchdevice.tools.cli import plans, programs, run
from torchdevice.tools.cli.parsing import CommandTexts, add_command, refusals

if TYPE_CHECKING:
    from torchdevice.plan.change_words import Change
    from torchdevice.plan.changes import Changed
    from torchdevice.report import Report
    from torchdevice.torch_modules.distributed.process_groups import FakeRanks


_TEXTS = CommandTexts(
    description=(
        "Report how much GPU memory a program needs, and which GPUs have that much. The program "
        "runs without values."
    ),
    usage=(
        "torchdevice plan [options] SCRIPT [args ...]\n"
        "       torchdevice plan [options] -m MODULE [args ...]\n"
        "       torchdevice plan [options] torchrun [options] SCRIPT [args ...]\n"
        "       torchdevice plan [options] --model NAME [--batch N] [--seq N]\n"
        "                        [--train KIND | --generate N] [--dtype DTYPE]"
    ),
    epilog=(
        "The program runs without values on a simulated GPU of 1 TiB: give it one epoch, or a few "
        "steps.\n"
        "\n"
        "examples:\n"
        "  torchdevice plan train.py --max-steps 2\n"
        "  torchdevice plan --target simulated:cuda:2 train.py\n"
        "  torchdevice plan --model llama --batch 4 --train lora\n"
        "  torchdevice plan --sweep batch-size=1,2,4,8 train.py --max-steps 2\n"
        "  torchdevice plan torchrun --nproc-per-node 4 train_ddp.py\n"
        "  torchdevice plan --report=plan.html train.py --max-steps 2"
    ),
    arguments={
        "--fits": {
            "metavar": "GPU",
            "help": "the status is 1 if the program does not fit this GPU, such as t4",
        },
        "--sweep": {
            "action": "append",
            "metavar": "NAME=VALUES",
            "help": (
                "make a plan for each value of a flag of the program, or of a variable, such as "
                "batch-size=1,2,4; may be repeated"
            ),
        },
        "--try": {
            "action": "store_true",
            "dest": "tries",
            "help": (
                "plan the program also with gradient checkpointing, AdamW with 8-bit states, LoRA "
                "and FSDP, and show what makes it fit; it must use transformers' Trainer or "
                "accelerate, or --model --train"
            ),
        },
        "--change": {
            "metavar": "CHANGE",
            "help": (
                "plan the program with one such change: checkpointing, 8-bit, lora, fsdp:N, or "
                "several joined by +"
            ),
        },
        "--world-size": {
            "metavar": "N",
            "help": (
                "plan rank 0 of N, for a program that torchrun starts; the other ranks do not run "
                "(after 'torchrun' or 'accelerate launch' N is read from their flags)"
            ),
        },
        "--ranks-per-machine": {
            "metavar": "N",
            "default": 8,
            "help": "the ranks of one machine, each with a GPU of its own (default: 8)",
        },
        "--rank": {
            "metavar": "R",
            "help": (
                "plan rank R of --world-size instead; 'all' plans each and shows the one that "
                "needs the most"
            ),
        },
        "--interval": {
            "action": "store_true",
            "help": (
                "plan with the most and the fewest that masks, nonzero() and routers can select, "
                "with steps that a GradScaler makes and skips, and show both"
            ),
        },
        "--assume": {
            "choices": ("most", "fewest"),
            "default": "most",
            "help": (
                "what a result whose size depends on values holds (default: most, the upper bound)"
            ),
        },
        "--json": {
            "action": "store_true",
            "help": "print data; what the program prints goes to stderr",
        },
        "--markdown": {
            "action": "store_true",
            "help": "print Markdown, for a pull request; what the program prints goes to stderr",
        },
        "--model": {
            "metavar": "NAME",
            "help": (
                "plan a model of transformers without a program: a folder with its config.json, a "
                "model in the Hub's cache, or an architecture such as llama; nothing is fetched"
            ),
        },
        "--batch": {"metavar": "N", "help": "the number of sequences (default: 1)"},
        "--seq": {"metavar": "N", "help": "the tokens of each sequence (default: 2048)"},
        "--train": {
            "choices": ("full", "lora", "qlora"),
            "help": (
                "train it for two steps with AdamW, wholly, by PEFT's LoRA on all linear layers, "
                "or so with weights in four bits"
            ),
        },
        "--generate": {"metavar": "N", "help": "generate so many tokens after the sequences"},
        "--dtype": {
            "choices": ("bf16", "fp16", "fp32"),
            "help": "the dtype of the weights (default: that of the configuration, else bf16)",
        },
        "--checkpointing": {
            "action": "store_true",
            "help": "compute activations again in the backward pass; qlora does so anyway",
        },
        "--strategy": {
            "choices": ("ddp", "fsdp"),
            "help": (
                "how the ranks of --world-size train it: each with the whole model, or with a part "
                "(default: ddp)"
            ),
        },
        "--baseline": {
            "metavar": "FILE",
            "help": (
                "compare with the plan that this file has; the status is 1 if the program needs "
                "more than --grow allows"
            ),
        },
        "--write-baseline": {
            "action": "store_true",
            "help": "write what the program needs to the baseline",
        },
        "--grow": {
            "metavar": "PERCENT",
            "default": 1.0,
            "help": "by how many percent the program may need more than the baseline (default: 1)",
        },
    },
    headings={
        "the plan": (
            "--fits",
            "--sweep",
            "--try",
            "--change",
            "--world-size",
            "--ranks-per-machine",
            "--rank",
            "--interval",
            "--assume",
            "--json",
            "--markdown",
        ),
        "a model without a program": (
            "--model",
            "--batch",
            "--seq",
            "--train",
            "--generate",
            "--dtype",
            "--checkpointing",
            "--strategy",
        ),
        "continuous integration": ("--baseline", "--write-baseline", "--grow"),
    },
)


def add(commands: Any) -> None:
    """Add the command to a command line."""
    numbers: dict[str, Callable[[str], Any]] = dict.fromkeys(("batch", "seq", "generate"), _number)
    numbers["grow"] = _percent
    # A plan sets the last two itself, and has no values that could be verified.
    without = ("verify", "verify_sample", "verify_only", "asynchronous", "compute", "values")
    run.take_program(
        add_command(
            commands,
            "plan",
            _plan,
            _TEXTS,
            world_size=programs.number,
            ranks_per_machine=programs.number,
            rank=_rank,
            sweep=_sweep,
            change=_change,
            **numbers,
        ),
        without,
    )


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number. Use a whole number from 1.")
    return int(text)


def _rank(text: str) -> int | str:
    if text == "all":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank. Use a number from 0, or 'all'.")
    return int(text)


def _percent(text: str) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of percent. Use a number of 0 or more."
        )
    return float(text)


def _sweep(text: str) -> Any:
    from torchdevice.plan.sweeping import Sweep  # here, because most commands need none

    try:
        return Sweep.parsed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _change(text: str) -> Any:
    from torchdevice.plan.change_words import Change  # as above

    try:
        return Change.parsed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _plan(options: argparse.Namespace) -> int:
    title = ""
    if options.model is None:
        _refuse_flags_of_models(options)
    else:
        title = _take_model(options)
    if not options.rest:
        options.parser.error(
            "which program? Name a SCRIPT, -m MODULE, -c CODE, - for stdin, a launcher such as "
            "torchrun, or --model NAME"
        )
    _take_variables(options)
    _take_launcher(options)
    _check_rank(options)
    made_by_others = _by_others(options)
    if made_by_others is not None:
        return made_by_others(options, title)
    if options.change is not None:
        # Before the scope, which installs the patches that its import registers.
        importlib.import_module("torchdevice.plan.changes")
        options.world_size = options.change.ranks or options.world_size
    file = _stdout_for_data() if options.json or options.markdown else None
    options.plan = functools.partial(_begin, _Output(options, file, title))
    options.interrupted = _ignore_next_interrupt
    _choose_device(options)
    options.compute = "meta"
    options.values = "assume" if options.assume == "most" else "assume-fewest"
    return run.start(options)


def _ignore_next_interrupt() -> None:
    """Let the next Ctrl-C show that the plan is being made, and only the one after it end that."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # the program chose what Ctrl-C does
    signal.signal(signal.SIGINT, _ignore)


def _ignore(number: int, frame: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Without print, whose lock the main thread may hold.
    os.write(2, b"torchdevice: the plan is being made (Ctrl-C again ends that)\n")


def _take_variables(options: argparse.Namespace) -> None:
    """Take the target, the devices and the memory from their variables, where no flag has them."""
    # Where a target is named, the scope reads the other two.
    if options.target is not None:
        return
    from torchdevice.simulation import model_lookup  # only a plan without a target needs it

    with refusals():
        said = collected_options.from_environment()
        # The variable may name a device that other commands use. A plan is made on simulated ones.
        options.target = model_lookup.simulated(said.get("target", ""))
    if options.target is not None:
        return
    options.devices = options.devices or said.get("devices")
    options.memory = options.memory or said.get("memory")


def _take_launcher(options: argparse.Namespace) -> None:
    """Replace a launcher among the words by the program that it would start as a rank."""
    with refusals():
        launcher = launchers.launcher_of(options.rest)
    # The names of a sweep may be flags of the launcher, so each plan reads its own words.
    if launcher is None or options.sweep:
        return
    if options.world_size is not None:
        options.parser.error(
            "a launcher has the number of ranks in its own words. Leave --world-size out"
        )
    with refusals():
        launch = launchers.read(launcher, _named_devices(options))
    os.environ.update(launch.variables)
    options.rest = launch.words
    if launch.machines:
        options.world_size = launch.machines * launch.on_machine
        options.ranks_per_machine = launch.on_machine
        said = {"--world-size": options.world_size, "--ranks-per-machine": launch.on_machine}
        for name, value in said.items():
            options.own += [name, str(value)]


def _named_devices(options: argparse.Namespace) -> int:
    """Return how many GPUs the command asks for; 0 if it does not say."""
    if options.devices is not None or options.target is None:
        return options.devices or 0
    from torchdevice.simulation import model_lookup  # only a launcher counts GPUs

    with refusals():
        said = collected_options.from_environment()
    return model_lookup.count_of(options.target) or said.get("devices", 0)


def _choose_device(options: argparse.Namespace) -> None:
    """Let the program be the rank that is planned, on a GPU of 1 TiB unless a target is named."""
    count, on_machine = options.world_size, options.ranks_per_machine
    if options.target is None:
        devices = options.devices or min(count or 1, on_machine)
        # The target has the number, and an option that repeats it would contradict it.
        options.target, options.devices = f"simulated:cuda:{devices}", None
        options.memory = options.memory or 1 << 40
    if count is not None:
        rank = options.rank or 0
        _be_rank(rank, count, on_machine)
        local = str(rank % on_machine)
        options.rest = [word.replace(launchers.LOCAL_RANK, local) for word in options.rest]


def _refuse_flags_of_models(options: argparse.Namespace) -> None:
    for name in model_words.FLAGS:
        if getattr(options, name):
            options.parser.error(
                f"--{name} needs --model NAME; the flags of a program come after it"
            )


def _stdout_for_data() -> TextIO:
    """Return a file that writes to stdout. The program's output goes to stderr from now on."""
    file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return file


def _check_rank(options: argparse.Namespace) -> None:
    """Refuse a rank that does not exist."""
    if options.rank is None:
        return
    if options.world_size is None:
        options.parser.error("--rank is one of several. Add --world-size N")
    if options.rank != "all" and options.rank >= options.world_size:
        last = options.world_size - 1
        options.parser.error(f"--rank {options.rank} does not exist. The last one is {last}")


def _be_rank(rank: int, count: int, on_machine: int) -> None:
    """Set the variables that torch's launcher sets for a rank of ``count``.

    Source: ``_start_workers`` in ``torch/distributed/elastic/agent/server/local_elastic_agent.py``.
    """
    machine, local = divmod(rank, on_machine)
    ranks = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": machine}
    sizes = {
        "WORLD_SIZE": count,
        "ROLE_WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": min(count, on_machine),
        "GROUP_WORLD_SIZE": -(-count // on_machine),
    }
    os.environ.update({name: str(value) for name, value in (ranks | sizes).items()})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    # Libraries ask it whether torch's launcher started them.
    os.environ["TORCHELASTIC_RUN_ID"] = "none"


class _Exclusion(NamedTuple):
    """A flag, the flags it excludes, and the error for both. Flags are attributes of options."""

    flag: str
    others: tuple[str, ...]
    error: str


_JUDGING = ("baseline", "write_baseline", "fits")

_EXCLUSIONS = (
    *(
        _Exclusion(flag, ("report",), f"--report shows one plan, and --{name} makes several")
        for flag, name in {
            "sweep": "sweep",
            "tries": "try",
            "interval": "interval",
            "all_ranks": "rank all",
        }.items()
    ),
    _Exclusion(
        "sweep",
        _JUDGING,
        "--sweep makes several plans, and --baseline and --fits judge one. Leave one of them out",
    ),
    _Exclusion(
        "tries",
        ("sweep", "baseline", "write_baseline", "change"),
        "--try makes its own plans. Leave --sweep, --baseline and --change out",
    ),
    _Exclusion(
        "interval",
        ("sweep", "tries", *_JUDGING),
        "--interval makes two plans. Leave --sweep, --try, --baseline and --fits out",
    ),
    _Exclusion(
        "all_ranks",
        ("sweep", "tries", "interval", *_JUDGING),
        "--rank all makes a plan for each rank. Leave --sweep, --try, --interval, --baseline and "
        "--fits out",
    ),
)


def _by_others(options: argparse.Namespace) -> Callable[[argparse.Namespace, str], int] | None:
    """Return the way in which other processes make the plans; None if only this one does."""
    given = {name for name, value in vars(options).items() if value}
    given |= {"all_ranks"} if options.rank == "all" else set()
    for flag, others, error in _EXCLUSIONS:
        if flag in given and not given.isdisjoint(others):
            options.parser.error(error)
    if options.tries and options.model is not None and options.train is None:
        options.parser.error(
            "--try changes how a model is trained. Add --train full, or name a program"
        )
    makers = {
        "all_ranks": plans.ranks,
        "interval": plans.interval,
        "sweep": lambda options, title: plans.sweep(options, options.model or ""),
        "tries": plans.try_changes,
        **dict.fromkeys(_JUDGING, plans.judge),
    }
    return next((make for name, make in makers.items() if name in given), None)


def _take_model(options: argparse.Namespace) -> str:
    """Let the program be the one that plans a model of transformers, and return its description."""
    if options.rest:
        options.parser.error("--model plans a model without a program. Leave one of the two out")
    for error in _contradictions(options):
        options.parser.error(error)
    if options.change is not None:
        _take_change(options)
    if options.train == "qlora" and options.strategy == "fsdp":
        options.parser.error(
            "FSDP of weights in four bits is not planned. Use --train lora or full"
        )
    if options.world_size is not None:
        options.strategy = options.strategy or "ddp"
    words = model_words.of(options.model, options)
    options.rest = ["-m", "torchdevice.plan.models", *words]
    return model_words.title(words)


def _contradictions(options: argparse.Namespace) -> Iterator[str]:
    """Yield the contradictions among the flags of a model."""
    if options.train and options.generate:
        yield "--train and --generate are two plans. Leave one of the two out"
    of_training = ("checkpointing", "strategy", "change", "world_size")
    given = [name for name in of_training if getattr(options, name)]
    if given and not options.train:
        flag = given[0].replace("_", "-")
        yield f"--{flag} is about training. Add --train full, lora or qlora"
    changed_ranks = None if options.change is None else options.change.ranks
    if options.strategy and options.world_size is None and changed_ranks is None:
        yield "--strategy is that of several ranks. Add --world-size N"


def _take_change(options: argparse.Namespace) -> None:
    """Let the flags of a model say what --change says, but for ``8-bit``, which has no flag."""
    names = options.change.names
    options.checkpointing = options.checkpointing or "checkpointing" in names
    options.train = next((each for each in ("qlora", "lora") if each in names), options.train)
    options.own = plans.without(options.own, {"--change"})
    if "fsdp" in names:
        options.world_size, options.strategy = options.change.ranks, "fsdp"
        options.own = plans.without(options.own, {"--world-size"})
        options.own += ["--world-size", str(options.world_size)]
    if "8-bit" in names:
        options.own += ["--change", "8-bit"]
        options.change = options.change.only("8-bit")
    else:
        options.change = None


class _Output(NamedTuple):
    """How a plan is shown.

    Attributes:
        options: Whether as text, JSON or Markdown.
        file: Where to, if it is not a text for a person.
        title: A name for the program; empty for its own words.
    """

    options: argparse.Namespace
    file: TextIO | None
    title: str


class _Progress:
    """Says now and then how far a plan has come. Ctrl-C shows the plan up to there."""

    every = 10.0
    """Seconds between two lines."""

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()

    def show(self, blocks: int, most: int, doing: str) -> None:
        now = time.monotonic()
        if now - self._shown >= self.every:
            self._shown = now
            said = (
                f"{now - self._began:.0f} s, {blocks:,} blocks of memory, {written(most)} at the "
                f"peak so far{doing}"
            )
            print(f"torchdevice: {said} (Ctrl-C shows the plan)", file=sys.stderr)


def _begin(output: _Output) -> Callable[[Report, SystemExit | None], Any]:
    """Follow the memory of the devices from now on, and make the requested change. Return a
    function that prints the plan at the end and returns it.
    """
    from torchdevice.plan import peaks, rendering

    found = peaks.Peaks()
    found.follow(_ranks(output.options))
    changed = _changed(output.options.change)
    if sys.stderr.isatty():
        found.progress = _Progress().show

    def show(report: Report, exited: SystemExit | None) -> dict[str, Any]:
        # What the interpreter printed.
        plan = peaks.data(found, report, exited or getattr(sys, "last_value", None))
        if output.title:
            _call(plan, output.title)
        plan["program"] = plans.of_rank(plan["program"], output.options)
        if changed is not None:
            plan |= {"change": str(changed.change), "not changed": changed.missing}
        refused = output.title and exited and not plan["devices"]  # the program said why
        if output.options.json or not refused:
            try:
                plans.show(plan, output.options, output.file)
            except BrokenPipeError:  # nobody reads on, as after 'head'
                # Python flushes what is left at its end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if signal.getsignal(signal.SIGINT) is _ignore:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return {
            **plan,
            "answer": [*rendering.answer(plan)],
            "over time": {
                f"cuda:{index}": found.timeline(index) for index in sorted(found.devices)
            },
        }

    return show


def _ranks(options: argparse.Namespace) -> FakeRanks | None:
    """Return the rank that is planned, and the number of ranks."""
    if options.world_size is None:
        return None
    from torchdevice.torch_modules.distributed.process_groups import FakeRanks

    folder = os.environ.pop(plans.FOLDER_OF_RANKS, None)
    return FakeRanks(options.rank or 0, options.world_size, folder)


def _changed(change: Change | None) -> Changed | None:
    """Make a change in this thread's scope."""
    if change is None:
        return None
    from torchdevice.kernel import thread_state
    from torchdevice.plan import changes

    assert thread_state.state.context is not None
    return changes.install(thread_state.state.context, change)


def _call(plan: dict[str, Any], title: str) -> None:
    """Name a plan after its subject, and drop the program's lines, which are this package's."""
    plan["program"] = title
    for each in (*plan["devices"], *plan["assumed"]):
        each["lines"] = [line for line in each["lines"] if not line.startswith("<")]
