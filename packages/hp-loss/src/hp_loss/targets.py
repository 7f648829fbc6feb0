"""What a token should be: from labels or probabilities and the options to the weights `a_c` of `hp_loss.statistics`.

With smoothing *e* over *V* classes and class weights *w*,

* a label *t* gives ``a_c = (1 - e) w_t [c = t] + (e / V) w_c``: a `mass` at one `column`, and a
  `background`;
* probabilities *q* give ``a_c = w_c ((1 - e) q_c + e / V)``: a `background` of one number per
  logit.

The rest of the package knows neither labels nor smoothing.

Class weights are whole on every rank or cut like the vocabulary; either way a rank looks up those
of its own classes only. The weight of the target's class, which the mean divides by, is then a
fifth number per token in the exchange. Not taken: looking it up in whole weights without the fifth
number. Ranks would have to agree on which case they are in, and a vocabulary of one class looks
like both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hp_loss._torch import assert_async
from hp_loss.errors import LossLayoutError, TargetError, TargetRangeError
from hp_loss.options import LossOptions
from hp_loss.vocabulary import Vocabulary

__all__ = ["LocalTarget", "from_labels", "from_probabilities", "refuse_out_of_range"]


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """The targets of this rank's tokens, as this rank's shard of the vocabulary sees them."""

    column: Tensor
    """`(tokens,)` int64: the local column of the target's class, or -1."""
    mass: Tensor
    """`(tokens,)`: the weight at that column."""
    background: Tensor | None
    """The weight of every class, as `CrossEntropyKernel` takes it."""
    valid: Tensor | None
    """`(tokens,)` bool: False where the target is to be ignored; None if all count."""
    weight: Tensor | None
    """`(tokens,)`: what a token counts in the mean's denominator, zero but on the owner of its class; None if one."""
    out_of_range: Tensor | None
    """0-d int64: how many labels are no class; None if that can't be."""


def from_labels(
    labels: Tensor,
    vocabulary: Vocabulary,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
) -> LocalTarget:
    """Describe class indices.

    Args:
        labels: shape `(tokens,)`, any integer dtype; the same on all ranks of the vocabulary's
            groups.
        vocabulary: the classes, and those held here.
        weight: class weights, `(classes,)` or as many as held here; or None.
        options: smoothing and the index to ignore.
        dtype: of the arithmetic.
    """
    labels = labels.to(torch.int64)
    valid = labels != options.ignore_index
    bad = valid & ((labels < 0) | (labels >= vocabulary.size))
    safe = torch.where(valid & ~bad, labels, 0)
    column = torch.where(valid, vocabulary.column(safe), -1)
    mass = valid.to(dtype)
    token_weight = None
    if weight is not None:
        weight = _local_weight(weight, vocabulary, dtype)
        token_weight = mass = _look_up(weight, column)
    if options.label_smoothing:
        mass = mass * (1.0 - options.label_smoothing)
    background = _smoothing(weight, vocabulary, options, mass)
    return LocalTarget(column, mass, background, valid, token_weight, bad.sum())


def from_probabilities(
    probabilities: Tensor,
    vocabulary: Vocabulary,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
) -> LocalTarget:
    """Describe class probabilities.

    Args:
        probabilities: shape `(tokens, columns held here)`; may require grad.
        vocabulary: the classes, and those held here.
        weight: class weights, `(classes,)` or as many as held here; or None.
        options: smoothing; there is no index to ignore.
        dtype: of the arithmetic.
    """
    background = probabilities.to(dtype)
    if options.label_smoothing:
        background = (
            background * (1.0 - options.label_smoothing)
            + options.label_smoothing / vocabulary.size
        )
    if weight is not None:
        background = background * _local_weight(weight, vocabulary, dtype)
    tokens = probabilities.shape[0]
    column = torch.full((tokens,), -1, dtype=torch.int64, device=probabilities.device)
    mass = torch.zeros(tokens, dtype=dtype, device=probabilities.device)
    return LocalTarget(column, mass, background, None, None, None)


def _smoothing(
    weight: Tensor | None, vocabulary: Vocabulary, options: LossOptions, like: Tensor
) -> Tensor | None:
    if not options.label_smoothing:
        return None
    share = options.label_smoothing / max(vocabulary.size, 1)
    return like.new_full((), share) if weight is None else weight * share


def _local_weight(weight: Tensor, vocabulary: Vocabulary, dtype: torch.dtype) -> Tensor:
    """The weights of the classes held here."""
    weight = weight.detach().to(dtype)
    if weight.shape == (vocabulary.size,):
        return vocabulary.part(weight)
    if weight.shape == (vocabulary.local_size,):
        return weight
    raise LossLayoutError(
        f"class weights have the shape {tuple(weight.shape)}: give one number per class, ({vocabulary.size},), or one "
        f"per class held by this rank, ({vocabulary.local_size},)",
    )


def _look_up(weight: Tensor, index: Tensor) -> Tensor:
    """`weight[index]`, and zero where *index* is negative."""
    if weight.shape[0] == 0:
        return torch.zeros(index.shape, dtype=weight.dtype, device=weight.device)
    return torch.where(index >= 0, weight[index.clamp(min=0)], 0.0)


def refuse_out_of_range(count: Tensor, vocabulary: Vocabulary, options: LossOptions) -> None:
    """Raise if *count* targets, counted over all who share the news, are no class.

    On a CPU in eager mode this raises at once. Elsewhere, looking at the count would wait for the
    device, or break the graph: there the assertion runs on the device, and surfaces as torch's own
    does for `cross_entropy`.
    """
    if torch.compiler.is_compiling() or count.device.type != "cpu":
        assert_async(count == 0, _out_of_range("some", vocabulary, options))
        return
    if found := int(count):
        raise TargetRangeError(
            _out_of_range(str(found), vocabulary, options), count=found, classes=vocabulary.size
        )


def _out_of_range(count: str, vocabulary: Vocabulary, options: LossOptions) -> str:
    return (
        f"{count} of the targets are out of bounds: a class index is at least 0 and less than {vocabulary.size}, or "
        f"equal to ignore_index ({options.ignore_index}); check the labels' padding, and that vocab_size counts all "
        "classes"
    )


def refuse_unlike(
    target: Tensor, expected: tuple[int, ...], logits_shape: tuple[int, ...]
) -> None:
    """Raise unless *target* has the *expected* shape."""
    if tuple(target.shape) != expected:
        raise TargetError(
            f"targets of shape {tuple(target.shape)} don't fit logits of shape {logits_shape}: give class indices of "
            f"shape {expected}, or probabilities of the logits' own shape",
            shape=tuple(target.shape),
            logits_shape=logits_shape,
        )
