"""From whole to distributed: a tensor, a module, or a fresh tensor that never was whole.

One rule cuts everything (:mod:`hp_dtensor.shards`), whether the data is sent by one rank or every rank cuts its own copy,
so both give the same pieces. With a source rank the data travels once along each axis: a scatter where the axis cuts, a
broadcast where it replicates; a tensor on the meta device never travels.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from hp_mesh import DeviceMesh, get_current_mesh
from hp_mesh.collectives import broadcast
from torch import nn

from hp_dtensor._torch import TorchDTensor, new_dtensor
from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import LayoutError
from hp_dtensor.layout import PlacementsLike, resolve
from hp_dtensor.local import as_ours
from hp_dtensor.placements import REPLICATE
from hp_dtensor.redistribute import redistribute_tensor
from hp_dtensor.spec import contiguous_stride, make_spec

if TYPE_CHECKING:
    from torch import Tensor

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]
InputFn = Callable[[nn.Module, tuple[object, ...], DeviceMesh], object]
OutputFn = Callable[[nn.Module, object, DeviceMesh], object]


def _mesh(device_mesh: DeviceMesh | None) -> DeviceMesh:
    return get_current_mesh() if device_mesh is None else DeviceMesh.from_torch(device_mesh)


def _from_source(tensor: Tensor, mesh: DeviceMesh, source: int) -> Tensor:
    """The whole tensor of the group rank *source*, made equal along one mesh axis after the other."""
    for axis, size in enumerate(mesh.shape):
        if size > 1 and not 0 <= source < size:
            msg = (
                f"src_data_rank={source} is no rank of mesh axis {axis}, which has {size}: it is a group rank on each "
                f"axis of the mesh {tuple(mesh.shape)}, or None for each rank's own data"
            )
            raise LayoutError(msg)
    for axis, size in enumerate(mesh.shape):
        if size > 1:
            tensor = broadcast(tensor.contiguous(), source, mesh.get_group(axis))
    return tensor


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
    mesh = _mesh(device_mesh)
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
    whole = tensor.detach()
    if whole.device.type not in (mesh.device_type, "meta"):
        whole = whole.to(mesh.device_type)
    shape = tuple(whole.shape)
    if mesh.get_coordinate() is None:
        local = whole.new_empty(0)
    else:
        if src_data_rank is not None and not whole.is_meta:
            whole = _from_source(whole, mesh, src_data_rank)
        local = redistribute_tensor(whole, mesh, shape, (REPLICATE,) * mesh.ndim, resolved)
        if (
            local.untyped_storage().nbytes() != local.numel() * local.itemsize
            or local.data_ptr() == tensor.data_ptr()
        ):
            # A piece owns its memory: a view would keep the whole tensor alive on every rank.
            local = local.clone(memory_format=torch.contiguous_format)
    stride = tuple(tensor.stride()) if tensor.is_contiguous() else contiguous_stride(shape)
    spec = make_spec(mesh, resolved, shape, stride, tensor.dtype)
    out = cast("DTensor", new_dtensor(DTensor, local, spec, False))
    out.requires_grad_(tensor.requires_grad)
    return out


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: InputFn | None = None,
    output_fn: OutputFn | None = None,
) -> nn.Module:
    """Lay out the parameters and buffers of *module*, in place, and convert what goes in and comes out.

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
    mesh = _mesh(device_mesh)
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


# --------------------------------------------------------------------------------------------------------------------
# Factories
# --------------------------------------------------------------------------------------------------------------------

Size = int | Sequence[int]


def _fresh(
    fill: Callable[[tuple[int, ...], torch.dtype | None, str], Tensor],
    size: tuple[Size, ...],
    *,
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: PlacementsLike | None,
) -> DTensor:
    if layout is not torch.strided:
        msg = f"layout={layout} is not supported: a distributed tensor is cut by index, which takes torch.strided"
        raise LayoutError(msg)
    shape = (
        tuple(size[0])
        if len(size) == 1 and not isinstance(size[0], int)
        else cast("tuple[int, ...]", size)
    )
    mesh = _mesh(device_mesh)
    resolved = resolve(placements, mesh, len(shape))
    stride = contiguous_stride(shape)
    spec = make_spec(mesh, resolved, shape, stride, dtype or torch.get_default_dtype())
    local = fill(spec.local_shape, dtype, mesh.device_type)
    out = cast("DTensor", new_dtensor(DTensor, local, spec.with_dtype(local.dtype), False))
    out.requires_grad_(requires_grad)
    return out


def _refuse_partial(placements: PlacementsLike | None, name: str) -> None:
    if isinstance(placements, Sequence) and any(
        getattr(p, "is_partial", bool)() for p in placements
    ):
        msg = f"{name} with placements {placements}: a value that is still to be reduced cannot be filled in; use Replicate()"
        raise LayoutError(msg)


def zeros(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A distributed tensor of zeros; each rank makes only its own piece.

    Args:
        size: the global shape, as numbers or as one sequence.
        dtype: the element type; torch's default when None.
        layout: ``torch.strided``.
        requires_grad: whether operators on it are recorded.
        device_mesh: the devices; the current mesh when None.
        placements: the layout; replicated when None.
    """
    return _fresh(
        lambda shape, kind, device: torch.zeros(shape, dtype=kind, device=device),
        size,
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        device_mesh=device_mesh,
        placements=placements,
    )


def ones(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A distributed tensor of ones; see :func:`zeros`. Partial placements are refused: each addend would be one."""
    _refuse_partial(placements, "ones")
    return _fresh(
        lambda shape, kind, device: torch.ones(shape, dtype=kind, device=device),
        size,
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        device_mesh=device_mesh,
        placements=placements,
    )


def empty(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A distributed tensor whose values are yet to be written; see :func:`zeros`."""
    return _fresh(
        lambda shape, kind, device: torch.empty(shape, dtype=kind, device=device),
        size,
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        device_mesh=device_mesh,
        placements=placements,
    )


def full(
    size: Size,
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A distributed tensor filled with *fill_value*; see :func:`zeros`. Partial placements are refused."""
    _refuse_partial(placements, "full")
    return _fresh(
        lambda shape, kind, device: torch.full(shape, fill_value, dtype=kind, device=device),
        (size,),
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        device_mesh=device_mesh,
        placements=placements,
    )
