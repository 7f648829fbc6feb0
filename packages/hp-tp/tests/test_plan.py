"""Plans: matching, checking and ties."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from hp_dtensor import DTensor, Replicate, Shard
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    ColwiseParallel,
    ParallelPlan,
    ParallelStyle,
    PlanError,
    RowwiseParallel,
    SequenceParallel,
    UnmatchedKeyError,
    match_plan,
    parallelize_module,
)
from hp_tp.testing import check_plan
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module

R, S = Replicate(), Shard


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.fc1(x).relu())


class Tower(nn.Module):
    def __init__(self, depth: int = 11) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Mlp()}) for _ in range(depth))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + layer.get_submodule("mlp")(x)
        return self.mlp(x)


def paths(plan: Any, model: nn.Module | None = None) -> list[str]:
    """The modules that *plan* names."""
    return [match.path for match in match_plan(model or Tower(), plan)]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("mlp.fc1", ["mlp.fc1"]),
        ("layers.0.mlp.fc1", ["layers.0.mlp.fc1"]),
        ("layers.[0-2].mlp.fc?", [f"layers.{i}.mlp.fc{j}" for i in range(3) for j in (1, 2)]),
        ("layers.1*.mlp.fc2", ["layers.1.mlp.fc2", "layers.10.mlp.fc2"]),
        ("*.fc1", ["mlp.fc1"]),
        ("", [""]),
        ("layers..3.mlp.", ["layers.3.mlp"]),
    ],
)
def test_keys_name_modules_level_by_level(key: Any, expected: Any) -> None:
    """One segment for one level; patterns for child names; empty tokens count for nothing."""
    assert paths({key: ColwiseParallel()}) == expected


def test_a_segment_is_not_tried_on_the_parent_again() -> None:
    """A key below ``layers`` never reaches a child of the root with the same name."""
    assert paths({"layers.*.mlp": ColwiseParallel()}) == [f"layers.{i}.mlp" for i in range(11)]


def test_nested_plans_and_none() -> None:
    """A value may be a plan for what is below, or None for nothing."""
    plan = {"mlp": {"fc1": ColwiseParallel(), "": SequenceParallel(), "fc2": None}, "layers": None}
    assert paths(plan) == ["mlp.fc1", "mlp"]


def test_wrappers_are_looked_through() -> None:
    """Keys of the plain model find the modules of a checkpointed or compiled one."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model: Any = Tower(2)
    model.mlp = checkpoint_wrapper(model.mlp)
    assert paths({"mlp.fc1": ColwiseParallel()}, model) == ["mlp._checkpoint_wrapped_module.fc1"]


def test_unmatched_keys_are_an_error_that_names_them() -> None:
    """Nothing is changed, all keys are listed, each with its nearest names."""
    model = Tower(2)
    plan = {
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc_2": RowwiseParallel(),
        "layers.*.mlpp.fc1": ColwiseParallel(),
        "zzz": ColwiseParallel(),
    }
    with pytest.raises(UnmatchedKeyError) as caught:
        match_plan(model, plan)
    assert list(caught.value.nearest) == ["mlp.fc_2", "layers.*.mlpp.fc1", "zzz"]
    assert caught.value.nearest["mlp.fc_2"][0] in {"mlp.fc2", "mlp.fc1"}
    assert "layers.*.mlp.fc1" in caught.value.nearest["layers.*.mlpp.fc1"]
    assert "'zzz': nothing is like it" in str(caught.value)
    assert "unmatched='ignore'" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert pickle.loads(pickle.dumps(caught.value)).nearest == caught.value.nearest
    assert len(match_plan(model, plan, unmatched="ignore")) == 1
    with pytest.warns(UserWarning, match="match no module"):
        match_plan(model, plan, unmatched="warn")


@spmd(world_size=2, timeout=120)
def test_unmatched_keys_leave_the_model_alone() -> None:
    """The error comes before the first parameter is cut."""
    model = Mlp()
    with pytest.raises(UnmatchedKeyError, match="fc_2"):
        parallelize_module(model, tp(2), {"fc1": ColwiseParallel(), "fc_2": RowwiseParallel()})
    assert type(model.fc1.weight) is nn.Parameter
    assert type(model.fc1) is nn.Linear


@spmd(world_size=4, timeout=120)
def test_what_is_no_plan_or_no_mesh() -> None:
    """A mesh of two axes, a plan that is none, and no plan at all."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"one axis, and this one has 2.*mesh\['tp'\]"):
        parallelize_module(Mlp(), mesh, ColwiseParallel())
    no_plans: list[Any] = [3, {"fc1": 3}, [ColwiseParallel()]]
    for plan in no_plans:
        with pytest.raises(TypeError, match="a plan is a ParallelStyle or a mapping"):
            parallelize_module(Mlp(), mesh["tp"], plan)
    model: Any = Mlp()
    with pytest.warns(UserWarning, match="No parallelize_plan is provided"):
        assert parallelize_module(model, mesh["tp"]) is model
    with mesh["tp"]:
        parallelize_module(model, parallelize_plan={"fc1": ColwiseParallel()})
    assert model.fc1.weight.placements == (S(0),)


@spmd(world_size=2, timeout=120)
def test_whole_tower() -> None:
    """Patterns over layers give the numbers of one device."""
    plan: ParallelPlan = {
        "layers.*.mlp": {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()},
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(),
    }
    check_plan(Tower(3), tp(2), plan, torch.randn(2, 4))


@spmd(world_size=2, timeout=120)
def test_one_style_object_for_many_modules() -> None:
    """A style is a value: shared between kinds of modules and plans, and unchanged by use."""
    mesh = tp(2)
    style = RowwiseParallel(input_layouts=R)
    linear, table = nn.Linear(4, 4), nn.Embedding(4, 4)
    check_plan(linear, mesh, style, torch.randn(2, 4))
    check_plan(table, mesh, style, torch.tensor([[0, 3]]))
    parallelize_module(nn.Linear(4, 4), mesh, style, src_data_rank=None)
    assert style == RowwiseParallel(input_layouts=R)
    assert style.src_data_rank == 0
    assert hash(style) == hash(RowwiseParallel(input_layouts=R))
    with pytest.raises(AttributeError, match=r"RowwiseParallel.input_layouts cannot be set"):
        style.input_layouts = S(0)


class Tied(nn.Module):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4, device=device)
        self.out = nn.Linear(4, 10, bias=False, device=device)
        self.out.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Any:
        return self.out(self.emb(ids))


TIED = {"emb": RowwiseParallel(), "out": ColwiseParallel(output_layouts=R)}


@spmd(world_size=2, timeout=120)
def test_tied_weights_stay_tied() -> None:
    """One parameter in two places is one parameter afterwards, with the sum of both gradients."""
    laid_out = check_plan(Tied(), tp(2), TIED, torch.tensor([[0, 3, 7]]))
    assert laid_out.out.weight is laid_out.emb.weight
    assert len(list(laid_out.parameters())) == 1


@spmd(world_size=2, timeout=120)
def test_ties_with_styles_of_torch() -> None:
    """Torch's styles make new parameters; the tie is kept through them as well."""
    mesh = tp(2)
    for plan in (
        {"emb": TorchRowwise(input_layouts=R), "out": ColwiseParallel(output_layouts=R)},
        {"emb": RowwiseParallel(), "out": TorchColwise(output_layouts=R)},
    ):
        model = parallelize_module(Tied(), mesh, plan)
        assert model.out.weight is model.emb.weight


@spmd(world_size=2, timeout=120)
def test_tie_through_the_meta_device() -> None:
    """Laid out on meta, then materialised and initialised: still one parameter."""
    mesh = tp(2)
    model: Any = parallelize_module(Tied(device="meta"), mesh, TIED)
    assert model.out.weight is model.emb.weight
    assert model.emb.weight.is_meta
    model.to_empty(device="cpu")
    assert model.out.weight is model.emb.weight
    with torch.no_grad():
        model.emb.weight.copy_(torch.arange(40.0).reshape(10, 4) / 40)
    reference = Tied()
    with torch.no_grad():
        reference.emb.weight.copy_(torch.arange(40.0).reshape(10, 4) / 40)
    ids = torch.tensor([[1, 9]])
    torch.testing.assert_close(model(ids), reference(ids))


@spmd(world_size=2, timeout=120)
def test_ties_that_disagree_are_refused() -> None:
    """Two layouts for one parameter: the error tells which, and what fits."""
    plan = {"emb": ColwiseParallel(), "out": ColwiseParallel()}
    with pytest.raises(
        PlanError, match=r"Linear.weight is laid out as .*tied.*RowwiseParallel for the embedding"
    ):
        parallelize_module(Tied(), tp(2), plan)


@spmd(world_size=2, timeout=120)
def test_styles_of_torch_mix_with_ours() -> None:
    """Columns by torch and rows by us, and the other way round."""
    mesh = tp(2)
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    for plan in (
        {"fc1": TorchColwise(), "fc2": RowwiseParallel()},
        {"fc1": ColwiseParallel(), "fc2": TorchRowwise()},
    ):
        model = Mlp()
        reference = copy.deepcopy(model)
        parallelize_module(model, mesh, plan)
        torch.testing.assert_close(model(x), reference(x))
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        for ours, right in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), right.grad)


@spmd(world_size=2, timeout=120)
def test_our_styles_in_the_function_of_torch() -> None:
    """Torch's ``parallelize_module`` takes our styles, and sets the source rank that it was given."""
    model, x = Mlp(), torch.randn(2, 4)
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_parallelize_module(
            model, tp(2), {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}, src_data_rank=None
        )
    assert isinstance(model.fc1.weight, DTensor)
    torch.testing.assert_close(model(x), reference(x))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return 2 * self.inner(x)


class Doubling(ParallelStyle):
    """A style of a user, which returns another module."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> Any:
        return Wrapped(module)


@spmd(world_size=2, timeout=120)
def test_a_style_may_return_another_module() -> None:
    """What ``apply`` returns takes the module's place, also at the root."""
    mesh, x = tp(2), torch.randn(2, 4)
    model = Mlp()
    reference = copy.deepcopy(model)
    assert parallelize_module(model, mesh, {"fc2": Doubling()}) is model
    torch.testing.assert_close(model(x), 2 * reference(x))
    assert isinstance(parallelize_module(model, mesh, Doubling()), Wrapped)


@spmd(world_size=2, timeout=120)
def test_applying_a_style_twice_is_refused_when_layouts_differ() -> None:
    """A second, different layout for the same parameter is an error."""
    model = parallelize_module(Mlp(), tp(2), {"fc1": ColwiseParallel()})
    with pytest.raises(PlanError, match="is laid out as"):
        parallelize_module(model, tp(2), {"fc1": RowwiseParallel()})


@spmd(world_size=2, timeout=120)
def test_a_forward_set_on_the_instance_is_not_lost() -> None:
    """A module whose ``forward`` somebody replaced is refused instead of silently computing something else."""
    layer: Any = nn.Linear(4, 4)
    layer.forward = lambda x: x
    with pytest.raises(PlanError, match="has a forward of its own in its attributes"):
        parallelize_module(layer, tp(2), ColwiseParallel())


def paper_mesh() -> DeviceMesh:
    """Two ranks without groups: what is checked before anything is sent needs none."""
    return DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",), _init_backend=False, _rank=0)


def test_a_module_is_laid_out_by_one_entry() -> None:
    """Two keys that lay out one module are an error that names both; a boundary besides is none."""
    model = Tower(2)
    with pytest.raises(
        PlanError,
        match=r"'layers.1.mlp.fc1' is matched twice, by the keys 'layers\.\*.*' and 'layers.1",
    ):
        parallelize_module(
            model,
            paper_mesh(),
            {"layers.*.mlp.fc1": ColwiseParallel(), "layers.1.mlp.fc1": TorchColwise()},
        )
    model.layers[1] = model.layers[0]
    with pytest.raises(PlanError, match=r"also called 'layers.1.mlp.fc1'"):
        parallelize_module(
            model,
            paper_mesh(),
            {"layers.0.mlp.fc1": ColwiseParallel(), "layers.1.mlp.fc1": RowwiseParallel()},
        )
    assert type(model.layers[0].get_submodule("mlp.fc1")) is nn.Linear


def test_all_of_a_plan_is_checked_before_any_of_it() -> None:
    """An entry that cannot be applied leaves what comes before it as it was."""
    model = Mlp()
    with pytest.raises(PlanError, match="blocks=3"):
        parallelize_module(
            model, paper_mesh(), {"fc1": ColwiseParallel(), "fc2": ColwiseParallel(blocks=3)}
        )
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_parameters_that_nobody_lays_out() -> None:
    """They are allowed, warned of or refused, by name, as asked."""
    plan = {"fc1": ColwiseParallel()}
    with pytest.raises(PlanError, match=r"no style of the plan lays out fc2.weight, fc2.bias"):
        parallelize_module(Mlp(), paper_mesh(), plan, uncovered="error")
    with pytest.warns(UserWarning, match=r"fc2.weight, fc2.bias, which stay whole"):
        parallelize_module(Mlp(), paper_mesh(), plan, uncovered="warn", src_data_rank=None)
    parallelize_module(Mlp(), paper_mesh(), plan, src_data_rank=None)


@spmd(world_size=2, timeout=120)
def test_ties_survive_meta_init() -> None:
    """A tied table is laid out on the meta device, materialised and filled, and stays one parameter."""
    mesh = tp(2)
    with torch.device("meta"):
        model: Any = nn.ModuleDict({"emb": nn.Embedding(8, 4), "out": nn.Linear(4, 8, bias=False)})
        model.out.weight = model.emb.weight
    parallelize_module(
        model,
        mesh,
        {"emb": RowwiseParallel(), "out": ColwiseParallel(output_layouts=R)},
    )
    model.to_empty(device="cpu")
    nn.init.normal_(model.emb.weight)
    assert model.out.weight is model.emb.weight
    assert len(list(model.parameters())) == 1
    ids = torch.tensor([[0, 3, 7]])
    table = model.emb.weight.full_tensor().detach().requires_grad_()
    model.out(model.emb(ids)).square().sum().backward()
    (table[ids] @ table.t()).square().sum().backward()
    torch.testing.assert_close(model.emb.weight.grad.full_tensor(), table.grad)


class Rotated(nn.Module):
    """A projection whose result is scaled by a table that it keeps, as rotary embeddings are."""

    def __init__(self, *, as_buffer: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 6)
        table = torch.linspace(-1, 1, 6)
        if as_buffer:
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self.table


@pytest.mark.parametrize("as_buffer", [True, False])
@spmd(world_size=2)
def test_plain_tables_of_a_model_meet_distributed_activations(as_buffer: bool) -> None:
    """A buffer or attribute that the plan does not mention counts as replicated; value and gradient are one device's."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    alone = Rotated(as_buffer=as_buffer)
    model = parallelize_module(
        copy.deepcopy(alone), mesh, {"proj": ColwiseParallel(use_local_output=False)}
    )
    x = torch.randn(3, 4)
    out = model(x)
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.full_tensor(), alone(x))
    out.sum().backward()
    alone(x).sum().backward()
    torch.testing.assert_close(model.proj.weight.grad.full_tensor(), alone.proj.weight.grad)
