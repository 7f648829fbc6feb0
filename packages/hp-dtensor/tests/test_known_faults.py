"""Faults that users of distributed tensors reported, each with the rest of its kind: the single device's value and gradient.

Kinds: uneven and empty shards, views of cut dims, addends that meet other operators, gradients across the border, state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

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
    StridedShard,
    distribute_tensor,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

R = Replicate()
Op = Callable[..., torch.Tensor]


def _equal(got: torch.Tensor, want: torch.Tensor, case: object) -> None:
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(whole, want, msg=lambda text: f"{case}: {text}")


def _agrees(op: Op, inputs: list[torch.Tensor], laid: list[torch.Tensor], case: object) -> None:
    """Value and gradients of *op* on *laid* are those on *inputs*."""
    alone = [t.clone().requires_grad_() for t in inputs]
    mine = [t.detach().requires_grad_() for t in laid]
    want, got = op(*alone), op(*mine)
    _equal(got, want, case)
    weight = torch.linspace(-1, 2, want.numel()).reshape(want.shape)
    (want * weight).sum().backward()
    ((got.full_tensor() if isinstance(got, DTensor) else got) * weight).sum().backward()
    for a, b in zip(mine, alone, strict=True):
        assert a.grad is not None, case
        assert b.grad is not None
        _equal(a.grad, b.grad, ("gradient", case))


@spmd(world_size=4)
def test_reductions_weigh_uneven_and_empty_pieces() -> None:
    """mean, var, norm, logsumexp and extremes over a dim of 7, 3 or 1 rows on four ranks; the mean gathers nothing."""
    mesh = init_device_mesh("cpu", (4,))
    ops: list[Op] = [
        lambda t: t.mean(),
        lambda t: t.mean(0),
        lambda t: t.var(0) if t.shape[0] > 1 else t.sum(0),
        lambda t: t.norm(),
        lambda t: t.logsumexp(0),
        lambda t: t.amax(0),
        lambda t: t.std(1),
    ]
    for rows, (number, op) in itertools.product((7, 3, 1), enumerate(ops)):
        x = torch.linspace(-3, 4, rows * 5).reshape(rows, 5)
        d = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
        _agrees(op, [x], [d], (rows, number))
    with CommDebugMode() as comm:
        d.mean().full_tensor()
    assert not any("gather" in op.__name__ for op in comm.get_comm_counts())


@spmd(world_size=4)
def test_products_and_reshapes_of_uneven_pieces() -> None:
    """A contraction of no indices, of uneven ones, flattening with an empty rank, splitting, padding and stacking."""
    mesh = init_device_mesh("cpu", (4,))
    a, b, none = torch.randn(3, 5), torch.randn(5, 2), torch.randn(3, 0)
    for tensor in (a, b):
        torch.distributed.broadcast(tensor, 0)
    for pa, pb in itertools.product([R, Shard(0), Shard(1)], repeat=2):
        laid = [distribute_tensor(t, mesh, [p], src_data_rank=None) for t, p in ((a, pa), (b, pb))]
        _agrees(lambda x, y: x @ y, [a, b], laid, (pa, pb))
        empty = distribute_tensor(none, mesh, [pa]) @ distribute_tensor(none.T, mesh, [pb])
        _equal(empty, torch.zeros(3, 3), (pa, pb))
    x = torch.arange(30.0).reshape(3, 5, 2)
    ops: list[Op] = [
        lambda t: t.flatten(0, 1),
        lambda t: t.reshape(3, 10),
        lambda t: t.reshape(-1),
        lambda t: t.split(2, 1)[1],
        lambda t: t.unflatten(1, (5, 1)),
        lambda t: torch.stack([t, t], 1),
        lambda t: F.pad(t, (1, 0, 2, 1)),
        lambda t: t.permute(2, 0, 1).contiguous(),
        lambda t: t.unbind(0)[2],
    ]
    for (number, op), dim in itertools.product(enumerate(ops), range(3)):
        d = distribute_tensor(x, mesh, [Shard(dim)], src_data_rank=None)
        _agrees(op, [x], [d], (number, dim))


@spmd(world_size=4)
def test_two_axes_on_one_dim_keep_their_order() -> None:
    """Both orders of nesting, even and uneven: whole tensors, contractions against the other order, views."""
    mesh = init_device_mesh("cpu", (2, 2))
    orders: list[tuple[Placement, Placement]] = [
        (Shard(0), Shard(0)),
        (StridedShard(0, split_factor=2), Shard(0)),
    ]
    for rows in (8, 7, 3):
        x, y = torch.arange(rows * 3.0).reshape(rows, 3), torch.arange(rows * 2.0).reshape(rows, 2)
        for one, other in itertools.product(orders, repeat=2):
            dx = distribute_tensor(x, mesh, one, src_data_rank=None)
            dy = distribute_tensor(y, mesh, other, src_data_rank=None)
            _equal(dx, x, one)
            _agrees(lambda a, b: a.T @ b, [x, y], [dx, dy], (rows, one, other))
            _agrees(lambda a, b: torch.cat([a, b], 1), [x, y], [dx, dy], (rows, one, other))
            _agrees(lambda a: a.reshape(-1), [x], [dx], (rows, one))
            _agrees(lambda a: a[1 : rows - 1].cumsum(0), [x], [dx], (rows, one))  # noqa: B023
    square = torch.arange(64.0).reshape(4, 4, 4)
    for pair in itertools.permutations([Shard(0), Shard(1)]):
        d = distribute_tensor(square, mesh, pair, src_data_rank=None)
        _agrees(lambda t: t.flatten(0, 1) * 2, [square], [d], pair)
        _agrees(lambda t: t.flatten(0, 1).unflatten(0, (4, 4)), [square], [d], pair)


@spmd(world_size=2)
def test_addends_of_both_signs_meet_what_is_not_linear() -> None:
    """A sum that is still to be taken, in scalars, extremes, products, casts, comparisons and in-place operators."""
    mesh = init_device_mesh("cpu", (2,))
    halves = torch.tensor([[3.0, -1.0, 0.5, -4.0], [-5.0, 2.0, 0.5, 9.0]])
    mine, whole = halves[mesh.get_local_rank()], halves.sum(0)

    def addend() -> DTensor:
        return DTensor.from_local(mine.clone(), mesh, [Partial()])

    ops: list[Op] = [
        lambda t: t + 10,
        lambda t: 1 - t / 2,
        lambda t: t * t,
        lambda t: t.max() - t.min(),
        lambda t: t.norm(),
        lambda t: t.relu(),
        lambda t: torch.where(t > 0, t, -t),
        lambda t: t.clamp(max=1),
        lambda t: t.to(torch.bfloat16).float(),
        lambda t: t.softmax(0),
        lambda t: t.sum() * t,
        lambda t: torch.maximum(t, t.flip(0)),
        lambda t: (t == 1).float() + 0 * t,
    ]
    for number, op in enumerate(ops):
        _equal(op(addend()), op(whole), number)
    assert addend().sum().item() == whole.sum().item()
    assert bool((addend().sum() == whole.sum()).item())
    assert addend().to(torch.float64).is_partial()
    doubled = addend()
    doubled.mul_(2)
    _equal(doubled, whole * 2, "in place")
    for kind in ("avg", "max", "min"):
        moved = addend().redistribute(placements=[Partial(kind)])
        _equal(moved, whole, kind)
        made = distribute_tensor(whole, mesh, [R]).redistribute(placements=[Partial(kind)])
        _equal(made, whole, kind)
        _equal(made * 2, whole * 2, kind)


@spmd(world_size=2)
def test_gradients_of_what_is_shared_by_cut_things() -> None:
    """A bias after a row-parallel product, a key shared by cut heads, experts, a gate: every gradient is whole."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, w, bias = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)
    rows = [distribute_tensor(t, mesh, [p]) for t, p in ((x, Shard(1)), (w, Shard(1)), (bias, R))]
    _agrees(lambda a, b, c: F.linear(a, b) + c, [x, w, bias], rows, "row-parallel")
    _agrees(lambda a, b, c: c - F.linear(a, b) * 2, [x, w, bias], rows, "row-parallel, minus")
    keys, shared = torch.randn(2, 4, 3, 2), torch.randn(2, 1, 3, 2)
    heads = [distribute_tensor(t, mesh, [p]) for t, p in ((keys, Shard(1)), (shared, R))]
    _agrees(
        lambda k, s: torch.cat([k, s.expand(2, 4, 3, 2)], -1).square(),
        [keys, shared],
        heads,
        "heads",
    )
    tokens, experts, gate = torch.randn(6, 3), torch.randn(4, 3, 3), torch.randn(6, 4)
    laid = [
        distribute_tensor(t, mesh, [p]) for t, p in ((tokens, R), (experts, Shard(0)), (gate, R))
    ]
    _agrees(
        lambda t, e, g: torch.einsum("td,edf,te->tf", t, e, g.softmax(-1)),
        [tokens, experts, gate],
        laid,
        "experts",
    )


@spmd(world_size=4)
def test_a_state_goes_in_and_comes_out_bit_for_bit() -> None:
    """A whole state dict into cut, short, empty and scalar parameters on one and two axes, and back."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in (("a", (1, 17)), ("b", (5,)), ("c", (0, 3)), ("d", ())):
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    for shape, layouts in (
        ((4,), ([Shard(0)], [R])),
        ((2, 2), ([Shard(0), Shard(0)], [R, Shard(0)])),
    ):
        mesh = init_device_mesh("cpu", shape)
        for layout in layouts:
            net = Odd()
            whole = {k: torch.randn_like(v) for k, v in net.state_dict().items()}
            for tensor in whole.values():
                torch.distributed.broadcast(tensor, 0)
            for name, parameter in list(net.named_parameters()):
                placements = layout if parameter.ndim else [R] * mesh.ndim
                laid = distribute_tensor(parameter.detach(), mesh, placements)
                net.register_parameter(name, nn.Parameter(laid))
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(net, dict(whole), options=options)
            out = get_model_state_dict(net, options=options)
            for name, tensor in whole.items():
                held = net.get_parameter(name)
                assert isinstance(held, DTensor)
                assert torch.equal(held.detach().full_tensor(), tensor), (name, layout)
                if torch.distributed.get_rank() == 0:
                    assert torch.equal(out[name], tensor), (name, layout)


@spmd(world_size=2)
def test_conversions_keep_the_layout() -> None:
    """type, type_as, float, double, to and data, on a cut tensor and on addends."""
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Partial(), R):
        d = distribute_tensor(torch.arange(5.0), mesh, [placement])
        other = distribute_tensor(torch.ones(2, dtype=torch.float64), mesh, [R])
        for made in (
            d.type(torch.float64),
            d.type_as(other),
            d.double(),
            d.to(torch.float64),
            d.to(other),
        ):
            assert isinstance(made, DTensor)
            assert (made.dtype, made.placements) == (torch.float64, (placement,))
            _equal(made, torch.arange(5.0, dtype=torch.float64), placement)
        assert isinstance(d.data, DTensor)
        assert d.float() is d
        assert not d.data.requires_grad
    with pytest.raises(TypeError):
        d.copy_("text")  # type: ignore[arg-type]
