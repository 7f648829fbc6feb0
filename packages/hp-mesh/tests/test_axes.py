"""The laws of rank arithmetic, against lists of ranks made by counting."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from hp_mesh import axes
from hp_mesh.axes import Axis, RankMap
from hypothesis import given, settings
from hypothesis import strategies as st

calm = settings(deadline=None)  # a busy machine is no failure
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 96)


def _subset(shape: list[int], data: st.DataObject) -> list[int]:
    """Draw some axes of *shape*, in order."""
    keep = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    return [i for i, kept in enumerate(keep) if kept]


@calm
@given(shapes)
def test_row_major_counts_like_a_tensor(shape: list[int]) -> None:
    """The coordinates of a position are those of the entry of that number in a tensor."""
    grid = torch.arange(math.prod(shape)).view(shape)
    parts = axes.row_major(shape)
    for position in range(math.prod(shape)):
        place = tuple(axis.coordinate(position) for axis in parts)
        assert grid[place] == position


@calm
@given(shapes, st.data())
def test_flatten_walks_the_last_axis_fastest(shape: list[int], data: st.DataObject) -> None:
    """Merged axes visit positions in the order of the flattened sub-grid."""
    picked = _subset(shape, data)
    index = [slice(None) if i in picked else 0 for i in range(len(shape))]
    expected = torch.arange(math.prod(shape)).view(shape)[tuple(index)].flatten().tolist()
    parts = axes.row_major(shape)
    merged = axes.merge([parts[i] for i in picked])
    assert list(merged.offsets()) == expected
    assert merged.size == len(expected)
    assert [merged.offset(c) for c in range(merged.size)] == expected
    assert [merged.coordinate(p) for p in expected] == list(range(merged.size))


@calm
@given(shapes, st.data())
def test_unflatten_undoes_flatten(shape: list[int], data: st.DataObject) -> None:
    """Splitting a merged axis into the sizes it was made of gives the axes back, and the reverse."""
    picked = [axes.row_major(shape)[i] for i in _subset(shape, data)]
    merged = axes.merge(picked)
    parts = axes.split(merged, [axis.size for axis in picked])
    assert parts == tuple(picked)
    assert axes.merge(parts) == merged


@calm
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_split_of_a_plain_axis_is_row_major(sizes: list[int]) -> None:
    """An axis without gaps may be cut into any sizes that multiply to it."""
    whole = axes.merge(axes.row_major([math.prod(sizes)]))
    assert axes.split(whole, sizes) == axes.row_major(sizes)


@calm
@given(shapes, st.data())
def test_base_is_coordinate_zero_of_the_slice(shape: list[int], data: st.DataObject) -> None:
    """The base of a position has 0 on the axes of the slice, and its own coordinates elsewhere."""
    picked = _subset(shape, data)
    grid = torch.arange(math.prod(shape)).view(shape)
    parts = axes.row_major(shape)
    position = data.draw(st.integers(0, math.prod(shape) - 1))
    place = tuple(0 if i in picked else a.coordinate(position) for i, a in enumerate(parts))
    assert axes.base([parts[i] for i in picked], position) == grid[place]


@calm
@given(shapes, st.data())
def test_complement_tiles_the_world(shape: list[int], data: st.DataObject) -> None:
    """The grids that start at the complement's positions cover every rank once."""
    count = math.prod(shape) * data.draw(st.integers(1, 3))
    picked = [axes.row_major(shape)[i] for i in _subset(shape, data)]
    rest = axes.complement(picked, count)
    seen = [start + o for start in rest.offsets() for o in axes.merge(picked).offsets()]
    assert sorted(seen) == list(range(count))


@calm
@given(shapes, st.permutations(range(4)))
def test_axes_of_one_grid_are_disjoint_in_any_order(shape: list[int], order: list[int]) -> None:
    """No two coordinates meet, however the axes are ordered; twice the same axis does."""
    parts = axes.row_major(shape)
    assert axes.disjoint([parts[i] for i in order if i < len(parts)])
    larger = [axis for axis in parts if axis.size > 1]
    for axis in larger:
        assert not axes.disjoint([axis, axes.merge(parts)])


@calm
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), max_size=4))
def test_canonical_digits_mean_the_same(digits: list[tuple[int, int]]) -> None:
    """Making digits canonical changes no position."""
    steps = (range(0, size * stride, stride) for size, stride in digits)
    expected = tuple(map(sum, itertools.product(*steps)))
    assert Axis(axes.canonical(digits)).offsets() == expected


@calm
@given(st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True))
def test_rank_map_finds_what_it_lists(ranks: list[int]) -> None:
    """Position and rank are each other's inverse, for ranges and for lists."""
    rank_map = RankMap.of(ranks)
    assert rank_map.ranks() == tuple(ranks)
    assert [rank_map.position(rank) for rank in ranks] == list(range(len(ranks)))
    assert [rank_map.rank(i) for i in range(len(ranks))] == ranks
    assert rank_map.position(201) is None
    assert rank_map.highest == max(ranks)
    assert rank_map.is_sorted == (ranks == sorted(ranks))
    assert rank_map == RankMap.of(list(ranks))
    assert hash(rank_map) == hash(RankMap.of(list(ranks)))


def test_split_names_what_cannot_be() -> None:
    """A wrong product and a cut across a digit each say so."""
    gapped = axes.merge([axes.row_major((2, 3, 3))[i] for i in (0, 2)])
    with pytest.raises(ValueError, match=re.escape("sizes (2, 2) multiply to 4, the axis has 6")):
        axes.split(gapped, (2, 2))
    with pytest.raises(ValueError, match=re.escape("sizes (3, 2) cut across the axis")):
        axes.split(gapped, (3, 2))
    with pytest.raises(ValueError, match="multiply"):
        axes.split(gapped, (0,))
