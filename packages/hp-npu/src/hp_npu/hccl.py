"""What HCCL can do, as data, and how what it cannot do is done exactly.

The idea: the table says which dtypes each collective takes and which reductions there are.
`reduction_route` reads it and says, as a value, how a reduction that HCCL lacks is made of ones it
has: through another dtype, as real numbers, by a division of ours, or by gathering every rank's
share and combining here. `all_reduce` and `reduce_scatter` walk a route; they are thin, and run on
any backend, so that each route is tested against one that has the reduction.

The rule: a route gives what a backend with that reduction would give, the argument is left as it
was, and nothing costs more than about twice the bytes unless the caller says ``gather=True``.
Where there is no such route the error says what to cast to.

Traps of HCCL that the routes keep away from: an average is a sum and a division inside the
backend, a pre-multiplied sum writes to the caller's tensor, bytes and bools are all-reduced and
not reduce-scattered.

The design not taken: sending 64-bit floats as 32-bit ones. Numbers would change without a word.

Facts were measured on the front end of torch-npu 2.13; a dtype that it takes and the vendor's
pages do not promise is `Support.UNDOCUMENTED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

import torch
from hp_mesh import BackendError, backends, collectives
from hp_mesh.backends import Capability, Collective, Reduction, Support

from hp_npu.probe import initialised_device_name

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = [
    "HCCL",
    "HCCL_ASCEND950",
    "Route",
    "all_reduce",
    "capabilities",
    "capability_of",
    "reduce_scatter",
    "reduction_route",
]

# --- the table ----------------------------------------------------------------------------------

HCCL: Capability = backends.HCCL
"""HCCL up to the 910 family, as hp-mesh describes it; a communicator has a send and a receive buffer of 200 MiB."""

HCCL_ASCEND950: Capability = replace(
    HCCL,
    reduces={
        collective: known | {torch.float64, torch.uint64}
        for collective, known in HCCL.reduces.items()
    },
)
"""HCCL on Ascend 950 devices, which also reduce float64 and uint64."""


def capability_of(device_name: str | None) -> Capability:
    """Return what HCCL can do on a device of that name; the lesser table if the name is not known.

    Example:
        >>> import torch
        >>> from hp_mesh.backends import Collective
        >>> torch.float64 in capability_of("Ascend950PR").reduces[Collective.ALL_REDUCE]
        True
        >>> torch.float64 in capability_of("Ascend910B1").reduces[Collective.ALL_REDUCE]
        False
    """
    return (
        HCCL_ASCEND950 if device_name is not None and device_name.startswith("Ascend950") else HCCL
    )


def capabilities() -> tuple[Capability, ...]:
    """Return the backends of this package; the entry point in ``hp.accelerators`` names this.

    The table is the one of the current device if that has been started, else the lesser one:
    neither torch_npu nor a device is started by asking.

    Example:
        >>> [capability.name for capability in capabilities()]
        ['hccl']
    """
    return (capability_of(initialised_device_name()),)


# --- routes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """How one reduction is made of what a backend has."""

    reduction: Reduction
    """What the backend is asked to do."""
    as_real: bool = False
    """Whether complex numbers go as pairs of real ones."""
    wire: torch.dtype | None = None
    """The dtype that values are cast to before and from after; None for their own."""
    scale: bool = False
    """Whether values are multiplied by a factor before, by us and into a new tensor."""
    divide: bool = False
    """Whether the result is divided by the number of ranks afterwards."""
    gather: bool = False
    """Whether shares are gathered and combined here, at the group's size times the bytes."""


_COMPLEX = MappingProxyType({torch.complex64: torch.float32, torch.complex128: torch.float64})
_LOGICAL = MappingProxyType(
    {
        Reduction.SUM: Reduction.MAX,
        Reduction.MAX: Reduction.MAX,
        Reduction.PRODUCT: Reduction.MIN,
        Reduction.MIN: Reduction.MIN,
        Reduction.BOR: Reduction.MAX,
        Reduction.BAND: Reduction.MIN,
    }
)
_BITWISE = frozenset({Reduction.BAND, Reduction.BOR, Reduction.BXOR})
_CAST_TO = MappingProxyType(
    {
        torch.uint16: "int32",
        torch.uint32: "int64",
        torch.uint64: "int64",
    }
)


def _wider(dtype: torch.dtype) -> str | None:
    """What the caller may cast to; we don't, since the result would not be what was asked for."""
    return "bfloat16" if dtype.is_floating_point and dtype.itemsize == 1 else _CAST_TO.get(dtype)


def reduction_route(
    collective: Collective,
    dtype: torch.dtype,
    reduction: Reduction,
    *,
    gather: bool = False,
    capability: Capability = HCCL,
) -> Route:
    """Say how *reduction* of *dtype* is done exactly with what *capability* has.

    Args:
        collective: one that combines values.
        dtype: of the tensors.
        reduction: how values are combined.
        gather: whether gathering every rank's share is a way, at the group's size times the bytes
            and memory.
        capability: what the backend can do.

    Raises:
        BackendError: (a `ValueError`) if there is no exact way; says what to cast to, or that
            ``gather=True`` is one.
        ValueError: if *collective* does not combine values.

    Example:
        >>> import torch
        >>> from hp_mesh.backends import Collective, Reduction
        >>> route = reduction_route(Collective.REDUCE_SCATTER, torch.bool, Reduction.SUM)
        >>> route.reduction.value, route.wire
        ('max', torch.int32)
    """
    if not collective.reduces:
        raise ValueError(
            f"{collective.value} combines nothing, so there is no route for a reduction"
        )
    taken = capability.reduces[collective]
    meaningless = _meaningless(dtype, reduction)
    if meaningless:
        raise BackendError(
            f"{capability.name}: {collective.value} of {dtype} with {reduction.value}: {meaningless}"
        )
    if dtype is torch.bool and reduction in _LOGICAL:
        return Route(_LOGICAL[reduction], wire=torch.int32)
    if dtype.is_complex:
        route = reduction_route(
            collective, _COMPLEX[dtype], reduction, gather=gather, capability=capability
        )
        return Route(
            route.reduction,
            as_real=True,
            scale=route.scale,
            divide=route.divide,
            gather=route.gather,
        )
    wire = torch.int32 if dtype is torch.uint8 and reduction not in _BITWISE else None
    scale = reduction is Reduction.PREMUL_SUM
    divide = reduction is Reduction.AVG
    asked = Reduction.SUM if scale or divide else reduction
    known = capability.reductions.get(asked, Support.UNSUPPORTED) is Support.NATIVE
    if known and (wire or dtype) in taken:
        return Route(asked, wire=wire, scale=scale, divide=divide)
    wider = _wider(dtype)
    if wider is not None and reduction not in _BITWISE:
        raise BackendError(
            f"{capability.name} does not {collective.value} {dtype}; cast to {wider} first, and back after"
        )
    if not gather:
        cheaper = "; or cast to float32 first, which rounds" if dtype is torch.float64 else ""
        raise BackendError(
            f"{capability.name} does not {collective.value} {dtype} with {reduction.value}. Pass gather=True to gather "
            f"every rank's share and combine it here, at the group's size times the bytes{cheaper}"
        )
    return Route(asked, scale=scale, divide=divide, gather=True)


def _meaningless(dtype: torch.dtype, reduction: Reduction) -> str | None:
    """Why no backend could do that, or None."""
    inexact = dtype.is_floating_point or dtype.is_complex
    if reduction in {Reduction.AVG, Reduction.PREMUL_SUM} and not inexact:
        return "the result is no integer; cast to a floating-point dtype first"
    if reduction in _BITWISE and inexact:
        return "bits of a floating-point number combine to nothing; cast to an integer dtype first"
    if dtype.is_complex and reduction not in {Reduction.SUM, Reduction.AVG, Reduction.PREMUL_SUM}:
        return "real and imaginary parts can't be combined apart; only sum, avg and premul_sum can"
    return None


# --- walking a route ----------------------------------------------------------------------------


def all_reduce(
    tensor: Tensor,
    reduction: Reduction,
    group: ProcessGroup,
    *,
    factor: float | None = None,
    gather: bool = False,
    capability: Capability = HCCL,
) -> Tensor:
    """Return the reduction of every rank's *tensor*, by what *capability* has.

    Args:
        tensor: of the same shape and dtype on every rank; it is not written to.
        reduction: how values are combined.
        group: the ranks that take part.
        factor: for `Reduction.PREMUL_SUM`, what values are multiplied by.
        gather: as in `reduction_route`.
        capability: what the backend can do.

    Raises:
        BackendError: as `reduction_route`.
        ValueError: if there is a *factor* without a PREMUL_SUM, or the other way round.
    """
    route = reduction_route(
        Collective.ALL_REDUCE, tensor.dtype, reduction, gather=gather, capability=capability
    )
    sent = _pack(tensor, route, reduction, factor)
    if route.gather:
        whole = collectives.all_gather(sent.unsqueeze(0), group)
        return _unpack(_combine(whole, route.reduction), route, tensor.dtype, group)
    return _unpack(collectives.all_reduce(sent, _op(route), group), route, tensor.dtype, group)


def reduce_scatter(
    tensor: Tensor,
    reduction: Reduction,
    group: ProcessGroup,
    *,
    factor: float | None = None,
    gather: bool = False,
    capability: Capability = HCCL,
) -> Tensor:
    """Return this rank's piece, along dim 0, of the reduction of every rank's *tensor*.

    Arguments and errors are those of `all_reduce`; the group's size divides dim 0. What is
    gathered is each rank's piece for each other, so a gather costs no more bytes than the argument
    has.
    """
    route = reduction_route(
        Collective.REDUCE_SCATTER, tensor.dtype, reduction, gather=gather, capability=capability
    )
    sent = _pack(tensor, route, reduction, factor)
    if route.gather:
        size, rows = group.size(), _piece(sent.shape[0], group.size())
        pieces = collectives.all_to_all(sent, [rows] * size, [rows] * size, group)
        combined = _combine(pieces.view(size, rows, *sent.shape[1:]), route.reduction)
        return _unpack(combined, route, tensor.dtype, group)
    return _unpack(collectives.reduce_scatter(sent, _op(route), group), route, tensor.dtype, group)


def _piece(rows: int, size: int) -> int:
    if rows % size:
        raise ValueError(f"dim 0 has {rows} rows, which {size} ranks do not divide; pad it first")
    return rows // size


def _op(route: Route) -> collectives.ReduceOp:
    return cast("Literal['sum', 'max', 'min', 'product']", route.reduction.value)


def _pack(tensor: Tensor, route: Route, reduction: Reduction, factor: float | None) -> Tensor:
    if (factor is None) == (reduction is Reduction.PREMUL_SUM):
        raise ValueError(
            f"factor is {factor} and the reduction is {reduction.value}; premul_sum has one, others none"
        )
    sent = tensor if factor is None else tensor * factor
    sent = torch.view_as_real(sent.resolve_conj()) if route.as_real else sent
    return (sent if route.wire is None else sent.to(route.wire)).contiguous()


def _unpack(result: Tensor, route: Route, dtype: torch.dtype, group: ProcessGroup) -> Tensor:
    if route.divide:
        result = result / group.size()
    if route.as_real:
        return torch.view_as_complex(result)
    return result.to(dtype)


_PAIRWISE: Mapping[Reduction, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        Reduction.SUM: torch.add,
        Reduction.PRODUCT: torch.mul,
        Reduction.MIN: torch.minimum,
        Reduction.MAX: torch.maximum,
        Reduction.BAND: torch.bitwise_and,
        Reduction.BOR: torch.bitwise_or,
        Reduction.BXOR: torch.bitwise_xor,
    }
)


def _combine(shares: Tensor, reduction: Reduction) -> Tensor:
    """Combine along dim 0, in rank order, so that every rank gets the same bits."""
    return reduce(_PAIRWISE[reduction], shares.unbind(0))
