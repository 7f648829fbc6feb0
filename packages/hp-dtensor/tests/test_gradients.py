"""Gradients of leaves: settled at once, or held back over several backward passes and reduced once."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    accumulate_gradients,
    distribute_tensor,
    to_local,
)
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor, nn

R, P = Replicate(), Partial()
MICRO_BATCHES = 3


def _data() -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(4, 5, generator=generator)
    return weight, [torch.randn(6, 4, generator=generator) for _ in range(MICRO_BATCHES)]


def _expected(weight: Tensor, batches: list[Tensor]) -> Tensor:
    leaf = weight.clone().requires_grad_()
    for batch in batches:
        (batch @ leaf).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def _grad(parameter: Tensor) -> DTensor:
    """The gradient that *parameter* keeps."""
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad


def _step(parameter: Tensor, batch: Tensor, mesh: DeviceMesh) -> None:
    """A backward whose weight gradient is an addend on each rank."""
    rows = distribute_tensor(batch, mesh, [Shard(0)] + [R] * (mesh.ndim - 1), src_data_rank=None)
    (rows @ parameter).square().sum().backward()


@spmd(world_size=2)
def test_one_reduction_for_all_micro_batches() -> None:
    """A replicated weight costs one all-reduce for three backward passes, and its gradient is the single device's."""
    mesh = init_device_mesh("cpu", (2,))
    weight, batches = _data()
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [R]))
    with CommDebugMode() as mode:
        with accumulate_gradients([parameter]):
            for batch in batches:
                _step(parameter, batch, mesh)
                assert _grad(parameter).placements == (P,)
        assert _grad(parameter).placements == (R,)
    assert mode.get_total_counts() == 1
    torch.testing.assert_close(_grad(parameter).to_local(), _expected(weight, batches))


@spmd(world_size=4)
@pytest.mark.parametrize("placement", [R, Shard(0), Shard(1)])
def test_every_layout_of_a_parameter(placement: Replicate | Shard) -> None:
    """Held back or not, on a 2x2 mesh the gradient ends in the parameter's layout with the same values."""
    mesh = init_device_mesh("cpu", (2, 2))
    weight, batches = _data()
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [R, placement]))
    with accumulate_gradients(nn.ParameterList([parameter])):
        for batch in batches:
            _step(parameter, batch, mesh)
    assert _grad(parameter).placements == (R, placement)
    torch.testing.assert_close(_grad(parameter).full_tensor(), _expected(weight, batches))


@spmd(world_size=2)
def test_a_piece_that_leaves_with_addends() -> None:
    """What goes out by to_local(grad_placements=[Partial()]) is held back as well, in nested contexts too."""
    mesh = init_device_mesh("cpu", (2,))
    weight, batches = _data()
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [R]))
    with CommDebugMode() as mode, accumulate_gradients([parameter]):
        with accumulate_gradients([parameter]):
            for batch in batches:
                rows = batch.chunk(2)[mesh.get_local_rank()]
                (rows @ to_local(parameter, grad_placements=[P])).square().sum().backward()
        assert _grad(parameter).placements == (P,)
    assert mode.get_total_counts() == 1
    torch.testing.assert_close(_grad(parameter).to_local(), _expected(weight, batches))


@spmd(world_size=2)
def test_a_gradient_from_before_is_added_to() -> None:
    """A gradient that was there when the context began is part of the sum."""
    mesh = init_device_mesh("cpu", (2,))
    weight, batches = _data()
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [R]))
    _step(parameter, batches[0], mesh)
    with accumulate_gradients([parameter]):
        for batch in batches[1:]:
            _step(parameter, batch, mesh)
    torch.testing.assert_close(_grad(parameter).to_local(), _expected(weight, batches))


@spmd(world_size=2)
def test_an_exception_communicates_nothing_and_loses_nothing() -> None:
    """After an exception the gradient holds addends and says so, and the next backward settles again."""
    mesh = init_device_mesh("cpu", (2,))
    weight, batches = _data()
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [R]))

    def fail() -> None:
        with accumulate_gradients([parameter]):
            _step(parameter, batches[0], mesh)
            raise KeyError

    with CommDebugMode() as mode, pytest.raises(KeyError):
        fail()
    assert mode.get_total_counts() == 0
    assert _grad(parameter).placements == (P,)
    torch.testing.assert_close(_grad(parameter).full_tensor(), _expected(weight, batches[:1]))
    parameter.grad = None
    _step(parameter, batches[0], mesh)
    assert _grad(parameter).placements == (R,)


@spmd(world_size=2)
def test_plain_parameters_and_a_gradient_set_to_none() -> None:
    """Plain parameters are left alone, and one whose gradient was dropped inside has none after."""
    mesh = init_device_mesh("cpu", (2,))
    weight, batches = _data()
    plain = nn.Parameter(weight.clone())
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [R]))
    with accumulate_gradients([plain, parameter]):
        _step(parameter, batches[0], mesh)
        (batches[0] @ plain).square().sum().backward()
        parameter.grad = None
    assert parameter.grad is None
    assert plain.grad is not None
    torch.testing.assert_close(plain.grad, _expected(weight, batches[:1]))


@spmd(world_size=2)
def test_autograd_grad_of_a_leaf_is_settled() -> None:
    """torch.autograd.grad gives a leaf's gradient in the leaf's layout, whatever the backward left."""
    mesh = init_device_mesh("cpu", (2,))
    weight, batches = _data()
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [R]))
    rows = distribute_tensor(batches[0], mesh, [Shard(0)], src_data_rank=None)
    (grad,) = torch.autograd.grad((rows @ parameter).square().sum(), [parameter])
    assert isinstance(grad, DTensor)
    assert grad.placements == (R,)
    torch.testing.assert_close(grad.to_local(), _expected(weight, batches[:1]))


@spmd(world_size=2)
def test_copies_look_after_their_own_gradients() -> None:
    """A deep copy and an unpickled parameter settle by hooks of their own; holding one back leaves the others."""
    mesh = init_device_mesh("cpu", (2,))
    weight, batches = _data()
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [R]))
    others = [copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))]
    with accumulate_gradients([parameter]):
        for other in others:
            _step(other, batches[0], mesh)
            assert _grad(other).placements == (R,)
            torch.testing.assert_close(_grad(other).to_local(), _expected(weight, batches[:1]))


@spmd(world_size=2)
def test_zeros_that_torch_makes_up_in_a_gradient_of_a_gradient() -> None:
    """The derivative of a sign is a plain zero without memory, on which every rank agrees."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def penalty(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad((x * x.abs()).sum().abs(), x, create_graph=True)
        return (grad * grad).sum()

    plain = x.clone().requires_grad_()
    penalty(plain).backward()
    assert plain.grad is not None
    for placement in (R, P, Shard(0), Shard(1)):
        leaf = distribute_tensor(x, mesh, [placement]).requires_grad_()
        penalty(leaf).backward()
        torch.testing.assert_close(_grad(leaf).full_tensor(), plain.grad)
