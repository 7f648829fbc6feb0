"""Collectives against a gather of objects and a reduction on one device, for every dtype."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hp_mesh import collectives
from hp_mesh.testing import spmd
from torch import Tensor
from torch.distributed import ProcessGroup

_FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
_INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
_WIDE = [torch.uint16, torch.uint32, torch.uint64]
_COMPLEX = [torch.complex64, torch.complex128]
_ALL = [*_FLOATS, *_INTEGERS, *_WIDE, *_COMPLEX, torch.bool]
_OPS: list[collectives.ReduceOp] = ["sum", "avg", "max", "min", "product"]
_SHAPES = [(4,), (4, 3), (8, 1, 2), (0, 3), (4, 0)]


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers of both signs, so that every reduction is exact."""
    generator = torch.Generator().manual_seed(17 * rank + len(shape))
    low = 0 if dtype in {torch.uint8, *_WIDE, torch.bool} else -2
    values = torch.randint(low, 2, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), values.flip(-1).double()).to(dtype)
    return values.to(dtype)


def _oracle(op: str, tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        stack = torch.stack(tensors)
        return stack.any(0) if op in {"sum", "max"} else stack.all(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stack = torch.stack([t.to(wide) for t in tensors])
    result = {
        "sum": lambda: stack.sum(0),
        "avg": lambda: stack.mean(0),
        "max": lambda: stack.amax(0),
        "min": lambda: stack.amin(0),
        "product": lambda: stack.prod(0),
    }[op]()
    if op == "avg" and not (dtype.is_complex or dtype.is_floating_point):
        result = result.trunc()
    return result.to(dtype)


def _same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    exact = torch.complex128 if want.dtype.is_complex else torch.float64
    assert torch.equal(got.to(exact), want.to(exact))


def _legal(op: str, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return op not in {"max", "min"}
    if dtype == torch.bool:
        return op != "avg"
    return dtype != torch.uint64 or op in {"sum", "product"}


@spmd(world_size=4)
def test_all_reduce_equals_the_reduction_on_one_device() -> None:
    """Every operation, dtype and shape, waited or lazily waited."""
    cases = itertools.product(_OPS, _ALL, _SHAPES, (False, True))
    for op, dtype, shape, async_op in cases:
        if _legal(op, dtype):
            pieces = [_of_rank(r, shape, dtype) for r in range(4)]
            mine = pieces[dist.get_rank()].clone()
            got = collectives.all_reduce(mine, op, _world(), async_op=async_op)
            _same(collectives.wait(got), _oracle(op, pieces, dtype))
            _same(mine, pieces[dist.get_rank()])


@spmd(world_size=4)
def test_reduce_scatter_equals_a_slice_of_the_reduction() -> None:
    """Every operation, dtype and shape, waited or lazily waited."""
    cases = itertools.product(_OPS, _ALL, _SHAPES, (False, True))
    for op, dtype, shape, async_op in cases:
        if _legal(op, dtype):
            pieces = [_of_rank(r, shape, dtype) for r in range(4)]
            mine = pieces[dist.get_rank()]
            got = collectives.reduce_scatter(mine, op, _world(), async_op=async_op)
            length = shape[0] // 4
            start = dist.get_rank() * length
            want = _oracle(op, pieces, dtype)[start : start + length]
            _same(collectives.wait(got), want)


@spmd(world_size=4)
def test_all_gather_and_broadcast_move_every_dtype() -> None:
    """Gathered in rank order; broadcast of any source."""
    for dtype, shape, async_op in itertools.product(_ALL, _SHAPES, (False, True)):
        pieces = [_of_rank(r, shape, dtype) for r in range(4)]
        mine = pieces[dist.get_rank()]
        got = collectives.all_gather(mine, _world(), async_op=async_op)
        _same(collectives.wait(got), torch.cat([p.view_as(p) for p in pieces]))
        _same(collectives.broadcast(mine, 2, _world()), pieces[2])


@spmd(world_size=4)
def test_all_to_all_moves_uneven_and_empty_pieces() -> None:
    """Rank r sends (r + i) % 3 rows to rank i; the oracle cuts the tensors of all ranks."""
    rank = dist.get_rank()
    splits = [[(r + i) % 3 for i in range(4)] for r in range(4)]
    for dtype, async_op in itertools.product(_ALL, (False, True)):
        sent = [_of_rank(r, (sum(splits[r]), 2), dtype) for r in range(4)]
        incoming = [splits[r][rank] for r in range(4)]
        group = _world()
        got = collectives.all_to_all(sent[rank], incoming, splits[rank], group, async_op=async_op)
        want = torch.cat([torch.split(sent[r], splits[r])[rank] for r in range(4)])
        _same(collectives.wait(got), want)


@spmd(world_size=2)
def test_strides_do_not_matter() -> None:
    """Transposed, expanded, conjugated and offset inputs give what their copies give."""
    base = torch.arange(24.0).reshape(4, 6) + 100 * dist.get_rank()
    spiral = torch.complex(base, -base)
    for x in (base.t(), base[:, ::2], base[:1].expand(4, 6), base[2:], spiral.conj(), spiral.mT):
        dense = x.resolve_conj().clone(memory_format=torch.contiguous_format)
        rows = [x.shape[0] // 2] * 2
        calls: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda t: collectives.all_reduce(t, "sum", _world()),
            lambda t: collectives.all_gather(t, _world()),
            lambda t: collectives.reduce_scatter(t, "sum", _world()),
            lambda t: collectives.all_to_all(t, rows, rows, _world()),  # noqa: B023
            lambda t: collectives.broadcast(t, 1, _world()),
        )
        for call in calls:
            _same(call(x), call(dense))


@spmd(world_size=2)
def test_a_group_of_one_does_not_communicate() -> None:
    """The result is the argument, and the group is never asked for more than its size."""
    alone: ProcessGroup | None = None
    for rank in range(2):
        group = dist.new_group([rank])
        if rank == dist.get_rank():
            assert isinstance(group, ProcessGroup)
            alone = group
    assert alone is not None
    x = torch.ones(3)
    assert collectives.all_reduce(x, "product", alone) is x
    assert collectives.all_gather(x, alone) is x
    assert collectives.reduce_scatter(x, "avg", alone) is x
    assert collectives.all_to_all(x, [3], [3], alone) is x
    assert collectives.broadcast(x, 0, alone) is x


@spmd(world_size=2)
def test_lazy_results_may_be_dropped_saved_and_used() -> None:
    """Dropped unwaited, saved for backward, and passed to any op."""
    x = torch.ones(1000)
    for _ in range(20):
        collectives.all_reduce(x, "sum", _world(), async_op=True)
    weight = torch.ones(1000, requires_grad=True)
    lazy = collectives.all_gather(x, _world(), async_op=True)[:1000]
    (gradient,) = torch.autograd.grad((weight * lazy).sum(), weight)
    assert torch.equal(gradient, x)
    assert torch.equal(torch.cat([lazy, lazy]), torch.ones(2000))
    assert collectives.wait(x) is x


@spmd(world_size=2)
def test_the_collectives_trace_into_one_graph() -> None:
    """No graph break, and the numbers of eager mode."""
    rank = dist.get_rank()
    sent = [[1, 3], [3, 1]]
    received = [sent[r][rank] for r in range(2)]

    def program(x: Tensor) -> Tensor:
        y = collectives.all_reduce(x, "avg", _world())
        y = collectives.all_gather(y, _world(), async_op=True) * 2
        y = collectives.reduce_scatter(y, "max", _world())
        y = collectives.all_to_all(y, received, sent[rank], _world())
        return collectives.all_reduce(y > rank, "product", _world())

    x = torch.arange(8.0).reshape(4, 2) * (1 + rank)
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), program(x))


@spmd(world_size=2)
def test_a_fake_tensor_passes_with_the_right_shape() -> None:
    """Shapes are those of the real call; nothing is sent."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = torch.empty(4, 3, dtype=torch.bool)
        assert collectives.all_gather(x, _world()).shape == (8, 3)
        assert collectives.reduce_scatter(x, "max", _world()).shape == (2, 3)
        assert collectives.all_to_all(x, [3, 4], [1, 3], _world()).shape == (7, 3)
        assert collectives.all_reduce(x, "sum", _world(), async_op=True).dtype == torch.bool


@pytest.mark.parametrize(
    ("op", "dtype", "error", "text"),
    [
        ("mean", torch.float32, ValueError, "reduction 'mean' is unknown; it is one of sum, avg"),
        ("avg", torch.bool, TypeError, "bools have no average; convert"),
        ("max", torch.complex64, TypeError, "complex numbers have no order, so no 'max'"),
        ("min", torch.uint64, TypeError, "'min' of torch.uint64 exists on no backend"),
    ],
)
@spmd(world_size=2)
def test_reductions_without_a_meaning_are_refused(
    op: collectives.ReduceOp, dtype: torch.dtype, error: type[Exception], text: str
) -> None:
    """Both reducing collectives say so on every rank, before they communicate."""
    x = torch.ones(2).to(dtype)
    with pytest.raises(error, match=re.escape(text)):
        collectives.all_reduce(x, op, _world())
    with pytest.raises(error, match=re.escape(text)):
        collectives.reduce_scatter(x, op, _world())


@spmd(world_size=2)
def test_reduce_scatter_refuses_what_it_cannot_cut() -> None:
    """The size and the remedy are named."""
    with pytest.raises(ValueError, match=r"over 2 ranks of dim 0 of size 3.*pad the tensor"):
        collectives.reduce_scatter(torch.ones(3), "sum", _world())
