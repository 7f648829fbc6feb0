"""Under a compiler: one graph, forward and backward, and eager's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import Shard, distribute_tensor
from hp_loss import (
    linear_cross_entropy,
    loss_parallel,
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

pytestmark = [
    pytest.mark.slow,
    # What the compiler of torch 2.12 itself does with autograd functions.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of what must be a DTensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


def _compile(program: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(program, fullgraph=True, backend="aot_eager")


def _case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, labels, and one device's loss and gradient."""
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, -100, 5, 6])
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf, labels, label_smoothing=0.1)
    loss.backward()
    assert leaf.grad is not None
    return logits, labels, loss.detach(), leaf.grad


def _part(whole: Tensor, dim: int) -> Tensor:
    return whole.chunk(2, dim)[dist.get_rank()]


@spmd(world_size=2, timeout=240)
def test_a_plain_shard_compiles() -> None:
    """Function and group."""
    logits, labels, expected, grad = _case()
    group = dist.group.WORLD
    compiled = _compile(
        lambda x, y: vocab_parallel_cross_entropy(
            x, y, group=group, vocab_size=7, label_smoothing=0.1
        )
    )
    shard = _part(logits, 1).clone().requires_grad_()
    loss = compiled(shard, labels)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(shard.grad, _part(grad, 1))


@spmd(world_size=2, timeout=240)
def test_a_bad_label_fails_in_a_graph_too() -> None:
    """The assertion on the device is in the graph."""
    logits, _, _, _ = _case()
    group = dist.group.WORLD
    compiled = _compile(lambda x, y: vocab_parallel_cross_entropy(x, y, group=group, vocab_size=7))
    with pytest.raises(RuntimeError, match="some of the targets are out of bounds"):
        compiled(_part(logits, 1), torch.tensor([0, 1, 2, 3, 4, 7]))


@spmd(world_size=2, timeout=240)
def test_distributed_logits_compile() -> None:
    """Function and DTensor."""
    logits, labels, expected, grad = _case()
    mesh = init_device_mesh("cpu", (2,))
    compiled = _compile(lambda x, y: vocab_parallel_cross_entropy(x, y, label_smoothing=0.1))
    sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    loss = compiled(sharded, labels)
    loss.backward()
    torch.testing.assert_close(_full(loss).detach(), expected)
    torch.testing.assert_close(_full(sharded.grad), grad)


@spmd(world_size=2, timeout=240)
def test_the_context_compiles_around_and_inside_a_graph() -> None:
    """`loss_parallel` entered outside of the compiled function, and in it."""
    logits, labels, expected, grad = _case()
    mesh = init_device_mesh("cpu", (2,))

    def bare(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, label_smoothing=0.1)

    def with_context(x: Tensor, y: Tensor) -> Tensor:
        with loss_parallel():
            return F.cross_entropy(x, y, label_smoothing=0.1)

    for program in (bare, with_context):
        sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        compiled = _compile(program)
        with loss_parallel():
            loss = compiled(sharded, labels)
        loss.backward()
        torch.testing.assert_close(_full(loss).detach(), expected)
        torch.testing.assert_close(_full(sharded.grad), grad)


@spmd(world_size=2, timeout=240)
def test_a_chunked_head_compiles() -> None:
    """`linear_cross_entropy` with its gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 4, generator=generator), torch.randn(8, 4, generator=generator)
    labels, group = torch.tensor([0, 1, 2, -100, 5, 7]), dist.group.WORLD
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = F.cross_entropy(F.linear(*leaves), labels)
    expected.backward()
    states, head = hidden.clone().requires_grad_(), _part(weight, 0).clone().requires_grad_()
    compiled = _compile(lambda x, w, y: linear_cross_entropy(x, w, y, group=group, chunk_size=4))
    loss = compiled(states, head, labels)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(states.grad, leaves[0].grad)
    assert leaves[1].grad is not None
    torch.testing.assert_close(head.grad, _part(leaves[1].grad, 0))


@spmd(world_size=2, timeout=240)
def test_the_entropy_compiles() -> None:
    """With its gradient."""
    logits, _, _, _ = _case()
    group = dist.group.WORLD
    whole = logits.clone().requires_grad_()
    expected = torch.special.entr(whole.softmax(1)).sum(1)
    expected.sum().backward()
    assert whole.grad is not None
    shard = _part(logits, 1).clone().requires_grad_()
    got = _compile(lambda x: vocab_parallel_entropy(x, group=group, vocab_size=7))(shard)
    got.sum().backward()
    torch.testing.assert_close(got.detach(), expected.detach())
    torch.testing.assert_close(shard.grad, _part(whole.grad, 1))
