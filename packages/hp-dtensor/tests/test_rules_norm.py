"""Normalisation: which gradients are sums, for the kernel that a CPU cannot run."""

import torch
from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rules import OpCall, Strategy, TensorMeta, find_rule

aten = torch.ops.aten
R, SUM = Replicate(), Partial("sum")


def _meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)


def test_the_gradient_of_a_fused_rms_norm() -> None:
    """A cut of an outer dim leaves the weight's gradient a sum; normalised dims are never cut."""
    entry = find_rule(aten._fused_rms_norm_backward.default)
    assert entry is not None
    x, weight, scale = _meta(2, 5, 3), _meta(3), _meta(2, 5, 1)
    args = (x, x, [3], scale, weight, [True, True])
    call = OpCall(aten._fused_rms_norm_backward.default, args, {}, (x, weight), 2)
    assert set(entry.strategies(call)) == {
        Strategy((Shard(d), SUM), (Shard(d), Shard(d), Shard(d), R)) for d in (0, 1)
    }


def test_a_gradient_that_is_not_wanted_has_no_placement() -> None:
    """With a mask the missing result is None, and so is its placement."""
    entry = find_rule(aten.native_layer_norm_backward.default)
    assert entry is not None
    x, weight, scale = _meta(2, 5, 3), _meta(3), _meta(2, 5, 1)
    args = (x, x, [3], scale, scale, weight, None, [True, False, False])
    call = OpCall(aten.native_layer_norm_backward.default, args, {}, (x, None, None), 2)
    assert {strategy.outputs for strategy in entry.strategies(call)} == {
        (Shard(0), None, None),
        (Shard(1), None, None),
    }
