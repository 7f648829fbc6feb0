"""``out=``: what is written to a distributed tensor, whatever its layout and shape, is what the operator gives."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, strict, zeros
from hp_dtensor.out_forms import functional_form
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch.testing._internal.two_tensor import TwoTensor

aten = torch.ops.aten
R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def test_the_form_that_returns() -> None:
    """The overload of the same arguments; an operator without ``out=`` has none."""
    assert functional_form(aten.kron.out) is aten.kron.default
    assert functional_form(aten.sum.IntList_out) is aten.sum.dim_IntList
    assert functional_form(aten.sort.values_stable) is aten.sort.stable
    assert functional_form(aten.kron.default) is None
    assert functional_form(aten.add_.Tensor) is None


@spmd(world_size=2)
def test_each_layout_is_filled() -> None:
    """Forms with a rule, forms without one, and forms that torch composes by writing through views of ``out``."""
    mesh = init_device_mesh("cpu", (2,))
    x, y = (torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(2))
    index = torch.tensor([[0, 2, 1], [3, 1, 0]])
    for of_input, of_out in product((R, P, S0, S1), (R, S0, S1)):
        a, b = (distribute_tensor(t, mesh, [of_input]) for t in (x, y))
        at = distribute_tensor(index, mesh, [R])

        for function, given, plain in (
            (torch.kron, (a, b), (x, y)),
            (torch.matmul, (a, b.t()), (x, y.t())),
            (torch.gather, (a, 0, at), (x, 0, index)),
            (torch.where, (a > 0, a, b), (x > 0, x, y)),
            (torch.softmax, (a, 0), (x, 0)),
            (torch.tril, (a,), (x,)),
            (torch.add, (a, b), (x, y)),
            (torch.fft.ihfftn, (a,), (x,)),
        ):
            expected = function(*plain)
            out = distribute_tensor(torch.zeros_like(expected), mesh, [of_out])
            made = function(*given, out=out)
            assert made is out
            assert made.placements == (of_out,)
            torch.testing.assert_close(out.full_tensor(), expected)
        values, places = (
            distribute_tensor(torch.zeros(4, 3, dtype=dtype), mesh, [of_out])
            for dtype in (torch.float32, torch.int64)
        )
        found = torch.sort(a, 0, out=(values, places))
        assert found[0] is values
        for out, plain_ in zip((values, places), torch.sort(x, 0), strict=True):
            torch.testing.assert_close(out.full_tensor(), plain_)


@spmd(world_size=2)
def test_nothing_moves_where_the_result_lies_as_asked() -> None:
    """A form without a rule of its own is as sharded as the operator itself."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(4, 3), mesh, [S0])
    with strict():
        for function in (torch.softmax, torch.logcumsumexp, torch.amax):
            like = function(x, 1)
            out = function(x, 1, out=torch.zeros_like(like))
            assert isinstance(out, DTensor)
            torch.testing.assert_close(out.to_local(), like.to_local())


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@spmd(world_size=2)
def test_a_tensor_of_another_shape_is_resized() -> None:
    """As torch does it; what all ranks know of the whole follows."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(8.0).view(4, 2)
    for shape, placement in product(((0,), (3, 3), (2,)), (R, S0)):
        laid = distribute_tensor(x, mesh, [S0])
        for function, given in ((torch.add, (laid, laid)), (torch.amax, (laid, 0))):
            plain = function(*[x if t is laid else t for t in given])  # type: ignore[operator]  # a function
            out = zeros(*shape, device_mesh=mesh, placements=[placement])
            function(*given, out=out)  # type: ignore[operator]  # a function
            assert out.shape == plain.shape
            torch.testing.assert_close(out.full_tensor(), plain)
            torch.testing.assert_close((out + 0).full_tensor(), plain)


@spmd(world_size=2)
def test_what_cannot_be_written_is_refused() -> None:
    """Dtypes that lose, gradients, and plain tensors, each with an error that says it."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(4, 2), mesh, [S0])
    whole = zeros(16, 4, device_mesh=mesh, placements=[R], dtype=torch.int64)
    with pytest.raises(RuntimeError, match="cast"):
        torch.kron(x, x, out=whole)
    with pytest.raises(RuntimeError, match="cast"):
        torch.gather(x, 0, zeros(1, 2, device_mesh=mesh, dtype=torch.int64), out=whole)
    leaf = x.clone().requires_grad_()
    for function in (torch.kron, torch.add):
        with pytest.raises(RuntimeError, match="automatic differentiation"):
            function(leaf, x, out=torch.zeros_like(x))
    with pytest.raises((RuntimeError, TypeError), match="DTensor"):
        torch.kron(x, x, out=torch.zeros(16, 4))


def test_other_tensors_are_written_as_ever() -> None:
    """Plain tensors, and other subclasses, for which ``kron`` composes itself."""
    x = torch.randn(2, 2)
    out = torch.empty(0)
    torch.testing.assert_close(torch.kron(x, x, out=out), torch.kron(x, x))
    pair = TwoTensor(torch.zeros(4), torch.zeros(4))
    row = TwoTensor(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    torch.hstack((row, row), out=pair)
    assert pair.b.tolist() == [3, 4, 3, 4]
    assert torch.empty(2, 3, out=torch.empty(0)).shape == (2, 3)
