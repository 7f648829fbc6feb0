"""Every pair of layouts: value and gradient against gather-then-slice, bytes against a shortest path, memory against a shard."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from hp_dtensor import DTensor
from hp_dtensor.plan import make_plan
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

_R, _P = Replicate(), Partial()
_S = [Shard(dim) for dim in range(3)]
Placements = tuple[Placement, ...]
Shape = tuple[int, ...]

_LAYOUTS_2D: list[Placements] = [
    *itertools.product([_R, *_S, _P], repeat=2),
    (StridedShard(0, split_factor=4), Shard(0)),
    (StridedShard(1, split_factor=4), Shard(1)),
    (StridedShard(2, split_factor=2), Shard(0)),
    (Shard(0), StridedShard(0, split_factor=2)),
    (StridedShard(0, split_factor=3), _R),
    (_P, StridedShard(1, split_factor=2)),
]
_LAYOUTS_3D: list[Placements] = [
    *itertools.product([_R, *_S, _P], repeat=3),
    (StridedShard(0, split_factor=2), Shard(0), _R),
    (StridedShard(0, split_factor=4), StridedShard(0, split_factor=2), Shard(0)),
    (StridedShard(0, split_factor=2), Shard(1), Shard(0)),
    (Shard(1), StridedShard(1, split_factor=2), _P),
]
_SHAPES: list[Shape] = [(8, 5, 1), (1, 8, 5), (5, 1, 8)]
"""Each has a dim that all ranks divide, one that they do not, and one with fewer indices than ranks."""


# --- the oracle: whole tensors, cut by torch.chunk ----------------------------------------------------------------------


def _chunks(x: Tensor, n: int, dim: int) -> list[Tensor]:
    pieces = list(torch.chunk(x, n, dim))
    return pieces + [x.narrow(dim, 0, 0)] * (n - len(pieces))


def _cut(whole: Tensor, placements: Placements, mesh: Shape, where: Shape) -> Tensor:
    for n, c, placement in zip(mesh, where, placements, strict=True):
        if isinstance(placement, StridedShard):
            chunks = _chunks(whole, int(placement.split_factor), placement.dim)
            whole = torch.cat([_chunks(x, n, placement.dim)[c] for x in chunks], placement.dim)
        elif isinstance(placement, Shard):
            whole = _chunks(whole, n, placement.dim)[c]
    return whole.contiguous()


def _random(shape: Shape, seed: int) -> Tensor:
    """Whole numbers of both signs, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def _addend(shape: Shape, placements: Placements, where: Shape) -> Tensor:
    """What a coordinate adds: it differs along the Partial axes and nowhere else."""
    return _random(shape, sum((c + 1) * 10**a for a, c in enumerate(where) if placements[a] == _P))


def _of_gradient(placements: Placements) -> Placements:
    return tuple(_R if placement == _P else placement for placement in placements)


class _Sweep:
    """What one rank knows beforehand and finds out; sums over ranks are taken for all pairs at once, at the end."""

    def __init__(self, mesh_shape: Shape) -> None:
        self.mesh = init_device_mesh("cpu", mesh_shape)
        self.shape = mesh_shape
        where = self.mesh.get_coordinate()
        assert where is not None
        self.where = tuple(where)
        self.failures: list[str] = []
        self.addends: dict[Shape, list[tuple[str, Tensor, Tensor]]] = {}
        self.piece = functools.cache(self._piece)
        self.wanted = functools.cache(self._wanted)
        self.gradient = functools.cache(self._gradient)

    def _piece(self, shape: Shape, placements: Placements) -> Tensor:
        return _cut(_addend(shape, placements, self.where), placements, self.shape, self.where)

    def _wanted(self, shape: Shape, source: Placements, target: Placements) -> Tensor:
        axes = [range(n if p == _P else 1) for n, p in zip(self.shape, source, strict=True)]
        whole = torch.stack(
            [_addend(shape, source, there) for there in itertools.product(*axes)]
        ).sum(0)
        return _cut(whole, target, self.shape, self.where)

    def _gradient(self, shape: Shape, placements: Placements) -> Tensor:
        return _cut(_random(shape, 7), _of_gradient(placements), self.shape, self.where)

    def pair(self, shape: Shape, source: Placements, target: Placements) -> None:
        case = f"{shape} on {self.shape}: {source} -> {target} at {self.where}"
        local = self.piece(shape, source).clone()
        x = DTensor.from_local(local, self.mesh, source, shape=shape).requires_grad_()
        out = x.redistribute(placements=target)
        seed = DTensor.from_local(
            self.gradient(shape, target), self.mesh, _of_gradient(target), shape=shape
        )
        (grad,) = torch.autograd.grad(out, x, seed)
        got, want = out.detach().to_local(), self.wanted(shape, source, target)
        if _P in target:
            kept = tuple(a for a, p in enumerate(target) if p == _P)
            self.addends.setdefault(kept, []).append((case, got, want))
        else:
            self.compare(case, got, want)
        assert isinstance(grad, DTensor)
        if grad.placements != _of_gradient(source):
            self.failures.append(f"{case}: the gradient is laid out as {grad.placements}")
        self.compare(f"gradient of {case}", grad.to_local(), self.gradient(shape, source))
        if not torch.equal(local, self.piece(shape, source)):
            self.failures.append(f"{case}: the source was written to")

    def compare(self, case: str, got: Tensor, want: Tensor) -> None:
        if got.shape != want.shape or not torch.equal(got, want):
            self.failures.append(f"{case}: {got.tolist()}, want {want.tolist()}")

    def finish(self) -> None:
        for axes, entries in self.addends.items():
            total = torch.cat([got.reshape(-1) for _, got, _ in entries])
            for axis in axes:
                dist.all_reduce(total, group=self.mesh.get_group(axis))
            sums = total.split([got.numel() for _, got, _ in entries])
            for (case, got, want), summed in zip(entries, sums, strict=True):
                self.compare(f"sum of {case}", summed.view(got.shape), want)
        assert not self.failures, f"{len(self.failures)} failures\n" + "\n".join(
            self.failures[:20]
        )


def _pairs(layouts: Sequence[Placements]) -> Iterator[tuple[Placements, Placements]]:
    return itertools.product(layouts, layouts)


def _alike(pair: tuple[Placements, Placements]) -> bool:
    """Whether the dims first occur in the order 0, 1, 2: one pair of those that differ in the names of dims only."""
    dims = [p.dim for p in itertools.chain(*pair) if isinstance(p, (Shard, StridedShard))]
    return list(dict.fromkeys(dims)) == list(range(len(set(dims))))


@pytest.mark.slow
@spmd(world_size=8, timeout=280)
def test_value_and_gradient_of_every_pair_on_2x4() -> None:
    """Replicas, shards of three dims, addends and strided orders; the shape changes from pair to pair."""
    sweep = _Sweep((2, 4))
    for number, (source, target) in enumerate(_pairs(_LAYOUTS_2D)):
        sweep.pair(_SHAPES[number % 3], source, target)
    sweep.finish()


@pytest.mark.slow
@spmd(world_size=8, timeout=280)
def test_value_and_gradient_of_every_pair_on_2x2x2() -> None:
    """Each pair that does not differ from another by the names of dims only; the shape changes from pair to pair."""
    sweep = _Sweep((2, 2, 2))
    for number, (source, target) in enumerate(filter(_alike, _pairs(_LAYOUTS_3D))):
        sweep.pair(_SHAPES[number % 3], source, target)
    sweep.finish()


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
@spmd(world_size=8, timeout=290)
def test_every_pair_with_every_shape(part: int) -> None:
    """All 16,641 pairs on 2x2x2 and the 961 on 2x4, each with each shape."""
    flat = _Sweep((2, 4))
    for number, (source, target) in enumerate(_pairs(_LAYOUTS_2D)):
        if number % 8 == part:
            for shape in _SHAPES:
                flat.pair(shape, source, target)
    flat.finish()
    sweep = _Sweep((2, 2, 2))
    for number, (source, target) in enumerate(_pairs(_LAYOUTS_3D)):
        if number % 8 == part:
            for shape in _SHAPES:
                sweep.pair(shape, source, target)
    sweep.finish()


@spmd(world_size=8)
def test_value_and_gradient_of_a_sample_of_pairs() -> None:
    """The quick suite's share of the sweeps."""
    sweep = _Sweep((2, 2, 2))
    for number, (source, target) in enumerate(_pairs(_LAYOUTS_3D)):
        if number % 101 == 7:
            sweep.pair(_SHAPES[number % 3], source, target)
    sweep.finish()


# --- bytes ------------------------------------------------------------------------------------------------------------

_COUNT = """
import itertools, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from hp_mesh import init_device_mesh
from hp_dtensor import DTensor, Partial, Replicate, Shard

dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=int(sys.argv[1]), world_size=8)
mesh, shape = init_device_mesh("cpu", (2, 2, 2)), (16, 16, 16)
LAYOUTS = list(itertools.product([Replicate(), Shard(0), Shard(1), Shard(2), Partial()], repeat=3))

class Wire(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            name = func.overloadpacket.__name__
            if name == "all_gather_into_tensor":
                self.received += out.nbytes - args[0].nbytes
            elif name == "reduce_scatter_tensor":
                self.received += args[0].nbytes - out.nbytes
            elif name == "all_reduce":
                ranks = dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[-1]))
                self.received += 2 * args[0].nbytes * (ranks - 1) // ranks
            elif name == "all_to_all_single":
                group = dist.distributed_c10d._resolve_process_group(args[-1])
                mine = dist.get_group_rank(group, dist.get_rank())
                self.received += sum(n for i, n in enumerate(args[1]) if i != mine) * out.itemsize
            elif name != "wait_tensor":
                raise AssertionError(name)
        return out

for source in LAYOUTS:
    n = [16, 16, 16]
    for placement in source:
        if placement.is_shard():
            n[placement.dim] //= 2
    x = DTensor.from_local(torch.ones(n), mesh, source)
    for target in LAYOUTS:
        with Wire() as wire:
            wire.received = 0
            x.redistribute(placements=target)
        print(wire.received)
"""


@pytest.mark.slow
def test_no_pair_receives_more_bytes_than_the_shortest_path() -> None:
    """All pairs of a 2x2x2 mesh: what the collectives of rank 5 carry, seen by a dispatch mode, and in total."""
    run = subprocess.run(
        [sys.executable, "-c", _COUNT, "5"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    counted = list(map(int, run.stdout.split()))
    mesh, shape = (2, 2, 2), (16, 16, 16)
    layouts = list(itertools.product([_R, *_S, _P], repeat=3))
    assert len(counted) == len(layouts) ** 2
    best = [4 * _shortest(mesh, shape, source)[target] for source, target in _pairs(layouts)]
    above = [
        f"{source} -> {target}: {got} bytes, optimum {least}"
        for (source, target), got, least in zip(_pairs(layouts), counted, best, strict=True)
        if got > least
    ]
    assert not above, f"{len(above)} pairs\n" + "\n".join(above[:10])
    assert sum(counted) <= sum(best)


def _never_above_the_optimum(part: int, parts: int) -> None:
    mesh, shape = (2, 2, 2), (16, 16, 16)
    layouts = list(itertools.product([_R, *_S, _P], repeat=3))
    above = []
    for source, target in itertools.islice(itertools.product(layouts, layouts), part, None, parts):
        optimum = _shortest(mesh, shape, source)[target] * 4
        plan = make_plan(shape, 4, mesh, source, target)
        if plan.bytes > optimum:
            above.append(f"{source} -> {target}: {plan.bytes} bytes, optimum {optimum}\n{plan}")
    assert not above, f"{len(above)} pairs\n" + "\n".join(above[:5])


def test_a_sample_of_pairs_never_sends_more_than_the_optimum() -> None:
    """2x2x2 mesh, 16x16x16 tensor, against a shortest path of one collective a step."""
    _never_above_the_optimum(3, 41)


def _edges(mesh: Shape, shape: Shape, layout: Placements) -> Iterator[tuple[float, Placements]]:
    """One collective on one axis, or a local step: what a textbook search over even layouts may do, ring costs."""
    cut = math.prod(n for n, p in zip(mesh, layout, strict=True) if p.is_shard())
    size = math.prod(shape) / cut
    for axis, n in enumerate(mesh):
        here = layout[axis]
        later = {p.dim for p in layout[axis + 1 :] if isinstance(p, Shard)}
        if isinstance(here, Shard) and here.dim in later:
            continue
        for there in (_R, *_S, _P):
            if here == there or (isinstance(there, Shard) and there.dim in later):
                continue
            cost: float
            if isinstance(here, Shard):
                if there.is_partial():
                    continue
                cost = (n - 1) * size if there.is_replicate() else (n - 1) / n * size
            elif here.is_partial():
                cost = (2 if there.is_replicate() else 1) * (n - 1) / n * size
            else:
                cost = 0
            yield cost, (*layout[:axis], there, *layout[axis + 1 :])


@functools.cache
def _shortest(mesh: Shape, shape: Shape, source: Placements) -> dict[Placements, float]:
    best: dict[Placements, float] = {source: 0.0}
    names = itertools.count()
    queue = [(0.0, next(names), source)]
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if cost > best[layout]:
            continue
        for step, after in _edges(mesh, shape, layout):
            if cost + step < best.get(after, math.inf):
                best[after] = cost + step
                heapq.heappush(queue, (cost + step, next(names), after))
    return best
