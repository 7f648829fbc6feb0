"""Alias strings as placements: name, for each tensor dim, the mesh axes that cut it.

``("dp", "None")`` says: dim 0 is cut by axis ``dp``, dim 1 by none. A tuple of names cuts one dim by several axes, the
first being the outermost, and that order is kept: where it differs from the mesh's own order the finer axis becomes a
``StridedShard`` whose split factor is the product of the axes to its right that cut before it.

Aliases speak of *tensor dims*, placements of *mesh axes*; the two lists have different lengths when the tensor and the
mesh have different ranks. A list counts as aliases only when every entry is a name or a non-empty tuple of names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, cast

from hp_dtensor.errors import LayoutError
from hp_dtensor.placements import REPLICATE, Placement, Shard, StridedShard, normalize_placements

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh

Alias: TypeAlias = str | tuple[str, ...]
PlacementsLike: TypeAlias = Sequence[Placement] | Sequence[Alias] | Placement
"""Whatever may stand where placements are taken."""

NO_AXIS = "None"


def _is_alias(entry: object) -> bool:
    return isinstance(entry, str) or (
        isinstance(entry, tuple) and bool(entry) and all(isinstance(name, str) for name in entry)
    )


def are_aliases(placements: object) -> TypeGuard[Sequence[Alias]]:
    """Whether *placements* is a list of axis names (or tuples of them) rather than of placements."""
    return (
        isinstance(placements, Sequence)
        and not isinstance(placements, str)
        and len(placements) > 0
        and all(_is_alias(entry) for entry in placements)
    )


def placements_of_aliases(
    aliases: Sequence[Alias], mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """One placement for each mesh axis from one alias for each tensor dim.

    Raises:
        LayoutError: for an unnamed mesh, a number of entries other than *ndim*, a name that is no axis, or an axis that
            is named twice.
    """
    names = mesh.mesh_dim_names
    if names is None:
        msg = f"alias strings {tuple(aliases)} need a mesh with named axes; this one, {tuple(mesh.shape)}, has none"
        raise LayoutError(msg)
    if len(aliases) != ndim:
        msg = f"{len(aliases)} aliases {tuple(aliases)} for a tensor of {ndim} dims; give one for each dim, 'None' for uncut"
        raise LayoutError(msg)
    out: list[Placement] = [REPLICATE] * mesh.ndim
    used: set[str] = set()
    for dim, alias in enumerate(aliases):
        order = [
            name for name in ((alias,) if isinstance(alias, str) else alias) if name != NO_AXIS
        ]
        for turn, name in enumerate(order):
            if name not in names:
                msg = f"alias {name!r} on dim {dim} is no axis of the mesh; its axes are {names}, or 'None'"
                raise LayoutError(msg)
            if name in used:
                msg = f"axis {name!r} is set more than one time in {tuple(aliases)}; an axis cuts at most one dim"
                raise LayoutError(msg)
            used.add(name)
            axis = names.index(name)
            factor = math.prod(
                mesh.size(names.index(other))
                for other in order[:turn]
                if names.index(other) > axis
            )
            out[axis] = Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)
    return tuple(out)


def resolve(
    placements: PlacementsLike | None, mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """The normalised placements that *placements* (placements, aliases, or None for replicated) stand for.

    Raises:
        LayoutError: as :func:`placements_of_aliases` and :func:`~hp_dtensor.placements.normalize_placements` say.
    """
    if are_aliases(placements):
        return placements_of_aliases(placements, mesh, ndim)
    return normalize_placements(
        cast("Sequence[Placement] | Placement | None", placements), mesh, ndim
    )
