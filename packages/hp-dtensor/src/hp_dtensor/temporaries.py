"""Which tensors of a call nobody but torch itself holds.

The idea: operators that are made of others create tensors on the way: a window of ones, zeros for a gradient, a result
that the next step overwrites. No Python name ever stood for them, so no one can have given them values that differ
between ranks, and nobody can see how they are laid out.

The rule: a tensor is such a temporary if the container of the call's arguments holds the only reference from Python, but
for those of torch's own functions that are running (`torch.svd_lowrank` draws a matrix and calls it ``R``), and of our kernels
that stand in for operators inside of them (a linear layer that takes a piece of the zeros of `nn.GRU`). For a plain one
its memory must be its own too, so that a view or a cast-free transpose of somebody's weight is not mistaken for a constant.

The design not taken: to wrap each composite operator. There are hundreds, most of them in C++, and their tensors look
the same from here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from hp_dtensor._torch import above_autograd, base_of, storage_owners

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["HELD_BY_TORCH", "alone", "owns_memory", "references"]


def references(values: Iterable[object]) -> list[int]:
    """How many references there are to each of *values*, those that counting takes included."""
    return [sys.getrefcount(value) for value in values]


HELD_BY_TORCH = references((torch.empty(0),))[0] + 1
"""What `references` finds for an argument that only the tuple of arguments and torch's own side hold."""


def held_by_a_call() -> int:
    """How many references to an argument a call of Python takes, on both sides.

    More than usual where somebody looks on at each call, as ``torch.compile`` leaves it after an error: the caller then keeps
    what it hands over.
    """

    def called(value: object) -> int:
        return sys.getrefcount(value)

    return called(object())


_HELD_BY_A_CALL = held_by_a_call()


def alone(values: Iterable[object], position: int, *, others: int = 0) -> bool:
    """Whether nobody holds the value at *position* but the container *values*, torch and *others* that the caller knows of."""
    others += held_by_a_call() - _HELD_BY_A_CALL
    if _spare(values, position) <= others:
        return True
    names = _names_in_torch(values, position)
    if names is None:
        return False
    # The innermost one has it on its stack too, and in the tuple of its arguments unless it calls a method of it.
    calls = 2 if position else 1
    kernels = _held_by_kernels(values, position)
    if kernels:
        calls = 2 if names else 0
    return _spare(values, position) <= others + names + kernels + calls


def _names_in_torch(values: Iterable[object], position: int) -> int | None:
    """How many references the names in torch's running functions are; None if the program called the operator itself."""
    frames = list(_functions_of_torch())
    return _names(frames, values, position) * _REFERENCES_OF_A_NAME if frames else None


def _held_by_kernels(values: Iterable[object], position: int) -> int:
    """How many references are those of our kernels for torch's operators, which torch's own code runs through.

    Each has a name for it, was called with a tuple of its arguments, and goes on with it on its stack and in two more.
    """
    return _names(_kernels(), values, position) * (_REFERENCES_OF_A_NAME + 4)


def _names(frames: Iterable[FrameType], values: Iterable[object], position: int) -> int:
    """How many names in *frames* stand for the value at *position*."""
    wanted = next(id(value) for at, value in enumerate(values) if at == position)
    return sum(id(value) == wanted for frame in frames for value in frame.f_locals.values())


def _spare(values: Iterable[object], position: int) -> int:
    """How many hold the value at *position* besides the container and torch's own side."""
    return references(values)[position] - HELD_BY_TORCH


def _functions_of_torch() -> Iterator[FrameType]:
    """Torch's Python functions that are running, down to the one that the program called; none in a backward pass."""
    return (frame for frame in _below_the_program() if _module(frame).partition(".")[0] == "torch")


def _kernels() -> Iterator[FrameType]:
    """Our kernels for torch's operators that are running."""
    return (frame for frame in _below_the_program() if _module(frame) == above_autograd.__module__)


def _below_the_program() -> Iterator[FrameType]:
    """The functions of torch's and of ours that are running, down to the one that the program, or a backward pass, called."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # there is no other way to the stack
    while frame is not None:
        module = _module(frame)
        if module.partition(".")[0] not in ("torch", "hp_dtensor") or module.startswith(
            "torch.autograd"
        ):
            return
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


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
