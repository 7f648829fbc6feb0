"""A linear layer whose weight is cut by columns or by rows, computed on local tensors.

``y = x Wᵀ + b``. Cut by columns (outputs) each rank needs the whole ``x`` and gives its part of ``y``; what comes back for
``x`` is an addend. Cut by rows (inputs) each rank needs its part of ``x`` and gives an addend of ``y``; the bias belongs to
the sum and is added after it, once, in the layout that the sum has then.

The parameters stay distributed; one autograd Function takes their pieces, multiplies, moves the result and wraps the
gradients, so that a layer costs one node, and the reduction of ``x``'s gradient runs while the weight's is computed. The
same computation written with separate steps (:meth:`LinearLayout.in_steps`) serves a compiler, autocast and second
derivatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import Placement, Shard, redistribute_local, to_local
from hp_dtensor.local import wrapped_like
from hp_dtensor.placements import gradient_placements, shard_dim
from hp_dtensor.redistribute import redistribute_tensor
from hp_mesh import DeviceMesh
from hp_mesh.collectives import wait
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp._torch import dispatch_modes, in_backward, parameters_of
from hp_tp.boundary import (
    PARTIAL,
    REPLICATE,
    check_even,
    hand_out,
    layout_on,
    move,
    normal,
)
from hp_tp.overlap import active, all_gather_matmul, matmul_reduce_scatter, overlap

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.autograd.function import FunctionCtx

    from hp_tp.substitution import Forward

__all__ = ["LinearLayout"]

Layout = tuple[Placement, ...]

_LAST = Shard(-1)


class _Moves(NamedTuple):
    """What a layer does to tensors of one number of dims; each layout has one placement."""

    label: Placement
    """What a plain input is."""
    wanted: Placement
    """What the multiplication takes."""
    natural: Layout
    """What it gives."""
    out: Layout
    """What the module gives."""
    natural_grad: Layout
    out_grad: Layout
    bias: Layout
    """How the bias is laid out when it is added after the move."""
    bias_grad: Layout
    """How its gradients fit together there."""
    moves: bool
    """Whether the result has to be moved."""
    bias_moves: bool
    """Whether the bias has to be moved before it is added."""
    grad_moves: bool
    """Whether the gradient of the output has to be moved."""
    checks: bool
    """Whether the output's size has to be checked: it leaves as a plain shard of something else than features."""
    sums: bool
    """Whether moving the result is adding it up over the ranks."""
    reduces: bool
    """Whether the gradient of the input is an addend to be added up."""
    plain: bool
    """Whether a plain input is taken as it is and the output handed out as it is."""


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """How one linear layer runs: a wrapper of its forward."""

    mesh: DeviceMesh
    """The one axis that the layer is cut over."""
    by_rows: bool
    """Whether the weight is cut along the input features; along the output features otherwise."""
    input_layout: Placement
    """What a plain input is."""
    output_layout: Placement
    """What the output is."""
    use_local_output: bool
    """Whether the output is a plain tensor."""
    reduce_dtype: torch.dtype | None
    """The dtype in which addends travel."""
    columns: Placement = _LAST
    """How the output lies over the ranks when the weight is cut by columns."""
    _moves: dict[int, _Moves] = field(default_factory=dict, compare=False, repr=False)
    _chunks: list[int] = field(default_factory=list, compare=False, repr=False)
    """Those of the overlap that the last forward was inside of, if it was: what is computed again in a backward does the same."""

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Tensor:
        """Return the layer's output; *forward* is not called."""
        del forward
        if (
            not kwargs
            and len(args) == 1
            and not torch.compiler.is_compiling()
            and not self._chunks
            and active() is None
        ):
            (input,) = args  # noqa: A001  # torch's name for it
            moves = self._moves.get(input.dim()) if type(input) is torch.Tensor else None
            if (
                moves is not None
                and moves.plain
                and not torch.is_autocast_enabled(self.mesh.device_type)
            ):  # what most calls are: nothing to move before, and nothing to wrap after
                held = parameters_of(module)
                weight = held.get("weight")
                if weight is not None and hasattr(weight, "_local_tensor"):
                    return _Linear.apply(  # type: ignore[no-any-return]  # torch leaves apply untyped
                        input, weight, held["bias"], self, moves, moves.reduces
                    )
        return self._run(module, *args, **kwargs)  # type: ignore[arg-type]  # forward's own arguments

    def _run(self, module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  # torch's name for it
        moves = self.moves(input.dim())
        around = self._overlap()
        if around is not None:
            overlapped = self._overlapped(around, module, input, moves)
            if overlapped is not None:
                return overlapped
        whole_input = isinstance(input, TorchDTensor)
        to_reduce = not self.by_rows and self.mesh.size() > 1
        if whole_input or moves.label != moves.wanted:
            input = move(  # noqa: A001  # as above
                input,
                self.mesh,
                moves.label,
                moves.wanted,
                local=True,
                grad=PARTIAL if to_reduce else None,
                where="the input of a linear layer",
            )
            to_reduce = False
        weight, bias = module.weight, module.bias
        if moves.checks:
            shape = (*input.shape[:-1], module.out_features)
            check_even(moves.out[0], shape, self.mesh, "the output of a linear layer")
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(self.mesh.device_type):
            output = self.in_steps(input, weight, bias, reduce=to_reduce)
        else:
            output = _Linear.apply(input, weight, bias, self, moves, to_reduce)
        if self.use_local_output:
            return output
        shape = (*input.shape[:-1], module.out_features)
        return hand_out(output, self.mesh, moves.out[0], shape, local=False)

    def _overlap(self) -> overlap | None:
        """The context that the layer runs in, or ran in when what it computes again now was computed first."""
        if torch.compiler.is_compiling():
            return None
        around = active()
        if around is None and self._chunks and in_backward():
            return overlap(self._chunks[0])
        self._chunks[:] = () if around is None else (around.chunks,)
        return around

    def _overlapped(
        self,
        around: overlap,
        module: nn.Linear,
        input: Tensor,  # noqa: A002  # torch's name for it
        moves: _Moves,
    ) -> Tensor | None:
        """The output with the collective next to the product overlapped; None when there is none to overlap with."""
        found = layout_on(input, self.mesh, "the input of a linear layer")
        held = moves.label if found is None else found[0]
        bias: Tensor | None = module.bias
        if self.by_rows:
            if held != moves.wanted or self.reduce_dtype is not None:
                around.skip(
                    f"a row-parallel layer with an input laid out as {held}, or with a reduce_dtype"
                )
                return None
            shape = torch.Size((*input.shape[:-1], module.out_features))
            dim = around.sequence(moves.out[0], shape, self.mesh)
            if dim is None:
                return None
            if moves.checks:
                check_even(moves.out[0], shape, self.mesh, "the output of a linear layer")
            output = matmul_reduce_scatter(
                to_local(input),
                to_local(module.weight),
                self.mesh,
                dim=dim,
                chunks=around.chunks,
            )
            if bias is not None:
                addend = to_local(bias, grad_placements=moves.bias_grad)
                output = output + addend.to(output.dtype)
            around.hit()
            return hand_out(output, self.mesh, moves.out[0], shape, local=self.use_local_output)
        if moves.moves:
            around.skip("a column-parallel layer whose outputs are moved")
            return None
        dim = around.sequence(held, input.shape, self.mesh)
        if dim is None:
            return None
        output = all_gather_matmul(
            to_local(input),
            to_local(module.weight),
            self.mesh,
            dim=dim,
            bias=None if bias is None else to_local(bias),
            length=None if found is None else input.shape[dim],
            chunks=around.chunks,
        )
        around.hit()
        shape = torch.Size((*output.shape[:-1], module.out_features))
        return hand_out(output, self.mesh, moves.out[0], shape, local=self.use_local_output)

    def moves(self, ndim: int) -> _Moves:
        """What the layer does to inputs of *ndim* dims."""
        if torch.compiler.is_compiling():
            return self._find_moves(ndim)
        found = self._moves.get(ndim)
        if found is None:
            found = self._moves[ndim] = self._find_moves(ndim)
        return found

    def _find_moves(self, ndim: int) -> _Moves:
        last = normal(_LAST, ndim)
        own = normal(self.columns, ndim)
        natural, wanted = (PARTIAL, last) if self.by_rows else (own, REPLICATE)
        out = normal(self.output_layout, ndim)
        moves = out != natural and self.mesh.size() > 1
        cut = shard_dim(out)
        bias = out if cut is None else _FIRST if cut == ndim - 1 else REPLICATE
        bias_grad = (
            PARTIAL if cut is not None and cut != ndim - 1 else gradient_placements((bias,))[0]
        )
        return _Moves(
            label=normal(self.input_layout, ndim),
            wanted=wanted,
            natural=(natural,),
            out=(out,),
            natural_grad=gradient_placements((natural,)),
            out_grad=gradient_placements((out,)),
            bias=(bias,),
            bias_grad=(bias_grad,),
            moves=moves,
            bias_moves=bias != REPLICATE and self.mesh.size() > 1,
            grad_moves=moves and gradient_placements((out,)) != gradient_placements((natural,)),
            checks=moves and self.use_local_output and cut is not None,
            sums=moves and natural == PARTIAL and out == REPLICATE,
            reduces=not self.by_rows and self.mesh.size() > 1,
            plain=self.use_local_output
            and normal(self.input_layout, ndim) == wanted
            and not (moves and cut is not None),
        )

    def in_steps(
        self, piece: Tensor, weight: Tensor, bias: Tensor | None, *, reduce: bool
    ) -> Tensor:
        """The output for a plain input in the layout wanted, by separate differentiable steps.

        Args:
            piece: this rank's piece of the input.
            weight: the distributed weight.
            bias: the distributed bias.
            reduce: whether the gradient of *piece* is an addend to be reduced here.
        """
        moves = self.moves(piece.dim())
        if reduce:
            piece = redistribute_local(
                piece, self.mesh, (REPLICATE,), (REPLICATE,), grad_placements=(PARTIAL,)
            )
        inside = None if bias is None or self.by_rows else to_local(bias)
        output = F.linear(piece, to_local(weight), inside)
        if moves.moves:
            dtype = output.dtype
            output = redistribute_local(
                output,
                self.mesh,
                moves.natural,
                moves.out,
                shape=(*output.shape[:-1], weight.shape[0]),
                forward_dtype=self.reduce_dtype,
            ).to(dtype)
        if self.by_rows and bias is not None:
            addend = redistribute_local(
                to_local(bias, grad_placements=_REPLICATED),
                self.mesh,
                (REPLICATE,),
                moves.bias,
                grad_placements=moves.bias_grad,
            )
            output = output + addend.to(output.dtype)
        return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        input: Tensor,  # noqa: A002  # torch's name for it
        weight: Tensor,
        bias: Tensor | None,
        layout: LinearLayout,
        moves: _Moves,
        reduce: bool,
    ) -> Tensor:
        ctx.facts = (layout, moves, reduce)  # type: ignore[attr-defined]  # torch leaves these open
        if type(input) is not torch.Tensor:
            input = wait(input)  # noqa: A001  # torch's name for it
        if bias is None:
            ctx.save_for_backward(input, weight)
        else:
            ctx.save_for_backward(input, weight, bias)
        by_rows = layout.by_rows
        output = F.linear(input, _piece(weight), None if bias is None or by_rows else _piece(bias))
        if moves.moves:
            dtype = output.dtype
            if layout.reduce_dtype is not None:
                output = output.to(layout.reduce_dtype)
            if moves.sums:
                output = _summed(output, layout.mesh)
            else:
                shape = (*output.shape[:-1], weight.shape[0])
                output = redistribute_tensor(output, layout.mesh, shape, moves.natural, moves.out)
            if output.dtype is not dtype:
                output = output.to(dtype)
        if by_rows and bias is not None:
            addend = _piece(bias)
            if moves.bias_moves:
                shape = tuple(bias.shape)
                addend = redistribute_tensor(addend, layout.mesh, shape, _REPLICATED, moves.bias)
            output = output + addend
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        layout, moves, reduce = ctx.facts  # type: ignore[attr-defined]  # set in forward
        if torch.is_grad_enabled():
            return (*_twice(ctx, grad, layout, reduce), None, None, None)
        input, weight, *rest = ctx.saved_tensors  # type: ignore[attr-defined]  # noqa: A001  # set in forward; as above
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]  # declared on a mixin that FunctionCtx lacks
        mesh: DeviceMesh = layout.mesh
        if moves.grad_moves:
            shape = (*input.shape[:-1], weight.shape[0])
            grad = redistribute_tensor(grad, mesh, shape, moves.out_grad, moves.natural_grad)
        of_input = of_weight = of_bias = None
        if needs[0]:
            of_input = grad.matmul(_piece(weight))
            if reduce and of_input.is_cpu:
                # On a host the reduction has no other processor to run on, and waiting lazily costs more than it.
                of_input = _summed(of_input, mesh)
            elif reduce:
                shape = tuple(of_input.shape)
                of_input = redistribute_tensor(
                    of_input, mesh, shape, _ADDENDS, _REPLICATED, async_op=True
                )
        flat = _rows(grad)
        if needs[1]:
            of_weight = wrapped_like(flat.t().mm(_rows(input)), weight)
        if needs[2]:
            of_bias = wrapped_like(flat.sum(0), rest[0])
        if reduce and of_input is not None and not of_input.is_cpu:
            of_input = wait(of_input)
        return of_input, of_weight, of_bias, None, None, None


def _summed(addend: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks of *addend*, which nobody else has: in place where that can be."""
    if addend.dtype in _REDUCED_IN_PLACE and addend.numel() and not dispatch_modes():
        dist.all_reduce(addend, group=mesh.get_group())
        return addend
    return redistribute_tensor(addend, mesh, tuple(addend.shape), _ADDENDS, _REPLICATED)


def _twice(
    ctx: FunctionCtx, grad: Tensor, layout: LinearLayout, reduce: bool
) -> tuple[Tensor | None, ...]:
    """The gradients as differentiable functions of all there is: for second derivatives."""
    saved = ctx.saved_tensors  # type: ignore[attr-defined]  # declared on a mixin that FunctionCtx lacks
    needs = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]  # as above
    given: tuple[Tensor | None, ...] = (*saved, None)[:3]
    output = layout.in_steps(saved[0], saved[1], given[2], reduce=reduce)
    wanted = [
        tensor for tensor, need in zip(given, needs, strict=True) if need and tensor is not None
    ]
    found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needs)


def _rows(tensor: Tensor) -> Tensor:
    """*tensor* as a matrix: all dims but the last become one."""
    ndim = tensor.dim()
    return tensor if ndim == 2 else tensor.flatten(0, -2) if ndim > 2 else tensor.unsqueeze(0)


def _piece(parameter: Tensor) -> Tensor:
    """This rank's piece, without history."""
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    return local


_FIRST = Shard(0)
_REDUCED_IN_PLACE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_REPLICATED: Layout = (REPLICATE,)
_ADDENDS: Layout = (PARTIAL,)
