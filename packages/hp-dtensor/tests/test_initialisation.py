"""Modules without memory, and values for each rank's piece alone."""

from __future__ import annotations

import threading

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_empty_weights,
    init_on_device,
    init_parameters,
    manual_seed,
)
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import run_spmd, spmd
from torch import nn

R = Replicate()


class Net(nn.Module):
    """Tied weights, a norm, a buffer, a parameter with an attribute, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.table.weight
        self.inner.weight.note = "kept"  # type: ignore[assignment]  # the point
        self.inner.bias.requires_grad_(False)


def _laid_out(place: Placement, mesh: DeviceMesh) -> Net:
    def cut(_name: str, module: nn.Module, where: DeviceMesh) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            laid = distribute_tensor(module.weight.detach(), where, [place])
            module.register_parameter("weight", nn.Parameter(laid))

    with init_empty_weights():
        net = Net()
    distribute_module(net, mesh, cut)
    return net


def test_parameters_have_no_memory_inside_and_do_outside() -> None:
    """Inside, parameters are on meta with ties, attributes and flags; buffers stay; afterwards and after errors all is usual."""
    with init_empty_weights():
        net = Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    assert net.head.weight is net.table.weight
    assert net.inner.weight.note == "kept"
    assert not net.inner.bias.requires_grad
    assert net.norm.running_mean is not None
    assert net.norm.running_mean.tolist() == [0.0] * 8
    with init_empty_weights(include_buffers=True):
        assert all(buffer.is_meta for buffer in Net().buffers())
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    assert not nn.Linear(2, 2).weight.is_meta


def test_one_parameter_registered_twice_stays_one() -> None:
    """A parameter that two modules register before either was moved is one parameter afterwards."""
    with init_empty_weights():
        shared = nn.Parameter(torch.ones(3))
        pair = nn.ParameterList([shared])
        other = nn.ParameterList([shared])
        lazy = nn.LazyLinear(3)
    assert pair[0] is other[0]
    assert pair[0].is_meta
    assert isinstance(lazy.weight, nn.UninitializedParameter)


def test_contexts_nest_and_know_their_thread() -> None:
    """The inner context counts; another thread makes ordinary modules meanwhile."""
    found = []
    inside, done = threading.Event(), threading.Event()

    def outsider() -> None:
        inside.wait(10)
        found.append(nn.Linear(2, 2).weight.device.type)
        done.set()

    thread = threading.Thread(target=outsider)
    thread.start()
    with init_empty_weights():
        inside.set()
        assert done.wait(10)
        with init_on_device("cpu"):
            assert nn.Linear(2, 2).weight.device.type == "cpu"
        assert nn.Linear(2, 2).weight.is_meta
    thread.join()
    assert found == ["cpu"]


def _initialised(cut: int | None, stage: int) -> dict[str, torch.Tensor]:
    """The whole parameters of a net that was cut along this dim, on ranks with seeds of their own."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(50 + torch.distributed.get_rank())
    net = _laid_out(R if cut is None else Shard(cut), mesh)
    state = torch.get_rng_state()
    assert init_parameters(net, stage) is net
    assert net.head.weight is net.table.weight
    assert not net.inner.bias.requires_grad
    weight = net.inner.weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().untyped_storage().nbytes() == weight.to_local().numel() * 4
    values = {name: p.full_tensor().detach().clone() for name, p in net.named_parameters()}
    init_parameters(net, stage + 1)
    assert all(torch.equal(values[name], p.full_tensor()) for name, p in net.named_parameters())
    assert not torch.equal(state, torch.get_rng_state())
    return values


def test_values_depend_on_no_layout() -> None:
    """1, 2 and 4 ranks and any layout give the same values, replicas included; a second call changes nothing."""
    want = run_spmd(_initialised, None, 0, world_size=1)[0]
    for world in (2, 4):
        for cut in (None, 0, 1):
            for values in run_spmd(_initialised, cut, 0, world_size=world):
                assert values.keys() == want.keys()
                assert all(torch.equal(values[name], want[name]) for name in want)
    assert 0.2 < float(want["table.weight"].std()) < 2.0
    assert want["norm.weight"].tolist() == [1.0] * 8
    other = run_spmd(_initialised, 0, 1, world_size=2)[0]
    assert not torch.equal(other["inner.weight"], want["inner.weight"])


@spmd(world_size=2)
def test_what_has_values_keeps_them() -> None:
    """Materialised parameters survive the initialiser of their module; seeded alike, nothing is sent."""
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(1, mesh)
    net = _laid_out(Shard(0), mesh)
    net.inner.bias = nn.Parameter(
        distribute_tensor(torch.arange(8.0), mesh, [R], src_data_rank=None)
    )
    with CommDebugMode() as comm:
        init_parameters(net)
    assert comm.get_total_counts() == 0
    bias = net.inner.bias
    assert isinstance(bias, DTensor)
    assert bias.full_tensor().tolist() == list(range(8))


@spmd(world_size=2)
def test_plain_parameters_become_equal_on_all_ranks() -> None:
    """A module that is partly distributed gets the same plain parameters on the ranks of its mesh."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(torch.distributed.get_rank())
    with init_empty_weights():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh, [Shard(0)]))
    init_parameters(net)
    for parameter in (net[0].bias, net[1].weight, net[1].bias):
        first = parameter.detach().clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(first, parameter)


def test_what_cannot_be_initialised_is_named() -> None:
    """No module, no number, or nobody who knows the values: ValueError, and nothing was changed."""
    with pytest.raises(ValueError, match="takes a module, not str"):
        init_parameters("net")
    with pytest.raises(ValueError, match=r"stage_index=1\.5 must be an integer"):
        init_parameters(nn.Linear(2, 2), 1.5)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.ones(2))

    with init_empty_weights():
        net = Scale()
    with pytest.raises(ValueError, match=r"no reset_parameters.*'': \['weight'\]"):
        init_parameters(net)
    assert net.layer.weight.is_meta


def _large() -> tuple[int, int, int]:
    """Bytes of a Llama of 70 billion parameters laid out over eight ranks: of all pieces here, with memory, and of the whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    width, hidden, groups = 8192, 28672, 1024
    shapes = {"q": (width, width), "k": (groups, width), "v": (groups, width), "o": (width, width)}
    shapes |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    with init_empty_weights():
        layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(b, a, bias=False) for name, (a, b) in shapes.items()})
            for _ in range(80)
        )
        ends = nn.ModuleDict({"table": nn.Embedding(128256, width), "norm": nn.RMSNorm(width)})
        ends["head"] = nn.Linear(width, 128256, bias=False)
        model = nn.ModuleList([layers, ends])

    def plan(name: str, module: nn.Module, where: DeviceMesh) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            place = Shard(1) if name.endswith(("o", "down")) else Shard(0)
            laid = distribute_tensor(module.weight.detach(), where, [Shard(0), place])
            module.register_parameter("weight", nn.Parameter(laid))

    with CommDebugMode() as comm:
        distribute_module(model, mesh, plan)
    assert comm.get_total_counts() == 0
    held = memory = whole = 0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        held += local.numel()
        memory += 0 if local.is_meta else local.untyped_storage().nbytes()
        whole += parameter.numel()
    return held, memory, whole


def test_seventy_billion_parameters_are_described_without_memory() -> None:
    """A 70B Llama is built and laid out on meta: no memory, no message, and pieces of a quarter but for the norm."""
    for held, memory, whole in run_spmd(_large, world_size=4, timeout=120):
        assert whole > 70e9
        assert memory == 0
        assert held == (whole - 8192) // 4 + 8192
