"""Notes which lines of a program ran: ``lines_that_ran.py OUT SECONDS FOLDER PROGRAM ...``.

The program is stopped when it has used its seconds of processor time, or when twenty times as long
has passed. What is noted: the lines of files in the folder that ran to their end, and the error
that ended the program.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from types import FrameType
from typing import Any


class OutOfTime(BaseException):
    """The program was stopped. No handler of the program catches this."""


def main() -> None:
    """Run the program that the command line names."""
    out, seconds, folder, program = sys.argv[1:5]
    # Everything is made on the device unless the program says otherwise.
    device = program.startswith("+")
    program = program.removeprefix("+")
    ran: dict[str, set[int]] = {}

    def watched(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(folder):
            return None
        lines = ran.setdefault(file, set())

        def line(frame: FrameType, event: str, _: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    def stop(*_: object) -> None:
        raise OutOfTime

    ended: dict[str, Any] = {}
    sys.argv[:] = [program, *sys.argv[5:]]
    sys.path[0] = os.path.dirname(program)
    for timer, sent, limit in (
        (signal.ITIMER_PROF, signal.SIGPROF, 1),
        (signal.ITIMER_REAL, signal.SIGALRM, 20),
    ):
        signal.signal(sent, stop)
        signal.setitimer(timer, limit * int(seconds))
    try:
        if device:
            import torch

            torch.set_default_device("cuda")
        sys.settrace(watched)
        runpy.run_path(program, run_name="__main__")
    except OutOfTime as error:
        ended = {"kind": "OutOfTime"}
        for entry in traceback.extract_tb(error.__traceback__):  # the lines that were not done
            ran.get(entry.filename, set()).discard(entry.lineno)
    except SystemExit as error:
        ended = {"kind": "SystemExit", "said": str(error.code)} if error.code else {}
    except BaseException as error:
        entries = [
            each
            for each in traceback.extract_tb(error.__traceback__)
            if each.filename.startswith(folder)
        ]
        last = entries[-1] if entries else None
        ended = {"kind": type(error).__name__, "said": str(error).split("\n")[0][:200]}
        ended |= {"file": last.filename, "line": last.lineno} if last else {}
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        with open(out, "w") as stream:
            json.dump(
                {"ran": {file: sorted(lines) for file, lines in ran.items()}, "ended": ended},
                stream,
            )


if __name__ == "__main__":
    main()
