"""Shapes, strides and dtypes of results, for the common operators without torch's metadata kernels.

A plan needs the metadata of what an operator gives on whole tensors. Torch's meta device says it for every operator, but for
the commonest ones through kernels written in Python, the first of which imports the compiler: seconds before a program's first
step. So what is plain is said here, and the rest (``None``) is left to the meta device:

* an elementwise operator gives the broadcast shape, its dims in memory in the order of its arguments' (torch's TensorIterator
  sorts them); its dtype is what the real kernel gives for single elements, so that no promotion rule is written down twice;
* a mean has the metadata of a sum, whose kernel is not in Python;
* a concatenation, and the backward of a softmax, are two lines each.

Not taken: tables of shape functions for all operators, which torch has already, right for strides as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from hp_dtensor._torch import schema_of
from hp_dtensor.rules._registry import aten_ops
from hp_dtensor.rules.matmul import layer_gradients
from hp_dtensor.spec import contiguous_stride

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

    from hp_dtensor.rules import TensorMeta

aten = torch.ops.aten

Run = Callable[["OpOverload", Sequence["Tensor"]], object]
"""Runs an operator on the arguments of the call, with other tensors in place of the call's own."""

_MEANS = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}
_LIKE_THE_FIRST = frozenset(
    aten_ops("_softmax_backward_data.default", "_log_softmax_backward_data.default")
)


def plain_outputs(
    op: OpOverload, args: Sequence[object], run: Run, metas: Sequence[TensorMeta]
) -> object:
    """What *op* gives, as tensors on the meta device; None where the meta device itself has to say it.

    Args:
        op: the operator.
        args: its positional arguments, of which only numbers are read.
        run: runs an operator on other tensors.
        metas: the metadata of its tensors.
    """
    if not metas or any(type(size) is not int for meta in metas for size in meta.shape):
        return None
    try:
        if op in _MEANS and metas[0].dtype.is_floating_point:
            (meta,) = metas
            whole = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            return cast("Tensor", run(_MEANS[op], [whole]))
        if op is aten.cat.default:
            return _concatenated(args[1] if len(args) > 1 else 0, metas)
        if op is aten.fractional_max_pool3d_backward.default:  # which has no metadata kernel
            return torch.empty(metas[1].shape, dtype=metas[1].dtype, device="meta")
        if op is aten.linear_backward.default:  # nor has this
            source, grad, weight = (
                torch.empty(m.shape, dtype=m.dtype, device="meta") for m in metas
            )
            return layer_gradients(source, grad, weight, cast("Sequence[bool]", args[3]))
        if op in _LIKE_THE_FIRST and _is_row_major(metas[0]):
            return torch.empty(metas[0].shape, dtype=cast("torch.dtype", args[3]), device="meta")
        if torch.Tag.pointwise in op.tags:
            return _elementwise(op, run, metas)
    except (RuntimeError, IndexError, TypeError):
        pass  # the meta device words the error
    return None


def _is_row_major(meta: TensorMeta) -> bool:
    return tuple(meta.stride) == contiguous_stride(meta.shape)


def _elementwise(op: OpOverload, run: Run, metas: Sequence[TensorMeta]) -> Tensor | None:
    schema = schema_of(op)
    if (
        schema.is_mutable
        or torch.Tag.nondeterministic_seeded in op.tags
        or any(argument.name == "memory_format" for argument in schema.arguments)
    ):
        return None
    shape = torch.broadcast_shapes(*(meta.shape for meta in metas))
    single = run(op, [torch.ones((1,) * len(meta.shape), dtype=meta.dtype) for meta in metas])
    if not isinstance(single, torch.Tensor) or single.shape != (1,) * len(shape):
        return None
    stride = _stride_of_result(shape, metas)
    return torch.empty_strided(shape, stride, dtype=single.dtype, device="meta")


def _stride_of_result(shape: torch.Size, metas: Sequence[TensorMeta]) -> tuple[int, ...]:
    """How an elementwise operator lays out its result: dense, with the dims in the order that the arguments have them.

    The first argument that has strides on both of two dims decides which of these is the outer one.
    """
    if all(_is_row_major(meta) for meta in metas):
        return contiguous_stride(shape)
    strides = []
    for meta in metas:
        missing = len(shape) - len(meta.shape)
        own = [
            0 if size == 1 != whole else step
            for size, whole, step in zip(meta.shape, shape[missing:], meta.stride, strict=True)
        ]
        strides.append([0] * missing + own)

    def compare(one: int, other: int) -> int:
        for steps in strides:
            if steps[one] and steps[other]:
                if steps[one] != steps[other]:
                    return 1 if steps[one] > steps[other] else -1
                if shape[one] > shape[other]:
                    return 1
        return 0

    order = list(reversed(range(len(shape))))  # the innermost dim first
    for last in range(1, len(order)):
        here = last
        for before in reversed(range(last)):
            found = compare(order[before], order[here])
            if found > 0:
                order[before], order[here] = order[here], order[before]
                here = before
            elif found < 0:
                break
    out, step = [0] * len(shape), 1
    for dim in order:
        out[dim] = step
        step *= max(shape[dim], 1)
    return tuple(out)


def _concatenated(dim: object, metas: Sequence[TensorMeta]) -> Tensor | None:
    first = metas[0]
    if type(dim) is not int or not -len(first.shape) <= dim < len(first.shape):
        return None
    dim %= len(first.shape)
    others = {(meta.dtype, *meta.shape[:dim], None, *meta.shape[dim + 1 :]) for meta in metas}
    channels_last = any(len(meta.shape) > 3 and meta.stride[1] == 1 for meta in metas)
    if len(others) > 1 or channels_last or any(not math.prod(meta.shape) for meta in metas):
        return None
    shape = list(first.shape)
    shape[dim] = sum(meta.shape[dim] for meta in metas)
    return torch.empty(shape, dtype=first.dtype, device="meta")
