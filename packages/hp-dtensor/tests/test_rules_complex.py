"""Numbers that are conjugated or negated by a bit: they move as what they stand for."""

from __future__ import annotations

from itertools import product

import torch
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd


@spmd(world_size=2)
def test_lazy_views_move_as_the_numbers_they_stand_for() -> None:
    """A conjugate, and the imaginary part of one, in each pair of layouts, alone and as an operand."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = torch.randn(3, 5, 4, dtype=torch.complex128)
    other = torch.randn(3, 5, 4, dtype=torch.complex128)
    places = (Replicate(), Shard(0), Shard(1), Shard(2))
    for source, target in product(places, places):
        x = distribute_tensor(whole, mesh, [source])
        for lazy, plain in ((x.mH, whole.mH), (x.conj().imag, whole.conj().imag)):
            moved = lazy.redistribute(mesh, [target])
            torch.testing.assert_close(moved.full_tensor(), plain.resolve_conj().resolve_neg())
        matrices = distribute_tensor(other, mesh, [target]) @ x.mH
        assert isinstance(matrices, DTensor)
        torch.testing.assert_close(matrices.full_tensor(), other @ whole.mH)
