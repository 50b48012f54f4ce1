"""Calls a function of a file: ``call.py FILE FUNCTION NAME=TEXT ...``. Of two texts of one name the
last counts.
"""

import runpy
import sys

file, function, *arguments = sys.argv[1:]
runpy.run_path(file)[function](**dict(argument.split("=", 1) for argument in arguments))
