"""Give every rank the merged statistics of all shards.

**One collective.** Each rank sends its four numbers per token to each other rank and merges what
it gets in rank order, so all ranks end with the same bits. It is a direct exchange (an all-to-all
of equal blocks): the bytes are those of an all-gather, `16 * ranks` per token, in one hop instead
of a ring's `ranks - 1`; on gloo it was never slower.

**Two, for many ranks and tokens.** One all-reduce of the maxima and one of the sums move a
constant number of bytes per token, whatever the number of ranks, for twice the latency.
`direct_is_cheaper` weighs the two.

Not taken: three all-reduces, one per quantity, as a loss composed of operators needs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from hp_mesh.collectives import all_reduce, all_to_all
from torch import Tensor

from hp_loss.statistics import MAXIMUM, merge, rebase

__all__ = ["direct_is_cheaper", "exchange", "exchange_all", "merge_over"]

LATENCY_BYTES = 2**21
"""Bytes that a link moves in the time that one more collective costs (20 us at 100 GB/s)."""


def direct_is_cheaper(ranks: int, nbytes: int) -> bool:
    """Whether one direct exchange of *nbytes* per rank costs no more than two all-reduces of them.

    A rank sends `ranks - 1` blocks directly, and `2 * (ranks - 1) / ranks` of one in a ring
    all-reduce.

    Example:
        >>> from hp_loss.exchange import direct_is_cheaper
        >>> direct_is_cheaper(8, 4096 * 16), direct_is_cheaper(256, 65536 * 16)
        (True, False)
    """
    sent_directly = (ranks - 1) * nbytes
    sent_in_rings = 2 * (ranks - 1) * nbytes // ranks
    return sent_directly <= sent_in_rings + LATENCY_BYTES


def exchange(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collect *block*, which has one shape on all ranks, from every rank of *group*.

    Returns:
        Shape `(ranks, *block.shape)`, in group-rank order, with equal bits on all ranks.
    """
    ranks = group.size()
    if ranks == 1 or block.numel() == 0:
        return block.unsqueeze(0).expand(ranks, *block.shape)
    rows = block.reshape(-1)
    splits = [rows.shape[0]] * ranks
    got = all_to_all(rows.repeat(ranks), splits, splits, group)
    return got.view(ranks, *block.shape)


def exchange_all(block: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    """Collect *block* over several groups; shape `(ranks, *block.shape)`, ranks in the order of their shards."""
    everyone = block.unsqueeze(0)
    for group in reversed(groups):
        everyone = exchange(everyone, group).flatten(0, 1)
    return everyone


def merge_over(statistics: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    """Merge *statistics* `(tokens, columns)` over each of *groups*; the result is the same on all their ranks."""
    for group in reversed(groups):
        ranks = group.size()
        if direct_is_cheaper(ranks, statistics.numel() * statistics.element_size()):
            statistics = merge(exchange(statistics, group))
        else:
            statistics = _merge_by_reduction(statistics, group)
    return statistics


def _merge_by_reduction(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    maximum = all_reduce(statistics[:, MAXIMUM].contiguous(), "max", group)
    sums = all_reduce(rebase(statistics, maximum), "sum", group)
    return torch.cat([maximum.unsqueeze(-1), sums], dim=-1)
