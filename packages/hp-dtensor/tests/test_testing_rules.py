"""`check_rule`: right rules pass, and each way in which a rule can be wrong is found."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hp_dtensor import rules
from hp_dtensor.placements import Partial, Replicate, Shard, StridedShard
from hp_dtensor.rules import LocalCall, OpCall, Strategy, register_rule
from hp_dtensor.rules.reduction import reduction
from hp_dtensor.rules.view import moved
from hp_dtensor.testing import SHAPES, RuleError, Sample, check_rule, draw

LIBRARY = torch.library.Library("hp_rule_test", "DEF")
ops = torch.ops.hp_rule_test


def _define(name: str, schema: str, body: Callable[..., object]) -> torch._ops.OpOverload:
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    return getattr(ops, name).default


def _only(*strategies: Strategy) -> Callable[[OpCall], Iterator[Strategy]]:
    return lambda _call: iter(strategies)


def _one(output: object, *inputs: object) -> Callable[[OpCall], Iterator[Strategy]]:
    return _only(Strategy((output,), inputs))


TABLE = (torch.arange(20.0, dtype=torch.float64).reshape(5, 4),)

WRONG = {
    "a mean of means": (
        "(Tensor x) -> Tensor",
        lambda x: x.mean(),
        _one(Partial("avg"), Shard(0)),
        Sample(TABLE),
        "Tensor-likes are not|Scalars are not close",
    ),
    "an addend through a square": (
        "(Tensor x) -> Tensor",
        torch.square,
        _one(Partial("sum"), Partial("sum")),
        Sample(TABLE),
        "not close",
    ),
    "two addends multiplied": (
        "(Tensor x, Tensor y) -> Tensor",
        torch.mul,
        _one(Partial("sum"), Partial("sum"), Partial("sum")),
        Sample(TABLE * 2),
        "not close",
    ),
    "a constant added to each addend": (
        "(Tensor x) -> Tensor",
        lambda x: x + 1,
        _one(Partial("sum"), Partial("sum")),
        Sample(TABLE),
        "not close",
    ),
    "a cut that a view loses": (
        "(Tensor x) -> Tensor",
        lambda x: x.reshape(-1).clone(),
        _one(Shard(0), Shard(0)),
        Sample(TABLE),
        "are not what|its placement says",
    ),
    "a transposed result": (
        "(Tensor x) -> Tensor",
        lambda x: x.t().contiguous(),
        _one(Shard(0), Shard(0)),
        Sample(TABLE),
        "its placement says",
    ),
    "a broadcast dim that is cut": (
        "(Tensor x, Tensor y) -> Tensor",
        torch.add,
        _one(Shard(0), Shard(0), Shard(0)),
        Sample((torch.ones(4, 3).double(), torch.ones(1, 3).double())),
        "size of tensor|its placement says",
    ),
    "a result that is said to be the same everywhere": (
        "(Tensor x) -> Tensor",
        lambda x: x.sum(),
        _one(Replicate(), Shard(0)),
        Sample(TABLE),
        "replicas differ",
    ),
    "a piece that has no maximum": (
        "(Tensor x) -> Tensor",
        lambda x: x.amax(),
        _one(Partial("max"), Shard(0)),
        Sample(TABLE),
        "amax",
    ),
    "runs in the wrong order": (
        "(Tensor x) -> Tensor",
        torch.clone,
        _one(Shard(0), StridedShard(0, split_factor=2)),
        Sample((torch.arange(8.0, dtype=torch.float64),)),
        "not close|are not what",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_found(what: str) -> None:
    """Each kind of wrong strategy raises, and the message names operator and strategy."""
    schema, body, rule, sample, symptom = WRONG[what]
    name = f"wrong_{list(WRONG).index(what)}"
    op = _define(name, schema, body)
    register_rule(op, rule)
    with pytest.raises(RuleError, match=symptom) as raised:
        check_rule(op, [sample], (2, 3, 4))
    assert name in str(raised.value)
    assert "is wrong for tensors of shapes" in str(raised.value)


def test_a_wrong_local_replacement_is_found() -> None:
    """A replacement that divides by the local count is as wrong as a mean of means."""

    def localize(local: LocalCall) -> Callable[[torch.Tensor], torch.Tensor]:
        count = max(local.input_local_shapes[0][0], 1)
        return lambda x: x.sum() / count / local.mesh_shape[0]

    op = _define("wrong_local", "(Tensor x) -> Tensor", lambda x: x.mean())
    register_rule(op, _one(Partial("sum"), Shard(0)), local=localize)
    with pytest.raises(RuleError, match="not close"):
        check_rule(op, [Sample((torch.arange(5.0, dtype=torch.float64),))])


def test_a_wrong_write_is_found() -> None:
    """What an operator writes in place is compared as well as what it returns."""

    def write(x: torch.Tensor) -> None:
        x.add_(x.sum())

    op = _define("wrong_write", "(Tensor(a!) x) -> ()", write)
    register_rule(op, _only(Strategy((), (Shard(0),))))
    with pytest.raises(RuleError, match="not close"):
        check_rule(op, [Sample(TABLE)])


def test_a_claim_of_linearity_is_checked() -> None:
    """``linear=`` adds strategies, and a false claim is found like a false strategy."""
    op = _define("wrong_linear", "(Tensor x) -> Tensor", torch.abs)
    register_rule(op, _only(), linear=[[0]])
    with pytest.raises(RuleError, match=r"Partial\(sum\)"):
        check_rule(op, [Sample(TABLE)])


def test_a_rule_that_only_fails_on_two_axes_is_found() -> None:
    """A replacement that forgets an axis is right on one axis and wrong on two."""

    def localize(local: LocalCall) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x.sum() / (x.numel() * local.mesh_shape[0])

    op = _define("wrong_on_two", "(Tensor x) -> Tensor", lambda x: x.mean())
    register_rule(op, _one(Partial("sum"), Shard(0)), local=localize)
    even = [Sample((torch.arange(4.0, dtype=torch.float64),))]
    assert check_rule(op, even, (2, 4)) == 2
    with pytest.raises(RuleError, match=r"mesh of \(2, 2\)"):
        check_rule(op, even, (), mesh_shapes=[(2, 2)])


def test_right_rules_pass_and_are_counted() -> None:
    """A right rule of a custom operator passes at all sizes, and says how much was checked."""
    total = _define("total", "(Tensor x) -> Tensor", torch.sum)
    register_rule(total, reduction(lambda _call: "sum"), linear=[[0]])
    samples = [Sample(draw(shape)) for shape in SHAPES]
    # One strategy a dim and a size, and two kinds of Partial for each shape and size.
    dims = sum(map(len, SHAPES))
    assert check_rule(total, samples, split_factors=()) == 3 * (dims + 2 * len(SHAPES))

    turned = _define("turned", "(Tensor x) -> Tensor", lambda x: x.t().contiguous())
    register_rule(turned, moved(lambda _call: ([0, 1], [1, 0])))
    assert check_rule(turned, [Sample(draw((5, 4)))], (2, 8), mesh_shapes=[(2, 3)]) > 10


def test_an_operator_without_a_rule_cannot_be_checked() -> None:
    """The error says how to give it one."""
    op = _define("bare", "(Tensor x) -> Tensor", torch.abs)
    with pytest.raises(LookupError, match="register_rule"):
        check_rule(op, [Sample(TABLE)])


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product", "all"])
def test_addends_are_real(kind: str) -> None:
    """The addends of a Partial combine to the whole, and none of them is the whole."""
    op = _define(f"copied_{kind}", "(Tensor x) -> Tensor", torch.clone)
    register_rule(op, _one(Partial(kind), Partial(kind)))
    dtype = torch.bool if kind == "all" else torch.float64
    sample = Sample(draw((6, 5), dtype=dtype))
    assert check_rule(op, [sample], (2, 3)) == 2

    lost = _define(f"lost_{kind}", "(Tensor x) -> Tensor", torch.clone)
    register_rule(lost, _one(Replicate(), Partial(kind)))
    with pytest.raises(RuleError, match="replicas differ"):
        check_rule(lost, [sample], (2, 3))


def test_the_table_is_public() -> None:
    """Everything that a rule author needs is importable from ``hp_dtensor.rules``."""
    assert {"OpCall", "Strategy", "LocalCall", "register_rule", "find_rule"} <= set(rules.__all__)
