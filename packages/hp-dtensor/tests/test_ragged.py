"""Placements of one's own: the laws of `Cut`, RaggedShard against whole tensors cut by hand, and checkpoints of both."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import shutil
import tempfile
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hp_dtensor import (
    CommDebugMode,
    Cut,
    DTensor,
    LayoutError,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    redistribute_plan,
)
from hp_dtensor.testing import check_placement
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hypothesis import given, settings

R = Replicate()


class Cyclic(Cut):
    """Index i belongs to rank i modulo the number of ranks: what a user may write, in one class."""

    def held(self, length: int, parts: int, coordinate: int) -> tuple[tuple[int, int], ...]:
        """Every index of this rank alone."""
        return tuple((i, i + 1) for i in range(coordinate, length, parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cyclic) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash((Cyclic, self.dim))


def _run(whole: torch.Tensor, units: tuple[int, ...], rank: int, dims: int = 1) -> torch.Tensor:
    """The oracle: flatten, and take what the shares say."""
    flat = whole.reshape(-1, *whole.shape[dims:])
    ends = [0, *itertools.accumulate(units)]
    start, stop = (flat.shape[0] * end // ends[-1] for end in ends[rank : rank + 2])
    return flat[start:stop]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
def test_the_laws_hold_for_any_shares(units: list[int]) -> None:
    """Every index is somewhere, once, whatever the shares are."""
    check_placement(RaggedShard((0,), units), len(units))
    check_placement(Cyclic(0), len(units))


def test_a_placement_that_loses_indices_is_caught() -> None:
    """The check names the law that is broken."""

    class Lossy(Cyclic):
        def held(self, length: int, parts: int, coordinate: int) -> tuple[tuple[int, int], ...]:
            return super().held(length - 1, parts, coordinate)

    with pytest.raises(AssertionError, match="every position belongs to one rank"):
        check_placement(Lossy(0), 2, range(1, 4))


def test_it_is_a_value_and_a_placement_of_torchs() -> None:
    """Equality, hash, pickle, deepcopy, predicates, and what cannot be made."""
    one = RaggedShard((0, 1), (1, 3))
    assert isinstance(one, torch.distributed.tensor.placement_types.Placement)
    assert one == RaggedShard([0, 1], [1, 3])
    assert hash(one) == hash(RaggedShard([0, 1], [1, 3]))
    assert one != RaggedShard((0,), (1, 3))
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert one.is_ragged_shard()
    assert [one.is_shard(), one.is_replicate(), one.is_partial()] == [False] * 3
    for dims, units, words in (
        ((1,), (1, 1), "not the leading dims"),
        ((), (1, 1), "not the leading dims"),
        ((0,), (0, 0), "not all zero"),
        ((0,), (1, -1), "not negative"),
    ):
        with pytest.raises(ValueError, match=words):
            RaggedShard(dims, units)


@spmd(world_size=4)
def test_from_and_to_every_other_placement() -> None:
    """Values and gradients, on a line and on a square, of one dim and of flattened ones, and of a user's own."""
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    whole, weight = torch.arange(90.0).reshape(6, 5, 3), 7 - torch.arange(90.0).reshape(6, 5, 3)
    uneven = RaggedShard((0,), (3, 0, 1, 2))
    flat = RaggedShard((0, 1), (1, 2, 0, 4))
    everything = RaggedShard((0, 1, 2), (1, 1, 1, 2))
    sides: list[tuple[DeviceMesh, tuple[Placement, ...]]] = [
        (line, (p,))
        for p in (uneven, flat, everything, Cyclic(1), R, Shard(0), Shard(1), Partial())
    ]
    sides += [
        (square, (RaggedShard((0,), (2, 1)), Shard(1))),
        (square, (Shard(2), RaggedShard((0, 1), (1, 5)))),
        (square, (RaggedShard((0,), (2, 1)), Cyclic(0))),
        (square, (Partial(), Shard(0))),
    ]
    for (a, source), (b, target) in itertools.product(sides, sides):
        x = distribute_tensor(whole, a, source, src_data_rank=None).requires_grad_()
        out = x.redistribute(b, target)
        case = (source, target)
        assert out.placements == target
        assert torch.equal(out.detach().full_tensor(), whole), case
        laid = tuple(R if p.is_partial() else p for p in target)
        seed = distribute_tensor(weight, b, laid, src_data_rank=None)
        (grad,) = torch.autograd.grad(out, x, seed)
        assert isinstance(grad, DTensor)
        assert grad.placements == tuple(R if p.is_partial() else p for p in source)
        assert torch.equal(grad.full_tensor(), weight), case


@spmd(world_size=4)
def test_pieces_are_what_the_shares_say() -> None:
    """Through distribute_tensor with and without a source, and back through from_local."""
    mesh = init_device_mesh("cpu", (4,))
    rank = mesh.get_local_rank()
    whole = torch.arange(60.0).reshape(6, 5, 2)
    for dims, units in (((0,), (3, 0, 1, 2)), ((0, 1), (1, 2, 0, 3)), ((0, 1, 2), (1, 1, 1, 1))):
        placement = RaggedShard(dims, units)
        want = _run(whole, units, rank, len(dims))
        for source in (0, None):
            d = distribute_tensor(whole, mesh, [placement], src_data_rank=source)
            assert torch.equal(d.to_local(), want)
            assert d.shape == (6, 5, 2)
        again = DTensor.from_local(want, mesh, [placement], shape=(6, 5, 2), run_check=True)
        assert torch.equal(again.full_tensor(), whole)
        with pytest.raises(LayoutError, match="pass the global shape="):
            DTensor.from_local(want, mesh, [placement])
    for bad, words in (
        (RaggedShard((0,), (1, 1)), "2 shares for a mesh axis of 4 ranks"),
        (RaggedShard((0, 1, 2, 3), (1, 1, 1, 1)), "flattens 4 dims, but the tensor has 3"),
    ):
        with pytest.raises(LayoutError, match=words):
            distribute_tensor(whole, mesh, [bad])
    square = init_device_mesh("cpu", (2, 2))
    with pytest.raises(LayoutError, match="a flattened dim is cut once"):
        distribute_tensor(whole, square, [RaggedShard((0, 1), (1, 1)), Shard(1)])


@spmd(world_size=4)
def test_an_optimizer_keeps_the_layout_and_sends_nothing() -> None:
    """Elementwise operators, in place and in lists, on whole blocks; other operators give the right value."""
    mesh = init_device_mesh("cpu", (4,))
    whole, grad = torch.arange(1.0, 25.0).reshape(4, 3, 2), torch.ones(4, 3, 2) / 2
    for placement in (RaggedShard((0,), (2, 0, 1, 1)), RaggedShard((0, 1), (1, 3, 0, 2))):
        p = torch.nn.Parameter(distribute_tensor(whole, mesh, [placement]))
        q = torch.nn.Parameter(whole.clone())
        p.grad, q.grad = distribute_tensor(grad, mesh, [placement]), grad.clone()
        for foreach in (False, True):
            mine, alone = (torch.optim.AdamW([t], lr=0.1, foreach=foreach) for t in (p, q))
            with CommDebugMode() as comm:
                mine.step()
            alone.step()
            assert comm.get_total_counts() == 0
            assert isinstance(p, DTensor)
            assert p.placements == (placement,)
            torch.testing.assert_close(p.full_tensor(), q.detach())
        ones = distribute_tensor(torch.ones(2), mesh, [R])
        torch.testing.assert_close((p @ ones).full_tensor(), q @ torch.ones(2))
        torch.testing.assert_close(p.sum().full_tensor(), q.sum())


@spmd(world_size=2)
def test_a_move_to_a_ragged_layout_sends_what_is_lacked() -> None:
    """Counted by hand: rank 0 grows from four of eight rows to six."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])
    plan = redistribute_plan(x, [RaggedShard((0,), (3, 1))])
    assert [step.kind for step in plan.steps] == ["all_to_all"]
    assert plan.bytes == 2 * 4 * 4
    with CommDebugMode() as comm:
        out = x.redistribute(placements=[RaggedShard((0,), (3, 1))])
    assert comm.get_total_counts() == 1
    assert out.local_shape[0] == (6, 2)[mesh.get_local_rank()]


@spmd(world_size=4)
def test_checkpoints_load_under_any_other_layout() -> None:
    """Saved ragged, strided, cyclic or plain, loaded as each of the others, bit for bit."""
    pytest.importorskip("numpy", reason="torch's checkpoints exchange objects through numpy")
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(60.0).reshape(6, 5, 2)
    layouts: list[tuple[Placement, ...]] = [
        (RaggedShard((0,), (2, 1)), Shard(1)),
        (Shard(2), RaggedShard((0, 1), (1, 6))),
        (R, RaggedShard((0, 1, 2), (1, 3))),
        (StridedShard(0, split_factor=2), Shard(0)),
        (Cyclic(1), R),
        (Shard(0), Shard(1)),
    ]
    path = Path(tempfile.gettempdir()) / f"hp_ragged_{_shared_number()}"
    for number, source in enumerate(layouts):
        saved = {"w": distribute_tensor(whole, mesh, source, src_data_rank=None)}
        dcp.save(saved, checkpoint_id=path / str(number))
        for target in layouts:
            into = {"w": distribute_tensor(torch.zeros(6, 5, 2), mesh, target)}
            dcp.load(into, checkpoint_id=path / str(number))
            assert torch.equal(into["w"].full_tensor(), whole), (source, target)
    if dist.get_rank() == 0:
        shutil.rmtree(path)


def _shared_number() -> int:
    """A number that the ranks share and other runs do not."""
    number = torch.tensor([time.time_ns()])
    dist.broadcast(number, 0)
    return int(number)


@spmd(world_size=2)
def test_copies_and_files_keep_the_placement() -> None:
    """deepcopy, pickle and torch.save, weights_only too."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [RaggedShard((0, 1), (1, 3))])
    buffer = io.BytesIO()
    torch.save(d, buffer)
    for weights_only in (False, True):
        buffer.seek(0)
        again = torch.load(buffer, weights_only=weights_only)
        assert again.placements == d.placements
        assert torch.equal(again.full_tensor(), d.full_tensor())
    for other in (copy.deepcopy(d), pickle.loads(pickle.dumps(d))):
        assert torch.equal(other.full_tensor(), d.full_tensor())
