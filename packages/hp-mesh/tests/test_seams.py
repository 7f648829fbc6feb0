"""One test per private thing of torch that `hp_mesh._torch` uses; run on the oldest torch too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hp_mesh import DeviceMesh, _torch, axes
from hp_mesh.testing import spmd
from torch.distributed import device_mesh as torch_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

pytestmark = pytest.mark.seam


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Play one rank of a world that does not communicate."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_world_group() -> None:
    """The world is None, then the default group, then None again."""
    assert _torch.world_group() is None
    with fake_world(2):
        assert _torch.world_group() is dist.group.WORLD
    assert _torch.world_group() is None


@spmd(world_size=2)
def test_default_backend_and_store() -> None:
    """The world's backend string and a store that all ranks share."""
    assert "gloo" in _torch.default_backend()
    store = _torch.default_store()
    assert store.add("seam", 1) in {1, 2}
    dist.barrier()
    assert store.add("seam", 0) == 2


def test_backend_devices() -> None:
    """A backend string, plain or a map, is read per device type."""
    assert _torch.backend_devices("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert _torch.backend_devices("gloo")["cpu"] == "gloo"


def test_is_options() -> None:
    """Options of a backend are told from anything else."""
    assert _torch.is_options(dist.ProcessGroupGloo._Options())
    assert not _torch.is_options("gloo")


@spmd(world_size=2)
def test_timeouts() -> None:
    """The default timeout of a backend, and that of a group, are read back."""
    assert isinstance(_torch.default_timeout("gloo"), timedelta)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=17))
    assert _torch.group_timeout(group) == timedelta(seconds=17)


def test_group_timeout_of_a_backend_without_one() -> None:
    """A backend that keeps no timeout gives None, or a timedelta."""
    with fake_world(2):
        assert dist.group.WORLD is not None
        found = _torch.group_timeout(dist.group.WORLD)
        assert found is None or isinstance(found, timedelta)


@spmd(world_size=2)
def test_create_group() -> None:
    """A group is made by its members alone, in the given order and name, and torch knows it."""
    rank = dist.get_rank()
    count = dist.distributed_c10d._world.group_count
    ranks = [1, 0] if rank < 2 else [rank]
    group = _torch.create_group(
        ranks,
        rank,
        name="seam_pair",
        label="a pair",
        backend="gloo",
        options=None,
        timeout=timedelta(seconds=30),
    )
    assert dist.distributed_c10d._world.group_count == count
    assert dist.get_process_group_ranks(group) == [1, 0]
    assert dist.get_rank(group) == 1 - rank
    assert group.group_desc == "a pair"
    assert _torch.group_name(group) == "seam_pair"
    assert _torch.is_alive(group)
    assert "seam_pair" in _torch.process_group_names()
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)
    assert value.item() == 1
    from torch.distributed._functional_collectives import all_reduce

    assert all_reduce(torch.ones(1), "sum", "seam_pair").item() == 2
    dist.destroy_process_group(group)
    assert not _torch.is_alive(group)


@spmd(world_size=1)
def test_create_group_hides_a_bound_device() -> None:
    """A world bound to a device is not split: the binding is hidden, and is on the new group after."""
    world = dist.group.WORLD
    assert world is not None
    device = torch.device("cuda", 0)
    world.bound_device_id = device
    try:
        group = _torch.create_group(
            [0],
            0,
            name="seam_bound",
            label="bound",
            backend="gloo",
            options=None,
            timeout=timedelta(seconds=30),
        )
        assert world.bound_device_id == device
        assert group.bound_device_id == device
    finally:
        world.bound_device_id = None


def test_find_backend() -> None:
    """The fake backend is made known, unknown names are returned."""
    assert _torch.find_backend("fake") == []
    assert _torch.find_backend("cpu:gloo,cuda:nccl") == []
    assert _torch.find_backend("pigeon") == ["pigeon"]


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 4), (6,)])
def test_make_layout_and_layout_digits(shape: tuple[int, ...]) -> None:
    """Our axes as torch's layout equal torch's own, and are read back."""
    grid = torch.arange(torch.Size(shape).numel()).view(shape)
    theirs = torch_mesh.DeviceMesh("cpu", grid, _init_backend=False, _rank=0)
    parts = axes.row_major(shape)
    assert _torch.make_layout(parts) == theirs._layout
    digits = _torch.layout_digits(theirs._layout)
    assert tuple(axes.Axis(axes.canonical(d)) for d in digits) == parts
    joined = axes.merge([parts[0], parts[-1]])
    assert _torch.layout_digits(_torch.make_layout([joined, joined]))[0] == list(joined.digits)


def test_host_ranks_and_strided_view_ignore_modes() -> None:
    """Tensors of ranks are real, on the host, and no inference tensors, whatever is active."""
    with torch.device("meta"), torch.inference_mode():
        made = [_torch.host_ranks(range(2, 8)), _torch.host_ranks((5, 3, 1, 0, 2, 4))]
        view = _torch.strided_view(made[0], [(2, 3), (2, 1)], 1, (2, 2))
    assert made[0].tolist() == [2, 3, 4, 5, 6, 7]
    assert made[1].tolist() == [5, 3, 1, 0, 2, 4]
    assert view.tolist() == [[3, 4], [6, 7]]
    assert not any(t.is_inference() for t in (*made, view))
    assert all(t.dtype == torch.int32 for t in (*made, view))


@spmd(world_size=2)
def test_plain_mesh() -> None:
    """A base mesh takes layout, rank map, root and group names."""
    ours = DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("a", "b"))
    plain = _torch.plain_mesh(ours, None, ours._dim_group_names)
    assert type(plain) is torch_mesh.DeviceMesh
    assert plain.get_group("a") is ours.get_group("a")
    assert plain.get_coordinate() == ours.get_coordinate()


@spmd(world_size=2)
def test_base_group_and_hash() -> None:
    """Torch's own methods work on what ours keeps in its place."""
    ours = DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("a", "b"))
    assert _torch.base_group(ours, "a") is ours.get_group("a")
    assert _torch.base_group(ours["a"], None) is ours.get_group("a")
    assert ours._dim_group_names[0] in ours._pg_registry
    assert _torch.base_hash(ours) == hash(ours.to_torch())
    # What DTensor, FSDP2 and functional collectives read.
    assert ours._rank_map.tolist() == [1, 0]
    assert ours._flatten_rank_map == (1, 0)
    assert ours._coordinate_on_dim == ours.get_coordinate()
    assert ours._is_current_rank_part_of_mesh()
    assert ours._sym_get_coordinate(0) == 1 - dist.get_rank()
    assert ours._get_mesh_dim_by_name("b") == 1
    assert ours["a"]._get_root_mesh_dim() == 0


def test_twins() -> None:
    """What is kept for a torch mesh goes with it."""
    mesh = torch_mesh.DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    twin = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    assert _torch.get_twin(mesh) is None
    _torch.set_twin(mesh, twin)
    assert _torch.get_twin(mesh) is twin
    key = id(mesh)
    del mesh
    assert key not in _torch._twins


def test_push_and_pop_current() -> None:
    """Torch's stack of current meshes is kept, by identity."""
    meshes = [DeviceMesh("cpu", [i], _init_backend=False, _rank=i) for i in range(2)]
    for mesh in meshes:
        _torch.push_current(mesh)
    _torch.pop_current(meshes[0])
    assert torch_mesh._mesh_resources.get_current_mesh() is meshes[1]
    _torch.pop_current(meshes[1])
    assert torch_mesh._mesh_resources.mesh_stack == []


def test_select_device_leaves_the_host_alone() -> None:
    """A mesh over the host, or in a fake world, selects no device."""
    with fake_world(2):
        _torch.select_device("cpu")
        _torch.select_device("cuda")
    assert not torch.cuda.is_initialized()


def test_process_group_names() -> None:
    """Live groups are listed by name."""
    assert _torch.process_group_names() == ()
    with fake_world(2):
        assert len(_torch.process_group_names()) == 1


def test_functional_collectives_are_loaded_on_demand() -> None:
    """What the collectives need of torch is there after load_functional()."""
    _torch.load_functional()
    x = torch.ones(2)
    assert _torch.waited(x) is x
    with fake_world(2):
        assert dist.group.WORLD is not None
        name = _torch.group_name(dist.group.WORLD)
        assert _torch.wait_tensor(_torch.all_reduce(x, "sum", name)).shape == x.shape


def test_what_torch_compile_reads_is_in_the_instance() -> None:
    """After a look, layout, names and shape are plain entries, where the tracer finds them."""
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "b"), _init_backend=False, _rank=0)
    for name in (
        "_layout",
        "shape",
        "ndim",
        "mesh_dim_names",
        "device_type",
        "_coordinate_on_dim",
    ):
        getattr(mesh, name)
        assert name in mesh.__dict__
    assert not _torch.is_compiling()
