"""The capability table: against gloo as it is, against HCCL's documents, and its own questions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hp_mesh import (
    BackendError,
    Capability,
    Collective,
    MeshError,
    Reduction,
    Support,
    backends,
    get_capability,
)
from hp_mesh.testing import spmd

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]
REDUCTIONS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.AVG: dist.ReduceOp.AVG,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
    Reduction.BAND: dist.ReduceOp.BAND,
    Reduction.BXOR: dist.ReduceOp.BXOR,
}


@pytest.fixture(autouse=True)
def _forget_discoveries() -> Iterator[None]:
    backends.discovered.cache_clear()
    yield
    backends.discovered.cache_clear()


def _tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(4).to(dtype)


@spmd(world_size=2)
def test_the_gloo_column_is_what_gloo_does() -> None:
    """For every dtype, moving and summing works exactly where the table says so."""
    gloo = get_capability("gloo")
    run = {
        Collective.ALL_REDUCE: lambda d: dist.all_reduce(_tensor(d)),
        Collective.REDUCE_SCATTER: lambda d: dist.reduce_scatter_tensor(
            torch.empty(2, dtype=d), _tensor(d)
        ),
        Collective.REDUCE: lambda d: dist.reduce(_tensor(d), 0),
        Collective.ALL_GATHER: lambda d: dist.all_gather_into_tensor(
            torch.empty(8, dtype=d), _tensor(d)
        ),
        Collective.ALL_TO_ALL: lambda d: dist.all_to_all_single(_tensor(d), _tensor(d)),
        Collective.BROADCAST: lambda d: dist.broadcast(_tensor(d), 0),
    }
    wrong = []
    for op, call in run.items():
        for dtype in DTYPES:
            told = gloo.check(op, dtype, Reduction.SUM if op.reduces else None)
            try:
                call(dtype)
                works = True
            except (RuntimeError, ValueError):
                works = False
            if works != (told is not Support.UNSUPPORTED):
                wrong.append((op, dtype, told))
    assert wrong == []


@spmd(world_size=2)
def test_the_gloo_reductions_are_what_gloo_does() -> None:
    """Each reduce operator works on floats and ints exactly where the table says so."""
    gloo = get_capability("gloo")
    wrong = []
    for reduction, op in REDUCTIONS.items():
        for dtype in (torch.float32, torch.int32):
            told = gloo.check(Collective.ALL_REDUCE, dtype, reduction)
            try:
                dist.all_reduce(_tensor(dtype), op=op)
                works = True
            except (RuntimeError, ValueError):
                works = False
            if works != (told is not Support.UNSUPPORTED):
                wrong.append((reduction, dtype, told))
    assert wrong == []


def test_the_hccl_column_keeps_what_was_measured() -> None:
    """HCCL: bool and bytes are reduced but not reduce-scattered, AVG is emulated, no bit operators."""
    hccl = backends.HCCL  # hp-npu, where installed, brings a table of its own
    reduce, scatter = Collective.ALL_REDUCE, Collective.REDUCE_SCATTER
    assert hccl.check(reduce, torch.bool, Reduction.SUM) is Support.NATIVE
    assert hccl.check(reduce, torch.uint8, Reduction.SUM) is Support.UNDOCUMENTED
    assert hccl.check(scatter, torch.uint8, Reduction.SUM) is Support.UNSUPPORTED
    assert hccl.check(scatter, torch.bool, Reduction.SUM) is Support.UNSUPPORTED
    assert hccl.check(reduce, torch.float64, Reduction.SUM) is Support.UNSUPPORTED
    assert hccl.check(reduce, torch.float32, Reduction.AVG) is Support.EMULATED
    assert hccl.check(reduce, torch.int32, Reduction.BAND) is Support.UNSUPPORTED
    assert hccl.check(Collective.ALL_GATHER, torch.float64) is Support.UNDOCUMENTED
    assert hccl.check(Collective.SEND, torch.float64) is Support.NATIVE
    assert not hccl.supports_splitting
    assert hccl.premul_mutates_input
    assert hccl.communicator_bytes == 400 * 2**20


def test_other_columns() -> None:
    """NCCL moves 8-bit floats and adds none of them; the fake backend takes all."""
    nccl, fake = backends.NCCL, backends.FAKE
    assert nccl.check(Collective.BROADCAST, torch.float8_e5m2) is Support.NATIVE
    assert (
        nccl.check(Collective.ALL_REDUCE, torch.float8_e5m2, Reduction.SUM) is Support.UNSUPPORTED
    )
    assert nccl.check(Collective.ALL_REDUCE, torch.int64, Reduction.AVG) is Support.UNSUPPORTED
    assert nccl.supports_splitting
    assert all(fake.check(Collective.BROADCAST, d) is Support.NATIVE for d in DTYPES)


def test_require_says_what_would_do() -> None:
    """require() raises with the dtypes and operators that are taken."""
    hccl = backends.HCCL  # hp-npu, where installed, brings a table of its own
    with pytest.raises(
        BackendError,
        match=r"hccl cannot reduce_scatter torch.bool with sum. It takes bfloat16, .*, with sum, avg, ",
    ):
        hccl.require(Collective.REDUCE_SCATTER, torch.bool, Reduction.SUM)
    with pytest.raises(BackendError, match=r"hccl cannot broadcast torch.complex128. It takes"):
        hccl.require(Collective.BROADCAST, torch.complex128)
    assert hccl.require(Collective.BROADCAST, torch.int8) is Support.NATIVE


def test_check_wants_a_reduction_where_values_are_combined() -> None:
    """A reduction is needed for all-reduce and refused for broadcast."""
    gloo = get_capability("gloo")
    with pytest.raises(MeshError, match="all_reduce needs a reduction; got None"):
        gloo.check(Collective.ALL_REDUCE, torch.float32)
    with pytest.raises(MeshError, match="broadcast combines nothing, so takes no reduction"):
        gloo.check(Collective.BROADCAST, torch.float32, Reduction.SUM)


PIGEON = Capability("pigeon", "cpu", moves={}, reduces={}, reductions={})


def provide() -> list[Capability]:
    """Describe a backend, as another package would."""
    return [PIGEON]


def broken() -> list[Capability]:
    """Fail, as a broken installation would."""
    message = "no driver"
    raise OSError(message)


def _install(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = importlib.metadata.EntryPoint("pigeon", value, backends.ENTRY_POINTS)
    real = importlib.metadata.entry_points

    def entry_points(**wanted: str) -> importlib.metadata.EntryPoints:
        mine = importlib.metadata.EntryPoints([entry]).select(**wanted)
        return importlib.metadata.EntryPoints([*real(**wanted), *mine])

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_installed_packages_describe_further_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point named as its backend is loaded when that backend is asked for."""
    with pytest.raises(BackendError, match="Nothing is known of the backend 'pigeon'; known are"):
        get_capability("pigeon")
    backends.discovered.cache_clear()
    monkeypatch.setattr(backends, "test_provider", provide, raising=False)
    _install(monkeypatch, "hp_mesh.backends:test_provider")
    assert get_capability("pigeon") is PIGEON
    assert "pigeon" in backends.registered()


def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that fails to describe its backend is named with its error; others still work."""
    monkeypatch.setattr(backends, "test_provider", broken, raising=False)
    _install(monkeypatch, "hp_mesh.backends:test_provider")
    with pytest.raises(BackendError, match=r"'pigeon' of group .* OSError: no driver"):
        get_capability("pigeon")
    assert get_capability("gloo").name == "gloo"
