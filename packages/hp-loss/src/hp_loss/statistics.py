r"""Four numbers per token that a shard of the vocabulary owes to the rest, and how they add up.

Let :math:`a_c` be the weight of class *c* in a token's target: one at the target's class,
something everywhere when labels are smoothed, the class weight times the probability when targets
are soft. Every cross entropy there is has the form

.. math:: \sum_c a_c \, (\mathrm{logsumexp}(x) - x_c) = A \log S - D

with, over the whole vocabulary and relative to the maximum :math:`M`,

=========  =====================================
================================================== column     meaning
over shards *r*, with :math:`\Delta_r = M_r - M`
=========  =====================================
================================================== `MAXIMUM`  :math:`M = \max_c x_c`
:math:`\max_r M_r` `EXP_SUM`  :math:`S = \sum_c e^{x_c - M}`
:math:`\sum_r S_r e^{\Delta_r}` `DOT`      :math:`D = \sum_c a_c (x_c - M)`
:math:`\sum_r D_r + A_r \Delta_r` `MASS`     :math:`A = \sum_c a_c`
:math:`\sum_r A_r`
=========  =====================================
==================================================

The four are closed under merging, so shards of shards merge the same way. Everything is relative
to a maximum that is itself a logit: adding ten thousand to all logits changes nothing, which the
textbook `logsumexp(x) - x[target]` can't say in 32 bits.

A shard without classes, or with nothing but minus infinity, has the most negative finite number as
its maximum: then no infinity is ever subtracted from another, and a token is NaN exactly when it
is on one device.

Not taken: sending `(max, sum of exp, target logit, sum of logits)`. Those four need the class
weights of all shards for smoothing with weights, and say nothing about soft targets.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "DOT",
    "EXP_SUM",
    "MASS",
    "MAXIMUM",
    "WIDTH",
    "empty_statistics",
    "floor_of",
    "merge",
    "rebase",
]

MAXIMUM, EXP_SUM, DOT, MASS = range(4)
WIDTH = 4
"""Columns that `merge` knows; further ones are plain sums."""


def floor_of(dtype: torch.dtype) -> float:
    """The maximum of a shard that has no finite logit."""
    return torch.finfo(dtype).min


def empty_statistics(tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The statistics of a shard without classes: the neutral element of `merge`."""
    statistics = torch.zeros(tokens, WIDTH, dtype=dtype, device=device)
    statistics[:, MAXIMUM] = floor_of(dtype)
    return statistics


def rebase(statistics: Tensor, maximum: Tensor) -> Tensor:
    """Make *statistics* relative to *maximum*, without its `MAXIMUM` column: columns that may be added over shards.

    Args:
        statistics: shape `(..., tokens, WIDTH or more)`.
        maximum: shape `(tokens,)`, no less than the maxima in *statistics*.
    """
    delta = statistics[..., MAXIMUM] - maximum
    mass = statistics[..., MASS]
    # A shard without mass adds nothing, however far down it is: zero times an overflow would be
    # NaN.
    moved = torch.where(mass == 0, 0.0, mass * delta)
    exp_sum = statistics[..., EXP_SUM] * delta.exp()
    dot = statistics[..., DOT] + moved
    return torch.cat([torch.stack([exp_sum, dot, mass], dim=-1), statistics[..., WIDTH:]], dim=-1)


def merge(shards: Tensor) -> Tensor:
    """Merge the statistics of several shards, in their order, so that all ranks get the same bits.

    Args:
        shards: shape `(shards, tokens, WIDTH or more)`.

    Returns:
        Shape `(tokens, WIDTH or more)`.

    Example:
        >>> import torch
        >>> from hp_loss.statistics import merge
        >>> left = torch.tensor([[1.0, 1.0, 0.0, 1.0]])  # one logit, 1.0, which is the target
        >>> right = torch.tensor([[3.0, 1.0, 0.0, 0.0]])  # one logit, 3.0
        >>> merge(torch.stack([left, right]))
        tensor([[ 3.0000,  1.1353, -2.0000,  1.0000]])
    """
    maximum = shards[..., MAXIMUM].amax(0)
    moved = rebase(shards, maximum).unbind(0)
    total = moved[0]
    for shard in moved[1:]:
        total = total + shard
    return torch.cat([maximum.unsqueeze(-1), total], dim=-1)
