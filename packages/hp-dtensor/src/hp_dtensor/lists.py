"""Operators over lists of tensors: the foreach and fused ones that optimizers and clipping are made of.

They do the same to each position of their lists, so each position is laid out on its own: all its tensors like the one
that is written to (or the first), whatever mesh that is on, and one that is broadcast like what it meets. Plain tensors and
tensors of several meshes may stand in one list. The local pieces then go through one call of the operator, and what was
written to after a move is moved back.

Addends that must be combined first (a norm is not linear) are flattened and combined in one collective for each
mesh, kind and dtype, however many tensors there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from hp_mesh.collectives import all_reduce, wait

from hp_dtensor import hits
from hp_dtensor._torch import new_dtensor, schema_of
from hp_dtensor.calls import signature
from hp_dtensor.copied_views import is_copy, write_to_base
from hp_dtensor.dispatch import (
    add_handler_family,
    dispatch_by_rule,
    handles,
    local_of,
    local_on,
    needs_network,
    refuse_plain,
    whole_of,
    write_back,
)
from hp_dtensor.errors import InPlaceError, MixedTensorError, NoRuleError
from hp_dtensor.modes import note_moves, refuse_communication
from hp_dtensor.placements import REPLICATE, Cut, Placement, shard_dim
from hp_dtensor.redistribute import redistribute_tensor
from hp_dtensor.rules._labels import shard
from hp_dtensor.rules._registry import aten_ops
from hp_dtensor.spec import Spec, make_spec, spec_of

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor
    from torch._ops import OpOverload

    from hp_dtensor.placements import Partial

aten = torch.ops.aten

KEEP_SUMS = frozenset(
    {
        "_foreach_add",
        "_foreach_sub",
        "_foreach_neg",
        "_foreach_mul",
        "_foreach_div",
        "_foreach_copy",
    }
)
"""List operators that are linear in their lists, so that addends of a sum or a mean may stay addends."""

Job = tuple[int, int, Spec, Spec]
"""(which list, which position, from, to)."""


def _base_name(op: OpOverload) -> str:
    return schema_of(op).name.split("::")[1].rstrip("_")


def _keeps_sums(
    op: OpOverload,
    tensors: Sequence[Tensor],
    specs: Sequence[Spec | None],
    extra: Sequence[object],
) -> bool:
    """Whether a position of *op* may be run on addends: linear, and addends on both sides of a sum."""
    name = _base_name(op)
    if name not in KEEP_SUMS or any(
        isinstance(value, torch.Tensor) and value.dim() for value in extra
    ):
        return False
    addends = (p for spec in specs if spec is not None for p in spec.placements if p.is_partial())
    if any(cast("Partial", p).reduce_op not in ("sum", "avg") for p in addends):
        return False
    if name in ("_foreach_add", "_foreach_sub"):
        return (
            len(tensors) == 2
            and specs[0] is not None
            and specs[1] is not None
            and specs[0].placements == specs[1].placements
        )
    return len(tensors) == 1


def _target(
    op: OpOverload, tensors: Sequence[Tensor], extra: Sequence[object], *, written: bool
) -> Spec | None:
    """How all tensors at one position shall be laid out; None when all of them are plain."""
    specs = [spec_of(tensor) for tensor in tensors]
    first = next((spec for spec in specs if spec is not None), None)
    if first is None:
        return None
    for spec in specs:
        if spec is not None and spec.mesh != first.mesh:
            msg = (
                f"{op}: the tensors at one position of the lists live on different meshes, {first.mesh} and {spec.mesh}; "
                "put tensors of one mesh together, or leave with to_local() first"
            )
            raise MixedTensorError(msg)
    if written and specs[0] is None:
        msg = (
            f"{op}: writes to a plain tensor of shape {tuple(tensors[0].shape)} at a position where another argument is a "
            f"DTensor laid out as {first.placements}; distribute the plain one like it"
        )
        raise InPlaceError(msg)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(shape != tuple(first.shape) for shape in shapes) and (
        any(isinstance(placement, Cut) for placement in first.placements)
        or torch.broadcast_shapes(*shapes) != first.shape
    ):
        # The result has none of the shapes that are laid out, or a layout that says nothing about a dim of size 1.
        return first.with_placements((REPLICATE,) * first.mesh.ndim)
    if first.is_partial and not _keeps_sums(op, tensors, specs, extra):
        return first.with_placements(
            tuple(REPLICATE if p.is_partial() else p for p in first.placements)
        )
    return first


def _beside(target: Spec, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """How a tensor of *shape* is laid out that is broadcast to one laid out as *target*."""
    if shape == tuple(target.shape):
        return target.placements
    missing = len(target.shape) - len(shape)
    out: list[Placement] = []
    for placement in target.placements:
        dim = shard_dim(placement)
        if dim is None:
            out.append(placement)
        elif dim < missing or shape[dim - missing] != target.shape[dim]:
            out.append(REPLICATE)
        else:
            out.append(shard(dim - missing, int(getattr(placement, "split_factor", 1))))
    return tuple(out)


def _combined(op: OpOverload, jobs: Sequence[tuple[Tensor, Spec, Spec]]) -> list[Tensor]:
    """The local pieces after their moves; those that only combine addends share collectives."""
    out: list[Tensor | None] = [None] * len(jobs)
    batches: dict[tuple[DeviceMesh, tuple[Placement, ...], torch.dtype], list[int]] = defaultdict(
        list
    )
    for index, (tensor, source, target) in enumerate(jobs):
        changed = [
            (a, b) for a, b in zip(source.placements, target.placements, strict=True) if a != b
        ]
        if all(a.is_partial() and b.is_replicate() for a, b in changed):
            pattern = tuple(
                a if a != b else REPLICATE
                for a, b in zip(source.placements, target.placements, strict=True)
            )
            batches[source.mesh, pattern, tensor.dtype].append(index)
        else:
            out[index] = local_on(op, tensor, source, target)
    for (mesh, pattern, _), members in batches.items():
        refuse_communication(
            op, f"combining the addends of {len(members)} tensors laid out as {pattern}"
        )
        pieces = [local_of(jobs[index][0]) for index in members]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        whole = redistribute_tensor(
            flat, mesh, tuple(flat.shape), pattern, (REPLICATE,) * mesh.ndim
        )
        for index, piece, part in zip(
            members, pieces, torch.split(whole, [p.numel() for p in pieces]), strict=True
        ):
            out[index] = part.view(piece.shape)
    return cast("list[Tensor]", out)


def list_operator(
    cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Run a list operator on lists of distributed and plain tensors."""
    values = [*args, *kwargs.values()]
    lists = [i for i, value in enumerate(values) if _is_tensor_list(value)]
    if not lists:  # fused into one kernel, like a norm, but no operator over lists
        return dispatch_by_rule(cls, op, args, kwargs)
    count = len(cast("Sequence[Tensor]", values[lists[0]]))
    full = [i for i in lists if len(cast("Sequence[Tensor]", values[i])) == count]
    extra = [value for i, value in enumerate(values) if i not in lists]
    facts = signature(op)
    names = list(kwargs)
    written = {
        *facts.written,
        *(len(args) + names.index(n) for n in facts.written_names if n in names),
    }
    writes = bool(facts.written or facts.written_names)
    filled: list[object] = list(values)
    for i in lists:
        filled[i] = list(cast("Sequence[Tensor]", values[i]))
    targets: list[Spec | None] = []
    moving: list[Job] = []
    for position in range(count):
        column = [cast("Sequence[Tensor]", values[i])[position] for i in full]
        target = _target(op, column, extra, written=writes and 0 in facts.written)
        targets.append(target)
        for i, tensor in zip(full, column, strict=True):
            spec = spec_of(tensor)
            if spec is None and target is not None and tensor.numel() > 1:
                refuse_plain(op, tensor, f"list argument {i}, position {position},", target.mesh)
                mesh = target.mesh
                spec = make_spec(
                    mesh, (REPLICATE,) * mesh.ndim, tensor.shape, tensor.stride(), tensor.dtype
                )
            row = cast("list[Tensor]", filled[i])
            if spec is None or target is None or spec is target:
                row[position] = local_of(tensor)
                continue
            wanted = _beside(target, tuple(tensor.shape))
            if spec.placements == wanted:
                row[position] = local_of(tensor)
            else:
                moving.append((i, position, spec, spec.with_placements(wanted)))
    jobs = [
        (cast("Sequence[Tensor]", values[i])[position], source, goal)
        for i, position, source, goal in moving
    ]
    for (i, position, _, _), local in zip(moving, _combined(op, jobs), strict=True):
        cast("list[Tensor]", filled[i])[position] = local
    back = [job for job in moving if job[0] in written]
    for i, _, source, goal in back:
        if needs_network(goal, source):
            note_moves(op, ((i, goal, source),))
    filled = [
        whole_of(op, value) if isinstance(value, torch.Tensor) else value for value in filled
    ]
    result = op(*filled[: len(args)], **dict(zip(kwargs, filled[len(args) :], strict=True)))
    for i, position, source, goal in back:
        write_back(
            cast("Sequence[Tensor]", values[i])[position],
            cast("Sequence[Tensor]", filled[i])[position],
            goal,
            source,
        )
    written_lists = tuple(i for i in lists if i in written)
    copies = {
        i: [tensor for tensor in cast("Sequence[Tensor]", values[i]) if is_copy(tensor)]
        for i in lists
    }
    for tensor in (tensor for i in written_lists for tensor in copies[i]):
        write_to_base(op, tensor)
    hits.count_writes(values, written_lists)
    moved = moving or any(copies.values())
    if not (moved or any(isinstance(value, torch.Tensor) for value in extra)):
        _remember(cls, op, args, kwargs, targets, result, written_lists)
    if writes:
        return None if not schema_of(op).returns else values[lists[0]]
    return [
        local if target is None else _wrapped(cls, op, local, target)
        for local, target in zip(cast("Sequence[Tensor]", result), targets, strict=True)
    ]


def _remember(
    cls: type,
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    targets: Sequence[Spec | None],
    result: object,
    written_lists: tuple[int, ...],
) -> None:
    """Let the hit path answer the next call on such lists, where all that is left to do is local."""
    outputs: tuple[Spec | None, ...] = ()
    if isinstance(result, (list, tuple)) and result and not signature(op).returns_written:
        pieces = cast("Sequence[Tensor]", result)
        outputs = tuple(
            None if target is None else target.with_dtype(piece.dtype)
            for target, piece in zip(targets, pieces, strict=True)
        )
        if any(
            spec is not None and tuple(piece.shape) != tuple(spec.local_shape)
            for spec, piece in zip(outputs, pieces, strict=True)
        ):
            return
    elif schema_of(op).returns:
        return
    hit = hits.Hit(hits.fastest(op), None, outputs, None, written_lists=written_lists)
    hits.remember(cls, op, args, kwargs, hit)


def _wrapped(cls: type, op: OpOverload, local: Tensor, target: Spec) -> Tensor:
    if tuple(local.shape) != tuple(target.local_shape):
        if all(placement.is_replicate() for placement in target.placements):
            whole = make_spec(
                target.mesh, target.placements, local.shape, local.stride(), local.dtype
            )
            return new_dtensor(cls, local, whole, False)
        msg = (
            f"{op}: is no operator that keeps the shapes in its lists (a piece of {tuple(target.local_shape)} became "
            f"{tuple(local.shape)}), and has no rule of its own; call the operator for single tensors instead"
        )
        raise NoRuleError(msg)
    return new_dtensor(cls, local, target.with_dtype(local.dtype), False)


def _is_tensor_list(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(item, torch.Tensor) for item in value)
    )


add_handler_family(("aten::_foreach_", "aten::_fused_"), list_operator)


def _max(tensor: Tensor, _order: float, _dtype: torch.dtype | None) -> Tensor:
    return tensor.max()


def _norm(tensor: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    return norm


def _power_sum(tensor: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    return tensor.abs().pow(order).sum(dtype=dtype)


def _each(name: str, reduce: Callable[[Tensor, float, torch.dtype | None], Tensor]) -> None:
    """Run the list operator *name*, which reduces, as *reduce* on single tensors, one after the other."""
    overloads = aten_ops(f"{name}.default", f"{name}.Scalar")

    @handles(*cast("tuple[OpOverload, ...]", overloads))
    def run(
        _cls: type, _op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        order = cast("float", args[1] if len(args) > 1 else kwargs.get("ord", 2))
        dtype = cast("torch.dtype | None", args[2] if len(args) > 2 else kwargs.get("dtype"))
        return [reduce(tensor, order, dtype) for tensor in cast("Sequence[Tensor]", args[0])]


_each("_foreach_norm", _norm)
_each("_foreach_powsum", _power_sum)
_each("_foreach_max", _max)


@handles(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Unscale gradients; an infinity on one rank is an infinity on all, or some would skip the step and others not."""
    grads, found = cast("Sequence[Tensor]", args[0]), cast("Tensor", args[1])
    op(
        [local_of(grad) for grad in grads],
        whole_of(op, found),
        whole_of(op, cast("Tensor", args[2])),
        **kwargs,
    )
    flag = local_of(found)
    for mesh in {spec.mesh for spec in map(spec_of, grads) if spec is not None}:
        for axis, size in enumerate(mesh.shape):
            if size > 1 and mesh.get_coordinate() is not None:
                flag.copy_(wait(all_reduce(flag, "max", mesh.get_group(axis))))
    return None
