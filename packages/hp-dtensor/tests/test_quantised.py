"""A quantised tensor class as the local tensor: cutting and multiplying commute with making numbers of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor, nn

BLOCK = 4


class Blockwise(torch.Tensor):
    """Rows of whole numbers with a scale for each block of a row; it can be cut between blocks only."""

    @staticmethod
    def __new__(cls: type, numbers: Tensor, scales: Tensor) -> Blockwise:  # noqa: PYI034  # the class says it
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    def dequantised(self) -> Tensor:
        """The numbers that it stands for."""
        return self.numbers.float() * self.scales.repeat_interleave(BLOCK, 1)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, aten = args[0], torch.ops.aten
        if func in (
            aten.detach.default,
            aten.alias.default,
            aten.clone.default,
            aten.view.default,
        ):
            return cls(first.numbers.clone(), first.scales.clone())
        collective = torch.ops._c10d_functional
        if func in (collective.broadcast.default, collective.wait_tensor.default):
            return cls(func(first.numbers, *args[1:]), func(first.scales, *args[1:]))
        if func is aten.slice.Tensor:
            _, dim, start, end = args
            end = min(end, first.shape[dim])
            step = BLOCK if dim == 1 else 1
            if start % step or end % step:
                raise ValueError(f"a cut from {start} to {end} goes through a block of {BLOCK}")
            return cls(
                first.numbers.narrow(dim, start, end - start),
                first.scales.narrow(dim, start // step, (end - start) // step),
            )
        plain = [a.dequantised() if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


def quantise(weight: Tensor) -> Blockwise:
    """*weight* with its largest number in a block at 127 steps."""
    blocks = weight.view(weight.shape[0], -1, BLOCK)
    scales = blocks.abs().amax(-1) / 127
    return Blockwise(
        (blocks / scales.unsqueeze(-1)).round().to(torch.int8).view(weight.shape), scales
    )


@spmd(world_size=2)
def test_cutting_commutes_with_dequantising() -> None:
    """Each rank's piece stands for the piece of what the whole stands for, and products equal the single device's."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    quantised, x = quantise(torch.randn(6, 16)), torch.randn(3, 16)
    whole = quantised.dequantised()
    for placement in (Shard(0), Shard(1), Replicate()):
        for source in (0, None):
            laid = distribute_tensor(quantised, mesh, [placement], src_data_rank=source)
            piece = laid.to_local()
            assert isinstance(piece, Blockwise)
            wanted = distribute_tensor(whole, mesh, [placement]).to_local()
            assert torch.equal(piece.dequantised(), wanted)
            out = F.linear(distribute_tensor(x, mesh, [Replicate()]), laid)
            torch.testing.assert_close(out.full_tensor(), F.linear(x, whole))


@spmd(world_size=2)
def test_a_cut_through_a_block_is_one_error() -> None:
    """A block that would straddle a cut is refused on every rank, with what the class says."""
    mesh = init_device_mesh("cpu", (2,))
    quantised = quantise(torch.ones(2, 12))
    with pytest.raises(ValueError, match="block"):
        distribute_tensor(quantised, mesh, [Shard(1)])


@spmd(world_size=2)
def test_a_frozen_quantised_layer_passes_gradients_on() -> None:
    """A quantised weight as a frozen parameter: the input's gradient is the single device's."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    quantised, x = quantise(torch.randn(6, 16)), torch.randn(3, 16)
    for placement in (Shard(0), Shard(1)):
        weight = nn.Parameter(distribute_tensor(quantised, mesh, [placement]), requires_grad=False)
        given = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
        F.linear(given, weight).square().sum().backward()
        alone = x.clone().requires_grad_()
        F.linear(alone, quantised.dequantised()).square().sum().backward()
        assert isinstance(given.grad, DTensor)
        torch.testing.assert_close(given.grad.full_tensor(), alone.grad, rtol=1e-4, atol=1e-4)
