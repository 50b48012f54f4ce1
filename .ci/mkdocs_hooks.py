"""What the documentation site does to a page's HTML: markup that GitHub and Python show otherwise."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):(?=(?:<autoref[^>]*>)?<code)")
"""The part of a docstring's reference, as in :class:`Scope`, that Markdown shows as text."""

_OPTIONS = '<a href="../options/">An option</a>, by its name.'
"""What torchdevice.options writes out when Python imports the package, which the site does not."""

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
    """Take roles away, and the backslash that GitHub wants before a bar in code in a table; link to the options."""
    html = _ROLE.sub("", html).replace("See below.", _OPTIONS)
    return _CODE.sub(lambda found: found[0].replace("\\|", "|"), html)
