"""What one mesh axis does to a tensor: torch's own placement values, under public names.

The values are torch's (``Shard(0) == torch.distributed.tensor.Shard(0)``), so that a layout written for one library
means the same in the other. Wrapping them in types of our own would have cost a conversion at every border
with FSDP2, checkpoints and user code, and an ``isinstance`` check that fails somewhere.

The set is open: a `Cut` is a placement of one's own, of which one method tells all that there is to know. `RaggedShard` is
one, and nothing outside of its class knows more of it than of any other.

Rules kept here and nowhere else: negative dims are made positive before anything is compared, a placement list has one
entry an axis, and missing trailing entries are an error rather than a guess.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_dtensor._torch import MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.errors import LayoutError

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh

__all__ = [
    "Cut",
    "MaskPartial",
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
    "StridedShard",
    "gradient_placements",
    "normalize_placements",
    "shard_dim",
]

REDUCE_OPS = ("sum", "avg", "max", "min", "product", "all")
REPLICATE = Replicate()


class Cut(Placement):
    """The base of placements of one's own: each rank of the axis has some of the indices of a dim.

    A subclass says which, by `held`, and has equality and a hash by value. All else follows from that: the shape of a
    piece and where it lies in the whole, gathering and scattering, the collectives from and to any other placement (a rank
    receives what it lacks), gradients, checkpoints. :func:`hp_dtensor.testing.check_placement` tries the laws that *held*
    has to obey. Elementwise operators keep the placement, others move the tensor to one that they know.
    """

    dim: int
    """The tensor dim that is cut; not negative."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    @property
    def folds(self) -> int:
        """How many leading dims are one dim before the cut is made; 1 where each dim is its own."""
        return 1

    @abstractmethod
    def held(self, length: int, parts: int, coordinate: int) -> tuple[tuple[int, int], ...]:
        """The positions, of *length* that are there, which *coordinate* of *parts* has: ascending half-open intervals.

        Every position is in exactly one coordinate's intervals.
        """

    def check(self, ndim: int, parts: int) -> None:
        """Raise `LayoutError` when a tensor of *ndim* dims cannot be cut so over *parts* ranks."""
        if not 0 <= self.dim < ndim:
            msg = f"{self} cuts dim {self.dim}, but the tensor has {ndim} dims"
            raise LayoutError(msg)
        del parts


class RaggedShard(Cut):
    """Each rank of the axis has a run of the leading dims, as long as its share of *local_units* says.

    The dims are flattened, and cut in proportion; a rank with no units has nothing. With one dim the local tensor looks as
    a shard does; with several its first dim is the run, and the others are the tensor's remaining dims. Block-wise
    optimizers keep whole blocks on a rank so, whatever the shape is.

    Args:
        dims: the leading dims that are flattened, ``(0,)`` or ``(0, 1)`` and so on.
        local_units: the share of each rank of the axis.

    Raises:
        LayoutError: (a `ValueError`) for dims that do not lead, or units that are negative or sum to nothing.

    Example:
        >>> RaggedShard((0,), (3, 1)).held(8, 2, 0)
        ((0, 6),)
    """

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        self.dims = tuple(dims)
        self.local_units = tuple(local_units)
        if not self.dims or self.dims != tuple(range(len(self.dims))):
            msg = f"RaggedShard dims {self.dims} are not the leading dims in order, (0,) or (0, 1) and so on"
            raise LayoutError(msg)
        if any(unit < 0 for unit in self.local_units) or sum(self.local_units) <= 0:
            msg = f"RaggedShard local_units {self.local_units}: shares are not negative and not all zero"
            raise LayoutError(msg)
        super().__init__(0)

    @property
    def folds(self) -> int:
        """How many leading dims are flattened."""
        return len(self.dims)

    def held(self, length: int, parts: int, coordinate: int) -> tuple[tuple[int, int], ...]:
        """The run of *coordinate*."""
        del parts
        ends = [0, *itertools.accumulate(self.local_units)]
        start, stop = (length * end // ends[-1] for end in ends[coordinate : coordinate + 2])
        return ((start, stop),) if start < stop else ()

    def check(self, ndim: int, parts: int) -> None:
        """One share for each rank, and dims that the tensor has."""
        if len(self.dims) > ndim:
            msg = f"{self} flattens {len(self.dims)} dims, but the tensor has {ndim}"
            raise LayoutError(msg)
        if len(self.local_units) != parts:
            msg = f"{self} has {len(self.local_units)} shares for a mesh axis of {parts} ranks; give one for each"
            raise LayoutError(msg)

    def is_ragged_shard(self) -> bool:
        """True, as HyperParallel asks."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and (self.dims, self.local_units) == (
            other.dims,
            other.local_units,
        )

    def __hash__(self) -> int:
        return hash((RaggedShard, self.dims, self.local_units))

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    def __str__(self) -> str:
        return f"RS({self.dims}, {self.local_units})"

    def __reduce__(self) -> tuple[object, ...]:
        return RaggedShard, (self.dims, self.local_units)


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that *placement* cuts, or None when it cuts none (or several at once)."""
    if isinstance(placement, Cut):
        return placement.dim if placement.folds == 1 else None
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def folded_dims(placements: Sequence[Placement]) -> int:
    """How many leading dims *placements* flatten before they cut; 1 where they flatten none."""
    return max([1, *[place.folds for place in placements if isinstance(place, Cut)]])


def folded(
    shape: Sequence[int], placements: Sequence[Placement], count: int
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """*shape* with its *count* leading dims as one, and the placements of the other dims moved along.

    A `Cut` that flattens is read as a cut of the first dim.

    Raises:
        LayoutError: when another placement cuts one of the flattened dims.
    """
    whole = 1
    for size in shape[:count]:
        whole *= size
    out: list[Placement] = []
    for placement in placements:
        dim = shard_dim(placement)
        if isinstance(placement, Cut) and placement.folds > 1:
            out.append(_Unfolded(placement))
        elif dim is None:
            out.append(placement)
        elif dim < count:
            msg = f"{tuple(placements)} cut dim {dim} and flatten it too; a flattened dim is cut once"
            raise LayoutError(msg)
        elif isinstance(placement, StridedShard):
            out.append(StridedShard(dim - count + 1, split_factor=placement.split_factor))
        else:
            out.append(Shard(dim - count + 1))
    return (whole, *shape[count:]), tuple(out)


class _Unfolded(Cut):
    """A flattening cut, on a tensor whose leading dims are flattened already."""

    def __init__(self, cut: Cut) -> None:
        super().__init__(0)
        self.cut = cut

    def held(self, length: int, parts: int, coordinate: int) -> tuple[tuple[int, int], ...]:
        return self.cut.held(length, parts, coordinate)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unfolded) and self.cut == other.cut

    def __hash__(self) -> int:
        return hash((_Unfolded, self.cut))


def gradient_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Where the gradient of a tensor laid out as *placements* lives: the same, a Partial value having a Replicate gradient.

    ``y = sum_r x_r`` has ``dL/dx_r = dL/dy`` on every rank, which is what Replicate says.
    """
    return tuple(REPLICATE if placement.is_partial() else placement for placement in placements)


def _normalize_one(placement: object, ndim: int, axis: int) -> Placement:
    if not isinstance(placement, Placement):
        msg = (
            f"placements[{axis}] is {placement!r} of type {type(placement).__name__}; each entry must be a Placement: "
            "Shard(dim), StridedShard(dim, split_factor=n), Replicate() or Partial(op)"
        )
        raise LayoutError(msg)
    if isinstance(placement, Partial) and placement.reduce_op not in REDUCE_OPS:
        msg = f"placements[{axis}] is Partial({placement.reduce_op!r}); the reduce op must be one of {', '.join(REDUCE_OPS)}"
        raise LayoutError(msg)
    dim = shard_dim(placement)
    if dim is None or isinstance(placement, Cut):
        return placement
    if not -ndim <= dim < ndim:
        what = (
            f"the tensor has {ndim} dims" if ndim else "the tensor is 0-d and has no dim to shard"
        )
        msg = f"placements[{axis}] is {placement}, but {what}; dims from {-ndim} to {ndim - 1} are legal"
        raise LayoutError(msg)
    if dim >= 0:
        return placement
    if isinstance(placement, StridedShard):
        return StridedShard(dim + ndim, split_factor=placement.split_factor)
    return Shard(dim + ndim)


def normalize_placements(
    placements: Sequence[Placement] | Placement | None, mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """*placements* with non-negative dims, one entry for each axis of *mesh*; None means replicated everywhere.

    Args:
        placements: one placement for each mesh axis, or a single one on a 1-D mesh.
        mesh: the mesh whose axes they speak of.
        ndim: how many dims the tensor has.

    Raises:
        LayoutError: when an entry is no placement, names a dim that the tensor lacks, when the number of entries differs
            from the number of axes, or when the Partial entries disagree about how addends combine.
    """
    if placements is None:
        return (REPLICATE,) * mesh.ndim
    if isinstance(placements, Placement):
        placements = (placements,)
    if len(placements) != mesh.ndim:
        msg = (
            "placements and the axes of the mesh must have the same length, got "
            f"{len(placements)} placements {tuple(placements)} for a mesh of {mesh.ndim} axes {tuple(mesh.shape)}; "
            "give exactly one placement for each axis"
        )
        raise LayoutError(msg)
    out = tuple(_normalize_one(placement, ndim, axis) for axis, placement in enumerate(placements))
    for size, placement in zip(mesh.shape, out, strict=True):
        if isinstance(placement, Cut):
            placement.check(ndim, size)
    if folded_dims(out) > 1:
        folded((1,) * ndim, out, folded_dims(out))
    kinds = {placement.reduce_op for placement in out if isinstance(placement, Partial)}
    if len(kinds) > 1:
        msg = (
            f"placements {out} mix Partial kinds {sorted(kinds)}: the order in which they would be reduced changes the "
            "value; use one kind on all axes"
        )
        raise LayoutError(msg)
    return out
