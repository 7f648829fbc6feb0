"""A packed weight: blocks of rows (queries, keys and values; gate and up), of each of which a rank uses a piece.

A plain shard of the rows would give one rank all queries and another all values. Equal blocks are cut one by one, which is what
``StridedShard`` says. For blocks of unequal size no placement says it, so that the rows lie in contiguous shards, as parameters
at rest, and are gathered when the layer runs; a rank keeps the rows of its pieces, and gradients are scattered back. Either
way the parameter has the shape, the name and the order of the single device, and so has a checkpoint.

Not taken: to store the rows in the order that ranks use them, which every checkpoint and every other degree would have to
undo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from hp_dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    redistribute_local,
    to_local,
)

from hp_tp.boundary import PARTIAL, REPLICATE, move

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor, nn

    from hp_tp.substitution import Forward

__all__ = ["FusedLayout", "FusedRows", "problem_of"]


def problem_of(blocks: tuple[int, ...], size: int, ranks: int) -> str | None:
    """What is wrong with cutting *size* rows as *blocks* over *ranks*; None when nothing is."""
    if not blocks or any(block < 1 for block in blocks) or sum(blocks) != size:
        return (
            f"fused={blocks} are blocks of {sum(blocks)} outputs in all, and the layer has {size}"
        )
    if len(set(blocks)) == 1 or not any(block % ranks for block in blocks):
        return None
    legal = [d for d in range(1, min(blocks) + 1) if not any(block % d for block in blocks)]
    return f"{ranks} ranks do not divide the blocks fused={blocks}; degrees that do: {legal}"


@dataclass(frozen=True, slots=True)
class FusedRows:
    """Which rows of a packed weight a rank uses, and how it lies at rest."""

    mesh: DeviceMesh
    blocks: tuple[int, ...]
    """The sizes of the blocks of the whole weight."""

    def pieces(self) -> list[tuple[int, int]]:
        """Start and length of this rank's piece of each block."""
        ranks, own = self.mesh.size(), self.mesh.get_local_rank()
        found, start = [], 0
        for block in self.blocks:
            found.append((start + own * (block // ranks), block // ranks))
            start += block
        return found

    def layout(self) -> Placement:
        """How the weight lies at rest."""
        if self.mesh.size() == 1:
            return Shard(0)
        if len(set(self.blocks)) == 1:
            return StridedShard(0, split_factor=len(self.blocks))
        return Shard(0)

    def local(self, weight: Tensor) -> Tensor:
        """This rank's rows of the distributed *weight*, with a gradient laid out like it."""
        piece = to_local(weight)
        layout = self.layout()
        if self.mesh.size() == 1 or isinstance(layout, StridedShard):
            return piece
        # Moved once each way: gathered here, and its gradient scattered.
        whole = redistribute_local(
            piece,
            self.mesh,
            (layout,),
            (Replicate(),),
            shape=tuple(weight.shape),
            grad_placements=(Partial(),),
        )
        return torch.cat([whole.narrow(0, *piece) for piece in self.pieces()])


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """How a linear layer with unequal blocks of outputs runs: a wrapper of its forward."""

    rows: FusedRows
    input_layout: Placement

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Tensor:
        """Return this rank's columns of each block, in order; *forward* is not called."""
        del forward
        return self._run(module, *args, **kwargs)  # type: ignore[arg-type]  # forward's own arguments

    def _run(self, module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  # torch's name for it
        whole = move(
            input,
            self.rows.mesh,
            self.input_layout,
            REPLICATE,
            local=True,
            grad=PARTIAL,
            where="the input of a fused linear layer",
        )
        bias: Tensor | None = module.bias  # torch declares that it is there
        if bias is not None:
            bias = self.rows.local(bias)
        return F.linear(whole, self.rows.local(module.weight), bias)
