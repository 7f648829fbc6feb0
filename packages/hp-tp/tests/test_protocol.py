"""Declarations: read, checked, carried out, undone and converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Replicate, Shard, StridedShard
from hp_mesh import DeviceMesh, ParallelDims, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    BoundaryError,
    ColwiseParallel,
    DeclaredParallel,
    LocalMapConfig,
    Module,
    NoParallel,
    PlanError,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    ShardingConfig,
    SpmdLayout,
    SpmdType,
    UnmatchedKeyError,
    colwise_config,
    configs_of_plan,
    dense_activation_placement,
    dense_param_placement,
    parallelize,
    parallelize_module,
    plan_of_configs,
    resolve_placements,
    rowwise_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
    set_gqa_attention_sharding,
    set_gqa_inner_attention_local_map,
    unparallelize,
)
from hp_tp.testing import check_plan
from torch import Tensor, nn

R, S, P = Replicate(), Shard, Partial()


def paper_mesh(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh without groups, to read layouts against."""
    count = 1
    for size in shape:
        count *= size
    ranks = torch.arange(count).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.wk, self.wv = (nn.Linear(dim, dim // 2, bias=False) for _ in range(2))
        self.inner = Inner()

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = (
            w(x).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        return self.wo(self.inner(q * table, k * table, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, 24), nn.Linear(dim, 24)
        self.w2 = nn.Linear(24, dim)

    def forward(self, x: Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.LayerNorm(dim)
        self.attention, self.feed_forward = Attention(dim), FeedForward(dim)

    def forward(self, x: Tensor, table: Tensor) -> Any:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(20, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, 20, bias=False)

    def forward(self, ids: Tensor, table: Tensor) -> Any:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, table)
        return self.output(self.norm(x))


def declare(model: Decoder, *, enable_sp: bool, local_attention: bool) -> None:
    """Put declarations on all parts of *model*."""
    layers: Any = list(model.layers)
    norms = [norm for layer in layers for norm in (layer.attention_norm, layer.ffn_norm)]
    set_decoder_sharding_config(model, enable_sp=enable_sp, norms=norms)
    for layer in layers:
        set_gqa_attention_sharding(layer.attention, enable_sp=enable_sp)
        set_dense_ffn_sharding(layer.feed_forward, enable_sp=enable_sp)
        if local_attention:
            set_gqa_inner_attention_local_map(layer.attention.inner)


def same_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Every gradient is that of one device."""
    rights = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        grad, right = parameter.grad, rights[name].grad
        assert grad is not None, name
        assert right is not None, name
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(
            full, right, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("enable_sp", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_declared_decoder_equals_one_device(enable_sp: bool, size: int) -> None:
    """Logits and every gradient of a decoder declared by the helpers; and it can be undone."""

    @spmd(world_size=size, timeout=120)
    def run() -> None:
        mesh = tp(size)
        reference = Decoder()
        model = copy.deepcopy(reference)
        declare(model, enable_sp=enable_sp, local_attention=size == 2)
        assert model.parallelize(mesh, strict=True) is model
        ids, table = torch.randint(0, 20, (2, 8)), torch.randn(8, 4)
        ours, right = model(ids, table), reference(ids, table)
        assert ours.placements == (S(2),)
        torch.testing.assert_close(ours.full_tensor(), right, rtol=1e-4, atol=1e-5)
        grad = torch.randn_like(right)
        right.backward(grad)
        (ours.full_tensor() * grad).sum().backward()
        same_gradients(model, reference)
        with pytest.raises(PlanError, match="laid out by parallelize already"):
            model.parallelize(mesh)
        model.unparallelize()
        assert type(model.output) is nn.Linear
        torch.testing.assert_close(model(ids, table), right)
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    run()


@spmd(world_size=4, timeout=120)
def test_layouts_are_over_the_enabled_axes_of_parallel_dims() -> None:
    """With ``ParallelDims`` the tensor axis is used and data axes are left to others; without it nothing happens."""
    tp(4)
    dims = ParallelDims(dp_shard=2, tp=2, world_size=4)
    dims.build_mesh("cpu")
    reference = Decoder()
    model = copy.deepcopy(reference)
    declare(model, enable_sp=True, local_attention=False)
    parallelize(model, dims)
    weight: Any = model.output.weight
    assert weight.placements == (S(0),)
    assert weight.device_mesh.mesh_dim_names == ("tp",)
    ids, table = torch.randint(0, 20, (2, 8)), torch.randn(8, 4)
    torch.testing.assert_close(
        model(ids, table).full_tensor(), reference(ids, table), rtol=1e-4, atol=1e-5
    )
    alone = ParallelDims(dp_shard=4, world_size=4)
    alone.build_mesh("cpu")
    other = copy.deepcopy(reference)
    declare(other, enable_sp=True, local_attention=False)
    parallelize(other, alone)
    torch.testing.assert_close(other(ids, table), reference(ids, table))


@spmd(world_size=2, timeout=120)
def test_tokens_first_is_only_another_argument() -> None:
    """A feed-forward network on ``[tokens, features]``, declared with the sequence in dim 0."""
    mesh = tp(2)
    reference = FeedForward(8)
    model = copy.deepcopy(reference)
    set_dense_ffn_sharding(model, enable_sp=True, batch_dim=None, seq_dim=0)
    parallelize(model, mesh)
    x = torch.randn(6, 8)
    out = model(x.chunk(2)[mesh.get_local_rank()])
    assert out.placements == (S(0),)
    torch.testing.assert_close(out.full_tensor(), reference(x))
    out.full_tensor().square().sum().backward()
    reference(x).square().sum().backward()
    same_gradients(model, reference)


class Several(nn.Module):
    """Outputs in a dict and a tuple, and a state that ranks use differently."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor, y: Tensor | None = None, *rest: Tensor, flag: bool = True) -> Any:
        assert flag
        assert not isinstance(self.scale, DTensor)
        extra = sum(rest) if rest else 0.0
        out = x * self.scale + self.shift + extra
        return (
            {"a": out, "b": (out * 2, "text")} if y is None else {"a": out, "b": (out * y, "text")}
        )


@spmd(world_size=2, timeout=120)
def test_local_regions_and_containers_of_outputs() -> None:
    """A region on local tensors gives the gradients of one device to replicas, for inputs by position and by name."""
    mesh = tp(2)
    model: Any = Several()
    reference: Any = copy.deepcopy(model)
    cut, whole = {"tp": S(0)}, {"tp": R}
    config = ShardingConfig(
        state_shardings={"scale": whole, "shift": whole},
        in_src_shardings={"x": whole, "y": whole},
        in_dst_shardings={"x": cut, "y": cut},
        out_src_shardings={"a": cut, "b": (cut, None)},
        out_dst_shardings={"a": whole, "b": (cut, None)},
        local_map=LocalMapConfig(),
    )
    parallelize(model, mesh, configs={"": config})
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for args, kwargs in (((x,), {}), ((x, y), {}), ((), {"x": x, "y": y, "flag": True})):
        ours, right = model(*args, **kwargs), reference(*args, **kwargs)
        assert ours["a"].placements == (R,)
        assert ours["b"][0].placements == (S(0),)
        assert ours["b"][1] == "text"
        torch.testing.assert_close(ours["a"].to_local(), right["a"])
        torch.testing.assert_close(ours["b"][0].full_tensor(), right["b"][0])
        (ours["a"].square().sum() + ours["b"][0].sum()).full_tensor().backward()
        (right["a"].square().sum() + right["b"][0].sum()).backward()
    torch.testing.assert_close(model.scale.grad.full_tensor(), reference.scale.grad)
    assert isinstance(model.scale, DTensor)
    with pytest.raises(BoundaryError, match=r"placements .*in_src_shardings expects"):
        model(DTensor.from_local(x, mesh, [S(1)]))


@spmd(world_size=2, timeout=120)
def test_replicas_say_what_their_gradient_is() -> None:
    """``R`` adds the ranks' gradients up and ``I`` takes one of them, whatever the rest of the declaration says."""
    mesh = tp(2)
    for kind, factor in ((SpmdType.R, 2.0), (SpmdType.I, 1.0)):
        layer: Any = nn.RMSNorm(4)
        config = ShardingConfig(
            state_shardings={"weight": {"tp": kind}}, local_map=LocalMapConfig()
        )
        parallelize_module(layer, mesh, DeclaredParallel(config=config))
        x = torch.ones(1, 4)
        layer(x).sum().backward()
        torch.testing.assert_close(
            layer.weight.grad.full_tensor(), torch.full((4,), factor), rtol=1e-4, atol=1e-4
        )


def test_layouts_are_read_against_a_mesh() -> None:
    """Axes come in the mesh's order, ``dp`` in its parts, axes of size 1 replicate, and the order on one dim is kept."""
    mesh = paper_mesh(2, 2, 1, names=("dp_replicate", "dp_shard", "tp"))
    assert resolve_placements({"tp": S(0), "dp": S(1), "ep": S(2)}, mesh) == (S(1), S(1), R)
    square = paper_mesh(2, 2, names=("dp", "tp"))
    inner = SpmdLayout({}, partition_spec=(("dp", "tp"), None))
    outer = SpmdLayout({"dp": SpmdType.V}, partition_spec=(("tp", "dp"), None))
    assert resolve_placements(inner, square) == (S(0), S(0))
    assert resolve_placements(outer, square) == (StridedShard(0, split_factor=2), S(0))
    kinds = {"dp": SpmdType.P, "tp": SpmdType.I}
    assert resolve_placements(kinds, square) == (P, R)
    with pytest.raises(ValueError, match="does not declare a placement for mesh axis 'dp'"):
        resolve_placements({"tp": S(0)}, square)
    with pytest.raises(PlanError, match="'tp' is V and has no place"):
        resolve_placements({"tp": SpmdType.V, "dp": R}, square)
    tokens = dense_activation_placement(tp=S(0), batch_dim=None, seq_dim=0)
    assert tokens.partition_spec == (("dp", "cp", "tp"), None)
    assert dense_param_placement(tp=S(0)).per_axis_spmd_types()["tp"] == S(0)


def test_layouts_that_say_two_things() -> None:
    """An order that nobody gave, and an axis with two roles, are errors."""
    with pytest.raises(PlanError, match="both cut dim 0, and nothing says which is the outer"):
        SpmdLayout({"dp": S(0), "tp": S(0)})
    with pytest.raises(PlanError, match="say V and put the axis into the spec"):
        SpmdLayout({"tp": S(0)}, partition_spec=("tp",))
    with pytest.raises(PlanError, match="it can be one of them"):
        SpmdLayout({"tp": SpmdType.P}, partition_spec=("tp",))
    with pytest.raises(PlanError, match="cuts two dims"):
        SpmdLayout({}, partition_spec=("tp", "tp"))


def test_declarations_are_checked_before_anything_changes() -> None:
    """Names that do not exist, states left out, ties in two ways: each is one error, and the model stays as it was."""
    mesh = paper_mesh(2, names=("tp",))
    model = Decoder()
    whole = {"tp": R}
    base = colwise_config(bias=False)

    def refuse(match: str, configs: dict[str, ShardingConfig], **options: Any) -> None:
        with pytest.raises(PlanError, match=match):
            parallelize(model, mesh, configs=configs, **options)
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    refuse(
        r"in_src_shardings names 'inptu', which is no input of Linear.forward.*Did you mean 'input'",
        {
            "output": ShardingConfig(
                state_shardings=base.state_shardings, in_src_shardings={"inptu": whole}
            )
        },
    )
    refuse(
        r"state_shardings names 'wieght'.*Did you mean 'weight'",
        {"output": ShardingConfig(state_shardings={**base.state_shardings, "wieght": whole})},
    )
    refuse(r"Linear.weight is not declared", {"output": ShardingConfig()})
    refuse(r"in no ShardingConfig: tok_embeddings.weight", {"output": base}, strict=True)
    model.output.weight = model.tok_embeddings.weight
    columns = ShardingConfig(state_shardings={"weight": {"tp": S(1)}})
    refuse(r"one tied parameter, declared as", {"output": base, "tok_embeddings": columns})
    with pytest.raises(UnmatchedKeyError, match="did you mean 'output'"):
        parallelize(model, mesh, configs={"outptu": base})
    model.norm.sharding_config = "rows"  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"norm.sharding_config is 'rows'"):
        parallelize(model, mesh)


@spmd(world_size=2, timeout=120)
def test_ties_survive_declarations_and_their_undoing() -> None:
    """A tied table is one parameter before, while and after it is laid out."""
    mesh = tp(2)
    model = Decoder()
    model.output.weight = model.tok_embeddings.weight
    declare(model, enable_sp=False, local_attention=False)
    parallelize(model, mesh)
    assert model.output.weight is model.tok_embeddings.weight
    assert isinstance(model.output.weight, DTensor)
    unparallelize(model)
    assert model.output.weight is model.tok_embeddings.weight


@spmd(world_size=2, timeout=120)
def test_plans_become_declarations_and_come_back() -> None:
    """A plan, the declarations that say the same, and the plan made of these give the single device's numbers."""
    mesh = tp(2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
            self.block = FeedForward(8)
            self.head = nn.Linear(8, 6)

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.block(self.norm(self.embedding(ids))))

    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=R, output_layouts=S(1)),
        "norm": SequenceParallel(),
        "block": PrepareModuleInput(input_layouts=S(1), desired_input_layouts=R),
        "block.w?": ColwiseParallel(),
        "head": NoParallel(),
    }
    plan["block.w[13]"] = plan.pop("block.w?")
    plan["block.w2"] = RowwiseParallel()
    net = Net()
    ids = torch.randint(0, 10, (2, 6))
    check_plan(net, mesh, plan, ids)
    configs = configs_of_plan(net, plan)
    assert len(configs) == 7
    again = plan_of_configs(net, configs)
    assert type(again["embedding"]) is RowwiseParallel
    assert type(again["block.w1"]) is ColwiseParallel
    assert type(again["norm"]) is DeclaredParallel
    check_plan(net, mesh, again, ids)
    output = PrepareModuleOutput(output_layouts=(P, None), desired_output_layouts=(R, None))
    (config,) = configs_of_plan(net, {"block": output}).values()
    assert config.out_src_shardings == ({"tp": P}, None)
    with pytest.raises(PlanError, match="blocks=2"):
        configs_of_plan(net, {"head": ColwiseParallel(blocks=2)})


@spmd(world_size=2, timeout=120)
def test_a_row_parallel_declaration_adds_the_bias_once() -> None:
    """Also where it goes through dispatch: the layer is a subclass with a forward of its own."""

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Any:  # noqa: A002  # torch's name for it
            return F.linear(input, self.weight, self.bias) * 1.0

    mesh = tp(2)
    for kind in (nn.Linear, Own):
        layer = kind(8, 4)
        reference = copy.deepcopy(layer)
        layer.sharding_config = rowwise_config()  # type: ignore[assignment]
        parallelize(layer, mesh)
        x = torch.randn(2, 3, 8)
        out = layer(DTensor.from_local(x.chunk(2, -1)[mesh.get_local_rank()], mesh, [S(2)]))
        torch.testing.assert_close(out.full_tensor(), reference(x))
