"""Matrix products that overlap with the collective in front of them or behind them, in eager mode.

A gather and then a product over the whole: each rank multiplies the piece that is here while the next one is on its way. A
product and then a scatter of the sum: each rank computes the addend of the piece that is asked for next, while sums are on
their way to where they belong. Either is a turn round the ring (:mod:`hp_tp.ring`), with the other one as its backward, and
keeps only the piece for it: the gathered input, which the plain path keeps whole, is gathered again while the weight's gradient
is computed. A piece travels in one part or in several: with more of them the first product can begin, and the first sum can
leave, sooner, and each costs a message.

The products are those of the plain path, of fewer rows at a time, and a sum over two ranks has one order; over more ranks sums
are in the order of the ring, which need not be that of the backend's own scatter. So results are exact where sums are, and
equal in every bit where the device's matrix product adds a row up alike however many rows there are: most do for large
products, and those of a host often do not for few rows.

Inside :class:`overlap` linear layers that were laid out by our styles, and ``F.linear`` of distributed tensors, go this way
where they gather a sequence before the product or scatter one after it. It counts where it did, and says for the first place
where it did not why not: an option that silently does nothing is what the compiler's own pass is known for. A layer that
computes again in a backward does what it did before, whether that runs inside of the ``with`` or not, and in whatever thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Placement, Shard, Spec, explain
from hp_dtensor.hits import keep
from hp_dtensor.placements import shard_dim
from hp_dtensor.spec import spec_of
from hp_mesh import DeviceMesh
from hp_mesh.collectives import wait
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.overrides import TorchFunctionMode

from hp_tp._torch import in_backward, pipeline_products_in_compiler
from hp_tp.errors import BoundaryError
from hp_tp.ring import send

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
    length: int | None = None,
    chunks: int = 1,
) -> Tensor:
    """``F.linear`` of a gathered input: pieces are multiplied while others are on their way.

    Args:
        piece: this rank's piece of the input.
        weight: this rank's, ``[out, in]``; plain.
        mesh: the one axis over which the input is cut.
        dim: the dim along which it is cut; not the last.
        bias: this rank's, ``[out]``.
        length: of the whole input in *dim*, which lies over the ranks as ``Shard(dim)`` does; None for pieces of one length.
        chunks: in how many parts a piece travels; with fewer rows than that, in as many as it has rows.

    Returns:
        The product for the whole of *dim*. The gradient of *piece* is summed over the ranks, that of *weight* is this rank's.

    Raises:
        BoundaryError: when *dim* is the last one, which the product sums over; when *piece* is not this rank's of *length*; or
            when *chunks* is no positive integer.

    Example:
        >>> import torch
        >>> from hp_tp import all_gather_matmul
        >>> def project(piece, weight, mesh):  # a sequence cut along dim 1
        ...     return all_gather_matmul(piece, weight, mesh["tp"], dim=1, chunks=4)
    """
    axis = DeviceMesh.from_torch(mesh)
    dim = _outer(piece, dim)
    whole = piece.shape[dim] * axis.size() if length is None else length
    way = _Way(axis, dim, whole, _checked(chunks))
    if piece.shape[dim] != way.sizes[axis.get_local_rank()]:
        message = (
            f"all_gather_matmul got {piece.shape[dim]} rows of dim {dim} as this rank's piece of {whole} over {axis.size()} "
            f"ranks, of which each has {list(way.sizes)}"
        )
        raise BoundaryError(message)
    if axis.size() == 1:
        return F.linear(piece, weight, bias)
    piece, weight, bias = _as_autocast(piece, weight, bias)
    out: Tensor = _GatherMatmul.apply(piece, weight, bias, way)
    return out


def matmul_reduce_scatter(
    tensor: Tensor, weight: Tensor, mesh: TorchMesh, *, dim: int = 0, chunks: int = 1
) -> Tensor:
    """``F.linear``, summed over the ranks and scattered: sums travel while addends are computed.

    Args:
        tensor: this rank's input, of equal shape on every rank; plain.
        weight: this rank's, ``[out, in]``.
        mesh: the one axis over which products are added up.
        dim: the dim along which the sum is scattered, as ``Shard(dim)`` cuts it; not the last.
        chunks: in how many parts a piece travels; with fewer rows than that, in as many as it has rows.

    Returns:
        This rank's piece of the sum. The gradients of *tensor* and *weight* are this rank's.

    Raises:
        BoundaryError: when *dim* is the last one, or *chunks* is no positive integer.

    Example:
        >>> import torch
        >>> from hp_tp import matmul_reduce_scatter
        >>> def project(hidden, weight, mesh):  # a sequence to be cut along dim 1
        ...     return matmul_reduce_scatter(hidden, weight, mesh["tp"], dim=1, chunks=4)
    """
    axis = DeviceMesh.from_torch(mesh)
    dim = _outer(tensor, dim)
    way = _Way(axis, dim, tensor.shape[dim], _checked(chunks))
    if axis.size() == 1:
        return F.linear(tensor, weight)
    tensor, weight, _ = _as_autocast(tensor, weight, None)
    out: Tensor = _MatmulScatter.apply(tensor, weight, way)
    return out


def _outer(tensor: Tensor, dim: int) -> int:
    own = dim % tensor.ndim
    if own == tensor.ndim - 1:
        message = f"dim={dim} of a tensor with {tensor.ndim} dims is the one that a product sums over; give another"
        raise BoundaryError(message)
    return own


def _checked(chunks: int) -> int:
    if type(chunks) is not int or chunks < 1:
        message = f"chunks={chunks!r} is how many parts a piece travels in: an integer, 1 or more"
        raise BoundaryError(message)
    return chunks


def _as_autocast(
    tensor: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """In the dtype in which autocast has products computed, so that what travels is in it too."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return tensor, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return tensor.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a cut dim lies over the ranks, and in which parts its pieces travel."""

    mesh: DeviceMesh
    dim: int
    length: int
    """Of the whole dim."""
    chunks: int
    """The most parts of a piece; the same number on every rank, since each is a collective."""
    sizes: tuple[int, ...] = field(init=False)
    """How much of the dim each rank has."""

    def __post_init__(self) -> None:
        ranks = self.mesh.size()
        each = -(-self.length // ranks)
        sizes = tuple(max(min(each, self.length - rank * each), 0) for rank in range(ranks))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "chunks", max(min(self.chunks, each), 1))

    def parts(self, rank: int) -> list[int]:
        """The lengths of the parts of a rank's piece."""
        least, more = divmod(self.sizes[rank], self.chunks)
        return [least + 1] * more + [least] * (self.chunks - more)

    def split(self, whole: Tensor) -> list[list[Tensor]]:
        """The parts of every rank's piece of *whole*, which is this long in the dim."""
        pieces = whole.split(self.sizes, self.dim)
        return [list(piece.split(self.parts(rank), self.dim)) for rank, piece in enumerate(pieces)]

    def send(self, part: Tensor, like: int) -> Tensor:
        """Start sending *part*; return what will come, which is *like* long in the dim."""
        shape = self._shape(part, like)
        return send(self.mesh, part, come=shape.numel())

    def receive(self, coming: Tensor, sent: Tensor, like: int) -> Tensor:
        """What came for *sent*."""
        return wait(coming).view(self._shape(sent, like))

    def _shape(self, part: Tensor, length: int) -> torch.Size:
        return torch.Size((*part.shape[: self.dim], length, *part.shape[self.dim + 1 :]))

    def gather(self, piece: Tensor, work: Callable[[Tensor, int, int], None]) -> None:
        """Do *work* on each part of every rank's piece, this rank's first, with whose it is and which; others come meanwhile."""
        ranks, own = self.mesh.size(), self.mesh.get_local_rank()
        held = list(piece.split(self.parts(own), self.dim))
        coming: dict[int, Tensor] = {}
        for step in range(ranks):
            rank = (own - step) % ranks
            lengths, before = self.parts(rank), self.parts((rank - 1) % ranks)
            for part in range(self.chunks):
                if step:
                    held[part] = self.receive(coming[part], held[part], lengths[part])
                if step + 1 < ranks:
                    coming[part] = self.send(held[part], before[part])
                if lengths[part]:
                    work(held[part], rank, part)

    def scatter(self, addend: Callable[[int, int], Tensor]) -> Tensor:
        """The sum of all ranks' ``addend(rank, part)`` for this rank; the next addend is computed while sums travel."""
        ranks, own = self.mesh.size(), self.mesh.get_local_rank()
        totals: dict[int, Tensor] = {}
        coming: dict[int, Tensor] = {}
        for step in range(ranks):
            rank = (own - 1 - step) % ranks
            lengths, following = self.parts(rank), self.parts((rank - 1) % ranks)
            for part in range(self.chunks):
                total = addend(rank, part)
                if step:
                    total = self.receive(coming[part], total, lengths[part]) + total
                totals[part] = total
                if step + 1 < ranks:
                    coming[part] = self.send(total, following[part])
        return totals[0] if self.chunks == 1 else torch.cat(list(totals.values()), self.dim)


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, piece: Tensor, weight: Tensor, bias: Tensor | None, way: _Way
    ) -> Tensor:
        ctx.save_for_backward(piece, weight)
        ctx.way = way  # type: ignore[attr-defined]  # torch leaves these open
        products: dict[tuple[int, int], Tensor] = {}

        def multiply(held: Tensor, rank: int, part: int) -> None:
            products[rank, part] = F.linear(held, weight, bias)

        way.gather(piece, multiply)
        return _joined(products, way, piece, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        piece, weight = ctx.saved_tensors  # type: ignore[attr-defined]  # declared on a mixin that FunctionCtx lacks
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]  # as above
        way: _Way = ctx.way  # type: ignore[attr-defined]  # set in forward
        parts = way.split(grads[0])
        of_piece = of_weight = of_bias = None
        if needs[0]:
            of_piece = way.scatter(lambda rank, part: parts[rank][part].matmul(weight))
        if needs[1]:
            total = torch.zeros_like(weight)

            def add(held: Tensor, rank: int, part: int) -> None:
                total.addmm_(_rows(parts[rank][part]).t(), _rows(held))

            way.gather(piece, add)
            of_weight = total
        if needs[2]:
            of_bias = _rows(grads[0]).sum(0)
        return of_piece, of_weight, of_bias, None


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, weight: Tensor, way: _Way) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.way = way  # type: ignore[attr-defined]  # torch leaves these open
        parts = way.split(tensor)
        return way.scatter(lambda rank, part: F.linear(parts[rank][part], weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight = ctx.saved_tensors  # type: ignore[attr-defined]  # declared on a mixin that FunctionCtx lacks
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]  # as above
        way: _Way = ctx.way  # type: ignore[attr-defined]  # set in forward
        parts = way.split(tensor)
        products: dict[tuple[int, int], Tensor] = {}
        total = torch.zeros_like(weight) if needs[1] else None

        def work(held: Tensor, rank: int, part: int) -> None:
            if needs[0]:
                products[rank, part] = held.matmul(weight)
            if total is not None:
                total.addmm_(_rows(held).t(), _rows(parts[rank][part]))

        way.gather(grads[0], work)
        of_tensor = _joined(products, way, grads[0], weight.shape[1]) if needs[0] else None
        return of_tensor, total, None


def _joined(
    products: Mapping[tuple[int, int], Tensor], way: _Way, like: Tensor, features: int
) -> Tensor:
    """The products in the order of ranks and parts; of a dim without rows, none."""
    if not products:
        return like.new_empty((*like.shape[:-1], features))
    return torch.cat([products[key] for key in sorted(products)], way.dim)


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
    along its outputs, where that gathers the input. Where the weight is the smaller one, it is gathered instead, and the result
    stays cut along the sequence; that is left as it is.

    Args:
        chunks: in how many parts each rank's piece travels. With more, products begin and sums leave sooner, and each part is a
            message and a smaller product.

    Raises:
        BoundaryError: when *chunks* is no positive integer.

    Layers that are checkpointed compute again as they did in the forward, in a backward inside or outside of the ``with``. Functions
    do not know where they are computed again, since torch leaves modes before a backward: have them enter it again, with
    ``checkpoint(..., context_fn=lambda: (nullcontext(), overlap(chunks)))``. Gradients of gradients are refused.

    Example:
        >>> from hp_tp import overlap
        >>> with overlap(chunks=4) as info:
        ...     pass  # out = model(x)
        >>> info.applied, info.reason
        (0, 'no linear layer ran')
    """

    def __init__(self, chunks: int = 1) -> None:
        super().__init__()
        self.chunks = _checked(chunks)
        """In how many parts a piece travels."""
        self.applied = 0
        """How many products of the forward overlapped with their collective."""
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
        if not by_columns:
            self.skip(
                "F.linear with a weight (and bias) that is not cut along its outputs gathers nothing"
            )
            return None
        plain = _plain_layout(input, weight, bias)
        if plain != (Shard(input.ndim - 1),):
            self.skip(
                f"F.linear of {tuple(input.shape)} with a weight of {tuple(weight.shape)} does not gather its input: what it "
                f"gives is laid out as {plain}"
            )
            return None
        locals_ = [
            None if tensor is None else DTensor.to_local(cast("DTensor", tensor))
            for tensor in (input, weight, bias)
        ]
        piece, own, own_bias = locals_
        out = all_gather_matmul(
            cast("Tensor", piece),
            cast("Tensor", own),
            x.mesh,
            dim=cut,
            bias=own_bias,
            length=input.shape[cut],
            chunks=self.chunks,
        )
        self.hit()
        shape = (*input.shape[:-1], weight.shape[0])
        return DTensor.from_local(out, x.mesh, (Shard(input.ndim - 1),), shape=shape)

    def sequence(self, placement: Placement, shape: torch.Size, mesh: DeviceMesh) -> int | None:
        """The dim of a cut of another dim than the last; else None, and why."""
        dim = shard_dim(placement) if type(placement) is Shard else None
        if dim is None or dim == len(shape) - 1:
            self.skip(f"an input or output laid out as {placement} is not cut along a sequence")
            return None
        if mesh.size() == 1:
            self.skip("there is one rank, and nothing to overlap with")
            return None
        return dim

    def hit(self) -> None:
        """Count a product that overlapped."""
        if in_backward():  # it was counted in the forward
            return
        self.applied += 1
        if not self._seen:
            self._seen, self.reason = True, None

    def skip(self, reason: str) -> None:
        """Note why a product did not overlap."""
        if not self._seen or self.reason is None:
            self._seen, self.reason = True, reason


_plain_layouts: dict[tuple[Spec | None, ...], tuple[Placement, ...] | None] = {}
_MOST_LAYOUTS = 1024


def _plain_layout(
    input: Tensor,  # noqa: A002  # torch's name for it
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Placement, ...] | None:
    """How the result of ``F.linear`` is laid out without us; found once for each layout of what it is given."""
    given = (input, weight) if bias is None else (input, weight, bias)
    key = tuple(spec_of(tensor) for tensor in given)
    if key in _plain_layouts:
        return _plain_layouts[key]
    results: list[Tensor] = []
    with torch.no_grad():  # what it saves is nobody's, and checkpointing counts it
        explain(lambda *tensors: results.append(F.linear(*tensors)), *given)
    spec = spec_of(results[0])
    layout = None if spec is None else spec.placements
    keep(_plain_layouts, _MOST_LAYOUTS, key, layout)
    return layout


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
