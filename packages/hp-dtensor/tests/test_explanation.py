"""What a program would communicate, as it is told without sending anything, and the ways to run an operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import (
    CommDebugMode,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    explain,
    strategies,
)
from hp_dtensor.rules import TensorMeta
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

aten = torch.ops.aten
R, P = Replicate(), Partial()


@spmd(world_size=4)
def test_an_operator_is_explained_without_being_run() -> None:
    """The table has the argument that moves, from and to which layout, by which collective, with its bytes."""
    mesh = init_device_mesh("cpu", (4,))
    a = distribute_tensor(torch.ones(64, 8), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        told = explain(torch.mm, a, b)
    assert comm.get_total_counts() == 1  # of a description without values, which sends nothing
    (row,) = told.rows
    assert (row.op, row.argument, row.shape) == ("aten.mm.default", 1, (8, 8))
    assert (row.source, row.target) == ((Shard(0),), (R,))
    assert (row.collectives, row.bytes) == (("all_gather",), 3 * 2 * 8 * 4)
    assert told.bytes == row.bytes
    assert told.written_out == 0
    assert "aten.mm.default" in str(told)


@spmd(world_size=2)
def test_what_is_told_is_what_happens() -> None:
    """A module with its backward sends the collectives that were told, and those that it writes out are counted apart."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    distribute_module(net, mesh)
    net[0].weight = nn.Parameter(
        distribute_tensor(net[0].weight.full_tensor().detach(), mesh, [Shard(1)])
    )

    def program(x: torch.Tensor) -> None:
        out = net(x)
        out.redistribute(placements=[R])  # type: ignore[operator]
        F.mse_loss(out, torch.zeros_like(out)).backward()

    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)])
    told = explain(program, x)
    net.zero_grad()
    with CommDebugMode() as comm:
        program(x)
    assert len(told.collectives) == comm.get_total_counts()
    assert [record.op for record in told.collectives] == [record.op for record in comm.records]
    assert any(row.op.startswith("aten.relu") for row in told.rows)


@spmd(world_size=2)
def test_a_module_is_explained_by_its_paths() -> None:
    """Parameters become descriptions, and each row says which submodule it belongs to."""
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1))
    distribute_module(net, mesh)
    net[0].weight = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]))
    told = explain(net, distribute_tensor(torch.randn(4, 6), mesh, [R]))
    assert {row.module for row in told.rows} == {"Sequential.1"}
    assert all(row.target == (R,) for row in told.rows)
    assert net[0].weight.device.type == "cpu"


@spmd(world_size=2)
def test_a_program_that_asks_for_values_says_so() -> None:
    """There are none."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="asks for one"):
        explain(lambda t: t.sum().item(), x)


def test_the_ways_to_run_a_product() -> None:
    """On one axis: rows, columns, what is summed over, each factor a sum, and whole."""
    a = TensorMeta((4, 6), (6, 1), torch.float32)
    b = TensorMeta((6, 8), (8, 1), torch.float32)
    found = {
        (*way.inputs, *way.outputs): way for way in strategies(aten.mm.default, a, b, mesh=(2,))
    }
    for way in (
        ((Shard(0),), (R,), (Shard(0),)),
        ((R,), (Shard(1),), (Shard(1),)),
        ((Shard(1),), (Shard(0),), (P,)),
        ((P,), (R,), (P,)),
        ((R,), (P,), (P,)),
        ((R,), (R,), (R,)),
    ):
        assert way in found
    way = found[(Shard(0),), (R,), (Shard(0),)]
    assert way.input_metas == (a, b)
    assert way.output_metas == (TensorMeta((4, 8), (8, 1), torch.float32),)
    assert way.version == 1


def test_the_ways_on_two_axes_are_the_product_of_those_on_one() -> None:
    """A dim may be cut by both axes; a tensor is never a sum in two ways; an unknown operator runs whole."""
    x = torch.empty(4, 6)
    found = {way.inputs[0] for way in strategies(aten.relu.default, x, mesh=(2, 2))}
    assert found == {(a, b) for a in (Shard(0), Shard(1), R) for b in (Shard(0), Shard(1), R)}
    kinds = [
        {place.reduce_op for place in way.outputs[0] or () if isinstance(place, Partial)}
        for way in strategies(aten.neg.default, x, mesh=(2, 2))
    ]
    assert max(map(len, kinds)) == 1
    (whole,) = strategies(aten.hash_tensor.default, x, mesh=(2, 2))
    assert whole.inputs == ((R, R),)
    assert len(strategies(aten.relu.default, x, mesh=(2, 2), at_most=3)) == 3
