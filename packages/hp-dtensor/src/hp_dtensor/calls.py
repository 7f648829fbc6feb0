"""The arguments of an operator call, as torch hands them over: where the tensors are, and which of them are written to.

The rule: tensors count in the order of the arguments, positional ones first, those inside lists in place. A schema says what
is written to and what is a view; the few operators whose schema does not say it are listed.

Not taken: torch's tree utilities, which walk dictionaries and classes too and take ten times as long for these shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from hp_dtensor._torch import schema_of

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten = torch.ops.aten


def _replace(values: Sequence[object], new: Iterator[object]) -> list[object]:
    """*values* with each tensor, also inside lists, replaced by the next of *new*."""
    out: list[object] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            out.append(next(new))
        elif type(value) in (list, tuple):
            out.append(_replace(cast("Sequence[object]", value), new))
        else:
            out.append(value)
    return out


def with_tensors(
    args: Sequence[object], kwargs: Mapping[str, object], new: Sequence[object]
) -> tuple[list[object], dict[str, object]]:
    """*args* and *kwargs* with each tensor, also inside lists, replaced by the next of *new*."""
    source = iter(new)
    filled = _replace(args, source)
    return filled, dict(zip(kwargs, _replace(list(kwargs.values()), source), strict=True))


def flat(result: object) -> list[object]:
    """The results of a call in a list, of which there may be one alone."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operator's schema says about aliasing: which arguments it writes to, and whether it gives views."""

    written: tuple[int, ...]
    """Positions among the *arguments* (not the tensors) that are written to."""
    written_names: tuple[str, ...]
    """Keyword arguments that are written to."""
    is_view: bool
    """Whether a result may share storage with an argument that is not written to."""
    returns_written: bool
    """Whether a result is an argument that was written to, as of ``add_`` and of ``out=`` forms."""


_signatures: dict[OpOverload, Signature] = {}

_WRITES_UNDECLARED = {aten.native_batch_norm.default: (3, 4)}
"""Arguments that an operator writes to although its schema does not say so: the running mean and variance."""


def signature(op: OpOverload) -> Signature:
    """The aliasing facts of *op*."""
    found = _signatures.get(op)
    if found is None:
        written, names, view = list(_WRITES_UNDECLARED.get(op, ())), [], False
        for position, argument in enumerate(schema_of(op).arguments):
            alias = argument.alias_info
            if alias is not None and alias.is_write:
                if argument.kwarg_only:
                    names.append(argument.name)
                else:
                    written.append(position)
        view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema_of(op).returns
        )
        returned = any(
            r.alias_info is not None and r.alias_info.is_write for r in schema_of(op).returns
        )
        found = _signatures[op] = Signature(tuple(written), tuple(names), view, returned)
    return found


def written_tensors(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[int]:
    """Positions among the tensors of the call of those that *op* writes to."""
    facts = signature(op)
    out: list[int] = []
    position = 0
    for index, value in enumerate([*args, *kwargs.values()]):
        hit = (
            index in facts.written
            if index < len(args)
            else list(kwargs)[index - len(args)] in facts.written_names
        )
        count = count_tensors(value)
        if hit:
            out.extend(range(position, position + count))
        position += count
    return out


def count_tensors(value: object) -> int:
    """How many tensors an argument is: one, those of a list, or none."""
    if isinstance(value, torch.Tensor):
        return 1
    if type(value) in (list, tuple):
        return sum(count_tensors(item) for item in cast("Sequence[object]", value))
    return 0
