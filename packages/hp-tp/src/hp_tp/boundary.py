"""A value crosses the boundary of a parallel module: labelled, moved, wrapped or unwrapped, with right gradients.

The rule: a plain tensor is what the style's label says; a distributed tensor is what *it* says, whatever the label. Both
then move to the layout wanted, with the fewest collectives, and leave as plain or distributed as asked. Nothing moves
when it is there already, and a plain tensor that stays plain makes no wrapper on its way. What the module itself does not
use at once moves lazily: the collective runs while others work, and the first operator on its result waits. The exception is
a plain result with a gradient: torch's lazily waited tensor loses its history where it enters a compiled program.

A label tells how a plain tensor is cut but not how long the whole is, so a plain shard stands for even shards; where a
style knows the whole size (of the features, always) it says so, and a result whose pieces would be uneven is not handed
out as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from hp_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    redistribute_local,
)
from hp_dtensor.layout import resolve
from hp_dtensor.local import as_ours, own_piece
from hp_dtensor.placements import shard_dim
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp.errors import BoundaryError
from hp_tp.partial_gradient import leave

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "check_even",
    "hand_out",
    "layout_on",
    "map_tensors",
    "move",
    "normal",
]

REPLICATE = Replicate()
PARTIAL = Partial()


def normal(placement: Placement, ndim: int) -> Placement:
    """*placement* with a non-negative dim, for a tensor of *ndim* dims."""
    dim = shard_dim(placement)
    if dim is None or dim >= 0:
        return placement
    if isinstance(placement, StridedShard):
        return StridedShard(dim + ndim, split_factor=placement.split_factor)
    return Shard(dim + ndim)


def layout_on(value: Tensor, mesh: DeviceMesh, where: str) -> tuple[Placement, ...] | None:
    """How a distributed *value* is laid out, None for a plain one.

    Raises:
        BoundaryError: when it lives on another mesh.
    """
    if not isinstance(value, TorchDTensor):
        return None
    if torch.compiler.is_compiling():  # the eager program has compared the meshes
        return tuple(value.placements)
    found = value.device_mesh
    if found is not mesh and found != mesh:
        message = (
            f"{where} is a DTensor on {found}, but the style was applied on {mesh}: a style moves values over its own "
            f"axis only. Pass x.to_local(), or a DTensor on the mesh {mesh}."
        )
        raise BoundaryError(message)
    return tuple(value.placements)


def move(
    value: Tensor,
    mesh: DeviceMesh,
    label: Placement,
    target: Placement,
    *,
    local: bool,
    where: str,
    grad: Placement | None = None,
    lazy: bool = False,
) -> Tensor:
    """*value* moved to *target*, as a plain tensor when *local*, else as one of our distributed tensors.

    Args:
        value: plain, and then laid out as *label*; or distributed.
        mesh: the one axis.
        label: what a plain value is.
        target: what is wanted.
        local: whether a plain tensor is wanted.
        where: what the value is, for errors.
        grad: how the gradients of a plain result fit together; like *target* when None. Partial says that each rank
            uses its replica for other work.
        lazy: return while the last collective is still under way, unless the result is plain and has a gradient; whoever uses
            the result first waits for it.

    Raises:
        BoundaryError: when the value is on another mesh.
        LayoutError: when a placement does not fit the value.
    """
    held = layout_on(value, mesh, where)
    wanted = (normal(target, value.ndim),)
    if held is None:
        source = (normal(label, value.ndim),)
        if local:
            if source == wanted and grad is None:
                return value
            return redistribute_local(
                value,
                mesh,
                source,
                wanted,
                grad_placements=None if grad is None else (grad,),
                async_op=lazy and not _recorded(value),
            )
        entered = DTensor.from_local(value, mesh, source)
        return entered if source == wanted else entered.redistribute(mesh, wanted, async_op=lazy)
    if not local:
        ours = value if isinstance(value, DTensor) else as_ours(cast("TorchDTensor", value))
        return ours if held == wanted else ours.redistribute(mesh, wanted, async_op=lazy)
    if held == wanted:
        return leave(value, grad)
    return redistribute_local(
        own_piece(value),
        mesh,
        held,
        wanted,
        shape=tuple(value.shape),
        grad_placements=None if grad is None else (grad,),
        async_op=lazy and not _recorded(value),
    )


def _recorded(value: Tensor) -> bool:
    """Whether gradients of what is made of *value* are wanted."""
    return value.requires_grad and torch.is_grad_enabled()


def check_even(
    placement: Placement,
    shape: Sequence[int],
    mesh: DeviceMesh,
    where: str,
    otherwise: str = "set use_local_output=False so that the output is a DTensor, which knows it",
) -> None:
    """Refuse to hand out a plain shard of a dim that does not divide: what takes it could not tell the whole size.

    Args:
        placement: of the shard.
        shape: of the whole.
        mesh: the one axis.
        where: what the whole is, for the error.
        otherwise: what to do if it cannot be padded.

    Raises:
        BoundaryError: when *placement* cuts a dim of *shape* unevenly.
    """
    dim = shard_dim(placement)
    size = mesh.size()
    if dim is None or shape[dim] % size == 0:
        return
    message = (
        f"{where} has {shape[dim]} elements in dim {dim}, which {size} ranks do not divide; as a plain tensor a piece would "
        f"not tell the whole size. Pad to a multiple of {size}, or {otherwise}."
    )
    raise BoundaryError(message)


def hand_out(
    value: Tensor,
    mesh: DeviceMesh,
    placement: Placement,
    shape: Sequence[int] | None,
    *,
    local: bool,
) -> Tensor:
    """*value*, a plain piece laid out as *placement*, as the module's output: as it is, or wrapped."""
    if local:
        return value
    return DTensor.from_local(value, mesh, resolve((placement,), mesh, value.ndim), shape=shape)


def map_tensors(function: Callable[[Tensor], object], value: object) -> object:
    """*value* with each tensor in it replaced: in tuples (named ones too), lists and dicts, at any depth."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in value]
        make = getattr(value, "_make", tuple)  # a named tuple is made from an iterable by this
        return make(items)
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value
