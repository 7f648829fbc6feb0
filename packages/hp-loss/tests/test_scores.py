"""Log-probabilities and entropy from shards equal those of the whole logits, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_loss import (
    LossLayoutError,
    TargetError,
    TargetRangeError,
    vocab_parallel_entropy,
    vocab_parallel_log_probs,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of what must be a DTensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


def _logits(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3


def _entropy(logits: Tensor) -> Tensor:
    """By definition; a probability of zero adds nothing."""
    return torch.special.entr(logits.double().softmax(-1)).sum(-1)


def _entropy_grad(logits: Tensor) -> Tensor:
    """By autograd, in 64 bits, of finite logits."""
    leaf = logits.double().requires_grad_()
    log_p = leaf.log_softmax(-1)
    (-(log_p.exp() * log_p).sum(-1) * torch.arange(1.0, leaf.shape[0] + 1)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@given(st.integers(1, 9), st.sampled_from([1.0, 30.0, 1e4]), st.integers(0, 2**16), st.booleans())
def test_the_entropy_of_adversarial_logits(
    classes: int, spread: float, seed: int, masked: bool
) -> None:
    """Peaked, flat and masked distributions: no NaN, and the definition's value."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, classes, generator=generator) * spread
    if masked:
        logits[:, 1:] = torch.where(
            torch.rand(3, classes - 1, generator=generator) < 0.5, -math.inf, logits[:, 1:]
        )
    got = vocab_parallel_entropy(logits)
    torch.testing.assert_close(got.double(), _entropy(logits), rtol=1e-5, atol=1e-5)


@spmd(world_size=4)
def test_the_entropy_of_shards() -> None:
    """Plain and distributed, even, uneven and empty shards, maxima ten thousand apart: value and gradient."""
    mesh, pair = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for classes in (8, 7, 3):
        logits = _logits(6, classes)
        logits[0, 0] += 1e4
        logits[1, -1] -= 1e4
        for on, placements in (
            (mesh, [Shard(1)]),
            (pair, [Shard(0), Shard(1)]),
            (pair, [Shard(1), Shard(1)]),
        ):
            sharded = distribute_tensor(logits, on, placements).requires_grad_()
            entropy = vocab_parallel_entropy(sharded)
            assert isinstance(entropy, DTensor)
            torch.testing.assert_close(
                _full(entropy).detach().double(), _entropy(logits), rtol=1e-5, atol=1e-5
            )
            (
                entropy * distribute_tensor(torch.arange(1.0, 7.0), on, entropy.placements)
            ).sum().backward()
            assert sharded.grad is not None
            torch.testing.assert_close(
                _full(sharded.grad).double(), _entropy_grad(logits), rtol=1e-4, atol=1e-5
            )
        step = -(-classes // 4)
        start = min(dist.get_rank() * step, classes)
        shard = logits[:, start : start + step].clone().requires_grad_()
        plain = vocab_parallel_entropy(shard, group=dist.group.WORLD, vocab_size=classes)
        torch.testing.assert_close(plain.detach().double(), _entropy(logits), rtol=1e-5, atol=1e-5)


@spmd(world_size=4)
def test_log_probs_of_shards() -> None:
    """Per token, whole on every rank; ignored tokens give zero; the gradient is that of one device."""
    mesh = init_device_mesh("cpu", (2, 2))
    logits, labels = _logits(2, 3, 7), torch.tensor([[0, 6, -100], [3, 3, 5]])
    whole = logits.clone().requires_grad_()
    expected = -F.cross_entropy(whole.movedim(-1, 1), labels, reduction="none")
    expected.sum().backward()
    for target in (labels, distribute_tensor(labels, mesh, [Shard(0), Replicate()])):
        sharded = distribute_tensor(logits, mesh, [Shard(0), Shard(2)]).requires_grad_()
        got = vocab_parallel_log_probs(sharded, target)
        assert isinstance(got, DTensor)
        torch.testing.assert_close(_full(got).detach(), expected.detach())
        got.sum().backward()
        assert sharded.grad is not None
        torch.testing.assert_close(_full(sharded.grad), whole.grad)


def test_log_probs_of_16_bit_logits_are_32_bit() -> None:
    """A ratio of policies needs more than 8 bits."""
    logits = _logits(3, 5).to(torch.bfloat16)
    got = vocab_parallel_log_probs(logits, torch.tensor([0, 1, 4]))
    expected = logits.float().log_softmax(1)[torch.arange(3), torch.tensor([0, 1, 4])]
    torch.testing.assert_close(got, expected)
    assert vocab_parallel_entropy(logits).dtype == torch.float32


def test_a_one_dimensional_vector_of_logits_is_one_token() -> None:
    """Without token dimensions the result has none."""
    logits = _logits(5)
    assert vocab_parallel_entropy(logits).shape == ()
    torch.testing.assert_close(
        vocab_parallel_log_probs(logits, torch.tensor(2)), logits.log_softmax(0)[2]
    )


def test_what_does_not_fit_is_refused() -> None:
    """Labels of another shape, kind or range, and logits without classes."""
    logits = _logits(3, 5)
    with pytest.raises(TargetError, match="give one class index per token"):
        vocab_parallel_log_probs(logits, torch.tensor([0, 1]))
    with pytest.raises(TargetError, match="give one class index per token"):
        vocab_parallel_log_probs(logits, torch.zeros(3))
    with pytest.raises(TargetRangeError, match="1 of the targets are out of bounds"):
        vocab_parallel_log_probs(logits, torch.tensor([0, 1, 5]))
    with pytest.raises(LossLayoutError, match="logits have no dimension"):
        vocab_parallel_entropy(torch.tensor(1.0))


@spmd(world_size=2)
def test_partial_logits_are_refused() -> None:
    """Scores of addends are no scores."""
    partial = distribute_tensor(_logits(3, 5), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(LossLayoutError, match="are addends on at least one mesh axis"):
        vocab_parallel_entropy(partial)
    with pytest.raises(LossLayoutError, match="a DTensor knows its mesh"):
        vocab_parallel_entropy(partial, vocab_size=5)


def test_a_second_derivative_of_the_entropy_is_refused() -> None:
    """Rather than a wrong one."""
    logits = _logits(2, 5).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(vocab_parallel_entropy(logits).sum(), logits, create_graph=True)
