"""Heads shared out: fewer key-value heads than ranks, and torch's own attention module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Replicate, Shard
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    ColwiseParallel,
    KVHeadParallel,
    MultiheadAttentionParallel,
    PlanError,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from hp_tp.testing import check_plan
from torch import Tensor, nn

R, S = Replicate(), Shard


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


class Grouped(nn.Module):
    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(width, heads * head_dim, bias=bias)
        self.k, self.v = (nn.Linear(width, kv_heads * head_dim, bias=bias) for _ in range(2))
        self.o = nn.Linear(heads * head_dim, width, bias=bias)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
@spmd(world_size=4, timeout=120)
def test_any_number_of_key_value_heads(kv_heads: int, bias: bool) -> None:
    """One head for several ranks, one each, and several each; the gradients sum over the copies of a head."""
    kv = KVHeadParallel(head_dim=4, num_heads=kv_heads)
    plan = {"q": ColwiseParallel(), "[kv]": kv, "o": RowwiseParallel()}
    model = Grouped(16, 8, kv_heads, 4, bias=bias)
    laid_out = check_plan(model, tp(4), plan, torch.randn(2, 5, 16))
    assert laid_out.k.weight.shape == (4 * kv_heads, 16)


@spmd(world_size=4, timeout=120)
def test_heads_and_ranks_that_do_not_divide() -> None:
    """Three heads for four ranks would cut a head; a size that is not that of the heads is a mistake."""
    mesh = tp(4)
    with pytest.raises(PlanError, match="3 key-value heads and 4 ranks do not divide each other"):
        parallelize_module(nn.Linear(8, 12), mesh, KVHeadParallel(head_dim=4, num_heads=3))
    with pytest.raises(PlanError, match=r"gives 12 features, and num_heads=2 of head_dim=4 are 8"):
        parallelize_module(nn.Linear(8, 12), mesh, KVHeadParallel(head_dim=4, num_heads=2))
    with pytest.raises(UnsupportedModuleError, match="not of LayerNorm"):
        parallelize_module(nn.LayerNorm(8), mesh, KVHeadParallel(head_dim=4, num_heads=2))


class Calls(nn.Module):
    """An attention module with the inputs of one call but the tensors."""

    def __init__(self, attention: Any, **call: Any) -> None:
        super().__init__()
        self.attention, self.call = attention, call

    def forward(self, query: Tensor, key: Any, value: Tensor | None) -> Any:
        return self.attention(
            query, query if key is None else key, query if value is None else value, **self.call
        )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "self": ({}, {"need_weights": False}, False),
    "weights": ({}, {}, False),
    "weights of each head": ({}, {"average_attn_weights": False}, False),
    "cross": ({}, {}, True),
    "other sizes": ({"kdim": 6, "vdim": 10}, {}, True),
    "no bias": ({"bias": False}, {}, False),
    "extra keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}, False),
    "sequence first": ({"batch_first": False}, {}, False),
}


@pytest.mark.parametrize("case", CASES)
@spmd(world_size=2, timeout=120)
def test_multihead_attention(case: str) -> None:
    """Self- and cross-attention, packed and separate weights: outputs, weights and all gradients."""
    options, call, cross = CASES[case]
    options = {"batch_first": True} | options
    attention = nn.MultiheadAttention(8, 4, **options)
    for name, parameter in attention.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    query = torch.randn(3, 5, 8)
    key = torch.randn(3, 4, options.get("kdim", 8)) if cross else None
    value = torch.randn(3, 4, options.get("vdim", 8)) if cross else None
    plan = {"attention": MultiheadAttentionParallel()}
    check_plan(Calls(attention, **call), tp(2), plan, query, key, value)


@spmd(world_size=2, timeout=120)
def test_masks() -> None:
    """Bool and float masks, for all heads or each, with padding, alone and together."""
    mesh = tp(2)
    hide = torch.rand(5, 5) > 0.6
    hide.fill_diagonal_(False)  # a value, no flag
    padding = torch.tensor([[False] * 5, [False] * 4 + [True]])
    per_head = hide.repeat(8, 1, 1)
    per_head[0] = ~torch.eye(5, dtype=torch.bool)
    for call in (
        {"attn_mask": hide},
        {"attn_mask": torch.randn(5, 5)},
        {"attn_mask": per_head},
        {"key_padding_mask": padding},
        {"attn_mask": torch.ones(5, 5).triu(1).bool(), "key_padding_mask": padding},
        {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True},
    ):
        attention = nn.MultiheadAttention(8, 4, batch_first=True)
        plan = {"attention": MultiheadAttentionParallel()}
        check_plan(Calls(attention, **call), mesh, plan, torch.randn(2, 5, 8), None, None)


@spmd(world_size=2, timeout=120)
def test_unbatched_and_scattered() -> None:
    """One sequence without a batch dim; the output cut along the sequence."""
    mesh = tp(2)
    attention = nn.MultiheadAttention(8, 4, batch_first=True)
    nn.init.normal_(attention.out_proj.bias)
    call = Calls(attention)
    check_plan(
        call, mesh, {"attention": MultiheadAttentionParallel()}, torch.randn(5, 8), None, None
    )
    call = Calls(attention, need_weights=False)
    plan = {"attention": MultiheadAttentionParallel(output_layouts=S(1))}
    check_plan(call, mesh, plan, torch.randn(2, 6, 8), None, None, output=S(1))


@spmd(world_size=4, timeout=120)
def test_attention_that_cannot_be_shared_out() -> None:
    """Heads that the ranks do not divide, dropout in training, and other modules."""
    mesh = tp(4)
    with pytest.raises(
        PlanError, match=r"4 ranks cannot share out 2 heads; degrees that can: \[1, 2\]"
    ):
        parallelize_module(nn.MultiheadAttention(8, 2), mesh, MultiheadAttentionParallel())
    with pytest.raises(UnsupportedModuleError, match="not for Linear"):
        parallelize_module(nn.Linear(8, 2), mesh, MultiheadAttentionParallel())
    dropping = parallelize_module(
        nn.MultiheadAttention(8, 4, dropout=0.5), mesh, MultiheadAttentionParallel()
    )
    x = torch.randn(3, 2, 8)
    with pytest.raises(UnsupportedModuleError, match=r"dropout=0.5 .* same mask on each rank"):
        dropping(x, x, x)
    dropping.eval()(x, x, x)


@spmd(world_size=2, timeout=60)
def test_a_stock_encoder_layer() -> None:
    """``nn.TransformerEncoderLayer`` trains and evaluates like one device: no kernel for the whole layer takes over."""
    mesh = tp(2)
    reference = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
    layer = copy.deepcopy(reference)
    plan = {
        "self_attn": MultiheadAttentionParallel(),
        "linear1": ColwiseParallel(),
        "linear2": RowwiseParallel(),
    }
    parallelize_module(layer, mesh, plan)
    x = torch.randn(2, 5, 8)
    out, right = layer(x), reference(x)
    torch.testing.assert_close(out, right)
    out.square().sum().backward()
    right.square().sum().backward()
    for ours, its in zip(layer.parameters(), reference.parameters(), strict=True):
        found = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(found, its.grad, rtol=1e-4, atol=1e-5)
    layer.eval()
    reference.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), reference(x))
