"""Plans against a table by hand, and their laws; `test_every_pair` compares them with a shortest-path search."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hp_dtensor import shards
from hp_dtensor.errors import LayoutError, RedistributeError
from hp_dtensor.plan import Link, Plan, make_plan
from hypothesis import given, settings
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

_R, _P = Replicate(), Partial()
Placements = tuple[Placement, ...]


_TABLE: list[tuple[tuple[int, ...], Placements, Placements, list[str], int]] = [
    ((4,), (Shard(0),), (Shard(0),), [], 0),
    ((4,), (Shard(0),), (_R,), ["all_gather"], 3 * 16 * 4),
    ((4,), (_R,), (Shard(1),), ["slice"], 0),
    ((4,), (Shard(0),), (Shard(1),), ["all_to_all"], 12 * 4),
    ((4,), (_P,), (_R,), ["all_reduce"], 96 * 4),
    ((4,), (_P,), (Shard(1),), ["reduce_scatter"], 48 * 4),
    ((4,), (_R,), (_P,), ["make_partial"], 0),
    ((4,), (Shard(0),), (_P,), ["make_partial"], 0),
    ((4,), (Shard(0),), (Partial("avg"),), ["all_gather", "make_partial"], 3 * 16 * 4),
    ((4,), (_P,), (Partial("max"),), ["reduce_scatter", "make_partial"], 48 * 4),
    ((2, 2), (Shard(0), Shard(1)), (Shard(1), Shard(0)), ["all_to_all"], 16 * 4),
    ((2, 2), (Shard(0), Shard(0)), (_R, _R), ["all_gather"], 48 * 4),
    ((2, 2), (Shard(0), _R), (_R, Shard(1)), ["slice", "all_gather"], 16 * 4),
    ((2, 2), (_P, _P), (_R, _R), ["all_reduce"], 96 * 4),
    ((2, 2), (_P, _P), (Shard(0), Shard(1)), ["reduce_scatter"], 48 * 4),
    ((2, 2), (_P, Shard(0)), (_R, Shard(0)), ["all_reduce"], 32 * 4),
    ((2, 2), (_P, Shard(0)), (_P, Shard(1)), ["all_to_all"], 16 * 4),
    ((2, 2), (_P, _R), (_P, _P), ["make_partial"], 0),
    (
        (2, 2),
        (StridedShard(0, split_factor=2), Shard(0)),
        (Shard(0), Shard(0)),
        ["all_to_all"],
        16 * 4,
    ),
    ((2, 2), (StridedShard(0, split_factor=2), Shard(0)), (_R, Shard(0)), ["all_gather"], 16 * 4),
    ((1, 4), (_P, Shard(0)), (Shard(1), Shard(0)), [], 0),
]


@pytest.mark.parametrize(("mesh", "source", "target", "kinds", "nbytes"), _TABLE)
def test_plans_of_an_8_by_8_tensor(
    mesh: tuple[int, ...], source: Placements, target: Placements, kinds: list[str], nbytes: int
) -> None:
    """Steps and bytes, counted by hand."""
    plan = make_plan((8, 8), 4, mesh, source, target)
    assert ([step.kind for step in plan.steps], plan.bytes) == (kinds, nbytes), plan


_ENTRIES = st.sampled_from([_R, Shard(0), Shard(1), _P, StridedShard(0, split_factor=2)])


@st.composite
def _cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Placements, Placements]:
    shape = (draw(st.integers(0, 9)), draw(st.integers(1, 9)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    source, target = (tuple(draw(_ENTRIES) for _ in mesh) for _ in range(2))
    return shape, mesh, source, target


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_steps_join_source_to_target(
    case: tuple[tuple[int, ...], tuple[int, ...], Placements, Placements],
) -> None:
    """Each step starts with what the one before left, and the ends hold what the layouts hold."""
    shape, mesh, source, target = case
    plan = make_plan(shape, 2, mesh, source, target)
    ends = [(step.source, step.target) for step in plan.steps]
    first, last = (ends[0][0], ends[-1][1]) if ends else (source, source)
    for where in itertools.product(*(range(n) for n in mesh)):
        for before, after in itertools.pairwise(ends):
            assert shards.local_box(shape, mesh, where, before[1]) == shards.local_box(
                shape, mesh, where, after[0]
            )
        assert shards.local_box(shape, mesh, where, first) == shards.local_box(
            shape, mesh, where, source
        )
        assert shards.local_box(shape, mesh, where, last) == shards.local_box(
            shape, mesh, where, target
        )
    live = [axis for axis, n in enumerate(mesh) if n > 1]
    assert [last[a].is_partial() for a in live] == [target[a].is_partial() for a in live]


@settings(max_examples=100, deadline=None)
@given(_cases())
def test_local_steps_are_free_and_nothing_moves_for_equal_layouts(
    case: tuple[tuple[int, ...], tuple[int, ...], Placements, Placements],
) -> None:
    """Slices and made addends cost nothing; a layout to itself has no steps."""
    shape, mesh, source, target = case
    for step in make_plan(shape, 2, mesh, source, target).steps:
        if step.kind in {"slice", "make_partial"}:
            assert (step.bytes, step.seconds) == (0, 0.0)
        else:
            assert len(step.axes) > 0
    assert make_plan(shape, 2, mesh, source, source) == Plan(())


def test_links_decide_where_bytes_alone_do_not() -> None:
    """A slow axis is spared: one large collective inside beats many bytes less across."""
    fast, slow = Link(1e-6, 1e11), Link(1e-3, 1e8)
    source, target = (_R, _P), (_R, _R)
    cheap = make_plan((1024, 1024), 4, (8, 8), source, target)
    quick = make_plan((1024, 1024), 4, (8, 8), source, target, (slow, fast))
    assert [step.kind for step in cheap.steps] == ["slice", "all_reduce", "all_gather"]
    assert [step.kind for step in quick.steps] == ["all_reduce"]
    assert quick.bytes > cheap.bytes
    assert quick.seconds == pytest.approx(1e-6 + quick.bytes / 1e11)


def test_a_plan_prints_its_steps() -> None:
    """One line a step, with axes, layouts and bytes."""
    plan = make_plan((8, 8), 4, (2, 2), (Shard(0), _R), (_R, Shard(1)))
    assert str(plan).splitlines() == [
        "slice axes (): (S(0), R) -> (S(0), S(1)), 0 bytes",
        "all_gather axes (0,): (S(0), S(1)) -> (R, S(1)), 64 bytes",
    ]
    assert str(make_plan((8,), 4, (2,), (_R,), (_R,))) == "nothing to do"


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ((_R,), LayoutError, r"1 placements .* for a mesh of shape \(2, 2\); give one placement"),
        ((_R, Shard(2)), LayoutError, r"a tensor of shape \(8, 8\) has no dim 2"),
        ((_R, Shard(-1)), LayoutError, r"a tensor of shape \(8, 8\) has no dim -1"),
        ((Partial("sum"), Partial("max")), RedistributeError, "addends of the kinds max, sum"),
    ],
)
def test_layouts_that_cannot_be_are_refused(
    source: Placements, error: type[Exception], text: str
) -> None:
    """As source and as target."""
    with pytest.raises(error, match=text):
        make_plan((8, 8), 4, (2, 2), source, (_R, _R))
    with pytest.raises(error, match=text):
        make_plan((8, 8), 4, (2, 2), (_R, _R), source)
