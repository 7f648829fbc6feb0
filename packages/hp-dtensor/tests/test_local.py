"""Leaving, moving and entering by hand: local_map, redistribute_local and to_local against the single device."""

from __future__ import annotations

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    from_torch,
    local_map,
    redistribute_local,
    to_local,
    to_torch,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch.distributed.tensor import DTensor as TorchDTensor

R = Replicate()


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid(tensor: torch.Tensor | None) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


@spmd(world_size=2)
def test_megatrons_pair_gives_the_single_devices_gradient() -> None:
    """F before a column cut and g after a row cut: right value and gradients, one collective each way."""
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(3, 4), torch.randn(6, 4), torch.randn(4, 6)
    ref = [t.clone().requires_grad_() for t in (x, w1, w2)]
    want = torch.relu(ref[0] @ ref[1].T) @ ref[2].T
    want.square().sum().backward()
    mine = x.clone().requires_grad_()
    a = w1.chunk(2, 0)[rank].clone().requires_grad_()
    b = w2.chunk(2, 1)[rank].clone().requires_grad_()
    with CommDebugMode() as comm:
        inner = redistribute_local(mine, mesh, [R], [R], grad_placements=[Partial()])
        out = redistribute_local(torch.relu(inner @ a.T) @ b.T, mesh, [Partial()], [R])
    assert comm.get_total_counts() == 1
    torch.testing.assert_close(out, want.detach())
    with CommDebugMode() as comm:
        out.square().sum().backward()
    assert comm.get_total_counts() == 1
    torch.testing.assert_close(mine.grad, ref[0].grad)
    torch.testing.assert_close(a.grad, ref[1].grad.chunk(2, 0)[rank])
    torch.testing.assert_close(b.grad, ref[2].grad.chunk(2, 1)[rank])


@spmd(world_size=2)
def test_the_sequence_parallel_pair_gathers_and_scatters() -> None:
    """All-gather with a reduce-scattered gradient, and its opposite, on an uneven sequence."""
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    x = torch.randn(2, 5, 3)
    weights = [torch.randn(2, 5, 3) for _ in range(2)]
    mine = x.chunk(2, 1)[rank].clone().requires_grad_()
    whole = redistribute_local(
        mine, mesh, [Shard(1)], [R], shape=x.shape, grad_placements=[Partial()]
    )
    torch.testing.assert_close(whole, x)
    (whole * weights[rank]).sum().backward()
    torch.testing.assert_close(mine.grad, (weights[0] + weights[1]).chunk(2, 1)[rank])
    addend = weights[rank].clone().requires_grad_()
    part = redistribute_local(addend, mesh, [Partial()], [Shard(1)])
    torch.testing.assert_close(part, (weights[0] + weights[1]).chunk(2, 1)[rank])
    (part * x.chunk(2, 1)[rank]).sum().backward()
    torch.testing.assert_close(addend.grad, x)


@spmd(world_size=4)
def test_a_wide_wire_adds_without_losing_bits() -> None:
    """forward_dtype sums bfloat16 addends in single precision: 256+1+1+1 is 259, which rounds to 260."""
    mesh = init_device_mesh("cpu", (4,))
    addend = torch.tensor([256.0, 1, 1, 1]).bfloat16()[mesh.get_local_rank()].reshape(1)
    out = redistribute_local(addend, mesh, [Partial()], [R], forward_dtype=torch.float32)
    assert out.bfloat16().item() == 260
    d = DTensor.from_local(addend, mesh, [Partial()])
    assert d.redistribute(placements=[R], forward_dtype=torch.float32).to_local().item() == 259


@spmd(world_size=2)
def test_to_local_takes_torchs_tensors_too() -> None:
    """A base DTensor, as FSDP2 leaves behind, gives its piece and gets a gradient of its own layout."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.randn(2, 3)
    base = TorchDTensor.from_local(local, mesh, [R], run_check=False).requires_grad_()
    (to_local(base, grad_placements=[Partial()]) * (mesh.get_local_rank() + 1)).sum().backward()
    assert base.grad.placements == (R,)
    torch.testing.assert_close(base.grad.to_local(), torch.full((2, 3), 3.0))
    plain = torch.ones(2)
    assert to_local(plain) is plain


@spmd(world_size=2)
def test_local_map_keeps_the_true_size_of_uneven_inputs() -> None:
    """A function over uneven pieces gives a result of the input's shape, with right gradients."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(5.0)
    double = local_map(
        lambda t: t * 2, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=mesh
    )
    d = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    out = double(d)
    assert out.shape == (5,)
    torch.testing.assert_close(_whole(out), 2 * x)
    _whole(out.sum()).backward()
    torch.testing.assert_close(_whole(d.grad), torch.full((5,), 2.0))


@spmd(world_size=2)
def test_local_map_checks_what_comes_in_and_goes_out() -> None:
    """Layouts and counts that differ from the declaration are errors that name the argument."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

    def pair(a: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
        return a * scale, scale

    strict = local_map(pair, out_placements=([R], None), in_placements=([R], None))
    with pytest.raises(
        LayoutError, match=r"argument 0 is laid out as .*does not match in_placements"
    ):
        strict(d, 2.0)
    moved = local_map(pair, ([R], None), ([R], None), redistribute_inputs=True)
    out, scale = moved(d, 2.0)
    assert (out.placements, scale) == ((R,), 2.0)
    with pytest.raises(LayoutError, match="1 entries for 2 arguments"):
        local_map(pair, ([R], None), ([R],))(d, 2.0)
    with pytest.raises(LayoutError, match=r"returned 2 values.* 1 entries"):
        local_map(pair, ([R],), None)(d, 2.0)

    @local_map(out_placements=[Partial()], in_placements=([Shard(0)],))
    def total(t: torch.Tensor) -> torch.Tensor:
        return t.sum()

    assert _whole(total(d)).item() == 16


@spmd(world_size=2)
def test_gradients_of_two_exits_add_up() -> None:
    """The first exit brings an expanded gradient, which the second is added to in place."""
    mesh = init_device_mesh("cpu", (2,))
    leaf = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)]).requires_grad_()
    leaf.to_local().sum().backward()
    _whole(leaf).sum().backward()
    torch.testing.assert_close(_whole(leaf.grad), torch.full((3, 2), 2.0))


@spmd(world_size=4)
def test_local_map_asks_the_ranks_where_pieces_may_differ_in_size() -> None:
    """A product with rows cut unevenly, one rank empty; a slice that only some ranks shorten; even inputs ask nobody."""
    mesh = init_device_mesh("cpu", (4,))
    x, w = torch.randn(9, 4), torch.randn(4, 8)
    torch.distributed.broadcast(x, 0)
    torch.distributed.broadcast(w, 0)
    product = local_map(torch.mm, out_placements=[Shard(0)])
    even = distribute_tensor(x[:8], mesh, [Shard(0)], src_data_rank=None)
    dw = distribute_tensor(w, mesh, [R], src_data_rank=None)
    with CommDebugMode() as comm:
        out = product(even, dw)
    assert comm.get_total_counts() == 0
    assert out.shape == (8, 8)
    out = product(distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None), dw)
    assert out.shape == (9, 8)
    torch.testing.assert_close(_whole(out), x @ w)
    head = local_map(lambda t: t[:2], out_placements=[Shard(0)])
    out = head(distribute_tensor(torch.arange(9.0), mesh, [Shard(0)], src_data_rank=None))
    assert _whole(out).tolist() == [0, 1, 3, 4, 6, 7]
    mine = local_map(lambda t: t.chunk(4)[mesh.get_local_rank()], out_placements=[Shard(0)])
    assert _whole(mine(distribute_tensor(torch.arange(7.0), mesh, [R]))).tolist() == list(range(7))


@spmd(world_size=2)
def test_torchs_tensors_and_ours_turn_into_each_other_without_a_copy() -> None:
    """The memory is shared both ways, the classes are the ones asked for, and gradients flow back."""
    mesh = init_device_mesh("cpu", (2,))
    ours = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).requires_grad_()
    theirs = to_torch(ours)
    assert type(theirs) is TorchDTensor
    assert type(theirs.device_mesh) is torch.distributed.device_mesh.DeviceMesh
    assert theirs.shape == (5,)
    assert theirs.to_local().data_ptr() == ours.to_local().data_ptr()
    (theirs * theirs).sum().full_tensor().backward()
    torch.testing.assert_close(_whole(ours.grad), 2 * torch.arange(5.0))
    back = from_torch(theirs)
    assert type(back) is DTensor
    assert back.device_mesh == mesh
    assert back.to_local().data_ptr() == ours.to_local().data_ptr()
    assert from_torch(ours) is ours
    assert to_torch(theirs) is theirs
