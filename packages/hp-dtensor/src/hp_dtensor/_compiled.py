"""Functions that a compiler puts into its graph as they are, without looking inside.

Imported only while something is being compiled: marking a function costs the import of torch's compiler, which takes
seconds and is nobody's business in an eager program. Their non-tensor arguments are meshes and placements, which torch
knows as constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hp_dtensor import _autograd

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor

    from hp_dtensor.placements import Placement


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]  # torch declares it untyped
def redistribute_local(
    local: Tensor,
    mesh: DeviceMesh,
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    shape: tuple[int, ...],
    grad_source: tuple[Placement, ...],
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> Tensor:
    """See :func:`hp_dtensor._autograd.redistribute_local`."""
    return _autograd.redistribute_local(
        local,
        mesh,
        source,
        target,
        shape,
        grad_source,
        forward_dtype,
        backward_dtype,
        async_op=False,
    )


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]  # torch declares it untyped
def from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    grad_placements: tuple[Placement, ...] | None,
) -> Tensor:
    """See :func:`hp_dtensor._autograd.from_local`."""
    from hp_dtensor.dtensor import DTensor

    return _autograd.from_local(DTensor, local, mesh, placements, shape, stride, grad_placements)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]  # torch declares it untyped
def made(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    """What the factory *name* makes; see :mod:`hp_dtensor.factories`."""
    from hp_dtensor.factories import MAKERS

    return MAKERS[name](*args, **kwargs)
