"""Process groups of meshes on real ranks: which are made, when, between whom."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hp_mesh import (
    BackendError,
    DeviceMesh,
    GroupConfig,
    GroupError,
    NoGroupError,
    init_device_mesh,
)
from hp_mesh.groups import registry
from hp_mesh.testing import run_spmd, spmd


def made() -> list[tuple[int, ...]]:
    """Return the ranks of the communicators that meshes made here, beside the world."""
    world = dist.group.WORLD
    return [r.ranks for r in registry.records() if len(r.ranks) > 1 and r.group is not world]


def groups_of_torch() -> int:
    """Return how many groups torch has."""
    return len(dist.distributed_c10d._world.pg_map)


def summed(group: dist.ProcessGroup) -> float:
    """Return the sum of the global ranks of *group*, by communicating."""
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=group)
    return value.item()


@spmd(world_size=4)
def test_groups_are_made_when_asked_for() -> None:
    """Making and slicing a mesh makes no group; asking for one axis makes that axis's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    before = groups_of_torch()
    tp = mesh["tp"]
    assert tp.size() == 2
    assert mesh.get_local_rank("dp") == dist.get_rank() // 2
    assert groups_of_torch() == before
    group = tp.get_group()
    assert groups_of_torch() == before + 1
    assert summed(group) == (1 if dist.get_rank() < 2 else 5)
    assert mesh.get_group("tp") is mesh.get_group(1) is mesh.get_group(-1) is group
    assert mesh.get_comm_group_by_axis("tp") is group


@spmd(world_size=4)
def test_equal_rank_sets_share_one_group() -> None:
    """A second mesh, a reshaped view and a flattened mesh of known ranks make no new group."""
    first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first.get_all_groups()
    before = groups_of_torch()
    second = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "ep"))
    assert second.get_group("ep") is first.get_group("tp")
    assert second.get_group("dp") is first.get_group("dp")
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    view = world.unflatten(0, (2, 2), ("a", "b"))
    assert view.get_all_groups() == first.get_all_groups()
    assert world.get_group() is dist.group.WORLD
    assert first.flatten("all").get_group() is dist.group.WORLD
    assert groups_of_torch() == before


@spmd(world_size=4)
def test_group_ranks_follow_coordinates() -> None:
    """On a permuted mesh the group's ranks are in coordinate order, also for the whole world."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), rank_list=(3, 1, 2, 0))
    for axis in ("dp", "tp"):
        group = mesh.get_group(axis)
        assert dist.get_process_group_ranks(group) == mesh.get_rank_list_along_axis(axis)
        assert group.rank() == mesh.get_local_rank(axis)
    flat = mesh.flatten("all")
    assert dist.get_process_group_ranks(flat.get_group()) == [3, 1, 2, 0]
    gathered = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())]), group=flat.get_group())
    assert [int(t.item()) for t in gathered] == [3, 1, 2, 0]


@spmd(world_size=4)
def test_only_members_take_part() -> None:
    """A mesh that some ranks build alone gets its group without the others, who may make theirs."""
    rank = dist.get_rank()
    if rank < 3:
        mesh = DeviceMesh("cpu", [2, 0, 1])
        assert summed(mesh.get_group()) == 3
        assert mesh.get_local_rank() == [2, 0, 1].index(rank)
    both = DeviceMesh("cpu", [0, 3] if rank in {0, 3} else [1, 2])
    assert summed(both.get_group()) == 3
    # Torch's own groups, which the whole world makes, still agree on their name.
    late = dist.new_group([1, 3])
    if rank in {1, 3}:
        assert summed(late) == 4
    dist.barrier()


@spmd(world_size=4)
def test_disjoint_meshes_of_different_shape() -> None:
    """Halves of the world with different shapes work side by side."""
    rank = dist.get_rank()
    if rank < 2:
        mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp"))
    else:
        mesh = DeviceMesh("cpu", [[3, 2]], mesh_dim_names=("dp", "tp"))
    total = summed(mesh.get_group("dp")) + summed(mesh.get_group("tp"))
    assert total == (1 if rank < 2 else 5) + rank


@spmd(world_size=2)
def test_axes_of_size_one_communicate_with_nobody() -> None:
    """A size-1 axis has a group of this rank alone, right for every collective, and counts as none."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    group = mesh.get_group("a")
    assert dist.get_process_group_ranks(group) == [dist.get_rank()]
    assert mesh.get_group("c") is group
    assert made() == []
    x = torch.arange(4.0)
    for out in (torch.zeros(4), torch.zeros(4)):
        dist.reduce_scatter_tensor(out, x, group=group)
        assert torch.equal(out, x)
    out = torch.zeros(4)
    dist.all_to_all_single(out, x, group=group)
    assert torch.equal(out, x)
    out = torch.zeros(4)
    dist.all_gather_into_tensor(out, x, group=group)
    assert torch.equal(out, x)


@spmd(world_size=4)
def test_a_sub_mesh_then_another_mesh_then_destroy() -> None:
    """After a mesh of some ranks and one of all, every rank leaves destroy_process_group()."""
    part = DeviceMesh("cpu", [0, 1, 2])
    assert (part.get_coordinate() is None) == (dist.get_rank() == 3)
    if part.get_coordinate() is not None:
        assert summed(part.get_group()) == 3
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert [summed(g) for g in whole.get_all_groups()] == [
        [2, 4][dist.get_rank() % 2],
        [1, 5][dist.get_rank() // 2],
    ]
    dist.destroy_process_group()


@spmd(world_size=2)
def test_meshes_survive_a_new_world() -> None:
    """After destroy and init an old mesh gets new groups, and so does an equal new one."""
    import os

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), rank_list=(1, 0))
    old = mesh.get_group()
    assert summed(old) == 1
    name = mesh._dim_group_names[0]
    for number in range(2):
        dist.destroy_process_group()
        with pytest.raises(NoGroupError, match=r"torch\.distributed is not initialized"):
            mesh.get_group()
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"again{number}", store),
            rank=int(os.environ["RANK"]),
            world_size=2,
        )
        again = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), rank_list=(1, 0))
        assert again is not mesh
        assert again == mesh
        new = mesh.get_group()
        assert new is not old
        assert again.get_group() is new
        assert summed(new) == 1
        assert mesh._dim_group_names == [new.group_name]
        assert made() == [(1, 0)]
    assert name


@spmd(world_size=2)
def test_destroying_one_group_makes_it_anew() -> None:
    """A group that the user destroyed is not handed out again."""
    mesh = init_device_mesh("cpu", (2,), rank_list=(1, 0))
    old = mesh.get_group()
    dist.destroy_process_group(old)
    other = DeviceMesh("cpu", [1, 0])
    assert other.get_group() is not old
    assert summed(other.get_group()) == 1


@spmd(world_size=2)
def test_abort_leaves_no_group() -> None:
    """abort() ends the mesh's groups and makes none; the world's stays."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), rank_list=(1, 0))
    before = groups_of_torch()
    mesh.abort()
    assert groups_of_torch() == before
    mesh.get_group()
    mesh.abort()
    assert groups_of_torch() == before
    assert summed(dist.group.WORLD) == 1


@spmd(world_size=2)
def test_groups_can_be_switched_on_later() -> None:
    """A layout-only mesh refuses groups until init_backend(), which its slices follow."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"), init_backend=False)
    with pytest.raises(RuntimeError, match="process groups not initialized!"):
        mesh.get_group("a")
    assert not hasattr(mesh, "_dim_group_names")
    part = mesh["a"]
    assert mesh.init_backend() is mesh
    assert summed(part.get_group()) == 1
    assert len(mesh._dim_group_names) == 2
    assert init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")) is not mesh


@spmd(world_size=4)
def test_a_timeout_reaches_the_groups() -> None:
    """timeout= is that of every group; one for an axis wins; without it the world's own holds."""

    def timeout_of(group: dist.ProcessGroup) -> float:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), timeout=timedelta(seconds=7)
    )
    assert [timeout_of(g) for g in mesh.get_all_groups()] == [7, 7]
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), timeout={"tp": timedelta(seconds=9)}
    )
    world = timeout_of(dist.group.WORLD)
    assert [timeout_of(g) for g in mesh.get_all_groups()] == [world, 9]
    flat = init_device_mesh("cpu", (4,), timeout=timedelta(seconds=11))
    assert timeout_of(flat.get_group()) == 11
    same = init_device_mesh("cpu", (4,), timeout=timedelta(seconds=world))
    assert same.get_group() is dist.group.WORLD


@spmd(world_size=4)
def test_backends_and_options_per_axis() -> None:
    """An axis may have a fake backend, or options; equal options share a group, others do not."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=13)
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("dp", "tp"),
        backend_override={"dp": "fake", "tp": ("gloo", options)},
    )
    assert dist.get_backend(mesh.get_group("dp")) == "fake"
    tp = mesh.get_group("tp")
    assert summed(tp) == (1 if dist.get_rank() < 2 else 5)
    again = DeviceMesh(
        "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), backend_override=[None, options]
    )
    assert again.get_group("tp") is tp
    plain = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert plain.get_group("tp") is not tp
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    view = world.unflatten(
        0, (2, 1, 2), ("a", "b", "c"), backend_override={"b": "fake", 0: "fake"}
    )
    assert [dist.get_backend(g) for g in view.get_all_groups()] == ["fake", "fake", "gloo"]
    assert dist.get_backend(view["a", "c"].flatten("ac", "fake").get_group()) == "fake"


def test_wrong_group_settings() -> None:
    """Timeouts and overrides of the wrong kind are named before anything is made."""

    def make(**settings: object) -> None:
        DeviceMesh("cpu", [0, 1], _init_backend=False, **settings)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"timeout must be a timedelta, or a dict of them"):
        make(timeout=7)
    with pytest.raises(TypeError, match=r"timeout of axis 0 must be a timedelta, got 7"):
        make(timeout={0: 7})
    with pytest.raises(ValueError, match=r"timeout of axis 0 must be positive"):
        make(timeout=timedelta(0))
    with pytest.raises(TypeError, match=r"backend_override of axis 0 must be a backend name"):
        make(backend_override={0: 3})
    with pytest.raises(ValueError, match=r"one entry per axis \(1\), got 2"):
        make(backend_override=("fake", "fake"))
    with pytest.raises(
        ValueError, match=re.escape("got ['tp'], expected integers in range [0, 1).")
    ):
        make(backend_override={"tp": "fake"})


@spmd(world_size=4)
def test_from_group_takes_the_groups_as_they_are() -> None:
    """One group or a list makes a mesh without new groups; slices and views use them."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    before = groups_of_torch()
    row, column = rows[rank // 2], columns[rank % 2]
    line = DeviceMesh.from_group(row, "cpu", mesh_dim_names=("tp",))
    assert line.get_group() is row
    assert line.rank_list == ((0, 1) if rank < 2 else (2, 3))
    grid = DeviceMesh.from_group(
        [column, row], "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp")
    )
    assert grid.get_all_groups() == [column, row]
    assert grid["tp"].get_group() is row
    assert grid["tp"].root_mesh is grid
    # Other meshes find them by their ranks.
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    assert other.get_group("ep") is row
    assert groups_of_torch() == before
    assert DeviceMesh.from_group(row, "cpu", list(line.rank_list)) == DeviceMesh(
        "cpu", line.rank_list
    )


@spmd(world_size=2)
def test_from_group_checks_what_it_is_given() -> None:
    """No groups, missing or wrong ranks: a ValueError that says what is needed."""
    world = dist.group.WORLD
    with pytest.raises(ValueError, match="at least one process group"):
        DeviceMesh.from_group([], "cpu")
    with pytest.raises(ValueError, match="needs mesh= to know how several groups lie"):
        DeviceMesh.from_group([world, world], "cpu")
    with pytest.raises(
        ValueError,
        match=r"Invalid mesh \[\[0, 1\]\] for ProcessGroup with ranks \[0, 1\]: .* one group per axis",
    ):
        DeviceMesh.from_group(world, "cpu", [[0, 1]])
    with pytest.raises(
        ValueError, match=r"got mesh \[0, 1\] and 2 ProcessGroups; .* one group per axis"
    ):
        DeviceMesh.from_group([world, world], "cpu", [0, 1])
    with pytest.raises(ValueError, match=r"has ranks \[0, 1\], but the mesh has \[1, 0\]"):
        DeviceMesh.from_group(world, "cpu", [1, 0])


def test_the_registry_travels_by_its_name() -> None:
    """What refers to the registry may be sent to another process, which has its own."""
    import pickle

    assert pickle.loads(pickle.dumps(registry)) is registry


@spmd(world_size=2)
def test_pickling_carries_no_groups() -> None:
    """A mesh read by another process finds that process's groups."""
    pytest.importorskip("numpy", reason="torch exchanges objects through numpy")
    import pickle

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    mesh.get_all_groups()
    before = groups_of_torch()
    sent: list[object] = [pickle.dumps(mesh["a"]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, src=0)
    assert isinstance(sent[0], bytes)
    got = pickle.loads(sent[0])
    assert got is mesh["a"]
    assert groups_of_torch() == before
    assert summed(got.get_group()) == 1


@spmd(world_size=2)
def test_describe_lists_what_was_made() -> None:
    """describe() names each communicator, what for and with which backend, and makes none."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"), rank_list=(1, 0))
    before = groups_of_torch()
    text = mesh.describe()
    assert groups_of_torch() == before
    assert "Process groups made by meshes in this process, beside the world: 0" in text
    assert re.search(r"dp +2 +\d +1,0 +not made yet", text)
    mesh.get_group("dp")
    text = mesh.describe()
    assert "Process groups made by meshes in this process, beside the world: 1" in text
    assert re.search(r"axis 'dp' of mesh \(dp=2, tp=1\) +1,0 +gloo", text)
    assert re.search(r"dp +2 +\d +1,0 +gloo, named hp_", text)


def test_group_config_is_a_key() -> None:
    """Equal settings are equal keys; options count by identity."""
    assert GroupConfig("gloo", timedelta(1)) == GroupConfig("gloo", timedelta(1))
    options = dist.ProcessGroupGloo._Options()
    assert GroupConfig(options=options) == GroupConfig(options=options)
    assert GroupConfig(options=options) != GroupConfig(options=dist.ProcessGroupGloo._Options())


@spmd(world_size=2)
def test_unknown_backends_are_named() -> None:
    """A backend that torch does not have is refused on all ranks before anything is made."""
    mesh = DeviceMesh("cpu", [1, 0], backend_override=("carrier_pigeon",))
    with pytest.raises(
        BackendError, match=r"torch has no backend 'carrier_pigeon'; it has .*gloo"
    ):
        mesh.get_group()


# When ranks do not agree.


def _cross() -> str:
    """Rank 3 has another shape than the others; return what it is told."""
    shape = (4,) if dist.get_rank() < 3 else (2, 2)
    names = ("dp",) if dist.get_rank() < 3 else ("dp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, timeout=timedelta(seconds=25))
    start = time.monotonic()
    with pytest.raises(GroupError) as caught:
        mesh.get_group("dp")
    assert time.monotonic() - start < 15
    assert caught.value.label.startswith("axis 'dp' of mesh (dp=")
    return str(caught.value)


def test_a_mesh_of_another_shape_on_one_rank_is_found() -> None:
    """Ranks that wait for each other in different groups raise long before the timeout."""
    texts = run_spmd(_cross, world_size=4)
    assert any(
        "Ranks wait for each other in two different process groups" in text for text in texts
    )
    assert any("axis 'dp' of mesh (dp=4)" in text and "(dp=2, tp=2)" in text for text in texts)
    assert all("Give every rank the same mesh shape" in text for text in texts)


def _silent() -> str | None:
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), timeout=timedelta(seconds=3)
    )
    if dist.get_rank() == 3:
        time.sleep(5)
        return None
    if dist.get_rank() == 0:
        assert summed(mesh.get_group("tp")) == 1
        return None
    if dist.get_rank() == 1:
        assert summed(mesh.get_group("tp")) == 1
    with pytest.raises(GroupError) as caught:
        mesh.get_group("dp" if dist.get_rank() == 1 else "tp")
    assert caught.value.missing == (3,)
    return str(caught.value)


def test_a_rank_that_never_comes_is_named() -> None:
    """After the timeout the others are told the axis, the group and who is missing."""
    texts = run_spmd(_silent, world_size=4)
    assert texts[1] == (
        "axis 'dp' of mesh (dp=2, tp=2): the process group of ranks [1, 3] was not made within 3 s: "
        "ranks [3] never asked for it. A member may have died or never got here; a group is made when "
        "all its members ask for it."
    )
    assert texts[2] is not None
    assert "axis 'tp' of mesh (dp=2, tp=2): the process group of ranks [2, 3]" in texts[2]


def _late() -> float:
    mesh = init_device_mesh("cpu", (2,), rank_list=(1, 0), timeout=timedelta(seconds=30))
    if dist.get_rank() == 1:
        time.sleep(2.5)
    return summed(mesh.get_group())


def test_a_late_rank_is_waited_for() -> None:
    """A member that is slow, but comes, breaks nothing."""
    assert run_spmd(_late, world_size=2) == [1, 1]


def _retry() -> float:
    mesh = init_device_mesh("cpu", (2,), rank_list=(1, 0), timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        time.sleep(3.5)
    with pytest.raises(GroupError, match=re.escape("ranks [1] never asked for it")):
        mesh.get_group()
    return summed(mesh.get_group())


def test_a_group_that_failed_can_be_asked_for_again() -> None:
    """A failed attempt fails once on every member, the late one too; the next attempt works."""
    assert run_spmd(_retry, world_size=2) == [1, 1]
