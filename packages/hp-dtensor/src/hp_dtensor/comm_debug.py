"""See every collective: which, how many, how many bytes, from which module, forward or backward.

A dispatch mode looks at each ATen operator. It steps aside for distributed tensors, so that what their dispatch sends
shows up as the collectives it really is, whether they come from us, from torch's own distributed tensors or from FSDP2.
Torch's mode steps aside for its own class only and is blind inside a subclass.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import torch
import torch.distributed as dist
from hp_mesh.groups import registry
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from hp_dtensor._torch import (
    Placement,
    TorchDTensor,
    functional_packet,
    functional_twin,
    group_of,
    schema_of,
)

if TYPE_CHECKING:
    from types import TracebackType

    from torch._ops import OpOverload, OpOverloadPacket
    from torch.utils.hooks import RemovableHandle

NOT_COLLECTIVE = frozenset(
    {"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_", "barrier"}
)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that was started."""

    op: OpOverloadPacket
    """The functional operator, or the one it stands for (``c10d.allreduce_`` counts as ``all_reduce``)."""
    payload: int
    """Bytes of its input on this rank."""
    wire: int
    """Bytes that this rank sends, by the usual ring algorithms."""
    module: str
    """The dotted path of the innermost module that is running, ``""`` outside of one."""
    backward: bool
    """Whether it belongs to a backward pass."""
    axis: str = ""
    """The mesh axis that its group was made for, in words; torch's own description for a group that no mesh of ours made."""
    ranks: tuple[int, ...] = ()
    """The global ranks that take part."""


class CommCounts(dict["OpOverloadPacket", int]):
    """How often each collective was started, by its packet; 0 for one that was not.

    A packet of ``torch.ops.c10d_functional`` finds the count of its namesake in ``torch.ops._c10d_functional``.

    Example:
        >>> import torch
        >>> counts = CommCounts({torch.ops._c10d_functional.all_reduce: 2})
        >>> (
        ...     counts[torch.ops.c10d_functional.all_reduce],
        ...     counts[torch.ops._c10d_functional.broadcast],
        ... )
        (2, 0)
    """

    def __missing__(self, packet: OpOverloadPacket) -> int:
        return super().get(functional_packet(packet), 0)

    def __contains__(self, packet: object) -> bool:
        return self[cast("OpOverloadPacket", packet)] > 0

    def get(self, packet: OpOverloadPacket, default: object = None) -> object:  # type: ignore[override]  # one form for torch's three
        """The count of *packet*, *default* when it was not started."""
        return self[packet] or default


def wire_bytes(name: str, payload: int, ranks: int) -> int:
    """Bytes that one of *ranks* sends when a collective *name* takes *payload* bytes as its input.

    An all-gather passes every other rank's piece on; a reduce-scatter sends all but its own share; an all-reduce is one
    after the other.

    Example:
        >>> wire_bytes("all_reduce", 1024, 4)
        1536
        >>> wire_bytes("all_gather_into_tensor", 256, 4)
        768
    """
    if ranks <= 1:
        return 0
    if "all_gather" in name or "allgather" in name:
        return payload * (ranks - 1)
    share = payload * (ranks - 1) // ranks
    return 2 * share if "all_reduce" in name or "allreduce" in name else share


def _tensors(values: Sequence[object]) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            out.append(value)
        elif isinstance(value, (list, tuple)):
            out.extend(_tensors(value))
    return out


def _axis_of(group: dist.ProcessGroup | None) -> str:
    for record in registry.records():
        if record.group is group:
            return record.label
    return "" if group is None else group.group_desc


class CommDebugMode(TorchDispatchMode):
    """Record the collectives that start inside ``with CommDebugMode() as comm:``.

    Example:
        >>> import torch
        >>> with CommDebugMode() as comm:
        ...     _ = torch.ones(2) + 1
        >>> comm.get_total_counts()
        0
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares it untyped
        self.records: list[Collective] = []
        self._modules = ModuleTracker()
        self._parameters: dict[str, dict[str, torch.nn.Parameter]] = {}
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Self:
        self.records.clear()
        self._parameters.clear()
        self._modules.__enter__()
        self._hook = register_module_forward_pre_hook(self._remember)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch declares it untyped
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch declares it untyped
        if self._hook is not None:
            self._hook.remove()
        self._modules.__exit__(kind, error, trace)

    def _remember(self, module: torch.nn.Module, _inputs: object) -> None:
        """Note whose forward starts: the parameters that *module* itself has, by the name it runs under."""
        own = dict(module.named_parameters(recurse=False))
        if own:
            self._parameters[self._innermost()] = own

    def _innermost(self) -> str:
        """The dotted path of the innermost module that is running."""
        return max(self._modules.parents - {"Global"}, key=len, default="")

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(issubclass(kind, TorchDTensor) for kind in types):
            return NotImplemented
        twin = functional_twin(func)
        if twin is not None and twin.__name__ not in NOT_COLLECTIVE:
            self._record(twin, func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, twin: OpOverloadPacket, func: OpOverload, args: Sequence[object]) -> None:
        name = schema_of(func).name.split("::")[1]
        tensors = _tensors(args)
        if (
            func.namespace == "c10d"
            and ("allgather" in name or "_base" in name)
            and len(tensors) > 1
        ):
            tensors = (
                tensors[1:] if "_base" in name else tensors[-1:]
            )  # the first ones are outputs
        payload = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        group = group_of(args)
        self.records.append(
            Collective(
                op=twin,
                payload=payload,
                wire=wire_bytes(twin.__name__, payload, 1 if group is None else group.size()),
                module=self._innermost(),
                backward=bool(self._modules.is_bw),
                axis=_axis_of(group),
                ranks=() if group is None else tuple(dist.get_process_group_ranks(group)),
            )
        )

    def get_comm_counts(self) -> dict[OpOverloadPacket, int]:
        """How often each collective was started, by packet; 0 for all others."""
        return CommCounts(Counter(record.op for record in self.records))

    @property
    def comm_counts(self) -> dict[OpOverloadPacket, int]:
        """What :meth:`get_comm_counts` gives."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[OpOverloadPacket, int]]]:
        """The counts of each module that something was started in, ``"forward"`` and ``"backward"`` apart.

        A collective counts for its module and the modules around it; under ``"Global"`` all of them count.
        """
        found: dict[str, dict[str, Counter[OpOverloadPacket]]] = {
            "Global": {"forward": Counter(), "backward": Counter()}
        }
        for record in self.records:
            path = record.module.split(".") if record.module else []
            around = [".".join(path[:depth]) for depth in range(1, len(path) + 1)]
            for name in ("Global", *around):
                per_pass = found.setdefault(name, {"forward": Counter(), "backward": Counter()})
                per_pass["backward" if record.backward else "forward"][record.op] += 1
        return {
            name: {which: CommCounts(counts) for which, counts in per_pass.items()}
            for name, per_pass in found.items()
        }

    def get_total_counts(self) -> int:
        """How many collectives were started."""
        return len(self.records)

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """What was recorded, as text: one line for each module and pass, with a count for each collective.

        Args:
            noise_level: from 1 on a line for each collective follows, with its bytes and axis; 0 leaves them out.
        """
        lines = []
        for name, passes in self.comm_module_counts.items():
            lines.append(name)
            for which, counts in passes.items():
                told = ", ".join(f"{op.__name__}: {count}" for op, count in counts.items())
                lines.append(f"  {which.upper()} PASS  {told or '-'}")
                if noise_level > 0:
                    lines += [
                        f"    {record.op.__name__}  {record.wire} bytes  {record.axis}"
                        for record in self.records
                        if record.backward is (which == "backward")
                        and (record.module == name or (name == "Global" and not record.module))
                    ]
        return "\n".join(lines)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write what was recorded to a file of JSON: counts and layouts module by module.

        Args:
            file_name: where to write.
            noise_level: from 1 on each collective follows, with its bytes, module and axis; 0 leaves them out.
        """
        layouts = self.get_sharding_info()
        counts = self.comm_module_counts
        found: dict[str, object] = {
            "modules": {
                name: {
                    **{
                        which: {op.__name__: count for op, count in started.items()}
                        for which, started in counts.get(name, {}).items()
                    },
                    "layouts": {
                        key: [str(placement) for placement in layouts[f"{name}.{key}"]]
                        for key in self._parameters.get(name, {})
                        if f"{name}.{key}" in layouts
                    },
                }
                for name in dict.fromkeys((*counts, *self._parameters))
            }
        }
        if noise_level > 0:
            found["collectives"] = [
                {
                    "op": record.op.__name__,
                    "bytes": record.wire,
                    "module": record.module,
                    "pass": "backward" if record.backward else "forward",
                    "axis": record.axis,
                    "ranks": record.ranks,
                }
                for record in self.records
            ]
        Path(file_name).write_text(json.dumps(found, indent=2) + "\n")

    def get_parameter_info(self) -> dict[str, dict[str, torch.nn.Parameter]]:
        """The parameters of each module that ran, by the name of the module and their own.

        Example:
            >>> import torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
            >>> with CommDebugMode() as comm:
            ...     _ = model(torch.ones(1, 2))
            >>> {name: list(own) for name, own in comm.get_parameter_info().items()}
            {'Sequential.0': ['weight', 'bias']}
        """
        return {name: dict(own) for name, own in self._parameters.items()}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of the distributed ones among those parameters, by module and name with a dot between."""
        return {
            f"{name}.{key}": tuple(parameter.placements)
            for name, own in self._parameters.items()
            for key, parameter in own.items()
            if isinstance(parameter, TorchDTensor)
        }

    def get_total_bytes(self) -> int:
        """How many bytes this rank sent."""
        return sum(record.wire for record in self.records)
