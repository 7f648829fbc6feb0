"""All ways to run an operator on a mesh, for programs that plan.

The idea: what dispatch picks from, as plain data: for each way the placements of the tensor arguments and of the results,
over all axes of the mesh. A planner chooses by its own measure and writes the moves out; their price is that of
:func:`hp_dtensor.redistribute_plan`.

The rule: the list does not depend on how the arguments are laid out now. It is the product over axes of what the rule
says for one, left to right, where an axis sees the shapes that those before it leave; a tensor is never a sum in two
ways. Each way is right, and none raises: an operator that nothing is known about runs on replicas.

The design not taken: cost in the list. It belongs to a pair of layouts, and to the links of a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hp_mesh import DeviceMesh

from hp_dtensor.choice import everywhere, infer_outputs, options_on_axis
from hp_dtensor.placements import Placement
from hp_dtensor.rules import TensorMeta, find_rule

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["OpPlacements", "strategies"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class OpPlacements:
    """One way to run an operator on a mesh."""

    inputs: tuple[Placements, ...]
    """For each tensor argument, flattened in order (positional, then keyword), its placements."""
    outputs: tuple[Placements | None, ...]
    """For each result its placements; None for one that is no tensor."""
    input_metas: tuple[TensorMeta, ...]
    """Global shape, stride and dtype of each tensor argument."""
    output_metas: tuple[TensorMeta | None, ...]
    """Those of each result."""
    version: int = 1
    """The form of this type: raised when a field changes its meaning."""


def _metas(values: Sequence[object]) -> Iterator[TensorMeta]:
    for value in values:
        if isinstance(value, TensorMeta):
            yield value
        elif isinstance(value, torch.Tensor):
            yield TensorMeta.of(value)
        elif isinstance(value, list | tuple):
            yield from _metas(value)


def _as_tensors(value: object) -> object:
    """Descriptions as tensors on the meta device, so that they are found where tensors are."""
    if isinstance(value, TensorMeta):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_as_tensors(item) for item in value)
    return value


def strategies(
    op: OpOverload,
    *args: object,
    mesh: DeviceMesh | Sequence[int],
    at_most: int = 4096,
    **kwargs: object,
) -> tuple[OpPlacements, ...]:
    """Return the ways to run ``op(*args, **kwargs)`` on *mesh*.

    Args:
        op: An operator overload, such as ``torch.ops.aten.mm.default``.
        *args: Its arguments; for a tensor, a tensor of any kind or a `TensorMeta`. Only shapes, strides and dtypes count.
        mesh: The devices, or the sizes of the axes.
        at_most: How many are returned at most; the product over axes grows fast.
        **kwargs: Its keyword arguments, likewise.

    Example:
        >>> import torch
        >>> x = torch.empty(4, 6, device="meta")
        >>> for way in strategies(torch.ops.aten.relu.default, x, mesh=(2,)):
        ...     print(way.inputs, way.outputs)
        ((Shard(dim=0),),) ((Shard(dim=0),),)
        ((Shard(dim=1),),) ((Shard(dim=1),),)
        ((Replicate(),),) ((Replicate(),),)
    """
    sizes = tuple(mesh.shape) if isinstance(mesh, DeviceMesh) else tuple(mesh)
    metas = tuple(_metas([*args, *kwargs.values()]))
    given = [_as_tensors(value) for value in args]
    named = {name: _as_tensors(value) for name, value in kwargs.items()}
    result = infer_outputs(op, given, named, metas)
    flat = list(result) if isinstance(result, list | tuple) else [result]
    outputs = tuple(TensorMeta.of(v) if isinstance(v, torch.Tensor) else None for v in flat)
    found: list[OpPlacements] = []
    for chosen in _over_axes(op, given, named, metas, outputs, sizes):
        inputs, results = chosen
        found.append(OpPlacements(inputs, results, metas, outputs))
        if len(found) == at_most:
            break
    return tuple(found)


def _over_axes(
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    metas: tuple[TensorMeta, ...],
    outputs: tuple[TensorMeta | None, ...],
    sizes: tuple[int, ...],
) -> Iterator[tuple[tuple[Placements, ...], tuple[Placements | None, ...]]]:
    """Placements of arguments and results over all axes, one combination after the other."""
    rule = find_rule(op)
    start = [(*metas, *outputs)]
    none: tuple[Placements, ...] = tuple(() for _ in metas)
    empty: tuple[Placements | None, ...] = tuple(None if m is None else () for m in outputs)

    def walk(
        axis: int,
        left: Sequence[tuple[TensorMeta | None, ...]],
        inputs: tuple[Placements, ...],
        results: tuple[Placements | None, ...],
    ) -> Iterator[tuple[tuple[Placements, ...], tuple[Placements | None, ...]]]:
        if axis == len(sizes):
            yield inputs, results
            return
        options = options_on_axis(
            op, rule, args, kwargs, left, len(metas), sizes[axis], inputs, results
        )
        for strategy, after in (*options, everywhere(left, len(metas))):
            yield from walk(
                axis + 1,
                after,
                tuple((*a, b) for a, b in zip(inputs, strategy.inputs, strict=True)),
                tuple(
                    None if a is None or b is None else (*a, b)
                    for a, b in zip(results, strategy.outputs, strict=True)
                ),
            )

    yield from walk(0, start, none, empty)
