"""Joining tensors: every dim but the one along which they are joined may be cut.

The idea: a join copies elements, so that all tensors may be Partial together, of any kind.
The rule: tensors that concatenation ignores (of shape ``(0,)``) are left whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from hp_dtensor.rules._labels import Dims, label_strategies
from hp_dtensor.rules._registry import OpCall, Strategy, TensorMeta, aten_ops, register_rule
from hp_dtensor.rules.pointwise import keep_partial
from hp_dtensor.rules.view import as_dims

__all__: list[str] = []


def _cat(call: OpCall) -> Iterator[Strategy]:
    ndim = len(call.output.shape)
    along = as_dims(call.arg(1, "dim", 0), ndim)
    labels: Dims = [None if dim in along else dim for dim in range(ndim)]

    def dims(meta: TensorMeta) -> Dims:
        return labels if len(meta.shape) == ndim else [None] * len(meta.shape)

    yield from label_strategies(call, [dims(meta) for meta in call.tensors], [labels], reduce=None)
    yield from keep_partial(call)


def _stack(call: OpCall) -> Iterator[Strategy]:
    ndim = len(call.tensors[0].shape)
    (new,) = as_dims(call.arg(1, "dim", 0), ndim + 1)
    labels: list[int | None] = list(range(ndim))
    result: Dims = [*labels[:new], None, *labels[new:]]
    yield from label_strategies(
        call,
        [labels if len(meta.shape) == ndim else result for meta in call.tensors],
        [result],
        reduce=None,
    )
    yield from keep_partial(call)


register_rule(aten_ops("cat", "concat", "concatenate"), _cat)
register_rule(aten_ops("stack", "_stack"), _stack)
