"""Triton's kernels on targets for which Triton makes no code, by Triton's own interpreter.

The folder is imported when the program imports ``triton``. ``launching.py`` runs the instances of a
grid one after the other. ``kernel_functions.py`` turns a kernel's source into a function of Python,
whose operations are those of ``numpy_builder.py``. ``memory_checks.py`` looks at each address, or
at the bounds of those that ``outer_sums.py`` has kept as terms.

May import ``calls``, ``errors``, ``kernel``, ``simulation`` and ``torch_modules``.
"""
