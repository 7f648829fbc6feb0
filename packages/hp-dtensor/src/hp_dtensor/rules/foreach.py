"""Operators over lists of tensors, and fused optimizer steps: one element-wise call per position.

The idea: the tensors at one position of the lists belong together (a parameter, its gradient and
its moments), those of different positions do not. Each position is asked about alone, as an
element-wise call, and the reader runs the operator once on all local pieces.

The rule: tensors of one element (step counts, learning rates, scales) are broadcast. An update in
place never changes the layout of what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator

from hp_dtensor.rules._registry import OpCall, Strategy, aten_ops, register_rule
from hp_dtensor.rules.pointwise import elementwise, linear_by_name, packet_name

__all__: list[str] = []

_UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1"),
    *("floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round"),
    *("rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "zero"),
)
_BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_max", "clamp_min")
_TERNARY = ("addcdiv", "addcmul", "lerp")
_COPIES = ("copy", "clone")

_FUSED = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")


def _linear(call: OpCall) -> Iterator[frozenset[int]]:
    name = packet_name(call).removeprefix("_foreach_")
    yield from linear_by_name(name)(call)


def _foreach(call: OpCall) -> Iterator[Strategy]:
    return elementwise(call)


register_rule(
    aten_ops(
        *(
            f"_foreach_{name}{suffix}"
            for name in (*_UNARY, *_BINARY, *_TERNARY, *_COPIES)
            for suffix in ("", "_")
        )
    ),
    _foreach,
    linear=_linear,
    zipped=True,
)
register_rule(aten_ops(*_FUSED, *(f"{name}_" for name in _FUSED)), _foreach, zipped=True)
