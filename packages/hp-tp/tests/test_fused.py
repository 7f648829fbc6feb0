"""Packed projections: each rank gets a piece of each block, and checkpoints keep the order of the single device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Replicate, Shard, strict
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    ColwiseParallel,
    LocalReplicas,
    PlanError,
    PrepareModuleInput,
    RowwiseParallel,
    StyleError,
    adapter_plan,
    parallelize_module,
)
from hp_tp.testing import check_plan
from torch import Tensor, nn


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


class Attention(nn.Module):
    """Queries, keys and values in one projection, with fewer key-value heads; sizes are read off what it gives."""

    def __init__(self, heads: int, kv_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.share = heads / (heads + 2 * kv_heads)
        self.packed = nn.Linear(12, (heads + 2 * kv_heads) * 4, bias=bias)
        self.out = nn.Linear(heads * 4, 12)

    def forward(self, x: Tensor) -> Any:
        packed = self.packed(x)
        width = packed.shape[-1]
        sizes = [round(width * self.share), *[round(width * (1 - self.share) / 2)] * 2]
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in packed.split(sizes, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4)])
@pytest.mark.parametrize("size", [2, 4])
def test_packed_attention_equals_one_device(heads: int, kv_heads: int, size: int) -> None:
    """Blocks of equal and of unequal size: outputs, gradients, and parameters in their own order."""

    @spmd(world_size=size, timeout=120)
    def run() -> None:
        mesh = tp(size)
        model: Any = Attention(heads, kv_heads, bias=size == 2)
        fused = (heads * 4, kv_heads * 4, kv_heads * 4)
        plan = {"packed": ColwiseParallel(fused=fused), "out": RowwiseParallel()}
        x = torch.randn(2, 5, 12)
        laid_out: Any = check_plan(model, mesh, plan, x)
        assert list(laid_out.state_dict()) == list(model.state_dict())
        torch.testing.assert_close(laid_out.packed.weight.full_tensor(), model.packed.weight)
        local = laid_out.packed.weight.to_local()
        assert local.shape[0] == sum(fused) // size
        fresh = copy.deepcopy(laid_out)
        for parameter in fresh.parameters():
            nn.init.zeros_(parameter)
        fresh.load_state_dict(laid_out.state_dict())
        torch.testing.assert_close(fresh(x), laid_out(x))

    run()


@spmd(world_size=2, timeout=120)
def test_gate_and_up_of_unequal_width() -> None:
    """Any two blocks whose sizes the ranks divide, and a distributed input whose gradient is reduced once."""
    mesh = tp(2)
    layer = nn.Linear(6, 8 + 4)
    reference = copy.deepcopy(layer)
    parallelize_module(layer, mesh, ColwiseParallel(fused=[8, 4], input_layouts=Shard(0)))
    x = torch.randn(4, 6)
    rank = mesh.get_local_rank()
    given = DTensor.from_local(x.chunk(2)[rank], mesh, [Shard(0)]).requires_grad_()
    whole = x.clone().requires_grad_()
    expected = reference(whole)
    picked = torch.cat(
        [expected[:, rank * 4 : rank * 4 + 4], expected[:, 8 + rank * 2 :][:, :2]], 1
    )
    torch.testing.assert_close(layer(given), picked)
    layer(given).square().sum().backward()
    expected.square().sum().backward()
    grad: Any = given.grad
    torch.testing.assert_close(grad.full_tensor(), whole.grad)
    own: Any = layer.weight.grad
    torch.testing.assert_close(own.full_tensor(), reference.weight.grad)


def test_blocks_that_do_not_fit() -> None:
    """Sizes that do not add up, that ranks do not divide, or that contradict other arguments."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",), _init_backend=False, _rank=0)
    layer = nn.Linear(4, 12)
    with pytest.raises(PlanError, match=r"blocks of 10 outputs in all, and the layer has 12"):
        parallelize_module(layer, mesh, ColwiseParallel(fused=(5, 5)))
    with pytest.raises(
        PlanError, match=r"2 ranks do not divide the blocks fused=\(9, 3\); .*\[1, 3\]"
    ):
        parallelize_module(layer, mesh, ColwiseParallel(fused=(9, 3)))
    with pytest.raises(PlanError, match=r"is for nn.Linear, not for"):
        parallelize_module(nn.Embedding(4, 12), mesh, ColwiseParallel(fused=(8, 4)))
    with pytest.raises(StyleError, match=r"blocks=2 must be left out"):
        ColwiseParallel(fused=(8, 4), blocks=2)
    with pytest.raises(StyleError, match=r"must be left out too"):
        ColwiseParallel(fused=(8, 4), output_layouts=Replicate())
    assert ColwiseParallel(fused=[6, 6]).blocks == 2
    assert hash(ColwiseParallel(fused=[8, 4])) == hash(ColwiseParallel(fused=(8, 4)))
    assert type(layer.weight) is nn.Parameter


class Adapted(nn.Module):
    """A layer with a low-rank adapter, as the peft library wraps one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        size = base.in_features, base.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(size[0], 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, size[1], bias=False)})

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + 0.5 * self.lora_B["default"](self.lora_A["default"](x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(nn.Linear(6, 8)), Adapted(nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x).tanh())


@pytest.mark.parametrize("between", [Replicate(), Shard(1)])
@pytest.mark.parametrize("distributed", [False, True])
def test_adapters_are_cut_beside_their_layers(between: Any, distributed: bool) -> None:
    """A plan for a model without adapters serves one with them, with and without a cut sequence, on plain inputs and DTensors."""

    @spmd(world_size=2, timeout=120)
    def run() -> None:
        mesh = tp(2)
        model = Mlp()
        for frozen in (model.up.base_layer, model.down.base_layer):
            frozen.requires_grad_(requires_grad=False)
        plan = adapter_plan(
            model,
            {
                # The label is that of plain inputs; a DTensor says itself what it is.
                "up": ColwiseParallel(
                    input_layouts=None if distributed else between,
                    use_local_output=not distributed,
                ),
                "down": RowwiseParallel(output_layouts=between),
            },
        )
        assert len(plan) == 6
        check_plan(
            model,
            mesh,
            plan,
            torch.randn(2, 4, 6),
            given=(between,),
            distributed=distributed,
            output=between,
        )

    run()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_adapters_in_a_module_whose_input_is_moved(local: bool, frozen: bool) -> None:
    """The layers of a module that gets a whole DTensor, or a plain tensor, for its piece; all gradients, in strict mode."""

    @spmd(world_size=2, timeout=120)
    def run() -> None:
        mesh = tp(2)
        model = nn.Sequential(Mlp())
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not frozen or "lora" in name
        plan = {
            "0": PrepareModuleInput(
                input_layouts=Shard(1),
                desired_input_layouts=Replicate(),
                use_local_output=local,
            ),
            "0.up": ColwiseParallel(),
            "0.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        with strict():
            check_plan(
                model,
                mesh,
                adapter_plan(model, plan),
                torch.randn(2, 4, 6),
                given=(Shard(1),),
                output=Shard(1),
            )

    run()


def test_adapters_beside_other_styles() -> None:
    """A style whose adapter nobody knows is an error that names the layer."""
    with pytest.raises(PlanError, match=r"'up' has an adapter, and its style is LocalReplicas"):
        adapter_plan(Mlp(), {"up": LocalReplicas()})
