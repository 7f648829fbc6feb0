"""distribute_module and distribute_tensor beyond the plain case: ties, attributes, callbacks, sources."""

from __future__ import annotations

import itertools

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    check_tensor_meta,
    distribute_module,
    distribute_tensor,
    spmd_distribute_tensor,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

R = Replicate()


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid(tensor: torch.Tensor | None) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


class Tied(nn.Module):
    """An embedding whose table is the head's weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.emb.weight
        self.register_buffer("scale", torch.arange(6.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.emb(ids)) * self.scale


@spmd(world_size=2)
def test_ties_attributes_and_buffers_survive() -> None:
    """A tied parameter stays one object, its attributes are kept, frozen stays frozen, buffers are replicated."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(mesh.get_local_rank())  # ranks start with different values; rank 0's count
    model = Tied()
    model.emb.weight.requires_grad_(False)
    model.emb.weight.note = "kept"
    distribute_module(model, mesh)
    assert model.out.weight is model.emb.weight
    assert isinstance(model.emb.weight, DTensor)
    assert isinstance(model.scale, DTensor)
    assert model.emb.weight.note == "kept"
    assert not model.emb.weight.requires_grad
    first = model.emb.weight.to_local().clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(first, model.emb.weight.to_local())
    with pytest.raises(RuntimeError, match="only be called once"):
        distribute_module(model, mesh)


@spmd(world_size=2)
def test_callbacks_run_in_order_and_their_result_counts() -> None:
    """partition_fn sees every submodule, root first; input_fn and output_fn wrap the root's forward."""
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    alone = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    alone.load_state_dict(net.state_dict())
    with torch.no_grad():
        for p in alone.parameters():
            torch.distributed.broadcast(p, 0)
    seen = []

    def partition(name: str, module: nn.Module, where: object) -> None:
        seen.append(name)
        if isinstance(module, nn.Linear):
            module.register_parameter(
                "weight",
                nn.Parameter(distribute_tensor(module.weight.detach(), where, [Shard(0)])),
            )

    distribute_module(
        net,
        mesh,
        partition,
        input_fn=lambda _module, inputs, where: tuple(
            distribute_tensor(x, where, [R]) for x in inputs
        ),
        output_fn=lambda _module, output, _where: _whole(output),
    )
    assert seen == ["", "0", "1"]
    assert net[0].weight.placements == (Shard(0),)
    assert net[0].bias.placements == (R,)
    x = torch.ones(2, 4)
    torch.testing.assert_close(net(x), alone(x))
    with pytest.raises(ValueError, match="input_fn should take in 3 arguments"):
        distribute_module(nn.Linear(2, 2), mesh, input_fn=lambda: None)


@spmd(world_size=4)
def test_the_source_rank_decides() -> None:
    """The data of the group rank asked for ends up everywhere; None cuts each rank's own and sends nothing."""
    mesh = init_device_mesh("cpu", (2, 2))
    rank = torch.distributed.get_rank()
    mine = torch.full((4, 4), float(rank))
    for source, value in ((0, 0), (1, 3)):
        laid = distribute_tensor(mine, mesh, [Shard(0), R], src_data_rank=source)
        assert _whole(laid).unique().tolist() == [value]
    with CommDebugMode() as comm:
        own = distribute_tensor(mine, mesh, [Shard(0), R], src_data_rank=None)
    assert comm.get_total_counts() == 0
    assert own.to_local().unique().tolist() == [rank]
    with pytest.raises(LayoutError, match="src_data_rank=2 is no rank of mesh axis 0"):
        distribute_tensor(mine, mesh, [R, R], src_data_rank=2)


@spmd(world_size=2)
def test_what_is_distributed_already_must_agree() -> None:
    """A distributed input comes back when it is laid out as asked, and is an error otherwise."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert distribute_tensor(d, mesh, [Shard(0)]) is d
    with pytest.raises(
        ValueError, match=r"Cannot distribute a DTensor laid out as .*redistribute\(\)"
    ):
        distribute_tensor(d, mesh, [R])
    leaf = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf tensors"):
        distribute_tensor(leaf * 2, mesh, [R])


@spmd(world_size=4)
def test_a_source_scatters_where_an_axis_cuts() -> None:
    """Each rank receives its piece and not the whole; every dtype, uneven, strided and empty pieces included."""
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    rank = torch.distributed.get_rank()
    whole = torch.arange(35).reshape(7, 5)
    with CommDebugMode() as comm:
        distribute_tensor(whole, flat, [Shard(0)])
    assert comm.get_comm_counts() == {torch.ops.c10d.scatter_: 1}
    layouts = list(itertools.product([R, Shard(0), Shard(1), Partial()], repeat=2))
    layouts += [(StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(0))]
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16):
        mine = (whole % 3).to(dtype) if rank == 0 else torch.zeros(7, 5, dtype=dtype)
        for placements in layouts:
            if dtype == torch.bool and Partial() in placements:
                continue
            made = distribute_tensor(mine, square, placements)
            own = distribute_tensor((whole % 3).to(dtype), square, placements, src_data_rank=None)
            assert torch.equal(made.to_local(), own.to_local()), (dtype, placements)
    last = torch.full((3,), float(rank))
    assert distribute_tensor(last, flat, [Shard(0)], src_data_rank=3).full_tensor().unique() == 3


@spmd(world_size=4)
def test_a_piece_as_a_plain_tensor() -> None:
    """spmd_distribute_tensor cuts without sending, in the order of an alias tuple, and puts gradients together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    whole = torch.arange(16.0).reshape(8, 2).requires_grad_()
    with CommDebugMode() as comm:
        piece = spmd_distribute_tensor(whole, mesh, (("tp", "dp"), "None"))
    assert comm.get_total_counts() == 0
    assert type(piece) is torch.Tensor
    start = 2 * (2 * tp + dp)
    assert torch.equal(piece, whole[start : start + 2])
    (piece * piece).sum().backward()
    torch.testing.assert_close(whole.grad, 2 * whole.detach())
    made = spmd_distribute_tensor(whole.detach(), mesh, [Shard(0), R], as_dtensor=True)
    assert isinstance(made, DTensor)
    mine = torch.full((4,), float(torch.distributed.get_rank()))
    sent = spmd_distribute_tensor(mine, mesh, [Shard(0), R], src_data_rank=1)
    assert sent.tolist() == [3.0, 3.0]
    with pytest.raises(LayoutError, match="has addends"):
        spmd_distribute_tensor(mine, mesh, [Partial(), R])


@spmd(world_size=2)
def test_ranks_agree_on_a_tensor_or_all_say_how_not() -> None:
    """Dtype and requires_grad always, shape and stride when asked; the error names the rank."""
    rank = torch.distributed.get_rank()
    check_tensor_meta(torch.ones(2 + rank))
    with pytest.raises(
        ValueError, match=r"rank 0 holds .*shape \(2,\).* rank 1 holds .*shape \(3,\)"
    ):
        check_tensor_meta(torch.ones(2 + rank), check_shape_stride=True)
    with pytest.raises(LayoutError, match="Inconsistent tensor metadata"):
        check_tensor_meta(torch.ones(2, dtype=(torch.float32, torch.float64)[rank]))


@spmd(world_size=2)
def test_inside_a_transform_constants_are_distributed_and_values_are_refused() -> None:
    """torch.func.grad may distribute what it does not differentiate; a value of its own is one error on every rank."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).view(3, 2)

    weight = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])

    def weighted(weight: torch.Tensor) -> torch.Tensor:
        return (distribute_tensor(whole, mesh, [Shard(0)]) * weight).sum()

    grad = torch.func.grad(weighted)(weight)
    assert isinstance(grad, DTensor)
    torch.testing.assert_close(grad.full_tensor(), whole)
    with pytest.raises(LayoutError, match=r"torch\.func transform.*from_local"):
        torch.func.grad(lambda x: distribute_tensor(x, mesh, [Shard(0)]).sum().full_tensor())(
            whole
        )
