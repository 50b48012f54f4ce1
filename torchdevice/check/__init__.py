"""``torchdevice check``: predicts the effects of a target from sources, without running them.

May import ``errors``, ``kernel``, ``scope``, ``simulation`` and ``version``.
"""

from torchdevice.check import device_rules, environment_rules, kernel_rules
from torchdevice.check.checker import check_file, check_files, check_source
from torchdevice.check.rule_registry import RULES, Finding, Verdict
from torchdevice.check.target import Target

AREAS = (device_rules, environment_rules, kernel_rules)
"""The files whose rules are applied. Their import has registered the rules."""

__all__ = ["RULES", "Finding", "Target", "Verdict", "check_file", "check_files", "check_source"]
