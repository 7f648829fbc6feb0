"""Carry a declaration out: lay out the state, and move what goes in and comes out.

The declaration belongs to a module and names the inputs of its forward; names that the forward does not have, states that
the module does not have and states that it does not declare are errors before anything is sent. Inputs and outputs may
be tuples, lists and dicts of tensors at any depth.

With a ``local_map`` the forward sees local tensors, its own parameters included; what the gradients of replicas are then
follows from what is cut over the axis, or is said. Leaving it open, as a bare ``to_local`` does, is how replicas drift.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from hp_dtensor import DTensor, Partial, Placement, Replicate, redistribute_local, to_local
from hp_dtensor.local import as_ours, own_piece
from hp_dtensor.placements import gradient_placements, normalize_placements, shard_dim
from hp_mesh import DeviceMesh
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp._torch import buffers_of, parameters_of
from hp_tp.boundary import layout_on, map_tensors
from hp_tp.errors import BoundaryError, PlanError
from hp_tp.local_states import local_states, owner_of
from hp_tp.placing import is_placed, place_state
from hp_tp.sharding import (
    LayoutLike,
    ShardingConfig,
    SpmdType,
    as_layout,
    is_layout,
    placements_on,
)
from hp_tp.style import ParallelStyle
from hp_tp.substitution import substitute

if TYPE_CHECKING:
    from torch import Tensor

    from hp_tp.substitution import Forward

__all__ = ["DeclaredParallel", "Meshes", "OneMesh", "apply_config"]

Placements = tuple[Placement, ...]


class Meshes(Protocol):
    """Which devices a layout is over, and what it does to each axis of them."""

    def find(self, layout: LayoutLike) -> tuple[DeviceMesh, Placements] | None:
        """The mesh and a placement for each of its axes; None when none of the axes is in use."""
        ...


@dataclass(frozen=True, slots=True)
class OneMesh:
    """All layouts are over one mesh."""

    mesh: DeviceMesh
    names: tuple[str, ...]
    """What layouts call its axes."""

    def find(self, layout: LayoutLike) -> tuple[DeviceMesh, Placements]:
        """The mesh, and a placement for each of its axes."""
        return self.mesh, placements_on(layout, self.mesh, self.names)


@dataclass(frozen=True, slots=True)
class _Value:
    """What one input or output is, and what it becomes."""

    mesh: DeviceMesh
    source: Placements | None
    target: Placements | None
    grad: Placements | None = None
    """How the gradients of a local result fit together; like the result when None."""
    local: bool = False
    field: str = "in_src_shardings"

    def move(self, value: object, where: str) -> object:
        """*value* with each tensor in it moved."""
        return map_tensors(lambda tensor: self._move(tensor, where), value)

    def _move(self, value: Tensor, where: str) -> Tensor:
        ndim = value.ndim
        source = _normal(self.source, self.mesh, ndim)
        target = _normal(self.target, self.mesh, ndim) or source
        grad = _normal(self.grad, self.mesh, ndim)
        held = layout_on(value, self.mesh, where)
        if held is None:
            return self._enter(value, source, target, grad, where)
        if source is not None and held != source:
            message = (
                f"{where} is a DTensor with placements {held}, but {self.field} expects {source}; redistribute it, or declare "
                "what it is"
            )
            raise BoundaryError(message)
        wanted = target or held
        if self.local:
            if held == wanted:
                return own_piece(value) if grad is None else to_local(value, grad_placements=grad)
            return redistribute_local(
                own_piece(value),
                self.mesh,
                held,
                wanted,
                shape=tuple(value.shape),
                grad_placements=grad,
            )
        ours = value if isinstance(value, DTensor) else as_ours(cast("TorchDTensor", value))
        return ours if held == wanted else ours.redistribute(self.mesh, wanted)

    def _enter(
        self,
        value: Tensor,
        source: Placements | None,
        target: Placements | None,
        grad: Placements | None,
        where: str,
    ) -> Tensor:
        if source is None or target is None:
            if self.target is None:
                return value
            message = (
                f"{where} is a plain tensor of shape {tuple(value.shape)} to be moved to {self.target}, and nothing says what "
                f"it is; declare it in {self.field}"
            )
            raise BoundaryError(message)
        if self.local:
            same = source == target and (grad is None or grad == gradient_placements(source))
            if same:
                return value
            return redistribute_local(value, self.mesh, source, target, grad_placements=grad)
        entered = DTensor.from_local(value, self.mesh, source)
        return entered if source == target else entered.redistribute(self.mesh, target)


def _normal(placements: Placements | None, mesh: DeviceMesh, ndim: int) -> Placements | None:
    return None if placements is None else normalize_placements(placements, mesh, ndim)


@dataclass(frozen=True, slots=True)
class _Each:
    """One entry for each output, in a container like theirs; None for what is left alone."""

    entries: tuple[tuple[int | str, _Value | _Each | None], ...]

    def move(self, value: object, where: str) -> object:
        """*value* with the tensors of each entry moved."""
        if isinstance(value, dict):
            given = dict(self.entries)
            missing = [key for key in given if key not in value]
            if missing:
                message = f"{where} is a dict without {missing[0]!r}, which its declaration names; it has {list(value)}"
                raise BoundaryError(message)
            return {
                key: _moved(given.get(key), item, f"{where}[{key!r}]")
                for key, item in value.items()
            }
        if not isinstance(value, (tuple, list)) or len(value) != len(self.entries):
            count = len(value) if isinstance(value, (tuple, list)) else 1
            message = (
                f"{where} has {count} entries and its declaration {len(self.entries)}; give one for each, None for what is "
                "left alone"
            )
            raise BoundaryError(message)
        items = [
            _moved(entry, item, f"{where}[{position}]")
            for position, (item, (_, entry)) in enumerate(zip(value, self.entries, strict=True))
        ]
        if isinstance(value, list):
            return items
        make = getattr(value, "_make", tuple)  # a named tuple is made from an iterable by this
        return cast("object", make(items))


def _moved(entry: _Value | _Each | None, value: object, where: str) -> object:
    return value if entry is None else entry.move(value, where)


@dataclass(frozen=True, slots=True)
class _Declared:
    """How a module with a declaration runs: a wrapper of its forward."""

    names: tuple[str, ...]
    """The forward's inputs that may be given by position."""
    inputs: Mapping[str, _Value]
    output: _Value | _Each | None
    states: Mapping[str, Placements | None]
    """In a local region the states that are swapped for their pieces, with how their gradients fit together."""
    use_local_output: bool

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        kind = type(module).__name__
        moved = [
            _moved(self.inputs.get(name), value, f"input {name!r} of {kind}")
            for name, value in zip(self.names, args, strict=False)
        ]
        named = {
            name: _moved(self.inputs.get(name), value, f"input {name!r} of {kind}")
            for name, value in kwargs.items()
        }
        with local_states(module, self.states):
            output = forward(module, *moved, *args[len(moved) :], **named)
        output = _moved(self.output, output, f"the output of {kind}")
        return map_tensors(to_local, output) if self.use_local_output else output

    def __hash__(self) -> int:
        return hash((self.names, tuple(self.inputs), tuple(self.states)))


def apply_config(
    module: nn.Module, config: ShardingConfig, meshes: Meshes, source: int | None
) -> None:
    """Lay out *module* as *config* declares.

    Raises:
        PlanError: for a name that the module or its forward lacks, an undeclared state, or a layout that does not fit.
    """
    plan = prepare_config(module, config, meshes)
    for path, mesh, placements in plan.states:
        owner, name = owner_of(module, path)
        place_state(owner, name, mesh, placements, source)
    if plan.wrapper is not None:
        substitute(module, plan.wrapper)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is left to do when a declaration has been checked against its module."""

    states: tuple[tuple[str, DeviceMesh, Placements], ...]
    wrapper: _Declared | None


def prepare_config(module: nn.Module, config: ShardingConfig, meshes: Meshes) -> _Prepared:
    """Check *config* against *module* and *meshes*; change nothing.

    Raises:
        PlanError: as :func:`apply_config` says.
    """
    states = _states(module, config, meshes)
    names, any_name = _signature(module)
    for given in ("in_src_shardings", "in_dst_shardings"):
        for name in getattr(config, given) or ():
            if name not in names and not any_name:
                near = get_close_matches(name, names, 1)
                message = (
                    f"{given} names {name!r}, which is no input of {type(module).__name__}.forward; its inputs are {list(names)}"
                    + (f". Did you mean {near[0]!r}?" if near else "")
                )
                raise PlanError(message)
    region = _Region(config, meshes, names)
    inputs = region.inputs()
    output = _outputs(config, meshes)
    grads = region.state_grads() if config.local_map is not None else {}
    idle = not inputs and output is None and not grads
    wrapper = None if idle else _Declared(names, inputs, output, grads, config.use_local_output)
    return _Prepared(states, wrapper)


def _states(
    module: nn.Module, config: ShardingConfig, meshes: Meshes
) -> tuple[tuple[str, DeviceMesh, Placements], ...]:
    """The states to lay out, each checked; those that are laid out so already are left out."""
    kind = type(module).__name__
    own = [
        name
        for name, state in (*parameters_of(module).items(), *buffers_of(module).items())
        if state is not None
    ]
    for name in own:
        if name not in config.state_shardings:
            message = (
                f"{kind}.{name} is not declared: state_shardings has {list(config.state_shardings)}. Each parameter and buffer "
                "of a module with a ShardingConfig needs a layout, Replicate() for one that is not cut"
            )
            raise PlanError(message)
    todo = []
    for path, layout in config.state_shardings.items():
        try:
            owner, name = owner_of(module, path)
        except AttributeError:
            owner, name = module, path
        known = (parameters_of(owner), buffers_of(owner))
        if not any(name in states for states in known):
            near = get_close_matches(path, [n for n, _ in module.named_parameters()] + own, 1)
            message = (
                f"state_shardings names {path!r}, which is no parameter or buffer of {kind}"
                + (f". Did you mean {near[0]!r}?" if near else f"; it has {own}")
            )
            raise PlanError(message)
        state: Tensor | None = known[0].get(name)
        if state is None:
            state = known[1].get(name)
        found = meshes.find(layout)
        if state is None or found is None:
            continue
        mesh, placements = found
        placements = _inert(placements, mesh)
        if not is_placed(owner, name, state, mesh, placements):
            todo.append((path, mesh, placements))
    return tuple(todo)


def _inert(placements: Placements, mesh: DeviceMesh) -> Placements:
    """Axes of size 1 cut nothing."""
    return tuple(
        Replicate() if mesh.size(axis) == 1 else placement
        for axis, placement in enumerate(placements)
    )


def _signature(module: nn.Module) -> tuple[tuple[str, ...], bool]:
    """The names of the forward's inputs, those by position first, and whether it takes any name."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = tuple(
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )
    named = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    return names + named, any(p.kind is p.VAR_KEYWORD for p in parameters)


@dataclass(frozen=True, slots=True)
class _Region:
    """The inputs of a module, and what is local in it."""

    config: ShardingConfig
    meshes: Meshes
    names: tuple[str, ...]
    cut: dict[tuple[DeviceMesh, int], bool] = field(default_factory=dict)

    def inputs(self) -> dict[str, _Value]:
        sources = self.config.in_src_shardings or {}
        targets = self.config.in_dst_shardings or {}
        local = self.config.local_map is not None
        made = {}
        for name in dict.fromkeys((*sources, *targets)):
            source, target = sources.get(name), targets.get(name)
            found = _find(self.meshes, source, target)
            if found is None:
                continue
            mesh, before, after = found
            grad = self._grad(name, target or source, mesh) if local else None
            made[name] = _Value(mesh, before, after, grad, local)
        return made

    def _grad(self, name: str, layout: LayoutLike | None, mesh: DeviceMesh) -> Placements | None:
        """How the gradients of the local input *name* fit together."""
        given = self.config.local_map.in_grad_placements if self.config.local_map else None
        if isinstance(given, Mapping):
            said = given.get(name)
        else:
            position = self.names.index(name) if name in self.names else len(given or ())
            said = given[position] if given is not None and position < len(given) else None
        if said is not None:
            found = self.meshes.find(said)
            return None if found is None else found[1]
        return None if layout is None else self._implied(layout, mesh)

    def _implied(self, layout: LayoutLike, mesh: DeviceMesh) -> Placements:
        """The gradient of replicas is a sum when something is cut over the axis, unless the layout says which it is."""
        found = self.meshes.find(layout)
        placements = () if found is None else found[1]
        types = as_layout(layout).axis_types
        names = _axis_names(self.meshes, mesh)
        return tuple(
            Partial()
            if placement.is_replicate()
            and mesh.size(axis) > 1
            and _is_addend(types, name, varies=name in self._varying())
            else Replicate()
            if placement.is_partial()
            else placement
            for axis, (placement, name) in enumerate(zip(placements, names, strict=True))
        )

    def _varying(self) -> set[str]:
        """The axes over which the ranks do different work: some input or state is cut, or the output is in parts."""
        config = self.config
        targets = {**(config.in_src_shardings or {}), **(config.in_dst_shardings or {})}
        layouts = [*config.state_shardings.values(), *targets.values()]
        layouts += _flat(config.out_src_shardings)
        return {
            axis
            for layout in layouts
            if layout is not None
            for axis, kind in as_layout(layout).per_axis_spmd_types().items()
            if kind in (SpmdType.P, SpmdType.V)
            or (isinstance(kind, Placement) and (shard_dim(kind) is not None or kind.is_partial()))
        }

    def state_grads(self) -> dict[str, Placements | None]:
        grads: dict[str, Placements | None] = {}
        for path, layout in self.config.state_shardings.items():
            found = self.meshes.find(layout)
            if found is not None:
                grads[path] = self._implied(layout, found[0])
        return grads


def _is_addend(types: Mapping[str, object], name: str, *, varies: bool) -> bool:
    kind = types.get(name, types.get("dp") if name.startswith("dp_") else None)
    if kind in (SpmdType.R, SpmdType.I):
        return kind is SpmdType.R
    return varies


def _axis_names(meshes: Meshes, mesh: DeviceMesh) -> tuple[str, ...]:
    if isinstance(meshes, OneMesh):
        return meshes.names
    return tuple(mesh.mesh_dim_names or ())


def _flat(layouts: object) -> list[LayoutLike]:
    """The layouts in a container of them."""
    if layouts is None:
        return []
    if is_layout(layouts):
        return [cast("LayoutLike", layouts)]
    items = layouts.values() if isinstance(layouts, Mapping) else cast("Sequence[object]", layouts)
    return [layout for item in items for layout in _flat(item)]


def _find(
    meshes: Meshes, source: LayoutLike | None, target: LayoutLike | None
) -> tuple[DeviceMesh, Placements | None, Placements | None] | None:
    """The one mesh of a pair of layouts, and what each says about it."""
    before = None if source is None else meshes.find(source)
    after = None if target is None else meshes.find(target)
    found = before or after
    if found is None:
        return None
    if before is not None and after is not None and before[0] != after[0]:
        message = (
            f"a value cannot move from {source} to {target}: these are layouts over different axes"
        )
        raise PlanError(message)
    return found[0], None if before is None else before[1], None if after is None else after[1]


def _outputs(config: ShardingConfig, meshes: Meshes) -> _Value | _Each | None:
    return _output(config.out_src_shardings, config.out_dst_shardings, meshes)


def _output(source: object, target: object, meshes: Meshes) -> _Value | _Each | None:
    shape = source if source is not None else target
    if shape is None:
        return None
    if is_layout(shape):
        if target is not None and not is_layout(target):
            message = f"out_src_shardings is one layout, and out_dst_shardings is {target!r:.80}; give both alike"
            raise PlanError(message)
        found = _find(meshes, cast("LayoutLike | None", source), cast("LayoutLike | None", target))
        if found is None:
            return None
        mesh, before, after = found
        return _Value(mesh, before, after, field="out_src_shardings")
    keys = _keys(shape)
    for other in (source, target):
        if other is not None and not is_layout(other) and _keys(other) != keys:
            message = f"out_src_shardings has entries {list(keys)} and out_dst_shardings {list(_keys(other))}; give both alike"
            raise PlanError(message)
    return _Each(
        tuple((key, _output(_entry(source, key), _entry(target, key), meshes)) for key in keys)
    )


def _keys(container: object) -> tuple[int | str, ...]:
    if isinstance(container, Mapping):
        return tuple(container)
    if isinstance(container, (tuple, list)):
        return tuple(range(len(container)))
    message = f"{container!r:.80} is neither a layout nor a tuple, list or dict of layouts"
    raise PlanError(message)


def _entry(container: object, key: int | str) -> object:
    if container is None or is_layout(container):
        return container
    return container[key]  # type: ignore[index]  # a container, as _keys has found


@dataclass(kw_only=True)
class DeclaredParallel(ParallelStyle):
    """Lay out a module as a :class:`ShardingConfig` declares: the declaration as a style, for a plan.

    Args:
        config: what the module's state, inputs and outputs are.
        axis: what the config calls the one axis that the style is applied on.

    Example:
        >>> from hp_dtensor import Shard
        >>> from hp_tp import DeclaredParallel, ShardingConfig
        >>> style = DeclaredParallel(
        ...     config=ShardingConfig(state_shardings={"bias": {"tp": Shard(0)}})
        ... )
    """

    lays_out: ClassVar[bool] = True
    config: ShardingConfig
    axis: str = "tp"

    def __hash__(self) -> int:
        return hash((self.axis, tuple(self.config.state_shardings)))

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse a declaration that does not fit the module."""
        prepare_config(module, self.config, OneMesh(device_mesh, (self.axis,)))

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Lay out the state, and move what goes in and comes out."""
        apply_config(module, self.config, OneMesh(device_mesh, (self.axis,)), self.src_data_rank)
        return module
