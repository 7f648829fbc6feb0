"""Sharding rules for operators of one's own, in torch's form.

:func:`hp_dtensor.register_rule` is the native form: a function of an :class:`~hp_dtensor.OpCall`. This is the form that
``torch.distributed.tensor.experimental.register_sharding`` made known: a function of the operator's own arguments that
lists, for one mesh axis, which placements of the results go with which placements of the arguments. Tensors may also
stand in keyword arguments and in lists; there a list of placements stands in the list's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from hp_dtensor._torch import schema_of
from hp_dtensor.placements import Placement
from hp_dtensor.rules import OpCall, Strategy, TensorMeta, register_rule

if TYPE_CHECKING:
    from torch._ops import OpOverload

PlacementTree: TypeAlias = Placement | Sequence["PlacementTree"] | None
Shardings: TypeAlias = Sequence[tuple[Sequence[PlacementTree], Sequence[PlacementTree]]]
ShardingFn: TypeAlias = Callable[..., Shardings]


def _leaves(tree: Iterable[PlacementTree]) -> Iterator[Placement | None]:
    for node in tree:
        if node is None or isinstance(node, Placement):
            yield node
        else:
            yield from _leaves(node)


def _values(call: OpCall) -> Iterator[object]:
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, (list, tuple)) and any(
            isinstance(item, TensorMeta) for item in value
        ):
            yield from value
        else:
            yield value


def _inputs(call: OpCall, tree: Sequence[PlacementTree]) -> tuple[Placement, ...]:
    """The placements of the tensors among the arguments, from one placement (or None) for each argument."""
    given = list(_leaves(tree))
    tensors = [isinstance(value, TensorMeta) for value in _values(call)]
    if len(given) == len(call.tensors) and all(placement is not None for placement in given):
        return tuple(placement for placement in given if placement is not None)
    if len(given) > len(tensors):
        given = _passed(call, given)
    # Trailing ones that are no tensors may be left out.
    given += [None] * (len(tensors) - len(given))
    out = tuple(
        placement
        for placement, is_tensor in zip(given, tensors, strict=False)
        if is_tensor and placement is not None
    )
    if len(out) != len(call.tensors) or len(given) != len(tensors):
        msg = (
            f"the sharding of {call.op} lists placements {given} for arguments of which {tensors} are tensors; give one "
            "placement for each argument, None for those that are no tensor"
        )
        raise ValueError(msg)
    return out


def _passed(call: OpCall, given: list[Placement | None]) -> list[Placement | None]:
    """Of placements for all arguments that the operator has, those of the arguments that the call passes."""
    names = [argument.name for argument in schema_of(call.op).arguments]
    named = dict(zip(names, given, strict=False))
    passed = [*names[: len(call.args)], *call.kwargs]
    left = any(placement is not None for name, placement in named.items() if name not in passed)
    return given if len(given) > len(names) or left else [named.get(name) for name in passed]


def _with_written(call: OpCall) -> OpCall:
    """*call* with the tensors that an ``out=`` form writes to, which the table keeps from rules, described like results."""
    names = [
        argument.name
        for argument in schema_of(call.op).arguments
        if argument.kwarg_only
        and argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name not in call.kwargs
    ]
    if not names:
        return call
    return replace(
        call, kwargs={**call.kwargs, **dict(zip(names, call.outputs, strict=False))}, present=()
    )


def register_sharding(op: OpOverload | Iterable[OpOverload]) -> Callable[[ShardingFn], ShardingFn]:
    """Register how *op* may run sharded, as a decorator.

    The function gets the operator's arguments, with a :class:`~hp_dtensor.rules.TensorMeta` (shape, stride, dtype,
    ``ndim``) in place of each tensor, and returns a list of pairs: placements of the results, placements of the arguments
    (None for one that is no tensor), each for one mesh axis. That everything may be replicated need not be listed.

    Args:
        op: the operator, or several that share the function. A rule that is there already is replaced.

    Example:
        >>> import torch
        >>> from hp_dtensor import Replicate, Shard, find_rule, register_sharding
        >>> @register_sharding(torch.ops.aten.celu.default)
        ... def celu(x, alpha=1.0):
        ...     return [([Shard(d)], [Shard(d), None]) for d in range(x.ndim)]
        >>> find_rule(torch.ops.aten.celu.default) is not None
        True
    """

    def decorate(function: ShardingFn) -> ShardingFn:
        def rule(call: OpCall) -> Iterator[Strategy]:
            full = _with_written(call)
            for outputs, inputs in function(*full.args, **full.kwargs):
                placements = _inputs(full, inputs)
                # What an operator without results gives counts as one, of no placement.
                results = tuple(_leaves(outputs)) or (None,) * len(call.outputs)
                yield Strategy(results, placements[: len(call.tensors)])

        register_rule(op, rule, overwrite=True)
        return function

    return decorate
