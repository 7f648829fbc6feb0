"""What a tensor-parallel MLP costs the host, against Megatron's by hand and torch's ``parallelize_module``.

One process plays one rank over the fake backend and the tensors are tiny, so that what is timed is host work alone. The
three run in turns; the table shows ratios to the version by hand. A second table compares the activations that a
sequence-parallel block keeps for its backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import Replicate, Shard
from hp_mesh import init_device_mesh
from hp_tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH, HIDDEN, RANKS = 16, 32, 4


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: nothing forward, a sum of the gradients backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # noqa: D102
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]  # noqa: D102
        del ctx
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class ReduceFromRanks(torch.autograd.Function):
    """Megatron's g: a sum forward, nothing backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # noqa: D102
        del ctx
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]  # noqa: D102
        del ctx
        return grad


class GatherSequence(torch.autograd.Function):
    """Megatron's gather of the sequence: its backward scatters the sum."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # noqa: D102
        del ctx
        out = x.new_empty(RANKS * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]  # noqa: D102
        del ctx
        out = grad.new_empty(grad.shape[0] // RANKS, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out


class ScatterSum(torch.autograd.Function):
    """Megatron's scatter of the summed sequence: its backward gathers."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # noqa: D102
        return GatherSequence.backward(ctx, x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]  # noqa: D102
        return GatherSequence.forward(ctx, grad.contiguous())


class ByHand(nn.Module):
    """The block with its pieces of the weights, as Megatron writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN // RANKS)
        self.down = nn.Linear(HIDDEN // RANKS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Up, activation, down, sum, bias."""
        hidden = F.gelu(self.up(CopyToRanks.apply(x)))  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        addend = F.linear(hidden, self.down.weight)
        return ReduceFromRanks.apply(addend) + self.down.bias  # type: ignore[no-any-return,no-untyped-call]  # as above


class Mlp(nn.Module):
    """The block as one device has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Up, activation, down."""
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]  # modules return Any


def by_hand(blocks: int) -> nn.Module:
    """Blocks by hand."""
    return nn.Sequential(*(ByHand() for _ in range(blocks)))


def ours(blocks: int) -> nn.Module:
    """Blocks laid out by hp_tp."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    model = nn.Sequential(*(Mlp() for _ in range(blocks)))
    return parallelize_module(model, mesh, plan, src_data_rank=None)


def torchs(blocks: int) -> nn.Module:
    """Blocks laid out by torch."""
    mesh = torch_init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    plan = {"*.up": TorchColwise(), "*.down": TorchRowwise()}
    model = nn.Sequential(*(Mlp() for _ in range(blocks)))
    return torch_parallelize_module(model, mesh, plan, src_data_rank=None)


def step(model: nn.Module, x: Tensor) -> None:
    """One forward and backward."""
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def interleaved(models: dict[str, nn.Module], rounds: int) -> dict[str, list[float]]:
    """Seconds that this thread works on a step of each model, in turns."""
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    for model in models.values():
        for _ in range(3):
            step(model, x)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = time.thread_time()  # what other processes do meanwhile does not count
            step(model, x)
            times[name].append(time.thread_time() - start)
    return times


class GatedByHand(nn.Module):
    """A sequence-parallel gated block by hand, its pieces of the weights; the sequence is the first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up = (nn.Linear(64, 256 // RANKS, bias=False) for _ in range(2))
        self.down = nn.Linear(256 // RANKS, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Norm, gather, gate and up, down, scatter."""
        whole = GatherSequence.apply(self.norm(x))  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        hidden = F.silu(self.gate(whole)) * self.up(whole)
        return x + ScatterSum.apply(self.down(hidden))  # type: ignore[no-any-return,no-untyped-call]  # as above


class Feed(nn.Module):
    """Gate, up and down as one device has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 256, bias=False) for _ in range(2))
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate and up, down."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]  # modules return Any


class Gated(nn.Module):
    """The gated block as one device has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.RMSNorm(64), Feed()

    def forward(self, x: Tensor) -> Tensor:
        """Norm and feed-forward, added."""
        return x + self.feed(self.norm(x))  # type: ignore[no-any-return]  # modules return Any


def ours_gated() -> nn.Module:
    """The gated block laid out by hp_tp."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "feed": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "feed.gate": ColwiseParallel(),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(Gated(), mesh, plan, src_data_rank=None)


def kept_bytes(model: nn.Module) -> int:
    """Bytes of the storages, other than parameters, that a forward keeps for its backward."""
    own = {getattr(p, "_local_tensor", p).untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(128, 2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    total = sum(kept.values())
    out.sum().backward()
    return total


def main(*, quick: bool) -> dict[str, float]:
    """Measure, print and return the ratios."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    blocks, rounds = (2, 5) if quick else (8, 60)
    makers: dict[str, Callable[[int], nn.Module]] = {
        "by hand": by_hand,
        "ours": ours,
        "torch": torchs,
    }
    times = interleaved({name: make(blocks) for name, make in makers.items()}, rounds)
    base = statistics.median(times["by hand"])
    print(
        f"{blocks} MLP blocks, forward and backward; median of {rounds}; ratio to the one by hand"
    )
    ratios = {name: statistics.median(of) / base for name, of in times.items()}
    for name, ratio in ratios.items():
        print(f"  {name:8} {ratio:6.2f}")
    memory = kept_bytes(ours_gated()) / kept_bytes(GatedByHand())
    print(f"activations kept by a sequence-parallel block, ours / by hand: {memory:.3f}")
    dist.destroy_process_group()
    return {**ratios, "memory": memory}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds; what the tests run")
    main(quick=parser.parse_args().quick)
