"""What happened to a program, shown: a reader of the journal. Nothing below knows it."""

from torchdevice.report.rendering import Report

__all__ = ["Report"]
