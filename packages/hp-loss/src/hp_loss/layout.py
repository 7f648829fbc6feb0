"""How distributed logits lie on a mesh, read once: which axes cut the classes, which cut the tokens.

An axis of the mesh that shards the class dimension is a *vocabulary axis*: statistics are merged
over it. One that shards another dimension is a *batch axis*: tokens are summed over it, when they
are summed at all. Replicated axes are neither, and neither are axes of one rank. Any number of
each kind may come in any order.

The targets' layout follows from the logits': the class dimension is gone, dims after it move down
by one, and what cut the classes now replicates. Targets that lie otherwise are moved there
(integers, one per token).

A Partial axis has addends where a softmax needs values. Summing them is the size of the logits, so
it is never done behind the caller's back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from hp_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    redistribute_local,
    to_local,
)
from hp_dtensor.placements import shard_dim
from hp_mesh import DeviceMesh
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.placement_types import Placement

from hp_loss.cross_entropy import class_dim_of
from hp_loss.errors import LossLayoutError
from hp_loss.vocabulary import Vocabulary, held_classes

__all__ = [
    "LogitsLayout",
    "as_our_mesh",
    "class_dim_of_dtensor",
    "layout_of",
    "local_target",
    "local_weight",
    "make_layout",
    "moved_to",
    "wrap_local",
]


@dataclass(frozen=True, slots=True)
class LogitsLayout:
    """The layout of logits, as a loss reads it."""

    mesh: DeviceMesh
    """Where the logits are."""
    placements: tuple[Placement, ...]
    """The logits' placements, none of them Partial."""
    shape: tuple[int, ...]
    """The logits' global shape."""
    class_dim: int
    """The dimension of the classes."""
    vocabulary: Vocabulary
    """The classes held here."""
    batch_axes: tuple[int, ...]
    """The mesh axes over which tokens are cut."""

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The global shape of the targets."""
        return self.shape[: self.class_dim] + self.shape[self.class_dim + 1 :]

    @property
    def token_placements(self) -> tuple[Placement, ...]:
        """The placements of anything that has one entry per token."""
        return tuple(_without(placement, self.class_dim) for placement in self.placements)

    @property
    def replica_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of ranks that hold the same tokens and classes."""
        return tuple(
            self.mesh.get_group(axis)
            for axis, placement in enumerate(self.placements)
            if placement.is_replicate() and self.mesh.size(axis) > 1
        )

    def sum_over_batch(self, vector: Tensor) -> Tensor:
        """Sum a local tensor over the batch axes; its gradient passes unchanged, as that of any sum of addends."""
        if not self.batch_axes:
            return vector
        return redistribute_local(vector, self.mesh, self.addend_placements, self._replicated)

    @property
    def addend_placements(self) -> tuple[Placement, ...]:
        """The placements of a sum over this rank's tokens."""
        axes = range(self.mesh.ndim)
        return tuple(Partial("sum") if axis in self.batch_axes else Replicate() for axis in axes)

    @property
    def _replicated(self) -> tuple[Placement, ...]:
        return (Replicate(),) * self.mesh.ndim

    def wrap(self, loss: Tensor, reduction: str) -> DTensor:
        """Make the local *loss* a DTensor: cut like the tokens, or addends of a sum, or a mean that all ranks have."""
        if reduction == "none":
            shape, placements = self.token_shape, self.token_placements
        else:
            shape = ()
            placements = self.addend_placements if reduction == "sum" else self._replicated
        return wrap_local(loss, self.mesh, placements, shape)

    def wrap_per_choice(self, values: Tensor) -> DTensor:
        """Make local *values*, of the tokens' shape and one more dimension, a DTensor cut like the tokens."""
        return wrap_local(
            values, self.mesh, self.token_placements, (*self.token_shape, values.shape[-1])
        )


def wrap_local(
    local: Tensor, mesh: TorchDeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Make *local* this rank's part of a DTensor of the global *shape*, row-major; differentiable."""
    stride = _contiguous_stride(shape)
    return DTensor.from_local(
        local,
        as_our_mesh(mesh),
        tuple(placements),
        run_check=False,
        shape=tuple(shape),
        stride=stride,
    )


def as_our_mesh(mesh: TorchDeviceMesh) -> DeviceMesh:
    """*mesh* as one of ours, with the same groups."""
    return mesh if isinstance(mesh, DeviceMesh) else DeviceMesh.from_torch(mesh)


def class_dim_of_dtensor(logits: TorchDTensor, target: Tensor, class_dim: int | None) -> int:
    """`class_dim_of` for logits whose targets may be this rank's part only.

    Then shapes don't tell, since a short shard of one dimension may be as long as one of another
    on some ranks and not on others. The class dimension is dimension 1 if that is cut and the last
    isn't, and the last otherwise; where neither is cut the shapes are the same on all ranks, and
    do tell.
    """
    shape, target_shape = tuple(logits.shape), tuple(target.shape)
    last = len(shape) - 1
    if class_dim is not None or last < 2 or isinstance(target, TorchDTensor):
        return class_dim_of(shape, target_shape, class_dim)
    if target_shape in (shape, shape[:1] + shape[2:], shape[:-1]):
        return class_dim_of(shape, target_shape, None)
    cut = {shard_dim(placement) for placement in logits.placements}
    if cut.isdisjoint((1, last)):
        return class_dim_of(tuple(logits.to_local().shape), target_shape, None)
    return 1 if 1 in cut and last not in cut else last


def layout_of(logits: TorchDTensor, class_dim: int) -> LogitsLayout:
    """Read the layout of *logits*.

    Raises:
        LossLayoutError: if an axis is Partial, or this rank isn't in the mesh.
    """
    mesh, placements = as_our_mesh(logits.device_mesh), tuple(logits.placements)
    if any(placement.is_partial() for placement in placements):
        fixed = tuple(
            Replicate() if placement.is_partial() else placement for placement in placements
        )
        raise LossLayoutError(
            f"logits with the placements {placements} are addends on at least one mesh axis, and a softmax needs their "
            f"sum: call logits.redistribute(placements={list(fixed)}) first, or use a head whose output is sharded over "
            "the classes (ColwiseParallel with output_layouts=Shard(-1)), which moves nothing",
            placements=str(placements),
        )
    return make_layout(mesh, placements, tuple(logits.shape), class_dim)


def make_layout(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], class_dim: int
) -> LogitsLayout:
    """Describe logits of *shape* on *mesh*, which may never exist as a tensor; none of *placements* is Partial."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LossLayoutError(
            f"this rank is not in the mesh of the logits, {mesh}: compute the loss only on ranks of the mesh",
            placements=str(placements),
        )
    splits, groups, batch_axes = [], [], []
    for axis, placement in enumerate(placements):
        ranks = int(mesh.size(axis))
        if ranks == 1 or not isinstance(placement, (Shard, StridedShard)):
            continue
        if placement.dim % len(shape) == class_dim:
            factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            splits.append((ranks, coordinate[axis], factor))
            groups.append(mesh.get_group(axis))
        else:
            batch_axes.append(axis)
    classes = shape[class_dim]
    vocabulary = Vocabulary(classes, held_classes(classes, tuple(splits)), tuple(groups))
    return LogitsLayout(mesh, placements, shape, class_dim, vocabulary, tuple(batch_axes))


def local_target(target: Tensor, layout: LogitsLayout) -> Tensor:
    """This rank's part of *target*, for logits with *layout*.

    A plain tensor of the global shape is taken to be the same on all ranks and is cut; one of the
    local shape is taken to be this rank's part already. A DTensor is moved to where the logits
    need it.
    """
    dense = target.is_floating_point()
    placements = layout.placements if dense else layout.token_placements
    shape = layout.shape if dense else layout.token_shape
    if isinstance(target, TorchDTensor):
        _refuse_other_mesh(target, layout, "the targets")
        source = tuple(target.placements)
        local = to_local(target)
        if source == placements:
            return local
        return redistribute_local(
            local, layout.mesh, source, placements, shape=tuple(target.shape)
        )
    if tuple(target.shape) != shape:
        return target
    return redistribute_local(
        target, layout.mesh, (Replicate(),) * layout.mesh.ndim, placements, shape=shape
    )


def local_weight(weight: Tensor | None, layout: LogitsLayout) -> Tensor | None:
    """The class weights as this rank needs them: those of its classes, or all of them."""
    if weight is None or not isinstance(weight, TorchDTensor):
        return weight
    _refuse_other_mesh(weight, layout, "the class weights")
    source, local = tuple(weight.placements), to_local(weight.detach())
    if source == _class_placements(layout):
        return local
    replicated = (Replicate(),) * layout.mesh.ndim
    return redistribute_local(local, layout.mesh, source, replicated, shape=tuple(weight.shape))


def _class_placements(layout: LogitsLayout) -> tuple[Placement, ...]:
    """The placements of one number per class, cut like the logits' classes."""
    return tuple(_only(placement, layout.class_dim) for placement in layout.placements)


def _without(placement: Placement, class_dim: int) -> Placement:
    if not isinstance(placement, (Shard, StridedShard)) or placement.dim < class_dim:
        return placement
    return Replicate() if placement.dim == class_dim else moved_to(placement, placement.dim - 1)


def _only(placement: Placement, class_dim: int) -> Placement:
    if not isinstance(placement, (Shard, StridedShard)) or placement.dim != class_dim:
        return Replicate()
    return moved_to(placement, 0)


def moved_to(placement: Shard | StridedShard, dim: int) -> Placement:
    """The same cut of another dimension."""
    if isinstance(placement, StridedShard):
        return StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, out = 1, []
    for size in reversed(shape):
        out.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(out))


def _refuse_other_mesh(tensor: TorchDTensor, layout: LogitsLayout, what: str) -> None:
    if tensor.device_mesh != layout.mesh:
        raise LossLayoutError(
            f"{what} are on {tensor.device_mesh} and the logits on {layout.mesh}: distribute both over one mesh, or pass "
            "a plain tensor: of the global shape, the same on all ranks, or of this rank's part",
            placements=str(tuple(tensor.placements)),
        )
