"""Attention over a sequence that is cut over ranks: exact, causal or not, with grouped heads and masks.

Three ways, one result. *Ring*: keys and values travel round the ranks, each rank attends to what passes by and merges the
results by their log-sum-exp; it holds two pieces at a time. *Gather*: keys and values are gathered and torch's own kernel
runs with a mask. *Ulysses*: an all-to-all turns the cut of the sequence into a cut of the heads, and back.

The ring's backward computes the weights again from the log-sum-exp, piece by piece, while the gradients of keys and values
travel with them and arrive at home after a full turn. A piece is sent on before it is attended to, and the next one waited for
after (:mod:`hp_tp.ring`).

With head and tail pieces (:mod:`hp_tp.context_shards`) causality needs no mask but on the diagonal: of an earlier rank's
keys only the head counts, for all queries; to a later rank's keys only the tail of the queries attends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from hp_dtensor import Partial, Replicate, Shard, redistribute_local

from hp_tp.context_shards import SequenceCut, places, sequence_positions
from hp_tp.errors import ContextParallelError
from hp_tp.ring import receive, send

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor
    from torch.autograd.function import FunctionCtx

__all__ = ["AttentionMethod", "context_parallel_attention"]

AttentionMethod: TypeAlias = Literal["ring", "gather", "ulysses"]
"""How the ranks exchange what attention needs."""

_METHODS = ("ring", "gather", "ulysses")
_LENGTH = 2
"""The dim of the sequence in queries, keys and values."""


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: DeviceMesh,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    method: AttentionMethod = "ring",
    balanced: bool = True,
) -> Tensor:
    """What ``scaled_dot_product_attention`` gives for the whole sequence, for this rank's queries.

    Args:
        query: this rank's tokens, ``[batch, heads, length, head_dim]``; plain, as are the others.
        key: this rank's tokens, ``[batch, kv_heads, length, head_dim]``.
        value: this rank's tokens, ``[batch, kv_heads, length, value_dim]``.
        mesh: the one axis over which the sequence is cut.
        attn_mask: for this rank's queries and **all** keys in their order, ``[..., length, length * ranks]``; bools that
            tell what takes part, or numbers to add. Not together with *is_causal*.
        is_causal: whether a token attends only to itself and those before it in the whole sequence.
        scale: of the scores; ``1 / sqrt(head_dim)`` when None.
        enable_gqa: whether there may be fewer key-value heads than heads.
        method: ``"ring"``, ``"gather"`` or ``"ulysses"``. Inside ``torch.compile`` the ring gathers instead.
        balanced: whether the sequence is cut head and tail, or contiguously.

    Returns:
        ``[batch, heads, length, value_dim]``, with right gradients for all three.

    Raises:
        ContextParallelError: (a ``ValueError``) when shapes do not fit each other, the mask, or the method.

    Example:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from hp_mesh import init_device_mesh
        >>> from hp_mesh.testing import run_spmd
        >>> from hp_tp import context_parallel_attention, split_sequence
        >>> def prove():
        ...     torch.manual_seed(0)
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        ...     q, k, v = torch.randn(3, 1, 2, 8, 4)
        ...     whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        ...     own = [split_sequence(t, mesh, 2) for t in (q, k, v)]
        ...     piece = context_parallel_attention(*own, mesh, is_causal=True)
        ...     torch.testing.assert_close(piece, split_sequence(whole, mesh, 2))
        >>> _ = run_spmd(prove, world_size=2)
    """
    ranks = mesh.size()
    _check(query, key, value, attn_mask, ranks, is_causal, enable_gqa, method, balanced)
    if ranks == 1:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if method == "ulysses":
        return _by_heads(query, key, value, mesh, attn_mask, is_causal, scale, balanced)
    if method == "gather" or torch.compiler.is_compiling():
        return _gathered(query, key, value, mesh, attn_mask, is_causal, scale, balanced)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    ring = _Ring(mesh, is_causal, balanced, factor)
    mixed: Tensor = _RingAttention.apply(query, key, value, attn_mask, ring)
    return mixed


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ranks: int,
    is_causal: bool,
    enable_gqa: bool,
    method: str,
    balanced: bool,
) -> None:
    if method not in _METHODS:
        raise ContextParallelError(f"method={method!r} is none of {_METHODS}")
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ContextParallelError(f"expected [batch, heads, length, head_dim], got {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        raise ContextParallelError(f"keys, values and queries do not fit each other: {shapes}")
    length = query.shape[_LENGTH]
    if key.shape[_LENGTH] != length:
        message = (
            f"each rank attends from its piece of a sequence to the same sequence, so that queries and keys have one length: "
            f"{shapes}. For cross-attention gather the keys and values, or keep them whole."
        )
        raise ContextParallelError(message)
    if balanced and length % 2 and ranks > 1:
        message = (
            f"a piece of {length} tokens is no head and tail of equal length; cut the sequence with split_sequence, or pass "
            "balanced=False for contiguous pieces"
        )
        raise ContextParallelError(message)
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and (not enable_gqa or heads % kv_heads):
        message = (
            f"{heads} heads and {kv_heads} key-value heads need enable_gqa=True and a number of heads that is a multiple of "
            "the other"
        )
        raise ContextParallelError(message)
    if method == "ulysses" and kv_heads % ranks:
        legal = [d for d in range(1, kv_heads + 1) if kv_heads % d == 0]
        message = (
            f"method='ulysses' shares out heads, and {ranks} ranks cannot share {kv_heads} key-value heads; degrees that can: "
            f"{legal}. method='ring' takes any number of heads."
        )
        raise ContextParallelError(message)
    if mask is None:
        return
    if is_causal:
        message = "attn_mask and is_causal exclude each other, as on one device; put causality in the mask"
        raise ContextParallelError(message)
    wanted = (length, length * ranks)
    if mask.ndim < 2 or mask.shape[-1] != wanted[1] or mask.shape[-2] not in {1, length}:
        message = (
            f"attn_mask has shape {tuple(mask.shape)}, and should end in {wanted}: rows for this rank's queries (split_sequence "
            "along dim -2 gives them), columns for the keys of all ranks in the order of the sequence"
        )
        raise ContextParallelError(message)


# Keys and values gathered.


def _gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: DeviceMesh,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    balanced: bool,
) -> Tensor:
    cut, whole, addend = (Shard(_LENGTH),), (Replicate(),), (Partial(),)
    keys, values = (
        redistribute_local(t, mesh, cut, whole, grad_placements=addend) for t in (key, value)
    )
    length = query.shape[_LENGTH] * mesh.size()
    if is_causal or (mask is not None and balanced):
        held = torch.tensor(SequenceCut(mesh.size(), balanced).order(length), device=query.device)
        if is_causal:
            own = sequence_positions(length, mesh, balanced=balanced, device=query.device)
            mask = own[:, None] >= held
        elif mask is not None:
            mask = mask.index_select(-1, held)
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=gqa)


# The cut of the sequence turned into a cut of the heads.


def _by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: DeviceMesh,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    balanced: bool,
) -> Tensor:
    tokens, heads = (Shard(_LENGTH),), (Shard(1),)
    q, k, v = (redistribute_local(t, mesh, tokens, heads) for t in (query, key, value))
    length = q.shape[_LENGTH]
    held = torch.tensor(SequenceCut(mesh.size(), balanced).order(length), device=query.device)
    if balanced:
        q, k, v = (
            t.index_select(_LENGTH, places(length, mesh.size(), query.device)) for t in (q, k, v)
        )
    if mask is not None:
        mask = _rows_of_all(mask, q.shape[1], mesh, balanced)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if balanced:
        out = out.index_select(_LENGTH, held)
    return redistribute_local(out, mesh, heads, tokens)


def _rows_of_all(mask: Tensor, heads: int, mesh: DeviceMesh, balanced: bool) -> Tensor:
    """The rows of every rank's queries, in order, for the *heads* that this rank has now."""
    from hp_tp.context_shards import join_sequence

    if mask.shape[-2] > 1:
        mask = join_sequence(mask, mesh, mask.ndim - 2, balanced=balanced)
    if mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask.narrow(-3, mesh.get_local_rank() * heads, heads)
    return mask


# The ring.


class _Part(NamedTuple):
    """Which of this rank's queries attend to which of a rank's keys; from a start to the end, or from 0 to a stop."""

    first_query: int
    last_key: int
    diagonal: bool
    """Whether causality cuts within."""


@dataclass(frozen=True, slots=True)
class _Ring:
    """How pieces travel, and what of each counts."""

    mesh: DeviceMesh
    causal: bool
    balanced: bool
    scale: float

    def part(self, source: int, length: int) -> _Part | None:
        """What of rank *source*'s keys counts; None for nothing."""
        own = self.mesh.get_local_rank()
        if not self.causal:
            return _Part(0, length, diagonal=False)
        if source == own:
            return _Part(0, length, diagonal=True)
        if not self.balanced:
            return _Part(0, length, diagonal=False) if source < own else None
        if source < own:
            return _Part(0, length // 2, diagonal=False)
        return _Part(length // 2, length, diagonal=False)

    def source(self, step: int) -> int:
        """Whose piece is here after *step* sends."""
        return (self.mesh.get_local_rank() - step) % self.mesh.size()

    def mask(self, mask: Tensor | None, source: int, groups: int, kv_heads: int) -> Tensor | None:
        """The columns of rank *source*'s keys of *mask*, as ``[batch, kv_heads, groups, queries, keys]``."""
        if mask is None:
            return None
        held = sequence_positions(
            mask.shape[-1], self.mesh, balanced=self.balanced, rank=source, device=mask.device
        )
        columns = mask.index_select(-1, held)
        columns = columns.view((1,) * (4 - columns.ndim) + tuple(columns.shape))
        if columns.shape[1] == 1:
            return columns.unsqueeze(2)
        per_head: Tensor = columns.unflatten(1, (kv_heads, groups))
        return per_head


def _scores(q: Tensor, k: Tensor, part: _Part, mask: Tensor | None, scale: float) -> Tensor:
    """``[batch, kv_heads, groups, queries, keys]`` in float32 or wider; hidden ones are minus infinity."""
    batch, heads, groups, length, _ = q.shape
    scores = (q.flatten(2, 3) @ k.transpose(-2, -1)).view(batch, heads, groups, length, -1)
    scores = scores * scale
    if part.diagonal:
        hidden = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Softmax weights from the log-sum-exp of all scores; zero in a row in which everything is hidden."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        ring: _Ring,
    ) -> Tensor:
        q = _grouped(query, key.shape[1])
        length, groups, heads = q.shape[3], q.shape[2], q.shape[1]
        out = q.new_zeros(*q.shape[:-1], value.shape[-1])
        lse = q.new_full((*q.shape[:-1], 1), -math.inf)
        held = [key, value]
        ranks = ring.mesh.size()
        for step in range(ranks):
            coming = send(ring.mesh, *held) if step + 1 < ranks else None
            source = ring.source(step)
            part = ring.part(source, length)
            if part is not None:
                first, last = part.first_query, part.last_key
                k, v = (tensor[:, :, :last].to(q.dtype) for tensor in held)
                columns = ring.mask(mask, source, groups, heads)
                scores = _scores(q[:, :, :, first:], k, part, columns, ring.scale)
                _merge(out[:, :, :, first:], lse[:, :, :, first:], scores, v)
            if coming is not None:
                held = receive(coming, key, value)
        mixed = out.flatten(1, 2).to(query.dtype)
        saved = (
            (query, key, value, mixed, lse)
            if mask is None
            else (query, key, value, mixed, lse, mask)
        )
        ctx.save_for_backward(*saved)
        ctx.ring = ring  # type: ignore[attr-defined]  # torch leaves these open
        return mixed

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            message = "ring attention has no second derivatives; use method='gather' for those"
            raise ContextParallelError(message)
        query, key, value, mixed, lse, *rest = ctx.saved_tensors  # type: ignore[attr-defined]  # declared on a mixin that FunctionCtx lacks
        ring: _Ring = ctx.ring  # type: ignore[attr-defined]  # set in forward
        mask = rest[0] if rest else None
        heads = key.shape[1]
        q, grad = _grouped(query, heads), _grouped(grads[0], heads)
        length, groups = q.shape[3], q.shape[2]
        # Softmax takes from each score's gradient its row's mean under the weights.
        mean = (grad * _grouped(mixed, heads)).sum(-1, keepdim=True)
        of_query = torch.zeros_like(q)
        of_mask = None
        if mask is not None and ctx.needs_input_grad[3]:  # type: ignore[attr-defined]  # as above
            of_mask = torch.zeros_like(mask)
        held = [key, value]
        carried = [torch.zeros_like(t, dtype=q.dtype) for t in (key, value)]
        ranks = ring.mesh.size()
        for step in range(ranks):
            coming = send(ring.mesh, *held) if step + 1 < ranks else None
            source = ring.source(step)
            part = ring.part(source, length)
            if part is not None:
                first, last = part.first_query, part.last_key
                k, v = (tensor[:, :, :last].to(q.dtype) for tensor in held)
                some, some_grad = q[:, :, :, first:], grad[:, :, :, first:].flatten(2, 3)
                columns = ring.mask(mask, source, groups, heads)
                scores = _scores(some, k, part, columns, ring.scale)
                weights = _weights(scores, lse[:, :, :, first:])
                of_weights = (some_grad @ v.transpose(-2, -1)).view_as(weights)
                of_scores = weights * (of_weights - mean[:, :, :, first:])
                carried[1][:, :, :last] += weights.flatten(2, 3).transpose(-2, -1) @ some_grad
                if of_mask is not None:
                    _add_to_mask(of_mask, of_scores, source, ring)
                flat = of_scores.flatten(2, 3) * ring.scale
                of_query[:, :, :, first:] += (flat @ k).view_as(some)
                carried[0][:, :, :last] += flat.transpose(-2, -1) @ some.flatten(2, 3)
            # Gradients leave after they are added to; the last send brings them home.
            returning = send(ring.mesh, *carried)
            if coming is not None:
                held = receive(coming, key, value)
            carried = receive(returning, *carried)
        of_key, of_value = carried
        return (
            of_query.flatten(1, 2).to(query.dtype),
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            of_mask,
            None,
        )


def _grouped(tensor: Tensor, kv_heads: int) -> Tensor:
    """``[batch, kv_heads, groups, length, dim]``, in float32 at least."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    grouped: Tensor = wide.unflatten(1, (kv_heads, -1))
    return grouped


def _merge(out: Tensor, lse: Tensor, scores: Tensor, v: Tensor) -> None:
    """Merge the attention to one piece into that to the pieces before, in place."""
    own = scores.logsumexp(-1, keepdim=True)
    total = torch.logaddexp(lse, own)
    finite = total.masked_fill(total == -math.inf, 0.0)
    weights = (scores - finite).exp()
    mixed = (weights.flatten(2, 3) @ v).view(out.shape)
    out.mul_((lse - finite).exp()).add_(mixed)
    lse.copy_(total)


def _add_to_mask(of_mask: Tensor, of_scores: Tensor, source: int, ring: _Ring) -> None:
    """Add the gradient of scores to that of the mask: its columns, summed over dims of size 1."""
    held = sequence_positions(
        of_mask.shape[-1], ring.mesh, balanced=ring.balanced, rank=source, device=of_mask.device
    )
    columns = (*of_mask.shape[:-1], held.numel())
    of_mask.index_add_(-1, held, of_scores.flatten(1, 2).sum_to_size(columns).to(of_mask.dtype))
