"""Operators whose result is no tensor, or whose plain argument has a meaning of its own.

``item`` and ``equal`` give a Python value that every rank must agree on, so they reduce over the mesh first: a local
answer would send ranks down different branches. ``copy_`` from a plain tensor takes it as the whole tensor, the same on
every rank, which is what loading a checkpoint means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from hp_mesh.collectives import all_reduce, wait

from hp_dtensor._torch import TorchDTensor, local_scalar, tree_flatten, update_metadata
from hp_dtensor.dispatch import (
    add_handler_family,
    dispatch_by_rule,
    handles,
    local_of,
    local_on,
)
from hp_dtensor.errors import InPlaceError, LayoutError, MixedTensorError, NoRuleError
from hp_dtensor.modes import implicit_replication, refuse_communication
from hp_dtensor.placements import REPLICATE
from hp_dtensor.rules._registry import aten_ops
from hp_dtensor.spec import Spec, make_spec, spec_of
from hp_dtensor.temporaries import alone

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

aten = torch.ops.aten


def _inside(op: OpOverload, spec: Spec) -> None:
    if spec.mesh.get_coordinate() is None:
        msg = (
            f"{op}: this rank is not part of the mesh {spec.mesh} and holds no value of the tensor; ask only on the ranks "
            "of the mesh (mesh.get_coordinate() is not None)"
        )
        raise RuntimeError(msg)


def _whole(op: OpOverload, tensor: Tensor) -> Tensor:
    """The whole tensor, plain."""
    spec = spec_of(tensor)
    if spec is None:
        return tensor
    _inside(op, spec)
    everywhere = spec.with_placements((REPLICATE,) * spec.mesh.ndim)
    return local_on(op, tensor, spec, everywhere)


def _become(op: OpOverload, args: Sequence[object], local: Tensor, spec: Spec) -> Tensor:
    """The first argument of *op*, which takes the piece *local* and the layout *spec*; its outside follows."""
    target = cast("Tensor", args[0])
    target._local_tensor = local  # type: ignore[attr-defined]  # one of ours
    target._own = spec  # type: ignore[attr-defined]  # as above
    update_metadata(op, args)
    return target


@handles(local_scalar)
def _item(
    _cls: type, op: OpOverload, args: Sequence[object], _kwargs: Mapping[str, object]
) -> object:
    return _whole(op, cast("Tensor", args[0])).item()


@handles(aten.equal.default)
def _equal(
    _cls: type, op: OpOverload, args: Sequence[object], _kwargs: Mapping[str, object]
) -> bool:
    left, right = (cast("Tensor", arg) for arg in args)
    spec = spec_of(left) or cast("Spec", spec_of(right))
    if left.shape != right.shape:
        return False
    target = spec.with_placements(
        tuple(REPLICATE if p.is_partial() else p for p in spec.placements)
    )
    if spec.mesh.get_coordinate() is None:
        return True  # of no elements all are equal, as torch.equal says of two empty tensors
    pieces = []
    for tensor in (left, right):
        own = spec_of(tensor)
        if own is None:
            own = Spec(
                spec.mesh, (REPLICATE,) * spec.mesh.ndim, spec.tensor_meta, copied_view=False
            )
        pieces.append(local_on(op, tensor, own, target))
    same = torch.tensor(int(torch.equal(*pieces)), dtype=torch.int32, device=pieces[0].device)
    for axis, size in enumerate(spec.mesh.shape):
        if size > 1 and not target.placements[axis].is_replicate():
            refuse_communication(op, f"combining the ranks' answers over mesh axis {axis}")
            same = wait(all_reduce(same, "min", spec.mesh.get_group(axis)))
    return bool(same.item())


@handles(aten.copy_.default)
def _copy(
    cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    target, source = cast("Tensor", args[0]), cast("Tensor", args[1])
    if not isinstance(target, TorchDTensor):
        msg = (
            f"{op}: a plain tensor of shape {tuple(target.shape)} cannot take the values of a DTensor, since it holds no "
            "layout: copy from source.full_tensor() for the whole tensor or source.to_local() for this rank's piece"
        )
        raise MixedTensorError(msg)
    if isinstance(source, TorchDTensor):
        return dispatch_by_rule(cls, op, args, kwargs)
    with implicit_replication():
        return dispatch_by_rule(cls, op, args, kwargs)


def _collective(
    cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """A call of ``torch.distributed`` knows no layout: all that it can have are whole tensors on each rank."""
    tensors = [v for v in tree_flatten((args, dict(kwargs)))[0] if isinstance(v, torch.Tensor)]
    specs = [spec_of(tensor) for tensor in tensors]
    if not all(
        spec is not None and all(p.is_replicate() for p in spec.placements) for spec in specs
    ):
        laid = next(spec for spec in specs if spec is not None)
        msg = (
            f"{op}: torch.distributed knows no layouts, and got a DTensor of shape {tuple(laid.shape)} laid out as "
            f"{laid.placements}. Use redistribute(placements=...) or full_tensor() for what the layout means, or pass the "
            "pieces of this rank, to_local(), of all tensors"
        )
        raise NoRuleError(msg)
    return dispatch_by_rule(cls, op, args, kwargs)


add_handler_family(("c10d::",), _collective)


@handles(aten.is_same_size.default)
def _is_same_size(
    _cls: type, _op: OpOverload, args: Sequence[object], _kwargs: Mapping[str, object]
) -> bool:
    """A question about shapes, which a plain tensor may take part in."""
    left, right = (cast("Tensor", arg) for arg in args)
    return left.shape == right.shape


@handles(aten.set_.source_Tensor)
def _set(
    _cls: type, op: OpOverload, args: Sequence[object], _kwargs: Mapping[str, object]
) -> object:
    """The tensor becomes another name of the source; who shared its piece before keeps that."""
    target, source = cast("Tensor", args[0]), cast("Tensor", args[1])
    spec = spec_of(source)
    if spec is None or not isinstance(target, TorchDTensor):
        msg = (
            f"{op}: a tensor of shape {tuple(target.shape)} and one of shape {tuple(source.shape)}, of which one is plain, "
            "cannot share their elements; use distribute_tensor first, or x.copy_(value)"
        )
        raise MixedTensorError(msg)
    return _become(op, args, local_of(source), spec)


@handles(aten.is_pinned.default)
def _is_pinned(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    return op(local_of(cast("Tensor", args[0])), *args[1:], **kwargs)


@handles(aten.allclose.default)
def _allclose(
    _cls: type, _op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    close = torch.isclose(*cast("tuple[Tensor, Tensor]", args[:2]), *args[2:], **kwargs)  # type: ignore[arg-type]  # tolerances
    return bool(close.all())


@handles(*cast("tuple[OpOverload, ...]", aten_ops("_linalg_check_errors.default")))
def _check_errors(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Each rank looks at what all found, or only some would raise."""
    spec = cast("Spec", spec_of(cast("Tensor", args[0])))
    if spec.mesh.get_coordinate() is None:
        return None
    whole = _whole(op, cast("Tensor", args[0])).contiguous()
    return op(whole, *args[1:], **kwargs)


@handles(
    *cast(
        "tuple[OpOverload, ...]",
        aten_ops(
            *("_to_sparse.default", "_to_sparse.sparse_dim", "_to_sparse_csr.default"),
            *("_to_sparse_csc.default", "_to_sparse_bsr.default", "_to_sparse_bsc.default"),
        ),
    )
)
def _to_sparse(
    _cls: type, op: OpOverload, args: Sequence[object], _kwargs: Mapping[str, object]
) -> object:
    shape = tuple(cast("Tensor", args[0]).shape)
    msg = (
        f"{op}: a sparse tensor of shape {shape} has no dims to cut, so no layout describes it. Leave distributed tensors "
        "first: full_tensor().to_sparse() for the whole, to_local().to_sparse() for this rank's piece"
    )
    raise LayoutError(msg)


@handles(aten.resize_.default)
def _resize(
    _cls: type, op: OpOverload, args: Sequence[object], _kwargs: Mapping[str, object]
) -> object:
    """Another shape for the same memory makes sense of a whole tensor only, and so it becomes one."""
    target = cast("Tensor", args[0])
    before = cast("Spec", spec_of(target))
    shape = tuple(cast("Sequence[int]", args[1]))
    if shape == tuple(before.shape):
        return target
    whole = _whole(op, target).contiguous()
    whole = whole.clone().resize_(shape)
    spec = make_spec(
        before.mesh, (REPLICATE,) * before.mesh.ndim, shape, whole.stride(), whole.dtype
    )
    return _become(op, args, whole, spec)


@handles(aten.resize_as_.default)
def _resize_as(
    cls: type, _op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    target, model = cast("Tensor", args[0]), cast("Tensor", args[1])
    return _resize(cls, aten.resize_.default, (target, list(model.shape)), kwargs)


_MAKERS = (
    *("zeros.out", "ones.out", "full.out", "eye.out", "eye.m_out", "arange.out"),
    *("arange.start_out", "range.out", "range.out_", "linspace.out", "logspace.out"),
)


@handles(*cast("tuple[OpOverload, ...]", aten_ops(*_MAKERS)))
def _made_into(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    """Every rank can make the whole, which nothing of what *out* held goes into, and keeps its piece."""
    out = cast("Tensor", kwargs["out"])
    whole = local_of(out).new_empty(0)
    op(*args, **{**kwargs, "out": whole})
    return out.resize_(whole.shape).copy_(whole)


_RESHAPES = {
    "squeeze_": ("default", "dim", "dims"),
    "unsqueeze_": ("default",),
    "transpose_": ("default",),
    "t_": ("default",),
    "swapaxes_": ("default",),
    "swapdims_": ("default",),
}
"""Operators that change the shape of a tensor in place, with their overloads."""
_TWINS = {"transpose_": "transpose.int"}
"""What the operator that leaves its argument alone is called, where the name does not tell."""


def _reshapes_in_place(name: str, overload: str) -> None:
    (op,) = aten_ops(f"{name}.{overload}")
    (twin,) = aten_ops(_TWINS.get(name, f"{name.rstrip('_')}.{overload}"))

    @handles(cast("OpOverload", op))
    def run(
        cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        target = cast("Tensor", args[0])
        before = cast("Spec", spec_of(target))
        made = dispatch_by_rule(cls, cast("OpOverload", twin), args, kwargs)
        spec = cast("Spec", spec_of(cast("Tensor", made)))
        if spec.copied_view and not before.copied_view and not alone(args, 0, others=1):
            msg = (
                f"{op}: in-place operations that require placement changes are not supported: a tensor of shape "
                f"{tuple(before.shape)} laid out as {before.placements} has no such view on each rank. Use the "
                "out-of-place operator, or redistribute the tensor first"
            )
            raise InPlaceError(msg)
        return _become(op, args, local_of(cast("Tensor", made)), spec)


for _name, _overloads in _RESHAPES.items():
    for _overload in _overloads:
        _reshapes_in_place(_name, _overload)
