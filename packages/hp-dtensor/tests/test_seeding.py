"""Seeding: torch's own generators, which ranks are alike, streams of their own, and nothing sent."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    Replicate,
    SeedReport,
    Shard,
    is_rng_supported_mesh,
    manual_seed,
    randn,
    seed_everything,
)
from hp_mesh import DeviceMesh, ParallelDims, init_device_mesh
from hp_mesh.testing import run_spmd, spmd

R = Replicate()


@spmd(world_size=2)
def test_manual_seed_is_torchs() -> None:
    """Plain draws after it are those after torch.manual_seed, with and without a mesh; nothing is sent."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(7)
    want = torch.randn(3)
    for where in (mesh, None):
        with CommDebugMode() as comm:
            manual_seed(7, where)
        assert comm.get_total_counts() == 0
        assert torch.equal(torch.randn(3), want)
    assert is_rng_supported_mesh(mesh)
    with mesh:
        assert is_rng_supported_mesh()


@spmd(world_size=4)
def test_a_seed_for_a_mesh_holds_on_it_and_its_parts() -> None:
    """Parts of the mesh that was seeded draw in silence, a larger one agrees first; outside of the mesh it is refused."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    manual_seed(whole.get_local_rank("dp"), whole["tp"])
    with CommDebugMode() as quiet:
        randn(4, device_mesh=whole["tp"])
    assert quiet.get_total_counts() == 0
    with CommDebugMode() as loud:
        same = randn(4, device_mesh=whole).to_local().clone()
    assert loud.get_total_counts() == 2
    first = same.clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(first, same)
    small = DeviceMesh("cpu", [0, 1])
    if torch.distributed.get_rank() > 1:
        with pytest.raises(
            RuntimeError, match="requires the current rank to be a part of the device mesh"
        ):
            manual_seed(1, small)


def _report(scheme: str, distinct: tuple[str, ...]) -> tuple[SeedReport, float, float]:
    dims = ParallelDims(pp=2, tp=2, world_size=4)
    dims.build_mesh("cpu")
    with CommDebugMode() as comm:
        report = seed_everything(dims, 40, distinct, scheme)
        mine = randn(4, device_mesh=dims.get_mesh("tp"), placements=[Shard(0)])
    assert comm.get_total_counts() == int("tp" in distinct)  # its ranks must agree then
    assert os.environ["PYTHONHASHSEED"] == str(report.seed % (1 << 32))
    return report, float(mine.full_tensor().sum()), random.random()


@pytest.mark.parametrize("scheme", ["hash", "offset"])
def test_stages_differ_and_the_ranks_of_a_stage_do_not(scheme: str) -> None:
    """Ranks that differ on a distinct axis get other seeds; all others the same, in torch and in Python."""
    found = run_spmd(_report, scheme, ("pp",), world_size=4)
    seeds = [report.seed for report, _, _ in found]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert [report.ranks for report, _, _ in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert found[0][1:] == found[1][1:]
    assert found[0][1:] != found[2][1:]
    assert dict(found[2][0].coordinates) == {"pp": (1, 2)}
    if scheme == "offset":
        assert seeds == [40, 40, 41, 41]


def test_offsets_count_in_mixed_radix() -> None:
    """Two distinct axes give every rank its own seed, counted as TorchTitan counts; no distinct axis gives the seed itself."""
    both = [
        report.seed for report, _, _ in run_spmd(_report, "offset", ("pp", "tp"), world_size=4)
    ]
    assert both == [40, 42, 41, 43]
    hashed = {
        report.seed for report, _, _ in run_spmd(_report, "hash", ("pp", "tp"), world_size=4)
    }
    assert len(hashed) == 4
    none = {report.seed for report, _, _ in run_spmd(_report, "hash", (), world_size=4)}
    assert none == {40}


@spmd(world_size=2)
def test_unknown_axes_and_schemes_are_refused() -> None:
    """A wrong name is told from the right ones, before anything is seeded."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"distinct='pp' is no axis .* \('dp',\)"):
        seed_everything(mesh, 1)
    with pytest.raises(ValueError, match="scheme='sum' does not exist"):
        seed_everything(mesh, 1, (), "sum")
    assert torch.equal(before, torch.get_rng_state())
