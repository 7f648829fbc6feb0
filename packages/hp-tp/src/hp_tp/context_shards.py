"""A sequence cut over ranks so that causal attention gives each of them the same work.

In causal attention a late token attends to many and an early one to few, so that contiguous pieces would leave the first
rank idle while the last one works. Head and tail: the sequence is cut in twice as many chunks as there are ranks, and rank
``r`` holds chunk ``r`` and the chunk ``r`` from the end. Any two such pieces cost the same.

Which tokens a piece has is arithmetic (:func:`sequence_positions`); rotary tables, masks, labels and losses per token are
cut by the same rule (:func:`split_sequence`), and :func:`join_sequence` puts a whole together again. A length that does
not divide is an error with the next one that does: pieces of unequal length would need the whole length to travel with
every tensor, and padding with ignored labels costs less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hp_dtensor import Replicate, Shard, redistribute_local

from hp_tp.errors import ContextParallelError

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor

__all__ = [
    "SequenceCut",
    "join_sequence",
    "sequence_positions",
    "split_sequence",
]


@dataclass(frozen=True, slots=True)
class SequenceCut:
    """Which tokens each of several ranks holds; pure integers.

    Args:
        ranks: how many there are.
        balanced: head and tail; contiguous pieces when False.

    Example:
        >>> from hp_tp import SequenceCut
        >>> [SequenceCut(2).intervals(rank, 8) for rank in range(2)]
        [((0, 2), (6, 8)), ((2, 4), (4, 6))]
        >>> SequenceCut(2, balanced=False).intervals(1, 8)
        ((4, 8),)
    """

    ranks: int
    balanced: bool = True

    def intervals(self, rank: int, length: int) -> tuple[tuple[int, int], ...]:
        """The half-open intervals of a sequence of *length* tokens that *rank* holds, in order.

        Raises:
            ContextParallelError: when *length* does not divide.
        """
        self.check(length)
        chunk = length // self.chunks
        ids = (rank, self.chunks - 1 - rank) if self.balanced else (rank,)
        return tuple((i * chunk, (i + 1) * chunk) for i in ids)

    @property
    def chunks(self) -> int:
        """What a length must be a multiple of."""
        return self.ranks * 2 if self.balanced else self.ranks

    def check(self, length: int) -> None:
        """Refuse a length that would leave pieces of unequal length.

        Raises:
            ContextParallelError: (a ``ValueError``) naming the next length that divides.
        """
        if length % self.chunks:
            how = "head and tail" if self.balanced else "contiguously"
            message = (
                f"a sequence of {length} tokens cannot be cut {how} over {self.ranks} ranks: its length must be a multiple of "
                f"{self.chunks}. Pad it to {-(-length // self.chunks) * self.chunks} (and ignore the labels of the padding)."
            )
            raise ContextParallelError(message)

    def order(self, length: int) -> list[int]:
        """The positions of all tokens in the order in which the ranks hold them.

        Example:
            >>> from hp_tp import SequenceCut
            >>> SequenceCut(2).order(4)
            [0, 3, 1, 2]
        """
        return [
            position
            for rank in range(self.ranks)
            for start, stop in self.intervals(rank, length)
            for position in range(start, stop)
        ]


def sequence_positions(
    length: int,
    mesh: DeviceMesh,
    *,
    balanced: bool = True,
    rank: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The positions in the whole sequence of the tokens that a rank holds.

    Args:
        length: of the whole sequence.
        mesh: the one axis over which it is cut.
        balanced: head and tail; contiguous pieces when False.
        rank: the coordinate on the axis; this rank's when None.
        device: where the result lives; the mesh's kind of device when None.

    Returns:
        int64, ``[length / ranks]``.

    Raises:
        ContextParallelError: when *length* does not divide.
    """
    own = mesh.get_local_rank() if rank is None else rank
    where = mesh.device_type if device is None else device
    pieces = SequenceCut(mesh.size(), balanced).intervals(own, length)
    return torch.cat([torch.arange(*piece, device=where) for piece in pieces])


def split_sequence(
    tensor: Tensor, mesh: DeviceMesh, dim: int = 1, *, balanced: bool = True
) -> Tensor:
    """This rank's tokens of a whole *tensor*: ids, labels, rotary tables, or the rows of a mask.

    Args:
        tensor: plain, equal on every rank.
        mesh: the one axis over which the sequence is cut.
        dim: the dim of the sequence.
        balanced: head and tail; a contiguous piece when False.

    Returns:
        A piece ``1 / ranks`` as long. It is differentiable: the gradient has zeros for the tokens of other ranks.

    Raises:
        ContextParallelError: when the length does not divide.

    Example:
        >>> import torch
        >>> from hp_mesh import init_device_mesh
        >>> from hp_mesh.testing import run_spmd
        >>> from hp_tp import split_sequence
        >>> def body():
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        ...     return split_sequence(torch.arange(8), mesh, 0).tolist()
        >>> run_spmd(body, world_size=2)
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    pieces = SequenceCut(mesh.size(), balanced).intervals(mesh.get_local_rank(), tensor.shape[dim])
    narrowed = [tensor.narrow(dim, start, stop - start) for start, stop in pieces]
    return narrowed[0] if len(narrowed) == 1 else torch.cat(narrowed, dim)


def join_sequence(
    piece: Tensor, mesh: DeviceMesh, dim: int = 1, *, balanced: bool = True
) -> Tensor:
    """The whole sequence from every rank's *piece*; what :func:`split_sequence` cut.

    Args:
        piece: plain, of the same shape on every rank.
        mesh: the one axis over which the sequence is cut.
        dim: the dim of the sequence.
        balanced: as it was cut.

    Returns:
        The whole, equal on every rank. It is differentiable, for a gradient that is equal on every rank too.
    """
    if mesh.size() == 1:
        return piece
    dim %= piece.ndim
    gathered = redistribute_local(piece, mesh, (Shard(dim),), (Replicate(),))
    if not balanced:
        return gathered
    return gathered.index_select(dim, places(gathered.shape[dim], mesh.size(), piece.device))


def places(length: int, ranks: int, device: torch.device) -> Tensor:
    """For each position, where it is in the order in which the ranks hold the tokens, head and tail."""
    order = torch.tensor(SequenceCut(ranks).order(length), device=device)
    return torch.argsort(order)
