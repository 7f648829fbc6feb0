"""Brute force: a rule is right if cutting, running and joining equals running on the whole.

The idea: without processes or a mesh, play all coordinates one after the other. The inputs of a
call are cut as a strategy says (addends are random and of mixed sign), the operator or its local
replacement runs on each coordinate's pieces, and the results are joined as the strategy says. What
comes out must equal the operator on whole tensors, in value, shape and dtype.

The rule: strategies are taken as they come, each alone; a rule that answers too little is not
found here, one that answers wrongly is. On a mesh of several axes a strategy is chosen for each,
among those that hold for the pieces of every coordinate of the axes before.

The design not taken: real ranks. They check the transport too, at a thousandth of the speed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hp_dtensor import shards
from hp_dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.rules import (
    LocalCall,
    OpCall,
    OpRule,
    Strategy,
    TensorMeta,
    common_strategies,
    find_rule,
)

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["RuleError", "Sample", "check_rule"]

REPLICATE = Replicate()
Pieces = dict[tuple[int, ...], torch.Tensor]
"""A local tensor for each coordinate of a mesh."""


_TOLERANCE = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""How far sums in another order may be off, absolutely and relatively; other dtypes are exact."""


class RuleError(AssertionError):
    """A strategy of a rule does not give what the operator gives on whole tensors."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments to call an operator with, whole tensors.

    Example:
        >>> import torch
        >>> Sample((torch.ones(2), 3)).args[1]
        3
    """

    args: tuple[object, ...]
    """Positional arguments."""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments."""


def check_rule(
    op: OpOverload,
    samples: Iterable[Sample],
    axis_sizes: Sequence[int] = (2, 3, 4),
    *,
    mesh_shapes: Sequence[tuple[int, ...]] = (),
    split_factors: Sequence[int] = (2, 3),
    values: bool = True,
    at_most: int = 64,
    seed: int = 0,
    reference: Callable[..., object] | None = None,
) -> int:
    """Check every strategy that the rule of *op* has for *samples*.

    Args:
        op: An operator with a rule.
        samples: Arguments to call it with. Prefer float64, in which sums in another order agree.
        axis_sizes: Sizes of the mesh axis; also larger than some dims, so that pieces are empty.
        mesh_shapes: Meshes of several axes to check as well, with at most *at_most* combinations
            of strategies for each sample.
        split_factors: Factors of the StridedShard placements that inputs are said to have.
        values: False for operators whose results have no defined values; their shapes and dtypes
            are checked.
        at_most: See *mesh_shapes*.
        seed: Seed of addends and choices.
        reference: What is right on whole tensors, for an operator that has no kernel here; the
            operator itself by default.

    Returns:
        How many combinations of strategy, sample and mesh were checked.

    Raises:
        RuleError: If one is wrong; the message names it.
        LookupError: If *op* has no rule.

    Example:
        >>> import torch
        >>> check_rule(torch.ops.aten.neg.default, [Sample((torch.ones(3, 2),))], (2,)) > 2
        True
    """
    entry = find_rule(op)
    if entry is None:
        raise LookupError(
            f"{op} has no rule; register one with hp_dtensor.rules.register_rule before checking it"
        )
    generator = random.Random(seed)  # noqa: S311
    checked = 0
    for sample in samples:
        for mesh_shape in [*((size,) for size in axis_sizes), *mesh_shapes]:
            trial = _Trial(op, entry, sample, mesh_shape, generator, values, reference or op)
            checked += trial.run(split_factors, at_most)
    return checked


# --- walking over arguments -------------------------------------------------------------------


def _leaves(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def _swap(value: object, new: Iterator[object]) -> object:
    """Replace the tensors in *value* by the next ones of *new*."""
    if isinstance(value, torch.Tensor):
        return next(new)
    if isinstance(value, list | tuple):
        swapped = [_swap(item, new) for item in value]
        return swapped if isinstance(value, list) else tuple(swapped)
    return value


def _filled(sample: Sample, new: Iterable[object]) -> tuple[tuple[object, ...], dict[str, object]]:
    source = iter(new)
    args = tuple(_swap(value, source) for value in sample.args)
    return args, {name: _swap(value, source) for name, value in sample.kwargs.items()}


def _flat(result: object) -> list[object]:
    """List the results of an operator; a tuple keeps its holes."""
    if isinstance(result, list | tuple):
        return list(result)
    return [] if result is None else [result]


# --- cutting and joining ----------------------------------------------------------------------


def _intervals(size: int, axis_size: int, place: Placement) -> list[tuple[tuple[int, int], ...]]:
    factor = int(place.split_factor) if isinstance(place, StridedShard) else 1
    return [
        shards.local_intervals(size, ((axis_size, coordinate, factor),))
        for coordinate in range(axis_size)
    ]


def _cut(
    tensor: torch.Tensor, place: Placement, axis_size: int, generator: random.Random
) -> list[torch.Tensor]:
    """Return what each coordinate of one axis holds of *tensor*."""
    if isinstance(place, Shard | StridedShard):
        dim = place.dim
        return [
            torch.cat([tensor.narrow(dim, start, end - start) for start, end in runs], dim)
            if runs
            else tensor.narrow(dim, 0, 0)
            for runs in _intervals(tensor.shape[dim], axis_size, place)
        ]
    if isinstance(place, Partial):
        return _addends(tensor, place.reduce_op, axis_size, generator)
    return [tensor.clone() for _ in range(axis_size)]


def _addends(
    tensor: torch.Tensor, kind: str, count: int, generator: random.Random
) -> list[torch.Tensor]:
    """Return *count* tensors that combine to *tensor*, none of which is like it."""
    numbers = torch.Generator().manual_seed(generator.getrandbits(31))
    exact = not (tensor.is_floating_point() or tensor.is_complex())

    def draw() -> torch.Tensor:
        if exact:
            drawn = torch.randint(
                0 if tensor.dtype == torch.bool else -4, 5, tensor.shape, generator=numbers
            )
            return drawn.to(tensor.dtype)
        return torch.randn(tensor.shape, generator=numbers, dtype=torch.float64).to(tensor.dtype)

    if kind in {"sum", "avg"}:
        noise = [draw() for _ in range(count - 1)]
        scaled = tensor * count if kind == "avg" else tensor
        return [*noise, scaled - sum(noise[1:], noise[0])] if noise else [tensor]
    owner = torch.randint(0, count, tensor.shape, generator=numbers)
    if kind == "product":
        signs = [torch.where(draw().abs() > 1, -1, 1).to(tensor.dtype) for _ in range(count - 1)]
        last = tensor.clone()
        for sign in signs:
            last *= sign
        scale = 1 if exact else 2
        return (
            [sign * scale for sign in signs[:1]]
            + signs[1:]
            + [last / scale if scale > 1 else last]
        )
    return [
        torch.where(owner == coordinate, tensor, _lose(tensor, draw(), kind))
        for coordinate in range(count)
    ]


def _lose(tensor: torch.Tensor, noise: torch.Tensor, kind: str) -> torch.Tensor:
    """Return values that do not win against *tensor*."""
    if tensor.dtype == torch.bool:
        return tensor & noise if kind == "max" else tensor | noise
    return torch.minimum(tensor, noise) if kind == "max" else torch.maximum(tensor, noise)


def _join(pieces: Sequence[torch.Tensor], place: Placement, axis_size: int) -> torch.Tensor:
    """Return what the pieces of one axis stand for."""
    if isinstance(place, Shard | StridedShard):
        return _assemble(pieces, place, axis_size)
    if isinstance(place, Partial):
        return _reduce(pieces, place.reduce_op)
    for piece in pieces[1:]:
        torch.testing.assert_close(
            piece, pieces[0], equal_nan=True, msg=lambda text: f"replicas differ: {text}"
        )
    return pieces[0]


def _assemble(
    pieces: Sequence[torch.Tensor], place: Shard | StridedShard, axis_size: int
) -> torch.Tensor:
    dim = place.dim
    size = sum(piece.shape[dim] for piece in pieces)
    shape = list(pieces[0].shape)
    shape[dim] = size
    whole = pieces[0].new_empty(shape)
    for piece, runs in zip(pieces, _intervals(size, axis_size, place), strict=True):
        expected = sum(end - start for start, end in runs)
        if piece.shape[dim] != expected:
            raise RuleError(
                f"pieces of sizes {[found.shape[dim] for found in pieces]} along dim {dim} are "
                f"not what {place} describes"
            )
        at = 0
        for start, end in runs:
            whole.narrow(dim, start, end - start).copy_(piece.narrow(dim, at, end - start))
            at += end - start
    return whole


def _reduce(pieces: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    combine: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sum": torch.add,
        "avg": torch.add,
        "product": torch.mul,
        "max": torch.maximum,
        "min": torch.minimum,
        "all": torch.logical_and,
    }
    total = pieces[0]
    for piece in pieces[1:]:
        total = combine[kind](total, piece)
    return total / len(pieces) if kind == "avg" else total


def _cut_all(
    tensor: torch.Tensor,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    generator: random.Random,
) -> Pieces:
    found: Pieces = {(): tensor}
    for place, size in zip(placements, mesh_shape, strict=True):
        found = {
            (*coordinate, position): piece
            for coordinate, whole in found.items()
            for position, piece in enumerate(_cut(whole, place, size, generator))
        }
    return found


def _join_all(
    pieces: Pieces, placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> torch.Tensor:
    for place, size in zip(reversed(placements), reversed(mesh_shape), strict=True):
        outer = dict.fromkeys(coordinate[:-1] for coordinate in pieces)
        pieces = {
            coordinate: _join([pieces[*coordinate, at] for at in range(size)], place, size)
            for coordinate in outer
        }
    return pieces[()]


# --- one sample on one mesh -------------------------------------------------------------------


class _Trial:
    """All strategies of one sample on one mesh."""

    def __init__(
        self,
        op: OpOverload,
        entry: OpRule,
        sample: Sample,
        mesh_shape: tuple[int, ...],
        generator: random.Random,
        values: bool,
        reference: Callable[..., object],
    ) -> None:
        self.op, self.entry, self.sample, self.mesh_shape = op, entry, sample, mesh_shape
        self.generator, self.values = generator, values
        self.before = [*_leaves(list(sample.args)), *_leaves(list(sample.kwargs.values()))]
        self.after = [tensor.clone() for tensor in self.before]
        args, kwargs = _filled(sample, self.after)
        self.expected = _flat(reference(*args, **kwargs))
        self.written = [
            position
            for position, (old, new) in enumerate(zip(self.before, self.after, strict=True))
            if old.shape != new.shape or not torch.equal(_bits(old), _bits(new))
        ]
        self.metas = [TensorMeta.of(tensor) for tensor in self.before]
        self.results = [
            TensorMeta.of(value) if isinstance(value, torch.Tensor) else None
            for value in self.expected
        ]

    def run(self, split_factors: Sequence[int], at_most: int) -> int:
        """Check the strategies; on several axes a choice of their combinations."""
        chosen = list(self._combinations((), split_factors))
        if len(self.mesh_shape) > 1 and len(chosen) > at_most:
            chosen = self.generator.sample(chosen, at_most)
        for combination in chosen:
            self._check(combination)
        return len(chosen)

    def _combinations(
        self, before: tuple[Strategy, ...], split_factors: Sequence[int]
    ) -> Iterator[tuple[Strategy, ...]]:
        axis = len(before)
        if axis == len(self.mesh_shape):
            if _one_kind(before):
                yield before
            return
        everywhere = Strategy(
            tuple(None if meta is None else REPLICATE for meta in self.results),
            (REPLICATE,) * len(self.metas),
        )
        found = dict.fromkeys(
            strategy
            for present in self._hints(split_factors)
            for strategy in common_strategies(self.entry, self._calls(before, present))
        )
        for strategy in [*found, everywhere] if len(self.mesh_shape) > 1 else found:
            yield from self._combinations((*before, strategy), split_factors)

    def _hints(self, split_factors: Sequence[int]) -> Iterator[tuple[Placement, ...]]:
        yield ()
        for position, meta in enumerate(self.metas):
            for dim, factor in itertools.product(range(meta.ndim), split_factors):
                hint: list[Placement] = [REPLICATE] * len(self.metas)
                hint[position] = StridedShard(dim, split_factor=factor)
                yield tuple(hint)

    def _calls(
        self, before: tuple[Strategy, ...], present: tuple[Placement, ...]
    ) -> tuple[OpCall, ...]:
        """The calls as each coordinate of the axes *before* sees them, without repetitions."""
        axis = len(before)
        axes = self.mesh_shape[:axis]
        found: dict[tuple[object, ...], OpCall] = {}
        for coordinate in itertools.product(*(range(size) for size in axes)):
            inputs = [
                _left(meta, axes, coordinate, [strategy.inputs[position] for strategy in before])
                for position, meta in enumerate(self.metas)
            ]
            outputs = [
                None
                if meta is None
                else _left(
                    meta,
                    axes,
                    coordinate,
                    [strategy.outputs[position] or REPLICATE for strategy in before],
                )
                for position, meta in enumerate(self.results)
            ]
            args, kwargs = _filled(self.sample, inputs)
            call = OpCall(self.op, args, kwargs, tuple(outputs), self.mesh_shape[axis], present)
            found.setdefault((*inputs, *outputs), call)
        return tuple(found.values())

    def _check(self, chosen: tuple[Strategy, ...]) -> None:
        try:
            self._compare(chosen)
        except Exception as error:
            shapes = [tuple(meta.shape) for meta in self.metas]
            inputs = [strategy.inputs for strategy in chosen]
            outputs = [strategy.outputs for strategy in chosen]
            raise RuleError(
                f"{self.op} on a mesh of {self.mesh_shape}: {inputs} -> {outputs} is wrong for "
                f"tensors of shapes {shapes}, {self._static()}: {type(error).__name__}: {error}"
            ) from error

    def _static(self) -> str:
        args, kwargs = _filled(self.sample, itertools.repeat("*"))
        return f"arguments {args} {kwargs}"

    def _compare(self, chosen: tuple[Strategy, ...]) -> None:
        inputs = [
            tuple(strategy.inputs[position] for strategy in chosen)
            for position in range(len(self.metas))
        ]
        outputs: list[tuple[Placement, ...] | None] = [
            None
            if meta is None
            else tuple(strategy.outputs[position] or REPLICATE for strategy in chosen)
            for position, meta in enumerate(self.results)
        ]
        held = [
            _cut_all(tensor, placements, self.mesh_shape, self.generator)
            for tensor, placements in zip(self.before, inputs, strict=True)
        ]
        found: list[Pieces] = [{} for _ in self.expected]
        for coordinate in itertools.product(*(range(size) for size in self.mesh_shape)):
            local = self._local_call(coordinate, inputs, outputs)
            results = self._run(local, [pieces[coordinate] for pieces in held])
            for position, (result, shape) in enumerate(
                zip(results, local.output_local_shapes, strict=True)
            ):
                if isinstance(result, torch.Tensor):
                    if tuple(result.shape) != shape:
                        raise RuleError(
                            f"result {position} on {coordinate} has shape {tuple(result.shape)}, "
                            f"its placement says {shape}"
                        )
                    found[position][coordinate] = result
        for position, expected in enumerate(self.expected):
            placements = outputs[position]
            if isinstance(expected, torch.Tensor) and placements is not None:
                self._close(found[position], placements, expected)
        for position in self.written:
            self._close(held[position], inputs[position], self.after[position])

    def _run(self, local: LocalCall, pieces: list[torch.Tensor]) -> list[object]:
        run: Callable[..., object] = self.op
        if self.entry.local is not None:
            run = self.entry.local(local)
        args, kwargs = _filled(self.sample, pieces)
        return _flat(run(*args, **kwargs))

    def _close(
        self, pieces: Pieces, placements: tuple[Placement, ...], expected: torch.Tensor
    ) -> None:
        if not self.values:
            return
        joined = _join_all(pieces, placements, self.mesh_shape)
        bound = _TOLERANCE.get(expected.dtype, 0.0)
        torch.testing.assert_close(joined, expected, rtol=bound, atol=bound, equal_nan=True)

    def _local_call(
        self,
        coordinate: tuple[int, ...],
        inputs: list[tuple[Placement, ...]],
        outputs: list[tuple[Placement, ...] | None],
    ) -> LocalCall:
        args, kwargs = _filled(self.sample, self.metas)
        where = self.mesh_shape, coordinate
        placed = [
            None if meta is None or placements is None else (tuple(meta.shape), *where, placements)
            for meta, placements in zip(self.results, outputs, strict=True)
        ]
        given = [
            (tuple(meta.shape), *where, placements)
            for meta, placements in zip(self.metas, inputs, strict=True)
        ]
        return LocalCall(
            call=OpCall(self.op, args, kwargs, tuple(self.results), 1),
            mesh_shape=self.mesh_shape,
            coordinate=coordinate,
            input_placements=tuple(inputs),
            output_placements=tuple(outputs),
            input_local_shapes=tuple(shards.local_shape(*item) for item in given),
            output_local_shapes=tuple(
                None if item is None else shards.local_shape(*item) for item in placed
            ),
            input_boxes=tuple(shards.local_box(*item) for item in given),
            output_boxes=tuple(
                None if item is None else shards.local_box(*item) for item in placed
            ),
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return values that compare equal where NaNs are."""
    return torch.nan_to_num(tensor) if tensor.is_floating_point() else tensor


def _one_kind(chosen: tuple[Strategy, ...]) -> bool:
    """Whether no tensor is Partial in two ways, whose order would matter."""
    for placements in zip(
        *(strategy.inputs + strategy.outputs for strategy in chosen), strict=True
    ):
        kinds = {place.reduce_op for place in placements if isinstance(place, Partial)}
        if len(kinds) > 1:
            return False
    return True


def _left(
    meta: TensorMeta,
    axes: Sequence[int],
    coordinate: tuple[int, ...],
    placements: Sequence[Placement],
) -> TensorMeta:
    shape = shards.local_shape(tuple(meta.shape), tuple(axes), coordinate, tuple(placements))
    stride = torch.empty(shape, device="meta").stride()
    return TensorMeta(shape, stride, meta.dtype)
