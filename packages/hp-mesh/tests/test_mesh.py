"""The mesh as a value: shapes, slices, errors. No process groups; see `test_groups`."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
import re
import threading
from collections.abc import Iterator

import pytest
import torch
from hp_mesh import (
    AxisError,
    AxisRequiredError,
    BackendError,
    DeviceMesh,
    MeshError,
    MeshTypeError,
    NoGroupError,
    UnnamedMeshError,
    get_current_mesh,
    init_device_mesh,
)
from hp_mesh.testing import spmd
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import device_mesh as torch_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

calm = settings(deadline=None)  # a busy machine is no failure
NAMES = ("pp", "dp", "cp", "tp")
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def on_rank(ranks: object, names: tuple[str, ...] | None = None, rank: int = 0) -> DeviceMesh:
    """Return a mesh without groups, as rank *rank* sees it."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def torch_on_rank(
    ranks: torch.Tensor, names: tuple[str, ...] | None, rank: int
) -> torch_mesh.DeviceMesh:
    """Return torch's mesh of the same, without groups: the oracle."""
    mesh = torch_mesh.DeviceMesh(
        "cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank
    )
    mesh._dim_group_names = []  # torch's slicing reads it
    return mesh


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Play one rank of a world that does not communicate."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def example() -> DeviceMesh:
    """The (2, 4) mesh of HyperParallel's documentation on rank 5."""
    return on_rank(torch.arange(8).view(2, 4), ("dp", "tp"), 5)


# What it tells.


@calm
@given(shapes, st.randoms(use_true_random=False))
def test_coordinates_are_places_in_the_tensor(shape: list[int], random: object) -> None:
    """Every rank's coordinate indexes its rank in the tensor, whatever the order of ranks."""
    ranks = list(range(math.prod(shape)))
    random.shuffle(ranks)  # type: ignore[attr-defined]  # hypothesis' Random
    grid = torch.tensor(ranks).view(shape)
    for rank in ranks[:6]:
        mesh = on_rank(grid, rank=rank)
        place = mesh.get_coordinate()
        assert place is not None
        assert grid[place] == rank
        assert [mesh.get_local_rank(i) for i in range(mesh.ndim)] == list(place)
        assert mesh.shape == mesh.mesh_shape == tuple(shape)
        assert torch.equal(mesh.mesh, grid.int())
        assert mesh.rank_list == tuple(ranks)
        assert mesh.size() == len(ranks)
        assert [mesh.size(i) for i in range(mesh.ndim)] == shape


@calm
@given(shapes, st.data())
def test_slices_are_the_rows_of_the_tensor_that_hold_this_rank(
    shape: list[int], data: st.DataObject
) -> None:
    """A slice has the ranks that agree with this rank on the axes left out; as in torch."""
    names = NAMES[: len(shape)]
    ranks = data.draw(st.permutations(range(math.prod(shape))))
    grid = torch.tensor(ranks).view(shape)
    rank = data.draw(st.sampled_from(ranks))
    mesh = on_rank(grid, names, rank)
    place = mesh.get_coordinate()
    assert place is not None
    picked = [n for n in names if data.draw(st.booleans())] or [names[0]]
    index = tuple(
        slice(None) if name in picked else i for name, i in zip(names, place, strict=True)
    )
    part = mesh[tuple(picked)]
    assert torch.equal(part.mesh, grid[index].int())
    assert part.rank_list == tuple(grid[index].flatten().tolist())
    assert part.get_coordinate() == tuple(
        i for name, i in zip(names, place, strict=True) if name in picked
    )
    assert mesh[tuple(picked)] is part
    for name in picked:
        assert part[name] is mesh[name]


@calm
@given(shapes, st.data())
def test_flatten_and_unflatten_are_inverse(shape: list[int], data: st.DataObject) -> None:
    """Flattening is the tensor's flatten, unflattening with the same sizes gives the slice back."""
    names = NAMES[: len(shape)]
    rank = data.draw(st.integers(0, math.prod(shape) - 1))
    mesh = on_rank(torch.arange(math.prod(shape)).view(shape), names, rank)
    picked = tuple(n for n in names if data.draw(st.booleans())) or names
    part = mesh[picked]
    flat = part.flatten("flat")
    assert torch.equal(flat.mesh, part.mesh.flatten())
    assert flat.get_coordinate() == (part.rank_list.index(rank),)
    assert flat.unflatten("flat", part.shape, picked) == part
    assert mesh["flat"] is flat
    assert part.flatten("flat") is flat


@calm
@given(shapes, st.data())
def test_concatenating_slices_is_slicing(shape: list[int], data: st.DataObject) -> None:
    """The concatenation of the slices of some axes is the slice of these axes."""
    names = NAMES[: len(shape)]
    mesh = on_rank(torch.arange(math.prod(shape)).view(shape), names)
    cut = data.draw(st.integers(1, len(names)))
    parts = [mesh[names[:cut]], *(mesh[name] for name in names[cut:])]
    assert DeviceMesh.concatenate(parts) is mesh


def test_ranks_may_come_in_a_numpy_array() -> None:
    """An array makes the mesh that a tensor of its ranks makes; numpy is no dependency of ours."""
    numpy = pytest.importorskip("numpy")
    rows = [[0, 1], [2, 3]]
    assert on_rank(numpy.array(rows)) == on_rank(torch.tensor(rows))


def test_ranks_may_come_in_any_container() -> None:
    """Tensor, nested lists and tuples make equal meshes."""
    rows = [[0, 1], [2, 3]]
    meshes = [on_rank(ranks) for ranks in (torch.tensor(rows), rows, ((0, 1), (2, 3)))]
    assert all(mesh == meshes[0] for mesh in meshes)
    assert len({hash(mesh) for mesh in meshes}) == 1


def test_the_current_rank_may_be_outside() -> None:
    """A rank outside has no coordinate, can ask for sizes, and is told so where a place is needed."""
    mesh = on_rank([[0, 1], [2, 3]], ("dp", "tp"), rank=7)
    assert mesh.get_coordinate() is None
    assert mesh.size("tp") == 2
    assert mesh["tp"].get_coordinate() is None
    with pytest.raises(MeshError, match=r"Rank 7 is not in the mesh \(dp=2, tp=2\)"):
        mesh.get_local_rank("tp")
    with pytest.raises(MeshError, match="Rank 7 is not in the mesh"):
        mesh["tp"].mesh  # noqa: B018 - the property raises
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]


def test_meshes_hold_real_ranks_under_any_default_device() -> None:
    """Under the meta device a mesh is made, sliced and read as anywhere else."""
    with torch.device("meta"):
        mesh = on_rank([[0, 1], [2, 3]], ("dp", "tp"), rank=3)
        other = init_device_mesh("cpu", (4,), rank_list=range(4), init_backend=False)
        assert mesh["tp"].mesh.tolist() == [2, 3]
        assert other.mesh.device.type == "cpu"
        assert other.mesh.tolist() == [0, 1, 2, 3]


def test_meshes_hold_real_ranks_under_fake_tensors() -> None:
    """What is kept under a fake-tensor mode is real, and still there after it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mesh = on_rank([[0, 1], [2, 3]], ("dp", "tp"), rank=3)
    with FakeTensorMode():
        kept = mesh["tp"].mesh
    assert type(kept) is torch.Tensor
    assert kept.tolist() == [2, 3]


def test_sizes_of_one_do_not_matter() -> None:
    """Axes of size 1 can be sliced, flattened and mixed with flattened names."""
    mesh = on_rank(torch.arange(4).view(1, 1, 1, 4), ("a", "b", "c", "d"))
    mesh["b", "c"].flatten("bc")
    assert mesh["a", "bc", "d"].shape == (1, 1, 4)
    assert mesh["a", "c"].flatten().mesh_dim_names == ("a_c",)


def test_flattened_axes_that_are_no_neighbours() -> None:
    """Flattening around an axis takes the ranks on both sides of it, in row-major order."""
    for rank in range(8):
        mesh = on_rank(torch.arange(8).view(2, 2, 2), ("dp", "cp", "tp"), rank)
        flat = mesh["dp", "tp"].flatten("dptp")
        j = rank // 2 % 2
        assert flat.mesh.tolist() == [4 * a + 2 * j + c for a in (0, 1) for c in (0, 1)]
        assert flat.get_local_rank() == flat.mesh.tolist().index(rank)


def test_slices_with_flattened_names_go_by_stride() -> None:
    """On the root, flattened names mix with others if outer axes come first."""
    mesh = on_rank(torch.arange(16).view(2, 2, 2, 2), NAMES)
    mesh["dp", "cp"].flatten("middle")
    assert mesh["pp", "middle", "tp"].shape == (2, 4, 2)
    assert mesh["pp", "middle", "tp"].mesh.flatten().tolist() == list(range(16))
    with pytest.raises(AxisError, match="not in the mesh's order"):
        mesh["middle", "pp"]
    with pytest.raises(AxisError, match="overlap"):
        mesh["middle", "cp"]
    with pytest.raises(AxisError, match=re.escape("use mesh.root_mesh['middle']")):
        mesh["pp", "dp"]["middle"]


def test_root_and_derived_meshes_know_each_other() -> None:
    """A root has no root mesh; a slice has it, whatever it was sliced from."""
    mesh = example()
    assert mesh.root_mesh is None
    assert mesh["tp"].root_mesh is mesh
    assert mesh["dp", "tp"] is mesh
    assert mesh["tp"] in mesh.sub_mesh
    assert mesh._get_root_mesh() is mesh


def test_permute_is_the_transposed_mesh() -> None:
    """Coordinates swap, ranks along an axis stay."""
    mesh = on_rank(torch.arange(6).view(2, 3), ("dp", "tp"), rank=4)
    turned = mesh.permute("tp", "dp")
    assert torch.equal(turned.mesh, mesh.mesh.t())
    assert turned.get_coordinate() == (1, 1)
    assert turned.get_rank_list_along_axis("dp") == mesh.get_rank_list_along_axis("dp")
    assert turned["tp"] is mesh["tp"]
    with pytest.raises(AxisError, match="takes each axis once"):
        mesh.permute("tp", "tp")


def test_get_all_submeshes_covers_the_world() -> None:
    """The 1-D meshes along an axis are those of every rank."""
    mesh = on_rank(torch.arange(8).view(2, 4), ("dp", "tp"), rank=1)
    assert [m.rank_list for m in mesh._get_all_submeshes("dp")] == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]


# HyperParallel's questions.


def test_axis_questions_on_the_documented_mesh() -> None:
    """The answers of HyperParallel's documentation for rank 5 of a (2, 4) mesh."""
    mesh = example()
    assert mesh.get_device_num_along_axis("tp") == 4
    assert mesh.get_rank_list_along_axis("tp") == [4, 5, 6, 7]
    assert mesh.get_rank_list_along_axis(0) == [1, 5]
    assert mesh.get_devices_for_axis("dp", 2) == [2, 6]
    assert mesh.get_devices_for_axis(1, 0) == [0, 1, 2, 3]
    assert mesh.get_global_shape((3, 5), (1, 0)) == (6, 20)
    assert mesh.get_global_shape((3, 5), ((1, 0), -1)) == (24, 5)
    assert (mesh.axis_id("dp"), mesh.axis_id("tp"), mesh.axis_id("None")) == (1, 0, -1)
    assert (mesh.axis_index("dp"), mesh.axis_index("tp")) == (0, 1)
    assert mesh.assert_axis("dp", "test") is None
    assert mesh.to_hash() == ((2, 4), ("dp", "tp"), tuple(range(8)))
    assert not mesh.interleaved_parallel
    assert on_rank([0], ("interleaved_parallel",)).interleaved_parallel


def test_ranks_along_an_axis_follow_coordinates() -> None:
    """On a permuted mesh the list is in coordinate order, not sorted."""
    mesh = on_rank([[3, 2], [1, 0]], ("dp", "tp"), rank=0)
    assert mesh.get_rank_list_along_axis("dp") == [2, 0]
    assert mesh.get_rank_list_along_axis("tp") == [1, 0]


@pytest.mark.parametrize(
    ("ask", "kind", "text"),
    [
        (
            lambda m: m.get_device_num_along_axis("pp"),
            ValueError,
            "no axis 'pp'; it has ('dp', 'tp')",
        ),
        (lambda m: m.axis_index("None"), ValueError, "no axis 'None'"),
        (lambda m: m.axis_id("pp"), ValueError, "axis_id(): the mesh has no axis 'pp'"),
        (lambda m: m.assert_axis("x", "scatter"), ValueError, "scatter: the mesh has no axis 'x'"),
        (lambda m: m.get_devices_for_axis("dp", 9), ValueError, "Rank 9 is not in the mesh"),
        (lambda m: m.get_devices_for_axis(2, 0), ValueError, "Axis index 2 is out of range"),
        (lambda m: m.get_global_shape((3,), None), ValueError, "one entry per dim"),
        (lambda m: m.get_global_shape((3,), (1, 0)), ValueError, "one entry per dim"),
        (lambda m: m.get_global_shape((3,), (2,)), ValueError, "axes 0 to 1 from the innermost"),
    ],
    ids=itertools.count(),
)
def test_axis_questions_name_what_is_legal(ask: object, kind: type, text: str) -> None:
    """A wrong axis, rank or map is a ValueError with the legal values."""
    with pytest.raises(kind, match=re.escape(text)):
        ask(example())  # type: ignore[operator]


# Errors.


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("cpu", 4), MeshTypeError, "mesh_shape must be a tuple of ints, got 4 of type int."),
        (("cpu", "22"), MeshTypeError, "mesh_shape must be a tuple of ints"),
        (("cpu", ()), MeshError, "mesh_shape must have at least one axis"),
        (("cpu", (2, 0)), MeshError, "mesh_shape must hold positive ints, got 0 in (2, 0)."),
        (("cpu", (2, -1)), MeshError, "mesh_shape must hold positive ints, got -1 in (2, -1)."),
        (("cpu", (2, 1.5)), MeshError, "mesh_shape must hold ints, got 1.5"),
        (("cpu", (True, 2)), MeshError, "mesh_shape must hold ints, got True"),
        (("cuda:0", (2,)), MeshError, "device_type must have no index, got 'cuda:0'"),
        (("toaster", (2,)), MeshError, "device_type 'toaster' is not known"),
        ((5, (2,)), MeshTypeError, "device_type must be a string"),
        (("xla", (2,)), BackendError, "'xla' is not supported: an XLA mesh needs torch_xla"),
    ],
)
def test_wrong_shapes_and_devices(
    arguments: tuple[object, ...], kind: type[Exception], text: str
) -> None:
    """Each wrong argument is named with its value and what is legal, before anything is started."""
    with pytest.raises(kind, match=re.escape(text)):
        init_device_mesh(*arguments)  # type: ignore[arg-type]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("names", "kind", "text"),
    [
        ("dp", MeshTypeError, "mesh_dim_names must be a tuple of strings, got 'dp'."),
        (7, MeshTypeError, "mesh_dim_names must be a tuple of strings"),
        (("dp",), MeshError, "got 1 names ('dp',) for 2 axes"),
        (("dp", "dp"), MeshError, "must be unique, got ['dp'] more than once"),
        (("dp", ""), MeshError, "non-empty strings, got ''"),
        (("dp", 3), MeshError, "non-empty strings, got 3"),
        (
            ("interleaved_parallel", "dp"),
            MeshError,
            "'interleaved_parallel' is only allowed for the last axis",
        ),
    ],
)
def test_wrong_names(names: object, kind: type[Exception], text: str) -> None:
    """Names are unique, non-empty, one per axis; the reserved one is last."""
    with pytest.raises(kind, match=re.escape(text)):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=names, rank_list=range(4))  # type: ignore[arg-type]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("ranks", "kind", "text"),
    [
        ([0, 1, 2], MeshError, "mesh_shape (2, 2) has 4, got 3 ranks"),
        ([0, 1, 2, 2], MeshError, "each rank once, got [2] more than once"),
        ([0, 1, 2, -3], MeshError, "ranks >= 0, got -3"),
        ([0, 1, 2, 0.5], MeshTypeError, "must hold ints, got 0.5"),
        ("0123", MeshTypeError, "rank_list must be a sequence of ints, got '0123'"),
        (4, MeshTypeError, "rank_list must be a sequence of ints, got 4"),
    ],
)
def test_wrong_rank_lists(ranks: object, kind: type[Exception], text: str) -> None:
    """A rank list has as many different ranks as the mesh has devices."""
    with pytest.raises(kind, match=re.escape(text)):
        init_device_mesh("cpu", (2, 2), rank_list=ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "kind", "text"),
    [
        (torch.tensor(3), MeshError, "at least one axis, got the scalar 3"),
        (torch.tensor([0.5]), MeshTypeError, "got a tensor of torch.float32"),
        (torch.zeros(2, device="meta", dtype=torch.int), MeshError, "meta device"),
        ([[0, 1], [2]], MeshError, "full, non-empty grid, got rows of lengths [1, 2] at depth 1"),
        ([[0, 1], 2], MeshError, "full, non-empty grid"),
        ([], MeshError, "full, non-empty grid"),
        ([0, 0], MeshError, "mesh must hold each rank once"),
        (object(), MeshTypeError, "mesh must be a tensor, a (nested) list or tuple"),
        ("01", MeshTypeError, "mesh must be a tensor"),
    ],
    ids=itertools.count(),
)
def test_wrong_grids(ranks: object, kind: type[Exception], text: str) -> None:
    """A grid of ranks is full, of ints, each once."""
    with pytest.raises(kind, match=re.escape(text)):
        on_rank(ranks)


@pytest.mark.parametrize(
    ("ask", "kind", "text"),
    [
        (
            lambda m: m["ep"],
            KeyError,
            "Invalid mesh_dim_name: the mesh has no axis 'ep'; it has ('dp', 'tp').",
        ),
        (
            lambda m: m["ep"],
            ValueError,
            "Invalid mesh_dim_name: the mesh has no axis 'ep'; it has ('dp', 'tp').",
        ),
        (
            lambda m: m["tp", "dp"],
            KeyError,
            (
                "Mesh dim indices should be in ascending order: the axes ('tp', 'dp') are not in the mesh's order ('dp', 'tp'). Use mesh['dp', 'tp'], or "
                "mesh.permute('tp', 'dp') for the transposed mesh"
            ),
        ),
        (lambda m: m["tp", "tp"], ValueError, "A slice names each axis once"),
        (lambda m: m[()], ValueError, "A slice names at least one axis"),
        (lambda m: m[0], TypeError, "A mesh is sliced by axis names, got 0."),
        (lambda m: m.size("ep"), ValueError, "no axis 'ep'"),
        (lambda m: m.size(2), ValueError, "Axis index 2 is out of range"),
        (lambda m: m.size(1.0), TypeError, "An axis is a name or an index, got 1.0."),
        (
            lambda m: m.get_local_rank(),
            RuntimeError,
            "get_local_rank() needs mesh_dim on a mesh of 2",
        ),
        (lambda m: m.get_local_rank("ep"), ValueError, "no axis 'ep'"),
        (lambda m: m.get_group(), RuntimeError, "get_group() needs mesh_dim on a mesh of 2"),
        (lambda m: m.get_group("tp"), RuntimeError, "process groups not initialized!"),
        (lambda m: m.get_all_groups(), RuntimeError, "call mesh.init_backend()"),
        (lambda m: m["tp"].flatten("dp"), ValueError, "'dp' is an axis of the root mesh"),
        (lambda m: m.unflatten("ep", (2, 2), ("a", "b")), ValueError, "no axis 'ep'"),
        (
            lambda m: m.unflatten(1, (2, 3), ("a", "b")),
            ValueError,
            "multiply to 6, the axis has 4",
        ),
        (lambda m: m.unflatten(1, (2, 2), ("a",)), ValueError, "got 1 names ('a',) for 2 sizes"),
        (lambda m: m.unflatten(1, (2, 2), ("dp", "b")), ValueError, "must be unique"),
        (
            lambda m: m.unflatten(1, (2, 2), ("a", "b"), {"c": "fake"}),
            ValueError,
            "Found invalid keys in backend_override: got ['c'], expected integers in range [0, 2) or one of ('a', 'b').",
        ),
        (
            lambda m: m.unflatten(1, (2, 2), ("a", "b"), {"a": "fake", 0: "fake"}),
            ValueError,
            "Found redundant dim index 0 and name a in backend_override; keep one of them.",
        ),
        (lambda m: DeviceMesh.concatenate([]), ValueError, "at least one mesh"),
        (lambda m: DeviceMesh.concatenate([m, m["tp"]]), ValueError, "must be unique"),
        (
            lambda m: DeviceMesh.concatenate([m["tp"], on_rank([0, 1], ("x",))]),
            ValueError,
            "Cannot concatenate meshes of different roots",
        ),
        (lambda m: m["tp"].abort(), ValueError, "abort() is for a root mesh"),
    ],
    ids=itertools.count(),
)
def test_wrong_questions(ask: object, kind: type[Exception], text: str) -> None:
    """Unknown names, wrong order, missing axes: what was asked, what is legal, what to do."""
    with pytest.raises(kind, match=re.escape(text)):
        ask(example())  # type: ignore[operator]


@pytest.mark.parametrize(
    ("ask", "kind", "text"),
    [
        (
            lambda m: m._unflatten(2, (2, 2), ("a", "b")),
            ValueError,
            "dim 2 specified in `_unflatten` is out of range 2",
        ),
        (
            lambda m: m._unflatten("ep", (2, 2), ("a", "b")),
            ValueError,
            "dim ep specified in `_unflatten` is not in ('dp', 'tp')",
        ),
        (
            lambda m: m._unflatten(1, (2, 2), ("a",)),
            RuntimeError,
            "mesh_dim_names must have same length as mesh_sizes in _unflatten!",
        ),
        (
            lambda m: m._unflatten(1, (2, 3), ("a", "b")),
            ValueError,
            "These must be equal for unflatten to work correctly",
        ),
        (
            lambda m: m["tp"]._flatten("dp"),
            ValueError,
            "dp already exists for submesh of the",
        ),
        (
            lambda m: (m._flatten("all"), m["tp"]._flatten("all")),
            ValueError,
            "Flatten mesh with mesh_dim_name all has been created before",
        ),
        (
            lambda m: DeviceMesh._concatenate([m["tp"], on_rank([0, 1], ("x",))]),
            RuntimeError,
            "Cannot concatenate DeviceMeshes derived from different device meshes",
        ),
    ],
    ids=itertools.count(),
)
def test_wrong_questions_in_torch_words(ask: object, kind: type[Exception], text: str) -> None:
    """What programs written for torch's mesh look for in the text of an error is in ours."""
    with pytest.raises(kind, match=re.escape(text)):
        ask(example())  # type: ignore[operator]


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m["tp"],
        lambda m: m.size("tp"),
        lambda m: m.flatten(),
        lambda m: m.unflatten(0, (2, 1), ("a", "b")),
        lambda m: m.assert_axis("tp"),
        lambda m: m.get_device_num_along_axis("tp"),
    ],
    ids=itertools.count(),
)
def test_meshes_without_names_say_so(ask: object) -> None:
    """Asking an unnamed mesh by name is a RuntimeError that says how to name axes."""
    with pytest.raises(RuntimeError, match="mesh_dim_names") as caught:
        ask(on_rank([[0, 1], [2, 3]]))  # type: ignore[operator]
    assert isinstance(caught.value, UnnamedMeshError)


def test_errors_carry_facts_and_cross_processes() -> None:
    """An error keeps its attributes and its text through pickling."""
    with pytest.raises(AxisError) as caught:
        example()["ep"]
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is AxisError
    assert (copied.asked, copied.legal, str(copied)) == ("ep", ("dp", "tp"), str(caught.value))
    with pytest.raises(AxisRequiredError):
        example().get_local_rank()


def test_a_mesh_needs_to_know_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch.distributed and RANK a layout-only mesh works until a coordinate is needed."""
    monkeypatch.delenv("RANK", raising=False)
    mesh = init_device_mesh("cpu", (2,), rank_list=(0, 1), init_backend=False)
    assert mesh.size() == 2
    with pytest.raises(NoGroupError, match="does not know which rank"):
        mesh.get_coordinate()
    with pytest.raises(NoGroupError, match="Pass rank_list"):
        init_device_mesh("cpu", (2,), init_backend=False)


def test_layout_only_meshes_read_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and WORLD_SIZE say the rank and the block before torch.distributed starts."""
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), init_backend=False)
    assert mesh.rank_list == (4, 5, 6, 7)
    assert mesh.get_coordinate() == (0, 1)
    whole = DeviceMesh("cpu", _init_backend=False)
    assert whole.rank_list == tuple(range(8))


# Values.


def test_equal_meshes_are_one_key() -> None:
    """Value, not identity, decides equality and hash; device type, names and ranks are part of it."""
    first, second = example(), example()
    assert first is not second
    assert first == second
    assert len({first, second}) == 1
    others = [
        on_rank(torch.arange(8).view(2, 4), ("dp", "cp"), 5),
        on_rank(torch.arange(8).view(4, 2), ("dp", "tp"), 5),
        on_rank(torch.arange(8).flip(0).view(2, 4), ("dp", "tp"), 5),
        on_rank(torch.arange(8).view(2, 4), None, 5),
        DeviceMesh(
            "cuda",
            torch.arange(8).view(2, 4),
            mesh_dim_names=("dp", "tp"),
            _init_backend=False,
            _rank=5,
        ),
    ]
    assert all(first != other for other in others)
    assert len({first, *others}) == 6
    assert first != "mesh"


@pytest.mark.parametrize("names", [None, ("dp", "tp")])
@pytest.mark.parametrize("shape", [(2, 4), (1, 8), (8, 1)])
def test_equal_to_torchs_mesh(shape: tuple[int, int], names: tuple[str, str] | None) -> None:
    """Our mesh and torch's of the same ranks are equal keys, in both directions."""
    grid = torch.arange(8).view(shape)
    ours, theirs = on_rank(grid, names, 5), torch_on_rank(grid, names, 5)
    assert ours == theirs
    assert theirs == ours
    assert hash(ours) == hash(theirs)
    assert len({ours, theirs}) == 1
    assert ours != torch_on_rank(grid + 1, names, 5)
    assert ours._layout == theirs._layout


@pytest.mark.parametrize("rank", [0, 17])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 6, 4), (4, 1, 6), (24, 1, 1)])
def test_derived_meshes_equal_torchs(rank: int, shape: tuple[int, int, int]) -> None:
    """Every slice, and the flattening of it, is equal to torch's of the same, as a key too."""
    names = ("a", "b", "c")
    with fake_world(rank, 24):
        grid = torch.arange(24).view(shape)
        theirs = torch_on_rank(grid, names, rank)
        ours = on_rank(grid, names, rank)
        for count in (1, 2):
            for choice in itertools.combinations(names, count):
                mine, other = ours[choice], theirs[choice]
                assert mine == other
                assert other == mine
                assert hash(mine) == hash(other)
                assert mine.get_coordinate() == other.get_coordinate()
                assert torch.equal(mine.mesh, other.mesh)
                flat, other_flat = (
                    mine._flatten("-".join(choice)),
                    other._flatten("-".join(choice)),
                )
                assert torch.equal(flat.mesh, other_flat.mesh)
                if (
                    min(mine.shape) > 1
                ):  # torch 2.12 keeps strides of size-1 axes that mean nothing
                    assert flat == other_flat


def test_copies_are_the_mesh_itself() -> None:
    """Copy, deep copy and unpickling in the same process give the same object."""
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), rank_list=(3, 2, 1, 0), init_backend=False
    )
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy({"mesh": mesh["tp"]})["mesh"] is mesh["tp"]
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert pickle.loads(pickle.dumps(mesh["tp"])) is mesh["tp"]
    assert pickle.loads(pickle.dumps(mesh.flatten())) is mesh.flatten()


def test_init_device_mesh_is_cached_by_value() -> None:
    """The same value gives the same object; device type and backend state are part of the value."""
    make = init_device_mesh
    first = make("cpu", (2, 2), rank_list=range(4), init_backend=False)
    assert make("cpu", (2, 2), rank_list=[0, 1, 2, 3], init_backend=False) is first
    assert make("cuda", (2, 2), rank_list=range(4), init_backend=False) is not first
    assert make("cpu", (2, 2), rank_list=(0, 1, 3, 2), init_backend=False) is not first


def test_hash_is_computed_once() -> None:
    """A second hash reads the kept one; meshes are keys on hot paths."""
    mesh = example()
    value = hash(mesh)
    assert mesh.__dict__["_hash"] == value
    mesh.__dict__["_hash"] = 17
    assert hash(mesh) == 17


def test_repr_shows_names_sizes_and_strides() -> None:
    """The text is torch's."""
    mesh = example()
    assert repr(mesh) == "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))"
    assert repr(mesh) == repr(torch_on_rank(torch.arange(8).view(2, 4), ("dp", "tp"), 5))
    assert repr(on_rank([[0], [1]])) == "DeviceMesh((2, 1), 'cpu', stride=(1, 1))"


# The current mesh.


def test_the_innermost_mesh_is_current() -> None:
    """Entering nests, leaving restores, also after an exception; torch's functions see it too."""
    outer, inner = example(), example()["tp"]
    with outer as entered:
        assert entered is outer
        assert get_current_mesh() is outer
        with inner:
            assert get_current_mesh() is inner
            assert torch_mesh._mesh_resources.get_current_mesh() is inner
        assert get_current_mesh() is outer
        with pytest.raises(ZeroDivisionError), inner:
            _ = 1 / 0
        assert get_current_mesh() is outer
    with pytest.raises(RuntimeError, match="No device mesh is currently active!"):
        get_current_mesh()
    with pytest.raises(RuntimeError, match="No device mesh is currently active!"):
        torch_mesh._mesh_resources.get_current_mesh()


def test_the_current_mesh_is_per_thread() -> None:
    """Another thread does not see this thread's mesh."""
    seen: list[object] = []

    def look() -> None:
        try:
            seen.append(get_current_mesh())
        except RuntimeError as error:
            seen.append(str(error))

    with example():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert "No device mesh" in str(seen[0])


def test_the_current_mesh_is_per_task() -> None:
    """Two async tasks that interleave each see their own mesh, and leave none behind."""
    import asyncio

    first, second = example(), example()["tp"]

    async def task(mesh: DeviceMesh, naps: int) -> list[DeviceMesh]:
        seen = []
        with mesh:
            for _ in range(naps):
                await asyncio.sleep(0)
                seen.append(get_current_mesh())
        return seen

    async def both() -> list[list[DeviceMesh]]:
        return await asyncio.gather(task(first, 2), task(second, 4))

    one, two = asyncio.run(both())
    assert all(mesh is first for mesh in one)
    assert all(mesh is second for mesh in two)
    assert torch_mesh._mesh_resources.mesh_stack == []


# Worlds larger than the mesh.


@spmd(world_size=4)
def test_a_smaller_mesh_is_one_mesh_per_block() -> None:
    """Without a rank list every rank gets the mesh of its own block of the world."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    first = rank - rank % 2
    assert mesh.rank_list == (first, first + 1)
    assert mesh.get_local_rank() == rank % 2
    total = torch.ones(1) * rank
    torch.distributed.all_reduce(total, group=mesh.get_group())
    assert total.item() == 2 * first + 1


@spmd(world_size=4)
def test_ranks_after_the_last_block_are_outside() -> None:
    """A mesh of 3 in a world of 4 leaves one rank out, as in torch."""
    mesh = init_device_mesh("cpu", (3,))
    assert mesh.rank_list == (0, 1, 2)
    outside = torch.distributed.get_rank() == 3
    assert (mesh.get_coordinate() is None) == outside
    if outside:
        with pytest.raises(NoGroupError, match="Rank 3 is not in the mesh"):
            mesh.get_group()
        assert mesh._dim_group_names == []
    else:
        assert mesh.get_group().size() == 3


@spmd(world_size=2)
def test_meshes_larger_than_the_world_are_refused_everywhere() -> None:
    """Every rank raises alike, and no group was made."""
    from hp_mesh.groups import registry

    before = registry.records()
    for make in (
        lambda: init_device_mesh("cpu", (2, 2)),
        lambda: DeviceMesh("cpu", [0, 3]),
        lambda: init_device_mesh("cpu", (2,), rank_list=(0, 3)),
    ):
        with pytest.raises(
            MeshError, match="bigger than default world size 2: it needs ranks up to 3"
        ):
            make()
    assert registry.records() == before


@spmd(world_size=2)
def test_no_mesh_argument_is_the_world() -> None:
    """`DeviceMesh(device_type)` is the 1-D mesh of all ranks."""
    mesh = DeviceMesh("cpu", mesh_dim_names=("world",))
    assert mesh.rank_list == (0, 1)
    assert mesh.get_group() is torch.distributed.group.WORLD


def test_all_orders_of_names_are_either_right_or_refused() -> None:
    """For every ordered choice of axes a slice is the transposed-free sub-grid, or a KeyError."""
    grid = torch.arange(24).view(2, 3, 4)
    names = ("a", "b", "c")
    mesh = on_rank(grid, names, rank=17)
    for count in (1, 2, 3):
        for choice in itertools.permutations(names, count):
            if list(choice) == sorted(choice):
                assert mesh[choice].shape == tuple(grid.size(names.index(n)) for n in choice)
            else:
                with pytest.raises(KeyError, match="not in the mesh's order"):
                    mesh[choice]


@pytest.mark.parametrize(
    "make",
    [
        lambda: init_device_mesh("cuda:0", (2,)),
        lambda: on_rank([[0, 1]], ("a",)),
        lambda: on_rank([[0, 1]], ("a", "a")),
        lambda: on_rank([0, 0]),
        lambda: on_rank([[0, 1], [2, 3]], ("dp", "tp"))["tp"].flatten("dp"),
        lambda: on_rank([0, 1], ("a",)).unflatten(0, (2, 1), ("b",)),
    ],
    ids=itertools.count(),
)
def test_what_torch_calls_a_runtime_error_is_one_here(make: object) -> None:
    """Code that catches torch's `RuntimeError` for a mesh that cannot be catches ours, and so does `ValueError`."""
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind):
            make()  # type: ignore[operator]
