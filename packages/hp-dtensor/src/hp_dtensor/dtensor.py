"""The distributed tensor: a torch ``DTensor`` whose operators we dispatch, whose layout we describe and whose moves we plan.

It *is a* ``torch.distributed.tensor.DTensor``, so FSDP2, distributed checkpoints and every ``isinstance`` check in the
field hold as they stand. What differs is inside: the layout is an interned :class:`~hp_dtensor.spec.Spec` of ours
(torch's own spec is made when somebody reads ``_spec``), and each ATen operator comes to our dispatch.

An independent class with adapters was measured too; it needed conversions at each border and lost to the subclass.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from hp_mesh import DeviceMesh, get_current_mesh
from hp_mesh.collectives import wait

from hp_dtensor import _autograd, checkpoint
from hp_dtensor._torch import (
    DTensorSpec,
    TensorMeta,
    TorchDTensor,
    disabled_torch_function,
    keep_linear_whole,
    mark_parameter,
    new_dtensor,
    scatter_uneven_strided_shards,
    support_foreach,
)
from hp_dtensor.checks import check_from_local
from hp_dtensor.copied_views import SOURCE, refresh
from hp_dtensor.dispatch import dispatch
from hp_dtensor.errors import InPlaceError, LayoutError
from hp_dtensor.gradients import Settle
from hp_dtensor.hits import dispatcher
from hp_dtensor.layout import Layout, PlacementsLike, folding, resolve
from hp_dtensor.placements import REPLICATE, Partial, Placement, RaggedShard
from hp_dtensor.random import policy_of
from hp_dtensor.replicas import watching
from hp_dtensor.rules.matmul import layer_gradients
from hp_dtensor.spec import Spec, contiguous_stride, make_spec, spec_from_torch, spec_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DTensor", "as_dtensor"]


class DTensor(TorchDTensor):
    """A tensor laid out over a mesh; operators on it give what they give on one device.

    Args:
        local_tensor: this rank's piece. A ``DTensor`` here is wrapped anew, by its local tensor.
        device_mesh: the devices.
        placements: one placement for each mesh axis, or alias strings, one for each tensor dim; None is replicated.
        requires_grad: whether the result records operators.

    The constructor takes the piece as it is: no communication, no autograd. Use :meth:`from_local` inside a
    differentiable program and :func:`hp_dtensor.distribute_tensor` to lay out a whole tensor.

    Raises:
        LayoutError: when the placements do not fit the mesh or the tensor.
    """

    __slots__ = ("_own",)
    # What torch.utils.swap_tensors exchanges (Module.to and to_empty use it); `_spec` would undo the exchange of `_own`.
    __slotnames__ = ("_local_tensor", "_own")

    _own: Spec
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]  # a C function for a class method

    def __new__(  # noqa: D102, PYI034  # documented on the class; torch's constructor makes it
        cls,
        local_tensor: Tensor,
        device_mesh: DeviceMesh | Spec | DTensorSpec,
        placements: PlacementsLike | None = None,
        *,
        requires_grad: bool = False,
    ) -> DTensor:
        local = (
            local_tensor._local_tensor if isinstance(local_tensor, TorchDTensor) else local_tensor
        )
        if isinstance(device_mesh, Spec):
            spec = device_mesh
        elif isinstance(device_mesh, DTensorSpec):
            spec = spec_from_torch(device_mesh)
        else:
            mesh = DeviceMesh.from_torch(device_mesh)
            resolved = resolve(placements, mesh, local.ndim)
            shape, stride = _autograd.global_shape(local, mesh, resolved)
            spec = make_spec(mesh, resolved, shape, stride, local.dtype)
        return cast("DTensor", new_dtensor(cls, local, spec, requires_grad))

    def __init__(self, *args: object, **kwargs: object) -> None:
        # All is done in __new__; torch's own __init__ would only warn under a compiler.
        pass

    # ----------------------------------------------------------------------------------------------------------------
    # What torch's machinery asks
    # ----------------------------------------------------------------------------------------------------------------

    __torch_dispatch__ = classmethod(dispatcher(dispatch))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[object, ...]]:
        spec = self._own.torch
        return ["_local_tensor", "device_mesh"], (
            spec.placements,
            spec.tensor_meta,
            spec.shard_order,
            self.requires_grad,
        )

    def _stable_hash_for_caching(self) -> str:
        """By what torch finds a compiled graph for this tensor in its caches, which ranks of one machine share.

        A graph holds the indices of this rank's piece and draws by the policy that was in force, so both count.
        """
        spec = self._own
        known = super()._stable_hash_for_caching()
        told = (known, spec.coordinate, policy_of(spec.mesh.device_type))
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Mapping[str, Any],
        flatten_spec: tuple[Any, ...],
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> DTensor:
        placements, meta, _, requires_grad = flatten_spec
        mesh = DeviceMesh.from_torch(inner_tensors["device_mesh"])
        local = inner_tensors["_local_tensor"]
        shape, stride = tuple(outer_size), tuple(outer_stride)
        if any(type(number) is not int for number in (*shape, *stride)):
            shape, stride = _autograd.guarded_shape(local, mesh, tuple(placements), shape, stride)
        spec = make_spec(mesh, tuple(placements), shape, stride, meta.dtype)
        return cast("DTensor", new_dtensor(DTensor, local, spec, requires_grad))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch's takes it by keyword only there
        spec = self._own
        return (
            f"DTensor(local_tensor={self._local_tensor}, shape={tuple(spec.shape)}, placements={spec.placements}, "
            f"device_mesh={spec.mesh})"
        )

    def __create_write_items__(self, fqn: str, object: object) -> Any:  # noqa: A002, ANN401  # torch's hook
        if checkpoint.is_one_box(self._own):
            return super().__create_write_items__(fqn, object)
        return checkpoint.write_items(fqn, self._own, self._local_tensor)

    def __create_chunk_list__(self) -> Any:  # noqa: ANN401  # torch's hook
        if checkpoint.is_one_box(self._own):
            return super().__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch's
        return checkpoint.chunk_list(self._own)

    def __get_tensor_shard__(self, index: Any) -> Tensor:  # noqa: ANN401  # torch's hook
        if checkpoint.is_one_box(self._own):
            held = super().__get_tensor_shard__(index)  # type: ignore[no-untyped-call]  # torch's
            return cast("Tensor", held)
        return checkpoint.chunk_at(index, self._own, self._local_tensor)

    def __deepcopy__(self, memo: dict[int, object]) -> DTensor:
        known = memo.get(id(self))
        if known is not None:
            return cast("DTensor", known)
        if not self.is_leaf:
            msg = (
                "only leaf tensors can be deep-copied: this DTensor is the result of an operator that is recorded for "
                "backward; detach() it first"
            )
            raise RuntimeError(msg)
        self._see_writes()
        local = self._local_tensor.detach().clone()
        out = new_dtensor(type(self), local, self._own.as_own(), False)
        out.requires_grad_(self.requires_grad)
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        out.__dict__.update(self._state())
        memo[id(self)] = out
        return cast("DTensor", out)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        self._see_writes()
        return rebuild, (
            wait(self._local_tensor.detach()),
            self._own.torch,
            self.requires_grad,
            self._state(),
        )

    def _state(self) -> dict[str, object]:
        """The attributes that were set on this tensor, which a copy takes over."""
        own = (_autograd.SETTLED, SOURCE)
        return {name: value for name, value in self.__dict__.items() if name not in own}

    # ----------------------------------------------------------------------------------------------------------------
    # What it is
    # ----------------------------------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The devices it is laid out over."""
        return self._own.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis, dims non-negative."""
        return self._own.placements

    @property
    def spec(self) -> Spec:
        """Mesh, placements, global shape, stride and dtype as one hashable value."""
        return self._own

    @property
    def layout(self) -> Layout:  # type: ignore[override]  # equal to the torch.strided that a plain tensor has
        """Mesh, placements and tensor map as HyperParallel's value; equal to ``torch.strided``, which plain tensors have."""
        return Layout.from_spec(self._own)

    @property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's piece."""
        return self._local_tensor.shape

    def is_distributed(self) -> bool:
        """Whether some axis of more than one rank cuts it or holds addends of it."""
        return any(
            size > 1 and not placement.is_replicate()
            for size, placement in zip(self._own.mesh.shape, self._own.placements, strict=True)
        )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether some axis holds addends that are still to be combined (by *reduce_op*, when given)."""
        return any(
            isinstance(placement, Partial) and reduce_op in (None, placement.reduce_op)
            for placement in self._own.placements
        )

    # ----------------------------------------------------------------------------------------------------------------
    # Entering, leaving, moving
    # ----------------------------------------------------------------------------------------------------------------

    @staticmethod
    def from_local(  # type: ignore[override]  # ours takes aliases too
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: PlacementsLike | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: PlacementsLike | None = None,
    ) -> DTensor:
        """The distributed tensor whose piece on this rank is *local_tensor*; differentiable, and without communication.

        Args:
            local_tensor: this rank's piece, a plain tensor; moved to the mesh's device type when it is elsewhere.
            device_mesh: the devices; the current mesh when None.
            placements: what the pieces are of the whole; replicated when None.
            run_check: agree with the other ranks first. Shapes and dtypes must fit together as the shard rule cuts
                (uneven shards included, and then *shape* need not be given); replicas are made equal by a broadcast from
                the first rank of each replicated axis.
            shape: the global shape. Without it (and without *run_check*) all pieces are taken to have the same shape.
            stride: the global stride; row-major when only *shape* is given.
            grad_placements: the layout in which the gradient leaves; by default that of the tensor, Replicate for Partial.

        Raises:
            LayoutError: when the placements do not fit, when *stride* is given without *shape*, or when *local_tensor* is
                not the piece that the shard rule gives this rank of a tensor of *shape*.
            RuntimeError: when *local_tensor* is distributed already.
        """
        if isinstance(local_tensor, TorchDTensor):
            msg = f"the local_tensor argument only accepts torch.Tensor but got {type(local_tensor)} value."
            raise RuntimeError(msg)  # noqa: TRY004  # what torch raises
        mesh = get_current_mesh() if device_mesh is None else DeviceMesh.from_torch(device_mesh)
        asked = run_check or not (shape is None and stride is None and grad_placements is None)
        asked = asked or watching()
        recorded = local_tensor.requires_grad and torch.is_grad_enabled()
        if not (asked or recorded or torch.compiler.is_compiling()) and type(placements) in _LISTS:
            spec = _even(
                mesh,
                tuple(placements),  # type: ignore[arg-type]  # a list or a tuple
                local_tensor.shape,
                local_tensor.stride(),
                local_tensor.dtype,
            )
            if spec is not None and local_tensor.device.type in (mesh.device_type, "meta"):
                local = local_tensor.detach() if local_tensor.requires_grad else local_tensor
                return cast("DTensor", new_dtensor(DTensor, local, spec, False))
        ndim = local_tensor.ndim + folding(placements) - 1 if shape is None else len(shape)
        resolved = resolve(placements, mesh, ndim)
        grad = None if grad_placements is None else resolve(grad_placements, mesh, ndim)
        if local_tensor.device.type not in (mesh.device_type, "meta"):
            local_tensor = local_tensor.to(mesh.device_type)
        if torch.compiler.is_compiling():
            # The check compares with the rank's own numbers, which belong in no graph; the eager program has made it.
            from hp_dtensor import _compiled

            whole, steps = _autograd.global_shape(local_tensor, mesh, resolved)
            if shape is not None:
                whole, steps = tuple(shape), tuple(stride or contiguous_stride(tuple(shape)))
            return cast(
                "DTensor", _compiled.from_local(local_tensor, mesh, resolved, whole, steps, grad)
            )
        local, whole, steps = check_from_local(
            local_tensor, mesh, resolved, run_check=run_check, shape=shape, stride=stride
        )
        return cast(
            "DTensor", _autograd.from_local(DTensor, local, mesh, resolved, whole, steps, grad)
        )

    def to_local(self, *, grad_placements: PlacementsLike | None = None) -> Tensor:
        """This rank's piece as a plain tensor; differentiable.

        Args:
            grad_placements: how the gradients that the ranks will bring back fit together. By default like the tensor
                itself (Replicate for a Partial one): say ``Partial()`` on an axis where each rank uses its replica for
                other data, or the replicas' gradients are never added up. A backward that comes to a replicated leaf by a
                call that said nothing warns; inside :func:`hp_dtensor.strict` the call raises.
        """
        grad = (
            None
            if grad_placements is None
            else resolve(grad_placements, self._own.mesh, self.ndim)
        )
        self._see_writes()
        local = _autograd.to_local(DTensor, self, grad)
        if getattr(self, "_is_param", False):
            if local is self._local_tensor:
                local = local.view_as(local)
            mark_parameter(local)
        return local

    def redistribute(  # type: ignore[override]  # ours takes aliases, and placements alone
        self,
        device_mesh: DeviceMesh | PlacementsLike | None = None,
        placements: PlacementsLike | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor laid out as *placements*; differentiable, and the tensor itself stays as it is.

        Args:
            device_mesh: the mesh of the result, this tensor's own when left out. ``x.redistribute([Replicate()])`` works.
            placements: the layout wanted.
            async_op: return at once; the result waits when it is first used.
            forward_dtype: cast to this before the collective, and keep it.
            backward_dtype: cast the gradient to this before its collective; it comes back in this tensor's dtype.

        Raises:
            LayoutError: when the placements do not fit.
            RedistributeError: when the move has no meaning, such as from a shard to ``Partial("max")``.
        """
        if placements is None and not isinstance(
            device_mesh, torch.distributed.device_mesh.DeviceMesh
        ):
            device_mesh, placements = None, device_mesh
        if placements is None:
            msg = "placements is needed for redistribute!"
            raise RuntimeError(msg)
        mesh = (
            self._own.mesh
            if device_mesh is None
            else DeviceMesh.from_torch(cast("DeviceMesh", device_mesh))
        )
        target = resolve(placements, mesh, self.ndim)
        self._see_writes()
        return cast(
            "DTensor",
            _autograd.redistribute(
                DTensor,
                self,
                mesh,
                target,
                async_op=async_op,
                forward_dtype=forward_dtype,
                backward_dtype=backward_dtype,
            ),
        )

    def full_tensor(self, *, grad_placements: PlacementsLike | None = None) -> Tensor:
        """The whole tensor, plain, on every rank of the mesh; differentiable, with whatever collectives it takes.

        Args:
            grad_placements: how the gradients that the ranks will bring back fit together; replicated by default.
        """
        mesh = self._own.mesh
        self._see_writes()
        whole = _autograd.redistribute(DTensor, self, mesh, (REPLICATE,) * mesh.ndim)
        grad = None if grad_placements is None else resolve(grad_placements, mesh, self.ndim)
        return _autograd.to_local(DTensor, whole, grad)

    def _see_writes(self) -> None:
        """Where a view was meant and had to be copied, have the values that it would have by now."""
        if self._own.copied_view and not torch.compiler.is_compiling():
            refresh(self)

    def reduce_partial(self) -> DTensor:
        """The same tensor with its addends combined on every axis that holds some; shards stay as they are."""
        target = tuple(REPLICATE if p.is_partial() else p for p in self._own.placements)
        return self if target == self._own.placements else self.redistribute(placements=target)

    # ----------------------------------------------------------------------------------------------------------------
    # Members that would read the local storage, or nothing
    # ----------------------------------------------------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Record operators on this tensor, or stop; returns the tensor.

        What is then kept in ``.grad`` is laid out like the tensor (replicated where it is Partial), whatever layout the
        last operator of the backward left it in.
        """
        super().requires_grad_(requires_grad)
        if requires_grad and self.is_leaf and _autograd.SETTLED not in self.__dict__:
            self._settle_gradients()
        return self

    def _settle_gradients(self) -> None:
        self.__dict__[_autograd.SETTLED] = Settle(DTensor, self, self._own)

    def __format__(self, format_spec: str) -> str:
        """A 0-d tensor as its number, as a plain one is formatted; every rank must take part where it is not replicated."""
        if self.ndim == 0 and not self.is_meta:
            return format(self.detach().item(), format_spec)
        return object.__format__(self, format_spec)

    def tolist(self) -> Any:  # noqa: ANN401  # nested lists as deep as the tensor
        """The whole tensor as nested lists, on every rank."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:  # noqa: ANN401  # numpy is no dependency of ours
        """The whole tensor as a numpy array, on every rank."""
        return self.full_tensor().numpy(force=force)

    def apply_(self, callable: Callable[[Any], Any]) -> Self:  # noqa: A002  # torch's name
        """Replace each element by what *callable* makes of it, on the CPU; each rank does its own piece.

        Raises:
            InPlaceError: when the tensor holds addends, of which no function can be taken one by one.
        """
        if any(p.is_partial() for p in self._own.placements):
            msg = (
                f"apply_: a tensor of shape {tuple(self.shape)} laid out as {self._own.placements} holds addends, not elements; "
                "combine them first with reduce_partial()"
            )
            raise InPlaceError(msg)
        self._see_writes()
        piece = self._local_tensor.detach().clone().apply_(callable)
        self.copy_(new_dtensor(type(self), piece, self._own.as_own(), False))
        return self

    def share_memory_(self) -> Self:
        """Move this rank's piece to memory that processes of this machine may share."""
        self._local_tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether this rank's piece lies in memory that processes of this machine may share."""
        return bool(self._local_tensor.is_shared())

    def __dlpack__(self, **_kwargs: object) -> object:
        msg = (
            "a DTensor has no memory of its own that another library could read: pass x.to_local() for this rank's piece or "
            "x.full_tensor() for the whole tensor"
        )
        raise BufferError(msg)

    def _get_data(self) -> Tensor:
        return cast("Tensor", torch.Tensor.data.__get__(self))  # type: ignore[attr-defined]  # a C descriptor

    def _set_data(self, value: Tensor) -> None:
        spec = spec_of(value)
        if spec is None:
            msg = (
                f"the data of a DTensor can only be set to a DTensor, got a plain tensor of shape {tuple(value.shape)}: "
                "use distribute_tensor first, or x.copy_(value) to write a whole tensor into this layout"
            )
            raise LayoutError(msg)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a C descriptor
        self._local_tensor = value._local_tensor  # type: ignore[attr-defined]  # every DTensor has one
        self._own = spec
        settled = self.__dict__.get(_autograd.SETTLED)
        if settled is not None:
            settled.remove()
            self._settle_gradients()

    def _get_requires_grad(self) -> bool:
        return cast("bool", torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]  # a C descriptor

    def _set_requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    requires_grad = property(
        _get_requires_grad,
        _set_requires_grad,
        doc="Whether operators on the tensor are recorded; setting it is `requires_grad_`.",
    )

    data = property(
        _get_data,
        _set_data,
        doc="The tensor without its history; setting it replaces values *and* layout.",
    )


_LISTS = (list, tuple)


@lru_cache(maxsize=4096)
def _even(
    mesh: DeviceMesh,
    placements: tuple[Any, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Spec | None:
    """The tensor whose pieces all have *shape* and *stride*; None outside of *mesh*, and where dims are flattened.

    Raises:
        LayoutError: when the placements do not fit.
    """
    if mesh.get_coordinate() is None or folding(placements) > 1:
        return None
    resolved = resolve(placements, mesh, len(shape))
    whole, steps = _autograd.global_shape(
        torch.empty_strided(shape, stride, dtype=dtype, device="meta"), mesh, resolved
    )
    return make_spec(mesh, resolved, whole, steps, dtype)


def _own_of(tensor: DTensor) -> DTensorSpec:
    return tensor._own.torch


# The setter is the slot's own C function, so the constructor pays no Python frame for storing our spec.
DTensor._spec = property(_own_of, DTensor._own.__set__)  # type: ignore[assignment,attr-defined]  # a slot in the base class


def rebuild(
    local: Tensor, spec: DTensorSpec, requires_grad: bool, state: dict[str, object]
) -> DTensor:  # pickle calls it by position
    """The tensor that was pickled: its piece, its layout and its attributes."""
    meta = cast("TensorMeta", spec.tensor_meta)
    ours = make_spec(
        DeviceMesh.from_torch(spec.mesh),
        tuple(spec.placements),
        meta.shape,
        meta.stride,
        meta.dtype,
    )
    out = cast("DTensor", new_dtensor(DTensor, local, ours, False))
    out.requires_grad_(requires_grad)
    out.__dict__.update(state)
    return out


def as_dtensor(tensor: TorchDTensor) -> DTensor:
    """*tensor* as one of ours, sharing its storage; one of torch's gets a new wrapper, without recorded history."""
    if isinstance(tensor, DTensor):
        return tensor
    return cast(
        "DTensor",
        new_dtensor(
            DTensor, tensor._local_tensor, spec_from_torch(tensor._spec), tensor.requires_grad
        ),
    )


# What a checkpoint of ours holds, so that torch.load(weights_only=True) takes it. Torch lists its own types itself.
torch.serialization.add_safe_globals([DTensor, RaggedShard, rebuild, TensorMeta, DTensorSpec])
support_foreach(DTensor)
keep_linear_whole(DTensor, layer_gradients)
scatter_uneven_strided_shards()
