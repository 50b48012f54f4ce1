"""Counts from a running program: rewritten calls by line, and findings of ``verify=``."""
