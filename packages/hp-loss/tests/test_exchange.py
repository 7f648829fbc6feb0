"""The exchange: one collective, equal bits on all ranks, and two all-reduces where those are cheaper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hp_loss import exchange as module
from hp_loss.exchange import direct_is_cheaper, exchange, exchange_all, merge_over
from hp_loss.statistics import merge
from hp_mesh import init_device_mesh
from hp_mesh.testing import run_spmd, spmd
from torch.utils._python_dispatch import TorchDispatchMode


class _Collectives(TorchDispatchMode):
    """Collects the collectives that run, with the bytes that go in; independent of ours and of torch's counter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name()
        if name.startswith(("_c10d_functional::", "c10d::")) and "wait" not in name:
            tensor = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.seen.append((name, tensor.numel() * tensor.element_size()))
        return func(*args, **(kwargs or {}))


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _block(rank: int) -> torch.Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(rank)).abs()


@spmd(world_size=4)
def test_every_rank_gets_every_block_in_rank_order() -> None:
    """The result is the stack of the ranks' blocks, on every rank."""
    got = exchange(_block(dist.get_rank()), _world())
    assert torch.equal(got, torch.stack([_block(rank) for rank in range(4)]))


@spmd(world_size=4)
def test_blocks_of_two_groups_come_in_the_order_of_their_shards() -> None:
    """Over two axes, the outer axis' rank counts first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    got = exchange_all(torch.tensor([dist.get_rank()]), (mesh.get_group("a"), mesh.get_group("b")))
    assert got.flatten().tolist() == [0, 1, 2, 3]


@spmd(world_size=4)
def test_a_merge_is_one_collective_of_16_bytes_per_token_and_rank() -> None:
    """A merge over a group runs one collective; it moves four 32-bit numbers per token to each rank."""
    with _Collectives() as collectives:
        merge_over(_block(dist.get_rank()), (_world(),))
    assert [size for _, size in collectives.seen] == [16 * 4 * 7]


def test_all_ranks_end_with_the_same_bits() -> None:
    """The merged statistics are bit-equal on all ranks, and equal to the merge in one process."""

    def body() -> torch.Tensor:
        return merge_over(_block(dist.get_rank()), (_world(),))

    merged = run_spmd(body, world_size=4)
    expected = merge(torch.stack([_block(rank) for rank in range(4)]))
    assert all(torch.equal(one, expected) for one in merged)


@spmd(world_size=4)
def test_where_reductions_are_cheaper_they_give_the_same() -> None:
    """Two all-reduces give what the direct exchange gives, for shards far apart as well."""
    block = _block(dist.get_rank())
    block[:, 0] += 1e4 * dist.get_rank()
    direct = merge_over(block, (_world(),))
    module.LATENCY_BYTES = -(2**40)
    try:
        with _Collectives() as collectives:
            reduced = merge_over(block, (_world(),))
    finally:
        module.LATENCY_BYTES = 2**21
    assert len(collectives.seen) == 2
    assert all("all_reduce" in name for name, _ in collectives.seen)
    torch.testing.assert_close(reduced, direct)


@spmd(world_size=2)
def test_nothing_is_sent_for_no_tokens() -> None:
    """Without tokens there is no collective."""
    with _Collectives() as collectives:
        assert exchange(torch.zeros(0, 4), _world()).shape == (2, 0, 4)
    assert collectives.seen == []


@pytest.mark.parametrize(
    ("ranks", "tokens", "cheaper"), [(2, 10**6, True), (8, 16384, True), (64, 65536, False)]
)
def test_the_direct_exchange_is_for_few_ranks_or_tokens(
    ranks: int, tokens: int, cheaper: bool
) -> None:
    """Two ranks always exchange directly; many ranks with many tokens reduce."""
    assert direct_is_cheaper(ranks, tokens * 16) is cheaper
