"""RMS norm: ``y = x * rsqrt(mean(x²) + eps) * weight``, the mean over the dims of *weight*.

The rule: arithmetic in 32 bits, or in 64 for 64-bit inputs; one rounding at the end. *y* has the
dtype of *x* and each gradient that of its input, as `torch.nn.functional.rms_norm` gives them. The
reciprocal root ``rstd`` is a second result, kept in the arithmetic's dtype, because the backward
needs it unrounded; it is not differentiable.

Sharding: any dim outside of the normalised ones may be cut, and the weight's gradient is then
Partial over that axis. A Partial gradient from above is reduced before the backward: both results
need the sum, which is one collective instead of two.

The vendor's operator takes 16- and 32-bit floats, a weight of the same dtype or of 32 bits, and no
empty tensor that its documentation would promise; it gives the weight's gradient in 32 bits
always.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from hp_dtensor import OpCall, Partial, Replicate, Strategy
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hp_npu.errors import KernelArgumentError
from hp_npu.kernels._cuts import cuts
from hp_npu.kernels._define import define
from hp_npu.kernels.protocol import Gradient, KernelSpec, Policy, VendorOp
from hp_npu.kernels.registry import KERNELS

if TYPE_CHECKING:
    from hp_dtensor import Placement

__all__ = ["RMS_NORM", "RMS_NORM_BACKWARD", "rms_norm"]

REPLICATE = Replicate()

VENDOR_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
VENDOR_DIMS = 8

# What the vendor's documentation promises beside exact 32-bit arithmetic: a rounding of the result.
TOLERANCE = {
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1e-2, 1e-2),
    torch.float32: (1e-4, 1e-5),
}


# --- arguments ----------------------------------------------------------------------------------


def _check(x: Tensor, weight: Tensor) -> None:
    """Refuse what has no RMS norm, from facts that every rank shares.

    Raises:
        KernelArgumentError: if shapes or dtypes don't fit.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if not tensor.is_floating_point():
            raise KernelArgumentError(
                f"rms_norm: {name} is {tensor.dtype}; it must be a floating-point dtype. Convert it with .float()"
            )
    shape, given = tuple(x.shape), tuple(weight.shape)
    if not given or shape[len(shape) - len(given) :] != given or len(given) > len(shape):
        legal = (
            ", ".join(str(shape[start:]) for start in range(len(shape)))
            or "none, since x has no dims"
        )
        raise KernelArgumentError(
            f"rms_norm: weight has shape {given} and x has shape {shape}; the weight's shape must be that of x's last "
            f"dims, which are normalised: one of {legal}"
        )


def _accumulation(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _normalised(weight: Tensor) -> tuple[int, ...]:
    return tuple(range(-weight.dim(), 0))


# --- forward ------------------------------------------------------------------------------------


def _reference(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, weight)
    wide = x.to(_accumulation(x))
    rstd = wide.square().mean(_normalised(weight), keepdim=True).add_(eps).rsqrt_()
    y = (wide * rstd * weight).to(x.dtype)
    return y.contiguous(), rstd.contiguous()


def _fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001  # the operator's signature
    _check(x, weight)
    outer = x.dim() - weight.dim()
    return x.new_empty(x.shape), x.new_empty(
        (*x.shape[:outer], *[1] * weight.dim()), dtype=_accumulation(x)
    )


def _constraint(x: Tensor, weight: Tensor, eps: float) -> str | None:  # noqa: ARG001  # the operator's signature
    if x.dtype not in VENDOR_DTYPES:
        return f"x is {x.dtype}, and the vendor's kernel takes float16, bfloat16 and float32"
    if weight.dtype not in (x.dtype, torch.float32):
        return f"weight is {weight.dtype}, and the vendor's kernel takes the dtype of x ({x.dtype}) or float32"
    if x.dim() > VENDOR_DIMS:
        return f"x has {x.dim()} dims, and the vendor's kernel takes up to {VENDOR_DIMS}"
    return "x is empty" if x.numel() == 0 else None


def _call_vendor(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, weight)
    return cast("tuple[Tensor, Tensor]", torch.ops.npu.npu_rms_norm(x, weight, eps))


def _rule(call: OpCall) -> Iterator[Strategy]:
    x, weight = call.tensors
    for cut in cuts(call, range(x.ndim - weight.ndim)):
        yield Strategy(outputs=(cut, cut), inputs=(cut, REPLICATE))


def _setup_context(
    ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]
) -> None:
    x, weight = cast("tuple[Tensor, Tensor]", inputs[:2])
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, rstd)


# --- backward -----------------------------------------------------------------------------------


def _reference_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = _accumulation(x, weight)
    unit = x.to(dtype) * rstd
    dy = dy.to(dtype)
    scaled = dy * weight
    mean = (scaled * unit).mean(_normalised(weight), keepdim=True)
    dx = (scaled - unit * mean) * rstd
    dweight = (dy * unit).sum_to_size(weight.shape)
    return dx.to(x.dtype).contiguous(), dweight.to(weight.dtype).contiguous()


def _fake_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _constraint_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> str | None:  # noqa: ARG001
    return _constraint(x, weight, 0.0)


def _call_vendor_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dweight = torch.ops.npu.npu_rms_norm_backward(dy.to(x.dtype), x, weight, rstd)
    return dx, dweight.to(weight.dtype)


def _rule_backward(call: OpCall) -> Iterator[Strategy]:
    _, x, weight, _ = call.tensors
    total: Placement = Partial("sum")
    for cut in cuts(call, range(x.ndim - weight.ndim)):
        yield Strategy(outputs=(cut, total), inputs=(cut, cut, REPLICATE, cut))


def _backward(
    ctx: FunctionCtx, dy: Tensor | None, _drstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    x, weight, rstd = ctx.saved_tensors  # type: ignore[attr-defined]  # torch leaves it out of its stub
    dx, dweight = _rms_norm_backward(dy, x, weight, rstd)
    needs_x, needs_weight, _ = ctx.needs_input_grad  # type: ignore[attr-defined]  # as above
    return dx if needs_x else None, dweight if needs_weight else None, None


# --- the operators ------------------------------------------------------------------------------

RMS_NORM_BACKWARD = KernelSpec(
    name="rms_norm_backward",
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    reference=_reference_backward,
    fake=_fake_backward,
    vendor=VendorOp(
        "npu::npu_rms_norm_backward",
        ("Tensor", "Tensor", "Tensor", "Tensor"),
        results=2,
        since="2.1.0",
    ),
    call_vendor=_call_vendor_backward,
    constraint=_constraint_backward,
    rule=_rule_backward,
    tolerance=TOLERANCE,
)
"""Gradients of *x* and *weight*, from the gradient of *y* and what the forward kept."""

RMS_NORM = KernelSpec(
    name="rms_norm",
    schema="(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    vendor=VendorOp("npu::npu_rms_norm", ("Tensor", "Tensor", "float"), results=2, since="2.1.0"),
    call_vendor=_call_vendor,
    constraint=_constraint,
    rule=_rule,
    gradient=Gradient(_setup_context, _backward),
    tolerance=TOLERANCE,
)
"""The norm and the reciprocal root: ``(y, rstd)``."""

_rms_norm_backward = define(RMS_NORM_BACKWARD, KERNELS)
_rms_norm = define(RMS_NORM, KERNELS)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, policy: Policy = "fallback"
) -> Tensor:
    """Return ``x * rsqrt(mean(x², last dims) + eps) * weight``.

    The dims that *weight* has are normalised: a weight of shape ``(hidden,)`` normalises the last.
    Arithmetic is in 32 bits (64 for 64-bit inputs), and the vendor's fused kernel runs where the
    tensors are on an NPU.

    Distributed tensors of any layout are taken: cuts of the outer dims stay, a cut of a normalised
    dim and a Partial are moved first. The gradient of *weight* sums over cuts of the outer dims by
    itself.

    Args:
        x: shape ``(*outer, *normalised)``, any floating dtype.
        weight: shape ``normalised``, any floating dtype.
        eps: added to the mean square. `torch.nn.functional.rms_norm` defaults to the dtype's
            epsilon, the vendor to this.
        policy: what to do when the vendor's kernel can't run: ``"error"``, ``"warn_once"`` or
            ``"fallback"``.

    Returns:
        Shape, dtype and layout of *x*, contiguous.

    Raises:
        KernelArgumentError: if a dtype is not floating or the weight's shape is not that of the
            last dims of *x*.
        KernelUnavailableError: if *policy* is ``"error"`` and the vendor's kernel can't run.

    Example:
        >>> import torch
        >>> from hp_npu import rms_norm
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), eps=0.0)
        tensor([[0.8485, 2.2627]])
    """
    _check(x, weight)
    if policy != "fallback":
        KERNELS.resolve(RMS_NORM, policy, x, weight, eps)
    y: Tensor = _rms_norm(x, weight, eps)[0]
    return y
