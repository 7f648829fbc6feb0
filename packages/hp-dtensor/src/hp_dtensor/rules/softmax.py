"""Softmax and its relatives: every dim but the one that is normalised may be cut.

The idea: each row is normalised alone, so rows may live anywhere. The rule of the gradient is
the same, with three tensors of one shape.

The rule: the normalised dim stays whole here. Over a cut dim a softmax needs two small reductions
in the middle, which no single local call can express; the losses that need it do it themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from hp_dtensor.rules._labels import Dims, broadcast_dims, label_strategies
from hp_dtensor.rules._registry import OpCall, Rule, Strategy, aten_ops, register_rule
from hp_dtensor.rules.view import as_dims

__all__ = ["along"]


def along(position: int, name: str = "dim", default: object = None, *, empty: bool = True) -> Rule:
    """Return the rule of an operator on tensors of one shape that must see a dim whole.

    The dim is the argument at *position*; without it the operator sees all dims. Tensors that
    lack dims or are of size 1 in some are broadcast. Without *empty* it cannot run on no elements.
    """

    def rule(call: OpCall) -> Iterator[Strategy]:
        ndim = len(call.tensors[0].shape)
        value = call.arg(position, name, default)
        if value is None:
            return
        whole = {dim - ndim for dim in as_dims(value, ndim)}

        def labels(dims: tuple[int, ...]) -> Dims:
            return [None if dim in whole else dim for dim in dims]

        yield from label_strategies(
            call,
            [labels(broadcast_dims(meta)) for meta in call.tensors],
            [None if meta is None else labels(broadcast_dims(meta)) for meta in call.outputs],
            reduce=None,
            empty=empty,
        )

    return rule


register_rule(
    aten_ops("_softmax", "_log_softmax", "_safe_softmax", "softmax.int", "log_softmax.int"),
    along(1),
)
register_rule(aten_ops("_softmax_backward_data", "_log_softmax_backward_data"), along(2))
register_rule(aten_ops("_masked_softmax"), lambda _call: ())
register_rule(aten_ops("glu"), along(1, default=-1))
register_rule(aten_ops("glu_backward"), along(2))
