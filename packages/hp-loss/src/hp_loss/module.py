"""The loss as a module, for programs that configure theirs once."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from hp_loss.options import LossOptions, Reduction
from hp_loss.vocab_parallel import cross_entropy_of

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(nn.Module):
    """`vocab_parallel_cross_entropy` as a module; it needs no context.

    Args:
        weight: class weights, shape `(C,)`, or None; kept as a buffer.
        ignore_index: targets of this value count for nothing.
        reduction: `"none"`, `"sum"` or `"mean"`.
        label_smoothing: the share of a target's weight that is spread over all classes.
        z_loss: factor of the squared logsumexp, which is added per valid token.
        group: for plain logits, the ranks over which the classes are cut, in order.
        vocab_size: for plain logits, the number of classes, if shards are uneven.
        class_dim: the dimension of the classes; see `vocab_parallel_cross_entropy`.
        inplace_backward: write the gradient over the logits.

    Example:
        >>> import torch
        >>> from hp_loss import CrossEntropyLoss
        >>> loss = CrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(1.3863)
        >>> loss(
        ...     torch.zeros(2, 4), torch.tensor([0, 3]), global_valid_tokens=8
        ... )  # of which these are two
        tensor(0.3466)
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        group: dist.ProcessGroup | None = None,
        vocab_size: int | None = None,
        class_dim: int | None = None,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.options = LossOptions(ignore_index, reduction, label_smoothing, z_loss)
        self.group = group
        self.vocab_size = vocab_size
        self.class_dim = class_dim
        self.inplace_backward = inplace_backward

    def forward(
        self, logits: Tensor, target: Tensor, *, global_valid_tokens: Tensor | float | None = None
    ) -> Tensor:
        """The loss of *logits*.

        Args:
            logits: as for `vocab_parallel_cross_entropy`.
            target: as for `vocab_parallel_cross_entropy`.
            global_valid_tokens: for a mean, what to divide the sum by instead: the number of
                tokens of the whole step, see `count_valid_tokens`. A tensor stays on its device.

        Returns:
            As `vocab_parallel_cross_entropy`; with *global_valid_tokens* this call's share of the
            step's mean: for DTensor logits Partial over the axes that cut the tokens, as a sum is.
        """
        return cross_entropy_of(
            logits,
            target,
            self.options,
            weight=self.weight,
            group=self.group,
            vocab_size=self.vocab_size,
            class_dim=self.class_dim,
            inplace=self.inplace_backward,
            denominator=global_valid_tokens,
        )

    def extra_repr(self) -> str:
        """The options, as `repr` shows them."""
        options = self.options
        return (
            f"ignore_index={options.ignore_index}, reduction={options.reduction!r}, "
            f"label_smoothing={options.label_smoothing}, z_loss={options.z_loss}"
        )
