"""Plain tensors that a distributed module holds may meet distributed tensors; others may not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    ImplicitCommunicationError,
    MixedTensorError,
    Shard,
    distribute_module,
    distribute_tensor,
    strict,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor, nn


class Bias(nn.Module):
    """Adds what it holds: a parameter, and whatever stands in ``table``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        table: Tensor = self.table
        return x * self.weight + table


def _model() -> tuple[nn.Module, Tensor, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Identity(), Bias())
    distribute_module(model, mesh)
    x = torch.arange(8.0).view(2, 4)
    return model, x, distribute_tensor(x, mesh, [Shard(0)])


@spmd(world_size=2)
@pytest.mark.parametrize("as_buffer", [False, True])
def test_what_is_set_afterwards_counts_as_replicated(as_buffer: bool) -> None:
    """An attribute or a buffer set after distribution gives the single device's value and gradient, in and out of forward."""
    model, x, laid = _model()
    table = torch.tensor([1.0, -2.0, 3.0, 0.5])
    if as_buffer:
        model[1].register_buffer("table", table)
    else:
        model[1].table = table
    out = model(laid)
    torch.testing.assert_close(out.full_tensor(), x * torch.arange(4.0) + table)
    out.sum().backward()
    torch.testing.assert_close(model[1].weight.grad.full_tensor(), x.sum(0))
    torch.testing.assert_close((laid - model[1].table).full_tensor(), x - table)


@spmd(world_size=2)
def test_ranks_are_compared_once_until_the_tensor_is_written_to() -> None:
    """Agreement is remembered: only the first use, and the first after a write, communicate."""
    model, x, laid = _model()
    model[1].table = torch.ones(4)
    model(laid)
    with CommDebugMode() as mode:
        model(laid)
        laid * model[1].table
    assert mode.get_total_counts() == 0
    model[1].table.add_(1)
    torch.testing.assert_close(model(laid).full_tensor(), x * torch.arange(4.0) + 2)
    model[1].table.add_(dist.get_rank())
    with pytest.raises(MixedTensorError, match="differs between the ranks"):
        model(laid)


@spmd(world_size=2)
def test_ranks_that_hold_different_tensors_get_one_error() -> None:
    """A tensor that differs between ranks is refused on every rank, naming the ways out."""
    model, _, laid = _model()
    model[1].table = torch.full((4,), float(dist.get_rank()))
    with pytest.raises(MixedTensorError, match=r"held by a distributed module, differs.*to_local"):
        model(laid)


@spmd(world_size=2)
def test_other_plain_tensors_are_refused_as_ever() -> None:
    """Neither a tensor that nobody's module holds, nor one of a module that was not distributed, nor a parameter."""
    model, _, laid = _model()
    model[1].table = torch.ones(4)
    model(laid)
    alone = nn.Module()
    alone.table = torch.ones(4)
    model.extra = nn.Parameter(torch.ones(4))
    for plain in (torch.ones(4), alone.table, model.extra, model[1].table.clone()):
        with pytest.raises(MixedTensorError, match="nothing says how it is laid out"):
            laid + plain


@spmd(world_size=2)
def test_strict_refuses_the_comparison() -> None:
    """The comparison is communication that nobody asked for, so strict mode raises until ranks have agreed."""
    model, x, laid = _model()
    model[1].table = torch.ones(4)
    with strict(), pytest.raises(ImplicitCommunicationError):
        model(laid)
    model(laid)
    with strict():
        torch.testing.assert_close(
            model(laid).to_local(), (x * torch.arange(4.0) + 1).chunk(2)[dist.get_rank()]
        )


@spmd(world_size=1)
def test_a_module_that_is_gone_is_forgotten() -> None:
    """What a module held is anybody's plain tensor again when the module is gone and nothing was agreed."""
    model, _, laid = _model()
    table = torch.ones(4)
    model[1].table = table
    del model
    with pytest.raises(MixedTensorError):
        laid + table
