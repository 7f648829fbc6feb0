"""Moves between meshes, values and gradients, against whole tensors cut by torch.chunk."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    Partial,
    Placement,
    RedistributeError,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
)
from hp_dtensor.transfer import Exchange, Side
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd

R = Replicate()


def _chunks(x: torch.Tensor, n: int, dim: int) -> list[torch.Tensor]:
    pieces = list(torch.chunk(x, n, dim))
    return pieces + [x.narrow(dim, 0, 0)] * (n - len(pieces))


def _cut(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    where = mesh.get_coordinate()
    if where is None:
        return whole.new_empty(0)
    for n, c, placement in zip(mesh.shape, where, placements, strict=True):
        if isinstance(placement, StridedShard):
            chunks = _chunks(whole, int(placement.split_factor), placement.dim)
            whole = torch.cat([_chunks(x, n, placement.dim)[c] for x in chunks], placement.dim)
        elif isinstance(placement, Shard):
            whole = _chunks(whole, n, placement.dim)[c]
    return whole


def _layouts(mesh: DeviceMesh) -> list[tuple[Placement, ...]]:
    layouts = list(itertools.product([R, Shard(0), Shard(1), Partial()], repeat=mesh.ndim))
    if mesh.ndim == 2:
        layouts += [(StridedShard(0, split_factor=2), Shard(0))]
    return layouts


def _check(
    whole: torch.Tensor,
    source_mesh: DeviceMesh,
    source: tuple[Placement, ...],
    target_mesh: DeviceMesh,
    target: tuple[Placement, ...],
) -> None:
    """One move and its gradient; addends are compared after they are combined."""
    case = (tuple(whole.shape), source_mesh, source, target_mesh, target)
    x = distribute_tensor(whole, source_mesh, source, src_data_rank=None).requires_grad_()
    out = x.redistribute(target_mesh, target)
    assert out.device_mesh == target_mesh
    assert out.placements == target
    assert out.shape == whole.shape
    weight = torch.arange(float(whole.numel())).reshape(whole.shape) - 7
    plain = tuple(R if p.is_partial() else p for p in target)
    got = out.detach().redistribute(placements=plain).to_local()
    assert torch.equal(got, _cut(whole, target_mesh, plain)), case
    seed = distribute_tensor(weight, target_mesh, plain, src_data_rank=None)
    (grad,) = torch.autograd.grad(out, x, seed)
    assert isinstance(grad, DTensor)
    laid = tuple(R if p.is_partial() else p for p in source)
    assert grad.device_mesh == source_mesh
    assert grad.placements == laid
    assert torch.equal(grad.to_local(), _cut(weight, source_mesh, laid)), case


@spmd(world_size=4)
def test_the_same_ranks_in_another_shape_or_order() -> None:
    """From 2x2 to a line of four, turned and reversed, even and uneven, addends on either side."""
    square = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,))
    turned = DeviceMesh("cpu", [[3, 1], [2, 0]])
    for other in (line, turned):
        for a, b in itertools.product(_layouts(square), _layouts(other)):
            _check(torch.arange(15.0).reshape(5, 3), square, a, other, b)
            _check(torch.arange(32.0).reshape(4, 8), other, b, square, a)


@spmd(world_size=4)
def test_fewer_more_and_other_ranks() -> None:
    """A subset, a superset, an overlap and disjoint meshes; ranks outside take part and hold nothing."""
    everyone = init_device_mesh("cpu", (2, 2))
    first, last = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    middle = DeviceMesh("cpu", [2, 1])
    whole = torch.arange(15.0).reshape(5, 3)
    for a, b in (
        (everyone, first),
        (first, everyone),
        (first, last),
        (first, middle),
        (middle, everyone),
    ):
        for source, target in itertools.product(_layouts(a), _layouts(b)):
            _check(whole, a, source, b, target)


@spmd(world_size=4)
def test_a_slice_of_a_mesh_and_the_mesh_itself() -> None:
    """Each rank has a slice of its own, and all of them agree on what moves."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(15.0).reshape(5, 3)
    for source, target in itertools.product(_layouts(mesh), _layouts(mesh["tp"])):
        _check(whole, mesh, source, mesh["tp"], target)
        _check(whole, mesh["dp"], target, mesh, source)
    for source, target in itertools.product(_layouts(mesh["tp"]), repeat=2):
        _check(whole, mesh["dp"], source, mesh["tp"], target)
    flat = mesh.flatten("all")
    _check(whole, mesh, (Shard(0), Shard(1)), flat, (Shard(0),))


@spmd(world_size=8)
def test_a_slice_by_a_flattened_axis_is_refused() -> None:
    """No common move exists where each rank sees other axes; the error says so before anything is sent."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    both = mesh["a", "b"].flatten("ab")
    x = distribute_tensor(torch.ones(8), mesh, [R, R, Shard(0)], src_data_rank=None)
    with pytest.raises(RedistributeError, match=r"a slice of .* go by way of the axes"):
        x.redistribute(both, [Shard(0)])


@spmd(world_size=4)
def test_torchs_mesh_is_taken() -> None:
    """A mesh of torch's own as the target; its groups are used where they exist."""
    torch_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
    ours = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(10.0)
    out = distribute_tensor(whole, ours, [Shard(0), R]).redistribute(torch_mesh, [Shard(0)])
    assert torch.equal(out.to_local(), _chunks(whole, 4, 0)[dist.get_rank()])


@spmd(world_size=4)
def test_what_need_not_be_sent_is_not_sent() -> None:
    """Renamed axes and pieces that everybody holds move without a collective; else there is one exchange."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    line = init_device_mesh("cpu", (4,))
    whole = torch.arange(64.0).reshape(8, 8)

    def count(target: DeviceMesh, source: list[Placement], laid: list[Placement]) -> int:
        x = distribute_tensor(whole, square, source, src_data_rank=None)
        with CommDebugMode() as comm:
            x.redistribute(target, laid)
        return comm.get_total_counts()

    assert count(named, [Shard(0), R], [Shard(0), R]) == 0
    assert count(line, [R, R], [Shard(0)]) == 0
    assert count(line, [Shard(0), Shard(0)], [Shard(0)]) == 0
    assert count(line, [Shard(0), R], [Shard(0)]) == 0
    assert count(line, [Shard(0), Shard(1)], [Shard(0)]) == 1
    assert count(line, [Shard(0), Partial()], [Shard(0)]) == 2


def test_no_rank_receives_what_it_holds_and_replicas_share_the_work() -> None:
    """Counted by hand: four receivers of one replicated row block take turns at its two holders."""
    held = Side((0, 1, 2, 3), (2, 2), (Shard(0), R))
    wanted = Side((4, 5, 6, 7), (4,), (Shard(0),))
    exchange = Exchange((8, 2), held, wanted)
    assert exchange.ranks == tuple(range(8))
    givers = {rank: [giver for giver, _ in exchange.arriving(rank)] for rank in wanted.ranks}
    assert givers == {4: [0], 5: [1], 6: [2], 7: [3]}
    assert exchange.received() == 4
    assert Exchange((8, 2), held, Side((0, 1, 2, 3), (4,), (Shard(0),))).received() == 0


@spmd(world_size=4)
def test_wire_dtypes_hold_between_meshes_too() -> None:
    """The value travels and stays in forward_dtype; the gradient comes back in the tensor's own dtype."""
    square, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(8.0), square, [Shard(0), R]).requires_grad_()
    out = x.redistribute(line, [R], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert out.dtype == torch.bfloat16
    out.to_local().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
