"""Views: a cut is kept exactly where the pieces before and after are the same elements."""

import itertools

import pytest
import torch
from hp_dtensor import shards
from hp_dtensor.placements import Placement, Shard, StridedShard
from hp_dtensor.rules.view import cuts, image
from hypothesis import given, settings
from hypothesis import strategies as st

S = Shard


def _strided(dim: int, factor: int) -> Placement:
    return StridedShard(dim, split_factor=factor)


@pytest.mark.parametrize(
    ("source", "target", "before", "after", "size"),
    [
        # flattening: the first dim is easy, the second leaves runs, the last does not mix
        ((2, 6, 4), (12, 4), S(0), S(0), 2),
        ((2, 6, 4), (12, 4), S(1), _strided(0, 2), 3),
        ((2, 5, 4), (10, 4), S(1), _strided(0, 2), 2),
        ((2, 6, 4), (12, 4), S(2), S(1), 4),
        ((2, 3, 6, 4), (36, 4), S(2), _strided(0, 6), 2),
        # and back
        ((12, 4), (2, 6, 4), S(0), S(0), 2),
        ((12, 4), (2, 6, 4), _strided(0, 2), S(1), 3),
        ((10, 4), (2, 5, 4), _strided(0, 2), S(1), 2),
        ((12, 4), (2, 6, 4), S(1), S(2), 4),
        # heads
        ((3, 8), (3, 4, 2), S(1), S(1), 4),
        ((3, 8), (3, 4, 2), S(1), S(1), 2),
        ((3, 8), (3, 2, 4), S(1), None, 4),
        # dims of size 1 come and go
        ((5, 4), (1, 5, 1, 4), S(0), S(1), 2),
        ((1, 5, 1, 4), (5, 4), S(3), S(1), 3),
        # uneven: only if the cuts fall on the same elements
        ((6, 256), (1536,), S(0), None, 4),
        ((6, 256), (1536,), S(0), S(0), 3),
        ((5, 2), (10,), S(0), S(0), 3),
        ((5, 2), (10,), S(0), None, 2),
        ((3, 3), (9,), S(0), S(0), 4),
        ((7,), (7, 1), S(0), S(0), 4),
        # a run that a new dim takes apart further
        ((24,), (2, 3, 4), _strided(0, 2), None, 4),
        ((24,), (2, 3, 4), _strided(0, 6), S(2), 2),
        ((24,), (4, 6), _strided(0, 2), None, 4),
        ((24,), (2, 12), _strided(0, 2), S(1), 4),
        # the same shape keeps anything
        ((5, 4), (5, 4), _strided(0, 3), _strided(0, 3), 2),
    ],
)
def test_what_a_cut_becomes(
    source: tuple[int, ...],
    target: tuple[int, ...],
    before: Placement,
    after: Placement | None,
    size: int,
) -> None:
    """Each case by hand; None means that no placement describes the pieces."""
    assert image(source, target, before, size) == after


def _pieces(shape: tuple[int, ...], place: Placement, size: int) -> list[list[int]]:
    """Which elements, by row-major position, each coordinate holds; computed on the elements."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    dim = place.dim  # type: ignore[attr-defined]
    factor = getattr(place, "split_factor", 1)
    found = []
    for coordinate in range(size):
        runs = shards.local_intervals(shape[dim], ((size, coordinate, factor),))
        index = [at for start, end in runs for at in range(start, end)]
        found.append(
            whole.index_select(dim, torch.tensor(index, dtype=torch.int64)).flatten().tolist()
        )
    return found


def _factorings(count: int) -> list[tuple[int, ...]]:
    found = [(count,), (1, count), (count, 1)]
    for first in range(2, count):
        if count % first == 0:
            found.append((first, count // first))
            rest = count // first
            found += [
                (first, second, rest // second) for second in range(2, rest) if rest % second == 0
            ]
    return found


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([6, 8, 10, 12, 16, 24, 30]), st.integers(2, 5), st.data())
def test_the_pieces_are_the_same_elements(count: int, size: int, data: st.DataObject) -> None:
    """Law: the image describes on every coordinate the elements that were there, in order."""
    shapes = _factorings(count)
    source, target = data.draw(st.sampled_from(shapes)), data.draw(st.sampled_from(shapes))
    dim = data.draw(st.integers(0, len(source) - 1))
    factor = data.draw(st.sampled_from([1, 1, 2, 3, 4]))
    place = S(dim) if factor == 1 else _strided(dim, factor)
    found = image(source, target, place, size)
    if found is not None:
        assert _pieces(target, found, size) == _pieces(source, place, size)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([6, 8, 12, 16, 24]), st.integers(2, 4), st.data())
def test_no_plain_cut_is_missed(count: int, size: int, data: st.DataObject) -> None:
    """Law: if some plain Shard of the new shape has the pieces of the old one, one is found.

    A cut of a dim of size 1 leaves everything on one coordinate, and is not looked after.
    """
    shapes = _factorings(count)
    source, target = data.draw(st.sampled_from(shapes)), data.draw(st.sampled_from(shapes))
    dim = data.draw(st.sampled_from([d for d, extent in enumerate(source) if extent > 1]))
    wanted = _pieces(source, S(dim), size)
    fits = [S(d) for d in range(len(target)) if _pieces(target, S(d), size) == wanted]
    found = image(source, target, S(dim), size)
    if fits:
        assert found is not None
        assert _pieces(target, found, size) == wanted


@pytest.mark.parametrize(("size", "count"), list(itertools.product((0, 1, 3, 5, 8), (1, 2, 3, 4))))
def test_cuts_are_those_of_chunk(size: int, count: int) -> None:
    """The ends agree with ``torch.chunk``, trailing pieces being empty."""
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(count)] if size else []
    ends = list(itertools.accumulate(chunks))
    ends += [size] * (count - len(ends))
    assert list(cuts(size, count)) == ends
