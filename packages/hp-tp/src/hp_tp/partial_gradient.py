"""Leaving a distributed tensor for local work whose gradients are addends, without adding them up at once.

A column-parallel layer that takes replicas gives back one addend of the gradient on each rank. When several layers take
the same tensor (queries, keys and values; gate and up), adding up each of them costs a collective each; a distributed
gradient can stay ``Partial`` until all have been added, and the move that made the replicas then reduces once. A leaf is
where that ends: what is kept in ``.grad`` has the layout of its tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from hp_dtensor import DTensor, to_local
from hp_dtensor.local import own_piece
from hp_dtensor.placements import normalize_placements
from hp_dtensor.spec import Spec, spec_of

if TYPE_CHECKING:
    from hp_dtensor import Placement
    from torch import Tensor
    from torch.autograd.function import FunctionCtx

__all__ = ["leave"]


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec  # type: ignore[attr-defined]  # torch leaves these open
        local = cast("Tensor", tensor._local_tensor)  # type: ignore[attr-defined]  # every DTensor has one
        return local.view_as(local)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        spec: Spec = ctx.spec  # type: ignore[attr-defined]  # set in forward
        grad = DTensor.from_local(
            grads[0], spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
        )
        return grad, None


def leave(tensor: Tensor, grad: Placement | None) -> Tensor:
    """This rank's piece of a distributed *tensor*, whose gradients fit together as *grad* (like the tensor when None)."""
    if grad is None:
        return own_piece(tensor)
    if torch.compiler.is_compiling() or tensor.is_leaf or not torch.is_grad_enabled():
        return to_local(tensor, grad_placements=(grad,))
    spec = spec_of(tensor)
    if spec is None:  # only to tell the type checker: callers pass distributed tensors
        return tensor
    placements = normalize_placements((grad,), spec.mesh, tensor.ndim)
    return cast("Tensor", _Leave.apply(tensor, spec.with_placements(placements)))
