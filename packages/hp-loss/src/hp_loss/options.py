"""The options of a cross entropy, checked once: those of `torch.nn.functional.cross_entropy`, and the z-loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hp_loss.errors import LossOptionError

__all__ = ["LossOptions", "Reduction"]

Reduction = Literal["none", "sum", "mean"]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """How a cross entropy is smoothed, masked and reduced.

    Example:
        >>> from hp_loss.options import LossOptions
        >>> LossOptions(label_smoothing=2.0)
        Traceback (most recent call last):
            ...
        hp_loss.errors.LossOptionError: label_smoothing is 2.0: it must lie between 0.0 and 1.0
    """

    ignore_index: int = -100
    """Targets of this value add nothing to the loss, its gradient, or the mean's denominator."""
    reduction: Reduction = "mean"
    """One loss per token, their sum, or their mean by weight over all tokens on all ranks."""
    label_smoothing: float = 0.0
    """The share of a target's weight that is spread evenly over all classes."""
    z_loss: float = 0.0
    """Factor of the squared logsumexp that is added per valid token; it has no class weight."""

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise LossOptionError(
                f"reduction is {self.reduction!r}: it must be one of {', '.join(map(repr, get_args(Reduction)))}",
                option="reduction",
                value=self.reduction,
            )
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise LossOptionError(
                f"label_smoothing is {self.label_smoothing}: it must lie between 0.0 and 1.0",
                option="label_smoothing",
                value=self.label_smoothing,
            )
        if not (math.isfinite(self.z_loss) and self.z_loss >= 0.0):
            raise LossOptionError(
                f"z_loss is {self.z_loss}: it must be a finite number, 0.0 or more",
                option="z_loss",
                value=self.z_loss,
            )
