"""Draw a class per token from vocabulary-sharded logits, the same on every rank, without gathering them.

A draw is the inverse of the cumulative distribution: one uniform number per token picks the class
at which the running sum of probabilities, in class order, passes it. The ranks need to know only
each shard's total to find whose shard that is; its owner finds the class. The uniform number is
that of the first rank that has the token, whatever the states of the other ranks' generators.

*top_k* first collects the *k* best of each token (`hp_loss.inference`), which every rank then
filters and draws from. *top_p* alone keeps the smallest set of most probable classes whose
probabilities reach it. Its edge is a logit, found byte by byte: per byte the ranks add up
histograms of probability, 256 numbers per token, and look in which bin the sum from above passes
*top_p*. Four rounds and two kilobytes per token find it exactly, where a sort would need all
logits in one place. Classes whose logit equals the edge are all kept.

Not taken: adding Gumbel noise and taking the maximum. It needs a number per class that doesn't
depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from hp_mesh.collectives import broadcast
from torch import Tensor

from hp_loss.errors import LossOptionError, TargetError
from hp_loss.exchange import exchange_all
from hp_loss.inference import local_candidates, pick
from hp_loss.logits_shard import LogitsShard, shard_of
from hp_loss.order import from_order, to_order
from hp_loss.statistics import floor_of
from hp_loss.vocabulary import Vocabulary

__all__ = ["vocab_parallel_sample"]

BITS, BINS = 8, 256
"""The edge of the nucleus is found this many bits at a time."""


@dataclass(frozen=True, slots=True)
class _Filter:
    """What is kept of the distribution, checked."""

    temperature: float
    top_k: int | None
    top_p: float | None

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature < float("inf"):
            raise LossOptionError(
                f"temperature is {self.temperature}: it must be above 0.0 and finite; for the most probable class use "
                "vocab_parallel_argmax",
                option="temperature",
                value=self.temperature,
            )
        if self.top_k is not None and self.top_k < 1:
            raise LossOptionError(
                f"top_k is {self.top_k}: it must be 1 or more, or None for all classes",
                option="top_k",
                value=self.top_k,
            )
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise LossOptionError(
                f"top_p is {self.top_p}: it must be above 0.0 and at most 1.0, or None for all classes",
                option="top_p",
                value=self.top_p,
            )


@torch.no_grad()
def vocab_parallel_sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    uniform: Tensor | None = None,
    generator: torch.Generator | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Draw a class for each token from vocabulary-sharded logits; all ranks that share a token draw the same.

    Args:
        logits: shape `(..., classes)`: a DTensor, or this rank's shard. Minus infinity is a
            probability of zero.
        temperature: divides the logits.
        top_k: keep the so many most probable classes.
        top_p: keep the smallest set of most probable classes, after *top_k*, whose probabilities
            sum to this or more.
        uniform: the numbers in [0, 1) to invert the distribution at, one per token of this rank,
            in the tokens' shape; drawn if None. Of ranks that share a token, those of the first
            count.
        generator: to draw them with.
        group: for a shard, the ranks over which the classes are cut, in order.
        vocab_size: for a shard, the number of classes, if shards are uneven.

    Returns:
        Shape `(...)`, int64; a DTensor, cut like the tokens, for DTensor logits. Where no class
        has a probability, or one is NaN, the class is undefined, and the same on all ranks.

    Raises:
        LossOptionError: if an option is out of range.

    Example:
        >>> import torch
        >>> from hp_loss import vocab_parallel_sample
        >>> logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
        >>> vocab_parallel_sample(logits, uniform=torch.tensor([0.6]))
        tensor([1])
        >>> vocab_parallel_sample(logits, uniform=torch.tensor([0.6]), top_p=0.5)
        tensor([0])
    """
    kept = _Filter(temperature, top_k, top_p)
    shard = shard_of(logits, group, vocab_size)
    if shard.vocabulary.size == 0:
        raise LossOptionError("there are no classes to draw from", option="vocab_size", value=0)
    numbers = _uniform(shard, uniform, generator)
    rows = shard.rows.to(torch.float32) / kept.temperature
    if kept.top_k is not None:
        return shard.per_token(
            _from_best(
                rows, min(kept.top_k, shard.vocabulary.size), kept.top_p, numbers, shard.vocabulary
            )
        )
    return shard.per_token(_from_all(rows, kept.top_p, numbers, shard.vocabulary))


def _uniform(
    shard: LogitsShard, uniform: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """A number per token, the same on all ranks that have the token whole or in part."""
    rows = shard.rows
    if uniform is None:
        numbers = torch.rand(rows.shape[0], generator=generator, device=rows.device)
    elif tuple(uniform.shape) == shard.token_shape:
        numbers = uniform.reshape(-1).to(rows.device, torch.float32)
    else:
        raise TargetError(
            f"uniform has the shape {tuple(uniform.shape)}: give one number per token of this rank, {shard.token_shape}",
            shape=tuple(uniform.shape),
            logits_shape=(*shard.token_shape, shard.vocabulary.local_size),
        )
    groups = shard.vocabulary.groups + (
        () if shard.layout is None else shard.layout.replica_groups
    )
    for group in groups:
        if numbers.numel():
            numbers = broadcast(numbers, 0, group)
    return numbers


def _from_best(
    rows: Tensor, k: int, top_p: float | None, numbers: Tensor, vocabulary: Vocabulary
) -> Tensor:
    """Draw from the *k* best classes, which every rank has."""
    best = pick(local_candidates(rows, vocabulary, k), vocabulary, k)
    values = from_order(best[..., 0], torch.float32)
    weight = (values - values[:, :1].clamp(min=floor_of(values.dtype))).exp()
    if top_p is not None:
        before = weight.cumsum(1) - weight
        weight = torch.where(before < top_p * weight.sum(1, keepdim=True), weight, 0.0)
    # The rule is the running sum in class order, so that top_k of all classes draws what no top_k
    # draws.
    classes, order = best[..., 1].sort(dim=1)
    weight = weight.gather(1, order)
    column = _invert(weight, numbers * weight.sum(1))
    return classes.gather(1, column.unsqueeze(1)).squeeze(1)


def _from_all(
    rows: Tensor, top_p: float | None, numbers: Tensor, vocabulary: Vocabulary
) -> Tensor:
    """Draw from all classes, or from the nucleus."""
    maximum = rows.amax(1) if rows.shape[1] else rows.new_full((rows.shape[0],), -torch.inf)
    maximum = exchange_all(maximum, vocabulary.groups).amax(0).clamp(min=floor_of(rows.dtype))
    weight = (rows - maximum.unsqueeze(1)).exp()
    if top_p is not None:
        weight = torch.where(
            to_order(rows) >= _edge(rows, weight, top_p, vocabulary).unsqueeze(1), weight, 0.0
        )
    totals = exchange_all(weight.sum(1), vocabulary.groups)  # (ranks, tokens)
    upto = totals.cumsum(0)
    aim = numbers * upto[-1]
    owner = ((upto <= aim) & (upto < upto[-1])).sum(0)
    mine = owner == _position(vocabulary)
    before = (upto - totals).gather(0, owner.unsqueeze(0)).squeeze(0)
    found = torch.full_like(owner, -1)
    if weight.shape[1]:
        found = torch.where(mine, vocabulary.class_of(_invert(weight, aim - before)), found)
    return exchange_all(found, vocabulary.groups).amax(0)


def _invert(weight: Tensor, aim: Tensor) -> Tensor:
    """The column at which the running sum of *weight* passes *aim*; never one without weight, if another has some."""
    column = (weight.cumsum(1) <= aim.unsqueeze(1)).sum(1)
    columns = torch.arange(weight.shape[1], device=weight.device)
    last = torch.where(weight > 0, columns, 0).amax(1)
    return torch.minimum(column, last)


def _position(vocabulary: Vocabulary) -> int:
    """Which of the shards, in the order of `exchange_all`, this rank has."""
    position = 0
    for group in vocabulary.groups:
        position = position * group.size() + group.rank()
    return position


def _edge(rows: Tensor, weight: Tensor, top_p: float, vocabulary: Vocabulary) -> Tensor:
    """The order of the lowest logit of the nucleus, per token."""
    unsigned = to_order(rows) + 2**31
    total = exchange_all(weight.sum(1), vocabulary.groups).sum(0)
    wanted = top_p * total
    prefix = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    above = torch.zeros_like(total)
    for shift in range(32 - BITS, -1, -BITS):
        inside = (unsigned >> (shift + BITS)) == prefix.unsqueeze(1)
        histogram = torch.zeros(rows.shape[0], BINS, dtype=weight.dtype, device=rows.device)
        digit = (unsigned >> shift) & (BINS - 1)
        histogram.scatter_add_(1, digit, torch.where(inside, weight, 0.0))
        histogram = exchange_all(histogram, vocabulary.groups).sum(0)
        from_above = histogram.flip(1).cumsum(1).flip(1) + above.unsqueeze(1)
        # The highest bin at which the sum from above is enough; the lowest that has anything, if
        # rounding denies it.
        bins = torch.arange(BINS, device=rows.device)
        enough = torch.where(from_above >= wanted.unsqueeze(1), bins, -1).amax(1)
        lowest = torch.where(histogram > 0, bins, BINS - 1).amin(1)
        chosen = torch.where(enough >= 0, enough, lowest)
        picked = chosen.unsqueeze(1)
        above = (from_above - histogram).gather(1, picked).squeeze(1)
        prefix = (prefix << BITS) | chosen
    return prefix - 2**31
