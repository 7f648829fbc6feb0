"""Factories: sizes in every form, exact pieces, the single device's values, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import hp_dtensor
import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    LayoutError,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    manual_seed,
    random_policy,
)
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd

R = Replicate()

ONE_DIM: list[tuple[str, tuple[object, ...], dict[str, object]]] = [
    ("zeros", (7,), {}),
    ("ones", ((7,),), {"dtype": torch.int32}),
    ("full", (7, 2.5), {}),
    ("full", ((7,), 3), {}),
    ("full", ([7], True), {}),
    ("arange", (11,), {}),
    ("arange", (3, 20), {}),
    ("arange", (0.0, 1.0, 0.07), {"dtype": torch.float64}),
    ("linspace", (-1.0, 2.0, 13), {}),
    ("logspace", (0.0, 1.0, 9), {}),
    ("logspace", (0.0, 3.0, 9, 2.0), {"dtype": torch.float64}),
    ("rand", (9,), {}),
    ("randn", (9,), {"dtype": torch.bfloat16}),
    ("randn", (9,), {"dtype": torch.complex64}),
    ("randint", (5, (9,)), {}),
    ("randint", (-3, 5, (9,)), {"dtype": torch.int32}),
    ("randperm", (13,), {}),
    ("randperm", (0,), {}),
]
TWO_DIMS: list[tuple[str, tuple[object, ...], dict[str, object]]] = [
    ("zeros", (5, 3), {}),
    ("eye", (6,), {}),
    ("eye", (4, 7), {"dtype": torch.int64}),
    ("rand", ([5, 3],), {"dtype": torch.float64}),
    ("randn", (torch.Size([5, 3]),), {}),
    ("randint", (0, 9, (0, 3)), {}),
]


def _made(name: str, args: tuple[object, ...], named: dict[str, object]) -> DTensor:
    made = getattr(hp_dtensor, name)(*args, **named)
    assert isinstance(made, DTensor)
    return made


@spmd(world_size=4)
def test_the_whole_is_what_one_device_makes() -> None:
    """Every factory in every layout gives torch's own tensor bit for bit, in pieces of the shard rule, and sends nothing."""
    lines: list[list[Placement]] = [[R], [Shard(0)], [StridedShard(0, split_factor=2)]]
    planes: list[list[Placement]] = [[Shard(0), Shard(0)], [Shard(1), R], [Shard(0), Shard(1)]]
    for mesh, layouts, cases in (
        (init_device_mesh("cpu", (4,)), lines, ONE_DIM),
        (init_device_mesh("cpu", (2, 2)), planes, TWO_DIMS),
    ):
        for name, args, named in cases:
            torch.manual_seed(5)
            want = getattr(torch, name)(*([(7,), *args[1:]] if name == "full" else args), **named)
            for placements in layouts:
                manual_seed(5)
                with CommDebugMode() as comm:
                    made = _made(
                        name, args, {"device_mesh": mesh, "placements": placements, **named}
                    )
                assert comm.get_total_counts() == 0
                assert made.dtype == want.dtype, (name, args)
                assert tuple(made.to_local().shape) == made.spec.local_shape
                assert made.to_local().is_contiguous()
                assert torch.equal(made.full_tensor(), want), (name, args, placements)


@spmd(world_size=2)
def test_layout_free_draws_have_one_whole_too() -> None:
    """Under "layout_free" each drawn factory gives the same bits in each layout."""
    mesh = init_device_mesh("cpu", (2,))
    with random_policy("layout_free"):
        for name, args, named in ONE_DIM:
            if name.startswith("rand"):
                whole = []
                for placements in ([R], [Shard(0)]):
                    manual_seed(5)
                    options = {"device_mesh": mesh, "placements": placements, **named}
                    whole.append(_made(name, args, options).full_tensor())
                assert torch.equal(*whole)
                if name == "randperm":
                    assert whole[0].sort().values.tolist() == list(range(int(args[0])))


@spmd(world_size=2)
def test_defaults_and_keywords() -> None:
    """The current mesh and Replicate are the defaults; no size is a scalar; requires_grad makes a leaf."""
    mesh = init_device_mesh("cpu", (2,))
    with mesh:
        scalar = hp_dtensor.randn()
        assert tuple(scalar.shape) == ()
        assert scalar.placements == (R,)
        assert tuple(hp_dtensor.rand([]).shape) == ()
        leaf = hp_dtensor.randn(3, 2, requires_grad=True)
        assert leaf.requires_grad
        assert leaf.is_leaf
        assert hp_dtensor.randint(low=2, high=3, size=(2,)).full_tensor().tolist() == [2, 2]
        part = hp_dtensor.zeros(4, placements=[Partial()])
        assert part.full_tensor().tolist() == [0.0] * 4


@spmd(world_size=2)
def test_what_cannot_be_made_is_refused() -> None:
    """Addends, other layouts of memory, negative sizes and missing bounds raise on every rank."""
    mesh = init_device_mesh("cpu", (2,))
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (
            lambda: hp_dtensor.ones(2, device_mesh=mesh, placements=[Partial()]),
            LayoutError,
            "use Replicate",
        ),
        (
            lambda: hp_dtensor.eye(2, device_mesh=mesh, placements=[Partial()]),
            LayoutError,
            "eye with",
        ),
        (
            lambda: hp_dtensor.rand(2, device_mesh=mesh, layout=torch.sparse_coo),
            LayoutError,
            "cut by index",
        ),
        (lambda: hp_dtensor.zeros(2, -1, device_mesh=mesh), LayoutError, "negative size"),
        (lambda: hp_dtensor.randint(5, device_mesh=mesh), TypeError, r"takes \(high, size\)"),
        (lambda: hp_dtensor.randint(1, 2, 3, (4,), device_mesh=mesh), TypeError, "takes"),
        (lambda: hp_dtensor.arange(3, 0, 1, device_mesh=mesh), RuntimeError, "bound"),
    ]
    for wrong, kind, text in refused:
        with pytest.raises(kind, match=text):
            wrong()


INTO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": lambda out: torch.zeros(7, 4, out=out),
    "ones": lambda out: torch.ones((7, 4), out=out),
    "full": lambda out: torch.full((7, 4), 2.5, out=out),
    "eye": lambda out: torch.eye(7, 4, out=out),
    "eye_": torch.nn.init.eye_,
    "square": lambda out: torch.eye(4, out=out.clone()),
    "smaller": lambda out: torch.ones(3, out=out.clone()),
    "arange": lambda out: torch.arange(7, out=out[:, 0].clone()),
    "arange from": lambda out: torch.arange(1, 8, out=out[:, 0].clone()),
    "linspace": lambda out: torch.linspace(0, 1, 7, out=out[:, 0].clone()),
    "logspace": lambda out: torch.logspace(0, 1, 7, out=out[:, 0].clone()),
}


@spmd(world_size=2)
def test_torchs_factories_fill_a_tensor_that_is_given() -> None:
    """With ``out`` nothing is sent, whatever the layout, unless the shape changes; the layout stays."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(28.0).view(7, 4)
    for name, fill in INTO.items():
        want = fill(x.clone())
        for placement in (R, Shard(0), Shard(1), Partial()):
            out = hp_dtensor.distribute_tensor(x, mesh, [R], src_data_rank=None)
            out = out.redistribute(placements=[placement])
            with CommDebugMode() as comm:
                made = fill(out)
            assert isinstance(made, DTensor)
            assert torch.equal(made.full_tensor(), want), (name, placement)
            if made is out:
                assert made.placements == (placement,)
                assert comm.get_total_counts() == 0, (name, placement)


def _programs(mesh: DeviceMesh) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Programs in which a factory makes a tensor of 6 rows."""
    laid = [Shard(0)]
    return {
        "zeros": lambda x: x + hp_dtensor.zeros(6, 2, device_mesh=mesh, placements=laid),
        "ones": lambda x: x + hp_dtensor.ones((6, 2), device_mesh=mesh),
        "full": lambda x: x + hp_dtensor.full((6, 2), 2.5, device_mesh=mesh, placements=laid),
        "empty": lambda x: (
            x + hp_dtensor.empty(6, 2, device_mesh=mesh, placements=laid).fill_(3.0)
        ),
        "eye": lambda x: x + hp_dtensor.eye(6, 2, device_mesh=mesh, placements=laid),
        "arange": lambda x: x.T + hp_dtensor.arange(6, device_mesh=mesh, placements=laid),
        "linspace": lambda x: x.T + hp_dtensor.linspace(0.0, 1.0, 6, device_mesh=mesh),
        "rand": lambda x: x + hp_dtensor.rand(6, 2, device_mesh=mesh, placements=laid),
        "randn": lambda x: x + hp_dtensor.randn(6, 2, device_mesh=mesh, placements=laid),
        "randint": lambda x: x + hp_dtensor.randint(9, (6, 2), device_mesh=mesh, placements=laid),
    }


@spmd(world_size=2, timeout=180)
def test_a_graph_makes_what_the_program_makes() -> None:
    """A factory is one call of a graph without a break, and draws anew in each run as the program does."""
    mesh = init_device_mesh("cpu", (2,))
    x = hp_dtensor.distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
    for name, program in _programs(mesh).items():
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        runs = []
        for run in (program, compiled):
            manual_seed(3)
            runs.append([run(x), run(x)])
        for want, got in zip(*runs, strict=True):
            assert isinstance(want, DTensor)
            assert isinstance(got, DTensor)
            assert got.placements == want.placements, name
            assert torch.equal(got.full_tensor(), want.full_tensor()), name
