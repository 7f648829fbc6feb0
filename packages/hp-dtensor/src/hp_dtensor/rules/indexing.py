"""Picking elements by position: dims that are not indexed may be cut, and so may the positions.

The idea: an index along one dim says nothing about the others, which are batches. The indices are
a batch themselves: each picks its own element of a whole tensor.

The rule: a cut of the indexed dim itself is right as well where the result may be a sum: a
coordinate picks what it holds and zeros elsewhere, so that the results sum to the answer. That is
not offered for booleans. Writing through an index keeps the indexed dim whole.

The design not taken: sending the indices to where the elements are. It needs data-dependent sizes
and two all-to-alls; a sum of the picked elements needs one collective of the result's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import torch

from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rules._labels import Dims, Label, broadcast_dims, broadcast_shape, label_strategies
from hp_dtensor.rules._registry import (
    LocalCall,
    OpCall,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)
from hp_dtensor.rules.embedding import at_least_one, localize_index
from hp_dtensor.rules.pointwise import is_in_place, linear_in
from hp_dtensor.rules.view import as_dims

__all__: list[str] = []

REPLICATE = Replicate()


def _dim(call: OpCall, position: int = 1) -> int:
    return as_dims(call.arg(position, "dim", 0), len(call.tensors[0].shape))[0]


def _named(ndim: int, dim: int, inside: Label | None) -> list[Label | None]:
    """Label dims by position, but *dim* as *inside*."""
    return [inside if position == dim else position for position in range(ndim)]


def _sums(meta: TensorMeta) -> bool:
    return meta.dtype != torch.bool


# --- index_select, gather and their opposites -------------------------------------------------


def _index_select(call: OpCall) -> Iterator[Strategy]:
    source, index = call.tensors[0], call.tensors[1]
    ndim, dim = len(source.shape), _dim(call)
    names = _named(ndim, dim, "picked")
    yield from label_strategies(
        call,
        [_named(ndim, dim, None), ["picked"][: len(index.shape)]],
        [names],
        reduce=None,
    )
    yield from _picked_from_pieces(call, dim)


def _picked_from_pieces(call: OpCall, dim: int) -> Iterator[Strategy]:
    source = call.tensors[0]
    if source.shape and _sums(source) and len(call.tensors) == 2:
        yield Strategy((Partial("sum"),), (Shard(dim), REPLICATE))


def _gather(call: OpCall) -> Iterator[Strategy]:
    """``gather(self, dim, index)``: the result has the shape of the index."""
    dim = _dim(call)
    yield from _aligned(call, [1], dim, results=1)
    if len(call.tensors[1].shape) == len(call.tensors[0].shape):
        yield from _picked_from_pieces(call, dim)


def _aligned(
    call: OpCall, indices: Iterable[int], dim: int, *, results: int | None = None
) -> Iterator[Strategy]:
    """Cut dims other than *dim* where all tensors have the same size in them.

    *indices* are the positions of tensors (and *results* says whether the result is too) whose
    *dim* counts picked elements, which may be cut while the first tensor is whole.
    """
    ndim = len(call.tensors[0].shape)
    if any(len(meta.shape) != ndim for meta in call.tensors):
        return
    same = [
        position
        for position in range(ndim)
        if position != dim and len({meta.shape[position] for meta in call.tensors}) == 1
    ]
    names: Dims = [position if position in same else None for position in range(ndim)]
    picked: Dims = ["picked" if position == dim else name for position, name in enumerate(names)]
    inside = set(indices) if results is not None else set()
    yield from label_strategies(
        call,
        [picked if position in inside else names for position in range(len(call.tensors))],
        [picked if results is not None else names],
        reduce=None,
    )


def _pick_local(local: LocalCall) -> Callable[..., object]:
    """Pick what is held here along the indexed dim, and zero for the rest."""
    call = local.call
    op = call.op
    source = call.tensors[0]
    if not source.shape:
        return op
    dim = _dim(call)
    size = source.shape[dim]
    if local.input_local_shapes[0][dim] == size:
        return op
    intervals = local.input_boxes[0][dim]
    alone = len(call.tensors[1].shape) != len(source.shape) or "index_select" in str(op)

    def run(
        tensor: torch.Tensor, _dim: int, index: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        position, foreign = localize_index(index, intervals, size)
        found: torch.Tensor = op(at_least_one(tensor, dim), dim, position, **kwargs)
        if alone:
            shape = [1] * found.ndim
            shape[dim] = -1
            foreign = foreign.reshape(shape)
        return found.masked_fill_(foreign, 0)

    return run


def _scatter(call: OpCall) -> Iterator[Strategy]:
    """``scatter(self, dim, index, src)``: cut what all tensors share."""
    yield from _aligned(call, (), _dim(call))


def _scatter_add(call: OpCall) -> Iterator[Strategy]:
    yield from _scatter(call)
    dim = _dim(call)
    source, index, values = call.tensors[:3]
    if len(source.shape) and _sums(source) and index.shape == values.shape:
        yield Strategy((Partial("sum"),), (Partial("sum"), Shard(dim), Shard(dim)))


def _index_write(call: OpCall) -> Iterator[Strategy]:
    """``index_add``, ``index_copy``, ``index_fill``: ``(self, dim, index, source)``."""
    ndim, dim = len(call.tensors[0].shape), _dim(call)
    names = _named(ndim, dim, None)
    inputs: list[Dims] = [names, [None] * len(call.tensors[1].shape)]
    inputs += [
        names if len(meta.shape) == ndim else [None] * len(meta.shape) for meta in call.tensors[2:]
    ]
    yield from label_strategies(call, inputs, [names] * len(call.outputs), reduce=None)


def _index_reduce_local(local: LocalCall) -> Callable[..., object]:
    """Rows of one element are multiplied as rows of two: torch's kernel for halves fails on them."""
    call = local.call
    op, dim = call.op, _dim(call)
    shape = local.input_local_shapes[0]
    row = prod(shape[:dim] + shape[dim + 1 :])
    halves = call.tensors[0].dtype in {torch.float16, torch.bfloat16}
    if row != 1 or not halves or call.arg(4, "reduce") != "prod":
        return op

    def run(
        tensor: torch.Tensor,
        _dim: int,
        index: torch.Tensor,
        source: torch.Tensor,
        *static: object,
        **named: object,
    ) -> torch.Tensor:
        pair, sources = (torch.stack((x.reshape(-1), x.reshape(-1)), 1) for x in (tensor, source))
        found: torch.Tensor = op(pair, 0, index, sources, *static, **named)
        row = found[:, 0].reshape(tensor.shape)
        return tensor.copy_(row) if is_in_place(call) else row.contiguous()

    return run


def _index_add(call: OpCall) -> Iterator[Strategy]:
    yield from _index_write(call)
    source, index, values = call.tensors[:3]
    if source.shape and index.shape and values.shape and _sums(source):
        yield Strategy((Partial("sum"),), (Partial("sum"), Shard(0), Shard(_dim(call))))


# --- advanced indexing ------------------------------------------------------------------------


def _positions(call: OpCall) -> list[TensorMeta | None]:
    indices = call.arg(1, "indices", ())
    found: list[TensorMeta | None] = []
    if isinstance(indices, list | tuple):
        found = [index if isinstance(index, TensorMeta) else None for index in indices]
    return found


def _advanced(call: OpCall) -> tuple[Dims, list[Dims], Dims] | None:
    """Return labels of the tensor, of each index, and of the indexed form; None for masks."""
    source, indices = call.tensors[0], _positions(call)
    given = [index for index in indices if index is not None]
    if not given or any(index.dtype in {torch.bool, torch.uint8} for index in given):
        return None
    ndim = len(source.shape)
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    names: list[Label | None] = [None if dim in indexed else ("kept", dim) for dim in range(ndim)]
    widest = max(len(index.shape) for index in given)
    batch: list[Label] = list(range(-widest, 0))
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if adjacent else 0
    kept = [name for name in names if name is not None]
    before = [name for name in names[:at] if name is not None]
    form = [*before, *batch, *kept[len(before) :]]
    return names, [broadcast_dims(index) for index in given], form


def _index(call: OpCall) -> Iterator[Strategy]:
    labels = _advanced(call)
    if labels is None:
        return
    names, indices, form = labels
    yield from label_strategies(call, [names, *indices], [form], reduce=None)
    if _sums(call.tensors[0]):
        for dim, name in enumerate(names):
            if name is None:
                yield Strategy((Partial("sum"),), (Shard(dim), *[REPLICATE] * len(indices)))


def _index_local(local: LocalCall) -> Callable[..., object]:
    call = local.call
    op = call.op
    sizes = call.tensors[0].shape
    cut = [
        dim
        for dim, index in enumerate(_positions(call))
        if index is not None and local.input_local_shapes[0][dim] != sizes[dim]
    ]
    if not cut:
        return op
    boxes = local.input_boxes[0]

    def run(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
        positions = list(indices)
        foreign: torch.Tensor | None = None
        for dim in cut:
            index = positions[dim]
            if index is None:
                continue
            position, elsewhere = localize_index(index, boxes[dim], sizes[dim], negative=True)
            tensor = at_least_one(tensor, dim)
            positions[dim] = position
            foreign = elsewhere if foreign is None else foreign | elsewhere
        found: torch.Tensor = op(tensor, positions)
        if foreign is None:
            return found
        return torch.where(_spread(foreign, positions, found), found.new_zeros(()), found)

    return run


def _spread(
    mask: torch.Tensor, positions: Sequence[torch.Tensor | None], found: torch.Tensor
) -> torch.Tensor:
    """Give *mask*, which has the dims of the indices, the dims of the result."""
    given = [index for index in positions if index is not None]
    shape = broadcast_shape(*(index.shape for index in given))
    indexed = [dim for dim, index in enumerate(positions) if index is not None]
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if adjacent else 0
    trailing = found.ndim - at - len(shape)
    return mask.broadcast_to(shape).reshape((*shape, *[1] * trailing))


def _index_put(call: OpCall) -> Iterator[Strategy]:
    """``index_put(self, indices, values, accumulate)``."""
    labels = _advanced(call)
    if labels is None:
        return
    names, indices, form = labels
    values = call.tensors[1 + len(indices)]
    spread = form[len(form) - len(values.shape) :] if values.shape else []
    whole = [[None] * len(dims) for dims in indices]
    yield from label_strategies(
        call,
        [names, *whole, [name if isinstance(name, tuple) else None for name in spread]],
        [names] * len(call.outputs),
        reduce=None,
    )
    if call.arg(3, "accumulate", False) and _sums(call.tensors[0]):
        unsigned = [None if isinstance(name, tuple) else name for name in spread]
        yield from label_strategies(
            call,
            [[None] * len(names), *indices, unsigned],
            [[None] * len(names)] * len(call.outputs),
            addends=(0,),
        )


def _put_linear(call: OpCall) -> Iterator[frozenset[int]]:
    """Linear in the tensor and the values together."""
    dtypes = {call.tensors[0].dtype, call.tensors[-1].dtype}
    if len(dtypes) == 1 and torch.bool not in dtypes:
        yield frozenset({0, len(call.tensors) - 1})


# --- gradients of slices ----------------------------------------------------------------------


def _slice_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, input_sizes, dim, start, end, step)``."""
    ndim = len(call.output.shape)
    (dim,) = as_dims(call.arg(2, "dim", 0), ndim)
    whole = call.tensors[0].shape == call.output.shape and call.arg(5, "step", 1) == 1
    names = [None if position == dim and not whole else position for position in range(ndim)]
    yield from label_strategies(call, [names], [names], reduce=None)


def _select_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, input_sizes, dim, index)``."""
    ndim = len(call.output.shape)
    (dim,) = as_dims(call.arg(2, "dim", 0), ndim)
    names = _named(ndim, dim, None)
    yield from label_strategies(call, [names[:dim] + names[dim + 1 :]], [names], reduce=None)


def _unfold_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, input_sizes, dim, size, step)``; the gradient has the window as its last dim."""
    ndim = len(call.output.shape)
    if ndim:
        (dim,) = as_dims(call.arg(2, "dim", 0), ndim)
        names = _named(ndim, dim, None)
        yield from label_strategies(call, [[*names, None]], [names], reduce=None)


def _diagonal_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, input_sizes, offset, dim1, dim2)``; the gradient has the diagonal as its last dim."""
    ndim = len(call.output.shape)
    dims = as_dims([call.arg(3, "dim1", 0), call.arg(4, "dim2", 1)], ndim)
    names = [None if position in dims else position for position in range(ndim)]
    yield from label_strategies(
        call, [[*(name for name in names if name is not None), None]], [names], reduce=None
    )


def _diagonal_scatter(call: OpCall) -> Iterator[Strategy]:
    """``(self, src, offset, dim1, dim2)``; the source has the diagonal as its last dim."""
    ndim = len(call.output.shape)
    dims = as_dims([call.arg(3, "dim1", 0), call.arg(4, "dim2", 1)], ndim)
    names = [None if position in dims else position for position in range(ndim)]
    diagonal: Dims = [*(name for name in names if name is not None), None]
    yield from label_strategies(call, [names, diagonal], [names], reduce=None)


def _sized_local(local: LocalCall) -> Callable[..., object]:
    """Put the size of the local result in place of ``input_sizes``."""
    size = local.output_local_shapes[0] or ()
    op = local.call.op

    def run(grad: torch.Tensor, _sizes: object, *static: object) -> object:
        return op(grad, size, *static)

    return run


def _slice_scatter(call: OpCall) -> Iterator[Strategy]:
    """``(self, src, dim, start, end, step)``."""
    ndim = len(call.tensors[0].shape)
    names = _named(ndim, _dim(call, 2), None)
    yield from label_strategies(call, [names, names], [names], reduce=None)


def _select_scatter(call: OpCall) -> Iterator[Strategy]:
    """``(self, src, dim, index)``."""
    ndim = len(call.tensors[0].shape)
    dim = _dim(call, 2)
    names = _named(ndim, dim, None)
    yield from label_strategies(
        call, [names, names[:dim] + names[dim + 1 :]], [names], reduce=None
    )


# --- triangles --------------------------------------------------------------------------------


def _triangle(call: OpCall) -> Iterator[Strategy]:
    """Any dim may be cut: a piece of rows or columns has its diagonal elsewhere."""
    names = list(range(len(call.tensors[0].shape)))
    yield from label_strategies(call, [names], [names] * len(call.outputs), reduce=None)


def _triangle_local(local: LocalCall) -> Callable[..., object]:
    call = local.call
    op = call.op
    rows, columns = local.input_boxes[0][-2:]
    if len(rows) > 1 or len(columns) > 1:
        return _triangle_by_mask(local)
    shift = (rows[0][0] if rows else 0) - (columns[0][0] if columns else 0)

    def run(tensor: torch.Tensor, diagonal: int = 0, **kwargs: object) -> object:
        return op(tensor, diagonal + shift, **kwargs)

    return run


def _triangle_by_mask(local: LocalCall) -> Callable[..., object]:
    """Rows or columns in several runs: compare the global indices."""
    rows, columns = (
        [index for start, end in box for index in range(start, end)]
        for box in local.input_boxes[0][-2:]
    )
    lower = "tril" in str(local.call.op)
    in_place = str(local.call.op).split(".")[1].endswith("_")

    def run(tensor: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
        row = torch.tensor(rows, device=tensor.device).unsqueeze(-1)
        column = torch.tensor(columns, device=tensor.device)
        kept = column - row <= diagonal if lower else column - row >= diagonal
        return tensor.masked_fill_(~kept, 0) if in_place else tensor.masked_fill(~kept, 0)

    return run


# --- the table --------------------------------------------------------------------------------


def _groups(*groups: Sequence[int]) -> Callable[[OpCall], Iterator[frozenset[int]]]:
    def find(call: OpCall) -> Iterator[frozenset[int]]:
        return linear_in(call, groups)

    return find


FIRST = _groups([0])
_PUTS = ("index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")

register_rule(aten_ops("index_select.default"), _index_select, local=_pick_local, linear=FIRST)
register_rule(aten_ops("gather.default"), _gather, local=_pick_local, linear=FIRST)
register_rule(aten_ops("scatter.src", "scatter_.src"), _scatter, linear=_groups([0, 3]))
register_rule(
    aten_ops(
        *("scatter.value", "scatter_.value", "scatter.reduce", "scatter_.reduce"),
        *("scatter.value_reduce", "scatter_.value_reduce", "scatter_reduce", "scatter_reduce_"),
    ),
    _scatter,
)
register_rule(
    aten_ops("scatter_add.default", "scatter_add_.default"),
    _scatter_add,
    linear=_groups([0, 3]),
)
register_rule(
    aten_ops("index_add.default", "index_add_.default"), _index_add, linear=_groups([0, 3])
)
register_rule(
    aten_ops("index_copy.default", "index_copy_.default"),
    _index_write,
    linear=_groups([0, 3]),
)
register_rule(aten_ops("index_fill", "index_fill_"), _index_write)
register_rule(aten_ops("index_reduce", "index_reduce_"), _index_write, local=_index_reduce_local)
register_rule(
    aten_ops("index.Tensor", "_unsafe_index.Tensor"), _index, local=_index_local, linear=FIRST
)
register_rule(
    aten_ops(*(f"{name}.default" for name in _PUTS)),
    _index_put,
    linear=_put_linear,
)
register_rule(
    aten_ops("slice_backward.default"), _slice_backward, local=_sized_local, linear=FIRST
)
register_rule(
    aten_ops("select_backward.default"), _select_backward, local=_sized_local, linear=FIRST
)
register_rule(
    aten_ops("unfold_backward.default"), _unfold_backward, local=_sized_local, linear=FIRST
)
register_rule(
    aten_ops("diagonal_backward.default"), _diagonal_backward, local=_sized_local, linear=FIRST
)
register_rule(aten_ops("diagonal_scatter.default"), _diagonal_scatter, linear=_groups([0, 1]))
register_rule(aten_ops("slice_scatter.default"), _slice_scatter, linear=_groups([0, 1]))
register_rule(aten_ops("select_scatter.default"), _select_scatter, linear=_groups([0, 1]))
register_rule(
    aten_ops("tril", "tril_", "triu", "triu_"), _triangle, local=_triangle_local, linear=FIRST
)
