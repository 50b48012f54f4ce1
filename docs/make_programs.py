"""Write docs/programs.md from the recorded runs of ``python -m benchmarks.programs``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from generated import write_or_check

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.programs import page
from benchmarks.programs.__main__ import RESULTS
from benchmarks.programs.runs import Run

if __name__ == "__main__":
    recorded = [Run(**each) for each in json.loads(RESULTS.read_text())]
    sys.exit(write_or_check(page.PAGE, page.page(recorded)))
