"""Do replicas really hold the same? A watch over values and gradients that claim to.

A missing sum over ranks leaves the loss right and the replicas of a weight drifting apart from the first step on; it is
found weeks later. The claim is in the layout, so it can be checked: each rank takes a hash of its piece, the hashes go
round the mesh, and where two replicas differ every rank raises the same error. Bits are compared (a zero's sign apart),
not values within a tolerance: replicas come from the same operations on the same bits, and a tolerance hides drift.

It is a dispatch mode, so that nothing is paid for it outside of the context, plus calls where plain tensors enter and
leave, which no operator marks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self, cast

import torch
from hp_mesh.collectives import all_gather, wait
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from hp_dtensor._torch import TorchDTensor, tree_flatten
from hp_dtensor.errors import ReplicaError
from hp_dtensor.placements import Placement
from hp_dtensor.spec import spec_of

if TYPE_CHECKING:
    from types import TracebackType

    from hp_mesh import DeviceMesh
    from torch import Tensor
    from torch._ops import OpOverload

__all__ = ["ReplicaCheck", "check_replicas", "compare", "described", "differing", "watching"]

Shape = tuple[int, ...]

_watches: list[ReplicaCheck] = []
"""The watches that are on, innermost last: one list for all threads, since autograd runs a backward on threads of its own."""

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(*modules: nn.Module) -> ReplicaCheck:
    """A context in which replicas that differ are an error, in forward and backward.

    Checked are the results of all operators on distributed tensors, what enters by ``from_local``, gradients where they
    come back to ``to_local`` and, at the end, parameters and their gradients. Each check is a small collective, so every
    rank of a mesh has to run the same program inside.

    Args:
        modules: their parameters are called by name in errors, and are checked when the context ends.

    Raises:
        ReplicaError: on every rank of the mesh, naming the tensor, the operator and the mesh axis.

    Example:
        >>> import torch
        >>> from hp_dtensor import check_replicas
        >>> model = torch.nn.Linear(2, 2)
        >>> with check_replicas(model):
        ...     model(torch.ones(2)).sum().backward()
    """
    return ReplicaCheck(modules)


class ReplicaCheck(TorchDispatchMode):
    """The context of :func:`check_replicas`."""

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares it untyped
        self._modules = tuple(modules)
        self._tracker = ModuleTracker()
        self.compared = 0

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters and buffers of the modules."""
        for module in self._modules:
            yield from itertools.chain(module.named_parameters(), module.named_buffers())

    @property
    def where(self) -> str:
        """The module that is running, in words."""
        paths = [path for path in self._tracker.parents if path != "Global"]
        return f" in module {max(paths, key=len)}" if paths else ""

    def __enter__(self) -> Self:
        self._tracker.__enter__()
        _watches.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch declares it untyped
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch declares it untyped
        self._tracker.__exit__(kind, error, trace)
        try:
            if error is None:
                self._check_parameters()
        finally:
            _watches.remove(self)

    def _check_parameters(self) -> None:
        for name, tensor in self.named():
            _compare_distributed(tensor, "the value at the end", name)
            if tensor.grad is not None:
                _compare_distributed(tensor.grad, "the gradient at the end", name)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if any(issubclass(kind, TorchDTensor) for kind in types):
            leaves, _ = tree_flatten((args, kwargs))
            names = ", ".join(described(leaf) for leaf in leaves if isinstance(leaf, TorchDTensor))
            for value in tree_flatten(out)[0]:
                if isinstance(value, torch.Tensor):
                    _compare_distributed(value, str(func), f"the result for {names}")
        return out


def watching() -> bool:
    """Whether a watch is on."""
    return bool(_watches)


def described(tensor: Tensor) -> str:
    """*tensor* in words, by its name where a watch knows one."""
    spec = spec_of(tensor)
    laid = f" {spec.placements}" if spec is not None else ""
    for watch in _watches:
        for name, known in watch.named():
            if known is tensor:
                return f"{name!r} {tuple(tensor.shape)}{laid}"
    return f"a tensor {tuple(tensor.shape)}{laid}"


def _compare_distributed(tensor: Tensor, op: str, name: str) -> None:
    spec = spec_of(tensor)
    if spec is not None:
        local = cast("TorchDTensor", tensor)._local_tensor
        compare(local, spec.mesh, spec.placements, op, name)


def compare(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], op: str, name: str
) -> None:
    """Raise on every rank of *mesh* when replicas of *local* differ and a watch is on.

    Args:
        local: this rank's piece.
        mesh: the devices.
        placements: what the piece claims to be.
        op: where it comes from.
        name: what it is.

    Raises:
        ReplicaError: the same on every rank.
    """
    if not _watches or local.is_meta or torch.compiler.is_compiling():
        return
    _watches[-1].compared += 1
    odd = differing(local, mesh, placements)
    if odd is not None:
        axis, first, where = odd
        _refuse(mesh, axis, first, where, placements, op, name)


def differing(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, Shape, Shape] | None:
    """Where replicas of *local* differ: a mesh axis and two coordinates, the same on every rank; None where they do not.

    One all-gather of three integers for each axis of the mesh, or none if there are no replicas.
    """
    axes = [
        axis
        for axis, (size, placement) in enumerate(zip(mesh.shape, placements, strict=True))
        if size > 1 and placement.is_replicate()
    ]
    if not axes or mesh.get_coordinate() is None:
        return None
    rows = _hash(local.detach())
    for axis in reversed(range(mesh.ndim)):
        if mesh.size(axis) > 1:
            rows = wait(all_gather(rows, mesh.get_group(axis)))
    table = dict(
        zip(itertools.product(*map(range, mesh.shape)), map(tuple, rows.tolist()), strict=True)
    )
    for axis in axes:
        for where, held in table.items():
            first = (*where[:axis], 0, *where[axis + 1 :])
            if held != table[first]:
                return axis, first, where
    return None


def _refuse(
    mesh: DeviceMesh,
    axis: int,
    first: Shape,
    where: Shape,
    placements: Sequence[Placement],
    op: str,
    name: str,
) -> None:
    names = mesh.mesh_dim_names
    called = f"{names[axis]!r}" if names else str(axis)
    msg = (
        f"{op}{_watches[-1].where}: {name} is laid out as {tuple(placements)}, so its replicas along mesh axis {called} "
        f"are equal; but the ranks at mesh coordinates {first} and {where} hold different ones. If each rank computes an "
        "addend there, say so with Partial(): from_local(x, mesh, [Partial()]) for a value, "
        "to_local(grad_placements=[Partial()]) for the gradient of a replica that each rank uses on data of its own"
    )
    raise ReplicaError(msg, op=op, axis=axis, coordinates=(first, where))


def _hash(local: Tensor) -> Tensor:
    """Shape, dtype and bits of *local* as one row of integers; the sum and a sum weighted by position."""
    facts = hash(tuple(local.shape))  # of integers, so the same in every process
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    if local.is_floating_point():
        local = local + 0.0  # -0.0 becomes 0.0
    flat = wait(local).contiguous().view(_SAME_WIDTH[local.itemsize]).reshape(-1)
    bits = flat.to(torch.int64)
    weights = torch.arange(1, bits.shape[0] + 1, device=bits.device)
    sums = [bits.sum(), (bits * weights).sum()]
    return torch.stack([torch.tensor(facts, device=bits.device), *sums])[None]
