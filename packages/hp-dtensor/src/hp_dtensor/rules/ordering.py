"""Operators that look along one dim: running sums, sorting, turning around.

The idea: a row is treated alone, so that every other dim may be cut, in all tensors together.
The rule: of these the running sum and the permutations are linear; the positions that sorting
gives are positions of the whole row, which is whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from hp_dtensor.rules._labels import broadcast_dims, label_strategies
from hp_dtensor.rules._registry import OpCall, Rule, Strategy, aten_ops, register_rule
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
    """``searchsorted(sequence, values)``: one sequence for all values, or one per leading index."""
    sequence = call.tensors[0]
    batched = len(sequence.shape) > 1
    labels = [
        [
            dim if dim < len(meta.shape) - 1 or not batched else None
            for dim in range(len(meta.shape))
        ]
        for meta in (*call.tensors, call.output)
    ]
    if not batched:
        labels[0] = [None] * len(sequence.shape)
    if len(call.tensors) == 2:
        yield from label_strategies(call, labels[:2], labels[2:], reduce=None)


def _against_whole(values: int) -> Rule:
    """Return a rule: the tensor at position *values* is cut, the other one is looked up in."""

    def rule(call: OpCall) -> Iterator[Strategy]:
        if len(call.tensors) == 2:
            labels = [
                list(range(len(meta.shape))) if position == values else [None] * len(meta.shape)
                for position, meta in enumerate(call.tensors)
            ]
            yield from label_strategies(call, labels, [labels[values]], reduce=None)

    return rule


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
register_rule(aten_ops("searchsorted.Tensor"), _searchsorted)
register_rule(aten_ops("bucketize.Tensor"), _against_whole(0))
register_rule(aten_ops("isin.Tensor_Tensor"), _against_whole(0))
register_rule(aten_ops("isin.Tensor_Scalar"), elementwise)
register_rule(aten_ops("constant_pad_nd.default"), _pad, linear=_linear_padding)
