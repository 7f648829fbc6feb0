"""For authors of sharding rules: proof by brute force that a rule is right.

- `_check`    `check_rule`: every strategy of a rule, on every coordinate, against the whole
- `_samples`  arguments of many shapes to check a rule with
"""

from hp_dtensor.testing._check import RuleError, Sample, check_rule

__all__ = ["RuleError", "Sample", "check_rule"]
