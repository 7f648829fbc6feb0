"""Strict mode: what would communicate raises, and at least one fix that it offers works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    Fix,
    ImplicitCommunicationError,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    strict,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd

R, P = Replicate(), Partial()
Program = Callable[..., object]

# A program, and for each of its tensors (of shape (4, 6), (6, 4) or (6,) by its letter) a layout.
IMPLICIT: dict[str, tuple[Program, list[tuple[str, object]]]] = {
    "product of a cut row and a cut row": (torch.mm, [("a", Shard(0)), ("b", Shard(0))]),
    "product of addends and a cut column": (torch.mm, [("a", P), ("b", Shard(1))]),
    "product of addends and addends": (torch.mm, [("a", P), ("b", P)]),
    "sum of tensors cut differently": (torch.add, [("a", Shard(0)), ("a", Shard(1))]),
    "product of sums": (torch.mul, [("a", P), ("a", P)]),
    "relu of addends": (torch.relu, [("a", P)]),
    "exponential of addends": (torch.exp, [("a", P)]),
    "division by addends": (torch.div, [("a", R), ("a", P)]),
    "sort of a cut dim": (lambda x: torch.sort(x, 1), [("a", Shard(1))]),
    "running sum of a cut dim": (lambda x: torch.cumsum(x, 0), [("a", Shard(0))]),
    "softmax of a cut dim": (lambda x: torch.softmax(x, 1), [("a", Shard(1))]),
    "softmax of addends": (lambda x: torch.softmax(x, 1), [("a", P)]),
    "layer norm of a cut dim": (lambda x: F.layer_norm(x, (6,)), [("a", Shard(1))]),
    "variance of a cut dim": (lambda x: x.var(1), [("a", Shard(1))]),
    "norm of addends": (torch.linalg.vector_norm, [("a", P)]),
    "inverse of a cut matrix": (torch.linalg.inv, [("c", Shard(0))]),
    "turning around a cut dim": (lambda x: x.flip(0), [("a", Shard(0))]),
    "concatenation along a cut dim": (
        lambda x, y: torch.cat([x, y]),
        [("a", Shard(0)), ("a", Shard(0))],
    ),
    "one row of a cut dim": (lambda x: x[2], [("a", Shard(0))]),
    "merging dims around a cut": (lambda x: x.reshape(3, 8), [("a", Shard(1))]),
    "value of a sum": (lambda x: x.item(), [("s", P)]),
    "comparison of cut tensors": (torch.equal, [("a", Shard(0)), ("a", Shard(1))]),
    "largest elements of a cut dim": (lambda x: x.topk(2, 1), [("a", Shard(1))]),
    "positions that are not zero": (torch.nonzero, [("a", Shard(0))]),
    "update of tensors by lists": (
        lambda x: torch._foreach_sqrt([x.abs()]),
        [("a", P)],
    ),
}
SHAPES = {"a": (4, 6), "b": (6, 4), "c": (4, 4), "v": (6,), "s": ()}


def _flat(value: object) -> list[object]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _whole(value: object) -> object:
    return value.full_tensor() if isinstance(value, DTensor) else value


@spmd(world_size=2)
@pytest.mark.parametrize("name", IMPLICIT)
def test_an_offered_fix_works(name: str) -> None:
    """The error names the operator; its first fix, written out, gives the right value and sends nothing more."""
    program, layouts = IMPLICIT[name]
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = [torch.randn(SHAPES[letter]) for letter, _ in layouts]
    given = [
        distribute_tensor(x, mesh, [layout])  # type: ignore[list-item]
        for x, (_, layout) in zip(whole, layouts, strict=True)
    ]
    with strict(), pytest.raises(ImplicitCommunicationError, match="redistribute tensor") as found:
        program(*given)
    assert found.value.op.startswith("aten.")
    fixes = found.value.fixes
    assert 1 <= len(fixes) <= 3
    worked = 0
    for fix in fixes:
        assert isinstance(fix, Fix)
        args, _ = fix.apply(given)
        with strict(), CommDebugMode() as comm:
            results = program(*args)
        assert comm.get_total_counts() == 0
        for got, want in zip(_flat(results), _flat(program(*whole)), strict=True):
            torch.testing.assert_close(_whole(got), want)
        worked += 1
    assert worked


@spmd(world_size=4)
def test_the_cheapest_fix_comes_first_with_its_price() -> None:
    """Of two arguments the smaller one moves; the price is in bytes and collectives, forward and backward."""
    mesh = init_device_mesh("cpu", (4,))
    big = distribute_tensor(torch.ones(64, 8), mesh, [Shard(0)])
    small = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    with strict(), pytest.raises(ImplicitCommunicationError) as found:
        big @ small
    first = found.value.fixes[0]
    assert isinstance(first, Fix)
    assert (first.moves, first.collectives) == (((1, (R,)),), ("all_gather",))
    assert first.bytes == 3 * 2 * 8 * 4
    assert first.backward == ()
    assert "1. redistribute tensor argument 1 to [Replicate()] (all_gather, 192 bytes" in str(
        found.value
    )


@spmd(world_size=2)
def test_what_is_written_out_may_communicate() -> None:
    """Redistributing, gathering and leaving are no implicit communication."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    with strict():
        assert x.redistribute(placements=[R]).sum().item() == 28
        assert x.full_tensor().sum() == 28
        assert (x + 1).sum().full_tensor() == 36
