"""Linearity, by hand: which operators may keep addends, and which must not."""

import pytest
import torch
from hp_dtensor.placements import Partial, Placement, Replicate
from hp_dtensor.rules import OpCall, Strategy, TensorMeta, find_rule

aten = torch.ops.aten
P, R = Partial("sum"), Replicate()
X = TensorMeta((4, 3), (3, 1), torch.float32)
WIDE = TensorMeta((4, 3), (3, 1), torch.float64)
I = TensorMeta((4, 3), (3, 1), torch.int64)  # noqa: E741
B = TensorMeta((4, 3), (3, 1), torch.bool)

# operator, arguments, result, and every way in which addends may enter
KEPT = [
    (aten.add.Tensor, (X, X), X, [(P, P)]),
    (aten.add.Tensor, (I, I), I, [(P, P)]),
    (aten.sub.Tensor, (X, WIDE), WIDE, [(P, P)]),
    (aten.add_.Tensor, (X, X), X, [(P, P)]),
    (aten.mul.Tensor, (X, X), X, [(P, R), (R, P)]),
    (aten.mul_.Tensor, (X, X), X, [(P, R)]),
    (aten.mul.Tensor, (X, 2.0), X, [(P,)]),
    (aten.div.Tensor, (X, X), X, [(P, R)]),
    (aten.div.Tensor, (X, 2.0), X, [(P,)]),
    (aten.neg.default, (X,), X, [(P,)]),
    (aten.where.self, (B, X, X), X, [(R, P, P)]),
    (aten.masked_fill.Tensor, (X, B, X), X, [(P, R, P)]),
    (aten.lerp.Scalar, (X, X, 0.5), X, [(P, P)]),
    (aten.lerp.Tensor, (X, X, X), X, [(P, P, R)]),
    (aten.addcmul.default, (X, X, X), X, [(P, P, R), (P, R, P)]),
    (aten.addcdiv_.default, (X, X, X), X, [(P, P, R)]),
    (aten.add.Tensor, (X, 2.0), X, [(P,)]),
    (aten.sub_.Scalar, (X, 2), X, [(P,)]),
    (aten.clone.default, (X,), X, [(P,)]),
    (aten._to_copy.default, (X,), WIDE, [(P,)]),
    (aten.copy_.default, (X, X), X, [(P, P)]),
    (aten.div.Tensor, (I, I), X, [(P, R)]),  # the quotient of integers is none
    (aten.silu_backward.default, (X, X), X, [(P, R)]),
    (aten.threshold_backward.default, (X, X, 0), X, [(P, R)]),
    (aten.zero_.default, (X,), X, [(P,)]),
]
NEVER = [
    (aten.add.Tensor, (I, X), X),
    (aten.mul.Tensor, (B, B), B),
    (aten.relu.default, (X,), X),
    (aten.exp.default, (X,), X),
    (aten.pow.Tensor_Scalar, (X, 2), X),
    (aten.reciprocal.default, (X,), X),
    (aten.maximum.default, (X, X), X),
    (aten.eq.Tensor, (X, X), B),
    (aten.remainder.Tensor, (X, X), X),
    (aten.floor_divide.default, (X, X), X),
    (aten._to_copy.default, (X,), I),
    (aten._to_copy.default, (X,), B),
    (aten._to_copy.default, (I,), X),
    (aten.masked_fill.Scalar, (X, B, 0), X),
    (aten.sgn.default, (X,), X),
]


def _summed(
    op: torch._ops.OpOverload, args: tuple[object, ...], out: TensorMeta, **kwargs: object
) -> list[Strategy]:
    entry = find_rule(op)
    assert entry is not None
    found = entry.strategies(OpCall(op, args, kwargs, (out,), 2))
    return [s for s in found if P in (*s.inputs, *s.outputs)]


@pytest.mark.parametrize("case", range(len(KEPT)), ids=lambda at: f"{at}-{KEPT[at][0]}")
def test_addends_stay_addends_where_the_operator_is_linear(case: int) -> None:
    """Exactly the listed inputs may be Partial, and the result is then."""
    op, args, out, ways = KEPT[case]
    assert _summed(op, args, out) == [Strategy((P,), inputs) for inputs in ways]


@pytest.mark.parametrize("case", range(len(NEVER)), ids=lambda at: f"{at}-{NEVER[at][0]}")
def test_addends_are_combined_first_where_it_is_not(case: int) -> None:
    """No strategy has a sum anywhere."""
    op, args, out = NEVER[case]
    assert _summed(op, args, out) == []


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_a_rounded_quotient_is_not_linear(mode: str) -> None:
    """Rounding each addend is not rounding the sum."""
    assert _summed(aten.div.Tensor_mode, (X, X), X, rounding_mode=mode) == []
    assert _summed(aten.div.Tensor_mode, (X, X), X, rounding_mode=None) != []


def test_integers_have_no_average() -> None:
    """A mean of integers is no integer, so that Partial("avg") of them is never kept."""
    entry = find_rule(aten.add.Tensor)
    assert entry is not None
    for dtype, expected in ((I, False), (X, True)):
        found = entry.strategies(OpCall(aten.add.Tensor, (dtype, dtype), {}, (dtype,), 2))
        assert any(Partial("avg") in strategy.outputs for strategy in found) is expected


@pytest.mark.parametrize(
    ("op", "given", "kept"),
    [
        (aten.neg.default, "max", "min"),
        (aten.neg.default, "min", "max"),
        (aten.clone.default, "max", "max"),
        (aten.clone.default, "product", "product"),
        (aten.maximum.default, "max", "max"),
        (aten.minimum.default, "min", "min"),
    ],
)
def test_extremes_stay_extremes(op: torch._ops.OpOverload, given: str, kept: str) -> None:
    """Maxima and minima pass through what commutes with them, and a minus turns them around."""
    entry = find_rule(op)
    assert entry is not None
    count = 2 if "imum" in str(op) else 1
    inputs: tuple[Placement, ...] = (Partial(given),) * count
    found = entry.strategies(OpCall(op, (X,) * count, {}, (X,), 2))
    assert Strategy((Partial(kept),), inputs) in found


def test_an_extreme_never_passes_where_it_does_not_commute() -> None:
    """The maximum of addends is not the addend of maxima."""
    for op in (aten.add.Tensor, aten.mul.Tensor):
        entry = find_rule(op)
        assert entry is not None
        found = entry.strategies(OpCall(op, (X, X), {}, (X,), 2))
        assert not any(Partial("max") in strategy.inputs for strategy in found)
