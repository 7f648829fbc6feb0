"""From one layout to another: which steps, how many bytes, how long. Pure integers; nothing here sees a tensor or a group.

Three facts keep the search small and its answer optimal:

* A move between layouts without addends needs one collective. A rank receives exactly what it lacks, from the ranks that
  differ from it only on the axes that cut the source; no plan can send less. Where all of a group want the same, that
  exchange is an all-gather; where nobody lacks anything, it is a slice.
* Addends are cheapest to move after they are reduced, and cheapest to reduce when the ranks that hold the same addends
  share the work. So a plan is: slice, reduce-scatter, all-reduce, exchange, make partial; each part may be empty.
* What is open is where the slices and the scattered pieces go. That is a choice for each axis; all are tried and priced.

Gathering a shard to cut it again, one axis at a time (the greedy plan), was not taken: it sends up to the whole tensor.
A general search over all layouts was not taken either: it finds the same plans, a thousand times slower.

The price is what one rank receives (bytes), or seconds where the speed of the axes' links is given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hp_dtensor.errors import LayoutError, RedistributeError
from hp_dtensor.placements import (
    Cut,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    shard_dim,
)
from hp_dtensor.shards import Intervals, cached, length, local_intervals

__all__ = ["Link", "Plan", "Step", "StepKind", "make_plan"]

StepKind = Literal[
    "slice", "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "make_partial"
]
"""What a step does; ``slice`` and ``make_partial`` do not communicate."""

Placements = tuple[Placement, ...]

_REPLICATE = Replicate()
_PADDED = ("sum", "product", "max", "min", "all")
"""Reductions with a neutral element, so that a shard becomes an addend by padding."""


@dataclass(frozen=True, slots=True)
class Link:
    """How fast the ranks along an axis talk to each other.

    Example:
        >>> Link(latency=1e-5, bandwidth=1e9).seconds(1_000_000)
        0.00101
    """

    latency: float = 1e-5
    """Seconds that a collective takes at least."""
    bandwidth: float = 5e10
    """Bytes a second that a rank receives."""

    def seconds(self, nbytes: int) -> float:
        """How long a collective takes in which a rank receives *nbytes*."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan: a local operation or one collective."""

    kind: StepKind
    """What is done."""
    axes: tuple[int, ...]
    """Mesh axes whose ranks take part, ascending; more than one makes it a collective over the flattened axes."""
    op: str
    """How values are reduced, or which kind of addend is made; empty otherwise."""
    source: Placements
    """The layout before."""
    target: Placements
    """The layout after."""
    bytes: int
    """The most that one rank receives."""
    seconds: float
    """Estimated duration; zero for local steps."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from one layout to another.

    Example:
        >>> from hp_dtensor.placements import Replicate, Shard
        >>> print(make_plan((8, 8), 4, (2,), (Shard(0),), (Shard(1),)))
        all_to_all axes (0,): (S(0)) -> (S(1)), 64 bytes
    """

    steps: tuple[Step, ...]
    """In order; empty where the layouts hold the same."""

    @property
    def bytes(self) -> int:
        """The most that one rank receives, over all steps."""
        return sum(step.bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """Estimated duration."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to do"
        return "\n".join(
            f"{step.kind}{f' {step.op}' if step.op else ''} axes {step.axes}: "
            f"({', '.join(map(str, step.source))}) -> ({', '.join(map(str, step.target))}), {step.bytes} bytes"
            for step in self.steps
        )


_Entry = tuple[int, int | Cut] | str | None
"""A placement inside the search: ``(dim, split_factor)`` or ``(dim, a placement of its own)``, the kind of addend, or None for a replica."""

_Layout = tuple[_Entry, ...]

_Cuts = tuple[tuple[int, int, "int | Cut"], ...]
"""``(axis, axis_size, split_factor)`` of the axes that cut a dim, in axis order."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A step that may never be taken, in elements."""

    kind: StepKind
    axes: tuple[int, ...]
    source: _Layout
    target: _Layout
    elements: int = 0


@dataclass(frozen=True, slots=True)
class _World:
    """What all parts of the search need to know."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    itemsize: int
    links: tuple[Link, ...] | None

    def group(self, axes: Sequence[int]) -> int:
        """How many ranks the flattened *axes* have."""
        return math.prod(self.mesh[axis] for axis in axes)

    def cuts(self, layout: _Layout) -> tuple[_Cuts, ...]:
        """Which axes cut each dim."""
        return _cuts(len(self.shape), self.mesh, layout)

    def most(self, layout: _Layout) -> int:
        """The most elements that one rank holds, counted dim by dim."""
        return math.prod(map(_most_of_dim, self.shape, self.cuts(layout)))

    def seconds(self, draft: _Draft) -> float:
        """How long the slowest of its axes takes."""
        links = self.links or (Link(),) * len(self.mesh)
        nbytes = draft.elements * self.itemsize
        return (
            max((links[axis].seconds(nbytes) for axis in draft.axes), default=0.0)
            if draft.elements
            else 0.0
        )

    def price(self, drafts: Sequence[_Draft]) -> tuple[float, int, int]:
        """What is made small: bytes (or seconds, where links are known), then collectives, then steps."""
        cost = (
            sum(map(self.seconds, drafts))
            if self.links
            else sum(draft.elements for draft in drafts)
        )
        return cost, sum(draft.elements > 0 for draft in drafts), len(drafts)

    def finish(self, drafts: Sequence[_Draft]) -> Plan:
        """The drafts as steps, in placements and bytes."""
        op = next((e for d in drafts for e in (*d.source, *d.target) if isinstance(e, str)), "")
        return Plan(
            tuple(
                Step(
                    draft.kind,
                    draft.axes,
                    _op(draft) if op else "",
                    tuple(map(_placement, draft.source)),
                    tuple(map(_placement, draft.target)),
                    draft.elements * self.itemsize,
                    self.seconds(draft),
                )
                for draft in drafts
            )
        )


@lru_cache(maxsize=1 << 14)
def _cuts(ndim: int, mesh: tuple[int, ...], layout: _Layout) -> tuple[_Cuts, ...]:
    out: list[list[tuple[int, int, int | Cut]]] = [[] for _ in range(ndim)]
    for axis, entry in enumerate(layout):
        if isinstance(entry, tuple):
            out[entry[0]].append((axis, mesh[axis], entry[1]))
    return tuple(tuple(cuts) for cuts in out)


def _op(draft: _Draft) -> str:
    """The kind of addend that a step reduces or makes."""
    layout = draft.target if draft.kind == "make_partial" else draft.source
    if draft.kind not in {"make_partial", "reduce_scatter", "all_reduce"}:
        return ""
    return str(layout[draft.axes[0]])


def _placement(entry: _Entry) -> Placement:
    if isinstance(entry, tuple):
        dim, factor = entry
        if isinstance(factor, Cut):
            return factor
        return Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)
    return _REPLICATE if entry is None else Partial(entry)


def make_plan(
    shape: tuple[int, ...],
    itemsize: int,
    mesh_shape: tuple[int, ...],
    source: Placements,
    target: Placements,
    links: tuple[Link, ...] | None = None,
) -> Plan:
    """The cheapest steps that turn layout *source* into layout *target*.

    Args:
        shape: global shape.
        itemsize: bytes of an element.
        mesh_shape: sizes of the mesh axes.
        source: one placement for each axis, dims non-negative.
        target: likewise.
        links: the speed of each axis; when given, time is made small, else bytes.

    Raises:
        LayoutError: when the placements do not fit the mesh or the shape.
        RedistributeError: when one layout has addends of several kinds, whose order would change the value.

    Example:
        >>> from hp_dtensor.placements import Partial, Replicate, Shard
        >>> [step.kind for step in make_plan((8,), 4, (4,), (Partial(),), (Shard(0),)).steps]
        ['reduce_scatter']
        >>> make_plan((8,), 4, (4,), (Partial(),), (Replicate(),)).bytes
        48
    """
    return _make_plan(
        tuple(shape), itemsize, tuple(mesh_shape), tuple(source), tuple(target), links
    )


@cached(1 << 14)
def _make_plan(
    shape: tuple[int, ...],
    itemsize: int,
    mesh_shape: tuple[int, ...],
    source: Placements,
    target: Placements,
    links: tuple[Link, ...] | None,
) -> Plan:
    world = _World(shape, mesh_shape, itemsize, links)
    held = _read(source, shape, mesh_shape)
    wanted = _read(target, shape, mesh_shape)
    changed = [axis for axis in range(len(mesh_shape)) if held[axis] != wanted[axis]]
    reduced = [axis for axis in changed if isinstance(held[axis], str)]
    made = [axis for axis in changed if isinstance(wanted[axis], str)]
    if not reduced and not made:
        return world.finish(_move(world, held, wanted))
    return world.finish(_search(world, held, wanted, reduced, made))


def _read(placements: Placements, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> _Layout:
    """The simplest spelling of a layout: size-1 axes are replicated, ``Shard`` is a split factor of one.

    Raises:
        LayoutError: when there is not one placement an axis, or one names a dim that is not there.
        RedistributeError: when addends are of several kinds.
    """
    if len(placements) != len(mesh_shape):
        message = f"{len(placements)} placements {placements} for a mesh of shape {mesh_shape}; give one placement for each axis"
        raise LayoutError(message)
    out: list[_Entry] = []
    for size, placement in zip(mesh_shape, placements, strict=True):
        dim = shard_dim(placement)
        if dim is not None and not 0 <= dim < len(shape):
            message = f"{placement} of {placements}: a tensor of shape {shape} has no dim {dim}"
            raise LayoutError(message)
        if size == 1 or placement.is_replicate():
            out.append(None)
        elif isinstance(placement, Partial):
            out.append(placement.reduce_op)
        elif isinstance(placement, Cut) and dim is not None:
            out.append((dim, placement))
        elif dim is not None:
            out.append(
                (dim, int(placement.split_factor) if isinstance(placement, StridedShard) else 1)
            )
        else:
            message = f"{placement!r} of {placements} is no shard, replica or addend, so nothing is known of moving it"
            raise RedistributeError(message)
    kinds = {entry for entry in out if isinstance(entry, str)}
    if len(kinds) > 1:
        message = (
            f"{placements} has addends of the kinds {', '.join(sorted(kinds))}: the value would depend on which is reduced "
            "first; use one kind"
        )
        raise RedistributeError(message)
    return tuple(out)


# --- moves without addends ----------------------------------------------------------------------------------------------


def _move(world: _World, source: _Layout, target: _Layout) -> list[_Draft]:
    """Steps between layouts that have the same addends: none, a slice, a gather or an exchange."""
    dims = list(map(_compare, world.shape, world.cuts(source), world.cuts(target)))
    axes = tuple(sorted({axis for dim in dims for axis in dim.asked}))
    if not axes:
        return [] if all(dim.same for dim in dims) else [_Draft("slice", (), source, target)]
    if all(target[axis] is None for axis in axes):
        middle = tuple(
            source[axis] if axis in axes else entry for axis, entry in enumerate(target)
        )
        if _within(world, source, middle) and _within(world, target, middle):
            first = [] if middle == source else [_Draft("slice", (), source, middle)]
            return [
                *first,
                _Draft(
                    "all_gather",
                    axes,
                    middle,
                    target,
                    (world.group(axes) - 1) * world.most(middle),
                ),
            ]
    return [_Draft("all_to_all", axes, source, target, _lacked(dims))]


def _within(world: _World, outer: _Layout, inner: _Layout) -> bool:
    """Whether each rank holds in *outer* all that it holds in *inner*."""
    pairs = zip(world.shape, world.cuts(outer), world.cuts(inner), strict=True)
    return all(not _compare(size, held, wanted).asked for size, held, wanted in pairs)


@dataclass(frozen=True, slots=True)
class _Dim:
    """What ranks hold of one dim before and after."""

    asked: tuple[int, ...]
    """The fewest axes along which a rank finds what it lacks."""
    same: bool
    """Whether each rank holds the same after as before."""
    axes: tuple[tuple[int, int], ...]
    """``(axis, size)`` of the axes that make a difference."""
    sizes: tuple[tuple[int, int], ...]
    """How much a rank holds after, and how much of that it held before, for each coordinate on the axes, row-major."""


@cached(1 << 14)
def _compare(size: int, held: _Cuts, wanted: _Cuts) -> _Dim:
    sizes_of = {axis: n for axis, n, _ in (*held, *wanted)}
    axes = tuple(sorted(sizes_of.items()))
    table = []
    same = True
    for where in _coordinates(axes):
        before, after = _cut(size, held, where), _cut(size, wanted, where)
        same = same and before == after
        table.append((length(after), length(common(before, after))))
    asked: tuple[int, ...] = ()
    if any(after != kept for after, kept in table):
        asked = _asked(size, held, wanted, axes)
    return _Dim(asked, same, axes, tuple(table))


def _asked(
    size: int, held: _Cuts, wanted: _Cuts, axes: tuple[tuple[int, int], ...]
) -> tuple[int, ...]:
    """The fewest axes that reach all a rank lacks; all that cut the dim before always do."""
    for count in range(1, len(held)):
        for cuts in itertools.combinations(held, count):
            asked = tuple((axis, n) for axis, n, _ in cuts)
            if all(_reaches(size, held, wanted, asked, where) for where in _coordinates(axes)):
                return tuple(axis for axis, _ in asked)
    return tuple(axis for axis, _, _ in held)


def _reaches(
    size: int,
    held: _Cuts,
    wanted: _Cuts,
    asked: tuple[tuple[int, int], ...],
    where: dict[int, int],
) -> bool:
    """Whether the ranks that differ from *where* on the *asked* axes hold all that it wants."""
    lacked = _cut(size, wanted, where)
    found = sum(
        length(common(_cut(size, held, where | there), lacked)) for there in _coordinates(asked)
    )
    return found == length(lacked)


def _coordinates(axes: Sequence[tuple[int, int]]) -> Iterator[dict[int, int]]:
    names = [axis for axis, _ in axes]
    for where in itertools.product(*(range(n) for _, n in axes)):
        yield dict(zip(names, where, strict=True))


def _cut(size: int, cuts: _Cuts, where: dict[int, int]) -> Intervals:
    return local_intervals(size, tuple((n, where[axis], factor) for axis, n, factor in cuts))


@cached(1 << 14)
def _most_of_dim(size: int, cuts: _Cuts) -> int:
    """The most of a dim that a rank holds: coordinate zero never holds less than another, but for placements of one's own."""
    if any(isinstance(factor, Cut) for _, _, factor in cuts):
        axes = tuple((axis, n) for axis, n, _ in cuts)
        return max(length(_cut(size, cuts, where)) for where in _coordinates(axes))
    return length(local_intervals(size, tuple((n, 0, factor) for _, n, factor in cuts)))


def _lacked(dims: Sequence[_Dim]) -> int:
    """The most elements that one rank wants and does not hold."""
    axes = sorted({pair for dim in dims for pair in dim.axes})
    most = 0
    for where in _coordinates(axes):
        after = kept = 1
        for dim in dims:
            index = 0
            for axis, n in dim.axes:
                index = index * n + where[axis]
            after *= dim.sizes[index][0]
            kept *= dim.sizes[index][1]
        most = max(most, after - kept)
    return most


def common(a: Intervals, b: Intervals) -> Intervals:
    """The indices that both hold.

    Example:
        >>> common(((0, 4), (6, 9)), ((2, 7),))
        ((2, 4), (6, 7))
    """
    out = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            out.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


# --- addends ------------------------------------------------------------------------------------------------------------


def _search(
    world: _World, source: _Layout, target: _Layout, reduced: Sequence[int], made: Sequence[int]
) -> list[_Draft]:
    """The cheapest way to slice, reduce, move and make addends."""
    best: list[_Draft] | None = None
    for layout in _middles(world, source, target, reduced):
        head = _reduction(world, source, layout, reduced)
        if head is None or (best is not None and world.price(head) >= world.price(best)):
            continue
        for ends in _ends(target, layout, made):
            received = max(world.most(ends) - world.most(layout), 0)
            least = [*head, _Draft("all_to_all", (), layout, ends, received)] if received else head
            if best is not None and world.price(least) >= world.price(best):
                continue
            tail = _making(world, ends, target, made)
            if tail is not None:
                steps = [*head, *_move(world, layout, ends), *tail]
                if best is None or world.price(steps) < world.price(best):
                    best = steps
    assert best is not None, (source, target)
    return best


def _middles(
    world: _World, source: _Layout, target: _Layout, reduced: Sequence[int]
) -> Iterator[_Layout]:
    """The layouts in which all is reduced: a choice for each axis that has addends or replicas in *source*.

    An axis may take what the target wants there, stay whole, or cut a dim. Dims that the target cuts are tried, and the one
    other dim that cuts best.
    """
    dims = {entry[0] for entry in target if isinstance(entry, tuple)}
    spare = [dim for dim, size in enumerate(world.shape) if dim not in dims and size > 1]
    spare.sort(key=lambda dim: (world.shape[dim] % math.prod(world.mesh) != 0, dim))
    tried = sorted({*dims, *spare[:1]})
    choices: list[tuple[_Entry | int, ...]] = []
    for axis, entry in enumerate(source):
        wanted = target[axis]
        if world.mesh[axis] == 1 or not (axis in reduced or entry is None):
            choices.append((entry,))
        elif isinstance(wanted, tuple):
            choices.append((wanted, None, *tried))
        else:
            choices.append((None, *tried))
    seen = set()
    for chosen in itertools.product(*choices):
        layout = _innermost(world, chosen)
        if layout not in seen:
            seen.add(layout)
            yield layout


def _innermost(world: _World, chosen: Sequence[_Entry | int]) -> _Layout:
    """A dim in place of an entry becomes the shard that cuts it last, whatever axis cuts it before."""
    out: list[_Entry] = [None] * len(chosen)
    done: dict[int, int] = {}
    for axis in reversed(range(len(chosen))):
        choice = chosen[axis]
        entry = (choice, done.get(choice, 1)) if isinstance(choice, int) else choice
        if isinstance(entry, tuple):
            done[entry[0]] = done.get(entry[0], 1) * world.mesh[axis]
        out[axis] = entry
    return tuple(out)


def _reduction(
    world: _World, source: _Layout, layout: _Layout, reduced: Sequence[int]
) -> list[_Draft] | None:
    """Slice, reduce-scatter and all-reduce from *source* to *layout*; None where that needs data from elsewhere."""
    sliced = tuple(source[axis] if axis in reduced else entry for axis, entry in enumerate(layout))
    scattered = tuple(axis for axis in reduced if isinstance(layout[axis], tuple))
    summed = tuple(axis for axis in reduced if layout[axis] is None)
    between = tuple(source[axis] if axis in summed else entry for axis, entry in enumerate(layout))
    steps = []
    if sliced != source:
        if not _within(world, source, sliced):
            return None
        steps.append(_Draft("slice", (), source, sliced))
    if scattered:
        if not _within(world, sliced, between):
            return None
        received = (world.group(scattered) - 1) * world.most(between)
        steps.append(_Draft("reduce_scatter", scattered, sliced, between, received))
    if summed:
        ranks = world.group(summed)
        received = -(-2 * (ranks - 1) * world.most(between) // ranks)
        steps.append(_Draft("all_reduce", summed, between, layout, received))
    return steps


def _ends(target: _Layout, layout: _Layout, made: Sequence[int]) -> Iterator[_Layout]:
    """The layouts from which addends can be made locally: replicated, or sharded as they are, on those axes."""
    choices: list[tuple[_Entry, ...]] = []
    for axis, entry in enumerate(target):
        if axis not in made:
            choices.append((entry,))
        else:
            choices.append((None, layout[axis]) if isinstance(layout[axis], tuple) else (None,))
    yield from itertools.product(*choices)


def _making(
    world: _World, layout: _Layout, target: _Layout, made: Sequence[int]
) -> list[_Draft] | None:
    """Turn *layout* into addends on the axes *made*, locally; None where it cannot be."""
    steps = []
    for axis in made:
        after = (*layout[:axis], target[axis], *layout[axis + 1 :])
        if isinstance(layout[axis], tuple) and (
            target[axis] not in _PADDED or not _within(world, after, layout)
        ):
            return None
        steps.append(_Draft("make_partial", (axis,), layout, after))
        layout = after
    return steps
