"""Views that had to be copied: where they come from, and how a write to one reaches the tensor that it was taken from.

A slice along a cut dim lives on other ranks, so what should share memory is a copy. It keeps the call that made it. A write to
it runs that call again on the numbers of all elements, which tells where they go; and who reads it or writes to it after the
tensor that it was taken from was written to, has the call run again first. Writes are counted by autograd, which counts those to
the copy too, since it takes it for a view: the next read after one runs the call once more than it need.

Not taken: to refuse every write. ``x[:, 1:].add_(1)`` is what people write, and its elements are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from hp_dtensor._torch import new_dtensor, writes_to
from hp_dtensor.calls import flat
from hp_dtensor.errors import InPlaceError
from hp_dtensor.modes import implicit_replication
from hp_dtensor.spec import spec_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

    from hp_dtensor.spec import Spec

__all__ = ["SOURCE", "is_copy", "refresh", "refresh_among", "remember_source", "write_to_base"]

SOURCE = "_hp_source"
"""Where a tensor that should be a view, and is a copy, keeps where it comes from; not copied or pickled with it."""


_copied: set[OpOverload] = set()
"""The operators whose results were copied so far; none in most programs."""


@dataclass(slots=True)
class _Source:
    """How a copy was made that should be a view: the operator with its arguments, and which of its results it is."""

    op: OpOverload
    args: Sequence[object]
    kwargs: Mapping[str, object]
    number: int
    version: int
    """How often its base had been written to."""

    @property
    def base(self) -> Tensor:
        """The tensor that it was taken from."""
        return cast("Tensor", self.args[0])


def is_copy(tensor: Tensor) -> bool:
    """Whether *tensor* is a copy where a view was meant."""
    spec = spec_of(tensor)
    return spec is not None and spec.copied_view


def remember_source(
    result: object, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Let each tensor of *result*, which *op* copied where a view was meant, know where it comes from."""
    _copied.add(op)
    for number, part in enumerate(flat(result)):
        if isinstance(part, torch.Tensor):
            version = writes_to(cast("Tensor", args[0]))
            part.__dict__[SOURCE] = _Source(op, args, kwargs, number, version)


def refresh_among(args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Give the copies among the arguments of a call the values that views would have by now."""
    if not _copied:
        return
    for value in args if not kwargs else (*args, *kwargs.values()):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and is_copy(tensor):
                refresh(tensor)


def refresh(copy: Tensor) -> bool:
    """Give *copy* the values that a view would have by now; whether anything was written since it was made."""
    source: _Source | None = copy.__dict__.get(SOURCE)
    if source is None:
        return False
    changed = refresh(source.base)
    version = writes_to(source.base)
    if not changed and version == source.version:
        return False
    with torch.no_grad():
        again = flat(source.op(*source.args, **source.kwargs))[source.number]
        now = again.redistribute(placements=copy.placements)  # type: ignore[attr-defined]  # both are DTensors
        copy._local_tensor.copy_(now._local_tensor)  # type: ignore[attr-defined]  # as above
    source.version = version
    return True


def write_to_base(op: OpOverload, copy: Tensor) -> None:
    """Write the values of *copy* to where a view would have had them, in the tensor that it was taken from.

    Which elements these are, the view operator says itself, run on the numbers of all elements.

    Raises:
        InPlaceError: when nobody knows any more what it was taken from.
    """
    source: _Source | None = copy.__dict__.get(SOURCE)
    if source is None:
        msg = (
            f"{op}: the tensor it writes to is a slice that had to be copied to this rank, so the write would not reach the "
            "tensor it was taken from. Write through the whole tensor (masked_fill, where, index_put), or redistribute so "
            "that the slice is local"
        )
        raise InPlaceError(msg)
    base = source.base
    with torch.no_grad(), implicit_replication():
        numbers = torch.arange(base.numel(), device=base.device).view(base.shape)
        seen = flat(source.op(numbers, *source.args[1:], **source.kwargs))[source.number]
        where = cast("Tensor", seen).reshape(-1)
        spec = cast("Spec", spec_of(copy)).as_own()  # as a copy it would be made anew
        values = new_dtensor(type(copy), copy._local_tensor, spec, False)  # type: ignore[attr-defined]  # distributed
        row = base.reshape(-1).index_copy(0, where, values.reshape(-1))
        base.copy_(row.view(base.shape))
    source.version = writes_to(base)
