"""The four numbers add up: however a vocabulary is cut, merging the parts gives the whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hp_loss.kernel import TorchKernel
from hp_loss.statistics import EXP_SUM, MASS, MAXIMUM, empty_statistics, merge, rebase
from hypothesis import given
from hypothesis import strategies as st


def _statistics(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition, in 64 bits and one line each."""
    maximum = logits.max(1).values
    relative = logits - maximum[:, None]
    return torch.stack(
        [maximum, relative.exp().sum(1), (weights * relative).sum(1), weights.sum(1)], 1
    )


def _cuts(data: st.DataObject, size: int) -> list[tuple[int, int]]:
    inner = sorted(data.draw(st.lists(st.integers(0, size), min_size=1, max_size=5)))
    edges = [0, *inner, size]
    return list(itertools.pairwise(edges))


@given(st.data())
def test_merged_parts_equal_the_whole(data: st.DataObject) -> None:
    """Any cut of the classes, empty parts among them, merges to the statistics of the whole."""
    classes = data.draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    spread = data.draw(st.sampled_from([1.0, 30.0, 1e4]))
    logits = torch.randn(3, classes, generator=generator, dtype=torch.float64) * spread
    weights = torch.rand(3, classes, generator=generator, dtype=torch.float64)
    kernel = TorchKernel()
    nowhere = torch.full((3,), -1)
    shards = [
        kernel.statistics(logits[:, a:b], nowhere, torch.zeros(3), weights[:, a:b])
        for a, b in _cuts(data, classes)
    ]
    torch.testing.assert_close(
        merge(torch.stack(shards)), _statistics(logits, weights), rtol=1e-12, atol=1e-9
    )


@given(st.permutations(range(4)), st.integers(0, 2**16))
def test_merging_is_associative(order: list[int], seed: int) -> None:
    """Shards of shards, in any order, merge to what all shards at once merge to."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(4, 5, 4, generator=generator, dtype=torch.float64).abs()
    first, second, third, fourth = (parts[i] for i in order)
    nested = merge(
        torch.stack([merge(torch.stack([first, second])), merge(torch.stack([third, fourth]))])
    )
    torch.testing.assert_close(nested, merge(parts))


def test_the_empty_shard_is_neutral() -> None:
    """Merging with a shard without classes changes no bit, even where the other has a huge maximum."""
    one = torch.tensor([[3e38, 1.5, -2.0, 1.0], [-7.0, 1.0, 0.0, 0.5]])
    empty = empty_statistics(2, torch.float32, torch.device("cpu"))
    assert torch.equal(merge(torch.stack([one, empty])), one)
    assert torch.equal(merge(torch.stack([empty, one])), one)


def test_further_columns_are_sums() -> None:
    """A fifth column is added up and otherwise left alone."""
    shards = torch.tensor([[[1.0, 1.0, 0.0, 1.0, 2.0]], [[5.0, 1.0, 0.0, 0.0, 3.0]]])
    assert merge(shards)[0, 4] == 5.0


def test_rebase_moves_to_a_common_maximum() -> None:
    """Relative to another maximum, the sum of exponentials scales and the dot product shifts by the mass."""
    moved = rebase(torch.tensor([[1.0, 2.0, -3.0, 0.5]]), torch.tensor([3.0]))
    torch.testing.assert_close(
        moved, torch.tensor([[2.0 * math.exp(-2.0), -3.0 - 0.5 * 2.0, 0.5]])
    )


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_row_that_is_nan_on_one_device_stays_nan(value: float) -> None:
    """An infinite or undefined logit in one shard makes the merged sum undefined."""
    kernel = TorchKernel()
    nowhere = torch.full((1,), -1)
    bad = kernel.statistics(torch.tensor([[value, 0.0]]), nowhere, torch.zeros(1), None)
    good = kernel.statistics(torch.tensor([[2.0, 1.0]]), nowhere, torch.zeros(1), None)
    assert merge(torch.stack([good, bad]))[0, EXP_SUM].isnan()


def test_a_shard_of_minus_infinity_adds_nothing() -> None:
    """A shard whose logits are all minus infinity has no share in the softmax and spoils no other."""
    kernel = TorchKernel()
    masked = kernel.statistics(
        torch.full((1, 3), -math.inf), torch.full((1,), -1), torch.zeros(1), None
    )
    good = kernel.statistics(
        torch.tensor([[2.0]]), torch.zeros(1, dtype=torch.int64), torch.ones(1), None
    )
    merged = merge(torch.stack([masked, good]))[0]
    assert merged[MAXIMUM] == 2.0
    assert merged[EXP_SUM] == 1.0
    assert merged[MASS] == 1.0
