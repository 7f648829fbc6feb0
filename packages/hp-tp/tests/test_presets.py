"""Plans of whole decoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Replicate, Shard
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    HUGGING_FACE_NAMES,
    ColwiseParallel,
    DecoderNames,
    PlanError,
    check_degree,
    llama_plan,
    match_plan,
)
from hp_tp.testing import check_plan
from torch import Tensor, nn

R, S = Replicate(), Shard


class Norm(nn.Module):
    """A norm written from operators, as Meta's code has it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary tables and an optional mask."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = (nn.Linear(dim, kv_heads * self.head_dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = q * table, k * table
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(dim), nn.RMSNorm(dim)
        self.attention, self.feed_forward = Attention(dim, 8, 4), FeedForward(dim, 40)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None) -> Any:
        x = x + self.attention(self.attention_norm(x), table, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, dim: int = 16, vocabulary: int = 18, depth: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = Norm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.register_buffer("table", torch.randn(8, 2), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.table, mask)
        return self.output(self.norm(x))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_llama_equals_one_device(sequence_parallel: bool, loss_parallel: bool, size: int) -> None:
    """Logits and every gradient, with hand-written and torch norms, and a vocabulary that four ranks do not divide."""

    @spmd(world_size=size, timeout=120)
    def run() -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        model = Llama()
        plan = llama_plan(model, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
        ids = torch.randint(0, 18, (2, 8))
        laid_out = check_plan(model, mesh, plan, ids)
        out = laid_out(ids)
        assert isinstance(out, DTensor) == loss_parallel
        if loss_parallel:
            assert out.placements == (S(2),)

    run()


def test_a_stage_of_a_pipeline_gets_what_it_has() -> None:
    """A model without embedding and output has no entries for them, and all of its entries match."""
    stage = Llama()
    del stage.tok_embeddings, stage.output
    plan = llama_plan(stage)
    assert "tok_embeddings" not in plan
    assert "output" not in plan
    assert len(match_plan(stage, plan)) == 2 * 11 + 1


def test_names_are_data() -> None:
    """The same plan for other names; a model with none of the known ones is an error."""
    assert "model.layers.*.self_attn.q_proj" in llama_plan(HUGGING_FACE_NAMES)
    fused = DecoderNames(queries_keys_values=("wqkv",))
    assert llama_plan(fused)["layers.*.attention.wqkv"] == ColwiseParallel()
    with pytest.raises(PlanError, match=r"Sequential has no module .* children are \['0'\]"):
        llama_plan(nn.Sequential(nn.Linear(2, 2)))


def test_degrees_that_do_not_divide() -> None:
    """The error lists what does not divide and what would."""
    check_degree(2, heads=8, kv_heads=4)
    with pytest.raises(
        PlanError,
        match=r"3 ranks cannot share out heads=8, kv_heads=4 whole; degrees that can: 1, 2, 4",
    ):
        check_degree(3, heads=8, kv_heads=4)
