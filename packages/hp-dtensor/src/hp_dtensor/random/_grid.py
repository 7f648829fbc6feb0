"""Which blocks of words the piece of a rank needs, and what is made of them.

The idea: along the last dim four (or two) elements share a block of the generator, and each row starts a new one. An
element's words depend on its index in the whole tensor and on the last dim's length, and every piece, cut along any dims
by whatever placements, computes no more than the blocks that it touches.

The elements of a block are neighbours in short rows. In long ones they are sixteen apart: sixteen blocks make a tile of
sixteen elements for each lane, so that what a lane gives is stored as one vector, which makes a compiled draw ten times
as fast.

The rule: dims of size 1 count for nothing, a rank's piece is a product of lists of intervals (its box), and blocks are
computed a bounded number at a time in eager mode, so that temporaries stay in the cache and small against the piece.

Blocks over the row-major index without regard to rows were not taken: a cut of the last dim would touch four times the
blocks that it needs unless all its pieces began at a multiple of four.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from hp_dtensor.random._distributions import Numbers, Words
from hp_dtensor.random._philox import Word, philox

__all__ = ["Box", "Key", "counted", "height_of"]

Box = Sequence[Sequence[tuple[int, int]]]
"""For each dim the half-open intervals of indices that are wanted."""

Key = tuple[Word, Word]
"""The generator's key: two words."""

_TILE = 16
_CHUNK = 1 << 14
"""Blocks computed at a time: the few arrays of so many words fit into a core's second cache."""


def height_of(intervals: Sequence[tuple[int, int]]) -> int:
    """How many indices *intervals* hold."""
    return sum(stop - start for start, stop in intervals)


def counted(
    shape: Sequence[int],
    box: Box,
    key: Key,
    lanes: int,
    make: Callable[[Words], Numbers],
    *,
    dtype: torch.dtype,
    device: torch.device,
    eager: bool,
) -> Tensor:
    """The elements of *box* of a tensor of *shape*, made by *make* from the words of their blocks.

    Args:
        shape: the whole tensor's.
        box: the wanted indices; may be empty.
        key: the key of this draw.
        lanes: how many elements a block serves.
        make: gives one tensor for each lane.
        dtype: what the numbers are rounded to.
        device: where they are made.
        eager: compute chunk by chunk into a buffer; else as one expression, which is what a compiler wants.

    Returns:
        A contiguous tensor of the box's shape.
    """
    sizes = [height_of(intervals) for intervals in box]
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype, device=device)
    kept = [(size, intervals) for size, intervals in zip(shape, box, strict=True) if size != 1]
    *rows, (last, wanted) = kept or [(1, ((0, 1),))]
    tile = _TILE if last >= 16 * _TILE or last % (4 * _TILE) == 0 else 1
    group = tile * lanes
    per_row = -(-last // group)
    height = math.prod([height_of(intervals) for _, intervals in rows])
    many = tile * per_row * math.prod([size for size, _ in rows]) > 1 << 32
    pieces = []
    for start, stop in wanted:
        first, end = start // group, -(-stop // group)
        total = height * (end - first)
        chunks = _tiles(
            rows, (first, end), per_row, device, max(_CHUNK // tile, 1) if eager else total
        )
        if eager:
            made = torch.empty((total, lanes, tile), dtype=dtype, device=device)
            done = 0
            for chunk in chunks:
                done = _store(made, done, make(_words(_blocks(chunk(), tile), key, many=many)))
        else:
            numbers = make(_words(_blocks(chunks[0](), tile), key, many=many))
            # Narrow elements are stored one by one; they become narrow afterwards, as vectors.
            kind = torch.float32 if dtype.itemsize < 4 else dtype
            made = torch.stack([v.to(kind) for v in numbers], 1).to(dtype)
        skip = start - first * group
        pieces.append(made.view(height, -1)[:, skip : skip + stop - start])
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    return out.reshape(sizes)


def _blocks(tiles: Tensor, tile: int) -> Tensor:
    """The counters of the blocks of these *tiles*, a row for each.

    A bit operator joins the two parts of a counter since a compiler would see through a sum: it would walk over all blocks
    in one loop, from which the lanes cannot be stored, and keep the words of all blocks in between.
    """
    inner = torch.arange(tile, device=tiles.device)
    return (tiles * tile).unsqueeze(-1) | inner


def _tiles(
    rows: Sequence[tuple[int, Sequence[tuple[int, int]]]],
    wanted: tuple[int, int],
    per_row: int,
    device: torch.device,
    chunk: int,
) -> list[Callable[[], Tensor]]:
    """The numbers of the *wanted* tiles of each of the *rows*, which are given as sizes and wanted intervals of dims.

    They come in order, about *chunk* at a time, each chunk made when it is called.
    """
    first, end = wanted
    strides = [per_row] * len(rows)
    for position in range(len(rows) - 2, -1, -1):
        strides[position] = strides[position + 1] * rows[position + 1][0]
    height = math.prod([height_of(intervals) for _, intervals in rows])
    if _adjacent(rows, whole=(first, end) == (0, per_row)):
        start = sum([i[0][0] * s for (_, i), s in zip(rows, strides, strict=True)]) + first
        stop = start + height * (end - first)
        return [
            partial(torch.arange, low, min(low + chunk, stop), device=device)
            for low in range(start, stop, chunk)
        ]
    origin = torch.zeros((), dtype=torch.int64, device=device)
    for (_, intervals), stride in zip(rows, strides, strict=True):
        index = torch.cat([torch.arange(a, b, device=device) for a, b in intervals])
        origin = origin[..., None] + index * stride
    inner = torch.arange(first, end, device=device)
    step = max(chunk // (end - first), 1)
    pieces = origin.reshape(-1, 1).split(step)
    return [partial(_outer, piece, inner) for piece in pieces]


def _adjacent(rows: Sequence[tuple[int, Sequence[tuple[int, int]]]], *, whole: bool) -> bool:
    """Whether the wanted tiles of all rows follow each other without a gap."""
    several = False
    for size, intervals in rows:
        if len(intervals) != 1 or (several and tuple(intervals[0]) != (0, size)):
            return False
        several = several or height_of(intervals) > 1
    return whole or not several


def _outer(origins: Tensor, inner: Tensor) -> Tensor:
    return (origins + inner).reshape(-1)


def _words(counter: Tensor, key: Key, *, many: bool) -> Words:
    # The upper words of the counter stay free: one key serves one draw.
    low, high = (counter & 0xFFFFFFFF, counter >> 32) if many else (counter, 0)
    return cast("Words", philox((low, high, 0, 0), key))


def _store(out: Tensor, done: int, numbers: Numbers) -> int:
    """Put the numbers of a chunk into *out*, of tiles by lanes by elements; return how many tiles are done then."""
    end = done + len(numbers[0])
    for lane, values in enumerate(numbers):
        out[done:end, lane] = values
    return end
