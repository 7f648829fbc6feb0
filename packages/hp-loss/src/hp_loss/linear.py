"""The head and its loss in one, over chunks of tokens: the logits never exist as a whole.

The forward goes over the chunks once: logits of a chunk, their four numbers per token, and the
logits are gone. Then comes the one exchange, for all tokens at once. The backward computes each
chunk's logits again, turns them into their own gradient in place, and adds up what they give to
the hidden states, the head and the bias. What is held at any time is one chunk of logits.

So a head costs four products of its size instead of three. Not taken: computing the gradients in
the forward, which saves the fourth. It needs an exchange per chunk and a loss that is already
reduced, and it works for nothing when no backward follows.

The gradient of the hidden states is a sum over the shards of the head; it is reduced here, so that
it is whole on every rank, as on one device. For distributed tensors that is the layout's business
(a Partial gradient, which becomes what the hidden states are); for plain ones `_SumGradient` does
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import Partial, Replicate, Shard, StridedShard, redistribute_local, to_local
from hp_dtensor.local import own_piece
from hp_dtensor.placements import shard_dim
from hp_mesh.collectives import all_reduce
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.placement_types import Placement

from hp_loss._autograd import refuse_second_derivative
from hp_loss.cross_entropy import (
    SumOverBatch,
    TokenLosses,
    describe_target,
    flatten_classes,
    reduce_losses,
    result_dtype,
)
from hp_loss.errors import LossLayoutError, LossOptionError, TargetError
from hp_loss.exchange import merge_over
from hp_loss.kernel import CrossEntropyKernel, accumulation_dtype, find_kernel
from hp_loss.layout import (
    LogitsLayout,
    as_our_mesh,
    local_target,
    local_weight,
    make_layout,
    moved_to,
)
from hp_loss.options import LossOptions, Reduction
from hp_loss.statistics import DOT, EXP_SUM, MASS, MAXIMUM, WIDTH
from hp_loss.targets import LocalTarget, refuse_out_of_range, refuse_unlike
from hp_loss.vocabulary import Vocabulary, vocabulary_of_group

__all__ = ["linear_cross_entropy"]

CHUNK_ELEMENTS = 2**22
"""Logits per chunk if the caller doesn't say: 16 MB in 32 bits, which keeps a matrix unit busy."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` that never holds the logits.

    One collective in the forward, of four 32-bit numbers per token and rank. In the backward the
    gradient of the hidden states is summed over the ranks that share the vocabulary; everything
    else is local.

    Args:
        hidden: shape `(..., features)`: a DTensor, or a plain tensor of this rank's tokens that is
            the same on all ranks of *group*. A DTensor that is cut over an axis which also cuts
            the head (sequence parallel) is gathered.
        weight: shape `(classes, features)`: a DTensor, `Shard(0)` on the axes that cut the
            vocabulary; or plain, this rank's rows.
        target: class indices of shape `(...)`, or probabilities of the shape of the logits; as for
            `vocab_parallel_cross_entropy`.
        bias: shape `(classes,)`, cut like *weight*.
        class_weight: as *weight* of `vocab_parallel_cross_entropy`.
        ignore_index: targets of this value count for nothing.
        reduction: `"none"`, `"sum"` or `"mean"`; the mean is over the tokens of all ranks of the
            mesh.
        label_smoothing: the share of a target's weight that is spread over all classes.
        z_loss: factor of the squared logsumexp, which is added per valid token.
        group: for plain tensors, the ranks over which the head is cut, in order.
        vocab_size: for plain tensors, the number of classes, if the head's shards are uneven.
        chunk_size: tokens per chunk; by default as many as give `2**22` logits.

    Returns:
        As `vocab_parallel_cross_entropy`.

    Raises:
        TargetRangeError: as there.
        TargetError: as there.
        LossLayoutError: if *hidden* and *weight* don't fit each other.
        LossOptionError: if an option means nothing.

    Example:
        >>> import torch
        >>> from hp_loss import linear_cross_entropy
        >>> hidden, head = (
        ...     torch.ones(3, 2),
        ...     torch.tensor([[1.0, 1.0], [0.0, 0.0]], requires_grad=True),
        ... )
        >>> linear_cross_entropy(hidden, head, torch.tensor([0, 0, 1]), chunk_size=2)
        tensor(0.7936, grad_fn=<...>)
    """
    options = LossOptions(ignore_index, reduction, label_smoothing, z_loss)
    if chunk_size is not None and chunk_size < 1:
        raise LossOptionError(
            f"chunk_size is {chunk_size}: it must be 1 or more, or None",
            option="chunk_size",
            value=chunk_size,
        )
    if isinstance(hidden, TorchDTensor) or isinstance(weight, TorchDTensor):
        if group is not None or vocab_size is not None:
            raise LossLayoutError(
                "group= and vocab_size= describe plain tensors; a DTensor knows its mesh: leave them out"
            )
        return _of_dtensors(hidden, weight, target, bias, class_weight, options, chunk_size)
    vocabulary = vocabulary_of_group(weight.shape[0], group, vocab_size)
    if vocabulary.groups and hidden.requires_grad:
        hidden = cast("Tensor", _SumGradient.apply(hidden, vocabulary.groups))
    return _local(
        hidden, weight, target, bias, class_weight, vocabulary, options, chunk_size, None
    )


def _of_dtensors(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    options: LossOptions,
    chunk_size: int | None,
) -> Tensor:
    if not isinstance(hidden, TorchDTensor) or not isinstance(weight, TorchDTensor):
        plain, other = (
            ("hidden", "weight") if isinstance(weight, TorchDTensor) else ("weight", "hidden")
        )
        raise LossLayoutError(
            f"{plain} is a plain tensor and {other} a DTensor: distribute both over one mesh, or pass this rank's shards "
            "of both as plain tensors, with group="
        )
    mesh = hidden.device_mesh
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (
            not isinstance(tensor, TorchDTensor) or tensor.device_mesh != mesh
        ):
            where = tensor.device_mesh if isinstance(tensor, TorchDTensor) else "no mesh"
            raise LossLayoutError(
                f"{name} is on {where} and hidden on {mesh}: distribute them over one mesh"
            )
    layout = _layout(hidden, weight)
    head_grads = _head_grad_placements(layout, weight)
    loss = _local(
        _local_hidden(hidden, layout),
        to_local(weight, grad_placements=head_grads),
        local_target(target, layout),
        None if bias is None else _local_bias(bias, weight, layout, head_grads),
        local_weight(class_weight, layout),
        layout.vocabulary,
        options,
        chunk_size,
        layout.sum_over_batch if layout.batch_axes else None,
    )
    return layout.wrap(loss, options.reduction)


def _layout(hidden: TorchDTensor, weight: TorchDTensor) -> LogitsLayout:
    """The layout that the logits would have."""
    features = classes = hidden.ndim - 1
    placements: list[Placement] = []
    for axis, (token, head) in enumerate(zip(hidden.placements, weight.placements, strict=True)):
        if shard_dim(token) == features or shard_dim(head) == 1 or head.is_partial():
            raise LossLayoutError(
                f"on mesh axis {axis} hidden is {token} and weight is {head}: the features can't be cut, and weight can't "
                "be a sum of addends. Give weight Shard(0) on the axes that cut the vocabulary and Replicate() on the "
                "others, and hidden any cut of its tokens",
                placements=f"{hidden.placements}, {weight.placements}",
            )
        if isinstance(head, (Shard, StridedShard)):
            placements.append(moved_to(head, classes))
        else:
            placements.append(Replicate() if token.is_partial() else token)
    shape = (*hidden.shape[:-1], weight.shape[0])
    return make_layout(as_our_mesh(hidden.device_mesh), tuple(placements), shape, classes)


def _local_hidden(hidden: TorchDTensor, layout: LogitsLayout) -> Tensor:
    """This rank's tokens, whole along the axes that cut the vocabulary; there, each rank's gradient is an addend."""
    source = tuple(hidden.placements)
    cut = [shard_dim(placement) == layout.class_dim for placement in layout.placements]
    pairs = list(zip(cut, layout.placements, strict=True))
    wanted = tuple(Replicate() if is_cut else placement for is_cut, placement in pairs)
    grads = tuple(Partial("sum") if is_cut else placement for is_cut, placement in pairs)
    if source == wanted:
        return to_local(hidden, grad_placements=grads)
    return redistribute_local(
        own_piece(hidden),
        layout.mesh,
        source,
        wanted,
        shape=tuple(hidden.shape),
        grad_placements=grads,
    )


def _head_grad_placements(layout: LogitsLayout, weight: TorchDTensor) -> tuple[Placement, ...]:
    """Tokens on other ranks contribute to the head's gradient too."""
    return tuple(
        Partial("sum") if axis in layout.batch_axes else placement
        for axis, placement in enumerate(weight.placements)
    )


def _local_bias(
    bias: Tensor, weight: TorchDTensor, layout: LogitsLayout, grads: tuple[Placement, ...]
) -> Tensor:
    assert isinstance(bias, TorchDTensor)
    source, wanted = tuple(bias.placements), tuple(weight.placements)
    if source == wanted:
        return to_local(bias, grad_placements=grads)
    return redistribute_local(
        own_piece(bias),
        layout.mesh,
        source,
        wanted,
        shape=tuple(bias.shape),
        grad_placements=grads,
    )


def _local(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    vocabulary: Vocabulary,
    options: LossOptions,
    chunk_size: int | None,
    sum_over_batch: SumOverBatch | None,
) -> Tensor:
    """The loss of the tokens held here, as `local_cross_entropy` of the logits."""
    hidden, weight, bias = (
        _as_autocast(hidden),
        _as_autocast(weight),
        None if bias is None else _as_autocast(bias),
    )
    token_shape, features = tuple(hidden.shape[:-1]), hidden.shape[-1]
    logits_shape = (*token_shape, weight.shape[0])
    if (
        weight.dim() != 2
        or weight.shape[1] != features
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        raise LossLayoutError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and bias "
            f"{None if bias is None else tuple(bias.shape)} don't fit: weight is (classes, features) and bias (classes,)"
        )
    refuse_unlike(
        target, logits_shape if target.is_floating_point() else token_shape, logits_shape
    )
    if target.requires_grad:
        raise TargetError(
            "probabilities that require grad get none from linear_cross_entropy: detach them, or use "
            "vocab_parallel_cross_entropy of the logits",
            shape=tuple(target.shape),
            logits_shape=logits_shape,
        )
    described = describe_target(
        target,
        vocabulary,
        class_weight,
        options,
        len(token_shape),
        accumulation_dtype(hidden.dtype),
    )
    shares_news = sum_over_batch is not None and options.reduction == "mean"
    if described.out_of_range is not None and not shares_news:
        refuse_out_of_range(described.out_of_range, vocabulary, options)
    rows = flatten_classes(hidden, len(token_shape))
    losses = _token_losses(rows, weight, bias, described, vocabulary, chunk_size)
    out, out_of_range = reduce_losses(losses, options, sum_over_batch, described.out_of_range)
    if out_of_range is not None and shares_news:
        refuse_out_of_range(out_of_range, vocabulary, options)
    if options.reduction == "none":
        out = out.view(token_shape)
    return out.to(result_dtype(hidden))


def _as_autocast(tensor: Tensor) -> Tensor:
    """What autocast would make of an operand of the head; the backward, which runs without it, then agrees."""
    device = tensor.device.type
    return (
        tensor.to(torch.get_autocast_dtype(device))
        if torch.is_autocast_enabled(device)
        else tensor
    )


def _token_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: LocalTarget,
    vocabulary: Vocabulary,
    chunk_size: int | None,
) -> TokenLosses:
    kernel = find_kernel(hidden.device.type)
    step = chunk_size or max(CHUNK_ELEMENTS // max(weight.shape[0], 1), 1)
    with torch.no_grad():
        parts = [
            kernel.statistics(
                F.linear(hidden[rows], weight, bias),
                target.column[rows],
                target.mass[rows],
                _rows(target.background, rows),
            )
            for rows in _chunks(hidden.shape[0], step)
        ]
        statistics = torch.cat(parts)
        if target.weight is not None:
            statistics = torch.cat([statistics, target.weight.unsqueeze(1)], dim=1)
        merged = merge_over(statistics, vocabulary.groups)
    loss, logsumexp = _LinearLoss.apply(
        hidden, weight, bias, target.column, target.mass, target.background, merged, kernel, step
    )
    if target.valid is not None:
        loss = torch.where(target.valid, loss, 0.0)
    return TokenLosses(
        loss, logsumexp, None if target.weight is None else merged[:, WIDTH], target.valid
    )


def _chunks(tokens: int, step: int) -> Iterator[slice]:
    """Slices of *step* tokens and a shorter last one; one empty slice if there are none."""
    return (slice(first, min(first + step, tokens)) for first in range(0, max(tokens, 1), step))


def _rows(background: Tensor | None, rows: slice) -> Tensor | None:
    return background[rows] if background is not None and background.dim() == 2 else background


class _Context(FunctionCtx):
    """What `_LinearLoss` keeps from forward to backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    kernel: CrossEntropyKernel
    step: int
    has_bias: bool
    has_background: bool


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        column: Tensor,
        mass: Tensor,
        background: Tensor | None,
        merged: Tensor,
        kernel: CrossEntropyKernel,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.kernel, ctx.step = kernel, step
        ctx.has_bias, ctx.has_background = bias is not None, background is not None
        optional = [tensor for tensor in (bias, background) if tensor is not None]
        ctx.save_for_backward(hidden, weight, column, mass, merged, *optional)
        log_sum = merged[:, EXP_SUM].log()
        return merged[:, MASS] * log_sum - merged[:, DOT], merged[:, MAXIMUM] + log_sum

    @staticmethod
    def backward(
        ctx: _Context, loss_grad: Tensor, logsumexp_grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, column, mass, merged, *optional = ctx.saved_tensors
        background = optional.pop() if ctx.has_background else None
        bias = optional.pop() if ctx.has_bias else None
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = accumulation_dtype(weight.dtype)
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        bias_grad = (
            torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if wants_bias else None
        )
        scale = (loss_grad * merged[:, MASS] + logsumexp_grad) / merged[:, EXP_SUM]
        for rows in _chunks(hidden.shape[0], ctx.step):
            logits = F.linear(hidden[rows], weight, bias)
            grad = ctx.kernel.gradient(
                logits,
                column[rows],
                mass[rows],
                _rows(background, rows),
                merged[rows, MAXIMUM],
                scale[rows],
                loss_grad[rows],
                inplace=True,
            )
            if hidden_grad is not None:
                hidden_grad[rows] = grad @ weight
            if weight_grad is not None:
                _add_product(weight_grad, grad, hidden[rows])
            if bias_grad is not None:
                bias_grad += grad.sum(0, dtype=wide)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None or bias is None else bias_grad.to(bias.dtype),
            *(None,) * 6,
        )


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Add the head's gradient of one chunk; the chunks of a 16-bit head are added in 32 bits."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), hidden)
    else:
        total += grad.t() @ hidden


class _SumContext(FunctionCtx):
    groups: tuple[dist.ProcessGroup, ...]


class _SumGradient(torch.autograd.Function):
    """The same values; a gradient that is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: _SumContext, hidden: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        ctx.groups = groups
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: _SumContext, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        for group in ctx.groups:
            grad = all_reduce(grad.contiguous(), "sum", group)
        return grad, None
