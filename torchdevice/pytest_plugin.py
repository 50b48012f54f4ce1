"""The pytest plugin: ``pytest --torchdevice=simulated:cuda:2`` runs a project's tests in a scope.

The scope is entered before the first test module is imported: ``skipif(not torch.cuda.is_available())`` sees it.

pytest imports this file for everybody who has the package installed, so torch is imported only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from torchdevice import options as _options

if TYPE_CHECKING:
    from torchdevice import Scope

_scopes = pytest.StashKey["Scope"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--torchdevice`` for the target, and a flag for each other option of a scope."""
    _options.add_flags(parser.getgroup("torchdevice").addoption, _options.pytest_flag_of)


def pytest_configure(config: pytest.Config) -> None:
    """Enter the scope, also for processes that tests start."""
    given = _given(config)
    if "target" not in given:
        return
    from torchdevice import errors, scope

    try:
        chosen = _options.Options(**{**_defaults(given["target"]), **_options.from_environment(), **given})
        config.stash[_scopes] = scope.enable_chosen(chosen, propagate=True)
    except (errors.TorchDeviceError, ValueError, TypeError) as error:
        raise pytest.UsageError(f"--torchdevice={given['target']}: {error}") from error


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the scope."""
    if config.stash.get(_scopes, None) is not None:
        from torchdevice import scope

        del config.stash[_scopes]
        scope.disable()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say where the tests run."""
    scope = config.stash.get(_scopes, None)
    return None if scope is None else f"torchdevice: {scope.runtime.target}"


@pytest.fixture
def simulated_accelerator(request: pytest.FixtureRequest) -> Iterator[Scope]:
    """A scope on simulated devices, active during the test: those of ``--torchdevice``, or one that simulates CUDA.

    A test chooses another by ``@pytest.mark.parametrize("simulated_accelerator", ["cuda:2", "mps"], indirect=True)``.
    """
    from torchdevice import choosing
    from torchdevice.scope import Scope

    chosen = getattr(request, "param", None)
    scope = request.config.stash.get(_scopes, None)
    if chosen is None and scope is not None and choosing.is_simulated(scope.runtime.target):
        yield scope
        return
    given = {name: value for name, value in _given(request.config).items() if name != "target"}
    target = f"simulated:{chosen or 'cuda'}"
    with Scope(_options.chosen({"target": target, **given}, **_defaults(target))) as scope:
        yield scope


def _given(config: pytest.Config) -> dict[str, Any]:
    """Return the options that the command line says."""
    flags = {name: config.getoption(_options.pytest_flag_of(name)) for name in _options.declarations()}
    return {name: value for name, value in flags.items() if value is not None}


def _defaults(target: object) -> dict[str, Any]:
    """Tests ask tensors whether they are on the program's accelerator, so simulated ones say that they are."""
    from torchdevice import choosing

    return {"identity": "program"} if choosing.is_simulated(target) else {}
