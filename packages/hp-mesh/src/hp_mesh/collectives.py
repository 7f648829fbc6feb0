"""Collectives on plain tensors: a tensor in, a new tensor out, traceable, without autograd.

Each function is one of torch's functional collectives plus what makes it total: any stride, any
dtype, no elements, a group of one. A backend that lacks a dtype or an operation gets an exact
equivalent: data travels as a dtype of the same width, bools reduce as bytes, an average is a sum
divided. The in-place collectives of `torch.distributed` were not taken, since a compiler cannot
move or overlap them.

The rule of aliasing: with a group of one the result is the argument; otherwise it is new memory.
Gradients are the caller's: call these inside an autograd Function, or without grad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import _torch

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "wait",
]

_torch.load_functional()

ReduceOp = Literal["sum", "avg", "max", "min", "product"]
"""How values of several ranks become one."""

_OPS = ("sum", "avg", "max", "min", "product")

_NATIVE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
"""What every backend carries and reduces."""

_SAME_WIDTH = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""What data of another dtype travels as; only its width counts."""

_REDUCED_AS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""Where integers that no backend reduces are reduced; wrapping round is the same there."""

_BOOL_OPS = {"sum": "max", "max": "max", "product": "min", "min": "min"}
"""Bools add as ``or`` and multiply as ``and``, as in torch."""


def all_reduce(
    tensor: Tensor, op: ReduceOp, group: ProcessGroup, *, async_op: bool = False
) -> Tensor:
    """Return the reduction of every rank's *tensor*.

    Bools reduce as logic (``sum`` is or, ``product`` is and), an integer ``avg`` is truncated.

    Args:
        tensor: of the same shape and dtype on every rank.
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``.
        group: the ranks that take part.
        async_op: return at once; the first use of the result waits.

    Raises:
        ValueError: if *op* is none of these.
        TypeError: if *op* has no meaning for the dtype: an average of bools, an order of complex.

    Example:
        >>> from hp_mesh.testing import run_spmd
        >>> import torch.distributed as dist
        >>> def body():
        ...     x = torch.tensor([1.0, dist.get_rank()])
        ...     return all_reduce(x, "sum", dist.group.WORLD).tolist()
        >>> run_spmd(body, world_size=2)
        [[2.0, 1.0], [2.0, 1.0]]
    """
    size = group.size()
    if size == 1:
        return tensor
    if tensor.dtype in _NATIVE and op in {"sum", "max", "min", "product"}:
        if tensor.numel() == 0:
            return tensor.clone()
        return _finish(_torch.all_reduce(tensor, op, _torch.group_name(group)), async_op)
    return _reduce_otherwise(all_reduce, tensor, op, group, async_op=async_op)


def all_gather(tensor: Tensor, group: ProcessGroup, *, async_op: bool = False) -> Tensor:
    """Return every rank's *tensor* concatenated along dim 0, in group-rank order.

    Args:
        tensor: of the same shape and dtype on every rank, at least 1-d.
        group: the ranks that take part.
        async_op: return at once; the first use of the result waits.

    Returns:
        A tensor whose dim 0 is the group's size times as long.
    """
    size = group.size()
    if size == 1:
        return tensor
    if tensor.numel() == 0:
        return tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
    carrier = _carrier(tensor)
    out = _torch.all_gather(carrier, size, _torch.group_name(group))
    return _restore(_finish(out, async_op), tensor.dtype)


def reduce_scatter(
    tensor: Tensor, op: ReduceOp, group: ProcessGroup, *, async_op: bool = False
) -> Tensor:
    """Return this rank's piece, along dim 0, of the reduction of every rank's *tensor*.

    Args:
        tensor: of the same shape and dtype on every rank; the group's size divides dim 0.
        op: as in `all_reduce`.
        group: the ranks that take part.
        async_op: return at once; the first use of the result waits.

    Raises:
        ValueError: if *op* is unknown or the group's size does not divide dim 0.
        TypeError: as in `all_reduce`.
    """
    size = group.size()
    if size == 1:
        return tensor
    if tensor.shape[0] % size != 0:
        message = (
            f"reduce_scatter over {size} ranks of dim 0 of size {tensor.shape[0]}, which {size} "
            "does not divide; pad the tensor"
        )
        raise ValueError(message)
    if tensor.dtype in _NATIVE and op in {"sum", "max", "min", "product"}:
        if tensor.numel() == 0:
            return tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
        source = tensor.contiguous()
        out = _torch.reduce_scatter(source, op, size, _torch.group_name(group))
        return _finish(out, async_op)
    return _reduce_otherwise(reduce_scatter, tensor, op, group, async_op=async_op)


def all_to_all(
    tensor: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: ProcessGroup,
    *,
    async_op: bool = False,
) -> Tensor:
    """Send piece *i* of dim 0 to rank *i*, and return what the ranks sent here, concatenated.

    Args:
        tensor: at least 1-d; dim 0 is the sum of *input_splits*, the others agree on all ranks.
        output_splits: how much of dim 0 comes from each rank; zeros are fine.
        input_splits: how much of dim 0 goes to each rank; zeros are fine.
        group: the ranks that take part.
        async_op: return at once; the first use of the result waits.
    """
    if group.size() == 1:
        return tensor
    carrier = _carrier(tensor)
    out = _torch.all_to_all(
        carrier, list(output_splits), list(input_splits), _torch.group_name(group)
    )
    return _restore(_finish(out, async_op), tensor.dtype)


def broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """Return the *tensor* of group rank *source*.

    Args:
        tensor: of the same shape and dtype on every rank; only the source's values matter.
        source: a rank within the group.
        group: the ranks that take part.
    """
    if group.size() == 1:
        return tensor
    if tensor.numel() == 0:
        return tensor.clone()
    out = _torch.broadcast(_carrier(tensor), source, _torch.group_name(group))
    return _restore(_torch.wait_tensor(out), tensor.dtype)


def wait(tensor: Tensor) -> Tensor:
    """Return the finished plain tensor behind the result of a collective with ``async_op=True``.

    Any other tensor is returned as it is.
    """
    return _torch.waited(tensor)


class _Reduction(Protocol):
    """`all_reduce` or `reduce_scatter`."""

    def __call__(
        self, tensor: Tensor, op: ReduceOp, group: ProcessGroup, *, async_op: bool = False
    ) -> Tensor: ...


def _finish(out: Tensor, async_op: bool) -> Tensor:
    waited: Tensor = _torch.lazily_waited(out) if async_op else _torch.wait_tensor(out)
    return waited


def _carrier(tensor: Tensor) -> Tensor:
    """Return the same bits, contiguous, as a dtype that every backend moves; dim 0 is kept."""
    if tensor.dtype in _NATIVE:
        return tensor.contiguous()
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj().resolve_neg().contiguous())
    return tensor.contiguous().view(_SAME_WIDTH[tensor.dtype.itemsize])


def _restore(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `_carrier`."""
    if tensor.dtype == dtype:
        return tensor
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)


def _reduce_otherwise(
    reduce: _Reduction, tensor: Tensor, op: ReduceOp, group: ProcessGroup, *, async_op: bool
) -> Tensor:
    """Reduce what no backend reduces, by something that every backend does."""
    _check(op, tensor.dtype)
    dtype = tensor.dtype
    if dtype == torch.bool:
        logic: ReduceOp = _BOOL_OPS[op]  # type: ignore[assignment]  # the keys are checked
        out = reduce(tensor.view(torch.uint8), logic, group, async_op=async_op)
        return out.view(torch.bool)
    if dtype.is_floating_point and dtype not in _NATIVE:  # eight bits and less
        return reduce(tensor.to(torch.float32), op, group).to(dtype)
    if dtype in _REDUCED_AS:
        return reduce(tensor.to(_REDUCED_AS[dtype]), op, group).to(dtype)
    if op == "avg":
        total = reduce(tensor, "sum", group)
        if dtype.is_floating_point or dtype.is_complex:
            return total / group.size()
        return torch.div(total, group.size(), rounding_mode="trunc")
    if dtype.is_complex and op == "product":
        return _multiply_complex(reduce is reduce_scatter, tensor, group)
    real = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return torch.view_as_complex(reduce(real, op, group, async_op=async_op))


def _multiply_complex(scatter: bool, tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Multiply complex values: gathered, since real and imaginary part are not separate."""
    size = group.size()
    if not scatter:
        return all_gather(tensor[None], group).prod(0)
    pieces = [tensor.shape[0] // size] * size
    mine = all_to_all(tensor, pieces, pieces, group)
    return mine.reshape(size, pieces[0], *tensor.shape[1:]).prod(0)


def _check(op: str, dtype: torch.dtype) -> None:
    if op not in _OPS:
        message = f"reduction {op!r} is unknown; it is one of {', '.join(_OPS)}"
        raise ValueError(message)
    if dtype == torch.bool and op == "avg":
        message = "bools have no average; convert them to a floating dtype first"
        raise TypeError(message)
    if dtype == torch.uint64 and op in {"max", "min", "avg"}:
        message = f"{op!r} of torch.uint64 exists on no backend; convert to torch.int64 first"
        raise TypeError(message)
    if dtype.is_complex and op in {"max", "min"}:
        message = f"complex numbers have no order, so no {op!r}; reduce a real tensor"
        raise TypeError(message)
