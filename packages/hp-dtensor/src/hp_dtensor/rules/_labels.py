"""Sharding by names of dims: how most operators say which dims may be cut.

The idea: give every dim of every tensor of a call a label; dims with one label are cut together.
A label that a result lacks has been summed over, and cutting it leaves that result a Partial.
Matrix products, reductions, norms, attention and all of pointwise are lines of labels.

The rule: a dim of size 1 beside a larger one with the same label is broadcast and stays whole.
A label that a tensor carries twice, or a dim labelled None, is never cut.

The design not taken: parsing einsum strings. Labels are any hashable value, since the number of
batch dims is known only per call.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

from hp_dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.rules._registry import OpCall, Strategy, TensorMeta

__all__ = [
    "Dims",
    "broadcast_dims",
    "broadcast_shape",
    "fills",
    "label_strategies",
    "own_dims",
    "shard",
]

Label = Hashable
Dims = Sequence[Label | None]
"""A label per tensor dim; None for a dim that is never cut."""

REPLICATE = Replicate()


def shard(dim: int, split_factor: int = 1) -> Placement:
    """Return the placement that cuts *dim*, in *split_factor* runs.

    Example:
        >>> shard(1), shard(0, 2)
        (Shard(dim=1), _StridedShard(dim=0, sf=2))
    """
    return Shard(dim) if split_factor == 1 else StridedShard(dim, split_factor=split_factor)


def own_dims(meta: TensorMeta, name: str = "") -> tuple[Label, ...]:
    """Return labels that no other tensor shares, unless it is given the same *name*."""
    return tuple((name, dim) for dim in range(len(meta.shape)))


def broadcast_dims(meta: TensorMeta) -> tuple[int, ...]:
    """Return labels that count from the last dim, as broadcasting aligns shapes.

    Example:
        >>> import torch
        >>> broadcast_dims(TensorMeta((2, 3), (3, 1), torch.float32))
        (-2, -1)
    """
    return tuple(range(-len(meta.shape), 0))


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which *shapes* broadcast; they must.

    Example:
        >>> broadcast_shape((4, 1), (3,))
        (4, 3)
    """
    ndim = max(map(len, shapes), default=0)
    aligned = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(
        next((size for size in sizes if size != 1), 1) for sizes in zip(*aligned, strict=True)
    )


def label_strategies(
    call: OpCall,
    inputs: Sequence[Dims],
    outputs: Sequence[Dims | Placement | None],
    *,
    labels: Iterable[Label] | None = None,
    reduce: str | None = "sum",
    addends: Collection[int] = (),
    empty: bool = True,
) -> Iterator[Strategy]:
    """Yield a strategy for each label that may be cut.

    Args:
        call: The call; ``call.present`` tells which split factors are tried beside plain shards.
        inputs: Labels of each entry of ``call.tensors``.
        outputs: Labels of each result, None for a result that is no tensor, a placement for one
            that is laid out so in any case.
        labels: The labels that may be cut, in order of preference; by default those of the
            results, then those of the inputs.
        reduce: How pieces of a result that lacks the label combine; None if they do not.
        addends: Positions of inputs that are added to a result: a Partial result takes them as
            Partial too, so that they count once.
        empty: False if the operator cannot run on a piece without elements.
    """
    if labels is None:
        named = [dims for dims in (*outputs, *inputs) if not isinstance(dims, Placement)]
        labels = [label for dims in named for label in dims or ()]
    for label in dict.fromkeys(labels):
        if label is None:
            continue
        size = _size(call, inputs, label)
        if size is None:
            continue
        for split_factor in (1, *_hinted(call, inputs, label)):
            if not empty and not fills(-(-size // split_factor), call.axis_size):
                continue
            strategy = _cut(
                call, inputs, outputs, label, size, split_factor, reduce, frozenset(addends)
            )
            if strategy is not None:
                yield strategy


def fills(size: int, axis_size: int) -> bool:
    """Whether cutting *size* indices as ``torch.chunk`` does gives every coordinate some.

    Example:
        >>> fills(5, 3), fills(5, 4), fills(2, 3)
        (True, False, False)
    """
    return size > -(-size // axis_size) * (axis_size - 1)


def _size(call: OpCall, inputs: Sequence[Dims], label: Label) -> int | None:
    sizes = [
        size
        for meta, dims in zip(call.tensors, inputs, strict=True)
        for size, own in zip(meta.shape, dims, strict=True)
        if own == label
    ]
    if not sizes:
        return None
    return next((size for size in sizes if size != 1), 1)


def _hinted(call: OpCall, inputs: Sequence[Dims], label: Label) -> Iterator[int]:
    seen: set[int] = set()
    for placement, dims in zip(call.present, inputs, strict=False):
        if isinstance(placement, StridedShard) and dims[placement.dim] == label:
            factor = int(placement.split_factor)
            if factor not in seen:
                seen.add(factor)
                yield factor


def _cut(
    call: OpCall,
    inputs: Sequence[Dims],
    outputs: Sequence[Dims | Placement | None],
    label: Label,
    size: int,
    split_factor: int,
    reduce: str | None,
    addends: frozenset[int],
) -> Strategy | None:
    placed: list[Placement | None] = []
    partial = False
    for meta, dims in zip(call.outputs, outputs, strict=True):
        if meta is None or dims is None:
            placed.append(None)
            continue
        if isinstance(dims, Placement):
            placed.append(dims)
            continue
        places = _places(meta, dims, label, size)
        if len(places) > 1 or (not places and reduce is None):
            return None
        partial = partial or not places
        placed.append(shard(places[0], split_factor) if places else Partial(reduce or "sum"))
    given: list[Placement] = []
    for position, (meta, dims) in enumerate(zip(call.tensors, inputs, strict=True)):
        places = _places(meta, dims, label, size)
        if len(places) > 1:
            return None
        if places:
            given.append(shard(places[0], split_factor))
        else:
            given.append(Partial("sum") if partial and position in addends else REPLICATE)
    return Strategy(tuple(placed), tuple(given))


def _places(meta: TensorMeta, dims: Dims, label: Label, size: int) -> list[int]:
    return [dim for dim, own in enumerate(dims) if own == label and meta.shape[dim] == size]
