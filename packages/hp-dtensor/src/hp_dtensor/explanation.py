"""What a program would communicate: a table, made without sending anything.

The idea: the program runs on descriptions. Each distributed tensor among its arguments and parameters becomes one of the
same layout whose local piece is on the meta device; every decision is then made as it would be, and no value exists that
could be sent. What operators move by themselves is written down on the way, with the module that they run in.

The rule: what is shown is decided by the same code that decides when the program runs for good. A program that asks for
values (``item``, ``nonzero``) cannot be explained, and says so.

The design not taken: to trace a graph and look for collectives in it. It needs a compiler, loses the line between what an
operator does by itself and what the program wrote out, and fails where the compiler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from hp_dtensor._torch import TorchDTensor, new_dtensor, tree_flatten, tree_unflatten
from hp_dtensor.comm_debug import Collective, CommDebugMode
from hp_dtensor.dtensor import DTensor
from hp_dtensor.modes import Move, listening
from hp_dtensor.placements import Placement
from hp_dtensor.preview import redistribute_plan
from hp_dtensor.spec import Spec, spec_of

__all__ = ["Communication", "Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Communication:
    """One argument that an operator moves by itself."""

    op: str
    """The operator."""
    module: str
    """The path of the innermost module that is running, empty outside of one."""
    backward: bool
    """Whether it belongs to a backward pass."""
    argument: int
    """The position among the tensor arguments of the operator."""
    shape: tuple[int, ...]
    """The global shape of the argument."""
    source: tuple[Placement, ...]
    """Its layout."""
    target: tuple[Placement, ...]
    """The layout that the operator runs on."""
    collectives: tuple[str, ...]
    """What the move takes."""
    bytes: int
    """The most that one rank receives."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a program would communicate; prints as a table."""

    rows: tuple[Communication, ...]
    """What operators move by themselves, in order."""
    collectives: tuple[Collective, ...]
    """All collectives, those that the program writes out as well."""
    version: int = 1
    """The form of these types: raised when a field changes its meaning."""

    @property
    def bytes(self) -> int:
        """The most that one rank receives for what operators move by themselves."""
        return sum(row.bytes for row in self.rows)

    @property
    def written_out(self) -> int:
        """How many collectives the program asks for itself (``redistribute``, ``full_tensor``)."""
        return len(self.collectives) - sum(len(row.collectives) for row in self.rows)

    def __str__(self) -> str:
        lines = [("operator", "module", "argument", "from", "to", "collectives", "bytes")]
        lines += [
            (
                f"{row.op}{' (backward)' if row.backward else ''}",
                row.module or "-",
                f"{row.argument}: {row.shape}",
                _short(row.source),
                _short(row.target),
                ", ".join(row.collectives),
                str(row.bytes),
            )
            for row in self.rows
        ]
        lines.append(("total", "", "", "", "", "", str(self.bytes)))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*table, f"written out by the program: {self.written_out} collectives"])


def _short(placements: Sequence[Placement]) -> str:
    return f"({', '.join(map(str, placements))})"


def _described(value: object) -> object:
    """A tensor of the same description without values."""
    if not isinstance(value, Tensor):
        return value
    spec = spec_of(value)
    if spec is None:
        return value.detach().to("meta").requires_grad_(value.requires_grad)
    local = cast("TorchDTensor", value)._local_tensor
    return _without_values(spec, local).requires_grad_(value.requires_grad)


def _without_values(spec: Spec, local: Tensor) -> Tensor:
    empty = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    return new_dtensor(DTensor, empty, spec, False)


def explain(program: Callable[..., object], *args: object, **kwargs: object) -> Explanation:
    """Return what *program* would communicate if it were called with these arguments; nothing is sent.

    Args:
        program: A function of tensors, an operator, or a module; also one that calls ``backward``. Modules that it is, gets or
            closes over take part with their parameters and buffers.
        *args: Its arguments, in any nesting, with distributed tensors where it would get them.
        **kwargs: Likewise.

    Raises:
        NotImplementedError: If the program asks for the value of a tensor.

    Example:
        >>> def on_each_rank():
        ...     from hp_dtensor import Shard, distribute_tensor
        ...     from hp_mesh import init_device_mesh
        ...
        ...     x = distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        ...     print(explain(torch.linalg.inv, x @ x.t()))
    """
    rows: list[Communication] = []
    flat, tree = tree_flatten((args, kwargs))
    given, named = tree_unflatten([_described(value) for value in flat], tree)
    with CommDebugMode() as sent, ModuleTracker() as modules:

        def listen(op: object, moves: Sequence[Move]) -> None:
            parents = [path for path in modules.parents if path != "Global"]
            rows.extend(
                _row(str(op), max(parents, key=len, default=""), bool(modules.is_bw), move)
                for move in moves
            )

        with listening(listen), _without_values_in(_modules(program, flat)):
            try:
                program(*given, **named)
            except (NotImplementedError, RuntimeError) as error:
                if "meta" not in str(error).lower():
                    raise
                msg = (
                    "explain runs the program without values, and the program asks for one (item, nonzero, a plain tensor's "
                    f"data): {error}"
                )
                raise NotImplementedError(msg) from error
    return Explanation(tuple(row for row in rows if row.collectives), tuple(sent.records))


def _modules(program: object, values: Iterable[object]) -> list[nn.Module]:
    """The modules that *program* is, gets, or closes over."""
    cells = getattr(program, "__closure__", None) or ()
    reached = [program, getattr(program, "__self__", None), *values]
    reached += [cell.cell_contents for cell in cells]
    return [value for value in reached if isinstance(value, nn.Module)]


@contextmanager
def _without_values_in(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within, the *modules* have descriptions in place of parameters and buffers; shared ones stay shared."""
    holders = [
        held
        for module in modules
        for child in module.modules()
        for held in (child._parameters, child._buffers)  # noqa: SLF001  # where a module keeps them
    ]
    before = [dict(held) for held in holders]
    described: dict[int, object] = {}
    try:
        for held in holders:
            for name, tensor in list(held.items()):
                if id(tensor) not in described:
                    described[id(tensor)] = _described(tensor)
                cast("dict[str, object]", held)[name] = described[id(tensor)]
        yield
    finally:
        for held, kept in zip(holders, before, strict=True):
            cast("dict[str, object]", held).update(kept)


def _row(op: str, module: str, backward: bool, move: Move) -> Communication:
    argument, source, target = move
    plan = redistribute_plan(source, list(target.placements))
    return Communication(
        op=op,
        module=module,
        backward=backward,
        argument=argument,
        shape=tuple(source.shape),
        source=source.placements,
        target=target.placements,
        collectives=tuple(step.kind for step in plan.steps if step.bytes),
        bytes=plan.bytes,
    )
