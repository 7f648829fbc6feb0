"""A module distributed by a plan: which layout each parameter, input and output has, by path.

HyperParallel's `ShardingPlan` and `shard_module`. Paths are exact: a name that is not there is an error, never searched
for further down, where the first match may be the wrong one. Parameters are cut from each rank's own copy, without
communication. Inputs and outputs that are distributed are moved; plain ones pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from hp_mesh import DeviceMesh
from torch import nn

from hp_dtensor._torch import TorchDTensor, tree_flatten, tree_unflatten
from hp_dtensor.custom_shard import is_one_layout
from hp_dtensor.distribute import distribute_tensor, like_parameter
from hp_dtensor.errors import LayoutError
from hp_dtensor.layout import PlacementsLike, resolve
from hp_dtensor.local import as_ours, to_local
from hp_dtensor.spec import spec_of

__all__ = ["ShardingPlan", "shard_module"]

Several: TypeAlias = Sequence[PlacementsLike | None] | Mapping[str, PlacementsLike | None]
"""Layouts of several values, by position or by name; None for one that stays as it is."""


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """What `shard_module` does to a module.

    A layout is placements, one for each mesh axis, or aliases in a tuple, one for each tensor dim. Several layouts stand
    in a list, or in a tuple of placement lists.

    Example:
        >>> from hp_dtensor import Replicate, Shard
        >>> plan = ShardingPlan(
        ...     plan={"weight": (Shard(0),)},
        ...     input_plan={"input": (Replicate(),)},
        ...     output_plan={"output": (Replicate(),)},
        ... )
        >>> sorted(plan.plan)
        ['weight']
    """

    plan: Mapping[str, PlacementsLike] | None = None
    """The layout of each parameter, by its path."""
    input_plan: Mapping[str, PlacementsLike | Several | None] | None = None
    """For ``"input"`` or ``"PATH.input"`` the layouts of what goes into that module: one for the first argument, a list by
    position, or a dictionary by parameter name."""
    output_plan: Mapping[str, PlacementsLike | Several | None] | None = None
    """For ``"output"`` or ``"PATH.output"`` the layouts of what comes out of it: one, or a list."""
    return_local_tensor: Sequence[str] | None = None
    """Paths of the modules whose outputs become local tensors; ``""`` is the module itself."""


def shard_module(
    model: nn.Module | Callable[..., object], device_mesh: DeviceMesh, sharding_plan: ShardingPlan
) -> nn.Module | Callable[..., object]:
    """Distribute the parameters of *model*, and move what goes in and comes out, as *sharding_plan* says.

    Args:
        model: changed in place. A plain function is wrapped instead, and may have inputs and outputs only.
        device_mesh: the devices.
        sharding_plan: the plan; all of it is checked before anything is changed.

    Returns:
        *model*, or the wrapped function.

    Raises:
        TypeError: when the plan, or one of its tables, is of another type.
        LayoutError: (a `ValueError`) for a path that is not there, a parameter that is distributed already, a key that
            ends otherwise, or a number of layouts that differs from the number of values.
        KeyError: for a path in *return_local_tensor* that is not there.
    """
    _check_types(sharding_plan)
    mesh = DeviceMesh.from_torch(device_mesh)
    inputs = _by_path(sharding_plan.input_plan, "input")
    outputs = _by_path(sharding_plan.output_plan, "output")
    local = tuple(path.removeprefix("self.") for path in sharding_plan.return_local_tensor or ())
    if not isinstance(model, nn.Module):
        return _wrapped(model, mesh, sharding_plan, inputs, outputs, local)
    modules = dict(model.named_modules())
    for path in (*inputs, *outputs):
        if path not in modules:
            msg = f"there is no submodule {path!r} for the plan's inputs or outputs; there are {_some(modules)}"
            raise LayoutError(msg)
    for path in local:
        if path not in modules:
            msg = f"return_local_tensor names {path!r}, but the submodules are {_some(modules)}"
            raise KeyError(msg)
    _shard_parameters(model, mesh, sharding_plan.plan or {})
    for path, layouts in inputs.items():
        modules[path].register_forward_pre_hook(
            functools.partial(_move_inputs, mesh, layouts), with_kwargs=True
        )
    for path, layouts in outputs.items():
        modules[path].register_forward_hook(functools.partial(_move_outputs, mesh, path, layouts))
    for path in local:
        modules[path].register_forward_hook(lambda _module, _args, output: _localized(output))
    return model


def _check_types(plan: object) -> None:
    if not isinstance(plan, ShardingPlan):
        msg = f"sharding_plan is a {type(plan).__name__}; give a ShardingPlan"
        raise TypeError(msg)
    for name in ("plan", "input_plan", "output_plan"):
        table = getattr(plan, name)
        if table is not None and not isinstance(table, Mapping):
            msg = f"ShardingPlan.{name} is a {type(table).__name__}; give a dictionary by path"
            raise TypeError(msg)


def _some(modules: Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in list(modules)[:8]) + (
        ", ..." if len(modules) > 8 else ""
    )


def _by_path(table: Mapping[str, object] | None, ending: str) -> dict[str, object]:
    """The layouts by the path of the module; the ending that says what they are of is taken off."""
    out: dict[str, object] = {}
    for key, layouts in (table or {}).items():
        path, _, last = key.removeprefix("self.").rpartition(".")
        if last != ending:
            msg = f"{key!r} in {ending}_plan does not end in {ending!r}; keys are {ending!r} and 'PATH.{ending}'"
            raise LayoutError(msg)
        if layouts is not None:
            out[path] = layouts
    return out


def _shard_parameters(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, PlacementsLike]
) -> None:
    found = dict(model.named_parameters(remove_duplicate=False))
    wanted = {path.removeprefix("self."): layout for path, layout in plan.items()}
    for path, layout in wanted.items():
        if path not in found:
            msg = f"there is no parameter {path!r}; there are {_some(found)}"
            raise LayoutError(msg)
        spec = spec_of(found[path])
        if spec is not None:
            msg = f"parameter {path!r} is distributed already, as {spec.placements}"
            raise LayoutError(msg)
        resolve(layout, mesh, found[path].ndim)
    made: dict[int, nn.Parameter] = {}
    for path, layout in wanted.items():
        old = found[path]
        whole = distribute_tensor(old.detach(), mesh, layout, src_data_rank=None)
        made[id(old)] = like_parameter(old, whole)
    for path, old in found.items():
        if id(old) in made:  # tied ones, too, whatever their path
            owner, _, name = path.rpartition(".")
            model.get_submodule(owner).register_parameter(name, made[id(old)])


def _moved(value: object, mesh: DeviceMesh, layout: object) -> object:
    if layout is None or not isinstance(value, TorchDTensor):
        return value
    ours = as_ours(value)
    return ours.redistribute(mesh, resolve(cast("PlacementsLike", layout), mesh, ours.ndim))


def _move_inputs(
    mesh: DeviceMesh,
    layouts: object,
    module: nn.Module | Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    function = module.forward if isinstance(module, nn.Module) else module
    if isinstance(layouts, Mapping):
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
        unknown = set(layouts) - set(inspect.signature(function).parameters)
        if unknown:
            msg = f"the input plan names {sorted(unknown)}, which are no parameters of forward{inspect.signature(function)}"
            raise LayoutError(msg)
        for name, layout in layouts.items():
            if name in bound.arguments:
                bound.arguments[name] = _moved(bound.arguments[name], mesh, layout)
        return bound.args, bound.kwargs
    several = [layouts] if is_one_layout(layouts) else list(cast("Sequence[object]", layouts))
    names = list(inspect.signature(function).parameters)
    if len(several) > max(len(args) + len(kwargs), len(names)):
        msg = f"the input plan has {len(several)} layouts, but forward takes {names}"
        raise LayoutError(msg)
    moved = list(args)
    for position, layout in enumerate(several):
        if position < len(args):
            moved[position] = _moved(args[position], mesh, layout)
        elif position < len(names) and names[position] in kwargs:
            kwargs = {**kwargs, names[position]: _moved(kwargs[names[position]], mesh, layout)}
    return tuple(moved), kwargs


def _move_outputs(
    mesh: DeviceMesh, path: str, layouts: object, _module: object, _args: object, output: object
) -> object:
    several = isinstance(output, (tuple, list))
    values = list(cast("Sequence[object]", output)) if several else [output]
    wanted = [layouts] if is_one_layout(layouts) else list(cast("Sequence[object]", layouts))
    if len(values) != len(wanted):
        msg = f"module {path!r} gave {len(values)} outputs, but its output plan has {len(wanted)} layouts; give one for each"
        raise LayoutError(msg)
    moved = [_moved(value, mesh, layout) for value, layout in zip(values, wanted, strict=True)]
    if not several:
        return moved[0]
    return moved if isinstance(output, list) else tuple(moved)


def _localized(output: object) -> object:
    leaves, tree = tree_flatten(output)
    return tree_unflatten(
        [to_local(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree
    )


def _wrapped(
    function: Callable[..., object],
    mesh: DeviceMesh,
    plan: ShardingPlan,
    inputs: Mapping[str, object],
    outputs: Mapping[str, object],
    local: Sequence[str],
) -> Callable[..., object]:
    if plan.plan or set(inputs) | set(outputs) | set(local) > {""}:
        msg = "a plain function has no parameters and no submodules: its plan may have the keys 'input' and 'output' only"
        raise LayoutError(msg)

    @functools.wraps(function)
    def wrapped(*args: object, **kwargs: object) -> object:
        if "" in inputs:
            args, kwargs = _move_inputs(mesh, inputs[""], function, args, kwargs)
        output = function(*args, **kwargs)
        if "" in outputs:
            output = _move_outputs(mesh, "", outputs[""], None, None, output)
        return _localized(output) if "" in local else output

    return wrapped
