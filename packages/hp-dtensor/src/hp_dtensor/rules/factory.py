"""New tensors made after the model of another: laid out like it, at the size of the local piece.

The idea: only the model's description matters, not its values, so that nothing ever moves: a cut
model gives a cut result of the same shape, and a Partial model gives a replicated one.

The rule: a size among the arguments is the size of the whole tensor, and becomes that of the local
result. Random ones are not made here: what is drawn must not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hp_dtensor.placements import Partial, Replicate
from hp_dtensor.rules._labels import label_strategies, shard
from hp_dtensor.rules._registry import LocalCall, OpCall, Strategy, aten_ops, register_rule
from hp_dtensor.rules.pointwise import partial_kinds

__all__ = ["local_strides"]

REPLICATE = Replicate()


def _like(call: OpCall) -> Iterator[Strategy]:
    source = call.tensors[0]
    if source.shape == call.output.shape:
        dims = range(len(source.shape))
        yield from label_strategies(call, [dims], [dims], reduce=None)
    for kind in partial_kinds(source.dtype):
        yield Strategy((REPLICATE,), (Partial(kind),))


def _sized(call: OpCall) -> Iterator[Strategy]:
    """A size of its own: cut like the model if the shapes agree, whole otherwise."""
    yield from _like(call)
    source = call.tensors[0]
    if source.shape != call.output.shape:
        for dim in range(len(source.shape)):
            yield Strategy((REPLICATE,), (shard(dim),))
        for place in call.present[:1]:
            yield Strategy((REPLICATE,), (place,))


def local_strides(
    shape: Sequence[int], stride: Sequence[int], local_shape: Sequence[int]
) -> tuple[int, ...]:
    """Return dense strides of *local_shape* with the order of dims that *stride* has.

    Example:
        >>> local_strides((4, 6), (1, 4), (2, 6))
        (1, 2)
    """
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim))
    found = [0] * len(shape)
    step = 1
    for dim in order:
        found[dim] = step
        step *= max(local_shape[dim], 1)
    return tuple(found)


def _sized_local(local: LocalCall) -> Callable[..., object]:
    size = local.output_local_shapes[0] or ()
    op = local.call.op

    def run(tensor: object, _size: object, *args: object, **kwargs: object) -> object:
        return op(tensor, size, *args, **kwargs)

    return run


def _strided_local(local: LocalCall) -> Callable[..., object]:
    size = local.output_local_shapes[0] or ()
    result = local.call.output
    stride = local_strides(result.shape, result.stride, size)
    op = local.call.op

    def run(tensor: object, _size: object, _stride: object, **kwargs: object) -> object:
        return op(tensor, size, stride, **kwargs)

    return run


register_rule(
    aten_ops("zeros_like", "ones_like", "full_like", "empty_like"),
    _like,
)
register_rule(
    aten_ops("new_zeros", "new_ones", "new_full", "new_empty"), _sized, local=_sized_local
)
register_rule(aten_ops("new_empty_strided"), _sized, local=_strided_local)
