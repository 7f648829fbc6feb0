"""Sharded equals whole: the rules by brute force, and the function on gloo ranks."""

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    find_rule,
    strict,
)
from hp_dtensor.testing import Sample, check_rule
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_npu import KernelArgumentError, rms_norm
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

OP = torch.ops.hp.rms_norm.default
BACKWARD = torch.ops.hp.rms_norm_backward.default
SHAPES = [
    ((4, 6, 8), 1),
    ((5, 3, 8), 1),
    ((4, 6, 8), 2),
    ((1, 7, 2), 1),
    ((0, 3, 4), 1),
    ((6,), 1),
]


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the rules ----------------------------------------------------------------------------------


def test_the_rule_of_the_forward_holds() -> None:
    """Every strategy, on every coordinate of axes of 2 to 4, also nested and strided, gives the whole's values."""
    samples = [
        Sample((draw(shape, 1), draw(shape[len(shape) - dims :], 2), 1e-6))
        for shape, dims in SHAPES
    ]
    assert check_rule(OP, samples, mesh_shapes=[(2, 2), (2, 3)]) > 20


def test_the_rule_of_the_backward_holds() -> None:
    """The same, with the weight's gradient a sum over the cut."""
    samples = []
    for shape, dims in SHAPES:
        x, weight = draw(shape, 1), draw(shape[len(shape) - dims :], 2)
        samples.append(Sample((draw(shape, 3), x, weight, OP(x, weight, 1e-6)[1])))
    assert check_rule(BACKWARD, samples, mesh_shapes=[(2, 2), (2, 3)]) > 20


def test_every_outer_dim_may_be_cut_and_no_normalised_one() -> None:
    """Of four dims with two normalised the first two are cut, each with results that keep the cut."""
    from hp_dtensor.rules import OpCall, TensorMeta

    x, weight = TensorMeta.of(torch.ones(2, 3, 4, 5)), TensorMeta.of(torch.ones(4, 5))
    rstd = TensorMeta.of(torch.ones(2, 3, 1, 1))
    rule = find_rule(OP)
    assert rule is not None
    found = rule.strategies(OpCall(OP, (x, weight, 1e-6), {}, (x, rstd), axis_size=2))
    assert [s.inputs for s in found] == [(Shard(0), Replicate()), (Shard(1), Replicate())]
    assert [s.outputs for s in found] == [(Shard(0), Shard(0)), (Shard(1), Shard(1))]


# --- on ranks -----------------------------------------------------------------------------------


def whole(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients on one device, by torch."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = F.rms_norm(x, weight.shape, weight, 1e-6)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    return y.detach(), dx, dweight


def full(tensor: Tensor | None) -> Tensor:
    """All of a distributed tensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


def check_layout(
    mesh: DeviceMesh, shape: tuple[int, ...], dims: int, placements: list[Placement]
) -> DTensor:
    """Compare output and gradients of an input laid out as *placements* with one device; return the output."""
    x, weight, dy = draw(shape, 1), draw(shape[len(shape) - dims :], 2), draw(shape, 3)
    everywhere: list[Placement] = [Replicate()] * mesh.ndim
    if any(placement.is_partial() for placement in placements):
        replica = distribute_tensor(x, mesh, everywhere)
        start = replica.requires_grad_()
        given: Tensor = replica.redistribute(placements=placements)
    else:
        start = given = distribute_tensor(x, mesh, placements).requires_grad_()
    scale = distribute_tensor(weight, mesh, everywhere).requires_grad_()
    y = rms_norm(given, scale)
    assert isinstance(y, DTensor)
    torch.autograd.backward(y, distribute_tensor(dy, mesh, y.placements))
    expected, dx, dweight = whole(x, weight, dy)
    torch.testing.assert_close(full(y), expected)
    torch.testing.assert_close(full(start.grad), dx)
    torch.testing.assert_close(full(scale.grad), dweight)
    return y


@spmd(world_size=4, timeout=200)
def test_one_axis_equals_one_device() -> None:
    """Batch, sequence and hidden cuts, replicas and addends, even, uneven and empty: values and gradients agree."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for shape, dims in [((4, 8, 8), 1), ((5, 3, 6), 1), ((2, 9, 4), 1), ((6, 2, 4), 2)]:
        for placement in (Shard(0), Shard(1), Shard(2), Replicate(), Partial("sum")):
            check_layout(mesh, shape, dims, [placement])


@spmd(world_size=4, timeout=200)
def test_two_axes_equal_one_device() -> None:
    """Batch over one axis and sequence over the other, both on one dim, and mixed with replicas and addends."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts: list[list[Placement]] = [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [Shard(0), Replicate()],
        [Replicate(), Shard(1)],
        [Shard(0), Shard(2)],
        [Shard(0), Partial("sum")],
    ]
    for layout in layouts:
        check_layout(mesh, (5, 7, 4), 1, layout)


@spmd(world_size=4, timeout=120)
def test_outer_cuts_communicate_nothing() -> None:
    """Forward and backward of a sequence cut run without a collective, and the output keeps the cut."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = distribute_tensor(draw((2, 8, 4), 1), mesh, [Shard(1)]).requires_grad_()
    weight = distribute_tensor(draw((4,), 2), mesh, [Replicate()])
    dy = distribute_tensor(draw((2, 8, 4), 3), mesh, [Shard(1)])
    with CommDebugMode() as comm, strict():
        y = rms_norm(x, weight)
        torch.autograd.backward(y, dy)
    assert isinstance(y, DTensor)
    assert y.placements == (Shard(1),)
    assert isinstance(x.grad, DTensor)
    assert x.grad.placements == (Shard(1),)
    assert comm.get_total_counts() == 0


@spmd(world_size=4, timeout=120)
def test_dtypes_and_torchs_own_tensors_are_taken() -> None:
    """Half inputs keep their dtypes, and a parameter that is torch's own DTensor mixes with ours."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x, weight = draw((4, 8, 8), 1).bfloat16(), draw((8,), 2).float()
    sharded = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    theirs = TorchDTensor.from_local(weight.clone(), mesh, [Replicate()]).requires_grad_()
    y = rms_norm(sharded, theirs)
    assert isinstance(y, DTensor)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.full_tensor(), rms_norm(x, weight))
    torch.autograd.backward(y.float().sum())
    assert sharded.grad is not None
    assert sharded.grad.dtype == torch.bfloat16
    assert theirs.grad is not None
    assert theirs.grad.dtype == torch.float32


@spmd(world_size=4, timeout=120)
def test_a_wrong_shape_is_refused_from_whole_shapes() -> None:
    """A weight of the local width is refused on every rank alike, and the message has the whole shapes."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x = distribute_tensor(draw((2, 8), 1), mesh, [Shard(1)])
    weight = distribute_tensor(draw((2,), 2), mesh, [Replicate()])
    with pytest.raises(
        KernelArgumentError, match=r"weight has shape \(2,\) and x has shape \(2, 8\)"
    ):
        rms_norm(x, weight)


@spmd(world_size=4, timeout=200)
def test_it_compiles_on_distributed_tensors() -> None:
    """A whole graph over a sequence cut gives the eager values and gradients."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    x, weight, dy = draw((2, 8, 4), 1), draw((4,), 2), draw((2, 8, 4), 3)
    given = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    scale = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    y = compiled(given, scale)
    torch.autograd.backward(y, distribute_tensor(dy, mesh, [Shard(1)]))
    expected, dx, dweight = whole(x, weight, dy)
    torch.testing.assert_close(full(y), expected)
    torch.testing.assert_close(full(given.grad), dx)
    torch.testing.assert_close(full(scale.grad), dweight)
