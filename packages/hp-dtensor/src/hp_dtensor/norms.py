"""One gradient norm over everything, with one collective, wherever the parameters live.

Parameters of one model live on different meshes (dense and expert), some on none. Each element must count once: a rank
adds what it holds of a shard, and its share of what it holds as a replica. These local sums over all tensors are one
number, and one all-reduce over all ranks makes it the norm's power sum. Torch stacks the norms of the tensors instead,
which fails as soon as two of them live on different meshes.

A p-norm adds ``|x|**p``; the infinity norms take a maximum (or minimum). A norm is not linear, so gradients that are still
Partial have to be combined first. They travel in the same collective: each rank puts its addend, beside its number, where
it belongs in the whole; after the sum each rank has them whole, and adds their norms without asking anybody. What that would
cost more than a few megabytes for is combined alone before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from hp_dtensor._torch import Partial, TorchDTensor, new_dtensor
from hp_dtensor.local import as_ours
from hp_dtensor.pieces import put, ranges_in, take
from hp_dtensor.placements import REPLICATE
from hp_dtensor.spec import spec_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from hp_dtensor.dtensor import DTensor
    from hp_dtensor.pieces import Ranges
    from hp_dtensor.spec import Spec

_TOGETHER = 2**24
"""How many elements of gradients that are addends travel with the norm; those that come after are combined before."""


def _reduced(tensor: Tensor) -> Tensor:
    return as_ours(tensor).reduce_partial() if isinstance(tensor, TorchDTensor) else tensor


def _travelling(tensors: Sequence[Tensor], world: int) -> dict[int, Spec]:
    """The positions of tensors whose addends travel with the norm, and their layouts.

    These are sums and averages over meshes that are, or are slices of, a mesh of the whole world: only there is it certain
    that all ranks hold the same list.
    """
    found: dict[int, Spec] = {}
    room = _TOGETHER
    for position, tensor in enumerate(tensors):
        spec = spec_of(tensor)
        if spec is None or not any(p.is_partial() for p in spec.placements):
            continue
        size = math.prod(spec.shape)
        kinds = {p.reduce_op for p in spec.placements if isinstance(p, Partial)}
        whole = spec.mesh.root_mesh or spec.mesh
        if whole.size() == world and kinds <= {"sum", "avg"} and size <= room:
            if not tensor.is_floating_point():
                continue
            found[position] = spec
            room -= size
    return found


def _range_in_whole(spec: Spec) -> Ranges:
    return ranges_in(tuple(((0, size),) for size in spec.shape), spec.local_box)


def _addend(tensor: Tensor, spec: Spec, world: int, dtype: torch.dtype) -> Tensor:
    """This rank's share of the whole *tensor*, flat: zero where it holds nothing."""
    parts = world // math.prod(
        size
        for size, place in zip(spec.mesh.shape, spec.placements, strict=True)
        if not (place == REPLICATE or (isinstance(place, Partial) and place.reduce_op == "avg"))
    )
    held = cast("Tensor", getattr(tensor, "_local_tensor", tensor)).detach().to(dtype)
    whole = held.new_zeros(tuple(spec.shape))
    put(whole, held / parts, _range_in_whole(spec))
    return whole.reshape(-1)


def _combined(whole: Tensor, tensor: Tensor, spec: Spec) -> Tensor:
    """*tensor* with its addends combined, of which *whole* has all elements."""
    placements = tuple(REPLICATE if p.is_partial() else p for p in spec.placements)
    piece = take(whole.view(tuple(spec.shape)), _range_in_whole(spec)).to(tensor.dtype)
    cls = type(as_ours(cast("DTensor", tensor)))
    return new_dtensor(cls, piece.contiguous(), spec.with_placements(placements), False)


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
        norm_type: p of the p-norm; ``inf`` and ``-inf`` for the largest and the smallest magnitude. As torch has it, 0
            counts the tensors that are not zero.
        error_if_nonfinite: raise when the result is infinite or not a number; this waits for the device.
        foreach: accepted for torch's sake; the result does not depend on it.
        group: the ranks that hold the tensors, all ranks when None. Meshes that do not overlap (pipeline stages) hold
            different tensors, and all of them count.

    Raises:
        RuntimeError: for a result that is not finite, on every rank, when *error_if_nonfinite*.
    """
    del foreach
    several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    total, _ = _total_norm(several, float(norm_type), group)
    _check_finite(total, norm_type, wanted=error_if_nonfinite)
    return total


def _check_finite(total: Tensor, order: float, *, wanted: bool) -> None:
    if wanted and not bool(torch.isfinite(total)):
        msg = (
            f"The total norm of order {float(order)} for gradients is non-finite, so it cannot be clipped. Set "
            "error_if_nonfinite=False to scale by a non-finite norm anyway"
        )
        raise RuntimeError(msg)


def _total_norm(
    tensors: Sequence[Tensor], order: float, group: ProcessGroup | None
) -> tuple[Tensor, list[Tensor]]:
    """The norm of all *tensors*, and the tensors with their addends combined."""
    if not tensors:
        return torch.tensor(0.0), []
    spread = any(isinstance(tensor, TorchDTensor) for tensor in tensors)
    world = dist.get_world_size(group) if spread else 1
    open_ = _travelling(tensors, world) if world > 1 else {}
    settled = [t if i in open_ else _reduced(t) for i, t in enumerate(tensors)]
    device = cast("Tensor", getattr(settled[0], "_local_tensor", settled[0])).device
    closed = [tensor for i, tensor in enumerate(settled) if i not in open_]
    share = _share(closed, order, world).to(device)
    if spread and world > 1 and not open_:
        dist.all_reduce(share, op=_COMBINED.get(order, dist.ReduceOp.SUM), group=group)
    elif open_:
        share = _travel(share, settled, open_, order, group)
    return _joined(share, order), settled


_COMBINED = {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}


def _share(tensors: Sequence[Tensor], order: float, world: int) -> Tensor:
    """What this rank adds to the sum of powers, or its extreme."""
    if math.isinf(order):
        if not tensors:
            return torch.tensor(0.0 if order > 0 else math.inf)
        extremes = [_local_extreme(tensor, order) for tensor in tensors]
        stacked = torch.stack([extreme.to(extremes[0].device) for extreme in extremes])
        return stacked.amax() if order > 0 else stacked.amin()
    if not tensors:
        return torch.zeros(0 if order == 0 else ())
    powers = [_local_power_sum(tensor, order, world) for tensor in tensors]
    stacked = torch.stack([power.to(powers[0].device) for power in powers])
    return stacked if order == 0 else stacked.sum()


def _joined(shares: Tensor, order: float) -> Tensor:
    """What *shares*, which are the same on all ranks, make together."""
    if order == 0:
        return (shares > 0).sum().to(shares.dtype)
    if math.isinf(order):
        return shares.amax() if order > 0 else shares.amin()
    return shares.sum() ** (1.0 / order)


def _travel(
    share: Tensor,
    tensors: list[Tensor],
    open_: dict[int, Spec],
    order: float,
    group: ProcessGroup | None,
) -> Tensor:
    """Sum *share* and the addends of *open_* in one collective: everybody's shares; what is whole goes into *tensors*.

    A sum has no maximum: for the infinity norms each rank has a place of its own for its extreme.
    """
    world = dist.get_world_size(group)
    wide = share.dtype
    for position in open_:
        wide = torch.promote_types(wide, tensors[position].dtype)
    mine = share.to(wide).reshape(-1)
    if math.isinf(order):
        mine = mine.new_zeros(world)
        mine[dist.get_rank(group)] = share
    parts = [
        mine,
        *(_addend(tensors[i], spec, world, wide).to(mine.device) for i, spec in open_.items()),
    ]
    everything = torch.cat(parts)
    dist.all_reduce(everything, group=group)
    head, *wholes = everything.split([part.numel() for part in parts])
    shares = [head]
    for whole, (position, spec) in zip(wholes, open_.items(), strict=True):
        shares.append(_share([whole], order, 1).reshape(1))
        tensors[position] = _combined(whole, tensors[position], spec)
    return torch.cat(shares)


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
    del foreach
    several = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    held = [parameter for parameter in several if parameter.grad is not None]
    grads = [cast("Tensor", parameter.grad) for parameter in held]
    total, settled = _total_norm(grads, float(norm_type), group)
    _check_finite(total, norm_type, wanted=error_if_nonfinite)
    for parameter, before, grad in zip(held, grads, settled, strict=True):
        if grad is not before:
            parameter.grad = grad
    scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    _scale(settled, scale)
    return total


def _scale(grads: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply each gradient's local values by *scale*: no layout changes, so no dispatch is needed."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        local = cast("Tensor", getattr(grad, "_local_tensor", grad))
        by_device.setdefault(local.device, []).append(local)
    for device, locals_ in by_device.items():
        torch._foreach_mul_(locals_, scale.to(device))
