"""The shard rule: a partition of the tensor, torch's own shards, and tables by hand."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hp_dtensor import shards
from hp_mesh.testing import run_spmd
from hypothesis import given, settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

_Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]


@st.composite
def _layouts(draw: st.DrawFn) -> _Layout:
    """A shape (empty dims included), a mesh (size-1 axes included) and a placement an axis."""
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds.append(st.builds(Shard, dims))
        strided = st.builds(lambda d, f: StridedShard(d, split_factor=f), dims, st.integers(1, 5))
        kinds.append(strided)
    return shape, mesh, tuple(draw(st.one_of(kinds)) for _ in mesh)


def _coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(n) for n in mesh)))


def _take(whole: torch.Tensor, box: shards.Box) -> torch.Tensor:
    for dim, intervals in enumerate(box):
        index = [i for start, stop in intervals for i in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.long))
    return whole


def _by_chunks(whole: torch.Tensor, layout: _Layout, where: tuple[int, ...]) -> torch.Tensor:
    """The rule spelled with torch.chunk on real tensors."""

    def cut(x: torch.Tensor, n: int, dim: int) -> list[torch.Tensor]:
        pieces = list(torch.chunk(x, n, dim))
        return pieces + [x.narrow(dim, 0, 0)] * (n - len(pieces))

    for n, c, placement in zip(layout[1], where, layout[2], strict=True):
        if isinstance(placement, StridedShard):
            chunks = cut(whole, int(placement.split_factor), placement.dim)
            whole = torch.cat([cut(x, n, placement.dim)[c] for x in chunks], placement.dim)
        elif isinstance(placement, Shard):
            whole = cut(whole, n, placement.dim)[c]
    return whole


@given(_layouts())
def test_pieces_tile_the_tensor_exactly_once(layout: _Layout) -> None:
    """Each element has as many holders as the replicated axes have coordinates."""
    shape, mesh, placements = layout
    count = torch.zeros(shape, dtype=torch.long)
    index = torch.arange(count.numel()).reshape(shape)
    for where in _coordinates(mesh):
        count.view(-1)[
            _take(index, shards.local_box(shape, mesh, where, placements)).reshape(-1)
        ] += 1
    copies = math.prod(n for n, p in zip(mesh, placements, strict=True) if p.is_replicate())
    assert bool((count == copies).all())


@given(_layouts())
def test_pieces_are_those_that_torch_chunk_cuts(layout: _Layout) -> None:
    """Values, order and shape equal chunks of a real tensor, at every coordinate."""
    shape, mesh, placements = layout
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for where in _coordinates(mesh):
        want = _by_chunks(whole, layout, where)
        box = shards.local_box(shape, mesh, where, placements)
        assert torch.equal(_take(whole, box), want)
        assert shards.local_shape(shape, mesh, where, placements) == tuple(want.shape)


@given(_layouts())
def test_intervals_are_canonical(layout: _Layout) -> None:
    """Ascending, not empty, never adjacent: equal sets of indices are equal values."""
    shape, mesh, placements = layout
    for where in _coordinates(mesh):
        for size, intervals in zip(
            shape, shards.local_box(shape, mesh, where, placements), strict=True
        ):
            ends = [end for interval in intervals for end in interval]
            assert all(a < b for a, b in itertools.pairwise(ends))
            assert not ends or (ends[0] >= 0 and ends[-1] <= size)


@settings(max_examples=30)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_fsdp_over_tp_is_the_inner_axis_first(size: int, dp: int, tp: int) -> None:
    """StridedShard(0, tp) before Shard(0) holds chunk *dp* of chunk *tp*."""
    for i, j in itertools.product(range(dp), range(tp)):
        placements = (StridedShard(0, split_factor=tp), Shard(0))
        got = shards.local_intervals(
            size, tuple((n, c, f) for n, c, f in ((dp, i, tp), (tp, j, 1)))
        )
        assert got == shards.local_box((size,), (dp, tp), (i, j), placements)[0]
        inner = torch.arange(size).tensor_split(tp)[j] if size % tp == 0 else None
        if inner is not None and len(inner) % dp == 0:
            want = inner.tensor_split(dp)[i].tolist()
            assert [k for a, b in got for k in range(a, b)] == want


def test_offsets_are_the_first_index_held_or_the_end() -> None:
    """A table by hand: uneven, empty, strided."""
    table = [
        ((5,), (2,), (1,), (Shard(0),), ((2,), (3,))),
        ((5,), (4,), (3,), (Shard(0),), ((0,), (5,))),
        ((8,), (2, 2), (1, 0), (StridedShard(0, split_factor=2), Shard(0)), ((2,), (2,))),
        ((8,), (2,), (1,), (StridedShard(0, split_factor=2),), ((4,), (2,))),
        ((), (2,), (1,), (Replicate(),), ((), ())),
    ]
    for shape, mesh, where, placements, want in table:
        assert shards.local_shape_and_offset(shape, mesh, where, placements) == want


_SIDES: list[Placement] = [Replicate(), Shard(0), Shard(1)]
_TORCH_LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    *itertools.product([(8, 6), (7, 5), (3, 1), (1, 9)], itertools.product(_SIDES, repeat=2)),
    *itertools.product(
        [(8, 6), (7, 5), (9, 10), (12, 3)],
        [(StridedShard(dim, split_factor=2), Shard(dim)) for dim in (0, 1)],
    ),
]


def test_local_shards_equal_those_of_torch() -> None:
    """Torch's distribute_tensor on a 2 x 2 mesh gives the same local tensors, FSDP2's layout included."""

    def body() -> list[tuple[tuple[int, ...] | None, torch.Tensor]]:
        mesh = init_device_mesh("cpu", (2, 2))
        out = []
        for shape, placements in _TORCH_LAYOUTS:
            whole = torch.arange(math.prod(shape)).reshape(shape)
            made = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert isinstance(made, DTensor)
            out.append((mesh.get_coordinate(), made.to_local()))
        assert dist.get_world_size() == 4
        return out

    for results in run_spmd(body, world_size=4):
        for (shape, placements), (where, got) in zip(_TORCH_LAYOUTS, results, strict=True):
            assert where is not None
            whole = torch.arange(math.prod(shape)).reshape(shape)
            box = shards.local_box(shape, (2, 2), tuple(where), placements)
            assert torch.equal(_take(whole, box), got), (shape, placements, where)
