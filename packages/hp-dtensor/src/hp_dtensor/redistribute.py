"""Run a plan on a local tensor.

A plan is compiled once for a rank into a list of closures that hold all offsets, shapes and groups; a later call is one
dict lookup and the collectives. The closures do nothing that depends on data, so that they run on fake tensors too.

The rule of memory: from one shard to another, at most a send buffer and a receive buffer live beside the source, and the
send buffer is gone before the result is made. The rule of aliasing: the result is the argument when nothing has to be
done, and new memory otherwise.

Rebuilding the full tensor and cutting it was not taken for any pair, and no autograd happens here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch
from hp_mesh import collectives
from hp_mesh.groups import GroupConfig, registry
from torch import Tensor

from hp_dtensor import _torch, shards
from hp_dtensor.pieces import Ranges, only_dim, overlap, put, ranges_in, sizes_of, take
from hp_dtensor.placements import (
    REPLICATE,
    Cut,
    Partial,
    Placement,
    folded,
    folded_dims,
    shard_dim,
)
from hp_dtensor.plan import Step, make_plan
from hp_dtensor.shards import Box

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch.distributed import ProcessGroup

__all__ = ["redistribute_tensor"]

Run = Callable[[Tensor, bool], Tensor]
"""One compiled step: the local tensor and whether the result may be waited for later."""

_MOST_RUNNERS = 1 << 14
_runners: dict[object, Run] = {}
registry.on_new_world(_runners.clear)


def redistribute_tensor(
    local: Tensor,
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    *,
    async_op: bool = False,
) -> Tensor:
    """Turn this rank's piece of layout *source* into its piece of layout *target*.

    No gradient is recorded: call it without grad or inside an autograd Function.

    Args:
        local: what this rank holds; its shape is that of the shard rule.
        mesh: the devices. A rank outside gets *local* back.
        shape: global shape.
        source: one placement for each axis, dims non-negative.
        target: likewise.
        async_op: let the first use of the result wait, where the last step is a bare collective.

    Returns:
        *local* itself where it is the result already; otherwise a contiguous tensor with its own memory.

    Raises:
        LayoutError: when the placements do not fit the mesh or the shape.
        RedistributeError: when one layout has addends of several kinds.
    """
    registry.refresh()
    if local.is_conj() or local.is_neg():
        local = _written_out(local)
    key = (mesh, shape, source, target)
    try:
        run = _runners.get(key)
    except TypeError:  # a symbolic size has no hash
        return _redistribute_symbolic(local, mesh, shape, source, target, async_op=async_op)
    if run is None:
        if max(folded_dims(source), folded_dims(target)) > 1:
            return _redistribute_folded(local, mesh, shape, source, target)
        masks = [_torch.mask_of(placement) for placement in source]
        if any(mask is not None for mask in masks):
            return _redistribute_masked(local, mesh, shape, source, target, masks)
        run = _compile(mesh, tuple(shape), tuple(source), tuple(target))
        if len(_runners) >= _MOST_RUNNERS:
            _runners.clear()
        _runners[key] = run
    return run(local, async_op)


def _written_out(local: Tensor) -> Tensor:
    """*local*, which is conjugated or negated by a bit, with the numbers that it stands for: what moves are bits."""
    with _torch.with_lazy_views():
        return local.resolve_conj().resolve_neg()


def _redistribute_symbolic(
    local: Tensor,
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    *,
    async_op: bool,
) -> Tensor:
    """Under a compiler that lets sizes vary: by a plan for all sizes if there is one, else for the sizes at hand.

    What is asked about the sizes on the way becomes a guard of the graph. A step that must count pieces asks for numbers,
    and the graph then holds for these alone.
    """
    try:
        run = _compile(mesh, tuple(shape), tuple(source), tuple(target))
    except TypeError:
        known = tuple(int(size) for size in shape)
        return redistribute_tensor(local, mesh, known, source, target, async_op=async_op)
    return run(local, async_op)


def _redistribute_masked(
    local: Tensor,
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    masks: Sequence[Tensor | None],
) -> Tensor:
    """What torch's vocabulary-sharded lookup left: rows that are not this rank's hold rubbish, and a mask says which.

    The mask is data of one call, so nothing of this is remembered.
    """
    for mask in masks:
        if mask is not None:
            local = local.masked_fill(
                mask.reshape(*mask.shape, *([1] * (local.ndim - mask.ndim))), 0
            )
    plain = tuple(Partial(p.reduce_op) if isinstance(p, Partial) else p for p in source)
    return redistribute_tensor(local, mesh, shape, plain, target)


def _redistribute_folded(
    local: Tensor,
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> Tensor:
    """A move from or to a layout that cuts flattened dims.

    Between two that flatten alike, it is a move of the flattened tensor. Any other goes by way of the layout in which the
    flattened dims are whole: a run of flattened indices is no box of any other layout.
    """
    if mesh.get_coordinate() is None or source == target:
        return local
    before, after = folded_dims(source), folded_dims(target)
    if before == after:
        flat, held = folded(shape, source, before)
        return redistribute_tensor(local, mesh, flat, held, folded(shape, target, after)[1])
    whole_source, whole_target = _unfolding(source), _unfolding(target)
    if before > 1:
        flat, held = folded(shape, source, before)
        wanted = folded(shape, whole_source, before)[1]
        local = redistribute_tensor(local, mesh, flat, held, wanted)
        local = local.reshape(*shape[:before], *local.shape[1:])
    if after == 1:
        return redistribute_tensor(local, mesh, shape, whole_source, target)
    local = redistribute_tensor(local, mesh, shape, whole_source, whole_target)
    flat, held = folded(shape, whole_target, after)
    wanted = folded(shape, target, after)[1]
    local = local.reshape(flat[0], *local.shape[after:])
    return redistribute_tensor(local, mesh, flat, held, wanted)


def _unfolding(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """*placements* with the flattened dims whole."""
    return tuple(
        REPLICATE if isinstance(placement, Cut) and placement.folds > 1 else placement
        for placement in placements
    )


# --- from plan to closures ----------------------------------------------------------------------------------------------


def _compile(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> Run:
    where = mesh.get_coordinate()
    steps = make_plan(shape, 1, tuple(mesh.shape), source, target).steps
    if where is None or not steps:
        return _keep
    runs = [_COMPILERS[step.kind](_Site(mesh, shape, tuple(where), step)) for step in steps]
    if steps[-1].kind == "slice":
        runs.append(_own)
    if len(runs) == 1:
        return runs[0]
    return _chain(tuple(runs[:-1]), runs[-1])


def _keep(local: Tensor, async_op: bool) -> Tensor:
    del async_op
    return local


def _own(local: Tensor, async_op: bool) -> Tensor:
    """A view becomes a tensor of its own."""
    del async_op
    return local.clone(memory_format=torch.contiguous_format)


def _chain(first: tuple[Run, ...], last: Run) -> Run:
    def run(local: Tensor, async_op: bool) -> Tensor:
        for step in first:
            local = step(local, False)
        return last(local, async_op)

    return run


class _Site:
    """One step, seen from one rank."""

    def __init__(
        self, mesh: DeviceMesh, shape: tuple[int, ...], where: tuple[int, ...], step: Step
    ) -> None:
        self.mesh = mesh
        self.shape = shape
        self.where = where
        self.step = step
        self.mesh_shape = tuple(mesh.shape)

    def before(self, where: tuple[int, ...] | None = None) -> Box:
        """What a coordinate (this rank's by default) holds before the step."""
        return shards.local_box(self.shape, self.mesh_shape, where or self.where, self.step.source)

    def after(self, where: tuple[int, ...] | None = None) -> Box:
        """What a coordinate (this rank's by default) holds after the step."""
        return shards.local_box(self.shape, self.mesh_shape, where or self.where, self.step.target)

    def peers(self) -> list[tuple[int, ...]]:
        """Coordinates of the ranks that take part, in group order."""
        axes = self.step.axes
        out = []
        for there in itertools.product(*(range(self.mesh_shape[axis]) for axis in axes)):
            moved = dict(zip(axes, there, strict=True))
            out.append(tuple(moved.get(axis, own) for axis, own in enumerate(self.where)))
        return out

    def group(self) -> ProcessGroup:
        """The process group over the step's axes, flattened with the last axis fastest."""
        axes = self.step.axes
        if len(axes) == 1:
            return self.mesh.get_group(axes[0])
        ranks = [self.mesh.rank_list[self._position(there)] for there in self.peers()]
        return registry.get(ranks, GroupConfig(), f"axes {axes} of {self.mesh}")

    def _position(self, where: tuple[int, ...]) -> int:
        """Where a coordinate stands in the mesh's row-major list of ranks."""
        position = 0
        for size, own in zip(self.mesh_shape, where, strict=True):
            position = position * size + own
        return position


# --- the kinds of step --------------------------------------------------------------------------------------------------


def _slice(site: _Site) -> Run:
    ranges = ranges_in(site.before(), site.after())

    def run(local: Tensor, async_op: bool) -> Tensor:
        del async_op
        return take(local, ranges)

    return run


def _all_gather(site: _Site) -> Run:
    group = site.group()
    held = [site.before(there) for there in site.peers()]
    sizes = [sizes_of(box) for box in held]
    whole = sizes_of(site.after())
    ranges = [ranges_in(site.after(), box) for box in held]
    dim = only_dim(ranges, sizes, whole)
    if dim is None:
        return _all_gather_padded(group, sizes, ranges, whole)

    def run(local: Tensor, async_op: bool) -> Tensor:
        return collectives.all_gather(local, group, async_op=async_op)

    before, rest = _around(sizes[0], dim)

    def run_inner(local: Tensor, async_op: bool) -> Tensor:
        got = collectives.all_gather(local, group, async_op=async_op)
        return got.view(len(sizes), before, rest).transpose(0, 1).reshape(whole).contiguous()

    return run_inner if dim else run


def _around(size: tuple[int, ...], dim: int) -> tuple[int, int]:
    """How many entries lie before *dim*, and in *dim* and after it: a piece as a matrix."""
    return math.prod(size[:dim]), math.prod(size[dim:])


def _all_gather_padded(
    group: ProcessGroup, sizes: list[tuple[int, ...]], ranges: list[Ranges], whole: tuple[int, ...]
) -> Run:
    numels = [math.prod(size) for size in sizes]
    most = max(numels)

    def run(local: Tensor, async_op: bool) -> Tensor:
        flat = local.reshape(-1)
        if flat.shape[0] != most:
            padded = flat.new_empty(most)
            padded[: flat.shape[0]].copy_(flat)
            flat = padded
        got = collectives.wait(collectives.all_gather(flat, group, async_op=async_op))
        out = local.new_empty(whole)
        for i, numel in enumerate(numels):
            if numel:
                put(out, got[i * most : i * most + numel].view(sizes[i]), ranges[i])
        return out

    return run


def _all_to_all(site: _Site) -> Run:
    group = site.group()
    peers = site.peers()
    sent = [overlap(site.before(), site.after(there)) for there in peers]
    received = [overlap(site.before(there), site.after()) for there in peers]
    out_ranges = [ranges_in(site.before(), box) for box in sent]
    in_ranges = [ranges_in(site.after(), box) for box in received]
    out_sizes = [sizes_of(box) for box in sent]
    in_sizes = [sizes_of(box) for box in received]
    whole = sizes_of(site.after())
    cut = only_dim(out_ranges, out_sizes, sizes_of(site.before()))
    joined = only_dim(in_ranges, in_sizes, whole)
    if cut is not None and joined is not None and _is_even(site):
        return _all_to_all_even(group, len(peers), out_sizes[0], cut, joined, whole)
    mine = peers.index(site.where)
    out_splits = [0 if i == mine else math.prod(size) for i, size in enumerate(out_sizes)]
    in_splits = [0 if i == mine else math.prod(size) for i, size in enumerate(in_sizes)]
    total = sum(out_splits)
    keeps = math.prod(in_sizes[mine]) > 0

    def pack(local: Tensor) -> Tensor:
        buffer = local.new_empty(total)
        for i, part in enumerate(torch.split(buffer, out_splits)):
            if out_splits[i]:
                part.view(out_sizes[i]).copy_(take(local, out_ranges[i]))
        return buffer

    def run(local: Tensor, async_op: bool) -> Tensor:
        del async_op  # what arrives has to be put in place
        got = collectives.all_to_all(pack(local), in_splits, out_splits, group)
        out = local.new_empty(whole)
        if keeps:
            put(out, take(local, out_ranges[mine]), in_ranges[mine])
        for i, part in enumerate(torch.split(got, in_splits)):
            if in_splits[i]:
                put(out, part.view(in_sizes[i]), in_ranges[i])
        return out

    return run


def _is_even(site: _Site) -> bool:
    """Whether every rank of the group sends and receives pieces of one size, so that all of them take the short way."""
    peers = site.peers()
    first, *rest = (sizes_of(overlap(site.before(a), site.after(b))) for a in peers for b in peers)
    return all(sizes == first for sizes in rest)


def _all_to_all_even(
    group: ProcessGroup,
    ranks: int,
    piece: tuple[int, ...],
    cut: int,
    joined: int,
    whole: tuple[int, ...],
) -> Run:
    """Equal pieces, cut along one dim and joined along another: two copies, whatever the number of ranks.

    A rank's piece for itself travels along in the buffers, which saves a third copy; it does not go over the wire.
    """
    cut_before, cut_rest = _around(piece, cut)
    joined_before, joined_rest = _around(piece, joined)
    splits = [math.prod(piece)] * ranks

    def pack(local: Tensor) -> Tensor:
        return local.reshape(cut_before, ranks, cut_rest).transpose(0, 1).reshape(-1)

    def run(local: Tensor, async_op: bool) -> Tensor:
        got = collectives.all_to_all(pack(local), splits, splits, group, async_op=async_op)
        if joined_before == 1:
            return got.view(whole)
        got = got.view(ranks, joined_before, joined_rest).transpose(0, 1)
        return got.reshape(whole).contiguous()

    return run


def _reduce_scatter(site: _Site) -> Run:
    group = site.group()
    op, enter, leave = _reduction(site.step.op)
    pieces = [site.after(there) for there in site.peers()]
    sizes = [sizes_of(box) for box in pieces]
    ranges = [ranges_in(site.before(), box) for box in pieces]
    whole = sizes_of(site.before())
    mine = sizes_of(site.after())
    dim = only_dim(ranges, sizes, whole)
    most = max(math.prod(size) for size in sizes)

    def run(local: Tensor, async_op: bool) -> Tensor:
        return leave(collectives.reduce_scatter(enter(local), op, group, async_op=async_op), local)

    before, rest = _around(mine, dim or 0)

    def run_inner(local: Tensor, async_op: bool) -> Tensor:
        moved = enter(local).reshape(before, len(sizes), rest).transpose(0, 1)
        got = collectives.reduce_scatter(moved, op, group, async_op=async_op)
        return leave(got.view(mine), local)

    def run_padded(local: Tensor, async_op: bool) -> Tensor:
        entered = enter(local)
        buffer = entered.new_zeros(len(sizes) * most)
        for i, size in enumerate(sizes):
            numel = math.prod(size)
            if numel:
                buffer[i * most : i * most + numel].view(size).copy_(take(entered, ranges[i]))
        got = collectives.reduce_scatter(buffer, op, group, async_op=async_op)
        numel = math.prod(mine)
        return leave(got if numel == most else got[:numel].clone(), local).view(mine)

    if dim is None:
        return run_padded
    return run_inner if dim else run


def _all_reduce(site: _Site) -> Run:
    group = site.group()
    op, enter, leave = _reduction(site.step.op)

    def run(local: Tensor, async_op: bool) -> Tensor:
        return leave(collectives.all_reduce(enter(local), op, group, async_op=async_op), local)

    def run_plain(local: Tensor, async_op: bool) -> Tensor:
        return collectives.all_reduce(local, op, group, async_op=async_op)

    return run if site.step.op in {"all", "max", "min"} else run_plain


def _make_partial(site: _Site) -> Run:
    (axis,) = site.step.axes
    op = site.step.op
    if shard_dim(site.step.source[axis]) is not None:
        ranges = ranges_in(site.after(), site.before())
        whole = sizes_of(site.after())

        def pad(local: Tensor, async_op: bool) -> Tensor:
            del async_op
            out = local.new_full(whole, _neutral(op, local.dtype))
            if local.numel():
                put(out, local, ranges)
            return out

        return pad
    if op in {"sum", "product"} and site.where[axis] != 0:
        return lambda local, _: local.new_full(local.shape, 0 if op == "sum" else 1)
    return _own


def _neutral(op: str, dtype: torch.dtype) -> float:
    """The value that does not change a reduction."""
    if op in {"sum", "product"}:
        return 0 if op == "sum" else 1
    if op == "all" or dtype == torch.bool:
        return op != "max"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


_Op = Literal["sum", "avg", "max", "min", "product"]


def _reduction(
    op: str,
) -> tuple[_Op, Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """The collective's reduction, and what to do to a tensor before and after it."""
    if op == "all":
        return (
            "min",
            lambda x: x if x.dtype == torch.bool else x != 0,
            lambda x, like: x.to(like.dtype),
        )
    if op in {"max", "min"}:
        return cast("_Op", op), lambda x: _as_ordered(x, op), _from_ordered
    return cast("_Op", op), lambda x: x, lambda x, _: x


_WIDE_AND_WHOLE = {
    torch.float16: (torch.float32, torch.int32),
    torch.bfloat16: (torch.float32, torch.int32),
    torch.float32: (torch.float32, torch.int32),
    torch.float64: (torch.float64, torch.int64),
}
"""The dtypes in which floating point numbers of each dtype are compared, and in which their bits are read."""


def _as_ordered(local: Tensor, op: str) -> Tensor:
    """Whole numbers in the order of the floating point numbers of *local*, with NaN where *op* finds it.

    On one device a maximum with NaN is NaN; the libraries that reduce over ranks drop it, or not, by who comes first.
    """
    dtypes = _WIDE_AND_WHOLE.get(local.dtype)
    if dtypes is None:
        return local
    wide, whole = dtypes
    nan = math.nan if op == "max" else -math.nan
    values = torch.where(local.isnan(), torch.full((), nan, device=local.device), local.to(wide))
    return _turned(values.to(wide).view(whole))


def _from_ordered(found: Tensor, like: Tensor) -> Tensor:
    dtypes = _WIDE_AND_WHOLE.get(like.dtype)
    return found if dtypes is None else _turned(found).view(dtypes[0]).to(like.dtype)


def _turned(bits: Tensor) -> Tensor:
    """Bits of negative numbers turned around, which as whole numbers count backwards; twice is nothing."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


_COMPILERS: dict[str, Callable[[_Site], Run]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "make_partial": _make_partial,
}
