"""From one mesh to another: other axes over the same ranks, some of the ranks, or other ranks altogether.

Two meshes that are slices of one mesh are both read on that mesh, an axis that a slice lacks being replicated: each rank
has a slice of its own, so only there do all ranks see the same move. Every other pair is three steps: combine the addends
on the source's mesh, exchange pieces over the ranks of both meshes at once, make the target's addends. In the exchange a
rank receives exactly what it lacks; where several hold the same, the receivers take turns, and whoever holds a piece
itself keeps it. Nothing is sent where no rank lacks anything.

A detour over one rank, or over the whole tensor on every rank, was not taken: both hold what no shard holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hp_mesh import collectives
from hp_mesh.groups import GroupConfig, registry

from hp_dtensor import shards
from hp_dtensor.errors import RedistributeError
from hp_dtensor.pieces import Ranges, overlap, put, ranges_in, sizes_of, take
from hp_dtensor.placements import REPLICATE, Cut, Placement, Shard, shard_dim
from hp_dtensor.redistribute import redistribute_tensor
from hp_dtensor.shards import Box

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["Exchange", "Side", "between", "lifted", "whole_addends", "without_addends"]

Placements = tuple[Placement, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One end of an exchange: ranks, and what each of them holds. No addends."""

    ranks: tuple[int, ...]
    """Global ranks, row-major over the mesh."""
    mesh_shape: Shape
    """Sizes of the axes."""
    placements: Placements
    """One for each axis; none is partial."""

    def coordinate(self, rank: int) -> Shape | None:
        """Where *rank* stands, or None."""
        if rank not in self.ranks:
            return None
        position, out = self.ranks.index(rank), []
        for size in reversed(self.mesh_shape):
            position, own = divmod(position, size)
            out.append(own)
        return tuple(reversed(out))

    def rank(self, where: Shape) -> int:
        """The rank at *where*."""
        position = 0
        for size, own in zip(self.mesh_shape, where, strict=True):
            position = position * size + own
        return self.ranks[position]

    def box(self, shape: Shape, rank: int) -> Box | None:
        """What *rank* holds of a tensor of *shape*; None outside."""
        where = self.coordinate(rank)
        if where is None:
            return None
        return shards.local_box(shape, self.mesh_shape, where, self.placements)

    def shards(self, shape: Shape) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """The different pieces, which tile the tensor, each with the ranks that hold it."""
        cut = [shard_dim(placement) is not None for placement in self.placements]
        for where in itertools.product(
            *(range(n if c else 1) for n, c in zip(self.mesh_shape, cut, strict=True))
        ):
            box = shards.local_box(shape, self.mesh_shape, where, self.placements)
            there = itertools.product(
                *(
                    (own,) if c else range(n)
                    for n, c, own in zip(self.mesh_shape, cut, where, strict=True)
                )
            )
            yield box, tuple(map(self.rank, there))


@dataclass(frozen=True, slots=True)
class Exchange:
    """Who sends what to whom, between two layouts without addends. Pure; the same on every rank."""

    shape: Shape
    """Global shape."""
    source: Side
    """Who holds what before."""
    target: Side
    """Who holds what after."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both sides, ascending."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    def arriving(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Each piece that *rank* needs with the rank that it takes it from, which may be itself."""
        wanted = self.target.box(self.shape, rank)
        if wanted is None:
            return
        turn = self.target.ranks.index(rank)
        for held, holders in self.source.shards(self.shape):
            piece = overlap(held, wanted)
            if all(piece) or not self.shape:
                yield (rank if rank in holders else holders[turn % len(holders)]), piece

    def received(self) -> int:
        """The most elements that one rank receives from others."""
        return max(
            sum(
                math.prod(sizes_of(piece)) for giver, piece in self.arriving(rank) if giver != rank
            )
            for rank in self.target.ranks
        )


def lifted(
    mesh: DeviceMesh, placements: Placements, other: DeviceMesh
) -> tuple[DeviceMesh, Placements] | None:
    """*placements* on the mesh that *mesh* was sliced from, where *other* is (a slice of) the same; None where it is not.

    Raises:
        RedistributeError: for a slice whose axes are no axes of the mesh it was sliced from.
    """
    root, other_root = mesh.root_mesh or mesh, other.root_mesh or other
    if root != other_root or mesh == root == other:
        return None
    if mesh == root:
        return root, placements
    names, all_names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if not set(names) <= set(all_names):
        if len(mesh.rank_list) == len(root.rank_list):
            return None  # the same ranks, flattened: every rank sees the same mesh
        msg = (
            f"{mesh} is a slice of {root} whose axes {names} are no axes of it, so each rank has another one and no common "
            f"move exists; go by way of the axes {all_names}"
        )
        raise RedistributeError(msg)
    on = dict(zip(names, placements, strict=True))
    return root, tuple(on.get(name, REPLICATE) for name in all_names)


def whole_addends(shape: Shape, mesh_shape: Shape, placements: Placements) -> Placements:
    """*placements* after the addends are combined: scattered over a dim that nothing else cuts, replicated if there is none.

    Flattened dims become whole, too: what one mesh cuts there is no box on another.
    """
    out = [REPLICATE if isinstance(p, Cut) and p.folds > 1 else p for p in placements]
    free = [
        dim
        for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim])
        if all(shard_dim(placement) != dim for placement in placements)
    ]
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            fits = bool(free) and shape[free[0]] >= mesh_shape[axis] > 1
            out[axis] = Shard(free.pop(0)) if fits else REPLICATE
    return tuple(out)


def without_addends(placements: Placements) -> Placements:
    """*placements* before addends are made and flattened dims are cut, which is done locally."""
    return tuple(
        REPLICATE if p.is_partial() or (isinstance(p, Cut) and p.folds > 1) else p
        for p in placements
    )


def between(
    local: Tensor,
    source_mesh: DeviceMesh,
    source: Placements,
    target_mesh: DeviceMesh,
    target: Placements,
    shape: Shape,
) -> Tensor:
    """This rank's piece of *target* on *target_mesh*, from its piece of *source* on *source_mesh*.

    No gradient is recorded. Every rank of either mesh has to call it; a rank of neither may, and gets nothing.

    Raises:
        RedistributeError: as :func:`lifted` says.
    """
    before = lifted(source_mesh, source, target_mesh)
    after = lifted(target_mesh, target, source_mesh)
    if before is not None and after is not None:
        out = redistribute_tensor(local, before[0], shape, before[1], after[1])
        outside = target_mesh.get_coordinate() is None
        return local.new_empty(0) if outside else _on_device(out, target_mesh)
    if source_mesh.rank_list == target_mesh.rank_list and tuple(source_mesh.shape) == tuple(
        target_mesh.shape
    ):
        out = redistribute_tensor(local, source_mesh, shape, source, target)
        return _on_device(out, target_mesh)
    middle = whole_addends(shape, tuple(source_mesh.shape), source)
    final = without_addends(target)
    if source_mesh.get_coordinate() is not None:
        local = redistribute_tensor(local, source_mesh, shape, source, middle)
    exchange = Exchange(shape, _side(source_mesh, middle), _side(target_mesh, final))
    local = _on_device(_exchanged(local, exchange), target_mesh)
    if target_mesh.get_coordinate() is not None:
        local = redistribute_tensor(local, target_mesh, shape, final, target)
    return local


def _on_device(local: Tensor, mesh: DeviceMesh) -> Tensor:
    return local if local.device.type in (mesh.device_type, "meta") else local.to(mesh.device_type)


def _side(mesh: DeviceMesh, placements: Placements) -> Side:
    return Side(tuple(mesh.rank_list), tuple(mesh.shape), placements)


@dataclass(frozen=True, slots=True)
class _Part:
    """An exchange as one rank sees it."""

    group: ProcessGroup | None
    """Who takes part; None where nothing is sent."""
    sent: tuple[tuple[Ranges, Shape], ...]
    """For each rank of the group where its piece lies here, and the piece's shape."""
    received: tuple[tuple[Ranges, Shape], ...]
    """For each rank of the group where its piece goes, and the piece's shape."""
    kept: tuple[Ranges, Ranges] | None
    """Where this rank's own piece lies before and after."""
    whole: Shape
    """The shape of the result; ``(0,)`` outside of the target."""


_NOTHING: tuple[Ranges, Shape] = ((), (0,))
_parts: dict[Exchange, _Part] = {}
registry.on_new_world(_parts.clear)


def _exchanged(local: Tensor, exchange: Exchange) -> Tensor:
    registry.refresh()
    part = _parts.get(exchange)
    if part is None:
        part = _parts[exchange] = _part_of(exchange)
    out = local.new_empty(part.whole)
    if part.kept is not None:
        put(out, take(local, part.kept[0]), part.kept[1])
    if part.group is None:
        return out
    counts = [math.prod(size) for _, size in part.sent]
    buffer = local.new_empty(sum(counts))
    for piece, (ranges, size) in zip(torch.split(buffer, counts), part.sent, strict=True):
        if piece.numel():
            piece.view(size).copy_(take(local, ranges))
    expected = [math.prod(size) for _, size in part.received]
    got = collectives.all_to_all(buffer, expected, counts, part.group)
    for piece, (ranges, size) in zip(torch.split(got, expected), part.received, strict=True):
        if piece.numel():
            put(out, piece.view(size), ranges)
    return out


def _part_of(exchange: Exchange) -> _Part:
    rank = torch.distributed.get_rank()
    shape, ranks = exchange.shape, exchange.ranks
    before, after = exchange.source.box(shape, rank), exchange.target.box(shape, rank)
    whole = (0,) if after is None else sizes_of(after)
    kept: tuple[Ranges, Ranges] | None = None
    received = dict.fromkeys(ranks, _NOTHING)
    sent = dict.fromkeys(ranks, _NOTHING)
    for giver, piece in exchange.arriving(rank):
        assert after is not None
        if giver != rank:
            received[giver] = ranges_in(after, piece), sizes_of(piece)
        elif before is not None:
            kept = ranges_in(before, piece), ranges_in(after, piece)
    quiet = True
    for taker in exchange.target.ranks:
        for giver, piece in exchange.arriving(taker):
            quiet = quiet and giver == taker
            if giver == rank != taker and before is not None:
                sent[taker] = ranges_in(before, piece), sizes_of(piece)
    if quiet or rank not in ranks:
        return _Part(None, (), (), kept, whole)
    group = registry.get(ranks, GroupConfig(), f"the ranks {ranks} of two meshes")
    return _Part(group, tuple(sent.values()), tuple(received.values()), kept, whole)
