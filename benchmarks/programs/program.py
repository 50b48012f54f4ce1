"""Facts of a public program before it runs: its place, command and output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OWN = "its own CPU mode"
"""The target of a run by plain python, in the program's own CPU mode."""

TARGETS = ("cpu", "simulated:cuda")


@dataclass(frozen=True)
class Program:
    """A program of a public repository, at a commit, and a small task for it.

    Attributes:
        name: How the page calls it.
        area: Such as "vision".
        repository: ``owner/name`` on GitHub, or the name of a project on PyPI.
        commit: The commit that is run, in full; of a project on PyPI, the release.
        command: The words after ``python``: a file of the repository or ``-m`` and a module, and
            its arguments.
        given: The data and the weights that it gets.
        own: The words that, added to the command, ask for the program's own CPU mode; None if it
            has none.
        inputs: The function of ``inputs.py`` that makes what it reads, in the folder where it is
            run.
        parts: The patterns of what is checked out, as git's sparse checkout reads them; empty for
            all.
        folder: The folder of the repository in which it is run.
        paths: Folders of the repository that are importable.
        environment: Variables that it runs with.
        needs: The packages of PyPI that it imports, beside torch and numpy.
        loss: A pattern with a group for the loss. Its last match counts.
        result: A pattern with a group for another result. Its last match counts.
        log: Files that it writes, as a pattern of paths, in which the patterns are searched too.
        digest: Files that it writes, as a pattern of paths, of which a digest is the result.
        targets: The targets that it runs on.
        faults: Why it fails and whose fault that is, by a pattern that is searched in the error.
        differs: Why its loss or result is not the same everywhere.
    """

    name: str
    area: str
    repository: str
    commit: str
    command: str
    given: str
    own: str | None = ""
    inputs: str = ""
    parts: tuple[str, ...] = ()
    folder: str = "."
    paths: tuple[str, ...] = (".",)
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    loss: str = ""
    result: str = ""
    log: str = ""
    digest: str = ""
    targets: tuple[str, ...] = TARGETS
    faults: Mapping[str, str] = field(default_factory=dict)
    differs: str = ""

    @property
    def address(self) -> str:
        """Where what is run can be read: a commit on GitHub, or a release on PyPI."""
        on_github = "/" in self.repository
        place = (
            f"github.com/{self.repository}/tree"
            if on_github
            else f"pypi.org/project/{self.repository}"
        )
        return f"https://{place}/{self.commit}"
