"""``bincount``: ranks count their own, and agree on how long the result is."""

from __future__ import annotations

import pytest
import torch
from hp_dtensor import CommDebugMode, DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd


@spmd(world_size=4)
def test_numbers_are_counted_where_they_are() -> None:
    """One number is sent, for uneven and empty pieces, with weights of any dtype and a least length."""
    mesh = init_device_mesh("cpu", (4,))
    for size in (1, 5, 64):
        numbers = torch.randint(0, 9, (size,), generator=torch.Generator().manual_seed(size))
        floats = torch.rand(size, generator=torch.Generator().manual_seed(size))
        for weight in (None, floats, floats.double(), torch.arange(size)):
            given = None
            if weight is not None:
                given = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            for dtype in (torch.int64, torch.uint8):
                whole = numbers.to(dtype)
                laid = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
                for least in (0, 20):
                    with CommDebugMode() as seen:
                        made = torch.bincount(laid, given, minlength=least)
                    assert seen.get_total_counts() == 1
                    assert isinstance(made, DTensor)
                    assert made.placements == (Partial(),)
                    want = torch.bincount(whole, weight, minlength=least)
                    assert made.dtype == want.dtype
                    torch.testing.assert_close(made.full_tensor(), want)


@spmd(world_size=2)
def test_what_cannot_be_counted_is_refused_as_torch_refuses_it() -> None:
    """A negative number on one rank is an error on all."""
    mesh = init_device_mesh("cpu", (2,))
    laid = distribute_tensor(torch.tensor([1, 2, 3, -4]), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.bincount(laid)
    copied = distribute_tensor(torch.tensor([1, 1]), mesh, [Replicate()], src_data_rank=None)
    made = torch.bincount(copied)
    assert isinstance(made, DTensor)
    assert made.tolist() == [0, 2]
