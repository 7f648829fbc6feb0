"""Placements that a sharding rule talks about: plain cuts, and strided ones that are there."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from hp_dtensor import OpCall, Placement, Shard, StridedShard

__all__ = ["cuts"]


def cuts(call: OpCall, dims: Iterable[int]) -> Iterator[Placement]:
    """Yield each way of cutting one of *dims*.

    There are too many `StridedShard` values to list, so only those that an argument of *call* has
    now are given.

    Example:
        >>> import torch
        >>> from hp_dtensor import OpCall
        >>> call = OpCall(torch.ops.aten.relu.default, (), {}, (), axis_size=2)
        >>> list(cuts(call, range(2)))
        [Shard(dim=0), Shard(dim=1)]
    """
    dims = tuple(dims)
    yield from (Shard(dim) for dim in dims)
    yield from _strided(call.present, dims)


def _strided(present: Iterable[Placement], dims: Container[int]) -> Iterator[Placement]:
    for placement in dict.fromkeys(present):
        if isinstance(placement, StridedShard) and placement.dim in dims:
            yield placement
