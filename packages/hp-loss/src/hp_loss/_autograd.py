"""The gradient of a token's loss, without communication: the only `Function` of the losses over given logits.

The forward has the merged statistics already, so there is no collective in here, forward or
backward, and a graph compiler sees plain tensors. The logits are saved as they are, in their own
dtype; beside them a few numbers per token. With `S`, `A` and `M` of `hp_loss.statistics`, the two
results have the gradients

* loss: ``A softmax(x) - a``, and ``log S - (x - M)`` for the target's weights `a` when those are
  wanted;
* logsumexp: ``softmax(x)``.

Every other quantity (z-loss, the mean, a mask) is an ordinary torch expression of the two.

A second derivative needs a sum over all shards in its backward, and is refused. torch's
`once_differentiable` would not do: it lets a gradient pass as a constant where its incoming
gradient is one, and a gradient penalty would be left out in silence.

Not taken: saving the softmax. That is the size of the logits again, in 32 bits, to save one pass
of exponentials.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hp_loss.kernel import CrossEntropyKernel
from hp_loss.statistics import DOT, EXP_SUM, MASS, MAXIMUM

__all__ = ["refuse_second_derivative", "token_loss"]


class _Context(FunctionCtx):
    """What `_TokenLoss` keeps from forward to backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    kernel: CrossEntropyKernel
    has_background: bool
    inplace: bool


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        logits: Tensor,
        column: Tensor,
        mass: Tensor,
        background: Tensor | None,
        merged: Tensor,
        kernel: CrossEntropyKernel,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        log_sum = merged[:, EXP_SUM].log()
        ctx.has_background = background is not None
        ctx.kernel, ctx.inplace = kernel, inplace
        ctx.save_for_backward(
            logits, column, mass, merged, *(() if background is None else (background,))
        )
        return merged[:, MASS] * log_sum - merged[:, DOT], merged[:, MAXIMUM] + log_sum

    @staticmethod
    def backward(
        ctx: _Context, loss_grad: Tensor, logsumexp_grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        logits, column, mass, merged = ctx.saved_tensors[:4]
        background = ctx.saved_tensors[4] if ctx.has_background else None
        maximum, exp_sum = merged[:, MAXIMUM], merged[:, EXP_SUM]
        target_grad = None
        if ctx.needs_input_grad[3]:
            relative = logits.to(merged.dtype) - maximum.unsqueeze(1)
            target_grad = loss_grad.unsqueeze(1) * (exp_sum.log().unsqueeze(1) - relative)
        logits_grad = None
        if ctx.needs_input_grad[0]:
            scale = (loss_grad * merged[:, MASS] + logsumexp_grad) / exp_sum
            logits_grad = ctx.kernel.gradient(
                logits, column, mass, background, maximum, scale, loss_grad, inplace=ctx.inplace
            )
        return logits_grad, None, None, target_grad, None, None, None


def refuse_second_derivative() -> None:
    """Raise inside a backward that is itself being recorded (`create_graph=True`)."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "a vocabulary-parallel loss has no second derivative, and this backward runs with create_graph=True: take "
            "torch.nn.functional.cross_entropy of the whole logits (outside of loss_parallel) for a gradient penalty",
        )


def token_loss(
    logits: Tensor,
    column: Tensor,
    mass: Tensor,
    background: Tensor | None,
    merged: Tensor,
    kernel: CrossEntropyKernel,
    *,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Give each token's loss and logsumexp, differentiable in *logits* and in a *background* of one number per logit.

    Args:
        logits: shape `(tokens, columns)`.
        column: as for `CrossEntropyKernel.statistics`.
        mass: as for `CrossEntropyKernel.statistics`.
        background: as for `CrossEntropyKernel.statistics`.
        merged: shape `(tokens, 4 or more)`: the statistics over all shards.
        kernel: computes the gradient.
        inplace: write the gradient over the logits.
    """
    out = _TokenLoss.apply(logits, column, mass, background, merged, kernel, inplace)
    return cast("tuple[Tensor, Tensor]", out)
