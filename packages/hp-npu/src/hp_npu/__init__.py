"""Ascend: the HCCL backend as data, and fused kernels that run anywhere.

- ``probe``    is torch_npu there, and if not, what is missing
- ``hccl``     what the HCCL backend can do; found by hp-mesh through an entry point
- ``kernels``  operators in the ``hp::`` namespace, a reference and a sharding rule each
- ``errors``   what is refused, and why

Importing this package defines its operators and registers their sharding rules with hp-dtensor; it
does not import torch_npu. That happens when a device is asked for.
"""

from hp_npu._version import __version__
from hp_npu.errors import (
    KernelArgumentError,
    KernelFallbackWarning,
    KernelUnavailableError,
    NpuError,
    NpuUnavailableError,
)
from hp_npu.kernels import (
    KERNELS,
    DeviceKernelRegistry,
    Gradient,
    KernelRegistry,
    KernelSpec,
    Policy,
    VendorOp,
)
from hp_npu.kernels.rms_norm import rms_norm
from hp_npu.probe import NpuStatus, npu_status, require_npu

__all__ = [
    "KERNELS",
    "DeviceKernelRegistry",
    "Gradient",
    "KernelArgumentError",
    "KernelFallbackWarning",
    "KernelRegistry",
    "KernelSpec",
    "KernelUnavailableError",
    "NpuError",
    "NpuStatus",
    "NpuUnavailableError",
    "Policy",
    "VendorOp",
    "__version__",
    "npu_status",
    "require_npu",
    "rms_norm",
]
