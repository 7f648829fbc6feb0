"""Tensor parallelism under data parallelism that knows plain tensors only: DDP, and the first FSDP.

Both keep parameters as plain tensors (in buckets, or in one flat tensor) and need the distributed ones only while the
forward runs. For DDP, :func:`pre_dp_module_transform` makes plain pieces of the parameters, and the forward sees distributed
tensors made of them (:mod:`hp_tp.pieces`): gradients come back to the pieces, already added up over the tensor-parallel ranks
where those are replicas, and DDP reduces them over the data-parallel ones. For the first FSDP, :class:`DTensorExtensions`
does the same around its flat parameter.

FSDP2 takes distributed parameters as they are and needs none of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch.distributed.fsdp  # noqa: F401  # the next module can only be imported from within this one
from hp_dtensor import DTensor, Placement, Replicate, Shard
from hp_dtensor.spec import Spec, spec_of
from hp_mesh import DeviceMesh
from hp_mesh.collectives import wait
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions as TorchExtensions

from hp_tp._torch import mark_flattened, parameters_of
from hp_tp.errors import PlanError
from hp_tp.local_states import owner_of
from hp_tp.pieces import link, piece_of
from hp_tp.substitution import substitute

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    from hp_tp.substitution import Forward

__all__ = ["DTensorExtensions", "pre_dp_module_transform", "sync_grad_hook"]


class DeviceHandle(Protocol):
    """What starts work on a stream: ``torch.cuda``, ``torch.npu``, ``torch.cpu``."""

    def stream(self, stream: object) -> AbstractContextManager[object]:
        """Make *stream* the current one inside a ``with``."""
        ...


def sync_grad_hook(
    grad: Tensor,
    *,
    device_handle: DeviceHandle | None = None,
    compute_stream: object = None,
) -> Tensor:
    """Wait for a gradient that a collective is still bringing; a hook for a tensor or a parameter.

    Args:
        grad: the gradient.
        device_handle: of the kind of device, needed with a stream.
        compute_stream: the stream that shall wait; the current one when None.

    Returns:
        The finished gradient; one that nobody is bringing comes back as it is.
    """
    if compute_stream is None or device_handle is None:
        return wait(grad)
    with device_handle.stream(compute_stream):
        return wait(grad)


def _distributed(piece: Tensor, spec: Spec) -> Tensor:
    """A distributed tensor made of *piece*, with gradients flowing to it."""
    return DTensor.from_local(
        piece, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
    )


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """A module whose parameters have plain pieces: a wrapper of its forward, in which all below see distributed ones."""

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        return forward(module, *args, **kwargs)


def pre_dp_module_transform(module: nn.Module) -> nn.Module:
    """Make a tensor-parallel *module* ready for ``DistributedDataParallel`` over another mesh axis, in place.

    Its parameters become plain, for DDP to collect: this rank's pieces, sharing memory with what they were. From the first
    forward on the distributed ones are back, and have their gradients in the memory of the pieces' that DDP reduces; so an
    optimizer may hold either, clipping has the norm of the whole, and checkpoints are as without DDP.

    ``DistributedDataParallel(model, device_mesh=...)`` and ``replicate(model, device_mesh=...)`` of torch need no call of
    this: they do the same by themselves.

    Args:
        module: after ``parallelize_module``.

    Returns:
        The module.

    Raises:
        PlanError: when none of its parameters is distributed, which a second call finds as well.

    Example:
        >>> from hp_tp import pre_dp_module_transform
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> def wrap(model, mesh):
        ...     pre_dp_module_transform(model)
        ...     return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    """
    found = False
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        if isinstance(parameter, TorchDTensor):
            found = True
            owner, name = owner_of(module, path)
            piece = piece_of(parameter)
            parameters_of(owner)[name] = link(parameter) if piece is None else piece
    if not found:
        message = f"no parameter of {type(module).__name__} is distributed; call parallelize_module first, and this once"
        raise PlanError(message)
    substitute(module, _Rebuilt())
    return module


class DTensorExtensions(TorchExtensions):
    """What the first FSDP calls around its flat parameter, for parameters that are distributed over another axis.

    It is torch's, with our tensors: shards of any length, gradients that are waited for, and dispatch that gives right
    numbers. FSDP makes torch's own where it meets a sliced mesh; set ours on a wrapped module with
    ``fsdp_module._fsdp_extension = DTensorExtensions(fsdp_module._device_handle)``.

    Args:
        device_handle: of the kind of device, ``torch.cuda`` for example.
    """

    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Spec | None]:
        """This rank's piece of a distributed *tensor*, and what is needed to make it whole again."""
        spec = spec_of(tensor)
        if spec is None:
            return tensor, None
        local = cast("Tensor", tensor._local_tensor)  # type: ignore[attr-defined]  # every DTensor has one
        return local.requires_grad_(tensor.requires_grad), spec

    def post_unflatten_transform(self, tensor: Tensor, param_extension: Spec) -> Tensor:
        """The distributed tensor whose piece is *tensor*, a view of the flat parameter."""
        chosen: object = self.compute_stream  # FSDP sets it
        stream = self.device_handle.current_stream() if chosen is None else chosen
        with self.device_handle.stream(stream):
            whole = _distributed(tensor, param_extension)
            if tensor.requires_grad:
                tensor.register_hook(sync_grad_hook)
            return mark_flattened(whole)

    def chunk_dtensor(self, tensor: Tensor, rank: int, device_mesh: TorchMesh) -> Tensor:
        """*tensor*, whole over the data-parallel axes, cut over the innermost of them as FSDP cuts: along dim 0.

        Raises:
            ValueError: when the mesh is no slice of one that has the tensor-parallel axis as well.
        """
        del rank
        root = DeviceMesh.from_torch(device_mesh).root_mesh
        if root is None or root.ndim < 2:
            message = f"{device_mesh} is no slice of a mesh that has a tensor-parallel axis too; make one mesh of both and slice it"
            raise ValueError(message)
        spec = spec_of(tensor)
        local = tensor.detach() if spec is None else tensor.detach()._local_tensor  # type: ignore[attr-defined]  # every DTensor has one
        own: Placement = Replicate() if spec is None else spec.placements[0]
        data = [Replicate()] * (root.ndim - 2)
        whole: list[Placement] = [*data, Replicate(), own]
        cut: list[Placement] = [*data, Shard(0), own]
        entered = DTensor.from_local(local.clone(), root, whole, shape=tuple(tensor.shape))
        return entered.redistribute(root, cut)

    def all_gather_dtensor(self, tensor: TorchDTensor, parent_mesh: TorchMesh | None) -> Tensor:
        """This tensor-parallel rank's piece, gathered over the data-parallel axes.

        Raises:
            ValueError: when *tensor* lives on another mesh than *parent_mesh*.
        """
        if parent_mesh != tensor.device_mesh:
            message = f"the tensor lives on {tensor.device_mesh}, and FSDP's parent mesh is {parent_mesh}"
            raise ValueError(message)
        placements = [*[Replicate()] * (tensor.device_mesh.ndim - 1), tensor.placements[-1]]
        return tensor.redistribute(tensor.device_mesh, placements).to_local()
