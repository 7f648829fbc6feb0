"""What a caller's type checker sees of hp-mesh."""

from typing import assert_type

import torch
from hp_mesh import DeviceMesh, get_current_mesh, init_device_mesh
from hp_mesh.testing import run_spmd, spmd
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

# A mesh is torch's mesh, and stays ours through everything that derives one from it.
assert_type(mesh, DeviceMesh)
torch_mesh: TorchMesh = mesh
assert_type(mesh["tp"], DeviceMesh)
assert_type(mesh["dp", "tp"], DeviceMesh)
assert_type(mesh.flatten("all"), DeviceMesh)
assert_type(mesh.root_mesh, DeviceMesh | None)
assert_type(DeviceMesh.from_torch(torch_mesh), DeviceMesh)
assert_type(get_current_mesh(), DeviceMesh)
with mesh as entered:
    assert_type(entered, DeviceMesh)

# Ranks and sizes are integers, and groups are torch's.
assert_type(mesh.shape, tuple[int, ...])
assert_type(mesh.size("tp"), int)
assert_type(mesh.size(0), int)
assert_type(mesh.get_local_rank("tp"), int)
assert_type(mesh.get_coordinate(), tuple[int, ...] | None)
assert_type(mesh.rank_list, tuple[int, ...])
assert_type(mesh.get_group("tp"), dist.ProcessGroup)
assert_type(mesh.get_all_groups(), list[dist.ProcessGroup])

mesh[0]  # type: ignore[index]
mesh.size(1.0)  # type: ignore[arg-type]
init_device_mesh("cpu", 4)  # type: ignore[arg-type]
init_device_mesh("cpu", (4,), ("tp",))  # type: ignore[call-arg]


# The runner gives what the function gives, once for each rank.
def rank_of(tensor: torch.Tensor) -> int:
    return int(tensor.sum())


assert_type(run_spmd(rank_of, torch.ones(3), world_size=2), list[int])


@spmd(world_size=2)
def takes_a_parameter(dim: int) -> None:
    assert dim


takes_a_parameter(1)
takes_a_parameter("1")  # type: ignore[arg-type]
run_spmd(rank_of, size=2)  # type: ignore[call-arg]
