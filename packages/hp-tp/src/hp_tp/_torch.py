"""What torch calls private and we use, in one place; each use with the reason why the public surface does not do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

__all__ = [
    "GRAPHS_RECOMPUTE",
    "apply_style",
    "buffers_of",
    "children_of",
    "dispatch_modes",
    "in_backward",
    "localized_by_torch",
    "mark_flattened",
    "parameters_of",
    "pipeline_products_in_compiler",
    "start_fake_world",
]

GRAPHS_RECOMPUTE = TorchVersion(torch.__version__) >= "2.15"
"""Whether a compiled graph may hold a recomputed region with a mesh in it; torch 2.12 saves the mesh as if it were a tensor."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters, None ones and repeated ones included; the public iterators skip both."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers, to exchange one without making it persistent."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's children under every name they have; the public iterator skips the second name of one."""
    return module._modules


def mark_flattened(tensor: Tensor) -> Tensor:
    """Tell the first FSDP that *tensor* is a view of its flat parameter; it looks for a mark that has no public name."""
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened

    _set_fsdp_flattened(tensor)
    return tensor


def localized_by_torch(parameter: nn.Parameter) -> bool:
    """Whether torch has made *parameter* as the piece of a distributed one, for DDP; the mark, which we take off, has no public name."""
    return parameter.__dict__.pop("_st_info", None) is not None


def apply_style(style: TorchStyle, module: nn.Module, mesh: TorchMesh) -> nn.Module:
    """Apply a style of ours or of torch's; the one method that both have has an underscore."""
    return style._apply(module, mesh)


def start_fake_world(size: int) -> None:
    """Make this process rank 0 of *size* ranks whose collectives do nothing: for a dry run without devices.

    The fake backend is torch's own tool for this, but its store lives with torch's test code.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


def pipeline_products_in_compiler(mesh: TorchMesh) -> bool:
    """Turn on inductor's pass that overlaps products with collectives, if *mesh*'s ranks share memory; it has no public switch."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    if not is_symm_mem_enabled_for_group(mesh.get_group().group_name):
        return False
    inductor._micro_pipeline_tp = True
    return True


def dispatch_modes() -> int:
    """How many dispatch modes look on: one that keeps results must not see them changed in place; nothing public counts them."""
    return torch._C._len_torch_dispatch_stack()


def in_backward() -> bool:
    """Whether the caller runs in a backward, as what is computed again does; autograd has no public question for it."""
    return torch._C._current_graph_task_id() != -1
