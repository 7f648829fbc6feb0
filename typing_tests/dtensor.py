"""What a caller's type checker sees of hp-dtensor."""

from typing import assert_type

import torch
from hp_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    clip_grad_norm_,
    distribute_module,
    distribute_tensor,
    zeros,
)
from hp_mesh import DeviceMesh, init_device_mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
whole = torch.ones(4, 4)

# A distributed tensor is torch's distributed tensor, and stays ours when it moves.
x = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
assert_type(x, DTensor)
torch_x: TorchDTensor = x
assert_type(x.redistribute(mesh, [Shard(1), Replicate()]), DTensor)
assert_type(DTensor.from_local(whole, mesh, [Shard(0), Partial("avg")]), DTensor)
assert_type(zeros(4, 4, device_mesh=mesh, placements=[Shard(0), Replicate()]), DTensor)

# What leaves is a plain tensor.
assert_type(x.to_local(), Tensor)
assert_type(x.full_tensor(), Tensor)

assert_type(x.device_mesh, DeviceMesh)
assert_type(x.placements, tuple[Placement, ...])

# The placement values are torch's.
shard: TorchShard = Shard(0)
strided: Placement = StridedShard(0, split_factor=2)
aliases = distribute_tensor(whole, mesh, ("dp", "None"))
nested = distribute_tensor(whole, mesh, (("dp", "tp"), "None"))

linear = nn.Linear(4, 4)
assert_type(distribute_module(linear, mesh), nn.Module)
assert_type(clip_grad_norm_(linear.parameters(), 1.0), Tensor)

Shard("dp")  # type: ignore[arg-type]
distribute_tensor(whole, mesh, [0, 1])  # type: ignore[arg-type]
distribute_tensor(whole, "cpu", [Shard(0)])  # type: ignore[arg-type]
x.redistribute(mesh, [Shard(0), Replicate()], async_op="yes")  # type: ignore[arg-type]
