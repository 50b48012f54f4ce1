"""Replacements for names of torch: a folder for each part of torch, a file for each of its files.

May import ``calls``, ``errors`` and ``kernel``.
"""
