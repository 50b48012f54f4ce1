"""Notebooks in a real kernel: cells that run again, in another order, and after a restart."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run_python

nbformat = pytest.importorskip("nbformat", reason="install with the [test] extra")
pytest.importorskip("nbclient", reason="install with the [test] extra")
pytest.importorskip("ipykernel", reason="install with the [test] extra")

pytestmark = pytest.mark.one_engine

LOAD = "%load_ext torchdevice"
ENTER = "%torchdevice simulated:cuda:2 --memory 1GiB"
USE = "import torch\nx = torch.ones(3, device='cuda:1')\nprint(x.device, torch.cuda.device_count())"
REPORT = "torchdevice.current().report()"
FAIL = "def add():\n    return x + torch.ones(3)\nadd()"
LEAVE = "%torchdevice off\ntorch.cuda.is_available()"

DRIVER = """
import json, sys
import nbclient, nbformat
from nbformat.v4 import new_code_cell, new_notebook

runs = json.load(open(sys.argv[1]))
client = nbclient.NotebookClient(new_notebook(), timeout=120, allow_errors=True)
said = []
with client.setup_kernel():
    for cells in runs:
        if cells == "restart":
            client.km.restart_kernel()
            client.kc.wait_for_ready()
            continue
        for source in cells:
            client.nb.cells = [new_code_cell(source)]
            client.execute_cell(client.nb.cells[0], 0)
            said.append(client.nb.cells[0].outputs)
json.dump(said, open(sys.argv[2], "w"))
"""


def executed(folder: Path, *runs: Any) -> list[str]:
    """Run cells, lists of sources or "restart", in one kernel; return each cell's output."""
    asked, given = folder / "runs.json", folder / "said.json"
    asked.write_text(json.dumps(runs))
    done = run_python("-c", DRIVER, str(asked), str(given), cwd=folder)
    assert done.returncode == 0, done.stderr
    return ["".join(map(shown, outputs)) for outputs in json.loads(given.read_text())]


def shown(output: dict[str, Any]) -> str:
    """Return a notebook's view of an output: HTML first, tracebacks without colours."""
    if output["output_type"] == "error":
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output["traceback"]))
    data = output.get("data", {})
    return output.get("text") or data.get("text/html") or data["text/plain"]


def test_cells_run_again_in_any_order_and_after_a_restart(tmp_path: Path) -> None:
    once = [LOAD, ENTER, USE, REPORT, FAIL, ENTER, USE, LEAVE, ENTER, USE, LEAVE]
    said = executed(tmp_path, once, once, "restart", [USE], once)
    plain = said.pop(2 * len(once))
    first, second, third = (
        said[start : start + len(once)] for start in range(0, len(said), len(once))
    )
    # After the restart torch is torch's own.
    assert (
        "Torch not compiled with CUDA enabled" in plain
        or "No CUDA GPUs" in plain
        or "NVIDIA driver" in plain
    )
    for load, enter, use, report, fail, enter_again, use_again, leave, *others in (
        first,
        second,
        third,
    ):
        # What IPython says of an extension that is loaded already.
        assert load == "" or "already loaded" in load
        assert enter == enter_again and enter.startswith(
            "torchdevice: CUDA is simulated:cuda:2 in this session"
        )
        assert use == use_again == "cuda:1 2\n" and leave == "False"
        assert others == [enter, use, leave]
        # The report is a page in the notebook. It names cells like IPython, not the kernel's files.
        assert report.startswith("<iframe srcdoc=") and "a notebook" in report and "In[" in report
        assert "ipykernel" not in report
        # The error's frames are those of the cell.
        assert "same device" in fail and "in add()" in fail and "torchdevice/" not in fail
        assert len(fail.splitlines()) < 20


def test_a_typo_is_one_line(tmp_path: Path) -> None:
    said = executed(
        tmp_path,
        [LOAD, "%torchdevice cpu --memroy 1GiB", "%torchdevice vax", "%torchdevice 'cpu", REPORT],
    )
    assert all(re.fullmatch(r"UsageError: [^\n]+\n+", text) for text in said[1:4]), said[1:4]
    assert "AttributeError: 'NoneType'" in said[4]  # no scope was entered


def test_help_is_usage_and_every_option(tmp_path: Path) -> None:
    _, text = executed(tmp_path, [LOAD, "%torchdevice --help"])
    assert text.startswith("usage: %torchdevice TARGET") and "\n       %%torchdevice TARGET" in text
    assert all(flag in text for flag in ("--target", "--memory", "--races", "--engine"))


@pytest.mark.sampled(8, of="long programs")
def test_jupyter_execute(tmp_path: Path) -> None:
    command = shutil.which(
        "jupyter-execute", path=str(Path(sys.executable).parent)
    ) or shutil.which("jupyter-execute")
    assert command, "nbclient's command is not on the path"
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in (LOAD, ENTER, USE, REPORT, "%%torchdevice cpu\n" + USE)
    ]
    page = tmp_path / "notebook.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), page)
    for _ in range(2):  # the notebook holds the results of its first run at the second
        done = subprocess.run(
            [command, "--inplace", str(page)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        *_, use, report, in_cell = nbformat.read(page, 4).cells
        assert use.outputs[0].text == "cuda:1 2\n" and "text/html" in report.outputs[0].data
        assert "cpu 1\n" in [output.get("text") for output in in_cell.outputs]
