"""Draw the report's page by a browser: docs/images/report-wide.png and report-phone.png.

A program for CUDA runs on a simulated Mac, which gives a row of most kinds. It needs Chromium or
Chrome. Look at the pictures before you commit them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

PROGRAM = '''\
"""Train a layer on whitened numbers, in half precision."""

import torch


def whiten(x):
    covariance = x.T @ x / len(x)
    values, vectors = torch.linalg.eig(covariance)
    return x @ vectors.real / values.real.sqrt()


def train():
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    scale = torch.tensor([0.5], dtype=torch.float64, device="cuda")
    model = torch.nn.Linear(64, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(30):
        x = whiten(torch.randn(512, 64, device="cuda"))
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(x) - scale * x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(torch.linalg.svdvals(model.weight), torch.cuda.max_memory_allocated())


train()
'''

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Picture(NamedTuple):
    """A picture of the page.

    Attributes:
        name: Its file in docs/images.
        size: Width and height of the window, in pixels.
        scheme: Blink's number of the preferred colours: 0 is dark, 1 is light.
    """

    name: str
    size: tuple[int, int]
    scheme: int


PICTURES = (Picture("report-wide.png", (1100, 900), 0), Picture("report-phone.png", (400, 900), 1))


def page(folder: Path) -> Path:
    """Run the program in a folder, and return the page of its report."""
    (folder / "train.py").write_text(PROGRAM)
    words = ["run", "--quiet", "--target", "simulated:mps", "--report=report.html", "train.py"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHDEVICE")}
    environment = {**kept, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "torchdevice", *words], cwd=folder, env=environment, check=True
    )
    return folder / "report.html"


def draw(browser: str, address: str, picture: Picture) -> None:
    """Let a browser write the picture of a page."""
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
    size = "--window-size={},{}".format(*picture.size)
    file = f"--screenshot={ROOT / 'docs' / 'images' / picture.name}"
    colours = f"--blink-settings=preferredColorScheme={picture.scheme}"
    # Without a desktop, Chromium's messages are about services that it does not find.
    subprocess.run(
        [browser, *flags, size, colours, file, address], check=True, stderr=subprocess.DEVNULL
    )


def main() -> None:
    """Draw all pictures."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"None of {', '.join(BROWSERS)} is installed. Install Chromium.")
    with tempfile.TemporaryDirectory() as folder:
        address = page(Path(folder)).as_uri()
        for picture in PICTURES:
            draw(browser, address, picture)


if __name__ == "__main__":
    main()
