"""How a module's state, inputs and outputs lie over named mesh axes, as values: what to declare, not how it is done.

A layout names axes and not devices, so that it is written once, beside the model, and read on any mesh
(:func:`resolve_placements`). Two spellings say the same: a placement for each axis, or for each dim of the tensor the
axes that cut it, outermost first, which is what it takes to cut one dim by several axes in a stated order.

Replicas come in two kinds, since what matters about them is the gradient. ``R`` is used for other work by each rank, so
that gradients are addends; ``I`` is used alike by all of them, and each has the whole gradient. ``Replicate()`` leaves
that to what is around it. Data types are no part of a layout: they are decided by who runs the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, cast

from hp_dtensor import Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.layout import placements_of_aliases
from hp_dtensor.placements import shard_dim

from hp_tp.errors import PlanError

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh

__all__ = [
    "LayoutLike",
    "LocalMapConfig",
    "ShardingConfig",
    "SpmdLayout",
    "SpmdType",
    "as_layout",
    "placements_on",
    "resolve_placements",
]

_PARTS_OF = {"dp": ("dp_replicate", "dp_shard")}
"""Axes that a mesh may hold in parts: what is said of the first holds for each of the others."""


class SpmdType(Enum):
    """What an axis does to a value, where a placement does not say enough about its gradient."""

    R = "R"
    """Replicas, used for other work by each rank: the gradient is a sum of addends."""
    I = "I"  # noqa: E741  # its name where people know it from
    """Replicas, used alike by each rank: every rank has the whole gradient."""
    V = "V"
    """Another value on each rank: a piece, which the partition spec describes."""
    P = "P"
    """Addends of the value."""


AxisType: TypeAlias = Placement | SpmdType
PartitionSpec: TypeAlias = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class SpmdLayout:
    """One tensor's layout over named mesh axes.

    Args:
        axis_types: what each axis does: a placement, or a :class:`SpmdType`.
        partition_spec: for each dim of the tensor None, an axis, or several axes, outermost first. The axes in it are
            ``V``, which need not be said.

    Raises:
        PlanError: (a ``ValueError``) when an axis is said to be two things, or two axes cut a dim in no stated order.

    Example:
        >>> from hp_dtensor import Shard
        >>> from hp_tp import SpmdLayout
        >>> SpmdLayout({"tp": Shard(0)}).axes()
        ('tp',)
        >>> SpmdLayout({}, partition_spec=(("dp", "tp"), None)).per_axis_spmd_types()
        {'dp': Shard(dim=0), 'tp': Shard(dim=0)}
    """

    axis_types: Mapping[str, AxisType] = field(default_factory=dict)
    partition_spec: PartitionSpec | None = None

    def __post_init__(self) -> None:
        types = dict(self.axis_types)
        for axis, kind in types.items():
            if not isinstance(cast("object", kind), (Placement, SpmdType)):
                message = f"axis {axis!r} has {kind!r}; each axis takes a placement, such as Shard(0), or a SpmdType"
                raise TypeError(message)
        if self.partition_spec is None:
            self._check_order(types)
        else:
            self._check_spec(types, self.partition_spec)
        object.__setattr__(self, "axis_types", types)

    def _check_order(self, types: Mapping[str, AxisType]) -> None:
        dims: dict[int, str] = {}
        for axis, kind in types.items():
            dim = shard_dim(kind) if isinstance(kind, Placement) else None
            if dim is None or isinstance(kind, StridedShard):
                continue
            if dim in dims:
                message = (
                    f"axes {dims[dim]!r} and {axis!r} both cut dim {dim}, and nothing says which is the outer one; give "
                    f"partition_spec with ({dims[dim]!r}, {axis!r}) or ({axis!r}, {dims[dim]!r}) as its entry for that dim"
                )
                raise PlanError(message)
            dims[dim] = axis

    def _check_spec(self, types: dict[str, AxisType], spec: PartitionSpec) -> None:
        named: set[str] = set()
        for entry in spec:
            for axis in _axes_of(entry):
                if axis in named:
                    message = (
                        f"axis {axis!r} cuts two dims in partition_spec {spec}; an axis cuts one"
                    )
                    raise PlanError(message)
                named.add(axis)
        for axis, kind in types.items():
            if isinstance(kind, Placement) and shard_dim(kind) is not None:
                message = f"axis {axis!r} is {kind} and there is a partition_spec as well; say V and put the axis into the spec"
                raise PlanError(message)
            if axis in named and kind is not SpmdType.V:
                message = f"axis {axis!r} is {kind} and cuts a dim in partition_spec {spec}; it can be one of them"
                raise PlanError(message)
        types.update((axis, SpmdType.V) for axis in sorted(named - types.keys()))

    def __hash__(self) -> int:
        return hash((frozenset(self.axis_types.items()), self.partition_spec))

    def axes(self) -> tuple[str, ...]:
        """The axes that the layout speaks of."""
        return tuple(self.axis_types)

    def per_axis_spmd_types(self) -> dict[str, AxisType]:
        """What each axis does, the spec read as ``Shard``; the order of axes on one dim is lost."""
        types = dict(self.axis_types)
        for dim, entry in enumerate(self.partition_spec or ()):
            types.update((axis, Shard(dim)) for axis in _axes_of(entry))
        return types


LayoutLike: TypeAlias = SpmdLayout | Mapping[str, AxisType]
"""A layout, or a mapping from axes to what they do."""


def _axes_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def as_layout(layout: LayoutLike) -> SpmdLayout:
    """*layout* as the value that it stands for."""
    return layout if isinstance(layout, SpmdLayout) else SpmdLayout(layout)


def is_layout(value: object) -> bool:
    """Whether *value* is a layout rather than a container of layouts."""
    return isinstance(value, SpmdLayout) or (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(kind, (Placement, SpmdType)) for kind in value.values())
    )


def resolve_placements(layout: LayoutLike, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """One placement for each axis of *mesh*, in its order.

    ``dp`` speaks for ``dp_replicate`` and ``dp_shard`` where the mesh has these. Axes that the mesh lacks are passed over,
    and an axis of size 1 replicates whatever it is said to do.

    Raises:
        PlanError: (a ``ValueError``) for an axis of the mesh that the layout does not declare, or a ``V`` without a place
            in the spec.

    Example:
        >>> from hp_dtensor import Shard
        >>> from hp_mesh import DeviceMesh
        >>> from hp_tp import resolve_placements
        >>> mesh = DeviceMesh(
        ...     "cpu", [[0, 1]], mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=0
        ... )
        >>> resolve_placements({"tp": Shard(0), "dp": Shard(1)}, mesh)
        (Replicate(), Shard(dim=0))
    """
    names = mesh.mesh_dim_names
    if names is None:
        message = f"a layout speaks of axes by name, and this mesh has no names: {mesh}"
        raise PlanError(message)
    return placements_on(layout, mesh, names)


def placements_on(
    layout: LayoutLike, mesh: DeviceMesh, names: Sequence[str]
) -> tuple[Placement, ...]:
    """As :func:`resolve_placements`, for a mesh whose axes the layout calls *names*."""
    layout = as_layout(layout)
    types = _expanded(layout.axis_types, names)
    missing = [name for name in names if name not in types]
    if missing:
        message = (
            f"ShardingConfig does not declare a placement for mesh axis {missing[0]!r}: the layout declares "
            f"{list(layout.axis_types)} and the mesh has {list(names)}"
        )
        raise PlanError(message)
    cut = _cuts(layout, mesh, names)
    return tuple(
        Replicate() if mesh.size(position) == 1 else _placement(types[name], name, cut)
        for position, name in enumerate(names)
    )


def _expanded(types: Mapping[str, AxisType], names: Sequence[str]) -> dict[str, AxisType]:
    out = dict(types)
    for whole, parts in _PARTS_OF.items():
        if whole in types and whole not in names:
            out.update((part, types[whole]) for part in parts if part not in types)
    return out


def _cuts(layout: SpmdLayout, mesh: DeviceMesh, names: Sequence[str]) -> dict[str, Placement]:
    """What the axes in the partition spec do, the order on each dim kept."""
    spec = layout.partition_spec
    if spec is None:
        return {}
    sizes = dict(zip(names, (mesh.size(axis) for axis in range(mesh.ndim)), strict=True))
    aliases: list[tuple[str, ...] | str] = []
    for entry in spec:
        parts = [
            part
            for axis in _axes_of(entry)
            for part in ((axis,) if axis in names else _PARTS_OF.get(axis, ()))
        ]
        here = tuple(part for part in parts if sizes.get(part, 1) > 1)
        aliases.append(here or "None")
    if mesh.mesh_dim_names == tuple(names):
        return dict(zip(names, placements_of_aliases(aliases, mesh, len(aliases)), strict=True))
    return {  # a mesh of one axis under another name
        axis: Shard(dim) for dim, alias in enumerate(aliases) for axis in _axes_of(alias)
    }


def _placement(kind: AxisType, axis: str, cuts: Mapping[str, Placement]) -> Placement:
    if isinstance(kind, Placement):
        return kind
    if kind is SpmdType.P:
        return Partial()
    if kind is not SpmdType.V:
        return Replicate()
    if axis not in cuts:
        message = (
            f"axis {axis!r} is V and has no place in a partition_spec, so nobody knows which dim it cuts; say Shard(dim), or "
            "give a partition_spec"
        )
        raise PlanError(message)
    return cuts[axis]


@dataclass(frozen=True, slots=True)
class LocalMapConfig:
    """Run the forward on local tensors, parameters included.

    Args:
        in_grad_placements: how the gradients of the local inputs fit together, as the body makes them, for each positional
            input of the forward, or by name; None for what is no tensor. Where it is not given, the gradient of a piece is
            a piece, and that of replicas is a sum of addends if anything else is cut over the axis, and whole if not.
    """

    in_grad_placements: Sequence[LayoutLike | None] | Mapping[str, LayoutLike | None] | None = None


Outputs: TypeAlias = object
"""A layout, or a tuple, list or dict of layouts and None like the module's outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig:
    """What a module's state, inputs and outputs are, and what they shall become.

    Args:
        state_shardings: the layout of each parameter and buffer, by name; dotted names reach below.
        in_src_shardings: what plain inputs are, by the forward's names for them. A DTensor must be laid out so.
        in_dst_shardings: what the forward wants them to be.
        out_src_shardings: what the outputs are: one layout for all, or a tuple, list or dict like the outputs.
        out_dst_shardings: what callers get.
        local_map: run the forward on local tensors.
        use_local_output: give callers plain tensors instead of DTensors.

    Example:
        >>> from hp_dtensor import Partial, Replicate, Shard
        >>> from hp_tp import ShardingConfig
        >>> rows = ShardingConfig(
        ...     state_shardings={"weight": {"tp": Shard(1)}},
        ...     in_src_shardings={"input": {"tp": Shard(-1)}},
        ...     out_src_shardings={"tp": Partial()},
        ...     out_dst_shardings={"tp": Replicate()},
        ... )
    """

    state_shardings: Mapping[str, LayoutLike] = field(default_factory=dict)
    in_src_shardings: Mapping[str, LayoutLike | None] | None = None
    in_dst_shardings: Mapping[str, LayoutLike | None] | None = None
    out_src_shardings: Outputs = None
    out_dst_shardings: Outputs = None
    local_map: LocalMapConfig | None = None
    use_local_output: bool = False

    def to_dict(self) -> dict[str, str]:
        """The fields that are set, as text for a log."""
        names = ("state_shardings", "in_src_shardings", "in_dst_shardings", "out_src_shardings")
        more = ("out_dst_shardings", "local_map", "use_local_output")
        found = {name: getattr(self, name) for name in (*names, *more)}
        return {name: repr(value) for name, value in found.items() if value}
