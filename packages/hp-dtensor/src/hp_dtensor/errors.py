"""What can go wrong with a distributed tensor, as types that callers already catch.

Each error extends the builtin that the mistake would raise on one device, so that code written against plain tensors
keeps working, and carries its facts in its text: what was asked, the values, what is legal, what to do.
None of them is a ``TypeError``: Python's operator protocol swallows that one.
"""

from __future__ import annotations


class LayoutError(ValueError):
    """A description of a layout that cannot be: placements, aliases or shapes that do not fit the mesh or the tensor."""


class RedistributeError(RuntimeError):
    """A move between two layouts that has no meaning, such as one that would have to invent addends."""


class NoRuleError(NotImplementedError):
    """An operator for which no sharding is known and which cannot be run replicated either."""


class MixedTensorError(RuntimeError):
    """A plain tensor met a distributed one where nobody said how its values are laid out."""


class InPlaceError(RuntimeError):
    """An in-place operator would have to change the layout of the tensor it writes to."""


class ImplicitCommunicationError(RuntimeError):
    """Inside :func:`hp_dtensor.strict`, an operator would have communicated without being asked to."""

    def __init__(
        self, message: str, *, op: str = "", reason: str = "", fixes: tuple[object, ...] = ()
    ) -> None:
        super().__init__(message)
        self.op = op
        """The operator."""
        self.reason = reason
        """What it would have done."""
        self.fixes = fixes
        """What to do instead, each an `hp_dtensor.Fix`: it was checked that the operator then sends nothing by itself."""

    def __reduce__(self) -> tuple[object, ...]:
        return _implicit_error, (str(self), self.op, self.reason, self.fixes)


def _implicit_error(
    message: str, op: str, reason: str, fixes: tuple[object, ...]
) -> ImplicitCommunicationError:
    return ImplicitCommunicationError(message, op=op, reason=reason, fixes=fixes)


class ReplicaError(RuntimeError):
    """Inside :func:`hp_dtensor.check_replicas`, replicas that claim to be equal are not."""

    def __init__(
        self, message: str, *, op: str, axis: int, coordinates: tuple[tuple[int, ...], ...]
    ) -> None:
        super().__init__(message)
        self.op = op
        """Where the tensor comes from."""
        self.axis = axis
        """The mesh axis along which replicas differ."""
        self.coordinates = coordinates
        """Two mesh coordinates whose ranks hold different ones."""

    def __reduce__(self) -> tuple[object, ...]:
        facts = {"op": self.op, "axis": self.axis, "coordinates": self.coordinates}
        return _replica_error, (str(self), facts)


def _replica_error(message: str, facts: dict[str, object]) -> ReplicaError:
    return ReplicaError(message, **facts)  # type: ignore[arg-type]  # what __reduce__ gave
