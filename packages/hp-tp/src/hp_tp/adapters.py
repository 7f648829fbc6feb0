"""Low-rank adapters beside layers that a plan cuts.

An adapter adds ``B(A(x))`` to a layer, with a narrow value between its two. Beside a column-parallel layer ``A`` is whole and
``B`` is cut by outputs like the layer; beside a row-parallel one ``A`` is cut by inputs, its narrow output is added up over the
ranks, and ``B`` is whole. So the ranks exchange what is narrow, and outputs add up layout by layout.

Only the plan changes. The parts are found by their names, which are those of the peft library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hp_dtensor import Replicate
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

from hp_tp.errors import PlanError
from hp_tp.plan import Match, ParallelPlan, match_plan
from hp_tp.prepare import PrepareModuleInput
from hp_tp.replicas import LocalReplicas
from hp_tp.style import CombinedParallel, ParallelStyle
from hp_tp.tensor_parallel import ColwiseParallel, RowwiseParallel

__all__ = ["adapter_plan"]

_BASE, _DOWN, _UP = "base_layer", "lora_A", "lora_B"


def adapter_plan(model: nn.Module, plan: ParallelPlan) -> dict[str, TorchStyle]:
    """Return *plan* for a model whose layers have low-rank adapters.

    Args:
        model: the model with adapters: modules with ``base_layer``, ``lora_A`` and ``lora_B``, the last two linear layers or
            dicts of them.
        plan: the plan of the model without.

    Raises:
        PlanError: for a layer with an adapter whose style is neither column- nor row-parallel.
        UnmatchedKeyError: for keys that match nothing.

    Example:
        >>> from hp_tp import ColwiseParallel, adapter_plan
        >>> from torch import nn
        >>> low_rank = {"lora_A": nn.Linear(4, 2), "lora_B": nn.Linear(2, 4)}
        >>> model = nn.ModuleDict(
        ...     {"up": nn.ModuleDict({"base_layer": nn.Linear(4, 4), **low_rank})}
        ... )
        >>> list(adapter_plan(model, {"up": ColwiseParallel()}))
        ['up.base_layer', 'up.lora_A', 'up.lora_B']
    """
    adapted: dict[str, TorchStyle] = {}
    for match in match_plan(model, plan):
        children = dict(match.module.named_children())
        if {_BASE, _DOWN, _UP} <= children.keys():
            adapted.update(_entries(match))
        else:
            adapted[match.path] = match.style
    return adapted


def _entries(match: Match) -> Iterator[tuple[str, TorchStyle]]:
    style = match.style
    yield f"{match.path}.{_BASE}", style
    if isinstance(style, ColwiseParallel) and style.blocks == 1 and style.fused is None:
        down: TorchStyle = CombinedParallel(styles=(LocalReplicas(alike=True), _whole(style)))
        up: TorchStyle = replace(style, input_layouts=None)
    elif isinstance(style, RowwiseParallel):
        cut = style.output_layouts is not None and not style.output_layouts.is_replicate()
        down = replace(style, use_local_output=True)
        up = LocalReplicas(alike=not cut)
        if not style.use_local_output:
            message = f"{match.path!r} has an adapter and use_local_output=False; adapters add plain tensors"
            raise PlanError(message)
    else:
        message = (
            f"{match.path!r} has an adapter, and its style is {type(style).__name__}; adapters go beside column-parallel layers "
            "in one block and row-parallel ones"
        )
        raise PlanError(message)
    for name, own in ((_DOWN, down), (_UP, up)):
        for path in _layers(match.module, name):
            yield f"{match.path}.{path}", own


def _whole(style: ColwiseParallel) -> ParallelStyle:
    """Make the input that a column-parallel layer takes whole and plain; a DTensor says itself what it is, as to the layer."""
    label = style.input_layouts or Replicate()
    return PrepareModuleInput(
        input_layouts=label, desired_input_layouts=Replicate(), use_local_output=True
    )


def _layers(module: nn.Module, name: str) -> Iterator[str]:
    child = module.get_submodule(name)
    if isinstance(child, nn.Linear):
        yield name
    else:
        for key, below in child.named_children():
            if isinstance(below, nn.Linear):
                yield f"{name}.{key}"
