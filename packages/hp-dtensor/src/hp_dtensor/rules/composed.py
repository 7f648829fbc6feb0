"""Operators over a cut dim, in terms of smaller ones: only the reductions move.

The idea: a softmax over a cut dim needs its maximum and its sum from everywhere, and nothing else.
Written as a maximum, an exponential, a sum and a quotient, each with a rule of its own, it leaves
the large tensor where it is; as one operator it would have to gather it.

The rule: a composition is used where the dims that the operator needs whole are cut, and only
there: on whole dims the fused kernel is faster and rounds once. Half precision is computed in
float32, as the kernels do. A composition says nothing about layouts; it is the same arithmetic.

The design not taken: local replacements that communicate. Their cost would be invisible to
whoever asks what an operator will send, and to strict mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hp_dtensor.placements import Placement, shard_dim
from hp_dtensor.rules._registry import OpCall, aten_ops, is_replaced
from hp_dtensor.rules.reduction import reduced_dims
from hp_dtensor.rules.view import as_dims

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["Composition", "compose"]


@dataclass(frozen=True, slots=True)
class Composition:
    """How an operator is made of others, and when."""

    whole: Callable[[OpCall], tuple[int, ...]]
    """The dims of the first tensor that the operator itself needs whole."""
    build: Callable[[OpCall], Callable[..., object]]
    """Gives what to run instead; it takes the operator's arguments, distributed tensors and all."""


_table: dict[OpOverload, Composition] = {}


def compose(
    call: OpCall, placements: Sequence[Sequence[Placement]]
) -> Callable[..., object] | None:
    """Return what to run instead of ``call.op``, or None if the operator itself is better.

    Args:
        call: The call, with metadata of whole tensors.
        placements: For each tensor of the call its placements over the mesh axes that have more
            than one coordinate.

    Example:
        >>> import torch
        >>> from hp_dtensor.placements import Shard
        >>> from hp_dtensor.rules import OpCall, TensorMeta
        >>> x = TensorMeta((4, 6), (6, 1), torch.float32)
        >>> call = OpCall(torch.ops.aten._softmax.default, (x, 1, False), {}, (x,), 1)
        >>> compose(call, [[Shard(0)]]) is None, compose(call, [[Shard(1)]]) is None
        (True, False)
    """
    found = _table.get(call.op)
    if found is None or is_replaced(call.op) or not call.tensors or not call.tensors[0].numel:
        return None
    cut = {shard_dim(placement) for placement in placements[0]}
    return found.build(call) if cut & set(found.whole(call)) else None


def _register(
    names: Sequence[str],
    whole: Callable[[OpCall], tuple[int, ...]],
    build: Callable[[OpCall], Callable[..., object]],
) -> None:
    for op in aten_ops(*names):
        _table[op] = Composition(whole, build)  # type: ignore[index]  # names of single overloads


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype


def _up(tensor: Tensor) -> Tensor:
    """Return *tensor* in the precision in which kernels compute."""
    return tensor.to(_wide(tensor.dtype))


def _dim(position: int) -> Callable[[OpCall], tuple[int, ...]]:
    def whole(call: OpCall) -> tuple[int, ...]:
        return as_dims(call.arg(position, "dim", -1), len(call.tensors[0].shape))

    return whole


# --- softmax ----------------------------------------------------------------------------------


def _softmax(call: OpCall) -> Callable[..., object]:
    dtype = call.output.dtype

    def run(x: Tensor, dim: int, _half_to_float: bool = False) -> Tensor:
        x = _up(x)
        weight = (x - x.amax(dim, keepdim=True)).exp()
        return (weight / weight.sum(dim, keepdim=True)).to(dtype)

    return run


def _log_softmax(call: OpCall) -> Callable[..., object]:
    dtype = call.output.dtype

    def run(x: Tensor, dim: int, _half_to_float: bool = False) -> Tensor:
        x = _up(x)
        shifted = x - x.amax(dim, keepdim=True)
        return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(dtype)

    return run


def _softmax_backward(call: OpCall) -> Callable[..., object]:
    dtype = call.output.dtype

    def run(grad: Tensor, output: Tensor, dim: int, _input_dtype: torch.dtype) -> Tensor:
        grad, output = _up(grad), _up(output)
        total = (grad * output).sum(dim, keepdim=True)
        return (output * (grad - total)).to(dtype)

    return run


def _log_softmax_backward(call: OpCall) -> Callable[..., object]:
    dtype = call.output.dtype

    def run(grad: Tensor, output: Tensor, dim: int, _input_dtype: torch.dtype) -> Tensor:
        grad, output = _up(grad), _up(output)
        return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(dtype)

    return run


_register(["_softmax.default"], _dim(1), _softmax)
_register(["_log_softmax.default"], _dim(1), _log_softmax)
_register(["_softmax_backward_data.default"], _dim(2), _softmax_backward)
_register(["_log_softmax_backward_data.default"], _dim(2), _log_softmax_backward)


# --- reductions that finish with something that is not linear ---------------------------------


def _logsumexp(call: OpCall) -> Callable[..., object]:
    dims, dtype = list(reduced_dims(call)), call.output.dtype

    def run(x: Tensor, _dim: object, keepdim: bool = False) -> Tensor:
        x = _up(x)
        # The largest size decides what overflows; of complex numbers that is the real part's.
        top = (x.real if x.is_complex() else x).amax(dims, keepdim=True)
        top = torch.where(top.abs() == inf, 0.0, top)
        total = (x - top).exp().sum(dims, keepdim=True).log() + top
        return (total if keepdim else _drop(total, dims)).to(dtype)

    return run


def _drop(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    return tensor.squeeze(tuple(dims)) if dims else tensor


def _moments(call: OpCall) -> Callable[..., object]:
    """``var``, ``std`` and their forms with the mean: two passes, as exact as the kernel."""
    name = str(call.op).split(".")[1]
    dims = list(reduced_dims(call))
    count = prod(call.tensors[0].shape[dim] for dim in dims)
    dtype = call.output.dtype

    def run(
        x: Tensor,
        _dim: object = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> object:
        x = _up(x)
        mean = x.mean(dims, keepdim=True)
        freedom = max(count - (1 if correction is None else correction), 0)
        spread = (x - mean).abs().square().sum(dims, keepdim=True) / freedom
        if name.startswith("std"):
            spread = spread.sqrt()
        if not keepdim:
            spread, mean = _drop(spread, dims), _drop(mean, dims)
        found = spread.to(dtype)
        return (found, mean.to(_mean_dtype(call))) if name.endswith("_mean") else found

    return run


def _mean_dtype(call: OpCall) -> torch.dtype:
    mean = call.outputs[-1]
    assert mean is not None
    return mean.dtype


def _vector_norm(position: int) -> Callable[[OpCall], Callable[..., object]]:
    """Norms of orders whose pieces do not combine by themselves: a sum of powers, and its root."""

    def build(call: OpCall) -> Callable[..., object]:
        order = call.arg(position, "ord", 2)
        dims = list(reduced_dims(call, 2))
        dtype = call.output.dtype
        power = 2.0 if order is None else float(order)  # type: ignore[arg-type]

        def run(x: Tensor, *_static: object, **_named: object) -> Tensor:
            powers = _up(x.to(dtype) if x.dtype.is_floating_point else x).abs().pow(power)
            total = powers.sum(dims, keepdim=len(call.output.shape) == x.ndim).pow(1 / power)
            return total.to(dtype)

        return run

    return build


def _norm_whole(position: int) -> Callable[[OpCall], tuple[int, ...]]:
    def whole(call: OpCall) -> tuple[int, ...]:
        if call.arg(position, "ord", 2) in {0, 1, inf, -inf}:
            return ()
        return reduced_dims(call, 2)

    return whole


def _extremes(_call: OpCall) -> Callable[..., object]:
    def run(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        dims = [] if dim is None else [dim]
        return x.amin(dims, keepdim=keepdim), x.amax(dims, keepdim=keepdim)

    return run


def _aminmax_dims(call: OpCall) -> tuple[int, ...]:
    return reduced_dims(call, 1)


_register(["logsumexp.default"], reduced_dims, _logsumexp)
_register(
    ["var.correction", "std.correction", "var_mean.correction", "std_mean.correction"],
    reduced_dims,
    _moments,
)
_register(["linalg_vector_norm.default"], _norm_whole(1), _vector_norm(1))
_register(["norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"], _norm_whole(1), _vector_norm(1))
_register(["aminmax.default"], _aminmax_dims, _extremes)


# --- where the extreme value is ---------------------------------------------------------------


def _first(x: Tensor, dims: tuple[int, ...], largest: bool) -> tuple[Tensor, Tensor]:
    """Return the extreme values over *dims* and the first index of each, all dims kept."""
    top = x.amax(dims, keepdim=True) if largest else x.amin(dims, keepdim=True)
    found = x == top
    if x.dtype.is_floating_point:
        found = found | x.isnan()
    shape = [size if dim in dims else 1 for dim, size in enumerate(x.shape)]
    index = torch.arange(prod(shape), device=x.device).view(shape)
    return top, torch.where(found, index, prod(shape)).amin(dims, keepdim=True)


def _position(largest: bool) -> Callable[[OpCall], Callable[..., object]]:
    def build(call: OpCall) -> Callable[..., object]:
        ndim = len(call.tensors[0].shape)

        def run(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
            dims = tuple(range(ndim)) if dim is None else as_dims(dim, ndim)
            _, index = _first(x, dims, largest)
            return index if keepdim else _drop(index, dims)

        return run

    return build


def _extreme(largest: bool) -> Callable[[OpCall], Callable[..., object]]:
    def build(call: OpCall) -> Callable[..., object]:
        ndim = len(call.tensors[0].shape)

        def run(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
            value, index = _first(x, as_dims(dim, ndim), largest)
            return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))

        return run

    return build


for _name, _largest in (("max", True), ("min", False)):
    _register([f"arg{_name}.default"], reduced_dims, _position(_largest))
    _register([f"{_name}.dim"], _dim(1), _extreme(_largest))


# --- normalisation ----------------------------------------------------------------------------


def _normalised(position: int) -> Callable[[OpCall], tuple[int, ...]]:
    def whole(call: OpCall) -> tuple[int, ...]:
        ndim = len(call.tensors[0].shape)
        shape = call.arg(position)
        count = len(shape) if isinstance(shape, list | tuple) else 0
        return tuple(range(ndim - count, ndim))

    return whole


def _layer_norm(call: OpCall) -> Callable[..., object]:
    dims = list(_normalised(1)(call))
    dtypes = [meta.dtype for meta in call.outputs if meta is not None]

    def run(
        x: Tensor, _shape: object, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _up(x)
        mean = x.mean(dims, keepdim=True)
        centred = x - mean
        scale = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
        out = centred * scale
        out = out if weight is None else out * weight
        out = out if bias is None else out + bias
        return out.to(dtypes[0]), mean.to(dtypes[1]), scale.to(dtypes[2])

    return run


def _layer_norm_backward(call: OpCall) -> Callable[..., object]:
    dims = list(_normalised(2)(call))
    outer = list(range(dims[0])) if dims else []
    count = prod(call.tensors[1].shape[dim] for dim in dims)

    def run(
        grad: Tensor,
        x: Tensor,
        _shape: object,
        mean: Tensor,
        scale: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        kinds = x.dtype, weight.dtype if weight is not None else x.dtype
        grad, x = _up(grad), _up(x)
        unit = (x - mean) * scale
        inner = grad if weight is None else grad * weight
        found: list[Tensor | None] = [None, None, None]
        if mask[0]:
            first = inner.sum(dims, keepdim=True) / count
            second = (inner * unit).sum(dims, keepdim=True) / count
            found[0] = ((inner - first - unit * second) * scale).to(kinds[0])
        if mask[1] and weight is not None:
            found[1] = _outer_sum(grad * unit, outer).to(kinds[1])
        if mask[2] and bias is not None:
            found[2] = _outer_sum(grad, outer).to(kinds[1])
        return found[0], found[1], found[2]

    return run


def _outer_sum(tensor: Tensor, outer: list[int]) -> Tensor:
    return tensor.sum(outer) if outer else tensor


_register(["native_layer_norm.default"], _normalised(1), _layer_norm)
_register(["native_layer_norm_backward.default"], _normalised(2), _layer_norm_backward)


def _rms_norm(call: OpCall) -> Callable[..., object]:
    dims = list(_normalised(1)(call))
    dtypes = [meta.dtype for meta in call.outputs if meta is not None]

    def run(
        x: Tensor, _shape: object, weight: Tensor | None, eps: float | None = None
    ) -> tuple[Tensor, Tensor]:
        small = torch.finfo(x.dtype).eps if eps is None else eps
        x = _up(x)
        scale = (x.square().mean(dims, keepdim=True) + small).rsqrt()
        out = x * scale
        out = out if weight is None else out * weight
        return out.to(dtypes[0]), scale.to(dtypes[1])

    return run


def _rms_norm_backward(call: OpCall) -> Callable[..., object]:
    dims = list(_normalised(2)(call))
    outer = list(range(dims[0])) if dims else []
    count = prod(call.tensors[1].shape[dim] for dim in dims)

    def run(
        grad: Tensor,
        x: Tensor,
        _shape: object,
        scale: Tensor,
        weight: Tensor | None,
        mask: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        kinds = x.dtype, weight.dtype if weight is not None else x.dtype
        grad, x = _up(grad), _up(x)
        unit = x * scale
        inner = grad if weight is None else grad * weight
        mean = (inner * unit).sum(dims, keepdim=True) / count
        first = ((inner - unit * mean) * scale).to(kinds[0]) if mask[0] else None
        second = None
        if mask[1] and weight is not None:
            second = _outer_sum(grad * unit, outer).to(kinds[1])
        return first, second

    return run


_register(["_fused_rms_norm.default"], _normalised(1), _rms_norm)
_register(["_fused_rms_norm_backward.default"], _normalised(2), _rms_norm_backward)


# --- losses -----------------------------------------------------------------------------------


def _nll_batch(call: OpCall) -> tuple[int, ...]:
    """The mean over a cut batch; other reductions have strategies, classes stay whole."""
    ndim = len(call.tensors[0].shape)
    mean = call.arg(3, "reduction", 1) == 1
    return tuple(dim for dim in range(ndim) if dim != 1) if mean and ndim > 1 else ()


def _nll(call: OpCall) -> Callable[..., object]:
    op = call.op

    def run(
        scores: Tensor,
        target: Tensor,
        weight: Tensor | None,
        _reduction: int,
        ignored: int,
    ) -> tuple[Tensor, Tensor]:
        loss, total = op(scores, target, weight, 2, ignored)
        return loss / total, total

    return run


_register(["nll_loss_forward.default", "nll_loss2d_forward.default"], _nll_batch, _nll)
