"""Distributed tensors that never were whole: each rank makes only its piece.

The idea: what a factory gives on one device, laid out. Sizes are those of the whole tensor, as numbers or as one sequence;
pieces are those of the shard rule, on the device of the mesh.

The rule: a value that is still to be reduced cannot be filled in, so only :func:`zeros` and :func:`empty` take Partial.
Sequences (``arange``, ``linspace``, ``logspace``, ``randperm``) are computed whole and cut, since torch rounds an element by
where it stands in the vector loop; they have one dim, so that this costs little.

Inside a graph a factory is one call, made of its arguments: what it asks of meshes and caches is no business of a compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, cast

import torch
from torch import Generator, Tensor

from hp_dtensor import random
from hp_dtensor._torch import new_dtensor
from hp_dtensor.distribute import mesh_or_current
from hp_dtensor.draws import draw_into, peers_of, piece_of
from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import LayoutError
from hp_dtensor.layout import PlacementsLike, resolve
from hp_dtensor.random import Draw, cut, policy_of
from hp_dtensor.spec import Spec, contiguous_stride, make_spec

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh

__all__ = [
    "Size",
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "zeros",
]

Size = int | Sequence[int]

P = ParamSpec("P")

MAKERS: dict[str, Callable[..., DTensor]] = {}
"""The factories by name, as a graph calls them."""


def _in_graphs(make: Callable[P, DTensor]) -> Callable[P, DTensor]:
    """*make*, which a compiler puts into its graph as one call and does not look into."""
    MAKERS[make.__name__] = make

    @functools.wraps(make)
    def run(*args: P.args, **kwargs: P.kwargs) -> DTensor:
        if torch.compiler.is_compiling():
            from hp_dtensor import _compiled

            return cast("DTensor", _compiled.made(make.__name__, args, kwargs))
        return make(*args, **kwargs)

    return run


def _shape(size: tuple[Size, ...]) -> tuple[int, ...]:
    if len(size) == 1 and not isinstance(size[0], int):
        return tuple(size[0])
    return cast("tuple[int, ...]", size)


def _spec(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: torch.layout,
    device_mesh: DeviceMesh | None,
    placements: PlacementsLike | None,
    *,
    addends: bool = False,
) -> Spec:
    """The description of the result of the factory *name*, checked."""
    if layout is not torch.strided:
        msg = f"{name}: layout={layout} is not supported: a distributed tensor is cut by index, which takes torch.strided"
        raise LayoutError(msg)
    if any(size < 0 for size in shape):
        msg = f"{name}: shape {shape} has a negative size; sizes are the whole tensor's and at least 0"
        raise LayoutError(msg)
    mesh = mesh_or_current(device_mesh)
    resolved = resolve(placements, mesh, len(shape))
    if not addends and any(placement.is_partial() for placement in resolved):
        msg = f"{name} with placements {resolved}: a value that is still to be reduced cannot be filled in; use Replicate()"
        raise LayoutError(msg)
    return make_spec(mesh, resolved, shape, contiguous_stride(shape), dtype)


def _wrapped(local: Tensor, spec: Spec, requires_grad: bool) -> DTensor:
    out = cast("DTensor", new_dtensor(DTensor, local, spec, False))
    return out.requires_grad_(requires_grad)


def _filled(
    make: Callable[..., Tensor], spec: Spec, requires_grad: bool, *args: object
) -> DTensor:
    local = make(spec.local_shape, *args, dtype=spec.dtype, device=spec.mesh.device_type)
    return _wrapped(local, spec, requires_grad)


@_in_graphs
def zeros(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A distributed tensor of zeros; each rank makes only its own piece.

    Args:
        size: the global shape, as numbers or as one sequence.
        dtype: the element type; torch's default when None.
        layout: ``torch.strided``.
        requires_grad: whether operators on it are recorded.
        device_mesh: the devices; the current mesh when None.
        placements: the layout; replicated when None.

    Raises:
        LayoutError: when the placements do not fit, or *layout* is another one.

    Example:
        >>> from hp_dtensor import Shard, zeros
        >>> def rows(mesh):
        ...     return zeros(3, 2, device_mesh=mesh, placements=[Shard(0)])
    """
    kind = dtype or torch.get_default_dtype()
    spec = _spec("zeros", _shape(size), kind, layout, device_mesh, placements, addends=True)
    return _filled(torch.zeros, spec, requires_grad)


@_in_graphs
def ones(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A distributed tensor of ones; see :func:`zeros`. Partial placements are refused: each addend would be one."""
    kind = dtype or torch.get_default_dtype()
    spec = _spec("ones", _shape(size), kind, layout, device_mesh, placements)
    return _filled(torch.ones, spec, requires_grad)


@_in_graphs
def empty(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A distributed tensor whose values are yet to be written; see :func:`zeros`."""
    kind = dtype or torch.get_default_dtype()
    spec = _spec("empty", _shape(size), kind, layout, device_mesh, placements, addends=True)
    return _filled(torch.empty, spec, requires_grad)


@_in_graphs
def full(
    size: Size,
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A distributed tensor filled with *fill_value*; see :func:`zeros`. Partial placements are refused."""
    kind = dtype or torch.full((), fill_value).dtype
    spec = _spec("full", _shape((size,)), kind, layout, device_mesh, placements)
    return _filled(torch.full, spec, requires_grad, fill_value)


# --- drawn ------------------------------------------------------------------------------------


def _drawn(
    name: str, spec: Spec, draw: Draw, generator: Generator | None, requires_grad: bool
) -> DTensor:
    local = torch.empty(spec.local_shape, dtype=spec.dtype, device=spec.mesh.device_type)
    draw_into(local, spec, draw, generator, f"hp_dtensor.{name}")
    return _wrapped(local, spec, requires_grad)


@_in_graphs
def rand(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
    generator: Generator | None = None,
) -> DTensor:
    """Uniform numbers from [0, 1), the same whole tensor whatever the layout; see :func:`zeros` for the arguments.

    Args:
        size: the global shape, as numbers or as one sequence.
        dtype: the element type; torch's default when None.
        layout: ``torch.strided``.
        requires_grad: whether operators on it are recorded.
        device_mesh: the devices; the current mesh when None.
        placements: the layout; replicated when None.
        generator: where the randomness comes from; torch's default CPU generator when None.

    How numbers are drawn is chosen with :func:`hp_dtensor.set_random_policy`.

    Raises:
        LayoutError: when the placements do not fit or are Partial.

    Example:
        >>> from hp_dtensor import Shard, rand
        >>> def rows(mesh):
        ...     return rand(3, 2, device_mesh=mesh, placements=[Shard(0)])
    """
    kind = dtype or torch.get_default_dtype()
    spec = _spec("rand", _shape(size), kind, layout, device_mesh, placements)
    return _drawn("rand", spec, Draw("uniform_", (0.0, 1.0)), generator, requires_grad)


@_in_graphs
def randn(
    *size: Size,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
    generator: Generator | None = None,
) -> DTensor:
    """Standard normal numbers, the same whole tensor whatever the layout; see :func:`rand` for the arguments."""
    kind = dtype or torch.get_default_dtype()
    spec = _spec("randn", _shape(size), kind, layout, device_mesh, placements)
    return _drawn("randn", spec, Draw("normal_", (0.0, 1.0)), generator, requires_grad)


@_in_graphs
def randint(
    *bounds_and_size: Size,
    low: int | None = None,
    high: int | None = None,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
    generator: Generator | None = None,
) -> DTensor:
    """Integers from *low* (0 when left out) up to but without *high*, as ``randint(low, high, size)``.

    Args:
        bounds_and_size: ``low, high, size`` or ``high, size``; each also by name.
        low: the smallest integer.
        high: one more than the largest.
        size: the global shape.
        dtype: the element type; int64 when None.
        layout: ``torch.strided``.
        requires_grad: whether operators on it are recorded.
        device_mesh: the devices; the current mesh when None.
        placements: the layout; replicated when None.
        generator: where the randomness comes from; torch's default CPU generator when None.

    Raises:
        LayoutError: when the placements do not fit or are Partial.
        TypeError: when bounds or size are missing or too many.
    """
    given = list(bounds_and_size)
    shape = given.pop() if size is None and given else size
    top = given.pop() if high is None and given else high
    bottom = given.pop() if low is None and given else low
    if given or not isinstance(top, int) or shape is None or isinstance(shape, int):
        msg = (
            f"randint{bounds_and_size}: takes (high, size) or (low, high, size), where size is a sequence; "
            f"low={low}, high={high} and size={size} were given by name"
        )
        raise TypeError(msg)
    spec = _spec("randint", tuple(shape), dtype or torch.int64, layout, device_mesh, placements)
    draw = Draw("random_", (cast("int", bottom or 0), top))
    return _drawn("randint", spec, draw, generator, requires_grad)


def randperm(
    n: int,
    *,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
    generator: Generator | None = None,
) -> DTensor:
    """The first *n* integers in random order, the same whatever the layout; see :func:`rand` for the arguments.

    Each rank makes the whole order and keeps its piece. Not for graphs, which would hold on to the generator of one run.
    """
    spec = _spec("randperm", (n,), dtype, layout, device_mesh, placements)
    if spec.coordinate is None:
        random.retire(generator)
        return _filled(torch.empty, spec, requires_grad)
    mesh = spec.mesh
    whole = random.permutation(
        n,
        policy_of(mesh.device_type),
        peers_of(mesh, "hp_dtensor.randperm"),
        generator,
        dtype,
        torch.device(mesh.device_type),
    )
    return _wrapped(cut(whole, piece_of(spec).box).clone(), spec, requires_grad)


# --- in order ---------------------------------------------------------------------------------


def _sequence(
    name: str,
    make: Callable[..., Tensor],
    args: tuple[float, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: PlacementsLike | None,
) -> DTensor:
    model = make(*args, dtype=dtype, device="meta")
    spec = _spec(name, tuple(model.shape), model.dtype, layout, device_mesh, placements)
    if spec.coordinate is None:
        return _filled(torch.empty, spec, requires_grad)
    whole = make(*args, dtype=dtype, device=spec.mesh.device_type)
    return _wrapped(cut(whole, spec.local_box).clone(), spec, requires_grad)


@_in_graphs
def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """Numbers from *start* (0 when only one bound is given) up to but without *end*, *step* apart.

    See :func:`zeros` for the other arguments.
    """
    args = (0, start, step) if end is None else (start, end, step)
    return _sequence(
        "arange", torch.arange, args, dtype, layout, requires_grad, device_mesh, placements
    )


@_in_graphs
def linspace(
    start: float,
    end: float,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """*steps* numbers evenly spaced from *start* to *end*, both included; see :func:`zeros` for the other arguments."""
    args = (start, end, steps)
    return _sequence(
        "linspace", torch.linspace, args, dtype, layout, requires_grad, device_mesh, placements
    )


@_in_graphs
def logspace(
    start: float,
    end: float,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """*base* to the powers of :func:`linspace`; see :func:`zeros` for the other arguments."""
    args = (start, end, steps, base)
    return _sequence(
        "logspace", torch.logspace, args, dtype, layout, requires_grad, device_mesh, placements
    )


@_in_graphs
def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
) -> DTensor:
    """A matrix of *n* rows and *m* columns (*n* when None) with ones on its diagonal; see :func:`zeros`.

    Each rank makes only its own piece.
    """
    shape = (n, n if m is None else m)
    kind = dtype or torch.get_default_dtype()
    spec = _spec("eye", shape, kind, layout, device_mesh, placements)
    device = spec.mesh.device_type
    if spec.coordinate is None:
        return _filled(torch.empty, spec, requires_grad)
    rows, columns = (
        torch.cat([torch.arange(a, b, device=device) for a, b in intervals] or [torch.empty(0)])
        for intervals in spec.local_box
    )
    return _wrapped((rows[:, None] == columns).to(kind), spec, requires_grad)
