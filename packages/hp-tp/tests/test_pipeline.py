"""Decoders parallelised in one call: context, tensor, recomputation, compilation, FSDP2; against the single device."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from hp_dtensor import clip_grad_norm_
from hp_mesh import ParallelDims, init_device_mesh
from hp_mesh.testing import run_spmd, spmd
from hp_tp import (
    DecoderNames,
    GatedDeltaNetParallel,
    PipelineError,
    parallelize_llama,
    parallelize_qwen3_5,
    split_sequence,
)
from torch import Tensor, nn

pytestmark = pytest.mark.seam

WIDTH, HEADS, HEAD_DIM, VOCABULARY, LENGTH = 16, 4, 4, 20, 16


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Pairs of features turned by the angle of their position; *table* starts at the first position."""
    cos, sin = table[: x.shape[2]].unbind(-1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Attention(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = HEAD_DIM
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, kv_heads * HEAD_DIM, bias=False) for _ in range(2))
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Any:
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, table), rotate(k, table)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.w2 = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(kv_heads), FeedForward()

    def forward(self, x: Tensor, table: Tensor) -> Any:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Rotary positions from a table, grouped heads, SwiGLU; Meta's names."""

    freqs_cis: Tensor

    def __init__(self, kv_heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(kv_heads) for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(LENGTH).float(), torch.tensor([1.0, 0.1]))
        table = torch.stack([angles.cos(), angles.sin()], -1)
        self.register_buffer("freqs_cis", table, persistent=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.freqs_cis)
        return self.output(self.norm(x))


def whole_of(tensor: Any) -> Tensor:
    """The whole of a distributed tensor; a plain one as it is."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def start() -> None:
    """One thread, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def named(name: str, text: str) -> str:
    """A message that says which parameter differs."""
    return f"{name}: {text}"


def train(
    model: Any, batches: list[Tensor], dims: ParallelDims
) -> tuple[list[float], list[float]]:
    """AdamW with clipping on this rank's part of each batch; losses of the whole batch, and gradient norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    batch, context = dims.get_optional_mesh("batch"), dims.get_optional_mesh("cp")
    for ids in batches:
        inputs, labels = ids[:, :-1], ids[:, 1:]
        if batch is not None:
            inputs, labels = (
                t.chunk(batch.size())[batch.get_local_rank()] for t in (inputs, labels)
            )
        if context is not None:
            inputs, labels = (split_sequence(t, context) for t in (inputs, labels))
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norms.append(float(clip_grad_norm_(list(model.parameters()), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if dims.world_size > 1:
            dist.all_reduce(mean)
            mean /= dims.world_size
        losses.append(float(mean))
    return losses, norms


def compare(model: Any, reference: nn.Module, dims: ParallelDims) -> None:
    """A few steps of both: losses, gradient norms, parameters and their names."""
    batches = [torch.randint(0, VOCABULARY, (4, LENGTH + 1)) for _ in range(3)]
    rights, right_norms = train(reference, batches, ParallelDims(world_size=1))
    losses, norms = train(model, batches, dims)
    torch.testing.assert_close(losses, rights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms, right_norms, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == list(reference.state_dict())
    for (name, ours), right in zip(model.named_parameters(), reference.parameters(), strict=True):
        message = functools.partial(named, name)
        torch.testing.assert_close(whole_of(ours), right, rtol=1e-3, atol=1e-4, msg=message)


CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2-tp2": ({"dp_shard": 2, "tp": 2}, {}),
    "dp2-tp2-full": ({"dp_shard": 2, "tp": 2}, {"activation_checkpoint": "full"}),
    "dp2-tp2-selective": ({"dp_shard": 2, "tp": 2}, {"activation_checkpoint": "selective"}),
    "dp2-tp2-no-sp": ({"dp_shard": 2, "tp": 2}, {"sequence_parallel": False}),
    "cp2-tp2": ({"dp_shard": 1, "cp": 2, "tp": 2}, {}),
    "dp2-cp2": ({"dp_shard": 2, "cp": 2}, {"activation_checkpoint": "full"}),
    "cp2-tp2-gather": ({"dp_shard": 1, "cp": 2, "tp": 2}, {"context_method": "gather"}),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, {}),
    "tp4-few-kv-heads": ({"dp_shard": 1, "tp": 4}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_llama_trains_like_one_device(case: str) -> None:
    """Losses, gradient norms and parameters of several steps, for each way to share out four ranks."""
    degrees, options = CASES[case]

    @spmd(world_size=4, timeout=120)
    def run() -> None:
        start()
        dims = ParallelDims(**degrees, world_size=4)  # type: ignore[arg-type]  # ints only
        reference = Llama()
        model = parallelize_llama(copy.deepcopy(reference), dims, seq_len=LENGTH, **options)
        compare(model, reference, dims)

    run()


@pytest.mark.slow
def test_all_at_once_and_its_checkpoint() -> None:
    """FSDP2 x TP x compile x recomputation trains like one device; what it saves loads on 1, 4x1 and 1x4 ranks bitwise."""
    pytest.importorskip("numpy", reason="torch exchanges objects through numpy")
    folder = tempfile.mkdtemp()

    def state_of(model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def save() -> dict[str, Tensor]:
        start()
        dims = ParallelDims(dp_shard=2, tp=2, world_size=4)
        reference = Llama(depth=1)
        model = parallelize_llama(
            copy.deepcopy(reference),
            dims,
            activation_checkpoint="full",
            compile="aot_eager",
            seq_len=LENGTH,
        )
        with warnings.catch_warnings():
            # The compiler asks tensors between layers for their gradient, and hides what torch says to that.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            compare(model, reference, dims)
        dcp.save(state_of(model), checkpoint_id=folder)
        return {name: whole_of(tensor).clone() for name, tensor in state_of(model).items()}

    saved = run_spmd(save, world_size=4, timeout=240)[0]

    def load(degrees: dict[str, int]) -> None:
        start()
        world = dist.get_world_size()
        dims = ParallelDims(**degrees, world_size=world)  # type: ignore[arg-type]  # ints only
        model = parallelize_llama(Llama(depth=1), dims)
        state = state_of(model)
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
        for name, right in saved.items():
            assert torch.equal(whole_of(model.state_dict()[name]), right), name

    run_spmd(load, {"tp": 4, "dp_shard": 1}, world_size=4, timeout=120)
    run_spmd(load, {"dp_shard": 4}, world_size=4, timeout=120)
    run_spmd(load, {"dp_shard": 1}, world_size=1, timeout=120)


def test_everything_wrong_is_told_at_once_and_before_any_group() -> None:
    """One error with all violations, in a process without process groups; the model stays as it was."""
    assert not dist.is_initialized()
    model = Llama()
    dims = ParallelDims(dp_shard=1, cp=2, tp=3, world_size=6)
    options: Any = {"activation_checkpoint": "some", "compile": "fastest"}
    with pytest.raises(PipelineError) as caught:
        parallelize_llama(model, dims, seq_len=10, context_method="gather", **options)
    text = "\n".join(caught.value.violations)
    assert len(caught.value.violations) == 4
    assert "activation_checkpoint='some' is none of ('none', 'selective', 'full')" in text
    assert "compile='fastest' is no backend" in text
    assert "seq_len=10 must be a multiple of 12" in text
    assert "the next is 12" in text
    assert "tp=3 cannot share out 4 query heads and 2 key-value heads" in text
    assert "degrees that can: [1, 2, 4]" in text
    assert type(model.layers[0]) is Block
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    with pytest.raises(PipelineError, match=r"no layers by Meta's or Hugging Face's names"):
        parallelize_llama(nn.Linear(2, 2), dims)
    with pytest.raises(PipelineError, match=r"cannot share out the 1 key-value heads .* cp=2"):
        parallelize_llama(
            model, ParallelDims(dp_shard=1, cp=2, tp=2, world_size=4), context_method="ulysses"
        )


@spmd(world_size=4, timeout=60)
def test_a_mesh_instead_of_degrees() -> None:
    """A mesh of the world with known axes is as good; one with others is refused."""
    start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_llama(Llama(), mesh)
    assert model.layers[0].attention.wq.weight.to_local().shape == (WIDTH // 4, WIDTH)
    with pytest.raises(PipelineError, match="distributed parameters already"):
        parallelize_llama(model, mesh)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(PipelineError, match="in this order"):
        parallelize_llama(Llama(), other)
    with pytest.raises(PipelineError, match="degrees are for 8 ranks, and 4 run"):
        parallelize_llama(Llama(), ParallelDims(tp=2, world_size=8))


@spmd(world_size=4, timeout=180)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_qwen3_5_trains_like_one_device(sequence_parallel: bool) -> None:
    """Transformers' Qwen3.5 with linear and full attention, dp=2 and tp=2, recomputed: logits, losses, parameters."""
    transformers = pytest.importorskip("transformers")
    start()
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        attn_implementation="sdpa",
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.Qwen3_5ForCausalLM(config)

        def forward(self, ids: Tensor) -> Any:
            return self.inner(ids, use_cache=False).logits

    reference = Logits()
    model = copy.deepcopy(reference)
    dims = ParallelDims(dp_shard=2, tp=2, world_size=4)
    parallelize_qwen3_5(
        model.inner,
        dims,
        sequence_parallel=sequence_parallel,
        activation_checkpoint="full",
    )
    assert model.inner.model.layers[0].linear_attn.num_v_heads == 2
    compare(model, reference, dims)


def test_qwen3_5_refuses_what_cannot_be_cut() -> None:
    """Context parallelism, and heads of the delta rule that do not divide, in one error."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear_attn: Any = nn.Module()
            self.linear_attn.num_k_heads = 2
            self.linear_attn.num_v_heads = 4

    model = nn.Module()
    model.blocks = nn.ModuleList([Layer()])
    dims = ParallelDims(dp_shard=1, cp=2, tp=4, world_size=8)
    with pytest.raises(PipelineError) as caught:
        parallelize_qwen3_5(model, dims, names=DecoderNames(layers="blocks.*"))
    text = str(caught.value)
    assert "carries a state along the sequence" in text
    assert "4 ranks cannot share out the 2 key heads and 4 value heads" in text
    assert GatedDeltaNetParallel() == GatedDeltaNetParallel()
