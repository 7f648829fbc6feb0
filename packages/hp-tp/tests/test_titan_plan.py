"""TorchTitan's plan of Llama as it was written in April 2026, with our imports: rotary tables, masks and positions included."""

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
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch import Tensor, nn

DIM, HEADS, KV_HEADS, VOCABULARY = 32, 8, 4, 40


def rotate(x: Tensor, table: Tensor) -> Any:
    """Pairs of features as complex numbers, turned by their position."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.unsqueeze(1)).flatten(3).type_as(x)


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        assert not any(isinstance(t, DTensor) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = DIM // HEADS
        self.wq = nn.Linear(DIM, HEADS * self.head_dim, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wo = nn.Linear(HEADS * self.head_dim, DIM, bias=False)
        self.inner_attention = Inner()

    def forward(
        self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> Any:
        del mask
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.head_dim) for w in (self.wq, self.wk, self.wv)
        )
        table = freqs_cis[:length] if positions is None else freqs_cis[positions[0]]
        q, k = rotate(q, table), rotate(k, table)
        out = self.inner_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 48, bias=False), nn.Linear(DIM, 48, bias=False)
        self.w2 = nn.Linear(48, DIM, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(
        self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> Any:
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask, positions)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): TransformerBlock() for i in range(2)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        self.freqs_cis: Tensor
        angles = torch.outer(torch.arange(16), torch.tensor([1.0, 0.1]))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Any:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis, None, positions)
        return self.output(self.norm(h))


def apply_tp(model: Transformer, tp_mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """The plan, entry by entry."""
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    heads = (Shard(1), Shard(1), Shard(1))
    layer_plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), Replicate(), None, Replicate()),
            desired_input_layouts=(Replicate(), Replicate(), None, Replicate()),
        ),
        "attention.wq": ColwiseParallel(use_local_output=False),
        "attention.wk": ColwiseParallel(use_local_output=False),
        "attention.wv": ColwiseParallel(use_local_output=False),
        "attention.inner_attention": PrepareModuleInput(
            input_layouts=heads, desired_input_layouts=heads, use_local_output=True
        ),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    for block in model.layers.values():
        parallelize_module(block, tp_mesh, layer_plan)


@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_the_plan_trains_like_one_device(loss_parallel: bool, size: int) -> None:
    """Logits, every gradient and three steps of AdamW, with and without positions given."""

    @spmd(world_size=size, timeout=120)
    def run() -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        reference = Transformer()
        model: Any = copy.deepcopy(reference)
        apply_tp(model, mesh, loss_parallel=loss_parallel)
        ours, right = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference))
        positions = torch.arange(8).flip(0).expand(2, 8).contiguous()
        for given in (None, positions, None):
            tokens = torch.randint(0, VOCABULARY, (2, 8))
            logits, expected = model(tokens, given), reference(tokens, given)
            if loss_parallel:
                assert logits.placements == (Shard(2),)
                logits = logits.full_tensor()
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            for out in (logits, expected):
                F.cross_entropy(out.flatten(0, 1), tokens.flatten().roll(1)).backward()
            for (name, ours_p), right_p in zip(
                model.named_parameters(), reference.parameters(), strict=True
            ):
                torch.testing.assert_close(
                    ours_p.grad.full_tensor(),
                    right_p.grad,
                    rtol=1e-4,
                    atol=1e-5,
                    msg=lambda text, n=name: f"{n}: {text}",
                )
            for optimizer in (ours, right):
                optimizer.step()
                optimizer.zero_grad()

    run()
