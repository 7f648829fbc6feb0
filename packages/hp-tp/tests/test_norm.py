"""Sequence parallelism, against the single device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hp_dtensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    BoundaryError,
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hp_tp.testing import check_plan
from torch import Tensor, nn

R, S = Replicate(), Shard


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def norms() -> list[nn.Module]:
    """A norm of each kind, with random parameters."""
    out: list[nn.Module] = [
        nn.LayerNorm(4),
        nn.LayerNorm(4, bias=False),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.RMSNorm(4),
    ]
    for norm in out:
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    return out


@pytest.mark.parametrize("kind", range(4))
@spmd(world_size=2, timeout=120)
def test_norms_on_pieces(kind: Any) -> None:
    """Plain pieces in, plain pieces out; the gradients of weight and bias are added up over the ranks."""
    mesh, x = tp(2), torch.randn(2, 6, 4)
    check_plan(norms()[kind], mesh, SequenceParallel(), x, given=[S(1)], output=S(1))


@pytest.mark.parametrize("length", [6, 5, 3, 1])
@pytest.mark.parametrize("given", [S(1), R, S(0)])
@spmd(world_size=4, timeout=120)
def test_norms_of_distributed_inputs(length: int, given: Placement) -> None:
    """DTensors are moved to the sequence layout and stay DTensors; uneven and empty pieces."""
    mesh = tp(4)
    for norm in norms():
        check_plan(
            norm,
            mesh,
            SequenceParallel(),
            torch.randn(2, length, 4),
            given=[given],
            distributed=True,
        )


@spmd(world_size=2, timeout=120)
def test_other_sequence_dims() -> None:
    """Tokens first, and negative dims."""
    mesh = tp(2)
    check_plan(
        nn.LayerNorm(4),
        mesh,
        SequenceParallel(sequence_dim=0),
        torch.randn(6, 4),
        given=[S(0)],
        output=S(0),
    )
    check_plan(
        nn.RMSNorm(4),
        mesh,
        SequenceParallel(sequence_dim=-2),
        torch.randn(2, 6, 4),
        given=[S(1)],
        output=S(1),
    )


@spmd(world_size=2, timeout=120)
def test_output_follows_the_input_unless_told() -> None:
    """None gives what came in; True and False give a plain tensor and a DTensor."""
    mesh, piece = tp(2), torch.randn(2, 3, 4)
    whole = distribute_tensor(torch.randn(2, 6, 4), mesh, [S(1)])
    for local, plain_gives, distributed_gives in (
        (None, False, True),
        (True, False, False),
        (False, True, True),
    ):
        norm = parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel(use_local_output=local))
        assert isinstance(norm(piece), DTensor) == plain_gives
        assert isinstance(norm(whole), DTensor) == distributed_gives
    assert norm(piece).shape == (2, 6, 4)


@spmd(world_size=2, timeout=120)
def test_a_whole_plain_input() -> None:
    """``input_layouts=Replicate()`` cuts a sequence that every rank holds whole."""
    mesh, x = tp(2), torch.randn(2, 6, 4)
    check_plan(nn.LayerNorm(4), mesh, SequenceParallel(input_layouts=R), x, output=S(1))


@spmd(world_size=2, timeout=120)
def test_a_norm_over_the_sequence() -> None:
    """Averaging over the dim that is cut needs the whole: it is gathered, and a plain output is a piece again."""
    mesh, x = tp(2), torch.randn(2, 6, 4)
    plan = SequenceParallel()
    check_plan(nn.LayerNorm((6, 4)), mesh, plan, x, given=(S(1),), output=S(1))
    check_plan(nn.LayerNorm((6, 4)), mesh, plan, x, given=(S(1),), distributed=True)
    norm = parallelize_module(nn.LayerNorm(4), mesh, plan)
    with pytest.raises(BoundaryError, match="expects a tensor"):
        norm("text")


class Scale(nn.Module):
    """A norm as model code writes it, from operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.shift: Tensor
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor, flag: bool = False) -> Any:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y * self.weight + (self.shift if flag else 0)


@pytest.mark.parametrize("flag", [False, True])
@spmd(world_size=2, timeout=120)
def test_any_module_goes_through_dispatch(flag: bool) -> None:
    """A hand-written norm with a buffer and another input, on pieces and on DTensors."""
    mesh, x = tp(2), torch.randn(2, 6, 4)
    check_plan(Scale(), mesh, SequenceParallel(), x, flag, given=[S(1)], output=S(1))
    check_plan(Scale(), mesh, SequenceParallel(), x, flag, given=[S(1)], distributed=True)


@spmd(world_size=2, timeout=120)
def test_dropout_that_drops_nothing() -> None:
    """In eval, and with p=0, a piece comes back as it is."""
    mesh, piece = tp(2), torch.randn(2, 3, 4)
    for dropout in (nn.Dropout(0.0), nn.Dropout(0.5).eval()):
        laid_out = parallelize_module(copy.deepcopy(dropout), mesh, SequenceParallel())
        assert torch.equal(laid_out(piece), piece)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


BLOCK = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=S(1)),
    "down": RowwiseParallel(output_layouts=S(1)),
}


@spmd(world_size=4, timeout=120)
def test_sequence_parallel_block() -> None:
    """A residual block on pieces of the sequence: all gradients right after backward, with no trainer code."""
    mesh, x = tp(4), torch.randn(2, 8, 8)
    laid_out = check_plan(Block(), mesh, BLOCK, x, given=[S(1)], output=S(1))
    grad = laid_out.norm.weight.grad
    assert grad.placements == (R,)
    check_plan(
        Block(),
        mesh,
        BLOCK | {"down": RowwiseParallel(output_layouts=S(1), use_local_output=False)},
        x,
        given=[S(1)],
        distributed=True,
    )
