"""Products that overlap with the collective next to them, against the plain path and the single device."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    BoundaryError,
    ColwiseParallel,
    RowwiseParallel,
    all_gather_matmul,
    matmul_reduce_scatter,
    maybe_enable_async_tp,
    overlap,
    parallelize_module,
)
from torch import Tensor, nn


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_product_of_a_gathered_input(ranks: int, dim: int) -> None:
    """The output of the whole; the gradient of the piece is summed, that of weight and bias is the rank's."""

    @spmd(world_size=ranks, timeout=60)
    def run() -> None:
        mesh = tp(ranks)
        rank = mesh.get_local_rank()
        x = torch.randn(12, 12, 5)
        weights, biases = torch.randn(ranks, 4, 5), torch.randn(ranks, 4)
        grads = torch.randn(ranks, 12, 12, 4)
        whole = x.clone().requires_grad_()
        own = x.chunk(ranks, dim)[rank].clone().requires_grad_()
        weight, bias = (t[rank].clone().requires_grad_() for t in (weights, biases))
        out = all_gather_matmul(own, weight, mesh, dim=dim, bias=bias)
        out.backward(grads[rank])
        all_weights, all_biases = (t.clone().requires_grad_() for t in (weights, biases))
        rights = [F.linear(whole, w, b) for w, b in zip(all_weights, all_biases, strict=True)]
        torch.autograd.backward(rights, list(grads))
        torch.testing.assert_close(out, rights[rank])
        assert whole.grad is not None
        assert all_weights.grad is not None
        assert all_biases.grad is not None
        torch.testing.assert_close(
            own.grad, whole.grad.chunk(ranks, dim)[rank], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(weight.grad, all_weights.grad[rank], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(bias.grad, all_biases.grad[rank], rtol=1e-4, atol=1e-4)

    run()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_sum_of_products_scattered(ranks: int, dim: int) -> None:
    """This rank's piece of the sum over ranks, and both gradients."""

    @spmd(world_size=ranks, timeout=60)
    def run() -> None:
        mesh = tp(ranks)
        rank = mesh.get_local_rank()
        xs, ws = torch.randn(ranks, 12, 12, 3), torch.randn(ranks, 4, 3)
        grad = torch.randn(12, 12, 4)
        x, w = (t[rank].clone().requires_grad_() for t in (xs, ws))
        out = matmul_reduce_scatter(x, w, mesh, dim=dim)
        out.backward(grad.chunk(ranks, dim)[rank])
        all_x, all_w = (t.clone().requires_grad_() for t in (xs, ws))
        right = torch.stack([F.linear(a, b) for a, b in zip(all_x, all_w, strict=True)]).sum(0)
        right.backward(grad)
        torch.testing.assert_close(out, right.chunk(ranks, dim)[rank], rtol=1e-4, atol=1e-5)
        assert all_x.grad is not None
        assert all_w.grad is not None
        torch.testing.assert_close(x.grad, all_x.grad[rank], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(w.grad, all_w.grad[rank], rtol=1e-4, atol=1e-4)

    run()


@spmd(world_size=2, timeout=60)
def test_only_the_piece_is_kept() -> None:
    """The plain path keeps the gathered input for the weight's gradient; this one gathers it again."""
    mesh = tp(2)
    kept: list[int] = []
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        all_gather_matmul(x, w, mesh)
    assert sorted(kept) == [w.numel(), x.numel()]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("local", [True, False])
@spmd(world_size=2, timeout=60)
def test_layers_of_ours_overlap(local: bool) -> None:
    """A sequence-parallel pair gives the same output and gradients inside and outside; both of its products overlapped."""
    mesh = tp(2)
    reference = Mlp()
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
    }
    model: Any = parallelize_module(copy.deepcopy(reference), mesh, plan)
    x = torch.randn(3, 4, 6)
    whole = x.clone().requires_grad_()
    right = reference(whole)
    grad = torch.randn_like(right)
    right.backward(grad)
    own: Any
    if local:
        own = x.chunk(2, 1)[mesh.get_local_rank()].clone().requires_grad_()
    else:
        own = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    with overlap() as info:
        out = model(own)
    assert (info.applied, info.reason) == (2, None)
    ends = grad.chunk(2, 1)[mesh.get_local_rank()]
    if local:
        out.backward(ends)
        torch.testing.assert_close(own.grad, whole.grad.chunk(2, 1)[mesh.get_local_rank()])  # type: ignore[union-attr]  # there is one
    else:
        out.backward(distribute_tensor(grad, mesh, [Shard(1)]))
        torch.testing.assert_close(own.grad.full_tensor(), whole.grad)
        assert out.placements == (Shard(1),)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), reference.get_parameter(name).grad
        )


@spmd(world_size=2, timeout=60)
def test_a_linear_function_of_distributed_tensors_overlaps() -> None:
    """The rows of the input are sent round; the result is cut along its features, exact where the sums are."""
    mesh = tp(2)
    x, w = (torch.randint(-9, 9, shape).float() for shape in ((8, 4), (6, 4)))
    d, dw = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Shard(0)])
    with overlap() as info:
        out: Any = F.linear(d, dw)
    assert info.applied == 1
    assert out.placements == (Shard(1),)
    assert torch.equal(out.full_tensor(), F.linear(x, w))


@spmd(world_size=2, timeout=60)
def test_it_says_why_it_did_not_apply() -> None:
    """Whole inputs, uneven sequences, other weights: the plain path runs, and the reason names what is missing."""
    mesh = tp(2)
    model = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with overlap() as info:
        model(torch.randn(3, 6))
    assert info.applied == 0
    assert "not cut along a sequence" in str(info.reason)
    x = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    with overlap() as info:
        F.linear(x, w)
    assert "5 tokens over 2 ranks has no equal pieces" in str(info.reason)
    even = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    with overlap() as info:
        F.linear(even, distribute_tensor(torch.randn(6, 4), mesh, [Replicate()]))
    assert "gathers nothing" in str(info.reason)
    with overlap() as info:
        torch.relu(even)
    assert (info.applied, info.reason) == (0, "no linear layer ran")


@spmd(world_size=2, timeout=60)
def test_dims_that_cannot_be_sent_round_are_refused() -> None:
    """The last dim, and a length that does not divide."""
    mesh = tp(2)
    x, w = torch.randn(3, 4), torch.randn(2, 4)
    with pytest.raises(BoundaryError, match="a product sums over"):
        all_gather_matmul(x, w, mesh, dim=1)
    with pytest.raises(BoundaryError, match="length 3 over 2 ranks"):
        matmul_reduce_scatter(x, w, mesh)


@spmd(world_size=2, timeout=60)
def test_the_compilers_overlap_reports() -> None:
    """Each thing that is missing has its reason, and the route that would work."""
    mesh = tp(2)
    wanted = SimpleNamespace(enable_async_tensor_parallel=True)
    compiled = SimpleNamespace(enable=True, components=["model"])
    reports = [
        maybe_enable_async_tp(SimpleNamespace(enable_async_tensor_parallel=False), compiled, mesh),
        maybe_enable_async_tp(wanted, compiled, None),
        maybe_enable_async_tp(wanted, SimpleNamespace(enable=False), mesh),
        maybe_enable_async_tp(wanted, SimpleNamespace(enable=True, components=["loss"]), mesh),
        maybe_enable_async_tp(wanted, compiled, mesh),
    ]
    assert not any(reports)
    assert [report.route for report in reports] == ["none", "none", "eager", "eager", "eager"]
    assert "was not asked for" in reports[0].reason
    assert "one tensor-parallel rank" in reports[1].reason
    assert "the model is not compiled" in reports[2].reason
    assert "cpu ranks do not share" in reports[4].reason
