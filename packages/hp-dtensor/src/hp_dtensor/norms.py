"""One gradient norm over everything, with one collective, wherever the parameters live.

Parameters of one model live on different meshes (dense and expert), some on none. Each element must count once: a rank
adds what it holds of a shard, and its share of what it holds as a replica. These local sums over all tensors are one
number, and one all-reduce over all ranks makes it the norm's power sum. Torch stacks the norms of the tensors instead,
which fails as soon as two of them live on different meshes.

A p-norm adds ``|x|**p``; the infinity norms take a maximum (or minimum). Gradients that are still Partial are reduced
first: a norm is not linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from hp_dtensor._torch import TorchDTensor
from hp_dtensor.local import as_ours
from hp_dtensor.placements import REPLICATE

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from hp_dtensor.dtensor import DTensor


def _reduced(tensor: Tensor) -> Tensor:
    return as_ours(tensor).reduce_partial() if isinstance(tensor, TorchDTensor) else tensor


def _copies(tensor: DTensor) -> int:
    """On how many ranks each element of *tensor* is held: once for each coordinate on the axes that replicate it.

    A slice of a mesh stands for all its parallel slices: what lives on ``mesh["dp"]`` is there once for each coordinate
    on the axes that were sliced away.
    """
    mesh = tensor.device_mesh
    slices = 1 if mesh.root_mesh is None else mesh.root_mesh.size() // mesh.size()
    return slices * math.prod(
        size
        for size, placement in zip(mesh.shape, tensor.placements, strict=True)
        if placement == REPLICATE
    )


def _local_power_sum(tensor: Tensor, norm_type: float, world: int) -> Tensor:
    """This rank's share of the sum of ``|x|**p`` over all elements, each counted once, in at least single precision."""
    held, copies = tensor, world
    if isinstance(tensor, TorchDTensor):
        ours = as_ours(tensor)
        if ours.device_mesh.get_coordinate() is None:
            return torch.zeros((), device=ours._local_tensor.device)
        held, copies = ours._local_tensor, _copies(ours)
    wide = torch.promote_types(
        held.dtype if not held.is_complex() else torch.float32, torch.float32
    )
    norm: Tensor = torch.linalg.vector_norm(
        held.detach(), norm_type, dtype=None if held.is_complex() else wide
    ).to(wide)
    power: Tensor = norm if norm_type == 0 else norm**norm_type
    return power / copies


def _local_extreme(tensor: Tensor, norm_type: float) -> Tensor:
    held = tensor
    if isinstance(tensor, TorchDTensor):
        held = tensor._local_tensor
        if tensor.device_mesh.get_coordinate() is None:
            held = held.new_empty(0)
    if held.numel() == 0:
        return torch.tensor(0.0 if norm_type > 0 else math.inf, device=held.device)
    extreme: Tensor = torch.linalg.vector_norm(held.detach(), norm_type)
    return extreme.float()


@torch.no_grad()
def get_total_norm(
    tensors: Iterable[Tensor] | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # torch's signature
    foreach: bool | None = None,  # torch's signature
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """The norm of all *tensors* as if they were one vector: a plain 0-d tensor, the same on every rank.

    Args:
        tensors: distributed tensors on any meshes, of ours or of torch's, and plain tensors, which count as the same on
            every rank. Every rank of *group* must call this with the same list.
        norm_type: p of the p-norm; ``inf`` and ``-inf`` for the largest and the smallest magnitude.
        error_if_nonfinite: raise when the result is infinite or not a number; this waits for the device.
        foreach: accepted for torch's sake; the result does not depend on it.
        group: the ranks that hold the tensors, all ranks when None. Meshes that do not overlap (pipeline stages) hold
            different tensors, and all of them count.

    Raises:
        RuntimeError: for a result that is not finite, on every rank, when *error_if_nonfinite*.
    """
    del foreach
    several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    norm_type = float(norm_type)
    if not several:
        return torch.tensor(0.0)
    reduced = [_reduced(tensor) for tensor in several]
    spread = any(isinstance(tensor, TorchDTensor) for tensor in reduced)
    world = dist.get_world_size(group) if spread else 1
    device = cast("Tensor", getattr(reduced[0], "_local_tensor", reduced[0])).device
    if math.isinf(norm_type):
        shares = [_local_extreme(tensor, norm_type).to(device) for tensor in reduced]
        total = torch.stack(shares).amax() if norm_type > 0 else torch.stack(shares).amin()
        how = dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
    else:
        shares = [_local_power_sum(tensor, norm_type, world).to(device) for tensor in reduced]
        total = torch.stack(shares).sum()
        how = dist.ReduceOp.SUM
    if spread and world > 1:
        dist.all_reduce(total, op=how, group=group)
    if not math.isinf(norm_type) and norm_type != 0:
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        msg = (
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. Set "
            "error_if_nonfinite=False to scale by a non-finite norm anyway"
        )
        raise RuntimeError(msg)
    return total


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # torch's signature
    foreach: bool | None = None,  # torch's signature
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients in place so that their common norm is at most *max_norm*; returns the norm before, plain.

    Args:
        parameters: whose gradients are clipped; those without one are left out. They may live on different meshes.
        max_norm: the largest norm allowed.
        norm_type: see :func:`get_total_norm`.
        error_if_nonfinite: see :func:`get_total_norm`.
        foreach: accepted for torch's sake.
        group: see :func:`get_total_norm`.

    Raises:
        RuntimeError: see :func:`get_total_norm`.
    """
    several = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    held = [parameter for parameter in several if parameter.grad is not None]
    for parameter in held:
        grad = cast("Tensor", parameter.grad)
        if isinstance(grad, TorchDTensor) and any(p.is_partial() for p in grad.placements):
            parameter.grad = _reduced(grad)
    grads = [cast("Tensor", parameter.grad) for parameter in held]
    total = get_total_norm(grads, norm_type, error_if_nonfinite, foreach, group=group)
    scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    _scale(grads, scale)
    return total


def _scale(grads: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply each gradient's local values by *scale*: no layout changes, so no dispatch is needed."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        local = cast("Tensor", getattr(grad, "_local_tensor", grad))
        by_device.setdefault(local.device, []).append(local)
    for device, locals_ in by_device.items():
        torch._foreach_mul_(locals_, scale.to(device))
