"""What a sharding rule is told, what it answers, and where it is found.

The idea: a rule speaks about one mesh axis. It is given an operator call in which every tensor
is a `TensorMeta`, and answers with the ways (`Strategy`) in which the call may run on the pieces
that an axis of ``call.axis_size`` coordinates holds. N-D is the product over axes, formed by the
reader of the table; a rule author never sees a mesh, a group or a tensor.

The rule: that everything may be replicated is implied and never listed. A listed strategy must be
right for every value of the tensors, for every size (uneven, empty) and for every dtype of the
call; `hp_dtensor.testing.check_rule` proves it by brute force. Order is preference on equal cost.

The design not taken: rules that see the layouts of their inputs and pick one. They cannot be
checked without the picker, and two readers of the same table could not disagree about cost.
`OpCall.present` is a hint only: it tells which `StridedShard` values are worth talking about,
since there are too many to list blindly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from hp_dtensor._torch import schema_of
from hp_dtensor.placements import Partial, Placement, Replicate

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket

__all__ = [
    "Box",
    "LocalCall",
    "Localizer",
    "OpCall",
    "OpRule",
    "Rule",
    "Strategy",
    "TensorMeta",
    "common_strategies",
    "find_rule",
    "register_rule",
    "registered_ops",
]

Box = tuple[tuple[tuple[int, int], ...], ...]
"""For each tensor dim the half-open intervals of global indices that a coordinate holds."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, stride and dtype of a tensor: all that a rule may know of it.

    Example:
        >>> import torch
        >>> TensorMeta((2, 3), (3, 1), torch.float32).ndim
        2
    """

    shape: tuple[int, ...]
    """Sizes left over by the mesh axes before the one that the rule is asked about."""
    stride: tuple[int, ...]
    """Strides in elements."""
    dtype: torch.dtype
    """Element type."""

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Return the metadata of *tensor*.

        Example:
            >>> import torch
            >>> TensorMeta.of(torch.zeros(2, 3)).shape
            (2, 3)
        """
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _flatten(value: object) -> Iterator[TensorMeta]:
    if isinstance(value, TensorMeta):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)


def _when_absent(op: OpOverload, position: int, name: str, default: object) -> tuple[str, object]:
    """The schema's name of the argument *name*, or of the one at *position*, and its value where it is left out."""
    arguments = schema_of(op).arguments
    at = [argument for argument in arguments[position : position + 1] if not argument.kwarg_only]
    found = [argument for argument in arguments if argument.name == name] or at
    if not found:
        return name, default
    (declared,) = found
    return declared.name, declared.default_value if declared.has_default_value() else default


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operator call, as a rule sees it."""

    op: OpOverload
    """The operator overload."""
    args: tuple[object, ...]
    """Positional arguments, a `TensorMeta` in place of each tensor, lists kept."""
    kwargs: Mapping[str, object]
    """Keyword arguments, in the same form."""
    outputs: tuple[TensorMeta | None, ...]
    """Metadata of the flattened results, None for a result that is no tensor."""
    axis_size: int
    """Number of coordinates on the mesh axis."""
    present: tuple[Placement, ...] = ()
    """What each tensor's placement on this axis is now, in the order of `tensors`; empty if unknown.

    Only a hint: a rule may add strategies for a `StridedShard` that it finds here, and must not
    leave any out because of it.
    """
    tensors: tuple[TensorMeta, ...] = field(init=False, repr=False, compare=False)
    """The tensor arguments, flattened in order (positional, then keyword)."""

    def __post_init__(self) -> None:
        found = (*_flatten(self.args), *_flatten(tuple(self.kwargs.values())))
        object.__setattr__(self, "tensors", found)

    def arg(self, position: int, name: str = "", default: object = None) -> object:
        """Return the argument at *position*, or the keyword *name*, or what stands for it if absent.

        That is the value that the operator's schema declares, since torch leaves out arguments
        that are equal to it; *default* where the schema has no such argument, or no such value.

        Example:
            >>> import torch
            >>> meta = TensorMeta((2, 3), (3, 1), torch.float32)
            >>> call = OpCall(torch.ops.aten.topk.default, (meta, 1), {}, (meta, meta), 1)
            >>> call.arg(1, "k"), call.arg(2, "dim"), call.arg(9, "unheard", "of")
            (1, -1, 'of')
        """
        if position < len(self.args):
            return self.args[position]
        if name in self.kwargs:
            return self.kwargs[name]
        declared, value = _when_absent(self.op, position, name, default)
        return self.kwargs.get(declared, value)

    @property
    def output(self) -> TensorMeta:
        """The first result, which must be a tensor."""
        first = self.outputs[0]
        if first is None:
            msg = f"{self.op} returned no tensor as its first result"
            raise ValueError(msg)
        return first


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a call on the pieces of a mesh axis."""

    outputs: tuple[Placement | None, ...]
    """A placement per result; None for a result that is no tensor."""
    inputs: tuple[Placement, ...]
    """A placement per entry of ``call.tensors``."""


@dataclass(frozen=True, slots=True)
class LocalCall:
    """What the code that runs on one coordinate may know; pure data but for `group`.

    Inputs are described as they are after redistribution. Tuples that speak of inputs have an
    entry per entry of ``call.tensors``, those that speak of outputs one per entry of
    ``call.outputs``; placements are over all mesh axes.
    """

    call: OpCall
    """The whole call: metadata of the global tensors."""
    mesh_shape: tuple[int, ...]
    """Sizes of the mesh axes."""
    coordinate: tuple[int, ...]
    """Where on the mesh this code runs."""
    input_placements: tuple[tuple[Placement, ...], ...]
    """A placement per mesh axis, for each input."""
    output_placements: tuple[tuple[Placement, ...] | None, ...]
    """A placement per mesh axis, for each result; None for a result that is no tensor."""
    input_local_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the local pieces of the inputs."""
    output_local_shapes: tuple[tuple[int, ...] | None, ...]
    """Shapes of the local pieces of the results."""
    input_boxes: tuple[Box, ...]
    """Which global indices the local piece of each input holds."""
    output_boxes: tuple[Box | None, ...]
    """Which global indices the local piece of each result holds."""
    group: Callable[[int], object] | None = None
    """The process group of a mesh axis, for code that must communicate."""


Rule = Callable[[OpCall], Iterable[Strategy]]
"""A pure function from a call to the strategies that are right for it."""

Localizer = Callable[[LocalCall], "Callable[..., object]"]
"""Gives what to run instead of the operator: it takes the operator's arguments, with local
tensors in place of tensors, and returns the operator's results."""

LinearFinder = Callable[[OpCall], Iterable[frozenset[int]]]
"""Gives, for a call, the sets of tensor positions in which the operator is jointly linear."""

Linear = Iterable[Iterable[int]] | LinearFinder
"""Linearity as data, or by call where it depends on the other arguments."""


@dataclass(frozen=True, slots=True)
class OpRule:
    """What the table holds for one operator overload."""

    rule: Rule
    """The strategies, without what `linear` adds."""
    local: Localizer | None = None
    """What to run locally, if not the operator itself."""
    linear: LinearFinder | None = None
    """Sets of tensor positions in which the operator is jointly linear."""

    def strategies(self, call: OpCall) -> tuple[Strategy, ...]:
        """Return all strategies for *call*, the preferred first, without duplicates.

        Strategies that do not fit the call (a wrong number of placements) are errors of the rule.

        Raises:
            ValueError: If the rule answers with a wrong number of placements.
        """
        found = dict.fromkeys(self.rule(call))
        if self.linear is not None:
            found |= dict.fromkeys(_linear_strategies(call, self.linear(call)))
        for strategy in found:
            _check_arity(call, strategy)
        return tuple(found)


def _check_arity(call: OpCall, strategy: Strategy) -> None:
    if len(strategy.inputs) != len(call.tensors) or len(strategy.outputs) != len(call.outputs):
        msg = (
            f"the rule of {call.op} answered with {len(strategy.inputs)} input and "
            f"{len(strategy.outputs)} output placements for a call with {len(call.tensors)} "
            f"tensors and {len(call.outputs)} results: {strategy}"
        )
        raise ValueError(msg)


def _linear_strategies(call: OpCall, groups: Iterable[frozenset[int]]) -> Iterator[Strategy]:
    outputs = [meta for meta in call.outputs if meta is not None] or call.tensors[:1]
    kinds = ["sum"] if any(not _is_inexact(meta.dtype) for meta in outputs) else ["sum", "avg"]
    for members in groups:
        for kind in kinds:
            partial = Partial(kind)
            yield Strategy(
                outputs=tuple(None if meta is None else partial for meta in call.outputs),
                inputs=tuple(
                    partial if position in members else Replicate()
                    for position in range(len(call.tensors))
                ),
            )


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def common_strategies(entry: OpRule, calls: Iterable[OpCall]) -> tuple[Strategy, ...]:
    """Return the strategies that hold for each of *calls*, preferred as for the first.

    Where an earlier mesh axis cut a dim unevenly, its coordinates are left with different sizes,
    and the next axis must act alike on all of them: ask with one call for each distinct shape.
    """
    answers = [entry.strategies(call) for call in calls]
    return tuple(
        strategy
        for strategy in (answers[0] if answers else ())
        if all(strategy in answer for answer in answers[1:])
    )


_table: dict[OpOverload, OpRule] = {}
_replaced: set[OpOverload] = set()
"""Operators whose first rule was replaced: whoever did it wants that rule, and no composition."""
_on_change: list[Callable[[], None]] = []
_by_tag: list[tuple[torch.Tag, OpRule]] = []


def _overload_names(packet: object) -> list[str]:
    """Name the overloads, but for those that take dims by name, which distributed tensors lack."""
    names: list[str] = packet.overloads()  # type: ignore[attr-defined]
    return [name for name in names if "name" not in name.lower()]


def _overloads(ops: object) -> Iterator[OpOverload]:
    if isinstance(ops, type(torch.ops.aten.add.Tensor)):
        yield ops
    elif isinstance(ops, type(torch.ops.aten.add)):
        yield from (getattr(ops, name) for name in _overload_names(ops))
    elif isinstance(ops, Iterable):
        for op in ops:
            yield from _overloads(op)
    else:
        msg = (
            f"a rule is registered for operators such as torch.ops.aten.add.Tensor or "
            f"torch.ops.aten.add, or an iterable of these, not for {ops!r}"
        )
        raise TypeError(msg)


def register_rule(
    ops: OpOverload | OpOverloadPacket | Iterable[OpOverload | OpOverloadPacket],
    rule: Rule,
    *,
    local: Localizer | None = None,
    linear: Linear = (),
    overwrite: bool = False,
) -> None:
    """Put *rule* into the table for each overload in *ops*.

    Args:
        ops: Operator overloads; a packet stands for all its overloads. The ``out=`` forms take
            the same rule, with the results' placements for the tensors written to, unless *local*
            is given.
        rule: The strategies of a call.
        local: Gives what to run on a coordinate instead of the operator itself, for operators
            whose static arguments speak about sizes, counts or positions of the whole tensor.
        linear: Sets of positions in ``call.tensors``. For each set the operator is linear in
            these tensors taken together when the others are fixed, so that a sum of addends
            (``Partial("sum")``, and ``Partial("avg")`` for inexact results) may stay one. A
            function of the call where that depends on its other arguments.
        overwrite: Replace a rule that is there already.

    Raises:
        ValueError: If an overload has a rule already and *overwrite* is not set.
        TypeError: If *ops* holds something else than operators.
    """
    if callable(linear):
        find_linear = linear
    else:
        groups = tuple(frozenset(group) for group in linear)

        def find_linear(_call: OpCall) -> Iterable[frozenset[int]]:
            return groups

    entry = OpRule(rule, local, find_linear)
    writing = OpRule(_with_out(rule), None, _linear_with_out(find_linear))
    found = tuple(_overloads(ops))
    taken = [str(op) for op in found if op in _table]
    if taken and not overwrite:
        msg = f"{', '.join(taken)} already has a rule; pass overwrite=True to replace it"
        raise ValueError(msg)
    for op in found:
        if not _is_out_variant(op):
            _table[op] = entry
        elif local is None:
            _table[op] = writing
    if taken:
        _replaced.update(found)
    for forget in _on_change:
        forget()


def is_replaced(op: OpOverload) -> bool:
    """Return whether somebody replaced the rule that *op* came with."""
    return op in _replaced


def on_change(forget: Callable[[], None]) -> None:
    """Call *forget* whenever the table changes, for what was decided by an older one."""
    _on_change.append(forget)


# --- out= forms -------------------------------------------------------------------------------

_OUT_NAMES = frozenset({"grad_input", "values", "values_stable", "dim_max", "dim_min", "output"})


def _is_out_variant(op: OpOverload) -> bool:
    """Whether *op* writes its results into keyword arguments, by ATen's naming rule."""
    name = str(op).rpartition(".")[2]
    return name == "out" or name.endswith("_out") or name in _OUT_NAMES


def _without_out(call: OpCall) -> OpCall | None:
    """Return *call* without the tensors that it writes to, which come last; None if they resize."""
    count = len(call.outputs)
    names = [name for name, value in call.kwargs.items() if isinstance(value, TensorMeta)]
    written = names[len(names) - count :]
    for name, result in zip(written, call.outputs, strict=False):
        given = call.kwargs[name]
        if not isinstance(given, TensorMeta) or result is None or given.shape != result.shape:
            return None
    kept = {name: value for name, value in call.kwargs.items() if name not in written}
    return replace(call, kwargs=kept, present=call.present[: len(call.tensors) - len(written)])


def _with_out(rule: Rule) -> Rule:
    def write(call: OpCall) -> Iterator[Strategy]:
        inner = _without_out(call)
        for strategy in rule(inner) if inner is not None else ():
            written = tuple(place for place in strategy.outputs if place is not None)
            yield Strategy(strategy.outputs, strategy.inputs + written)

    return write


def _linear_with_out(linear: LinearFinder) -> LinearFinder:
    def find(call: OpCall) -> Iterator[frozenset[int]]:
        inner = _without_out(call)
        if inner is not None:
            written = range(len(inner.tensors), len(call.tensors))
            for group in linear(inner):
                yield group.union(written)

    return find


def register_tag_rule(tag: torch.Tag, entry: OpRule) -> None:
    """Let *entry* answer for every operator that carries *tag* and has no rule of its own."""
    _by_tag.append((tag, entry))


def find_rule(op: OpOverload) -> OpRule | None:
    """Return what the table holds for *op*, or None.

    Example:
        >>> import torch
        >>> find_rule(torch.ops.aten.mm.default) is not None
        True
    """
    entry = _table.get(op)
    if entry is None:
        for tag, candidate in _by_tag:
            if tag in op.tags:
                entry = _table[op] = candidate
                break
    return entry


def registered_ops() -> tuple[OpOverload, ...]:
    """Return the operators that have a rule of their own (not by tag)."""
    return tuple(_table)


def aten_ops(*names: str) -> tuple[OpOverload | OpOverloadPacket, ...]:
    """Return the ATen operators of these names that this torch has.

    ``"add"`` stands for the packet, ``"add.Tensor"`` for one overload. Names that this torch does
    not know are skipped, since operators come and go between versions.

    Example:
        >>> [str(op) for op in aten_ops("mm.default", "no_such_operator")]
        ['aten.mm.default']
    """
    found: list[OpOverload | OpOverloadPacket] = []
    for name in names:
        packet_name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, packet_name, None)
        if packet is None:
            continue
        op = getattr(packet, overload, None) if overload else packet
        if op is not None:
            found.append(op)
    return tuple(found)
