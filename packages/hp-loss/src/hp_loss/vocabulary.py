"""Which classes this rank holds, and with whom it shares the rest.

A vocabulary is cut over one or more groups of ranks. This rank holds an ordered list of half-open
intervals of class indices (one interval, unless the layout is strided), and its logits have one
column per class of that list. The cut is the one shard rule of the workspace, so an uneven
vocabulary has a short or empty last shard.

Not taken: keeping `start` and `stop` only. A list of intervals costs nothing for the usual single
one and makes fused and strided heads right too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hp_dtensor.shards import local_intervals
from torch import Tensor

from hp_loss.errors import LossLayoutError

__all__ = ["Vocabulary", "held_classes", "vocabulary_of_group", "whole_vocabulary"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A set of classes, and the part of it that this rank holds."""

    size: int
    """How many classes there are, over all ranks."""
    intervals: tuple[tuple[int, int], ...]
    """The half-open intervals of classes held here, in the order of the local columns."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """The groups over which the classes are cut; statistics are merged over each of them."""

    @property
    def local_size(self) -> int:
        """How many classes this rank holds."""
        return sum(stop - start for start, stop in self.intervals)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all classes."""
        return self.local_size == self.size

    def column(self, classes: Tensor) -> Tensor:
        """Turn class indices into local columns; -1 where another rank holds the class (or none does)."""
        column = torch.full_like(classes, -1)
        first = 0
        for start, stop in self.intervals:
            held = (classes >= start) & (classes < stop)
            column = torch.where(held, classes - (start - first), column)
            first += stop - start
        return column

    def class_of(self, column: Tensor) -> Tensor:
        """Turn local columns into class indices."""
        classes = column
        first = 0
        for start, stop in self.intervals:
            classes = torch.where(
                (column >= first) & (column < first + stop - start),
                column + (start - first),
                classes,
            )
            first += stop - start
        return classes

    def part(self, whole: Tensor, dim: int = -1) -> Tensor:
        """Cut from *whole*, which has all classes along *dim*, the part that this rank holds."""
        if self.is_whole:
            return whole
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in self.intervals]
        if not pieces:
            return whole.narrow(dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


_uncached: Callable[[int, tuple[tuple[int, int, int], ...]], tuple[tuple[int, int], ...]] = (
    inspect.unwrap(local_intervals)
)


def held_classes(
    size: int, splits: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """The classes that are left of *size* after *splits*, as `hp_dtensor.shards.local_intervals` says."""
    if torch.compiler.is_compiling():
        # A compiler looks through the cache, and warns that it does.
        return _uncached(size, splits)
    return local_intervals(size, splits)


def whole_vocabulary(size: int) -> Vocabulary:
    """A vocabulary that every rank holds in full."""
    return Vocabulary(size, ((0, size),) if size else ())


def vocabulary_of_group(
    local_size: int, group: dist.ProcessGroup | None, size: int | None
) -> Vocabulary:
    """Describe a vocabulary of *size* classes that is cut evenly over *group*.

    Without a size the shards are taken to be even. With one, this rank's *local_size* must be what
    the shard rule gives.
    """
    if group is None or group.size() == 1:
        if size is not None and size != local_size:
            raise LossLayoutError(
                f"the logits have {local_size} classes and vocab_size is {size}, with one rank in the group: they must "
                "be equal; pass the group over which the vocabulary is cut, or leave vocab_size out",
            )
        return whole_vocabulary(local_size)
    ranks, rank = group.size(), group.rank()
    total = local_size * ranks if size is None else size
    found = Vocabulary(total, held_classes(total, ((ranks, rank, 1),)), (group,))
    if found.local_size != local_size:
        raise LossLayoutError(
            f"a vocabulary of {total} classes over {ranks} ranks gives rank {rank} of the group {found.local_size} of them "
            f"(chunks of {-(-total // ranks)}), and its logits have {local_size}: cut the head as torch.chunk does, or "
            "pass the logits as a DTensor, which knows its layout",
        )
    return found
