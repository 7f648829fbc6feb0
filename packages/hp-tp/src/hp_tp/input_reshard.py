"""What a module keeps of its inputs for the backward, kept in pieces.

Tensor parallelism gives every rank the same input, and every rank keeps it. Kept in pieces it costs a rank its share, and one
gather in the backward. Only what is known to be equal on all ranks may be cut: the module's own inputs, plain ones (and views
of them) and distributed ones that say they are replicas. Everything else that is kept, pieces of hidden features above
all, differs from rank to rank and stays as it is; cutting it as well would put together a tensor that never was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hp_dtensor import DTensor, Replicate, Shard
from hp_dtensor.redistribute import redistribute_tensor
from hp_dtensor.spec import Spec, spec_of
from hp_mesh import DeviceMesh

from hp_tp.boundary import map_tensors
from hp_tp.substitution import substitute

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    from hp_tp.substitution import Forward

__all__ = ["input_reshard"]


@dataclass(frozen=True, slots=True)
class _Piece:
    """This rank's piece of a replica, and what the whole was."""

    local: Tensor
    shape: tuple[int, ...]
    dim: int
    spec: Spec | None
    """Of a distributed tensor."""


def _local(tensor: Tensor) -> Tensor:
    """This rank's piece of a distributed tensor; a plain one as it is."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


@dataclass(frozen=True, slots=True)
class _Resharded:
    """A module that keeps its inputs in pieces: a wrapper of its forward."""

    mesh: DeviceMesh
    dim: int

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        inputs: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            spec = spec_of(tensor)
            if spec is None or all(placement.is_replicate() for placement in spec.placements):
                inputs.add(_local(tensor).untyped_storage().data_ptr())
            return tensor

        map_tensors(note, [args, kwargs])
        inputs.discard(0)  # what has no memory

        def pack(tensor: Tensor) -> Tensor | _Piece:
            return self._cut(tensor) if self._is_replica(tensor, inputs) else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, self._whole):
            return forward(module, *args, **kwargs)

    def _is_replica(self, tensor: Tensor, inputs: set[int]) -> bool:
        """Whether every rank has the same, and enough of it to share."""
        if tensor.numel() < self.mesh.size() or not -tensor.ndim <= self.dim < tensor.ndim:
            return False
        return _local(tensor).untyped_storage().data_ptr() in inputs

    def _cut(self, tensor: Tensor) -> _Piece:
        shape, dim = tuple(tensor.shape), self.dim % tensor.ndim
        with torch.no_grad():
            local = redistribute_tensor(
                _local(tensor).detach(), self.mesh, shape, (Replicate(),), (Shard(dim),)
            )
        return _Piece(local, shape, dim, spec_of(tensor))

    def _whole(self, kept: Tensor | _Piece) -> Tensor:
        if not isinstance(kept, _Piece):
            return kept
        with torch.no_grad():
            whole = redistribute_tensor(
                kept.local, self.mesh, kept.shape, (Shard(kept.dim),), (Replicate(),)
            )
            return whole if kept.spec is None else DTensor(whole, kept.spec)


def input_reshard(
    module: nn.Module, tp_device_mesh: TorchMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Let *module* keep its inputs in pieces between forward and backward, in place.

    Use it around a recomputed block, whose inputs are all that it keeps, when plain inputs are equal on all ranks; with
    sequence parallelism they are pieces already.

    Args:
        module: whose plain inputs are equal on all ranks of the mesh.
        tp_device_mesh: the one axis.
        input_reshard_dim: the dim along which inputs are cut; None leaves the module as it is.

    Returns:
        The module.

    Example:
        >>> from torch import nn
        >>> from hp_tp import input_reshard
        >>> def lay_out(block, mesh):
        ...     return input_reshard(block, mesh["tp"], 0)
    """
    if input_reshard_dim is None:
        return module
    mesh = DeviceMesh.from_torch(tp_device_mesh)
    if mesh.ndim != 1:
        message = f"input_reshard takes a mesh of one axis, and got {mesh}; slice it first"
        raise ValueError(message)
    substitute(module, _Resharded(mesh, input_reshard_dim))
    return module
