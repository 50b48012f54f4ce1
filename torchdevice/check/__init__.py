"""What of a program a target does otherwise, foretold from its source: the program is neither run nor imported."""

from torchdevice.check import devices, dtypes, operators, surroundings, torch_names
from torchdevice.check.checking import check, check_source
from torchdevice.check.findings import Finding, Verdict
from torchdevice.check.rules import RULES
from torchdevice.check.target import Target

AREAS = (torch_names, devices, operators, dtypes, surroundings)
"""The files whose rules are applied. Their import has registered the rules."""

__all__ = ["RULES", "Finding", "Target", "Verdict", "check", "check_source"]
