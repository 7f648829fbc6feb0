"""Torch's own DTensor, TP, FSDP2, DCP and compiler on our mesh, against one device."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from torch import nn
from torch.distributed import device_mesh as torch_mesh


def grid() -> DeviceMesh:
    """Return the (dp 2, tp 2) mesh."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def network() -> nn.Sequential:
    """Return the same two-layer network on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def parallelized(mesh: DeviceMesh) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a network under TP and FSDP2 on slices of *mesh*, and the plain one."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = network()
    whole = copy.deepcopy(net)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net, whole


views = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # as torch means it


@views
@pytest.mark.seam
@spmd(world_size=4)
def test_fsdp2_over_tp_trains_like_one_device() -> None:
    """Losses and parameters of three steps equal those of the single-device program."""
    mesh = grid()
    net, whole = parallelized(mesh)
    mine = torch.optim.SGD(net.parameters(), lr=0.1)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        loss = net(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean()
        loss.backward()
        mine.step()
        mine.zero_grad()
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        expected = whole(x).square().mean()
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(loss.detach(), expected.detach())
    for ours, single in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), single)


@pytest.mark.seam
@spmd(world_size=4)
def test_the_mesh_fsdp2_makes_is_ours_again() -> None:
    """FSDP2 concatenates slices to a base mesh; it equals ours and leads back to it."""
    mesh = grid()
    net, _ = parallelized(mesh)
    made = net[0].weight.device_mesh
    assert made == mesh
    assert hash(made) == hash(mesh)
    # Torch keeps meshes by value, so this one may stem from an equal mesh of an earlier test.
    ours = DeviceMesh.from_torch(made)
    assert ours == mesh
    assert type(ours) is DeviceMesh
    assert DeviceMesh.from_torch(made) is ours
    assert ours.get_group("tp") is mesh.get_group("tp")
    assert DeviceMesh.concatenate([made["dp"], made["tp"]]) is ours


@pytest.mark.seam
@spmd(world_size=4)
def test_torchs_concatenation_of_our_slices_is_ours_again() -> None:
    """A base mesh that torch builds from our slices leads back to our mesh, with its settings."""
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "fake"}
    )
    made = torch_mesh.DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
    assert type(made) is torch_mesh.DeviceMesh
    assert made == mesh
    assert DeviceMesh.from_torch(made) is mesh
    assert made.get_group("dp") is mesh.get_group("dp")
    assert made.get_group("tp") is mesh.get_group("tp")


@views
@pytest.mark.seam
@spmd(world_size=4)
def test_hsdp_on_a_slice_of_two_axes() -> None:
    """FSDP2 with replication takes our 2-D slice, also under axes of size 1."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp"))
    net = network()
    whole = copy.deepcopy(net)
    fully_shard(net, mesh=mesh["replicate", "shard"])
    torch.manual_seed(1)
    x = torch.randn(8, 8)
    net(x.chunk(4)[dist.get_rank()]).square().mean().backward()
    whole(x).square().mean().backward()
    for ours, single in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), single.grad)


@pytest.mark.seam
@spmd(world_size=4)
def test_torchs_dtensor_redistributes_over_our_mesh() -> None:
    """Sharding, gathering and reducing over one and two axes, and over a flattened one, are right."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = grid()
    x = torch.arange(40.0).view(8, 5)
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(1), Replicate()],
    ):
        d = distribute_tensor(x, mesh, placements)
        torch.testing.assert_close(d.full_tensor(), x)
        torch.testing.assert_close(
            d.redistribute(placements=[Shard(1), Shard(0)]).full_tensor(), x
        )
    mesh.flatten("all")
    d = distribute_tensor(x, mesh, [Shard(0), Shard(0)])
    torch.testing.assert_close(d.redistribute(placements=[Replicate(), Replicate()]).to_local(), x)
    torch.testing.assert_close(d.sum().full_tensor(), x.sum())
    flat = distribute_tensor(x, mesh["all"], [Shard(0)])
    whole = distribute_tensor(x.t(), mesh["all"], [Replicate()])
    torch.testing.assert_close((flat @ whole).full_tensor(), x @ x.t())


@spmd(world_size=4)
def test_tensors_on_non_contiguous_and_permuted_meshes() -> None:
    """Round trips hold on flattened axes that are no neighbours, and on permuted ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    x = torch.arange(10.0)
    flat = mesh["dp", "tp"].flatten("dptp")
    torch.testing.assert_close(distribute_tensor(x, flat, [Shard(0)]).full_tensor(), x)
    turned = init_device_mesh("cpu", (4,), rank_list=(3, 0, 2, 1))
    d = distribute_tensor(x, turned, [Shard(0)])
    torch.testing.assert_close(d.full_tensor(), x)
    place = turned.get_local_rank()
    torch.testing.assert_close(d.to_local(), [*x.chunk(4), x[:0]][place])
    swapped = grid().permute("tp", "dp")
    y = torch.arange(8.0).view(4, 2)
    torch.testing.assert_close(
        distribute_tensor(y, swapped, [Shard(0), Shard(1)]).full_tensor(), y
    )


@spmd(world_size=4)
def test_a_tensor_on_a_part_of_the_world() -> None:
    """A rank outside of the mesh holds nothing and takes part in nothing."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1, 2])
    d = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    if dist.get_rank() == 3:
        assert d.to_local().numel() == 0
    else:
        torch.testing.assert_close((d * 2).full_tensor(), torch.arange(6.0) * 2)


@pytest.mark.seam
@spmd(world_size=4)
def test_distributed_checkpoints_save_and_load() -> None:
    """A DCP checkpoint of a model on our mesh loads into another layout of it."""
    pytest.importorskip("numpy", reason="torch exchanges objects through numpy")
    import tempfile

    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = grid()
    folder: list[object] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    x = torch.arange(48.0).view(8, 6)
    saved = {"x": distribute_tensor(x, mesh, [Shard(0), Shard(1)])}
    dcp.save(saved, checkpoint_id=str(folder[0]))
    loaded = {"x": distribute_tensor(torch.zeros(8, 6), mesh["tp"], [Replicate()])}
    dcp.load(loaded, checkpoint_id=str(folder[0]))
    torch.testing.assert_close(loaded["x"].full_tensor(), x)


@pytest.mark.seam
@spmd(world_size=2)
def test_torch_load_reads_tensors_on_our_mesh() -> None:
    """torch.save and torch.load(weights_only=True) carry a DTensor on our mesh, without groups."""
    import io

    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    d = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    file = io.BytesIO()
    torch.save({"d": d}, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)["d"]
    assert again.device_mesh is mesh
    torch.testing.assert_close(again.full_tensor(), torch.arange(4.0))


@pytest.mark.seam
@pytest.mark.slow
@spmd(world_size=4, timeout=200)
def test_compiled_graphs_use_our_mesh() -> None:
    """fullgraph: DTensors in and out, from_local inside, groups, sizes, names, coordinates, slices."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = grid()
    tp = mesh["tp"]
    x = torch.arange(8.0).view(4, 2)

    def compiled(call: object) -> object:
        return torch.compile(call, backend="aot_eager", fullgraph=True)  # type: ignore[call-overload]

    def redistribute(d: DTensor) -> torch.Tensor:
        return (d.redistribute(placements=[Replicate(), Replicate()]) + 1).to_local()

    d = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    torch.testing.assert_close(compiled(redistribute)(d), x + 1)  # type: ignore[operator]

    def enter(local: torch.Tensor) -> torch.Tensor:
        made = DTensor.from_local(local, tp, [Shard(0)], run_check=False)
        return made.redistribute(placements=[Replicate()]).to_local() * tp.size()

    torch.testing.assert_close(compiled(enter)(torch.ones(2)), 2 * torch.ones(4))  # type: ignore[operator]

    def ask(local: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(local, "sum", mesh.get_group("tp"))
        total = total + functional.all_reduce(local, "sum", (mesh, 0))
        place = mesh.get_coordinate()
        assert place is not None
        facts = mesh.size(0) + mesh.ndim + mesh.shape[1] + len(mesh.mesh_dim_names or ())
        return total * facts + place[0] * 10 + mesh.get_local_rank("tp")

    expected = 4 * 8 + (dist.get_rank() // 2) * 10 + dist.get_rank() % 2
    torch.testing.assert_close(
        compiled(ask)(torch.ones(2)),  # type: ignore[operator]
        torch.full((2,), float(expected)),
    )


@pytest.mark.seam
@pytest.mark.slow
@spmd(world_size=4, timeout=200)
def test_the_first_use_of_a_group_may_be_in_a_graph() -> None:
    """A group that nobody asked for before is made while torch.compile traces."""
    import torch.distributed._functional_collectives as functional

    mesh = grid()

    def ask(local: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(local, "sum", mesh.get_group("dp"))

    result = torch.compile(ask, backend="aot_eager", fullgraph=True)(
        torch.full((2,), float(dist.get_rank()))
    )
    torch.testing.assert_close(result, torch.full((2,), float(dist.get_rank() % 2 * 2 + 2)))


@views
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.seam
@pytest.mark.slow
@spmd(world_size=4, timeout=200)
def test_compiled_training_over_fsdp2_and_tp() -> None:
    """A compiled TP + FSDP2 network has the gradients of the single device."""
    net, whole = parallelized(grid())
    run = torch.compile(net, backend="aot_eager")
    torch.manual_seed(3)
    x = torch.randn(4, 8)
    run(x.chunk(2)[dist.get_rank() // 2]).square().mean().backward()
    whole(x).square().mean().backward()
    for ours, single in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), single.grad)


@pytest.mark.seam
@spmd(world_size=4)
def test_from_torch_shares_groups() -> None:
    """Our mesh of a torch mesh has its ranks, names and groups, is made once, and makes none."""
    theirs = torch_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = theirs._flatten("all")
    before = len(dist.distributed_c10d._world.pg_map)
    ours = DeviceMesh.from_torch(theirs)
    assert ours == theirs
    assert DeviceMesh.from_torch(theirs) is ours
    assert DeviceMesh.from_torch(ours) is ours
    assert ours.get_all_groups() == theirs.get_all_groups()
    assert ours["tp"].get_group() is theirs["tp"].get_group()
    part = DeviceMesh.from_torch(theirs["tp"])
    assert part == theirs["tp"]
    assert part.root_mesh is ours
    assert DeviceMesh.from_torch(flat).get_group() is flat.get_group()
    assert len(dist.distributed_c10d._world.pg_map) == before


@pytest.mark.seam
@spmd(world_size=4)
def test_to_torch_shares_groups() -> None:
    """The plain torch mesh has our ranks, names and groups; its slices too."""
    ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), rank_list=(3, 2, 1, 0))
    plain = ours.to_torch()
    assert type(plain) is torch_mesh.DeviceMesh
    assert plain == ours
    assert hash(plain) == hash(ours)
    assert plain.get_group("tp") is ours.get_group("tp")
    assert plain["dp"].get_group() is ours.get_group("dp")
    part = ours["tp"].to_torch()
    assert part == ours["tp"]
    assert type(part._get_root_mesh()) is torch_mesh.DeviceMesh
    assert pickle.loads(pickle.dumps(ours)) == plain
    bare = init_device_mesh("cpu", (4,), init_backend=False).to_torch()
    assert not hasattr(bare, "_dim_group_names")


@pytest.mark.seam
@spmd(world_size=2)
def test_current_mesh_of_torchs_functions() -> None:
    """Torch functions that take no mesh use the one that was entered."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with mesh:
        d = distribute_tensor(torch.arange(4.0), placements=[Shard(0)])
    assert d.device_mesh is mesh


@pytest.mark.seam
@spmd(world_size=2)
def test_ddp_takes_our_mesh() -> None:
    """DistributedDataParallel(device_mesh=) averages over our mesh."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False), device_mesh=mesh)
    net(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    torch.testing.assert_close(net.module.weight.grad, torch.full((1, 2), 0.5))


def test_a_mesh_costs_no_heavy_import(tmp_path: Path) -> None:
    """Making, slicing and drawing a mesh imports neither torch.distributed.tensor nor sympy."""
    import subprocess
    import sys

    code = (
        "import sys; from hp_mesh import DeviceMesh;"
        "m = DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('a', 'b'), _init_backend=False, "
        "_rank=0); m['a'].mesh; m.flatten('c'); m.unflatten(0, (2, 1), ('x', 'y')); m.draw(); hash(m);"
        "print([n for n in ('sympy', 'torch.distributed.tensor', 'torch._dynamo') if n in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert out.stdout.strip() == "[]"
