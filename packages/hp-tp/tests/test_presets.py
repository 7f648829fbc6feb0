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
    GatedDeltaNetParallel,
    PlanError,
    check_degree,
    gqa_plan,
    linear_attention_plan,
    llama_plan,
    match_plan,
    mla_plan,
    moe_plan,
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


class Experts(nn.Module):
    """Stacked experts on tokens in the order of their experts."""

    def __init__(self, count: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(count, hidden, dim) / 4) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(count, dim, hidden) / 4)

    def forward(self, tokens: Tensor, counts: Tensor) -> Any:
        pieces = tokens.split(counts.tolist())
        return torch.cat(
            [
                (F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t()
                for x, w1, w2, w3 in zip(pieces, self.w1, self.w2, self.w3, strict=True)
            ]
        )


class Mixture(nn.Module):
    """A router, experts weighted by it, and a shared expert."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 3, bias=False)
        self.experts, self.shared_experts = Experts(3, dim, 8), FeedForward(dim, 8)

    def forward(self, x: Tensor) -> Any:
        flat = x.flatten(0, 1)
        scores = self.gate(flat).softmax(-1)
        best, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=3)
        mixed = torch.zeros_like(flat).index_copy(0, order, self.experts(flat[order], counts))
        return (mixed * best.unsqueeze(-1)).view_as(x) + self.shared_experts(x)


class LatentAttention(nn.Module):
    """Attention whose keys and values come from latents, beside one rotary key for all heads."""

    def __init__(self, dim: int, heads: int, *, latent_queries: bool) -> None:
        super().__init__()
        if latent_queries:
            self.wq_a, self.q_norm = nn.Linear(dim, 6, bias=False), Norm(6)
            self.wq_b = nn.Linear(6, heads * 6, bias=False)
        else:
            self.wq = nn.Linear(dim, heads * 6, bias=False)
        self.latent = latent_queries
        self.wkv_a, self.kv_norm = nn.Linear(dim, 5 + 2, bias=False), Norm(5)
        self.wkv_b, self.wo = nn.Linear(5, heads * 8), nn.Linear(heads * 4, dim)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None) -> Any:
        del mask
        q = self.wq_b(self.q_norm(self.wq_a(x))) if self.latent else self.wq(x)
        q = q.unflatten(-1, (-1, 6)).transpose(1, 2)
        kv, rotary = self.wkv_a(x).split([5, 2], -1)
        k, v = self.wkv_b(self.kv_norm(kv)).unflatten(-1, (-1, 8)).transpose(1, 2).split(4, -1)
        rotary = (rotary * table).unsqueeze(1).expand(-1, k.shape[1], -1, -1)
        out = F.scaled_dot_product_attention(q, torch.cat([k, rotary], -1), v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class MixtureBlock(nn.Module):
    """A layer with a mixture of experts, and latent attention if asked for."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(dim), nn.RMSNorm(dim)
        self.attention, self.moe = attention, Mixture(dim)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None) -> Any:
        x = x + self.attention(self.attention_norm(x), table, mask)
        return x + self.moe(self.ffn_norm(x))


@pytest.mark.parametrize("kind", ["few heads", "mixture", "latent"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_other_decoders_equal_one_device(kind: str, sequence_parallel: bool) -> None:
    """Two key-value heads on four ranks, a mixture of experts, and latent attention: logits and every gradient."""

    @spmd(world_size=4, timeout=120)
    def run() -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model = Llama()
        options = {"sequence_parallel": sequence_parallel, "loss_parallel": False}
        if kind == "few heads":
            for layer in model.layers:
                layer.attention = Attention(16, 8, 2)
            plan = gqa_plan(model, head_dim=2, num_kv_heads=2, **options)
        elif kind == "mixture":
            model.layers[1] = MixtureBlock(16, Attention(16, 8, 4))
            plan = moe_plan(model, **options)
        else:
            for i, latent in enumerate((True, False)):
                attention = LatentAttention(16, 4, latent_queries=latent)
                model.layers[i] = MixtureBlock(16, attention)
            plan = mla_plan(model, qk_rope_head_dim=2, **options)
        check_plan(model, mesh, plan, torch.randint(0, 18, (2, 8)))

    run()


def test_linear_attention_is_one_more_entry() -> None:
    """The plan has the delta net between the same layouts as attention, and all that a Llama has."""
    plan = linear_attention_plan(sequence_parallel=True)
    style = plan.pop("layers.*.linear_attn")
    assert style == GatedDeltaNetParallel(input_layouts=S(1), output_layouts=S(1))
    assert plan == llama_plan()
