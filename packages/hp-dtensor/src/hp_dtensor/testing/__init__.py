"""For authors of sharding rules and of programs: proof by brute force that they are right.

- `_check`    `check_rule`: every strategy of a rule, on every coordinate, against the whole
- `_program`  `check_program`: a program on distributed tensors against the same on plain ones
- `_samples`  tensors of the sizes at which rules go wrong
"""

from hp_dtensor.testing._check import RuleError, Sample, check_rule
from hp_dtensor.testing._placement import check_placement
from hp_dtensor.testing._program import Outcome, check_program, draw_layouts
from hp_dtensor.testing._samples import SHAPES, draw

__all__ = [
    "SHAPES",
    "Outcome",
    "RuleError",
    "Sample",
    "check_placement",
    "check_program",
    "check_rule",
    "draw",
    "draw_layouts",
]
