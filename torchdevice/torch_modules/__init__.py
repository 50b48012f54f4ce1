"""Replacements for names of torch: a folder for each part of torch, and in it a file for each of
torch's files.

May import ``calls``, ``errors`` and ``kernel``.
"""
