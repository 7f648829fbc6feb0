"""One way in for what is asked of vocabulary-sharded logits besides their loss: this rank's rows and classes.

Scores, choices and samples all start alike: distributed logits or a plain shard with a group,
classes last, become `(tokens, classes held here)` and a `Vocabulary`; and what comes out, one
thing per token, gets the tokens' shape and layout back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from hp_dtensor.local import own_piece
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_loss.errors import LossLayoutError, TargetError
from hp_loss.layout import LogitsLayout, layout_of, local_target
from hp_loss.vocabulary import Vocabulary, vocabulary_of_group

__all__ = ["LogitsShard", "shard_of"]


@dataclass(frozen=True, slots=True)
class LogitsShard:
    """This rank's part of logits whose last dimension is the classes."""

    rows: Tensor
    """`(tokens, classes held here)`."""
    vocabulary: Vocabulary
    """The classes."""
    token_shape: tuple[int, ...]
    """The shape of this rank's tokens."""
    layout: LogitsLayout | None
    """How distributed logits lie on their mesh; None for plain ones."""

    def targets(self, target: Tensor) -> Tensor:
        """This rank's class indices, as a vector."""
        local = target if self.layout is None else local_target(target, self.layout)
        if (
            isinstance(local, TorchDTensor)
            or tuple(local.shape) != self.token_shape
            or local.is_floating_point()
        ):
            raise TargetError(
                f"targets of shape {tuple(target.shape)} and dtype {target.dtype} don't fit logits with tokens of shape "
                f"{self.token_shape}: give one class index per token",
                shape=tuple(target.shape),
                logits_shape=(*self.token_shape, self.vocabulary.local_size),
            )
        return local.reshape(-1)

    def per_token(self, values: Tensor) -> Tensor:
        """Give `(tokens,)` values the shape and the layout of the tokens."""
        values = values.view(self.token_shape)
        return values if self.layout is None else self.layout.wrap(values, "none")

    def per_choice(self, values: Tensor) -> Tensor:
        """Give `(tokens, k)` values the shape of the tokens, with *k* last, and their layout."""
        count = values.shape[-1]
        values = values.view(*self.token_shape, count)
        return values if self.layout is None else self.layout.wrap_per_choice(values)


def shard_of(
    logits: Tensor, group: dist.ProcessGroup | None, vocab_size: int | None
) -> LogitsShard:
    """Read *logits* of shape `(..., classes)`.

    Raises:
        LossLayoutError: if they are Partial, 0-dimensional, or don't fit *group* and *vocab_size*.
    """
    if logits.dim() == 0:
        raise LossLayoutError("logits have no dimension: give at least one, of classes, last")
    layout = None
    if isinstance(logits, TorchDTensor):
        if group is not None or vocab_size is not None:
            raise LossLayoutError(
                "group= and vocab_size= describe plain logits; a DTensor knows its mesh: leave them out"
            )
        layout = layout_of(logits, logits.dim() - 1)
        vocabulary = layout.vocabulary
        logits = own_piece(logits)
    else:
        vocabulary = vocabulary_of_group(logits.shape[-1], group, vocab_size)
    token_shape = tuple(logits.shape[:-1])
    tokens = 1
    for size in token_shape:
        tokens *= size
    return LogitsShard(logits.reshape(tokens, logits.shape[-1]), vocabulary, token_shape, layout)
