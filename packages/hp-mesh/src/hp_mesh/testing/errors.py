"""What the caller of ``run_spmd`` sees when a rank fails.

An exception that a rank raised comes back as itself, so that ``pytest.raises`` works, with a
`RankTraceback` as its cause. Only a rank that gave no answer needs an error of ours. A wrapper
around every error was not taken: a test would then have to know that it ran on ranks.
"""

from __future__ import annotations

__all__ = ["RankDiedError", "RankError", "RankTimeoutError", "RankTraceback"]


class RankError(RuntimeError):
    """A rank gave no answer, or one that cannot be brought to the parent.

    Example:
        >>> RankError("rank 2 of 4 died", ranks=(2,)).ranks
        (2,)
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        """Say what happened; *ranks* are those that are to blame."""
        super().__init__(message)
        self.ranks = ranks
        """The ranks that are to blame, in ascending order."""


class RankDiedError(RankError):
    """A rank's process ended while it ran the function."""


class RankTimeoutError(RankError, TimeoutError):
    """Some ranks had not finished within the timeout; the message holds every rank's stack."""


class RankTraceback(Exception):  # noqa: N818 - it is a cause to be read, never raised
    """The traceback of a rank as text, the cause of the exception that the parent raises."""

    def __init__(self, text: str) -> None:
        """Keep *text*, which says the rank and its traceback."""
        super().__init__(text)
        self.text = text
        """Rank, traceback and, where another rank failed too, one line for each."""

    def __str__(self) -> str:
        """Return the text on its own lines."""
        return f"\n{self.text}"
