"""Choices from vocabulary-sharded logits without gathering them: the best class, the best few; and the gather, if it must be.

Each rank sends its own best candidates, as pairs of an order-preserving integer and a class, and
every rank picks from all of them in the same way; so all ranks choose the same, and equal logits
go to the lowest class.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from hp_dtensor import Replicate
from hp_dtensor.placements import shard_dim
from hp_mesh.collectives import all_gather
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_loss.errors import LossOptionError
from hp_loss.exchange import exchange_all
from hp_loss.kernel import accumulation_dtype
from hp_loss.logits_shard import shard_of
from hp_loss.order import LOWEST, from_order, to_order
from hp_loss.vocabulary import Vocabulary

__all__ = [
    "GatherConfig",
    "TopK",
    "gather_tensor_parallel_logits",
    "local_candidates",
    "pick",
    "vocab_parallel_argmax",
    "vocab_parallel_topk",
]

NO_CLASS = 2**63 - 1


class GatherConfig(Protocol):
    """The part of a generation config that `gather_tensor_parallel_logits` reads; any object with these will do."""

    @property
    def gather_logits(self) -> bool:
        """Whether to gather at all."""
        ...

    @property
    def logits_process_group(self) -> dist.ProcessGroup | None:
        """The ranks over which the classes are cut; None for all."""
        ...

    @property
    def logits_gather_dim(self) -> int:
        """The dimension of the classes, counted from the end."""
        ...


class TopK(NamedTuple):
    """The best classes of each token."""

    values: Tensor
    """Their logits, best first; shape `(..., k)`, the logits' dtype."""
    indices: Tensor
    """The classes; shape `(..., k)`, int64."""


def gather_tensor_parallel_logits(logits: Tensor, config: GatherConfig) -> Tensor:
    """The logits with all classes on every rank; as they are, if *config* doesn't ask for it or there is nobody to ask.

    Shards may be uneven or empty. A DTensor is gathered over the axes that cut the classes,
    whatever the group, and stays one. Plain logits get no gradient.

    Args:
        logits: a DTensor or this rank's shard; the shards' other dimensions are equal.
        config: with `gather_logits`, `logits_process_group` and `logits_gather_dim`.

    Raises:
        LossOptionError: (a `ValueError`) if `logits_gather_dim` isn't negative, or not a
            dimension.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from hp_loss import gather_tensor_parallel_logits
        >>> config = SimpleNamespace(
        ...     gather_logits=False, logits_process_group=None, logits_gather_dim=-1
        ... )
        >>> gather_tensor_parallel_logits(torch.zeros(2, 3), config).shape
        torch.Size([2, 3])
    """
    dim = config.logits_gather_dim
    if dim >= 0:
        raise LossOptionError(
            f"logits_gather_dim is {dim}: count it from the end, -1 for the last dimension",
            option="logits_gather_dim",
            value=dim,
        )
    if not config.gather_logits:
        return logits
    if -dim > logits.dim():
        raise LossOptionError(
            f"logits_gather_dim is {dim} and the logits have {logits.dim()} dimensions",
            option="logits_gather_dim",
            value=dim,
        )
    if isinstance(logits, TorchDTensor):
        whole = [
            Replicate() if shard_dim(placement) == logits.dim() + dim else placement
            for placement in logits.placements
        ]
        return logits.redistribute(placements=whole)
    if not (dist.is_available() and dist.is_initialized()):
        return logits
    group = config.logits_process_group or dist.group.WORLD
    if group is None or group.size() == 1:
        return logits
    return _gather(logits.detach(), logits.dim() + dim, group)


def _gather(logits: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate shards along *dim*, whatever their sizes there."""
    first = logits.movedim(dim, 0)
    sizes = all_gather(torch.tensor([first.shape[0]], device=logits.device), group).tolist()
    longest = max(sizes)
    padded = torch.cat([first, first.new_zeros(longest - first.shape[0], *first.shape[1:])])
    gathered = all_gather(padded.contiguous(), group)
    if min(sizes) == longest:
        return gathered.movedim(0, dim).contiguous()
    pieces = [gathered.narrow(0, rank * longest, size) for rank, size in enumerate(sizes)]
    return torch.cat(pieces).movedim(0, dim).contiguous()


@torch.no_grad()
def vocab_parallel_argmax(
    logits: Tensor, *, group: dist.ProcessGroup | None = None, vocab_size: int | None = None
) -> Tensor:
    """The best class of each token, the lowest of equal ones: what `argmax(-1)` of the whole logits gives.

    One collective, 16 bytes per token and rank.

    Args:
        logits: shape `(..., classes)`: a DTensor, or this rank's shard.
        group: for a shard, the ranks over which the classes are cut, in order.
        vocab_size: for a shard, the number of classes, if shards are uneven.

    Returns:
        Shape `(...)`, int64, the same on all ranks that share the token; a DTensor, cut like the
        tokens, for DTensor logits.

    Example:
        >>> import torch
        >>> from hp_loss import vocab_parallel_argmax
        >>> vocab_parallel_argmax(torch.tensor([[1.0, 3.0, 3.0]]))
        tensor([1])
    """
    shard = shard_of(logits, group, vocab_size)
    _refuse_no_class(shard.vocabulary)
    return shard.per_token(
        pick(local_candidates(shard.rows, shard.vocabulary, 1), shard.vocabulary, 1)[..., 0, 1]
    )


@torch.no_grad()
def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> TopK:
    """The *k* best classes of each token, best first, equal ones by class: a `topk` of the whole logits.

    Which of equal logits make it when not all can is as little promised as by torch's `topk`.

    One collective, `16 * k` bytes per token and rank.

    Args:
        logits: shape `(..., classes)`: a DTensor, or this rank's shard.
        k: how many; at most the number of classes.
        group: for a shard, the ranks over which the classes are cut, in order.
        vocab_size: for a shard, the number of classes, if shards are uneven.

    Returns:
        Values and classes, the same on all ranks that share the token; DTensors, cut like the
        tokens, for DTensor logits.

    Raises:
        LossOptionError: if there are fewer than *k* classes.

    Example:
        >>> import torch
        >>> from hp_loss import vocab_parallel_topk
        >>> vocab_parallel_topk(torch.tensor([1.0, 3.0, 2.0]), 2).indices
        tensor([1, 2])
    """
    shard = shard_of(logits, group, vocab_size)
    if not 1 <= k <= shard.vocabulary.size:
        raise LossOptionError(
            f"k is {k}: it must be at least 1 and at most the number of classes, {shard.vocabulary.size}",
            option="k",
            value=k,
        )
    best = pick(local_candidates(shard.rows, shard.vocabulary, k), shard.vocabulary, k)
    values = from_order(best[..., 0], accumulation_dtype(logits.dtype)).to(logits.dtype)
    return TopK(shard.per_choice(values), shard.per_choice(best[..., 1].contiguous()))


def _refuse_no_class(vocabulary: Vocabulary) -> None:
    if vocabulary.size == 0:
        raise LossOptionError("there are no classes to choose from", option="vocab_size", value=0)


def local_candidates(rows: Tensor, vocabulary: Vocabulary, k: int) -> Tensor:
    """This shard's *k* best of each token; shape `(tokens, k, 2)`: order and class, filled up with no class."""
    tokens, columns = rows.shape
    order = to_order(rows.to(accumulation_dtype(rows.dtype)))
    found = min(k, columns)
    best = torch.empty(tokens, k, 2, dtype=torch.int64, device=rows.device)
    best[..., 0], best[..., 1] = LOWEST, NO_CLASS
    if k == 1 and found:
        column = order.argmax(
            1, keepdim=True
        )  # the first of equal ones, which topk doesn't promise
        best[..., 0], best[..., 1] = order.gather(1, column), vocabulary.class_of(column)
    elif found:
        best[:, :found, 0], column = order.topk(found)
        best[:, :found, 1] = vocabulary.class_of(column)
    return best


def pick(candidates: Tensor, vocabulary: Vocabulary, k: int) -> Tensor:
    """Pick the *k* best of all ranks' *candidates* `(tokens, k, 2)`; the same on every rank."""
    everyone = exchange_all(candidates, vocabulary.groups)  # (ranks, tokens, k, 2)
    pool = everyone.movedim(0, 1).flatten(1, 2)
    by_class = pool[..., 1].argsort(dim=1, stable=True)
    pool = pool.gather(1, by_class.unsqueeze(-1).expand_as(pool))
    best = pool[..., 0].argsort(dim=1, descending=True, stable=True)[:, :k]
    return pool.gather(1, best.unsqueeze(-1).expand(-1, -1, 2))
