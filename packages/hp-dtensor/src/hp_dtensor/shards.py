"""Which global indices a mesh coordinate holds: the one shard rule, in integers alone.

Placements apply left to right over the mesh axes. For each tensor dim a coordinate holds an ascending list of half-open
intervals, at first the whole dim. ``Shard(d)`` cuts the list as ``torch.chunk`` cuts a tensor (pieces of the ceiling, the
last ones short or empty) and keeps this coordinate's piece; ``StridedShard(d, split_factor)`` first cuts it into
``split_factor`` chunks, cuts each of those over the axis, and keeps this coordinate's piece of each. Everything else keeps
the list. Parameter shards, factories, redistribution, vocabulary ranges, checkpoints and random numbers all ask here.

Formulas for sizes and offsets were not taken: they exist for even shards only, and each further case (uneven, empty,
strided) is one more formula to get wrong. Lists are short and the functions are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

from torch import SymInt

from hp_dtensor.placements import Cut, Placement, Shard, StridedShard, folded, folded_dims

__all__ = [
    "Box",
    "Intervals",
    "Split",
    "axes_of",
    "cached",
    "local_box",
    "local_intervals",
    "local_shape",
    "local_shape_and_offset",
]

Intervals = tuple[tuple[int, int], ...]
"""Half-open intervals of global indices: ascending, not empty, no two adjacent."""

Box = tuple[Intervals, ...]
"""One list of intervals for each tensor dim; the indices held are their product."""

Split = tuple[int, int, "int | Cut"]
"""How one axis cuts a dim: its size, the coordinate on it, the split factor (1 for ``Shard``) or a placement of its own."""


P = ParamSpec("P")
T = TypeVar("T")


def cached(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Keep the last *maxsize* answers of a function of sizes; one with symbolic sizes is computed at each call.

    Under a compiler that lets shapes vary, sizes are expressions. They have no hash, and what they give is an expression
    again, which is worth keeping only in the graph.

    Example:
        >>> half = cached(8)(lambda size: size // 2)
        >>> half(10), half(10)
        (5, 5)
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = lru_cache(maxsize=maxsize)(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return known(*args, **kwargs)  # type: ignore[arg-type]  # sizes are hashable, but for symbolic ones
            except TypeError:
                if not _symbolic((*args, *kwargs.values())):
                    raise
            return function(*args, **kwargs)

        return call

    return decorate


def _symbolic(values: Sequence[object]) -> bool:
    return any(
        _symbolic(value) if isinstance(value, tuple) else isinstance(value, SymInt)
        for value in values
    )


@cached(1 << 16)
def local_intervals(size: int, splits: tuple[Split, ...]) -> Intervals:
    """The indices of a dim that are left after *splits*, first to last.

    Args:
        size: length of the dim.
        splits: ``(axis_size, coordinate, split_factor)`` of each axis that cuts the dim, in axis order.

    Example:
        >>> local_intervals(10, ((4, 1, 1),))
        ((3, 6),)
        >>> local_intervals(8, ((2, 0, 2),))
        ((0, 2), (4, 6))
        >>> local_intervals(2, ((4, 3, 1),))
        ()
    """
    held: Intervals = ((0, size),) if size else ()
    for parts, coordinate, factor in splits:
        total = length(held)
        if isinstance(factor, Cut):
            kept = factor.held(total, parts, coordinate)
            held = _joined([pair for low, high in kept for pair in _between(held, low, high)])
            continue
        if factor == 1:
            held = _joined(_between(held, *_chunk(total, parts, coordinate)))
            continue
        chunk = -(-total // factor)
        pieces: list[tuple[int, int]] = []
        for start in range(0, total, chunk or 1):
            low, high = _chunk(min(chunk, total - start), parts, coordinate)
            pieces += _between(held, start + low, start + high)
        held = _joined(pieces)
    return held


def _chunk(total: int, parts: int, coordinate: int) -> tuple[int, int]:
    """Where the piece number *coordinate* of *parts* begins and ends. No ``range`` and no ``int``: sizes may be symbolic."""
    step = -(-total // parts)
    return min(coordinate * step, total), min((coordinate + 1) * step, total)


def length(intervals: Intervals) -> int:
    """How many indices *intervals* hold."""
    return sum(stop - start for start, stop in intervals)


def _between(intervals: Intervals, low: int, high: int) -> list[tuple[int, int]]:
    """The entries at positions low..high of the list that *intervals* spell out."""
    out = []
    position = 0
    for start, stop in intervals:
        first = max(low - position, 0)
        last = min(high - position, stop - start)
        if first < last:
            out.append((start + first, start + last))
        position += stop - start
    return out


def _joined(pieces: Sequence[tuple[int, int]]) -> Intervals:
    out: list[tuple[int, int]] = []
    for start, stop in pieces:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


@lru_cache(maxsize=1 << 14)
def axes_of(
    placements: tuple[Placement, ...], ndim: int
) -> tuple[tuple[tuple[int, int | Cut], ...], ...]:
    """For each tensor dim ``(axis, split_factor)`` of the axes that cut it, in axis order.

    Example:
        >>> from hp_dtensor.placements import Replicate, Shard
        >>> axes_of((Shard(1), Replicate(), Shard(1)), 2)
        ((), ((0, 1), (2, 1)))
    """
    out: list[list[tuple[int, int | Cut]]] = [[] for _ in range(ndim)]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Cut):
            out[placement.dim].append((axis, placement))
        elif isinstance(placement, StridedShard):
            out[placement.dim].append((axis, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            out[placement.dim].append((axis, 1))
    return tuple(tuple(axes) for axes in out)


@cached(1 << 16)
def local_box(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> Box:
    """The intervals of global indices that *coordinate* holds, for each dim.

    Args:
        shape: global shape.
        mesh_shape: sizes of the mesh axes.
        coordinate: where the rank stands, one entry an axis.
        placements: one an axis, with non-negative dims.

    Example:
        >>> from hp_dtensor.placements import Replicate, Shard
        >>> local_box((5, 4), (2, 2), (1, 0), (Shard(0), Shard(1)))
        (((3, 5),), ((0, 2),))
    """
    count = folded_dims(placements)
    if count > 1:
        shape, placements = folded(shape, placements, count)
    return tuple(
        local_intervals(
            size, tuple((mesh_shape[axis], coordinate[axis], factor) for axis, factor in cuts)
        )
        for size, cuts in zip(shape, axes_of(placements, len(shape)), strict=True)
    )


@cached(1 << 16)
def local_shape(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[int, ...]:
    """The shape of what *coordinate* holds; the arguments are those of :func:`local_box`.

    Example:
        >>> from hp_dtensor.placements import Shard
        >>> [local_shape((5, 4), (4,), (c,), (Shard(0),)) for c in range(4)]
        [(2, 4), (2, 4), (1, 4), (0, 4)]
    """
    return tuple(
        length(intervals) for intervals in local_box(shape, mesh_shape, coordinate, placements)
    )


def local_shape_and_offset(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Local shape, and for each dim the first global index held; the dim's size where none is.

    A strided layout holds several intervals; :func:`local_box` has them all. The arguments are those of it.

    Example:
        >>> from hp_dtensor.placements import Shard
        >>> local_shape_and_offset((5, 4), (2,), (1,), (Shard(0),))
        ((2, 4), (3, 0))
    """
    box = local_box(shape, mesh_shape, coordinate, placements)
    sizes = tuple(length(intervals) for intervals in box)
    offsets = tuple(
        intervals[0][0] if intervals else size for intervals, size in zip(box, shape, strict=True)
    )
    return sizes, offsets
