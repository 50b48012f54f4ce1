"""The program's use of the accelerator's driver, which a forked process cannot continue."""

from __future__ import annotations

import os
from collections.abc import Callable

from torchdevice.kernel.devices.supplied import SuppliedDevice

_FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method"
)


class DriverUse:
    """The program's use of the driver, in the process that was the first to use it.

    Args:
        supplied: The target's part for the driver.
        begun: Called at the first use.

    Attributes:
        user: The id of the process that was the first to use the accelerator; None before one has.
    """

    def __init__(self, supplied: SuppliedDevice, begun: Callable[[], None]):
        self.user: int | None = None
        self._supplied = supplied
        self._begun = begun
        self._initialized = False

    @property
    def is_initialized(self) -> bool:
        """Whether the program has used the accelerator, or chosen one, in this process."""
        # The process is compared too: a forked child inherits both values, and has not used the
        # accelerator itself. Last, because it is a call.
        return self._initialized and self.user == os.getpid()

    def initialize(self) -> None:
        """Note the accelerator's first use in this process, and run CUDA's checks of it.

        Raises:
            RuntimeError: The process was forked from one that had used the accelerator. The text is
                torch's.
            ValueError: Settings in the environment are wrong, see
                :meth:`SuppliedDevice.initialize`.
        """
        # As `is_initialized` does it, without its frame.
        if self._initialized and self.user == os.getpid():
            return
        if self.is_in_bad_fork:
            raise RuntimeError(_FORKED)
        self._supplied.initialize()
        # Before `_initialized`, which is read together with the process id that this sets.
        self.touch()
        self._initialized = True
        self._begun()

    def touch(self) -> None:
        """Note that the program called the driver: a fork of the process can no longer do so."""
        if self.user is None:
            self.user = os.getpid()

    @property
    def is_in_bad_fork(self) -> bool:
        """Whether this process was forked from one that used the accelerator."""
        # Process ids are compared last: this is a call, and the others are attributes.
        return (
            self.user is not None
            and not self._supplied.shared_by_processes
            and self.user != os.getpid()
        )

    def forget(self) -> None:
        """Be as before the first use, as a new process is."""
        self.user, self._initialized = None, False
