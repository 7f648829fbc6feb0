r"""What a policy gradient asks of vocabulary-sharded logits: log-probabilities of targets, and the entropy.

A target's log-probability is minus its cross entropy, so it is that. The entropy has statistics of
its own: with `M` and `S` of `hp_loss.statistics` and ``E = sum_c e^(x_c - M) (x_c - M)``,

.. math:: H = \log S - E / S

and three numbers per token are exchanged. Both are differentiable, without communication in the
backward: ``dH/dx_c = -p_c (log p_c + H)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hp_loss._autograd import refuse_second_derivative
from hp_loss.cross_entropy import token_losses
from hp_loss.exchange import exchange
from hp_loss.kernel import accumulation_dtype
from hp_loss.logits_shard import shard_of
from hp_loss.options import LossOptions
from hp_loss.statistics import floor_of
from hp_loss.targets import from_labels, refuse_out_of_range
from hp_loss.vocabulary import Vocabulary

__all__ = ["vocab_parallel_entropy", "vocab_parallel_log_probs"]

CHUNK_ELEMENTS = 2**20
"""Logits that are worked on at a time."""


def vocab_parallel_log_probs(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """The log-probability of each token's target, from vocabulary-sharded logits; one collective.

    Args:
        logits: shape `(..., classes)`: a DTensor, or this rank's shard.
        target: class indices, shape `(...)`; as for `vocab_parallel_cross_entropy`.
        ignore_index: targets of this value get zero, and no gradient.
        group: for a shard, the ranks over which the classes are cut, in order.
        vocab_size: for a shard, the number of classes, if shards are uneven.

    Returns:
        Shape `(...)`, 32 bits or more; a DTensor, cut like the tokens, for DTensor logits.

    Raises:
        TargetRangeError: (an `IndexError`) if a target is no class.
        TargetError: if the shapes don't fit.
        LossLayoutError: if the logits are Partial.

    Example:
        >>> import torch
        >>> from hp_loss import vocab_parallel_log_probs
        >>> vocab_parallel_log_probs(torch.zeros(2, 4), torch.tensor([0, -100]))
        tensor([-1.3863, -0.0000])
    """
    shard = shard_of(logits, group, vocab_size)
    options = LossOptions(ignore_index)
    dtype = accumulation_dtype(shard.rows.dtype)
    described = from_labels(shard.targets(target), shard.vocabulary, None, options, dtype)
    if described.out_of_range is not None:
        refuse_out_of_range(described.out_of_range, shard.vocabulary, options)
    losses = token_losses(shard.rows, described, shard.vocabulary)
    return shard.per_token(losses.loss.neg())


def vocab_parallel_entropy(
    logits: Tensor, *, group: dist.ProcessGroup | None = None, vocab_size: int | None = None
) -> Tensor:
    """The entropy of each token's distribution, from vocabulary-sharded logits; one collective.

    Args:
        logits: shape `(..., classes)`: a DTensor, or this rank's shard. Minus infinity is a
            probability of zero.
        group: for a shard, the ranks over which the classes are cut, in order.
        vocab_size: for a shard, the number of classes, if shards are uneven.

    Returns:
        Shape `(...)`, in nats, 32 bits or more; a DTensor, cut like the tokens, for DTensor
        logits.

    Raises:
        LossLayoutError: if the logits are Partial.

    Example:
        >>> import torch
        >>> from hp_loss import vocab_parallel_entropy
        >>> vocab_parallel_entropy(torch.tensor([[0.0, 0.0], [0.0, -float("inf")]]))
        tensor([0.6931, 0.0000])
    """
    shard = shard_of(logits, group, vocab_size)
    with torch.no_grad():
        maximum, exp_sum, dot = _entropy_statistics(shard.rows.detach(), shard.vocabulary).unbind(
            1
        )
    return shard.per_token(
        cast("Tensor", _Entropy.apply(shard.rows, maximum, exp_sum.log(), dot / exp_sum))
    )


def _entropy_statistics(rows: Tensor, vocabulary: Vocabulary) -> Tensor:
    """`(M, S, E)` per token, over all shards."""
    dtype = accumulation_dtype(rows.dtype)
    if rows.shape[1] == 0:
        out = torch.zeros(rows.shape[0], 3, dtype=dtype, device=rows.device)
        out[:, 0] = floor_of(dtype)
    else:
        out = torch.cat(
            [_local_entropy_statistics(rows[part].to(dtype)) for part in _chunks(rows)]
        )
    for group in reversed(vocabulary.groups):
        out = _merge_entropy(exchange(out, group))
    return out


def _local_entropy_statistics(rows: Tensor) -> Tensor:
    maximum = rows.amax(1).clamp_(min=floor_of(rows.dtype))
    relative = rows - maximum.unsqueeze(1)
    exponential = relative.exp()
    return torch.stack(
        [maximum, exponential.sum(1), _product(exponential, relative).sum(1)], dim=1
    )


def _merge_entropy(shards: Tensor) -> Tensor:
    maximum = shards[..., 0].amax(0)
    delta = shards[..., 0] - maximum
    factor = delta.exp()
    total = torch.zeros_like(shards[0, :, 1:])
    for shard, scale, shift in zip(
        shards.unbind(0), factor.unbind(0), delta.unbind(0), strict=True
    ):
        exp_sum = shard[:, 1] * scale
        total = total + torch.stack(
            [exp_sum, shard[:, 2] * scale + _product(exp_sum, shift)], dim=1
        )
    return torch.cat([maximum.unsqueeze(1), total], dim=1)


def _product(exponential: Tensor, exponent: Tensor) -> Tensor:
    """Their product, zero where the exponential is: no probability, no entropy."""
    return torch.where(exponential == 0, 0.0, exponential * exponent)


def _chunks(rows: Tensor) -> Iterator[slice]:
    step = max(CHUNK_ELEMENTS // rows.shape[1], 1)
    if torch.compiler.is_compiling():
        step = max(rows.shape[0], 1)
    return (slice(first, first + step) for first in range(0, max(rows.shape[0], 1), step))


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, rows: Tensor, maximum: Tensor, log_sum: Tensor, mean: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, maximum, log_sum, mean)
        return log_sum - mean

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        (grad,) = grads
        rows, maximum, log_sum, mean = ctx.saved_tensors
        out = torch.empty_like(rows)
        if rows.shape[1] == 0:
            return out, None, None, None
        for part in _chunks(rows):
            # log p + H = (x - M) - E / S: the logarithms of S cancel.
            relative = rows[part].to(maximum.dtype) - maximum[part].unsqueeze(1)
            probability = (relative - log_sum[part].unsqueeze(1)).exp()
            slope = _product(probability, relative - mean[part].unsqueeze(1))
            out[part] = slope.mul_(-grad[part].unsqueeze(1))
        return out, None, None, None
