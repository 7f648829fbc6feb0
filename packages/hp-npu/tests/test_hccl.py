"""The HCCL table against the published one, and each way round a gap against a backend that has no gap."""

import importlib.metadata

import pytest
import torch
import torch.distributed as dist
from hp_mesh import BackendError
from hp_mesh.backends import Collective, Reduction, Support, get_capability
from hp_mesh.testing import spmd
from hp_npu import hccl
from hp_npu.hccl import HCCL, HCCL_ASCEND950, Route, reduction_route

C, R, S = Collective, Reduction, Support

# Written from the measured table, a row per collective; what is not in a row is refused.
REDUCES = {
    C.ALL_REDUCE: "float16 bfloat16 float32 int8 int16 int32 int64 uint8 bool complex64",
    C.REDUCE: "float16 bfloat16 float32 int8 int16 int32 int64 uint8 bool",
    C.REDUCE_SCATTER: "float16 bfloat16 float32 int8 int16 int32 int64",
}
MOVED = (
    "uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 bool "
    "float8_e4m3fn float8_e5m2 complex64"
)
EVERY = f"{MOVED} complex128 float8_e4m3fnuz float8_e5m2fnuz"
PROMISED = {
    C.ALL_REDUCE: "bfloat16 float16 float32 int32 int64 bool",
    C.REDUCE_SCATTER: "bfloat16 float16 float32 int8 int32",
}


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch has under *name*."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", REDUCES)
def test_reductions_take_the_measured_dtypes(collective: Collective) -> None:
    """A sum is taken for the dtypes of the measured row, refused for every other."""
    taken = {
        name
        for name in EVERY.split()
        if HCCL.check(collective, dtype_of(name), R.SUM) is not S.UNSUPPORTED
    }
    assert taken == set(REDUCES[collective].split())


@pytest.mark.parametrize("collective", [C.ALL_GATHER, C.ALL_TO_ALL, C.BROADCAST, C.SEND])
def test_moves_take_the_measured_dtypes(collective: Collective) -> None:
    """Collectives without arithmetic take every dtype but the other 8-bit floats and 128-bit complex."""
    taken = {
        name
        for name in EVERY.split()
        if HCCL.check(collective, dtype_of(name)) is not S.UNSUPPORTED
    }
    assert taken == set(MOVED.split())


@pytest.mark.parametrize("collective", PROMISED)
def test_what_the_vendor_does_not_promise_is_marked(collective: Collective) -> None:
    """Of the dtypes taken, those outside of the vendor's page are UNDOCUMENTED, the others NATIVE."""
    native = {n for n in EVERY.split() if HCCL.check(collective, dtype_of(n), R.SUM) is S.NATIVE}
    undocumented = {
        n for n in EVERY.split() if HCCL.check(collective, dtype_of(n), R.SUM) is S.UNDOCUMENTED
    }
    assert native == set(PROMISED[collective].split())
    assert undocumented == set(REDUCES[collective].split()) - native


@pytest.mark.parametrize(
    ("reduction", "support"),
    [
        (R.SUM, S.NATIVE),
        (R.MIN, S.NATIVE),
        (R.MAX, S.NATIVE),
        (R.PRODUCT, S.NATIVE),
        (R.AVG, S.EMULATED),
        (R.PREMUL_SUM, S.EMULATED),
        (R.BAND, S.UNSUPPORTED),
        (R.BOR, S.UNSUPPORTED),
        (R.BXOR, S.UNSUPPORTED),
    ],
)
def test_reduce_operators_have_the_measured_support(
    reduction: Reduction, support: Support
) -> None:
    """Average and pre-multiplied sum are emulated, bitwise operators refused."""
    dtype = torch.int32 if support is S.UNSUPPORTED else torch.float32
    assert HCCL.check(C.ALL_REDUCE, dtype, reduction) is support


def test_an_average_of_integers_is_refused() -> None:
    """HCCL would divide in place; the table says no."""
    assert HCCL.check(C.ALL_REDUCE, torch.int32, R.AVG) is S.UNSUPPORTED


def test_the_950_also_reduces_doubles_and_wide_unsigned() -> None:
    """The newer chips add float64 and uint64 to every reduction and nothing else."""
    for collective in REDUCES:
        added = HCCL_ASCEND950.reduces[collective] - HCCL.reduces[collective]
        assert added == {torch.float64, torch.uint64}
    assert HCCL_ASCEND950.moves == HCCL.moves


def test_the_other_facts_are_those_measured() -> None:
    """No splitting, contiguous tensors only, a mutated pre-multiplied input, 400 MiB a communicator."""
    assert (HCCL.name, HCCL.device_type) == ("hccl", "npu")
    assert not HCCL.supports_splitting
    assert HCCL.supports_coalescing
    assert HCCL.needs_contiguous
    assert not HCCL.zero_dim_all_to_all
    assert HCCL.premul_mutates_input
    assert HCCL.uneven == "single_node"
    assert HCCL.communicator_bytes == 400 * 1024 * 1024


def test_hp_mesh_finds_the_table_by_its_entry_point() -> None:
    """The installed package is listed in the group that hp-mesh reads, and hp-mesh answers with our table."""
    names = [
        entry.value
        for entry in importlib.metadata.entry_points(group="hp.accelerators", name="hccl")
    ]
    assert "hp_npu.hccl:capabilities" in names
    assert get_capability("hccl") is HCCL


# --- routes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int8, torch.int64], ids=str
)
@pytest.mark.parametrize("reduction", [R.SUM, R.MIN, R.MAX, R.PRODUCT])
def test_what_hccl_has_goes_straight(dtype: torch.dtype, reduction: Reduction) -> None:
    """No detour for a native reduction."""
    assert reduction_route(C.REDUCE_SCATTER, dtype, reduction) == Route(reduction)


def test_every_route_asks_only_for_what_the_table_has() -> None:
    """Over all dtypes and reductions a route ends in a native reduction of a dtype taken, or in a gather of one."""
    seen = 0
    for collective in REDUCES:
        for name in EVERY.split():
            for reduction in Reduction:
                dtype = dtype_of(name)
                try:
                    route = reduction_route(collective, dtype, reduction, gather=True)
                except BackendError:
                    continue
                real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(
                    dtype, dtype
                )
                wire = route.wire or real
                seen += 1
                if route.gather:
                    assert HCCL.check(C.ALL_GATHER, wire) is not S.UNSUPPORTED
                else:
                    assert HCCL.check(collective, wire, route.reduction) in {
                        S.NATIVE,
                        S.UNDOCUMENTED,
                    }
    assert seen > 100


@pytest.mark.parametrize(
    ("dtype", "reduction", "says"),
    [
        (torch.float64, R.SUM, r"Pass gather=True .* or cast to float32 first, which rounds"),
        (torch.int32, R.BXOR, r"Pass gather=True to gather every rank's share"),
        (torch.uint16, R.SUM, r"cast to int32 first, and back after"),
        (torch.uint64, R.MAX, r"cast to int64 first"),
        (torch.float8_e4m3fn, R.SUM, r"cast to bfloat16 first"),
        (torch.int32, R.AVG, r"the result is no integer; cast to a floating-point dtype first"),
        (torch.float32, R.BAND, r"cast to an integer dtype first"),
        (torch.complex64, R.MAX, r"only sum, avg and premul_sum can"),
        (torch.bool, R.AVG, r"the result is no integer"),
    ],
    ids=str,
)
def test_what_has_no_exact_way_says_what_to_do(
    dtype: torch.dtype, reduction: Reduction, says: str
) -> None:
    """The error names the backend, the dtype, the reduction and the way out."""
    with pytest.raises(BackendError, match=says) as caught:
        reduction_route(C.ALL_REDUCE, dtype, reduction)
    assert str(caught.value).startswith("hccl")
    assert str(dtype) in str(caught.value)


def test_a_collective_without_arithmetic_has_no_route() -> None:
    """Asking for the reduction of an all-gather is a mistake of the caller."""
    with pytest.raises(ValueError, match="all_gather combines nothing"):
        reduction_route(C.ALL_GATHER, torch.float32, R.SUM)


def test_the_950_reduces_doubles_itself() -> None:
    """Where the table has the dtype no detour is taken."""
    assert reduction_route(C.ALL_REDUCE, torch.float64, R.SUM, capability=HCCL_ASCEND950) == Route(
        R.SUM
    )


# --- walking routes, on gloo --------------------------------------------------------------------

WORLD = 3


def shares(dtype: torch.dtype, world: int) -> list[torch.Tensor]:
    """One tensor per rank, of values that overflow the small integers when combined."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(world):
        if dtype is torch.bool:
            made.append(torch.rand(2 * world, 5, generator=generator) < 0.4)
        elif dtype.is_complex or dtype.is_floating_point:
            made.append(torch.randn(2 * world, 5, generator=generator, dtype=dtype))
        else:
            made.append(torch.randint(3, 120, (2 * world, 5), generator=generator).to(dtype))
    return made


def combined(
    parts: list[torch.Tensor], reduction: Reduction, factor: float | None
) -> torch.Tensor:
    """The reduction by hand: in numpy-like steps over a stack, no collective."""
    stack = torch.stack(parts)
    if stack.dtype is torch.bool and reduction is not R.BXOR:
        any_of = reduction in {R.SUM, R.MAX, R.BOR}
        return stack.any(0) if any_of else stack.all(0)
    if reduction is R.PREMUL_SUM:
        assert factor is not None
        return (stack * factor).sum(0)
    if reduction is R.AVG:
        return stack.mean(0)
    if reduction is R.SUM:
        return stack.sum(0, dtype=stack.dtype)
    if reduction is R.PRODUCT:
        return stack.prod(0, dtype=stack.dtype)
    if reduction is R.MIN:
        return stack.amin(0)
    if reduction is R.MAX:
        return stack.amax(0)
    step = {R.BAND: torch.bitwise_and, R.BOR: torch.bitwise_or, R.BXOR: torch.bitwise_xor}[
        reduction
    ]
    out = parts[0]
    for part in parts[1:]:
        out = step(out, part)
    return out


CASES = [
    *((torch.bool, r) for r in (R.SUM, R.MAX, R.MIN, R.PRODUCT, R.BAND, R.BOR, R.BXOR)),
    *((torch.uint8, r) for r in (R.SUM, R.MAX, R.MIN, R.PRODUCT, R.BAND, R.BOR, R.BXOR)),
    *((torch.int64, r) for r in (R.SUM, R.PRODUCT, R.BAND, R.BOR, R.BXOR)),
    *((torch.float64, r) for r in (R.SUM, R.AVG, R.MIN, R.MAX, R.PRODUCT, R.PREMUL_SUM)),
    *((torch.float32, r) for r in (R.SUM, R.AVG, R.PREMUL_SUM)),
    *((torch.bfloat16, r) for r in (R.MAX, R.MIN)),
    *((torch.complex64, r) for r in (R.SUM, R.AVG, R.PREMUL_SUM)),
    *((torch.complex128, r) for r in (R.SUM, R.AVG)),
]


@spmd(world_size=WORLD, timeout=120)
def test_each_route_gives_what_the_reduction_means() -> None:
    """All-reduce and reduce-scatter by route equal the reduction by hand and leave their argument alone."""
    torch.set_num_threads(1)
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    for dtype, reduction in CASES:
        factor = 0.5 if reduction is R.PREMUL_SUM else None
        parts = shares(dtype, WORLD)
        whole = combined(parts, reduction, factor)
        mine = parts[rank].clone()
        got = hccl.all_reduce(mine, reduction, group, factor=factor, gather=True)
        piece = hccl.reduce_scatter(mine, reduction, group, factor=factor, gather=True)
        case = f"{dtype} {reduction}"
        for found, expected in ((got, whole), (piece, whole.chunk(WORLD)[rank])):
            assert found.dtype == dtype, case
            torch.testing.assert_close(found, expected, msg=case)
        assert torch.equal(mine, parts[rank])


@spmd(world_size=WORLD, timeout=120)
def test_strided_tensors_are_taken() -> None:
    """A transposed argument is made contiguous on the way, as HCCL asks."""
    torch.set_num_threads(1)
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    parts = [part.t().contiguous() for part in shares(torch.uint8, WORLD)]
    got = hccl.all_reduce(parts[rank].t(), R.SUM, group)
    assert torch.equal(got, combined(parts, R.SUM, None).t())


@spmd(world_size=2)
def test_mistakes_are_refused_before_communication() -> None:
    """A factor without its reduction, a reduction without its factor, and rows that ranks do not divide."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="premul_sum has one, others none"):
        hccl.all_reduce(torch.ones(3), R.SUM, group, factor=2.0)
    with pytest.raises(ValueError, match="premul_sum has one, others none"):
        hccl.all_reduce(torch.ones(3), R.PREMUL_SUM, group)
    with pytest.raises(ValueError, match="dim 0 has 3 rows, which 2 ranks do not divide"):
        hccl.reduce_scatter(x, R.SUM, group, gather=True)
    with pytest.raises(BackendError, match="gather=True"):
        hccl.all_reduce(x, R.SUM, group)
