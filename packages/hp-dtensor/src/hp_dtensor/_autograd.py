"""Leaving, entering and moving, with gradients: the only calls of ``Function.apply`` in the package.

The contract, per mesh axis: a gradient has the placement of what it is the gradient of, and a Partial value has a
Replicate gradient. So a backward is again one of the three functions here, which makes each of them differentiable
twice. Nothing is ever scaled by the number of ranks.

The class of the results is an argument: the tensor class is built on top of this module.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, cast

import torch
from torch.compiler import is_dynamo_compiling

from hp_dtensor import replicas
from hp_dtensor._torch import new_dtensor
from hp_dtensor.errors import LayoutError, RedistributeError
from hp_dtensor.modes import is_strict
from hp_dtensor.placements import Cut, Partial, Placement, gradient_placements, shard_dim
from hp_dtensor.redistribute import redistribute_tensor
from hp_dtensor.spec import Spec, contiguous_stride, make_spec, spec_of
from hp_dtensor.transfer import between

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor
    from torch.autograd.function import FunctionCtx

    from hp_dtensor.gradients import Settle

Placements = tuple[Placement, ...]

SETTLED = "__settled__"
"""Where a leaf keeps the hook that lays out its gradient (``hp_dtensor.gradients``); not copied or pickled with it."""


def settle_of(tensor: Tensor) -> Settle | None:
    """The hook that lays out the gradient of a leaf; None for a tensor that has none."""
    return tensor.__dict__.get(SETTLED)


def _spec(tensor: Tensor) -> Spec:
    found = spec_of(tensor)
    if found is None:
        msg = f"expected a distributed tensor, got a plain {type(tensor).__name__} of shape {tuple(tensor.shape)}"
        raise RedistributeError(msg)
    return found


def _refuse_unlike(source: Placements, target: Placements) -> None:
    """A shard cannot be turned into addends without inventing them on the other ranks; say so before anything moves."""
    for axis, (a, b) in enumerate(zip(source, target, strict=True)):
        if (
            b.is_partial()
            and a != b
            and not (a.is_replicate() or a.is_partial() or cast("Partial", b).reduce_op == "sum")
        ):
            msg = f"mesh axis {axis} cannot go from {a} to {b}: only a sum has a neutral element to pad a shard with"
            raise RedistributeError(msg)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        tensor: Tensor,
        cls: type,
        mesh: DeviceMesh,
        placements: Placements,
        async_op: bool,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> Tensor:
        spec = _spec(tensor)
        ctx.cls, ctx.source, ctx.backward_dtype = cls, spec, backward_dtype or spec.dtype  # type: ignore[attr-defined]  # torch leaves these open
        ctx.set_materialize_grads(False)
        return move(cls, tensor, spec, mesh, placements, async_op=async_op, dtype=forward_dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return (None,) * 7
        source: Spec = ctx.source  # type: ignore[attr-defined]  # set in forward
        target = gradient_placements(source.placements)
        dtype = ctx.backward_dtype  # type: ignore[attr-defined]  # set in forward
        out = redistribute(ctx.cls, grad, source.mesh, target, forward_dtype=dtype)  # type: ignore[attr-defined]  # set in forward
        if out.dtype != source.dtype:
            out = out.to(source.dtype)
        return (out, None, None, None, None, None, None)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: Tensor, cls: type, grad_placements: Placements | None
    ) -> Tensor:
        ctx.cls, ctx.source, ctx.grad_placements = cls, _spec(tensor), grad_placements  # type: ignore[attr-defined]  # torch leaves these open
        ctx.leaf = tensor.is_leaf  # type: ignore[attr-defined]  # as above
        ctx.settle = None if is_dynamo_compiling() else settle_of(tensor)  # type: ignore[attr-defined]  # as above
        ctx.name = replicas.described(tensor) if replicas.watching() else ""  # type: ignore[attr-defined]  # as above
        ctx.set_materialize_grads(False)
        local = cast("Tensor", tensor._local_tensor)  # type: ignore[attr-defined]  # every DTensor has one
        return local.view_as(local)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return None, None, None
        source: Spec = ctx.source  # type: ignore[attr-defined]  # set in forward
        wanted = gradient_placements(source.placements)
        held = ctx.grad_placements or wanted  # type: ignore[attr-defined]  # set in forward
        if 0 in grad.stride():
            # What sum() sends back has one number for all entries; a leaf would keep it as it is and add to it in place.
            grad = grad.contiguous()
        if replicas.watching():
            name = f"the gradient of {ctx.name}"  # type: ignore[attr-defined]  # set in forward
            replicas.compare(grad, source.mesh, held, "backward of to_local()", name)
        elif (
            ctx.leaf  # type: ignore[attr-defined]  # set in forward
            and ctx.grad_placements is None  # type: ignore[attr-defined]  # as above
            and (unstated := _unstated_gradient(source))
        ):
            warnings.warn(unstated, stacklevel=2)
        out = from_local(ctx.cls, grad, source.mesh, held, source.shape, source.stride, None)  # type: ignore[attr-defined]  # set in forward
        # What a leaf keeps is laid out like it. Elsewhere addends stay addends: a move that came before this one scatters
        # their sum, and combining them here would send every element twice.
        settle: Settle | None = ctx.settle  # type: ignore[attr-defined]  # set in forward
        if held != wanted and ctx.leaf and not (settle and settle.held):  # type: ignore[attr-defined]  # set in forward
            out = redistribute(ctx.cls, out, source.mesh, wanted)  # type: ignore[attr-defined]  # set in forward
        return out, None, None


def _unstated_gradient(leaf: Spec) -> str | None:
    """What is wrong with taking the piece of a leaf if the gradients of its replicas are added up by nobody; or None."""
    pairs = zip(leaf.mesh.shape, leaf.placements, strict=True)
    if all(size == 1 or not placement.is_replicate() for size, placement in pairs):
        return None
    return (
        f"to_local() took a replicated leaf of shape {tuple(leaf.shape)}, laid out as {leaf.placements}, into plain code, and "
        "the gradient that comes back counts as the same on every rank. If ranks used it for different data (their own "
        "tokens), pass grad_placements=[Partial()] for that axis, or their gradients are never added up; if all computed "
        "the same, pass grad_placements=[Replicate()] to say so. hp_dtensor.check_replicas() finds which it is"
    )


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        local: Tensor,
        cls: type,
        mesh: DeviceMesh,
        placements: Placements,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        grad_placements: Placements | None,
    ) -> Tensor:
        ctx.cls, ctx.mesh = cls, mesh  # type: ignore[attr-defined]  # torch leaves these open
        ctx.grad_placements = grad_placements or gradient_placements(placements)  # type: ignore[attr-defined]  # as above
        ctx.set_materialize_grads(False)
        if replicas.watching():
            name = f"a local tensor {tuple(local.shape)}"
            replicas.compare(local, mesh, placements, "from_local()", name)
        spec = make_spec(mesh, placements, shape, stride, local.dtype)
        return new_dtensor(cls, local.detach(), spec, False)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return (None,) * 7
        held: Placements = ctx.grad_placements  # type: ignore[attr-defined]  # set in forward
        if _spec(grad).placements != held:
            grad = redistribute(ctx.cls, grad, ctx.mesh, held)  # type: ignore[attr-defined]  # set in forward
        return to_local(ctx.cls, grad, None), None, None, None, None, None, None  # type: ignore[attr-defined]  # as above


def move(
    cls: type,
    tensor: Tensor,
    spec: Spec,
    mesh: DeviceMesh,
    placements: Placements,
    *,
    async_op: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """*tensor* laid out as *placements* on *mesh*, without recording a gradient."""
    local = cast("Tensor", tensor._local_tensor)  # type: ignore[attr-defined]  # every DTensor has one
    if dtype is not None and dtype != local.dtype:
        local = local.to(dtype)
    if mesh is not spec.mesh and mesh != spec.mesh:
        shape = tuple(spec.shape)
        out = between(local, spec.mesh, spec.placements, mesh, placements, shape)
        if out is local:
            out = local.view_as(local)
        moved = make_spec(mesh, placements, shape, spec.stride, out.dtype)
        return new_dtensor(cls, out, moved, False)
    _refuse_unlike(spec.placements, placements)
    out = redistribute_tensor(
        local, spec.mesh, tuple(spec.shape), spec.placements, placements, async_op=async_op
    )
    if out is local:
        out = local.view_as(local)
    return new_dtensor(cls, out, spec.with_placements(placements).with_dtype(out.dtype), False)


def redistribute(
    cls: type,
    tensor: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor:
    """*tensor* laid out as *placements*; its gradient comes back in the layout it left."""
    if not torch.is_grad_enabled() or not tensor.requires_grad:
        return move(
            cls, tensor, _spec(tensor), mesh, placements, async_op=async_op, dtype=forward_dtype
        )
    return cast(
        "Tensor",
        _Redistribute.apply(
            tensor, cls, mesh, placements, async_op, forward_dtype, backward_dtype
        ),
    )


def to_local(cls: type, tensor: Tensor, grad_placements: Placements | None) -> Tensor:
    """This rank's piece of *tensor* as a plain tensor; its gradient is wrapped again, laid out like the tensor."""
    if not torch.is_grad_enabled():
        return cast("Tensor", tensor._local_tensor)  # type: ignore[attr-defined]  # every DTensor has one
    if (
        grad_placements is None
        and tensor.requires_grad
        and tensor.is_leaf
        and not is_dynamo_compiling()
        and is_strict()
        and (unstated := _unstated_gradient(_spec(tensor)))
    ):
        raise LayoutError(f"inside hp_dtensor.strict(): {unstated}")
    return cast("Tensor", _ToLocal.apply(tensor, cls, grad_placements))


def from_local(
    cls: type,
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    grad_placements: Placements | None,
) -> Tensor:
    """A distributed tensor of global *shape* whose piece on this rank is *local*."""
    return cast(
        "Tensor", _FromLocal.apply(local, cls, mesh, placements, shape, stride, grad_placements)
    )


class _RedistributeLocal(torch.autograd.Function):
    """Move a plain tensor that holds one layout to another: Megatron's f and g, and their sequence-parallel pair."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        local: Tensor,
        mesh: DeviceMesh,
        source: Placements,
        target: Placements,
        shape: tuple[int, ...],
        grad_source: Placements,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
        async_op: bool,
    ) -> Tensor:
        ctx.facts = (mesh, grad_source, source, shape, backward_dtype or local.dtype, local.dtype)  # type: ignore[attr-defined]  # torch leaves these open
        if replicas.watching():
            name = f"a local tensor {tuple(local.shape)}"
            replicas.compare(local, mesh, source, "redistribute_local()", name)
        if forward_dtype is not None:
            local = local.to(forward_dtype)
        out = redistribute_tensor(local, mesh, shape, source, target, async_op=async_op)
        return local.view_as(local) if out is local else out

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return (None,) * 9
        mesh, held, source, shape, dtype, out_dtype = ctx.facts  # type: ignore[attr-defined]  # set in forward
        wanted = gradient_placements(source)
        if replicas.watching():
            name = f"the gradient of the result, {tuple(grad.shape)}"
            replicas.compare(grad, mesh, held, "backward of redistribute_local()", name)
        # What comes back for this gradient in a second derivative is laid out as the forward's input: the adjoint of
        # the adjoint is the forward's own move.
        out = redistribute_local(
            grad, mesh, held, wanted, shape, source, dtype, None, async_op=False
        )
        return (out.to(out_dtype), None, None, None, None, None, None, None, None)


def redistribute_local(
    local: Tensor,
    mesh: DeviceMesh,
    source: Placements,
    target: Placements,
    shape: tuple[int, ...],
    grad_source: Placements,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    *,
    async_op: bool,
) -> Tensor:
    """*local*, this rank's piece of a tensor of *shape* laid out as *source*, moved to *target*.

    The gradient arrives in *grad_source* and leaves in the gradient layout of *source*.
    """
    return cast(
        "Tensor",
        _RedistributeLocal.apply(
            local,
            mesh,
            source,
            target,
            shape,
            grad_source,
            forward_dtype,
            backward_dtype,
            async_op,
        ),
    )


def guarded_shape(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Symbolic *shape* and *stride* of a whole tensor in terms of the sizes of its piece.

    A compiler checks the sizes of the piece before it uses a graph again, and not those of the whole. Where the pieces are
    uneven they do not tell the whole, and the graph is made for the sizes at hand; the spec's guard sees to it.
    """
    whole, steps = global_shape(local, mesh, placements)
    if whole == shape and steps == stride:
        return whole, steps
    return tuple(int(size) for size in shape), tuple(int(step) for step in stride)


def global_shape(
    local: Tensor, mesh: DeviceMesh, placements: Placements
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Global shape and stride of a tensor whose pieces all look like *local*: each shard multiplies its dim."""
    shape = list(local.shape)
    stride = list(local.stride())
    for size, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Cut) and size > 1:
            msg = f"a piece of {placement} does not tell how long the whole is; pass the global shape="
            raise LayoutError(msg)
        dim = shard_dim(placement)
        if dim is not None:
            shape[dim] *= size
            for other in range(len(stride)):
                if other != dim and stride[other] >= stride[dim]:
                    stride[other] *= size
    return tuple(shape), tuple(stride) if local.numel() else contiguous_stride(tuple(shape))
