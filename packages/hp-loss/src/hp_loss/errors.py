"""What a loss refuses, and why.

Each error extends the builtin that a caller of `torch.nn.functional.cross_entropy` catches today
and carries its facts as attributes. All of them are raised before any communication, from facts
that every rank of the vocabulary axis shares, so that the ranks fail together; the one exception
(`TargetRangeError` of a mean over sharded rows) is raised after the reduction, so that the ranks
of the batch axes fail together too.
"""

from __future__ import annotations

__all__ = ["LossError", "LossLayoutError", "LossOptionError", "TargetError", "TargetRangeError"]


class LossError(ValueError):
    """A loss can't be computed from what was given.

    Example:
        >>> from hp_loss import LossError, LossOptionError
        >>> issubclass(LossOptionError, LossError) and issubclass(LossError, ValueError)
        True
    """


class LossOptionError(LossError):
    """An option has a value that means nothing, such as a smoothing outside of [0, 1].

    Attributes:
        option: the name of the option.
        value: what it was.
    """

    def __init__(self, message: str, *, option: str, value: object) -> None:
        super().__init__(message)
        self.option = option
        self.value = value


class LossLayoutError(LossError):
    """The logits, the targets or the weights don't lie on the ranks in a way that the loss can use.

    Attributes:
        placements: the layout that was given, as text; empty for plain tensors.
    """

    def __init__(self, message: str, *, placements: str = "") -> None:
        super().__init__(message)
        self.placements = placements


class TargetError(LossError):
    """The targets' shape or dtype doesn't fit the logits.

    Attributes:
        shape: the shape of the targets.
        logits_shape: the shape of the logits, whole.
    """

    def __init__(
        self, message: str, *, shape: tuple[int, ...], logits_shape: tuple[int, ...]
    ) -> None:
        super().__init__(message)
        self.shape = shape
        self.logits_shape = logits_shape


class TargetRangeError(IndexError):
    """A class index is neither in the vocabulary nor the ignored one.

    It is an `IndexError`, as on one device.

    Attributes:
        count: how many targets are out of range.
        classes: the size of the vocabulary.
    """

    def __init__(self, message: str, *, count: int, classes: int) -> None:
        super().__init__(message)
        self.count = count
        self.classes = classes
