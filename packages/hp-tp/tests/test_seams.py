"""Each use of what torch calls private, on the oldest and the newest torch that we support."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hp_dtensor import CommDebugMode, Shard, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import ColwiseParallel
from hp_tp._torch import (
    GRAPHS_RECOMPUTE,
    apply_style,
    buffers_of,
    children_of,
    dispatch_modes,
    in_backward,
    localized_by_torch,
    mark_flattened,
    parameters_of,
)
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise

pytestmark = pytest.mark.seam


def test_a_module_keeps_its_parts_in_dictionaries() -> None:
    """Parameters (None ones too), buffers and children (one under two names too); what is put there is found."""
    layer = nn.Linear(2, 2, bias=False)
    assert list(parameters_of(layer)) == ["weight", "bias"]
    new = nn.Parameter(torch.ones(2, 2))
    parameters_of(layer)["weight"] = new
    assert layer.weight is new
    holder = nn.ModuleDict({"a": layer, "b": layer})
    assert list(children_of(holder)) == ["a", "b"]
    layer.register_buffer("table", torch.ones(1), persistent=False)
    other = torch.zeros(1)
    buffers_of(layer)["table"] = other
    assert layer.get_buffer("table") is other
    assert "table" not in layer.state_dict()


@spmd(world_size=2, timeout=120)
def test_styles_are_applied_by_one_method() -> None:
    """Ours and torch's have ``_apply``, which takes module and mesh and returns the module."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for style in (ColwiseParallel(), TorchColwise()):
        layer = nn.Linear(2, 2)
        assert apply_style(style, layer, mesh) is layer
        assert hasattr(layer.weight, "placements")


def test_a_world_that_does_not_communicate() -> None:
    """The fake backend starts from torch's fake store, and leaves when it is told to."""
    program = """
import torch, torch.distributed as dist
from hp_tp._torch import start_fake_world
start_fake_world(4)
assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_dispatch_modes_are_counted() -> None:
    """None outside; one inside a mode, whichever it is."""
    assert dispatch_modes() == 0
    with CommDebugMode():
        assert dispatch_modes() == 1
    assert dispatch_modes() == 0


def test_a_tensor_is_marked_for_the_first_fsdp() -> None:
    """The mark is an attribute that FSDP itself finds."""
    from torch.distributed.fsdp._common_utils import _is_fsdp_flattened

    tensor = torch.ones(2)
    assert not _is_fsdp_flattened(tensor)
    assert mark_flattened(tensor) is tensor
    assert _is_fsdp_flattened(tensor)


@spmd(world_size=2, timeout=120)
def test_torch_marks_the_pieces_that_it_makes_for_ddp() -> None:
    """Exchanged by torch's own function, a parameter of a plain module has the mark; it can be taken off once."""
    from torch.distributed.tensor.parallel.ddp import _localize_dtensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layer: Any = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    assert not localized_by_torch(layer.weight)
    _localize_dtensor(layer)
    assert type(layer.weight) is nn.Parameter
    assert localized_by_torch(layer.weight)
    assert not localized_by_torch(layer.weight)


def test_the_compilers_pass_has_its_switch() -> None:
    """Inductor's configuration knows the switch, and it is off."""
    import torch._inductor.config as inductor

    assert inductor._micro_pipeline_tp is False
    assert isinstance(GRAPHS_RECOMPUTE, bool)


def test_a_backward_knows_that_it_is_one() -> None:
    """Outside, in a forward, no; in what a backward calls, yes."""
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(in_backward()))
    assert not in_backward()
    y.backward()
    assert seen == [True]
    assert not in_backward()
