"""Shards of a vocabulary, in one process: value, dtype, shape and gradient of `F.cross_entropy`.

The ranks are a loop here, so that hypothesis can try many cuts; real ranks are in
test_vocab_parallel.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_loss import TargetError, TargetRangeError, vocab_parallel_cross_entropy
from hp_loss._autograd import token_loss
from hp_loss.cross_entropy import TokenLosses, class_dim_of, describe_target, reduce_losses
from hp_loss.kernel import TorchKernel
from hp_loss.options import LossOptions, Reduction
from hp_loss.statistics import WIDTH, merge
from hp_loss.vocabulary import Vocabulary
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}


def _sharded(
    logits: Tensor,
    target: Tensor,
    edges: Sequence[int],
    options: LossOptions,
    weight: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """The loss on each rank, and the shard of logits whose gradient it gives, for 2-D logits cut at *edges*."""
    kernel, dtype = TorchKernel(), torch.promote_types(logits.dtype, torch.float32)
    shards, targets, sent = [], [], []
    for start, stop in itertools.pairwise(edges):
        part = Vocabulary(logits.shape[1], ((start, stop),) if stop > start else ())
        own = target[:, start:stop] if target.is_floating_point() else target
        described = describe_target(own, part, weight, options, 1, dtype)
        shard = logits[:, start:stop].detach().clone().requires_grad_()
        row = kernel.statistics(
            shard.detach(), described.column, described.mass, described.background
        )
        if described.weight is not None:
            row = torch.cat([row, described.weight[:, None]], 1)
        shards.append(shard)
        targets.append(described)
        sent.append(row)
    merged = merge(torch.stack(sent))
    out = []
    for shard, described in zip(shards, targets, strict=True):
        loss, logsumexp = token_loss(
            shard, described.column, described.mass, described.background, merged, kernel
        )
        if described.valid is not None:
            loss = torch.where(described.valid, loss, 0.0)
        token_weight = None if described.weight is None else merged[:, WIDTH]
        total, _ = reduce_losses(
            TokenLosses(loss, logsumexp, token_weight, described.valid), options
        )
        out.append((total.to(logits.dtype), shard))
    return out


def _compare(
    logits: Tensor,
    target: Tensor,
    edges: Sequence[int],
    options: LossOptions,
    weight: Tensor | None = None,
) -> None:
    """Each rank's loss, and the gradients put together, equal those of one device."""
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(
        whole,
        target,
        weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    seed = torch.linspace(0.5, 1.5, expected.numel(), dtype=expected.dtype).view(expected.shape)
    expected.backward(seed)
    ranks = _sharded(logits, target, edges, options, weight)
    for loss, _ in ranks:
        torch.testing.assert_close(
            loss, expected.detach(), **TOLERANCE[logits.dtype], equal_nan=True
        )
        assert torch.equal(loss.nan_to_num(), ranks[0][0].nan_to_num())
        loss.backward(seed)
    gradient = torch.cat([shard.grad for _, shard in ranks if shard.grad is not None], 1)
    torch.testing.assert_close(gradient, whole.grad, **TOLERANCE[logits.dtype], equal_nan=True)


REDUCTIONS: tuple[Reduction, ...] = ("none", "sum", "mean")
EDGES = {
    "even": (0, 4, 8),
    "uneven": (0, 3, 6, 8),
    "empty": (0, 4, 8, 8),
    "one each": tuple(range(9)),
}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, 5])
@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
def test_class_indices_give_what_one_device_gives(
    dtype: torch.dtype,
    reduction: Reduction,
    smoothing: float,
    weighted: bool,
    ignore_index: int,
    edges: tuple[int, ...],
) -> None:
    """The product of the options, over cuts of eight classes: loss on each rank and gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, 8, generator=generator) * 4).to(dtype)
    target = torch.tensor([0, 7, ignore_index, 3, 4, 4])
    weight = torch.rand(8, generator=generator).to(dtype) if weighted else None
    _compare(logits, target, edges, LossOptions(ignore_index, reduction, smoothing), weight)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
def test_class_probabilities_give_what_one_device_gives(
    dtype: torch.dtype,
    reduction: Reduction,
    smoothing: float,
    weighted: bool,
    edges: tuple[int, ...],
) -> None:
    """Soft targets, with smoothing and class weights."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(6, 8, generator=generator) * 4).to(dtype)
    target = torch.rand(6, 8, generator=generator).softmax(1).to(dtype)
    weight = torch.rand(8, generator=generator).to(dtype) if weighted else None
    _compare(logits, target, edges, LossOptions(-100, reduction, smoothing), weight)


@given(st.data())
def test_adversarial_logits_give_what_one_device_gives(data: st.DataObject) -> None:
    """Maxima ten thousand apart, infinities, everything ignored, one valid token: NaN and infinity come out alike."""
    classes, tokens = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    logits = torch.randn(tokens, classes, generator=generator)
    logits += data.draw(st.sampled_from([0.0, -1e4, 1e4, 1e30]))
    inner = sorted(data.draw(st.lists(st.integers(0, classes), max_size=4)))
    edges = [0, *inner, classes]
    if data.draw(st.booleans()):
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            logits[:, start:stop] += 1e4 * number
    for _ in range(data.draw(st.integers(0, 3))):
        row, column = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, classes - 1))
        logits[row, column] = data.draw(st.sampled_from([-math.inf, math.inf, 1e30, -1e30]))
    if data.draw(st.booleans()):
        logits[0, : data.draw(st.integers(0, classes))] = -math.inf
    target = torch.tensor(
        data.draw(st.lists(st.integers(0, classes - 1), min_size=tokens, max_size=tokens))
    )
    ignored = data.draw(st.integers(0, tokens))
    target[:ignored] = -100
    options = LossOptions(
        -100, data.draw(st.sampled_from(REDUCTIONS)), data.draw(st.sampled_from([0.0, 0.1]))
    )
    _compare_adversarial(logits, target, edges, options)


def _compare_adversarial(
    logits: Tensor, target: Tensor, edges: Sequence[int], options: LossOptions
) -> None:
    """As `_compare`, in 64 bits on one device, since 32 bits round there as well."""
    whole = logits.double().requires_grad_()
    expected = F.cross_entropy(
        whole, target, reduction=options.reduction, label_smoothing=options.label_smoothing
    )
    expected.sum().backward()
    assert whole.grad is not None
    ranks = _sharded(logits, target, edges, options)
    for loss, _ in ranks:
        torch.testing.assert_close(
            loss.double(), expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True
        )
        loss.sum().backward()
    gradient = torch.cat([shard.grad for _, shard in ranks if shard.grad is not None], 1).double()
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "target_shape", "class_dim"),
    [
        ((5,), (), 0),
        ((3, 5), (3,), 1),
        ((3, 5, 4), (3, 4), 1),
        ((3, 4, 5), (3, 4), 2),
        ((2, 5, 3, 4), (2, 3, 4), 1),
        ((2, 3, 4, 5), (2, 3, 4), 3),
        ((3, 5, 5), (3, 5), 1),
    ],
)
def test_the_class_dimension_is_torchs_unless_only_the_last_fits(
    shape: tuple[int, ...], target_shape: tuple[int, ...], class_dim: int
) -> None:
    """Dimension 1 as in torch, also where both fit; the last where only that fits; and the loss is that of it."""
    assert class_dim_of(shape, target_shape, None) == class_dim
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    target = torch.randint(0, 5, target_shape, generator=torch.Generator().manual_seed(1))
    got = vocab_parallel_cross_entropy(logits, target, reduction="none")
    moved = logits if len(shape) == 1 else logits.movedim(class_dim, 1)
    torch.testing.assert_close(got, F.cross_entropy(moved, target, reduction="none"))
    assert got.shape == target_shape


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 5, 0)])
def test_no_tokens_give_what_one_device_gives(
    reduction: Reduction, shape: tuple[int, ...]
) -> None:
    """Without tokens a mean is NaN and a sum is zero."""
    logits, target = torch.zeros(shape), torch.zeros(shape[:1] + shape[2:], dtype=torch.int64)
    got = vocab_parallel_cross_entropy(logits, target, reduction=reduction)
    expected = F.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_labels_of_any_integer_dtype_are_taken(dtype: torch.dtype) -> None:
    """Labels come from tokenisers in all widths."""
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1, 4, 0])
    got = vocab_parallel_cross_entropy(logits, target.to(dtype))
    torch.testing.assert_close(got, F.cross_entropy(logits, target))


@pytest.mark.parametrize("bad", [5, -1, -101, 2**40])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_label_that_is_no_class_is_an_index_error(bad: int, reduction: Reduction) -> None:
    """It is an `IndexError`, as on one device, and tells how many there are and what is legal."""
    with pytest.raises(TargetRangeError) as caught:
        vocab_parallel_cross_entropy(
            torch.zeros(3, 5), torch.tensor([0, bad, bad]), reduction=reduction
        )
    assert isinstance(caught.value, IndexError)
    assert (caught.value.count, caught.value.classes) == (2, 5)
    assert str(caught.value) == (
        "2 of the targets are out of bounds: a class index is at least 0 and less than 5, or equal to ignore_index "
        "(-100); check the labels' padding, and that vocab_size counts all classes"
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_target_of_another_shape_is_refused(dtype: torch.dtype) -> None:
    """The error carries both shapes and says which would do."""
    with pytest.raises(TargetError) as caught:
        vocab_parallel_cross_entropy(torch.zeros(3, 5), torch.zeros(4, dtype=dtype))
    assert (caught.value.shape, caught.value.logits_shape) == ((4,), (3, 5))
    assert "targets of shape (4,) don't fit logits of shape (3, 5)" in str(caught.value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_z_loss_adds_the_squared_logsumexp_of_valid_tokens(
    reduction: Reduction, weighted: bool
) -> None:
    """Value and gradient equal those of the expression in torch; its mean is over valid tokens, without weights."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    target, weight = torch.tensor([1, -100, 0, 4]), torch.rand(5) if weighted else None
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = vocab_parallel_cross_entropy(
        ours, target, weight=weight, reduction=reduction, z_loss=0.1
    )
    penalty = 0.1 * theirs.logsumexp(1).square() * (target != -100)
    reduced = {"none": penalty, "sum": penalty.sum(), "mean": penalty.sum() / 3}[reduction]
    expected = F.cross_entropy(theirs, target, weight, reduction=reduction) + reduced
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_probabilities_get_their_gradient() -> None:
    """Soft targets that require grad get the gradient they get on one device."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    soft = torch.rand(4, 5).softmax(1)
    ours, theirs = soft.clone().requires_grad_(), soft.clone().requires_grad_()
    vocab_parallel_cross_entropy(logits, ours, label_smoothing=0.1).backward()
    F.cross_entropy(logits, theirs, label_smoothing=0.1).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_mean_of_many_16_bit_losses_counts_every_token() -> None:
    """A count of 4097 tokens isn't rounded to 4096, as it would be in bfloat16."""
    logits = torch.zeros(4097, 2, dtype=torch.bfloat16)
    logits[:, 0] = 3.0
    target = torch.zeros(4097, dtype=torch.int64)
    losses = F.cross_entropy(logits.float(), target, reduction="sum")
    got = vocab_parallel_cross_entropy(logits, target)
    assert got == (losses / 4097).to(torch.bfloat16)
    assert got.dtype == torch.bfloat16


def test_in_place_backward_gives_the_same_gradient_in_the_logits_memory() -> None:
    """With inplace_backward the gradient's memory is the logits'."""
    start = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1, 0, 4, 2])
    plain = start.clone().requires_grad_()
    vocab_parallel_cross_entropy(plain, target).backward()
    leaf = start.clone().requires_grad_()
    logits = leaf * 1.0
    logits.retain_grad()
    vocab_parallel_cross_entropy(logits, target, inplace_backward=True).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)
    assert logits.grad is not None
    torch.testing.assert_close(logits.detach(), plain.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_the_dtype_is_that_of_one_device(dtype: torch.dtype) -> None:
    """A loss under autocast has the dtype that torch gives it there."""
    logits, target = torch.randn(4, 5).to(dtype), torch.tensor([1, 0, 4, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(logits, target)
        got = vocab_parallel_cross_entropy(logits, target)
    assert got.dtype == expected.dtype


def test_a_second_derivative_is_refused() -> None:
    """The backward is written for first derivatives and says so, rather than giving a wrong second one."""
    logits = torch.randn(2, 5, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 2]))
    with pytest.raises(
        RuntimeError, match="no second derivative, and this backward runs with create_graph=True"
    ):
        torch.autograd.grad(loss, logits, create_graph=True)
