"""Options that mean nothing are refused when they are given."""

from __future__ import annotations

import math

import pytest
from hp_loss import LossOptionError
from hp_loss.options import LossOptions


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "reduction",
            "average",
            "reduction is 'average': it must be one of 'none', 'sum', 'mean'",
        ),
        ("label_smoothing", -0.1, "label_smoothing is -0.1: it must lie between 0.0 and 1.0"),
        ("label_smoothing", 1.5, "label_smoothing is 1.5: it must lie between 0.0 and 1.0"),
        ("label_smoothing", math.nan, "label_smoothing is nan: it must lie between 0.0 and 1.0"),
        ("z_loss", -1.0, "z_loss is -1.0: it must be a finite number, 0.0 or more"),
        ("z_loss", math.inf, "z_loss is inf: it must be a finite number, 0.0 or more"),
    ],
)
def test_a_meaningless_option_is_named_with_its_value(
    option: str, value: object, message: str
) -> None:
    """The error says which option, what it was and what it may be, and carries both."""
    with pytest.raises(LossOptionError) as caught:
        LossOptions(**{option: value})  # type: ignore[arg-type]
    assert str(caught.value) == message
    assert (caught.value.option, repr(caught.value.value)) == (option, repr(value))


@pytest.mark.parametrize("smoothing", [0.0, 1.0])
def test_the_ends_of_the_range_of_smoothing_are_legal(smoothing: float) -> None:
    """No smoothing and nothing but smoothing both mean something."""
    assert LossOptions(label_smoothing=smoothing).label_smoothing == smoothing
