"""What random numbers that do not depend on the layout cost, against torch's own: dropout and randn, eager and compiled.

One process, one thread, one rank: what is compared is the work of a rank on its piece. Variants run in turns; the table
shows the ratio of each one's time to that of torch's operator on a plain tensor of the same size, the best of its turns.
On a CPU the time is the thread's own, so that other programs on the machine count for little.

The limits printed beside the ratios are what the project promises on a CPU; ``--check`` fails when one is broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import (
    Shard,
    distribute_tensor,
    manual_seed,
    randn,
    random_policy,
    set_random_policy,
)
from hp_mesh import init_device_mesh

Step = Callable[[], object]

LIMITS = {
    "dropout, layout_free, eager": 2.5,
    "dropout, layout_free, compiled": 0.3,
    "randn, layout_free, compiled": 1.0,
}
"""The most that a variant may take, in times of torch's operator."""


def variants(size: int, device: str) -> dict[str, dict[str, Step]]:
    """The steps to compare, by what they do; the one called "torch" is the measure."""
    mesh = init_device_mesh(device, (1,))
    manual_seed(0, mesh)
    plain = torch.randn(size, device=device)
    laid = distribute_tensor(plain, mesh, [Shard(0)])
    noise = torch.empty_like(laid)

    def drop() -> object:
        return F.dropout(laid, 0.5)

    def draw() -> object:
        return noise.normal_()

    def under(policy: str, step: Step) -> Step:
        def run() -> object:
            with random_policy(policy):  # type: ignore[arg-type]  # one of the three
                return step()

        return run

    compiled_drop = torch.compile(lambda x: F.dropout(x, 0.5), fullgraph=True)
    compiled_draw = torch.compile(torch.randn_like, fullgraph=True)
    return {
        "dropout": {
            "torch": lambda: F.dropout(plain, 0.5),
            "layout_free, eager": under("layout_free", drop),
            "layout_free, compiled": under("layout_free", lambda: compiled_drop(laid)),
            "host, eager": under("host", drop),
            "device, eager": under("device", drop),
        },
        "randn": {
            "torch": lambda: torch.randn(size, device=device),
            "layout_free, eager": under(
                "layout_free", lambda: randn(size, device_mesh=mesh, placements=[Shard(0)])
            ),
            "layout_free, compiled": under("layout_free", lambda: compiled_draw(laid)),
            "host, eager": under("host", draw),
            "device, eager": under("device", draw),
        },
    }


def measured(steps: dict[str, Step], turns: int, device: str) -> dict[str, float]:
    """The best time of each step, in seconds; they take turns."""
    best = dict.fromkeys(steps, float("inf"))
    clock = time.thread_time if device == "cpu" else time.perf_counter
    for turn in range(turns + 2):
        for name, step in steps.items():
            _settle(device)
            start = clock()
            step()
            _settle(device)
            if turn > 1:  # the first two compile and fill caches
                best[name] = min(best[name], clock() - start)
    return best


def _settle(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def main() -> int:
    """Run all of it; return 1 if a limit is broken and that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short")
    parser.add_argument("--check", action="store_true", help="fail when a limit is broken")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = 1 << (12 if options.quick else 20)
    turns = 2 if options.quick else 60
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo" if options.device == "cpu" else "nccl",
            init_method=f"file://{Path(folder) / 'store'}",
            rank=0,
            world_size=1,
        )
        set_random_policy(None)
        broken = []
        print(f"{size} elements, one thread; times of torch's operator on a plain tensor")
        for what, steps in variants(size, options.device).items():
            times = measured(steps, turns, options.device)
            for name, seconds in times.items():
                ratio = seconds / times["torch"]
                limit = LIMITS.get(f"{what}, {name}")
                told = "" if limit is None else f"   limit {limit}"
                print(f"  {what:8} {name:24} {ratio:8.2f}{told}")
                if limit is not None and ratio > limit and not options.quick:
                    broken.append(f"{what}, {name}: {ratio:.2f} > {limit}")
        dist.destroy_process_group()
    print("\n".join(broken))
    return int(bool(broken) and options.check)


if __name__ == "__main__":
    sys.exit(main())
