"""What a sequence-parallel block keeps for its backward, byte for byte; and that recomputation gives the same bits."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import Replicate, Shard
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hp_tp.recompute import recompute
from torch import Tensor, nn

LENGTH, WIDTH, HIDDEN, RANKS = 32, 8, 24, 2

PLAN = {
    "norm": SequenceParallel(sequence_dim=0),
    "feed": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    "feed.gate": ColwiseParallel(),
    "feed.up": ColwiseParallel(),
    "feed.down": RowwiseParallel(output_layouts=Shard(0)),
}


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.RMSNorm(WIDTH), Feed()

    def forward(self, x: Tensor) -> Any:
        return x + self.feed(self.norm(x))


def tp() -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))


def local(tensor: Any) -> Tensor:
    """This rank's piece of a distributed tensor; a plain one as it is."""
    piece: Tensor = getattr(tensor, "_local_tensor", tensor)
    return piece


def kept(model: nn.Module, x: Tensor) -> list[int]:
    """How many elements each storage has that a forward keeps, parameters aside, sorted."""
    own = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    out.sum().backward()
    return sorted(found.values())


@spmd(world_size=RANKS, timeout=60)
def test_a_sequence_parallel_block_keeps_what_must_be_kept() -> None:
    """The norm's piece in and out, the gathered sequence once for both layers, four hidden tensors, and the norm's scales."""
    model = parallelize_module(Gated(), tp(), PLAN)
    x = torch.randn(LENGTH // RANKS, WIDTH, requires_grad=True)
    found = kept(model, x)
    whole, piece, hidden = LENGTH * WIDTH, LENGTH * WIDTH // RANKS, LENGTH * HIDDEN // RANKS
    scales = LENGTH // RANKS
    allowed = sorted([piece, piece, whole, *[hidden] * 4, scales])
    assert sum(found) <= sum(allowed), (found, allowed)
    assert found.count(whole) <= 1
    assert found.count(hidden) == 4


@pytest.mark.parametrize("what", ["full", "selective"])
@spmd(world_size=RANKS, timeout=60)
def test_recomputed_gradients_have_the_same_bits(what: Literal["full", "selective"]) -> None:
    """The block, recomputed, gives exactly the gradients of the block."""
    mesh = tp()
    model = parallelize_module(Gated(), mesh, PLAN)
    again = recompute(copy.deepcopy(model), what)
    x = torch.randn(LENGTH // RANKS, WIDTH)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for block, own in zip((model, again), inputs, strict=True):
        block(own).square().sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(local(p.grad), local(q.grad)), name


@spmd(world_size=RANKS, timeout=60)
def test_selective_recomputation_without_sequence_parallel() -> None:
    """Kept products are not changed by the sum over the ranks: the same bits again."""
    mesh = tp()
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    model: Any = parallelize_module(Feed(), mesh, plan)
    again: Any = recompute(copy.deepcopy(model), "selective")
    x = torch.randn(4, WIDTH)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [block(own) for block, own in zip((model, again), inputs, strict=True)]
    assert torch.equal(outs[0], outs[1])
    for out in outs:
        out.square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]  # there are some
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(local(p.grad), local(q.grad)), name
