"""What a caller's type checker sees of hp-tp."""

from typing import assert_type

from hp_dtensor import Replicate, Shard
from hp_mesh import init_device_mesh
from hp_tp import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch import nn
from torch.distributed.tensor import parallel as torch_parallel

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


class Block(nn.Module):
    """Something to split."""

    up: nn.Linear


# A module stays what it was.
assert_type(parallelize_module(Block(), mesh, {"up": ColwiseParallel()}), nn.Module)

# Ours and torch's styles go into one plan, and a plan may nest.
style: ParallelStyle = RowwiseParallel(output_layouts=Shard(1))
torch_style: torch_parallel.ParallelStyle = style
parallelize_module(
    Block(),
    mesh,
    {
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        "norm": SequenceParallel(),
        "up": torch_parallel.ColwiseParallel(),
        "inner": {"down": RowwiseParallel()},
        "left": None,
    },
)

ColwiseParallel(input_layouts="dp")  # type: ignore[arg-type]
ColwiseParallel(Shard(0))  # type: ignore[call-arg]
parallelize_module(Block(), mesh, {"up": ColwiseParallel})  # type: ignore[dict-item]
ParallelStyle()  # type: ignore[abstract]
