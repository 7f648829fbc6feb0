"""The mesh: named axes over the ranks of a job.

The idea: a mesh is a value, made of integers (device type, ranks, axes, names). Its process groups are
not part of it; they come from the registry of the process when asked for (`groups`).
So slicing, flattening and unflattening are arithmetic, equal meshes are equal keys, a mesh pickles, and
none of this talks to another rank. All meshes derived from one root share it, and are made once.

It is a `torch.distributed.device_mesh.DeviceMesh`. What torch code reads of a mesh (its layout, rank
map, group names) is computed when it is read and then kept in the instance's dictionary, where
torch.compile finds plain values.

Not taken: wrapping a torch mesh, which FSDP2, DTensor and torch.compile would not accept; and torch's
own constructor, which lists every rank several times per slice and makes groups.
"""

# ruff: noqa: SLF001 - a mesh reads the inner parts of other meshes: its root's, its slices'

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeAlias, cast

import torch
import torch.distributed as dist

from . import _torch, arguments, axes
from .axes import Axis, RankMap
from .current import pop, push
from .errors import (
    AxisError,
    AxisRequiredError,
    MeshError,
    MeshTypeError,
    NoGroupError,
    UnnamedMeshError,
)
from .groups import GroupConfig, registry

if TYPE_CHECKING:
    from types import TracebackType

    from ._torch import GroupName, TorchLayout
    from .arguments import BackendChoice, RanksLike

AxisKey: TypeAlias = int | str
"""An axis by index or by name."""


class _Family:
    """What a root and the meshes derived from it share."""

    __slots__ = ("configs", "derived", "fixed_rank", "given", "ranks", "root", "with_groups")

    def __init__(self, ranks: RankMap, fixed_rank: int | None, *, with_groups: bool) -> None:
        self.ranks = ranks
        self.fixed_rank = fixed_rank
        self.with_groups = with_groups
        self.root: DeviceMesh
        self.derived: dict[tuple[object, ...], DeviceMesh] = {}
        self.given: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.configs: dict[Axis, GroupConfig] = {}

    def rank(self) -> int:
        """Return the rank whose coordinates the meshes tell."""
        if self.fixed_rank is not None:
            return self.fixed_rank
        if dist.is_initialized():
            return dist.get_rank()
        if "RANK" in os.environ:
            return int(os.environ["RANK"])
        message = (
            "The mesh does not know which rank this process is: torch.distributed is not initialized "
            "and RANK is not set. Call torch.distributed.init_process_group(), or start with torchrun."
        )
        raise NoGroupError(message)


class DeviceMesh(_torch.TorchMesh):
    """Named axes over the ranks of a job; a `torch.distributed.device_mesh.DeviceMesh`.

    A value: equal meshes compare and hash equal, a deep copy is the mesh itself, and pickling makes no
    process groups. Groups are made when first asked for (see `get_group`).

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"npu"`` or another device type that torch knows.
        mesh: global ranks as a tensor, numpy array or nested sequences, in any order, each once; None
            for a 1-D mesh of the whole world. Ranks outside of it have coordinate None.
        mesh_dim_names: one name per axis.
        backend_override: per axis, a backend name, its options, or both; a dict by axis name or index,
            or one entry per axis. ``"fake"`` makes groups that do not communicate.
        timeout: of the groups; one for all axes, or a dict by axis name or index.

    Raises:
        MeshError: (a `ValueError`) if ranks or names are no mesh; `MeshTypeError` for wrong types.

    Example:
        >>> from hp_mesh import DeviceMesh
        >>> mesh = DeviceMesh(
        ...     "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=2
        ... )
        >>> mesh, mesh["tp"].rank_list, mesh.get_coordinate()
        (DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)), (2, 3), (1, 0))
    """

    def __init__(
        self,
        device_type: str,
        mesh: RanksLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, BackendChoice]
        | Sequence[BackendChoice]
        | None = None,
        timeout: timedelta | Mapping[int | str, timedelta] | None = None,
        _init_backend: bool = True,
        _rank: int | None = None,
    ) -> None:
        device_type = arguments.check_device_type(device_type)
        if mesh is None:
            shape, ranks = None, None
            ndim = 1
        else:
            shape, listed = arguments.read_grid(mesh)
            ranks = RankMap.of(listed)
            ndim = len(shape)
        names = arguments.check_names(mesh_dim_names, ndim)
        configs = arguments.group_configs(ndim, names, backend_override, timeout)
        if _init_backend:
            start_world(device_type, ranks.highest + 1 if ranks else 1, configs)
        if ranks is None or shape is None:
            size = _world_size()
            shape, ranks = (size,), RankMap(0, size)
        self._fill(
            device_type,
            axes.row_major(shape),
            names,
            configs,
            _Family(ranks, _rank, with_groups=_init_backend),
            None,
        )

    @classmethod
    def _make(
        cls,
        device_type: str,
        mesh_axes: tuple[Axis, ...],
        names: tuple[str, ...] | None,
        configs: tuple[GroupConfig, ...],
        family: _Family,
        root: DeviceMesh | None,
    ) -> DeviceMesh:
        mesh = object.__new__(DeviceMesh)
        mesh._fill(device_type, mesh_axes, names, configs, family, root)
        return mesh

    def _fill(
        self,
        device_type: str,
        mesh_axes: tuple[Axis, ...],
        names: tuple[str, ...] | None,
        configs: tuple[GroupConfig, ...],
        family: _Family,
        root: DeviceMesh | None,
    ) -> None:
        self._axes = mesh_axes
        self._configs = configs
        self._family = family
        self._device_type = device_type
        self._mesh_dim_names = names
        self._root_mesh = root
        self._thread_id = None
        self._preserve_rank_order = not family.ranks.is_sorted
        self._hash = None
        self._flatten_mapping: dict[str, _torch.TorchMesh] = {}
        self._pg_registry = {} if root is None else root._pg_registry
        self._groups: dict[int, dist.ProcessGroup] = {}
        if root is None:
            family.root = self
        for axis, config in zip(mesh_axes, configs, strict=True):
            family.configs.setdefault(axis, config)
        _alive[id(self)] = self

    # What the mesh is. Kept in the instance's dictionary after the first look, where torch.compile reads.

    @cached_property
    def device_type(self) -> str:
        """The kind of device, for example ``"cuda"``."""
        return self._device_type

    @cached_property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The axis names, or None."""
        return self._mesh_dim_names

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(axis.size for axis in self._axes)

    @cached_property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._axes)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis; HyperParallel's name for `shape`."""
        return self.shape

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._rank

    @cached_property
    def rank_list(self) -> tuple[int, ...]:
        """The global ranks of this rank's mesh, row-major.

        Example:
            >>> from hp_mesh import init_device_mesh
            >>> mesh = init_device_mesh(
            ...     "cpu",
            ...     (2, 2),
            ...     mesh_dim_names=("dp", "tp"),
            ...     rank_list=(3, 2, 1, 0),
            ...     init_backend=False,
            ... )
            >>> mesh.rank_list
            (3, 2, 1, 0)
        """
        if self._root_mesh is None:
            return self._family.ranks.ranks()
        return self._family.ranks.ranks(axes.positions(self._axes, self._start()))

    @cached_property
    def mesh(self) -> torch.Tensor:
        """The global ranks of this rank's mesh: an int32 tensor of `shape` on the host."""
        digits = [digit for axis in self._axes for digit in axis.digits]
        return _torch.strided_view(self._rank_map, digits, self._start(), self.shape)

    @property
    def root_mesh(self) -> DeviceMesh | None:
        """The mesh this one was derived from, in the end; None for a root."""
        return cast("DeviceMesh | None", self._root_mesh)

    @property
    def sub_mesh(self) -> list[DeviceMesh]:
        """The meshes derived from this one's root by slicing, flattening and so on, oldest first."""
        return [mesh for mesh in self._family.derived.values() if mesh is not self]

    def size(self, mesh_dim: AxisKey | None = None) -> int:
        """Return the size of an axis, or of the whole mesh.

        Example:
            >>> from hp_mesh import init_device_mesh
            >>> mesh = init_device_mesh(
            ...     "cpu",
            ...     (2, 4),
            ...     mesh_dim_names=("dp", "tp"),
            ...     rank_list=range(8),
            ...     init_backend=False,
            ... )
            >>> mesh.size(), mesh.size("tp"), mesh.size(0)
            (8, 4, 2)
        """
        if mesh_dim is None:
            return math.prod(self.shape)
        return self.shape[self._index(mesh_dim)]

    def get_rank(self) -> int:
        """Return the global rank of this process."""
        return self._rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinate on each axis, or None if it is not in the mesh.

        Raises:
            NoGroupError: (a `RuntimeError`) if nothing says which rank this process is.
        """
        return self._coordinate_on_dim

    def get_local_rank(self, mesh_dim: AxisKey | None = None) -> int:
        """Return this rank's coordinate on one axis; the axis may be left out if there is one.

        Raises:
            AxisError: (a `KeyError` and `ValueError`) for an axis the mesh does not have.
            AxisRequiredError: (a `RuntimeError`) if the mesh has several axes and none is named.
            MeshError: (a `ValueError`) if this rank is not in the mesh.
        """
        index = self._only(mesh_dim, "get_local_rank")
        coordinate = self._coordinate_on_dim
        if coordinate is None:
            raise self._outside()
        return coordinate[index]

    # What torch code reads. There these are attributes, and mypy wants them written to; nobody does.

    @cached_property
    def _rank(self) -> int:  # type: ignore[override]
        return self._family.rank()

    @cached_property
    def _coordinate_on_dim(self) -> tuple[int, ...] | None:  # type: ignore[override]
        position = self._family.ranks.position(self._rank)
        if position is None:
            return None
        start = axes.base(self._axes, position)
        if self._root_mesh is None and start:
            return None
        return tuple(axis.coordinate(position) for axis in self._axes)

    @cached_property
    def _layout(self) -> TorchLayout:  # type: ignore[override]
        return _torch.make_layout(self._axes)

    @cached_property
    def _rank_map(self) -> torch.Tensor:  # type: ignore[override]
        if self._root_mesh is not None:
            return self._family.root._rank_map
        ranks = self._family.ranks
        if ranks.is_range:
            first = ranks.rank(0)
            return _torch.host_ranks(range(first, first + len(ranks)))
        return _torch.host_ranks(ranks.ranks())

    @cached_property
    def _flatten_rank_map(self) -> tuple[int, ...]:  # type: ignore[override]
        if self._root_mesh is not None:
            return self._family.root._flatten_rank_map
        return self._family.ranks.ranks()

    @cached_property
    def _dim_group_names(self) -> list[GroupName]:  # type: ignore[override]
        if not self._family.with_groups:
            message = "_dim_group_names: the mesh was made with init_backend=False"
            raise AttributeError(message)
        if self._coordinate_on_dim is None:
            return []
        return [_torch.group_name(group) for group in self.get_all_groups()]

    # Groups.

    def get_group(self, mesh_dim: AxisKey | None = None) -> dist.ProcessGroup:
        """Return the process group of one axis; its ranks are in coordinate order along the axis.

        The first call for a set of ranks makes the group, and is a collective over those ranks, and over
        no others. Later calls, on any mesh, return the same group.

        Args:
            mesh_dim: name or index of the axis, or the name of a flattened mesh; may be left out if
                there is one axis.

        Raises:
            AxisError: (a `KeyError` and `ValueError`) for an axis the mesh does not have.
            AxisRequiredError: (a `RuntimeError`) if the mesh has several axes and none is named.
            NoGroupError: (a `RuntimeError`) if the mesh was made with ``init_backend=False``, if
                torch.distributed is not initialized, or if this rank is not in the mesh.
            GroupError: (a `RuntimeError`) if a member died or asked for another group.
        """
        if _torch.is_compiling():
            return _torch.base_group(self, mesh_dim)
        registry.refresh()
        if mesh_dim is None or isinstance(mesh_dim, int):
            index = self._only(mesh_dim, "get_group")
        else:
            flattened = self._family.root._flatten_mapping.get(mesh_dim)
            if flattened is not None and mesh_dim not in (self._mesh_dim_names or ()):
                return flattened.get_group()
            index = self._only(mesh_dim, "get_group")
        group = self._groups.get(index)
        if group is None:
            group = self._groups[index] = self._find_group(index)
        return group

    def get_all_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups of all axes, in axis order; see `get_group`."""
        return [self.get_group(index) for index in range(self.ndim)]

    def init_backend(self) -> Self:
        """Let a mesh made with ``init_backend=False``, and all of its root's, have process groups.

        Initialises `torch.distributed` if need be. Makes no group yet.
        """
        if not self._family.with_groups:
            start_world(self._device_type, self._family.ranks.highest + 1, self._configs)
            self._family.with_groups = True
        return self

    def _find_group(self, index: int) -> dist.ProcessGroup:
        if not self._family.with_groups:
            message = (
                f"{self!r}: process groups not initialized! The mesh was made with "
                "init_backend=False; call mesh.init_backend() to let it have groups."
            )
            raise NoGroupError(message)
        if self._coordinate_on_dim is None:
            raise self._outside()
        ranks = self._ranks_along(index)
        given = self._family.given.get(ranks)
        if given is None or not _torch.is_alive(given):
            given = registry.get(ranks, self._configs[index], self._label(index))
        self._pg_registry[_torch.group_name(given)] = given
        return given

    def _ranks_along(self, index: int, rank: int | None = None) -> tuple[int, ...]:
        position = self._family.ranks.position(self._rank if rank is None else rank)
        if position is None:
            raise self._outside()
        axis = self._axes[index]
        start = axes.base((axis,), position)
        return self._family.ranks.ranks([start + offset for offset in axis.offsets()])

    def _label(self, index: int) -> str:
        name = repr(self._mesh_dim_names[index]) if self._mesh_dim_names else str(index)
        return f"axis {name} of mesh {self._described()}"

    def _described(self) -> str:
        if self._mesh_dim_names is None:
            return str(self.shape)
        pairs = zip(self._mesh_dim_names, self.shape, strict=True)
        return f"({', '.join(f'{name}={size}' for name, size in pairs)})"

    def _outside(self) -> MeshError:
        message = (
            f"Rank {self._rank} is not in the mesh {self._described()}; its coordinate is None. Check "
            "mesh.get_coordinate() first."
        )
        return NoGroupError(message)

    def _start(self) -> int:
        """Return the position of coordinate zero of this rank's mesh."""
        if self._root_mesh is None or math.prod(self.shape) == len(self._family.ranks):
            return 0
        position = self._family.ranks.position(self._rank)
        if position is None:
            raise self._outside()
        return axes.base(self._axes, position)

    def group_state(self, mesh_dim: AxisKey) -> str:
        """Say in a word how the group of an axis is: made or not, and with which backend."""
        index = self._index(mesh_dim)
        if not self._family.with_groups:
            return "none (init_backend=False)"
        if self._coordinate_on_dim is None:
            return "none (rank not in mesh)"
        registry.refresh()
        group = self._groups.get(index)
        if group is None:
            backend = self._configs[index].backend
            return f"not made yet{f' ({backend})' if backend else ''}"
        return f"{dist.get_backend(group)}, named {_torch.group_name(group)}"

    def describe(self) -> str:
        """Return the axes, the grid of ranks and the process groups as text; makes no group.

        Example:
            >>> from hp_mesh import DeviceMesh
            >>> mesh = DeviceMesh(
            ...     "cpu", [0, 1], mesh_dim_names=("tp",), _init_backend=False, _rank=0
            ... )
            >>> mesh.describe().splitlines()[0]
            "DeviceMesh((tp=2), 'cpu', stride=(1,))"
        """
        from .drawing import describe

        return describe(self)

    def draw(self) -> str:
        """Return the grid of ranks as text, with this process's rank in brackets."""
        from .drawing import draw

        return draw(self)

    def draw_svg(self) -> str:
        """Return the grid of ranks as an SVG image."""
        from .drawing import draw_svg

        return draw_svg(self)

    def abort(self) -> None:
        """Abort the process groups that this root and its derived meshes have made; make none.

        For when a rank is gone and the others must not hang. The world's own group stays.

        Raises:
            MeshError: on a mesh that is not a root, as others may use the same groups.
        """
        if self._root_mesh is not None:
            message = "abort() is for a root mesh: call mesh.root_mesh.abort()."
            raise MeshError(message)
        registry.refresh()
        meshes = [self, *self._family.derived.values()]
        groups = [group for mesh in meshes for group in mesh._groups.values()]
        registry.abort(groups)

    # HyperParallel's questions.

    def assert_axis(self, axis: str, operate_name: str = "the mesh") -> None:
        """Raise unless *axis* is the name of an axis.

        Raises:
            UnnamedMeshError: (a `RuntimeError`) if the mesh has no axis names.
            AxisError: (a `ValueError`) if it has others.
        """
        if self._mesh_dim_names is None:
            message = f"{operate_name} needs axis names; give the mesh mesh_dim_names."
            raise UnnamedMeshError(message)
        if axis not in self._mesh_dim_names:
            raise AxisError(
                f"{operate_name}: the mesh has no axis {axis!r}; it has {self._mesh_dim_names}.",
                asked=axis,
                legal=self._mesh_dim_names,
            )

    def axis_index(self, axis: str) -> int:
        """Return the place of *axis*, counted from the outermost: `axis_id` counts the other way."""
        self.assert_axis(axis, "axis_index()")
        return self._index(axis)

    def axis_id(self, axis: str) -> int:
        """Return the place of *axis*, counted from the innermost; ``"None"`` is -1.

        Example:
            >>> from hp_mesh import init_device_mesh
            >>> mesh = init_device_mesh(
            ...     "cpu",
            ...     (2, 4),
            ...     mesh_dim_names=("dp", "tp"),
            ...     rank_list=range(8),
            ...     init_backend=False,
            ... )
            >>> mesh.axis_id("dp"), mesh.axis_id("tp"), mesh.axis_id("None"), mesh.axis_index("dp")
            (1, 0, -1, 0)
        """
        if axis == "None":
            return -1
        self.assert_axis(axis, "axis_id()")
        return self.ndim - 1 - self._index(axis)

    @property
    def interleaved_parallel(self) -> bool:
        """Whether the last axis has the reserved name ``"interleaved_parallel"``.

        It is an axis like any other: it takes ranks, and nothing is split inside one device.
        """
        return (self._mesh_dim_names or ("",))[-1] == "interleaved_parallel"

    def get_device_num_along_axis(self, axis: str) -> int:
        """Return the size of the axis named *axis*."""
        self.assert_axis(axis, "get_device_num_along_axis()")
        return self.size(axis)

    def get_rank_list_along_axis(self, mesh_dim: AxisKey) -> list[int]:
        """Return the global ranks that differ from this rank on one axis only, in coordinate order.

        Raises:
            AxisError: (a `ValueError`) for an axis the mesh does not have.
            NoGroupError: (a `ValueError`) if this rank is not in the mesh.
        """
        return list(self._ranks_along(self._index(mesh_dim)))

    def get_devices_for_axis(self, mesh_dim: AxisKey, rank: int) -> list[int]:
        """Return the global ranks that differ from *rank* on one axis only, in coordinate order.

        Example:
            >>> from hp_mesh import init_device_mesh
            >>> mesh = init_device_mesh(
            ...     "cpu",
            ...     (2, 4),
            ...     mesh_dim_names=("dp", "tp"),
            ...     rank_list=range(8),
            ...     init_backend=False,
            ... )
            >>> mesh.get_devices_for_axis("dp", 2)
            [2, 6]
        """
        index = self._index(mesh_dim)
        if rank not in self.rank_list:
            message = (
                f"Rank {rank} is not in the mesh {self._described()} of ranks {self.rank_list}."
            )
            raise MeshError(message)
        return list(self._ranks_along(index, rank))

    def get_comm_group_by_axis(self, mesh_dim: AxisKey | None = None) -> dist.ProcessGroup:
        """Return `get_group`: HyperParallel's spelling."""
        return self.get_group(mesh_dim)

    def get_global_shape(
        self, slice_shape: Sequence[int], tensor_map: Sequence[int | Sequence[int]] | None
    ) -> tuple[int, ...]:
        """Return the global shape of evenly sharded local tensors of *slice_shape*.

        Args:
            slice_shape: the local shape.
            tensor_map: per tensor dim, the axis that shards it, counted from the innermost as by
                `axis_id`, -1 for none, or a tuple of these.

        Raises:
            MeshError: (a `ValueError`) if the lengths differ or an entry is no axis.

        Example:
            >>> from hp_mesh import init_device_mesh
            >>> mesh = init_device_mesh(
            ...     "cpu",
            ...     (2, 4),
            ...     mesh_dim_names=("dp", "tp"),
            ...     rank_list=range(8),
            ...     init_backend=False,
            ... )
            >>> mesh.get_global_shape((3, 5), ((1, 0), -1))
            (24, 5)
        """
        if tensor_map is None or len(tensor_map) != len(slice_shape):
            message = (
                f"tensor_map must have one entry per dim of slice_shape {tuple(slice_shape)}, got "
                f"{tensor_map!r}."
            )
            raise MeshError(message)
        result: list[int] = []
        for size, entry in zip(slice_shape, tensor_map, strict=True):
            full = size
            for axis in (entry,) if isinstance(entry, int) else entry:
                if not -1 <= axis < self.ndim:
                    message = (
                        f"tensor_map names axes 0 to {self.ndim - 1} from the innermost, or -1; got "
                        f"{axis}."
                    )
                    raise MeshError(message)
                full *= 1 if axis == -1 else self.shape[self.ndim - 1 - axis]
            result.append(full)
        return tuple(result)

    # Axis keys.

    def _index(self, key: object) -> int:
        """Return the index of the axis *key*."""
        if isinstance(key, str):
            if self._mesh_dim_names is None:
                message = (
                    f"Axis {key!r} was asked of a mesh without axis names; pass an index 0 to "
                    f"{self.ndim - 1}, or give the mesh mesh_dim_names."
                )
                raise UnnamedMeshError(message)
            if key not in self._mesh_dim_names:
                raise AxisError(
                    f"The mesh has no axis {key!r}; it has {self._mesh_dim_names}.",
                    asked=key,
                    legal=self._mesh_dim_names,
                )
            return self._mesh_dim_names.index(key)
        if not isinstance(key, int) or isinstance(key, bool):
            message = f"An axis is a name or an index, got {key!r}."
            raise MeshTypeError(message)
        if not -self.ndim <= key < self.ndim:
            raise AxisError(
                f"Axis index {key} is out of range; the mesh {self._described()} has {self.ndim} axes.",
                asked=key,
                legal=range(self.ndim),
            )
        return key % self.ndim

    def _only(self, key: AxisKey | None, what: str) -> int:
        if key is not None:
            return self._index(key)
        if self.ndim > 1:
            message = (
                f"{what}() needs mesh_dim on a mesh of {self.ndim} axes {self._described()}; "
                f"pass one of {self._mesh_dim_names or tuple(range(self.ndim))}. "
                "(Optional kwarg `mesh_dim` needs to be specified when device_mesh.ndim > 1.)"
            )
            raise AxisRequiredError(message)
        return 0

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        return self._index(mesh_dim_name)

    # Derived meshes.

    def _derive(
        self,
        mesh_axes: tuple[Axis, ...],
        names: tuple[str, ...] | None,
        configs: tuple[GroupConfig, ...],
    ) -> DeviceMesh:
        """Return the mesh of the family with these axes: the same object each time."""
        family = self._family
        root = family.root
        if mesh_axes == root._axes and names == root._mesh_dim_names and configs == root._configs:
            return root
        key = (mesh_axes, names, configs)
        mesh = family.derived.get(key)
        if mesh is None:
            mesh = DeviceMesh._make(self._device_type, mesh_axes, names, configs, family, root)
            family.derived[key] = mesh
        return mesh

    def _name_axis(self, name: str, axis: Axis) -> None:
        """Make *axis* known to this root by *name*, as `flatten` does."""
        self._flatten_mapping[name] = self._derive((axis,), (name,), (self._config_of(axis),))

    def _config_of(self, axis: Axis) -> GroupConfig:
        """Return how the groups of *axis* are made, as the family first heard of it."""
        return self._family.configs.get(axis, GroupConfig())

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of the named axes that this rank is in: the same object each time.

        Names follow the mesh's own order; see `permute` for another. Names of flattened meshes are
        known to the root mesh.

        Raises:
            AxisError: (a `KeyError` and `ValueError`) for unknown names, or names out of order.
            UnnamedMeshError: (a `RuntimeError`) if the mesh has no axis names.

        Example:
            >>> from hp_mesh import init_device_mesh
            >>> mesh = init_device_mesh(
            ...     "cpu",
            ...     (2, 2, 2),
            ...     mesh_dim_names=("dp", "cp", "tp"),
            ...     rank_list=range(8),
            ...     init_backend=False,
            ... )
            >>> mesh["dp", "tp"].shape, mesh["tp"] is mesh["tp"]
            ((2, 2), True)
        """
        names = arguments.read_names(mesh_dim_names)
        if self._mesh_dim_names is None:
            message = (
                "Cannot slice a DeviceMesh without mesh_dim_names! Name its axes when it is made."
            )
            raise UnnamedMeshError(message)
        if names == self._mesh_dim_names:
            return self
        picked = [self._named(name) for name in names]
        self._check_slice(names, [axis for axis, _ in picked])
        return self._derive(
            tuple(axis for axis, _ in picked), names, tuple(config for _, config in picked)
        )

    def _named(self, name: str) -> tuple[Axis, GroupConfig]:
        own = self._mesh_dim_names or ()
        if name in own:
            index = own.index(name)
            return self._axes[index], self._configs[index]
        flattened = self._flatten_mapping.get(name)
        if isinstance(flattened, DeviceMesh):
            return flattened._axes[0], flattened._configs[0]
        legal = (*own, *self._flatten_mapping)
        message = f"Invalid mesh_dim_name: the mesh has no axis {name!r}; it has {legal}."
        elsewhere = self._family.root._flatten_mapping
        if name in elsewhere:
            message += f" {name!r} is a flattened mesh of the root: use mesh.root_mesh[{name!r}]."
        raise AxisError(message, asked=name, legal=legal)

    def _check_slice(self, names: tuple[str, ...], picked: Sequence[Axis]) -> None:
        own = self._mesh_dim_names or ()
        if not names:
            message = f"A slice names at least one axis; the mesh has {own}."
            raise AxisError(message, asked=names, legal=own)
        if len(set(names)) != len(names):
            message = f"A slice names each axis once, got {names}."
            raise AxisError(message, asked=names, legal=own)
        if all(name in own for name in names):
            places = [own.index(name) for name in names]
        else:
            if not axes.disjoint(picked):
                message = f"The axes {names} overlap: some ranks would have two coordinates."
                raise AxisError(message, asked=names, legal=own)
            places = [-axis.leading_stride for axis in picked if axis.size > 1]
        if places != sorted(places):
            ordered = tuple(name for name in own if name in names)
            wanted = f"mesh{list(ordered)}" if len(ordered) == len(names) else "that order"
            message = (
                f"Mesh dim indices should be in ascending order: the axes {names} are not in the mesh's order "
                f"{own}. Use {wanted}, or mesh.permute{names} for the transposed mesh, in which "
                "coordinates are swapped and groups are the same."
            )
            raise AxisError(message, asked=names, legal=own)

    def permute(self, *mesh_dim_names: str) -> DeviceMesh:
        """Return the mesh of the named axes in the given order: coordinates move, groups stay.

        Example:
            >>> from hp_mesh import init_device_mesh
            >>> mesh = init_device_mesh(
            ...     "cpu",
            ...     (2, 3),
            ...     mesh_dim_names=("dp", "tp"),
            ...     rank_list=range(6),
            ...     init_backend=False,
            ... )
            >>> mesh.permute("tp", "dp").mesh.tolist()
            [[0, 3], [1, 4], [2, 5]]
        """
        if len(set(mesh_dim_names)) != len(mesh_dim_names) or not mesh_dim_names:
            legal = self._mesh_dim_names or ()
            message = (
                f"permute() takes each axis once, got {mesh_dim_names}; the mesh has {legal}."
            )
            raise AxisError(message, asked=mesh_dim_names, legal=legal)
        picked = [self._index(name) for name in mesh_dim_names]
        return self._derive(
            tuple(self._axes[i] for i in picked),
            tuple(mesh_dim_names),
            tuple(self._configs[i] for i in picked),
        )

    def flatten(
        self, mesh_dim_name: str | None = None, backend_override: BackendChoice = None
    ) -> DeviceMesh:
        """Return the 1-D mesh over this rank's mesh, the last axis fastest; the root learns its name.

        Args:
            mesh_dim_name: its axis name; by default the axis names joined by ``_``.
            backend_override: backend name, options or both for its group.

        Raises:
            MeshError: (a `ValueError`) if the name is an axis of the root, or was given to a flattened
                mesh of other axes.
            UnnamedMeshError: (a `RuntimeError`) if the mesh has no axis names.

        Example:
            >>> from hp_mesh import init_device_mesh
            >>> mesh = init_device_mesh(
            ...     "cpu",
            ...     (2, 2, 2),
            ...     mesh_dim_names=("dp", "cp", "tp"),
            ...     rank_list=range(8),
            ...     init_backend=False,
            ... )
            >>> mesh["dp", "cp"].flatten("loss").shape, mesh["loss"].mesh_dim_names
            ((4,), ('loss',))
        """
        own = self._mesh_dim_names
        if own is None:
            message = "Cannot flatten a mesh without axis names; give it mesh_dim_names."
            raise UnnamedMeshError(message)
        name = mesh_dim_name or "_".join(own)
        if self.ndim == 1 and name == own[0]:
            return self
        root = self._family.root
        if name in (root._mesh_dim_names or ()):
            message = (
                f"{name!r} is an axis of the root mesh {root._described()}; give the flattened mesh "
                f"another name. ({name} already exists for submesh of the {root!r}.)"
            )
            raise MeshError(message)
        backend, options = arguments.split_choice(backend_override, 0)
        config = GroupConfig(backend, self._common_timeout(), options)
        flat = axes.merge(self._axes)
        known = root._flatten_mapping.get(name)
        if isinstance(known, DeviceMesh):
            if known._axes[0] != flat:
                message = (
                    f"{name!r} is already the flattened mesh of other axes "
                    f"{known._axes[0].digits}; give this one another name. (Flatten mesh with "
                    f"mesh_dim_name {name} has been created before.)"
                )
                raise MeshError(message)
            return known
        mesh = self._derive((flat,), (name,), (config,))
        root._flatten_mapping[name] = mesh
        return mesh

    def _common_timeout(self) -> timedelta | None:
        timeouts = {config.timeout for config in self._configs}
        return timeouts.pop() if len(timeouts) == 1 else None

    def unflatten(
        self,
        dim: AxisKey,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[int | str, BackendChoice] | None = None,
    ) -> DeviceMesh:
        """Return the mesh in which axis *dim* is cut into several.

        Args:
            dim: name or index of the axis.
            mesh_sizes: sizes of the new axes; their product is the size of *dim*.
            mesh_dim_names: their names.
            backend_override: per new axis, by name or by index among the new ones; ``"fake"`` makes a
                group that does not communicate.

        Raises:
            AxisError: (a `KeyError` and `ValueError`) if there is no axis *dim*.
            MeshError: (a `ValueError`) if the sizes do not multiply to the axis, or names repeat.

        Example:
            >>> from hp_mesh import init_device_mesh
            >>> world = init_device_mesh(
            ...     "cpu", (8,), mesh_dim_names=("world",), rank_list=range(8), init_backend=False
            ... )
            >>> world.unflatten("world", (2, 4), ("dp", "tp")).shape
            (2, 4)
        """
        if self._mesh_dim_names is None:
            message = "Cannot unflatten a mesh without axis names; give it mesh_dim_names."
            raise UnnamedMeshError(message)
        index = self._index(dim)
        sizes = arguments.check_shape(tuple(mesh_sizes))
        new = tuple(mesh_dim_names)
        if len(new) != len(sizes):
            message = (
                "mesh_dim_names must have the length of mesh_sizes, got "
                f"{len(new)} names {new} for {len(sizes)} sizes {sizes}. "
                "(mesh_dim_names must have same length as mesh_sizes in _unflatten!)"
            )
            raise MeshError(message)
        names = (*self._mesh_dim_names[:index], *new, *self._mesh_dim_names[index + 1 :])
        names = arguments.check_names(names, len(names)) or names
        try:
            parts = axes.split(self._axes[index], sizes)
        except ValueError as error:
            message = (
                f"Cannot unflatten axis {dim!r} of mesh {self._described()}: {error}. "
                "(These must be equal for unflatten to work correctly.)"
            )
            raise MeshError(message) from None
        configs = arguments.group_configs(
            len(new), new, backend_override, self._configs[index].timeout
        )
        return self._derive(
            (*self._axes[:index], *parts, *self._axes[index + 1 :]),
            names,
            (*self._configs[:index], *configs, *self._configs[index + 1 :]),
        )

    def _flatten(
        self, mesh_dim_name: str | None = None, backend_override: BackendChoice = None
    ) -> DeviceMesh:
        """Return `flatten`: torch's spelling."""
        return self.flatten(mesh_dim_name, backend_override)

    def _unflatten(  # type: ignore[override]  # a Mapping takes every dict torch's may
        self,
        dim: AxisKey,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[int | str, BackendChoice] | None = None,
    ) -> DeviceMesh:
        """Return `unflatten`: torch's spelling, and its words for an axis that is not there."""
        try:
            self._index(dim)
        except AxisError as error:
            told = (
                f"out of range {self.ndim}"
                if isinstance(dim, int)
                else f"not in {self._mesh_dim_names}"
            )
            message = f"dim {dim} specified in `_unflatten` is {told}: {error}"
            raise AxisError(message, asked=dim, legal=error.legal) from None
        return self.unflatten(dim, mesh_sizes, mesh_dim_names, backend_override)

    @staticmethod
    def concatenate(meshes: Sequence[_torch.TorchMesh]) -> DeviceMesh:
        """Return the mesh that has the axes of all *meshes*, which are slices of one root.

        Raises:
            MeshError: (a `ValueError`) if there are none, if they are of different roots, unnamed,
                overlap, or share a name.

        Example:
            >>> from hp_mesh import DeviceMesh, init_device_mesh
            >>> mesh = init_device_mesh(
            ...     "cpu",
            ...     (2, 2, 2),
            ...     mesh_dim_names=("dp", "cp", "tp"),
            ...     rank_list=range(8),
            ...     init_backend=False,
            ... )
            >>> DeviceMesh.concatenate([mesh["dp"], mesh["tp"]]) is mesh["dp", "tp"]
            True
        """
        if not meshes:
            message = "concatenate() needs at least one mesh, got none."
            raise MeshError(message)
        own = [DeviceMesh.from_torch(mesh) for mesh in meshes]
        if len(own) == 1:
            return own[0]
        first = own[0]
        names: list[str] = []
        for mesh in own:
            if mesh._mesh_dim_names is None:
                message = f"concatenate() needs axis names; {mesh!r} has none."
                raise MeshError(message)
            names.extend(mesh._mesh_dim_names)
            if mesh._family is not first._family and (
                mesh._family.ranks != first._family.ranks
                or mesh._device_type != first._device_type
            ):
                message = (
                    f"Cannot concatenate meshes of different roots: {first!r} of "
                    f"{first._family.root!r} and {mesh!r} of {mesh._family.root!r}. "
                    "(Cannot concatenate DeviceMeshes derived from different device meshes.)"
                )
                raise MeshError(message)
        checked = arguments.check_names(tuple(names), len(names)) or ()
        mesh_axes = tuple(axis for mesh in own for axis in mesh._axes)
        if not axes.disjoint(mesh_axes):
            message = f"Cannot concatenate overlapping meshes: {own}."
            raise MeshError(message)
        return first._derive(
            mesh_axes, checked, tuple(config for mesh in own for config in mesh._configs)
        )

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[_torch.TorchMesh]) -> DeviceMesh:
        """Return `concatenate`: torch's spelling."""
        return DeviceMesh.concatenate(device_mesh_list)

    def _get_all_submeshes(  # type: ignore[override]  # ours, which are torch's too
        self, mesh_dim_name: str
    ) -> list[DeviceMesh]:
        """Return the 1-D meshes along an axis, those of other ranks too."""
        index = self._index(mesh_dim_name)
        axis = self._axes[index]
        family = self._family
        found: list[DeviceMesh] = []
        for start in axes.complement((axis,), len(family.ranks)).offsets():
            ranks = family.ranks.ranks([start + offset for offset in axis.offsets()])
            child = _Family(RankMap.of(ranks), family.fixed_rank, with_groups=family.with_groups)
            child.given = family.given
            found.append(
                DeviceMesh._make(
                    self._device_type,
                    axes.row_major((axis.size,)),
                    (mesh_dim_name,),
                    (self._configs[index],),
                    child,
                    None,
                )
            )
        return found

    # Torch meshes and groups made elsewhere.

    @staticmethod
    def from_group(  # type: ignore[override]  # torch's type is numpy's ArrayLike
        group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
        device_type: str,
        mesh: RanksLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return the mesh over process groups that exist; makes none.

        Args:
            group: a group for a 1-D mesh, or one group per axis.
            device_type: the kind of device.
            mesh: the global ranks; needed for several groups, and checked for one.
            mesh_dim_names: one name per axis.

        Raises:
            MeshError: (a `ValueError`) if there are no groups, or *mesh* does not fit them.
        """
        device_type = arguments.check_device_type(device_type)
        groups = [group] if isinstance(group, dist.ProcessGroup) else list(group)
        if not groups:
            message = "from_group() needs at least one process group, got none."
            raise MeshError(message)
        listed = [tuple(dist.get_process_group_ranks(g)) for g in groups]
        if mesh is None:
            if len(groups) > 1:
                message = (
                    "from_group() needs mesh= to know how several groups lie to each other; pass the "
                    f"ranks as a grid of {len(groups)} axes."
                )
                raise MeshError(message)
            shape: tuple[int, ...] = (len(listed[0]),)
            ranks = listed[0]
        else:
            shape, ranks = arguments.read_grid(mesh)
        if len(shape) != len(groups):
            grid = torch.tensor(ranks).view(shape).tolist()
            message = (
                f"Invalid mesh {grid} for ProcessGroup with ranks {list(listed[0])}: from_group() needs one "
                f"group per axis, and the mesh has {len(shape)}."
                if len(groups) == 1
                else "Expects mesh with ndim equal to number of ProcessGroups but got mesh "
                f"{grid} and {len(groups)} ProcessGroups; from_group() needs one group per axis."
            )
            raise MeshError(message)
        names = arguments.check_names(mesh_dim_names, len(shape))
        family = _Family(RankMap.of(ranks), None, with_groups=True)
        result = DeviceMesh._make(
            device_type,
            axes.row_major(shape),
            names,
            (GroupConfig(),) * len(shape),
            family,
            None,
        )
        if result._coordinate_on_dim is not None:
            for index, along in enumerate(listed):
                expected = result._ranks_along(index)
                if expected != along:
                    message = (
                        f"from_group(): the group of axis {index} has ranks {list(along)}, but the mesh "
                        f"has {list(expected)} along it."
                    )
                    raise MeshError(message)
                family.given[along] = groups[index]
                registry.put(groups[index], result._label(index))
        return result

    @staticmethod
    def from_torch(mesh: _torch.TorchMesh) -> DeviceMesh:
        """Return our mesh for a torch mesh, with the same ranks, names and process groups.

        The same object each time; a mesh of ours is returned as it is. Makes no groups.
        """
        if isinstance(mesh, DeviceMesh):
            return mesh
        twin = _torch.get_twin(mesh)
        if isinstance(twin, DeviceMesh):
            return twin
        root = mesh._get_root_mesh()
        if root is mesh:
            result = _adopt_root(mesh)
        else:
            ours = DeviceMesh.from_torch(root)
            mesh_axes = _read_axes(mesh)
            configs = tuple(ours._config_of(axis) for axis in mesh_axes)
            result = ours._derive(mesh_axes, mesh.mesh_dim_names, configs)
        if not isinstance(root, DeviceMesh):
            _take_groups(result, mesh)
        _torch.set_twin(mesh, result)
        return result

    def to_torch(self) -> _torch.TorchMesh:
        """Return a plain torch mesh with the same ranks, names and process groups.

        Makes the groups of all axes if the mesh may have groups (see `get_group`).
        """
        names = self._dim_group_names if self._family.with_groups else None
        root = None if self._root_mesh is None else self._family.root.to_torch()
        return _torch.plain_mesh(self, root, names)

    # The current mesh.

    def __enter__(self) -> Self:
        """Make this the current mesh; see `get_current_mesh`."""
        push(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        exc_traceback: TracebackType | None,
    ) -> None:
        """Make the mesh before this the current one."""
        pop(self)

    # Values.

    def _value(self) -> tuple[object, ...]:
        return (
            self._family.ranks,
            self._axes,
            self._device_type,
            self._mesh_dim_names,
            self._preserve_rank_order,
        )

    def __eq__(self, other: object) -> bool:
        """Compare by device type, ranks, axes and names; torch meshes too."""
        if self is other:
            return True
        if type(other) is DeviceMesh:
            return self._value() == other._value()
        return _torch.TorchMesh.__eq__(self, other)

    def __hash__(self) -> int:
        """Return the hash torch gives an equal mesh; computed once."""
        return self._hash or _torch.base_hash(self)

    def to_hash(self) -> tuple[tuple[int, ...], tuple[str, ...] | None, tuple[int, ...]]:
        """Return ``(shape, names, ranks)``, which identifies the mesh up to its device type."""
        return self.shape, self._mesh_dim_names, self.rank_list

    def __copy__(self) -> Self:
        """Return the mesh itself, as it is a value."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the mesh itself, as it is a value."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the value; process groups and backend options stay behind."""
        family = self._family
        root = family.root
        settings = tuple((c.backend, c.timeout) for c in self._configs)
        root_settings = tuple((c.backend, c.timeout) for c in root._configs)
        ranks = family.ranks
        return _rebuild, (
            self._device_type,
            (ranks.rank(0), len(ranks)) if ranks.is_range else list(ranks.ranks()),
            (root.shape, root._mesh_dim_names, root_settings),
            (tuple(a.digits for a in self._axes), self._mesh_dim_names, settings),
            family.with_groups,
        )

    def __repr__(self) -> str:
        """Show names, sizes, device type and strides, as torch does."""
        strides = tuple(
            axis.leading_stride if len(axis.digits) <= 1 else tuple(d for _, d in axis.digits)
            for axis in self._axes
        )
        return f"DeviceMesh({self._described()}, {self._device_type!r}, stride={strides})"


_alive: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()
"""All meshes by id, to make them forget a world that is gone."""

_made: dict[tuple[object, ...], DeviceMesh] = {}
"""What `init_device_mesh` returned, by value."""

_OF_A_WORLD = ("_rank", "_coordinate_on_dim", "_dim_group_names", "mesh", "rank_list")


def _forget_world() -> None:
    _made.clear()
    for mesh in list(_alive.values()):
        for name in _OF_A_WORLD:
            mesh.__dict__.pop(name, None)
        mesh._groups.clear()
        mesh._pg_registry.clear()


registry.on_new_world(_forget_world)


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    rank_list: Sequence[int] | None = None,
    init_backend: bool = True,
    backend_override: Mapping[int | str, BackendChoice] | None = None,
    timeout: timedelta | Mapping[int | str, timedelta] | None = None,
) -> DeviceMesh:
    """Return the mesh of *mesh_shape* over the ranks of the job; the same object for the same value.

    Everything is checked before any process group is touched. Process groups are made when first asked
    for (see `DeviceMesh.get_group`); `torch.distributed` itself is initialised here if need be.

    A mesh smaller than the world: without *rank_list* the world is cut into blocks of the mesh's size,
    and each rank gets the mesh of its block, so that a mesh of 4 in a world of 8 is two meshes. Ranks
    after the last whole block are in no mesh; theirs is the first block's, with coordinate None.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"npu"`` or another device type that torch knows.
        mesh_shape: size of each axis.
        mesh_dim_names: one name per axis.
        rank_list: the global ranks, row-major, in any order.
        init_backend: False for a mesh without process groups, which needs no `torch.distributed`;
            `DeviceMesh.init_backend` changes it later.
        backend_override: per axis, by name or index, a backend name, its options or both.
        timeout: of the groups (and of the world, if it is initialised here); one for all axes, or a
            dict by axis name or index.

    Raises:
        MeshError: (a `ValueError`) for a shape, names or ranks that are no mesh; `MeshTypeError` for
            wrong types.

    Example:
        >>> from hp_mesh import init_device_mesh
        >>> init_device_mesh(
        ...     "cpu", (2, 4), mesh_dim_names=("dp", "tp"), rank_list=range(8), init_backend=False
        ... )
        DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))
    """
    device_type = arguments.check_device_type(device_type)
    shape = arguments.check_shape(mesh_shape)
    names = arguments.check_names(mesh_dim_names, len(shape))
    configs = arguments.group_configs(len(shape), names, backend_override, timeout)
    total = arguments.total(shape)
    if rank_list is not None:
        ranks = RankMap.of(arguments.check_rank_list(rank_list, total, shape))
    else:
        ranks = None
    if init_backend:
        start_world(device_type, total if ranks is None else ranks.highest + 1, configs)
    if ranks is None:
        ranks = _block(total)
    registry.refresh()
    key = (device_type, shape, names, ranks, configs, init_backend)
    mesh = _made.get(key)
    if mesh is None:
        mesh = DeviceMesh._make(
            device_type,
            axes.row_major(shape),
            names,
            configs,
            _Family(ranks, None, with_groups=init_backend),
            None,
        )
        _made[key] = mesh
    return mesh


def _block(total: int) -> RankMap:
    """Return the block of *total* ranks that this rank is in."""
    if not dist.is_initialized() and "RANK" not in os.environ:
        message = (
            "init_device_mesh() without rank_list needs to know this process's rank, but "
            "torch.distributed is not initialized and RANK is not set. Pass rank_list, or call "
            "torch.distributed.init_process_group()."
        )
        raise NoGroupError(message)
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    first = rank - rank % total
    size = _world_size()
    if first + total > size >= total:
        first = 0
    return RankMap(first, total)


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_world(device_type: str, needed: int, configs: Sequence[GroupConfig]) -> None:
    """Initialise `torch.distributed` if need be; check that it has *needed* ranks."""
    if not dist.is_initialized():
        timeouts = [config.timeout for config in configs if config.timeout is not None]
        dist.init_process_group(timeout=max(timeouts) if timeouts else None)
    if needed > dist.get_world_size():
        message = (
            f"Mesh should not be bigger than default world size {dist.get_world_size()}: it needs ranks up to "
            f"{needed - 1}. Make the mesh smaller, or start more processes (torchrun --nproc-per-node)."
        )
        raise MeshError(message)
    _torch.select_device(device_type)


def _read_axes(mesh: _torch.TorchMesh) -> tuple[Axis, ...]:
    return tuple(
        Axis(axes.canonical(digits), unit_stride=digits[0][1] if digits else 1)
        for digits in _torch.layout_digits(mesh._layout)
    )


def _adopt_root(mesh: _torch.TorchMesh) -> DeviceMesh:
    family = _Family(
        RankMap.of(mesh._flatten_rank_map), None, with_groups=hasattr(mesh, "_dim_group_names")
    )
    return DeviceMesh._make(
        mesh.device_type,
        _read_axes(mesh),
        mesh.mesh_dim_names,
        (GroupConfig(),) * mesh.ndim,
        family,
        None,
    )


def _take_groups(ours: DeviceMesh, mesh: _torch.TorchMesh) -> None:
    """Use the groups of a torch mesh in ours."""
    if ours._coordinate_on_dim is None or not getattr(mesh, "_dim_group_names", None):
        return
    for index in range(mesh.ndim):
        group = mesh.get_group(index)
        ours._family.given.setdefault(ours._ranks_along(index), group)
        registry.put(group, ours._label(index))


def _rebuild(
    device_type: str,
    ranks: tuple[int, int] | list[int],
    root: tuple[
        tuple[int, ...],
        tuple[str, ...] | None,
        tuple[tuple[str | None, timedelta | None], ...],
    ],
    own: tuple[
        tuple[tuple[axes.Digit, ...], ...],
        tuple[str, ...] | None,
        tuple[tuple[str | None, timedelta | None], ...],
    ],
    with_groups: bool,
) -> DeviceMesh:
    """Return the mesh that was pickled: the one that is there, if it is."""
    registry.refresh()
    rank_map = RankMap(*ranks) if isinstance(ranks, tuple) else RankMap.of(ranks)
    shape, names, settings = root
    configs = tuple(GroupConfig(backend, timeout) for backend, timeout in settings)
    key = (device_type, shape, names, rank_map, configs, with_groups)
    mesh = _made.get(key)
    if mesh is None:
        mesh = DeviceMesh._make(
            device_type,
            axes.row_major(shape),
            names,
            configs,
            _Family(rank_map, None, with_groups=with_groups),
            None,
        )
        _made[key] = mesh
    digits, own_names, own_settings = own
    return mesh._derive(
        tuple(Axis(d) for d in digits),
        own_names,
        tuple(GroupConfig(backend, timeout) for backend, timeout in own_settings),
    )


_torch.allow_unpickling([DeviceMesh, _rebuild, timedelta])
