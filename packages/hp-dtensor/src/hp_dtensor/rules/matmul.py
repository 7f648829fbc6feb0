"""Products of matrices: cut the rows, the columns or what is summed over.

The idea: a product is written as labels (``ik,kj->ij``); a label that only the factors carry is
summed over, and cutting it leaves the product a Partial.

The rule: a product is linear in each factor, so one Partial factor beside a whole one is kept; two
are not. What is added to a product (the bias of ``addmm``) is an addend: where the product is a
Partial, the bias becomes one too, at no cost, and counts once.

The design not taken: reducing a Partial factor first. In ``(P @ W)`` the product is often smaller
than P, and its sum may be fused with what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hp_dtensor.placements import Partial, Placement, Replicate
from hp_dtensor.rules._labels import Dims, broadcast_dims, label_strategies
from hp_dtensor.rules._registry import (
    LinearFinder,
    LocalCall,
    OpCall,
    Rule,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)
from hp_dtensor.rules.pointwise import is_in_place, linear_in

__all__ = ["layer_gradients", "product"]

REPLICATE: Placement = Replicate()


def product(equation: str, addend: str | None = None) -> Rule:
    """Return the rule of the product *equation* (``"ik,kj->ij"``) of the last two tensors.

    Args:
        equation: The labels of both factors and of the result.
        addend: Labels of the tensor that comes before the factors and is added to the product,
            broadcast to it.
    """
    factors, _, result = equation.partition("->")
    left, _, right = factors.partition(",")

    def rule(call: OpCall) -> Iterator[Strategy]:
        if is_in_place(call) and call.tensors[0].shape != call.output.shape:
            return  # torch resizes such a tensor, which a piece of another one must not be
        inputs: list[Dims] = [left, right]
        if addend is not None:
            inputs.insert(0, addend[len(addend) - len(call.tensors[0].shape) :])
        yield from label_strategies(
            call,
            inputs,
            [result],
            labels=dict.fromkeys(result + left),
            addends=() if addend is None else (0,),
        )

    return rule


def _groups(*groups: Sequence[int]) -> LinearFinder:
    def find(call: OpCall) -> Iterable[frozenset[int]]:
        return linear_in(call, groups)

    return find


def _spread_addend(local: LocalCall) -> Callable[..., object]:
    """Broadcast the addend first: the kernel of ``addmv`` takes an addend of one row as the size of the result."""
    op = local.call.op
    shape = local.output_local_shapes[0] or ()
    if local.input_local_shapes[0] == shape or is_in_place(local.call):
        return op

    def run(addend: torch.Tensor, *args: object, **kwargs: object) -> object:
        return op(addend.expand(shape), *args, **kwargs)

    return run


FACTORS = _groups([0], [1])
WITH_ADDEND = _groups([0, 1], [0, 2])

register_rule(aten_ops("mm", "_int_mm"), product("ik,kj->ij"), linear=FACTORS)
register_rule(aten_ops("bmm"), product("bik,bkj->bij"), linear=FACTORS)
register_rule(aten_ops("mv"), product("ik,k->i"), linear=FACTORS)
register_rule(aten_ops("dot", "vdot"), product("k,k->"), linear=FACTORS)
register_rule(aten_ops("outer", "ger"), product("i,j->ij"), linear=FACTORS)
for _names, _equation, _addend in (
    (("addmm", "addmm_"), "ik,kj->ij", "ij"),
    (("baddbmm", "baddbmm_"), "bik,bkj->bij", "bij"),
    (("addbmm", "addbmm_"), "bik,bkj->ij", "ij"),
    (("addmv", "addmv_"), "ik,k->i", "i"),
    (("addr", "addr_"), "i,j->ij", "ij"),
):
    register_rule(
        aten_ops(*_names),
        product(_equation, _addend),
        linear=WITH_ADDEND,
        local=_spread_addend if "addmv" in _names else None,
    )


# --- linear and matmul, where they arrive undecomposed ----------------------------------------


def _linear(call: OpCall) -> Iterator[Strategy]:
    """``x @ w.T + b`` with any number of leading dims in x."""
    source, weight = call.tensors[0], call.tensors[1]
    lead = [("lead", dim) for dim in range(len(source.shape) - 1)]
    rows: list[str] = ["o"] if len(weight.shape) == 2 else []
    result: Dims = [*lead, *rows]
    inputs: list[Dims] = [[*lead, "k"], [*rows, "k"]]
    inputs += [result[len(result) - len(bias.shape) :] for bias in call.tensors[2:]]
    yield from label_strategies(call, inputs, [result], addends=(2,))


def _linear_groups(call: OpCall) -> Iterable[frozenset[int]]:
    bias = [2] if len(call.tensors) > 2 else []
    return linear_in(call, [[0, *bias], [1, *bias]])


def _linear_backward(call: OpCall) -> Iterator[Strategy]:
    """``(input, grad, weight, wanted) -> (grad of input, of weight, of bias)``.

    The gradient of the input needs no input, and that of the weight no weight: what is not read stays as it is.
    """
    lead = [("lead", dim) for dim in range(len(call.tensors[0].shape) - 1)]
    inputs: list[Dims] = [[*lead, "k"], [*lead, "o"], ["o", "k"]]
    results: list[Dims | Placement] = [[*lead, "k"], ["o", "k"], ["o"]]
    unread = [at for at, result in ((0, 1), (2, 0)) if call.outputs[result] is None]
    for at in unread:
        inputs[at] = [None] * len(inputs[at])

    def strategies() -> Iterator[Strategy]:
        yield from label_strategies(call, inputs, results, labels=[*lead, "o"])
        yield from label_strategies(call, inputs, [*results[:2], REPLICATE], labels=["k"])
        for kind in (Partial("sum"), Partial("avg")):
            for factor, products in ((0, {1}), (1, {0, 1, 2}), (2, {0})):
                given = [REPLICATE] * 3
                given[factor] = kind
                made = [
                    None if meta is None else kind if at in products else REPLICATE
                    for at, meta in enumerate(call.outputs)
                ]
                yield Strategy(tuple(made), tuple(given))

    for strategy in strategies():
        given = list(strategy.inputs)
        for at in unread if call.present else ():
            given[at] = call.present[at]
        yield replace(strategy, inputs=tuple(given))


def _layer_gradients(_: LocalCall) -> Callable[..., object]:
    return layer_gradients


def layer_gradients(
    source: Tensor, grad: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """What ``aten::linear_backward`` gives, which torch has no kernel of for dense tensors."""
    if grad.is_complex():
        source, weight = source.conj(), weight.conj()
    flat = grad.dim() == 2
    rows = grad if flat else grad.flatten(0, -2)
    return (
        torch.matmul(grad, weight) if wanted[0] else None,
        torch.mm(rows.t(), source if flat else source.flatten(0, -2)) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _matmul(call: OpCall) -> Iterator[Strategy]:
    left, right = call.tensors[0], call.tensors[1]
    yield from label_strategies(
        call,
        [_factor(left, "i", "k"), _factor(right, "j", "k", transposed=True)],
        [_product_dims(left, right)],
    )


def _factor(meta: TensorMeta, own: str, summed: str, *, transposed: bool = False) -> Dims:
    if len(meta.shape) == 1:
        return [summed]
    tail = [summed, own] if transposed else [own, summed]
    return [*broadcast_dims(meta)[:-2], *tail]


def _product_dims(left: TensorMeta, right: TensorMeta) -> Dims:
    batch = max(broadcast_dims(left)[:-2], broadcast_dims(right)[:-2], key=len)
    rows = ["i"] if len(left.shape) > 1 else []
    columns = ["j"] if len(right.shape) > 1 else []
    return [*batch, *rows, *columns]


# Labels of both factors and the result by their numbers of dims, and which may be cut: offsets
# cut a dim into groups, which stays whole.
_GROUPED = {
    (2, 3): (" k", "gkj", " j", "jk"),
    (3, 2): ("gik", "k ", "i ", "ik"),
    (2, 2): ("i ", " j", "gij", "ij"),
    (3, 3): ("gik", "gkj", "gij", "gijk"),
}


def _grouped(call: OpCall) -> Iterator[Strategy]:
    """``_grouped_mm(self, mat2, offs, bias, out_dtype)``, whose rows must be aligned to 16 bytes."""
    left, right = call.tensors[0], call.tensors[1]
    form = _GROUPED.get((len(left.shape), len(right.shape)))
    if form is None or call.arg(3, "bias") is not None:
        return
    first, second, result, labels = form
    sizes = dict(zip(first + second, left.shape + right.shape, strict=True))
    unit = 16 // left.dtype.itemsize * call.axis_size

    def dims(names: str) -> Dims:
        return [None if name == " " else name for name in names]

    yield from label_strategies(
        call,
        [dims(first), dims(second), *([None] for _ in call.tensors[2:])],
        [dims(result)],
        labels=[name for name in labels if name in "gi" or not sizes[name] % unit],
        empty=False,
    )


def _scaled(call: OpCall) -> Iterator[Strategy]:
    """``_scaled_mm(self, mat2, scale_a, scale_b, bias)``: eight bits a factor, and scales for all or for each row.

    What is summed over stays whole: the kernel rounds its result, which would then be rounded before the sum.
    """
    left, right = call.tensors[:2]

    def dims(meta: TensorMeta) -> Dims:
        if meta.shape == (left.shape[0], 1):
            return ["i", None]
        if meta.shape == (1, right.shape[1]):
            return [None, "j"]
        return ["j"] if meta.shape == (right.shape[1],) else [None] * len(meta.shape)

    others = call.tensors[2:]
    if all(meta.numel == 1 or None not in dims(meta) or "i" in dims(meta) for meta in others):
        yield from label_strategies(
            call,
            [["i", None], [None, "j"], *map(dims, others)],
            [["i", "j"]],
            reduce=None,
            empty=False,
        )


register_rule(aten_ops("_grouped_mm.default"), _grouped, linear=FACTORS)
register_rule(aten_ops("_scaled_mm.default"), _scaled)
register_rule(aten_ops("linear"), _linear, linear=_linear_groups)
register_rule(aten_ops("linear_backward.default"), _linear_backward, local=_layer_gradients)
register_rule(aten_ops("matmul"), _matmul, linear=FACTORS)
