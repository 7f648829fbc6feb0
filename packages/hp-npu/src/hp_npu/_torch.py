"""What torch calls private and we use, in one place, each with why nothing public does.

``tests/test_seams.py`` has a test for each, which runs on the oldest and on the newest torch that
we support.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Signature", "signatures_of"]


@dataclass(frozen=True, slots=True)
class Signature:
    """An operator's schema, as far as a caller by position must know it."""

    arguments: tuple[str, ...]
    """Type of each argument as a schema spells it, for example ``Tensor`` or ``float``."""
    required: int
    """How many leading arguments have no default."""
    positional: int
    """How many leading arguments can be given by position."""
    results: int
    """How many results there are."""
    text: str
    """The schema itself."""


# A lookup in C++, which a compiler can't trace; torch leaves the decorator untyped.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def signatures_of(name: str) -> tuple[Signature, ...]:
    """Return the schemas of all overloads of an operator; none if it is unknown.

    `torch._C._jit_get_schemas_for_operator`: `torch.ops` answers whether a packet exists, but what
    the packet takes is told nowhere in public. We compare schemas since a vendor's version does
    not tell which arguments there are.
    """
    return tuple(_signature(schema) for schema in torch._C._jit_get_schemas_for_operator(name))


def _signature(schema: torch._C.FunctionSchema) -> Signature:
    required = [
        place
        for place, argument in enumerate(schema.arguments)
        if not argument.has_default_value()
    ]
    return Signature(
        arguments=tuple(str(argument.type) for argument in schema.arguments),
        required=required[-1] + 1 if required else 0,
        positional=sum(not argument.kwarg_only for argument in schema.arguments),
        results=len(schema.returns),
        text=str(schema),
    )
