"""What is logged while a test runs."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged(logger: str = "torchdevice", level: int | str = logging.INFO) -> Iterator[list[str]]:
    """Yield messages from this level up that a logger, or one below it, records meanwhile.

    pytest's ``caplog`` does this too, but its plugin takes more time for each test than most tests
    do.
    """
    messages: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, of_name = Keeping(level), logging.getLogger(logger)
    before = of_name.level
    of_name.addHandler(handler)
    of_name.setLevel(level)
    try:
        yield messages
    finally:
        of_name.setLevel(before)
        of_name.removeHandler(handler)
