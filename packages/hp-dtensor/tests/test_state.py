"""What is saved under one layout loads under every other, for the shapes at which pieces go missing."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hp_dtensor import (
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

R = Replicate()
SHAPES = ((1, 17), (5,), (0, 3), (), (6, 4), (3, 5, 2))
LAYOUTS: tuple[tuple[Placement, Placement], ...] = (
    (R, R),
    (Shard(0), Shard(0)),
    (StridedShard(0, split_factor=2), Shard(0)),
    (Shard(1), Shard(0)),
)


def _fitting(shape: tuple[int, ...], layout: tuple[Placement, ...]) -> list[Placement]:
    return [R if getattr(place, "dim", -1) >= len(shape) else place for place in layout]


def _values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@spmd(world_size=4)
def test_a_checkpoint_loads_under_every_layout(tmp_path: Path) -> None:
    """Empty, 0-d, short and uneven tensors, cut on one axis and on two in both orders, and whole."""
    pytest.importorskip("numpy", reason="torch's checkpoints exchange objects through numpy")
    mesh, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    wholes = {str(number): value for number, value in enumerate(_values())}
    for number, saved in enumerate(LAYOUTS):
        place = tmp_path / str(number)
        dcp.save(
            {
                name: distribute_tensor(value, mesh, _fitting(value.shape, saved))
                for name, value in wholes.items()
            },
            checkpoint_id=place,
        )
        targets = [(mesh, layout) for layout in LAYOUTS] + [(line, (Shard(0),))]
        for where, layout in targets:
            state = {
                name: distribute_tensor(
                    torch.zeros_like(value), where, _fitting(value.shape, layout)
                )
                for name, value in wholes.items()
            }
            dcp.load(state, checkpoint_id=place)
            for name, value in wholes.items():
                assert torch.equal(state[name].full_tensor(), value), (name, saved, layout)
        plain = {name: torch.zeros_like(value) for name, value in wholes.items()}
        dcp.load(plain, checkpoint_id=place)
        assert all(torch.equal(plain[name], value) for name, value in wholes.items())
    dist.barrier()


@spmd(world_size=4)
def test_a_parameter_survives_every_way_of_copying_it() -> None:
    """deepcopy, pickle, torch.save, copy_ from other layouts, load_state_dict by value and by assignment."""
    mesh = init_device_mesh("cpu", (2, 2))
    for value, layout in itertools.product(_values(), LAYOUTS):
        places = _fitting(value.shape, layout)
        p = nn.Parameter(distribute_tensor(value, mesh, places))
        saved = io.BytesIO()
        torch.save(p, saved)
        saved.seek(0)
        for twin in (
            copy.deepcopy(p),
            copy.copy(p),
            pickle.loads(pickle.dumps(p)),
            torch.load(saved, weights_only=True),
        ):
            assert isinstance(twin, DTensor)
            assert isinstance(twin, nn.Parameter)
            assert (twin.placements, twin.requires_grad) == (tuple(places), True)
            assert torch.equal(twin.detach().full_tensor(), value)
        module = nn.Module()
        module.p = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, places))
        for factor, source in enumerate(
            (
                value.clone(),
                distribute_tensor(value, mesh, [R, R]),
                distribute_tensor(value, mesh, [Partial(), R]),
                p.detach(),
            ),
            start=1,
        ):
            module.load_state_dict({"p": source * factor})
            held = module.p
            assert isinstance(held, DTensor)
            assert held.placements == tuple(places)
            torch.testing.assert_close(held.detach().full_tensor(), value * factor)
        module.load_state_dict({"p": p.detach()}, assign=True)
        assert torch.equal(module.state_dict()["p"].full_tensor(), value)
