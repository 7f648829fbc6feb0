"""The distributed tensor against the single device: values, gradients, layouts and errors, on real ranks."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    ImplicitCommunicationError,
    InPlaceError,
    LayoutError,
    MixedTensorError,
    NoRuleError,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    implicit_replication,
    strict,
    zeros,
)
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

R = Replicate()


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid(tensor: torch.Tensor | None) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


def _close(got: torch.Tensor, want: torch.Tensor, **tolerance: float) -> None:
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(whole, want, **tolerance)


@spmd(world_size=4)
def test_every_layout_gives_the_whole_tensor_back() -> None:
    """distribute_tensor and full_tensor are inverse for even, uneven and short tensors on 1-D and 2-D meshes."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for shape in ((8, 4), (5, 3), (1, 2), (0, 3), (7,)):
        whole = torch.randn(shape)
        choices = [
            R,
            *(Shard(d) for d in range(len(shape))),
            Partial(),
            Partial("avg"),
            Partial("max"),
        ]
        for placement in choices:
            _close(distribute_tensor(whole, flat, [placement]), whole)
        for pair in itertools.product(
            [R, *(Shard(d) for d in range(len(shape))), Partial()], repeat=2
        ):
            _close(distribute_tensor(whole, square, pair), whole)
            _close(distribute_tensor(whole, square, pair, src_data_rank=None), whole)


@spmd(world_size=4)
def test_pieces_are_those_of_chunk() -> None:
    """A shard is what torch.chunk gives, contiguous, in memory of its own."""
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(30.0).reshape(6, 5)
    for dim in (0, 1):
        pieces = [*whole.chunk(4, dim)]
        empty = pieces[0].narrow(dim, 0, 0)
        local = distribute_tensor(whole, mesh, [Shard(dim)]).to_local()
        rank = mesh.get_local_rank()
        want = pieces[rank] if rank < len(pieces) else empty
        assert torch.equal(local, want)
        assert local.is_contiguous()
        assert local.untyped_storage().nbytes() == local.numel() * 4


@spmd(world_size=2)
def test_gradients_cross_the_border_both_ways() -> None:
    """Entering and leaving, for each placement, gives the single device's gradient."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(4, 3)
    weight = torch.randn(4, 3)
    for placement in (R, Shard(0), Shard(1)):
        leaf = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        local = leaf.to_local(grad_placements=[placement])
        inside = DTensor.from_local(local, mesh, [placement], shape=whole.shape)
        (inside * distribute_tensor(weight, mesh, [placement])).sum().backward()
        assert isinstance(leaf.grad, DTensor)
        _close(leaf.grad, weight)


@spmd(world_size=2)
def test_a_replicated_leaf_whose_gradients_nobody_adds_up_warns() -> None:
    """Only when a gradient comes back, only for replicas, and not when it was said how gradients fit together."""
    mesh = init_device_mesh("cpu", (2,))
    leaf = distribute_tensor(torch.ones(4), mesh, [R]).requires_grad_()
    with pytest.warns(UserWarning, match=r"grad_placements=\[Partial\(\)\]"):
        leaf.to_local().sum().backward()
    leaf.to_local()
    leaf.to_local(grad_placements=[R]).sum().backward()
    (leaf * 2).to_local().sum().backward()
    cut = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    cut.to_local().sum().backward()
    alone = distribute_tensor(torch.ones(4), mesh, [R]).detach()
    alone.to_local().sum()


@spmd(world_size=2)
def test_strict_refuses_a_replicated_leaf_whose_gradients_nobody_adds_up() -> None:
    """At the call, on every rank, and in none of the cases in which the gradient's layout is known."""
    mesh = init_device_mesh("cpu", (2,))
    leaf = distribute_tensor(torch.ones(4), mesh, [R]).requires_grad_()
    cut = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    with strict():
        with pytest.raises(LayoutError, match=r"grad_placements=\[Partial\(\)\]"):
            leaf.to_local()
        leaf.to_local(grad_placements=[Partial()]).sum().backward()
        assert isinstance(leaf.grad, DTensor)
        _close(leaf.grad, torch.full((4,), 2.0))
        leaf.detach().to_local()
        (leaf * 2).to_local().sum().backward()
        cut.to_local().sum().backward()
        leaf.full_tensor().sum().backward()
        with torch.no_grad():
            leaf.to_local()


@spmd(world_size=2)
def test_a_partial_value_has_a_replicated_gradient() -> None:
    """Leaving as addends and coming back does not multiply the gradient."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.tensor([1.0, 2.0])
    d = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    total = (d * d).sum()
    assert total.is_partial("sum")
    again = DTensor.from_local(total.to_local(), mesh, [Partial()])
    _whole(again * 3).backward()
    assert d.grad is not None
    _close(d.grad, 6 * x)


@spmd(world_size=2)
def test_grad_placements_say_how_replicas_add_up() -> None:
    """A replica used for rank-local data has a partial gradient, which is summed when told so."""
    mesh = init_device_mesh("cpu", (2,))
    w, x = torch.tensor([1.0, 2.0]), torch.arange(4.0).view(2, 2)
    dw = distribute_tensor(w, mesh, [R]).requires_grad_()
    loc = distribute_tensor(x, mesh, [Shard(0)]).to_local()
    (loc * dw.to_local(grad_placements=[Partial()])).sum().backward()
    ref = w.clone().requires_grad_()
    (x * ref).sum().backward()
    assert dw.grad is not None
    assert dw.grad.placements == (R,)
    assert ref.grad is not None
    _close(dw.grad, ref.grad)


@spmd(world_size=2)
def test_a_leaf_that_is_thawed_keeps_a_gradient_of_its_own_layout() -> None:
    """Setting `requires_grad` is `requires_grad_`, for tensors and parameters made frozen."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).view(4, 2)
    frozen = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=False)
    plain = distribute_tensor(whole, mesh, [Shard(1)])
    for leaf in (frozen, plain):
        assert not leaf.requires_grad
        leaf.requires_grad = True
        assert leaf.requires_grad
        before = leaf.placements  # type: ignore[attr-defined]  # a parameter is a DTensor too
        (leaf.redistribute(placements=[R]) * 2).sum().backward()
        assert isinstance(leaf.grad, DTensor)
        assert leaf.grad.placements == before
        (leaf.sum(0) * 3).sum().backward()
        assert leaf.grad.placements == before
        _close(leaf.grad, torch.full((4, 2), 5.0))
        leaf.requires_grad = False
        assert not leaf.requires_grad


@spmd(world_size=2)
def test_a_leaf_keeps_a_gradient_of_its_own_layout() -> None:
    """Whatever layout the backward ends in, .grad is laid out like the tensor, replicated where that is Partial."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    ref = [t.clone().requires_grad_() for t in (x, w)]
    (ref[0] @ ref[1]).square().sum().backward()
    for px, pw in itertools.product([R, Shard(0), Shard(1), Partial()], repeat=2):
        leaves = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((x, px), (w, pw))]
        (leaves[0] @ leaves[1]).square().sum().backward()
        for leaf, want, placement in zip(leaves, ref, (px, pw), strict=True):
            assert isinstance(leaf.grad, DTensor)
            assert leaf.grad.placements == ((R,) if placement.is_partial() else (placement,))
            _close(leaf.grad, want.grad, rtol=1e-4, atol=1e-4)


@spmd(world_size=2)
def test_double_backward_equals_the_single_device() -> None:
    """The second derivative through redistribute, to_local and from_local is right."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, dtype=torch.float64)

    def second(value: torch.Tensor) -> torch.Tensor:
        y = value**3
        if isinstance(y, DTensor):
            y = y.redistribute(placements=[R]).to_local()
        (g,) = torch.autograd.grad(y.sum(), value, create_graph=True)
        total = (g * g).sum()
        if isinstance(total, DTensor):
            total = _whole(total)
        (h,) = torch.autograd.grad(total, value)
        return h

    _close(
        second(distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()),
        second(x.clone().requires_grad_()),
    )


@spmd(world_size=4)
def test_linear_equals_the_single_device_for_every_layout() -> None:
    """F.linear, its bias and all three gradients, over the product of placements on a 2-D mesh."""
    mesh = init_device_mesh("cpu", (2, 2))
    x, w, b = torch.randn(2, 4, 6), torch.randn(8, 6), torch.randn(8)
    ref = [t.clone().requires_grad_() for t in (x, w, b)]
    F.linear(*ref).square().sum().backward()
    for px, pw in itertools.product(
        itertools.product([R, Shard(0), Shard(1), Shard(2)], repeat=2),
        itertools.product([R, Shard(0), Shard(1)], repeat=2),
    ):
        d = [
            distribute_tensor(t, mesh, p, src_data_rank=None).requires_grad_()
            for t, p in ((x, px), (w, pw), (b, (R, R)))
        ]
        out = F.linear(*d)
        _close(out, F.linear(x, w, b))
        out.square().sum().backward()
        for a, e in zip(d, ref, strict=True):
            assert a.grad is not None
            assert e.grad is not None
            _close(a.grad, e.grad, rtol=1e-4, atol=1e-4)


@spmd(world_size=2)
def test_linear_on_a_sharded_sequence_stays_local() -> None:
    """A token-wise layer leaves a sharded sequence sharded and sends nothing."""
    mesh = init_device_mesh("cpu", (2,))
    x, w, b = torch.randn(2, 8, 4), torch.randn(6, 4), torch.randn(6)
    d = [distribute_tensor(t, mesh, [p]) for t, p in ((x, Shard(1)), (w, R), (b, R))]
    with CommDebugMode() as comm:
        out = F.linear(*d)
    assert comm.get_total_counts() == 0
    assert out.placements == (Shard(1),)
    _close(out, F.linear(x, w, b))


@spmd(world_size=2)
def test_addends_meet_plain_numbers_and_replicas_once() -> None:
    """A Partial value plus a number, a 0-d tensor or a replica adds it once, not once a rank."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(10.0).reshape(10, 1)
    one = torch.ones(())
    for f in (
        lambda t: t + 10,
        lambda t: t + torch.tensor(10),
        lambda t: 10 + t,
        lambda t: t - 10,
        lambda t: 10 - t,
        lambda t: torch.add(t, 3, alpha=2),
        lambda t: t * 2 + 1,
        lambda t: t / 2 - 1,
        lambda t: t * t,
        lambda t: t.abs(),
        lambda t: torch.maximum(t, -t),
        lambda t: 1 / t,
    ):
        total = distribute_tensor(x, mesh, [Shard(0)]).sum()
        assert total.is_partial()
        _close(f(total), f(x.sum()))
    total = distribute_tensor(x, mesh, [Shard(0)]).sum()
    total.add_(10).sub_(3.0)
    assert total.is_partial()
    _close(total, x.sum() + 7)
    total = distribute_tensor(x, mesh, [Shard(0)]).sum()
    _close(total + distribute_tensor(one, mesh, [R]), x.sum() + 1)


@spmd(world_size=2)
def test_values_read_on_the_host_are_global() -> None:
    """item, float, int, bool, tolist and equal see the whole tensor on every rank."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(6.0)
    total = distribute_tensor(x, mesh, [Shard(0)]).sum()
    assert total.item() == float(total) == int(total) == total.tolist() == 15
    assert bool(total)
    a, b = x.clone(), x.clone()
    b[5] = 9
    da, db = (distribute_tensor(t, mesh, [Shard(0)]) for t in (a, b))
    assert torch.equal(da, db) is False
    assert torch.equal(da, distribute_tensor(a, mesh, [R])) is True
    assert torch.allclose(da, db) is False


@spmd(world_size=2)
def test_in_place_operators_keep_their_layout_or_refuse() -> None:
    """An in-place operator writes through, and one that would have to change the layout says so."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(1.0, 7.0)
    d = distribute_tensor(x, mesh, [Shard(0)])
    same = d.mul_(2).add_(distribute_tensor(x, mesh, [R]))
    assert same is d
    _close(d, x * 3)
    total = distribute_tensor(x, mesh, [Shard(0)]).sum()
    with pytest.raises(
        InPlaceError, match="in-place operations that require placement changes are not supported"
    ):
        total.clamp_(max=2)


@spmd(world_size=2)
def test_writing_to_a_slice_reaches_the_tensor() -> None:
    """A slice that had to be gathered is no view on this rank; a write to it is sent to where it belongs."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    whole = torch.ones(8, 4)
    d[:2].zero_()
    whole[:2] = 0
    d[5, 1:3] = 7
    whole[5, 1:3] = 7
    d[1:6][2].add_(3)
    whole[1:6][2].add_(3)
    d.diagonal().fill_(9)
    whole.diagonal().fill_(9)
    _close(d, whole)
    e = distribute_tensor(torch.ones(8, 4), mesh, [Shard(1)])
    e[:2].zero_()
    _close(e, torch.cat([torch.zeros(2, 4), torch.ones(6, 4)]))


@spmd(world_size=2)
def test_reshaping_in_place_changes_the_layout_with_the_shape() -> None:
    """``transpose_`` and its like move the cut to where its dim goes."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 6)
    d = distribute_tensor(x, mesh, [Shard(0)])
    d.transpose_(0, 1)
    assert (d.shape, d.placements) == ((6, 4), (Shard(1),))
    d.unsqueeze_(0)
    assert (d.shape, d.placements) == ((1, 6, 4), (Shard(2),))
    d.squeeze_(0).t_()
    _close(d, x)


@spmd(world_size=2)
def test_mixing_with_plain_tensors_is_an_error_unless_it_is_safe() -> None:
    """Scalars, one-element and integer tensors mix freely; float tensors only when told that they are replicated."""
    mesh = init_device_mesh("cpu", (2,))
    x, k = torch.randn(4, 4), torch.randn(4, 4)
    d = distribute_tensor(x, mesh, [Shard(0)])
    _close(d * torch.tensor(2.0), x * 2)
    _close(d + torch.tensor([[1.0]]), x + 1)
    with pytest.raises(
        MixedTensorError,
        match=r"got mixed torch.Tensor and DTensor: tensor argument 1 .* \(4, 4\)",
    ):
        d + k
    with implicit_replication():
        _close(d + k, x + k)
        _close(d @ k, x @ k)
        _close(torch.cat([d, k]), torch.cat([x, k]))
    with pytest.raises(MixedTensorError):
        d + k


@spmd(world_size=2)
def test_strict_mode_names_the_hidden_collective() -> None:
    """Inside strict() an operator that must communicate raises, and explicit moves go on working."""
    mesh = init_device_mesh("cpu", (2,))
    a = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    with strict():
        with pytest.raises(ImplicitCommunicationError, match="mm"):
            a @ a
        a.redistribute(placements=[R])
        (a + a).relu()
    _close(a @ a, _whole(a) @ _whole(a))


@spmd(world_size=4)
def test_from_local_checks_what_it_is_told() -> None:
    """Pieces that the shard rule would not give are refused, with run_check by the same error on all ranks."""
    mesh = init_device_mesh("cpu", (4,))
    rank = mesh.get_local_rank()
    whole = torch.arange(20.0).reshape(10, 2)
    piece = whole.chunk(4)[rank]
    assert DTensor.from_local(piece, mesh, [Shard(0)], run_check=True).shape == (10, 2)
    _close(DTensor.from_local(piece, mesh, [Shard(0)], shape=(10, 2)), whole)
    odd = torch.zeros(2, 2 + rank)
    with pytest.raises(
        LayoutError, match=r"mesh coordinate \(0,\) holds a local tensor of shape \(2, 2\)"
    ):
        DTensor.from_local(odd, mesh, [Shard(1)], run_check=True)
    with pytest.raises(LayoutError, match="stride"):
        DTensor.from_local(piece, mesh, [Shard(0)], stride=(2, 1))
    replica = torch.full((3,), float(rank))
    _close(DTensor.from_local(replica, mesh, [R], run_check=True), torch.zeros(3))


@spmd(world_size=4)
def test_alias_strings_stand_for_placements() -> None:
    """Names of axes, one entry a dim, mean the same as placements, and the order in a tuple is kept."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.arange(32.0).reshape(8, 4)
    d = distribute_tensor(x, mesh, ("dp", "tp"))
    assert d.placements == (Shard(0), Shard(1))
    assert d.redistribute(placements=("None", "tp")).placements == (R, Shard(1))
    assert d.redistribute(placements=(("dp", "tp"), "None")).placements == (Shard(0), Shard(0))
    swapped = d.redistribute(placements=(("tp", "dp"), "None"))
    assert swapped.placements == (StridedShard(0, split_factor=2), Shard(0))
    dp, tp = mesh.get_coordinate()
    assert torch.equal(swapped.to_local(), x[tp * 4 + dp * 2 : tp * 4 + dp * 2 + 2])
    _close(swapped, x)
    with pytest.raises(LayoutError, match="'pp' on dim 0 is no axis"):
        distribute_tensor(x, mesh, ("pp", "None"))


@spmd(world_size=2)
def test_copies_pickles_and_saves_by_value() -> None:
    """deepcopy, pickle and torch.save keep values, layout, requires_grad and the kind of parameter."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(5, 3)
    d = torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]))
    for other in (copy.deepcopy(d), pickle.loads(pickle.dumps(d))):
        assert isinstance(other, DTensor)
        assert isinstance(other, torch.nn.Parameter)
        assert other.requires_grad
        assert other.placements == d.placements
        assert other.shape == (5, 3)
        _close(other.detach(), x)
        assert other.to_local().data_ptr() != d.to_local().data_ptr()
    buffer = io.BytesIO()
    torch.save({"d": d}, buffer)
    buffer.seek(0)
    _close(torch.load(buffer, weights_only=False)["d"].detach(), x)
    buffer.seek(0)
    _close(torch.load(buffer, weights_only=True)["d"].detach(), x)


@spmd(world_size=2)
def test_data_and_copy_write_values_and_layout() -> None:
    """Setting .data replaces the local tensor; copy_ takes another layout or a plain whole tensor."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 3)
    d = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
    d.copy_(x)
    _close(d, x)
    d.copy_(distribute_tensor(2 * x, mesh, [Shard(1)]))
    _close(d, 2 * x)
    d.data = distribute_tensor(3 * x, mesh, [Shard(1)])
    assert d.placements == (Shard(1),)
    _close(d, 3 * x)
    d.requires_grad_()
    d.data = distribute_tensor(x, mesh, [R])
    (d * distribute_tensor(x, mesh, [Shard(0)])).sum().backward()
    assert isinstance(d.grad, DTensor)
    assert d.grad.placements == (R,)
    _close(d.grad, x)


@spmd(world_size=2)
def test_a_module_moves_and_is_emptied_with_its_parameters_kept() -> None:
    """module.to and to_empty exchange the tensors behind parameter objects, and gradients go on being laid out."""
    mesh = init_device_mesh("cpu", (2,))
    net = torch.nn.Linear(4, 6, bias=False)
    net.weight = torch.nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, [R]))
    kept = net.weight
    net.to(torch.float64)
    assert net.weight is kept
    x = torch.randn(2, 4, dtype=torch.float64)
    net(distribute_tensor(x, mesh, [Shard(0)])).sum().backward()
    assert isinstance(net.weight.grad, DTensor)
    assert net.weight.grad.placements == (R,)
    _close(net.weight.grad, x.sum(0).expand(6, 4))
    net.weight.grad = None
    net.to("meta").to_empty(device="cpu")
    assert net.weight.to_local().shape == (6, 4)


@spmd(world_size=3)
def test_a_rank_outside_the_mesh_takes_part_without_data() -> None:
    """On a mesh smaller than the world the other ranks run the same program on empty pieces."""
    from hp_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 1])
    d = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    out = (d * 2).sum()
    if torch.distributed.get_rank() < 2:
        _close(out, torch.arange(6.0).sum() * 2)
    else:
        assert d.to_local().numel() == 0


@spmd(world_size=4)
def test_the_gradient_of_replicas_is_scattered_as_it_is_summed() -> None:
    """A shard that was gathered to be used rank by rank gets its gradient by one reduce-scatter."""
    mesh = init_device_mesh("cpu", (4,))
    d = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)]).requires_grad_()
    local = d.redistribute(placements=[R]).to_local(grad_placements=[Partial()])
    with CommDebugMode() as comm:
        (local * (mesh.get_local_rank() + 1)).sum().backward()
    assert comm.get_comm_counts() == {torch.ops._c10d_functional.reduce_scatter_tensor: 1}
    assert d.grad is not None
    assert d.grad.placements == (Shard(0),)
    _close(d.grad, torch.full((8, 3), 10.0))


@spmd(world_size=3)
def test_questions_outside_the_mesh_have_answers() -> None:
    """A rank that holds nothing gets a zero for a scalar, and finds its empty pieces equal."""
    from hp_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 2])
    a, b = (DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)]) for _ in range(2))
    assert a.equal(b)
    assert a.is_same_size(b)
    assert not torch.ones(4, 3).is_same_size(a)
    total = a.sum().to_local()
    inside = mesh.get_coordinate() is not None
    assert total.shape == ()
    assert total.item() == (12.0 if inside else 0.0)
    parts = [part.to_local().numel() for part in a.split([2, 1], dim=1)]
    assert parts == ([8, 4] if inside else [0, 0])


@spmd(world_size=2)
def test_as_strided_gives_back_what_is_there() -> None:
    """Asked for the size and strides it has, a sharded tensor stays where it is; other strides need it whole."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(24.0).view(6, 4)
    d = distribute_tensor(x, mesh, [Shard(0)])
    same = d.as_strided(d.size(), d.stride())
    assert same.placements == (Shard(0),)
    _close(same, x)
    _close(d.as_strided((3, 4), (8, 1)), x.as_strided((3, 4), (8, 1)))


@spmd(world_size=2)
def test_meta_tensors_never_communicate() -> None:
    """A tensor without data is laid out without a collective and stays without data."""
    mesh = init_device_mesh("cpu", (2,))
    with CommDebugMode() as comm:
        d = distribute_tensor(torch.empty(8, 4, device="meta"), mesh, [Shard(0)])
    assert comm.get_total_counts() == 0
    assert d.to_local().is_meta
    assert d.shape == (8, 4)


@spmd(world_size=2)
def test_factories_make_only_the_local_piece() -> None:
    """Zeros of an uneven shape has the exact global shape and the chunk's local shape."""
    mesh = init_device_mesh("cpu", (2,))
    d = zeros(
        5, 3, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64, requires_grad=True
    )
    assert (d.shape, d.dtype, d.requires_grad) == ((5, 3), torch.float64, True)
    assert d.local_shape[0] == (3, 2)[mesh.get_local_rank()]
    with mesh:
        assert zeros((2, 2)).placements == (R,)


@spmd(world_size=2)
def test_wrong_placements_are_named() -> None:
    """Each malformed layout gets one error that says what is legal."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.zeros(2, 2)
    for bad, words in (
        ([Shard(2)], "dims from -2 to 1 are legal"),
        ([R, R], "2 placements .* for a mesh of 1 axes"),
        ([0], "each entry must be a Placement"),
        ([Partial("median")], "the reduce op must be one of"),
    ):
        with pytest.raises(LayoutError, match=words):
            distribute_tensor(x, mesh, bad)
    assert distribute_tensor(x, mesh, [Shard(-1)]).placements == (Shard(1),)


@spmd(world_size=2)
def test_a_number_is_formatted_as_one() -> None:
    """A 0-d tensor takes the format of its number, addends and gradients included; others only the empty format."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.tensor([1.25, 2.5]), mesh, [Shard(0)]).requires_grad_()
    assert f"{x.sum():.2f} {(x.sum() * 2):6.1f}" == "3.75    7.5"
    assert f"{(x > 2).sum():03d}" == "001"
    assert f"{x}" == str(x)
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{x:.2f}"


@spmd(world_size=2)
def test_members_that_read_memory_in_c() -> None:
    """``apply_`` and ``share_memory_`` act on the piece; the memory is lent to no other library, and nothing crashes."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(6, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(whole.clone(), mesh, [placement])
        assert x.apply_(lambda v: 2 * v) is x
        x[1:5].apply_(lambda v: -v)
        expected = 2 * whole
        expected[1:5] *= -1
        assert torch.equal(x.full_tensor(), expected)
        assert not x.is_shared()
        assert x.share_memory_().is_shared()
        with pytest.raises(BufferError, match="to_local"):
            torch.from_dlpack(x)
    addends = DTensor.from_local(whole, mesh, [Partial()])
    with pytest.raises(InPlaceError, match="reduce_partial"):
        addends.apply_(abs)


@spmd(world_size=2)
def test_torch_collectives_take_no_layouts() -> None:
    """A call of ``torch.distributed`` on pieces or addends is refused on each rank; on replicas it is what it says."""
    mesh = init_device_mesh("cpu", (2,))
    pieces = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    addends = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
    replicas = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
    plain = [torch.zeros(4, 2) for _ in range(2)]
    for call in (
        lambda: dist.all_reduce(pieces),
        lambda: dist.all_reduce(addends),
        lambda: dist.broadcast(pieces, 0),
        lambda: dist.all_gather([torch.zeros_like(pieces) for _ in range(2)], pieces),
        lambda: dist.all_gather(plain, replicas),
        lambda: dist.reduce_scatter_tensor(torch.zeros_like(pieces), pieces),
    ):
        with pytest.raises(NoRuleError, match="knows no layouts"):
            call()
    dist.all_reduce(replicas)
    assert torch.equal(replicas.to_local(), torch.full((4, 2), 2.0))


@spmd(world_size=2)
def test_operators_describe_their_results_outside_of_the_mesh() -> None:
    """A rank that the mesh does not have runs the same program without an error, whatever the operator needs to know."""
    half = DeviceMesh("cpu", [0])
    x = distribute_tensor(torch.randn(6, 4), half, [Shard(0)])
    index = distribute_tensor(torch.zeros(6, 4, dtype=torch.long), half, [Shard(0)])
    results = [
        x.mean(),
        x.mean(0),
        x.var(0),
        x.tril(),
        x.gather(0, index),
        x.index_select(0, index[:, 0]),
        F.embedding(index, x),
        F.rms_norm(x, (4,)),
        F.group_norm(x, 2),
        x.quantile(0.5),
        torch.linalg.inv(distribute_tensor(torch.eye(4), half, [Shard(0)])),
    ]
    assert [tuple(r.shape) for r in results[:4]] == [(), (4,), (4,), (6, 4)]
    x.requires_grad_()
    F.embedding(index, x).sum().backward()
    assert x.grad is not None


@spmd(world_size=2)
def test_set_makes_another_name_of_the_source() -> None:
    """``set_`` of what shares a tensor's piece leaves that tensor as it was, whatever the layouts and shapes are."""
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Replicate()):
        for shape in ((4, 2), (6,)):
            x = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [placement]))
            other = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
            view = x.detach()
            assert view.set_(other) is view
            assert torch.equal(x.full_tensor(), torch.ones(4, 2))  # type: ignore[attr-defined]  # distributed
            assert view.shape == shape
            assert view.placements == other.placements  # type: ignore[attr-defined]  # as above
            view.add_(1)
            assert torch.equal(other.full_tensor(), torch.ones(shape))
    with pytest.raises(MixedTensorError, match="distribute_tensor"):
        distribute_tensor(torch.ones(4), mesh, [Shard(0)]).set_(torch.ones(4))
