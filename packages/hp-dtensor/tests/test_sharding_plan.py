"""Modules sharded by a plan against the single device, and plans that do not fit."""

from __future__ import annotations

import copy

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    LayoutError,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    shard_module,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

R = Replicate()


class Net(nn.Module):
    """Two layers with a tied bias, a keyword and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.relu = nn.ReLU()
        self.second = nn.Linear(6, 4)
        self.again = nn.Linear(6, 4)
        self.again.weight = self.second.weight

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.relu(self.first(x))
        if scale is not None:
            hidden = hidden * scale
        return self.second(hidden), self.again(hidden)


@spmd(world_size=4)
def test_a_sharded_module_computes_what_it_did() -> None:
    """Parameters by placements and aliases, inputs by name, outputs, local results; gradients too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = Net()
    alone = copy.deepcopy(net)
    net.first.weight.note = "kept"  # type: ignore[attr-defined]
    plan = ShardingPlan(
        plan={
            "first.weight": ("tp", "None"),
            "first.bias": (R, Shard(0)),
            "self.second.weight": ("None", "tp"),
            "second.bias": (R, R),
            "again.bias": (R, R),
        },
        input_plan={"input": {"x": ("dp", "None"), "scale": (R, R)}},
        output_plan={"relu.output": ("dp", "tp"), "output": [(Shard(0), R), None]},
        return_local_tensor=["again"],
    )
    with CommDebugMode() as comm:
        assert shard_module(net, mesh, plan) is net
    assert comm.get_total_counts() == 0
    assert isinstance(net.first.weight, DTensor)
    assert net.first.weight.placements == (R, Shard(0))
    assert net.first.weight.note == "kept"
    assert net.again.weight is net.second.weight
    x, scale = torch.randn(8, 4), torch.randn(6)
    dx = distribute_tensor(x, mesh, [R, R])
    dscale = distribute_tensor(scale, mesh, [R, Shard(0)])
    one, two = net(dx, scale=dscale)
    want = alone(x, scale=scale)
    assert isinstance(one, DTensor)
    assert one.placements == (Shard(0), R)
    assert type(two) is torch.Tensor
    torch.testing.assert_close(one.full_tensor(), want[0])
    one.square().sum().backward()
    want[0].square().sum().backward()
    for got, expected in zip(net.parameters(), alone.parameters(), strict=True):
        if expected.grad is not None:
            assert isinstance(got.grad, DTensor)
            torch.testing.assert_close(got.grad.full_tensor(), expected.grad)


@spmd(world_size=1)
def test_one_rank_gets_its_module_back() -> None:
    """A mesh of one rank is a mesh."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    net = nn.Linear(2, 2)
    assert shard_module(net, mesh, ShardingPlan(plan={"weight": ("tp", "None")})) is net
    assert isinstance(net.weight, DTensor)


@spmd(world_size=2)
def test_a_function_is_wrapped() -> None:
    """Inputs by position, the output, and nothing else."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    seen = []

    def double(value: torch.Tensor, factor: float) -> torch.Tensor:
        assert isinstance(value, DTensor)
        seen.append(value.placements)
        return value * factor

    plan = ShardingPlan(input_plan={"input": [(R,), None]}, output_plan={"output": ("tp",)})
    wrapped = shard_module(double, mesh, plan)
    out = wrapped(x, 2.0)
    assert isinstance(out, DTensor)
    assert (seen, out.placements) == ([(R,)], (Shard(0),))
    with pytest.raises(LayoutError, match="a plain function has no parameters"):
        shard_module(double, mesh, ShardingPlan(plan={"weight": (R,)}))


@spmd(world_size=2)
def test_what_does_not_fit_is_named_before_anything_changes() -> None:
    """Types, paths, endings, parameters that are distributed, and counts."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = Net()
    for plan, error, words in (
        ({"weight": (R,)}, TypeError, "give a ShardingPlan"),
        (ShardingPlan(plan=[1]), TypeError, r"ShardingPlan\.plan is a list"),
        (ShardingPlan(plan={"weight": (R,)}), LayoutError, "there is no parameter 'weight'"),
        (ShardingPlan(plan={"first.bias": (Shard(1),)}), LayoutError, "the tensor has 1 dims"),
        (ShardingPlan(input_plan={"third.input": (R,)}), LayoutError, "no submodule 'third'"),
        (ShardingPlan(output_plan={"first": (R,)}), LayoutError, "does not end in 'output'"),
        (ShardingPlan(return_local_tensor=["third"]), KeyError, "return_local_tensor names"),
    ):
        with pytest.raises(error, match=words):
            shard_module(net, mesh, plan)
    assert not any(isinstance(p, DTensor) for p in net.parameters())
    shard_module(net, mesh, ShardingPlan(plan={"first.bias": (R,)}, output_plan={"output": (R,)}))
    with pytest.raises(LayoutError, match=r"'first\.bias' is distributed already"):
        shard_module(net, mesh, ShardingPlan(plan={"first.bias": (R,)}))
    for name in ("first.weight", "second.weight", "second.bias", "again.bias"):
        shard_module(net, mesh, ShardingPlan(plan={name: (R,)}))
    with pytest.raises(LayoutError, match="gave 2 outputs, but its output plan has 1 layouts"):
        net(distribute_tensor(torch.ones(2, 4), mesh, [R]))
