"""The laws of a placement of one's own, tried out."""

from __future__ import annotations

from hp_dtensor.placements import Cut

__all__ = ["check_placement"]


def check_placement(placement: Cut, parts: int, lengths: range = range(25)) -> None:
    """Try the laws that `Cut.held` has to obey, over an axis of *parts* ranks.

    The intervals of a rank ascend, do not overlap and are not empty; those of all ranks together are every position once;
    an equal placement has an equal hash and says the same; the text of the placement is its own.

    Args:
        placement: what is tried.
        parts: how many ranks.
        lengths: how many positions there are.

    Raises:
        AssertionError: naming the law, the length and the rank.

    Example:
        >>> from hp_dtensor import RaggedShard
        >>> check_placement(RaggedShard((0,), (3, 0, 1)), 3)
    """
    for length in lengths:
        seen: list[int] = []
        for rank in range(parts):
            held = placement.held(length, parts, rank)
            case = f"{placement}, {length} positions, rank {rank} of {parts}: {held}"
            flat = [end for pair in held for end in pair]
            assert all(a < b for a, b in held), f"an empty or reversed interval: {case}"
            assert flat == sorted(flat), f"intervals that overlap or do not ascend: {case}"
            assert held == placement.held(length, parts, rank), f"two answers: {case}"
            seen += [index for start, stop in held for index in range(start, stop)]
        missing = sorted(set(range(length)) - set(seen))
        assert sorted(seen) == list(range(length)), (
            f"every position belongs to one rank: {placement} over {parts} ranks gives of {length} positions "
            f"{sorted(seen)}; {missing} are missing"
        )
    assert placement == placement, f"not equal to itself: {placement}"  # noqa: PLR0124  # a law of __eq__
    assert hash(placement) == hash(placement), f"no hash of its own value: {placement}"
    assert not placement.is_replicate(), f"a cut is no replica: {placement}"
    assert not placement.is_partial(), f"a cut is no addend: {placement}"
