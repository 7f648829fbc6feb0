"""Context parallelism against attention over the whole sequence on one device."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    ContextParallel,
    ContextParallelError,
    SequenceCut,
    context_parallel_attention,
    join_sequence,
    parallelize_module,
    sequence_positions,
    split_sequence,
)
from torch import Tensor, nn

attention: Any = context_parallel_attention
sdpa: Any = F.scaled_dot_product_attention


def cp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_token_is_on_one_rank(ranks: int, balanced: bool) -> None:
    """Pieces are equally long, sorted, and together the sequence."""
    cut = SequenceCut(ranks, balanced)
    order = cut.order(24)
    assert sorted(order) == list(range(24))
    size = 24 // ranks
    for start in range(0, 24, size):
        assert order[start : start + size] == sorted(order[start : start + size])


def test_pieces_cost_the_same() -> None:
    """Head and tail give each rank the same number of query-key pairs under causality; contiguous pieces do not."""

    def pairs(balanced: bool) -> set[int]:
        cut = SequenceCut(4, balanced)
        return {
            sum(p + 1 for start, stop in cut.intervals(rank, 32) for p in range(start, stop))
            for rank in range(4)
        }

    assert len(pairs(balanced=True)) == 1
    assert len(pairs(balanced=False)) == 4


def test_a_length_that_does_not_divide_says_which_one_does() -> None:
    """The error names the length, the multiple and what to pad to; contiguous pieces need less."""
    with pytest.raises(
        ContextParallelError, match=r"10 tokens .* over 4 ranks.*multiple of 8.*Pad it to 16"
    ):
        SequenceCut(4).check(10)
    SequenceCut(5, balanced=False).check(10)


@pytest.mark.parametrize("balanced", [True, False])
@spmd(world_size=4, timeout=60)
def test_split_and_join_are_inverse(balanced: bool) -> None:
    """A whole cut and joined is itself; positions say where a piece comes from; gradients go where they came from."""
    mesh = cp(4)
    whole = torch.randn(2, 16, 3, requires_grad=True)
    piece = split_sequence(whole, mesh, 1, balanced=balanced)
    positions = sequence_positions(16, mesh, balanced=balanced)
    assert torch.equal(piece, whole[:, positions])
    again = join_sequence(piece, mesh, 1, balanced=balanced)
    assert torch.equal(again, whole)
    grad = torch.randn(2, 16, 3)
    again.backward(grad)
    expected = torch.zeros_like(grad)
    expected[:, positions] = grad[:, positions]
    assert torch.equal(whole.grad, expected)  # type: ignore[arg-type]  # there is one now


def inputs(kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Whole queries, keys, values and an output gradient, with values of their own width."""
    shapes = [(2, 4, 24, 6), (2, kv_heads, 24, 6), (2, kv_heads, 24, 5), (2, 4, 24, 5)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def compare(
    mesh: DeviceMesh, tensors: list[Tensor], mask: Tensor | None, balanced: bool, **options: Any
) -> None:
    """Values and gradients of this rank's tokens equal those of the whole sequence."""
    *given, grad = tensors
    cut = functools.partial(split_sequence, mesh=mesh, dim=2, balanced=balanced)
    whole = [t.clone().requires_grad_() for t in given]
    own = [cut(t).clone().requires_grad_() for t in given]
    method = options.pop("method")
    full_mask = own_mask = None
    if mask is not None:
        learnt = mask.is_floating_point()
        full_mask = mask.clone().requires_grad_(learnt)
        rows = split_sequence(mask, mesh, mask.ndim - 2, balanced=balanced)
        own_mask = rows.clone().requires_grad_(learnt)
    right = sdpa(*whole, full_mask, enable_gqa=True, **options)
    ours = attention(
        *own,
        mesh,
        attn_mask=own_mask,
        enable_gqa=True,
        method=method,
        balanced=balanced,
        **options,
    )
    torch.testing.assert_close(ours, cut(right))
    right.backward(grad)
    ours.backward(cut(grad))
    for name, a, b in zip(["query", "key", "value"], own, whole, strict=True):
        assert b.grad is not None
        torch.testing.assert_close(a.grad, cut(b.grad), msg=functools.partial(named, name))
    if own_mask is not None and full_mask is not None and full_mask.grad is not None:
        rows = split_sequence(full_mask.grad, mesh, full_mask.ndim - 2, balanced=balanced)
        torch.testing.assert_close(own_mask.grad, rows)


def named(name: str, text: str) -> str:
    """A message that says which tensor differs."""
    return f"{name}: {text}"


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_equals_one_device(ranks: int, method: str) -> None:
    """Causal or not, balanced or contiguous, with and without grouped heads and a scale: values and gradients."""

    @spmd(world_size=ranks, timeout=120)
    def run() -> None:
        mesh = cp(ranks)
        for kv_heads in (4, 2, 1):
            if method == "ulysses" and kv_heads % ranks:
                continue
            tensors = inputs(kv_heads)
            options = (
                itertools.product((True, False), repeat=2) if kv_heads == 2 else [(True, True)]
            )
            for balanced, causal in options:
                scale = 0.3 if causal else None
                compare(
                    mesh, tensors, None, balanced, is_causal=causal, scale=scale, method=method
                )

    run()


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
@spmd(world_size=2, timeout=120)
def test_masks_equal_one_device(method: str) -> None:
    """Bools that hide (whole rows, too) and numbers to add, which get a gradient in the ring and the gather."""
    mesh = cp(2)
    tensors = inputs(2)
    hidden = torch.rand(24, 24) > 0.4
    hidden |= torch.eye(24, dtype=torch.bool)
    bias = torch.randn(1, 4, 24, 24, dtype=torch.float64)
    for balanced in (True, False):
        compare(mesh, tensors, hidden, balanced, method=method)
        compare(mesh, tensors, hidden.expand(2, 1, 24, 24), balanced, method=method)
        if method == "ulysses":
            bias = bias.detach()
            with torch.no_grad():
                right = sdpa(*tensors[:3], bias, enable_gqa=True)
            own = [split_sequence(t, mesh, 2, balanced=balanced) for t in (*tensors[:3], bias)]
            ours = attention(
                *own[:3],
                mesh,
                attn_mask=own[3],
                enable_gqa=True,
                method="ulysses",
                balanced=balanced,
            )
            torch.testing.assert_close(ours, split_sequence(right, mesh, 2, balanced=balanced))
        else:
            compare(mesh, tensors, bias, balanced, method=method)


@spmd(world_size=2, timeout=60)
def test_a_row_that_sees_nothing_gives_zeros() -> None:
    """As in torch: no NaN in the output nor in any gradient."""
    mesh = cp(2)
    tensors = inputs(4)
    hidden = torch.ones(24, 24, dtype=torch.bool)
    hidden[5] = hidden[20] = False
    compare(mesh, tensors, hidden, True, method="ring")


@spmd(world_size=2, timeout=60)
def test_low_precision_accumulates_in_float32() -> None:
    """bfloat16 in and out, as near to the exact result as torch's own kernel is."""
    mesh = cp(2)
    *given, _ = inputs(2, torch.float64)
    exact = sdpa(*given, is_causal=True, enable_gqa=True)
    low = [t.bfloat16() for t in given]
    own = [split_sequence(t, mesh, 2) for t in low]
    ours = attention(*own, mesh, is_causal=True, enable_gqa=True)
    assert ours.dtype == torch.bfloat16
    error = (ours - split_sequence(exact, mesh, 2)).abs().max()
    torchs = sdpa(*low, is_causal=True, enable_gqa=True)
    assert error <= 2 * (torchs - exact).abs().max() + 1e-3


@spmd(world_size=2, timeout=60)
def test_what_cannot_be_computed_is_refused_alike() -> None:
    """Each refusal says what is wrong and what to do, before anything is sent."""
    mesh = cp(2)
    q = torch.randn(1, 3, 4, 2)
    attend = functools.partial(attention, mesh=mesh)
    with pytest.raises(ContextParallelError, match=r"method='rong' is none of"):
        attend(q, q, q, method="rong")
    with pytest.raises(ContextParallelError, match=r"\[batch, heads, length, head_dim\]"):
        attend(q[0], q[0], q[0])
    with pytest.raises(ContextParallelError, match="one length"):
        attend(q[:, :, :2], q, q)
    with pytest.raises(ContextParallelError, match="3 heads and 2 key-value heads"):
        attend(q, q[:, :2], q[:, :2], enable_gqa=True)
    with pytest.raises(ContextParallelError, match="do not fit each other"):
        attend(q, q, q[:, :2])
    with pytest.raises(
        ContextParallelError, match=r"cannot share 3 .* degrees that can: \[1, 3\]"
    ):
        attend(q, q, q, method="ulysses")
    with pytest.raises(ContextParallelError, match="no head and tail"):
        attend(q[:, :, :3], q[:, :, :3], q[:, :, :3])
    with pytest.raises(ContextParallelError, match="exclude each other"):
        attend(q, q, q, is_causal=True, attn_mask=torch.ones(4, 8, dtype=torch.bool))
    with pytest.raises(ContextParallelError, match=r"shape \(4, 4\), and should end in \(4, 8\)"):
        attend(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool))


def test_one_rank_is_torchs_attention() -> None:
    """On one rank nothing is sent: torch's kernel runs."""

    @spmd(world_size=1, timeout=60)
    def run() -> None:
        mesh = cp(1)
        q = torch.randn(1, 2, 5, 4)
        right = sdpa(q, q, q, is_causal=True)
        assert torch.equal(attention(q, q, q, mesh, is_causal=True), right)
        assert not math.isnan(float(right.sum()))

    run()


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
@spmd(world_size=2, timeout=120)
def test_torchs_encoder_attends_over_all_pieces(method: Any) -> None:
    """``nn.TransformerEncoder`` with masks of the piece's length, causal and not: outputs, gradients, and in eval."""
    mesh = cp(2)
    for causal, batch_first in ((True, True), (False, False)):
        dim = 1 if batch_first else 0
        layer = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=batch_first)
        reference = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, {"layers.*.self_attn": ContextParallel(method=method)})
        x = torch.randn(2, 8, 16) if batch_first else torch.randn(8, 2, 16)
        own = split_sequence(x, mesh, dim)

        def run(each: Any, tokens: Tensor, causal: bool = causal, dim: int = dim) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[dim])
            out: Tensor = each(tokens, mask=mask if causal else None, is_causal=causal)
            return out

        right, out = run(reference, x), run(model, own)
        torch.testing.assert_close(join_sequence(out.detach(), mesh, dim), right.detach())
        right.square().sum().backward()
        out.square().sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None
            torch.distributed.all_reduce(ours.grad)
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            out = run(model.eval(), own)
        torch.testing.assert_close(join_sequence(out, mesh, dim), right.detach())


@spmd(world_size=2, timeout=60)
def test_what_torchs_attention_cannot_do_over_pieces() -> None:
    """Weights and masks for a piece are refused, each by its name."""
    attend = parallelize_module(
        nn.MultiheadAttention(8, 2, batch_first=True), cp(2), ContextParallel()
    )
    x = torch.randn(1, 4, 8)
    with pytest.raises(ContextParallelError, match="need_weights=True"):
        attend(x, x, x)
    with pytest.raises(ContextParallelError, match="attn_mask without is_causal"):
        attend(x, x, x, need_weights=False, attn_mask=torch.zeros(4, 4))
    with pytest.raises(ContextParallelError, match="key_padding_mask"):
        attend(x, x, x, need_weights=False, key_padding_mask=torch.zeros(1, 4))
