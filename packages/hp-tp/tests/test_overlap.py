"""Products that overlap with the collective next to them, against the plain path and the single device."""

from __future__ import annotations

import contextlib
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
from torch.utils.checkpoint import checkpoint


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


CASES = [
    (dim, length, chunks)
    for dim in (0, 1)
    for length, chunks in ((12, 1), (12, 3), (7, 2), (2, 5))
]


def piece_of(whole: Tensor, ranks: int, rank: int, dim: int) -> Tensor:
    """The piece that ``Shard(dim)`` gives a rank, which may be empty."""
    each = -(-whole.shape[dim] // ranks)
    first = min(rank * each, whole.shape[dim])
    return whole.narrow(dim, first, min(each, whole.shape[dim] - first)).clone()


def leaf(tensor: Tensor) -> Tensor:
    """A copy that wants a gradient."""
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_product_of_a_gathered_input(ranks: int) -> None:
    """The output of the whole; the gradient of the piece is summed, that of weight and bias is the rank's.

    Pieces may be uneven and empty, and travel in parts, also where there are fewer rows than parts.
    """

    @spmd(world_size=ranks, timeout=60)
    def run() -> None:
        mesh = tp(ranks)
        rank = mesh.get_local_rank()
        tolerance = {"rtol": 1e-4, "atol": 1e-4}
        for dim, length, chunks in CASES:
            shape = [6, 6]
            shape[dim] = length
            x = torch.randn(*shape, 5)
            weights, biases = torch.randn(ranks, 4, 5), torch.randn(ranks, 4)
            grads = torch.randn(ranks, *shape, 4)
            whole, own = leaf(x), leaf(piece_of(x, ranks, rank, dim))
            weight, bias = leaf(weights[rank]), leaf(biases[rank])
            out = all_gather_matmul(
                own, weight, mesh, dim=dim, bias=bias, length=length, chunks=chunks
            )
            out.backward(grads[rank])
            all_weights, all_biases = leaf(weights), leaf(biases)
            rights = [F.linear(whole, w, b) for w, b in zip(all_weights, all_biases, strict=True)]
            torch.autograd.backward(rights, list(grads))
            torch.testing.assert_close(out, rights[rank])
            assert whole.grad is not None
            assert all_weights.grad is not None
            assert all_biases.grad is not None
            right = piece_of(whole.grad, ranks, rank, dim)
            torch.testing.assert_close(own.grad, right, **tolerance)
            torch.testing.assert_close(weight.grad, all_weights.grad[rank], **tolerance)
            torch.testing.assert_close(bias.grad, all_biases.grad[rank], **tolerance)

    run()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_sum_of_products_scattered(ranks: int) -> None:
    """This rank's piece of the sum over ranks, and both gradients; pieces may be uneven and empty, and travel in parts."""

    @spmd(world_size=ranks, timeout=60)
    def run() -> None:
        mesh = tp(ranks)
        rank = mesh.get_local_rank()
        tolerance = {"rtol": 1e-4, "atol": 1e-4}
        for dim, length, chunks in CASES:
            shape = [6, 6]
            shape[dim] = length
            xs, ws, grad = (
                torch.randn(ranks, *shape, 3),
                torch.randn(ranks, 4, 3),
                torch.randn(*shape, 4),
            )
            x, w = leaf(xs[rank]), leaf(ws[rank])
            out = matmul_reduce_scatter(x, w, mesh, dim=dim, chunks=chunks)
            out.backward(piece_of(grad, ranks, rank, dim))
            all_x, all_w = leaf(xs), leaf(ws)
            products = [F.linear(a, b) for a, b in zip(all_x, all_w, strict=True)]
            right = torch.stack(products).sum(0)
            right.backward(grad)
            torch.testing.assert_close(out, piece_of(right, ranks, rank, dim), **tolerance)
            assert all_x.grad is not None
            assert all_w.grad is not None
            torch.testing.assert_close(x.grad, all_x.grad[rank], **tolerance)
            torch.testing.assert_close(w.grad, all_w.grad[rank], **tolerance)

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
    x, w = (torch.randint(-9, 9, shape).float() for shape in ((8, 4), (20, 4)))
    d, dw = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Shard(0)])
    with overlap() as info:
        out: Any = F.linear(d, dw)
    assert info.applied == 1
    assert out.placements == (Shard(1),)
    assert torch.equal(out.full_tensor(), F.linear(x, w))


@spmd(world_size=2, timeout=60)
def test_a_function_that_gathers_its_weight_is_left_alone() -> None:
    """The weight is the smaller one: the result lies, and is, as it would be, and the reason says so."""
    mesh = tp(2)
    x, w = torch.randn(8, 4), torch.randn(6, 4)
    d, dw = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Shard(0)])
    plain: Any = F.linear(d, dw)
    with overlap(chunks=4) as info:
        out: Any = F.linear(d, dw)
    assert info.applied == 0
    assert "does not gather its input" in str(info.reason)
    assert out.placements == plain.placements
    assert torch.equal(out.full_tensor(), plain.full_tensor())


@pytest.mark.parametrize("local", [True, False])
@spmd(world_size=2, timeout=60)
def test_parts_give_what_the_plain_path_gives(local: bool) -> None:
    """Exactly, where sums are exact: in one part, in two and in more than there are rows; uneven pieces stay distributed."""
    mesh = tp(2)
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
    }
    reference = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    for parameter in reference.parameters():
        nn.init.uniform_(parameter, -3, 3).data.round_()
    model: Any = parallelize_module(reference, mesh, plan)
    x = torch.randint(-9, 9, (3, 6 if local else 7, 6)).float()
    own: Any = x.chunk(2, 1)[mesh.get_local_rank()]
    if not local:
        own = distribute_tensor(x, mesh, [Shard(1)])
    plain = model(own)
    for chunks in (1, 2, 9):
        with overlap(chunks=chunks) as info:
            out = model(own)
        assert (info.applied, info.reason) == (2, None)
        assert out.shape == plain.shape
        assert torch.equal(*((t if local else t.full_tensor()) for t in (out, plain)))


@spmd(world_size=2, timeout=60)
def test_what_is_computed_again_overlaps_again() -> None:
    """Under activation checkpointing, with the backward inside and outside of the context; products of the forward are counted."""
    mesh = tp(2)
    reference = Mlp()
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    x = torch.randn(3, 4, 6)
    rank = mesh.get_local_rank()
    reference(x).square().sum().backward()
    for inside in (True, False):
        model: Any = parallelize_module(copy.deepcopy(reference), mesh, plan)
        model.zero_grad()
        own = leaf(x.chunk(2, 1)[rank])
        with overlap(chunks=2) as info:
            out = checkpoint(model, own, use_reentrant=False)
            if inside:
                out.square().sum().backward()
        if not inside:
            out.square().sum().backward()
        assert (info.applied, info.reason) == (2, None)
        for name, parameter in model.named_parameters():
            right = reference.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), right)
        plain: Any = checkpoint(model, own, use_reentrant=False)  # forgotten again
        plain.square().sum().backward()
        torch.testing.assert_close(plain, out)


@spmd(world_size=2, timeout=60)
def test_functions_under_checkpointing_overlap_again() -> None:
    """``F.linear`` of distributed tensors, computed again inside of the context that checkpointing is given."""
    mesh = tp(2)
    x, w = torch.randn(5, 4), torch.randn(7, 4)
    right = leaf(w)
    F.linear(x, right).square().sum().backward()
    d, dw = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Shard(0)])
    dw = dw.detach().requires_grad_()
    with overlap(chunks=2) as info:
        out: Any = checkpoint(
            F.linear,
            d,
            dw,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), overlap(chunks=2)),
        )
        out.square().sum().backward()
    assert (info.applied, info.reason) == (1, None)
    grad: Any = dw.grad
    torch.testing.assert_close(grad.full_tensor(), right.grad)


@spmd(world_size=2, timeout=60)
def test_autocast_decides_what_travels() -> None:
    """Products in bfloat16, gradients in the dtype of the parameters, as on the plain path."""
    mesh = tp(2)
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    model: Any = parallelize_module(Mlp(), mesh, plan)
    own = torch.randn(3, 2, 6)
    grads = []
    for context in (contextlib.nullcontext(), overlap(chunks=2)):
        with torch.autocast("cpu", torch.bfloat16), context:
            out = model(own)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        grads.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        model.zero_grad()
    for ours, plain in zip(*grads, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.05)


@spmd(world_size=2, timeout=60)
def test_it_says_why_it_did_not_apply() -> None:
    """Whole inputs, one rank, other weights: the plain path runs, and the reason names what is missing."""
    mesh = tp(2)
    model = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with overlap() as info:
        model(torch.randn(3, 6))
    assert info.applied == 0
    assert "not cut along a sequence" in str(info.reason)
    even = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    with overlap() as info:
        F.linear(even, distribute_tensor(torch.randn(6, 4), mesh, [Replicate()]))
    assert "gathers nothing" in str(info.reason)
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    with overlap() as info:
        F.linear(*(distribute_tensor(torch.randn(4, 4), alone, [Shard(0)]) for _ in range(2)))
    assert "one rank" in str(info.reason)
    with overlap() as info:
        torch.relu(even)
    assert (info.applied, info.reason) == (0, "no linear layer ran")


@spmd(world_size=2, timeout=60)
def test_what_cannot_be_sent_round_is_refused() -> None:
    """The last dim, pieces that are not what the length says, an uneven plain output, no parts, and second derivatives."""
    mesh = tp(2)
    x, w = torch.randn(3, 4), torch.randn(2, 4)
    with pytest.raises(BoundaryError, match="a product sums over"):
        all_gather_matmul(x, w, mesh, dim=1)
    with pytest.raises(
        BoundaryError, match=r"got 3 rows .* of 8 over 2 ranks, of which each has \[4, 4\]"
    ):
        all_gather_matmul(x, w, mesh, length=8)
    for chunks in (0, -1, True, 2.0, "4"):
        with pytest.raises(BoundaryError, match=f"chunks={chunks!r} is how many parts"):
            overlap(chunks=chunks)  # type: ignore[arg-type]  # what is tested
        with pytest.raises(BoundaryError, match="an integer, 1 or more"):
            matmul_reduce_scatter(x, w, mesh, chunks=chunks)  # type: ignore[arg-type]  # what is tested
    rows = parallelize_module(nn.Linear(4, 4), mesh, RowwiseParallel(output_layouts=Shard(0)))
    with overlap(), pytest.raises(BoundaryError, match="3 elements in dim 0, which 2 ranks"):
        rows(torch.randn(3, 2))
    own = leaf(torch.randn(4, 4))
    out = all_gather_matmul(own, w, mesh)
    (grad,) = torch.autograd.grad(out.square().sum(), own, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


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
