"""Operators that turn a dim into one value: combine the pieces' values, or keep the dim whole.

The idea: a cut of a dim that stays is kept. A cut of a dim that is reduced leaves a Partial of the
kind in which the pieces' values combine: sums sum, maxima max.

The rule: a mean is a sum divided by the number of elements of the **whole** tensor, so each piece
divides its own sum by that (a local replacement), and uneven and empty pieces are right; a mean of
means is not. A maximum has no value for an empty piece, which gives the smallest value instead.

The design not taken: Partial("avg") for means, which is wrong as soon as one piece is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, prod

import torch

from hp_dtensor.placements import Partial
from hp_dtensor.rules._labels import Dims, label_strategies
from hp_dtensor.rules._registry import (
    LocalCall,
    OpCall,
    Rule,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)
from hp_dtensor.rules.pointwise import is_inexact, linear_in, partial_kinds, uniform
from hp_dtensor.rules.view import as_dims

__all__ = ["reduced_dims", "reduction"]


def reduced_dims(call: OpCall, position: int = 1, name: str = "dim") -> tuple[int, ...]:
    """Return the dims that are reduced: the argument at *position*, all of them if it is absent."""
    ndim = len(call.tensors[0].shape)
    dims = call.arg(position, name)
    if not ndim or dims is None or dims in ([], ()) or isinstance(dims, bool):
        return tuple(range(ndim))
    return as_dims(dims, ndim)


def kept_dims(call: OpCall, dims: tuple[int, ...], result: TensorMeta) -> tuple[Dims, Dims]:
    """Return the labels of the input and of *result*, which has the reduced dims as 1 or not."""
    ndim = len(call.tensors[0].shape)
    source = list(range(ndim))
    if len(result.shape) == ndim:
        return source, [None if dim in dims else dim for dim in source]
    return source, [dim for dim in source if dim not in dims]


def reduction(
    combine: Callable[[OpCall], str | None], *, position: int = 1, name: str = "dim"
) -> Rule:
    """Return the rule of a reduction whose pieces combine as *combine* says (None: they do not).

    The reduced dims are the argument at *position*, or the keyword *name*.
    """

    def rule(call: OpCall) -> Iterator[Strategy]:
        dims = reduced_dims(call, position, name)
        source, target = kept_dims(call, dims, call.output)
        outputs: list[Dims | None] = [
            target if meta is not None else None for meta in call.outputs
        ]
        yield from label_strategies(call, [source], outputs, reduce=combine(call))

    return rule


def _always(kind: str) -> Callable[[OpCall], str | None]:
    return lambda _call: kind


def _never(_call: OpCall) -> str | None:
    return None


def _idempotent(kind: str) -> Rule:
    """Return a rule that keeps Partial(*kind*) too: extremes and products have no order."""
    base = reduction(_always(kind))

    def rule(call: OpCall) -> Iterator[Strategy]:
        yield from base(call)
        if call.tensors[0].dtype == call.output.dtype and kind in partial_kinds(call.output.dtype):
            yield uniform(call, Partial(kind))

    return rule


# --- local replacements -----------------------------------------------------------------------


def _mean_local(local: LocalCall) -> Callable[..., torch.Tensor]:
    """Divide the local sum by the number of elements of the whole tensor."""
    call = local.call
    dims = reduced_dims(call)
    count = prod(call.tensors[0].shape[dim] for dim in dims)
    local_count = prod(local.input_local_shapes[0][dim] for dim in dims)
    if local_count == count:
        return call.op
    dtype = call.output.dtype
    wide = torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype

    def run(
        tensor: torch.Tensor,
        _dim: object = None,
        keepdim: bool = False,
        **_dtype: object,
    ) -> torch.Tensor:
        return tensor.sum(list(dims), keepdim=keepdim, dtype=wide).div_(count).to(dtype)

    return run


def _extreme_local(kind: str) -> Callable[[LocalCall], Callable[..., object]]:
    """An empty piece has no extreme value, so it gives the one that never wins."""

    def localize(local: LocalCall) -> Callable[..., object]:
        call = local.call
        dims = reduced_dims(call)
        if all(local.input_local_shapes[0][dim] for dim in dims):
            return call.op
        shape = local.output_local_shapes[0] or ()
        value = _loser(call.output.dtype, kind)

        def run(tensor: torch.Tensor, *_static: object, **_kwargs: object) -> torch.Tensor:
            return tensor.new_full(shape, value)

        return run

    return localize


def _loser(dtype: torch.dtype, kind: str) -> float | bool:
    if dtype == torch.bool:
        return kind == "min"
    if is_inexact(dtype):
        return -inf if kind == "max" else inf
    info = torch.iinfo(dtype)
    return info.min if kind == "max" else info.max


def _quiet_local(local: LocalCall) -> Callable[..., object]:
    """An empty result is made, not computed: torch would warn that it has no degrees of freedom."""
    shapes = local.output_local_shapes
    if all(shape is None or prod(shape) for shape in shapes):
        return local.call.op
    dtypes = [meta.dtype for meta in local.call.outputs if meta is not None]

    def run(tensor: torch.Tensor, *_static: object, **_kwargs: object) -> object:
        made = tuple(
            tensor.new_empty(shape or (), dtype=dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        return made if len(made) > 1 else made[0]

    return run


# --- norms, of which some combine -------------------------------------------------------------


def _norm_kind(position: int) -> Callable[[OpCall], str | None]:
    """Norms that combine as they are: of order 0 and 1 by sums, of infinite order by extremes."""

    def combine(call: OpCall) -> str | None:
        order = call.arg(position, "ord" if position == 1 else "p", 2)
        if order in (0, 1):
            return "sum"
        if order == inf:
            return "max"
        return "min" if order == -inf else None

    return combine


def _norm_local(position: int) -> Callable[[LocalCall], Callable[..., object]]:
    """An empty piece has no norm of infinite order; it gives the value that never wins."""

    def localize(local: LocalCall) -> Callable[..., object]:
        call = local.call
        dims = reduced_dims(call, 2)
        order = call.arg(position, "ord", 2)
        if order not in (inf, -inf) or all(local.input_local_shapes[0][dim] for dim in dims):
            return call.op
        shape = local.output_local_shapes[0] or ()
        dtype = call.output.dtype

        def run(tensor: torch.Tensor, *_static: object, **_kwargs: object) -> torch.Tensor:
            return tensor.new_full(shape, 0.0 if order == inf else inf, dtype=dtype)

        return run

    return localize


# --- the table --------------------------------------------------------------------------------


def _linear(call: OpCall) -> Iterator[frozenset[int]]:
    return linear_in(call, [[0]])


def _named(name: str) -> list[str]:
    """Name the overloads on tensors; the packets hold others, on Python's own lists."""
    forms = ("default", "dim", "dims", "all_out", "out", "dims_out")
    return [f"{name}.{form}" for form in forms]


_sum, _product, _max, _min = (_always(kind) for kind in ("sum", "product", "max", "min"))

register_rule(
    aten_ops("sum.default", "sum.dim_IntList", "sum.IntList_out"), reduction(_sum), linear=_linear
)
register_rule(aten_ops("nansum"), reduction(_sum))
register_rule(aten_ops("linalg__powsum"), reduction(_sum, position=2))
register_rule(aten_ops("mean"), reduction(_sum), linear=_linear, local=_mean_local)
register_rule(aten_ops("count_nonzero"), reduction(_sum))
register_rule(aten_ops("prod"), _idempotent("product"))
register_rule(
    aten_ops("amax", "max.default"),
    _idempotent("max"),
    local=_extreme_local("max"),
)
register_rule(
    aten_ops("amin", "min.default"),
    _idempotent("min"),
    local=_extreme_local("min"),
)
register_rule(aten_ops(*_named("any"), "_is_any_true"), reduction(_max))
register_rule(aten_ops(*_named("all"), "_is_all_true"), reduction(_min))
register_rule(
    aten_ops("linalg_vector_norm"),
    reduction(_norm_kind(1), position=2),
    local=_norm_local(1),
)
register_rule(
    aten_ops("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"),
    reduction(_norm_kind(1), position=2),
    local=_norm_local(1),
)
register_rule(
    aten_ops(
        *("logsumexp", "argmax", "argmin", "max.dim", "min.dim", "mode", "median.dim"),
        "nanmedian.dim",
    ),
    reduction(_never),
)
register_rule(
    aten_ops("var", "std", "var_mean", "std_mean"), reduction(_never), local=_quiet_local
)
register_rule(aten_ops("kthvalue"), reduction(_never, position=2))
register_rule(aten_ops("aminmax"), reduction(_never, position=1))
register_rule(aten_ops("median.default", "nanmedian.default"), lambda _call: ())
