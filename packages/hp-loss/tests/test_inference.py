"""Choices from shards equal those from the whole logits; the gather puts uneven shards together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_loss import (
    LossOptionError,
    gather_tensor_parallel_logits,
    vocab_parallel_argmax,
    vocab_parallel_topk,
)
from hp_loss.order import from_order, to_order
from hp_mesh import init_device_mesh
from hp_mesh.testing import run_spmd, spmd
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of what must be a DTensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


@dataclass
class _Config:
    """What a generation config has; ours needs these three and no class of ours."""

    gather_logits: bool = True
    logits_process_group: dist.ProcessGroup | None = None
    logits_gather_dim: int = -1


def _logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def _shard(logits: Tensor, dim: int = -1) -> Tensor:
    size, ranks, rank = logits.shape[dim], dist.get_world_size(), dist.get_rank()
    step = -(-size // ranks)
    start = min(rank * step, size)
    return logits.narrow(dim, start, min(step, size - start))


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_the_order_of_floats_is_that_of_their_integers(values: list[float]) -> None:
    """Integers compare as the floats do, zeros are equal, NaN is above all, and the way back gives the floats."""
    floats = torch.tensor(values)
    order = to_order(floats)
    expected = torch.where(floats.isnan(), math.inf, floats)
    for left in range(len(values)):
        for right in range(len(values)):
            if floats[left].isnan() or floats[right].isnan():
                continue
            assert bool(order[left] < order[right]) == bool(expected[left] < expected[right])
            assert bool(order[left] == order[right]) == bool(expected[left] == expected[right])
    torch.testing.assert_close(
        from_order(order, torch.float32), floats, rtol=0, atol=0, equal_nan=True
    )


@given(st.lists(st.floats(), min_size=1, max_size=8))
def test_64_bit_floats_have_an_order_too(values: list[float]) -> None:
    """The way there and back keeps every 64-bit float."""
    floats = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(
        from_order(to_order(floats), torch.float64), floats, rtol=0, atol=0, equal_nan=True
    )


@spmd(world_size=4)
def test_argmax_of_shards_is_argmax() -> None:
    """Even, uneven and empty shards, ties, infinities and NaN: the class that one device picks."""
    for classes in (8, 7, 5, 3, 1):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            logits = _logits(6, classes).to(dtype)
            logits[0] = 1.0
            logits[1] = -math.inf
            logits[2, -1] = math.nan
            logits[3, classes // 2] = math.inf
            got = vocab_parallel_argmax(_shard(logits), group=dist.group.WORLD, vocab_size=classes)
            assert torch.equal(got, logits.argmax(-1))


@spmd(world_size=4)
def test_argmax_of_distributed_logits_lies_as_the_tokens_do() -> None:
    """A DTensor in, a DTensor out, cut like the tokens; any axes may cut the classes."""
    mesh = init_device_mesh("cpu", (2, 2))
    logits = _logits(2, 3, 7)
    for placements in (
        [Shard(0), Shard(2)],
        [Shard(2), Shard(1)],
        [Shard(2), Shard(2)],
        [Replicate(), Replicate()],
    ):
        got = vocab_parallel_argmax(distribute_tensor(logits, mesh, placements))
        assert isinstance(got, DTensor)
        assert torch.equal(_full(got), logits.argmax(-1))


@spmd(world_size=4)
def test_topk_of_shards_is_topk() -> None:
    """Also where k is more than a shard has, and all there is."""
    for classes, k in ((8, 1), (8, 3), (7, 5), (5, 5), (3, 2)):
        for dtype in (torch.float32, torch.bfloat16):
            # Whole numbers, all different: 16 bits hold them, and there are no ties.
            logits = torch.stack(
                [
                    torch.randperm(classes, generator=torch.Generator().manual_seed(row))
                    for row in range(6)
                ]
            ).to(dtype)
            logits -= 3
            expected = logits.topk(k)
            got = vocab_parallel_topk(
                _shard(logits), k, group=dist.group.WORLD, vocab_size=classes
            )
            assert torch.equal(got.values, expected.values)
            assert torch.equal(got.indices, expected.indices)
    mesh = init_device_mesh("cpu", (2, 2))
    logits = _logits(2, 3, 7)
    spread = vocab_parallel_topk(distribute_tensor(logits, mesh, [Shard(0), Shard(2)]), 3)
    assert isinstance(spread.indices, DTensor)
    assert torch.equal(_full(spread.values), logits.topk(3).values)
    assert torch.equal(_full(spread.indices), logits.topk(3).indices)


def test_equal_logits_go_to_the_lowest_class_on_all_ranks() -> None:
    """Ties are broken by class, so that all ranks agree."""

    def body() -> list[list[int]]:
        group = dist.group.WORLD
        logits = torch.zeros(1, 8)
        return [
            vocab_parallel_argmax(_shard(logits), group=group).tolist(),
            vocab_parallel_topk(_shard(logits), 2, group=group).indices[0].tolist(),
        ]

    assert run_spmd(body, world_size=4) == [[[0], [0, 1]]] * 4


@pytest.mark.parametrize("k", [0, 6])
def test_more_than_there_are_is_refused(k: int) -> None:
    """The error says how many classes there are."""
    with pytest.raises(
        LossOptionError,
        match=f"k is {k}: it must be at least 1 and at most the number of classes, 5",
    ):
        vocab_parallel_topk(torch.zeros(2, 5), k)


def test_no_classes_are_refused() -> None:
    """There is no best of nothing."""
    with pytest.raises(LossOptionError, match="there are no classes to choose from"):
        vocab_parallel_argmax(torch.zeros(2, 0))


@spmd(world_size=4)
def test_gathered_shards_are_the_whole() -> None:
    """Along any dimension from the end, over even, uneven and empty shards, in rank order."""
    for size, dim in ((8, -1), (7, -1), (3, -1), (5, -2)):
        logits = _logits(2, size, size)
        got = gather_tensor_parallel_logits(_shard(logits, dim), _Config(logits_gather_dim=dim))
        assert torch.equal(got, logits)


@spmd(world_size=4)
def test_a_gather_is_over_the_groups_ranks_in_their_order() -> None:
    """A group of half of the ranks gathers from those."""
    mesh = init_device_mesh("cpu", (2, 2))
    config = _Config(logits_process_group=mesh.get_group(1))
    got = gather_tensor_parallel_logits(torch.full((1, 2), float(dist.get_rank())), config)
    first = dist.get_rank() // 2 * 2
    assert got.tolist() == [[first, first, first + 1.0, first + 1.0]]


@spmd(world_size=4)
def test_distributed_logits_are_gathered_over_the_classes_only() -> None:
    """Tokens stay where they are."""
    mesh = init_device_mesh("cpu", (2, 2))
    logits = _logits(4, 7)
    got = gather_tensor_parallel_logits(
        distribute_tensor(logits, mesh, [Shard(0), Shard(1)]), _Config()
    )
    assert isinstance(got, DTensor)
    assert got.placements == (Shard(0), Replicate())
    assert torch.equal(_full(got), logits)


def test_without_anything_to_gather_the_logits_are_returned() -> None:
    """Not asked for, or without process groups: the same object."""
    logits = _logits(2, 5)
    assert gather_tensor_parallel_logits(logits, _Config(gather_logits=False)) is logits
    assert gather_tensor_parallel_logits(logits, _Config()) is logits


@spmd(world_size=2)
def test_in_a_group_of_one_the_logits_are_returned() -> None:
    """A group of one rank has nothing to gather."""
    mesh = init_device_mesh("cpu", (2, 1))
    logits = _logits(2, 5)
    config = _Config(logits_process_group=mesh.get_group(1))
    assert gather_tensor_parallel_logits(logits, config) is logits


@pytest.mark.parametrize("dim", [0, 1])
def test_the_dimension_is_counted_from_the_end(dim: int) -> None:
    """As the config promises, gathering or not."""
    with pytest.raises(
        LossOptionError, match=f"logits_gather_dim is {dim}: count it from the end"
    ):
        gather_tensor_parallel_logits(
            _logits(2, 5), _Config(gather_logits=False, logits_gather_dim=dim)
        )


def test_a_dimension_that_is_not_there_is_refused() -> None:
    """The error says how many there are."""
    with pytest.raises(
        LossOptionError, match="logits_gather_dim is -3 and the logits have 2 dimensions"
    ):
        gather_tensor_parallel_logits(_logits(2, 5), _Config(logits_gather_dim=-3))
