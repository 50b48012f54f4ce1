"""What the documentation site does to pages: markup that GitHub and Python show otherwise."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_CODE = re.compile(r"<code[^>]*>[^<]*</code>")


_VERSION = Path(__file__).parent.parent / "torchdevice" / "version.py"


def on_config(config: Any) -> Any:
    """Say the version below each page; in a workflow of GitHub, link to the repository and to each page's source."""
    found = re.search(r'__version__ = "(.+)"', _VERSION.read_text())
    assert found is not None
    config.copyright = f"torchdevice {found[1]}"
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and repository:
        config.repo_url, config.repo_name = f"{server}/{repository}", repository
        config.edit_uri = "edit/main/docs/"
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Take away the backslash that GitHub wants before a bar in code in a table."""
    return _CODE.sub(lambda found: found[0].replace("\\|", "|"), html)
