"""Operators that write their result into a tensor of the caller's (``out=``), in terms of those that return a new one.

The rule: the result is computed by the form that returns it, which has its own rule or composition, and is copied into what the
caller gave, whose layout stays. The copy says what moves. One of another shape is resized first, as torch has it, and held whole
by each rank then. A form with a rule of its own needs all this only where it would have to resize: the pieces would follow, what
all ranks know of the whole would not.

Not taken: torch's own composition of such a form, which writes through reshaped views of ``out``. Of a sharded tensor these may be
copies, and what is written to a copy is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from hp_dtensor._torch import TorchDTensor, schema_of
from hp_dtensor.calls import flat, signature

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

__all__: list[str] = []


@cache
def functional_form(op: OpOverload) -> OpOverload | None:
    """The overload of the same arguments that returns what *op* writes into ``out=``; None if *op* is no such form."""
    schema = schema_of(op)
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    if len(wanted) == len(schema.arguments):
        return None
    packet = op.overloadpacket
    for name in packet.overloads():
        other: OpOverload = getattr(packet, name)
        if [(a.name, str(a.type)) for a in schema_of(other).arguments] == wanted:
            return other
    return None


def given_outs(op: OpOverload, kwargs: Mapping[str, object]) -> list[Tensor]:
    """The tensors that *op* writes to, also those in a list."""
    values = [one for name in signature(op).written_names for one in flat(kwargs.get(name))]
    return [value for value in values if isinstance(value, torch.Tensor)]


def must_resize(op: OpOverload, kwargs: Mapping[str, object], results: Sequence[object]) -> bool:
    """Whether a distributed tensor that *op* writes to has another shape than what goes there of *results*."""
    return any(
        isinstance(out, TorchDTensor)
        and isinstance(result, torch.Tensor)
        and out.shape != result.shape
        for out, result in zip(given_outs(op, kwargs), results, strict=False)
    )


def write_outs(
    op: OpOverload, form: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Run *form* for *op*, copy what it gives into the tensors to write to, and return these.

    Raises:
        RuntimeError: when the results cannot be cast to the dtype of one.
    """
    outs = given_outs(op, kwargs)
    names = signature(op).written_names
    rest = {name: value for name, value in kwargs.items() if name not in names}
    results = [value for value in flat(form(*args, **rest)) if isinstance(value, torch.Tensor)]
    for out, result in zip(outs, results, strict=True):
        if not torch.can_cast(result.dtype, out.dtype):
            msg = f"{op}: the result is of {result.dtype}, which cannot be cast to {out.dtype}, the dtype of out="
            raise RuntimeError(msg)
        if out.shape != result.shape:
            out.resize_(result.shape)
        out.copy_(result)
    if not schema_of(op).returns:
        return None
    return outs[0] if len(outs) == 1 else tuple(outs)
