"""The package's logger, its output, and the environment variables that configure it."""

from __future__ import annotations

import functools
import logging
import os
import threading
import zlib

from torchdevice.kernel.python import printable, run_folder
from torchdevice.kernel.python.environment import SAID, keys_of, set_of, switched_on

logger = logging.getLogger("torchdevice")

LEVEL = "TORCHDEVICE_LOG"
FILE = "TORCHDEVICE_LOG_FILE"

_VARIABLES = keys_of((LEVEL, FILE))


class _Format(logging.Formatter):
    """Writes messages so that a name in them commands no terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text."""
        return printable.lines(super().format(record))


_FORMAT = _Format("torchdevice: %(message)s")


class _VariableFileHandler(logging.FileHandler):
    """The handler that ``TORCHDEVICE_LOG_FILE`` asks for."""


# The class of `logging.lastResort`, which a program may have set to None.
class _Stderr(logging._StderrHandler):  # type: ignore[name-defined]
    """Prints records nobody else handles; a program that configures logging decides itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to print a record."""
        others = any(handler is not self for handler in logger.handlers)
        return not (others or logging.getLogger().handlers) and bool(super().filter(record))


_configuring = threading.RLock()


def configure_logging() -> None:
    """Set up the logger by ``TORCHDEVICE_LOG`` (a level) and ``TORCHDEVICE_LOG_FILE`` (a path).

    Each outermost entry of a scope calls this. A handler that is attached already is not attached
    again.

    Raises:
        ValueError: ``TORCHDEVICE_LOG`` is not the name of a level, or the file cannot be written.
    """
    variables = set_of(_VARIABLES)
    level, path = variables.get(LEVEL), variables.get(FILE)
    if not level and not path and logger.handlers:
        return
    with _configuring:
        number = logging.getLevelName((level or "INFO").upper())
        if not isinstance(number, int):
            raise ValueError(
                f"{LEVEL}={level!r} is not a level. Use DEBUG, INFO, WARNING or ERROR."
            )
        files = [
            each.baseFilename for each in logger.handlers if isinstance(each, _VariableFileHandler)
        ]
        if path and os.path.abspath(path) not in files:
            _attach(_file_handler(path))
        if level or path:
            logger.setLevel(number)
        if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
            _attach(_Stderr())


def _file_handler(path: str) -> logging.Handler:
    try:
        return _VariableFileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(
            f"{FILE}={path!r} cannot be written: {error.strerror}. Name a file in a folder that is "
            "there, or unset the variable."
        ) from None


def _attach(handler: logging.Handler) -> None:
    handler.setFormatter(_FORMAT)
    logger.addHandler(handler)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, once in a run: not in processes whose parent or sibling did."""
    if claim(message):
        logger.warning(message)


def claim(message: str) -> bool:
    """Return whether this process is the first of its run to log a message."""
    name = f"{zlib.crc32(message.encode()):08x}"
    before = os.environ.get(SAID, "").split()
    if name in before or not run_folder.claim(name):
        return False
    if switched_on():  # or child processes have nothing to say
        os.environ[SAID] = " ".join([*before, name])
    return True
