"""Modules that say how they are laid out, and one call that does it.

A module with a ``sharding_config`` is laid out by it; no base class is asked for, and a model can be declared from outside
by paths just as well. All declarations are read against the model and the mesh before the first tensor is sent, children
before parents. Tied parameters stay tied, and must be declared alike.

Not taken: wrapping ``forward`` on the instance, which hides it from copies and pickles and from what exchanges the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, cast

from hp_mesh import DeviceMesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp._torch import buffers_of, parameters_of
from hp_tp.conversion import style_of_config
from hp_tp.declared import (
    DeclaredParallel,
    Meshes,
    OneMesh,
    Placements,
    apply_config,
    prepare_config,
)
from hp_tp.errors import PlanError
from hp_tp.placing import tie
from hp_tp.plan import match_plan
from hp_tp.sharding import LayoutLike, ShardingConfig, as_layout, placements_on
from hp_tp.substitution import original_class, restore

__all__ = ["Module", "parallelize", "unparallelize"]

_DONE = "_parallelized"
_MODEL_AXES = ("tp", "ep", "etp")


class Dims(Protocol):
    """Where meshes come from: :class:`hp_mesh.ParallelDims`, or what has this method of it."""

    @property
    def degrees(self) -> Mapping[str, int]:
        """The size of every axis, outermost first."""
        ...

    def get_activated_mesh(self, dims: Sequence[str]) -> DeviceMesh | None:
        """The mesh of those of the axes that are enabled; None when none is."""
        ...


@dataclass(frozen=True, slots=True)
class _ManyMeshes:
    """Each layout is over those of its axes that are enabled and count."""

    dims: Dims
    axes: tuple[str, ...]

    def find(self, layout: LayoutLike) -> tuple[DeviceMesh, Placements] | None:
        declared = as_layout(layout).axes()
        names = [
            name
            for name in self.dims.degrees
            if name in self.axes
            and (name in declared or (name.startswith("dp_") and "dp" in declared))
        ]
        mesh = self.dims.get_activated_mesh(names) if names else None
        if mesh is None:
            return None
        return mesh, placements_on(layout, mesh, mesh.mesh_dim_names or ())


def parallelize(
    module: nn.Module,
    parallel_dims: TorchMesh | Dims,
    *,
    configs: Mapping[str, ShardingConfig] | None = None,
    axes: Sequence[str] = _MODEL_AXES,
    strict: bool = False,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Lay *module* out as it and the modules below it declare, in place; return it.

    A module declares itself by an attribute ``sharding_config``.

    Args:
        module: the model. Modules without a declaration are left as they are.
        parallel_dims: a mesh with named axes, which all layouts are then over; or a :class:`hp_mesh.ParallelDims`, and then
            each layout is over the axes that it declares, are enabled and are among *axes*.
        configs: declarations by path, as in a plan, for modules that have none or another.
        axes: which axes of a ``ParallelDims`` count; the others are for somebody else, such as FSDP.
        strict: whether every parameter of the model must be declared.
        src_data_rank: the group rank whose values count; None when each rank cuts its own, and nothing is sent.

    Raises:
        PlanError: (a ``ValueError``) for a module that is laid out already, a name that a module or its forward lacks, an
            undeclared state, or tied parameters that are declared in two ways. Nothing has changed then.

    Example:
        >>> from hp_dtensor import Replicate, Shard
        >>> from hp_tp import ShardingConfig, parallelize
        >>> rows = {"weight": {"tp": Shard(0)}, "bias": {"tp": Shard(0)}}
        >>> def lay_out(model, mesh):
        ...     model.up.sharding_config = ShardingConfig(
        ...         state_shardings=rows,
        ...         in_src_shardings={"input": {"tp": Replicate()}},
        ...         out_dst_shardings={"tp": Replicate()},
        ...     )
        ...     return parallelize(model, mesh["tp"])
    """
    meshes = _meshes(parallel_dims, tuple(axes))
    found = _declarations(module, configs or {})
    _check(module, found, meshes, strict=strict)
    for path, config in reversed(found.items()):
        child = module.get_submodule(path)
        before = _states(module)
        _apply(child, config, meshes, src_data_rank)
        child.__dict__[_DONE] = True
        _tie(before)
    return module


def _meshes(given: TorchMesh | Dims, axes: tuple[str, ...]) -> Meshes:
    if not isinstance(given, TorchMesh):
        return _ManyMeshes(given, axes)
    mesh = DeviceMesh.from_torch(given)
    if mesh.mesh_dim_names is None:
        message = f"declarations speak of axes by name, and this mesh has no names: {mesh}"
        raise PlanError(message)
    return OneMesh(mesh, mesh.mesh_dim_names)


def _declarations(
    module: nn.Module, configs: Mapping[str, ShardingConfig]
) -> dict[str, ShardingConfig]:
    """The declaration of each module that has one, parents first."""
    plan = {path: DeclaredParallel(config=config) for path, config in configs.items()}
    given = {
        match.path: cast("DeclaredParallel", match.style).config
        for match in match_plan(module, plan)
    }
    found = {}
    for path, child in module.named_modules():
        config = given.get(path, getattr(child, "sharding_config", None))
        if config is None:
            continue
        if not isinstance(config, ShardingConfig):
            message = f"{path or type(child).__name__}.sharding_config is {config!r:.80}; it should be a ShardingConfig or None"
            raise TypeError(message)
        if _DONE in child.__dict__:
            message = (
                f"{path or type(child).__name__!r} has been laid out by parallelize already; a module is laid out once. Call "
                "unparallelize first, or build the model again"
            )
            raise PlanError(message)
        found[path] = config
    return found


def _check(
    module: nn.Module, found: Mapping[str, ShardingConfig], meshes: Meshes, *, strict: bool
) -> None:
    """Read each declaration against its module, and those of tied parameters against each other."""
    laid_out: dict[int, tuple[str, DeviceMesh, Placements]] = {}
    declared: set[int] = set()
    for path, config in found.items():
        child = module.get_submodule(path)
        prepared = prepare_config(child, config, meshes)
        for name in config.state_shardings:
            owner = child.get_submodule(name.rpartition(".")[0])
            declared.add(id(parameters_of(owner).get(name.rpartition(".")[2])))
        for name, mesh, placements in prepared.states:
            full = f"{path}.{name}" if path else name
            owner = child.get_submodule(name.rpartition(".")[0])
            state = parameters_of(owner).get(name.rpartition(".")[2])
            if state is None:
                continue
            before = laid_out.setdefault(id(state), (full, mesh, placements))
            if before[1:] != (mesh, placements):
                message = (
                    f"{before[0]!r} and {full!r} are one tied parameter, declared as {before[2]} and as {placements}; give both "
                    "the same layout"
                )
                raise PlanError(message)
    missing = [name for name, p in module.named_parameters() if id(p) not in declared]
    if strict and missing:
        message = (
            f"these parameters are in no ShardingConfig: {', '.join(missing)}. Declare them (Replicate() for those that are "
            "not cut), or pass strict=False to leave them as they are"
        )
        raise PlanError(message)


def _apply(module: nn.Module, config: ShardingConfig, meshes: Meshes, source: int | None) -> None:
    """Carry one declaration out, by a style that computes on local tensors where there is one."""
    layouts = [meshes.find(layout) for layout in config.state_shardings.values()]
    over = [found[0] for found in layouts if found is not None]
    if over and over[0].ndim == 1 and all(mesh == over[0] for mesh in over):
        (axis,) = over[0].mesh_dim_names or ("",)
        style = style_of_config(original_class(module), config, axis)
        if not isinstance(style, DeclaredParallel):
            style.src_data_rank = source
            style.apply(module, over[0])
            return
    apply_config(module, config, meshes, source)


def _states(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in parameters_of(owner).items()
        if parameter is not None
    ]


def _tie(before: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Give every place that shared a parameter the one that has replaced it."""
    changed = {
        old: new
        for owner, name, old in before
        if (new := parameters_of(owner).get(name)) is not None and new is not old
    }
    for owner, name, old in before:
        if old in changed:
            tie(owner, name, changed[old])


def unparallelize(module: nn.Module) -> nn.Module:
    """Make *module* the single-device one again, in place; return it. Call it on every rank.

    Parameters and buffers become whole and plain, forwards what they were, and ties stay. It undoes
    :func:`parallelize` and :func:`parallelize_module`, before ``fully_shard`` or a compiler has taken over.

    Example:
        >>> from hp_tp import unparallelize
        >>> from torch import nn
        >>> unparallelize(nn.Linear(2, 2))
        Linear(in_features=2, out_features=2, bias=True)
    """
    whole: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        restore(owner)
        owner.__dict__.pop(_DONE, None)
        for name, parameter in parameters_of(owner).items():
            if parameter is None:
                continue
            data = _whole(parameter.detach()) if id(parameter) not in whole else None
            if data is not None:
                whole[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
            if id(parameter) in whole:
                parameters_of(owner)[name] = whole[id(parameter)]
        for name, buffer in buffers_of(owner).items():
            data = None if buffer is None else _whole(buffer.detach())
            if data is not None:
                buffers_of(owner)[name] = data
    return module


def _whole(tensor: Tensor) -> Tensor | None:
    """The whole of a distributed tensor; None for a plain one, which stays."""
    return tensor.full_tensor() if isinstance(tensor, TorchDTensor) else None


class Module(nn.Module):
    """An ``nn.Module`` that can declare and lay out itself; any other with a ``sharding_config`` is laid out alike.

    Example:
        >>> from hp_tp import Module
        >>> class Head(Module):
        ...     def forward(self, x):
        ...         return x
        >>> Head().sharding_config is None
        True
    """

    sharding_config: ShardingConfig | None = None
    """How this module is laid out; None leaves it as it is."""

    def parallelize(
        self,
        parallel_dims: TorchMesh | Dims,
        *,
        axes: Sequence[str] = _MODEL_AXES,
        strict: bool = False,
        src_data_rank: int | None = 0,
    ) -> Self:
        """Lay out this module and those below it as they declare; see :func:`parallelize`."""
        parallelize(self, parallel_dims, axes=axes, strict=strict, src_data_rank=src_data_rank)
        return self

    def unparallelize(self) -> Self:
        """Undo it; see :func:`unparallelize`."""
        unparallelize(self)
        return self
