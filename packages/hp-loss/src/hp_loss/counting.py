"""How many tokens count: the denominator of a mean over more than one call sees.

A step's loss is a mean over all tokens of all micro-batches on all ranks that aren't padding. Each
call sees some of them, and their numbers differ; so the count is taken once, over all labels of
the step, and each call divides its sum by it. The sum of the calls' gradients is then the gradient
of the one mean, whatever the padding. The count stays on the device: nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from hp_dtensor import Replicate
from hp_dtensor.placements import shard_dim
from hp_mesh.collectives import all_reduce
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_loss.errors import LossLayoutError

__all__ = ["count_valid_tokens"]


@torch.no_grad()
def count_valid_tokens(
    labels: Tensor | Iterable[Tensor],
    *,
    ignore_index: int = -100,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Count the labels that aren't ignored, over all micro-batches and ranks.

    Args:
        labels: those of a step: one tensor, or one per micro-batch. A DTensor counts globally; of
            plain ones each rank has its own.
        ignore_index: the label that doesn't count.
        mesh: for plain labels, the mesh over all of whose axes they are cut, such as
            `mesh["dp", "cp"]`.
        group: for plain labels, the ranks over which they are cut, instead.

    Returns:
        No dimension, int64, the same on all of these ranks.

    Example:
        >>> import torch
        >>> from hp_loss import count_valid_tokens
        >>> count_valid_tokens([torch.tensor([1, 2, -100]), torch.tensor([-100, 5])])
        tensor(3)
    """
    if mesh is not None and group is not None:
        raise LossLayoutError("count_valid_tokens got mesh= and group=: give one of them")
    batches = [labels] if isinstance(labels, Tensor) else list(labels)
    if not batches:
        raise LossLayoutError(
            "count_valid_tokens got no labels: give those of at least one micro-batch"
        )
    distributed = [batch for batch in batches if isinstance(batch, TorchDTensor)]
    if distributed and len(distributed) < len(batches):
        raise LossLayoutError("count_valid_tokens got DTensors and plain tensors: give one kind")
    if distributed:
        if mesh is not None or group is not None:
            raise LossLayoutError(
                "mesh= and group= describe plain labels; a DTensor knows its mesh: leave them out"
            )
        return _count_distributed(distributed, ignore_index)
    count = torch.stack([(batch != ignore_index).sum() for batch in batches]).sum()
    groups = [group] if group is not None else [] if mesh is None else _groups(mesh)
    for one in groups:
        count = all_reduce(count, "sum", one)
    return count


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]


def _count_distributed(batches: list[TorchDTensor], ignore_index: int) -> Tensor:
    mesh, placements = batches[0].device_mesh, tuple(batches[0].placements)
    if any(
        batch.device_mesh != mesh or tuple(batch.placements) != placements for batch in batches
    ):
        raise LossLayoutError(
            "the labels of the micro-batches lie differently: give all of them one mesh and placements"
        )
    if any(placement.is_partial() for placement in placements):
        fixed = [Replicate() if placement.is_partial() else placement for placement in placements]
        raise LossLayoutError(
            f"labels with the placements {placements} are addends: call labels.redistribute(placements={fixed}) first",
            placements=str(placements),
        )
    count = torch.stack([(batch.to_local() != ignore_index).sum() for batch in batches]).sum()
    for axis, placement in enumerate(placements):
        if shard_dim(placement) is not None and mesh.size(axis) > 1:
            count = all_reduce(count, "sum", mesh.get_group(axis))
    return count
