"""Ranks that die while groups are made: real processes, because a pool's ranks must live."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, when, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=3,
                        timeout=timedelta(seconds=60))
from hp_mesh import GroupError, groups, init_device_mesh
mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"), rank_list=(2, 1, 0),
                        timeout=timedelta(seconds=4))
if rank == 2 and when == "before":
    os._exit(1)
if rank == 2 and when == "during":
    groups._torch.create_group = lambda *a, **k: os._exit(1)
start = time.monotonic()
try:
    mesh.get_group("tp")
except GroupError as error:
    print(f"{time.monotonic() - start:.1f}|{error.label}|{error.ranks}|{error}", flush=True)
os._exit(0)
"""


def told(when: str, folder: Path) -> list[list[str]]:
    """Return what ranks 0 and 1 were told when rank 2 died *when*."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), when, str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    answers = [process.communicate(timeout=150) for process in ranks]
    assert ranks[2].returncode == 1, answers[2]
    return [out.strip().split("|", 3) for out, _ in answers[:2]]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_dead_rank_is_an_error_that_names_axis_and_group(when: str, tmp_path: Path) -> None:
    """Whether it dies before the ranks meet or while they connect, the others are told in time."""
    for seconds, label, ranks, text in told(when, tmp_path):
        assert float(seconds) < 15
        assert label == "axis 'tp' of mesh (dp=1, tp=3)"
        assert ranks == "(2, 1, 0)"
        assert "the process group of ranks [2, 1, 0]" in text
        if when == "before":
            assert "ranks [2] never asked for it" in text
        else:
            assert "A member may have died" in text
