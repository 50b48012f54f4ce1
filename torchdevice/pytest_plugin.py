"""The pytest plugin: ``pytest --torchdevice=simulated:cuda:2`` runs a project's tests in a scope.

The scope is entered before the first test module is imported: ``skipif(not torch.cuda.is_available())`` sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from torchdevice import Scope

_scopes = pytest.StashKey["Scope"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--torchdevice``."""
    parser.getgroup("torchdevice").addoption(
        "--torchdevice",
        metavar="TARGET",
        help="run the tests in a scope: on simulated devices (simulated:cuda:2, simulated:mps) or on cpu, mps, ...",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Enter the scope, also for processes that tests start."""
    target = config.getoption("--torchdevice")
    if target is None:
        return
    import torchdevice

    try:
        config.stash[_scopes] = torchdevice.enable(target, identity=_identity(target), propagate=True)
    except torchdevice.errors.TorchDeviceError as error:
        raise pytest.UsageError(f"--torchdevice={target}: {error}") from error


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave it."""
    if config.stash.get(_scopes, None) is not None:
        import torchdevice

        del config.stash[_scopes]
        torchdevice.disable()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say where the tests run."""
    scope = config.stash.get(_scopes, None)
    return None if scope is None else f"torchdevice: {scope.runtime.target}"


@pytest.fixture
def simulated_accelerator(request: pytest.FixtureRequest) -> Iterator[Scope]:
    """A scope on simulated devices, active during the test: those of ``--torchdevice``, or one that simulates CUDA.

    A test chooses another by ``@pytest.mark.parametrize("simulated_accelerator", ["cuda:2", "mps"], indirect=True)``.
    """
    import torchdevice

    chosen = getattr(request, "param", None)
    scope = request.config.stash.get(_scopes, None)
    if chosen is None and scope is not None and scope.runtime.target.startswith("simulated"):
        yield scope
        return
    target = f"simulated:{chosen or 'cuda'}"
    with torchdevice.portable(target, identity=_identity(target)) as scope:
        yield scope


def _identity(target: str) -> Literal["target", "cuda"]:
    """Tests of CUDA programs ask tensors whether they are on CUDA, so simulated ones say they are."""
    return "cuda" if target.startswith("simulated") and not target.startswith("simulated:mps") else "target"
