"""Computing on local tensors with right gradients: leave, move and enter.

Module code that knows its layout (a linear layer cut by columns) is faster and clearer on local tensors than through
dispatch. What it must not lose is the gradient's layout; so each function here says where a gradient is, and moves it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, cast

import torch
from hp_mesh import DeviceMesh

from hp_dtensor import _autograd
from hp_dtensor._torch import TorchDTensor, new_dtensor, tree_flatten, tree_unflatten
from hp_dtensor.checks import check_all_ranks
from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import LayoutError
from hp_dtensor.layout import Layout, PlacementsLike, resolve
from hp_dtensor.placements import Placement, gradient_placements, shard_dim
from hp_dtensor.spec import spec_of

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")

OutPlacements: TypeAlias = PlacementsLike | tuple[PlacementsLike | None, ...] | None
"""One layout, or one for each output; None for an output that is no tensor, or stays local."""


def to_local(tensor: Tensor, *, grad_placements: PlacementsLike | None = None) -> Tensor:
    """This rank's piece of a distributed tensor of ours or of torch's; a plain tensor comes back as it is.

    Unlike torch's method it gives a gradient that our dispatch understands, whichever class the tensor has: FSDP2 rebuilds
    parameters as torch's own.

    Args:
        tensor: any tensor.
        grad_placements: how the gradients that the ranks bring back fit together; see :meth:`DTensor.to_local`.
    """
    if not isinstance(tensor, TorchDTensor):
        return tensor
    if torch.compiler.is_dynamo_compiling():
        # A method call is put into the graph as it is; what is inside runs when the graph is lowered.
        asked = cast("Sequence[Placement] | None", grad_placements)
        return tensor.to_local(grad_placements=asked)
    spec = spec_of(tensor)
    grad = (
        None
        if grad_placements is None or spec is None
        else resolve(grad_placements, spec.mesh, tensor.ndim)
    )
    return _autograd.to_local(DTensor, tensor, grad)


def own_piece(tensor: Tensor) -> Tensor:
    """This rank's piece of a distributed *tensor*, whose gradients fit together like the tensor itself: that is said here.

    For code that knows it, so that nobody is warned of sums that get lost.
    """
    layout = cast("DTensor", tensor).placements
    return to_local(tensor, grad_placements=gradient_placements(tuple(layout)))


def redistribute_local(
    local: Tensor,
    mesh: DeviceMesh,
    source: PlacementsLike,
    target: PlacementsLike,
    *,
    shape: Sequence[int] | None = None,
    grad_placements: PlacementsLike | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Tensor:
    """A plain tensor that holds layout *source*, moved to layout *target*, as a plain tensor; differentiable.

    ``[Replicate()] -> [Replicate()]`` with ``grad_placements=[Partial()]`` is Megatron's f (identity, then an all-reduce
    of the gradient); ``[Partial()] -> [Replicate()]`` is its g. The sequence-parallel pair is ``[Shard(1)] ->
    [Replicate()]`` with ``grad_placements=[Partial()]``, and ``[Partial()] -> [Shard(1)]``.

    Args:
        local: this rank's piece of a tensor laid out as *source*.
        mesh: the devices.
        source: what *local* is.
        target: what is wanted.
        shape: the global shape; needed when shards are uneven, else found from *local*.
        grad_placements: how the incoming gradients of the ranks fit together; *target* (Replicate for Partial) when None.
        forward_dtype: cast to this before the collective, and keep it.
        backward_dtype: cast the gradient to this before its collective; it leaves in the dtype of *local*.
        async_op: return at once; the result waits when it is first used.

    Raises:
        LayoutError: when the placements do not fit *local* and *mesh*.
    """
    ndim = local.ndim
    before, after = resolve(source, mesh, ndim), resolve(target, mesh, ndim)
    whole = tuple(shape) if shape is not None else _autograd.global_shape(local, mesh, before)[0]
    grad = (
        gradient_placements(after)
        if grad_placements is None
        else resolve(grad_placements, mesh, ndim)
    )
    if torch.compiler.is_dynamo_compiling():
        from hp_dtensor import _compiled

        traced: Tensor = _compiled.redistribute_local(
            local, mesh, before, after, whole, grad, forward_dtype, backward_dtype
        )
        return traced
    return _autograd.redistribute_local(
        local, mesh, before, after, whole, grad, forward_dtype, backward_dtype, async_op=async_op
    )


def wrapped_like(piece: Tensor, like: Tensor) -> Tensor:
    """*piece*, without history, as a distributed tensor laid out like *like*; as it is where that is plain.

    For gradients in autograd Functions: nothing is checked and nothing recorded.
    """
    spec = spec_of(like)
    return piece if spec is None else new_dtensor(DTensor, piece, spec, False)


def _per_output(out_placements: OutPlacements, count: int) -> tuple[PlacementsLike | None, ...]:
    """One layout for each of *count* outputs."""
    if out_placements is None:
        return (None,) * count
    several = isinstance(out_placements, tuple) and all(
        entry is None
        or isinstance(entry, Layout)
        or (isinstance(entry, Sequence) and not isinstance(entry, str))
        for entry in out_placements
    )
    if not several:
        return (cast("PlacementsLike", out_placements),) * count
    given = cast("tuple[PlacementsLike | None, ...]", out_placements)
    if len(given) != count:
        msg = f"the function returned {count} values, but out_placements has {len(given)} entries: {out_placements}"
        raise LayoutError(msg)
    return given


def _enter(
    tensor: DTensor,
    position: int,
    placements: PlacementsLike | None,
    grads: PlacementsLike | None,
    mesh: DeviceMesh,
    *,
    redistribute_inputs: bool,
) -> Tensor:
    if placements is None:
        msg = (
            f"argument {position} is a DTensor laid out as {tensor.placements}, but in_placements has None for it; give the "
            "layout that the function expects"
        )
        raise LayoutError(msg)
    wanted = resolve(placements, mesh, tensor.ndim)
    if tensor.placements != wanted or tensor.device_mesh != mesh:
        if not redistribute_inputs:
            msg = (
                f"argument {position} is laid out as {tensor.placements} on {tensor.device_mesh}, but in_placements asks for "
                f"{wanted}: the placement of a DTensor does not match in_placements; redistribute it first, or set "
                "redistribute_inputs=True"
            )
            raise LayoutError(msg)
        tensor = tensor.redistribute(mesh, wanted)
    return tensor.to_local(grad_placements=grads)


def whole_shape(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], like: Sequence[DTensor]
) -> Sequence[int] | None:
    """The global shape of an output that was computed from *like*; None where its pieces are all of one shape.

    A shard does not tell how long the dim is that it was cut from. Where an input is cut unevenly over the same axes, or
    none is cut there at all, the ranks tell each other their shapes: one small exchange, which all of them take part in,
    since layouts are the same on all. Even inputs are taken to give even outputs.

    Raises:
        LayoutError: on every rank, when the pieces are not those of the shard rule.
    """
    cut = {
        axis
        for axis, (size, placement) in enumerate(zip(mesh.shape, placements, strict=True))
        if size > 1 and shard_dim(placement) is not None
    }
    told: set[int] = set()
    even = True
    for tensor in like:
        if tensor.device_mesh == mesh:
            over = _cut_over(tensor)
            told |= {axis for axes in over.values() for axis in axes}
            even = even and all(
                tensor.shape[dim] % math.prod(mesh.size(axis) for axis in axes) == 0
                for dim, axes in over.items()
            )
    if (cut <= told and even) or mesh.get_coordinate() is None or torch.compiler.is_compiling():
        return None
    return check_all_ranks(local, mesh, placements, None)


def _cut_over(tensor: DTensor) -> dict[int, list[int]]:
    """For each dim that is cut, the axes that cut it."""
    out: dict[int, list[int]] = {}
    for axis, placement in enumerate(tensor.placements):
        dim = shard_dim(placement)
        if dim is not None and tensor.device_mesh.size(axis) > 1:
            out.setdefault(dim, []).append(axis)
    return out


def local_map(
    func: Callable[P, object] | None = None,
    out_placements: OutPlacements = None,
    in_placements: tuple[PlacementsLike | None, ...] | None = None,
    in_grad_placements: tuple[PlacementsLike | None, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., object]:
    """Make *func*, written for local tensors, take and give distributed ones.

    Args:
        func: the function; left out when used as a decorator with arguments.
        out_placements: the layout of the output, or a tuple with one for each; None where it stays local.
        in_placements: for each positional argument (leaves of nested ones in order) the layout it must have, None for
            what is no distributed tensor. None altogether takes every input as it is laid out.
        in_grad_placements: for each argument the layout of its gradient; that of the argument when None.
        device_mesh: the devices; those of the first distributed argument when None.
        redistribute_inputs: move inputs that are laid out differently, instead of an error.

    Returns:
        A function that unwraps its distributed arguments, calls *func* and wraps what comes back. Without a distributed
        argument it returns what *func* returns.

    Raises:
        LayoutError: when an argument's layout differs from *in_placements*, or a count differs.

    Example:
        >>> import torch
        >>> from hp_dtensor import Shard
        >>> double = local_map(lambda t: t * 2, out_placements=[Shard(0)])
        >>> double(torch.ones(2))  # no distributed argument: func as it is
        tensor([2., 2.])
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    @functools.wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> object:
        leaves, tree = tree_flatten(args)
        for name, given in (
            ("in_placements", in_placements),
            ("in_grad_placements", in_grad_placements),
        ):
            if given is not None and len(given) != len(leaves):
                msg = f"{name} has {len(given)} entries for {len(leaves)} arguments; the two numbers must be equal"
                raise LayoutError(msg)
        tensors = [as_ours(leaf) for leaf in leaves if isinstance(leaf, TorchDTensor)]
        if not tensors:
            return func(*args, **kwargs)
        mesh = device_mesh if device_mesh is not None else tensors[0].device_mesh
        local_args = []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, TorchDTensor):
                local_args.append(leaf)
                continue
            ours = as_ours(leaf)
            wanted = ours.placements if in_placements is None else in_placements[position]
            grads = None if in_grad_placements is None else in_grad_placements[position]
            local_args.append(
                _enter(
                    ours, position, wanted, grads, mesh, redistribute_inputs=redistribute_inputs
                )
            )
        result = func(*tree_unflatten(local_args, tree), **kwargs)
        flat, out_tree = tree_flatten(result)
        wrapped_out: list[object] = []
        for value, placements in zip(flat, _per_output(out_placements, len(flat)), strict=True):
            if placements is None:
                wrapped_out.append(value)
                continue
            if not isinstance(value, torch.Tensor) or isinstance(value, TorchDTensor):
                msg = f"out_placements has {placements} for an output that is no local tensor: {type(value).__name__}"
                raise LayoutError(msg)
            resolved = resolve(placements, mesh, value.ndim)
            shape = whole_shape(value, mesh, resolved, tensors)
            wrapped_out.append(DTensor.from_local(value, mesh, resolved, shape=shape))
        return tree_unflatten(wrapped_out, out_tree)

    return wrapped


def as_ours(tensor: TorchDTensor) -> DTensor:
    """*tensor* as one of ours, with gradients flowing through; one of torch's is wrapped anew."""
    if isinstance(tensor, DTensor):
        return tensor
    spec = spec_of(tensor)
    if spec is None:  # only to tell the type checker: a DTensor has a spec
        msg = f"expected a distributed tensor, got {type(tensor).__name__}"
        raise LayoutError(msg)
    local = _autograd.to_local(DTensor, tensor, None)
    return cast(
        "DTensor",
        _autograd.from_local(
            DTensor, local, spec.mesh, spec.placements, spec.shape, spec.stride, None
        ),
    )


def from_torch(tensor: TorchDTensor) -> DTensor:
    """Torch's distributed tensor as one of ours, sharing its memory; gradients flow back to *tensor*. Ours as it is."""
    return as_ours(tensor)


def to_torch(tensor: TorchDTensor) -> TorchDTensor:
    """A distributed tensor as torch's own class on torch's own mesh, sharing its memory; gradients flow back to *tensor*."""
    if type(tensor) is TorchDTensor:
        return tensor
    ours = as_ours(tensor)
    spec = ours.spec
    return TorchDTensor.from_local(
        ours.to_local(),
        spec.mesh.to_torch(),
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )


__all__ = [
    "PlacementsLike",
    "as_ours",
    "from_torch",
    "local_map",
    "redistribute_local",
    "to_local",
    "to_torch",
    "whole_shape",
]
