"""Operators that torch takes apart, or gives a gradient, in a way that no distributed tensor survives.

Most operators that are made of others fall apart above dispatch into ones that have rules. A few read the memory of an
argument on the way (``tensor_split`` with a tensor of indices), compare what they rounded (``isclose``), write to a reshaped
``out=`` (``kron``), or have a backward in Python that writes to plain buffers (the chunked ``linear_cross_entropy``). These are
met earlier, above autograd, and said in terms of operators that have rules, and are differentiable where they should be.

Not taken: ``__torch_function__``, which sees every call of a program, and costs each of them more than the local operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional

from hp_dtensor._torch import above_autograd, composed_out_forms, decompose
from hp_dtensor.calls import flat
from hp_dtensor.dispatch import whole_of
from hp_dtensor.out_forms import functional_form, write_outs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__: list[str] = []


@above_autograd("aten", "tensor_split.tensor_indices_or_sections")
def _tensor_split(x: Tensor, where: Tensor, dim: int = 0) -> Sequence[Tensor]:
    """Each rank reads all the indices, which are few and must be known to give results their shapes."""
    whole = whole_of(torch.ops.aten.tensor_split.tensor_indices_or_sections, where.detach())
    if whole.dtype != torch.int64 or whole.dim() > 1:
        plain = torch.empty(x.shape, device="meta")
        return torch.tensor_split(plain, whole, dim)  # which words the error
    at = whole.tolist()
    return torch.tensor_split(x, at, dim)


@above_autograd("aten", "isclose")
def _isclose(
    x: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    """Addends are summed first: their differences would be rounded on each rank, and numbers at the bound fall beside it."""
    op = torch.ops.aten.isclose.default
    settled = [t.reduce_partial() if hasattr(t, "reduce_partial") else t for t in (x, other)]
    return cast("Tensor", decompose(op, (*settled, rtol, atol, equal_nan), {}))


def _out_form(name: str) -> Callable[..., object]:
    """What the composed operator *name* does, which writes to ``out=``."""
    packet, _, overload = name.partition(".")

    def write(*args: object, **kwargs: object) -> object:
        op = getattr(getattr(torch.ops.aten, packet), overload)
        form = functional_form(op)
        tensors = [t for value in (*args, *kwargs.values()) for t in flat(value)]
        if form is None or not any(isinstance(t, Tensor) for value in args for t in flat(value)):
            return NotImplemented
        if torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in tensors
        ):
            msg = (
                f"{packet}(): functions with out=... arguments don't support automatic differentiation, but one of the "
                "arguments requires grad"
            )
            raise RuntimeError(msg)
        return write_outs(op, form, args, kwargs)

    return write


for _name in composed_out_forms():
    above_autograd("aten", _name)(_out_form(_name))


def _loss(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    ignored: int,
    wide: torch.dtype,
) -> Tensor:
    """The loss in the dtype in which the chunks are computed, and rounded once."""
    scores = functional.linear(
        x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    )
    loss = functional.cross_entropy(
        scores,
        target.to(wide) if target.is_floating_point() else target,
        None if class_weight is None else class_weight.to(wide),
        reduction=reduction,
        ignore_index=ignored,
    )
    return loss.to(x.dtype)


@above_autograd("torch_nn", "_linear_cross_entropy_batch_chunked")
def _chunked(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    ignored: int,
    _smoothing: float,
    _chunk: int,
    _policy: str,
    wide: torch.dtype,
    *_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss; autograd finds the gradients, which the operator itself would have found already, from it."""
    loss = _loss(x, weight, target, bias, class_weight, reduction, ignored, wide)
    none = torch.empty(0, 0, dtype=x.dtype, device=x.device)
    return loss, none, none.clone(), none.reshape(0).clone()


@above_autograd("torch_nn", "_linear_cross_entropy_batch_chunked_no_reduction")
def _chunked_each(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignored: int,
    _chunk: int,
    _policy: str,
    wide: torch.dtype,
) -> Tensor:
    return _loss(x, weight, target, bias, class_weight, "none", ignored, wide)
