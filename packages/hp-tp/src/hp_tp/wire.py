"""Distributed tensors between the stages of a pipeline: the layout once, then local pieces only.

A pipeline sends plain buffers, and learns their shapes once. What a stage takes is a piece of a tensor whose whole it must know:
shape, layout, dtype. So that is packed as a value to be sent when the pipeline is set up (it is small and pickles), and each
step sends pieces from a rank to the one with the same coordinate in the next stage. Nothing is gathered for the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hp_dtensor import DTensor, Placement
from hp_dtensor.spec import make_spec, spec_of
from hp_mesh import DeviceMesh
from torch import Tensor

from hp_tp.errors import BoundaryError

__all__ = ["WireMeta", "pack_meta", "unpack"]


@dataclass(frozen=True, slots=True)
class WireMeta:
    """What the next stage must know of a tensor besides its piece."""

    shape: tuple[int, ...]
    """The shape of the whole."""
    stride: tuple[int, ...]
    """The strides of the whole."""
    dtype: torch.dtype
    placements: tuple[Placement, ...] | None
    """The layout; None for a plain tensor."""
    requires_grad: bool

    def local_shape(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """The shape of this rank's piece on *mesh*: that of the buffer to receive into."""
        if self.placements is None:
            return self.shape
        spec = make_spec(mesh, self.placements, self.shape, self.stride, self.dtype)
        return tuple(spec.local_shape)


def pack_meta(tensor: Tensor) -> WireMeta:
    """Return what the next stage must know of *tensor*, distributed or plain.

    Example:
        >>> import torch
        >>> from hp_tp import pack_meta
        >>> pack_meta(torch.ones(2, 3)).shape
        (2, 3)
    """
    spec = spec_of(tensor)
    if spec is None:
        return WireMeta(
            tuple(tensor.shape), tensor.stride(), tensor.dtype, None, tensor.requires_grad
        )
    return WireMeta(
        tuple(spec.shape), tuple(spec.stride), spec.dtype, spec.placements, tensor.requires_grad
    )


def unpack(meta: WireMeta, local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the tensor of which *local* is this rank's piece on *mesh*, as a leaf that requires grad like the one packed.

    Its ``.grad``, after the backward, has the same layout: send ``x.grad.to_local()`` back.

    Args:
        meta: what :func:`pack_meta` gave in the stage before.
        local: what was received; its storage is shared.
        mesh: the axes of this stage, with the sizes of those before.

    Raises:
        BoundaryError: when *local* is not such a piece.

    Example:
        >>> import torch
        >>> from hp_tp import pack_meta, unpack
        >>> meta = pack_meta(torch.ones(2, 3, requires_grad=True))
        >>> unpack(meta, torch.zeros(2, 3), None).requires_grad
        True
    """
    wanted = meta.local_shape(mesh)
    if tuple(local.shape) != wanted or local.dtype is not meta.dtype:
        message = (
            f"received {tuple(local.shape)} of {local.dtype}, and this rank's piece of {meta.shape} laid out as "
            f"{meta.placements} is {wanted} of {meta.dtype}; receive into an empty tensor of meta.local_shape(mesh)"
        )
        raise BoundaryError(message)
    local = local.detach()
    if meta.placements is not None:
        local = DTensor.from_local(
            local, mesh, meta.placements, shape=meta.shape, stride=meta.stride
        )
    return local.requires_grad_(meta.requires_grad)
