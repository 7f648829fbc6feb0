"""Cross entropy of the logits that this rank holds: shapes, the exchange, and the reduction.

Everything here is about plain local tensors. Where the classes are cut is a `Vocabulary`; where
the tokens are cut is the caller's business, who passes a function that sums over the ranks of the
batch axes. All entry points of the package come through `local_cross_entropy`.

The arithmetic is in 32 bits (64 for 64-bit logits) and the result has the logits' dtype, as on one
device, where a 16-bit loss is rounded as well. Counts are integers until they divide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hp_loss._autograd import token_loss
from hp_loss.errors import TargetError
from hp_loss.exchange import merge_over
from hp_loss.kernel import accumulation_dtype, find_kernel
from hp_loss.options import LossOptions
from hp_loss.statistics import WIDTH
from hp_loss.targets import (
    LocalTarget,
    from_labels,
    from_probabilities,
    refuse_out_of_range,
    refuse_unlike,
)
from hp_loss.vocabulary import Vocabulary

__all__ = [
    "SumOverBatch",
    "TokenLosses",
    "class_dim_of",
    "flatten_classes",
    "local_cross_entropy",
    "merged_statistics",
    "reduce_losses",
    "result_dtype",
    "token_losses",
]

SumOverBatch = Callable[[Tensor], Tensor]
"""Sums a small vector over the ranks that hold other tokens, differentiably; the result is the same on all of them."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What is known of each token before the reduction; all of shape `(tokens,)`."""

    loss: Tensor
    """The cross entropy; zero where the target is ignored."""
    logsumexp: Tensor
    """The logarithm of the softmax's denominator."""
    weight: Tensor | None
    """What the token counts in the mean's denominator; None if one."""
    valid: Tensor | None
    """False where the target is ignored; None if all count."""


def class_dim_of(
    logits_shape: tuple[int, ...], target_shape: tuple[int, ...], class_dim: int | None
) -> int:
    """The dimension of the classes: *class_dim* if given, else what the targets' shape says.

    That is dimension 1 as for `torch.nn.functional.cross_entropy` (0 of a 1-D input) if the
    targets fit it, and otherwise the last if they fit that.

    Example:
        >>> from hp_loss.cross_entropy import class_dim_of
        >>> class_dim_of((2, 7, 5), (2, 5), None), class_dim_of((2, 5, 7), (2, 5), None)
        (1, 2)
    """
    ndim = len(logits_shape)
    if ndim == 0:
        raise TargetError(
            "logits have no dimension: give at least one, of classes",
            shape=target_shape,
            logits_shape=(),
        )
    if class_dim is not None:
        if not -ndim <= class_dim < ndim:
            raise TargetError(
                f"class_dim is {class_dim} and the logits of shape {logits_shape} have {ndim} dimensions",
                shape=target_shape,
                logits_shape=logits_shape,
            )
        return class_dim % ndim
    first = min(1, ndim - 1)
    fits_first = target_shape in (logits_shape, logits_shape[:first] + logits_shape[first + 1 :])
    return ndim - 1 if not fits_first and target_shape == logits_shape[:-1] else first


def flatten_classes(tensor: Tensor, class_dim: int) -> Tensor:
    """Bring *tensor* to `(tokens, classes)`."""
    last = tensor.movedim(class_dim, -1)
    tokens = 1
    for size in last.shape[:-1]:
        tokens *= size
    return last.reshape(tokens, last.shape[-1])


def result_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of a loss of *logits*: theirs, or 32 bits where autocast computes losses so."""
    if torch.is_autocast_enabled(logits.device.type):
        return accumulation_dtype(logits.dtype)
    return logits.dtype


def describe_target(
    target: Tensor,
    vocabulary: Vocabulary,
    weight: Tensor | None,
    options: LossOptions,
    class_dim: int,
    dtype: torch.dtype,
) -> LocalTarget:
    """Describe *target*, class indices or probabilities, for logits with *class_dim*."""
    if target.is_floating_point():
        return from_probabilities(
            flatten_classes(target, class_dim), vocabulary, weight, options, dtype
        )
    return from_labels(target.reshape(-1), vocabulary, weight, options, dtype)


def merged_statistics(logits: Tensor, target: LocalTarget, vocabulary: Vocabulary) -> Tensor:
    """The statistics of all shards, merged; shape `(tokens, 4)`, and a fifth column if tokens have weights."""
    with torch.no_grad():
        kernel = find_kernel(logits.device.type)
        background = None if target.background is None else target.background.detach()
        statistics = kernel.statistics(logits.detach(), target.column, target.mass, background)
        if target.weight is not None:
            statistics = torch.cat([statistics, target.weight.unsqueeze(1)], dim=1)
        return merge_over(statistics, vocabulary.groups)


def token_losses(
    logits: Tensor, target: LocalTarget, vocabulary: Vocabulary, *, inplace: bool = False
) -> TokenLosses:
    """Each token's loss, on every rank of the vocabulary's groups; one collective.

    Args:
        logits: shape `(tokens, columns)`: the classes held here.
        target: of these tokens.
        vocabulary: the classes.
        inplace: write the gradient over the logits in backward.
    """
    merged = merged_statistics(logits, target, vocabulary)
    loss, logsumexp = token_loss(
        logits,
        target.column,
        target.mass,
        target.background,
        merged,
        find_kernel(logits.device.type),
        inplace=inplace,
    )
    if target.valid is not None:
        loss = torch.where(target.valid, loss, 0.0)
    return TokenLosses(
        loss, logsumexp, None if target.weight is None else merged[:, WIDTH], target.valid
    )


def reduce_losses(
    losses: TokenLosses,
    options: LossOptions,
    sum_over_batch: SumOverBatch | None = None,
    extra: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Reduce per *options*; also *extra*, a count, summed over the batch if the reduction is.

    `sum` is the sum of this rank's tokens; `mean` divides by the weight of the tokens of all
    ranks.
    """
    penalty = _z_loss(losses, options)
    if options.reduction == "none":
        return (losses.loss if penalty is None else losses.loss + penalty), extra
    if options.reduction == "sum":
        return (losses.loss.sum() if penalty is None else losses.loss.sum() + penalty.sum()), extra
    count = _count(losses)
    weight = count if losses.weight is None else losses.weight.sum()
    dtype = losses.loss.dtype
    parts = [losses.loss.sum(), weight.to(dtype)]
    if penalty is not None:
        parts += [penalty.sum(), count.to(dtype)]
    if sum_over_batch is not None:
        if extra is not None:
            parts.append(extra.to(dtype))
        parts = list(sum_over_batch(torch.stack(parts)).unbind())
        extra = None if extra is None else parts.pop()
    total = parts[0] / parts[1]
    return (total if penalty is None else total + parts[2] / parts[3]), extra


def _count(losses: TokenLosses) -> Tensor:
    if losses.valid is not None:
        return losses.valid.sum()
    return torch.full((), losses.loss.shape[0], dtype=torch.int64, device=losses.loss.device)


def _z_loss(losses: TokenLosses, options: LossOptions) -> Tensor | None:
    if not options.z_loss:
        return None
    penalty = options.z_loss * losses.logsumexp.square()
    return penalty if losses.valid is None else torch.where(losses.valid, penalty, 0.0)


def local_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocabulary: Vocabulary,
    options: LossOptions,
    *,
    class_dim: int,
    weight: Tensor | None = None,
    sum_over_batch: SumOverBatch | None = None,
    inplace: bool = False,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """The loss of the tokens held here.

    Args:
        logits: this rank's part, classes along *class_dim*.
        target: of this rank's tokens, the same on all ranks of the vocabulary's groups: class
            indices (the logits' shape without *class_dim*) or the probabilities of the classes
            held here (the logits' shape).
        vocabulary: the classes.
        options: how to smooth, mask and reduce.
        class_dim: 0 or more.
        weight: class weights, whole or those held here.
        sum_over_batch: for a mean over tokens of which other ranks hold some.
        inplace: write the gradient over the logits in backward.
        denominator: divide the result by this.

    Returns:
        Shape of the targets for `none`, else no dimension; the logits' dtype.

    Raises:
        TargetRangeError: if a label is no class.
    """
    shape = tuple(logits.shape)
    token_shape = shape[:class_dim] + shape[class_dim + 1 :]
    refuse_unlike(target, shape if target.is_floating_point() else token_shape, shape)
    dtype = accumulation_dtype(logits.dtype)
    described = describe_target(target, vocabulary, weight, options, class_dim, dtype)
    shares_news = sum_over_batch is not None and options.reduction == "mean"
    if described.out_of_range is not None and not shares_news:
        refuse_out_of_range(described.out_of_range, vocabulary, options)
    losses = token_losses(
        flatten_classes(logits, class_dim), described, vocabulary, inplace=inplace
    )
    out, out_of_range = reduce_losses(losses, options, sum_over_batch, described.out_of_range)
    if out_of_range is not None and shares_news:
        refuse_out_of_range(out_of_range, vocabulary, options)
    if options.reduction == "none":
        out = out.view(token_shape)
    if denominator is not None:
        out = out / denominator
    return out.to(result_dtype(logits))
