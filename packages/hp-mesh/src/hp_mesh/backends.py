"""What a communication backend can do, as data, so that a plan can be checked before it runs.

The rule: a capability is a table of facts (which dtypes a collective moves or reduces, which reduce
operators it has, what it costs), and `Capability.check` reads it. Code that works round a missing
feature asks the table; it never asks for a backend by name.
Facts of gloo were measured on torch 2.12 and 2.15, those of HCCL on torch-npu 2.13's front end, where
what the front end takes and the vendor's table does not promise is `Support.UNDOCUMENTED`.

Further backends come through the entry point group ``hp.accelerators``: an entry is named as its
backend and is a function of no arguments that returns `Capability` objects. It is loaded when that
backend is first asked for, and wins over ours, since a vendor knows its newer chips.

Not taken: probing a backend at start, which needs a group, costs time and fails differently per rank;
comparing versions, which says little about a vendor's build.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Literal, cast

import torch

from .errors import BackendError, MeshError

__all__ = ["Capability", "Collective", "Reduction", "Support", "get_capability"]

ENTRY_POINTS = "hp.accelerators"
"""The entry point group that further backends register in."""


class Collective(Enum):
    """A communication."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SEND = "send"

    @property
    def reduces(self) -> bool:
        """Whether values are combined, not only moved."""
        return self in {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE}


class Reduction(Enum):
    """How values of several ranks become one."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    PREMUL_SUM = "premul_sum"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


class Support(Enum):
    """How well a backend serves a communication."""

    NATIVE = "native"
    """In one call, exactly."""
    EMULATED = "emulated"
    """In several steps inside the backend, which may round or overflow between them."""
    UNDOCUMENTED = "undocumented"
    """Taken by the front end, not promised by the vendor."""
    UNSUPPORTED = "unsupported"
    """Refused."""


_Dtypes = frozenset[torch.dtype]

_BITWISE = frozenset({Reduction.BAND, Reduction.BOR, Reduction.BXOR})
_INTEGERS = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)
_WIDE_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_ALL = _INTEGERS | _FLOATS | _COMPLEX | _FLOAT8


@dataclass(frozen=True, slots=True, eq=False)
class Capability:
    """What one backend can do.

    Example:
        >>> import torch
        >>> from hp_mesh import Collective, Reduction, get_capability
        >>> hccl = get_capability("hccl")
        >>> hccl.check(Collective.REDUCE_SCATTER, torch.bool, Reduction.SUM)
        <Support.UNSUPPORTED: 'unsupported'>
        >>> hccl.check(Collective.ALL_REDUCE, torch.bfloat16, Reduction.AVG)
        <Support.EMULATED: 'emulated'>
    """

    name: str
    """The backend's name in torch."""
    device_type: str
    """The devices it is for."""
    moves: Mapping[Collective, _Dtypes]
    """Dtypes that the collectives without arithmetic take."""
    reduces: Mapping[Collective, _Dtypes]
    """Dtypes that the collectives with arithmetic take."""
    reductions: Mapping[Reduction, Support]
    """The reduce operators; those left out are refused."""
    documented: Mapping[Collective, _Dtypes] | None = None
    """What the vendor promises, where it is less than the front end takes."""
    supports_splitting: bool = False
    """Whether a communicator can be made from a larger one (`split_group`)."""
    supports_coalescing: bool = True
    """Whether several collectives can be launched as one."""
    uneven: Literal["list", "single_node", "none"] = "list"
    """Shares of different size in all-gather and reduce-scatter: as a list of tensors, only inside one
    machine, or not at all. All-to-all takes uneven splits on every backend here."""
    needs_contiguous: bool = True
    """Whether tensors must be contiguous."""
    zero_dim_all_to_all: bool = False
    """Whether all-to-all takes a tensor without dims."""
    premul_mutates_input: bool = False
    """Whether PREMUL_SUM writes to the tensor it is given."""
    communicator_bytes: int = 0
    """Device memory that a communicator takes, about."""

    def check(
        self, op: Collective, dtype: torch.dtype, reduction: Reduction | None = None
    ) -> Support:
        """Say how the backend serves *op* on tensors of *dtype*.

        Args:
            op: the collective.
            dtype: of the tensors.
            reduction: how values are combined; needed where *op* combines values.

        Raises:
            MeshError: (a `ValueError`) if *reduction* is missing, or given where nothing is combined.
        """
        if op.reduces != (reduction is not None):
            need = "needs a reduction" if op.reduces else "combines nothing, so takes no reduction"
            message = f"{op.value} {need}; got {reduction!r}."
            raise MeshError(message)
        table = self.reduces if op.reduces else self.moves
        if dtype not in table.get(op, frozenset()):
            return Support.UNSUPPORTED
        support = Support.NATIVE
        if reduction is not None:
            support = self.reductions.get(reduction, Support.UNSUPPORTED)
            if reduction in _BITWISE and dtype not in _INTEGERS:
                support = Support.UNSUPPORTED
            if reduction is Reduction.AVG and dtype in _INTEGERS:
                support = Support.UNSUPPORTED
        promised = None if self.documented is None else self.documented.get(op)
        if support is Support.NATIVE and promised is not None and dtype not in promised:
            return Support.UNDOCUMENTED
        return support

    def require(
        self, op: Collective, dtype: torch.dtype, reduction: Reduction | None = None
    ) -> Support:
        """Return `check`, or raise where the answer is no.

        Raises:
            BackendError: names the backend, the dtype, and what would be taken.
        """
        support = self.check(op, dtype, reduction)
        if support is Support.UNSUPPORTED:
            table = self.reduces if op.reduces else self.moves
            legal = sorted(str(d).removeprefix("torch.") for d in table.get(op, frozenset()))
            how = f" with {reduction.value}" if reduction else ""
            message = (
                f"{self.name} cannot {op.value} {dtype}{how}. It takes {', '.join(legal) or 'nothing'}"
                f"{self._reductions(op)}. Cast the tensor first."
            )
            raise BackendError(message)
        return support

    def _reductions(self, op: Collective) -> str:
        if not op.reduces:
            return ""
        known = (r.value for r, s in self.reductions.items() if s is not Support.UNSUPPORTED)
        return f", with {', '.join(known)}"


def _table(dtypes: _Dtypes, *ops: Collective) -> dict[Collective, _Dtypes]:
    return dict.fromkeys(ops, dtypes)


_MOVING = tuple(op for op in Collective if not op.reduces)
_REDUCING = tuple(op for op in Collective if op.reduces)
_NATIVE = MappingProxyType(dict.fromkeys(Reduction, Support.NATIVE))

_GLOO_DTYPES = (
    frozenset({torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}) | _FLOATS | _COMPLEX
)

GLOO = Capability(
    name="gloo",
    device_type="cpu",
    moves=_table(_GLOO_DTYPES, *_MOVING) | {Collective.SEND: _ALL},
    reduces=_table(_GLOO_DTYPES, *_REDUCING),
    reductions={
        Reduction.SUM: Support.NATIVE,
        # A sum, then a division by torch.
        Reduction.AVG: Support.EMULATED,
        Reduction.MIN: Support.NATIVE,
        Reduction.MAX: Support.NATIVE,
        Reduction.PRODUCT: Support.NATIVE,
        Reduction.BAND: Support.NATIVE,
        Reduction.BOR: Support.NATIVE,
        Reduction.BXOR: Support.NATIVE,
    },
    supports_coalescing=False,
    needs_contiguous=False,
)
"""gloo on the host."""

_NCCL_DTYPES = _GLOO_DTYPES

NCCL = Capability(
    name="nccl",
    device_type="cuda",
    moves=_table(_NCCL_DTYPES | _FLOAT8, *_MOVING),
    reduces=_table(_NCCL_DTYPES - _COMPLEX, *_REDUCING),
    reductions={
        Reduction.SUM: Support.NATIVE,
        Reduction.AVG: Support.NATIVE,
        Reduction.MIN: Support.NATIVE,
        Reduction.MAX: Support.NATIVE,
        Reduction.PRODUCT: Support.NATIVE,
        Reduction.PREMUL_SUM: Support.NATIVE,
    },
    supports_splitting=True,
    communicator_bytes=64 * 2**20,
)
"""NCCL on CUDA devices. The memory is that of its channels' buffers; it grows with peers and channels."""

_HCCL_INTS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
_HCCL_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})
_HCCL_SUMS = _HCCL_INTS | _HCCL_FLOATS

HCCL = Capability(
    name="hccl",
    device_type="npu",
    moves=_table(_ALL - {torch.complex128}, *_MOVING),
    reduces={
        Collective.ALL_REDUCE: _HCCL_SUMS | {torch.uint8, torch.bool, torch.complex64},
        Collective.REDUCE: _HCCL_SUMS | {torch.uint8, torch.bool},
        Collective.REDUCE_SCATTER: _HCCL_SUMS,
    },
    reductions={
        Reduction.SUM: Support.NATIVE,
        # A sum, then a division on the host's order: fp16 can overflow before it.
        Reduction.AVG: Support.EMULATED,
        Reduction.MIN: Support.NATIVE,
        Reduction.MAX: Support.NATIVE,
        Reduction.PRODUCT: Support.NATIVE,
        Reduction.PREMUL_SUM: Support.EMULATED,
    },
    documented={
        Collective.ALL_REDUCE: _HCCL_FLOATS | {torch.int32, torch.int64, torch.bool},
        Collective.REDUCE_SCATTER: _HCCL_FLOATS | {torch.int8, torch.int32},
        Collective.ALL_GATHER: _HCCL_FLOATS | {torch.int8, torch.int32, torch.bool},
        Collective.ALL_TO_ALL: frozenset({torch.float32}),
    },
    uneven="single_node",
    premul_mutates_input=True,
    communicator_bytes=400 * 2**20,
)
"""HCCL on Ascend devices: one send and one receive buffer of 200 MB each per communicator."""

FAKE = Capability(
    name="fake",
    device_type="cpu",
    moves=_table(_ALL, *_MOVING),
    reduces=_table(_ALL, *_REDUCING),
    reductions=_NATIVE,
    needs_contiguous=False,
    zero_dim_all_to_all=True,
)
"""Torch's fake backend: takes everything, moves nothing."""

_OURS = {capability.name: capability for capability in (GLOO, NCCL, HCCL, FAKE)}


def registered() -> tuple[str, ...]:
    """Return the backends that installed packages describe; loads none of these packages."""
    return tuple(entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS))


@cache
def discovered(backend: str) -> Capability | None:
    """Return what an installed package says of *backend*, if one does.

    Raises:
        BackendError: if the package cannot be loaded or answers something else.
    """
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=backend):
        try:
            provide = cast("Callable[[], Iterable[Capability]]", entry.load())
            found = {capability.name: capability for capability in provide()}
            return found[backend]
        except Exception as error:
            message = (
                f"The entry point {entry.name!r} of group {ENTRY_POINTS!r} ({entry.value}) could not "
                f"tell what its backend can do: {type(error).__name__}: {error}. Repair or uninstall "
                "its package."
            )
            raise BackendError(message) from error
    return None


def get_capability(backend: str) -> Capability:
    """Return what *backend* can do.

    Raises:
        BackendError: (a `ValueError`) if no package at hand describes it.

    Example:
        >>> from hp_mesh import get_capability
        >>> get_capability("gloo").supports_splitting
        False
    """
    capability = discovered(backend) or _OURS.get(backend)
    if capability is None:
        known = ", ".join(sorted({*_OURS, *registered()}))
        message = (
            f"Nothing is known of the backend {backend!r}; known are {known}. "
            f"A package can describe it through the entry point group {ENTRY_POINTS!r}."
        )
        raise BackendError(message)
    return capability
