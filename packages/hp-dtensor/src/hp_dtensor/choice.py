"""Which layouts an operator runs on: the cheapest strategy of its rule, axis after axis.

The metadata of the results is found first. Then each mesh axis in turn takes the strategy whose moves cost least, on the
shapes that the axes before it leave, which may differ between ranks: a strategy has to hold for all of them. Addends of two
kinds never meet in one layout.

Pure: specs and metadata in, placements out. Not taken: the best choice over all axes at once, whose number of candidates is a
power of the axes, and which differs from this one only where a dim could be cut by two of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from hp_dtensor import shards
from hp_dtensor._torch import Partial, Placement, disable_current_modes, hint
from hp_dtensor.calls import with_tensors
from hp_dtensor.errors import InPlaceError
from hp_dtensor.outputs import plain_outputs
from hp_dtensor.placements import REPLICATE, Cut, Shard, shard_dim
from hp_dtensor.rules import OpCall, OpRule, Strategy, TensorMeta, common_strategies
from hp_dtensor.rules._registry import aten_ops
from hp_dtensor.spec import Spec, contiguous_stride

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

aten = torch.ops.aten


def _meta(value: object) -> object:
    """*value* as the metadata run takes it: devices become meta."""
    return torch.device("meta") if isinstance(value, torch.device) else value


def infer_outputs(
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    metas: Sequence[TensorMeta],
) -> object:
    """What *op* gives on whole tensors of *metas*, run on the meta device: nothing is computed or allocated."""

    def run(other: OpOverload, tensors: Sequence[Tensor]) -> object:
        filled, named = with_tensors(args, kwargs, tensors)
        return other(*filled, **named)

    with disable_current_modes(), torch.no_grad():
        plain = plain_outputs(op, args, run, metas)
        if plain is not None:
            return plain
        tensors = [
            torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="meta") for m in metas
        ]
        filled, named = with_tensors(args, kwargs, tensors)
        named = {name: _meta(value) for name, value in named.items() if name != "pin_memory"}
        return op(*[_meta(value) for value in filled], **named)


_TRAINING = dict.fromkeys(
    aten_ops(
        *("native_batch_norm.default", "_native_batch_norm_legit.default"),
        "_native_batch_norm_legit_functional.default",
    ),
    5,
)
"""The position of the flag without which batch norm on a CPU leaves out the statistics; a metadata run has them."""


def as_computed(op: OpOverload, args: Sequence[object], result: object, device: str) -> object:
    """*result* of a metadata run as the kernels of *device* make it."""
    if device != "cpu":
        return result
    if op is aten.native_layer_norm.default:
        # The statistics have the dtype of the parameters, or that of the input where there are none.
        out, *statistics = cast("Sequence[Tensor]", result)
        given = next((x for x in args[2:4] if isinstance(x, torch.Tensor)), out)
        return (out, *(value.to(given.dtype) for value in statistics))
    flag = _TRAINING.get(op)
    if flag is None or args[flag]:
        return result
    first, *rest = cast("Sequence[Tensor]", result)
    return (first, *(value.new_empty(0) if i < 2 else value for i, value in enumerate(rest)))


def meta_of_tensor(value: object) -> TensorMeta | None:
    """What a rule may know of a result; None for one that is no tensor."""
    return TensorMeta.of(value) if isinstance(value, torch.Tensor) else None


def bytes_of(meta: TensorMeta) -> float:
    """The bytes of the whole tensor."""
    return float(math.prod(map(hint, meta.shape)) * meta.dtype.itemsize)


_LATENCY = 1024.0
"""What starting a collective costs, in bytes that could have been sent meanwhile; only the order of choices depends on it."""


def move_cost(source: Placement, target: Placement, meta: TensorMeta, size: int) -> float:
    """What moving a tensor from *source* to *target* over an axis of *size* ranks costs, in bytes a rank sends.

    A local step (cutting a replica, or keeping one addend) costs a little more than nothing: it throws away a layout
    that a later operator may want.
    """
    if source == target:
        return 0.0
    if source.is_replicate():
        return 0.5 if not target.is_partial() else 0.75
    if size == 1:
        return 0.25
    share = bytes_of(meta) * (size - 1) / size
    if source.is_partial():
        if target.is_partial():
            return math.inf
        return _LATENCY + (2 * share if target.is_replicate() else share)
    if target.is_partial():
        return math.inf
    return _LATENCY + (share if target.is_replicate() else share / size)


Metas = tuple[TensorMeta | None, ...]
"""Metadata of all arguments and results of a call, in this order."""


def _shrunk(
    meta: TensorMeta | None, placement: Placement | None, size: int, coordinate: int
) -> TensorMeta | None:
    """*meta* as the axes after one of *size* ranks see it on *coordinate*, laid out as *placement*."""
    dim = None if placement is None else shard_dim(placement)
    if meta is None or placement is None or dim is None or size == 1:
        return meta
    shape = shards.local_shape(meta.shape, (size,), (coordinate,), (placement,))
    return TensorMeta(shape, contiguous_stride(shape), meta.dtype)


def _variants(
    left: Sequence[Metas], placements: Sequence[Placement | None], size: int
) -> list[Metas]:
    """What the axes after one of *size* ranks see: one entry for each set of shapes that occurs, the largest first.

    There is one if the sizes divide; a strategy of the next axis must hold for all.
    """
    made = [
        tuple(
            _shrunk(meta, place, size, coordinate)
            for meta, place in zip(metas, placements, strict=True)
        )
        for metas in left
        for coordinate in (range(1) if _divides(metas, placements, size) else range(size))
    ]
    try:
        return list(dict.fromkeys(made))
    except TypeError:  # symbolic sizes, under a compiler, have no hash
        return made


def _divides(metas: Metas, placements: Sequence[Placement | None], size: int) -> bool:
    """Whether each dim of *metas* that *placements* cut is left with the same size on all of *size* ranks."""
    return all(
        meta is None
        or place is None
        or (dim := shard_dim(place)) is None
        or (type(place) is Shard and meta.shape[dim] % size == 0)
        for meta, place in zip(metas, placements, strict=True)
    )


def meta_of(spec: Spec) -> TensorMeta:
    """What a rule may know of the whole tensor that *spec* describes."""
    return TensorMeta(tuple(spec.shape), spec.stride, spec.dtype)


def _mixes(before: Sequence[Sequence[Placement] | None], now: Sequence[Placement | None]) -> bool:
    """Whether a tensor laid out as *before* on earlier axes would hold a second kind of addends with *now*.

    The order in which two kinds are combined changes the value, so no layout has both.
    """
    return any(
        isinstance(placement, Partial)
        and any(
            isinstance(p, Partial) and p.reduce_op != placement.reduce_op for p in earlier or ()
        )
        for earlier, placement in zip(before, now, strict=True)
    )


_LIKE_THEIR_ARGUMENT = frozenset(
    {
        aten._to_copy.default,  # noqa: SLF001  # an operator's name
        aten.alias.default,
        aten.clone.default,
        aten.copy_.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.fill_.Scalar,
        aten.full_like.default,
        aten.ones_like.default,
        aten.zero_.default,
        aten.zeros_like.default,
    }
)
"""Operators that torch does not call pointwise, and whose result has an entry for each of the argument's."""


def _elementwise(
    op: OpOverload,
    present: Sequence[Placement],
    metas: Sequence[TensorMeta],
    outputs: Sequence[TensorMeta | None],
) -> Iterator[Strategy]:
    """What no rule knows of: placements of one's own, which an elementwise operator on equal shapes keeps."""
    if torch.Tag.pointwise not in op.tags and op not in _LIKE_THEIR_ARGUMENT:
        return
    for placement in dict.fromkeys(p for p in present if isinstance(p, Cut)):
        shape = metas[present.index(placement)].shape
        if all(meta is not None and meta.shape == shape for meta in outputs) and all(
            meta.shape == shape or math.prod(meta.shape) == 1 for meta in metas
        ):
            yield Strategy(
                outputs=(placement,) * len(outputs),
                inputs=tuple(placement if m.shape == shape else REPLICATE for m in metas),
            )


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for one call: placements over all axes for each tensor argument and each result."""

    inputs: tuple[tuple[Placement, ...], ...]
    outputs: tuple[tuple[Placement, ...] | None, ...]


def choose(
    op: OpOverload,
    rule: OpRule | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    specs: Sequence[Spec],
    outputs: Sequence[TensorMeta | None],
    written: Sequence[int],
) -> Choice:
    """The cheapest strategy of *rule* on each mesh axis in turn.

    Raises:
        InPlaceError: when no strategy leaves the tensors at *written* laid out as they are.
    """
    mesh = specs[0].mesh
    count = len(specs)
    left: list[Metas] = [(*(meta_of(spec) for spec in specs), *outputs)]
    inputs: list[list[Placement]] = [[] for _ in specs]
    chosen: list[list[Placement] | None] = [None if meta is None else [] for meta in outputs]
    everywhere = Strategy(
        outputs=tuple(None if meta is None else REPLICATE for meta in outputs),
        inputs=(REPLICATE,) * len(specs),
    )
    for axis, size in enumerate(mesh.shape):
        present = tuple(spec.placements[axis] for spec in specs)
        calls = []
        for variant in left:
            filled, named = with_tensors(args, kwargs, variant[:count])
            calls.append(OpCall(op, tuple(filled), named, variant[count:], size, present))
        metas = cast("tuple[TensorMeta, ...]", left[0][:count])
        best, price = everywhere, math.inf
        for strategy in (
            *(common_strategies(rule, calls) if rule is not None else ()),
            *_elementwise(op, present, metas, outputs),
            everywhere,
        ):
            if any(strategy.inputs[i] != specs[i].placements[axis] for i in written):
                continue
            if _mixes(inputs, strategy.inputs) or _mixes(chosen, strategy.outputs):
                continue
            cost = 0.0
            for spec, target, meta in zip(specs, strategy.inputs, metas, strict=True):
                cost += move_cost(spec.placements[axis], target, meta, size)
                if cost >= price:
                    break
            if cost < price:
                best, price = strategy, cost
        if price == math.inf and written:
            held = [f"{tuple(specs[i].shape)} as {specs[i].placements}" for i in written]
            msg = (
                f"{op}: in-place operations that require placement changes are not supported: it writes to {held}, and no "
                f"strategy on mesh axis {axis} keeps that layout. Use the out-of-place operator, or redistribute the "
                "tensor first"
            )
            raise InPlaceError(msg)
        for i, target in enumerate(best.inputs):
            inputs[i].append(target)
        for i, made in enumerate(best.outputs):
            laid_out = chosen[i]
            if laid_out is not None and made is not None:
                laid_out.append(made)
        left = _variants(left, (*best.inputs, *best.outputs), size)
    return Choice(
        tuple(map(tuple, inputs)), tuple(None if c is None else tuple(c) for c in chosen)
    )


Option = tuple[Strategy, "list[Metas]"]
"""A strategy of one axis, and what the axes after it see."""


def everywhere(left: Sequence[Metas], count: int) -> Option:
    """All replicated; *left* describes the first *count* tensors, the arguments, and the results, as an axis sees them."""
    outputs = left[0][count:]
    kept = tuple(None if meta is None else REPLICATE for meta in outputs)
    return Strategy(outputs=kept, inputs=(REPLICATE,) * count), list(left)


def options_on_axis(
    op: OpOverload,
    rule: OpRule | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    left: Sequence[Metas],
    count: int,
    size: int,
    before: Sequence[Sequence[Placement]],
    made: Sequence[Sequence[Placement] | None],
) -> Iterator[Option]:
    """The strategies of *rule* for an axis of *size* ranks, after axes that left the shapes *left*.

    *before* and *made* are the placements of arguments and results on those axes.
    """
    calls = []
    for variant in left:
        filled, named = with_tensors(args, kwargs, variant[:count])
        calls.append(OpCall(op, tuple(filled), named, variant[count:], size))
    for strategy in common_strategies(rule, calls) if rule is not None else ():
        if not _mixes(before, strategy.inputs) and not _mixes(made, strategy.outputs):
            yield strategy, _variants(left, (*strategy.inputs, *strategy.outputs), size)
