"""What a plan will do to a model, told without devices: a dry run on the meta device.

The plan is applied to a copy of the model that has shapes and no data, so the report shows what *is* laid out, by any style
of anybody, rather than what styles say they do. With inputs a step is run as well, over a world of ranks that do not
communicate, and its collectives are counted.

Not taken: reading layouts off the styles. It needs a description of each style beside its code, and the two would differ.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from hp_dtensor import CommDebugMode
from hp_dtensor.spec import spec_of
from hp_mesh import DeviceMesh, init_device_mesh
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

from hp_tp._torch import buffers_of, parameters_of, start_fake_world
from hp_tp.errors import PlanError
from hp_tp.hugging_face import hugging_face_plan
from hp_tp.plan import ParallelPlan, match_plan, parallelize_module
from hp_tp.presets import llama_plan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CollectiveRow", "PlanReport", "StateRow", "plan_report"]


@dataclass(frozen=True, slots=True)
class StateRow:
    """One parameter or buffer."""

    name: str
    """Its first name in the model."""
    also: tuple[str, ...]
    """Its other names, when it is tied."""
    style: str
    """The style of the module that owns it or of the nearest one around that; empty without one."""
    shape: tuple[int, ...]
    """The whole shape."""
    placement: str
    """How it is laid out; ``plain`` when it is not."""
    whole_bytes: int
    """Bytes of the whole."""
    rank_bytes: int
    """Bytes on rank 0, which holds the largest piece."""
    buffer: bool
    """Whether it is a buffer."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """The collectives of one kind in one step."""

    op: str
    """What torch calls it."""
    backward: bool
    """Whether it runs in the backward."""
    count: int
    """How many."""
    wire_bytes: int
    """Bytes that a rank sends for all of them."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a plan does to a model; ``print`` shows it as a table."""

    degree: int
    """The number of ranks."""
    states: tuple[StateRow, ...]
    """Parameters and buffers, in the model's order."""
    unmatched: tuple[str, ...]
    """Keys of the plan that name no module."""
    collectives: tuple[CollectiveRow, ...] | None
    """The collectives of a step; None when no inputs were given."""

    @property
    def whole_bytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(row.whole_bytes for row in self.states)

    @property
    def rank_bytes(self) -> int:
        """Bytes of them on one rank."""
        return sum(row.rank_bytes for row in self.states)

    @property
    def plain(self) -> tuple[str, ...]:
        """Names of the parameters that no style lays out."""
        return tuple(
            row.name for row in self.states if row.placement == "plain" and not row.buffer
        )

    def to_json(self) -> str:
        """The report as JSON, with the totals."""
        totals = {
            "whole_bytes": self.whole_bytes,
            "rank_bytes": self.rank_bytes,
            "plain": self.plain,
        }
        return json.dumps(asdict(self) | totals, indent=2)

    def __str__(self) -> str:
        header = ("name", "style", "shape", "placement", "bytes", "bytes/rank")
        rows = [
            (
                " = ".join((row.name, *row.also)),
                row.style,
                "x".join(map(str, row.shape)),
                row.placement,
                f"{row.whole_bytes:,}",
                f"{row.rank_bytes:,}",
            )
            for row in self.states
        ]
        total = ("total", "", "", "", f"{self.whole_bytes:,}", f"{self.rank_bytes:,}")
        parts = [f"{self.degree} ranks", *_table([header, *rows, total])]
        if self.plain:
            parts.append(f"not laid out: {', '.join(self.plain)}")
        if self.unmatched:
            parts.append(f"keys that match nothing: {', '.join(self.unmatched)}")
        if self.collectives is not None:
            lines = [
                (
                    row.op,
                    "backward" if row.backward else "forward",
                    str(row.count),
                    f"{row.wire_bytes:,}",
                )
                for row in self.collectives
            ]
            parts += ["", *_table([("collective", "in", "count", "bytes sent"), *lines])]
        return "\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def plan_report(
    model: nn.Module,
    plan: TorchStyle | ParallelPlan,
    degree: int,
    *,
    inputs: Sequence[object] | None = None,
) -> PlanReport:
    """Say what *plan* does to *model* on *degree* ranks, without devices and without changing it.

    Args:
        model: on any device; one on the meta device needs no memory.
        plan: as for :func:`hp_tp.parallelize_module`.
        degree: the number of ranks.
        inputs: what to call the model with, to count the collectives of a step; tensors on any device. The process must not
            have initialised ``torch.distributed``, since a world of ranks that do not communicate is made for the run.

    Raises:
        PlanError: for a plan that conflicts, as ``parallelize_module`` raises; or with *inputs* when there is a world.

    Example:
        >>> from hp_tp import ColwiseParallel, RowwiseParallel, plan_report
        >>> from torch import nn
        >>> model = nn.Sequential(
        ...     nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)
        ... )
        >>> report = plan_report(model, {"0": ColwiseParallel(), "2": RowwiseParallel()}, 2)
        >>> report.whole_bytes, report.rank_bytes, report.plain
        (256, 128, ())
        >>> print(report)
        2 ranks
        name      style            shape  placement  bytes  bytes/rank
        0.weight  ColwiseParallel  8x4    S(0)       128    64
        2.weight  RowwiseParallel  4x8    S(1)       128    64
        total                                        256    128
    """
    matched = match_plan(model, plan, unmatched="ignore")
    styles = {match.path: type(match.style).__name__ for match in matched}
    missing = () if not isinstance(plan, Mapping) else _unmatched(plan, {m.key for m in matched})
    shadow = copy.deepcopy(model, _meta_memo(model))
    if inputs is None:
        mesh = DeviceMesh(
            "cpu", list(range(degree)), mesh_dim_names=("tp",), _init_backend=False, _rank=0
        )
        laid_out = parallelize_module(shadow, mesh, plan, src_data_rank=None, unmatched="ignore")
        return PlanReport(degree, tuple(_states(laid_out, styles)), missing, None)
    if dist.is_initialized():
        message = (
            "plan_report counts collectives in a world of its own, and this process has one already; call it in another "
            "process, or without inputs"
        )
        raise PlanError(message)
    start_fake_world(degree)
    try:
        mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
        laid_out = parallelize_module(shadow, mesh, plan, src_data_rank=None, unmatched="ignore")
        rows = _collectives(laid_out, inputs)
        return PlanReport(degree, tuple(_states(laid_out, styles)), missing, rows)
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of a model and a plan that are named on the command line; 1 when a key matches nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m hp_tp.plan",
        description="Show what a tensor-parallel plan does to a model, without devices.",
    )
    parser.add_argument(
        "model",
        help="module:function that makes the model, which runs on the meta device; or the config of a Hugging Face model: a "
        "folder, a file, or a name that is in the local cache",
    )
    parser.add_argument(
        "--plan",
        help="module:name of a plan, or of a function of the model that makes one; by default llama_plan, "
        "or the tp_plan of a Hugging Face model",
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="cut the sequence between sub-layers, when the plan is the model's own",
    )
    parser.add_argument("--degree", type=int, default=2, help="the number of ranks")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        metavar=("BATCH", "LENGTH"),
        help="run a step on token ids, and count collectives",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    sys.path.insert(0, "")
    own = Path(given.model).exists() or ":" not in given.model
    with torch.device("meta"):
        model = _from_config(given.model) if own else pkgutil.resolve_name(given.model)()
    if given.plan is not None:
        plan = pkgutil.resolve_name(given.plan)
        if not isinstance(plan, (Mapping, TorchStyle)):
            plan = plan(model)
    elif own:
        plan = hugging_face_plan(model, sequence_parallel=given.sequence_parallel)
    else:
        plan = llama_plan(model)
    inputs = None if given.tokens is None else [torch.zeros(given.tokens, dtype=torch.long)]
    report = plan_report(model, plan, given.degree, inputs=inputs)
    print(report.to_json() if given.json else report)  # noqa: T201  # what a command is for
    return 1 if report.unmatched else 0


def _from_config(name: str) -> nn.Module:
    """The causal language model (or else the base model) of a Hugging Face config on disk."""
    library = importlib.import_module("transformers")
    config = library.AutoConfig.from_pretrained(name, local_files_only=True)
    try:
        model = library.AutoModelForCausalLM.from_config(config)
    except ValueError:  # a model that does not generate text
        model = library.AutoModel.from_config(config)
    return cast("nn.Module", model)


def _unmatched(plan: ParallelPlan, found: set[str]) -> tuple[str, ...]:
    """The keys of *plan* that are in no match; a nested plan counts when something below it matched."""
    return tuple(
        key
        for key, value in plan.items()
        if value is not None and not any(f == key or f.startswith(f"{key}.") for f in found)
    )


def _meta_memo(model: nn.Module) -> dict[int, object]:
    """What a deep copy puts in place of each tensor: one of the same shape without data. Ties stay ties."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for parameter in parameters_of(module).values():
            if parameter is not None and id(parameter) not in memo:
                data = parameter.detach().to("meta")
                memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        for buffer in buffers_of(module).values():
            if buffer is not None:
                memo[id(buffer)] = buffer.detach().to("meta")
    return memo


def _states(model: nn.Module, styles: dict[str, str]) -> Iterator[StateRow]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[Tensor, bool]] = {}
    for path, module in model.named_modules():
        own: Iterable[tuple[str, Tensor | None, bool]] = (
            *((name, value, False) for name, value in parameters_of(module).items()),
            *((name, value, True) for name, value in buffers_of(module).items()),
        )
        for name, tensor, buffer in own:
            if tensor is not None:
                names.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
                tensors[id(tensor)] = (tensor, buffer)
    for key, (tensor, buffer) in tensors.items():
        spec = spec_of(tensor)
        size = tensor.element_size()
        local = tuple(tensor.shape) if spec is None else spec.local_shape
        first, *others = names[key]
        yield StateRow(
            name=first,
            also=tuple(others),
            style=_style_of(first, styles),
            shape=tuple(tensor.shape),
            placement="plain" if spec is None else str(spec.placements[0]),
            whole_bytes=tensor.numel() * size,
            rank_bytes=prod(local) * size,
            buffer=buffer,
        )


def _style_of(name: str, styles: dict[str, str]) -> str:
    """The style of the owner of the state *name*, or of the nearest module around it."""
    path = name.rpartition(".")[0]
    while path:
        if path in styles:
            return styles[path]
        path = path.rpartition(".")[0]
    return styles.get("", "")


def _collectives(model: nn.Module, inputs: Sequence[object]) -> tuple[CollectiveRow, ...]:
    """Run a forward and a backward without data, and count."""
    on_meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in inputs]
    with CommDebugMode() as mode:
        output = model(*on_meta)
        for tensor in _differentiable(output):
            tensor.backward(torch.ones_like(tensor), retain_graph=True)
    wires: dict[tuple[str, bool], list[int]] = {}
    for record in mode.records:
        name = str(record.op).rpartition(".")[2]
        wires.setdefault((name, record.backward), []).append(record.wire)
    return tuple(
        CollectiveRow(name, backward, len(sent), sum(sent))
        for (name, backward), sent in wires.items()
    )


def _differentiable(value: object) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _differentiable(item)]
    return []
