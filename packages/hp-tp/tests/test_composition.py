"""What composes with what: FSDP2, checkpoints, compilation, recomputation, and all of them together.

Each compares with a single-device run of the same steps. They touch what torch calls private, through FSDP2's rebuilt
parameters and the compiler, so they also run on the oldest torch that we support.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from hp_dtensor import CommDebugMode, Replicate, Shard, clip_grad_norm_, get_total_norm
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hp_tp.testing import check_plan
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

pytestmark = pytest.mark.seam

R, S = Replicate(), Shard
WIDTH, HEADS, VOCABULARY = 16, 4, 20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float) -> Any:
        b, t, _ = x.shape
        q, k, v = (
            w(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q * scale, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.w2 = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.attention_norm(x), 0.7)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def plan(*, sequence_parallel: bool, local: bool = True) -> dict[str, Any]:
    """The plan of the decoder, with or without the sequence cut between blocks."""
    between = S(1) if sequence_parallel else R
    norm = SequenceParallel() if sequence_parallel else None
    enter = PrepareModuleInput(
        input_layouts=(between, None),
        desired_input_layouts=(R, None),
        use_local_output=local and not sequence_parallel,
    )
    return {
        "emb": RowwiseParallel(output_layouts=between),
        "norm": norm,
        "out": ColwiseParallel(input_layouts=between, output_layouts=R),
        "layers.*": {
            "attention_norm": norm,
            "ffn_norm": norm,
            "attention": enter,
            "attention.w[qkv]": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=between),
            "feed_forward": PrepareModuleInput(input_layouts=between, desired_input_layouts=R),
            "feed_forward.w[13]": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=between),
        },
    }


def whole_of(tensor: Any) -> Tensor:
    """The whole of a distributed tensor; a plain one as it is."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def start(*shape: int) -> DeviceMesh:
    """A mesh whose last axis is tp, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = ("dp", "tp")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_decoder_equals_one_device(sequence_parallel: bool, size: int) -> None:
    """Embedding, attention, feed-forward, norms and head together: logits and every gradient."""

    @spmd(world_size=size, timeout=120)
    def run() -> None:
        ids = torch.randint(0, VOCABULARY, (2, 8))
        check_plan(Decoder(), start(size), plan(sequence_parallel=sequence_parallel), ids)

    run()


@spmd(world_size=2, timeout=120)
def test_collectives_of_a_sequence_parallel_block() -> None:
    """One gather and one scatter around attention and feed-forward, mirrored backward, and the norms' small sums."""
    mesh = start(2)
    layer = parallelize_module(Block(), mesh, plan(sequence_parallel=True)["layers.*"])
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    with CommDebugMode() as forward:
        y = layer(x)
    with CommDebugMode() as backward:
        y.sum().backward()
    assert forward.get_total_counts() == 4
    # Mirrored, one sum for each of the three parameters of norms, and one for each row-parallel bias: none, since the
    # gathered gradient gives it whole.
    assert backward.get_total_counts() == 4 + 3


def train(
    model: nn.Module, batches: list[Tensor], rank: int, replicas: int, norms: list[float]
) -> list[float]:
    """AdamW with clipping; this replica's part of each batch. Returns the losses of the whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids in batches:
        own = ids.chunk(replicas)[rank]
        logits = model(own[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        norms.append(float(clip_grad_norm_(list(model.parameters()), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if replicas > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(float(mean))
    return losses


def named(name: str) -> Callable[[str], str]:
    """A message that says which parameter differs."""
    return lambda text: f"{name}: {text}"


def shard_fully(model: Any, mesh: DeviceMesh) -> None:
    """FSDP2 over dp, block by block."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


@pytest.mark.parametrize("recompute", [False, True])
@spmd(world_size=4, timeout=180)
def test_fsdp_over_tp_trains_like_one_device(recompute: bool) -> None:
    """Losses, gradient norms and parameters of several AdamW steps, dp=2 and tp=2, with and without recomputation."""
    mesh = start(2, 2)
    reference = Decoder()
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh["tp"], plan(sequence_parallel=True))
    if recompute:
        for layer in model.layers:
            layer.forward = recomputed(layer.forward)
    shard_fully(model, mesh)
    batches = [torch.randint(0, VOCABULARY, (4, 9)) for _ in range(4)]
    norms: list[float] = []
    right_norms: list[float] = []
    rank = mesh.get_local_rank("dp")
    losses = train(model, batches, rank, 2, norms)
    rights = train(reference, batches, 0, 1, right_norms)
    torch.testing.assert_close(losses, rights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms, right_norms, rtol=1e-4, atol=1e-5)
    for (name, ours), right in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole_of(ours), right, rtol=1e-3, atol=1e-4, msg=named(name))


def recomputed(forward: Any) -> Any:
    """*forward* with its activations computed again in the backward."""
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


@spmd(world_size=4, timeout=120)
def test_full_tensor_after_fsdp_over_tp() -> None:
    """Rows cut by tp and then by dp come back in order, and each rank holds the rows it should."""
    mesh = start(2, 2)
    x = torch.arange(8.0).reshape(8, 1)
    layer = nn.Linear(1, 8, bias=False)
    layer.weight.data.copy_(x)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    weight: Any = layer.weight
    assert torch.equal(whole_of(weight), x)
    dp, tp = mesh.get_coordinate() or (0, 0)
    assert torch.equal(weight.to_local(), x[tp * 4 + dp * 2 : tp * 4 + dp * 2 + 2])


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@spmd(world_size=4, timeout=180)
def test_checkpoints_load_in_any_layout() -> None:
    """Saved at dp=2, tp=2: loads at tp=4, at dp=4 and whole, bit for bit."""
    pytest.importorskip("numpy", reason="torch exchanges objects through numpy")
    mesh = start(2, 2)
    source = Decoder()
    model = copy.deepcopy(source)
    parallelize_module(model, mesh["tp"], plan(sequence_parallel=True))
    shard_fully(model, mesh)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(state_of(model), checkpoint_id=folder[0])

    def load(into: nn.Module) -> None:
        state = state_of(into)
        dcp.load(state, checkpoint_id=folder[0])
        into.load_state_dict(state)
        for name, right in source.state_dict().items():
            assert torch.equal(whole_of(into.state_dict()[name]), right), name

    load(Decoder())
    load(
        parallelize_module(
            Decoder(),
            init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
            plan(sequence_parallel=False),
        )
    )
    sharded = Decoder()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    load(sharded)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@spmd(world_size=2, timeout=300)
def test_compiled_block(sequence_parallel: bool) -> None:
    """One graph, forward and backward, with the numbers of one device."""
    mesh = start(2)
    block = Block()
    reference = copy.deepcopy(block)
    parallelize_module(block, mesh, plan(sequence_parallel=sequence_parallel)["layers.*"])
    compiled: Any = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8, WIDTH)
    rank = mesh.get_local_rank()
    piece = (x.chunk(2, 1)[rank] if sequence_parallel else x).clone().requires_grad_()
    whole = x.clone().requires_grad_()
    y, right = compiled(piece), reference(whole)
    grad = torch.randn_like(x)
    right.backward(grad)

    def cut(tensor: Any) -> Tensor:
        own: Tensor = tensor.chunk(2, 1)[rank] if sequence_parallel else tensor
        return own

    y.backward(cut(grad).contiguous())
    torch.testing.assert_close(y, cut(right), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(piece.grad, cut(whole.grad), rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(block.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole_of(p.grad), q.grad, rtol=1e-4, atol=1e-5, msg=named(name))


@spmd(world_size=2, timeout=300)
def test_compiled_decoder() -> None:
    """Embedding, blocks and head in one graph."""
    mesh = start(2)
    model = Decoder(1)
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh, plan(sequence_parallel=True))
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = torch.randint(0, VOCABULARY, (2, 8))
    y, right = compiled(ids), reference(ids)
    torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(right)
    y.backward(grad)
    right.backward(grad)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole_of(p.grad), q.grad, rtol=1e-4, atol=1e-5)


@spmd(world_size=4, timeout=120)
def test_gradient_norm_over_two_meshes() -> None:
    """The total norm counts each element once, whichever mesh a parameter lives on."""
    mesh = start(2, 2)
    model = Decoder(1)
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], plan(sequence_parallel=True))
    ids = torch.randint(0, VOCABULARY, (2, 8))
    model(ids).square().mean().backward()
    reference(ids).square().mean().backward()
    ours = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    right = get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    torch.testing.assert_close(float(ours), float(right), rtol=1e-4, atol=1e-6)


def all_at_once(
    model: Any, shape: tuple[int, int], *, recompute: Any = None, compiles: bool = False
) -> DeviceMesh:
    """Lay *model* out over dp and tp, with recomputed and compiled blocks, in place."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if shape[1] > 1:
        parallelize_module(model, mesh["tp"], plan(sequence_parallel=True))
    for layer in model.layers:
        if recompute is not None:
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, **recompute
            )
        if compiles:
            layer.compile(backend="aot_eager")
    if shape[0] > 1:
        shard_fully(model, mesh)
    return mesh


def keeps_products(*arguments: Any, **options: Any) -> CheckpointPolicy:
    """The policy of selective recomputation: matrix products are kept."""
    del options
    kept = arguments[1] in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and the optimizer's state under one flat name each, whole."""
    weights, states = get_state_dict(model, optimizer)
    flat: dict[str, Any] = dict(weights)
    for name, entries in cast("dict[str, dict[str, Any]]", states["state"]).items():
        flat.update({f"{name}/{entry}": value for entry, value in entries.items()})
    return {name: whole_of(value).clone() for name, value in flat.items()}


@pytest.mark.parametrize(
    ("tied", "selective", "compiles"),
    [(True, False, False), pytest.param(False, True, True, marks=pytest.mark.slow)],
)
@spmd(world_size=4, timeout=240)
def test_all_at_once_with_the_optimizer_in_the_checkpoint(
    tied: bool, selective: bool, compiles: bool
) -> None:
    """FSDP2 x TP x recomputation (x compilation) trains like one device; weights and AdamW's state load in other layouts, bit for bit."""
    pytest.importorskip("numpy", reason="torch exchanges objects through numpy")
    start(2, 2)

    def build() -> Decoder:
        made = Decoder()
        if tied:
            made.out.weight = made.emb.weight
        return made

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)

    reference = build()
    model = copy.deepcopy(reference)
    context = functools.partial(create_selective_checkpoint_contexts, keeps_products)
    mesh = all_at_once(
        model,
        (2, 2),
        recompute={"context_fn": context} if selective else {},
        compiles=compiles,
    )
    assert (model.out.weight is model.emb.weight) == tied
    ours, rights = optimizer_of(model), optimizer_of(reference)
    for _ in range(3):
        ids = torch.randint(0, VOCABULARY, (4, 9))
        for each, optimizer, own in (
            (model, ours, ids.chunk(2)[mesh.get_local_rank("dp")]),
            (reference, rights, ids),
        ):
            logits = each(own[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, own_parameter), right in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(
            whole_of(own_parameter), right, rtol=1e-3, atol=1e-4, msg=named(name)
        )

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    weights, states = get_state_dict(model, ours)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    saved = whole_state(model, ours)
    for shape in ((1, 1), (4, 1), (1, 4)):
        other = build()
        all_at_once(other, shape)
        optimizer = optimizer_of(other)
        weights, states = get_state_dict(other, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
        set_state_dict(other, optimizer, model_state_dict=weights, optim_state_dict=states)
        loaded = whole_state(other, optimizer)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved), shape
