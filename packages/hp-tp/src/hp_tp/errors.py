"""What can go wrong with a plan or a style, as types that callers already catch.

Each is raised on every rank alike and before any communication: what is wrong follows from the plan, the model and the
shapes, which all ranks share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "BoundaryError",
    "ContextParallelError",
    "PipelineError",
    "PlanError",
    "StyleError",
    "UnmatchedKeyError",
    "UnsupportedModuleError",
]


class PlanError(ValueError):
    """A plan that does not fit the model: a conflict between two entries, or a parameter that is laid out already."""


class UnmatchedKeyError(PlanError):
    """A plan has keys that name no module of the model.

    Args:
        nearest: each key that matches nothing, with the names of modules that are most like it.
    """

    nearest: Mapping[str, Sequence[str]]
    """The keys that match nothing, each with the module names most like it."""

    def __init__(self, nearest: Mapping[str, Sequence[str]]) -> None:
        self.nearest = dict(nearest)
        lines = [
            f"  {key!r}: "
            + (f"did you mean {' or '.join(map(repr, names))}?" if names else "nothing is like it")
            for key, names in self.nearest.items()
        ]
        super().__init__(
            "These keys of the plan match no module:\n"
            + "\n".join(lines)
            + "\nCorrect them, or pass unmatched='ignore' if the plan covers modules that this model lacks."
        )

    def __reduce__(self) -> tuple[type[UnmatchedKeyError], tuple[Mapping[str, Sequence[str]]]]:
        return UnmatchedKeyError, (self.nearest,)


class StyleError(ValueError, AssertionError):
    """Arguments of a style that contradict each other; an AssertionError too, which is what torch raises for these."""


class BoundaryError(ValueError):
    """A value at the boundary of a parallel module that is not what its style says: a count, a kind, a mesh or a size."""


class UnsupportedModuleError(NotImplementedError):
    """A style was applied to a kind of module that it has no rule for."""


class ContextParallelError(ValueError):
    """A sequence, a mask or an attention that context parallelism cannot cut or compute."""


class PipelineError(PlanError):
    """A model, degrees and options that do not go together.

    Args:
        violations: every rule that is broken, each with what is legal.
    """

    violations: Sequence[str]
    """Every rule that is broken."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        listed = "\n".join(f"  - {violation}" for violation in self.violations)
        super().__init__(f"The model cannot be parallelised like this:\n{listed}")

    def __reduce__(self) -> tuple[type[PipelineError], tuple[Sequence[str]]]:
        return PipelineError, (self.violations,)
