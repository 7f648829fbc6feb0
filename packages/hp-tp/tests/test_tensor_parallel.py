"""Columns and rows, against the single device."""

from __future__ import annotations

import copy
import pickle
from typing import Any

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
    distribute_tensor,
)
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    BoundaryError,
    ColwiseParallel,
    PlanError,
    PrepareModuleInput,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from hp_tp.testing import check_plan
from torch import Tensor, nn

R, P, S = Replicate(), Partial(), Shard


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def mlp(*, bias: bool = True, hidden: int = 12, width: int = 8) -> nn.Sequential:
    """Two layers with an activation between them."""
    return nn.Sequential(
        nn.Linear(width, hidden, bias=bias), nn.GELU(), nn.Linear(hidden, width, bias=bias)
    )


PAIR = {"0": ColwiseParallel(), "2": RowwiseParallel()}


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (8,), (2, 0, 8)])
@pytest.mark.parametrize("bias", [True, False])
@spmd(world_size=2, timeout=120)
def test_mlp_equals_one_device(shape: tuple[int, ...], bias: bool) -> None:
    """Columns, then rows: outputs and all gradients, for inputs of any rank."""
    check_plan(mlp(bias=bias), tp(2), PAIR, torch.randn(shape))


@pytest.mark.parametrize("hidden", [12, 10, 3, 1])
@spmd(world_size=4, timeout=120)
def test_uneven_and_empty_shards(hidden: int) -> None:
    """A hidden size that the ranks do not divide, down to ranks that hold nothing."""
    check_plan(mlp(hidden=hidden), tp(4), PAIR, torch.randn(2, 3, 8))


@pytest.mark.parametrize("given", [R, S(0), S(1), S(2), P])
@pytest.mark.parametrize("out", [R, S(1), S(2), P])
@spmd(world_size=2, timeout=120)
def test_distributed_inputs_are_taken_as_they_are(given: Placement, out: Placement) -> None:
    """A DTensor is moved from its own layout, whatever the style's label says; extremes of both layers."""
    plan = {
        "0": ColwiseParallel(input_layouts=S(0)),
        "2": RowwiseParallel(output_layouts=out, use_local_output=False),
    }
    check_plan(mlp(), tp(2), plan, torch.randn(4, 6, 8), given=[given], distributed=True)


@pytest.mark.parametrize("layout", [R, S(0), S(1), S(-1), P])
@spmd(world_size=2, timeout=120)
def test_plain_inputs_are_what_the_label_says(layout: Placement) -> None:
    """A plain piece is moved from the layout that the style names."""
    plan = {"0": ColwiseParallel(input_layouts=layout), "2": RowwiseParallel()}
    check_plan(mlp(), tp(2), plan, torch.randn(4, 6, 8), given=[layout])


@pytest.mark.parametrize("layout", [R, S(0), S(1), S(-1), P])
@pytest.mark.parametrize("bias", [True, False])
@spmd(world_size=2, timeout=120)
def test_row_parallel_output_layouts(layout: Placement, bias: bool) -> None:
    """The bias is added once and its gradient is whole, wherever the output goes."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=layout)}
    check_plan(mlp(bias=bias), tp(2), plan, torch.randn(4, 6, 8), output=layout)


@pytest.mark.parametrize("layout", [R, S(0), S(1), S(-1)])
@spmd(world_size=2, timeout=120)
def test_column_parallel_output_layouts(layout: Placement) -> None:
    """A column-parallel layer alone, its output moved."""
    style = ColwiseParallel(output_layouts=layout)
    check_plan(nn.Linear(8, 6), tp(2), style, torch.randn(4, 6, 8), output=layout)


@spmd(world_size=4, timeout=120)
def test_uneven_output_columns_gather() -> None:
    """Seven columns over four ranks come back whole, plain and distributed."""
    for local in (True, False):
        style = ColwiseParallel(output_layouts=R, use_local_output=local)
        check_plan(nn.Linear(5, 7), tp(4), style, torch.randn(3, 5))


@spmd(world_size=4, timeout=120)
def test_uneven_sequence_as_dtensor_or_error() -> None:
    """A sequence that the ranks do not divide is fine as a DTensor, and refused as a plain tensor on every rank."""
    mesh = tp(4)
    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=S(1), use_local_output=False),
    }
    check_plan(mlp(), mesh, plan, torch.randn(2, 6, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=S(1))}
    model = parallelize_module(mlp(), mesh, plan)
    with pytest.raises(
        BoundaryError, match=r"6 elements in dim 1, which 4 ranks do not divide.*multiple of 4"
    ):
        model(torch.randn(2, 6, 8))


@spmd(world_size=2, timeout=120)
def test_frozen_parameters_and_inputs() -> None:
    """What requires no gradient gets none, and the rest is right."""
    for frozen in ("0.weight", "0.bias", "2.weight", "2.bias"):
        model = mlp()
        model.get_parameter(frozen).requires_grad_(False)
        check_plan(model, tp(2), PAIR, torch.randn(2, 3, 8))
    model = mlp().requires_grad_(False)
    laid_out = check_plan(model, tp(2), PAIR, torch.randn(2, 3, 8))
    with torch.no_grad():
        assert not laid_out(torch.randn(2, 8)).requires_grad


@spmd(world_size=2, timeout=120)
def test_one_collective_each_way() -> None:
    """The pair of layers costs one all-reduce forward and one backward."""
    model = parallelize_module(mlp(), tp(2), PAIR)
    x = torch.randn(2, 3, 8, requires_grad=True)
    with CommDebugMode() as forward:
        y = model(x)
    with CommDebugMode() as backward:
        y.sum().backward()
    assert forward.get_total_counts() == 1
    assert backward.get_total_counts() == 1


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@spmd(world_size=2, timeout=120)
def test_shared_input_is_reduced_once() -> None:
    """Layers that take the same gathered input give their addends to one reduce-scatter."""
    mesh = tp(2)
    plan = {
        "": PrepareModuleInput(input_layouts=S(1), desired_input_layouts=R),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=S(1)),
    }
    laid_out = check_plan(Gated(), mesh, plan, torch.randn(2, 4, 8), given=[S(1)], output=S(1))
    x = torch.randn(2, 2, 8, requires_grad=True)
    with CommDebugMode() as both:
        laid_out(x).sum().backward()
    assert both.get_total_counts() == 4  # gather and scatter, forward and backward


@spmd(world_size=2, timeout=120)
def test_second_derivatives() -> None:
    """A gradient penalty through both layers has the gradients of the single device."""
    model = mlp()
    reference = copy.deepcopy(model)
    parallelize_module(model, tp(2), PAIR)
    x = torch.randn(3, 8)
    for m in (model, reference):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(leaf).square().sum(), leaf, create_graph=True)
        slope.square().sum().backward()
    for ours, right in zip(model.parameters(), reference.parameters(), strict=True):
        if right.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), right.grad, rtol=1e-4, atol=1e-4)


@spmd(world_size=2, timeout=120)
def test_autocast_gives_the_dtypes_of_one_device() -> None:
    """Under autocast the output, also a row-parallel one with a bias, is bfloat16, and gradients are float32."""
    model = mlp()
    reference = copy.deepcopy(model)
    parallelize_module(model, tp(2), PAIR)
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        ours, right = model(x), reference(x)
    assert ours.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)
    ours.float().sum().backward()
    right.float().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=5e-2, atol=5e-2)


@spmd(world_size=4, timeout=120)
def test_reduce_dtype_adds_up_in_it() -> None:
    """Addends 256, 1, 1, 1 in bfloat16 make 260 when added in float32, and the output stays bfloat16."""
    mesh = tp(4)
    layer = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[256.0, 1, 1, 1]]))
    for out in (R, S(0)):
        style = RowwiseParallel(input_layouts=R, output_layouts=out, reduce_dtype=torch.float32)
        y = parallelize_module(copy.deepcopy(layer), mesh, style)(
            torch.ones(4, 4, dtype=torch.bfloat16)
        )
        assert y.dtype == torch.bfloat16
        assert y.flatten().tolist() == [260.0] * y.numel()


@spmd(world_size=2, timeout=120)
def test_keyword_input() -> None:
    """The input may be passed by its name, as to any linear layer."""
    model = parallelize_module(nn.Linear(4, 4), tp(2), ColwiseParallel(output_layouts=R))
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(input=x), model(x))
    with pytest.raises(TypeError):
        model(x, x)


class Scaled(nn.Linear):
    """A linear layer with a forward of its own, an extra positional input and a flag."""

    def forward(self, x: Tensor, scale: float, *, flip: bool = False) -> Tensor:  # type: ignore[override]  # that is the point
        y = F.linear(x, self.weight, self.bias) * scale
        return -y if flip else y


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scaled(8, 12), Scaled(12, 8)

    def forward(self, x: Tensor) -> Any:
        return self.b(F.gelu(self.a(x, 2.0)), 3.0, flip=True)


@spmd(world_size=2, timeout=120)
def test_subclass_with_its_own_forward() -> None:
    """A subclass keeps its forward, its extra inputs and its numbers."""
    check_plan(
        Chain(), tp(2), {"a": ColwiseParallel(), "b": RowwiseParallel()}, torch.randn(2, 3, 8)
    )


@spmd(world_size=2, timeout=120)
def test_kinds_without_a_rule_are_refused() -> None:
    """A norm is neither cut by columns nor by rows."""
    mesh = tp(2)
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(
            UnsupportedModuleError, match=r"not LayerNorm.*SequenceParallel or NoParallel"
        ):
            parallelize_module(nn.LayerNorm(4), mesh, style)
    assert issubclass(UnsupportedModuleError, NotImplementedError)


@spmd(world_size=4, timeout=120)
def test_input_on_another_mesh_is_refused() -> None:
    """A DTensor of the whole 2-D mesh cannot go into a layer that was laid out over one axis."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    with pytest.raises(
        BoundaryError, match=r"the input of a linear layer is a DTensor on .*applied on"
    ):
        layer(distribute_tensor(torch.randn(4, 4), mesh, [S(0), R]))


@spmd(world_size=2, timeout=120)
def test_parameters_stay_distributed_with_their_attributes() -> None:
    """Parameters are DTensors with the layouts of the style, and what was set on them is kept."""
    layer: Any = nn.Linear(4, 6)
    layer.weight.no_decay = True
    parallelize_module(layer, tp(2), ColwiseParallel())
    assert isinstance(layer.weight, DTensor)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.placements == (S(0),) == layer.bias.placements
    assert layer.weight.shape == (6, 4)
    assert vars(layer.weight)["no_decay"]
    row: Any = parallelize_module(nn.Linear(4, 6), tp(2), RowwiseParallel())
    assert (row.weight.placements, row.bias.placements) == ((S(1),), (R,))


@spmd(world_size=2, timeout=120)
def test_source_rank() -> None:
    """The values of the source rank count; with None each rank cuts its own."""
    mesh = tp(2)
    rank = mesh.get_local_rank()
    for source, expected in ((0, [0.0, 0.0]), (1, [1.0, 1.0]), (None, [0.0, 1.0])):
        layer: Any = nn.Linear(1, 2, bias=False)
        nn.init.constant_(layer.weight, float(rank))
        parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=source)
        assert layer.weight.full_tensor().flatten().tolist() == expected


@spmd(world_size=1, timeout=120)
def test_one_rank() -> None:
    """A mesh of one rank changes nothing but the types."""
    check_plan(mlp(), tp(1), PAIR, torch.randn(2, 3, 8))


@spmd(world_size=2, timeout=120)
def test_copies_and_pickles_compute() -> None:
    """A laid-out module can be copied and pickled, and the copy owns its parameters."""
    model: Any = parallelize_module(mlp(), tp(2), PAIR)
    x = torch.randn(2, 8)
    y = model(x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(x), y)
        with torch.no_grad():
            again[0].weight.zero_()
        torch.testing.assert_close(model(x), y)
    assert isinstance(model[0], nn.Linear)
    assert repr(model[0]).startswith("ParallelLinear(in_features=8, out_features=12")


class FusedGated(nn.Module):
    """Gate and up in one projection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 2 * hidden), nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


@pytest.mark.parametrize("hidden", [12, 10, 3])
@spmd(world_size=4, timeout=120)
def test_fused_projections_are_cut_block_by_block(hidden: int) -> None:
    """Each rank has its columns of every block; the parameter stays in the order of the single device."""
    mesh = tp(4)
    plan = {"gate_up": ColwiseParallel(blocks=2), "down": RowwiseParallel()}
    model = FusedGated(hidden)
    laid_out: Any = check_plan(model, mesh, plan, torch.randn(2, 3, 8))
    assert torch.equal(laid_out.gate_up.weight.full_tensor(), model.gate_up.weight)
    for local in (True, False):
        style = ColwiseParallel(blocks=2, output_layouts=R, use_local_output=local)
        check_plan(nn.Linear(8, 2 * hidden), mesh, style, torch.randn(2, 8))
    with pytest.raises(PlanError, match=r"blocks=3 .* this Linear has 8 outputs"):
        parallelize_module(nn.Linear(4, 8), mesh, ColwiseParallel(blocks=3))
