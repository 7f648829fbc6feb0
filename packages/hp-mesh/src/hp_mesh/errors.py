"""Every error of this package, in one place.

The rule: an error extends the builtin that callers of PyTorch or HyperParallel catch today, says what
was given, what is legal and what to do, and carries those facts as attributes.
It is raised on every rank alike and before any communication; `GroupError` is the exception, since
it reports a communication that failed.
Not taken: one error class with a code; callers catch classes.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AxisError",
    "AxisRequiredError",
    "BackendError",
    "GroupError",
    "MeshError",
    "MeshTypeError",
    "NoGroupError",
    "ParallelDimsError",
    "UnnamedMeshError",
]


class MeshError(ValueError, RuntimeError):
    """A mesh, or a question to one, that cannot be.

    A `ValueError`, as such a mistake is in Python, and a `RuntimeError`, as PyTorch raises for most of them: code written
    for either keeps working.
    """

    def __str__(self) -> str:
        """Return the message as it was written (`KeyError` would quote it)."""
        return str(self.args[0]) if self.args else ""


class MeshTypeError(MeshError, TypeError):
    """An argument of a type that says nothing about a mesh."""


class AxisError(MeshError, KeyError):
    """An axis name, index or order that the mesh does not have.

    A `KeyError` as in PyTorch, and a `ValueError` as in HyperParallel.
    """

    def __init__(self, message: str, *, asked: object, legal: Sequence[object]) -> None:
        super().__init__(message)
        self.asked = asked
        """What was asked for."""
        self.legal = tuple(legal)
        """What the mesh has."""

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild with the facts, so that the error crosses processes."""
        return _rebuild_axis_error, (type(self), str(self), self.asked, self.legal)


def _rebuild_axis_error(
    kind: type[AxisError], message: str, asked: object, legal: Sequence[object]
) -> AxisError:
    return kind(message, asked=asked, legal=legal)


class UnnamedMeshError(MeshError):
    """A question by axis name to a mesh whose axes have no names."""


class AxisRequiredError(MeshError):
    """A question about one axis, to a mesh of several, that names none."""


class NoGroupError(MeshError):
    """A process group was asked of a mesh that has none on this rank."""


class BackendError(MeshError, NotImplementedError):
    """A device type or a communication that no backend at hand offers."""


class GroupError(MeshError):
    """A process group could not be made: a member died, or asked for another group."""

    def __init__(
        self,
        message: str,
        *,
        label: str = "",
        ranks: Sequence[int] = (),
        missing: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.label = label
        """What the group is for, for example ``axis 'tp' of mesh (dp=2, tp=4)``."""
        self.ranks = tuple(ranks)
        """The global ranks of the group."""
        self.missing = tuple(missing)
        """Those that were never heard of."""

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild with the facts, so that the error crosses processes."""
        return _rebuild_group_error, (str(self), self.label, self.ranks, self.missing)


def _rebuild_group_error(
    message: str, label: str, ranks: Sequence[int], missing: Sequence[int]
) -> GroupError:
    return GroupError(message, label=label, ranks=ranks, missing=missing)


class ParallelDimsError(MeshError):
    """Parallel degrees that do not fit the world or each other; lists every broken rule."""

    def __init__(self, message: str, *, violations: Sequence[str]) -> None:
        super().__init__(message)
        self.violations = tuple(violations)
        """One sentence per broken rule."""

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild with the facts, so that the error crosses processes."""
        return _rebuild_dims_error, (str(self), self.violations)


def _rebuild_dims_error(message: str, violations: Sequence[str]) -> ParallelDimsError:
    return ParallelDimsError(message, violations=violations)
