"""From plain parameters to laid-out ones, in place.

The rule: a parameter that is laid out already must be laid out as asked, and then stays the same object; that is how a
tied weight stays tied when both of its modules have a style. All parameters of a module are checked before the first of
them is sent anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from hp_dtensor import Placement, Replicate, distribute_tensor
from hp_dtensor.distribute import like_parameter
from hp_dtensor.layout import resolve
from hp_dtensor.spec import spec_of
from hp_mesh import DeviceMesh
from torch import nn

from hp_tp._torch import buffers_of, parameters_of
from hp_tp.errors import PlanError
from hp_tp.substitution import enroll

__all__ = ["is_placed", "place", "place_state", "replicate", "tie"]


def place(
    module: nn.Module, mesh: DeviceMesh, layouts: Mapping[str, Placement], source: int | None
) -> None:
    """Lay out the named parameters of *module*, each over the one axis of *mesh*; a parameter that is None stays so.

    Raises:
        PlanError: when a parameter is laid out in another way, or on another mesh.
    """
    todo: list[tuple[str, Placement]] = []
    for name, placement in layouts.items():
        parameter = parameters_of(module).get(name)
        if parameter is not None and not is_placed(module, name, parameter, mesh, (placement,)):
            todo.append((name, placement))
    for name, placement in todo:
        place_state(module, name, mesh, (placement,), source)


def place_state(
    module: nn.Module,
    name: str,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    source: int | None,
) -> None:
    """Lay out one parameter or buffer of *module*, which is not laid out yet."""
    parameter = parameters_of(module).get(name)
    if parameter is not None:
        data = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=source)
        tie(module, name, like_parameter(parameter, data))
        return
    buffer = buffers_of(module).get(name)
    if buffer is not None:
        buffers_of(module)[name] = distribute_tensor(
            buffer.detach(), mesh, placements, src_data_rank=source
        )


def tie(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Let the parameter *name* of *module* be the distributed *parameter*, which other modules may have as well."""
    enroll(module)
    module.register_parameter(name, parameter)


def is_placed(
    module: nn.Module,
    name: str,
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
) -> bool:
    """Whether the state *name* of *module* is laid out so; False for a plain one.

    Raises:
        PlanError: when it is laid out in another way, or on another mesh.
    """
    spec = spec_of(tensor)
    wanted = resolve(placements, mesh, tensor.ndim)
    if spec is None:
        return False
    if spec.mesh == mesh and spec.placements == wanted:
        return True
    message = (
        f"{type(module).__name__}.{name} is laid out as {spec.placements} on {spec.mesh} already, and would have to be "
        f"{wanted} on {mesh}. If it is tied to a parameter of another module, give both the same layout (for an embedding "
        "and an output projection: RowwiseParallel for the embedding and ColwiseParallel for the projection); otherwise "
        "apply one style to each module, before fully_shard."
    )
    raise PlanError(message)


def replicate(module: nn.Module, mesh: DeviceMesh, source: int | None) -> None:
    """Lay out every parameter and buffer of *module* and below as replicas."""
    tied: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(parameters_of(child).items()):
            if parameter is None:
                continue
            if parameter in tied:
                tie(child, name, tied[parameter])
                continue
            place(child, mesh, {name: Replicate()}, source)
            tied[parameter] = getattr(child, name)
        for name, buffer in list(buffers_of(child).items()):
            if buffer is not None and not is_placed(child, name, buffer, mesh, (Replicate(),)):
                place_state(child, name, mesh, (Replicate(),), source)
