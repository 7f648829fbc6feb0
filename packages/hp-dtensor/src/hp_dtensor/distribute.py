"""From whole to distributed: a tensor, or a module.

One rule cuts everything (:mod:`hp_dtensor.shards`), whether the data is sent by one rank or every rank cuts its own copy,
so both give the same pieces. With a source rank the data travels once along each axis: a scatter where the axis cuts, a
broadcast where it replicates; a tensor on the meta device never travels.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from hp_mesh import DeviceMesh, get_current_mesh
from hp_mesh.collectives import broadcast
from torch import nn

from hp_dtensor import shards
from hp_dtensor._torch import TorchDTensor, is_transformed, new_dtensor, outside_transforms
from hp_dtensor.belongings import adopt
from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import LayoutError
from hp_dtensor.layout import PlacementsLike, resolve
from hp_dtensor.local import as_ours, redistribute_local
from hp_dtensor.pieces import ranges_in, sizes_of, take
from hp_dtensor.placements import REPLICATE, Placement, shard_dim
from hp_dtensor.redistribute import redistribute_tensor
from hp_dtensor.spec import contiguous_stride, make_spec
from hp_dtensor.transfer import without_addends

if TYPE_CHECKING:
    from torch import Tensor

Placements = tuple[Placement, ...]
PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]
InputFn = Callable[[nn.Module, tuple[object, ...], DeviceMesh], object]
OutputFn = Callable[[nn.Module, object, DeviceMesh], object]


def mesh_or_current(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """*device_mesh* as a mesh of ours, or the current one."""
    return get_current_mesh() if device_mesh is None else DeviceMesh.from_torch(device_mesh)


def _from_source(tensor: Tensor, mesh: DeviceMesh, placements: Placements, source: int) -> Tensor:
    """This rank's piece of the whole tensor that the group rank *source* has, one mesh axis after the other.

    An axis that cuts takes a scatter of what is left, any other a broadcast. Pieces travel as bytes, as long as the
    longest: no backend scatters every dtype, nor pieces of different lengths.
    """
    where = mesh.get_coordinate()
    for axis, size in enumerate(mesh.shape):
        if size > 1 and not 0 <= source < size:
            msg = (
                f"src_data_rank={source} is no rank of mesh axis {axis}, which has {size}: it is a group rank on each "
                f"axis of the mesh {tuple(mesh.shape)}, or None for each rank's own data"
            )
            raise LayoutError(msg)
    assert where is not None
    shape = tuple(tensor.shape)
    done: list[Placement] = [REPLICATE] * mesh.ndim
    for axis, size in enumerate(mesh.shape):
        if size == 1:
            continue
        group = mesh.get_group(axis)
        if shard_dim(placements[axis]) is None:
            tensor = broadcast(tensor.contiguous(), source, group)
            continue
        held = shards.local_box(shape, tuple(mesh.shape), tuple(where), tuple(done))
        done[axis] = placements[axis]
        boxes = [
            shards.local_box(
                shape, tuple(mesh.shape), (*where[:axis], c, *where[axis + 1 :]), tuple(done)
            )
            for c in range(size)
        ]
        mine = sizes_of(boxes[where[axis]])
        longest = max(math.prod(sizes_of(box)) for box in boxes) * tensor.itemsize
        out = tensor.new_empty(longest, dtype=torch.uint8)
        if longest:
            sent = None
            if where[axis] == source:
                sent = [_padded(take(tensor, ranges_in(held, box)), longest) for box in boxes]
            dist.scatter(out, sent, group=group, group_src=source)
        numel = math.prod(mine)
        tensor = out[: numel * tensor.itemsize].clone().view(tensor.dtype).view(mine)
    return tensor


def _padded(piece: Tensor, length: int) -> Tensor:
    """The bytes of *piece*, and as many more as make *length*."""
    flat = piece.contiguous().reshape(-1).view(torch.uint8)
    out = flat.new_zeros(length)
    out[: flat.shape[0]].copy_(flat)
    return out


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A whole tensor, laid out over a mesh. The result is a leaf that requires grad as *tensor* does.

    Args:
        tensor: the whole tensor, on every rank in the right shape and dtype. Already distributed: it must be laid out as
            asked, and comes back as it is.
        device_mesh: the devices; the current mesh when None.
        placements: the layout; replicated when None.
        src_data_rank: the group rank, on each mesh axis, whose data counts; the others' is ignored. None: every rank cuts
            its own copy, and nothing is sent.

    Raises:
        LayoutError: when the placements do not fit, or *src_data_rank* is no rank of an axis.
        ValueError: when a distributed *tensor* has another layout or mesh.

    Example:
        >>> import torch
        >>> from hp_dtensor import Shard, distribute_tensor
        >>> def rows(mesh):
        ...     return distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    """
    mesh = mesh_or_current(device_mesh)
    if isinstance(tensor, TorchDTensor):
        ours = as_ours(tensor)
        if ours.device_mesh != mesh or ours.placements != resolve(placements, mesh, tensor.ndim):
            other = (
                f"device mesh {mesh}" if ours.device_mesh != mesh else f"placements {placements}"
            )
            msg = (
                f"Cannot distribute a DTensor laid out as {ours.placements} on {ours.device_mesh} to a different {other}: "
                "use redistribute() to change the layout of a tensor that is distributed already"
            )
            raise ValueError(msg)
        return ours
    if not tensor.is_leaf:
        msg = (
            "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf tensor! "
            "Inside a differentiable program use DTensor.from_local"
        )
        raise RuntimeError(msg)
    resolved = resolve(placements, mesh, tensor.ndim)
    if is_transformed(tensor):
        msg = (
            f"distribute_tensor got a value of a torch.func transform, of shape {tuple(tensor.shape)}, which has no memory to "
            "send: distribute the inputs before the transform, or use DTensor.from_local inside of it"
        )
        raise LayoutError(msg)
    with outside_transforms():
        return _laid_out(tensor, mesh, resolved, src_data_rank)


def _laid_out(
    tensor: Tensor, mesh: DeviceMesh, resolved: Placements, src_data_rank: int | None
) -> DTensor:
    """The plain *tensor* laid out as *resolved*."""
    whole = tensor.detach()
    if whole.device.type not in (mesh.device_type, "meta"):
        whole = whole.to(mesh.device_type)
    shape = tuple(whole.shape)
    if mesh.get_coordinate() is None:
        local = whole.new_empty(0)
    else:
        held: Placements = (REPLICATE,) * mesh.ndim
        if src_data_rank is not None and not whole.is_meta:
            held = without_addends(resolved)
            if (
                type(whole) is not torch.Tensor
            ):  # its bytes are not its own to cut: quantised, or without data
                held = (REPLICATE,) * mesh.ndim
            whole = _from_source(whole, mesh, held, src_data_rank)
        local = redistribute_tensor(whole, mesh, shape, held, resolved)
        if (
            local.untyped_storage().nbytes() != local.numel() * local.itemsize
            or local.data_ptr() == tensor.data_ptr()
        ):
            # A piece owns its memory: a view would keep the whole tensor alive on every rank.
            local = local.clone(memory_format=torch.contiguous_format)
    stride = tuple(tensor.stride()) if tensor.is_contiguous() else contiguous_stride(shape)
    spec = make_spec(mesh, resolved, shape, stride, tensor.dtype)
    out = cast("DTensor", new_dtensor(DTensor, local, spec, False))
    return out.requires_grad_() if tensor.requires_grad else out


def spmd_distribute_tensor(
    tensor: Tensor,
    mesh: DeviceMesh,
    layout: PlacementsLike,
    *,
    src_data_rank: int | None = None,
    as_dtensor: bool = False,
) -> Tensor:
    """This rank's piece of a whole *tensor* as a plain tensor, for programs that keep layouts beside their tensors.

    The gradient of the pieces is put together again, so that *tensor*, which every rank has whole, gets all of it.

    Args:
        tensor: the whole tensor, the same on every rank.
        mesh: the devices.
        layout: placements, aliases or a `Layout`; axes that cut nothing are ignored, addends are not allowed.
        src_data_rank: None cuts each rank's own copy and sends nothing; a group rank makes its data count, without grad.
        as_dtensor: give a `DTensor` instead.

    Raises:
        LayoutError: when the layout does not fit.
    """
    ours = DeviceMesh.from_torch(mesh)
    resolved = resolve(layout, ours, tensor.ndim)
    if any(placement.is_partial() for placement in resolved):
        msg = f"{resolved} has addends, of which a whole tensor has none; use Replicate() there"
        raise LayoutError(msg)
    if as_dtensor or src_data_rank is not None:
        made = distribute_tensor(tensor, ours, resolved, src_data_rank=src_data_rank)
        return made if as_dtensor else made.to_local()
    everywhere = (REPLICATE,) * ours.ndim
    return redistribute_local(tensor, ours, everywhere, resolved, shape=tuple(tensor.shape))


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: InputFn | None = None,
    output_fn: OutputFn | None = None,
) -> nn.Module:
    """Lay out the parameters and buffers of *module*, in place, and convert what goes in and comes out.

    A plain tensor that is set as an attribute or buffer afterwards may meet distributed tensors too: it counts as
    replicated once the ranks were seen to agree about it.

    Args:
        module: its parameters are replaced; tied ones stay tied, and attributes set on them are kept.
        device_mesh: the devices; the current mesh when None.
        partition_fn: called as ``(name, submodule, mesh)`` for every submodule, the root having the name ``""``; what it
            leaves plain is then replicated. None replicates everything.
        input_fn: called as ``(module, inputs, mesh)`` before the root's forward; returns the inputs to use.
        output_fn: called as ``(module, outputs, mesh)`` after it; returns the outputs to use.

    Returns:
        *module*.

    Raises:
        RuntimeError: when *module* was distributed before.
        ValueError: when a callback takes a number of arguments other than the one given above.
    """
    mesh = mesh_or_current(device_mesh)
    if getattr(module, "_distribute_module_applied", False):
        msg = (
            "distribute_module should only be called once on a module, but it has already been called on this module; "
            "call it on a fresh module, or redistribute its parameters one by one"
        )
        raise RuntimeError(msg)
    before = _with_mesh(input_fn, "input_fn", mesh)
    after = _with_mesh(output_fn, "output_fn", mesh)
    tied: dict[int, nn.Parameter] = {}
    keep: list[nn.Parameter] = []  # ids stay unique while the replaced parameters are alive
    for name, child in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, child, mesh)
        _replicate_rest(child, mesh, tied, keep)
    if before is not None:
        module.register_forward_pre_hook(before)
    if after is not None:
        module.register_forward_hook(lambda hooked, _inputs, outputs: after(hooked, outputs))
    adopt(module)
    module._distribute_module_applied = True  # type: ignore[assignment]  # a mark on a module that is not ours
    return module


def _replicate_rest(
    module: nn.Module, mesh: DeviceMesh, tied: dict[int, nn.Parameter], keep: list[nn.Parameter]
) -> None:
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if isinstance(parameter, TorchDTensor):
            continue
        found = tied.get(id(parameter))
        if found is None:
            found = like_parameter(parameter, distribute_tensor(parameter.detach(), mesh))
            tied[id(parameter)] = found
            keep.append(parameter)
        module.register_parameter(name, found)
    for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        if not isinstance(buffer, TorchDTensor):
            setattr(module, name, distribute_tensor(buffer.detach(), mesh))


def like_parameter(old: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter that holds *data* and otherwise is as *old*: requires_grad, and the attributes that were set on it."""
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        if not hasattr(new, name):
            setattr(new, name, value)
    return new


def _with_mesh(
    callback: Callable[..., object] | None, name: str, mesh: DeviceMesh
) -> Callable[[nn.Module, object], object] | None:
    """*callback* as a function of module and values; the form without a mesh still works, with a warning."""
    if callback is None:
        return None
    count = len(inspect.signature(callback).parameters)
    if count == 3:
        return lambda module, values: callback(module, values, mesh)
    if count == 2:
        warnings.warn(
            f"Deprecating {name} that takes two arguments (values, device_mesh); take three: (module, values, device_mesh)",
            FutureWarning,
            stacklevel=3,
        )
        return lambda _module, values: callback(values, mesh)
    msg = f"{name} should take in 3 arguments (module, values, device_mesh), but it takes {count}"
    raise ValueError(msg)
