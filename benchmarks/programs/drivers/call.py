"""Calls a file's function: ``call.py FILE FUNCTION NAME=TEXT ...``. The last text counts."""

import runpy
import sys

file, function, *arguments = sys.argv[1:]
runpy.run_path(file)[function](**dict(argument.split("=", 1) for argument in arguments))
