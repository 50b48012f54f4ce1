"""Entering and leaving a scope, choosing its target, and the options of all features.

May import ``calls``, ``errors``, ``kernel``, ``random_numbers``, ``report``, ``simulation``,
``torch_modules``, ``triton_kernels`` and ``verify``.
"""
