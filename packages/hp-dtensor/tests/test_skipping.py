"""Operators on local tensors inside SkipDTensorDispatch."""

from __future__ import annotations

import pytest
import torch
from hp_dtensor import DTensor, Replicate, Shard, SkipDTensorDispatch, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

R = Replicate()


@spmd(world_size=2)
def test_inside_operators_see_pieces_and_give_plain_tensors() -> None:
    """Out of place, in lists, in place into the tensor's own memory; outside all is as before."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(6.0)
    d = distribute_tensor(x, mesh, [Shard(0)])
    rank = mesh.get_local_rank()
    with SkipDTensorDispatch():
        total = d.sum()
        assert type(total) is torch.Tensor
        assert total == x.chunk(2)[rank].sum()
        assert type(torch.cat([d, d])) is torch.Tensor
        torch._foreach_mul_([d, d], 2.0)
        d.add_(1)
        assert d.shape == (6,)
    assert isinstance(d * 1, DTensor)
    assert torch.equal(d.full_tensor(), x * 4 + 1)


@spmd(world_size=2)
def test_exempt_names_are_dispatched_and_add_up() -> None:
    """By name or as a function; a context inside keeps what the outer one exempts, and gives it back."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with SkipDTensorDispatch(no_skip=["mul"]):
        assert isinstance(torch.mul(d, 2), DTensor)
        assert isinstance(d.mul(2), DTensor)
        with SkipDTensorDispatch(no_skip=[torch.add]) as inner:
            assert isinstance(torch.mul(d, 2), DTensor)
            assert isinstance(torch.add(d, 2), DTensor)
            assert type(torch.sub(d, 2)) is torch.Tensor
            with pytest.raises(RuntimeError, match="entered already"), inner:
                pass
        assert type(torch.add(d, 2)) is torch.Tensor
        with inner:
            assert isinstance(torch.add(d, 2), DTensor)


@spmd(world_size=2)
def test_an_optimizer_steps_on_pieces() -> None:
    """Step and zero_grad inside give the parameters of the single device."""
    mesh = init_device_mesh("cpu", (2,))
    w, g = torch.randn(5, 3), torch.randn(5, 3)
    torch.distributed.broadcast(w, 0)
    torch.distributed.broadcast(g, 0)
    p = nn.Parameter(distribute_tensor(w, mesh, [Shard(0)]))
    q = nn.Parameter(w.clone())
    optimizers = [torch.optim.AdamW([one], lr=0.1) for one in (p, q)]
    for _ in range(3):
        p.grad, q.grad = distribute_tensor(g, mesh, [Shard(0)]), g.clone()
        with SkipDTensorDispatch():
            optimizers[0].step()
            optimizers[0].zero_grad()
        optimizers[1].step()
    assert isinstance(p, DTensor)
    assert p.grad is None
    torch.testing.assert_close(p.full_tensor(), q.detach())


@spmd(world_size=2)
def test_gradients_flow_out_of_the_context() -> None:
    """A local computation that is recorded has the gradient that to_local() gives."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
    with SkipDTensorDispatch():
        (d * d).sum().backward()
    assert isinstance(d.grad, DTensor)
    assert torch.equal(d.grad.full_tensor(), 2 * torch.arange(4.0))
