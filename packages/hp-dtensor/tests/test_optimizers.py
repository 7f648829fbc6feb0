"""Every optimizer of torch, in each of its forms, on distributed parameters against the single device.

Where torch refuses a form on one device (capturable on a CPU, an lr tensor in lists), it refuses it here.
"""

from __future__ import annotations

import copy
import inspect
import io
import itertools
from collections.abc import Iterator

import pytest
import torch
from hp_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    cache_statistics,
    distribute_tensor,
    spec,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

R = Replicate()
O = torch.optim  # noqa: E741
KINDS = (
    *(O.SGD, O.Adam, O.AdamW, O.Adagrad, O.RMSprop, O.Adafactor, O.Muon),
    *(O.NAdam, O.RAdam, O.Adamax, O.ASGD, O.Rprop, O.Adadelta),
)
SWITCHES = ("amsgrad", "maximize", "weight_decay", "momentum", "nesterov", "centered")
FORMS: tuple[dict[str, object], ...] = (
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"capturable": True},
    {"lr": torch.tensor(0.05)},
)
Options = dict[str, object]


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _options(kind: type[O.Optimizer]) -> Iterator[Options]:
    """Each form alone and with all switches that fit together."""
    known = inspect.signature(kind).parameters
    values = {"weight_decay": 0.1, "momentum": 0.9}
    switched = {name: values.get(name, True) for name in SWITCHES if name in known}
    for form, extra in itertools.product(FORMS, ({}, switched)):
        if set(form) <= set(known):
            yield {"lr": 0.05, **form, **extra}


def _parameters(kind: type[O.Optimizer]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same values on a 2-D mesh, on slices of it and on none, and all plain."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)
    starts = [
        torch.randn(shape, generator=generator) for shape in ((5, 4), (3, 4), (2, 3), (1, 5))
    ]
    mine = [
        distribute_tensor(starts[0], mesh, [Shard(0), Shard(1)]),
        distribute_tensor(starts[1], mesh["dp"], [Shard(0)]),
        starts[2].clone(),
        distribute_tensor(starts[3], mesh, [Shard(0), R]),
    ]
    if kind is not O.Muon:
        starts += [torch.tensor(1.5), torch.arange(7.0)]
        mine += [
            distribute_tensor(starts[4], mesh, [R, R]),
            distribute_tensor(starts[5], mesh, [Shard(0), Shard(0)]),
        ]
    if kind not in {O.Muon, O.Adafactor}:  # which divides by the number of elements
        starts.append(torch.zeros(0, 3))
        mine.append(distribute_tensor(starts[-1], mesh["tp"], [Shard(0)]))
    return [nn.Parameter(t) for t in mine], [nn.Parameter(t.clone()) for t in starts]


def _step(optimizer: O.Optimizer, parameters: list[nn.Parameter], number: int) -> str:
    """One step on gradients that depend on the values; the kind of error where there is one."""
    for p in parameters:
        p.grad = p.detach() * 0.5 + number
    try:
        optimizer.step()
    except (RuntimeError, ValueError, AssertionError) as error:
        return type(error).__name__
    return ""


def _made(
    kind: type[O.Optimizer], parameters: list[nn.Parameter], options: Options
) -> O.Optimizer | str:
    try:
        return kind(parameters, **options)  # type: ignore[call-arg]  # its own options
    except (RuntimeError, ValueError) as error:
        return str(error)


@spmd(world_size=4)
@pytest.mark.parametrize("kind", KINDS)
def test_each_form_equals_the_single_device(kind: type[O.Optimizer]) -> None:
    """Parameters and state after two steps, saved and loaded and stepped again, for one group over three meshes."""
    bound = {"rtol": 2e-2, "atol": 2e-2} if kind is O.Muon else {"rtol": 1e-4, "atol": 1e-5}
    for options in _options(kind):
        mine, alone = _parameters(kind)
        one, other = _made(kind, mine, options), _made(kind, alone, options)
        if isinstance(one, str) or isinstance(other, str):
            assert one == other, options
            continue
        refused = [_step(other, alone, number) for number in range(2)]
        assert [_step(one, mine, number) for number in range(2)] == refused, options
        if any(refused):
            continue
        saved = io.BytesIO()
        torch.save(one.state_dict(), saved)
        saved.seek(0)
        again = [nn.Parameter(p.detach().clone()) for p in mine]
        loaded = kind(again, **options)  # type: ignore[call-arg]  # its own options
        loaded.load_state_dict(torch.load(saved, weights_only=True))
        for optimizer, parameters in ((one, mine), (other, alone), (loaded, again)):
            assert not _step(optimizer, parameters, 3)
        for p, q, r in zip(mine, alone, again, strict=True):
            torch.testing.assert_close(_whole(p.detach()), q.detach(), **bound)
            torch.testing.assert_close(_whole(r.detach()), _whole(p.detach()), rtol=0, atol=0)
            for name, value in other.state[q].items():
                held = one.state[p][name]
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(_whole(held), value, **bound)
                if isinstance(held, DTensor) and isinstance(p, DTensor) and held.shape == p.shape:
                    assert held.placements == p.placements, (name, options)


@spmd(world_size=4)
@pytest.mark.parametrize("kind", [O.SGD, O.Adam, O.AdamW, O.RMSprop])
def test_a_differentiable_step_has_the_single_devices_gradients(kind: type[O.Optimizer]) -> None:
    """What an updated parameter is worth is known for its start and for the gradient that it was updated with."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.linspace(-1, 2, 20).view(5, 4)
    found = []
    for start in (distribute_tensor(whole, mesh, [Shard(0), Shard(1)]), whole.clone()):
        start.requires_grad_()
        slope = (start.detach() * 0.2 + 1).requires_grad_()
        updated = start.clone()
        updated.grad = slope * 1.0
        kind([updated], lr=0.1, differentiable=True).step()  # type: ignore[call-arg]  # all four have it
        _whole(updated).square().sum().backward()
        found.append((updated.detach(), start.grad, slope.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(_whole(got), _whole(want))


@spmd(world_size=4)
def test_a_line_search_sees_the_whole_loss() -> None:
    """LBFGS with and without strong Wolfe conditions."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.linspace(-1, 2, 20).view(5, 4)
    for search in (None, "strong_wolfe"):
        ends = []
        for start in (distribute_tensor(whole, mesh, [Shard(0), Shard(1)]), whole.clone()):
            p = nn.Parameter(start)
            optimizer = O.LBFGS([p], lr=0.1, line_search_fn=search)

            def loss(p: nn.Parameter = p, optimizer: O.LBFGS = optimizer) -> float:
                optimizer.zero_grad()
                value = (p - 1).pow(4).sum()
                value.backward()  # type: ignore[no-untyped-call]  # torch's own
                return value.item()

            optimizer.step(loss)
            ends.append(_whole(p.detach()))
        torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


@spmd(world_size=4)
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_everywhere(fused: bool) -> None:
    """Scaled losses over mixed meshes: parameters and the scale follow the single device."""
    mine, alone = _parameters(O.SGD)
    scales = []
    for parameters in (mine, alone):
        optimizer = O.SGD(parameters, lr=0.1, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for number in range(3):
            for p in parameters:
                p.grad = p.detach() * 4.0
            if number == 1:
                parameters[0].grad = parameters[0].detach() * float("inf")
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    for p, q in zip(mine, alone, strict=True):
        torch.testing.assert_close(_whole(p.detach()), q.detach())


@spmd(world_size=4)
@pytest.mark.parametrize("form", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_gradients_of_other_layouts_and_none(form: Options) -> None:
    """Addends, pieces of another cut, a frozen parameter and bfloat16."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole, slope = torch.linspace(-1, 2, 20).view(5, 4), torch.linspace(2, -3, 20).view(5, 4)
    for held, layout, dtype in itertools.product(
        ([R, R], [Shard(0), R]),
        ([Partial(), Partial()], [Partial("avg"), R], [Shard(1), Shard(0)]),
        (torch.float32, torch.bfloat16),
    ):
        p = nn.Parameter(distribute_tensor(whole.to(dtype), mesh, held))
        q = nn.Parameter(whole.clone().to(dtype))
        frozen = nn.Parameter(distribute_tensor(whole, mesh, held))
        p.grad, q.grad = distribute_tensor(slope.to(dtype), mesh, layout), slope.to(dtype)
        for parameters in ([p, frozen], [q, nn.Parameter(whole.clone())]):
            O.AdamW(parameters, lr=0.1, **form).step()  # type: ignore[arg-type]  # flags
        torch.testing.assert_close(_whole(p.detach()), q.detach())
        torch.testing.assert_close(_whole(frozen.detach()), whole)


def _train(steps: int) -> list[tuple[int, int]]:
    """How many plans and specs there are after each step of a training in which every number changes."""
    mesh = init_device_mesh("cpu", (2,))
    start = torch.linspace(-1, 2, 20).view(5, 4)
    parameters = [
        nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])),
        nn.Parameter(distribute_tensor(start, mesh, [R])),
    ]
    optimizers = [
        O.AdamW(parameters, lr=0.1, foreach=True),
        O.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
        O.RMSprop(parameters, lr=0.1, foreach=False),
        O.Adam(parameters, lr=0.1, fused=True),
    ]
    schedules = [O.lr_scheduler.ExponentialLR(optimizer, 0.999) for optimizer in optimizers]
    sizes = []
    for number in range(1, steps + 1):
        share = 1.0 / number
        optimizer, schedule = (each[number % len(optimizers)] for each in (optimizers, schedules))
        optimizer.zero_grad()
        first, second = parameters
        loss = (first * share + number).mul(torch.tensor(share)).clamp(max=number).square().mean()
        loss = loss + torch.add(second, share, alpha=number).pow(2).sum() / number
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        nn.utils.clip_grad_norm_(parameters, 1.0 + share)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            first.lerp_(first.detach() * 0.5, share)
            second.add_(number % 7, alpha=1e-6 * number).mul_(1 - 1e-3 * share)
        sizes.append((cache_statistics()["plans"], len(spec._specs)))
    return sizes


@spmd(world_size=2)
def test_numbers_that_change_from_step_to_step_leave_nothing_behind() -> None:
    """Rates, step counts, coefficients and clipping bounds: after a few dozen steps no plan and no spec is new."""
    sizes = _train(300)
    assert sizes[40] == sizes[-1]


@pytest.mark.nightly
@spmd(world_size=2, timeout=900)
def test_caches_after_ten_thousand_steps_are_those_after_forty() -> None:
    """The same training, for as long as a real one."""
    sizes = _train(10_000)
    assert sizes[40] == sizes[-1]


@spmd(world_size=2)
def test_copies_of_an_optimizer_step_alike() -> None:
    """Deepcopy of a model and what trains it."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.linspace(-1, 2, 20).view(5, 4), mesh, [Shard(0)]))
    optimizer = O.AdamW([p], lr=0.1)
    assert not _step(optimizer, [p], 0)
    twin, second = copy.deepcopy((p, optimizer))
    for which, parameter in ((optimizer, p), (second, twin)):
        assert not _step(which, [parameter], 1)
    torch.testing.assert_close(_whole(twin.detach()), _whole(p.detach()), rtol=0, atol=0)
