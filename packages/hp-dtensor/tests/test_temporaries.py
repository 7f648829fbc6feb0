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
    distribute_module,
    distribute_tensor,
    strict,
)
from hp_dtensor.errors import ImplicitCommunicationError
from hp_dtensor.temporaries import HELD_BY_TORCH, alone, owns_memory, references
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

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


# Layers that begin with zeros of their own, which torch slices before a linear layer or a product takes them.
RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(4, 3),
    "LSTM with projections": lambda: nn.LSTM(4, 3, proj_size=2),
    "GRU": lambda: nn.GRU(4, 3),
    "GRU without biases": lambda: nn.GRU(4, 3, bias=False),
    "GRU of several layers": lambda: nn.GRU(4, 3, num_layers=2, bidirectional=True),
    "RNN": lambda: nn.RNN(4, 3),
    "RNN with the batch first": lambda: nn.RNN(4, 3, nonlinearity="relu", batch_first=True),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@spmd(world_size=2)
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("shape", [(6, 1, 4), (6, 4)])
def test_recurrent_layers_start_from_zeros_of_their_own(name: str, shape: tuple[int, ...]) -> None:
    """Their outputs and gradients are those of one device, and no initial state has to be passed."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    layer, reference = RECURRENT[name](), RECURRENT[name]()
    reference.load_state_dict(layer.state_dict())
    distribute_module(layer, mesh)
    x = torch.randn(shape)
    want = reference(x)[0]
    want.square().sum().backward()
    got = layer(distribute_tensor(x, mesh, [R]))[0]
    got.square().sum().backward()
    torch.testing.assert_close(got.full_tensor(), want)
    for own, other in zip(layer.parameters(), reference.parameters(), strict=True):
        assert isinstance(own.grad, DTensor)
        torch.testing.assert_close(own.grad.full_tensor(), other.grad)
    with torch.no_grad():
        torch.testing.assert_close(layer(distribute_tensor(x, mesh, [R]))[0].full_tensor(), want)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@spmd(world_size=2)
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("batched", [True, False])
def test_states_that_a_program_passes_are_refused(name: str, batched: bool) -> None:
    """A plain initial state with a name is not taken for zeros of torch's own, and one without is compared over the ranks."""
    mesh = init_device_mesh("cpu", (2,))
    layer = RECURRENT[name]()
    distribute_module(layer, mesh)
    x = distribute_tensor(torch.randn(1, 1, 4) if batched else torch.randn(1, 4), mesh, [R])
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    modes = torch.enable_grad, torch.no_grad, torch.inference_mode

    def state(width: int, factor: float) -> torch.Tensor:
        return torch.full((rows, 1, width) if batched else (rows, width), factor)

    def together(hidden: torch.Tensor, cell: torch.Tensor) -> object:
        return (hidden, cell) if isinstance(layer, nn.LSTM) else hidden

    for factor in (1.0, 1.0 + mesh.get_rank()):
        hidden = state(layer.proj_size or layer.hidden_size, factor)
        cell = state(layer.hidden_size, factor)
        for mode in modes:
            with mode(), pytest.raises(MixedTensorError, match="is a plain tensor of shape"):
                layer(x, together(hidden, cell))
            with mode(), pytest.raises(MixedTensorError, match="is a plain tensor of shape"):
                layer(x, hx=together(hidden, cell))
    del hidden, cell
    other = 1.0 + mesh.get_rank()
    for mode in modes:
        with mode(), pytest.raises(MixedTensorError):
            layer(
                x,
                together(
                    state(layer.proj_size or layer.hidden_size, other),
                    state(layer.hidden_size, other),
                ),
            )


@spmd(world_size=2)
def test_an_error_of_the_compiler_changes_nothing() -> None:
    """After ``torch.compile`` failed, Python keeps what it hands to calls; a temporary is still known as one."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    with pytest.raises(Exception, match=r"reduction dim|mat1 and mat2"):
        torch.compile(lambda z: z @ z, backend="eager")(torch.ones(2, 3))
    for _ in range(2):
        got = torch.quantile(x, 0.3, dim=0).full_tensor()  # type: ignore[attr-defined]  # distributed
        torch.testing.assert_close(got, torch.quantile(x.full_tensor(), 0.3, dim=0))
    with pytest.raises(MixedTensorError):
        x + torch.randn(6, 4)
