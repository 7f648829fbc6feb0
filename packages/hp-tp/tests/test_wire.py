"""Distributed tensors between the stages of a pipeline."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    BoundaryError,
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    pack_meta,
    parallelize_module,
    unpack,
)
from torch import nn


def block() -> nn.Sequential:
    """A norm and two layers."""
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))


PLAN = {
    "0": SequenceParallel(use_local_output=False),
    "1": ColwiseParallel(),
    "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


@spmd(world_size=4, timeout=120)
def test_two_stages_train_like_one_device() -> None:
    """Pieces of the sequence on the wire, one uneven, both ways; gradients and the loss are those of one device."""
    pytest.importorskip("numpy", reason="torch exchanges objects through it")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    tp, stage = mesh["tp"], mesh["pp"].get_local_rank()
    other = dist.get_rank() + (2 if stage == 0 else -2)
    whole = nn.Sequential(block(), block())
    own: Any = copy.deepcopy(whole[stage])
    parallelize_module(own, tp, PLAN)
    x = torch.randn(2, 5, 8)
    expected = whole(x).square().mean()
    expected.backward()
    if stage == 0:
        out = own(distribute_tensor(x, tp, [Shard(1)]))
        dist.send_object_list([pickle.dumps(pack_meta(out))], other)
        dist.send(out.to_local().contiguous(), other)
        back = torch.empty_like(out.to_local())
        dist.recv(back, other)
        out.to_local().backward(back)
    else:
        received: list[Any] = [None]
        dist.recv_object_list(received, other)
        meta = pickle.loads(received[0])
        buffer = torch.empty(meta.local_shape(tp))
        dist.recv(buffer, other)
        given: Any = unpack(meta, buffer, tp)
        assert given.is_leaf
        assert given.placements == (Shard(1),)
        assert given.shape == x.shape
        loss = own(given).square().mean().full_tensor()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        dist.send(given.grad.to_local().contiguous(), other)
    for parameter, right in zip(own.parameters(), whole[stage].parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), right.grad, rtol=1e-4, atol=1e-6)


@spmd(world_size=2, timeout=120)
def test_a_piece_that_does_not_fit() -> None:
    """What was received is checked against what was packed."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    meta = pack_meta(distribute_tensor(torch.randn(3, 4), mesh, [Shard(0)]))
    assert meta.local_shape(mesh) == ((2, 4) if mesh.get_local_rank() == 0 else (1, 4))
    with pytest.raises(BoundaryError, match=r"received \(3, 4\) of torch.float32, and this rank"):
        unpack(meta, torch.zeros(3, 4), mesh)
    plain = pack_meta(torch.ones(2))
    assert torch.equal(unpack(plain, torch.zeros(2), mesh), torch.zeros(2))


@spmd(world_size=2, timeout=120)
def test_a_stage_may_hand_out_replicas() -> None:
    """The layout is that of the output, whatever it is."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    style = PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
    )
    out = parallelize_module(nn.Identity(), mesh, style)(torch.ones(2, 4))
    assert pack_meta(out).placements == (Shard(1),)
