"""Normalisation layers: the dims outside of the normalised ones may be cut.

The idea: statistics are taken over the normalised dims (or channels) and kept whole there; every
other dim is a batch. Weight and bias live in the normalised dims and are whole.

The rule: the gradients of weight and bias are sums over the batch, so a cut of it leaves them
Partial, while the gradient of the input keeps the cut. The gradient is linear in what comes from
above, but its results are used so differently that a Partial is reduced first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hp_dtensor.placements import Placement, Replicate, Shard
from hp_dtensor.rules._labels import Dims, label_strategies
from hp_dtensor.rules._registry import (
    LocalCall,
    OpCall,
    Rule,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)

__all__: list[str] = []


def _outer(ndim: int, call: OpCall, position: int) -> int:
    """How many dims lie outside of ``normalized_shape``, the argument at *position*."""
    shape = call.arg(position, "normalized_shape", ())
    return ndim - (len(shape) if isinstance(shape, list | tuple) else 0)


def _labels(meta: TensorMeta, outer: int) -> Dims:
    return [dim if dim < outer else None for dim in range(len(meta.shape))]


def _whole(meta: TensorMeta) -> Dims:
    return [None] * len(meta.shape)


def _layer_norm(call: OpCall) -> Iterator[Strategy]:
    """Layer and RMS norm; the results are the output and statistics, all with the outer dims."""
    source = call.tensors[0]
    outer = _outer(len(source.shape), call, 1)
    yield from label_strategies(
        call,
        [_labels(source, outer), *map(_whole, call.tensors[1:])],
        [None if meta is None else _labels(meta, outer) for meta in call.outputs],
        reduce=None,
    )


def _layer_norm_backward(statistics: int) -> Rule:
    """``(grad, input, normalized_shape, *statistics, weight, ...)``."""

    def rule(call: OpCall) -> Iterator[Strategy]:
        outer = _outer(len(call.tensors[1].shape), call, 2)
        batch = 2 + statistics
        yield from label_strategies(
            call,
            [
                *(_labels(meta, outer) for meta in call.tensors[:batch]),
                *map(_whole, call.tensors[batch:]),
            ],
            [
                None if meta is None else _whole(meta) if position else _labels(meta, outer)
                for position, meta in enumerate(call.outputs)
            ],
        )

    return rule


# --- group norm -------------------------------------------------------------------------------
# Its static arguments are the sizes of the input (N, C, H*W) and the number of groups.


def _group_norm(sizes: int) -> Rule:
    """Cut the batch, or the channels where the cuts fall between groups.

    *sizes* is the position of N among the arguments; C, H*W and the number of groups follow.
    """

    def rule(call: OpCall) -> Iterator[Strategy]:
        yield from label_strategies(
            call,
            [_batch_first(meta) for meta in call.tensors],
            [None if meta is None else _batch_first(meta) for meta in call.outputs],
        )
        groups = call.arg(sizes + 3)
        whole = call.arg(sizes + 1) == call.tensors[0].shape[1]
        if isinstance(groups, int) and whole and not groups % call.axis_size:
            yield Strategy(
                tuple(None if meta is None else _channels(meta) for meta in call.outputs),
                tuple(_channels(meta) for meta in call.tensors),
            )

    return rule


def _batch_first(meta: TensorMeta) -> Dims:
    """Input, gradients and statistics begin with the batch; weights have channels alone."""
    return [None] if len(meta.shape) == 1 else ["n", *[None] * (len(meta.shape) - 1)]


def _channels(meta: TensorMeta) -> Placement:
    """Channels, or the groups that they form in statistics, come second; in weights alone."""
    return Shard(0 if len(meta.shape) == 1 else 1)


def _group_norm_local(sizes: int) -> Callable[[LocalCall], Callable[..., object]]:
    def localize(local: LocalCall) -> Callable[..., object]:
        op = local.call.op
        batch, channels = local.input_local_shapes[0][:2]
        whole = local.call.tensors[0].shape[1]

        def run(*args: object) -> object:
            groups = args[sizes + 3]
            scaled = groups * channels // max(whole, 1) if isinstance(groups, int) else groups
            static = (batch, channels, args[sizes + 2], scaled)
            return op(*args[:sizes], *static, *args[sizes + 4 :])

        return run

    return localize


# --- batch norm -------------------------------------------------------------------------------


def _batch_norm(training: int | None, *, gradients: bool = False) -> Rule:
    """Cut the channels; the batch too where its statistics are not taken.

    *training* is the position of the flag that says whether they are; None if they never are.
    """

    def rule(call: OpCall) -> Iterator[Strategy]:
        batch = training is None or not call.arg(training)
        yield from label_strategies(
            call,
            [_per_channel(meta) for meta in call.tensors],
            [
                None if meta is None else _per_channel(meta) if meta.numel else Replicate()
                for meta in call.outputs
            ],
            labels=["n", "c"] if batch else ["c"],
            reduce="sum" if gradients else None,
            empty=False,
        )

    return rule


def _per_channel(meta: TensorMeta) -> Dims:
    if len(meta.shape) < 2:
        return ["c"] * len(meta.shape)
    return ["n", "c", *[None] * (len(meta.shape) - 2)]


def _always_training(call: OpCall) -> Iterator[Strategy]:
    """Batch norm that takes the statistics of the batch in any case."""
    yield from label_strategies(
        call,
        [_per_channel(meta) for meta in call.tensors],
        [
            None if meta is None else _per_channel(meta) if meta.numel else Replicate()
            for meta in call.outputs
        ],
        labels=["c"],
        reduce=None,
        empty=False,
    )


register_rule(
    aten_ops(
        *("native_batch_norm.default", "_native_batch_norm_legit.default"),
        "_native_batch_norm_legit_functional.default",
    ),
    _batch_norm(5),
)
register_rule(aten_ops("_native_batch_norm_legit.no_stats"), _batch_norm(3))
register_rule(
    aten_ops("_native_batch_norm_legit_no_training.default", "_batch_norm_no_update.default"),
    _batch_norm(None),
)
register_rule(
    aten_ops("_batch_norm_with_update.default", "_batch_norm_with_update_functional.default"),
    _always_training,
)
register_rule(aten_ops("batch_norm_backward.default"), _batch_norm(7, gradients=True))
register_rule(aten_ops("native_batch_norm_backward.default"), _batch_norm(7, gradients=True))

register_rule(aten_ops("native_layer_norm.default", "_fused_rms_norm.default"), _layer_norm)
register_rule(aten_ops("native_layer_norm_backward.default"), _layer_norm_backward(2))
register_rule(aten_ops("_fused_rms_norm_backward.default"), _layer_norm_backward(1))
register_rule(aten_ops("native_group_norm.default"), _group_norm(3), local=_group_norm_local(3))
register_rule(
    aten_ops("native_group_norm_backward.default"), _group_norm(5), local=_group_norm_local(5)
)
