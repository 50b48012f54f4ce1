"""The package's logger, and the two environment variables that configure it."""

from __future__ import annotations

import functools
import logging
import os
import threading

logger = logging.getLogger("torchdevice")


class _VariableFileHandler(logging.FileHandler):
    """The handler that ``TORCHDEVICE_LOG_FILE`` asks for."""


_configuring = threading.RLock()


def configure_logging() -> None:
    """Apply ``TORCHDEVICE_LOG`` (a level name) and ``TORCHDEVICE_LOG_FILE`` (a path) to the package's logger.

    Each outermost entry of a scope calls this. It does nothing where neither variable is set, and attaches no handler
    twice.

    Raises:
        ValueError: ``TORCHDEVICE_LOG`` is not the name of a logging level.
    """
    level = os.environ.get("TORCHDEVICE_LOG")
    path = os.environ.get("TORCHDEVICE_LOG_FILE")
    if not level and not path:
        return
    with _configuring:
        number = logging.getLevelName((level or "INFO").upper())
        if not isinstance(number, int):
            raise ValueError(f"TORCHDEVICE_LOG={level!r} is not a level. Use DEBUG, INFO, WARNING or ERROR.")
        logger.setLevel(number)
        formatter = logging.Formatter("%(levelname)s torchdevice: %(message)s")
        if path and not _writes_to(os.path.abspath(path)):
            _attach(_VariableFileHandler(path, delay=True), formatter)
        if level and not path and not logger.handlers and not logging.getLogger().handlers:
            _attach(logging.StreamHandler(), formatter)


def _writes_to(path: str) -> bool:
    return any(isinstance(each, _VariableFileHandler) and each.baseFilename == path for each in logger.handlers)


def _attach(handler: logging.Handler, formatter: logging.Formatter) -> None:
    handler.setFormatter(formatter)
    logger.addHandler(handler)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning; each text is logged once in a process."""
    logger.warning(message)
