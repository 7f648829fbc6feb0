"""What a program asks of dispatch while it runs: to take plain tensors as replicated, to refuse to communicate, to be told.

Each is a context variable, so that threads and tasks do not disturb one another, and is read at the one place that decides.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hp_dtensor.errors import ImplicitCommunicationError

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from hp_dtensor.spec import Spec

__all__ = [
    "Move",
    "implicit_replication",
    "is_replication_implied",
    "is_strict",
    "listening",
    "note_moves",
    "refuse_communication",
    "strict",
]

Move = tuple[int, "Spec", "Spec"]
"""(position among the tensor arguments, from, to)."""

_implicit_replication: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "hp_implicit_replication", default=False
)
_strict: contextvars.ContextVar[bool] = contextvars.ContextVar("hp_strict", default=False)
_listener: contextvars.ContextVar[Callable[[OpOverload, Sequence[Move]], None] | None] = (
    contextvars.ContextVar("hp_listener", default=None)
)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, a plain tensor that meets a distributed one counts as replicated.

    The caller promises that the tensor is the same on every rank; nothing checks it.
    Without the context only scalars, 0-d and one-element tensors, and integer or boolean tensors (ids, labels, masks)
    may mix with distributed tensors.

    Example:
        >>> import hp_dtensor
        >>> with hp_dtensor.implicit_replication():
        ...     pass
    """
    token = _implicit_replication.set(True)
    try:
        yield
    finally:
        _implicit_replication.reset(token)


@contextmanager
def strict() -> Iterator[None]:
    """Inside, an operator that would communicate without being asked raises instead.

    What is written out (``redistribute``, ``full_tensor``, ``to_local``, ``from_local``) may communicate. What is left
    unsaid raises too: ``to_local()`` of a replicated leaf, such as the weights of a router, without ``grad_placements``.

    Raises:
        ImplicitCommunicationError: naming the operator, the layouts it met and the ones it would have moved to.
        LayoutError: from ``to_local()``, if nothing says how the gradients of a leaf's replicas fit together.

    Example:
        >>> import hp_dtensor
        >>> with hp_dtensor.strict():
        ...     pass
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def is_replication_implied() -> bool:
    """Whether plain tensors count as replicated right now."""
    return _implicit_replication.get()


def is_strict() -> bool:
    """Whether communication that nobody asked for is forbidden right now."""
    return _strict.get()


@contextmanager
def listening(listener: Callable[[OpOverload, Sequence[Move]], None]) -> Iterator[None]:
    """Inside, *listener* hears of each operator that moves its arguments over the network by itself, and how."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def note_moves(op: OpOverload, moves: Sequence[Move]) -> None:
    """Say that *op* is about to make *moves*, or refuse."""
    listener = _listener.get()
    if listener is not None:
        listener(op, moves)
    if _strict.get():
        told = (f"tensor argument {i}: {a.placements} -> {b.placements}" for i, a, b in moves)
        refuse_communication(op, "; ".join(told))


def refuse_communication(op: OpOverload, what: str) -> None:
    """Raise when implicit communication is forbidden right now.

    Raises:
        ImplicitCommunicationError: inside :func:`strict`, naming *op* and *what* it would do.
    """
    if _strict.get():
        msg = (
            f"{op}: would communicate implicitly inside hp_dtensor.strict(): {what}. Redistribute explicitly with "
            "x.redistribute(placements=...) before the call, or change the layouts that meet here"
        )
        raise ImplicitCommunicationError(msg, op=str(op), reason=what)
