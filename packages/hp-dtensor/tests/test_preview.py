"""Plans that are shown against the collectives that really run, and against a table by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    Layout,
    LayoutError,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    redistribute_plan,
)
from hp_dtensor.plan import Link
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd

R = Replicate()


def _mesh(*shape: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    ranks = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return DeviceMesh(
        "cpu", ranks, mesh_dim_names=names[: len(shape)], _init_backend=False, _rank=0
    )


def test_the_table_of_a_move() -> None:
    """Steps with axis names, layouts, bytes and time, and a total; it needs no process group."""
    plan = redistribute_plan([Partial(), Shard(1)], [R, R], (64, 64), mesh=_mesh(2, 4))
    assert str(plan).splitlines() == [
        "step            axes  from            to         bytes  time",
        "all_reduce sum  dp    (P(sum), S(1))  (R, S(1))  4096   10.1 us",
        "all_gather      tp    (R, S(1))       (R, R)     12288  10.2 us",
        "total                                            16384  20.3 us",
    ]
    assert (plan.bytes, plan.collectives, plan.version) == (16384, 2, 1)
    assert [step.kind for step in plan.steps] == ["all_reduce", "all_gather"]


def test_nothing_to_do_is_said() -> None:
    """An empty plan prints too."""
    plan = redistribute_plan([R], [R], (4,), mesh=_mesh(2))
    assert plan.steps == ()
    assert "nothing to do" in str(plan)


def test_what_stands_for_a_layout() -> None:
    """Layouts, aliases and placements; dtype and links count."""
    mesh = _mesh(2, 4)
    layout = Layout.from_device_mesh(mesh)
    a = redistribute_plan(layout("dp", "tp"), ("tp", "dp"), (8, 8))
    b = redistribute_plan([Shard(0), Shard(1)], [Shard(1), Shard(0)], (8, 8), mesh=mesh)
    assert a == b
    half = redistribute_plan(layout("dp", "tp"), ("tp", "dp"), (8, 8), dtype=torch.bfloat16)
    assert 2 * half.bytes == a.bytes
    slow = redistribute_plan(
        layout("dp", "tp"), ("tp", "dp"), (8, 8), links=(Link(1.0, 1.0), Link(0.0, 1.0))
    )
    assert slow.seconds == 1.0 + a.bytes
    known = layout("dp", "tp").set_tensor_meta((8, 8), (8, 1), torch.float32)
    assert redistribute_plan(known, ("tp", "dp")) == a
    with pytest.raises(LayoutError, match="the global shape is not known"):
        redistribute_plan(layout("dp", "tp"), ("tp", "dp"))


def test_a_move_between_meshes() -> None:
    """Addends are combined on the source's mesh, then pieces are exchanged."""
    target = Layout.from_device_mesh(_mesh(8, names=("all",)))([Shard(0)])
    plan = redistribute_plan([Partial(), Shard(0)], target, (16, 4), mesh=_mesh(2, 4))
    assert [step.kind for step in plan.steps] == ["reduce_scatter", "exchange"]
    assert plan.steps[1].axes == ("dp", "tp", "all")
    assert plan.steps[1].bytes == 2 * 4 * 4  # most ranks hold nothing of their two rows


@spmd(world_size=4)
def test_what_is_shown_is_what_runs() -> None:
    """The number of collectives of every pair, counted while they run."""
    square = init_device_mesh("cpu", (2, 2))
    line = init_device_mesh("cpu", (4,))
    sides: list[Placement] = [R, Shard(0), Shard(1), Partial()]
    whole = torch.ones(8, 8)
    pairs = list(itertools.product(sides, repeat=2))
    for source, (mesh, target) in itertools.product(
        pairs, [(square, p) for p in pairs] + [(line, (p,)) for p in sides]
    ):
        x = distribute_tensor(whole, square, source, src_data_rank=None)
        plan = redistribute_plan(x, Layout.from_device_mesh(mesh)(list(target)))
        with CommDebugMode() as comm:
            x.redistribute(mesh, target)
        assert plan.collectives == comm.get_total_counts(), (source, target, str(plan))
