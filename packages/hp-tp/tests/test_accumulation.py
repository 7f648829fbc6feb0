"""Several micro-batches of a tensor-parallel block: replicated parameters are reduced once, not in every backward."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from hp_dtensor import CommDebugMode, Replicate, Shard, accumulate_gradients
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    """A norm and a feed-forward layer with biases, on a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(self.norm(x))))
        return out


def _backward(model: nn.Module, batches: Tensor) -> None:
    for batch in batches:
        model(batch).square().sum().backward()


@spmd(world_size=2)
def test_replicas_of_a_sequence_parallel_block_are_reduced_once() -> None:
    """Gradients equal the single device's, with one collective for each replicated parameter instead of one a micro-batch."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    alone = Block()
    model = parallelize_module(
        copy.deepcopy(alone),
        mesh,
        {
            "": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
            ),
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        },
    )
    batches = torch.randn(3, 2, 6, 8)
    _backward(alone, batches)
    counts = []
    for held in (False, True):
        model.zero_grad()
        with CommDebugMode() as mode:
            if held:
                with accumulate_gradients(model):
                    _backward(model, batches)
            else:
                _backward(model, batches)
        counts.append(mode.get_total_counts())
        for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert isinstance(got.grad, DTensor)
            assert got.grad.placements == got.placements, name  # type: ignore[attr-defined]  # a DTensor
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, msg=name)
    assert (
        counts[0] - counts[1] >= 2 * 2
    )  # the norm's weight and bias, in two of three micro-batches
