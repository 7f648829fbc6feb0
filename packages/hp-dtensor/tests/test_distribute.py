"""distribute_module and distribute_tensor beyond the plain case: ties, attributes, callbacks, sources."""

from __future__ import annotations

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    LayoutError,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
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
