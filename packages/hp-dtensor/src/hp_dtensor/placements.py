"""What one mesh axis does to a tensor: torch's own placement values, under public names.

The values are torch's (``Shard(0) == torch.distributed.tensor.Shard(0)``), so that a layout written for one library
means the same in the other. Wrapping them in types of our own would have cost a conversion at every border
with FSDP2, checkpoints and user code, and an ``isinstance`` check that fails somewhere.

Rules kept here and nowhere else: negative dims are made positive before anything is compared, a placement list has one
entry an axis, and missing trailing entries are an error rather than a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_dtensor._torch import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.errors import LayoutError

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh

__all__ = [
    "MaskPartial",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "gradient_placements",
    "normalize_placements",
    "shard_dim",
]

REDUCE_OPS = ("sum", "avg", "max", "min", "product", "all")
REPLICATE = Replicate()


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that *placement* cuts, or None when it cuts none."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def gradient_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Where the gradient of a tensor laid out as *placements* lives: the same, a Partial value having a Replicate gradient.

    ``y = sum_r x_r`` has ``dL/dx_r = dL/dy`` on every rank, which is what Replicate says.
    """
    return tuple(REPLICATE if placement.is_partial() else placement for placement in placements)


def _normalize_one(placement: object, ndim: int, axis: int) -> Placement:
    if not isinstance(placement, Placement):
        msg = (
            f"placements[{axis}] is {placement!r} of type {type(placement).__name__}; each entry must be a Placement: "
            "Shard(dim), StridedShard(dim, split_factor=n), Replicate() or Partial(op)"
        )
        raise LayoutError(msg)
    if isinstance(placement, Partial) and placement.reduce_op not in REDUCE_OPS:
        msg = f"placements[{axis}] is Partial({placement.reduce_op!r}); the reduce op must be one of {', '.join(REDUCE_OPS)}"
        raise LayoutError(msg)
    dim = shard_dim(placement)
    if dim is None:
        return placement
    if not -ndim <= dim < ndim:
        what = (
            f"the tensor has {ndim} dims" if ndim else "the tensor is 0-d and has no dim to shard"
        )
        msg = f"placements[{axis}] is {placement}, but {what}; dims from {-ndim} to {ndim - 1} are legal"
        raise LayoutError(msg)
    if dim >= 0:
        return placement
    if isinstance(placement, StridedShard):
        return StridedShard(dim + ndim, split_factor=placement.split_factor)
    return Shard(dim + ndim)


def normalize_placements(
    placements: Sequence[Placement] | Placement | None, mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """*placements* with non-negative dims, one entry for each axis of *mesh*; None means replicated everywhere.

    Args:
        placements: one placement for each mesh axis, or a single one on a 1-D mesh.
        mesh: the mesh whose axes they speak of.
        ndim: how many dims the tensor has.

    Raises:
        LayoutError: when an entry is no placement, names a dim that the tensor lacks, when the number of entries differs
            from the number of axes, or when the Partial entries disagree about how addends combine.
    """
    if placements is None:
        return (REPLICATE,) * mesh.ndim
    if isinstance(placements, Placement):
        placements = (placements,)
    if len(placements) != mesh.ndim:
        msg = (
            "placements and the axes of the mesh must have the same length, got "
            f"{len(placements)} placements {tuple(placements)} for a mesh of {mesh.ndim} axes {tuple(mesh.shape)}; "
            "give exactly one placement for each axis"
        )
        raise LayoutError(msg)
    out = tuple(_normalize_one(placement, ndim, axis) for axis, placement in enumerate(placements))
    kinds = {placement.reduce_op for placement in out if isinstance(placement, Partial)}
    if len(kinds) > 1:
        msg = (
            f"placements {out} mix Partial kinds {sorted(kinds)}: the order in which they would be reduced changes the "
            "value; use one kind on all axes"
        )
        raise LayoutError(msg)
    return out
