"""Redistribution of plain local tensors against gather-then-slice; every pair of layouts is in ``test_every_pair``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.distributed as dist
from hp_dtensor.redistribute import redistribute_tensor
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_R = Replicate()
_REDUCTIONS = ("sum", "avg", "max", "min", "product", "all")
Placements = tuple[Placement, ...]


def _chunks(x: Tensor, n: int, dim: int) -> list[Tensor]:
    pieces = list(torch.chunk(x, n, dim))
    return pieces + [x.narrow(dim, 0, 0)] * (n - len(pieces))


def _shard(
    whole: Tensor, placements: Placements, mesh: tuple[int, ...], where: tuple[int, ...]
) -> Tensor:
    """The oracle's own cutting, by torch.chunk of real tensors."""
    for n, c, placement in zip(mesh, where, placements, strict=True):
        if isinstance(placement, StridedShard):
            chunks = _chunks(whole, int(placement.split_factor), placement.dim)
            whole = torch.cat([_chunks(x, n, placement.dim)[c] for x in chunks], placement.dim)
        elif isinstance(placement, Shard):
            whole = _chunks(whole, n, placement.dim)[c]
    return whole.contiguous()


def _partial_axes(placements: Placements) -> list[int]:
    return [axis for axis, placement in enumerate(placements) if placement.is_partial()]


def _op(placements: Placements) -> str:
    return next((p.reduce_op for p in placements if isinstance(p, Partial)), "")


def _addend(
    shape: tuple[int, ...], dtype: torch.dtype, placements: Placements, where: tuple[int, ...]
) -> Tensor:
    """What a coordinate adds: it differs along Partial axes and nowhere else; whole numbers, both signs."""
    seed = sum((where[axis] + 1) * 10**axis for axis in _partial_axes(placements))
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in {torch.bool, torch.uint8} else -2
    values = torch.randint(low, 3, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), -values.double()).to(dtype)
    return values.to(dtype)


def _reduced(
    shape: tuple[int, ...], dtype: torch.dtype, placements: Placements, mesh: tuple[int, ...]
) -> Tensor:
    """The whole value of the layout."""
    axes = _partial_axes(placements)
    addends = []
    for there in itertools.product(*(range(mesh[axis]) for axis in axes)):
        where = [0] * len(mesh)
        for axis, c in zip(axes, there, strict=True):
            where[axis] = c
        addends.append(_addend(shape, dtype, placements, tuple(where)))
    return _combine(addends, _op(placements) if axes else "max")


def _combine(addends: list[Tensor], op: str) -> Tensor:
    stack = torch.stack(addends)
    dtype = stack.dtype
    if op == "all" or (dtype == torch.bool and op in {"min", "product"}):
        return (stack != 0).all(0).to(dtype)
    if dtype == torch.bool:
        return stack.any(0)
    if op in {"max", "min"} and len(addends) == 1:
        return addends[0]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stack = stack.to(wide)
    result = {
        "sum": lambda: stack.sum(0),
        "avg": lambda: stack.mean(0),
        "max": lambda: stack.amax(0),
        "min": lambda: stack.amin(0),
        "product": lambda: stack.prod(0),
    }[op]()
    return result.to(dtype)


def _check(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    source: Placements,
    target: Placements,
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """Redistribute and compare; the text of the failure, or None."""
    where = mesh.get_coordinate()
    assert where is not None
    whole_of_this_addend = _addend(shape, dtype, source, tuple(where))
    local = _shard(whole_of_this_addend, source, tuple(mesh.shape), tuple(where))
    before = local.clone()
    got = redistribute_tensor(local, mesh, shape, source, target)
    want = _reduced(shape, dtype, source, tuple(mesh.shape))
    if "all" in {_op(source), _op(target)}:  # what is left of a value is whether it is zero
        want = (want != 0).to(dtype)
    kept = [a for a in _partial_axes(target) if mesh.shape[a] > 1]
    if kept:  # addends are compared after the oracle combined them
        got = _combined_along(got, mesh, target)
    want = _shard(want, target, tuple(mesh.shape), tuple(where))
    case = f"{dtype} {shape} on {tuple(mesh.shape)}: {source} -> {target} at {where}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{case}: {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
    if not torch.equal(got, want):
        return f"{case}: {got.tolist()}, want {want.tolist()}"
    if not torch.equal(local, before):
        return f"{case}: the source was written to"
    return None


def _combined_along(addend: Tensor, mesh: DeviceMesh, target: Placements) -> Tensor:
    """Combine by torch.distributed's own in-place reduction, axis by axis."""
    op, dtype = _op(target), addend.dtype
    reduction = {
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
        "product": dist.ReduceOp.PRODUCT,
    }
    reduction["all"] = dist.ReduceOp.MIN
    if dtype == torch.bool:
        op = "max" if op == "sum" else op
    value = (addend != 0) if op == "all" else addend.clone()
    value = value.to(torch.complex128 if dtype.is_complex else torch.float64)
    for axis in _partial_axes(target):
        if mesh.shape[axis] > 1:
            dist.all_reduce(
                value, reduction.get(op, dist.ReduceOp.SUM), group=mesh.get_group(axis)
            )
            value = value / mesh.shape[axis] if op == "avg" else value
    return value.to(dtype)


@pytest.mark.parametrize("op", _REDUCTIONS)
@spmd(world_size=4)
def test_every_kind_of_addend(op: str) -> None:
    """From, to and between addends of a kind, beside shards and replicas, uneven too."""
    mesh = init_device_mesh("cpu", (2, 2))
    sides: list[Placement] = [_R, Shard(0), Partial(op)]
    layouts = list(itertools.product(sides, repeat=2))
    failures = [
        _check(mesh, shape, source, target)
        for shape in [(4, 3), (5,), (1,)]
        for source, target in itertools.product(layouts, layouts)
    ]
    failures += [
        _check(mesh, (), (Partial(op), _R), target)
        for target in itertools.product([_R, Partial(op)], repeat=2)
    ]
    assert not any(failures), "\n".join(f for f in failures if f)


@spmd(world_size=4)
def test_addends_become_addends_of_another_kind() -> None:
    """Every kind to every other, by a reduction in between."""
    mesh = init_device_mesh("cpu", (2, 2))
    failures = [
        _check(mesh, (5, 2), (Partial(a), side), (Partial(b), side))
        for a, b in itertools.permutations(_REDUCTIONS, 2)
        for side in (_R, Shard(0), Shard(1))
    ]
    assert not any(failures), "\n".join(f for f in failures if f)


@spmd(world_size=4)
def test_every_dtype() -> None:
    """Integers, bools, complex and low precision: moves are exact, reductions of small numbers too."""
    mesh = init_device_mesh("cpu", (2, 2))
    dtypes = [
        torch.int64,
        torch.int16,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.bfloat16,
        torch.float64,
    ]
    layouts: list[Placements] = [
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Partial(), Shard(1)),
        (_R, Shard(0)),
        (_R, Partial()),
        (StridedShard(0, split_factor=2), Shard(0)),
    ]
    failures = [
        _check(mesh, shape, source, target, dtype)
        for dtype in dtypes
        for source, target in itertools.product(layouts, layouts)
        for shape in [(4, 6), (5, 3)]
    ]
    assert not any(failures), "\n".join(f for f in failures if f)


@spmd(world_size=4)
def test_size_one_axes_are_inert() -> None:
    """Any placement on them reads as Replicate, from either side, and the tensor comes back as it is."""
    mesh = init_device_mesh("cpu", (1, 4, 1))
    sides: list[Placement] = [_R, Shard(0), Shard(1), Partial()]
    local = torch.arange(6.0).reshape(1, 6)
    for a, b, c, d in itertools.product(sides, repeat=4):
        assert (
            redistribute_tensor(local, mesh, (4, 6), (a, Shard(0), b), (c, Shard(0), d)) is local
        )
    failures = [
        _check(mesh, (5, 3), (a, Shard(0), _R), (_R, Shard(1), b))
        for a in sides[:3]
        for b in sides
    ]
    assert not any(failures), "\n".join(f for f in failures if f)


@spmd(world_size=4)
def test_a_rank_outside_the_mesh_keeps_what_it_has() -> None:
    """It takes no part in the collective that the others run."""
    mesh = init_device_mesh("cpu", (2,), rank_list=(0, 1))
    if mesh.get_coordinate() is None:
        empty = torch.empty(0)
        assert redistribute_tensor(empty, mesh, (4,), (Shard(0),), (_R,)) is empty
    else:
        local = torch.full((2,), float(dist.get_rank()))
        got = redistribute_tensor(local, mesh, (4,), (Shard(0),), (_R,))
        assert got.tolist() == [0, 0, 1, 1]


@spmd(world_size=4)
def test_the_result_never_shares_memory_with_the_source() -> None:
    """Unless it is the source; slices and copies included."""
    mesh = init_device_mesh("cpu", (2, 2))
    sides: list[Placement] = [_R, Shard(0), Partial("sum"), Partial("avg")]
    for source, target in itertools.product(itertools.product(sides, repeat=2), repeat=2):
        if len({p.reduce_op for p in (*source, *target) if isinstance(p, Partial)}) > 1:
            continue
        where = mesh.get_coordinate()
        assert where is not None
        local = _shard(torch.ones(4, 4), source, (2, 2), tuple(where))
        got = redistribute_tensor(local, mesh, (4, 4), source, target)
        shared = got.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        assert (got is local) == (source == target)
        assert shared == (source == target), (source, target)
        assert got.is_contiguous()


@spmd(world_size=4)
def test_strides_of_the_source_do_not_matter() -> None:
    """A transposed local tensor moves like its contiguous copy."""
    mesh = init_device_mesh("cpu", (2, 2))
    sides: list[Placement] = [_R, Shard(0), Shard(1), Partial()]
    where = mesh.get_coordinate()
    assert where is not None
    for source, target in itertools.product(itertools.product(sides, repeat=2), repeat=2):
        whole = _addend((5, 6), torch.float32, source, tuple(where))
        local = _shard(whole, source, (2, 2), tuple(where))
        turned = local.t().contiguous().t()
        got = redistribute_tensor(turned, mesh, (5, 6), source, target)
        want = redistribute_tensor(local, mesh, (5, 6), source, target)
        assert torch.equal(got, want)


@spmd(world_size=4)
def test_async_results_are_right_whenever_they_are_used() -> None:
    """Dropped, viewed, used twice, waited."""
    mesh = init_device_mesh("cpu", (2, 2))
    pairs: list[tuple[Placements, Placements]] = [
        ((Partial(), Partial()), (_R, _R)),
        ((Shard(0), _R), (_R, _R)),
        ((Shard(1), _R), (_R, _R)),
        ((Partial(), _R), (Shard(0), _R)),
        ((Partial(), _R), (Shard(1), _R)),
        ((Shard(0), Shard(1)), (Shard(1), Shard(0))),
    ]
    where = mesh.get_coordinate()
    assert where is not None
    for source, target in pairs:
        local = _shard(
            _addend((4, 8), torch.float32, source, tuple(where)), source, (2, 2), tuple(where)
        )
        want = redistribute_tensor(local, mesh, (4, 8), source, target)
        redistribute_tensor(local, mesh, (4, 8), source, target, async_op=True)
        got = redistribute_tensor(local, mesh, (4, 8), source, target, async_op=True)
        assert torch.equal(got.view(-1) + 0, want.view(-1))
        assert torch.equal(got * 1, want)


class _Meter(TorchDispatchMode):
    """The collectives and the largest tensor made, seen from outside our code."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[str] = []
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket.__name__)
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self.collectives.append(name)
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@spmd(world_size=4)
def test_shard_to_shard_is_one_all_to_all_and_makes_no_large_tensor() -> None:
    """Cross-axis permutations and reorders included; no tensor is larger than a shard."""
    mesh = init_device_mesh("cpu", (2, 2))
    pairs: list[tuple[Placements, Placements]] = [
        ((Shard(0), Shard(1)), (Shard(1), Shard(0))),
        ((Shard(0), Shard(0)), (Shard(0), Shard(1))),
        ((Shard(0), Shard(0)), (Shard(1), Shard(1))),
        ((Shard(0), Shard(1)), (Shard(2), Shard(1))),
        ((Shard(0), _R), (Shard(1), _R)),
        ((StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(0))),
    ]
    where = mesh.get_coordinate()
    assert where is not None
    for source, target in pairs:
        local = _shard(torch.ones(8, 8, 4), source, (2, 2), tuple(where))
        redistribute_tensor(local, mesh, (8, 8, 4), source, target)
        with _Meter() as meter:
            redistribute_tensor(local, mesh, (8, 8, 4), source, target)
        assert meter.collectives == ["all_to_all_single"], (source, target)
        assert meter.largest <= local.numel(), (source, target)


@spmd(world_size=4)
def test_it_runs_on_fake_tensors() -> None:
    """Every step gives the right shape with no data at all."""
    mesh = init_device_mesh("cpu", (2, 2))
    sides: list[Placement] = [_R, Shard(0), Shard(1), Partial()]
    layouts = [*itertools.product(sides, repeat=2), (StridedShard(0, split_factor=2), Shard(0))]
    where = mesh.get_coordinate()
    assert where is not None
    for source, target in itertools.product(layouts, layouts):
        whole = torch.ones(5, 6)
        local = _shard(whole, source, (2, 2), tuple(where))
        want = _shard(whole, target, (2, 2), tuple(where)).shape
        with torch._subclasses.fake_tensor.FakeTensorMode() as fake:
            got = redistribute_tensor(fake.from_tensor(local), mesh, (5, 6), source, target)
        assert got.shape == want


@spmd(world_size=4)
def test_a_large_value_survives_a_cast_back_and_forth() -> None:
    """Round trips over all layouts give the first local tensor back, bit for bit."""
    mesh = init_device_mesh("cpu", (2, 2))
    sides: list[Placement] = [_R, Shard(0), Shard(1)]
    layouts = list(itertools.product(sides, repeat=2))
    where = mesh.get_coordinate()
    assert where is not None
    whole = torch.randn(7, 9, generator=torch.Generator().manual_seed(1)) * math.pi**20
    for source, target in itertools.product(layouts, layouts):
        local = _shard(whole, source, (2, 2), tuple(where))
        there = redistribute_tensor(local, mesh, (7, 9), source, target)
        back = redistribute_tensor(there, mesh, (7, 9), target, source)
        assert torch.equal(back, local)


@spmd(world_size=4)
def test_shard_to_shard_holds_at_most_two_shards_beside_the_source() -> None:
    """Everything that is alive after any operator, views counted once."""
    mesh = init_device_mesh("cpu", (2, 2))
    pairs: list[tuple[Placements, Placements]] = [
        ((Shard(0), Shard(1)), (Shard(1), Shard(0))),
        ((Shard(0), Shard(0)), (Shard(1), Shard(1))),
        ((Shard(0), _R), (Shard(1), _R)),
        ((Shard(1), _R), (Shard(2), _R)),
        ((StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(0))),
    ]
    where = mesh.get_coordinate()
    assert where is not None
    for (source, target), shape in itertools.product(pairs, [(16, 16, 16), (10, 10, 10)]):
        local = _shard(torch.ones(shape), source, (2, 2), tuple(where))
        got = redistribute_tensor(local, mesh, shape, source, target)
        peaks = []
        for _ in range(5):  # gloo's thread may let go of a buffer a moment after the wait for it
            with _Memory() as memory:
                redistribute_tensor(local, mesh, shape, source, target)
            peaks.append(memory.peak)
        largest = max(local.nbytes, got.nbytes)
        assert got.nbytes <= min(peaks) <= 2 * largest, (source, target)


class _Memory(TorchDispatchMode):
    """The most bytes of new storage that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            if storage._cdata not in given:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        for key in [k for k, (alive, _) in self._alive.items() if alive.expired()]:
            del self._alive[key]
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out


@pytest.mark.seam
@spmd(world_size=2)
def test_addends_of_a_masked_lookup_are_masked_before_they_are_reduced() -> None:
    """Torch's own vocabulary-sharded embedding, its result moved by us, against the lookup on one device."""
    weight = torch.arange(12.0).reshape(6, 2) + 1
    tokens = torch.tensor([[0, 5, 3], [2, 1, 4]])
    mesh = init_device_mesh("cpu", (2,))
    torch_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    rows = distribute_tensor(weight, torch_mesh, [Shard(0)])
    ids = distribute_tensor(tokens, torch_mesh, [_R])
    looked_up = torch.nn.functional.embedding(ids, rows)
    assert isinstance(looked_up, DTensor)
    local, source = looked_up.to_local().clone(), looked_up.placements
    assert type(source[0]) is not Partial
    assert source[0].is_partial()
    for target in (_R, Shard(0), Shard(2)):
        got = redistribute_tensor(local, mesh, (2, 3, 2), tuple(source), (target,))
        want = _shard(weight[tokens], (target,), (2,), (dist.get_rank(),))
        assert torch.equal(got, want)


@spmd(world_size=2)
def test_what_arrives_is_row_major() -> None:
    """Also where a piece has one index in a dim, so that the joined pieces could be a transposed view."""
    mesh = init_device_mesh("cpu", (2,))
    for shape in ((4, 2), (2, 4), (2, 2), (1, 2), (4, 2, 1), (3, 2, 2)):
        whole = torch.arange(float(math.prod(shape))).view(shape)
        layouts: list[Placement] = [_R, *(Shard(dim) for dim in range(len(shape)))]
        for source, target in itertools.permutations(layouts, 2):
            local = _shard(whole, (source,), (2,), (dist.get_rank(),))
            got = redistribute_tensor(local, mesh, shape, (source,), (target,))
            want = _shard(whole, (target,), (2,), (dist.get_rank(),))
            assert got.is_contiguous()
            assert torch.equal(got, want)
