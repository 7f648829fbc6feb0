"""Train a byte-level Llama on a mesh and show that it equals one device.

``python train_llama.py`` starts its own ranks; ``torchrun --nproc-per-node 4 train_llama.py`` uses the ones it is given.
Tensor parallel with sequence parallel and a loss over the sharded vocabulary on axis ``tp``, FSDP2 on axis ``dp``. Rank 0
first trains the same model alone, on the same data from the same seed; at the end the two runs are compared step by step.

The text is what every machine has: the sources of Python's standard library.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import CommDebugMode, DTensor, Replicate, Shard, clip_grad_norm_
from hp_loss import loss_parallel
from hp_mesh import DeviceMesh, init_device_mesh
from hp_tp import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from llama import SIZES, Llama, LlamaConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

SEED = 1234
BATCH = 8
LEARNING_RATE = 1e-3
MAX_NORM = 1.0
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Run:
    """What a training run reports."""

    losses: list[float]
    """Mean loss over all tokens, a value a step."""
    norms: list[float]
    """Norm of the whole gradient before clipping, a value a step."""
    parameter_bytes: int
    """Bytes of parameters that this rank holds."""
    collectives: int
    """Collectives that this rank starts in one step."""
    wire_bytes: int
    """Bytes that this rank sends in one step."""


def corpus(limit: int = 4_000_000) -> Tensor:
    """The sources of the standard library as one vector of bytes."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8).long()


def batches(
    text: Tensor, steps: int, length: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """The whole batch of each step, ``[BATCH, length]`` inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    out = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).to(
            device
        )
        out.append((rows[:, :-1], rows[:, 1:].contiguous()))
    return out


def build(config: LlamaConfig, device: torch.device) -> Llama:
    """The model, initialised from the seed."""
    torch.manual_seed(SEED)
    return Llama(config).to(device)


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the parameters' local pieces."""
    locals_ = (getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters())
    return sum(local.numel() * local.element_size() for local in locals_)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over everything."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), foreach=True)


def train_alone(
    config: LlamaConfig, steps: int, text: Tensor, device: torch.device, console: Console
) -> Run:
    """The run that everything is compared with: one process, nothing distributed."""
    model = build(config, device)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    with bar(console) as progress:
        task = progress.add_task("one process", total=steps, loss=math.nan)
        for inputs, targets in batches(text, steps, config.length, device):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=losses[-1])
    return Run(losses, norms, parameter_bytes(model), 0, 0)


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """What each module does on axis ``tp``.

    Between blocks the residual stream is cut along the sequence. A block gathers it once, computes on its share of the
    heads or hidden features, and scatters what it adds back. The logits stay cut along the vocabulary.
    """
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    gather_first = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": gather_first,
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": gather,
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


def parallelize(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallel on ``tp``, then FSDP2 on ``dp``, block by block."""
    parallelize_module(model, mesh["tp"], tensor_parallel_plan())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def train_on_mesh(
    config: LlamaConfig,
    steps: int,
    text: Tensor,
    mesh: DeviceMesh,
    device: torch.device,
    console: Console,
) -> Run:
    """The same run on a mesh."""
    model = build(config, device)
    parallelize(model, mesh)
    optimizer = optimizer_of(model)
    data = mesh["dp"]
    losses, norms = [], []
    comm = CommDebugMode()
    with bar(console) as progress:
        task = progress.add_task(
            f"mesh {dict(zip(('dp', 'tp'), mesh.shape, strict=True))}", total=steps, loss=math.nan
        )
        for step, (inputs, targets) in enumerate(batches(text, steps, config.length, device)):
            mine = slice(data.get_local_rank(), None, data.size())
            watch = comm if step == steps - 1 else CommDebugMode()
            with watch:
                with loss_parallel():
                    logits = model(inputs[mine])
                    loss = F.cross_entropy(logits.flatten(0, 1), targets[mine].flatten())
                    loss.backward()
                norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
                optimizer.step()
                optimizer.zero_grad()
            assert isinstance(loss, DTensor)  # the loss of logits that are distributed
            mean = loss.full_tensor().detach()
            dist.all_reduce(mean, group=data.get_group())
            losses.append(mean.item() / data.size())
            progress.update(task, advance=1, loss=losses[-1])
    return Run(
        losses, norms, parameter_bytes(model), comm.get_total_counts(), comm.get_total_bytes()
    )


def bar(console: Console) -> Progress:
    """A progress bar with the loss."""
    return Progress(
        TextColumn("{task.description:>24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        console=console,
    )


def worst(mine: list[float], reference: list[float]) -> float:
    """The largest relative difference over all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(mine, reference, strict=True))


def report(mesh_run: Run, alone: Run, gathered: list[int], out: Path, console: Console) -> bool:
    """Print the comparison, draw the curves, and say whether the runs agree."""
    steps = len(alone.losses)
    table = Table(title="A mesh against one process")
    for column in (
        "step",
        "loss, mesh",
        "loss, one process",
        "relative difference",
        "gradient norm, mesh",
        "one process",
    ):
        table.add_column(column, justify="right")
    shown = sorted({0, *range(0, steps, max(1, steps // 8)), steps - 1})
    for step in shown:
        a, b = mesh_run.losses[step], alone.losses[step]
        table.add_row(
            str(step),
            f"{a:.6f}",
            f"{b:.6f}",
            f"{abs(a - b) / b:.1e}",
            f"{mesh_run.norms[step]:.5f}",
            f"{alone.norms[step]:.5f}",
        )
    console.print(table)
    facts = Table(title="What it takes", show_header=False)
    loss_gap, norm_gap = worst(mesh_run.losses, alone.losses), worst(mesh_run.norms, alone.norms)
    facts.add_row("largest relative difference of the loss", f"{loss_gap:.1e}")
    facts.add_row("largest relative difference of the gradient norm", f"{norm_gap:.1e}")
    facts.add_row("parameter bytes, one process", f"{alone.parameter_bytes:,}")
    facts.add_row("parameter bytes, each rank", ", ".join(f"{size:,}" for size in gathered))
    facts.add_row("collectives a step, rank 0", f"{mesh_run.collectives:,}")
    facts.add_row("bytes sent a step, rank 0", f"{mesh_run.wire_bytes:,}")
    console.print(facts)
    draw(mesh_run, alone, out)
    console.print(f"loss curve: {out}")
    agree = loss_gap <= TOLERANCE and norm_gap <= TOLERANCE
    verdict = "equal" if agree else "NOT EQUAL"
    console.print(f"[bold]{verdict}[/bold] to {TOLERANCE:.0e} at every step")
    return agree


def draw(mesh_run: Run, alone: Run, out: Path) -> None:
    """The two loss curves as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(alone.losses, linewidth=4, alpha=0.35, label="one process")
    axes.plot(mesh_run.losses, linewidth=1.2, label="mesh")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=140)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="how many optimizer steps")
    parser.add_argument("--mesh", default="dp=2,tp=2", help="the degrees, as dp=2,tp=2")
    parser.add_argument(
        "--model-size", choices=sorted(SIZES), default="small", help="how large a model"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu")
    parser.add_argument(
        "--out", type=Path, default=Path("loss.png"), help="where the loss curve goes"
    )
    return parser.parse_args()


def degrees(text: str) -> tuple[int, int]:
    """``dp=2,tp=2`` as two numbers.

    Raises:
        SystemExit: for another form, saying which one is meant.
    """
    try:
        given = {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
        wanted = given.pop("dp", 1), given.pop("tp", 1)
    except ValueError:
        given = {text: 0}
        wanted = (0, 0)
    if given or min(wanted) < 1 or BATCH % wanted[0]:
        message = f"--mesh {text}: give positive degrees as dp=2,tp=2; dp must divide the batch of {BATCH}"
        raise SystemExit(message)
    return wanted


def start_ranks(count: int) -> int:
    """Run this script once more under torchrun, on *count* ranks of this machine."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(count),
    ]
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)), **os.environ}
    return subprocess.run([*command, *sys.argv], env=environment, check=False).returncode


def main() -> int:
    """Train alone on rank 0, then together, then compare."""
    options = arguments()
    dp, tp = degrees(options.mesh)
    if "RANK" not in os.environ:
        return start_ranks(dp * tp)
    rank = int(os.environ["RANK"])
    console = Console(quiet=rank != 0)
    device = torch.device(options.device)
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(device).set_device(device)
    config = SIZES[options.model_size]
    text = corpus()
    alone = None
    if rank == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        alone = train_alone(config, options.steps, text, device, console)
        torch.set_num_threads(threads)
    # The others wait here for rank 0.
    dist.init_process_group(timeout=timedelta(minutes=30))
    mesh = init_device_mesh(options.device, (dp, tp), mesh_dim_names=("dp", "tp"))
    run = train_on_mesh(config, options.steps, text, mesh, device, console)
    gathered: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, run.parameter_bytes)
    agree = report(run, alone, gathered, options.out, console) if alone is not None else True
    dist.barrier()
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
