"""Reports of what happened to a program, made from the journal.

May import ``kernel`` and ``version``.
"""

from torchdevice.report.rendering import Report

__all__ = ["Report"]
