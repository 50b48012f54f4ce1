"""The ways to the package that need no line of code: commands, pytest, notebooks, and a variable.

May import ``calls``, ``check``, ``cuda``, ``errors``, ``kernel``, ``native``, ``packages``,
``plan``, ``report``, ``scope``, ``simulation``, ``torch_modules`` and ``version``.
"""
