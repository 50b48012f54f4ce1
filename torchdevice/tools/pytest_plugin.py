"""The pytest plugin: ``pytest --torchdevice=simulated:cuda:2`` runs a project's tests in a scope.

The scope is entered before the first test module is imported, so that ``skipif(not
torch.cuda.is_available())`` does not skip. Every option of a scope is a flag, and a key of pytest's
configuration file. The mark ``torchdevice`` and the fixtures give a scope to single tests.

pytest imports this file wherever the package is installed, so torch is imported only if a test or
an option asks for a scope.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from torchdevice.errors import TorchDeviceError
from torchdevice.kernel.python import printable
from torchdevice.kernel.python.environment import switched_off, switched_on
from torchdevice.scope import collected_options as _options
from torchdevice.tools.cli.report import add_report_flag, show_report

if TYPE_CHECKING:
    from torchdevice import Report, Scope

_MARK = "torchdevice"

_REPORT = "--torchdevice-report"

_ISOLATION = "torchdevice_isolation"

_EXAMPLES = """torchdevice: examples:
  pytest --torchdevice=simulated:cuda:2
  pytest --torchdevice=cpu
  pytest --torchdevice=a100:2 --torchdevice-report=report.html
  pytest --torchdevice=simulated:cuda --torchdevice-memory=8GiB
  pytest --torchdevice=simulated:mps -n 2
  pytest -o torchdevice=

"""
"""The text above the flags in pytest's help. The last example overrides a configuration file."""

_ERRORS = (TorchDeviceError, ValueError, TypeError)
"""The errors of options that cannot be had."""

_scopes = pytest.StashKey["Scope"]()

_scopes_of_marks = pytest.StashKey["Scope"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--torchdevice``, a flag for each other option of a scope, and configuration keys."""
    for index, (heading, names) in enumerate(_options.groups().items()):
        above = "" if index else _EXAMPLES
        group = parser.getgroup(f"torchdevice{index or ''}", f"{above}torchdevice: {heading}")
        _options.add_flags(group.addoption, _options.pytest_flag_of, names)
    add_report_flag(parser.getgroup("torchdevice").addoption, _REPORT)
    parser.addini(
        _ISOLATION,
        "how long a failed device stays lost: the 'test', or the 'session' as on a GPU",
        default="test",
    )
    for name in _options.declarations():
        parser.addini(
            _options.pytest_key_of(name), f"the same as {_options.pytest_flag_of(name)}", default=""
        )


def pytest_configure(config: pytest.Config) -> None:
    """Enter the scope, and set the variables that give it to processes that tests start."""
    config.addinivalue_line(
        "markers", f"{_MARK}(profile, **options): run the test on a simulated device, or target="
    )
    try:
        given, configured = _given(config), _configured(config)
        # A configuration file chooses the target, unless `torchdevice run pytest` does.
        if "target" in given or ("target" in configured and not switched_on()):
            with switched_off():
                from torchdevice.scope import activation
            chosen = _options.chosen(given, **configured)
            scope = config.stash[_scopes] = activation.enable_chosen(
                chosen, propagate=True, enabled_by="pytest"
            )
            config.pluginmanager.register(_Summary(scope, config.getoption(_REPORT)))
    except _ERRORS as error:
        raise pytest.UsageError(f"torchdevice: {error}") from error


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the scope."""
    if config.stash.get(_scopes, None) is not None:
        from torchdevice.scope import activation

        del config.stash[_scopes]
        activation.disable()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the line of pytest's header that names the target, or flags that lack one."""
    scope = config.stash.get(_scopes, None)
    if scope is None:
        flags = ", ".join(map(_options.pytest_flag_of, _given(config)))
        if not flags:
            return None
        return (
            "torchdevice: without --torchdevice=TARGET only tests with a mark or a fixture take "
            f"{flags}"
        )
    kernels = scope.runtime.supplied.kernels(scope.options.native)
    return f"torchdevice: {scope.runtime.target}" + (f", kernels: {kernels}" if kernels else "")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Enter the scope of a test's mark, before its fixtures are made."""
    mark = item.get_closest_marker(_MARK)
    if mark is not None:
        try:
            item.stash[_scopes_of_marks] = _scope_of_mark(item.config, mark).__enter__()
        except _ERRORS as error:
            raise pytest.fail.Exception(f"torchdevice: {error}", pytrace=False) from None


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Leave a test's scope after its fixtures, and replace devices that failed in the test."""
    yield
    _leave_scope_of_mark(item)
    # Not imported for tests that simulate nothing.
    policy = sys.modules.get("torchdevice.simulation.policy")
    if policy is not None and item.config.getini(_ISOLATION) == "test":
        policy.replace_lost()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show a test's error without this package's frames."""
    if call.excinfo is not None and _is_in_scope(item):
        from torchdevice.kernel.python.uncaught_errors import trim

        trim(call.excinfo.value)
        call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)
    yield


def _is_in_scope(item: pytest.Item) -> bool:
    """Return whether this plugin has entered a scope for a test."""
    by_fixture = {torchdevice_scope.__name__, simulated_accelerator.__name__} & {
        *getattr(item, "fixturenames", ())
    }
    return _scopes in item.config.stash or _scopes_of_marks in item.stash or bool(by_fixture)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Leave the scope of a test's mark where Ctrl-C kept the teardown from running."""
    yield
    _leave_scope_of_mark(item)


def _leave_scope_of_mark(item: pytest.Item) -> None:
    scope = item.stash.get(_scopes_of_marks, None)
    if scope is not None:
        del item.stash[_scopes_of_marks]
        scope.__exit__(None, None, None)


@pytest.fixture
def torchdevice_scope(request: pytest.FixtureRequest) -> Iterator[Scope]:
    """The scope in which the test runs: of its mark or ``--torchdevice``, or a new one."""
    from torchdevice.scope import activation

    active = activation.current()
    if active is not None:
        yield active
        return
    with _scope_with(request.config, {}) as scope:
        yield scope


@pytest.fixture
def simulated_accelerator(request: pytest.FixtureRequest) -> Iterator[Scope]:
    """A scope on simulated devices for the test: of its mark or ``--torchdevice``, or a new one.

    A test chooses others by ``@pytest.mark.parametrize("simulated_accelerator", ["cuda:2", "mps"],
    indirect=True)``.
    """
    from torchdevice.scope import activation
    from torchdevice.simulation import targets

    chosen = getattr(request, "param", None)
    active = activation.current()
    if chosen is None and active is not None and targets.is_simulated(active.runtime.target):
        yield active
        return
    with _scope_on(request.config, chosen or "cuda", {}) as scope:
        yield scope


def _scope_of_mark(config: pytest.Config, mark: pytest.Mark) -> Scope:
    """Return the scope that a mark asks for.

    Raises:
        TypeError: The mark names no option, or more than one device.
        ValueError: A value is not valid for its option.
    """
    options = dict(mark.kwargs)
    devices = [
        *mark.args,
        *(options.pop(name) for name in ("profile", "target") if name in options),
    ]
    if len(devices) > 1:
        raise TypeError(
            f"pytest.mark.torchdevice names {len(devices)} devices: {devices!r}. Give one profile "
            "such as 'cuda:2', or target=, and the options by name."
        )
    if "target" in mark.kwargs:
        return _scope_with(config, mark.kwargs)
    return _scope_on(config, devices[0] if devices else "cuda", options)


def _scope_on(config: pytest.Config, profile: str, options: Mapping[str, Any]) -> Scope:
    """Return a scope on the simulated devices that a text such as ``"cuda:2"`` names."""
    from torchdevice.simulation import model_lookup, targets

    name = targets.named(profile) or f"{model_lookup.SIMULATED}:{profile}"
    return _scope_with(config, {**options, "target": name})


def _scope_with(config: pytest.Config, options: Mapping[str, Any]) -> Scope:
    """Return a scope with a test's options, and the configuration's for all others."""
    from torchdevice.scope.scope import Scope

    return Scope(_options.chosen(options, **{**_configured(config), **_given(config)}))


def _given(config: pytest.Config) -> dict[str, Any]:
    """Return the options that the command line gives."""
    flags = {
        name: config.getoption(_options.pytest_flag_of(name)) for name in _options.declarations()
    }
    return {name: value for name, value in flags.items() if value is not None}


def _configured(config: pytest.Config) -> dict[str, Any]:
    """Return the options that the configuration file gives."""
    return _options.from_texts(_options.pytest_key_of, config.getini, "Or leave the key out.")


# ---- what pytest says at its end -----------------------------------------------------------------


class _Summary:
    """Reports, for all xdist workers in one scope, the accelerator requests and their handling.

    Args:
        scope: The scope of ``--torchdevice``.
        shown: The value of ``--torchdevice-report``: None for totals, True for the whole report,
            else a file.
    """

    def __init__(self, scope: Scope, shown: str | bool | None):
        self._scope = scope
        self._shown = shown
        self._of_workers: list[Report] = []

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send a worker's report to the process that started it."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            name = session.config.workerinput["workerid"]  # type: ignore[attr-defined]
            output[_MARK] = self._scope.report().renamed(name).to_json(indent=None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Collect a worker's report. A worker that was killed sends none."""
        from torchdevice.report import Report

        sent = getattr(node, "workeroutput", {}).get(_MARK)
        if sent:
            self._of_workers.append(Report.from_dict(json.loads(sent)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the totals, or the report if it was asked for."""
        if hasattr(terminalreporter.config, "workerinput"):  # this is a worker
            return
        report = self._scope.report().joined(self._of_workers)
        if self._shown:
            show_report(self._shown, report)
        elif report.rows and terminalreporter.verbosity >= 0:
            from torchdevice.report import rendering

            terminalreporter.section("torchdevice")
            for line in rendering.heading(report)[1:]:
                terminalreporter.line(printable.line(line))
            terminalreporter.line(
                "  --torchdevice-report shows each line, --torchdevice-report=FILE.html writes a "
                "page"
            )
