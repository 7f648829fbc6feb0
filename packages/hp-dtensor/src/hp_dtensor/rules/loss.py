"""Losses: element-wise up to the reduction at their end.

The idea: without a reduction a loss is element-wise. A summed loss of a cut batch is a Partial,
and so is a mean, whose pieces divide by the number of elements of the whole tensor.

The rule: the mean of ``nll_loss`` divides by the weights of the targets that it meets, which are
not known before all pieces are; only the sum and the unreduced form are cut. In its gradient that
number is an argument, so that every form may be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import torch

from hp_dtensor.placements import Replicate
from hp_dtensor.rules._labels import Dims, broadcast_dims, broadcast_shape, label_strategies
from hp_dtensor.rules._registry import (
    LocalCall,
    OpCall,
    Rule,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)
from hp_dtensor.rules.pointwise import linear_in

__all__: list[str] = []

NONE, MEAN, SUM = 0, 1, 2
"""How ATen writes the reduction of a loss."""


def _pairwise(reduction: int) -> Rule:
    """Return the rule of ``loss(self, target, ...)``; *reduction* is the position of that."""

    def rule(call: OpCall) -> Iterator[Strategy]:
        unreduced = call.arg(reduction, "reduction", MEAN) == NONE
        yield from label_strategies(
            call,
            [broadcast_dims(meta) for meta in call.tensors],
            [broadcast_dims(call.output) if unreduced else []],
        )

    return rule


def _pairwise_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, self, target, ...)``: element-wise, a reduced gradient being broadcast."""
    yield from label_strategies(
        call,
        [broadcast_dims(meta) for meta in call.tensors],
        [broadcast_dims(call.output)],
        reduce=None,
    )


def _count(shapes: Iterable[tuple[int, ...]]) -> int:
    return prod(broadcast_shape(*shapes))


def _with_reduction(args: Sequence[object], position: int, reduction: int) -> list[object]:
    padded = [*args, *[None] * (position - len(args))]
    return [*padded[:position], reduction, *padded[position + 1 :]]


def _mean_local(reduction: int) -> Callable[[LocalCall], Callable[..., object]]:
    """Divide the local sum by the number of elements of the whole tensor."""

    def localize(local: LocalCall) -> Callable[..., object]:
        op = local.call.op
        count = _count(meta.shape for meta in local.call.tensors[:2])
        if (
            local.call.arg(reduction, "reduction", MEAN) != MEAN
            or _count(local.input_local_shapes[:2]) == count
        ):
            return op
        dtype = local.call.output.dtype
        wide = torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype

        def run(*args: object) -> torch.Tensor:
            each: torch.Tensor = op(*_with_reduction(args, reduction, NONE))
            return each.sum(dtype=wide).div_(count).to(dtype)

        return run

    return localize


def _mean_backward_local(reduction: int) -> Callable[[LocalCall], Callable[..., object]]:
    """The gradient of a mean is that of a sum with its gradient divided by the whole count."""

    def localize(local: LocalCall) -> Callable[..., object]:
        op = local.call.op
        count = _count(meta.shape for meta in local.call.tensors[1:3])
        if (
            local.call.arg(reduction, "reduction", MEAN) != MEAN
            or _count(local.input_local_shapes[1:3]) == count
        ):
            return op

        def run(grad: torch.Tensor, *args: object) -> object:
            return op(*_with_reduction((grad / count, *args), reduction, SUM))

        return run

    return localize


# --- negative log likelihood ------------------------------------------------------------------


def _class_dims(meta: TensorMeta) -> Dims:
    """Labels of scores ``(n, class, *space)``; the classes stay whole."""
    return [None if dim == 1 else dim for dim in range(len(meta.shape))]


def _target_dims(meta: TensorMeta) -> Dims:
    return [dim if dim == 0 else dim + 1 for dim in range(len(meta.shape))]


def _nll_forward(call: OpCall) -> Iterator[Strategy]:
    """``(scores, target, weight, reduction, ignore_index) -> (loss, total_weight)``."""
    scores, target, *weight = call.tensors
    reduction = call.arg(3, "reduction", MEAN)
    if len(scores.shape) == 1 or reduction == MEAN:
        return
    kept: Dims = _target_dims(target)
    yield from label_strategies(
        call,
        [_class_dims(scores), kept, *([None] for _ in weight)],
        [kept, Replicate()] if reduction == NONE else [[], []],
    )


def _nll_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, scores, target, weight, reduction, ignore_index, total_weight)``."""
    grad, scores, target, *weights = call.tensors
    if len(scores.shape) == 1:
        return
    kept: Dims = _target_dims(target)
    yield from label_strategies(
        call,
        [
            kept if grad.shape else [],
            _class_dims(scores),
            kept,
            *([None] * len(meta.shape) for meta in weights),
        ],
        [_class_dims(scores)],
        reduce=None,
    )


# --- the table --------------------------------------------------------------------------------


def _linear(call: OpCall) -> Iterator[frozenset[int]]:
    return linear_in(call, [[0]])


for _position, _names in (
    (2, ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "l1_loss")),
    (3, ("binary_cross_entropy",)),
    (4, ("binary_cross_entropy_with_logits",)),
):
    for _name in _names:
        register_rule(
            aten_ops(f"{_name}.default"), _pairwise(_position), local=_mean_local(_position)
        )
        register_rule(
            aten_ops(f"{_name}_backward.default"),
            _pairwise_backward,
            local=_mean_backward_local(_position + 1),
            linear=_linear,
        )
register_rule(aten_ops("nll_loss_forward.default", "nll_loss2d_forward.default"), _nll_forward)
register_rule(
    aten_ops("nll_loss_backward.default", "nll_loss2d_backward.default"),
    _nll_backward,
    linear=_linear,
)
