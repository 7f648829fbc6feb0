"""What a caller's type checker sees of hp-npu."""

from typing import assert_type

import torch
from hp_mesh import Capability
from hp_npu import KERNELS, KernelRegistry, NpuStatus, npu_status, rms_norm
from hp_npu.hccl import capabilities
from torch import Tensor

x, weight = torch.ones(2, 4), torch.ones(4)

# A kernel looks like the function that it stands for.
assert_type(rms_norm(x, weight), Tensor)
assert_type(rms_norm(x, weight, eps=1e-6), Tensor)
registry: KernelRegistry = KERNELS

# What the entry point gives is what hp-mesh reads.
assert_type(capabilities(), tuple[Capability, ...])
assert_type(npu_status(), NpuStatus)

rms_norm(x)  # type: ignore[call-arg]
rms_norm(x, weight, eps="small")  # type: ignore[arg-type]
