"""What the documentation site does to pages: the made pages, and markup that GitHub and Python show
otherwise.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

_CODE = re.compile(r"<code[^>]*>[^<]*</code>")

_LINK = re.compile(r"\]\(reference\.md#([\w-]+)\)")
"""A link from a written page to a made one: to its heading in reference.md, which is there on
GitHub too.
"""

_HEADING = re.compile(r"^## (.+)$", re.M)

_ROOT = Path(__file__).parent.parent
_VERSION = _ROOT / "torchdevice" / "version.py"
_MADE = _ROOT / "build" / "reference"


def on_config(config: Any) -> Any:
    """Show the version in the header; in a workflow of GitHub, link to the repository and to each
    page's source.
    """
    found = re.search(r'__version__ = "(.+)"', _VERSION.read_text())
    assert found is not None
    config.site_name = f"torchdevice {found[1]}"
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and repository:
        config.repo_url, config.repo_name = f"{server}/{repository}", repository
        config.edit_uri = "edit/main/docs/"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that docs/make_reference.py has made."""
    made = sorted(_MADE.glob("*.md"))
    if not made:
        raise PluginError(
            f"{_MADE} has no pages. Run python docs/make_reference.py, which needs torch."
        )
    for path in made:
        files.append(File.generated(config, path.name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to headings of reference.md, and these headings themselves, to the made pages."""
    addresses = made_pages()
    if page.file.src_uri == "reference.md":
        return _HEADING.sub(
            lambda found: f"## [{found[1]}]({addresses[_slug(found[1])]})", markdown
        )
    return _LINK.sub(lambda found: f"]({addresses[found[1]]})", markdown)


def made_pages() -> dict[str, str]:
    """Return the made pages by the anchors of their titles."""
    titles = {
        path.name: path.read_text().partition("\n")[0].removeprefix("# ")
        for path in _MADE.glob("*.md")
    }
    return {_slug(title): name for name, title in titles.items()}


def _slug(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Take away the backslash that GitHub wants before a bar in code in a table, and mark the pages
    of the reference, which get a filter where they are long (docs/filter.js).
    """
    html = _CODE.sub(lambda found: found[0].replace("\\|", "|"), html)
    if any(section.title == "Reference" for section in page.ancestors):
        html += "<span data-reference hidden></span>"
    return html
