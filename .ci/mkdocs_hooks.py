"""What the documentation site does to a page's HTML: markup that GitHub and Python show otherwise."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):(?=(?:<autoref[^>]*>)?<code)")
"""The part of a docstring's reference, as in :class:`Scope`, that Markdown shows as text."""

_OPTIONS = '<a href="../options/">An option</a>, by its name.'
"""What torchdevice.options writes out when Python imports the package, which the site does not."""

_CODE = re.compile(r"<code[^>]*>[^<]*</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Take roles away, and the backslash that GitHub wants before a bar in code in a table; link to the options."""
    html = _ROLE.sub("", html).replace("See below.", _OPTIONS)
    return _CODE.sub(lambda found: found[0].replace("\\|", "|"), html)
