"""What torch makes on its way is told from what somebody holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import (
    DTensor,
    InPlaceError,
    MixedTensorError,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    strict,
)
from hp_dtensor.errors import ImplicitCommunicationError
from hp_dtensor.temporaries import HELD_BY_TORCH, alone, owns_memory, references
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd

R, P = Replicate(), Partial()


def test_a_name_for_a_value_counts() -> None:
    """A value that a container alone holds has one reference less than one that has a name too."""
    only, named = (torch.ones(2),), torch.ones(2)
    assert references(only)[0] + 1 == references((named,))[0] == HELD_BY_TORCH
    assert alone(only, 0)
    other = named
    assert not alone((other,), 0)
    assert alone((other,), 0, others=1)


def test_a_view_of_what_somebody_holds_owns_no_memory() -> None:
    """Its memory is that of the tensor with a name, whose values may be anything."""
    weight = torch.ones(2, 3)
    assert owns_memory(torch.ones(2, 3))
    assert not owns_memory(weight.t())


# Operators that torch writes as in-place ones on results of its own, of one, two and three tensors.
COMPOSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of one tensor": lambda x: torch.mvlgamma(x.abs() + 3, 2),
    "of two tensors": lambda x: F.cosine_embedding_loss(x, x * 2 + 1, torch.ones_like(x[:, 0])),
    "with a number": lambda x: F.margin_ranking_loss(x, x.flip(1), x.sign()),
    "with plain constants": lambda x: torch.quantile(x, 0.3, dim=0),
    "reshaped in place": lambda x: torch.stft(
        x, 4, window=torch.ones_like(x[:, 0]), return_complex=True
    ).abs(),
    "joined with zeros": lambda x: torch.block_diag(x, x),
    "with products of ones": lambda x: x.prod(1),
}


@spmd(world_size=2)
@pytest.mark.parametrize("name", COMPOSED)
def test_operators_that_torch_composes_are_right_on_addends(name: str) -> None:
    """Results on the way may change their layout, and constants count as replicated; forward and backward."""
    program = COMPOSED[name]
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = torch.randn(4, 6)
    for layout in (P, Shard(0), Shard(1)):
        x = distribute_tensor(whole, mesh, [layout]).requires_grad_()
        ref = whole.clone().requires_grad_()
        got, want = program(x), program(ref)
        torch.testing.assert_close(got.full_tensor(), want)  # type: ignore[attr-defined]
        got.sum().backward()
        want.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), ref.grad)  # type: ignore[attr-defined]


# Functions that torch writes in Python, with names for what they make on the way.
IN_PYTHON: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "counts": lambda x: torch.masked.var(x, 1, unbiased=True),
    "a random matrix": lambda x: torch.svd_lowrank(x, 6)[1],
    "a copy that is clamped": lambda x: F.gaussian_nll_loss(x, x.detach(), x.detach().abs() * x),
    "random places": lambda x: F.fractional_max_pool2d(x.view(2, 2, 2, 3), 1, output_size=(1, 2)),
}


@spmd(world_size=2)
@pytest.mark.parametrize("name", IN_PYTHON)
def test_functions_that_torch_writes_in_python_are_right(name: str) -> None:
    """What they have names for counts as made on the way, on cut tensors and on addends."""
    program = IN_PYTHON[name]
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = torch.rand(4, 6) + 0.5
    torch.manual_seed(1)
    expected = program(whole)
    for layout in (R, Shard(0), Shard(1), P):
        torch.manual_seed(1)
        got = program(distribute_tensor(whole, mesh, [layout]))
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-4, atol=1e-4)


@spmd(world_size=2)
def test_what_somebody_holds_is_refused() -> None:
    """Neither is a plain tensor with a name taken for a constant, nor is the layout of a held one changed."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 6), mesh, [P])
    weight = torch.ones(3, 6)
    for mixed in (
        lambda: x + torch.ones(4, 6),
        lambda: torch.ones(4, 6) + x,
        lambda: F.linear(x, weight),
        lambda: x @ weight.t(),
        lambda: torch.cat([x, weight]),
        lambda: F.pairwise_distance(x[:3], weight),
        lambda: F.gaussian_nll_loss(x[:3], weight, weight),
    ):
        with pytest.raises(MixedTensorError):
            mixed()
    with torch.inference_mode(), pytest.raises(MixedTensorError):
        F.linear(x, weight)
    with pytest.raises(InPlaceError):
        x.clamp_(max=2)
    tensors = [x]
    with pytest.raises(InPlaceError):
        tensors[0].sqrt_()


@spmd(world_size=2)
def test_what_was_made_from_other_data_on_each_rank_is_refused() -> None:
    """A copy that torch reshapes on its way is compared over the ranks; equal ones count as replicated."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(18.0).view(3, 6), mesh, [R])
    plain = torch.arange(48.0).view(2, 4, 6)
    products: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: torch.einsum("abd,ed->abe", x.permute(1, 0, 2), weight),
        lambda x: torch.tensordot(x.transpose(0, 2), weight, dims=([0], [1])),
    )
    for product in products:
        got = product(plain)
        assert isinstance(got, DTensor)
        assert got.placements == (R,)
        with pytest.raises(MixedTensorError, match="differs between the ranks"):
            product(plain * (1 + mesh.get_rank()))
        with strict(), pytest.raises(ImplicitCommunicationError):
            product(plain)
