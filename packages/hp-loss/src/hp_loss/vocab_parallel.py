"""Cross entropy of logits whose classes are cut over ranks: the function.

It takes what `torch.nn.functional.cross_entropy` takes and gives what that gives on one device.
Distributed logits say themselves how they lie on the mesh; plain ones are this rank's shard, and a
process group says who has the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from hp_dtensor.local import own_piece
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_loss.cross_entropy import class_dim_of, local_cross_entropy
from hp_loss.errors import LossLayoutError, LossOptionError
from hp_loss.layout import class_dim_of_dtensor, layout_of, local_target, local_weight
from hp_loss.options import LossOptions, Reduction
from hp_loss.vocabulary import vocabulary_of_group

__all__ = ["cross_entropy_of", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    class_dim: int | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Cross entropy over a sharded vocabulary: what one device gives, for one collective and no gathered logits.

    The collective moves four 32-bit numbers per token and rank (five with class weights). The
    backward communicates nothing. Beside the logits, in their own dtype, a few numbers per token
    are kept.

    Args:
        logits: a DTensor, ours or torch's, with any number of axes that shard the classes or the
            tokens; or this rank's shard as a plain tensor. Shape `(C)`, `(N, C)`, `(N, C, d...)`
            or `(..., C)`; any floating dtype.
        target: class indices (integers, the logits' shape without the classes), the same on all
            ranks that share a token; or class probabilities (the logits' shape). A DTensor, a
            plain tensor of the global shape that is the same everywhere, or a plain tensor of this
            rank's tokens.
        weight: class weights, shape `(C,)`: whole, cut like the classes, or a DTensor. They get no
            gradient.
        ignore_index: targets of this value count for nothing.
        reduction: `"none"`, `"sum"` or `"mean"`. The mean divides by the weight of all tokens of
            the mesh.
        label_smoothing: the share of a target's weight that is spread over all classes.
        z_loss: factor of the squared logsumexp, which is added per valid token.
        group: for plain logits, the ranks over which the classes are cut, in order.
        vocab_size: for plain logits, the number of classes; all shards have the same size if it is
            left out.
        class_dim: the dimension of the classes. If left out, 1 (0 for 1-D logits) if the targets'
            shape fits that, as for torch, else the last.
        inplace_backward: write the gradient over the logits, which saves their size in backward.
            Nothing else may need their values by then.

    Returns:
        A DTensor for DTensor logits, of the targets' shape and cut like the tokens for `"none"`,
        Partial over the axes that cut the tokens for `"sum"`, replicated for `"mean"`. Else a
        plain tensor, the same on all ranks of *group*, over this rank's tokens. The dtype is that
        of the logits, or 32 bits under autocast.

    Raises:
        TargetRangeError: (an `IndexError`) if a target is no class. On a CPU in eager mode at
            once; elsewhere by an assertion on the device, so that nothing waits. All ranks that
            share the token raise, and for a mean all ranks of the mesh.
        TargetError: if the targets' shape doesn't fit.
        LossLayoutError: if the logits are Partial, or the meshes differ.
        LossOptionError: if an option means nothing.

    Example:
        >>> import torch
        >>> from hp_loss import vocab_parallel_cross_entropy
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
        >>> vocab_parallel_cross_entropy(logits, torch.tensor([0]))  # without a group: one shard
        tensor(0.1698, grad_fn=<...>)
    """
    options = LossOptions(ignore_index, reduction, label_smoothing, z_loss)
    return cross_entropy_of(
        logits,
        target,
        options,
        weight=weight,
        group=group,
        vocab_size=vocab_size,
        class_dim=class_dim,
        inplace=inplace_backward,
    )


def cross_entropy_of(
    logits: Tensor,
    target: Tensor,
    options: LossOptions,
    *,
    weight: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    class_dim: int | None = None,
    inplace: bool = False,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """`vocab_parallel_cross_entropy` with its options in one value, and a *denominator* of the mean if it is known."""
    if denominator is not None:
        if options.reduction != "mean":
            raise LossOptionError(
                f"reduction is {options.reduction!r} and the number of tokens to divide by is given: only a mean divides",
                option="reduction",
                value=options.reduction,
            )
        options = replace(options, reduction="sum")
        if isinstance(denominator, TorchDTensor):
            denominator = denominator.full_tensor()
    if isinstance(logits, TorchDTensor):
        return _of_dtensor(
            logits,
            target,
            options,
            weight,
            group,
            vocab_size,
            class_dim,
            inplace=inplace,
            denominator=denominator,
        )
    for name, tensor in (("the targets", target), ("the class weights", weight)):
        if isinstance(tensor, TorchDTensor):
            raise LossLayoutError(
                f"{name} are a DTensor with the placements {tuple(tensor.placements)} and the logits a plain tensor: make "
                "the logits a DTensor too, or pass a plain tensor with group=",
                placements=str(tuple(tensor.placements)),
            )
    dim = class_dim_of(tuple(logits.shape), tuple(target.shape), class_dim)
    vocabulary = vocabulary_of_group(logits.shape[dim], group, vocab_size)
    return local_cross_entropy(
        logits,
        target,
        vocabulary,
        options,
        class_dim=dim,
        weight=weight,
        inplace=inplace,
        denominator=denominator,
    )


def _of_dtensor(
    logits: TorchDTensor,
    target: Tensor,
    options: LossOptions,
    weight: Tensor | None,
    group: dist.ProcessGroup | None,
    vocab_size: int | None,
    class_dim: int | None,
    *,
    inplace: bool,
    denominator: Tensor | float | None,
) -> Tensor:
    if group is not None or vocab_size is not None:
        raise LossLayoutError(
            "group= and vocab_size= describe plain logits; a DTensor knows its mesh and its shape: leave them out",
            placements=str(tuple(logits.placements)),
        )
    layout = layout_of(logits, class_dim_of_dtensor(logits, target, class_dim))
    loss = local_cross_entropy(
        own_piece(logits),
        local_target(target, layout),
        layout.vocabulary,
        options,
        class_dim=layout.class_dim,
        weight=local_weight(weight, layout),
        sum_over_batch=layout.sum_over_batch if layout.batch_axes else None,
        inplace=inplace,
        denominator=denominator,
    )
    return layout.wrap(loss, options.reduction)
