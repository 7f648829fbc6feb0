"""Rank arithmetic in integers: which ranks lie along an axis, without listing the others.

The idea: a mesh numbers its ranks by *position*, row-major in its root. An axis is a short list of
digits ``(size, stride)`` over positions, outermost first, as in a mixed-radix number. Slicing picks
axes, flattening joins their digits, unflattening cuts digits; none of them touches a rank, so the
cost does not grow with the world.
The rule: digits are kept canonical (no size 1, neighbours merged), so equal axes are equal values.
Not taken: tensors of ranks (PyTorch's way), whose cost is the world per slice; and CuTe's general
layout algebra, of which meshes need only these digits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Digit = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis.

    Example:
        >>> dp, tp = row_major((2, 4))
        >>> tp.coordinate(6), dp.coordinate(6), dp.offsets()
        (2, 1, (0, 4))
    """

    digits: tuple[Digit, ...]
    """Pairs ``(size, stride)`` over positions, outermost first, canonical."""
    unit_stride: int = field(default=1, compare=False)
    """The stride an axis of size 1 would have; carried for PyTorch's layouts, no part of the value."""
    merged: bool = field(default=False, compare=False)
    """Whether `merge` made it; torch 2.12 writes such a layout in another form. No part of the value."""

    @property
    def size(self) -> int:
        """How many coordinates the axis has."""
        return math.prod(size for size, _ in self.digits)

    @property
    def leading_stride(self) -> int:
        """The stride of the outermost digit."""
        return self.digits[0][1] if self.digits else self.unit_stride

    def coordinate(self, position: int) -> int:
        """Return the coordinate along this axis of the rank at *position*."""
        value = 0
        for size, stride in self.digits:
            value = value * size + position // stride % size
        return value

    def offset(self, coordinate: int) -> int:
        """Return how far *coordinate* lies from coordinate 0, in positions."""
        total = 0
        for size, stride in reversed(self.digits):
            coordinate, digit = divmod(coordinate, size)
            total += digit * stride
        return total

    def offsets(self) -> tuple[int, ...]:
        """Return the positions along the axis relative to coordinate 0, in coordinate order."""
        if len(self.digits) <= 1:
            size, stride = self.digits[0] if self.digits else (1, 1)
            return tuple(range(0, size * stride, stride))
        steps = (range(0, size * stride, stride) for size, stride in self.digits)
        return tuple(map(sum, itertools.product(*steps)))


def canonical(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """Return *digits* without size 1 and with mergeable neighbours merged.

    Example:
        >>> canonical([(2, 4), (1, 9), (4, 1)])
        ((8, 1),)
    """
    kept: list[Digit] = []
    for size, stride in digits:
        if size == 1:
            continue
        if kept and kept[-1][1] == size * stride:
            kept[-1] = (kept[-1][0] * size, stride)
        else:
            kept.append((size, stride))
    return tuple(kept)


def row_major(shape: Sequence[int]) -> tuple[Axis, ...]:
    """Return the axes of a row-major grid of *shape*.

    Example:
        >>> [axis.digits for axis in row_major((2, 3))]
        [((2, 3),), ((3, 1),)]
    """
    axes: list[Axis] = []
    stride = math.prod(shape)
    for size in shape:
        stride //= size
        axes.append(Axis(((size, stride),) if size != 1 else (), unit_stride=stride))
    return tuple(axes)


def merge(axes: Iterable[Axis]) -> Axis:
    """Return the axis that walks *axes* row-major, the last one fastest.

    Example:
        >>> dp, cp, tp = row_major((2, 2, 2))
        >>> merge((dp, tp)).offsets()
        (0, 1, 4, 5)
    """
    return Axis(canonical(digit for axis in axes for digit in axis.digits), merged=True)


def split(axis: Axis, sizes: Sequence[int]) -> tuple[Axis, ...]:
    """Cut *axis* into axes of *sizes*, so that ``merge(split(axis, sizes)) == axis``.

    Raises:
        ValueError: if the sizes do not multiply to the axis, or cut a digit in two unevenly.

    Example:
        >>> [a.digits for a in split(Axis(((8, 1),)), (2, 4))]
        [((2, 4),), ((4, 1),)]
    """
    if math.prod(sizes) != axis.size or any(size < 1 for size in sizes):
        message = f"sizes {tuple(sizes)} multiply to {math.prod(sizes)}, the axis has {axis.size}"
        raise ValueError(message)
    left = list(axis.digits)
    parts: list[Axis] = []
    inner = left[-1][1] if left else axis.unit_stride
    for wanted in reversed(sizes):
        taken: list[Digit] = []
        rest = wanted
        while rest > 1:
            size, stride = left.pop()
            step = math.gcd(rest, size)
            if step not in (rest, size):
                message = (
                    f"sizes {tuple(sizes)} cut across the axis, which is made of "
                    f"{tuple(s for s, _ in axis.digits)}"
                )
                raise ValueError(message)
            taken.insert(0, (step, stride))
            if step != size:
                left.append((size // step, stride * step))
            rest //= step
        if taken:
            inner = taken[0][0] * taken[0][1]
        parts.insert(0, Axis(canonical(taken), unit_stride=inner))
    return tuple(parts)


def disjoint(axes: Iterable[Axis]) -> bool:
    """Say whether no two coordinates of the grid of *axes* meet at one position.

    Example:
        >>> dp, tp = row_major((2, 4))
        >>> disjoint((dp, tp)), disjoint((tp, merge((dp, tp))))
        (True, False)
    """
    digits = sorted((d for axis in axes for d in axis.digits), key=lambda d: d[1], reverse=True)
    return all(
        outer % (inner_size * inner) == 0
        for (_, outer), (inner_size, inner) in itertools.pairwise(digits)
    )


def complement(axes: Iterable[Axis], count: int) -> Axis:
    """Return the axis that visits, once each, the grids of *axes* that tile ``range(count)``.

    Example:
        >>> dp, cp, tp = row_major((2, 2, 2))
        >>> complement((cp,), 8).offsets()
        (0, 1, 4, 5)
    """
    digits = sorted((d for axis in axes for d in axis.digits), key=lambda d: d[1])
    free: list[Digit] = []
    covered = 1
    for size, stride in digits:
        free.append((stride // covered, covered))
        covered = stride * size
    free.append((count // covered, covered))
    return Axis(canonical(reversed(free)))


def base(axes: Iterable[Axis], position: int) -> int:
    """Return the position of coordinate zero of the grid of *axes* that holds *position*.

    Example:
        >>> dp, tp = row_major((2, 4))
        >>> base((tp,), 6)
        4
    """
    for axis in axes:
        for size, stride in axis.digits:
            position -= position // stride % size * stride
    return position


def positions(axes: Sequence[Axis], start: int = 0) -> tuple[int, ...]:
    """Return the positions of the grid of *axes* whose zero is *start*, row-major."""
    return tuple(start + offset for offset in merge(axes).offsets())


class RankMap:
    """Which global rank sits at each position: a range, or a list where it is no range.

    Example:
        >>> (
        ...     RankMap.of([4, 5, 6, 7]).position(6),
        ...     RankMap.of([3, 1]).rank(0),
        ...     len(RankMap.of([3, 1])),
        ... )
        (2, 3, 2)
    """

    __slots__ = ("_count", "_first", "_index", "_ranks")

    def __init__(self, first: int, count: int, ranks: tuple[int, ...] | None = None) -> None:
        self._first = first
        self._count = count
        self._ranks = ranks
        self._index: dict[int, int] | None = None

    @classmethod
    def of(cls, ranks: Sequence[int]) -> RankMap:
        """Return the map for *ranks*, as a range if they are one."""
        count = len(ranks)
        first = ranks[0] if count else 0
        if all(rank == first + i for i, rank in enumerate(ranks)):
            return cls(first, count)
        return cls(first, count, tuple(ranks))

    @property
    def is_range(self) -> bool:
        """Whether the ranks are consecutive and ascending."""
        return self._ranks is None

    @property
    def is_sorted(self) -> bool:
        """Whether the ranks ascend."""
        return self._ranks is None or all(a < b for a, b in itertools.pairwise(self._ranks))

    @property
    def highest(self) -> int:
        """The largest rank."""
        return self._first + self._count - 1 if self._ranks is None else max(self._ranks)

    def __len__(self) -> int:
        """Return how many ranks there are."""
        return self._count

    def rank(self, position: int) -> int:
        """Return the global rank at *position*."""
        return self._first + position if self._ranks is None else self._ranks[position]

    def position(self, rank: int) -> int | None:
        """Return where *rank* sits, or None if it is not in the map."""
        if self._ranks is None:
            position = rank - self._first
            return position if 0 <= position < self._count else None
        if self._index is None:
            self._index = {rank: position for position, rank in enumerate(self._ranks)}
        return self._index.get(rank)

    def ranks(self, positions: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return the ranks at *positions*, or all of them."""
        if positions is None:
            return self._ranks or tuple(range(self._first, self._first + self._count))
        if self._ranks is None:
            return tuple(self._first + position for position in positions)
        return tuple(self._ranks[position] for position in positions)

    def __eq__(self, other: object) -> bool:
        """Compare by the ranks and their order."""
        if not isinstance(other, RankMap):
            return NotImplemented
        return (self._first, self._count, self._ranks) == (
            other._first,
            other._count,
            other._ranks,
        )

    def __hash__(self) -> int:
        """Hash by the ranks and their order."""
        return hash((self._first, self._count, self._ranks))

    def __repr__(self) -> str:
        """Show the ranks."""
        if self._ranks is None:
            return f"RankMap(range({self._first}, {self._first + self._count}))"
        return f"RankMap({list(self._ranks)})"
