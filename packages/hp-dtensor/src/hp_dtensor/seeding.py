"""Seed the ranks, and say so, so that drawing on distributed tensors needs no communication.

The idea: what is drawn comes from torch's default CPU generator, so seeding is ``torch.manual_seed``. What is added here is
the promise that some ranks seed alike. Without it each draw begins with a broadcast of a few bytes, which keeps replicas
equal even where every rank has a seed of its own; with it nothing is sent, and the count of draws stays in step even where
ranks draw other things in between.

The rule: no function here communicates. The promise holds until the generator is seeded otherwise.

A broadcast of the first rank's seed was not taken: it stops a program in which only some ranks seed.
"""

from __future__ import annotations

import hashlib
import os
import random as python_random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from hp_mesh import DeviceMesh, ParallelDims, get_current_mesh

from hp_dtensor.random import agree

__all__ = ["SeedReport", "is_rng_supported_mesh", "manual_seed", "seed_everything"]

_WIDTH = 1 << 64


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None) -> None:
    """Seed torch on this rank as ``torch.manual_seed`` does, and note that the mesh's ranks do the same.

    Nothing is sent, so call it with the same *seed* on every rank of *device_mesh*. Draws on that mesh and on parts of it
    then need no communication, until the generator is seeded in another way.

    Args:
        seed: an integer that ``torch.manual_seed`` takes.
        device_mesh: the ranks that seed alike; all ranks of the job when None.

    Raises:
        RuntimeError: on a rank that is not part of *device_mesh*.

    Example:
        >>> import hp_dtensor
        >>> hp_dtensor.manual_seed(7)
    """
    if device_mesh is None:
        ranks = None
    else:
        mesh = DeviceMesh.from_torch(device_mesh)
        if mesh.get_coordinate() is None:
            msg = (
                f"manual_seed requires the current rank to be a part of the device mesh: rank {mesh.rank} is not among the "
                f"ranks of {mesh}. Call it on those ranks only, or without a mesh to seed the whole job alike"
            )
            raise RuntimeError(msg)
        ranks = mesh.rank_list
    torch.manual_seed(seed)
    agree(ranks)


def is_rng_supported_mesh(device_mesh: DeviceMesh | None = None) -> bool:
    """Whether draws on tensors laid out over this mesh are right: True for each kind of device that torch can use here.

    Args:
        device_mesh: the mesh; the current one when None.

    Example:
        >>> from hp_mesh import init_device_mesh
        >>> def check():
        ...     return is_rng_supported_mesh(init_device_mesh("cpu", (2,)))
    """
    mesh = get_current_mesh() if device_mesh is None else device_mesh
    kind = mesh.device_type
    return kind == "cpu" or bool(getattr(getattr(torch, kind, None), "is_available", bool)())


@dataclass(frozen=True, slots=True)
class SeedReport:
    """What :func:`seed_everything` did on this rank."""

    base: int
    """The seed that was given."""
    seed: int
    """The seed that this rank's generators got."""
    coordinates: Mapping[str, tuple[int, int]]
    """For each axis whose coordinates have streams of their own: this rank's coordinate, and the size."""
    scheme: str
    """How the seed follows from the base and the coordinates."""
    seeded: tuple[str, ...]
    """Which generators were seeded."""
    ranks: tuple[int, ...] | None
    """The ranks with the same seed, or None for all of the job."""


def _derived(seed: int, place: Mapping[str, tuple[int, int]], scheme: str) -> int:
    """The seed of the stream at *place*; *seed* itself where there is one stream only.

    Example:
        >>> _derived(7, {}, "hash"), _derived(7, {"pp": (1, 4), "dp": (1, 2)}, "offset")
        (7, 12)
    """
    streams = {name: at for name, at in place.items() if at[1] > 1}
    if not streams:
        return seed % _WIDTH
    if scheme == "offset":
        step, total = 1, seed
        for coordinate, size in streams.values():
            total += coordinate * step
            step *= size
        return total % _WIDTH
    text = repr((seed % _WIDTH, sorted((name, at[0]) for name, at in streams.items())))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"hp seed").digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits, which every generator takes


def _axis(dims: ParallelDims | DeviceMesh, name: str) -> DeviceMesh | None:
    if isinstance(dims, ParallelDims):
        return dims.get_optional_mesh(name)
    names = dims.mesh_dim_names
    if names is None or name not in names:
        msg = f"distinct={name!r} is no axis of {dims}; its axes are {names}"
        raise ValueError(msg)
    return dims[name]


def _alike(mesh: DeviceMesh, distinct: Sequence[str]) -> tuple[int, ...] | None:
    """The ranks of *mesh* with this rank's coordinates on the axes *distinct*; None when those are all."""
    where = mesh.get_coordinate()
    axes = [i for i, name in enumerate(mesh.mesh_dim_names or ()) if name in distinct]
    if where is None or not any(mesh.shape[axis] > 1 for axis in axes):
        return None
    ranks = mesh.mesh
    for axis in sorted(axes, reverse=True):
        ranks = ranks.select(axis, where[axis])
    return tuple(ranks.flatten().tolist())


def seed_everything(
    dims: ParallelDims | DeviceMesh,
    seed: int,
    distinct: Sequence[str] = ("pp",),
    scheme: Literal["hash", "offset"] = "hash",
) -> SeedReport:
    """Seed torch, Python and numpy (where it is loaded) on this rank; nothing is sent.

    Ranks get the same seed unless they differ in their coordinate on an axis of *distinct*: pipeline stages hold different
    layers, which must not start alike, while all ranks of a stage must.

    Args:
        dims: the axes: the degrees of the job, or a mesh with names. Names that *dims* knows and that are disabled count
            for nothing.
        seed: the same on every rank.
        distinct: the axes whose coordinates have streams of their own.
        scheme: ``"hash"``: a hash of seed, axis names and coordinates, so that the streams of two experiments never meet.
            ``"offset"``: the seed plus the coordinates in mixed radix, as TorchTitan has it.

    Returns:
        What was set.

    Raises:
        ValueError: for an unknown axis or scheme.

    Example:
        >>> from hp_mesh import init_device_mesh
        >>> from hp_mesh.testing import run_spmd
        >>> def seeds():
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     return seed_everything(mesh, 7, distinct=()).seed
        >>> run_spmd(seeds, world_size=2)
        [7, 7]
    """
    if scheme not in {"hash", "offset"}:
        msg = f"scheme={scheme!r} does not exist; choose 'hash' or 'offset'"
        raise ValueError(msg)
    place: dict[str, tuple[int, int]] = {}
    for name in distinct:
        mesh = _axis(dims, name)
        if mesh is not None and mesh.get_coordinate() is not None:
            place[name] = (mesh.get_local_rank(), mesh.size())
    derived = _derived(seed, place, scheme)
    torch.manual_seed(derived)
    python_random.seed(derived)
    seeded = ["torch", "random"]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(derived % (1 << 32))
        seeded.append("numpy")
    # For processes started from here; this one has hashed already.
    os.environ["PYTHONHASHSEED"] = str(derived % (1 << 32))
    whole = dims if isinstance(dims, DeviceMesh) else dims.get_mesh("dense")
    ranks = _alike(whole, distinct)
    agree(ranks)
    return SeedReport(seed, derived, MappingProxyType(place), scheme, tuple(seeded), ranks)
