"""Which tensors of a call nobody but torch itself holds.

The idea: operators that are made of others create tensors on the way: a window of ones, zeros for a gradient, a result
that the next step overwrites. No Python name ever stood for them, so no one can have given them values that differ
between ranks, and nobody can see how they are laid out.

The rule: a tensor is such a temporary if the container of the call's arguments holds the only reference from Python, but
for those of torch's own functions that are running (`torch.svd_lowrank` draws a matrix and calls it ``R``). For a plain one
its memory must be its own too, so that a view or a cast-free transpose of somebody's weight is not mistaken for a constant.

The design not taken: to wrap each composite operator. There are hundreds, most of them in C++, and their tensors look
the same from here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from hp_dtensor._torch import base_of, storage_owners

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["HELD_BY_TORCH", "alone", "owns_memory", "references"]


def references(values: Iterable[object]) -> list[int]:
    """How many references there are to each of *values*, those that counting takes included."""
    return [sys.getrefcount(value) for value in values]


HELD_BY_TORCH = references((torch.empty(0),))[0] + 1
"""What `references` finds for an argument that only the tuple of arguments and torch's own side hold."""


def alone(values: Iterable[object], position: int, *, others: int = 0) -> bool:
    """Whether nobody holds the value at *position* but the container *values*, torch and *others* that the caller knows of."""
    if _spare(values, position) <= others:
        return True
    names = _names_in_torch(values, position)
    if names is None:
        return False
    # The innermost one has it on its stack too, and in the tuple of its arguments unless it calls a method of it.
    return _spare(values, position) <= others + names + (2 if position else 1)


def _names_in_torch(values: Iterable[object], position: int) -> int | None:
    """How many references the names in torch's running functions are; None if the program called the operator itself."""
    wanted = next(id(value) for at, value in enumerate(values) if at == position)
    frames = list(_functions_of_torch())
    found = sum(id(value) == wanted for frame in frames for value in frame.f_locals.values())
    return found * _REFERENCES_OF_A_NAME if frames else None


def _spare(values: Iterable[object], position: int) -> int:
    """How many hold the value at *position* besides the container and torch's own side."""
    return references(values)[position] - HELD_BY_TORCH


def _functions_of_torch() -> Iterator[FrameType]:
    """Torch's Python functions that are running, down to the one that the program called; none in a backward pass."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # there is no other way to the stack
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package == "torch" and not module.startswith("torch.autograd"):
            yield frame
        elif package != "hp_dtensor":
            return
        frame = frame.f_back


def _references_of_a_name() -> int:
    """How many references a name is once its function's names were looked at: some Pythons keep a copy of them."""
    value = object()
    before = sys.getrefcount(value)
    names = sys._getframe().f_locals  # noqa: SLF001  # as above
    assert "value" in names
    return 1 + sys.getrefcount(value) - before


_REFERENCES_OF_A_NAME = _references_of_a_name()


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether nobody from Python sees the memory of the plain *tensor*: it is its own, or that of another temporary."""
    if storage_owners(tensor) <= 2:  # itself, and the handle that asks
        return True
    base = base_of(tensor)
    if base is None:
        return False
    named = _names_in_torch((base,), 0)
    # The name of it here, and where a function of torch's has a name for it, that one's stack and arguments.
    return _spare((base,), 0) <= (named + 3 if named else 1)
