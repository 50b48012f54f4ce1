"""Functions of C++ that a compiler of this machine makes while the process runs."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

Loop = Callable[[int, Sequence[int], bytes], None]
"""Takes a number of elements, the addresses of their arrays, and further bytes."""


@functools.cache
def compiled(source: str, name: str) -> Loop:
    """Compile C++, and return its function ``void name(int64_t, void**, const char*)``.

    The process keeps the loaded library.

    Args:
        source: The text of a file, with the function as ``extern "C"``.
        name: The name of the function.

    Raises:
        FileNotFoundError: There is no compiler.
        RuntimeError: The compiler refuses the source. The text is the compiler's.
    """
    with tempfile.TemporaryDirectory(prefix="torchdevice-") as folder:
        written, library = Path(folder, "loop.cpp"), Path(folder, "loop.so")
        written.write_text(source)
        # As torch.utils.cpp_extension finds it, whose import takes long.
        command = [os.environ.get("CXX", "c++"), "-O2", "-std=c++17", "-fPIC", "-shared", "-w"]
        command += [str(written), "-o", str(library)]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(error.stderr.strip()) from None
        function = getattr(ctypes.CDLL(str(library)), name)
    function.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p]
    function.restype = None

    def loop(count: int, addresses: Sequence[int], numbers: bytes) -> None:
        function(count, (ctypes.c_void_p * len(addresses))(*addresses), numbers)

    return loop
