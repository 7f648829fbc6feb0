"""Pieces that travel round the ranks of a mesh axis, while what is here is worked on.

Each rank sends to the next one and receives from the one before. That is one functional all-to-all whose pieces for all others
are empty: every backend has it, a compiler can trace it, and it cannot deadlock as pairs of sends may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hp_mesh.collectives import all_to_all, wait

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor

__all__ = ["receive", "send"]


def send(mesh: DeviceMesh, *tensors: Tensor, come: int | None = None) -> Tensor:
    """Start sending *tensors*, of one dtype, to the next rank; return what will come from the one before, flat.

    As many elements come as go, or *come* of them.
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    ranks, own = mesh.size(), mesh.get_local_rank()
    to, from_ = [0] * ranks, [0] * ranks
    to[(own + 1) % ranks] = flat.numel()
    from_[(own - 1) % ranks] = flat.numel() if come is None else come
    return all_to_all(flat, from_, to, mesh.get_group(), async_op=True)


def receive(flat: Tensor, *like: Tensor) -> list[Tensor]:
    """Wait for what was sent, in the shapes of *like*."""
    pieces = wait(flat).split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
