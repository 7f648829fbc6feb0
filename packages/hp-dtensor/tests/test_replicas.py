"""The replica check: silent on right programs, and one error on all ranks, with names, on those that lose a sum."""

from __future__ import annotations

import zlib

import pytest
import torch
import torch.distributed as dist
from hp_dtensor import (
    DTensor,
    Partial,
    ReplicaError,
    Replicate,
    Shard,
    check_replicas,
    distribute_module,
    distribute_tensor,
    redistribute_local,
)
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

R = Replicate()


def _agree(text: str) -> None:
    """Every rank of the world saw the same error."""
    mine = torch.tensor([zlib.crc32(text.encode())])
    sums = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, mine)
    assert all(torch.equal(one, mine) for one in sums), text


class Router(nn.Module):
    """A replicated weight that is used on local tokens."""

    def __init__(self, mesh: DeviceMesh, grad_placements: list[object] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.tensor([1.0, 2.0]), mesh, [R]))
        self.grad_placements = grad_placements

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.weight.to_local(grad_placements=self.grad_placements)


@spmd(world_size=2)
def test_a_gradient_that_was_never_added_up_is_named() -> None:
    """A replica taken out with to_local() and used on a rank's own tokens, without and with grad_placements."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tokens = torch.arange(4.0).view(2, 2)
    mine = tokens[dist.get_rank()]
    wrong = Router(mesh, None)
    with (
        pytest.raises(
            ReplicaError,
            match=r"backward of to_local\(\) in module Router: the gradient of 'weight' \(2,\) \(Replicate\(\),\) is laid out as "
            r"\(Replicate\(\),\), .* mesh axis 'tp' .* coordinates \(0,\) and \(1,\) .*grad_placements=\[Partial\(\)\]",
        ) as caught,
        check_replicas(wrong),
    ):
        wrong(mine).sum().backward()
    assert (caught.value.axis, caught.value.coordinates) == (0, ((0,), (1,)))
    _agree(str(caught.value))
    right = Router(mesh, [Partial()])
    with check_replicas(right) as watch:
        right(mine).sum().backward()
    assert watch.compared > 0
    assert isinstance(right.weight.grad, DTensor)
    assert torch.equal(right.weight.grad.full_tensor(), tokens.sum(0))


@spmd(world_size=4)
def test_the_axis_is_named_where_another_one_agrees() -> None:
    """Values that differ along tp and not along dp, entering as replicas of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = torch.full((3,), float(mesh.get_local_rank("tp")))
    DTensor.from_local(local, mesh, [R, R])  # nobody watches
    with (
        pytest.raises(ReplicaError, match=r"from_local\(\): .* mesh axis 'tp'") as caught,
        check_replicas(),
    ):
        DTensor.from_local(local, mesh, [R, R])
    assert caught.value.axis == 1
    _agree(str(caught.value))
    with check_replicas():
        DTensor.from_local(local, mesh, [R, Shard(0)])
        DTensor.from_local(local, mesh, [R, Partial()]).reduce_partial()


@spmd(world_size=2)
def test_a_right_training_step_is_silent() -> None:
    """A module with replicated and cut parameters, forward, backward and an optimizer step."""
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))

    def cut(name: str, module: nn.Module, where: DeviceMesh) -> None:
        if name == "0":
            assert isinstance(module, nn.Linear)
            weight = distribute_tensor(module.weight.detach(), where, [Shard(0)])
            module.register_parameter("weight", nn.Parameter(weight))

    distribute_module(net, mesh, cut)
    optimizer = torch.optim.AdamW(net.parameters())
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    for _ in range(2):
        with check_replicas(net) as watch:
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert watch.compared > 10


@spmd(world_size=2)
def test_a_parameter_that_drifted_is_named_at_the_end() -> None:
    """One rank wrote to its replica; no operator ran."""
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Linear(2, 2, bias=False)
    distribute_module(net, mesh)
    if dist.get_rank() == 1:
        net.weight.to_local().detach()[0, 0] += 1e-6
    with (
        pytest.raises(ReplicaError, match="the value at the end: weight is laid out"),
        check_replicas(net),
    ):
        pass


@spmd(world_size=2)
def test_an_operator_on_drifted_replicas_is_named_with_its_module() -> None:
    """The first operator that gives different replicas, its inputs and the module it runs in."""
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    distribute_module(net, mesh)
    if dist.get_rank() == 1:
        net[0].weight.to_local().detach()[0, 0] += 1
    x = distribute_tensor(torch.ones(1, 2), mesh, [R])
    with (
        pytest.raises(ReplicaError, match=r"aten\..* in module Sequential\.0: the result for"),
        check_replicas(net),
    ):
        net(x)


@spmd(world_size=2)
def test_plain_moves_are_watched_too() -> None:
    """Megatron's f left out: the gradient of a replica arrives as an addend and is claimed to be whole."""
    mesh = init_device_mesh("cpu", (2,))
    scale = float(dist.get_rank() + 1)
    for grads, wrong in (([R], True), ([Partial()], False)):
        x = torch.ones(2, requires_grad=True)
        with check_replicas():
            y = redistribute_local(x, mesh, [R], [R], grad_placements=grads)
            if wrong:
                with pytest.raises(ReplicaError, match=r"backward of redistribute_local\(\)"):
                    (y * scale).sum().backward()
            else:
                (y * scale).sum().backward()
                assert x.grad is not None
                assert x.grad.tolist() == [3.0, 3.0]


@spmd(world_size=2)
def test_bits_count_and_the_sign_of_zero_does_not() -> None:
    """Order, dtype and the last bit differ; -0.0 is 0.0; empty, boolean and complex tensors are fine."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    with check_replicas():
        DTensor.from_local(torch.tensor([0.0, -0.0][rank]), mesh, [R])
        for dtype in (torch.bool, torch.complex64, torch.bfloat16, torch.int64, torch.uint8):
            DTensor.from_local(torch.ones(3, 2).to(dtype).t(), mesh, [R])
        DTensor.from_local(torch.empty(0, 4), mesh, [R])
        for pair in (
            ([1.0, 2.0], [2.0, 1.0]),
            ([1.0, 2.0], [1.0, 2.0000002]),
            ([True, False], [False, True]),
        ):
            with pytest.raises(ReplicaError):
                DTensor.from_local(torch.tensor(pair[rank]), mesh, [R])
