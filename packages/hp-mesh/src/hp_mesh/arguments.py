"""What a user may write for a mesh's shape, ranks, names, timeouts and backends, made canonical.

The rule: everything is checked here, before any process group is touched, and the message names the
argument, its value and what is legal. Nothing here depends on the rank, so all ranks raise alike.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import torch

from .errors import AxisError, BackendError, MeshError, MeshTypeError
from .groups import GroupConfig

if TYPE_CHECKING:
    from ._torch import Options

DEVICE_TYPES = frozenset({"cpu", "cuda", "npu", "xpu"})
"""Device types that need no extension of torch to be named in a mesh."""

BackendChoice: TypeAlias = "str | Options | tuple[str, Options] | None"
"""A backend name, its options, or both."""


@runtime_checkable
class HasToList(Protocol):
    """A tensor, a numpy array: anything that can list itself."""

    def tolist(self) -> object:
        """Return the content as nested lists."""


RanksLike: TypeAlias = "torch.Tensor | Sequence[object] | HasToList"
"""Ranks as a tensor, an array, or nested sequences of ints."""


def check_device_type(device_type: object) -> str:
    """Return *device_type* if it names a kind of device, without an index."""
    if not isinstance(device_type, str):
        message = f"device_type must be a string such as 'cpu', got {device_type!r}."
        raise MeshTypeError(message)
    if device_type == "xla":
        message = (
            "device_type 'xla' is not supported: an XLA mesh needs torch_xla's SPMD runtime, which has "
            "no process groups for this package to use. Use torch_xla.distributed.spmd.Mesh, or one "
            f"of {_listed(sorted(DEVICE_TYPES))}."
        )
        raise BackendError(message)
    if device_type in DEVICE_TYPES:
        return device_type
    if ":" in device_type:
        message = (
            "Device type with index is not supported: device_type must have no index, got "
            f"{device_type!r}; a mesh is over the devices of all ranks. Pass "
            f"{device_type.split(':')[0]!r}."
        )
        raise MeshError(message)
    try:
        return torch.device(device_type).type
    except RuntimeError:
        message = (
            f"device_type {device_type!r} is not known to this torch; legal are "
            f"{_listed(sorted(DEVICE_TYPES))} and the device types of installed extensions."
        )
        raise MeshError(message) from None


def check_shape(mesh_shape: object) -> tuple[int, ...]:
    """Return *mesh_shape* as a non-empty tuple of positive ints."""
    if not isinstance(mesh_shape, tuple | list):
        message = (
            f"mesh_shape must be a tuple of ints, got {mesh_shape!r} of type {_kind(mesh_shape)}."
        )
        raise MeshTypeError(message)
    if not mesh_shape:
        message = "mesh_shape must have at least one axis, got ()."
        raise MeshError(message)
    for size in mesh_shape:
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            message = f"mesh_shape must hold ints, got {size!r} in {tuple(mesh_shape)}."
            raise MeshError(message)
        if int(size) < 1:
            message = f"mesh_shape must hold positive ints, got {size} in {tuple(mesh_shape)}."
            raise MeshError(message)
    return tuple(int(size) for size in mesh_shape)


def check_names(names: object, ndim: int) -> tuple[str, ...] | None:
    """Return axis *names* as a tuple of *ndim* unique names, or None."""
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, tuple | list):
        message = f"mesh_dim_names must be a tuple of strings, got {names!r}."
        raise MeshTypeError(message)
    for name in names:
        if not isinstance(name, str) or not name:
            message = (
                f"mesh_dim_names must hold non-empty strings, got {name!r} in {tuple(names)}."
            )
            raise MeshError(message)
    if len(names) != ndim:
        message = (
            "mesh_shape and mesh_dim_names should have same length! mesh_dim_names must name every axis "
            f"once: got {len(names)} names {tuple(names)} for {ndim} axes."
        )
        raise MeshError(message)
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        message = (
            f"Each mesh_dim_name must be unique, got {twice} more than once in {tuple(names)}."
        )
        raise MeshError(message)
    if "interleaved_parallel" in names[:-1]:
        message = (
            "The axis name 'interleaved_parallel' is only allowed for the last axis, got "
            f"{tuple(names)}."
        )
        raise MeshError(message)
    return tuple(names)


def read_names(names: object) -> tuple[str, ...]:
    """Return one axis name or several as a tuple."""
    listed = (names,) if isinstance(names, str) else names
    if not isinstance(listed, tuple | list) or not all(isinstance(n, str) for n in listed):
        message = f"A mesh is sliced by axis names, got {names!r}."
        raise MeshTypeError(message)
    return tuple(listed)


def check_rank_list(rank_list: object, total: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return *rank_list* as *total* unique ranks."""
    if isinstance(rank_list, HasToList):
        rank_list = rank_list.tolist()
    if isinstance(rank_list, str) or not isinstance(rank_list, Sequence):
        message = f"rank_list must be a sequence of ints, got {rank_list!r}."
        raise MeshTypeError(message)
    if len(rank_list) != total:
        message = (
            f"rank_list must hold one rank per device: mesh_shape {shape} has {total}, got "
            f"{len(rank_list)} ranks."
        )
        raise MeshError(message)
    return check_ranks(rank_list, "rank_list")


def check_ranks(ranks: Sequence[object], what: str) -> tuple[int, ...]:
    """Return *ranks* as unique, non-negative ints."""
    checked: list[int] = []
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, numbers.Integral):
            message = f"{what} must hold ints, got {rank!r}."
            raise MeshTypeError(message)
        checked.append(int(rank))
    if min(checked) < 0:
        message = f"{what} must hold ranks >= 0, got {min(checked)}."
        raise MeshError(message)
    if len(set(checked)) != len(checked):
        twice = sorted(rank for rank in set(checked) if checked.count(rank) > 1)
        message = f"{what} must hold each rank once, got {twice[:8]} more than once."
        raise MeshError(message)
    return tuple(checked)


def read_grid(mesh: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and row-major ranks of a tensor, an array or nested sequences."""
    if isinstance(mesh, torch.Tensor):
        if mesh.dtype.is_floating_point or mesh.dtype.is_complex or mesh.dtype == torch.bool:
            message = f"mesh must hold ints, got a tensor of {mesh.dtype}."
            raise MeshTypeError(message)
        if mesh.is_meta:
            message = "mesh must hold ranks, got a tensor on the meta device, which has no values."
            raise MeshError(message)
    value = mesh.tolist() if isinstance(mesh, HasToList) else mesh
    if isinstance(value, str) or not isinstance(value, Sequence):
        if isinstance(value, numbers.Integral):
            message = f"mesh must have at least one axis, got the scalar {value}."
            raise MeshError(message)
        message = (
            "mesh must be a tensor, a (nested) list or tuple of ints, or a numpy array, got "
            f"{mesh!r} of type {_kind(mesh)}."
        )
        raise MeshTypeError(message)
    shape: list[int] = []
    level: list[object] = [value]
    while isinstance(level[0], Sequence) and not isinstance(level[0], str):
        sizes = {len(item) if isinstance(item, Sequence) else -1 for item in level}
        if len(sizes) != 1 or 0 in sizes:
            message = (
                f"mesh must be a full, non-empty grid, got rows of lengths {sorted(sizes)} at depth "
                f"{len(shape)}."
            )
            raise MeshError(message)
        shape.append(sizes.pop())
        level = [entry for item in level if isinstance(item, Sequence) for entry in item]
    return tuple(shape), check_ranks(level, "mesh")


def group_configs(
    ndim: int,
    names: tuple[str, ...] | None,
    backend_override: Mapping[int | str, BackendChoice] | Sequence[BackendChoice] | None,
    timeout: timedelta | Mapping[int | str, timedelta] | None,
) -> tuple[GroupConfig, ...]:
    """Return how to make the groups of each of *ndim* axes."""
    backends = _per_axis("backend_override", ndim, names, backend_override)
    common = timeout if isinstance(timeout, timedelta) else None
    if timeout is not None and common is None and not isinstance(timeout, Mapping):
        message = f"timeout must be a timedelta, or a dict of them by axis name or index, got {timeout!r}."
        raise MeshTypeError(message)
    timeouts = _per_axis("timeout", ndim, names, timeout if isinstance(timeout, Mapping) else None)
    return tuple(
        _config(backends.get(axis), timeouts.get(axis, common), axis) for axis in range(ndim)
    )


def _per_axis(
    what: str,
    ndim: int,
    names: tuple[str, ...] | None,
    given: Mapping[int | str, object] | Sequence[object] | None,
) -> dict[int, object]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        if len(given) != ndim:
            message = f"{what} must have one entry per axis ({ndim}), got {len(given)}."
            raise MeshError(message)
        return dict(enumerate(given))
    legal: list[int | str] = [*(names or ()), *range(ndim)]
    chosen: dict[int, object] = {}
    for key, value in given.items():
        if key not in legal:
            message = (
                f"Found invalid keys in {what}: got {[k for k in given if k not in legal]}, expected integers "
                f"in range [0, {ndim}){f' or one of {names}' if names else ''}."
            )
            raise AxisError(message, asked=key, legal=legal)
        axis = names.index(key) if isinstance(key, str) and names else int(key)
        if axis in chosen:
            message = f"Found redundant dim index {axis} and name {(names or ())[axis]} in {what}; keep one of them."
            raise AxisError(message, asked=key, legal=legal)
        chosen[axis] = value
    return chosen


def _config(backend: object, timeout: object, axis: int) -> GroupConfig:
    if timeout is not None and not isinstance(timeout, timedelta):
        message = f"timeout of axis {axis} must be a timedelta, got {timeout!r}."
        raise MeshTypeError(message)
    if timeout is not None and timeout <= timedelta(0):
        message = f"timeout of axis {axis} must be positive, got {timeout}."
        raise MeshError(message)
    name, options = split_choice(backend, axis)
    own = getattr(options, "_timeout", None)
    if timeout is None and isinstance(own, timedelta):
        timeout = own
    return GroupConfig(name, timeout, options)


def split_choice(choice: object, axis: int) -> tuple[str | None, Options | None]:
    """Return backend name and options of a `BackendChoice`."""
    from ._torch import is_options

    parts = choice if isinstance(choice, tuple) else (choice,)
    name: str | None = None
    options: Options | None = None
    for part in parts:
        if isinstance(part, str):
            name = part
        elif is_options(part):
            options = part
        elif part is not None:
            message = (
                f"backend_override of axis {axis} must be a backend name, its options, or a pair of "
                f"both, got {choice!r}."
            )
            raise MeshTypeError(message)
    return name, options


def total(shape: Sequence[int]) -> int:
    """Return how many devices a mesh of *shape* has."""
    return math.prod(shape)


def _kind(value: object) -> str:
    return type(value).__name__


def _listed(values: Sequence[object]) -> str:
    return ", ".join(repr(value) for value in values)
