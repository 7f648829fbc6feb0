"""Operators that torch takes apart before dispatch: right on distributed tensors, untouched on others."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch._subclasses import FakeTensorMode

R, S0, P = Replicate(), Shard(0), Partial()

needs_chunks = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="this torch has no chunked loss"
)


@spmd(world_size=2)
def test_a_tensor_is_split_at_distributed_indices() -> None:
    """Each layout of the indices gives the plain pieces, with gradients."""
    mesh = init_device_mesh("cpu", (2,))
    whole, where = torch.arange(14.0).view(7, 2), torch.tensor([2, 5])
    expected = torch.tensor_split(whole, where)
    for layout, of_indices in product((R, S0, P), (R, S0, P)):
        x = distribute_tensor(whole, mesh, [layout]).requires_grad_()
        pieces = torch.tensor_split(x, distribute_tensor(where, mesh, [of_indices]))
        for piece, plain in zip(pieces, expected, strict=True):
            assert isinstance(piece, DTensor)
            torch.testing.assert_close(piece.full_tensor(), plain)
        pieces[1].sum().backward()
        assert isinstance(x.grad, DTensor)
        assert x.grad.full_tensor()[:, 0].tolist() == [0, 0, 1, 1, 1, 0, 0]
    for wrong in (where.int(), where.view(2, 1)):
        with pytest.raises(RuntimeError, match="tensor_indices_or_sections"):
            torch.tensor_split(x, distribute_tensor(wrong, mesh, [R]))


def test_tensors_of_other_kinds_are_split_as_ever() -> None:
    """Plain tensors and fake ones never meet a distributed tensor's detour."""
    pieces = torch.tensor_split(torch.arange(6), torch.tensor([2, 3]))
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2], [3, 4, 5]]
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.arange(6))
        assert [tuple(piece.shape) for piece in torch.tensor_split(x, [2, 3])] == [
            (2,),
            (1,),
            (3,),
        ]


@spmd(world_size=2)
def test_numbers_that_addends_hold_are_close_when_their_sums_are() -> None:
    """In low precision too, where the difference of each addend would be rounded by itself."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = torch.randn(512).to(torch.bfloat16)
    y = x + (torch.randn(512) * 0.02).to(torch.bfloat16)
    rank = mesh.get_local_rank()
    expected = torch.isclose(x, y, rtol=1e-2, atol=1e-3)
    assert 0 < expected.sum() < 512
    addends = [DTensor.from_local(t * (2 if rank else -1), mesh, [P]) for t in (x, y)]
    cut, same = ([distribute_tensor(t, mesh, [p]) for t in (x, y)] for p in (S0, R))
    for left, right in (
        (addends[0], same[1]),
        (same[0], addends[1]),
        (cut[0], addends[1]),
        addends,
    ):
        close = torch.isclose(left, right, rtol=1e-2, atol=1e-3)
        assert torch.equal(close.full_tensor(), expected)
        assert not torch.allclose(left, right, rtol=1e-2, atol=1e-3)
    with pytest.raises(RuntimeError, match=r"same dtype|did not match"):
        torch.isclose(cut[0], cut[1].float())


@needs_chunks
@spmd(world_size=2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.filterwarnings("error")
def test_a_chunked_loss_has_the_value_and_the_gradients_of_the_plain_one(reduction: str) -> None:
    """Cut batches, features and classes, and addends; nothing runs on replicas of everything."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    given = [torch.randn(6, 4), torch.randn(5, 4), torch.randn(5)]
    target = torch.tensor([0, 4, -100, 2, 1, 3])
    seed = torch.randn(6) if reduction == "none" else torch.tensor(1.5)

    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction=reduction, options=options
        )

    plain = [tensor.clone().requires_grad_() for tensor in given]
    expected = loss(*plain)
    gradients = torch.autograd.grad(expected, plain, seed)
    for layout in ((S0, R, R), (Shard(1), Shard(1), R), (R, S0, S0), (P, R, P)):
        laid_out = [
            distribute_tensor(tensor, mesh, [place]).requires_grad_()
            for tensor, place in zip(given, layout, strict=True)
        ]
        found = loss(*laid_out)
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), expected.detach())
        weight = distribute_tensor(seed, mesh, [R])
        for grad, wanted in zip(
            torch.autograd.grad(found, laid_out, weight), gradients, strict=True
        ):
            assert isinstance(grad, DTensor)
            torch.testing.assert_close(grad.full_tensor(), wanted)
