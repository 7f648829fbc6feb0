"""Degrees of parallelism: rules, meshes, views, and how many groups they make."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hp_mesh import DeviceMesh, ParallelDims, ParallelDimsError, init_device_mesh, unflatten_mesh
from hp_mesh.groups import registry
from hp_mesh.parallel_dims import VIEWS
from hp_mesh.testing import spmd
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

degree = st.sampled_from([1, 1, 2, 3, 4])


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Play one rank of a world that does not communicate."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def flat(**degrees: int) -> ParallelDims:
    """Return checked degrees whose meshes need no process groups, seen from rank 0."""
    dims = ParallelDims(**degrees)  # type: ignore[arg-type]
    dims.build_mesh("cpu", init_backend=False)
    return dims


@pytest.fixture(autouse=True)
def _as_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")


def test_the_64_rank_job_has_11_groups() -> None:
    """All views of dp_rep2 dp_shard4 cp2 tp2 pp2 ep8: ten rank sets and the world; torch makes 20."""
    with fake_world(64):
        before = len(dist.distributed_c10d._world.pg_map)
        dims = ParallelDims(dp_replicate=2, dp_shard=4, cp=2, tp=2, pp=2, ep=8, world_size=64)
        dims.build_mesh("cpu")
        for view in VIEWS:
            mesh = dims.get_mesh(view)
            for name in mesh.mesh_dim_names or ():
                mesh.get_group(name)
        for mesh in dims.get_all_one_dimensional_meshes().values():
            mesh.get_group()
        assert before == 1
        assert len(dist.distributed_c10d._world.pg_map) == 11
        sets = [frozenset(record.ranks) for record in registry.records()]
        assert len(sets) == len(set(sets)) == 10


@settings(deadline=None)
@given(degree, degree, degree, degree, degree, st.data())
def test_every_axis_groups_the_ranks_it_should(
    pp: int, replicate: int, shard: int, cp: int, tp: int, data: st.DataObject
) -> None:
    """For each axis, ranks share a group if and only if their other coordinates agree."""
    world = pp * replicate * shard * cp * tp
    pool = shard * cp * tp
    ep = data.draw(st.sampled_from([n for n in range(1, pool + 1) if pool % n == 0]))
    rank = data.draw(st.integers(0, world - 1))
    dims = ParallelDims(
        pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, world_size=world
    )
    dense = torch.arange(world).view(pp, replicate, shard, cp, tp)
    sparse = torch.arange(world).view(pp, replicate, pool // ep, ep)
    i = [int(x) for x in (dense == rank).nonzero()[0]]
    j = [int(x) for x in (sparse == rank).nonzero()[0]]
    expected = {
        "pp": dense[:, i[1], i[2], i[3], i[4]],
        "dp_replicate": dense[i[0], :, i[2], i[3], i[4]],
        "dp_shard": dense[i[0], i[1], :, i[3], i[4]],
        "cp": dense[i[0], i[1], i[2], :, i[4]],
        "tp": dense[i[0], i[1], i[2], i[3], :],
        "batch": dense[i[0], :, :, i[3], i[4]],
        "dp": dense[i[0], :, :, i[3], i[4]],
        "fsdp": dense[i[0], i[1], :, :, i[4]],
        "loss": dense[i[0], :, :, :, i[4]],
        "ep": sparse[j[0], j[1], j[2], :],
        "efsdp": sparse[j[0], j[1], :, j[3]],
    }
    grid = DeviceMesh("cpu", torch.arange(world), _init_backend=False, _rank=rank)
    for name, ranks in expected.items():
        axis = dims._axes()[name]
        start = rank - axis.offset(axis.coordinate(rank))
        assert [start + o for o in axis.offsets()] == ranks.flatten().tolist(), name
        assert dims.degrees[name] == ranks.numel()
    assert grid.size() == world


def test_dp_shard_is_inferred() -> None:
    """-1 takes what the others leave; 1 is what it is for a world of one."""
    assert ParallelDims(tp=2, cp=2, world_size=16).dp_shard == 4
    assert ParallelDims().dp_shard == 1
    assert ParallelDims(dp_replicate=2, dp_shard=2, world_size=4).dp_size == 4


@pytest.mark.parametrize(
    ("degrees", "texts"),
    [
        (
            {"tp": 3, "world_size": 8},
            [
                (
                    "dp_shard=-1 needs dp_replicate(1) * cp(1) * tp(3) * pp(1) = 3 to divide world_size=8; "
                    "nearest: tp=2 or 4"
                )
            ],
        ),
        (
            {"dp_shard": 3, "tp": 2, "world_size": 8},
            [
                (
                    "dp_replicate(1) * cp(1) * tp(2) * pp(1) * dp_shard(3) = 6 must be world_size=8; "
                    "dp_shard=4 fits"
                )
            ],
        ),
        ({"dp_shard": 2, "tp": 3, "world_size": 8}, ["must be world_size=8; nearest: tp=2 or 4"]),
        (
            {"ep": 3, "world_size": 4},
            ["ep(3) must divide dp_shard * cp * tp = 4; nearest ep: 2 or 4"],
        ),
        ({"etp": 3, "tp": 2, "world_size": 4}, ["etp must be 1 or tp=2, got 3"]),
        (
            {"tp": 2, "etp": 2, "ep": 4, "world_size": 4},
            ["ep(4) * etp(2) must divide dp_shard * cp * tp = 4; nearest ep: 2"],
        ),
        (
            {"cp": 4, "ulysses_degree": 3, "world_size": 4},
            ["ulysses_degree must divide cp=4, got 3; nearest: 2 or 4"],
        ),
        (
            {"tp": 0, "pp": -1, "dp_shard": 0, "world_size": 4},
            [
                "tp must be an int >= 1, got 0",
                "pp must be an int >= 1, got -1",
                "dp_shard must be -1 (infer) or an int >= 1, got 0",
            ],
        ),
        ({"cp": 1.5, "world_size": 4}, ["cp must be an int >= 1, got 1.5"]),
        (
            {"dp_shard": 3, "ep": 4, "etp": 3, "tp": 2, "world_size": 8},
            ["dp_shard=4 fits", "etp must be 1 or tp=2, got 3"],
        ),
    ],
    ids=itertools.count(),
)
def test_every_broken_rule_is_listed(degrees: dict[str, int], texts: list[str]) -> None:
    """One ValueError names each broken rule, with the nearest legal degrees."""
    with pytest.raises(ValueError, match="These parallel degrees do not fit") as caught:
        ParallelDims(**degrees)  # type: ignore[arg-type]
    assert isinstance(caught.value, ParallelDimsError)
    for text in texts:
        assert any(text in violation for violation in caught.value.violations), text
        assert text in str(caught.value)
    assert len(caught.value.violations) == len(texts)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.violations == caught.value.violations


def test_the_nearest_degrees_that_are_offered_are_legal() -> None:
    """Each number offered for tp makes the check pass."""
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp=5, dp_replicate=2, world_size=24)
    offered = re.search(r"nearest: tp=(\d+) or (\d+)", str(caught.value))
    assert offered is not None
    for tp in offered.groups():
        ParallelDims(tp=int(tp), dp_replicate=2, world_size=24)


def test_the_root_mesh_knows_every_axis_by_name() -> None:
    """build_mesh() has the axes that are larger than 1, and flattened names beside them."""
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2, world_size=16)
    mesh = dims.build_mesh("cpu", init_backend=False)
    assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp")
    assert mesh["fsdp"].rank_list == (0, 2, 4, 6)
    assert mesh["dp"].rank_list == (0, 4, 8, 12)
    assert mesh["loss"].size() == 8
    assert mesh["dp_replicate", "fsdp"].shape == (2, 4)
    assert dims.build_mesh("cpu", init_backend=False) is mesh
    assert dims.world_mesh is mesh
    alone = ParallelDims(world_size=1).build_mesh("cpu", init_backend=False)
    assert alone.mesh_dim_names == ("dp_shard",)
    assert alone["fsdp"].size() == 1


def test_meshes_by_name() -> None:
    """One name, several names, a view; the same object each time, all of one root."""
    dims = flat(dp_replicate=2, dp_shard=2, tp=2, pp=2, ep=4, world_size=16)
    tp = dims.get_mesh("tp")
    assert tp is dims.get_mesh("tp")
    hsdp = dims.get_mesh(["dp_replicate", "fsdp"])
    assert hsdp.shape == (2, 2)
    assert hsdp._get_root_mesh() is tp._get_root_mesh() is dims.world_mesh
    assert dims.get_mesh("sparse").mesh_dim_names == ("pp", "dp_replicate", "efsdp", "ep")
    assert dims.get_mesh("sparse").shape == (2, 2, 1, 4)
    assert dims.get_mesh("dataloading").mesh_dim_names == ("pp", "batch", "tp")
    assert DeviceMesh.concatenate([hsdp, tp]).shape == (2, 2, 2)
    assert set(dims.get_all_one_dimensional_meshes()) == {
        "pp", "dp_replicate", "dp_shard", "tp", "batch", "dp", "fsdp", "loss", "ep",
    }  # fmt: skip


def test_disabled_axes() -> None:
    """get_mesh raises, get_optional_mesh gives None or a size-1 axis, get_activated_mesh drops."""
    dims = flat(tp=2, world_size=2)
    with pytest.raises(
        ValueError, match=r"Mesh 'cp' is not available: 'cp' is disabled \(size 1\)"
    ):
        dims.get_mesh("cp")
    with pytest.raises(ValueError, match="'efsdp', 'ep' are disabled"):
        dims.get_mesh(["efsdp", "ep"])
    assert dims.get_optional_mesh("cp") is None
    assert dims.get_optional_mesh(["cp", "tp"]) is None
    kept = dims.get_optional_mesh(["cp", "tp"], include_singleton_axes=True)
    assert kept is not None
    assert kept.shape == (1, 2)
    whole = dims.get_optional_mesh("dense", include_singleton_axes=True)
    assert whole is not None
    assert whole.shape == (1, 1, 1, 1, 2)
    active = dims.get_activated_mesh(["cp", "tp"])
    assert active is not None
    assert active.mesh_dim_names == ("tp",)
    assert dims.get_activated_mesh(["cp", "pp"]) is None
    assert dims.get_mesh("fsdp").shape == (1,)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("data", "There is no mesh axis 'data'; there are 'pp', 'dp_replicate'"),
        (["tp", "data"], "There is no mesh axis 'data'"),
        ([], "There is no mesh axis no axis"),
        (["tp", "dp_replicate"], "must be given outermost first: ('dp_replicate', 'tp')."),
        (["fsdp", "cp"], "The axes ('fsdp', 'cp') overlap"),
        (["tp", "tp"], "The axes ('tp', 'tp') overlap"),
        (["ep", "tp"], "The axes ('ep', 'tp') overlap"),
    ],
    ids=itertools.count(),
)
def test_wrong_names_say_what_is_legal(names: str | list[str], text: str) -> None:
    """Unknown names, wrong order and axes that share ranks are a ValueError of our own."""
    dims = flat(dp_replicate=2, cp=2, tp=2, ep=4, world_size=16)
    with pytest.raises(ParallelDimsError, match=re.escape(text)):
        dims.get_mesh(names)


def test_views_of_ones_own() -> None:
    """A view names axes that exist, or brings axes whose sizes multiply to the world."""
    dims = ParallelDims(dp_shard=4, tp=2, world_size=8)
    dims = dims.with_view("vision", {"vision_dp": 2, "vision_tp": 4})
    dims = dims.with_view("plain", ("dp_shard", "tp"))
    root = dims.build_mesh("cpu", init_backend=False)
    assert dims.get_mesh("vision").shape == (2, 4)
    assert dims.get_mesh("vision_tp").rank_list == (0, 1, 2, 3)
    assert dims.get_mesh("plain") is root
    assert root["vision_dp"].rank_list == (0, 4)
    assert pickle.loads(pickle.dumps(dims)) == dims
    with pytest.raises(ParallelDimsError, match="multiply to 6, not to world_size=8"):
        dims.with_view("bad", {"a": 2, "b": 3})
    with pytest.raises(ParallelDimsError, match="axis 'tp' is already"):
        dims.with_view("bad", {"x": 2, "tp": 4})
    with pytest.raises(ParallelDimsError, match="there is no axis 'x'"):
        dims.with_view("bad", ("x",))
    with pytest.raises(ParallelDimsError, match="'tp' is the name of an axis"):
        dims.with_view("tp", ("dp_shard",))


def test_ulysses_splits_context_parallelism() -> None:
    """Cp is ring times ulysses, ulysses inner."""
    dims = flat(cp=8, ulysses_degree=2, world_size=8)
    assert dims.get_mesh(["ring", "ulysses"]).shape == (4, 2)
    assert dims.get_mesh("ulysses").rank_list == (0, 1)
    with pytest.raises(ParallelDimsError, match="There is no mesh axis 'ulysses'"):
        flat(cp=8, world_size=8).get_mesh("ulysses")


def test_sequence_lengths() -> None:
    """The plain number is tp * 2 * cp; called, it is what the features need."""
    dims = ParallelDims(cp=2, tp=4, world_size=8)
    assert dims.seq_len_divisor == 16
    assert 64 % dims.seq_len_divisor == 0
    ask = dims.seq_len_divisor
    assert ask(sequence_parallel=True, cp_balancer=True) == 16
    assert ask(sequence_parallel=True, cp_balancer=False) == 8
    assert ask(sequence_parallel=False, cp_balancer=True) == 4
    assert ask(sequence_parallel=False, cp_balancer=False) == 2
    alone = ParallelDims(tp=2, world_size=2).seq_len_divisor
    assert alone == 4
    assert alone(sequence_parallel=True, cp_balancer=True) == 2


def test_from_config_reads_both_spellings() -> None:
    """TorchTitan's object and a plain mapping, with the older 'dp', give the same degrees."""
    titan = SimpleNamespace(
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=2,
        context_parallel_degree=1,
        tensor_parallel_degree=2,
        pipeline_parallel_degree=2,
        expert_parallel_degree=4,
    )
    plain = {"dp": 2, "tp": 2, "pp": 2, "ep": 4}
    dims = ParallelDims.from_config(titan, 8)
    assert dims == ParallelDims.from_config(plain, 8)
    assert hash(dims) == hash(ParallelDims.from_config(plain, 8))
    assert ParallelDims.from_config({"cp": 4, "ulysses_degree": 2}, 4).ulysses_degree == 2
    assert ParallelDims.from_config({}, 4).dp_shard == 4


def test_flags() -> None:
    """Each property says whether its degree is larger than 1."""
    dims = ParallelDims(dp_replicate=2, cp=2, tp=2, pp=2, ep=2, etp=2, world_size=16)
    assert dims.dp_enabled
    assert dims.dp_replicate_enabled
    assert not dims.dp_shard_enabled
    assert dims.cp_enabled
    assert dims.dp_cp_enabled
    assert dims.fsdp_enabled
    assert dims.tp_enabled
    assert dims.pp_enabled
    assert dims.ep_enabled
    assert dims.etp_enabled
    assert dims.non_dp_size == dims.non_data_parallel_size == 8
    alone = ParallelDims()
    assert not any(getattr(alone, name) for name in dir(alone) if name.endswith("_enabled"))


def test_models_that_do_not_fit() -> None:
    """Heads, experts, layers and sequence length are checked together; what is unknown is not."""
    dims = ParallelDims(tp=4, pp=2, cp=2, ep=8, world_size=16)
    config = SimpleNamespace(
        num_attention_heads=6, num_key_value_heads=3, num_experts=12, num_hidden_layers=1
    )
    with pytest.raises(ParallelDimsError, match="The model does not fit") as caught:
        dims.validate_against_model(SimpleNamespace(config=config), seq_len=20)
    assert caught.value.violations == (
        "num_attention_heads=6 must be divisible by tp=4; nearest tp: 3 or 6",
        (
            "num_key_value_heads=3 must be divisible by tp=4, or divide it (heads are then replicated); "
            "nearest tp: 3"
        ),
        "num_experts=12 must be divisible by ep=8; nearest ep: 6 or 12",
        "num_hidden_layers=1 must be at least pp=2",
        "seq_len=20 must be divisible by cp * tp = 8; nearest: 16 or 24",
    )
    dims.validate_against_model(SimpleNamespace(n_heads=8, n_kv_heads=2), seq_len=64)
    dims.validate_against_model(torch.nn.Linear(1, 1))


def test_summary_shows_degrees_and_ranks() -> None:
    """summary() names every degree and draws the grid."""
    text = ParallelDims(dp_replicate=2, tp=2, world_size=4).summary()
    assert text.splitlines()[0] == "world 4 = pp 1 * dp_replicate 2 * dp_shard 1 * cp 1 * tp 2"
    assert text.splitlines()[-3:] == [
        "                tp=0  tp=1",
        "dp_replicate=0   [0]     1",
        "dp_replicate=1     2     3",
    ]


def test_a_world_of_another_size_is_refused() -> None:
    """build_mesh() compares world_size with the world that runs."""
    with fake_world(4), pytest.raises(ParallelDimsError, match="runs 4 ranks"):
        ParallelDims(world_size=8).build_mesh("cpu")


def test_unflatten_mesh_costs_nothing_for_axes_of_size_one() -> None:
    """The first axis is cut by name; asking for the groups makes those of axes larger than 1 only."""
    with fake_world(8):
        world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        mesh = unflatten_mesh(world, ("dp", "cp", "tp"), (4, 1, 2))
        assert mesh.shape == (4, 1, 2)
        mesh.get_all_groups()
        assert sorted(len(record.ranks) for record in registry.records()) == [1, 2, 4]


@spmd(world_size=4)
def test_meshes_of_a_job_communicate() -> None:
    """On real ranks every axis sums over its own ranks."""
    dims = ParallelDims(dp_replicate=2, tp=2, ep=2, world_size=4)
    mesh = dims.build_mesh("cpu")
    for name in ("dp_replicate", "tp", "dp", "ep"):
        part = dims.get_mesh(name)
        value = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(value, group=part.get_group())
        assert value.item() == sum(part.rank_list)
    assert mesh["tp"].get_group() is dims.get_mesh("ep").get_group()
    assert math.prod(mesh.shape) == 4
