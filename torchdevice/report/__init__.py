"""Reports on a program's run, made from the journal.

May import ``kernel`` and ``version``.
"""

from torchdevice.report.rendering import Report

__all__ = ["Report"]
