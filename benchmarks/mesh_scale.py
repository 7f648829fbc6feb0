"""What a mesh of thousands of ranks costs on one of them, against torch's own mesh.

One process plays one rank of a large world over the fake backend, so that what is timed is host work
alone. Ours and torch's run in turns; the table shows ratios.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable

import hp_mesh
import torch.distributed as dist
from torch.distributed import device_mesh as torch_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

NAMES = ("pp", "dp", "tp")
Make = Callable[..., torch_mesh.DeviceMesh]


def build(make: Make, shape: tuple[int, ...]) -> torch_mesh.DeviceMesh:
    """Make the mesh."""
    return make("cpu", shape, mesh_dim_names=NAMES)


def views(make: Make, shape: tuple[int, ...]) -> torch_mesh.DeviceMesh:
    """Make the mesh, then slice, flatten and unflatten it."""
    mesh = build(make, shape)
    for name in NAMES:
        _ = mesh[name]
    flat = mesh["dp", "tp"]._flatten("dp_tp")
    return flat._unflatten(0, (shape[1] // 2, shape[2] * 2), ("replicate", "shard"))


def views_and_groups(make: Make, shape: tuple[int, ...]) -> torch_mesh.DeviceMesh:
    """Do the same, and ask for every group."""
    mesh = views(make, shape)
    mesh.get_all_groups()
    mesh._get_root_mesh().get_all_groups()
    return mesh


def hashed(make: Make, shape: tuple[int, ...]) -> int:
    """Make the mesh and use it as a key."""
    return hash(build(make, shape))


MEASURED = (build, views, views_and_groups, hashed)


def fresh_world(size: int) -> None:
    """Make a world of *size* ranks, of which this is rank 0; ours forgets what it knew."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


def seconds(
    what: Callable[[Make, tuple[int, ...]], object], make: Make, shape: tuple[int, ...]
) -> float:
    """Time *what* in a world of its own, so that no cache answers."""
    fresh_world(shape[0] * shape[1] * shape[2])
    start = time.perf_counter()
    what(make, shape)
    return time.perf_counter() - start


def large(shape: tuple[int, ...]) -> tuple[float, float]:
    """Return seconds and peak MB of making a mesh, slicing it and listing this rank's groups."""
    fresh_world(shape[0] * shape[1] * shape[2])
    tracemalloc.start()
    start = time.perf_counter()
    mesh = hp_mesh.init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    for name in NAMES:
        _ = mesh[name].mesh
    mesh.get_all_groups()
    took = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return took, peak / 2**20


def import_cost(rounds: int) -> tuple[float, list[str]]:
    """Return the milliseconds `import hp_mesh` adds to `import torch`, and heavy modules it pulled in."""
    code = (
        "import sys, time, torch; start = time.perf_counter(); import hp_mesh;"
        "print((time.perf_counter() - start) * 1e3,"
        " *[m for m in ('sympy', 'torch.distributed.tensor') if m in sys.modules])"
    )
    answers = [
        subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-W", "ignore", "-c", code],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for _ in range(rounds)
    ]
    return min(float(answer[0]) for answer in answers), answers[0][1:]


def main(*, quick: bool, check: bool) -> None:
    """Measure and print; with *check*, end with an error where a target is missed."""
    missed: list[str] = []
    warnings.simplefilter("ignore")
    shape = (4, 8, 4) if quick else (16, 64, 16)
    rounds = 3 if quick else 7
    # Both sides pay for their imports before the clock runs.
    for make in (torch_mesh.init_device_mesh, hp_mesh.init_device_mesh):
        seconds(views_and_groups, make, (2, 4, 2))
    print(f"mesh of {shape}; median of {rounds}; ratio is ours / torch")
    for what in MEASURED:
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(rounds):
            theirs.append(seconds(what, torch_mesh.init_device_mesh, shape))
            ours.append(seconds(what, hp_mesh.init_device_mesh, shape))
        ratio = statistics.median(ours) / statistics.median(theirs)
        print(f"  {what.__name__:18} {ratio:7.3f}")
        if what in {build, views} and ratio > 0.5:
            missed.append(f"{what.__name__} takes more than half of torch's time")
    huge = (8, 16, 8) if quick else (64, 128, 16)
    took, peak = large(huge)
    print(
        f"mesh of {huge}, slices and groups: {took:.3f} s, {peak:.1f} MB of Python objects at peak"
    )
    added, heavy = import_cost(1 if quick else 5)
    print(f"import hp_mesh adds {added:.0f} ms to import torch; heavy imports: {heavy or 'none'}")
    dist.destroy_process_group()
    if took > 1 or peak > 200:
        missed.append("131,072 ranks: more than a second or 200 MB")
    if added > 50 or heavy:
        missed.append("the import: more than 50 ms, or something heavy")
    if check and missed:
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds; what the tests run")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    main(quick=arguments.quick, check=arguments.check)
