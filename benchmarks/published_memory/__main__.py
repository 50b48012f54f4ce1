"""Plan the rows of a source: ``python -m benchmarks.published_memory qwen --checkout FOLDER``."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
from pathlib import Path
from typing import Any

from benchmarks.published_memory.rows import planned
from torchdevice.plan.peaks import versions
from torchdevice.plan.workspaces import size

SOURCES = ("qwen", "litgpt", "low_bit", "zero", "loading", "titan", "diffusion", "tune")

RESULTS = Path(__file__).with_name("results.json")
"""Source -> its rows, each with the measured and the planned bytes, and the versions with which it
was planned.
"""


def _one(row: Any, checkout: Path, answers: Any) -> None:
    """Plan one row in this process, and send what was found."""
    answers.send({"planned": planned(row, checkout), "versions": versions()})


def _planned_as(row: Any) -> str:
    """Return a text equal for rows with one plan: a program on two GPUs with equal workspaces."""
    return f"{row.work} {row.memory} {row.ranks} {size(row.capability)} {row.reserved}"


def _in_a_process(row: Any, checkout: Path) -> dict[str, Any]:
    """Plan one row in a fork of this process, which has imported what takes long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_one, args=(row, checkout, sender))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        raise SystemExit(f"{row.case} could not be planned") from None
    process.join()
    return found


def main() -> None:
    """Plan the rows, print a table, and keep the results with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("--checkout", type=Path, default=Path())
    parser.add_argument("--write", action="store_true", help="keep what was found, after each row")
    parser.add_argument(
        "--missing", action="store_true", help="plan only the rows that are not kept"
    )
    arguments = parser.parse_args()
    source: Any = importlib.import_module(f"benchmarks.published_memory.{arguments.source}")
    for each in source.IMPORTS:
        importlib.import_module(each)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    of_source = kept.setdefault(arguments.source, {"rows": []})
    of_source |= {"title": source.TITLE, "source": source.SOURCE, "measured with": source.VERSIONS}
    before = {(each["case"], each["gpu"]): each for each in of_source["rows"] if arguments.missing}
    of_source["rows"] = results = []
    same: dict[str, dict[str, Any]] = {}
    for row in source.ROWS:
        found = (
            before.get((row.case, row.gpu))
            or same.get(_planned_as(row))
            or _in_a_process(row, arguments.checkout)
        )
        same[_planned_as(row)] = found
        facts = {"case": row.case, "gpu": row.gpu, "measured": row.measured, "why": row.why}
        results.append({**facts, "planned": found["planned"], "versions": found["versions"]})
        print(f"{row.case} on {row.gpu}: {difference(results[-1])}", flush=True)
        if arguments.write:
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def difference(row: dict[str, Any]) -> str:
    """Return by how much a plan differs from the measurement, in percent."""
    if row["measured"] is None or row["planned"] is None:
        return "as measured" if row["measured"] == row["planned"] else "not as measured"
    return f"{100 * (row['planned'] / row['measured'] - 1):+.2f} %"


if __name__ == "__main__":
    main()
