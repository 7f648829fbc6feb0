"""Operators that look along one dim: running sums, sorting, turning around.

The idea: a row is treated alone, so that every other dim may be cut, in all tensors together.
The rule: of these the running sum and the permutations are linear; the positions that sorting
gives are positions of the whole row, which is whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from hp_dtensor.rules._labels import Dims, broadcast_dims, label_strategies
from hp_dtensor.rules._registry import OpCall, Strategy, TensorMeta, aten_ops, register_rule
from hp_dtensor.rules.pointwise import elementwise, keep_partial, linear_in
from hp_dtensor.rules.softmax import along

__all__: list[str] = []


def _linear(call: OpCall) -> Iterator[frozenset[int]]:
    return linear_in(call, [[0]])


def _rearranged(call: OpCall) -> Iterator[Strategy]:
    yield from along(1, "dims")(call)
    yield from keep_partial(call)


def _rolled(call: OpCall) -> Iterator[Strategy]:
    """Without dims, ``roll`` turns the tensor around in its flattened form."""
    if call.arg(2, "dims"):
        yield from along(2, "dims")(call)
    yield from keep_partial(call)


def _repeated(call: OpCall) -> Iterator[Strategy]:
    """A dim that is repeated once keeps its cut."""
    source, repeats = call.tensors[0], call.arg(1, "repeats", ())
    counts = list(repeats) if isinstance(repeats, list | tuple) else []
    result = [
        dim if count == 1 else None
        for dim, count in zip(broadcast_dims(call.output), counts, strict=True)
    ]
    new = len(counts) - len(source.shape)
    yield from label_strategies(call, [result[new:]], [result], reduce=None)
    yield from keep_partial(call)


def _searchsorted(call: OpCall) -> Iterator[Strategy]:
    """``searchsorted(sequence, values)``: one sequence for all values, or one per leading index.

    The place of a value is how many elements come before it, so pieces of the sequence give
    addends; not where another tensor says in which order the elements are.
    """
    ordered = isinstance(call.kwargs.get("sorter"), TensorMeta)
    batch: Dims = list(range(len(call.tensors[0].shape) - 1))
    sequence: Dims = [*batch, None if ordered else "sorted"]

    def looked_up(meta: TensorMeta) -> Dims:
        own = range(len(batch), len(meta.shape))
        return [*batch, *(None if batch else ("value", dim) for dim in own)]

    values = [looked_up(meta) for meta in call.tensors[1 : len(call.tensors) - ordered]]
    yield from label_strategies(
        call, [sequence, *values, *[sequence] * ordered], [looked_up(call.output)]
    )


def _bucketize(call: OpCall) -> Iterator[Strategy]:
    """``bucketize(values, boundaries)``: as with ``searchsorted``, the boundaries may be in pieces."""
    values = list(range(len(call.output.shape)))
    given = [values] * (len(call.tensors) - 1)
    yield from label_strategies(call, [*given, ["sorted"]], [values])


def _is_in(call: OpCall) -> Iterator[Strategy]:
    """``isin(elements, others)``: the elements are cut, the others are looked through."""
    elements = list(range(len(call.output.shape)))
    others = [None] * len(call.tensors[1].shape)
    yield from label_strategies(call, [elements, others], [elements], reduce=None)


def _pad(call: OpCall) -> Iterator[Strategy]:
    """Padding comes in pairs from the last dim on; dims without any keep their cut."""
    source, pad = call.tensors[0], call.arg(1, "pad", ())
    amounts = list(pad) if isinstance(pad, list | tuple) else []
    ndim = len(source.shape)
    padded = {ndim - 1 - position // 2 for position, amount in enumerate(amounts) if amount}
    labels = [None if dim in padded else dim for dim in range(ndim)]
    yield from label_strategies(call, [labels], [labels], reduce=None)


def _linear_padding(call: OpCall) -> Iterator[frozenset[int]]:
    if call.arg(2, "value", 0) == 0:
        yield from _linear(call)


register_rule(
    aten_ops("cumsum", "cumsum_"),
    along(1),
    linear=_linear,
)
register_rule(
    aten_ops(
        *("cumprod", "cumprod_", "cummax", "cummin", "logcumsumexp", "_logcumsumexp"),
    ),
    along(1),
)
register_rule(aten_ops("sort.default", "sort.stable", "sort.values_stable"), along(1, default=-1))
register_rule(aten_ops("topk"), along(2, default=-1))
register_rule(aten_ops("flip"), _rearranged)
register_rule(aten_ops("roll"), _rolled)
register_rule(aten_ops("rot90"), along(2, "dims", (0, 1)))
register_rule(aten_ops("repeat"), _repeated)
register_rule(aten_ops("searchsorted.Tensor", "searchsorted.Scalar"), _searchsorted)
register_rule(aten_ops("bucketize.Tensor", "bucketize.Scalar"), _bucketize)
register_rule(aten_ops("isin.Tensor_Tensor"), _is_in)
register_rule(aten_ops("isin.Tensor_Scalar"), elementwise)
register_rule(aten_ops("constant_pad_nd.default"), _pad, linear=_linear_padding)
