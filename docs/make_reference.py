"""Write the site's reference into build/reference, from declarations and recorded runs.

.ci/mkdocs_hooks.py adds them to the site. They need torch and the package; mkdocs needs neither.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import make_check
import make_cli
import make_coverage
import make_options
import make_torch_names

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "reference"

sys.path.insert(0, str(ROOT))

from benchmarks.programs import page as programs_page  # noqa: E402
from benchmarks.programs.__main__ import RESULTS  # noqa: E402
from benchmarks.programs.runs import Run  # noqa: E402


def programs() -> str:
    """Return the page of the recorded runs of public programs."""
    return programs_page.page([Run(**each) for each in json.loads(RESULTS.read_text())])


PAGES: dict[str, Callable[[], str]] = {
    "options.md": make_options.page,
    "cli.md": make_cli.page,
    "rules.md": make_check.page,
    "coverage.md": make_coverage.page,
    "programs.md": programs,
    "predictions.md": make_check.measured,
    "torch-names.md": make_torch_names.page,
}
"""The pages by their file."""


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
