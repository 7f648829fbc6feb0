"""For authors of sharding rules: proof by brute force that a rule is right.

- `_check`    `check_rule`: every strategy of a rule, on every coordinate, against the whole
- `_samples`  tensors of the sizes at which rules go wrong
"""

from hp_dtensor.testing._check import RuleError, Sample, check_rule
from hp_dtensor.testing._samples import SHAPES, draw

__all__ = ["SHAPES", "RuleError", "Sample", "check_rule", "draw"]
