"""Lookups in a table of which each coordinate holds some rows.

The idea: an index whose row lives elsewhere gives zeros here, so the lookups of all coordinates
sum to the whole answer. The gradient of the table needs no communication at all: each coordinate
adds up what falls on its own rows.

The rule: indices speak about the whole table, and so does ``padding_idx``. An index that the whole
table lacks is passed on as one that the local rows lack too, so that the operator itself raises
as it does on one device. A frequency (``scale_grad_by_freq``) is counted over all indices.

The design not taken: a Partial that carries its mask along. Its value depends on state that two
equal layouts would not share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hp_dtensor.placements import Placement, Replicate, Shard
from hp_dtensor.rules._labels import Dims, label_strategies
from hp_dtensor.rules._registry import (
    LocalCall,
    OpCall,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)
from hp_dtensor.rules.pointwise import linear_in

__all__ = ["at_least_one", "localize_index"]

Intervals = tuple[tuple[int, int], ...]


def localize_index(
    index: torch.Tensor, intervals: Intervals, size: int, *, negative: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn global indices into positions among the local ones.

    Args:
        index: Indices of any integer dtype.
        intervals: The half-open intervals of global indices that are held here, in order.
        size: Number of global indices.
        negative: Whether negative indices count from the end.

    Returns:
        The local positions and a mask of the indices that are held elsewhere, whose position is
        0. An index that the whole lacks gets a position that a local tensor lacks as well, even
        one that had no index and was given one (see `at_least_one`).

    Example:
        >>> import torch
        >>> position, foreign = localize_index(torch.tensor([0, 2, 3, 4]), ((2, 4),), 4)
        >>> position.tolist(), foreign.tolist()
        ([0, 0, 1, 2], [True, False, False, False])
    """
    if negative:
        index = torch.where(index < 0, index + size, index)
    position = torch.zeros_like(index)
    foreign = torch.ones_like(index, dtype=torch.bool)
    held = 0
    for start, end in intervals:
        inside = (index >= start) & (index < end)
        position = torch.where(inside, index - (start - held), position)
        foreign &= ~inside
        held += end - start
    nowhere = (index < 0) | (index >= size)
    return position.masked_fill_(nowhere, max(held, 1)), foreign & ~nowhere


def at_least_one(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return *tensor*, or zeros with one index along *dim* if it has none: to look up nothing in.

    Example:
        >>> import torch
        >>> at_least_one(torch.ones(0, 3), 0).shape
        torch.Size([1, 3])
    """
    if tensor.shape[dim]:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = 1
    return tensor.new_zeros(shape)


def _embedding(call: OpCall) -> Iterator[Strategy]:
    """Cut the indices, the width of the rows, or the rows themselves (the result is a sum)."""
    indices = call.tensors[1]
    lead: Dims = [("index", dim) for dim in range(len(indices.shape))]
    yield from label_strategies(call, [["row", "width"], lead], [[*lead, "width"]])


def _embedding_local(local: LocalCall) -> Callable[..., object]:
    call = local.call
    rows = call.tensors[0].shape[0]
    intervals = local.input_boxes[0][0]
    if local.input_local_shapes[0][0] == rows:
        return call.op

    def run(weight: torch.Tensor, indices: torch.Tensor, *_static: object) -> torch.Tensor:
        position, foreign = localize_index(indices, intervals, rows)
        found: torch.Tensor = call.op(at_least_one(weight, 0), position)
        return found.masked_fill_(foreign.unsqueeze(-1), 0)

    return run


def _embedding_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, indices, num_weights, padding_idx, scale_grad_by_freq)``."""
    indices = call.tensors[1]
    lead: Dims = [("index", dim) for dim in range(len(indices.shape))]
    by_frequency = bool(call.arg(4, "scale_grad_by_freq", False))
    yield from label_strategies(
        call,
        [[*lead, "width"], lead],
        [["row", "width"]],
        labels=["width"] if by_frequency else [*lead, "width"],
    )
    # Replicated before cut: the layout of the table is not known here, and a gradient that is cut
    # although the table is not would have to be gathered.
    yield Strategy((Replicate(),), (Replicate(), Replicate()))
    yield Strategy((Shard(0),), (Replicate(), Replicate()))


def _embedding_backward_local(local: LocalCall) -> Callable[..., object]:
    call = local.call
    box = local.output_boxes[0]
    rows = call.output.shape[0]
    shape = local.output_local_shapes[0] or (0, 0)
    if box is None or shape[0] == rows:
        return call.op
    intervals = box[0]

    def run(
        grad: torch.Tensor,
        indices: torch.Tensor,
        _rows: int,
        padding: int,
        by_frequency: bool,
    ) -> torch.Tensor:
        position, foreign = localize_index(indices, intervals, rows)
        # A row that is held elsewhere and the padding row both receive nothing: one row more,
        # which is cut off again, stands for both.
        lost = foreign if padding < 0 else foreign | (indices == padding)
        position = position.masked_fill_(lost, shape[0])
        found: torch.Tensor = torch.ops.aten.embedding_dense_backward(
            grad, position, shape[0] + 1, -1, by_frequency
        )
        return found[: shape[0]]

    return run


# --- bags -------------------------------------------------------------------------------------
# Only the width of the rows is cut: a bag may hold rows from anywhere, and its maximum needs all.


def _bag(call: OpCall) -> Iterator[Strategy]:
    """``(weight, indices, offsets, ...) -> (bags, offset2bag, bag_size, positions of maxima)``."""
    width = call.tensors[0].shape[1]
    results: list[Dims | Placement | None] = [[None, "width"], Replicate(), Replicate()]
    positions = call.outputs[3]
    wide = positions is not None and positions.shape[1:] == (width,)
    results.append([None, "width"] if wide else Replicate())
    yield from label_strategies(call, [[None, "width"], *(map(_whole, call.tensors[1:]))], results)


def _bag_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, indices, offset2bag, bag_size, positions of maxima, ...)``."""
    width = call.tensors[0].shape[1]
    yield from label_strategies(
        call,
        [[None, "width"] if meta.shape[1:] == (width,) else _whole(meta) for meta in call.tensors],
        [[None, "width"]],
    )


def _bag_weights_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, weight, indices, ...)``: a product of rows, summed over their width."""
    wide: Dims = [None, "width"]
    yield from label_strategies(
        call, [wide, wide, *map(_whole, call.tensors[2:])], [_whole(call.output)]
    )


def _whole(meta: TensorMeta) -> Dims:
    return [None] * len(meta.shape)


def _linear_table(call: OpCall) -> Iterator[frozenset[int]]:
    return linear_in(call, [[0]])


register_rule(aten_ops("_embedding_bag.default", "_embedding_bag_forward_only.default"), _bag)
register_rule(
    aten_ops("_embedding_bag_dense_backward.default"), _bag_backward, linear=_linear_table
)
register_rule(
    aten_ops("_embedding_bag_per_sample_weights_backward.default"), _bag_weights_backward
)
register_rule(
    aten_ops("embedding.default"), _embedding, local=_embedding_local, linear=_linear_table
)
register_rule(
    aten_ops("embedding_dense_backward.default"),
    _embedding_backward,
    local=_embedding_backward_local,
    linear=_linear_table,
)
