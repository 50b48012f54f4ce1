"""How torch's calls are seen, and how each is rewritten.

``mode.py`` and ``wrap.py`` are the two engines. ``lookup.py`` finds the rewriter of a call.
``kept_functions.py`` is about functions that were kept before a scope. ``lacking/`` makes good what
a target lacks: dtypes, kernels, precision.

May import ``errors`` and ``kernel``.
"""
