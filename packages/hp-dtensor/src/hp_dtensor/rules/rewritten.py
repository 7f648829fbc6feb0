"""Operators without a strategy of their own, in terms of others that have some.

The idea: what an operator does to layouts follows from what it is made of. A margin loss is a difference, a clamp and a
sum; writing values at flat positions is an ``index_put`` on the flattened tensor. Said once in terms of smaller
operators, it is right for every layout, and only what must move does.

The rule: the functions here are the mathematics of the operator and nothing about layouts. They run under dispatch,
below autograd, and give results of the same dtypes as the operator itself. Operators that torch decomposes well
itself need no line here.

The design not taken: strategies for each of them. They are rare, and a strategy that is never used is never right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from hp_dtensor._torch import is_traced
from hp_dtensor.placements import shard_dim
from hp_dtensor.rules._registry import aten_ops
from hp_dtensor.spec import spec_of

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from hp_dtensor._torch import TorchDTensor

__all__ = ["rewritten"]

NONE, MEAN = 0, 1
"""How ATen writes the reduction of a loss; what is neither is the sum."""

_TINY = 1e-7
"""What torch adds to a length before it divides by it."""

_LARGEST = (1 << 63) - 1

_table: dict[OpOverload, Callable[..., object]] = {}


def rewritten(op: OpOverload) -> Callable[..., object] | None:
    """Return what to run instead of *op*, or None.

    Example:
        >>> import torch
        >>> rewritten(torch.ops.aten.put.default) is not None, rewritten(torch.ops.aten.mm.default)
        (True, None)
    """
    return _table.get(op)


def _stands_for(*names: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def register(function: Callable[..., object]) -> Callable[..., object]:
        for op in aten_ops(*names):
            _table[op] = function  # type: ignore[index]  # names of single overloads
        return function

    return register


# --- positions in the flattened tensor --------------------------------------------------------


@_stands_for("put.default")
def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = x.reshape(-1)
    index = index.reshape(-1)
    index = torch.where(index < 0, index + x.numel(), index)
    return flat.index_put((index,), source.reshape(-1), accumulate).view(x.shape)


@_stands_for("masked_scatter.default")
def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Each true position takes the next element of the source: the one that its running count tells."""
    x, mask = torch.broadcast_tensors(x, mask)
    if not source.numel() or not x.numel():
        return x.clone()
    turn = mask.reshape(-1).cumsum(0) - 1
    picked = source.reshape(-1).index_select(0, turn.clamp(0, source.numel() - 1))
    return torch.where(mask, picked.view(x.shape), x)


@_stands_for("masked_scatter_backward.default")
def _masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    count = 1
    for size in sizes:
        count *= size
    grad, mask = torch.broadcast_tensors(grad, mask)
    flat = mask.reshape(-1)
    turn = torch.where(flat, flat.cumsum(0) - 1, count)
    # One place more than there are elements takes what no element of the source went to.
    found = grad.new_zeros(count + 1).index_add(0, turn.clamp(0, count), grad.reshape(-1))
    return found[:count].view(sizes)


# --- counting ---------------------------------------------------------------------------------


@_stands_for("bincount.default")
def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> object:
    """Each rank counts what it holds once all know the largest number; the rest is left to torch, its refusals as well."""
    alike = weights is None or weights.shape == x.shape
    other = x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool
    if not _is_cut(x) or not alike or other or x.ndim != 1 or not x.numel() or minlength < 0:
        return NotImplemented
    places = x.to(torch.int64)
    # What is below zero counts as the largest number there is, so that one maximum tells all ranks of it.
    top = int(torch.where(places < 0, _LARGEST, places).amax().item())
    if top == _LARGEST:
        return torch.bincount(torch.tensor([-1]))  # raises what torch raises
    each = torch.ones_like(places) if weights is None else weights
    if weights is not None and weights.dtype != torch.float32:
        each = weights.to(torch.float64)
    found = torch.zeros(max(top + 1, minlength), dtype=each.dtype, device=x.device)
    return found.index_add(0, places, each)


def _is_cut(x: Tensor) -> bool:
    """Whether the ranks hold different elements of *x*, and this one holds some that may be looked at."""
    spec = spec_of(x)
    if spec is None or spec.coordinate is None or spec.is_partial:
        return False
    local = cast("TorchDTensor", x)._local_tensor
    cut = any(shard_dim(placement) is not None for placement in spec.placements)
    return cut and not local.is_meta and not is_traced(local)


# --- rows that must not be long ---------------------------------------------------------------


@_stands_for("embedding_renorm_.default")
def _embedding_renorm(
    weight: Tensor, index: Tensor, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale each row that is looked up and too long, once, in place."""
    length = torch.linalg.vector_norm(weight, norm_type, dim=1, keepdim=True)
    looked_up = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
    looked_up = looked_up.index_fill(0, index.reshape(-1), True).unsqueeze(1)
    scale = max_norm / (length + _TINY)
    weight.mul_(torch.where(looked_up & (length > max_norm), scale, 1))
    return weight


# --- distances between the rows of one matrix -------------------------------------------------


(_distances,) = aten_ops("_cdist_forward.default")
(_distances_backward,) = aten_ops("_cdist_backward.default")


def _pairs(rows: int, device: torch.device) -> Tensor:
    return torch.triu_indices(rows, rows, 1, device=device)


@_stands_for("_pdist_forward.default")
def _pdist(x: Tensor, p: float = 2.0) -> Tensor:
    first, second = _pairs(x.shape[0], x.device)
    between: Tensor = _distances(x, x, p, None)
    return between[first, second]


@_stands_for("_pdist_backward.default")
def _pdist_backward(grad: Tensor, x: Tensor, p: float, distance: Tensor) -> Tensor:
    rows = x.shape[0]
    first, second = _pairs(rows, x.device)
    weight, length = (
        torch.zeros(rows, rows, dtype=x.dtype, device=x.device).index_put((first, second), each)
        for each in (grad, distance)
    )
    weight, length = weight + weight.t(), length + length.t()
    found: Tensor = _distances_backward(weight.contiguous(), x, x, p, length)
    return found


# --- margin losses ----------------------------------------------------------------------------


def _reduced(each: Tensor, reduction: int) -> Tensor:
    if reduction == NONE:
        return each
    return each.mean() if reduction == MEAN else each.sum()


def _share(grad: Tensor, rows: int, reduction: int) -> Tensor:
    """The gradient of each row, as a column, from that of the loss."""
    if reduction == NONE:
        return grad.reshape(-1, 1)
    return grad / rows if reduction == MEAN else grad


def _margins(
    x: Tensor, target: Tensor, margin: float, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """How far each class comes too close, whether it counts, and the weight of the row."""
    right = x.gather(1, target)
    classes = torch.arange(x.shape[1], device=x.device)
    other = classes != target
    gap = torch.where(other, margin - right + x, 0)
    scale = torch.ones((), dtype=x.dtype, device=x.device)
    if weight is not None:
        scale = weight.index_select(0, target.reshape(-1)).reshape(-1, 1)
    return gap, other, scale


@_stands_for("multi_margin_loss.default")
def _multi_margin_loss(
    x: Tensor,
    target: Tensor,
    p: complex = 1,
    margin: complex = 1,
    weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    rows, column = _rows(x), target.reshape(-1, 1)
    gap, _, scale = _margins(rows, column, float(margin.real), weight)
    each = (gap.clamp(min=0).pow(p) * scale).sum(1) / max(rows.shape[1], 1)
    return _reduced(each.reshape(target.shape), reduction)


@_stands_for("multi_margin_loss_backward.default")
def _multi_margin_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    p: complex,
    margin: complex,
    weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    rows, column = _rows(x), target.reshape(-1, 1)
    gap, other, scale = _margins(rows, column, float(margin.real), weight)
    near = torch.where(gap > 0, p * gap.pow(p - 1), 0) * scale / max(rows.shape[1], 1)
    slope = torch.where(other, near, -near.sum(1, keepdim=True))
    return (slope * _share(grad, rows.shape[0], reduction)).to(x.dtype).reshape(x.shape)


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(1, -1)


def _targets(x: Tensor, target: Tensor) -> Tensor:
    """Which classes of each row are named before the first negative one."""
    named = (target >= 0).to(torch.int64).cumprod(1)
    counts = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    return counts.scatter_add(1, target.clamp(min=0), named) > 0


def _hinges(x: Tensor, target: Tensor, is_target: Tensor) -> tuple[Tensor, Tensor]:
    """For each named class (dim 1) and each other one (dim 2) the margin that lacks; and which name counts."""
    named = (target >= 0).to(torch.int64).cumprod(1).to(x.dtype)
    right = x.gather(1, target.clamp(min=0))
    gap = 1 - right.unsqueeze(2) + x.unsqueeze(1)
    other = 1 - is_target.to(x.dtype)
    return gap, named.unsqueeze(2) * other.unsqueeze(1)


@_stands_for("multilabel_margin_loss_forward.default")
def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    rows, names = _rows(x), _rows(target)
    is_target = _targets(rows, names)
    gap, counts = _hinges(rows, names, is_target)
    each = (gap.clamp(min=0) * counts).sum((1, 2)) / max(rows.shape[1], 1)
    loss = _reduced(each if x.ndim == 2 else each.reshape(()), reduction)
    return loss, is_target.to(x.dtype).reshape(target.shape)


@_stands_for("multilabel_margin_loss_backward.default")
def _multilabel_margin_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    rows, names = _rows(x), _rows(target)
    gap, counts = _hinges(rows, names, _rows(is_target) > 0)
    near = (gap > 0).to(x.dtype) * counts / max(rows.shape[1], 1)
    slope = near.sum(1).scatter_add(1, names.clamp(min=0), -near.sum(2))
    return (slope * _share(grad, rows.shape[0], reduction)).to(x.dtype).reshape(x.shape)
