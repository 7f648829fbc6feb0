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
from hp_dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard, shard_dim
from hp_dtensor.shards import Intervals, Split, axes_of, length, local_intervals, local_shape

__all__ = ["Link", "Plan", "Step", "StepKind", "make_plan"]

StepKind = Literal[
    "slice", "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "make_partial"
]
"""What a step does; ``slice`` and ``make_partial`` do not communicate."""

Placements = tuple[Placement, ...]

_REPLICATE = Replicate()
_COPIED = ("avg", "max", "min", "all")
"""Reductions of equal values that give the value: each rank may hold a copy."""
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


@dataclass(frozen=True, slots=True)
class _World:
    """What all parts of the search need to know."""

    shape: tuple[int, ...]
    itemsize: int
    mesh: tuple[int, ...]
    links: tuple[Link, ...] | None

    def group(self, axes: Sequence[int]) -> int:
        """How many ranks the flattened *axes* have."""
        return math.prod(self.mesh[axis] for axis in axes)

    def step(
        self,
        kind: StepKind,
        axes: Sequence[int],
        op: str,
        source: Placements,
        target: Placements,
        elements: int,
    ) -> Step:
        """A step in which a rank receives *elements*."""
        nbytes = elements * self.itemsize
        links = self.links or (Link(),) * len(self.mesh)
        slowest = max((links[axis].seconds(nbytes) for axis in axes), default=0.0)
        seconds = 0.0 if kind in {"slice", "make_partial"} else slowest
        return Step(kind, tuple(axes), op, source, target, nbytes, seconds)

    def price(self, steps: Sequence[Step]) -> tuple[float, int, int]:
        """What is made small: bytes (or seconds, where links are known), then collectives, then steps."""
        seconds = sum(step.seconds for step in steps)
        cost = seconds if self.links else sum(step.bytes for step in steps)
        return cost, sum(step.bytes > 0 for step in steps), len(steps)


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


@lru_cache(maxsize=1 << 14)
def _make_plan(
    shape: tuple[int, ...],
    itemsize: int,
    mesh_shape: tuple[int, ...],
    source: Placements,
    target: Placements,
    links: tuple[Link, ...] | None,
) -> Plan:
    world = _World(shape, itemsize, mesh_shape, links)
    source = canonical(source, shape, mesh_shape)
    target = canonical(target, shape, mesh_shape)
    changed = [axis for axis in range(len(mesh_shape)) if source[axis] != target[axis]]
    reduced = [axis for axis in changed if source[axis].is_partial()]
    made = [axis for axis in changed if target[axis].is_partial()]
    if not reduced and not made:
        return Plan(tuple(_move(world, source, target)))
    best: list[Step] | None = None
    for steps in _candidates(world, source, target, reduced, made):
        if best is None or world.price(steps) < world.price(best):
            best = steps
    assert best is not None, (source, target)
    return Plan(tuple(best))


def canonical(
    placements: Placements, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> Placements:
    """The simplest spelling of the same layout: size-1 axes are replicated, a split factor of one is a plain shard.

    Raises:
        LayoutError: when there is not one placement an axis, or one names a dim that is not there.
        RedistributeError: when addends are of several kinds.
    """
    if len(placements) != len(mesh_shape):
        message = f"{len(placements)} placements {placements} for a mesh of shape {mesh_shape}; give one placement for each axis"
        raise LayoutError(message)
    out: list[Placement] = []
    for size, placement in zip(mesh_shape, placements, strict=True):
        dim = shard_dim(placement)
        if dim is not None and not 0 <= dim < len(shape):
            message = f"{placement} of {placements}: a tensor of shape {shape} has no dim {dim}"
            raise LayoutError(message)
        if size == 1 or placement.is_replicate():
            out.append(_REPLICATE)
        elif isinstance(placement, Partial):
            out.append(Partial(placement.reduce_op))
        elif isinstance(placement, StridedShard) and int(placement.split_factor) == 1:
            out.append(Shard(placement.dim))
        else:
            out.append(placement)
    kinds = {placement.reduce_op for placement in out if isinstance(placement, Partial)}
    if len(kinds) > 1:
        message = (
            f"{placements} has addends of the kinds {', '.join(sorted(kinds))}: the value would depend on which is reduced "
            "first; use one kind"
        )
        raise RedistributeError(message)
    return tuple(out)


# --- moves without addends ----------------------------------------------------------------------------------------------


def _move(world: _World, source: Placements, target: Placements) -> list[Step]:
    """Steps between layouts that have the same Partial axes: none, a slice, a gather or an exchange."""
    axes = _axes_asked(world, source, target)
    if not axes:
        same = all(a == b for a, b in _boxes(world, source, target))
        return [] if same else [world.step("slice", (), "", source, target, 0)]
    middle = tuple(
        source[axis] if axis in axes else placement for axis, placement in enumerate(target)
    )
    if _is_gather(world, source, middle, target, axes):
        steps = [] if middle == source else [world.step("slice", (), "", source, middle, 0)]
        lacked = (world.group(axes) - 1) * _most(world, middle)
        return [*steps, world.step("all_gather", axes, "", middle, target, lacked)]
    lacked = max(
        _numel(wanted) - _numel(_common(held, wanted))
        for held, wanted in _boxes(world, source, target)
    )
    return [world.step("all_to_all", axes, "", source, target, lacked)]


def _axes_asked(world: _World, source: Placements, target: Placements) -> tuple[int, ...]:
    """The fewest axes along which a rank finds all that it lacks."""
    ndim = len(world.shape)
    axes: set[int] = set()
    for size, held, wanted in zip(
        world.shape, axes_of(source, ndim), axes_of(target, ndim), strict=True
    ):
        axes.update(_axes_asked_of_dim(size, world.mesh, held, wanted))
    return tuple(sorted(axes))


@lru_cache(maxsize=1 << 14)
def _axes_asked_of_dim(
    size: int,
    mesh: tuple[int, ...],
    held: tuple[tuple[int, int], ...],
    wanted: tuple[tuple[int, int], ...],
) -> tuple[int, ...]:
    if held == wanted or not held:
        return ()
    cutting = [axis for axis, _ in held]
    everywhere = sorted({axis for axis, _ in (*held, *wanted)})
    for count in range(len(cutting)):
        for asked in itertools.combinations(cutting, count):
            if all(
                _covers(size, mesh, held, asked, where, _cut(size, mesh, wanted, where))
                for where in _coordinates(mesh, everywhere)
            ):
                return asked
    return tuple(cutting)


def _covers(
    size: int,
    mesh: tuple[int, ...],
    held: tuple[tuple[int, int], ...],
    asked: tuple[int, ...],
    where: dict[int, int],
    wanted: Intervals,
) -> bool:
    """Whether the ranks that differ from *where* on the *asked* axes hold all of *wanted*."""
    found = 0
    for there in _coordinates(mesh, asked):
        found += length(common(_cut(size, mesh, held, where | there), wanted))
        if found == length(wanted):
            return True
    return found == length(wanted)


def _coordinates(mesh: tuple[int, ...], axes: Sequence[int]) -> Iterator[dict[int, int]]:
    for where in itertools.product(*(range(mesh[axis]) for axis in axes)):
        yield dict(zip(axes, where, strict=True))


def _cut(
    size: int, mesh: tuple[int, ...], cuts: tuple[tuple[int, int], ...], where: dict[int, int]
) -> Intervals:
    splits: tuple[Split, ...] = tuple((mesh[axis], where[axis], factor) for axis, factor in cuts)
    return local_intervals(size, splits)


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


def _common(a: tuple[Intervals, ...], b: tuple[Intervals, ...]) -> tuple[Intervals, ...]:
    return tuple(common(x, y) for x, y in zip(a, b, strict=True))


def _numel(box: tuple[Intervals, ...]) -> int:
    return math.prod(length(intervals) for intervals in box)


def _boxes(
    world: _World, source: Placements, target: Placements
) -> Iterator[tuple[tuple[Intervals, ...], tuple[Intervals, ...]]]:
    """What each rank holds before and after; ranks that differ on axes that cut nothing are left out."""
    ndim = len(world.shape)
    before, after = axes_of(source, ndim), axes_of(target, ndim)
    cutting = sorted({axis for cuts in (*before, *after) for axis, _ in cuts})
    for where in _coordinates(world.mesh, cutting):
        yield (
            tuple(
                _cut(size, world.mesh, cuts, where)
                for size, cuts in zip(world.shape, before, strict=True)
            ),
            tuple(
                _cut(size, world.mesh, cuts, where)
                for size, cuts in zip(world.shape, after, strict=True)
            ),
        )


def _most(world: _World, placements: Placements) -> int:
    """The most elements that one rank holds: coordinate zero never holds less than another."""
    return math.prod(local_shape(world.shape, world.mesh, (0,) * len(world.mesh), placements))


def _is_gather(
    world: _World,
    source: Placements,
    middle: Placements,
    target: Placements,
    axes: tuple[int, ...],
) -> bool:
    """Whether all ranks along *axes* want the same, and hold just that between them once they have sliced."""
    if any(shard_dim(target[axis]) is not None for axis in axes):
        return False
    if any(not _holds(kept, cut) for kept, cut in _boxes(world, source, middle)):
        return False
    return all(_holds(whole, part) for part, whole in _boxes(world, middle, target))


def _holds(outer: tuple[Intervals, ...], inner: tuple[Intervals, ...]) -> bool:
    return _common(outer, inner) == inner


# --- addends ------------------------------------------------------------------------------------------------------------


def _candidates(
    world: _World,
    source: Placements,
    target: Placements,
    reduced: Sequence[int],
    made: Sequence[int],
) -> Iterator[list[Step]]:
    """Every way to slice, reduce, move and make addends that is worth a price."""
    for layout in _middles(world, source, target, reduced):
        head = _reduction(world, source, layout, reduced)
        if head is None:
            continue
        for ends in _ends(target, layout, made):
            tail = _making(world, ends, target, made)
            if tail is not None:
                yield [*head, *_move(world, layout, ends), *tail]


def _middles(
    world: _World, source: Placements, target: Placements, reduced: Sequence[int]
) -> Iterator[Placements]:
    """The layouts in which all is reduced: a choice for each axis that is Partial or replicated in *source*."""
    dims = [dim for dim in (shard_dim(placement) for placement in target) if dim is not None]
    spare = [dim for dim, size in enumerate(world.shape) if dim not in dims and size > 1]
    spare.sort(key=lambda dim: (world.shape[dim] % math.prod(world.mesh) != 0, dim))
    dims = sorted({*dims, *spare[:1]})
    choices: list[tuple[Placement | int, ...]] = []
    for axis, placement in enumerate(source):
        if world.mesh[axis] == 1 or not (axis in reduced or placement.is_replicate()):
            choices.append((placement,))
        elif shard_dim(target[axis]) is None:
            choices.append((_REPLICATE, *dims))
        else:
            choices.append((target[axis], _REPLICATE, *dims))
    seen = set()
    for chosen in itertools.product(*choices):
        layout = _innermost(world, chosen)
        if layout not in seen:
            seen.add(layout)
            yield layout


def _innermost(world: _World, chosen: Sequence[Placement | int]) -> Placements:
    """A dim in place of a placement becomes the shard that cuts it last, whatever axis cuts it before."""
    out: list[Placement] = [_REPLICATE] * len(chosen)
    done: dict[int, int] = {}
    for axis in reversed(range(len(chosen))):
        choice = chosen[axis]
        placement: Placement
        if isinstance(choice, int):
            factor = done.get(choice, 1)
            placement = Shard(choice) if factor == 1 else StridedShard(choice, split_factor=factor)
        else:
            placement = choice
        dim = shard_dim(placement)
        if dim is not None:
            done[dim] = done.get(dim, 1) * world.mesh[axis]
        out[axis] = placement
    return tuple(out)


def _reduction(
    world: _World, source: Placements, layout: Placements, reduced: Sequence[int]
) -> list[Step] | None:
    """Slice, reduce-scatter and all-reduce from *source* to *layout*; None where that needs data from elsewhere."""
    sliced = tuple(
        source[axis] if axis in reduced else placement for axis, placement in enumerate(layout)
    )
    if sliced != source and _axes_asked(world, source, sliced):
        return None
    steps = [] if sliced == source else [world.step("slice", (), "", source, sliced, 0)]
    scattered = tuple(axis for axis in reduced if shard_dim(layout[axis]) is not None)
    summed = tuple(axis for axis in reduced if axis not in scattered)
    op = next((p.reduce_op for p in source if isinstance(p, Partial)), "")
    between = tuple(
        source[axis] if axis in summed else placement for axis, placement in enumerate(layout)
    )
    if scattered:
        if any(not _holds(kept, cut) for kept, cut in _boxes(world, sliced, between)):
            return None
        lacked = (world.group(scattered) - 1) * _most(world, between)
        steps.append(world.step("reduce_scatter", scattered, op, sliced, between, lacked))
    if summed:
        ranks = world.group(summed)
        lacked = -(-2 * (ranks - 1) * _most(world, between) // ranks)
        steps.append(world.step("all_reduce", summed, op, between, layout, lacked))
    return steps


def _ends(target: Placements, layout: Placements, made: Sequence[int]) -> Iterator[Placements]:
    """The layouts from which addends can be made locally: replicated, or sharded as they are, on those axes."""
    choices = [
        ((_REPLICATE,) if shard_dim(layout[axis]) is None else (_REPLICATE, layout[axis]))
        if axis in made
        else (placement,)
        for axis, placement in enumerate(target)
    ]
    yield from itertools.product(*choices)


def _making(
    world: _World, layout: Placements, target: Placements, made: Sequence[int]
) -> list[Step] | None:
    """Turn *layout* into addends on the axes *made*, locally; None where it cannot be."""
    steps = []
    for axis in made:
        wanted = target[axis]
        assert isinstance(wanted, Partial)
        after = (*layout[:axis], wanted, *layout[axis + 1 :])
        if shard_dim(layout[axis]) is not None and (
            wanted.reduce_op not in _PADDED
            or any(not _holds(whole, part) for part, whole in _boxes(world, layout, after))
        ):
            return None
        steps.append(world.step("make_partial", (axis,), wanted.reduce_op, layout, after, 0))
        layout = after
    return steps
