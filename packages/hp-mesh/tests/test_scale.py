"""What a large world costs on one of its ranks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import hp_mesh
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

NAMES = ("pp", "dp", "tp")


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Play one rank of a world that does not communicate."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_131072_ranks() -> None:
    """A mesh of 131,072 ranks with its slices and groups: under 200 MB."""
    with fake_world(131_072, rank=77_777):
        tracemalloc.start()
        mesh = hp_mesh.init_device_mesh("cpu", (64, 128, 16), mesh_dim_names=NAMES)
        parts = [mesh[name] for name in NAMES]
        groups = mesh.get_all_groups()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 200 * 2**20
        assert [part.size() for part in parts] == [group.size() for group in groups]
        assert mesh.get_coordinate() == (37, 125, 1)
        assert dist.get_process_group_ranks(groups[2]) == list(range(77_776, 77_792))


@pytest.mark.slow
def test_importing_the_package_is_cheap() -> None:
    """`import hp_mesh` imports nothing heavy, and nothing of its own that few programs need."""
    code = """
import sys, torch
before = set(sys.modules)
import hp_mesh
new = set(sys.modules) - before
print(*sorted(new - {name for name in new if name.split(".")[0] == "hp_mesh"}))
print(*[name for name in ("sympy", "torch.distributed.tensor") if name in sys.modules])
print(*[name for name in ("backends", "parallel_dims", "drawing", "collectives") if f"hp_mesh.{name}" in new])
hp_mesh.ParallelDims, hp_mesh.unflatten_mesh
print("ParallelDims" in dir(hp_mesh), hasattr(hp_mesh, "no_such_name"))
"""
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert len(answer[0].split()) < 5
    assert answer[1:] == ["", "", "True False"]
