"""An embedding whose table is cut by columns (features) or by rows (vocabulary), computed on local tensors.

Cut by columns each rank looks every id up and gives its features. Cut by rows each rank looks up the ids that it holds and
gives zeros for the others, so that the sum over ranks is the answer; an id that is not held must be looked up *somewhere*
safe first, and gives no gradient. ``padding_idx`` is a global id: its row's gradient is dropped by the rank that holds it.

The mask lives in the call. Torch keeps it in a placement object that calls share, and two tables could mix theirs up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from hp_dtensor import Placement, Shard, redistribute_local, to_local
from hp_dtensor.shards import local_intervals
from hp_mesh import DeviceMesh

from hp_tp.boundary import PARTIAL, REPLICATE, check_even, hand_out, move, normal
from hp_tp.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hp_tp.substitution import Forward

__all__ = ["EmbeddingLayout", "check_embedding", "held_rows"]


def held_rows(vocabulary: int, mesh: DeviceMesh) -> tuple[int, int]:
    """The range of the *vocabulary* that this rank holds when *mesh* cuts it; an empty one at the end when it holds none."""
    held = local_intervals(vocabulary, ((mesh.size(), mesh.get_local_rank(), 1),))
    return held[0] if held else (vocabulary, vocabulary)


def check_embedding(module: nn.Embedding) -> None:
    """Refuse options that need a whole table on each rank.

    Raises:
        UnsupportedModuleError: for ``max_norm`` and ``sparse``.
    """
    if module.max_norm is not None:
        message = (
            f"an Embedding with max_norm={module.max_norm} cannot be cut: it rescales rows of the table while it is read, "
            "on the ranks that look them up only. Clip the table in the training loop, or leave the embedding out of the plan."
        )
        raise UnsupportedModuleError(message)
    if module.sparse:
        message = (
            "an Embedding with sparse=True cannot be cut: its gradient is a sparse tensor, which has no layout. Use "
            "sparse=False."
        )
        raise UnsupportedModuleError(message)


@dataclass(frozen=True, slots=True)
class EmbeddingLayout:
    """How one embedding runs: a wrapper of its forward."""

    mesh: DeviceMesh
    """The one axis that the table is cut over."""
    by_rows: bool
    """Whether the table is cut along the vocabulary; along the features otherwise."""
    input_layout: Placement
    """What plain ids are."""
    output_layout: Placement
    """What the output is."""
    use_local_output: bool
    """Whether the output is a plain tensor."""
    reduce_dtype: torch.dtype | None
    """The dtype in which addends travel."""
    held: tuple[int, int]
    """The range of ids whose rows this rank holds, when the table is cut by rows."""

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Tensor:
        """Return the rows of the ids; *forward* is not called."""
        del forward
        return self._run(module, *args, **kwargs)  # type: ignore[arg-type]  # forward's own arguments

    def _run(self, module: nn.Embedding, input: Tensor) -> Tensor:  # noqa: A002  # torch's name for it
        ids = move(
            input,
            self.mesh,
            self.input_layout,
            REPLICATE,
            local=True,
            where="the input of an embedding",
        )
        shape = (*ids.shape, module.embedding_dim)
        natural = PARTIAL if self.by_rows else normal(_LAST, len(shape))
        out = normal(self.output_layout, len(shape))
        moves = out != natural and self.mesh.size() > 1
        if moves and self.use_local_output:
            check_even(out, shape, self.mesh, "the output of an embedding")
        table = to_local(module.weight)
        rows = (
            self._held_rows(module, ids, table) if self.by_rows else _look_up(module, ids, table)
        )
        if moves:
            rows = redistribute_local(
                rows,
                self.mesh,
                (natural,),
                (out,),
                shape=shape,
                forward_dtype=self.reduce_dtype,
                async_op=not rows.requires_grad,
            )
            if rows.dtype is not table.dtype:
                rows = rows.to(table.dtype)
        return hand_out(rows, self.mesh, out, shape, local=self.use_local_output)

    def _held_rows(self, module: nn.Embedding, ids: Tensor, table: Tensor) -> Tensor:
        """The rows of the ids that this rank holds, zeros for the others."""
        start, stop = self.held
        away = (ids < start) | (ids >= stop)
        ids = ids - start
        padding = None if module.padding_idx is None else module.padding_idx - start
        if padding is not None and not 0 <= padding < stop - start:
            padding = None
        if start == stop or module.scale_grad_by_freq:
            # One more row, of zeros: for a rank without rows, and so that ids that are away count for no row's frequency.
            table = torch.cat([table, table.new_zeros(1, table.shape[1])])
            return F.embedding(
                ids.masked_fill(away, stop - start),
                table,
                padding,
                scale_grad_by_freq=module.scale_grad_by_freq,
            )
        rows = F.embedding(ids.masked_fill(away, 0), table, padding)
        return rows.masked_fill(away.unsqueeze(-1), 0)


def _look_up(module: nn.Embedding, ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(
        ids, table, module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq
    )


_LAST = Shard(-1)
