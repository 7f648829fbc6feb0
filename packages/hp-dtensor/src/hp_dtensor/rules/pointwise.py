"""Operators that treat each element alone: cut all tensors together, and keep sums where linear.

The idea: torch tags these operators, so one rule answers for all of them; what differs between
them is only in which arguments they are linear, and that is the table below.

The rule: a Partial stays one only where the operator is linear in it. ``P + P`` is linear in both
arguments together, ``P * R`` in each alone; ``relu(P)`` is not linear, and in ``P + 1`` the number is
added on one coordinate. An addend
that is replicated may be turned into a Partial (kept on one coordinate) at no cost, which is why
``P + R`` needs no line of its own. Results are never Partial where the dtype changes to or from
an integer, since overflow and truncation do not commute with the sum.

The design not taken: keeping Partial("max") through every monotone operator. It saves little, and
NaN and signed zeros would have to be argued for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from hp_dtensor.placements import Partial, Placement, Replicate
from hp_dtensor.rules._labels import broadcast_dims, label_strategies
from hp_dtensor.rules._registry import (
    LinearFinder,
    LocalCall,
    OpCall,
    OpRule,
    Rule,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
    register_tag_rule,
)

__all__ = [
    "elementwise",
    "is_in_place",
    "is_inexact",
    "keep_partial",
    "linear_in",
    "partial_kinds",
    "uniform",
]

REPLICATE = Replicate()


def elementwise(call: OpCall) -> Iterator[Strategy]:
    """Cut any dim of the broadcast result, in all tensors that have it at full size."""
    if _resizes_out(call):
        return
    yield from label_strategies(
        call,
        [broadcast_dims(meta) for meta in call.tensors],
        [None if meta is None else broadcast_dims(meta) for meta in call.outputs],
        reduce=None,
    )


def _resizes_out(call: OpCall) -> bool:
    """Whether an ``out=`` tensor has another shape than the result, and will be resized."""
    if not call.outputs or call.outputs[0] is None:
        return False
    shape = call.outputs[0].shape
    return any(
        isinstance(value, TensorMeta) and value.shape != shape for value in call.kwargs.values()
    )


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether *dtype* is real or complex floating point."""
    return dtype.is_floating_point or dtype.is_complex


def partial_kinds(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the ways in which addends of *dtype* may be waiting to be combined."""
    if dtype == torch.bool:
        return ("max", "min", "all")
    if dtype.is_complex:
        return ("sum", "avg", "product")
    return ("sum", "avg", "max", "min", "product") if dtype.is_floating_point else _INTEGER_KINDS


_INTEGER_KINDS = ("sum", "max", "min", "product")


def uniform(call: OpCall, placement: Placement) -> Strategy:
    """Return the strategy with *placement* for every tensor of *call*."""
    return Strategy(
        tuple(None if meta is None else placement for meta in call.outputs),
        (placement,) * len(call.tensors),
    )


def keep_partial(call: OpCall) -> Iterator[Strategy]:
    """Keep a Partial of any kind: for operators that move, copy or round elements."""
    dtypes = [meta.dtype for meta in (*call.tensors, *call.outputs) if meta is not None]
    first = dtypes[0]
    if all(dtype == first for dtype in dtypes) or all(is_inexact(dtype) for dtype in dtypes):
        for kind in partial_kinds(first):
            if all(kind in partial_kinds(dtype) for dtype in dtypes):
                yield uniform(call, Partial(kind))


def _copy(call: OpCall) -> Iterator[Strategy]:
    yield from elementwise(call)
    yield from keep_partial(call)


def _as_it_is(_local: LocalCall) -> Callable[..., object]:
    """``detach_`` acts on the graph alone, which is above all local tensors."""
    return lambda tensor: tensor


def _extreme(kind: str) -> Rule:
    """``maximum`` of two Partial("max") is one, and so for the minimum."""

    def rule(call: OpCall) -> Iterator[Strategy]:
        yield from elementwise(call)
        if len(call.tensors) > 1 and not call.output.dtype.is_complex:
            yield uniform(call, Partial(kind))

    return rule


def _negate(call: OpCall) -> Iterator[Strategy]:
    """``-max(x)`` is ``min(-x)``; not for integers, whose smallest value is its own negative."""
    yield from elementwise(call)
    if call.output.dtype.is_floating_point and not is_in_place(call):
        for kind, other in (("max", "min"), ("min", "max")):
            out = (Partial(other),) * (len(call.tensors) - 1)
            yield Strategy((Partial(other),), (Partial(kind), *out))


def is_in_place(call: OpCall) -> bool:
    """Whether the operator writes its result into its first argument, by ATen's naming rule."""
    name = packet_name(call)
    return name.startswith("__i") if name.startswith("__") else name.endswith("_")


def packet_name(call: OpCall) -> str:
    """Return the operator's name without namespace and overload: ``"add_"``."""
    return str(call.op).split(".")[1]


# --- linearity --------------------------------------------------------------------------------
# A group names the argument positions that enter linearly when taken together.


def linear_in(call: OpCall, groups: Iterable[Iterable[int]]) -> Iterator[frozenset[int]]:
    """Turn argument positions into tensor positions, and drop groups that are not linear here.

    A group is dropped if one of its arguments is a number, if the result or a member has a dtype
    in which sums do not commute with the operator, or if the result is written into a tensor
    that would not be Partial. ``out=`` tensors join each group.
    """
    places: dict[int, int] = {}
    count = 0
    for position, value in enumerate(call.args):
        if isinstance(value, TensorMeta):
            places[position] = count
            count += 1
        elif isinstance(value, list | tuple):
            count += sum(isinstance(item, TensorMeta) for item in value)
    outs = frozenset(range(count, len(call.tensors)))
    for group in groups:
        positions = tuple(group)
        if all(position in places for position in positions):
            members = frozenset(places[position] for position in positions)
            if _commutes(call, members) and (0 in members or not is_in_place(call)):
                yield members | outs


_QUOTIENTS = frozenset({"div", "true_divide"})


def _commutes(call: OpCall, members: frozenset[int]) -> bool:
    result = call.outputs[0] if call.outputs else call.tensors[0]
    if result is None or result.dtype == torch.bool:
        return False
    dtypes = [call.tensors[member].dtype for member in members]
    if packet_name(call) in _QUOTIENTS and result.dtype.is_floating_point:
        return torch.bool not in dtypes  # of integers too: the quotient is no integer
    return all(
        dtype == result.dtype or (is_inexact(dtype) and is_inexact(result.dtype))
        for dtype in dtypes
    )


BOTH, FIRST, EACH = ((0, 1),), ((0,),), ((0,), (1,))

LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    # sums and differences: both together
    "add": BOTH,
    "sub": BOTH,
    "rsub": BOTH,
    # products: each alone
    "mul": EACH,
    # one argument, possibly scaled
    "div": FIRST,
    "true_divide": FIRST,
    "ldexp": FIRST,
    "neg": FIRST,
    "deg2rad": FIRST,
    "rad2deg": FIRST,
    "_masked_scale": FIRST,
    # weighted sums
    "lerp": BOTH,
    "addcmul": ((0, 1), (0, 2)),
    "addcdiv": BOTH,
    "complex": BOTH,
    # choices that do not look at the values
    "where": ((1, 2),),
    "masked_fill": ((0, 2),),
    # gradients are linear in what comes from above
    "gelu_backward": FIRST,
    "silu_backward": FIRST,
    "sigmoid_backward": FIRST,
    "tanh_backward": FIRST,
    "logit_backward": FIRST,
    "threshold_backward": FIRST,
    "hardtanh_backward": FIRST,
    "hardswish_backward": FIRST,
    "hardsigmoid_backward": FIRST,
    "hardshrink_backward": FIRST,
    "softshrink_backward": FIRST,
    "softplus_backward": FIRST,
    "leaky_relu_backward": FIRST,
    "elu_backward": FIRST,
    "mish_backward": FIRST,
    "log_sigmoid_backward": FIRST,
    "rrelu_with_noise_backward": FIRST,
    "native_dropout_backward": FIRST,
    "_prelu_kernel_backward": FIRST,
}
"""In which argument positions an operator is linear, by the name of its packet."""


def linear_by_name(name: str) -> LinearFinder:
    """Return the linearity of the operator called *name*, in place or not."""
    groups = LINEAR.get(name) or LINEAR.get(name.rstrip("_"), ())

    def find(call: OpCall) -> Iterator[frozenset[int]]:
        if call.kwargs.get("rounding_mode") is None:
            yield from linear_in(call, groups)

    return find


def _linear(call: OpCall) -> Iterator[frozenset[int]]:
    """Linearity never depends on the value of a number, so that plans need not either."""
    yield from linear_by_name(packet_name(call))(call)


# --- filling ----------------------------------------------------------------------------------


def _fill(call: OpCall) -> Iterator[Strategy]:
    """``fill_`` and ``zero_`` write without reading, so that any placement may stay as it is."""
    yield from elementwise(call)
    extra = (REPLICATE,) * (len(call.tensors) - 1)
    for kind in partial_kinds(call.tensors[0].dtype):
        if kind != "product":
            partial = Partial(kind)
            yield Strategy((partial,) * len(call.outputs), (partial, *extra))


def _counts(local: LocalCall) -> bool:
    """Whether this coordinate is the one whose addend takes what is there once."""
    return all(
        coordinate == 0
        for placement, coordinate in zip(local.input_placements[0], local.coordinate, strict=True)
        if isinstance(placement, Partial) and placement.reduce_op == "sum"
    )


def _fill_local(local: LocalCall) -> Callable[..., object]:
    """Write the value on one coordinate of each axis that sums, and zero on the others."""
    op = local.call.op
    if _counts(local):
        return op

    def zero(tensor: torch.Tensor, *_value: object) -> torch.Tensor:
        return tensor.zero_() if is_in_place(local.call) else torch.zeros_like(tensor)

    return zero


# --- adding a number --------------------------------------------------------------------------


def _plus_number(call: OpCall) -> Iterator[Strategy]:
    """A number may be added to a sum that is still to be taken, once; to an average, everywhere."""
    yield from elementwise(call)
    if len(call.tensors) == 1 and call.tensors[0].dtype == call.output.dtype:
        for kind in ("sum", "avg"):
            if kind in partial_kinds(call.output.dtype):
                yield uniform(call, Partial(kind))


def _number_once(local: LocalCall) -> Callable[..., object]:
    """Add the number on one coordinate of each axis that sums, and zero of its type on the others."""
    op = local.call.op
    if len(local.call.tensors) > 1 or _counts(local):
        return op

    def none(tensor: torch.Tensor, number: complex, *rest: object, **named: object) -> object:
        return op(tensor, type(number)(0), *rest, **named)

    return none


# --- the table --------------------------------------------------------------------------------

# Torch does not tag these, although they look at each element alone.
_UNTAGGED = (
    *("abs_", "copysign_", "eq_", "ne_", "ge_", "gt_", "le_", "lt_", "gcd_", "lcm_"),
    *("__irshift__", "floor_divide", "floor_divide_", "heaviside_", "xlogy_", "rsub.Tensor"),
    *("hardswish", "hardswish_", "hardswish_backward", "hardtanh_backward", "gelu_", "mish_"),
    *("hardshrink_backward", "hardsigmoid_backward", "softshrink_backward", "softplus_backward"),
    *(
        "leaky_relu_backward",
        "elu_backward",
        "mish_backward",
        "threshold_",
        "polar.default",
        "complex",
    ),
    *("threshold_backward.grad_input", "rrelu_with_noise_backward", "_masked_scale"),
    *("masked_fill.Tensor", "masked_fill_", "_prelu_kernel", "_prelu_kernel_backward"),
    *("gelu_backward.grad_input", "fake_quantize_per_tensor_affine_cachemask"),
    *("log_sigmoid_forward", "log_sigmoid_backward", "special_modified_bessel_i0_"),
)

# These copy, so that a Partial of any kind stays one.
_COPIES = (
    *(
        "clone",
        "_to_copy",
        "copy_.default",
        "copy.default",
        "lift",
        "lift_fresh",
        "positive",
        "alias",
        "detach",
    ),
    *("_conj", "_conj_physical", "conj_physical", "conj_physical_", "_lazy_clone"),
    *("resolve_conj", "resolve_neg", "contiguous", "_pin_memory"),
)


def _no_strategy(_call: OpCall) -> Iterator[Strategy]:
    """``equal`` is tagged as pointwise, although its answer is one for all elements."""
    return iter(())


_PRIMS = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and"),
    *("bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "convert_element_type", "cos", "cosh"),
    *("cbrt", "digamma", "eq", "erf", "erfc", "erf_inv", "exp", "exp2", "expm1", "floor", "fmax"),
    *("fmin", "fmod", "ge", "gt", "hypot", "igamma", "igammac", "imag", "isfinite", "ldexp", "le"),
    *("lgamma", "log", "log10", "log1p", "log2", "lt", "maximum", "minimum", "ndtri", "ne"),
    *("nextafter", "pow", "real", "reciprocal", "remainder", "round", "rsqrt", "shift_left"),
    *("shift_right_arithmetic", "sign", "signbit", "sin", "sinh", "spherical_bessel_j0", "sqrt"),
    *("tan", "tanh", "trunc", "where", "zeta", "neg", "add", "sub", "mul", "div", "gcd", "frexp"),
    *("bessel_i0", "bessel_i0e", "bessel_i1", "bessel_i1e", "bessel_j0", "bessel_j1", "clone"),
    *("conj", "conj_physical", "view_of"),
)
"""Torch's primitives of one element, which carry no tag."""

register_tag_rule(torch.Tag.pointwise, OpRule(elementwise, None, _linear))
register_rule(
    [getattr(torch.ops.prims, name).default for name in _PRIMS if hasattr(torch.ops.prims, name)],
    elementwise,
    linear=_linear,
)
register_rule(aten_ops("equal"), _no_strategy)
register_rule(aten_ops(*_COPIES), _copy)
register_rule(aten_ops("detach_"), _copy, local=_as_it_is)
register_rule(aten_ops("maximum", "max.other", "max.out"), _extreme("max"))
register_rule(aten_ops("minimum", "min.other", "min.out"), _extreme("min"))
register_rule(
    aten_ops("neg.default", "neg_.default", "neg.out", "_neg_view.default"),
    _negate,
    linear=_linear,
)
register_rule(aten_ops("fill_", "zero_", "fill", "zero"), _fill, local=_fill_local)
register_rule(aten_ops(*_UNTAGGED), elementwise, linear=_linear)
register_rule(
    aten_ops(
        *("add.Scalar", "add_.Scalar", "sub.Scalar", "sub_.Scalar", "rsub.Scalar"),
        # Python's operators pass their number here.
        *("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor"),
    ),
    _plus_number,
    linear=_linear,
    local=_number_once,
)
