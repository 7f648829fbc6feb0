"""Which classes a rank holds: columns and classes are each other's inverse, and parts make up the whole."""

from __future__ import annotations

import torch
from hp_dtensor.shards import local_intervals
from hp_loss.vocabulary import Vocabulary, whole_vocabulary
from hypothesis import given
from hypothesis import strategies as st


def _ranks(size: int, ranks: int, factor: int) -> list[Vocabulary]:
    return [
        Vocabulary(size, local_intervals(size, ((ranks, rank, factor),))) for rank in range(ranks)
    ]


@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 3))
def test_each_class_has_one_column_on_one_rank(size: int, ranks: int, factor: int) -> None:
    """Over all ranks every class is held once, at the column that leads back to it; others are -1."""
    classes = torch.arange(-2, size + 2)
    held = torch.zeros(size, dtype=torch.int64)
    for vocabulary in _ranks(size, ranks, factor):
        column = vocabulary.column(classes)
        mine = classes[column >= 0]
        held[mine] += 1
        assert torch.equal(column[column >= 0], torch.arange(vocabulary.local_size))
        assert torch.equal(vocabulary.class_of(torch.arange(vocabulary.local_size)), mine)
    assert held.tolist() == [1] * size


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 3))
def test_a_part_is_what_the_columns_hold(size: int, ranks: int, factor: int) -> None:
    """The part of a vector of classes has, at each column, the entry of the column's class."""
    whole = torch.arange(size) * 10
    for vocabulary in _ranks(size, ranks, factor):
        expected = vocabulary.class_of(torch.arange(vocabulary.local_size)) * 10
        assert torch.equal(vocabulary.part(whole), expected)


def test_a_whole_vocabulary_holds_everything() -> None:
    """One rank: every class is its own column, and the part is the whole."""
    vocabulary = whole_vocabulary(5)
    assert vocabulary.is_whole
    assert vocabulary.column(torch.tensor([0, 4, 5, -1])).tolist() == [0, 4, -1, -1]
    assert whole_vocabulary(0).local_size == 0
