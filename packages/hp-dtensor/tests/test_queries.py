"""Pieces as others ask for them: they tile the tensor and are what to_local holds."""

from __future__ import annotations

import pytest
import torch
from hp_dtensor import (
    LayoutError,
    Replicate,
    Shard,
    StridedShard,
    compute_local_shape_and_global_offset,
    distribute_tensor,
    global_slices,
    local_shard_size_and_offset,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_tile_as_torch_cuts(size: int, count: int) -> None:
    """Sizes and offsets of all chunks are those of torch.chunk, and empty ones start at the end."""
    pieces = [local_shard_size_and_offset(size, count, rank) for rank in range(count)]
    want = [len(piece) for piece in torch.arange(size).chunk(count)] if size else []
    assert [length for length, _ in pieces] == want + [0] * (count - len(want))
    assert [start for _, start in pieces] == [sum(want[:rank]) for rank in range(count)]


def test_a_chunk_that_cannot_be_is_refused() -> None:
    """Numbers out of range are named."""
    with pytest.raises(LayoutError, match="rank=4"):
        local_shard_size_and_offset(5, 4, 4)


@spmd(world_size=4)
def test_shape_offset_and_slices_describe_the_local_tensor() -> None:
    """For uneven, doubly cut and strided layouts the queries find the local values in the whole tensor."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(35.0).reshape(7, 5)
    for placements in (
        [Shard(0), Shard(0)],
        [Shard(0), Shard(1)],
        [Replicate(), Shard(1)],
        [StridedShard(0, split_factor=2), Shard(0)],
    ):
        d = distribute_tensor(whole, mesh, placements)
        shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
        local = d.to_local()
        assert tuple(shape) == tuple(local.shape)
        rows, columns = (
            [i for part in parts for i in range(part.start, part.stop)]
            for parts in global_slices(d)
        )
        assert torch.equal(whole[rows][:, columns], local)
        if local.numel():
            assert (rows[0], columns[0]) == tuple(offset)
    with pytest.raises(LayoutError, match="plain tensor"):
        global_slices(whole)
