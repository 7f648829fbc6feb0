"""Attention whose heads are shared out, where a linear layer's columns are not enough.

Fewer key-value heads than ranks: a head cannot be cut, so several ranks compute the same one for different query heads. The
weight stays whole on the mesh, each rank uses the rows of its head, and the gradients of the ranks are added up, which sums
over the copies of a head and puts each head's rows in their place in one step.

``nn.MultiheadAttention`` packs queries, keys and values into one weight: three blocks, each cut by heads, which is what
``StridedShard(0, split_factor=3)`` says. So the parameter keeps its shape, its name and its order in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from hp_dtensor import Placement, Replicate, Shard, StridedShard, redistribute_local, to_local
from hp_mesh import DeviceMesh
from torch import nn

from hp_tp.boundary import PARTIAL, REPLICATE, check_even, hand_out, move, normal
from hp_tp.errors import PlanError, UnsupportedModuleError
from hp_tp.placing import place
from hp_tp.style import ParallelStyle
from hp_tp.substitution import original_class, substitute
from hp_tp.tensor_parallel import ColwiseParallel

if TYPE_CHECKING:
    from torch import Tensor

    from hp_tp.substitution import Forward

__all__ = ["KVHeadParallel", "MultiheadAttentionParallel", "no_fast_path", "project_heads"]


@dataclass(frozen=True, slots=True)
class _SharedHead:
    """A projection of which each rank computes one head: a wrapper of its forward."""

    mesh: DeviceMesh
    input_layout: Placement
    start: int
    rows: int

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Tensor:
        del forward
        return self._run(module, *args, **kwargs)  # type: ignore[arg-type]  # forward's own arguments

    def _run(self, module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  # torch's name for it
        whole = move(
            input,
            self.mesh,
            self.input_layout,
            REPLICATE,
            local=True,
            grad=PARTIAL,
            where="the input of a key or value projection",
        )
        weight = to_local(module.weight, grad_placements=(PARTIAL,))
        bias = module.bias
        if bias is not None:
            bias = to_local(bias, grad_placements=(PARTIAL,)).narrow(0, self.start, self.rows)  # type: ignore[assignment]  # a piece
        return F.linear(whole, weight.narrow(0, self.start, self.rows), bias)


@dataclass(kw_only=True, unsafe_hash=True)
class KVHeadParallel(ParallelStyle):
    """Share out the heads of a key or value projection, also when there are fewer heads than ranks.

    With at least as many heads as ranks it is :class:`ColwiseParallel`. With fewer, ``ranks / heads`` neighbouring ranks
    compute the same head, the one that their query heads use; the weight is then replicated, in its original shape, and its
    gradient is that of the single device.

    Args:
        head_dim: the width of a head.
        num_heads: how many key-value heads the projection gives.
        input_layouts: what a plain input is; ``Replicate()`` when None.

    The output is plain: this rank's head or heads.

    Example:
        >>> from hp_tp import KVHeadParallel
        >>> kv = KVHeadParallel(head_dim=128, num_heads=2)
        >>> plan = {"wk": kv, "wv": kv}
    """

    lays_out: ClassVar[bool] = True
    head_dim: int
    num_heads: int
    input_layouts: Placement | None = None

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut or replicate the projection, by how many heads and ranks there are.

        Raises:
            UnsupportedModuleError: when *module* is no ``nn.Linear``.
            PlanError: when its size is not that of the heads, or when heads and ranks do not divide each other.
        """
        if original_class(module) is not nn.Linear or not isinstance(module, nn.Linear):
            message = f"KVHeadParallel shares out the heads of an nn.Linear, not of {type(module).__name__}"
            raise UnsupportedModuleError(message)
        heads, ranks = self.num_heads, device_mesh.size()
        if module.out_features != heads * self.head_dim:
            message = (
                f"the projection gives {module.out_features} features, and num_heads={heads} of head_dim={self.head_dim} are "
                f"{heads * self.head_dim}"
            )
            raise PlanError(message)
        if heads % ranks == 0:
            style = ColwiseParallel(input_layouts=self.input_layouts)
            style.src_data_rank = self.src_data_rank
            return style.apply(module, device_mesh)
        if ranks % heads:
            message = (
                f"{heads} key-value heads and {ranks} ranks do not divide each other, so that ranks would need parts of heads; "
                f"use a divisor or a multiple of {heads} ranks"
            )
            raise PlanError(message)
        place(module, device_mesh, {"weight": REPLICATE, "bias": REPLICATE}, self.src_data_rank)
        head = device_mesh.get_local_rank() // (ranks // heads)
        layout = _SharedHead(
            device_mesh, self.input_layouts or REPLICATE, head * self.head_dim, self.head_dim
        )
        substitute(module, layout)
        return module


def project_heads(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, heads: int
) -> list[Tensor]:
    """Queries, keys and values of the *heads* that this rank has, ``[batch, heads, length, head_dim]``; inputs are batch-first."""
    packed: Tensor | None = module.in_proj_weight  # torch declares that it is there
    if packed is not None:
        weights = to_local(packed).chunk(3)
    else:
        apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = tuple(to_local(weight) for weight in apart)
    biases: tuple[Tensor | None, ...] = (None, None, None)
    if module.in_proj_bias is not None:
        biases = to_local(module.in_proj_bias).chunk(3)
    projected = [
        F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)
    ]
    for i, extra in ((1, module.bias_k), (2, module.bias_v)):
        if extra is not None:
            more = to_local(extra).expand(projected[i].shape[0], -1, -1)
            projected[i] = torch.cat([projected[i], more], 1)
    if module.add_zero_attn:
        for i in (1, 2):
            more = projected[i].new_zeros(projected[i].shape[0], 1, projected[i].shape[2])
            projected[i] = torch.cat([projected[i], more], 1)
    return [p.unflatten(-1, (heads, -1)).transpose(1, 2) for p in projected]


@dataclass(frozen=True, slots=True)
class _HeadsLayout:
    """How a multi-head attention runs with this rank's heads: a wrapper of its forward."""

    mesh: DeviceMesh
    heads: int
    """How many heads this rank computes."""
    first: int
    """The first of them."""
    output_layout: Placement
    use_local_output: bool

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> tuple[Tensor, Tensor | None]:
        del forward
        return self._run(module, *args, **kwargs)  # type: ignore[arg-type]  # forward's own arguments

    def _run(
        self,
        module: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if module.training and module.dropout > 0:
            message = (
                f"dropout={module.dropout} on attention weights that are shared out by heads would repeat the same mask on each "
                "rank; set it to 0, or drop the output with a module of its own"
            )
            raise UnsupportedModuleError(message)
        same = key is query and value is query
        query = self._enter(query)
        key, value = (query, query) if same else (self._enter(key), self._enter(value))
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        elif not module.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = project_heads(module, query, key, value, self.heads)
        mask = self._mask(module, attn_mask, key_padding_mask, q, k, is_causal=is_causal)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = (
                scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
            )
        weights = torch.softmax(scores, -1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        output = self._leave(module, mixed, batched=batched)
        if not need_weights:
            return output, None
        return output, self._weights(weights, average=average_attn_weights, batched=batched)

    def _enter(self, value: Tensor) -> Tensor:
        where = "an input of a multi-head attention"
        return move(value, self.mesh, REPLICATE, REPLICATE, local=True, grad=PARTIAL, where=where)

    def _mask(
        self,
        module: nn.MultiheadAttention,
        attn_mask: Tensor | None,
        padding: Tensor | None,
        q: Tensor,
        k: Tensor,
        *,
        is_causal: bool,
    ) -> Tensor | None:
        """Both masks as one, for this rank's heads: bools that hide, or numbers to add."""
        if is_causal and attn_mask is None:
            message = "is_causal=True needs attn_mask too, as on one device: it only hints at what the mask is"
            raise RuntimeError(message)
        masks = []
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                per_head = attn_mask.unflatten(0, (-1, module.num_heads))
                attn_mask = per_head.narrow(1, self.first, self.heads)
            masks.append(_widened(attn_mask, k.shape[2]))
        if padding is not None:
            if padding.dim() == 1:
                padding = padding.unsqueeze(0)
            masks.append(_widened(padding[:, None, None, :], k.shape[2]))
        if not masks:
            return None
        if all(mask.dtype == torch.bool for mask in masks):
            return masks[0] if len(masks) == 1 else masks[0] | masks[1]
        numbers = [
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
            if mask.dtype == torch.bool
            else mask
            for mask in masks
        ]
        return numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]

    def _leave(self, module: nn.MultiheadAttention, mixed: Tensor, *, batched: bool) -> Tensor:
        """This rank's heads through its rows of the output projection, added up over the ranks."""
        output = F.linear(mixed, to_local(module.out_proj.weight))
        if not batched:
            output = output.squeeze(0)
        elif not module.batch_first:
            output = output.transpose(0, 1)
        out = normal(self.output_layout, output.ndim)
        if self.use_local_output:
            check_even(out, output.shape, self.mesh, "the output of a multi-head attention")
        shape = tuple(output.shape)
        output = redistribute_local(output, self.mesh, (PARTIAL,), (out,), shape=shape)
        if module.out_proj.bias is not None:
            grad = (out,) if out.is_replicate() else (PARTIAL,)
            output = output + to_local(module.out_proj.bias, grad_placements=grad)
        return hand_out(output, self.mesh, out, shape, local=self.use_local_output)

    def _weights(self, weights: Tensor, *, average: bool, batched: bool) -> Tensor:
        """The attention weights of all heads, or their mean, whole on every rank."""
        if average:
            total = weights.sum(1) / (self.heads * self.mesh.size())
            whole = redistribute_local(total, self.mesh, (PARTIAL,), (REPLICATE,))
        else:
            whole = redistribute_local(weights, self.mesh, (Shard(1),), (Replicate(),))
        return whole if batched else whole.squeeze(0)


def _widened(mask: Tensor, keys: int) -> Tensor:
    """*mask* with columns that hide nothing for keys that were added behind the caller's."""
    return F.pad(mask, (0, keys - mask.shape[-1])) if keys != mask.shape[-1] else mask


def no_fast_path(module: nn.Module, args: object) -> None:
    """A hook that does nothing: where there is one, ``nn.TransformerEncoderLayer`` calls its attention instead of one kernel."""


@dataclass(kw_only=True, unsafe_hash=True)
class MultiheadAttentionParallel(ParallelStyle):
    """Share out the heads of an ``nn.MultiheadAttention``: self- and cross-attention, masks, packed or separate weights.

    Args:
        output_layouts: what the output is; ``Replicate()`` when None. ``Shard(1)`` scatters the sequence of a batch-first
            module.
        use_local_output: whether the output is a plain tensor (the default) or a DTensor.

    Plain inputs are whole on every rank; DTensors are gathered. Attention weights, when asked for, are whole.

    Example:
        >>> from hp_tp import ColwiseParallel, MultiheadAttentionParallel, RowwiseParallel
        >>> plan = {  # of an nn.TransformerEncoderLayer
        ...     "self_attn": MultiheadAttentionParallel(),
        ...     "linear1": ColwiseParallel(),
        ...     "linear2": RowwiseParallel(),
        ... }
    """

    lays_out: ClassVar[bool] = True
    output_layouts: Placement | None = None
    use_local_output: bool = True

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the packed projections by heads.

        Raises:
            UnsupportedModuleError: when *module* is no ``nn.MultiheadAttention``.
            PlanError: when the number of ranks does not divide the heads.
        """
        if original_class(module) is not nn.MultiheadAttention or not isinstance(
            module, nn.MultiheadAttention
        ):
            message = f"MultiheadAttentionParallel is for nn.MultiheadAttention, not for {type(module).__name__}"
            raise UnsupportedModuleError(message)
        ranks = device_mesh.size()
        if module.num_heads % ranks:
            legal = [d for d in range(1, module.num_heads + 1) if module.num_heads % d == 0]
            message = f"{ranks} ranks cannot share out {module.num_heads} heads; degrees that can: {legal}"
            raise PlanError(message)
        packed = StridedShard(0, split_factor=3) if ranks > 1 else Shard(0)
        own: dict[str, Placement] = {
            "in_proj_weight": packed,
            "in_proj_bias": packed,
            "q_proj_weight": Shard(0),
            "k_proj_weight": Shard(0),
            "v_proj_weight": Shard(0),
            "bias_k": Shard(2),
            "bias_v": Shard(2),
        }
        place(module, device_mesh, own, self.src_data_rank)
        projection = {"weight": Shard(1), "bias": REPLICATE}
        place(module.out_proj, device_mesh, projection, self.src_data_rank)
        heads = module.num_heads // ranks
        substitute(
            module,
            _HeadsLayout(
                device_mesh,
                heads,
                heads * device_mesh.get_local_rank(),
                self.output_layouts or REPLICATE,
                self.use_local_output,
            ),
        )
        module.register_forward_pre_hook(no_fast_path)
        return module
