"""``torchdevice demo``: in the terminal, a program fails, runs, is planned, and is checked."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchdevice.kernel.python import printable, styled_text
from torchdevice.tools.cli.parsing import CommandTexts, add_command

_TRAIN = """\
import torch

torch.manual_seed(0)
x = torch.linspace(-3, 3, 256, device="cuda").unsqueeze(1)
model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
scaler = torch.amp.GradScaler("cuda")
for step in range(61):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(x), x.sin())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step % 30 == 0:
        print(f"step {step}: loss {loss.item():.4f} on {torch.cuda.get_device_name()}")
"""

_MIXED = """\
import torch

weights = torch.ones(2, device="cuda:0")
inputs = torch.ones(2, device="cuda:1")
print(weights + inputs)
"""


class _Step(NamedTuple):
    """A command of the story.

    Attributes:
        said: The text before it.
        words: The command, as it is typed.
        last: How many of its last lines are shown; None for all.
        begin: How the first line begins that is shown.
        end: How the line begins before which the output ends.
    """

    said: str
    words: str
    last: int | None = None
    begin: str = ""
    end: str = "\0"


_STORY = (
    _Step("train.py is written for CUDA. This machine may have none:", "python train.py", 1),
    _Step("The same file, unchanged, on the best device here:", "torchdevice run --quiet train.py"),
    _Step(
        "How much memory of a GPU it needs, and which GPUs have that much:",
        "torchdevice plan train.py",
        begin="torchdevice: plan",
        end="assumed",
    ),
    _Step(
        "mixed.py adds tensors of two GPUs. Two simulated GPUs raise CUDA's error at its line:",
        "torchdevice run --target simulated:cuda:2 mixed.py",
        5,
    ),
)

_NEXT = (
    "Now yours: `torchdevice run YOUR_SCRIPT.py`. `torchdevice doctor` shows which device it will "
    "use."
)


_TEXTS = CommandTexts(
    description="Show the package in four commands, on files of its own. It takes 10 to 20 seconds."
)


def add(commands: Any) -> None:
    """Add the command to a command line."""
    add_command(commands, "demo", _demo, _TEXTS)


def _demo(options: argparse.Namespace) -> int:
    """Run the commands of the story in a folder of their own, which is removed at the end."""
    # Here, because `run` must import no `queue` before the program's folder is on the path.
    from concurrent.futures import ThreadPoolExecutor

    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("train.py", _TRAIN), ("mixed.py", _MIXED)):
            (Path(folder) / name).write_text(text)
        # Most of their time is the import of torch.
        at_once = os.cpu_count() if _is_compiled() else 1
        with ThreadPoolExecutor(at_once) as pool:
            printed = pool.map(lambda step: "\n".join(_shown(step, folder)), _STORY)
            for step in _STORY:
                styled_text.show(
                    [((f"# {step.said}", "dim"),), ((f"$ {step.words}", "bold green"),)]
                )
                sys.stdout.flush()  # before the command has ended
                print(next(printed).rstrip(), end="\n\n", flush=True)
    print(_NEXT)
    return 0


def _is_compiled() -> bool:
    """Return whether Python has compiled torch before: else each command would, beside the others.

    An optimizer imports the largest part, torch's compiler.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    last = Path(torch.origin).parent / "_dynamo" / "convert_frame.py"
    return os.path.exists(importlib.util.cache_from_source(last))


def _shown(step: _Step, folder: str) -> Iterator[str]:
    """Yield the lines of a command's output that are shown."""
    first, *arguments = step.words.split()
    start = [sys.executable, *(["-m", "torchdevice"] if first == "torchdevice" else [])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHDEVICE")}
    done = subprocess.run(
        [*start, *arguments],
        cwd=folder,
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },  # of a wheel that is not installed
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = done.stdout.rstrip().splitlines()
    lines = list(itertools.dropwhile(lambda line: not line.startswith(step.begin), lines))
    lines = list(itertools.takewhile(lambda line: not line.startswith(step.end), lines))
    for line in lines if step.last is None else lines[-step.last :]:
        yield printable.line(line)
