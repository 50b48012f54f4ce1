"""The pytest plugin: ``pytest --torchdevice=simulated:cuda:2`` runs a project's tests in a scope.

The scope is entered before the first test module is imported, so that ``skipif(not torch.cuda.is_available())`` does
not skip.

pytest imports this file wherever the package is installed, so torch is imported only if an option asks for a scope.
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
    """Enter the scope, and set the variables that give it to processes that tests start."""
    given = _given(config)
    if "target" not in given:
        return
    from torchdevice import activation, errors

    try:
        chosen = _options.Options(**{**_defaults(given["target"]), **_options.from_environment(), **given})
        config.stash[_scopes] = activation.enable_chosen(chosen, propagate=True)
    except (errors.TorchDeviceError, ValueError, TypeError) as error:
        raise pytest.UsageError(f"--torchdevice={given['target']}: {error}") from error


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the scope."""
    if config.stash.get(_scopes, None) is not None:
        from torchdevice import activation

        del config.stash[_scopes]
        activation.disable()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the line of pytest's header that names the target."""
    scope = config.stash.get(_scopes, None)
    return None if scope is None else f"torchdevice: {scope.runtime.target}"


@pytest.fixture
def simulated_accelerator(request: pytest.FixtureRequest) -> Iterator[Scope]:
    """A scope on simulated devices, active during the test: that of ``--torchdevice``, else one with the profile cuda.

    A test chooses others by ``@pytest.mark.parametrize("simulated_accelerator", ["cuda:2", "mps"], indirect=True)``.
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
    """Return the options that the command line gives."""
    flags = {name: config.getoption(_options.pytest_flag_of(name)) for name in _options.declarations()}
    return {name: value for name, value in flags.items() if value is not None}


def _defaults(target: object) -> dict[str, Any]:
    """Return the defaults that differ from those of a scope: on a simulated device, ``identity="program"``."""
    from torchdevice import choosing

    # Tests check that tensors are on the program's accelerator.

    return {"identity": "program"} if choosing.is_simulated(target) else {}
