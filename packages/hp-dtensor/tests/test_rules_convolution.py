"""Convolutions: groups over several axes, and biases that count once."""

import pytest
import torch
from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rules import OpCall, Strategy, TensorMeta, find_rule
from hp_dtensor.testing import Sample, check_rule, draw

aten = torch.ops.aten
R, SUM = Replicate(), Partial("sum")


def _grouped(transposed: bool) -> tuple[object, ...]:
    """Eight channels in four groups, twice as many out."""
    weight = (8, 4, 3) if transposed else (16, 2, 3)
    x, w, b = draw((3, 8, 7), weight, (16,))
    return (x, w, b, [1], [1], [1], transposed, [0], 4)


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_are_cut_over_several_axes(transposed: bool) -> None:
    """The second axis counts the groups that the first one left, forward and backward."""
    args = _grouped(transposed)
    x, w, _, *static = args
    check_rule(aten.convolution.default, [Sample(args)], (2, 4), mesh_shapes=[(2, 2)], at_most=500)
    grad = torch.ones_like(aten.convolution(*args))
    backward = Sample((grad, x, w, [16], *static, [True, True, True]))
    check_rule(
        aten.convolution_backward.default, [backward], (2, 4), mesh_shapes=[(2, 2)], at_most=500
    )


def test_the_bias_counts_once() -> None:
    """Where the channels that go in are cut, the bias is an addend like the product."""
    x, w, b = draw((3, 4, 7), (6, 4, 3), (6,))
    metas = tuple(TensorMeta.of(tensor) for tensor in (x, w, b))
    static = ([1], [0], [1], False, [0], 1)
    out = TensorMeta.of(aten.convolution(x, w, b, *static))
    entry = find_rule(aten.convolution.default)
    assert entry is not None
    found = entry.strategies(OpCall(aten.convolution.default, (*metas, *static), {}, (out,), 2))
    assert found[:3] == (
        Strategy((Shard(0),), (Shard(0), R, R)),
        Strategy((Shard(1),), (R, Shard(0), Shard(0))),
        Strategy((SUM,), (Shard(1), Shard(1), SUM)),
    )


def test_a_single_image_is_not_cut() -> None:
    """Without a batch dim, dims mean something else; the operator runs whole."""
    x, w = draw((4, 7), (6, 4, 3))
    args = (TensorMeta.of(x), TensorMeta.of(w), None, [1], [0], [1], False, [0], 1)
    out = TensorMeta.of(torch.empty(6, 5))
    entry = find_rule(aten.convolution.default)
    assert entry is not None
    assert entry.strategies(OpCall(aten.convolution.default, args, {}, (out,), 2)) == ()
