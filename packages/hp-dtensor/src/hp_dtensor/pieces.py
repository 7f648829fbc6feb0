"""Pieces inside local tensors: where a box of global indices lies in the tensor that holds a larger one; take it, put it.

What a rank holds of a dim is a list of intervals (:mod:`hp_dtensor.shards`), stored one after the other. So a part of it
is a list of ranges of the local dim: one range for plain shards, several for strided ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from hp_dtensor import shards
from hp_dtensor.plan import common
from hp_dtensor.shards import Box, Intervals

__all__ = ["Ranges", "only_dim", "overlap", "put", "ranges_in", "sizes_of", "take"]

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim the ``(start, length)`` of the local entries that a piece is made of."""


def sizes_of(box: Box) -> tuple[int, ...]:
    """The shape of the tensor that holds *box*."""
    return tuple(shards.length(intervals) for intervals in box)


def overlap(a: Box, b: Box) -> Box:
    """The indices that both hold."""
    return tuple(common(x, y) for x, y in zip(a, b, strict=True))


def ranges_in(outer: Box, inner: Box) -> Ranges:
    """Where *inner*, a part of *outer*, lies in the local tensor of *outer*."""
    return tuple(_ranges_of_dim(x, y) for x, y in zip(outer, inner, strict=True))


def _ranges_of_dim(outer: Intervals, inner: Intervals) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []
    position = 0
    for start, stop in outer:
        for low, high in common(((start, stop),), inner):
            local = position + low - start
            if out and out[-1][0] + out[-1][1] == local:
                out[-1] = (out[-1][0], out[-1][1] + high - low)
            else:
                out.append((local, high - low))
        position += stop - start
    return tuple(out)


def take(tensor: Tensor, ranges: Ranges) -> Tensor:
    """The entries at *ranges*: a view where they are one range in each dim."""
    for dim, parts in enumerate(ranges):
        if len(parts) == 1:
            start, size = parts[0]
            if start or size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, size)
        elif parts:
            tensor = torch.cat([tensor.narrow(dim, start, size) for start, size in parts], dim)
        else:
            tensor = tensor.narrow(dim, 0, 0)
    return tensor


def put(out: Tensor, piece: Tensor, ranges: Ranges) -> None:
    """Write *piece* to the entries of *out* at *ranges*."""
    starts = [
        list(itertools.accumulate((size for _, size in parts), initial=0)) for parts in ranges
    ]
    for chosen in itertools.product(*(range(len(parts)) for parts in ranges)):
        there, here = out, piece
        for dim, i in enumerate(chosen):
            start, size = ranges[dim][i]
            there = there.narrow(dim, start, size)
            if len(ranges[dim]) > 1:
                here = here.narrow(dim, starts[dim][i], size)
        there.copy_(here)


def only_dim(
    pieces: Sequence[Ranges], sizes: Sequence[tuple[int, ...]], whole: tuple[int, ...]
) -> int | None:
    """The dim along which equal *pieces* lie one after the other in *whole*; None if they do not."""
    if not sizes or any(size != sizes[0] for size in sizes[1:]) or 0 in sizes[0]:
        return None
    cut = [
        dim for dim, (part, size) in enumerate(zip(sizes[0], whole, strict=True)) if part != size
    ]
    if len(cut) != 1:
        return None
    dim = cut[0]
    step = sizes[0][dim]
    in_order = all(ranges[dim] == ((i * step, step),) for i, ranges in enumerate(pieces))
    return dim if in_order and len(pieces) * step == whole[dim] else None
