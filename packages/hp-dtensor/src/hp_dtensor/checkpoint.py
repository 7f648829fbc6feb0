"""What a distributed checkpoint writes of a tensor, and where what it reads goes: the boxes that a rank holds.

Torch's checkpoints know one box for each rank, which is enough for plain shards. A strided shard holds several, and a run
of flattened dims is several, too; each becomes a chunk of its own, so that what is saved under one layout loads under any
other. A chunk is a view of the local tensor: loading writes in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_dtensor import shards
from hp_dtensor.placements import Cut, StridedShard, folded_dims

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from hp_dtensor.spec import Spec

__all__ = ["Chunk", "chunk_at", "chunk_list", "chunks", "is_one_box", "write_items"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of global indices that this rank holds, and where it lies in the local tensor."""

    offsets: Shape
    """The first global index of each dim."""
    sizes: Shape
    """How many of each dim."""
    starts: Shape
    """The first local index of each local dim."""
    local_sizes: Shape
    """How many of each local dim; their product is that of *sizes*."""

    def of(self, local: Tensor) -> Tensor:
        """The chunk as a view of the local tensor, in the shape of *sizes*."""
        for dim, (start, size) in enumerate(zip(self.starts, self.local_sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local.view(self.sizes) if self.local_sizes != self.sizes else local


def is_one_box(spec: Spec) -> bool:
    """Whether each rank holds one box, which torch's own checkpoint code can tell."""
    return not any(isinstance(placement, (StridedShard, Cut)) for placement in spec.placements)


def chunks(spec: Spec) -> Iterator[Chunk]:
    """The boxes that this rank holds of the tensor that *spec* describes."""
    where = spec.coordinate
    if where is None:
        return
    if 0 in spec.shape:  # no box, but a tensor that has to be in the checkpoint
        none = (0,) * len(spec.shape)
        yield Chunk(none, tuple(spec.shape), (0,) * len(spec.local_shape), tuple(spec.local_shape))
        return
    count = folded_dims(spec.placements)
    box = shards.local_box(
        tuple(spec.shape), tuple(spec.mesh.shape), tuple(where), spec.placements
    )
    inner = tuple(spec.shape[1:count])
    positions = [
        list(itertools.accumulate((b - a for a, b in intervals), initial=0)) for intervals in box
    ]
    for chosen in itertools.product(*(range(len(intervals)) for intervals in box)):
        spans = [intervals[i] for intervals, i in zip(box, chosen, strict=True)]
        starts = [at[i] for at, i in zip(positions, chosen, strict=True)]
        rest_offsets = tuple(start for start, _ in spans[1:])
        rest_sizes = tuple(stop - start for start, stop in spans[1:])
        if count == 1:
            offsets = tuple(start for start, _ in spans)
            sizes = tuple(stop - start for start, stop in spans)
            yield Chunk(offsets, sizes, tuple(starts), sizes)
            continue
        first, last = spans[0]
        for begin, offsets, sizes in _boxes(first, last, inner):
            run = 1
            for size in sizes:
                run *= size
            yield Chunk(
                (*offsets, *rest_offsets),
                (*sizes, *rest_sizes),
                (starts[0] + begin - first, *starts[1:]),
                (run, *rest_sizes),
            )


def _boxes(start: int, stop: int, inner: Shape) -> Iterator[tuple[int, Shape, Shape]]:
    """A run of flattened indices as boxes: the first flat index of each, its offsets and its sizes.

    Example:
        >>> list(_boxes(1, 7, (3,)))
        [(1, (0, 1), (1, 2)), (3, (1, 0), (1, 3)), (6, (2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not inner:
        yield start, (start,), (stop - start,)
        return
    row = 1
    for size in inner:
        row *= size
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        first = last = start // row
        yield from _within_row(first, start, stop, row, inner)
        return
    yield from _within_row(first - 1, start, first * row, row, inner)
    if first < last:
        yield first * row, (first, *(0 for _ in inner)), (last - first, *inner)
    yield from _within_row(last, last * row, stop, row, inner)


def _within_row(
    index: int, start: int, stop: int, row: int, inner: Shape
) -> Iterator[tuple[int, Shape, Shape]]:
    for begin, offsets, sizes in _boxes(start - index * row, stop - index * row, inner[1:]):
        yield begin + index * row, (index, *offsets), (1, *sizes)


def chunk_list(spec: Spec) -> list[ChunkStorageMetadata]:
    """The chunks, as torch's checkpoint planner asks for them."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
        for chunk in chunks(spec)
    ]


def write_items(name: str, spec: Spec, local: Tensor) -> list[WriteItem]:
    """What to write for the tensor that is called *name*."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties.create_from_tensor(local),
                size=spec.shape,
            ),
        )
        for chunk in chunk_list(spec)
    ]


def chunk_at(index: MetadataIndex, spec: Spec, local: Tensor) -> Tensor:
    """The part of *local* that *index* names by its global offsets.

    Raises:
        ValueError: when this rank holds no such chunk.
    """
    wanted = None if index.offset is None else tuple(index.offset)
    held = list(chunks(spec))
    for chunk in held:
        if chunk.offsets == wanted:
            return chunk.of(local)
    msg = f"{index.fqn}: this rank holds no chunk at {wanted}; it holds those at {[chunk.offsets for chunk in held]}"
    raise ValueError(msg)
