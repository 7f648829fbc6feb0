"""Random operators on real ranks: one whole for every layout, equal replicas, torch's own numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import hp_dtensor
import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    ImplicitCommunicationError,
    LayoutError,
    NoRuleError,
    Partial,
    Placement,
    Policy,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    manual_seed,
    random_policy,
    set_random_policy,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import run_spmd, spmd
from torch import nn
from torch.utils.checkpoint import checkpoint

R = Replicate()
SHAPE = (6, 70)
Operator = Callable[[torch.Tensor], torch.Tensor]


def _made(name: str, *args: object) -> Operator:
    """The factory of this name, laid out as its model is."""

    def make(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            laid = x.placements if name != "randperm" else [_of_a_line(p) for p in x.placements]
            made = getattr(hp_dtensor, name)(*args, device_mesh=x.device_mesh, placements=laid)
        else:
            made = getattr(torch, name)(*args)
        return cast("torch.Tensor", made)

    return make


def _of_a_line(placement: Placement) -> Placement:
    return R if isinstance(placement, Replicate) else Shard(0)


OPERATORS: dict[str, Operator] = {
    "rand": _made("rand", SHAPE),
    "randn": _made("randn", SHAPE),
    "randint": _made("randint", 3, 9, SHAPE),
    "randperm": _made("randperm", 67),
    "feature_alpha": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(2.0),
    "geometric_": lambda x: x.geometric_(0.3),
    "log_normal_": lambda x: x.log_normal_(0, 0.5),
    "cauchy_": lambda x: x.cauchy_(1, 2),
    "random_": lambda x: x.random_(),
    "random_to": lambda x: x.random_(9),
    "random_from": lambda x: x.random_(-3, 1 << 22),
    "bernoulli_by": lambda x: torch.zeros_like(x).bernoulli_(x.abs()),
    "bernoulli": lambda x: torch.bernoulli(x.abs()),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 10),
    "normal_by": lambda x: torch.normal(x, 0.5),
    "normal_std": lambda x: torch.normal(1.0, x.abs()),
    "normal_both": lambda x: torch.normal(x, x.abs()),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_in_place": lambda x: F.dropout(x, 0.4, inplace=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "feature_dropout": lambda x: F.dropout1d(x.unsqueeze(0), 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "poisson": lambda x: torch.poisson(x.abs() * 9),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9), x.abs()),
    "multinomial": lambda x: torch.multinomial(x.abs(), 5),
    "multinomial_replaced": lambda x: torch.multinomial(x.abs()[0], 5, replacement=True),
    "kaiming": lambda x: nn.init.kaiming_uniform_(x, 5**0.5),
    "xavier": nn.init.xavier_normal_,
    "trunc_normal": lambda x: nn.init.trunc_normal_(x, std=2.0),
    "orthogonal": nn.init.orthogonal_,
    "complex": lambda x: torch.view_as_real(torch.randn_like(x, dtype=torch.complex64)),
}


def _model() -> torch.Tensor:
    return torch.linspace(-0.9, 0.9, 420).reshape(SHAPE)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _layouts(axes: int) -> list[tuple[Placement, ...]]:
    if axes == 3:
        return [
            (Shard(0), Shard(0), Shard(1)),
            (R, Shard(1), Shard(1)),
            (Shard(1), StridedShard(0, split_factor=2), Shard(0)),
        ]
    if axes == 1:
        return [(R,), (Shard(0),), (Shard(1),), (StridedShard(1, split_factor=3),)]
    return [
        (Shard(0), Shard(0)),
        (Shard(1), R),
        (Shard(0), Shard(1)),
        (R, StridedShard(0, split_factor=2)),
    ]


def _every_layout(names: Sequence[str] = tuple(OPERATORS)) -> dict[str, torch.Tensor]:
    """What each operator gives under each policy and layout, checked to be one whole; of the default layout."""
    world = torch.distributed.get_world_size()
    meshes = [init_device_mesh("cpu", (world,))]
    if world > 1:
        meshes.append(init_device_mesh("cpu", (2, world // 2)))
    if world == 8:
        meshes.append(init_device_mesh("cpu", (2, 2, 2)))
    found = {}
    for policy in ("host", "layout_free"):
        set_random_policy(policy)
        for name in names:
            results = []
            for mesh in meshes:
                for placements in _layouts(mesh.ndim):
                    manual_seed(11)
                    laid = distribute_tensor(_model(), mesh, placements, src_data_rank=None)
                    results.append(_whole(OPERATORS[name](laid)))
            for result in results[1:]:
                assert torch.equal(result, results[0]), (policy, name)
            found[f"{policy} {name}"] = results[0]
    set_random_policy(None)
    return found


def test_every_layout_and_number_of_ranks_gives_one_whole() -> None:
    """On 1, 2 and 4 ranks and in every layout each operator gives the same bits; under "host" they are torch's."""
    alone = run_spmd(_every_layout, world_size=1)[0]
    for world in (2, 4):
        for rank in run_spmd(_every_layout, world_size=world, timeout=120):
            for name, want in alone.items():
                assert torch.equal(rank[name], want), (world, name)
    for name, operator in OPERATORS.items():
        torch.manual_seed(11)
        assert torch.equal(alone[f"host {name}"], operator(_model())), name


def _eight_give_what_one_gives(names: Sequence[str]) -> None:
    run = partial(_every_layout, names)
    alone = run_spmd(run, world_size=1)[0]
    for rank in run_spmd(run, world_size=8, timeout=240):
        assert all(torch.equal(rank[name], want) for name, want in alone.items())


def test_eight_ranks_draw_what_one_draws() -> None:
    """On 8 ranks, along one to three axes, some of the operators give the bits of one rank."""
    _eight_give_what_one_gives(["normal_", "dropout", "multinomial", "randint", "trunc_normal"])


@pytest.mark.nightly
def test_eight_ranks_draw_what_one_draws_by_every_operator() -> None:
    """On 8 ranks as on one."""
    _eight_give_what_one_gives(tuple(OPERATORS))


@spmd(world_size=4)
def test_replicas_are_equal_although_ranks_are_seeded_differently() -> None:
    """Ranks with seeds of their own, and generators that stand elsewhere, still draw one tensor, by each policy."""
    mesh = init_device_mesh("cpu", (2, 2))
    for policy in ("host", "layout_free", "device"):
        with random_policy(policy):
            torch.manual_seed(torch.distributed.get_rank())
            torch.rand(torch.distributed.get_rank())
            for _ in range(2):
                laid = distribute_tensor(
                    torch.empty(8, 3), mesh, [Shard(0), R], src_data_rank=None
                )
                laid.normal_()
                mine = laid.to_local().clone()
                first = mine.clone()
                torch.distributed.broadcast(first, group=mesh.get_group(1), group_src=0)
                assert torch.equal(mine, first)
                drawn = torch.multinomial(torch.ones_like(laid).exp()[0], 2)
                token = _whole(drawn).clone()
                torch.distributed.broadcast(token, 0)
                assert torch.equal(token, _whole(drawn))


@spmd(world_size=2)
def test_pieces_differ_under_the_device_policy() -> None:
    """With native streams each piece has numbers of its own, and a second draw has others."""
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(3, mesh)
    with random_policy("device"):
        laid = distribute_tensor(torch.empty(8, 3), mesh, [Shard(0)], src_data_rank=None)
        whole = [_whole(laid.normal_()).clone() for _ in range(2)]
    assert not torch.equal(whole[0][:4], whole[0][4:])
    assert not torch.equal(*whole)


@spmd(world_size=2)
def test_only_ranks_that_were_not_seeded_alike_communicate() -> None:
    """After manual_seed a draw sends nothing, before it a few bytes; seeding otherwise ends the promise, strict refuses."""
    mesh = init_device_mesh("cpu", (2,))
    laid = distribute_tensor(torch.empty(8, 3), mesh, [R], src_data_rank=None)
    for policy in ("host", "layout_free", "device"):
        with random_policy(policy):
            with CommDebugMode() as quiet:
                manual_seed(5, mesh)
                laid.normal_()
                F.dropout(laid, 0.5)
            assert quiet.get_total_counts() == 0
            with hp_dtensor.strict():
                laid.uniform_()
            torch.manual_seed(5)
            with CommDebugMode() as loud:
                laid.normal_()
            assert loud.get_total_counts() == 1
            with (
                hp_dtensor.strict(),
                pytest.raises(ImplicitCommunicationError, match="manual_seed"),
            ):
                laid.uniform_()


@spmd(world_size=2)
def test_counts_stay_in_step_where_plain_draws_differ() -> None:
    """After manual_seed, layout-free draws do not see what ranks draw for themselves in between."""
    mesh = init_device_mesh("cpu", (2,))
    laid = distribute_tensor(torch.empty(4), mesh, [R], src_data_rank=None)
    with random_policy("layout_free"):
        manual_seed(5, mesh)
        torch.rand(torch.distributed.get_rank())
        laid.normal_()
        first = laid.to_local().clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(first, laid.to_local())


@spmd(world_size=4)
def test_ranks_outside_of_the_mesh_stay_in_step() -> None:
    """A rank that holds nothing of the tensor moves its generator like those that do."""
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    from hp_mesh import DeviceMesh

    small = DeviceMesh("cpu", [0, 1])
    for policy in ("host", "layout_free", "device"):
        with random_policy(policy):
            manual_seed(5)
            spec = distribute_tensor(torch.empty(6, 2), small, [Shard(0)], src_data_rank=None)
            spec.normal_()
            laid = distribute_tensor(torch.empty(4), part, [R, R], src_data_rank=None)
            laid.normal_()
            first = laid.to_local().clone()
            torch.distributed.broadcast(first, 0)
            assert torch.equal(first, laid.to_local()), policy


@spmd(world_size=2)
def test_addends_are_never_drawn() -> None:
    """Drawing into a Partial tensor raises on every rank; a tensor like one is replicated; dropout drops whole values."""
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(1, mesh)
    addends = DTensor.from_local(torch.ones(4, 6), mesh, [Partial()])
    for policy in ("host", "layout_free"):
        with random_policy(policy):
            with pytest.raises(LayoutError, match="a sum of draws is not a draw"):
                addends.normal_()
            assert torch.rand_like(addends).placements == (R,)
            values = _whole(F.dropout(addends, 0.5)).unique().tolist()
            assert values == [0.0, 4.0]
    with pytest.raises(LayoutError, match="still to be reduced"):
        hp_dtensor.randn(4, device_mesh=mesh, placements=[Partial()])


@spmd(world_size=2)
def test_a_generator_is_used_and_advanced() -> None:
    """A torch.Generator gives what torch draws from it, moves on, and leaves the default generator alone."""
    mesh = init_device_mesh("cpu", (2,))
    for policy in ("host", "layout_free"):
        with random_policy(policy):
            own = torch.Generator().manual_seed(9)
            before = torch.get_rng_state()
            laid = distribute_tensor(torch.empty(5, 3), mesh, [Shard(0)], src_data_rank=None)
            drawn = [_whole(laid.normal_(generator=own)).clone() for _ in range(2)]
            assert torch.equal(before, torch.get_rng_state())
            assert not torch.equal(*drawn)
            again = torch.Generator().manual_seed(9)
            other = hp_dtensor.randn(
                5, 3, device_mesh=mesh, placements=[Shard(1)], generator=again
            )
            assert torch.equal(_whole(other), drawn[0])
            if policy == "host":
                assert torch.equal(
                    drawn[0], torch.randn(5, 3, generator=torch.Generator().manual_seed(9))
                )


def _twice(policy: Policy, run: Callable[[DTensor], DTensor]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with random_policy(policy):
        for seed in (
            lambda: manual_seed(3),
            lambda: torch.manual_seed(torch.distributed.get_rank()),
        ):
            x = distribute_tensor(_model(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
            seed()
            run(x).sum().backward()
            plain = _whole(x.grad).clone()
            x.grad = None
            seed()
            checkpoint(run, x, use_reentrant=False).sum().backward()
            assert torch.equal(plain, _whole(x.grad))


@spmd(world_size=2)
def test_activation_checkpointing_draws_again_what_was_drawn() -> None:
    """With preserve_rng_state the mask of the backward pass is that of the forward, by each policy and kind of seeding."""
    for policy in ("host", "layout_free", "device"):
        _twice(policy, lambda x: F.dropout(F.dropout(x.sin(), 0.3), 0.5).cos())


@spmd(world_size=2)
def test_the_state_of_torch_is_all_there_is_to_save() -> None:
    """get_rng_state and set_rng_state, and fork_rng, carry draws on distributed tensors along."""
    mesh = init_device_mesh("cpu", (2,))
    for policy in ("host", "layout_free"):
        with random_policy(policy):
            manual_seed(5, mesh)
            laid = distribute_tensor(torch.empty(4), mesh, [R], src_data_rank=None)
            laid.normal_()
            state = torch.get_rng_state()
            with torch.random.fork_rng():
                first = _whole(laid.normal_()).clone()
            second = _whole(laid.normal_()).clone()
            torch.set_rng_state(state)
            with CommDebugMode() as quiet:
                third = _whole(laid.normal_()).clone()
            assert quiet.get_total_counts() == 0
            assert torch.equal(first, second)
            assert torch.equal(first, third)


@spmd(world_size=2, timeout=120)
def test_a_compiled_graph_draws_what_eager_mode_draws() -> None:
    """Each run of a graph draws anew, the same bits as eager mode; checkpointing around a compiled function replays."""
    mesh = init_device_mesh("cpu", (2,))

    def net(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin(), 0.5).cos() + torch.randn_like(x)

    for policy in ("host", "layout_free", "device"):
        with random_policy(policy):
            torch.compiler.reset()
            compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
            x = distribute_tensor(_model(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
            results = []
            replayed = partial(checkpoint, compiled, use_reentrant=False)
            for function in (net, compiled, replayed):
                manual_seed(3)
                outs = [function(x) for _ in range(2)]
                outs[0].sum().backward()
                results.append([_whole(outs[0]), _whole(outs[1]), _whole(x.grad)])
                x.grad = None
            for result in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
            assert not torch.equal(results[0][0], results[0][1])


@spmd(world_size=2, timeout=120)
def test_a_checkpoint_inside_a_graph_draws_again_what_was_drawn() -> None:
    """A region that a whole graph recomputes has the masks and gradients of eager mode, and each run draws anew."""
    mesh = init_device_mesh("cpu", (2,))

    def region(x: torch.Tensor) -> torch.Tensor:
        dropped = F.dropout(F.dropout(x.sin(), 0.3), 0.5)
        picked = torch.multinomial(x.detach().abs() + 0.1, 2).to(x.dtype).sum()
        return dropped.cos() * torch.rand_like(x) * picked

    def net(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(region, checkpoint(region, x, use_reentrant=False), use_reentrant=False)

    policies: tuple[Policy, ...] = ("layout_free", "host", "device")
    for policy in policies:
        with random_policy(policy):
            torch.compiler.reset()
            compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
            x = distribute_tensor(_model(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
            results = []
            for function in (net, compiled):
                manual_seed(3)
                outs = [function(x) for _ in range(2)]
                (outs[0] + 2 * outs[1]).sum().backward()
                results.append([_whole(value) for value in (*outs, x.grad, torch.rand_like(x))])
                x.grad = None
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), policy
            assert not torch.equal(results[0][0], results[0][1])


@spmd(world_size=2)
def test_caches_of_graphs_know_the_rank_and_the_policy() -> None:
    """Ranks that share a folder of compiled graphs, and programs of other policies, do not find each other's."""
    mesh = init_device_mesh("cpu", (2,))
    laid = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    policies: tuple[Policy, ...] = ("layout_free", "host", "device")
    names = []
    for policy in policies:
        with random_policy(policy):
            name = laid._stable_hash_for_caching()
            assert name == (laid + 1)._stable_hash_for_caching()
            names.append(int(name[:15], 16))
    everyone = torch.empty(6, dtype=torch.int64)
    torch.distributed.all_gather_into_tensor(everyone, torch.tensor(names))
    assert len(everyone.unique()) == 6


@spmd(world_size=2)
def test_attention_with_dropout_has_the_gradients_of_its_mask() -> None:
    """A kernel that would draw inside is made of operators: one result for each layout, and the gradients that autograd finds."""
    mesh = init_device_mesh("cpu", (2,))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    inputs = [
        torch.linspace(-1, 1, 2 * 4 * 5 * 8).reshape(2, 4, 5, 8).roll(k).cos() for k in range(3)
    ]
    results = []
    for placements in ([R], [Shard(0)], [Shard(1)]):
        manual_seed(2, mesh)
        laid = [distribute_tensor(x, mesh, placements, src_data_rank=None) for x in inputs]
        out, total, mask, unused = kernel(*laid, None, True, 0.4, True)
        grads = backward(
            torch.ones_like(out),
            *laid,
            None,
            out,
            total,
            mask,
            unused,
            0.4,
            [True] * 3 + [False],
            True,
        )
        results.append([_whole(value) for value in (out, mask, *grads[:3])])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    leaves = [x.clone().requires_grad_() for x in inputs]
    scores = leaves[0] @ leaves[1].transpose(-2, -1) / 8**0.5
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    want = (scores.softmax(-1) * results[0][1] / 0.6) @ leaves[2]
    want.sum().backward()
    torch.testing.assert_close(results[0][0], want.detach())
    torch.testing.assert_close(results[0][2:], [leaf.grad for leaf in leaves])


@spmd(world_size=2)
def test_scaled_dot_product_attention_drops_alike_in_each_layout() -> None:
    """F.scaled_dot_product_attention with dropout gives one whole, forward and backward."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.linspace(-1, 1, 2 * 4 * 5 * 8).reshape(2, 4, 5, 8).cos()
    results = []
    for placements in ([R], [Shard(0)], [Shard(1)]):
        manual_seed(2, mesh)
        laid = distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()
        out = F.scaled_dot_product_attention(laid, laid, laid, dropout_p=0.3)
        out.square().sum().backward()
        results.append([_whole(out.detach()), _whole(laid.grad)])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@spmd(world_size=2)
def test_draws_go_into_a_tensor_that_is_given() -> None:
    """With ``out`` a draw fills a distributed tensor of any layout with torch's numbers."""
    mesh = init_device_mesh("cpu", (2,))
    draws: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "rand": lambda _, out: torch.rand(SHAPE, out=out),
        "randn": lambda _, out: torch.randn(SHAPE, out=out),
        "randint": lambda _, out: torch.randint(9, SHAPE, out=out),
        "randint_from": lambda _, out: torch.randint(3, 9, SHAPE, out=out),
        "randperm": lambda _, out: torch.randperm(6, out=out[:, 0].clone()),
        "bernoulli": lambda x, out: torch.bernoulli(x.abs(), out=out),
        "normal": lambda x, out: torch.normal(x, 0.5, out=out),
        "normal_std": lambda x, out: torch.normal(1.0, x.abs(), out=out),
        "normal_both": lambda x, out: torch.normal(x, x.abs(), out=out),
        "multinomial": lambda x, out: torch.multinomial(x.abs(), 5, out=out[:, :5].long()),
    }
    for name, draw in draws.items():
        torch.manual_seed(4)
        want = draw(_model(), torch.zeros(SHAPE))
        for placement in (R, Shard(0)):
            manual_seed(4)
            laid = distribute_tensor(_model(), mesh, [placement], src_data_rank=None)
            assert torch.equal(_whole(draw(laid, torch.zeros_like(laid))), want), name


@spmd(world_size=4)
def test_rows_sampled_from_stay_where_their_chances_are() -> None:
    """The result of ``multinomial`` is cut in rows as its argument is, and replicated along other cuts."""
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    chances = torch.rand(6, 8, generator=torch.Generator().manual_seed(2))
    layouts = (
        (line, (Shard(0),), (Shard(0),)),
        (line, (Shard(1),), (R,)),
        (line, (Partial(),), (R,)),
        (grid, (StridedShard(0, split_factor=2), Shard(0)), None),
        (grid, (Shard(1), Shard(0)), (R, Shard(0))),
    )
    torch.manual_seed(4)
    want = torch.multinomial(chances, 3)
    for mesh, placements, kept in layouts:
        manual_seed(4)
        laid = distribute_tensor(chances, mesh, [R] * mesh.ndim, src_data_rank=None)
        laid = laid.redistribute(placements=placements)
        made = torch.multinomial(laid, 3)
        assert isinstance(made, DTensor)
        assert made.placements == (placements if kept is None else kept)
        assert torch.equal(_whole(made), want), placements
    vector = distribute_tensor(chances[0], line, [Shard(0)], src_data_rank=None)
    made = torch.multinomial(vector, 2)
    assert isinstance(made, DTensor)
    assert made.placements == (R,)


@spmd(world_size=2)
def test_an_operator_that_draws_and_has_no_rule_raises() -> None:
    """Rather than draw other numbers on each rank, an operator nobody described is refused with a way out."""
    mesh = init_device_mesh("cpu", (2,))
    laid = distribute_tensor(torch.zeros(4), mesh, [R], src_data_rank=None)
    with pytest.raises(NoRuleError, match="draws random numbers in a way that no rule describes"):
        torch.ops.aten.normal.out(laid, 0.0, 1.0, out=laid)


@spmd(world_size=2)
def test_torchs_own_checks_hold() -> None:
    """Arguments that torch refuses are refused with its words, and nothing is drawn."""
    mesh = init_device_mesh("cpu", (2,))
    laid = distribute_tensor(torch.zeros(4), mesh, [R], src_data_rank=None)
    before = torch.get_rng_state()
    for wrong in (
        lambda: laid.normal_(0, -1),
        lambda: laid.uniform_(2, 1),
        lambda: laid.bernoulli_(1.5),
    ):
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(ValueError, match="random policy 'fast' does not exist"):
        set_random_policy("fast")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(_whole(laid), torch.zeros(4))


def _in_columns(x: torch.Tensor) -> torch.Tensor:
    """Probabilities whose strides are those of a transposed matrix."""
    return x.clone().t()


@spmd(world_size=2)
def test_rows_are_drawn_where_their_chances_are() -> None:
    """Neither chances nor weights move, in any order of strides and any precision, and the numbers are torch's."""
    mesh = init_device_mesh("cpu", (2,))
    chances = torch.rand(7, 8, generator=torch.Generator().manual_seed(2))
    draws: dict[str, Operator] = {
        "bernoulli": torch.bernoulli,
        "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(x),
        "bernoulli of columns": lambda x: torch.bernoulli(_in_columns(x)),
        "bernoulli_ in columns": lambda x: torch.empty_like(_in_columns(x)).bernoulli_(x.t()),
        "one": lambda x: torch.multinomial(x, 1),
        "one, put back": lambda x: torch.multinomial(x, 1, replacement=True),
        "three": lambda x: torch.multinomial(x, 3),
    }
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        whole = chances.to(dtype)
        laid = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        for name, draw in draws.items():
            torch.manual_seed(4)
            want = draw(whole)
            manual_seed(4)
            with hp_dtensor.strict(), CommDebugMode() as seen:
                made = draw(laid)
            assert seen.get_total_counts() == 0, name
            assert torch.equal(_whole(made), want), name
    columns = distribute_tensor(chances, mesh, [Shard(0)], src_data_rank=None).t()
    torch.manual_seed(4)
    want = torch.multinomial(chances.t(), 2)
    manual_seed(4)
    assert torch.equal(_whole(torch.multinomial(columns, 2)), want)


@spmd(world_size=2)
def test_what_is_no_chance_is_refused_as_torch_refuses_it() -> None:
    """Each rank looks at what it draws by."""
    mesh = init_device_mesh("cpu", (2,))

    def laid(value: float) -> DTensor:
        return distribute_tensor(torch.full((4, 3), value), mesh, [Shard(0)], src_data_rank=None)

    for value in (-0.5, 1.5, float("nan")):
        with pytest.raises(RuntimeError, match="p_in >= 0"):
            torch.bernoulli(laid(value))
    for value in (-0.5, float("inf"), float("nan")):
        with pytest.raises(RuntimeError, match="inf"):
            torch.multinomial(laid(value), 1)
    with pytest.raises(RuntimeError, match="sum of probabilities"):
        torch.multinomial(laid(0.0), 1)
    with pytest.raises(RuntimeError, match="without replacement"):
        torch.multinomial(laid(1.0), 4)
    with pytest.raises(RuntimeError, match="not implemented"):
        laid(0.0).bernoulli_(laid(1.0).to(torch.int64))
