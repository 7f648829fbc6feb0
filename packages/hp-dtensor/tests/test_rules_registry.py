"""The registry: what is found, what is refused, and what a call looks like to a rule."""

from collections.abc import Iterator

import pytest
import torch
from hp_dtensor.placements import Partial, Replicate, Shard, StridedShard
from hp_dtensor.rules import (
    OpCall,
    Strategy,
    TensorMeta,
    common_strategies,
    find_rule,
    register_rule,
    registered_ops,
)
from hp_dtensor.rules._registry import aten_ops

aten = torch.ops.aten
LIBRARY = torch.library.Library("hp_registry_test", "DEF")


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)


def _call(op: object, *args: object, out: TensorMeta | None = None, **kwargs: object) -> OpCall:
    first = out or next(arg for arg in args if isinstance(arg, TensorMeta))
    present = kwargs.pop("present", ())
    return OpCall(op, args, kwargs, (first,), kwargs.pop("axis_size", 2), present)


def _strategies(op: object, *args: object, **kwargs: object) -> list[Strategy]:
    entry = find_rule(op)
    assert entry is not None
    return list(entry.strategies(_call(op, *args, **kwargs)))


def _keep(found: OpCall) -> Iterator[Strategy]:
    yield Strategy((Shard(0),), (Shard(0),) * len(found.tensors))


def _define(name: str) -> torch._ops.OpOverload:
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    return getattr(torch.ops.hp_registry_test, name).default


def test_tensors_are_flattened_in_order() -> None:
    """Tensors in lists count one by one, keywords after positions, and None not at all."""
    a, b, c, d = _meta(1), _meta(2), _meta(3), _meta(4)
    found = OpCall(aten.cat.default, ([a, None, b], 0, c), {"out": d, "dim": 1}, (a,), 2)
    assert found.tensors == (a, b, c, d)
    assert found.arg(1, "dim") == 0
    assert found.arg(7, "dim") == 1
    assert found.arg(7, "nothing", "default") == "default"


def test_the_first_result_must_be_a_tensor_to_be_asked_for() -> None:
    """`OpCall.output` says so when it is none."""
    with pytest.raises(ValueError, match="no tensor as its first result"):
        _ = OpCall(aten.equal.default, (_meta(1), _meta(1)), {}, (None,), 2).output


def test_metadata_of_a_tensor() -> None:
    """Shape, stride, dtype and sizes are those of the tensor."""
    found = TensorMeta.of(torch.zeros(2, 3, dtype=torch.int32).t())
    assert found == TensorMeta((3, 2), (1, 3), torch.int32)
    assert (found.ndim, found.numel) == (2, 6)


def test_a_rule_is_registered_once() -> None:
    """A second rule for an operator must be meant."""
    op = _define("once")
    assert find_rule(op) is None
    register_rule(op, _keep)
    with pytest.raises(ValueError, match=r"once.default already has a rule; pass overwrite=True"):
        register_rule(op, _keep)
    register_rule(op, lambda _call: (), overwrite=True)
    assert _strategies(op, _meta(4)) == []
    assert op in registered_ops()


def test_only_operators_have_rules() -> None:
    """A Python function is refused, with what to pass."""
    with pytest.raises(TypeError, match=r"torch.ops.aten.add.Tensor"):
        register_rule(3, _keep)


def test_a_packet_stands_for_its_overloads() -> None:
    """Every overload of the packet gets the rule; `linear=` adds sums and averages."""
    LIBRARY.define("two(Tensor x) -> Tensor")
    LIBRARY.define("two.more(Tensor x, int n) -> Tensor")
    register_rule(torch.ops.hp_registry_test.two, _keep, linear=[[0]])
    for op in (torch.ops.hp_registry_test.two.default, torch.ops.hp_registry_test.two.more):
        found = _strategies(op, _meta(4))
        assert [strategy.outputs for strategy in found] == [
            (Shard(0),),
            (Partial("sum"),),
            (Partial("avg"),),
        ]
    exact = _strategies(torch.ops.hp_registry_test.two.default, _meta(4, dtype=torch.int64))
    assert [strategy.outputs for strategy in exact] == [(Shard(0),), (Partial("sum"),)]


def test_a_rule_that_answers_with_the_wrong_number_is_an_error() -> None:
    """The message counts what came and what was wanted."""
    op = _define("short")
    register_rule(op, lambda _call: [Strategy((Shard(0),), ())])
    with pytest.raises(ValueError, match="0 input and 1 output placements for a call with 1"):
        _strategies(op, _meta(4))


def test_duplicates_are_listed_once_and_in_order() -> None:
    """The first mention of a strategy decides its preference."""
    op = _define("twice")
    first = Strategy((Shard(1),), (Shard(1),))
    second = Strategy((Shard(0),), (Shard(0),))
    register_rule(op, lambda _call: [first, second, first])
    assert _strategies(op, _meta(4, 4)) == [first, second]


def test_names_that_this_torch_lacks_are_skipped() -> None:
    """Neither an unknown operator nor an unknown overload is an error."""
    assert aten_ops("no_such_operator", "mm.no_such_overload") == ()
    assert aten_ops("mm.default") == (aten.mm.default,)


def test_the_pointwise_tag_is_a_rule() -> None:
    """An operator that nobody named is cut by its tag."""
    found = _strategies(aten.special_bessel_j0.default, _meta(4, 2))
    assert found == [Strategy((Shard(d),), (Shard(d),)) for d in (0, 1)]


def test_strided_shards_are_tried_where_they_are_present() -> None:
    """A StridedShard passes through where an input has one, on the dims that belong together."""
    hint = StridedShard(1, split_factor=4)
    found = _strategies(aten.add.Tensor, _meta(3, 8), _meta(8), present=(hint, Replicate()))
    assert Strategy((hint,), (hint, StridedShard(0, split_factor=4))) in found
    without = _strategies(aten.add.Tensor, _meta(3, 8), _meta(8))
    assert set(without) < set(found)


def test_strategies_for_all_coordinates_hold_for_each() -> None:
    """Of several shapes only what holds for each is kept."""
    entry = find_rule(aten.view.default)
    assert entry is not None
    calls = [
        OpCall(aten.view.default, (_meta(rows, 2), [rows * 2]), {}, (_meta(rows * 2),), 2)
        for rows in (2, 1)
    ]
    assert Strategy((Shard(0),), (Shard(0),)) in entry.strategies(calls[0])
    assert Strategy((Shard(0),), (Shard(0),)) not in entry.strategies(calls[1])
    kept = common_strategies(entry, calls)
    assert Strategy((Shard(0),), (Shard(0),)) not in kept
    assert Strategy((Partial("sum"),), (Partial("sum"),)) in kept
    assert common_strategies(entry, []) == ()
