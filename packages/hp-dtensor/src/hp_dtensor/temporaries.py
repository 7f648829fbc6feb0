"""Which tensors of a call nobody but torch itself holds.

The idea: operators that are made of others create tensors on the way: a window of ones, zeros for a gradient, a result
that the next step overwrites. No Python name ever stood for them, so no one can have given them values that differ
between ranks, and nobody can see how they are laid out.

The rule: a tensor is such a temporary if the container of the call's arguments holds the only reference from Python.
For a plain one its memory must be its own too, so that a view or a cast-free transpose of somebody's weight is not
mistaken for a constant.

The design not taken: to wrap each composite operator. There are hundreds, most of them in C++, and their tensors look
the same from here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from hp_dtensor._torch import base_of, storage_owners

__all__ = ["HELD_BY_TORCH", "alone", "owns_memory", "references"]


def references(values: Iterable[object]) -> list[int]:
    """How many references there are to each of *values*, those that counting takes included."""
    return [sys.getrefcount(value) for value in values]


HELD_BY_TORCH = references((torch.empty(0),))[0] + 1
"""What `references` finds for an argument that only the tuple of arguments and torch's own side hold."""


def alone(values: Iterable[object], position: int, *, others: int = 0) -> bool:
    """Whether nobody holds the value at *position* but the container *values*, torch and *others* that the caller knows of."""
    for at, count in enumerate(references(values)):
        if at == position:
            return count <= HELD_BY_TORCH + others
    return False


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether nobody from Python sees the memory of the plain *tensor*: it is its own, or that of another temporary."""
    if storage_owners(tensor) <= 2:  # itself, and the handle that asks
        return True
    base = base_of(tensor)
    return base is not None and alone((base,), 0, others=1)
