"""Layout against the worked examples of HyperParallel's documentation, a brute force over axis orders, and torch.chunk."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch
from hp_dtensor import (
    DTensor,
    Layout,
    LayoutError,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    local_map,
)
from hp_mesh import DeviceMesh, MeshError, init_device_mesh
from hp_mesh.testing import spmd

R = Replicate()


def _on(
    rank: int, shape: tuple[int, ...] = (2, 4), names: tuple[str, ...] = ("dp", "tp")
) -> Layout:
    """A layout as *rank* sees it, without process groups."""
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    return Layout.from_device_mesh(mesh)


_EXAMPLES = [
    (("dp", "tp"), (1, 0), (Shard(0), Shard(1)), 1, (6, 20), (range(8, 16), range(2, 4))),
    (("None", "tp"), (-1, 0), (R, Shard(1)), 2, (3, 20), (range(16), range(2, 4))),
    (
        (("dp", "tp"), "None"),
        ((1, 0), -1),
        (Shard(0), Shard(0)),
        1,
        (24, 5),
        (range(10, 12), range(8)),
    ),
    (
        (("tp", "dp"), "None"),
        ((0, 1), -1),
        (StridedShard(0, split_factor=4), Shard(0)),
        1,
        (24, 5),
        (range(6, 8), range(8)),
    ),
    (("None", "None"), (-1, -1), (R, R), 8, (3, 5), (range(16), range(8))),
]


@pytest.mark.parametrize(
    ("aliases", "tensor_map", "placements", "repeat", "whole", "_owned"), _EXAMPLES
)
def test_the_worked_examples(
    aliases: tuple[str, ...],
    tensor_map: tuple[object, ...],
    placements: tuple[Placement, ...],
    repeat: int,
    whole: tuple[int, ...],
    _owned: object,
) -> None:
    """Map, placements, repeat count and the global shape of a (3, 5) piece, on a (2, 4) mesh."""
    layout = _on(5)(*aliases)
    assert layout.tensor_map == tensor_map
    assert layout.placements == placements
    assert layout.repeat_num() == repeat
    assert layout.get_global_shape((3, 5)) == whole
    assert layout.placement_to_tensor_map(2) == list(tensor_map)
    assert layout.tensor_map_to_placement() == list(placements)
    assert layout.alias_tensor_map == aliases


@spmd(world_size=8)
def test_rank_5_owns_what_the_examples_say() -> None:
    """The rows and columns of a 16x8 tensor, through distribute_tensor by aliases."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(128).reshape(16, 8)
    for aliases, _, placements, _, _, owned in _EXAMPLES:
        d = distribute_tensor(whole, mesh, aliases, src_data_rank=None)
        assert d.placements == placements
        if torch.distributed.get_rank() == 5:
            rows, columns = (list(part) for part in owned)
            assert torch.equal(d.to_local(), whole[rows][:, columns])


def test_a_scalar_and_an_empty_layout() -> None:
    """``layout()`` is a scalar; a layout that was not called knows no placements."""
    scalar = _on(0)()
    assert (scalar.tensor_map, scalar.placements, scalar.repeat_num()) == ((), (R, R), 8)
    assert scalar.get_global_shape(()) == ()
    empty = _on(0)
    assert (empty.tensor_map, empty.placements, empty.partial) == (None, None, [None, None])
    for use in (
        empty.repeat_num,
        empty.to_dict,
        empty.tensor_map_to_placement,
        lambda: empty.placement_to_tensor_map(2),
        lambda: empty.alias_tensor_map,
    ):
        with pytest.raises(LayoutError, match="call"):
            use()


def test_split_factors_of_every_axis_order() -> None:
    """The table for mesh (2, 3, 4): the factor of an axis is the product of those right of it that come earlier."""
    names = ("a", "b", "c")
    table = {
        (0, 1, 2): (1, 1, 1),
        (0, 2, 1): (1, 4, 1),
        (1, 0, 2): (3, 1, 1),
        (1, 2, 0): (12, 1, 1),
        (2, 0, 1): (4, 4, 1),
        (2, 1, 0): (12, 4, 1),
    }
    whole = torch.arange(48)
    for order, factors in table.items():
        for rank in range(24):
            layout = _on(rank, (2, 3, 4), names)(tuple(names[axis] for axis in order))
            assert layout.placements is not None
            got = tuple(int(getattr(p, "split_factor", 1)) for p in layout.placements)
            assert got == factors
            assert layout.tensor_map == (tuple(2 - axis for axis in order),)
            # The piece with this number, counted in the order of the tuple, is the one that the placements give.
            held = whole
            where = layout.mesh.get_coordinate()
            assert where is not None
            for placement, size, c in zip(layout.placements, (2, 3, 4), where, strict=True):
                factor = int(getattr(placement, "split_factor", 1))
                held = torch.cat([part.chunk(size)[c] for part in held.chunk(factor)])
            assert torch.equal(held, whole.chunk(24)[layout.get_split_id(0)])


def test_split_ids_count_in_tuple_order() -> None:
    """Rank 5 of (2, 4) is piece 5 of ("dp", "tp") and piece 3 of ("tp", "dp")."""
    layout = _on(5)
    assert layout(("dp", "tp"), "None").get_split_id(0) == 5
    assert layout(("tp", "dp"), "None").get_split_id(0) == 3
    assert layout("dp", "tp").get_split_id(-1) == 1
    assert [layout(("tp", "dp"), "None").get_split_id(dim) for dim in (1, 7)] == [0, 0]
    assert [layout(("dp", "tp"), "None").get_dim_split_num(dim) for dim in (0, 1, 7)] == [8, 1, 1]
    outside = _on(9)(("dp", "tp"))
    assert outside.get_split_id(0) == 0


def test_placements_are_taken_as_a_list_or_one_by_one() -> None:
    """The number of dims stays open until it is asked for; negative dims count from it."""
    layout = _on(0)
    for called in (layout([Shard(-1), R]), layout(Shard(-1), R)):
        assert called.tensor_map is None
        assert called.placement_to_tensor_map(3) == [-1, -1, 1]
        assert called.placement_to_tensor_map(1) == [1]
    with pytest.raises(LayoutError, match=r"placements\[0\] is S\(2\), but the tensor has 2 dims"):
        layout(Shard(2), R).placement_to_tensor_map(2)
    with pytest.raises(LayoutError, match="a tensor has no -1 dims"):
        layout(R, R).placement_to_tensor_map(-1)
    with pytest.raises(LayoutError, match="split factor mismatch"):
        layout(StridedShard(0, split_factor=3), Shard(0)).placement_to_tensor_map(1)
    assert layout(R, R).placement_to_tensor_map(0) == []


def test_addends_are_set_by_axis_and_never_go_stale() -> None:
    """Setting gives a new layout; a cut axis refuses; other placements carry no addends over."""
    plain = _on(0)("dp", "None")
    summed = plain.set_partial_by_dev_axis("tp", "sum")
    assert (summed.partial, summed.placements) == ([None, "sum"], (Shard(0), Partial("sum")))
    assert not plain.is_partial()
    assert summed.is_partial()
    assert summed.get_partial_by_dev_id("tp") == "sum"
    assert summed.reset_partial() == plain
    assert summed.set_partial_by_dev_axis("tp", None) == plain
    assert summed.set_placements([R, Shard(0)]).partial == [None, None]
    assert summed("dp", "None") == plain
    assert [
        plain.set_partial_by_dev_axis(1, op).partial[1]
        for op in ("max", "min", "avg", "prod", "all")
    ] == ["max", "min", "avg", "product", "all"]
    with pytest.raises(LayoutError, match="Partial dim must be replicate"):
        plain.set_partial_by_dev_axis("dp", "sum")
    with pytest.raises(LayoutError, match="'median' combines no addends"):
        plain.set_partial_by_dev_axis("tp", "median")
    with pytest.raises(LayoutError, match="'pp' is no axis of the mesh"):
        plain.set_partial_by_dev_axis("pp", "sum")


def test_alias_placements_lose_neither_order_nor_addends() -> None:
    """Aliases where a dim is cut twice, placements otherwise and wherever there are addends."""
    layout = _on(0)
    assert layout("dp", "tp").alias_placements == (Shard(0), Shard(1))
    assert layout(("tp", "dp"), "None").alias_placements == (("tp", "dp"), "None")
    cube = _on(0, (2, 2, 2), ("a", "b", "c"))(("b", "a"), "None")
    summed = cube.set_partial_by_dev_axis("c", "sum")
    assert summed.alias_placements == (StridedShard(0, split_factor=2), Shard(0), Partial())
    unnamed = Layout.from_device_mesh(
        DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=0)
    )
    laid = unnamed(R, Shard(0)).set_tensor_meta((4, 4), (4, 1), torch.float32)
    assert laid.alias_tensor_map == ("dim_1", "None")


def test_which_axis_cuts_what() -> None:
    """By name and by number."""
    layout = _on(0)("None", "dp")
    assert layout.is_dev_axis_apply_shard("dp")
    assert layout.get_dev_axis_apply_shard_axis(0) == 1
    assert layout.get_dev_axis_apply_shard_axis("tp") is None


def test_as_a_dictionary_and_as_a_text() -> None:
    """to_dict holds HyperParallel's facts; compact_str differs where layouts do."""
    layout = _on(0)
    assert layout(("tp", "dp"), "None").to_dict() == {
        "mesh_shape": (2, 4),
        "tensor_map": ((0, 1), -1),
        "interleaved_parallel": False,
        "alias_name": ("dp", "tp"),
        "rank_list": tuple(range(8)),
    }
    several = [
        layout,
        layout(),
        layout("dp"),
        layout("dp", "None"),
        layout("dp", "None").set_partial_by_dev_axis("tp", "sum"),
        layout("dp", "None").set_partial_by_dev_axis("tp", "max"),
        layout("dp", "None").set_tensor_meta((4, 4), (4, 1), torch.float32),
        layout(("dp", "tp"), "None"),
        layout(("tp", "dp"), "None"),
        _on(0, names=("a", "b"))("a", "None"),
    ]
    assert len({one.compact_str for one in several}) == len(several) == len(set(several))


def test_it_is_a_frozen_value() -> None:
    """Equal layouts are equal keys, nothing can be written, a copy keeps the mesh, a pickle makes no groups."""
    layout = _on(0)("dp", "tp")
    assert layout == _on(0)("dp", "tp")
    assert hash(layout) == hash(_on(0)("dp", "tp"))
    assert layout != _on(0)("tp", "dp")
    with pytest.raises(FrozenInstanceError):
        layout.placements = ()  # type: ignore[misc]
    assert copy.deepcopy(layout).device_mesh is layout.device_mesh
    again = pickle.loads(pickle.dumps(layout))
    assert again.placements == layout.placements
    assert again.mesh_shape == (2, 4)
    meta = layout.set_tensor_meta((5, 4), (4, 1), torch.float32)
    assert meta.get_global_shape((1, 1)) == (5, 4)
    assert meta != layout


def test_what_is_no_layout_is_refused() -> None:
    """Wrong names, numbers and mixtures."""
    layout = _on(0)
    for spec, words in (
        (("dp", "dp"), "set more than one time"),
        (("pp", "None"), "'pp' on dim 0 is no axis"),
        (("dp", Shard(0)), "is no layout"),
        ((R,), "1 placements"),
        ((Partial("sum"), Partial("max")), "mix Partial kinds"),
    ):
        with pytest.raises(LayoutError, match=words):
            layout(*spec)
    with pytest.raises(LayoutError, match="cannot name an axis"):
        Layout((2,), ("None",), rank_list=(0, 1), init_backend=False)
    for shape, names in (((2, 2), ("a",)), ((2, 2), ("a", "a")), ((2, 2), ("a", ""))):
        with pytest.raises((MeshError, ValueError)):
            Layout(shape, names, rank_list=range(4), init_backend=False)


@spmd(world_size=4)
def test_a_tensor_tells_its_layout() -> None:
    """Shape, map and addends; where torch asks a tensor for its layout, the answer is still strided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(20.0).reshape(5, 4)
    d = distribute_tensor(whole, mesh, (("tp", "dp"), "None"))
    assert d.layout.tensor_map == ((0, 1), -1)
    assert d.layout.device_mesh is mesh
    assert d.layout.get_global_shape(d.local_shape) == (5, 4)
    assert d.layout == torch.strided
    assert d.sum(0).layout.partial == ["sum", "sum"]
    torch.testing.assert_close(d.full_tensor(), whole)
    made = Layout((2, 2), ("dp", "tp"), device_type="cpu")
    assert made.device_mesh == mesh
    assert distribute_tensor(whole, mesh, made("tp", "dp")).placements == (Shard(1), Shard(0))
    with pytest.raises(LayoutError, match="says nothing about the mesh"):
        distribute_tensor(whole, mesh, made)


@spmd(world_size=4)
def test_aliases_are_taken_wherever_placements_are() -> None:
    """Entering, leaving, moving, mapping, and the layouts of gradients; the order of a tuple is kept."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(32.0).reshape(8, 4)
    turned = (("tp", "dp"), "None")
    want = (StridedShard(0, split_factor=2), Shard(0))
    d = distribute_tensor(whole, mesh, turned)
    assert d.placements == want
    assert DTensor.from_local(d.to_local(), mesh, turned, shape=(8, 4)).placements == want
    moved = distribute_tensor(whole, mesh, ("dp", "tp")).redistribute(placements=turned)
    assert torch.equal(moved.to_local(), d.to_local())
    leaf = d.detach().requires_grad_()
    leaf.to_local(grad_placements=turned).sum().backward()
    leaf.full_tensor(grad_placements=("None", "None")).sum().backward()
    assert isinstance(leaf.grad, DTensor)
    assert leaf.grad.placements == want
    assert torch.equal(leaf.grad.full_tensor(), torch.full((8, 4), 2.0))
    double = local_map(
        lambda t: t * 2, out_placements=turned, in_placements=(turned,), device_mesh=mesh
    )
    out = double(d)
    assert isinstance(out, DTensor)
    assert out.placements == want
    assert torch.equal(out.full_tensor(), whole * 2)


@spmd(world_size=4)
def test_all_is_a_kind_of_addend() -> None:
    """Bools combine by and, from every pair of axes."""
    mesh = init_device_mesh("cpu", (2, 2))
    rank = torch.distributed.get_rank()
    local = torch.tensor([rank != 2, True, rank == 5])
    for placements in itertools.product([R, Partial("all")], repeat=2):
        d = DTensor.from_local(local, mesh, placements)
        where = mesh.get_coordinate()
        assert where is not None
        rows = range(2) if placements[0].is_partial() else [where[0]]
        columns = range(2) if placements[1].is_partial() else [where[1]]
        held = all(2 * row + column != 2 for row in rows for column in columns)
        assert d.reduce_partial().to_local().tolist() == [held, True, False]
