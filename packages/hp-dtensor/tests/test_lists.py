"""List operators and the optimizers made of them, against the single device."""

from __future__ import annotations

import itertools

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    ImplicitCommunicationError,
    MixedTensorError,
    Partial,
    Replicate,
    Shard,
    cache_statistics,
    distribute_tensor,
    implicit_replication,
    spec,
    strict,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

R = Replicate()


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid(tensor: torch.Tensor | None) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


@spmd(world_size=4)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
        (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
        (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
        (torch.optim.Adam, {"lr": 0.1, "fused": True, "amsgrad": True}),
        (torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
        (torch.optim.AdamW, {"lr": 0.1, "foreach": True, "capturable": False, "maximize": True}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
        (torch.optim.Adagrad, {"lr": 0.1, "foreach": True, "lr_decay": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
        (torch.optim.RMSprop, {"lr": 0.1, "foreach": True, "weight_decay": 0.1}),
        (torch.optim.Adafactor, {"lr": 0.1, "foreach": False}),
        (torch.optim.Adafactor, {"lr": 0.1, "foreach": True, "weight_decay": 0.1}),
        (torch.optim.Muon, {"lr": 0.1}),
        (torch.optim.NAdam, {"lr": 0.1, "foreach": True}),
        (torch.optim.RAdam, {"lr": 0.1}),
        (torch.optim.Adamax, {"lr": 0.1, "foreach": True}),
        (torch.optim.ASGD, {"lr": 0.1}),
        (torch.optim.Adadelta, {"lr": 0.1, "foreach": True}),
        (torch.optim.Rprop, {"lr": 0.1, "foreach": True}),
    ],
)
def test_an_optimizer_over_mixed_meshes_equals_the_single_device(
    kind: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:
    """Parameters on a 2-D mesh, on a slice of it and on no mesh, in one group, are updated as on one device."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    starts = [torch.randn(5, 4) for _ in range(3)]
    mine = [
        nn.Parameter(distribute_tensor(starts[0], mesh, [Shard(0), Shard(1)])),
        nn.Parameter(distribute_tensor(starts[1], mesh["dp"], [Shard(0)])),
        nn.Parameter(starts[2].clone()),
    ]
    alone = [nn.Parameter(start.clone()) for start in starts]
    optimizers = [kind(mine, **options), kind(alone, **options)]
    for step in range(3):
        for p, q in zip(mine, alone, strict=True):
            p.grad, q.grad = (t.detach() * 0.5 + step for t in (p, q))
        for optimizer in optimizers:
            optimizer.step()
    # Muon multiplies in bfloat16.
    loose = {"rtol": 2e-2, "atol": 2e-2} if kind is torch.optim.Muon else {}
    for p, q in zip(mine, alone, strict=True):
        torch.testing.assert_close(_whole(p.detach()), q.detach(), **loose)


@spmd(world_size=2)
def test_state_of_an_optimizer_is_laid_out_like_its_parameter() -> None:
    """Moments made by zeros_like carry the parameter's placements."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)]))
    p.grad = p.detach().clone()
    optimizer = torch.optim.AdamW([p])
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].placements == (Shard(1),)


@spmd(world_size=2)
def test_foreach_forms_equal_the_single_tensors() -> None:
    """Scalars, tensor scalars, lists of scalars and ternary forms give the plain result in the same layout."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(5, 4)
    d, two = distribute_tensor(x, mesh, [Shard(0)]), torch.tensor(2.0)
    for got, want in (
        (torch._foreach_mul([d], 2.0), x * 2),
        (torch._foreach_mul([d], two), x * 2),
        (torch._foreach_div([d], [3.0]), x / 3),
        (torch._foreach_add([d], [d], alpha=2), x * 3),
        (torch._foreach_addcdiv([d], [d], [d.abs() + 1], [0.5]), x + 0.5 * x / (x.abs() + 1)),
        (torch._foreach_lerp([d], [distribute_tensor(2 * x, mesh, [R])], 0.25), x * 1.25),
        (torch._foreach_sqrt([d.abs()]), x.abs().sqrt()),
    ):
        assert got[0].placements == (Shard(0),)
        torch.testing.assert_close(_whole(got[0]), want)
    for power in (1.0, 2.0, float("inf")):
        torch.testing.assert_close(
            _whole(torch._foreach_norm([d], power)[0]), torch.linalg.vector_norm(x, power)
        )
        assert torch._foreach_norm([d], power, dtype=torch.float64)[0].dtype == torch.float64


@spmd(world_size=2)
def test_addends_stay_addends_where_the_operator_is_linear() -> None:
    """Scaling keeps a Partial, a nonlinear operator combines all of them in one collective."""
    mesh = init_device_mesh("cpu", (2,))
    xs = [torch.randn(3) - rank for rank in range(8)]
    ds = [DTensor.from_local(x, mesh, [Partial()]) for x in xs]
    with CommDebugMode() as comm:
        scaled = torch._foreach_mul(ds, 3.0)
        added = torch._foreach_add(ds, ds)
    assert comm.get_total_counts() == 0
    for got, x in zip(scaled, xs, strict=True):
        assert got.is_partial()
        torch.testing.assert_close(_whole(got), 6 * x)
    torch.testing.assert_close(_whole(added[3]), 4 * xs[3])
    with CommDebugMode() as comm:
        sizes = torch._foreach_abs(ds)
    assert comm.get_total_counts() == 1
    for got, x in zip(sizes, xs, strict=True):
        torch.testing.assert_close(_whole(got), (2 * x).abs())
    wanted = [(2 * x).abs() for x in xs]  # the addends are these tensors themselves
    with CommDebugMode() as comm:
        torch._foreach_abs_(ds)
    assert comm.get_total_counts() == 1
    for got, want in zip(ds, wanted, strict=True):
        assert got.is_partial()
        torch.testing.assert_close(_whole(got), want)


@spmd(world_size=2)
def test_an_infinity_on_one_rank_skips_the_step_on_all() -> None:
    """GradScaler sees an overflow that only one rank's shard has."""
    mesh = init_device_mesh("cpu", (2,))
    grad = torch.tensor([1.0, 2.0, 3.0, float("inf")])
    d = distribute_tensor(grad, mesh, [Shard(0)])
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([d], found, torch.ones(1))
    assert found.item() == 1.0


@spmd(world_size=2)
def test_the_plans_of_a_training_loop_stop_growing() -> None:
    """Step-dependent scalars of an optimizer add no plan after the first steps."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([p], lr=0.1, foreach=False)
    sizes = []
    for _ in range(30):
        p.grad = p.detach() * 0.1
        optimizer.step()
        sizes.append(cache_statistics()["plans"])
    assert sizes[3] == sizes[-1]


@pytest.mark.nightly
@spmd(world_size=2, timeout=280)
def test_the_caches_of_a_long_training_are_those_of_a_short_one() -> None:
    """After 10,000 steps there are as many plans and specs as after ten."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([p], lr=0.1, foreach=True)
    sizes = []
    for step in range(10_000):
        p.grad = p.detach() * 0.1
        optimizer.step()
        if step in {10, 9_999}:
            sizes.append((cache_statistics()["plans"], len(spec._specs)))
    assert sizes[0] == sizes[1]


@spmd(world_size=4)
def test_tensors_of_different_meshes_do_not_meet() -> None:
    """Each position of the lists has one mesh; pieces of two meshes would be added although they do not fit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    of_x = [distribute_tensor(torch.ones(4, 3), mesh["x"], [Shard(0)]) for _ in range(2)]
    of_y = [distribute_tensor(torch.ones(4, 3), mesh["y"], [Shard(0)]) for _ in range(2)]
    with pytest.raises(RuntimeError, match="live on different meshes"):
        torch._foreach_add(of_x, of_y)
    mixed = torch._foreach_add([of_x[0], of_y[0]], [of_x[1], of_y[1]])
    for got, axis in zip(mixed, "xy", strict=True):
        assert got.device_mesh == mesh[axis]
        torch.testing.assert_close(_whole(got), torch.full((4, 3), 2.0))


@spmd(world_size=2)
def test_reductions_over_lists_are_those_of_the_whole_tensors() -> None:
    """Norms, maxima and sums of powers are numbers of the whole tensors, not of the pieces."""
    mesh = init_device_mesh("cpu", (2,))
    xs = [torch.arange(10.0).view(5, 2) - 4, torch.linspace(-1, 1, 6)]
    ds = [distribute_tensor(x, mesh, [Shard(0)]) for x in xs]
    for name, order in (("_foreach_norm", 3.0), ("_foreach_powsum", 3.0), ("_foreach_max", None)):
        op = getattr(torch.ops.aten, name)
        rest = () if order is None else (order,)
        for got, expected in zip(op(ds, *rest), op(xs, *rest), strict=True):
            assert got.shape == ()
            torch.testing.assert_close(_whole(got), expected)


@spmd(world_size=2)
def test_broadcasting_inside_a_list_gives_the_shape_of_both() -> None:
    """A row and a column at one position give a matrix."""
    mesh = init_device_mesh("cpu", (2,))
    row, column = torch.arange(4.0).view(1, 4), torch.arange(3.0).view(3, 1)
    (got,) = torch._foreach_add(
        [distribute_tensor(row, mesh, [Shard(1)])], [distribute_tensor(column, mesh, [Shard(0)])]
    )
    assert got.shape == (3, 4)
    torch.testing.assert_close(_whole(got), row + column)


@spmd(world_size=2)
def test_a_plain_tensor_in_a_list_needs_to_be_said_to_be_replicated() -> None:
    """As outside of lists: the error names its place, again and again, and ``implicit_replication`` lets it in."""
    mesh = init_device_mesh("cpu", (2,))
    x, k = torch.randn(4, 2), torch.randn(4, 2)
    d = distribute_tensor(x, mesh, [Shard(0)])
    for _ in range(2):
        with pytest.raises(
            MixedTensorError, match=r"mixed torch.Tensor and DTensor: list argument 1"
        ):
            torch._foreach_add([d], [k])
        with implicit_replication():
            torch.testing.assert_close(_whole(torch._foreach_add([d], [k])[0]), x + k)
    flags = torch._foreach_add([d], [torch.ones(4, 2, dtype=torch.int64)])
    torch.testing.assert_close(_whole(flags[0]), x + 1)


@spmd(world_size=2)
def test_what_is_written_to_takes_the_result_in_any_layout_and_with_broadcasting() -> None:
    """In-place list operators on pieces, replicas and addends, with small tensors that are broadcast, equal the plain run."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    layouts = [R, Shard(0), Shard(1), Partial()]
    binary = ("add", "sub", "mul", "div", "maximum", "clamp_min")
    shapes = [
        ((1, 6), (1, 1)),
        ((4, 1), (1, 1)),
        ((5, 3), (5, 1)),
        ((5, 3), (1, 3)),
        ((2, 2), (2, 2)),
    ]
    for shape, small in shapes:
        for a, b in itertools.product(layouts, layouts):
            left, right = torch.rand(shape) + 0.5, torch.rand(small) + 0.5
            mine = distribute_tensor(left, mesh, [a])
            other = distribute_tensor(right, mesh, [b])
            told = f"{shape} {a} with {small} {b}"
            for name in binary:
                for form in (f"_foreach_{name}", f"_foreach_{name}_"):
                    got, want = mine.clone(), left.clone()
                    results = [
                        getattr(torch, form)([x], [y]) for x, y in ((got, other), (want, right))
                    ]
                    ours, plain = (
                        (got, want) if form.endswith("_") else (results[0][0], results[1][0])
                    )
                    torch.testing.assert_close(ours.full_tensor(), plain, msg=f"{form} {told}")
                    assert not form.endswith("_") or got.placements == (a,)
            got, want = mine.clone(), left.clone()
            torch._foreach_sqrt_([got])
            torch._foreach_addcdiv_([got], [mine], [other], 0.5)
            torch._foreach_lerp_([got], [other.expand(shape)], 0.25)
            torch._foreach_sqrt_([want])
            torch._foreach_addcdiv_([want], [left], [right], 0.5)
            torch._foreach_lerp_([want], [right.expand(shape)], 0.25)
            torch.testing.assert_close(got.full_tensor(), want, msg=told)


@spmd(world_size=2)
def test_strict_refuses_a_list_write_that_moves() -> None:
    """A list write that has to combine addends first is communication that nobody asked for."""
    mesh = init_device_mesh("cpu", (2,))
    addends = distribute_tensor(torch.ones(4), mesh, [Partial()])
    with strict(), pytest.raises(ImplicitCommunicationError):
        torch._foreach_sqrt_([addends])
    torch.testing.assert_close(addends.full_tensor(), torch.ones(4))
