"""Does a local tensor fit the layout that is claimed for it? Asked of one rank, or of all of them together.

A claim is checked against the one shard rule. What one rank can see alone is checked always; what only all ranks can see
(shapes that agree, replicas that are equal) costs a small collective and is done on request. In that case every rank
comes to the same verdict from the same table, so either all go on or all raise the same error.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from hp_mesh.collectives import all_gather, broadcast, wait

from hp_dtensor import shards
from hp_dtensor._autograd import global_shape
from hp_dtensor.errors import LayoutError
from hp_dtensor.placements import Placement, shard_dim
from hp_dtensor.spec import contiguous_stride

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank says of its local tensor."""

    shape: Shape
    dtype: torch.dtype
    requires_grad: bool


_DTYPES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str
)
_MOST_DIMS = 64
"""The most dims that a tensor of torch can have."""


def _encoded(piece: Piece, device: torch.device) -> Tensor:
    """*piece* as numbers: torch's exchange of objects would need numpy, which is no dependency of ours."""
    head = [len(piece.shape), _DTYPES.index(piece.dtype), int(piece.requires_grad)]
    padding = [0] * (_MOST_DIMS - len(piece.shape))
    return torch.tensor([[*head, *piece.shape, *padding]], dtype=torch.int64, device=device)


def _decoded(row: list[int]) -> Piece:
    ndim, dtype, requires_grad, *sizes = row
    return Piece(tuple(sizes[:ndim]), _DTYPES[dtype], bool(requires_grad))


def _table(mine: Piece, mesh: DeviceMesh, device: torch.device) -> dict[Shape, Piece]:
    """Every rank's piece by mesh coordinate, the same on all ranks: one exchange along each axis, inner axes first."""
    rows = _encoded(mine, device)
    for axis in reversed(range(mesh.ndim)):
        if mesh.size(axis) > 1:
            rows = wait(all_gather(rows, mesh.get_group(axis)))
    pieces = [_decoded(row) for row in rows.tolist()]
    return dict(zip(itertools.product(*map(range, mesh.shape)), pieces, strict=True))


def _agreed_shape(
    table: dict[Shape, Piece], mesh: DeviceMesh, placements: Sequence[Placement]
) -> Shape:
    """The global shape: on each dim the sum of the pieces along the axes that cut it."""
    ndim = len(next(iter(table.values())).shape)
    sizes = []
    for dim in range(ndim):
        cutting = [
            axis for axis, placement in enumerate(placements) if shard_dim(placement) == dim
        ]
        walk = (
            tuple(next(turn) if axis in cutting else 0 for axis in range(mesh.ndim))
            for turn in map(iter, itertools.product(*(range(mesh.size(axis)) for axis in cutting)))
        )
        sizes.append(sum(table[where].shape[dim] for where in walk))
    return tuple(sizes)


def _expected(
    shape: Shape, mesh: DeviceMesh, where: Shape, placements: Sequence[Placement]
) -> Shape:
    return shards.local_shape(shape, tuple(mesh.shape), where, tuple(placements))


def _misfit(
    where: Shape, got: Shape, want: Shape, shape: Shape, placements: Sequence[Placement]
) -> LayoutError:
    return LayoutError(
        f"the rank at mesh coordinate {where} holds a local tensor of shape {got}, but its piece of a tensor of shape "
        f"{shape} laid out as {tuple(placements)} has shape {want} (shards are cut as torch.chunk cuts). Give the pieces "
        "those shapes, or pass the global shape= that they really are pieces of"
    )


def check_all_ranks(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Shape | None
) -> Shape:
    """Agree with all ranks of *mesh* on dtype, requires_grad and global shape; the shape is returned.

    Raises:
        LayoutError: the same on every rank, naming the first coordinate that does not fit.
    """
    mine = Piece(tuple(local.shape), local.dtype, local.requires_grad)
    device = torch.device(mesh.device_type) if local.is_meta else local.device
    table = _table(mine, mesh, device)
    first_where, first = next(iter(table.items()))
    for where, piece in table.items():
        if (len(piece.shape), piece.dtype, piece.requires_grad) != (
            len(first.shape),
            first.dtype,
            first.requires_grad,
        ):
            msg = f"ranks disagree about the tensor: at mesh coordinate {first_where} it is {first}, at {where} it is {piece}"
            raise LayoutError(msg)
    whole = _agreed_shape(table, mesh, placements) if shape is None else shape
    for where, piece in table.items():
        want = _expected(whole, mesh, where, placements)
        if piece.shape != want:
            raise _misfit(where, piece.shape, want, whole, placements)
    return whole


def _with_equal_replicas(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> Tensor:
    for axis, placement in enumerate(placements):
        if placement.is_replicate() and mesh.size(axis) > 1:
            local = _Broadcast.apply(local, mesh, axis)
    return local


class _Broadcast(torch.autograd.Function):
    """The first rank's values everywhere; the gradient passes as it is, since the replicas stand for one tensor."""

    @staticmethod
    def forward(_ctx: object, local: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        return broadcast(local.contiguous(), 0, mesh.get_group(axis))

    @staticmethod
    def backward(_ctx: object, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def check_from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    *,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> tuple[Tensor, Shape, Shape]:
    """The local tensor, global shape and global stride that ``from_local`` was given or can find out.

    Raises:
        LayoutError: when they contradict each other or the shard rule.
    """
    if stride is not None and shape is None:
        msg = f"stride={tuple(stride)} was given without shape; pass both, or shape alone for a row-major tensor"
        raise LayoutError(msg)
    where = mesh.get_coordinate()
    if where is None:
        if shape is None:
            shape, stride = global_shape(local, mesh, placements)
        return local.new_empty(0), tuple(shape), tuple(stride or contiguous_stride(tuple(shape)))
    whole = None if shape is None else tuple(shape)
    if run_check:
        whole = check_all_ranks(local, mesh, placements, whole)
        local = _with_equal_replicas(local, mesh, placements)
    if whole is None:
        whole, steps = global_shape(local, mesh, placements)
        return local, whole, steps
    if not torch.compiler.is_compiling():
        want = _expected(whole, mesh, tuple(where), placements)
        if tuple(local.shape) != want:
            raise _misfit(tuple(where), tuple(local.shape), want, whole, placements)
    if stride is None and shape is None:
        even, steps = global_shape(local, mesh, placements)
        if even == whole:
            return local, whole, steps
    return local, whole, tuple(stride or contiguous_stride(whole))


def check_tensor_meta(local_tensor: Tensor, check_shape_stride: bool = False) -> None:
    """Raise on every rank of the world unless all of them hold a tensor of the same dtype and requires_grad.

    Args:
        local_tensor: this rank's tensor.
        check_shape_stride: whether shape and stride have to agree, too.

    Raises:
        LayoutError: (a `ValueError`) naming the first rank that differs and how.
    """
    facts = [_DTYPES.index(local_tensor.dtype), int(local_tensor.requires_grad)]
    if check_shape_stride:
        sizes, steps = list(local_tensor.shape), list(local_tensor.stride())
        padding = [0] * (_MOST_DIMS - len(sizes))
        facts += [len(sizes), *sizes, *padding, *steps, *padding]
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return
    device = local_tensor.device
    if local_tensor.is_meta:
        device = torch.device("cpu")
    row = torch.tensor([facts], dtype=torch.int64, device=device)
    rows = wait(all_gather(row, world)).tolist()
    for rank, other in enumerate(rows):
        if other != rows[0]:
            msg = (
                f"Inconsistent tensor metadata (including shape and stride) across ranks: rank 0 holds {_told(rows[0])}, "
                f"rank {rank} holds {_told(other)}"
            )
            raise LayoutError(msg)


def _told(facts: Sequence[int]) -> str:
    dtype, requires_grad, *rest = facts
    out = f"{_DTYPES[dtype]}, requires_grad={bool(requires_grad)}"
    if rest:
        ndim, sizes, steps = rest[0], rest[1 : 1 + _MOST_DIMS], rest[1 + _MOST_DIMS :]
        out += f", shape {tuple(sizes[:ndim])}, stride {tuple(steps[:ndim])}"
    return out
