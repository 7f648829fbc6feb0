"""Convolutions: cut the batch, the channels that come out, or those that go in.

The idea: a convolution is a matrix product over channels, repeated in space: cutting the channels
that go in leaves a Partial, and the bias counts once. With groups, whole groups may be cut, of
channels in and out together.

The rule: dims in space stay whole; neighbours would have to exchange their borders, and a module
that wants that says so. The number of groups is an argument about the whole tensor, and becomes
that of the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.rules._labels import fills
from hp_dtensor.rules._registry import (
    LocalCall,
    OpCall,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)

__all__: list[str] = []

REPLICATE = Replicate()
SUM = Partial("sum")


def _sizes(call: OpCall, first: int) -> tuple[TensorMeta, TensorMeta, bool, int]:
    """Return (input, weight, transposed, groups); the input is the argument at *first*.

    The number of groups is that of what earlier axes left over, so it is told by the shapes.
    """
    source, weight = call.arg(first), call.arg(first + 1)
    assert isinstance(source, TensorMeta)
    assert isinstance(weight, TensorMeta)
    transposed = bool(call.arg(first + 6))
    result = call.tensors[0] if first else call.output
    wide = result if transposed else source
    groups = _groups(wide.shape, weight.shape) if _batched(source, weight) else 1
    return source, weight, transposed, groups


def _groups(shape: tuple[int, ...], weight: tuple[int, ...]) -> int:
    """A weight has the channels of one group in its second dim, its image those of all."""
    return shape[1] // weight[1] if weight[1] else 1


def _batched(source: TensorMeta, weight: TensorMeta) -> bool:
    return len(source.shape) == len(weight.shape)


def _divides(groups: int, source: TensorMeta, weight: TensorMeta, size: int) -> bool:
    """Whether a cut of the channels on both sides gives each coordinate whole groups."""
    return groups > 1 and not groups % size and bool(source.shape[1]) and bool(weight.shape[0])


def _forward(call: OpCall) -> Iterator[Strategy]:
    """``(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``."""
    source, weight, transposed, groups = _sizes(call, 0)
    if not _batched(source, weight):
        return
    size = call.axis_size
    out, into = (1, 0) if transposed else (0, 1)
    bias = call.tensors[2:]
    if fills(source.shape[0], size):
        yield Strategy((Shard(0),), (Shard(0), REPLICATE, *(REPLICATE for _ in bias)))
    if groups == 1 and fills(weight.shape[out], size):
        yield Strategy((Shard(1),), (REPLICATE, Shard(out), *(Shard(0) for _ in bias)))
    if groups == 1 and fills(source.shape[1], size):
        yield Strategy((SUM,), (Shard(1), Shard(into), *(SUM for _ in bias)))
    if _divides(groups, source, weight, size):
        yield Strategy((Shard(1),), (Shard(1), Shard(0), *(Shard(0) for _ in bias)))
    for kind in (Partial("sum"), Partial("avg")):
        yield Strategy((kind,), (kind, REPLICATE, *(kind for _ in bias)))
        yield Strategy((kind,), (REPLICATE, kind, *(kind for _ in bias)))


def _backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, input, weight, bias_sizes, ...) -> (grad_input, grad_weight, grad_bias)``."""
    source, weight, transposed, groups = _sizes(call, 1)
    if not _batched(source, weight):
        return
    size = call.axis_size
    out, into = (1, 0) if transposed else (0, 1)

    def strategy(results: tuple[Placement, ...], inputs: tuple[Placement, ...]) -> Strategy:
        kept = tuple(
            None if meta is None else place
            for meta, place in zip(call.outputs, results, strict=True)
        )
        return Strategy(kept, inputs)

    if fills(source.shape[0], size):
        yield strategy((Shard(0), SUM, SUM), (Shard(0), Shard(0), REPLICATE))
    if groups == 1 and fills(weight.shape[out], size):
        yield strategy((SUM, Shard(out), Shard(0)), (Shard(1), REPLICATE, Shard(out)))
    if groups == 1 and fills(source.shape[1], size):
        yield strategy((Shard(1), Shard(into), REPLICATE), (REPLICATE, Shard(1), Shard(into)))
    if _divides(groups, source, weight, size):
        yield strategy((Shard(1), Shard(0), Shard(0)), (Shard(1), Shard(1), Shard(0)))


def _groups_local(first: int) -> Callable[[LocalCall], Callable[..., object]]:
    """Scale the number of groups, and the size of the bias, to the channels that are here."""

    def localize(local: LocalCall) -> Callable[..., object]:
        call = local.call
        source, weight, transposed, groups = _sizes(call, first)
        if not _batched(source, weight):
            return call.op
        held, held_weight = local.input_local_shapes[first : first + 2]
        result = local.input_local_shapes[0] if first else local.output_local_shapes[0] or ()
        scaled = _groups(result if transposed else held, held_weight) if groups > 1 else 1
        channels = held_weight[1] * scaled if transposed else held_weight[0]
        op = call.op

        def run(*args: object) -> object:
            given = [*args]
            given[first + 8] = scaled
            if first and given[3] is not None:
                given[3] = [channels]
            return op(*given)

        return run

    return localize


register_rule(
    aten_ops("convolution.default", "_convolution.default"), _forward, local=_groups_local(0)
)
register_rule(aten_ops("convolution_backward.default"), _backward, local=_groups_local(1))
