"""Matrix products that overlap with the collective in front of them or behind them, in eager mode.

A gather and then a product over the whole: each rank multiplies the piece that is here while the next one is on its way. A
product and then a scatter of the sum: each rank computes the addend of the piece that is asked for next, while sums are on
their way to where they belong. Either is a turn round the ring (:mod:`hp_tp.ring`), with the other one as its backward, and
keeps only the piece for it: the gathered input, which the plain path keeps whole, is gathered again while the weight's gradient
is computed.

Inside :class:`overlap` linear layers that were laid out by our styles, and ``F.linear`` of distributed tensors, go this way
where they gather a sequence before the product or scatter one after it. It counts where it did, and says for the first place
where it did not why not: an option that silently does nothing is what the compiler's own pass is known for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Placement, Shard
from hp_dtensor.placements import shard_dim
from hp_dtensor.spec import spec_of
from hp_mesh import DeviceMesh
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.overrides import TorchFunctionMode

from hp_tp._torch import pipeline_products_in_compiler
from hp_tp.errors import BoundaryError
from hp_tp.ring import receive, send

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor
    from torch.autograd.function import FunctionCtx

__all__ = [
    "AsyncTPReport",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "maybe_enable_async_tp",
    "overlap",
]


# The two products.


def all_gather_matmul(
    piece: Tensor,
    weight: Tensor,
    mesh: TorchMesh,
    *,
    dim: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """``F.linear`` of a gathered input: pieces are multiplied while others are on their way.

    Args:
        piece: this rank's piece of the input, of equal shape on every rank.
        weight: this rank's, ``[out, in]``; plain.
        mesh: the one axis over which the input is cut.
        dim: the dim along which it is cut; not the last.
        bias: this rank's, ``[out]``.

    Returns:
        The product for the whole of *dim*. The gradient of *piece* is summed over the ranks, that of *weight* is this rank's.

    Raises:
        BoundaryError: when *dim* is the last one, which the product sums over.
    """
    axis = DeviceMesh.from_torch(mesh)
    dim = _outer(piece, dim)
    if axis.size() == 1:
        return F.linear(piece, weight, bias)
    out: Tensor = _GatherMatmul.apply(piece, weight, bias, axis, dim)
    return out


def matmul_reduce_scatter(
    tensor: Tensor, weight: Tensor, mesh: TorchMesh, *, dim: int = 0
) -> Tensor:
    """``F.linear``, summed over the ranks and scattered: sums travel while addends are computed.

    Args:
        tensor: this rank's input, of equal shape on every rank; plain.
        weight: this rank's, ``[out, in]``.
        mesh: the one axis over which products are added up.
        dim: the dim along which the sum is scattered; not the last, and of a length that divides.

    Returns:
        This rank's piece of the sum. The gradients of *tensor* and *weight* are this rank's.

    Raises:
        BoundaryError: when *dim* is the last one, or its length does not divide.
    """
    axis = DeviceMesh.from_torch(mesh)
    dim = _outer(tensor, dim)
    if axis.size() == 1:
        return F.linear(tensor, weight)
    if tensor.shape[dim] % axis.size():
        message = (
            f"matmul_reduce_scatter scatters dim {dim} of length {tensor.shape[dim]} over {axis.size()} ranks, which do not "
            "divide it; pad it"
        )
        raise BoundaryError(message)
    out: Tensor = _MatmulScatter.apply(tensor, weight, axis, dim)
    return out


def _outer(tensor: Tensor, dim: int) -> int:
    own = dim % tensor.ndim
    if own == tensor.ndim - 1:
        message = f"dim={dim} of a tensor with {tensor.ndim} dims is the one that a product sums over; give another"
        raise BoundaryError(message)
    return own


def _gather(piece: Tensor, mesh: DeviceMesh, work: Callable[[Tensor, int], None]) -> None:
    """Do *work* on every rank's piece, this rank's first, with whose it is; the next piece comes meanwhile."""
    ranks, own = mesh.size(), mesh.get_local_rank()
    held = piece.contiguous()
    for step in range(ranks):
        coming = send(mesh, held) if step + 1 < ranks else None
        work(held, (own - step) % ranks)
        if coming is not None:
            (held,) = receive(coming, held)


def _scatter(mesh: DeviceMesh, addend: Callable[[int], Tensor]) -> Tensor:
    """The sum of all ranks' ``addend(rank)`` for this rank; the next addend is computed while sums travel."""
    ranks, own = mesh.size(), mesh.get_local_rank()
    coming: Tensor | None = None
    total = addend((own - 1) % ranks)
    for step in range(1, ranks):
        coming = send(mesh, total)
        following = addend((own - 1 - step) % ranks)
        (arrived,) = receive(coming, total)
        total = arrived + following
    return total


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        piece: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: DeviceMesh,
        dim: int,
    ) -> Tensor:
        ctx.save_for_backward(piece, weight)
        ctx.facts = (mesh, dim)  # type: ignore[attr-defined]  # torch leaves these open
        parts: list[Tensor | None] = [None] * mesh.size()

        def multiply(held: Tensor, rank: int) -> None:
            parts[rank] = F.linear(held, weight, bias)

        _gather(piece, mesh, multiply)
        return torch.cat(cast("list[Tensor]", parts), dim)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        piece, weight = ctx.saved_tensors  # type: ignore[attr-defined]  # declared on a mixin that FunctionCtx lacks
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]  # as above
        mesh, dim = ctx.facts  # type: ignore[attr-defined]  # set in forward
        pieces = grads[0].chunk(mesh.size(), dim)
        of_piece = of_weight = of_bias = None
        if needs[0]:
            of_piece = _scatter(mesh, lambda rank: pieces[rank].matmul(weight))
        if needs[1]:
            total = torch.zeros_like(weight)

            def add(held: Tensor, rank: int) -> None:
                total.addmm_(_rows(pieces[rank]).t(), _rows(held))

            _gather(piece, mesh, add)
            of_weight = total
        if needs[2]:
            of_bias = _rows(grads[0]).sum(0)
        return of_piece, of_weight, of_bias, None, None


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: Tensor, weight: Tensor, mesh: DeviceMesh, dim: int
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.facts = (mesh, dim)  # type: ignore[attr-defined]  # torch leaves these open
        pieces = tensor.chunk(mesh.size(), dim)
        return _scatter(mesh, lambda rank: F.linear(pieces[rank], weight))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight = ctx.saved_tensors  # type: ignore[attr-defined]  # declared on a mixin that FunctionCtx lacks
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]  # as above
        mesh, dim = ctx.facts  # type: ignore[attr-defined]  # set in forward
        pieces = tensor.chunk(mesh.size(), dim)
        parts: list[Tensor | None] = [None] * mesh.size()
        total = torch.zeros_like(weight) if needs[1] else None

        def work(held: Tensor, rank: int) -> None:
            if needs[0]:
                parts[rank] = held.matmul(weight)
            if total is not None:
                total.addmm_(_rows(held).t(), _rows(pieces[rank]))

        _gather(grads[0], mesh, work)
        of_tensor = torch.cat(cast("list[Tensor]", parts), dim) if needs[0] else None
        return of_tensor, total, None, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


# Where they are used.


_active: ContextVar[overlap | None] = ContextVar("hp_tp_overlap", default=None)


def active() -> overlap | None:
    """The innermost :class:`overlap` around the caller, if there is one."""
    if torch.compiler.is_dynamo_compiling():
        return None  # a compiler orders the collectives itself, and before torch 2.15 it cannot read the variable
    return _active.get()


class overlap(TorchFunctionMode):  # noqa: N801  # used like a function
    """Overlap gathers and scatters of a sequence with the products next to them, inside a ``with``.

    It concerns linear layers laid out by ``ColwiseParallel`` with an input that is cut along another dim than the last, by
    ``RowwiseParallel`` with such an output, and ``F.linear`` of a distributed tensor that is cut so with a weight that is cut
    along its outputs.

    Example:
        >>> from hp_tp import overlap
        >>> with overlap() as info:
        ...     pass  # out = model(x)
        >>> info.applied, info.reason
        (0, 'no linear layer ran')
    """

    def __init__(self) -> None:
        super().__init__()
        self.applied = 0
        """How many products overlapped with their collective."""
        self.reason: str | None = "no linear layer ran"
        """Why the first one that did not overlap did not; None when all did."""
        self._seen = False
        self._tokens: list[Token[overlap | None]] = []

    def __enter__(self) -> overlap:  # noqa: PYI034  # torch's modes return themselves as this
        """Begin."""
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._tokens.append(_active.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        _active.reset(self._tokens.pop())
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]  # torch leaves it so

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Let a linear function of distributed tensors overlap, and let all others be."""
        if func is F.linear and args and isinstance(args[0], TorchDTensor):
            out = self._linear(*args, **(kwargs or {}))  # type: ignore[arg-type]  # the function's own arguments
            if out is not None:
                return out
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:  # noqa: A002  # torch's name for it
        """The product of distributed tensors with its gather overlapped; None when it has none."""
        x, w, b = spec_of(input), spec_of(weight), None if bias is None else spec_of(bias)
        if x is None or w is None or x.mesh != w.mesh or x.mesh.ndim != 1:
            self.skip("F.linear of tensors on different meshes, or on a mesh of several axes")
            return None
        cut = self.sequence(x.placements[0], input.shape, x.mesh)
        by_columns = w.placements == (Shard(0),) and (
            bias is None or (b is not None and b.placements == w.placements)
        )
        if cut is None:
            return None
        if not by_columns or weight.shape[0] % x.mesh.size():
            self.skip(
                "F.linear with a weight (and bias) that is not cut evenly along its outputs gathers nothing"
            )
            return None
        locals_ = [
            None if tensor is None else DTensor.to_local(cast("DTensor", tensor))
            for tensor in (input, weight, bias)
        ]
        piece, own, own_bias = locals_
        out = all_gather_matmul(
            cast("Tensor", piece), cast("Tensor", own), x.mesh, dim=cut, bias=own_bias
        )
        self.hit()
        shape = (*input.shape[:-1], weight.shape[0])
        return DTensor.from_local(out, x.mesh, (Shard(input.ndim - 1),), shape=shape)

    def sequence(self, placement: Placement, shape: torch.Size, mesh: DeviceMesh) -> int | None:
        """The dim of a cut of another dim than the last, when it is even; else None, and why."""
        dim = shard_dim(placement) if type(placement) is Shard else None
        if dim is None or dim == len(shape) - 1:
            self.skip(f"an input or output laid out as {placement} is not cut along a sequence")
            return None
        if mesh.size() == 1 or shape[dim] % mesh.size():
            self.skip(
                f"a sequence of {shape[dim]} tokens over {mesh.size()} ranks has no equal pieces to send round"
            )
            return None
        return dim

    def hit(self) -> None:
        """Count a product that overlapped."""
        self.applied += 1
        if not self._seen:
            self._seen, self.reason = True, None

    def skip(self, reason: str) -> None:
        """Note why a product did not overlap."""
        if not self._seen or self.reason is None:
            self._seen, self.reason = True, reason


# The compiler's way.


@dataclass(frozen=True, slots=True)
class AsyncTPReport:
    """Whether tensor-parallel products will overlap with their collectives, how, and if not, why not."""

    enabled: bool
    route: Literal["compiler", "eager", "none"]
    """Who overlaps: the compiler's pass, or the :class:`overlap` context."""
    reason: str

    def __bool__(self) -> bool:
        return self.enabled


def maybe_enable_async_tp(
    parallelism: object, compile_config: object, tp_mesh: TorchMesh | None
) -> AsyncTPReport:
    """Turn on the compiler's overlap of products and collectives where it can work, and say so.

    Args:
        parallelism: True, or a configuration with ``enable_async_tensor_parallel``.
        compile_config: True, or a configuration with ``enable`` and, perhaps, ``components``.
        tp_mesh: the tensor-parallel axis; None without tensor parallelism.

    Returns:
        A report, which is true when the compiler's pass is on. What the pass then fuses depends on the graph, for it needs
        sequence parallelism, pieces of at least 1024 tokens and collectives that are not saved for the backward.

    Example:
        >>> from hp_tp import maybe_enable_async_tp
        >>> report = maybe_enable_async_tp(False, True, None)
        >>> bool(report), report.reason
        (False, 'it was not asked for')
    """
    if not _wanted(parallelism, "enable_async_tensor_parallel"):
        return AsyncTPReport(False, "none", "it was not asked for")
    if tp_mesh is None or tp_mesh.size() == 1:
        return AsyncTPReport(
            False, "none", "there is one tensor-parallel rank, and nothing to overlap with"
        )
    components = getattr(compile_config, "components", ("model",))
    if not _wanted(compile_config, "enable") or "model" not in components:
        reason = "the model is not compiled; use `with hp_tp.overlap():` around the eager forward, or compile it"
        return AsyncTPReport(False, "eager", reason)
    device = tp_mesh.device_type
    if device != "cuda":
        reason = f"the compiler's pass needs memory that {device} ranks do not share; `with hp_tp.overlap():` works on any device"
        return AsyncTPReport(False, "eager", reason)
    if not pipeline_products_in_compiler(tp_mesh):
        reason = "these ranks have no symmetric memory; `with hp_tp.overlap():` works without"
        return AsyncTPReport(False, "eager", reason)
    return AsyncTPReport(True, "compiler", "the compiler's pass is on")


def _wanted(config: object, name: str) -> bool:
    return config if isinstance(config, bool) else bool(getattr(config, name, False))
