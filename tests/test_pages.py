"""The pages: the picture of README.md shows what its commands print, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import run_python

ROOT = Path(__file__).parent.parent


@pytest.mark.sampled(1)
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA has another error text")
def test_the_picture_is_up_to_date() -> None:
    result = run_python(str(ROOT / "docs" / "make_picture.py"), "--check", TORCHDEVICE_ENGINE="")
    assert result.returncode == 0, result.stderr


def test_the_readme_shows_it() -> None:
    assert "(docs/images/terminal.svg)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "page", ["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text())
    lost = [link for link in links if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()]
    assert lost == []
