"""What to write instead, where strict mode refused: layouts for the arguments on which the operator sends nothing.

The idea: the same decision that found a communication is asked again for other layouts. What it then leaves alone is a
fix, and its price is that of the moves that the program would have to write out.

The rule: a fix that is offered was checked, never guessed. The cheapest come first, three at most; replicating all
arguments always works and is offered when nothing cheaper does.

The design not taken: a table of hints for each operator. It would go out of date with the first new rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from hp_dtensor.calls import with_tensors
from hp_dtensor.choice import meta_of
from hp_dtensor.dispatch import add_adviser, moves_of
from hp_dtensor.errors import ImplicitCommunicationError
from hp_dtensor.placements import REPLICATE, Placement, gradient_placements, shard_dim
from hp_dtensor.preview import redistribute_plan
from hp_dtensor.rules import OpCall, find_rule
from hp_dtensor.spec import Spec, spec_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

    from hp_dtensor.dtensor import DTensor

__all__ = ["Fix", "fixes_for"]

MOST = 3
"""How many fixes are offered."""
_TRIED = 64
"""How many candidates are checked."""

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Fix:
    """Moves to write out before a call, after which the operator sends nothing by itself."""

    moves: tuple[tuple[int, Placements], ...]
    """(position among the tensor arguments, placements) of each argument to redistribute."""
    collectives: tuple[str, ...]
    """The collectives that these moves take."""
    bytes: int
    """The most that one rank receives for them."""
    backward: tuple[str, ...]
    """The collectives that their gradients take."""

    def apply(
        self, args: Sequence[object], kwargs: Mapping[str, object] | None = None
    ) -> tuple[list[object], dict[str, object]]:
        """Return the arguments of the call with the moves made.

        Example:
            >>> Fix((), (), 0, ()).apply([1], {"dim": 0})
            ([1], {'dim': 0})
        """
        kwargs = kwargs or {}
        wanted = dict(self.moves)
        tensors = [
            cast("DTensor", tensor).redistribute(placements=list(wanted[position]))
            if position in wanted
            else tensor
            for position, tensor in enumerate(_tensors([*args, *kwargs.values()]))
        ]
        return with_tensors(args, kwargs, tensors)

    def __str__(self) -> str:
        told = " and ".join(
            f"redistribute tensor argument {position} to {list(placements)}"
            for position, placements in self.moves
        )
        forward = ", ".join(self.collectives) or "nothing sent"
        backward = ", ".join(self.backward) or "nothing sent"
        return f"{told} ({forward}, {self.bytes} bytes; backward: {backward})"


def _tensors(values: Sequence[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _candidates(
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    specs: Sequence[Spec | None],
) -> Iterator[dict[int, Placements]]:
    """Layouts to try: one argument elsewhere, all as some strategy has them, all replicated."""
    known = [(position, spec) for position, spec in enumerate(specs) if spec is not None]
    whole: dict[int, Placements] = {
        position: (REPLICATE,) * spec.mesh.ndim
        for position, spec in known
        if not all(place.is_replicate() for place in spec.placements)
    }
    for position, placements in whole.items():
        yield {position: placements}
    for position, spec in known:
        for other, model in known:
            dims = {shard_dim(place) for place in model.placements}
            if (
                other != position
                and max((d for d in dims if d is not None), default=0) < spec.ndim
            ):
                yield {position: model.placements}
    yield from _strategies(op, args, kwargs, known)
    if whole:
        yield whole


def _strategies(
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    known: Sequence[tuple[int, Spec]],
) -> Iterator[dict[int, Placements]]:
    """For each strategy of an axis of its own, on one axis at a time."""
    rule = find_rule(op)
    if rule is None or len(known) != sum(1 for _ in _tensors([*args, *kwargs.values()])):
        return
    specs = [spec for _, spec in known]
    filled, named = with_tensors(args, kwargs, [meta_of(spec) for spec in specs])
    mesh = specs[0].mesh
    for axis, size in enumerate(mesh.shape):
        try:
            found = rule.strategies(OpCall(op, tuple(filled), named, (), size))
        except (ValueError, IndexError, TypeError, AttributeError):
            # A rule that reads the description of its results, which nobody has made here.
            return
        for strategy in found:
            if not any(place.is_partial() for place in strategy.inputs):
                yield {
                    position: (*spec.placements[:axis], place, *spec.placements[axis + 1 :])
                    for (position, spec), place in zip(known, strategy.inputs, strict=True)
                    if spec.placements[axis] != place
                }


def _priced(specs: Sequence[Spec | None], moves: Mapping[int, Placements]) -> Fix | None:
    collectives: list[str] = []
    backward: list[str] = []
    total = 0
    for position, placements in moves.items():
        spec = cast("Spec", specs[position])
        plan = redistribute_plan(spec, list(placements))
        total += plan.bytes
        collectives += [step.kind for step in plan.steps if step.bytes]
        back = redistribute_plan(
            spec.with_placements(gradient_placements(placements)),
            list(gradient_placements(spec.placements)),
        )
        backward += [step.kind for step in back.steps if step.bytes]
    return Fix(tuple(sorted(moves.items())), tuple(collectives), total, tuple(backward))


def fixes_for(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[Fix, ...]:
    """Return what to write before a call of *op* that would communicate, cheapest first."""
    specs = [spec_of(tensor) for tensor in _tensors([*args, *kwargs.values()])]
    found: dict[tuple[tuple[int, Placements], ...], Fix] = {}
    for moves in itertools.islice(_candidates(op, args, kwargs, specs), _TRIED):
        key = tuple(sorted(moves.items()))
        if not moves or key in found or not _settles(op, args, kwargs, specs, moves):
            continue
        fix = _priced(specs, moves)
        if fix is not None:
            found[key] = fix
    return tuple(sorted(found.values(), key=lambda fix: (fix.bytes, len(fix.moves))))[:MOST]


def _settles(
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    specs: Sequence[Spec | None],
    moves: Mapping[int, Placements],
) -> bool:
    """Whether *op* sends nothing once *moves* are made."""
    changed = [
        spec if spec is None or position not in moves else spec.with_placements(moves[position])
        for position, spec in enumerate(specs)
    ]
    if all(
        spec is None or all(place.is_replicate() for place in spec.placements) for spec in changed
    ):
        return True
    if any(spec is None for spec in changed):
        return False
    left = moves_of(op, args, kwargs, cast("list[Spec]", changed))
    return left is not None and not left


def _advise(
    error: ImplicitCommunicationError,
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> ImplicitCommunicationError:
    layouts = [
        f"{position}: {tuple(spec.shape)} as {list(spec.placements)}"
        for position, spec in enumerate(map(spec_of, _tensors([*args, *kwargs.values()])))
        if spec is not None
    ]
    fixes = fixes_for(op, args, kwargs)
    inner = f" (in {error.op})" if error.op and error.op != str(op) else ""
    told = "".join(f"\n  {number}. {fix}" for number, fix in enumerate(fixes, 1))
    msg = (
        f"{op}{inner}: would communicate implicitly inside hp_dtensor.strict(): {error.reason}. Tensor arguments: "
        f"{'; '.join(layouts)}. Redistribute explicitly with x.redistribute(placements=...) before the call"
        f"{', one of:' if told else ', or change the layouts that meet here'}{told}"
    )
    return ImplicitCommunicationError(msg, op=str(op), reason=error.reason, fixes=fixes)


add_adviser(_advise)
