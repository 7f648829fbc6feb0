"""Operators that give the same elements another shape or order of dims.

The idea: a view keeps the row-major order of elements. A cut of one dim is a pattern over that
order: *runs* repetitions of one unit, each cut at the same places. Two dims of two shapes are cut
alike exactly if the numbers of runs agree and the cuts fall on the same elements, whatever dims
were merged or split in between.

The rule: a shard is kept if and only if the pieces that the result's placement describes are the
pieces that the input's placement left, on every coordinate; uneven sizes are compared cut by cut.
Flattening ``(B, T, D)`` to ``(B*T, D)`` with T cut leaves ``StridedShard(0, split_factor=B)``,
and taking it apart gives Shard(1) back, both without communication.

The design not taken: matching groups of dims by their products, which gives up at uneven sizes
and at dims of size 1, and needs a special case for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import cast

import torch

from hp_dtensor.placements import Placement, StridedShard
from hp_dtensor.rules._labels import Dims, broadcast_dims, label_strategies, shard
from hp_dtensor.rules._registry import (
    LocalCall,
    OpCall,
    Rule,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)
from hp_dtensor.rules.pointwise import keep_partial

__all__ = ["as_dims", "moved", "sized_output", "view"]


def cuts(size: int, count: int) -> tuple[int, ...]:
    """Return where ``torch.chunk`` ends each of *count* pieces of *size* indices.

    Example:
        >>> cuts(5, 4)
        (2, 4, 5, 5)
    """
    step = -(-size // count)
    return tuple(min(size, step * (piece + 1)) for piece in range(count))


def _pattern(shape: Sequence[int], dim: int, split_factor: int) -> tuple[int, int, int] | None:
    """Return (runs, size of the unit that is cut, elements per index of it), or None."""
    if shape[dim] % split_factor:
        return None
    return (
        prod(shape[:dim]) * split_factor,
        shape[dim] // split_factor,
        prod(shape[dim + 1 :]),
    )


def image(
    source: Sequence[int], target: Sequence[int], placement: Placement, axis_size: int
) -> Placement | None:
    """Return the placement of shape *target* that *placement* of shape *source* becomes.

    Both shapes have the same elements in row-major order. None if no placement describes the
    pieces. *placement* must be a Shard or a StridedShard.

    Example:
        >>> image((2, 6, 4), (12, 4), shard(1), 3)
        _StridedShard(dim=0, sf=2)
        >>> image((12, 4), (2, 6, 4), shard(0, 2), 3)
        Shard(dim=1)
        >>> image((6, 256), (1536,), shard(0), 4) is None
        True
    """
    dim, factor = _dim_and_factor(placement)
    given = _pattern(source, dim, factor)
    if given is None:
        return placement if tuple(source) == tuple(target) else None
    runs, unit, inner = given
    if not prod(source):
        return _image_of_nothing(source, target, dim, factor)
    wanted = [cut * inner for cut in cuts(unit, axis_size)]
    found: Placement | None = None
    for candidate in range(len(target)):
        outer = prod(target[:candidate])
        if runs % outer:
            continue
        split_factor = runs // outer
        pattern = _pattern(target, candidate, split_factor)
        if pattern is None or (split_factor > 1 and pattern[1] < 2):
            continue
        if [cut * pattern[2] for cut in cuts(pattern[1], axis_size)] != wanted:
            continue
        if split_factor == 1:
            return shard(candidate)
        found = found or shard(candidate, split_factor)
    return found


def _dim_and_factor(placement: Placement) -> tuple[int, int]:
    if isinstance(placement, StridedShard):
        return placement.dim, int(placement.split_factor)
    dim: int = placement.dim  # type: ignore[attr-defined]
    return dim, 1


def _image_of_nothing(
    source: Sequence[int], target: Sequence[int], dim: int, factor: int
) -> Placement | None:
    """Without elements, a dim is found again if the dims before it or after it are the same."""
    if tuple(source[: dim + 1]) == tuple(target[: dim + 1]):
        return shard(dim, factor)
    after = len(source) - dim
    if len(target) >= after and tuple(source[dim:]) == tuple(target[-after:]):
        return shard(len(target) - after, factor)
    return None


def view(call: OpCall) -> Iterator[Strategy]:
    """Keep each cut that the new shape can express, and a Partial of any kind."""
    source = call.tensors[0]
    target = call.output.shape
    cut: list[Placement] = [shard(dim) for dim in range(len(source.shape))]
    cut += [found for found in call.present[:1] if isinstance(found, StridedShard)]
    for placement in cut:
        result = image(source.shape, target, placement, call.axis_size)
        if result is not None:
            yield Strategy((result,), (placement,))
    yield from keep_partial(call)


def sized_output(local: LocalCall) -> Callable[..., torch.Tensor]:
    """Run a view with the size of the local result, copying where its strides leave no choice."""
    size = local.output_local_shapes[0] or ()

    def run(tensor: torch.Tensor, *_static: object, **_kwargs: object) -> torch.Tensor:
        try:
            return tensor.view(size)
        except RuntimeError:
            return tensor.reshape(size)

    return run


def as_dims(value: object, ndim: int) -> tuple[int, ...]:
    """Return one dim or a list of dims as non-negative dims.

    Example:
        >>> as_dims([-1, 0], 3), as_dims(-2, 3)
        ((2, 0), (1,))
    """
    dims = value if isinstance(value, list | tuple) else (value,)
    return tuple(int(dim) % max(ndim, 1) for dim in dims)


def moved(find: Callable[[OpCall], tuple[Dims, Dims]]) -> Rule:
    """Return the rule of an operator that only moves elements: labels of its input and results.

    All results have the same labels. A Partial of any kind is kept.
    """

    def rule(call: OpCall) -> Iterator[Strategy]:
        source, target = find(call)
        yield from label_strategies(call, [source], [target] * len(call.outputs), reduce=None)
        yield from keep_partial(call)

    return rule


def _all(meta: TensorMeta) -> list[int | None]:
    return list(range(len(meta.shape)))


def _without(meta: TensorMeta, dims: Sequence[int]) -> list[int | None]:
    return [None if dim in dims else dim for dim in range(len(meta.shape))]


def _dim_argument(call: OpCall, position: int, default: int = 0) -> int:
    value = call.arg(position, "dim", default)
    return as_dims(value, len(call.tensors[0].shape))[0]


def _permute(call: OpCall) -> tuple[Dims, Dims]:
    meta = call.tensors[0]
    return _all(meta), as_dims(call.arg(1, "dims"), len(meta.shape))


def _transpose(call: OpCall) -> tuple[Dims, Dims]:
    meta = call.tensors[0]
    out = _all(meta)
    if out:
        first, second = as_dims([call.arg(1, "dim0"), call.arg(2, "dim1")], len(out))
        out[first], out[second] = out[second], out[first]
    return _all(meta), out


def _t(call: OpCall) -> tuple[Dims, Dims]:
    labels = _all(call.tensors[0])
    return labels, labels[::-1]


def _expand(call: OpCall) -> tuple[Dims, Dims]:
    return broadcast_dims(call.tensors[0]), broadcast_dims(call.output)


def _unsqueeze(call: OpCall) -> tuple[Dims, Dims]:
    labels = _all(call.tensors[0])
    dim = as_dims(call.arg(1, "dim"), len(labels) + 1)[0]
    return labels, [*labels[:dim], None, *labels[dim:]]


def _select(call: OpCall) -> tuple[Dims, Dims]:
    dim = _dim_argument(call, 1)
    labels = _without(call.tensors[0], [dim])
    return labels, labels[:dim] + labels[dim + 1 :]


def _slice(call: OpCall) -> tuple[Dims, Dims]:
    """A slice that keeps all indices of its dim keeps its cut as well."""
    dim = _dim_argument(call, 1)
    whole = call.output.shape == call.tensors[0].shape and call.arg(4, "step", 1) == 1
    labels = _without(call.tensors[0], [] if whole else [dim])
    return labels, labels


def _split(call: OpCall) -> tuple[Dims, Dims]:
    labels = _without(call.tensors[0], [_dim_argument(call, 2)])
    return labels, labels


def _unbind(call: OpCall) -> tuple[Dims, Dims]:
    dim = _dim_argument(call, 1)
    labels = _without(call.tensors[0], [dim])
    return labels, labels[:dim] + labels[dim + 1 :]


def _unfold(call: OpCall) -> tuple[Dims, Dims]:
    meta = call.tensors[0]
    if not meta.shape:
        return [], [None]
    labels = _without(meta, as_dims(call.arg(1, "dimension"), len(meta.shape)))
    return labels, [*labels, None]


def _diagonal(call: OpCall) -> tuple[Dims, Dims]:
    meta = call.tensors[0]
    dims = as_dims([call.arg(2, "dim1", 0), call.arg(3, "dim2", 1)], len(meta.shape))
    labels = _without(meta, dims)
    return labels, [*(dim for position, dim in enumerate(labels) if position not in dims), None]


def _view_dtype(call: OpCall) -> Iterator[Strategy]:
    """Reading bits as another dtype mixes indices of the last dim if the item sizes differ."""
    meta = call.tensors[0]
    same = meta.dtype.itemsize == call.output.dtype.itemsize
    labels = _without(meta, [] if same else [len(meta.shape) - 1])
    yield from label_strategies(call, [labels], [labels], reduce=None)


def _is_itself(call: OpCall) -> bool:
    """Whether ``as_strided`` is asked for what the tensor is already."""
    source = call.tensors[0]
    offset = call.args[3] if len(call.args) > 3 else call.kwargs.get("storage_offset")
    return (source.shape, source.stride) == (call.output.shape, call.output.stride) and not offset


def _as_strided(call: OpCall) -> Iterator[Strategy]:
    """Strides are those of a whole tensor: only the tensor itself can be asked for in pieces."""
    if _is_itself(call):
        labels = _all(call.output)
        yield from label_strategies(call, [labels], [labels], reduce=None)
        yield from keep_partial(call)


def _as_strided_local(local: LocalCall) -> Callable[..., torch.Tensor]:
    if not _is_itself(local.call):
        return cast("Callable[..., torch.Tensor]", local.call.op)
    return lambda tensor, *_sizes, **_more: torch.ops.aten.alias.default(tensor)


def _view_as_real(call: OpCall) -> Iterator[Strategy]:
    labels = _all(call.tensors[0])
    yield from label_strategies(call, [labels], [[*labels, None]], reduce=None)


def _view_as_complex(call: OpCall) -> Iterator[Strategy]:
    labels = _all(call.output)
    yield from label_strategies(call, [[*labels, None]], [labels], reduce=None)


register_rule(
    aten_ops(
        *("view.default", "_unsafe_view", "reshape", "_reshape_alias", "reshape_copy"),
        *("squeeze", "squeeze_copy", "view_copy.default", "flatten", "unflatten"),
    ),
    view,
    local=sized_output,
)
register_rule(aten_ops("permute", "permute_copy"), moved(_permute))
register_rule(aten_ops("transpose.int", "transpose_copy.int"), moved(_transpose))
register_rule(aten_ops("t", "t_copy"), moved(_t))
register_rule(aten_ops("unsqueeze", "unsqueeze_copy"), moved(_unsqueeze))
register_rule(aten_ops("select.int", "select_copy.int"), moved(_select))
register_rule(aten_ops("slice.Tensor", "slice_copy.Tensor"), moved(_slice))
register_rule(aten_ops("unbind.int", "unbind_copy.int"), moved(_unbind))
register_rule(aten_ops("unfold", "unfold_copy"), moved(_unfold))
register_rule(aten_ops("diagonal", "diagonal_copy"), moved(_diagonal))
register_rule(aten_ops("as_strided"), _as_strided, local=_as_strided_local)
register_rule(aten_ops("view_as_real", "view_as_real_copy"), _view_as_real, linear=[[0]])
register_rule(aten_ops("view_as_complex", "view_as_complex_copy"), _view_as_complex, linear=[[0]])
register_rule(aten_ops("view.dtype", "view_copy.dtype"), _view_dtype)
register_rule(
    aten_ops(
        *("split.Tensor", "split_with_sizes", "unsafe_split.Tensor", "unsafe_split_with_sizes"),
        *("split_copy.Tensor", "split_with_sizes_copy", "chunk", "unsafe_chunk"),
    ),
    moved(_split),
)


def _expand_local(local: LocalCall) -> Callable[..., torch.Tensor]:
    size = local.output_local_shapes[0] or ()
    op = local.call.op
    if tuple(cast("Sequence[int]", local.call.args[1])) == size:
        return op

    def view(tensor: torch.Tensor, _size: object, **_implicit: object) -> torch.Tensor:
        return tensor.expand(size)

    def copy(tensor: torch.Tensor, _size: object, **kwargs: object) -> torch.Tensor:
        result: torch.Tensor = op(tensor, size, **kwargs)
        return result

    return view if op is torch.ops.aten.expand.default else copy


register_rule(aten_ops("expand", "expand_copy"), moved(_expand), local=_expand_local)
