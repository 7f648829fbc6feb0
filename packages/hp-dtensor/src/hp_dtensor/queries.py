"""Where this rank's piece lies in the whole: shapes, offsets and slices, for checkpoints and data loaders.

All answers come from the one shard rule (:mod:`hp_dtensor.shards`); nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_mesh import DeviceMesh

from hp_dtensor import shards
from hp_dtensor.errors import LayoutError
from hp_dtensor.layout import PlacementsLike, resolve
from hp_dtensor.spec import spec_of

if TYPE_CHECKING:
    from torch import Tensor


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: PlacementsLike
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's piece of a tensor of *global_shape*, and where it starts on each dim.

    The pieces of all ranks tile the tensor. An empty piece starts at the end of its dim. A piece that a StridedShard
    leaves in several runs has the offset of the first one; :func:`global_slices` gives them all.

    Returns:
        ``((0,), ())`` on a rank outside the mesh.

    Raises:
        LayoutError: when the placements do not fit.
    """
    ours = DeviceMesh.from_torch(mesh)
    shape = tuple(global_shape)
    resolved = resolve(placements, ours, len(shape))
    where = ours.get_coordinate()
    if where is None:
        return (0,), ()
    return shards.local_shape_and_offset(shape, tuple(ours.shape), tuple(where), resolved)


def local_shard_size_and_offset(
    curr_local_size: int, num_chunks: int, rank: int
) -> tuple[int, int]:
    """Size and offset of chunk *rank* when *curr_local_size* indices are cut into *num_chunks* as ``torch.chunk`` cuts.

    Chunks past the end are empty and start at *curr_local_size*.

    Raises:
        LayoutError: for a size below zero, no chunk, or a rank that is no chunk.

    Example:
        >>> [local_shard_size_and_offset(5, 4, rank) for rank in range(4)]
        [(2, 0), (2, 2), (1, 4), (0, 5)]
    """
    if curr_local_size < 0 or num_chunks < 1 or not 0 <= rank < num_chunks:
        msg = (
            f"no chunk: curr_local_size={curr_local_size}, num_chunks={num_chunks}, rank={rank}; a size is not negative, "
            "there is at least one chunk, and the rank lies between 0 and num_chunks - 1"
        )
        raise LayoutError(msg)
    step = -(-curr_local_size // num_chunks)
    start = min(step * rank, curr_local_size)
    return min(step, curr_local_size - start), start


def global_slices(tensor: Tensor) -> tuple[tuple[slice, ...], ...]:
    """For each dim of a distributed *tensor* the slices of global indices that this rank holds, in local order.

    One slice a dim for plain shards, several for a strided one, none where the piece is empty.

    Raises:
        LayoutError: for a plain tensor.

    Example:
        >>> import torch
        >>> def local_rows(dtensor):
        ...     return [
        ...         index
        ...         for part in global_slices(dtensor)[0]
        ...         for index in range(part.start, part.stop)
        ...     ]
    """
    spec = spec_of(tensor)
    if spec is None:
        msg = f"a plain tensor of shape {tuple(tensor.shape)} is no piece of anything; pass a DTensor"
        raise LayoutError(msg)
    return tuple(
        tuple(slice(start, stop) for start, stop in intervals) for intervals in spec.local_box
    )
