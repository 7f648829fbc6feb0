"""Views that had to be copied: where they come from, and how a write to one reaches the tensor that it was taken from.

A slice along a cut dim lives on other ranks, so what should share memory is a copy. It keeps the call that made it, and a
write to it runs that call again on the numbers of all elements, which tells where they go.

Not taken: to refuse every write. ``x[:, 1:].add_(1)`` is what people write, and its elements are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from hp_dtensor.calls import flat
from hp_dtensor.errors import InPlaceError
from hp_dtensor.modes import implicit_replication

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

__all__ = ["remember_source", "write_to_base"]

_SOURCE = "_hp_source"
"""Where a tensor that should be a view, and is a copy, keeps where it comes from."""


@dataclass(frozen=True, slots=True)
class _Source:
    """How a copy was made that should be a view: the operator with its arguments, and which of its results it is."""

    op: OpOverload
    args: Sequence[object]
    kwargs: Mapping[str, object]
    number: int


def remember_source(
    result: object, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Let each tensor of *result*, which *op* copied where a view was meant, know where it comes from."""
    for number, part in enumerate(flat(result)):
        if isinstance(part, torch.Tensor):
            part.__dict__[_SOURCE] = _Source(op, args, kwargs, number)


def write_to_base(op: OpOverload, copy: Tensor) -> None:
    """Write the values of *copy* to where a view would have had them, in the tensor that it was taken from.

    Which elements these are, the view operator says itself, run on the numbers of all elements.

    Raises:
        InPlaceError: when nobody knows any more what it was taken from.
    """
    source: _Source | None = copy.__dict__.get(_SOURCE)
    if source is None:
        msg = (
            f"{op}: the tensor it writes to is a slice that had to be copied to this rank, so the write would not reach the "
            "tensor it was taken from. Write through the whole tensor (masked_fill, where, index_put), or redistribute so "
            "that the slice is local"
        )
        raise InPlaceError(msg)
    base = cast("Tensor", source.args[0])
    with torch.no_grad(), implicit_replication():
        numbers = torch.arange(base.numel(), device=base.device).view(base.shape)
        seen = flat(source.op(numbers, *source.args[1:], **source.kwargs))[source.number]
        where = cast("Tensor", seen).reshape(-1)
        row = base.reshape(-1).index_copy(0, where, copy.detach().reshape(-1))
        base.copy_(row.view(base.shape))
