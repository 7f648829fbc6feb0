"""The description of one distributed tensor: mesh, placements, global shape, stride and dtype, interned.

Equal descriptions are one object, so dispatch can key its plans by identity, and everything derived (local shape,
torch's own spec) is computed once. Entries live as long as somebody holds them; the table never holds a tensor.
A spec with symbolic sizes (under a compiler) is not interned: comparing such sizes would add guards.

Torch's ``DTensorSpec`` was not used as the description itself: it is mutable, hashes its contents at each lookup, and its
value for a strided layout depends on a flag. It is made on demand for the code that reads ``tensor._spec``.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING

import torch
from hp_mesh import DeviceMesh

from hp_dtensor import shards
from hp_dtensor._torch import (
    DTensorSpec,
    GuardedSpec,
    Shard,
    StridedShard,
    TensorMeta,
    TorchDTensor,
)
from hp_dtensor.errors import LayoutError

if TYPE_CHECKING:
    from torch import (
        dtype as DType,  # a spec has a member `torch`, which hides the module in its class
    )

    from hp_dtensor.placements import Placement


class Spec:
    """One distributed tensor, described; made by the library, never directly."""

    __slots__ = (
        "__weakref__",
        "_box",
        "_local_shape",
        "_torch",
        "copied_view",
        "dtype",
        "mesh",
        "placements",
        "shape",
        "stride",
        "tensor_meta",
    )

    mesh: DeviceMesh
    """The devices."""
    placements: tuple[Placement, ...]
    """One placement for each mesh axis, dims non-negative."""
    tensor_meta: TensorMeta
    """Global shape, stride and dtype, under the name that torch's constructor reads."""
    copied_view: bool
    """Whether the tensor was made by a view operator that had to move data: writing to it would not reach the base."""

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        meta: TensorMeta,
        *,
        copied_view: bool,
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.tensor_meta = meta
        self.shape: torch.Size = meta.shape
        self.stride: tuple[int, ...] = meta.stride
        self.dtype: DType = meta.dtype
        self.copied_view = copied_view
        self._torch: DTensorSpec | None = None
        self._local_shape: tuple[int, ...] | None = None
        self._box: tuple[tuple[tuple[int, int], ...], ...] | None = None

    @property
    def ndim(self) -> int:
        """How many dims the tensor has."""
        return len(self.shape)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The devices, under torch's name."""
        return self.mesh

    @property
    def coordinate(self) -> tuple[int, ...] | None:
        """Where this rank stands in the mesh, or None outside of it."""
        return self.mesh.get_coordinate()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece; ``(0,)`` outside the mesh."""
        if self._local_shape is None:
            where = self.coordinate
            if where is None:
                self._local_shape = (0,)
            else:
                self._local_shape = shards.local_shape(
                    tuple(self.shape), tuple(self.mesh.shape), where, self.placements
                )
        return self._local_shape

    @property
    def local_box(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each dim the half-open intervals of global indices that this rank holds; empty outside the mesh."""
        if self._box is None:
            where = self.coordinate
            self._box = (
                ()
                if where is None
                else shards.local_box(
                    tuple(self.shape), tuple(self.mesh.shape), where, self.placements
                )
            )
        return self._box

    @property
    def local_offset(self) -> tuple[int, ...]:
        """For each dim the first global index that this rank holds (the dim's size when it holds none)."""
        return tuple(
            intervals[0][0] if intervals else size
            for intervals, size in zip(self.local_box, self.shape, strict=True)
        )

    @property
    def interned(self) -> bool:
        """Whether this is the one description of these facts; one with symbolic sizes is not."""
        return all(type(number) is int for number in (*self.shape, *self.stride))

    @property
    def is_partial(self) -> bool:
        """Whether some axis still holds addends."""
        return any(placement.is_partial() for placement in self.placements)

    @property
    def torch(self) -> DTensorSpec:
        """The same description as torch's own type."""
        if self._torch is None:
            self._torch = GuardedSpec(self.mesh, self.placements, tensor_meta=self.tensor_meta)
        return self._torch

    def with_placements(self, placements: tuple[Placement, ...]) -> Spec:
        """The same tensor laid out as *placements*."""
        if placements == self.placements:
            return self
        return make_spec(self.mesh, placements, self.shape, self.stride, self.dtype)

    def as_own(self) -> Spec:
        """The same layout of a tensor that shares its elements with no other."""
        if not self.copied_view:
            return self
        return make_spec(self.mesh, self.placements, self.shape, self.stride, self.dtype)

    def with_dtype(self, dtype: DType) -> Spec:
        """The same layout with other elements."""
        return (
            self
            if dtype == self.dtype
            else make_spec(self.mesh, self.placements, self.shape, self.stride, dtype)
        )

    def same(self, other: Spec) -> bool:
        """Whether both describe the same tensor, interned or not."""
        return self is other or (
            self.mesh == other.mesh
            and self.placements == other.placements
            and tuple(self.tensor_meta) == tuple(other.tensor_meta)
        )

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return make_spec, (self.mesh, self.placements, tuple(self.shape), self.stride, self.dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> Spec:
        return self

    def __repr__(self) -> str:
        return f"Spec({tuple(self.shape)}, {self.dtype}, {self.placements}, mesh {tuple(self.mesh.shape)})"


class _Facts:
    """What makes a spec, with its hash taken once.

    The table forgets an entry when its spec dies, which looks the key up again; that may be at the interpreter's end, when
    torch's placements cannot be hashed any more.
    """

    __slots__ = ("facts", "number")

    def __init__(self, facts: tuple[object, ...]) -> None:
        self.facts = facts
        self.number = hash(facts)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Facts) and self.facts == other.facts)


_specs: weakref.WeakValueDictionary[_Facts, Spec] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def contiguous_stride(shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
    """The strides of a row-major tensor of *shape*, as torch counts them (empty dims count as one)."""
    out: list[int] = []
    step = 1
    for size in reversed(shape):
        out.append(step)
        step = step * size if size != 0 else step
    return tuple(reversed(out))


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...] | torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    *,
    copied_view: bool = False,
) -> Spec:
    """The one description of these facts; *placements* must be normalised already."""
    if any(type(number) is not int for number in (*shape, *stride)):
        return Spec(
            mesh,
            placements,
            TensorMeta(torch.Size(shape), tuple(stride), dtype),
            copied_view=copied_view,
        )
    key = _Facts((mesh, placements, tuple(shape), tuple(stride), dtype, copied_view))
    found = _specs.get(key)
    if found is None:
        with _lock:
            found = _specs.get(key)
            if found is None:
                meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
                found = Spec(mesh, placements, meta, copied_view=copied_view)
                _specs[key] = found
    return found


def _ordered(spec: DTensorSpec) -> tuple[Placement, ...]:
    """The placements of torch's *spec* with its axis order, which torch may note beside plain shards, written into them.

    An axis that stands left of another but cuts after it is the finer one: a StridedShard whose split factor counts the
    pieces that those axes have made already.
    """
    placements = tuple(spec.placements)
    if spec.use_strided_shard_as_shard_order:
        return placements
    out = list(placements)
    for entry in spec.shard_order:
        for turn, axis in enumerate(entry.mesh_dims):
            factor = math.prod(
                spec.mesh.size(other) for other in entry.mesh_dims[:turn] if other > axis
            )
            if factor > 1 and type(out[axis]) is Shard:
                out[axis] = StridedShard(entry.tensor_dim, split_factor=factor)
    return tuple(out)


def spec_from_torch(spec: DTensorSpec) -> Spec:
    """Our description of what torch's *spec* describes. Kept on torch's object, and checked before it is used again.

    Raises:
        LayoutError: when torch's spec lacks the shape, stride and dtype.
    """
    meta = spec.tensor_meta
    if meta is None:
        msg = f"a torch spec without shape, stride and dtype cannot be read: {spec}"
        raise LayoutError(msg)
    kept: Spec | None = spec.__dict__.get("_hp_spec")
    placements = _ordered(spec)
    if kept is not None and kept.placements == placements and kept.tensor_meta == meta:
        return kept
    made = make_spec(
        DeviceMesh.from_torch(spec.mesh), placements, meta.shape, meta.stride, meta.dtype
    )
    spec.__dict__["_hp_spec"] = made
    return made


def spec_of(tensor: torch.Tensor) -> Spec | None:
    """The description of a distributed tensor of ours or of torch's; None for a plain one."""
    if not isinstance(tensor, TorchDTensor):
        return None
    own: Spec | None = getattr(tensor, "_own", None)
    return spec_from_torch(tensor._spec) if own is None else own
