"""A program on distributed tensors against the same program on plain ones, on real ranks.

The idea: whatever the layouts of its inputs, a program gives what it gives on whole tensors, and so
do its gradients. A layout of the inputs is drawn, the inputs are cut as it says, the program runs on
them, and its results are gathered and compared.

The rule: addends are of mixed sign and sum exactly to the value (twice it, and its negative), so
that only a wrong rule can make a difference. All ranks give the same answer, also when only one of
them failed. Nothing is raised for a wrong value: who asks wants to know of all layouts.

The design not taken: `check_rule` for this. It proves rules one operator at a time and fast; what it
cannot see is everything around them: dispatch, autograd, moves, and operators without a rule.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from hp_dtensor.dtensor import DTensor
from hp_dtensor.placements import Partial, Placement, Replicate, Shard, shard_dim
from hp_dtensor.spec import make_spec

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh

__all__ = ["Outcome", "check_program", "draw_layouts"]

Layout = tuple[tuple[Placement, ...], ...]
"""For each tensor among the arguments, its placements."""

_TOLERANCE = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 3e-4,
    torch.complex64: 3e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 6e-2,
}
_VERDICTS = ("right", "fell back", "wrong", "error")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a program on one layout of its inputs."""

    layout: Layout
    """The placements of each tensor argument."""
    verdict: str
    """``"right"``, ``"fell back"`` (right, on replicas of everything), ``"wrong"`` or ``"error"``."""
    message: str
    """What this rank has to say about it; empty when all is right."""


# --- walking over arguments and results -------------------------------------------------------


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _swap(value: object, new: Iterator[object]) -> object:
    if isinstance(value, torch.Tensor):
        return next(new)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_swap(item, new) for item in value))  # type: ignore[arg-type]  # a named tuple
    if isinstance(value, list | tuple):
        return type(value)(_swap(item, new) for item in value)
    if isinstance(value, dict):
        return {key: _swap(item, new) for key, item in value.items()}
    return value


# --- layouts ----------------------------------------------------------------------------------


def _choices(tensor: torch.Tensor) -> list[Placement]:
    found: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]
    # There is no sum of truth values, nor does torch add numbers of eight bits that float.
    sums = tensor.dtype != torch.bool and not (
        tensor.is_floating_point() and tensor.dtype.itemsize == 1
    )
    return [*found, Partial("sum")] if sums else found


def draw_layouts(
    tensors: Sequence[torch.Tensor], mesh_ndim: int, *, at_most: int | None = None, seed: int = 0
) -> list[Layout]:
    """Return layouts of *tensors*: all of them, or *at_most* drawn without repetition.

    Each tensor is replicated, cut along each dim, or a sum of addends, on each mesh axis.

    Example:
        >>> import torch
        >>> len(draw_layouts([torch.zeros(2, 3), torch.zeros(3)], 1))
        12
    """
    each = [list(itertools.product(_choices(tensor), repeat=mesh_ndim)) for tensor in tensors]
    count = 1
    for choices in each:
        count *= len(choices)
    if at_most is None or count <= at_most:
        return list(itertools.product(*each))
    generator = random.Random(seed)  # noqa: S311
    return [_numbered(each, number) for number in sorted(generator.sample(range(count), at_most))]


def _numbered(each: Sequence[Sequence[tuple[Placement, ...]]], number: int) -> Layout:
    found = []
    for choices in reversed(each):
        number, position = divmod(number, len(choices))
        found.append(choices[position])
    return tuple(reversed(found))


def _addend(piece: torch.Tensor, size: int, position: int, *, mixed: bool) -> torch.Tensor:
    """One of *size* addends that sum to *piece* without rounding, in any order.

    *mixed* ones are twice the value and its negative. Only one axis can have those: their sums are exact in pairs, not
    in fours. On others some coordinate has the value, another one for each element, and the rest zero.
    """
    if size == 1:
        return piece
    if position > 1:
        return torch.zeros_like(piece)
    flat = torch.arange(piece.numel(), device=piece.device).view(piece.shape)
    chosen = flat % 2 == position
    if not mixed:
        return torch.where(chosen, piece, torch.zeros_like(piece))
    found = torch.where(chosen, piece + piece, -piece)
    if piece.is_floating_point() or piece.is_complex():
        whole = piece if position == 0 else torch.zeros_like(piece)
        found = torch.where(torch.isfinite(piece + piece), found, whole)
    return found


def _distribute(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        msg = f"check_program runs on the ranks of the mesh; this one is not part of {mesh}"
        raise ValueError(msg)
    piece = tensor.detach()
    mixed = True
    for size, position, placement in zip(mesh.shape, coordinate, placements, strict=True):
        dim = shard_dim(placement)
        if dim is not None:
            step = max(-(-piece.shape[dim] // size), 1)
            start = min(step * position, piece.shape[dim])
            piece = piece.narrow(dim, start, min(step, piece.shape[dim] - start))
        elif placement.is_partial():
            piece = _addend(piece, size, position, mixed=mixed)
            mixed = mixed and size == 1
    spec = make_spec(mesh, placements, tensor.shape, tensor.stride(), tensor.dtype)
    made = DTensor(piece.clone(), spec)
    return made.requires_grad_(tensor.requires_grad)


# --- running and comparing --------------------------------------------------------------------


def _gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    reached = [out for out in outputs if out.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not reached or not wanted:
        return []
    generator = torch.Generator().manual_seed(7)
    seeds = [
        torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out.dtype)
        for out in reached
    ]
    return list(torch.autograd.grad(reached, wanted, seeds, allow_unused=True))


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _scale(tensor: torch.Tensor) -> float:
    """How large the numbers are that the small ones among them are differences of; one at least."""
    if tensor.dtype not in {torch.float16, torch.bfloat16} or not tensor.numel():
        return 1.0
    return max(1.0, float(torch.nan_to_num(tensor.detach().float(), 0, 0, 0).abs().max()))


def _differ(expected: torch.Tensor | None, found: torch.Tensor | None, what: str) -> str:
    if expected is None or found is None:
        present = found if expected is None else expected
        same = present is None or not present.count_nonzero()
        return "" if same else f"{what}: one has a value, the other none"
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return (
            f"{what}: {found.dtype} of {tuple(found.shape)} instead of {expected.dtype} of "
            f"{tuple(expected.shape)}"
        )
    if expected.layout != torch.strided or found.layout != torch.strided:
        expected, found = expected.to_dense(), found.to_dense()
    bound = _TOLERANCE.get(expected.dtype, 0.0)
    try:
        torch.testing.assert_close(
            found.detach(),
            expected.detach(),
            rtol=bound,
            atol=bound * _scale(expected),
            equal_nan=True,
        )
    except AssertionError as error:
        return f"{what}: {' '.join(str(error).split())}"
    return ""


def _compare(expected: Sequence[object], found: Sequence[object], what: str) -> str:
    if len(expected) != len(found):
        return f"{len(found)} {what}s instead of {len(expected)}"
    for position, (left, right) in enumerate(zip(expected, found, strict=True)):
        message = _differ(left, right, f"{what} {position}")  # type: ignore[arg-type]
        if message:
            return message
    return ""


class _Program:
    """One program with its arguments, and what it gives on whole tensors."""

    def __init__(
        self,
        function: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        gradient: bool,
        seed: int,
    ) -> None:
        self.function, self.args, self.kwargs = function, list(args), dict(kwargs)
        self.gradient, self.seed = gradient, seed
        self.inputs = list(_tensors([self.args, self.kwargs]))
        self.results, self.gradients = self._run(
            [
                tensor.detach().clone().requires_grad_(tensor.requires_grad)
                for tensor in self.inputs
            ]
        )

    def _run(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        torch.manual_seed(self.seed)
        new = iter(tensors)
        args = cast("list[object]", _swap(self.args, new))
        kwargs = cast("dict[str, object]", _swap(self.kwargs, new))
        outputs = self.function(*args, **kwargs)
        found = [_whole(value) for value in _tensors(outputs)]
        others = repr(_swap(outputs, itertools.repeat("*")))
        self.others = getattr(self, "others", others)
        if others != self.others:
            msg = f"gave {others} instead of {self.others}"
            raise AssertionError(msg)
        return found, _gradients(found, tensors) if self.gradient else []

    def on(self, mesh: DeviceMesh, layout: Layout) -> str:
        """Return what is wrong on *layout*, nothing if it is right."""
        tensors = [
            _distribute(tensor, mesh, placements)
            for tensor, placements in zip(self.inputs, layout, strict=True)
        ]
        results, gradients = self._run(tensors)
        message = _compare(self.results, results, "result")
        if message:
            return message
        whole = [None if grad is None else _whole(grad) for grad in gradients]
        return _compare(self.gradients, whole, "gradient")


def check_program(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    mesh: DeviceMesh,
    at_most: int | None = 16,
    gradient: bool = True,
    seed: int = 0,
) -> list[Outcome]:
    """Run *function* on its arguments laid out in many ways over *mesh*, and compare.

    To be called on all ranks of *mesh* with the same arguments. The function is called once on
    plain tensors, then once for each layout with distributed ones; it may return tensors in any
    nesting. Gradients are compared for the arguments that require them.

    Args:
        function: What to check. It must not depend on anything but its arguments.
        args: Its positional arguments, whole plain tensors, also inside lists.
        kwargs: Its keyword arguments, in the same form.
        mesh: The devices.
        at_most: How many layouts are drawn; None for all of them.
        gradient: Whether to compare gradients as well.
        seed: Of the layouts, and of the random numbers that the program draws.

    Returns:
        An outcome for each layout, with the same verdicts on all ranks.

    Example:
        >>> from hp_mesh import init_device_mesh
        >>> def on_each_rank():
        ...     x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 3)
        ...     found = check_program(torch.matmul, [x, w], mesh=init_device_mesh("cpu", (2,)))
        ...     assert {outcome.verdict for outcome in found} == {"right"}
    """
    program = _Program(function, args, kwargs or {}, gradient=gradient, seed=seed)
    layouts = draw_layouts(program.inputs, mesh.ndim, at_most=at_most, seed=seed)
    return [_outcome(program, mesh, layout) for layout in layouts]


def _outcome(program: _Program, mesh: DeviceMesh, layout: Layout) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            message = program.on(mesh, layout)
            code = 2 if message else 0
        except Exception as error:  # noqa: BLE001  # whatever went wrong is the answer
            message, code = f"{type(error).__name__}: {error}", 3
    told = [str(warning.message) for warning in caught if "replicated" in str(warning.message)]
    if not code and told:
        message, code = told[0], 1
    verdict = torch.tensor(code, device=mesh.device_type)
    dist.all_reduce(verdict, dist.ReduceOp.MAX)
    return Outcome(layout, _VERDICTS[int(verdict)], message)
