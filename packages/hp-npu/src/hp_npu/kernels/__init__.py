"""Fused kernels, a file each: an operator of ours, its reference, gradient and sharding rule.

- ``protocol``  what a kernel is made of (`KernelSpec`), and the policies of a call
- ``registry``  which code a call runs: the vendor's operator or the reference
- ``_define``   makes the operator out of a spec
- ``_cuts``     placements that rules talk about
- one module per kernel, which defines its operators when it is imported
"""

from hp_npu.kernels.protocol import Gradient, KernelRegistry, KernelSpec, Policy, VendorOp
from hp_npu.kernels.registry import KERNELS, DeviceKernelRegistry

__all__ = [
    "KERNELS",
    "DeviceKernelRegistry",
    "Gradient",
    "KernelRegistry",
    "KernelSpec",
    "Policy",
    "VendorOp",
]
