"""What a vocabulary-parallel loss costs, against torch's own ``loss_parallel``: time, memory and collectives.

Two ranks hold half of the vocabulary each. All variants run in one process a rank, in turns, forward and backward; the
tables show ratios to torch's. Memory is the peak of the process (of the device, on a GPU) over what it had before the
call, so the logits count only where a variant makes them itself.

The limits printed beside the ratios are what the project promises; ``--check`` fails when one is broken.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hp_dtensor import DTensor, Replicate, Shard
from hp_loss import linear_cross_entropy, loss_parallel, vocab_parallel_cross_entropy
from hp_mesh import init_device_mesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel as torch_loss_parallel

RANKS = 2
FEATURES = 64
Step = Callable[[], object]


class Case:
    """Tensors of one rank, and the variants as functions of no arguments."""

    def __init__(self, tokens: int, classes: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, classes, (tokens,), generator=generator).to(device)
        self.hidden = torch.randn(tokens, FEATURES, generator=generator).to(device)
        self.head = torch.randn(classes // RANKS, FEATURES, generator=generator).to(device)
        self.logits = torch.randn(tokens, classes // RANKS, generator=generator).to(device)
        self.ours = init_device_mesh(device, (RANKS,))
        self.theirs = torch_init_device_mesh(device, (RANKS,))

    def loss_torch(self) -> None:
        """Use torch's context, forward and backward inside it."""
        local = self.logits.detach().requires_grad_()
        logits = TorchDTensor.from_local(local, self.theirs, [Shard(1)], run_check=False)
        with torch_loss_parallel():
            F.cross_entropy(logits, self.labels).backward()

    def loss_ours(self) -> None:
        """Our context, around the same call."""
        local = self.logits.detach().requires_grad_()
        logits = DTensor.from_local(local, self.ours, [Shard(1)], run_check=False)
        with loss_parallel():
            F.cross_entropy(logits, self.labels).backward()

    def loss_ours_plain(self) -> None:
        """Our function, on plain shards."""
        local = self.logits.detach().requires_grad_()
        vocab_parallel_cross_entropy(local, self.labels, group=self.ours.get_group(0)).backward()

    def loss_ours_smoothed(self) -> None:
        """Our function with label smoothing, which torch's lacks."""
        local = self.logits.detach().requires_grad_()
        group = self.ours.get_group(0)
        vocab_parallel_cross_entropy(
            local, self.labels, group=group, label_smoothing=0.1
        ).backward()

    def head_torch(self) -> None:
        """A linear head and torch's loss."""
        hidden = TorchDTensor.from_local(
            self.hidden.detach().requires_grad_(), self.theirs, [Replicate()], run_check=False
        )
        head = TorchDTensor.from_local(
            self.head.detach().requires_grad_(), self.theirs, [Shard(0)], run_check=False
        )
        with torch_loss_parallel():
            F.cross_entropy(F.linear(hidden, head), self.labels).backward()

    def head_ours(self) -> None:
        """The head and the loss in one."""
        hidden, head = (leaf.detach().requires_grad_() for leaf in (self.hidden, self.head))
        linear_cross_entropy(hidden, head, self.labels, group=self.ours.get_group(0)).backward()


def peak(step: Step, device: str) -> int:
    """Bytes at the peak of *step* over those before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Linux forgets the high-water mark of the resident set when asked to.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """One figure of this process' memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def seconds(step: Step, device: str) -> float:
    """Time of *step*, which all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ratios(
    steps: dict[str, Step], measure: Callable[[Step], float], rounds: int
) -> dict[str, float]:
    """Medians over *rounds* of taking turns, relative to the first of *steps*."""
    for step in steps.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            taken[name].append(measure(step))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    first = next(iter(medians.values()))
    return {name: value / first for name, value in medians.items()}


def collectives(step: Step) -> int:
    """How many collectives *step* runs."""
    with CommDebugMode() as mode:
        step()
    return int(mode.get_total_counts())


def measure(
    tokens: int, classes: int, rounds: int, device: str
) -> list[tuple[str, float, float | None]]:
    """Rows of the table: what, how much, and the limit."""
    case = Case(tokens, classes, device)
    losses: dict[str, Step] = {
        "torch loss_parallel": case.loss_torch,
        "loss_parallel": case.loss_ours,
        "function, plain shards": case.loss_ours_plain,
        "function, smoothed": case.loss_ours_smoothed,
    }
    heads: dict[str, Step] = {
        "linear + torch loss_parallel": case.head_torch,
        "linear_cross_entropy": case.head_ours,
    }
    rows: list[tuple[str, float, float | None]] = []
    for name, value in ratios(losses, lambda step: seconds(step, device), rounds).items():
        rows.append((f"time: {name}", value, 0.8 if "torch" not in name else None))
    for name, value in ratios(losses, lambda step: peak(step, device), 3).items():
        rows.append(
            (f"memory beyond the logits: {name}", value, 0.5 if "torch" not in name else None)
        )
    for name, value in ratios(heads, lambda step: seconds(step, device), rounds).items():
        rows.append((f"time: {name}", value, None))
    for name, value in ratios(heads, lambda step: peak(step, device), 3).items():
        rows.append((f"memory: {name}", value, 0.15 if "torch" not in name else None))
    rows.append(("collectives: torch loss_parallel", collectives(case.loss_torch), None))
    rows.append(("collectives: loss_parallel", collectives(case.loss_ours), 1.0))
    return rows


def run(rank: int, store: str, options: argparse.Namespace) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS)
    tokens, classes, rounds = (
        (256, 16384, 3) if options.quick else (options.tokens, options.classes, 5)
    )
    rows = measure(tokens, classes, rounds, options.device)
    dist.destroy_process_group()
    if rank:
        return
    print(
        f"{tokens} tokens, {classes} classes over {RANKS} ranks; relative to torch's, in one run"
    )
    for name, value, limit in rows:
        print(f"{name:<52} {value:8.3f}" + ("" if limit is None else f"   limit {limit:g}"))
    broken = [name for name, value, limit in rows if limit is not None and value > limit]
    if options.check and broken:
        sys.exit(f"over the limit: {', '.join(broken)}")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small and short")
    parser.add_argument("--check", action="store_true", help="fail when a limit is broken")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=131072)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    # Large blocks go back to the system when they are freed, so that the resident set is what is in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (str(Path(folder) / "store"), options), nprocs=RANKS)


if __name__ == "__main__":
    main()
