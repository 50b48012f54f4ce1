"""What happened to a program, shown: a reader of the journal. Nothing below knows it."""

from torchdevice.report.report import Report

__all__ = ["Report"]
