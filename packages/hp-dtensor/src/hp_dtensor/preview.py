"""What a move would take, before it is made: steps, bytes and time, as a value that prints as a table.

It asks the same planner that :meth:`DTensor.redistribute` runs, so what is shown is what happens; nothing communicates,
and a description of a mesh without process groups is enough. The types here are ours and plain, so that a program that
reads plans does not break when the planner's own change; `RedistributePlan.version` tells which form they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import torch
from hp_mesh import DeviceMesh, get_current_mesh
from torch import Tensor

from hp_dtensor._torch import TorchDTensor
from hp_dtensor.errors import LayoutError
from hp_dtensor.layout import Layout, PlacementsLike, resolve
from hp_dtensor.placements import Placement
from hp_dtensor.plan import Link, make_plan
from hp_dtensor.spec import Spec, spec_of
from hp_dtensor.transfer import Exchange, Side, lifted, whole_addends, without_addends

__all__ = ["PlannedStep", "RedistributePlan", "redistribute_plan"]

Place: TypeAlias = Tensor | Spec | PlacementsLike
"""A distributed tensor, its spec, a `Layout`, or placements."""

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a move."""

    kind: str
    """``slice`` and ``make_partial`` are local; ``all_gather``, ``all_to_all``, ``reduce_scatter``, ``all_reduce`` are one
    collective over *axes*; ``exchange`` is one all-to-all over the ranks of two meshes."""
    axes: tuple[str, ...]
    """The axes whose ranks take part; several make it a collective over the flattened axes."""
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
class RedistributePlan:
    """The steps of a move; prints as a table.

    Example:
        >>> from hp_mesh import DeviceMesh
        >>> from hp_dtensor import Partial, Replicate, Shard
        >>> mesh = DeviceMesh(
        ...     "cpu", range(4), mesh_dim_names=("tp",), _init_backend=False, _rank=0
        ... )
        >>> print(redistribute_plan([Partial()], [Shard(0)], (8, 8), mesh=mesh))
        step                axes  from      to      bytes  time
        reduce_scatter sum  tp    (P(sum))  (S(0))  192    10.0 us
        total                                       192    10.0 us
    """

    steps: tuple[PlannedStep, ...]
    """In order; empty where the layouts hold the same."""
    version: int = field(default=1, init=False)
    """The form of these types: raised when a field changes its meaning."""

    @property
    def bytes(self) -> int:
        """The most that one rank receives, over all steps."""
        return sum(step.bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """Estimated duration."""
        return sum(step.seconds for step in self.steps)

    @property
    def collectives(self) -> int:
        """How many steps communicate."""
        return sum(step.bytes > 0 for step in self.steps)

    def __str__(self) -> str:
        rows = [("step", "axes", "from", "to", "bytes", "time")]
        rows += [
            (
                f"{step.kind} {step.op}".rstrip(),
                ", ".join(step.axes) or "-",
                _short(step.source),
                _short(step.target),
                str(step.bytes),
                _time(step.seconds),
            )
            for step in self.steps
        ]
        if not self.steps:
            rows.append(("nothing to do", "-", "", "", "0", _time(0)))
        rows.append(("total", "", "", "", str(self.bytes), _time(self.seconds)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def _short(placements: Placements) -> str:
    return f"({', '.join(map(str, placements))})"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def redistribute_plan(
    source: Place,
    target: Place,
    shape: Sequence[int] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    links: Sequence[Link] | None = None,
) -> RedistributePlan:
    """The steps that turn *source* into *target*, as :meth:`DTensor.redistribute` would take them.

    Args:
        source: a distributed tensor (then shape, mesh and dtype are known), its spec, a `Layout`, or placements.
        target: likewise; only its layout counts. A `Layout` on another mesh makes it a move between meshes.
        shape: the global shape.
        mesh: the devices, where *source* is placements; the current mesh when None.
        dtype: of the elements; torch's default where *source* does not tell.
        links: the speed of each mesh axis, for the estimate of the time; the plan is the one that is run either way.

    Raises:
        LayoutError: when the layouts do not fit, or the shape is not known.
        RedistributeError: when the move has no meaning.
    """
    spec = source if isinstance(source, Spec) else None
    if isinstance(source, TorchDTensor):
        spec = spec_of(source)
    meta = source.tensor_meta if isinstance(source, Layout) else None
    if shape is None and spec is None and meta is None:
        msg = "the global shape is not known: pass shape=, or a distributed tensor as the source"
        raise LayoutError(msg)
    whole = tuple(shape if shape is not None else spec.shape if spec is not None else meta.shape)  # type: ignore[union-attr]  # one of the three is there
    known = dtype or (spec.dtype if spec is not None else meta.dtype if meta is not None else None)
    itemsize = (known or torch.get_default_dtype()).itemsize
    here, before = _place(source, mesh, len(whole))
    there, after = _place(target, here, len(whole))
    speed = None if links is None else tuple(links)
    return RedistributePlan(tuple(_steps(whole, itemsize, here, before, there, after, speed)))


def _place(place: Place, mesh: DeviceMesh | None, ndim: int) -> tuple[DeviceMesh, Placements]:
    """Mesh and placements of *place*, on *mesh* unless it tells."""
    if isinstance(place, TorchDTensor):
        place = cast("Spec", spec_of(place))
    if isinstance(place, Spec):
        return place.mesh, place.placements
    if isinstance(place, Layout):
        return place.device_mesh, resolve(place, place.device_mesh, ndim)
    on = get_current_mesh() if mesh is None else DeviceMesh.from_torch(mesh)
    return on, resolve(cast("PlacementsLike", place), on, ndim)


def _steps(
    shape: tuple[int, ...],
    itemsize: int,
    here: DeviceMesh,
    before: Placements,
    there: DeviceMesh,
    after: Placements,
    links: tuple[Link, ...] | None,
) -> list[PlannedStep]:
    """The same choices as :func:`hp_dtensor.transfer.between` makes."""
    if here != there:
        a, b = lifted(here, before, there), lifted(there, after, here)
        if a is not None and b is not None:
            return _on_one_mesh(shape, itemsize, a[0], a[1], b[1], links)
        same = here.rank_list == there.rank_list and tuple(here.shape) == tuple(there.shape)
        if not same:
            return _between_meshes(shape, itemsize, here, before, there, after, links)
    return _on_one_mesh(shape, itemsize, here, before, after, links)


def _on_one_mesh(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: DeviceMesh,
    before: Placements,
    after: Placements,
    links: tuple[Link, ...] | None,
) -> list[PlannedStep]:
    names = Layout.from_device_mesh(mesh).alias_name
    speed = links or (Link(),) * mesh.ndim
    out = []
    for step in make_plan(shape, itemsize, tuple(mesh.shape), before, after).steps:
        seconds = max((speed[axis].seconds(step.bytes) for axis in step.axes), default=0.0)
        out.append(
            PlannedStep(
                step.kind,
                tuple(names[axis] for axis in step.axes),
                step.op,
                step.source,
                step.target,
                step.bytes,
                seconds if step.bytes else 0.0,
            )
        )
    return out


def _between_meshes(
    shape: tuple[int, ...],
    itemsize: int,
    here: DeviceMesh,
    before: Placements,
    there: DeviceMesh,
    after: Placements,
    links: tuple[Link, ...] | None,
) -> list[PlannedStep]:
    middle = whole_addends(shape, tuple(here.shape), before)
    final = without_addends(after)
    exchange = Exchange(
        shape,
        Side(tuple(here.rank_list), tuple(here.shape), middle),
        Side(tuple(there.rank_list), tuple(there.shape), final),
    )
    nbytes = exchange.received() * itemsize
    slowest = max(link.seconds(nbytes) for link in links or (Link(),))
    names = (*Layout.from_device_mesh(here).alias_name, *Layout.from_device_mesh(there).alias_name)
    step = PlannedStep(
        "exchange", names if nbytes else (), "", middle, final, nbytes, slowest if nbytes else 0.0
    )
    return [
        *_on_one_mesh(shape, itemsize, here, before, middle, links),
        step,
        *_on_one_mesh(shape, itemsize, there, final, after, None),
    ]
