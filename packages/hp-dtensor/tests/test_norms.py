"""The gradient norm over mixed meshes against the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    get_total_norm,
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


INF = float("inf")


def _mixed(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = [torch.randn(shape).to(dtype) for shape in ((5, 4), (4,), (3, 2), (7,), ())]
    laid = [
        distribute_tensor(plain[0], mesh, [Shard(0), Shard(1)]),
        distribute_tensor(plain[1], mesh["dp"], [Shard(0)]),
        distribute_tensor(plain[2], mesh["tp"], [R]),
        plain[3].clone(),
        distribute_tensor(plain[4], mesh, [R, R]),
    ]
    return plain, laid


@spmd(world_size=4)
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, INF, -INF])
def test_one_norm_over_two_meshes_and_none(order: float) -> None:
    """Every element counts once, in one collective, for each order of norm."""
    plain, laid = _mixed()
    with CommDebugMode() as comm:
        got = get_total_norm(laid, order)
    assert comm.get_total_counts() == 1
    want = torch.linalg.vector_norm(torch.cat([t.reshape(-1) for t in plain]), order)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, want)


@spmd(world_size=4)
def test_clipping_scales_every_gradient_by_the_same_number() -> None:
    """clip_grad_norm_ equals torch's on one device, and addends are combined first."""
    plain, laid = _mixed()
    mine, alone = ([nn.Parameter(torch.zeros_like(t)) for t in ts] for ts in (laid, plain))
    for p, g in zip([*mine, *alone], [*laid, *plain], strict=True):
        p.grad = g.clone()
    rank = dist.get_rank()
    mesh = laid[0].device_mesh
    addend = torch.full((3,), rank - 1.0)
    mine.append(nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [R, R])))
    mine[-1].grad = DTensor.from_local(addend, mesh, [Partial(), Partial()])
    alone.append(nn.Parameter(torch.zeros(3)))
    alone[-1].grad = torch.full((3,), 2.0)
    got, want = clip_grad_norm_(mine, 0.5), nn.utils.clip_grad_norm_(alone, 0.5)
    torch.testing.assert_close(got, want)
    for p, q in zip(mine, alone, strict=True):
        whole = _whole(p.grad) if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(whole, q.grad)


@spmd(world_size=4)
def test_low_precision_gradients_are_added_in_single() -> None:
    """A bfloat16 norm does not lose the small gradients."""
    mesh = init_device_mesh("cpu", (4,))
    many = torch.full((4096,), 0.01, dtype=torch.bfloat16)
    got = get_total_norm([distribute_tensor(many, mesh, [Shard(0)])])
    torch.testing.assert_close(got, many.double().norm().float(), rtol=1e-5, atol=1e-5)


@spmd(world_size=2)
def test_a_norm_that_is_not_finite_raises_on_every_rank() -> None:
    """error_if_nonfinite sees an infinity that only one rank holds."""
    mesh = init_device_mesh("cpu", (2,))
    grad = distribute_tensor(torch.tensor([1.0, INF]), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="non-finite"):
        get_total_norm([grad], error_if_nonfinite=True)
    assert get_total_norm([]).item() == 0


@spmd(world_size=2)
def test_torchs_own_clipping_works_on_one_mesh() -> None:
    """nn.utils.clip_grad_norm_ returns the global norm as a number, for each order."""
    mesh = init_device_mesh("cpu", (2,))
    w, g = torch.randn(6, 4), torch.randn(6, 4)
    for order in (2.0, 1.0, INF):
        p = nn.Parameter(distribute_tensor(w, mesh, [Shard(0)]))
        p.grad = distribute_tensor(g, mesh, [Shard(0)])
        q = nn.Parameter(w.clone())
        q.grad = g.clone()
        got, want = (nn.utils.clip_grad_norm_([t], 1.0, norm_type=order) for t in (p, q))
        torch.testing.assert_close(float(got), float(want))
        torch.testing.assert_close(_whole(p.grad), q.grad)


ADDENDS = (
    [Partial(), Partial()],
    [Partial(), R],
    [R, Partial("avg")],
    [Shard(0), Partial()],
    [Partial("avg"), Shard(1)],
)


@spmd(world_size=4)
@pytest.mark.parametrize("order", [2.0, 1, 3.5, INF, -INF, 0])
def test_gradients_that_are_addends_travel_with_the_norm(order: float) -> None:
    """Sums and averages, beside cut, replicated and plain gradients: one collective, and they end combined."""
    plain, laid = _mixed()
    mesh = laid[0].device_mesh
    for placements in ADDENDS:
        plain.append(torch.randn(5, 3))
        laid.append(distribute_tensor(plain[-1], mesh, placements))
    mine, alone = [], [nn.Parameter(torch.zeros_like(t)) for t in plain]
    for q, whole, grad in zip(alone, plain, laid, strict=True):
        start = torch.zeros_like(whole)
        if isinstance(grad, DTensor):
            places = [R if place.is_partial() else place for place in grad.placements]
            start = distribute_tensor(start, grad.device_mesh, places)
        mine.append(nn.Parameter(start))
        mine[-1].grad, q.grad = grad.clone(), whole.clone()
    with CommDebugMode() as comm:
        got = clip_grad_norm_(mine, 0.5, order)
    assert comm.get_total_counts() == 1
    torch.testing.assert_close(got, nn.utils.clip_grad_norm_(alone, 0.5, order))
    for p, q in zip(mine, alone, strict=True):
        assert not isinstance(p.grad, DTensor) or not p.grad.is_partial()
        torch.testing.assert_close(_whole(p.grad), q.grad)


@spmd(world_size=4)
def test_addends_that_cannot_travel_are_combined_before() -> None:
    """Extremes are no sums, and a sum of one rank's own mesh is nobody else's."""
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.randn(5, 3)
    extreme = distribute_tensor(whole, mesh, [Partial("max")])
    addend = distribute_tensor(whole, mesh, [Partial()])
    got = get_total_norm([extreme, addend])
    torch.testing.assert_close(got, torch.stack([whole, whole]).norm())


@spmd(world_size=4)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_torchs_own_clipping_over_mixed_meshes(foreach: bool | None) -> None:
    """Parameters on two meshes and on none, clipped by torch, one by one and by lists."""
    for order in (2.0, 1.0, 3.5, INF):
        plain, laid = _mixed()
        mine, alone = ([nn.Parameter(torch.zeros_like(t)) for t in ts] for ts in (laid, plain))
        for p, g in zip([*mine, *alone], [*laid, *plain], strict=True):
            p.grad = g.clone()
        got, want = (
            nn.utils.clip_grad_norm_(ps, 0.5, order, foreach=foreach) for ps in (mine, alone)
        )
        torch.testing.assert_close(float(got), float(want))
        for p, q in zip(mine, alone, strict=True):
            torch.testing.assert_close(_whole(p.grad), q.grad)


@spmd(world_size=4)
def test_pieces_of_nothing_count_as_nothing() -> None:
    """Ranks without elements, tensors without elements, numbers, one parameter, no gradient, an iterator, nothing."""
    mesh = init_device_mesh("cpu", (2, 2))
    wholes = [torch.tensor([3.0]), torch.zeros(0, 3), torch.tensor(-4.0)]
    cuts = ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [R, R])
    laid = [distribute_tensor(w, mesh, cut) for w, cut in zip(wholes, cuts, strict=True)]
    for order, want in ((2.0, 5.0), (1.0, 7.0), (INF, 4.0), (0, 2.0)):
        assert get_total_norm(iter(laid), order).item() == pytest.approx(want)
    p = nn.Parameter(laid[0])
    assert clip_grad_norm_(p, 1.0).item() == 0
    assert clip_grad_norm_([], 1.0).item() == 0
    p.grad = laid[0].detach().clone()
    assert clip_grad_norm_(p, 1.0).item() == pytest.approx(3.0)
    torch.testing.assert_close(_whole(p.grad), torch.tensor([1.0]))
    p.grad = laid[0] * float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
