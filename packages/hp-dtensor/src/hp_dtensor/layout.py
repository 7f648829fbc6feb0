"""Layouts in words: alias strings, which name for each tensor dim the mesh axes that cut it, and `Layout`, the value.

``("dp", "None")`` says: dim 0 is cut by axis ``dp``, dim 1 by none. A tuple of names cuts one dim by several axes, the
first being the outermost, and that order is kept: where it differs from the mesh's own order the finer axis becomes a
``StridedShard`` whose split factor is the product of the axes to its right that cut before it.

Aliases speak of *tensor dims*, placements of *mesh axes*; the two lists have different lengths when the tensor and the
mesh have different ranks. A list counts as aliases only when every entry is a name or a non-empty tuple of names.

`Layout` is HyperParallel's object of that name as a frozen value: what there writes to the layout gives a new one here.
Nothing is derived twice or kept: placements are the one truth, and the tensor map is read from them, so that no entry of
one can outlive a change of the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, cast, overload

import torch
from hp_mesh import DeviceMesh, init_device_mesh

from hp_dtensor._torch import TensorMeta
from hp_dtensor.errors import LayoutError
from hp_dtensor.placements import (
    REDUCE_OPS,
    REPLICATE,
    Cut,
    Partial,
    Placement,
    Shard,
    StridedShard,
    folded_dims,
    normalize_placements,
    shard_dim,
)

if TYPE_CHECKING:
    from hp_dtensor.spec import Spec

Alias: TypeAlias = str | tuple[str, ...]

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


def folding(placements: PlacementsLike | None) -> int:
    """How many leading dims *placements* flatten in a local tensor; 1 where they flatten none."""
    if isinstance(placements, Layout):
        placements = placements.placements
    if isinstance(placements, Placement):
        placements = (placements,)
    return folded_dims(cast("Sequence[Placement]", placements or ()))


def resolve(
    placements: PlacementsLike | None, mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """The normalised placements that *placements* (placements, aliases, or None for replicated) stand for.

    Raises:
        LayoutError: as :func:`placements_of_aliases` and :func:`~hp_dtensor.placements.normalize_placements` say, and for
            a `Layout` on another mesh or without placements.
    """
    if isinstance(placements, Layout):
        if placements.device_mesh != mesh or placements.placements is None:
            msg = f"{placements} says nothing about the mesh {mesh}: call it with aliases or placements, on that mesh"
            raise LayoutError(msg)
        placements = placements.placements
    if are_aliases(placements):
        return placements_of_aliases(placements, mesh, ndim)
    return normalize_placements(
        cast("Sequence[Placement] | Placement | None", placements), mesh, ndim
    )


# --------------------------------------------------------------------------------------------------------------------
# Layout
# --------------------------------------------------------------------------------------------------------------------

MapEntry: TypeAlias = int | tuple[int, ...]
"""-1 for an uncut dim, else the axis that cuts it, counted from the mesh's *last* axis, which is 0; a tuple of these,
outermost first, where several do."""


def tensor_map_of(
    placements: Sequence[Placement], mesh_shape: Sequence[int], ndim: int
) -> tuple[MapEntry, ...]:
    """HyperParallel's encoding of *placements* for a tensor of *ndim* dims.

    Raises:
        LayoutError: for a negative *ndim*, a dim that the tensor lacks, or a split factor that no order of axes explains.

    Example:
        >>> tensor_map_of((StridedShard(0, split_factor=4), Shard(0)), (2, 4), 2)
        ((0, 1), -1)
    """
    if ndim < 0:
        msg = f"a tensor has no {ndim} dims; give a number that is not negative"
        raise LayoutError(msg)
    last = len(mesh_shape) - 1
    cutting: list[list[int]] = [[] for _ in range(ndim)]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Cut):
            msg = f"placements[{axis}] is {placement}, which no tensor map can say; use the placements"
            raise LayoutError(msg)
        dim = shard_dim(placement)
        if dim is not None:
            if not -ndim <= dim < ndim:
                msg = (
                    f"placements[{axis}] is {placement}, but the tensor has {ndim} dims; dims from {-ndim} to {ndim - 1} "
                    "are legal"
                )
                raise LayoutError(msg)
            cutting[dim].append(axis)
    out: list[MapEntry] = []
    for axes in cutting:
        order = tuple(last - axis for axis in _outermost_first(axes, placements, mesh_shape))
        out.append(-1 if not order else order[0] if len(order) == 1 else order)
    return tuple(out)


def _outermost_first(
    axes: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> list[int]:
    """*axes*, which all cut one dim, from the outermost in.

    Built from the right: an axis stands behind those on its right whose sizes multiply to its split factor.
    """
    order: list[int] = []
    for axis in reversed(axes):
        placement = placements[axis]
        factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        product, position = 1, 0
        while product < factor and position < len(order):
            product *= mesh_shape[order[position]]
            position += 1
        if product != factor:
            msg = (
                f"split factor mismatch: {placement} on axis {axis} fits no order of the axes to its right that cut the "
                f"same dim, whose sizes are {[mesh_shape[other] for other in order]}, outermost first"
            )
            raise LayoutError(msg)
        order.insert(position, axis)
    return order


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Layout:
    """How a tensor lies on a mesh, as a value.

    Made with a mesh shape and axis names, then *called* with aliases or placements to say how a tensor is cut. Each call,
    and each method that sets something, gives a new layout and leaves this one as it is.

    Args:
        mesh_shape: the size of each axis.
        alias_name: the name of each axis.
        rank_list: the global ranks, row-major; the world's, by the block rule, when None.
        init_backend: whether the mesh shall have process groups; a description needs none.
        device_type: the kind of device; the accelerator if there is one, else ``"cpu"``.

    A layout equals ``torch.strided``: it stands where plain tensors have that (``tensor.layout``), and distributed tensors
    are as dense as they are.

    Raises:
        LayoutError: for an axis called ``"None"``.
        hp_mesh.MeshError: (a `ValueError`) for a shape, names or ranks that are no mesh.

    Example:
        >>> layout = Layout((2, 4), ("dp", "tp"), rank_list=range(8), init_backend=False)
        >>> layout("dp", "tp").tensor_map
        (1, 0)
        >>> layout(("tp", "dp"), "None").placements
        (_StridedShard(dim=0, sf=4), Shard(dim=0))
        >>> layout("None", "tp").repeat_num()
        2
    """

    device_mesh: DeviceMesh
    """The devices."""
    placements: tuple[Placement, ...] | None
    """One placement for each axis; None for a layout that was not called yet."""
    ndim: int | None
    """How many dims the tensor has; None where placements alone were given."""
    tensor_meta: TensorMeta | None
    """Global shape, stride and dtype, where they are known."""

    def __init__(
        self,
        mesh_shape: Sequence[int],
        alias_name: Sequence[str],
        rank_list: Sequence[int] | None = None,
        init_backend: bool = True,
        *,
        device_type: str | None = None,
    ) -> None:
        if NO_AXIS in alias_name:
            msg = f"alias_name {tuple(alias_name)}: 'None' stands for an uncut dim and cannot name an axis"
            raise LayoutError(msg)
        mesh = init_device_mesh(
            device_type or _detected_device(),
            tuple(mesh_shape),
            mesh_dim_names=tuple(alias_name),
            rank_list=None if rank_list is None else tuple(rank_list),
            init_backend=init_backend,
        )
        self._set(mesh, None, None, None)

    def _set(
        self,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...] | None,
        ndim: int | None,
        meta: TensorMeta | None,
    ) -> None:
        object.__setattr__(self, "device_mesh", mesh)
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "ndim", ndim)
        object.__setattr__(self, "tensor_meta", meta)

    @classmethod
    def _of(
        cls,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...] | None = None,
        ndim: int | None = None,
        meta: TensorMeta | None = None,
    ) -> Layout:
        out = object.__new__(cls)
        out._set(mesh, placements, ndim, meta)  # of this very class
        return out

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Layout:
        """A layout on *device_mesh* that says nothing about a tensor yet.

        Example:
            >>> from hp_mesh import DeviceMesh
            >>> mesh = DeviceMesh("cpu", range(2), _init_backend=False, _rank=0)
            >>> Layout.from_device_mesh(mesh).placements is None
            True
        """
        return cls._of(DeviceMesh.from_torch(device_mesh))

    @classmethod
    def from_spec(cls, spec: Spec) -> Layout:
        """The layout of the tensor that *spec* describes."""
        return cls._of(spec.mesh, spec.placements, spec.ndim, spec.tensor_meta)

    @overload
    def __call__(self, *spec: Alias) -> Layout: ...
    @overload
    def __call__(self, *spec: Placement) -> Layout: ...
    @overload
    def __call__(self, spec: Sequence[Placement], /) -> Layout: ...
    def __call__(self, *spec: object) -> Layout:
        """A layout on the same mesh for a tensor that is cut as *spec* says, without addends unless *spec* has some.

        Args:
            spec: an alias for each tensor dim; or a placement for each mesh axis, also as one list, which leaves the number
                of dims open; or nothing, for a scalar.

        Raises:
            LayoutError: when the aliases or placements do not fit the mesh.
        """
        given = spec[0] if len(spec) == 1 and isinstance(spec[0], list) else spec
        entries = tuple(cast("Sequence[object]", given))
        if not entries:
            return self._of(self.device_mesh, (REPLICATE,) * self.device_mesh.ndim, 0)
        if are_aliases(entries):
            count = len(entries)
            return self._of(
                self.device_mesh, placements_of_aliases(entries, self.device_mesh, count), count
            )
        if not all(isinstance(entry, Placement) for entry in entries):
            msg = (
                f"{entries} is no layout: give one axis name (or a tuple of names, or 'None') for each tensor dim, or one "
                "placement for each mesh axis"
            )
            raise LayoutError(msg)
        return self.set_placements(cast("Sequence[Placement]", entries))

    # -- the mesh ------------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """The devices."""
        return self.device_mesh

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(self.device_mesh.shape)

    @property
    def alias_name(self) -> tuple[str, ...]:
        """The name of each axis; ``dim_k`` where the mesh has no names."""
        names = self.device_mesh.mesh_dim_names
        return tuple(f"dim_{k}" for k in range(self.device_mesh.ndim)) if names is None else names

    @property
    def rank_list(self) -> tuple[int, ...]:
        """The global ranks, row-major."""
        return tuple(self.device_mesh.rank_list)

    def _axis(self, axis: str | int) -> int:
        if isinstance(axis, int) and -self.device_mesh.ndim <= axis < self.device_mesh.ndim:
            return axis % self.device_mesh.ndim
        if axis in self.alias_name:
            return self.alias_name.index(axis)
        msg = f"{axis!r} is no axis of the mesh; its axes are {self.alias_name}"
        raise LayoutError(msg)

    # -- placements and the tensor map ---------------------------------------------------------------------------------

    def _known(self) -> tuple[Placement, ...]:
        if self.placements is None:
            msg = "this layout says nothing about a tensor yet; call it with aliases or placements first"
            raise LayoutError(msg)
        return self.placements

    @property
    def tensor_map(self) -> tuple[MapEntry, ...] | None:
        """For each tensor dim the axes that cut it, counted from the last; None while the number of dims is open."""
        if self.placements is None or self.ndim is None:
            return None
        return tensor_map_of(self.placements, self.mesh_shape, self.ndim)

    def placement_to_tensor_map(self, dim: int) -> list[MapEntry]:
        """The tensor map of a tensor of *dim* dims.

        Raises:
            LayoutError: as `tensor_map_of` says, and for a layout without placements.

        Example:
            >>> layout = Layout((2, 4), ("dp", "tp"), rank_list=range(8), init_backend=False)
            >>> layout(Shard(-1), REPLICATE).placement_to_tensor_map(3)
            [-1, -1, 1]
        """
        return list(tensor_map_of(self._known(), self.mesh_shape, dim))

    def tensor_map_to_placement(self) -> list[Placement]:
        """One placement for each mesh axis, as the tensor map and the addends say.

        Raises:
            LayoutError: while the number of dims is open.
        """
        if self.tensor_map is None:
            msg = "there is no tensor map while the number of dims is open; call the layout with one alias for each dim"
            raise LayoutError(msg)
        return list(self._known())

    def set_placements(self, placements: Sequence[Placement]) -> Layout:
        """This layout with other *placements*, addends included, and no others.

        Raises:
            LayoutError: when they do not fit.
        """
        ndim = self.device_mesh.ndim if self.ndim is None else self.ndim
        if self.ndim is None:  # dims cannot be checked yet; counts and kinds can
            legal = [REPLICATE if shard_dim(p) is not None else p for p in placements]
            normalize_placements(legal, self.device_mesh, ndim)
            return self._of(self.device_mesh, tuple(placements), None, self.tensor_meta)
        made = normalize_placements(placements, self.device_mesh, ndim)
        return self._of(self.device_mesh, made, ndim, self.tensor_meta)

    def set_tensor_meta(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Layout:
        """This layout for a tensor of a known global shape, stride and dtype.

        Raises:
            LayoutError: when the placements do not fit a tensor of that many dims.
        """
        ndim = len(shape)
        made = (
            None
            if self.placements is None
            else normalize_placements(self.placements, self.device_mesh, ndim)
        )
        meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
        return self._of(self.device_mesh, made, ndim, meta)

    # -- addends -------------------------------------------------------------------------------------------------------

    @property
    def partial(self) -> list[str | None]:
        """For each axis how its ranks' addends combine, or None where it holds none."""
        return [
            p.reduce_op if isinstance(p, Partial) else None
            for p in (self.placements or (REPLICATE,) * self.device_mesh.ndim)
        ]

    def set_partial_by_dev_axis(self, axis: str | int, op: str | None) -> Layout:
        """This layout with addends on *axis* that *op* combines; None for none.

        Raises:
            LayoutError: for an unknown *op* or *axis*, and for an axis that cuts the tensor.

        Example:
            >>> layout = Layout((2, 4), ("dp", "tp"), rank_list=range(8), init_backend=False)
            >>> layout("dp", "None").set_partial_by_dev_axis("tp", "sum").placements
            (Shard(dim=0), Partial(sum))
        """
        names = {"prod": "product"}
        if op is not None and names.get(op, op) not in REDUCE_OPS:
            msg = (
                f"{op!r} combines no addends; it is one of sum, max, min, avg, prod, all, or None"
            )
            raise LayoutError(msg)
        index = self._axis(axis)
        out = list(self.placements or (REPLICATE,) * self.device_mesh.ndim)
        if shard_dim(out[index]) is not None:
            msg = f"Partial dim must be replicate. Axis {axis!r} cuts the tensor as {out[index]}"
            raise LayoutError(msg)
        out[index] = REPLICATE if op is None else Partial(names.get(op, op))
        return self.set_placements(out)

    def reset_partial(self) -> Layout:
        """This layout without addends."""
        if self.placements is None:
            return self
        return self.set_placements([REPLICATE if p.is_partial() else p for p in self.placements])

    def is_partial(self) -> bool:
        """Whether some axis holds addends."""
        return any(op is not None for op in self.partial)

    def get_partial_by_dev_id(self, axis: str | int) -> str | None:
        """How the addends on *axis* combine; None where it holds none."""
        return self.partial[self._axis(axis)]

    # -- shards --------------------------------------------------------------------------------------------------------

    def get_dev_axis_apply_shard_axis(self, axis: str | int) -> int | None:
        """The tensor dim that *axis* cuts, or None."""
        return shard_dim(self._known()[self._axis(axis)])

    def is_dev_axis_apply_shard(self, axis: str | int) -> bool:
        """Whether *axis* cuts a dim."""
        return self.get_dev_axis_apply_shard_axis(axis) is not None

    def _axes_of(self, tensor_dim: int) -> list[int]:
        """The axes that cut *tensor_dim*, outermost first; none where the tensor has no such dim."""
        placements = self._known()
        dim = tensor_dim + self.ndim if tensor_dim < 0 and self.ndim is not None else tensor_dim
        axes = [axis for axis, p in enumerate(placements) if shard_dim(p) == dim]
        return _outermost_first(axes, placements, self.mesh_shape)

    def get_split_id(self, tensor_dim: int) -> int:
        """Which piece of *tensor_dim* this rank holds, counted from the first; 0 where it is uncut or the rank outside.

        Example:
            >>> layout = Layout((2, 4), ("dp", "tp"), rank_list=range(8), init_backend=False)
            >>> layout("None", "tp").get_split_id(0)
            0
        """
        axes = self._axes_of(tensor_dim)
        where = self.device_mesh.get_coordinate() if axes else None
        out = 0
        if where is not None:
            for axis in axes:
                out = out * self.mesh_shape[axis] + where[axis]
        return out

    def get_dim_split_num(self, tensor_dim: int) -> int:
        """In how many pieces *tensor_dim* is cut."""
        return math.prod(self.mesh_shape[axis] for axis in self._axes_of(tensor_dim))

    def get_global_shape(self, slice_shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape: the one that was set, else that of which *slice_shape* is an even piece."""
        if self.tensor_meta is not None:
            return tuple(self.tensor_meta.shape)
        return tuple(size * self.get_dim_split_num(dim) for dim, size in enumerate(slice_shape))

    def repeat_num(self) -> int:
        """How many ranks hold the same piece: the ranks of the axes that cut nothing."""
        return math.prod(
            size
            for size, placement in zip(self.mesh_shape, self._known(), strict=True)
            if shard_dim(placement) is None
        )

    # -- in words ------------------------------------------------------------------------------------------------------

    @property
    def alias_tensor_map(self) -> tuple[Alias, ...]:
        """For each tensor dim the name of the axis that cuts it, a tuple of names, or ``"None"``.

        Raises:
            LayoutError: while the number of dims is open.
        """
        if self.tensor_map is None:
            msg = "there is no alias map while the number of dims is open; call the layout with one alias for each dim"
            raise LayoutError(msg)
        names = (*reversed(self.alias_name), NO_AXIS)  # -1 is the last
        return tuple(
            tuple(names[axis] for axis in entry) if isinstance(entry, tuple) else names[entry]
            for entry in self.tensor_map
        )

    @property
    def alias_placements(self) -> tuple[Alias, ...] | tuple[Placement, ...]:
        """What to pass where placements are taken: aliases if several axes cut a dim and none holds addends."""
        placements = self._known()
        if self.tensor_map is None or self.is_partial():
            return placements
        several = any(isinstance(entry, tuple) for entry in self.tensor_map)
        return self.alias_tensor_map if several else placements

    def to_dict(self) -> dict[str, object]:
        """Mesh shape, tensor map, interleaving, names and ranks, as HyperParallel stores them.

        Raises:
            LayoutError: while the number of dims is open.
        """
        if self.tensor_map is None:
            msg = "the tensor map is not set; call the layout with one alias for each dim before to_dict()"
            raise LayoutError(msg)
        return {
            "mesh_shape": self.mesh_shape,
            "tensor_map": self.tensor_map,
            "interleaved_parallel": self.device_mesh.interleaved_parallel,
            "alias_name": self.alias_name,
            "rank_list": self.rank_list,
        }

    @property
    def compact_str(self) -> str:
        """A text that differs where layouts differ."""
        meta = self.tensor_meta
        facts = (
            self.device_mesh.device_type,
            self.mesh_shape,
            self.device_mesh.mesh_dim_names,
            self.rank_list,
            self.ndim,
            None if self.placements is None else tuple(map(str, self.placements)),
            None if meta is None else (tuple(meta.shape), tuple(meta.stride), str(meta.dtype)),
        )
        return repr(facts)

    def __repr__(self) -> str:
        laid = "" if self.placements is None else f", {self.placements}"
        dims = "" if self.ndim is None else f", {self.ndim} dims"
        return f"Layout({self.device_mesh}{laid}{dims})"

    def _value(self) -> tuple[object, ...]:
        meta = None if self.tensor_meta is None else tuple(self.tensor_meta)
        return self.device_mesh, self.placements, self.ndim, meta

    def __eq__(self, other: object) -> bool:
        if other is torch.strided:
            return True
        return isinstance(other, Layout) and self._value() == other._value()

    def __hash__(self) -> int:
        # Equal values hash alike, and a layout equals `torch.strided`: torch asks `tensor.layout in {torch.strided, ...}`.
        return hash(torch.strided)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Layout._of, (self.device_mesh, self.placements, self.ndim, self.tensor_meta)


PlacementsLike: TypeAlias = Sequence[Placement] | Sequence[Alias] | Placement | Layout
"""Whatever may stand where placements are taken."""


def _detected_device() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type
