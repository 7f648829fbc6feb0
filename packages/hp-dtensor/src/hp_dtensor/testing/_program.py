"""A program on distributed tensors against the same program on plain ones, on real ranks.

The idea: whatever the layouts of its inputs, a program gives what it gives on whole tensors, and so
do its gradients. A layout of the inputs is drawn, the inputs are cut as it says, the program runs on
them, and its results are gathered and compared.

The rule: addends are of mixed sign and sum exactly to the value (twice it, and its negative), so
that only a wrong rule can make a difference. All ranks give the same answer, also when only one of
them failed. Nothing is raised for a wrong value: who asks wants to know of all layouts.

Rounding is not wrong. What is further from the plain program than the dtype's tolerance is compared
with the truth, the program in double precision, and may be off by a few times as much as the truth
itself moves when each input is rounded once more: a program that amplifies rounding on one device
does so on several. Addends, and the sums of pieces, are rounded each on its own, so that a step in
which they would have cancelled amplifies more; what is off still must agree with the truth when the
program runs in double precision on the same layout, and in its own precision be near.

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
    torch.float16: 4e-3,
    torch.bfloat16: 1.6e-2,
}
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_ROUNDINGS = 8
"""How many times the rounding of its inputs a result may be off."""
_NEAR = 0.25
"""How far addends may be off that agree in double precision, relative to the largest number; pieces a quarter of it."""
_PROBES = 3
"""How often the inputs are rounded at random, to see how far the truth moves."""
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
            atol=bound,
            equal_nan=True,
        )
    except AssertionError as error:
        return f"{what}: {' '.join(str(error).split())}"
    return ""


Values = Sequence[torch.Tensor | None]
"""Results, or gradients, of which some may be absent."""


def _compare(expected: Values, found: Values, what: str) -> dict[int, str]:
    """Return what is wrong at which position; -1 for the number of values."""
    if len(expected) != len(found):
        return {-1: f"{len(found)} {what}s instead of {len(expected)}"}
    told = {
        position: _differ(left, right, f"{what} {position}")
        for position, (left, right) in enumerate(zip(expected, found, strict=True))
    }
    return {position: message for position, message in told.items() if message}


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    """*tensor* in double precision; as it is where its dtype has none."""
    wide = tensor.detach().to(_WIDE.get(tensor.dtype, tensor.dtype))
    return wide.requires_grad_(tensor.requires_grad)


def _rounded(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """*tensor* in double precision, each element moved by what rounding it once could do."""
    wide = _doubled(tensor).detach()
    if tensor.dtype not in _WIDE:
        return wide
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return wide * (1 + signs.to(tensor.device) * torch.finfo(tensor.dtype).eps / 2)


def _anywhere(found: bool, mesh: DeviceMesh) -> bool:
    """Whether *found* is true on any rank."""
    flag = torch.tensor(int(found), device=mesh.device_type)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _within(truth: torch.Tensor, moved: Values, found: torch.Tensor) -> bool:
    """Whether *found* is as near to *truth* as those for rounded inputs are, up to a small factor."""
    if found.dtype not in _WIDE or found.shape != truth.shape:
        return False
    wide = found.detach().to(truth.dtype)
    spread = torch.zeros(truth.shape, dtype=torch.float64, device=truth.device)
    for other in moved:
        if other is None or other.shape != truth.shape:
            return False
        spread = torch.maximum(spread, (other - truth).abs().to(torch.float64))
    spread = spread + truth.abs() * torch.finfo(found.dtype).eps
    same = (wide == truth) | (wide.isnan() & truth.isnan())
    return bool((same | ((wide - truth).abs() <= _ROUNDINGS * spread)).all())


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
        self._truths: list[tuple[Values, Values]] | None = None
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
        message, odd = self._judged(*self._on(tensors))
        # All ranks run again if one of them has to, since they move pieces to each other.
        if _anywhere(bool(odd), mesh):
            exact = self._on(
                [
                    _distribute(_doubled(tensor), mesh, placements)
                    for tensor, placements in zip(self.inputs, layout, strict=True)
                ]
            )
            addends = any(place.is_partial() for placements in layout for place in placements)
            near = _NEAR if addends else _NEAR / 4
            message = "" if all(self._near(*one, exact, near) for one in odd) else message
        return message

    def _on(self, tensors: Sequence[torch.Tensor]) -> tuple[Values, Values]:
        """Whole results and gradients."""
        results, gradients = self._run(tensors)
        return results, [None if grad is None else _whole(grad) for grad in gradients]

    def _judged(
        self, results: Values, gradients: Values
    ) -> tuple[str, list[tuple[int, int, torch.Tensor | None]]]:
        """The first thing that is wrong, and which results (0) and gradients (1) are, at which position, and their values."""
        told = ""
        odd: list[tuple[int, int, torch.Tensor | None]] = []
        wanted: tuple[Values, Values] = (self.results, self.gradients)
        for which, found in enumerate((results, gradients)):
            what = ("result", "gradient")[which]
            for position, message in _compare(wanted[which], found, what).items():
                value = found[position] if position >= 0 else None
                if not self._rounds(which, position, value):
                    told = told or message
                    odd.append((which, position, value))
        return told, odd

    def _truth(self, which: int, position: int) -> tuple[torch.Tensor | None, Values]:
        """The result (0) or gradient (1) at *position* in double precision, and those for rounded inputs."""
        if self._truths is None:
            self._truths = self._in_double()
        values = [found[which] for found in self._truths]
        if not values or any(len(found) <= position for found in values):
            return None, ()
        truth, *moved = (found[position] for found in values)
        return truth, moved

    def _rounds(self, which: int, position: int, value: torch.Tensor | None) -> bool:
        """Whether what is found for a result (0) or gradient (1) is the truth but for rounding."""
        if value is None or value.dtype not in _WIDE:
            return False
        truth, moved = self._truth(which, position)
        return truth is not None and _within(truth, moved, value)

    def _near(
        self,
        which: int,
        position: int,
        value: torch.Tensor | None,
        exact: tuple[Values, Values],
        near: float,
    ) -> bool:
        """Whether the program is right in double precision on this layout too, and *value* near to that."""
        if value is None or value.dtype not in _WIDE:
            return False
        truth, _ = self._truth(which, position)
        if truth is None or truth.shape != value.shape:
            return False
        if len(exact[which]) <= position or _differ(truth, exact[which][position], ""):
            return False
        finite = truth.isfinite()
        scale = max(1.0, float(torch.where(finite, truth, 0).abs().max()))
        wanted: tuple[Values, Values] = (self.results, self.gradients)
        plain = wanted[which][position]
        # The plain program may be far from the truth itself.
        own, gap = (
            torch.where(finite, found.detach().to(truth.dtype) - truth, 0).abs()
            for found in (value if plain is None else plain, value)
        )
        return bool((gap <= near * scale + 2 * float(own.max() if own.numel() else 0)).all())

    def _in_double(self) -> list[tuple[Values, Values]]:
        """What the program gives in double precision, then for inputs that were rounded; nothing if it cannot."""
        generator = torch.Generator().manual_seed(self.seed)
        exact = [
            tensor.detach().to(_WIDE.get(tensor.dtype, tensor.dtype)) for tensor in self.inputs
        ]
        runs = [exact]
        runs += [[_rounded(tensor, generator) for tensor in self.inputs] for _ in range(_PROBES)]
        try:
            return [
                self._run(
                    [
                        tensor.detach().clone().requires_grad_(own.requires_grad)
                        for tensor, own in zip(tensors, self.inputs, strict=True)
                    ]
                )
                for tensors in runs
            ]
        except Exception:  # noqa: BLE001  # a program that is for one dtype has no other truth
            return []


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
