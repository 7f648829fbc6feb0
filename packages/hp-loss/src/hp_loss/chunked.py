"""A loss of a head's logits, taken over chunks of tokens: any loss, any head, one chunk of logits at a time.

`linear_cross_entropy` is the better choice for a plain linear head. This wrapper is for the rest:
a head that is a module with hooks (tensor parallel, FSDP2, quantised, compiled) and a loss that is
a function of the logits.

Each chunk goes forward and backward at once: hidden states, cut off from the model, through the
head and the loss, and back to the chunk's gradient and the head's own. What is returned is the sum
of the losses; its backward hands the gathered gradient of the hidden states to the model. The loss
must therefore be a *sum* over tokens, already divided by what the step divides by (see
`count_valid_tokens`), so that the chunks' losses add up.

The head's gradients exist before the caller's `backward()`, so nothing may scale the returned
loss: a factor is given as *scale*, and a backward that arrives with another gradient than one is
refused.

Under FSDP2 the head is gathered once for all chunks and its gradients are reduced once, with the
last one. What FSDP2 was told before is put back afterwards, an exception included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, cast

import torch
from hp_dtensor import to_local
from hp_dtensor.placements import shard_dim
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_loss._torch import assert_async, fsdp_flags
from hp_loss.errors import LossLayoutError, LossOptionError, TargetError
from hp_loss.layout import wrap_local

__all__ = ["ChunkedLoss", "GradAccumulator"]

Metrics: TypeAlias = dict[str, Tensor]
LossFunction: TypeAlias = Callable[..., Tensor | tuple[Tensor, Metrics]]


class ChunkedLoss:
    """Take a loss over chunks of tokens, so that only one chunk's logits exist at a time.

    Args:
        loss_fn: `loss_fn(logits, labels, *more, **keywords)`: a sum over tokens, divided by the
            step's count; or that and a dictionary of metrics. Metrics of the chunks are merged by
            their names' last part, after `/` or `_`: `mean` and `frac` (already divided by the
            step's count) and `sum` are added, `max` and `min` are what they say, and any other is
            refused.
        num_chunks: how many chunks; their sizes differ by one at most.
        lm_head: what makes logits of hidden states; or given later, by `set_lm_head`.
        seq_dim: the dimension along which tokens are cut.

    Example:
        >>> import torch
        >>> from hp_loss import ChunkedLoss, CrossEntropyLoss
        >>> head, hidden = torch.nn.Linear(2, 4), torch.randn(5, 2, requires_grad=True)
        >>> labels = torch.tensor([0, 1, 2, 3, -100])
        >>> loss = ChunkedLoss(CrossEntropyLoss(), num_chunks=2, lm_head=head)
        >>> loss(hidden, labels, global_valid_tokens=4).backward()
        >>> hidden.grad.shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        *,
        num_chunks: int = 8,
        lm_head: nn.Module | None = None,
        seq_dim: int = 0,
    ) -> None:
        if num_chunks < 1:
            raise LossOptionError(
                f"num_chunks is {num_chunks}: it must be 1 or more",
                option="num_chunks",
                value=num_chunks,
            )
        self.loss_fn = loss_fn
        self.num_chunks = num_chunks
        self.seq_dim = seq_dim
        self._lm_head = lm_head

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Give the module that makes logits of hidden states."""
        self._lm_head = lm_head

    def __call__(
        self, hidden: Tensor, labels: Tensor, *more: Tensor, scale: float = 1.0, **keywords: object
    ) -> Tensor | tuple[Tensor, Metrics]:
        """The loss of *hidden*.

        Args:
            hidden: hidden states, a plain tensor or a DTensor; a DTensor that is cut along
                *seq_dim* is cut evenly, and chunks are taken of each rank's part.
            labels: cut as *hidden* is, along the same dimension.
            more: further tensors per token, cut likewise.
            scale: multiplies the loss.
            keywords: for the loss, whole.

        Returns:
            The sum of the chunks' losses; and the merged metrics, if the loss gives any. Under
            `no_grad`, or if *hidden* and the head require no gradient, nothing is differentiated.

        Raises:
            TargetError: if *labels* or *more* aren't as long as *hidden*.
            LossLayoutError: if *hidden* is cut unevenly along *seq_dim*.
            LossOptionError: without a head, or if a metric's name doesn't say how it is merged.
        """
        head = self._lm_head
        if head is None:
            raise LossOptionError(
                "ChunkedLoss has no head: pass lm_head=, or call set_lm_head",
                option="lm_head",
                value=None,
            )
        dim = self.seq_dim % hidden.dim()
        chunks = [
            _split(tensor, self.num_chunks, dim) for tensor in (hidden.detach(), labels, *more)
        ]
        _refuse_lengths(chunks, dim)
        differentiate = torch.is_grad_enabled() and (
            hidden.requires_grad or any(parameter.requires_grad for parameter in head.parameters())
        )
        accumulator = None
        if differentiate and hidden.requires_grad:
            accumulator = GradAccumulator(hidden, num_chunks=self.num_chunks, seq_dim=dim)
        total: Tensor | None = None
        metrics: Metrics = {}
        with _gathered_once(head, differentiate=differentiate) as before_chunk:
            for number, (states, *rest) in enumerate(zip(*chunks, strict=True)):
                before_chunk(number == self.num_chunks - 1)
                states.requires_grad_(accumulator is not None)
                out = self.loss_fn(head(states), *rest, **keywords)
                loss, found = out if isinstance(out, tuple) else (out, {})
                loss = loss * scale if scale != 1.0 else loss
                if differentiate:
                    loss.backward()
                if accumulator is not None:
                    accumulator.add(cast("Tensor", states.grad))
                total = loss.detach() if total is None else total + loss.detach()
                _merge(metrics, found)
        assert total is not None
        if accumulator is not None:
            total = cast("Tensor", _Inject.apply(hidden, accumulator.result(), total))
        elif differentiate:
            total.requires_grad_()
        return (total, metrics) if metrics else total


class GradAccumulator:
    """Put the gradients of consecutive chunks together in one buffer.

    The result lies on the ranks as the *gradients* do, not as the activation did: a replicated
    activation may well have a gradient that is a sum of addends.

    Args:
        reference: what the gradient is of.
        num_chunks: how many chunks there will be.
        seq_dim: the dimension along which they follow each other.
        dtype: of the buffer; the reference's if None. Each element is written once, so a wider one
            gains nothing.

    Example:
        >>> import torch
        >>> from hp_loss import GradAccumulator
        >>> accumulator = GradAccumulator(torch.zeros(3, 2), num_chunks=2)
        >>> accumulator.add(torch.ones(2, 2))
        >>> accumulator.add(torch.zeros(1, 2))
        >>> accumulator.result().sum(1)
        tensor([2., 2., 0.])
    """

    def __init__(
        self,
        reference: Tensor,
        *,
        num_chunks: int,
        seq_dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        local = _local(reference)
        self._reference = reference
        self._buffer = torch.empty_like(
            local, dtype=dtype or local.dtype, memory_format=torch.contiguous_format
        )
        self._dim = seq_dim % reference.dim()
        self._num_chunks = num_chunks
        self._added = 0
        self._filled = 0
        self._first: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        """Put the next chunk's gradient behind those before it.

        Raises:
            LossLayoutError: (a `ValueError`) if there are more than were announced, if it doesn't
                fit into what is left, or if it lies on the ranks in another way than the first.
        """
        if self._added == self._num_chunks:
            raise LossLayoutError(
                f"GradAccumulator got a chunk after all {self._num_chunks} of them"
            )
        if self._first is None:
            self._first = grad.detach()
        self._refuse_unlike(self._first, grad)
        local = _local(grad)
        length = local.shape[self._dim]
        room = self._buffer.shape[self._dim] - self._filled
        expected = (*self._buffer.shape[: self._dim], length, *self._buffer.shape[self._dim + 1 :])
        if tuple(local.shape) != expected or length > room:
            raise LossLayoutError(
                f"chunk {self._added} has the shape {tuple(local.shape)}, and what is left of the gradient is {room} of "
                f"{tuple(self._buffer.shape)} along dimension {self._dim}"
            )
        self._buffer.narrow(self._dim, self._filled, length).copy_(local)
        self._filled += length
        self._added += 1

    def result(self) -> Tensor:
        """The whole gradient; a DTensor if the chunks were.

        Raises:
            LossLayoutError: if chunks are missing.
        """
        first = self._first
        if first is None or self._filled != self._buffer.shape[self._dim]:
            raise LossLayoutError(
                f"GradAccumulator has {self._filled} of {self._buffer.shape[self._dim]} entries along dimension "
                f"{self._dim}, from {self._added} of {self._num_chunks} chunks"
            )
        if not isinstance(first, TorchDTensor):
            return self._buffer
        return wrap_local(self._buffer, first.device_mesh, first.placements, self._reference.shape)

    def _refuse_unlike(self, first: Tensor, grad: Tensor) -> None:
        if isinstance(first, TorchDTensor) != isinstance(grad, TorchDTensor):
            raise LossLayoutError(
                "GradAccumulator got DTensors and plain tensors: the chunks' gradients must be one kind"
            )
        if not isinstance(first, TorchDTensor) or not isinstance(grad, TorchDTensor):
            return
        if first.placements != grad.placements or first.device_mesh != grad.device_mesh:
            raise LossLayoutError(
                f"chunk {self._added} has a gradient with the placements {grad.placements}, and the first chunk's were "
                f"{first.placements}: they must be equal",
                placements=str(grad.placements),
            )


def _local(tensor: Tensor) -> Tensor:
    return to_local(tensor.detach())


def _split(tensor: Tensor, num_chunks: int, dim: int) -> Sequence[Tensor]:
    """Cut this rank's part of *tensor* into *num_chunks*, which differ by one in size, in its layout."""
    if not isinstance(tensor, TorchDTensor):
        return tensor.tensor_split(num_chunks, dim)
    mesh, placements = tensor.device_mesh, tensor.placements
    local = tensor.to_local()
    ranks = 1
    for axis, placement in enumerate(placements):
        if shard_dim(placement) == dim:
            ranks *= mesh.size(axis)
    if local.shape[dim] * ranks != tensor.shape[dim]:
        raise LossLayoutError(
            f"ChunkedLoss got a DTensor of shape {tuple(tensor.shape)} with the placements {placements}, cut unevenly along "
            f"dimension {dim}: its chunks would have no common layout. Pad that dimension to a multiple of {ranks}, or "
            "cut another one (seq_dim)",
            placements=str(placements),
        )
    return [
        wrap_local(part.contiguous(), mesh, placements, _chunk_shape(tensor, part, dim, ranks))
        for part in local.tensor_split(num_chunks, dim)
    ]


def _chunk_shape(tensor: Tensor, part: Tensor, dim: int, ranks: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], part.shape[dim] * ranks, *tensor.shape[dim + 1 :])


def _refuse_lengths(chunks: Sequence[Sequence[Tensor]], dim: int) -> None:
    lengths = [sum(_local(part).shape[dim] for part in parts) for parts in chunks]
    if len(set(lengths)) > 1:
        raise TargetError(
            f"ChunkedLoss got hidden states, labels and further tensors of the lengths {lengths} on this rank, along "
            f"dimension {dim}: they must be equal; give labels laid out as the hidden states are",
            shape=tuple(lengths[1:]),
            logits_shape=tuple(lengths[:1]),
        )


_SUMMED, _COMPARED = ("mean", "frac", "sum"), {"max": torch.maximum, "min": torch.minimum}


def _merge(metrics: Metrics, found: Mapping[str, Tensor]) -> None:
    for name, tensor in found.items():
        value = tensor.detach()
        kind = name.replace("/", "_").rpartition("_")[2]
        if kind not in _SUMMED and kind not in _COMPARED:
            raise LossOptionError(
                f"the metric {name!r} doesn't say how those of several chunks become one: end its name in "
                f"{', '.join('/' + end for end in (*_SUMMED, *_COMPARED))}",
                option="metrics",
                value=name,
            )
        if name not in metrics:
            metrics[name] = value
        elif kind in _SUMMED:
            metrics[name] = metrics[name] + value
        else:
            metrics[name] = _COMPARED[kind](metrics[name], value)


@contextmanager
def _gathered_once(head: nn.Module, *, differentiate: bool) -> Iterator[Callable[[bool], None]]:
    """Keep an FSDP2 *head* gathered; give what is to be called before a chunk, with whether it is the last."""
    if not isinstance(head, FSDPModule):
        yield lambda _is_last: None
        return
    flags = fsdp_flags(head)
    try:
        head.unshard()
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        if differentiate:
            # The model's own backward is still to come; FSDP2 must not take a chunk's for it.
            head.set_is_last_backward(False)
        if flags.wants_sync:
            head.set_requires_gradient_sync(False)

        def before_chunk(is_last: bool) -> None:
            if is_last:
                flags.put_back_sync()

        yield before_chunk
    finally:
        flags.put_back()
        head.reshard()


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _Inject(torch.autograd.Function):
    """The loss, whose backward gives the hidden states the gradient that is already there."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, grad: Tensor, total: Tensor) -> Tensor:  # noqa: ARG004  # hidden gets the gradient
        ctx.save_for_backward(grad)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        _refuse_scaled(to_local(grads[0]))
        (grad,) = ctx.saved_tensors
        return grad, None, None


def _refuse_scaled(grad: Tensor) -> None:
    """Refuse a gradient of the loss that isn't one: the head's gradients are there already, without it."""
    message = (
        "ChunkedLoss got a gradient of its loss that isn't 1: the head's gradients exist already and can't be scaled. Call "
        "backward() on the loss itself, and pass a factor as scale="
    )
    if grad.device.type != "cpu" or torch.compiler.is_compiling():
        assert_async((grad == 1).all(), message)
    elif not bool((grad == 1).all()):
        raise LossOptionError(message, option="scale", value=grad.tolist())
