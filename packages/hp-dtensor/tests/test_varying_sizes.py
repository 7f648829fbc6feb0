"""Compiled programs whose sizes vary: right numbers for every size, and few graphs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_dtensor import _torch as seam
from hp_dtensor.shards import local_shape
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from torch._dynamo.testing import CompileCounterWithBackend

R = Replicate()


def _laid_out(shape: tuple[int, ...], mesh: DeviceMesh, *placements: object) -> DTensor:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)  # type: ignore[arg-type]


@pytest.mark.slow
@spmd(world_size=2, timeout=120)
def test_a_graph_for_many_sizes_knows_the_size_of_the_whole() -> None:
    """A mean divides by the number of elements there are now, not by that of the call that was compiled."""
    mesh = init_device_mesh("cpu", (2,))
    count = CompileCounterWithBackend("aot_eager")
    mean = torch.compile(lambda x: x.mean(), backend=count, fullgraph=True)
    for rows in (4, 6, 10, 8):
        d = _laid_out((rows, 8), mesh, Shard(0))
        torch.testing.assert_close(mean(d).full_tensor(), d.full_tensor().mean())
    assert count.frame_count == 2


@pytest.mark.slow
@spmd(world_size=2, timeout=120)
def test_sizes_that_look_alike_on_one_rank_are_told_apart() -> None:
    """Five and six rows are three on the first of two ranks; each gets its own graph, on all ranks alike."""
    mesh = init_device_mesh("cpu", (2,))
    count = CompileCounterWithBackend("aot_eager")
    mean = torch.compile(lambda x: x.mean(), backend=count, fullgraph=True)
    for rows in (5, 6, 5, 7, 6):
        d = _laid_out((rows, 4), mesh, Shard(0))
        torch.testing.assert_close(mean(d).full_tensor(), d.full_tensor().mean())


@pytest.mark.slow
@spmd(world_size=2, timeout=120)
def test_moves_are_compiled_once_for_all_even_sizes() -> None:
    """Gather, exchange and scatter keep a marked size open."""
    mesh = init_device_mesh("cpu", (2,))
    moves = {
        "gather": lambda x: x.redistribute(placements=[R]).to_local(),
        "exchange": lambda x: x.redistribute(placements=[Shard(1)]).to_local(),
        "multiply": lambda x: (x.t() @ x).redistribute(placements=[R]).to_local(),
        "join": lambda x: torch.cat((x, x), 0).redistribute(placements=[R]).to_local(),
    }
    for name, move in moves.items():
        torch.compiler.reset()
        count = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(move, backend=count, fullgraph=True)
        for rows in (4, 6, 10):
            d = _laid_out((rows, 4), mesh, Shard(0))
            torch._dynamo.mark_dynamic(d, 0)
            torch.testing.assert_close(compiled(d), move(d))
        assert (name, count.frame_count) == (name, 1)


def test_symbolic_sizes_are_computed_and_not_remembered() -> None:
    """The shard rule takes expressions; other types without a hash stay errors."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    size = _backed(env, 10)
    shape = local_shape((size, 4), (2,), (1,), (Shard(0),))
    assert shape == (5, 4)
    assert type(shape[0]) is torch.SymInt
    assert seam.hint(size) == 10
    assert seam.hint(7) == 7
    with pytest.raises(TypeError, match="unhashable"):
        local_shape([10, 4], (2,), (1,), (Shard(0),))  # type: ignore[arg-type]


def _backed(env: object, value: int) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    assert isinstance(env, ShapeEnv)
    symbol = env.create_symbol(value, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    made = env.create_symintnode(symbol, hint=value, source=ConstantSource("rows"))
    assert isinstance(made, torch.SymInt)
    return made


@pytest.mark.seam
def test_the_guard_of_a_spec_compares_what_pieces_do_not_tell() -> None:
    """Dynamo compares specs without sizes; sizes with other leftovers differ all the same, even ones do not."""
    mesh = init_device_mesh("cpu", (2, 2), rank_list=range(4), init_backend=False)

    def spec(shape: tuple[int, ...], *placements: object) -> seam.GuardedSpec:
        meta = seam.TensorMeta(
            torch.Size(shape), tuple(torch.empty(shape).stride()), torch.float32
        )
        return seam.GuardedSpec(mesh, tuple(placements), tensor_meta=meta)  # type: ignore[arg-type]

    cut = (Shard(0), Shard(0))
    for first, second, same in (
        ((4, 3), (8, 5), True),
        ((5, 3), (6, 3), False),
        ((5, 3), (5, 7), True),
    ):
        assert spec(first, *cut)._check_equals(spec(second, *cut), skip_shapes=True) is same
        assert not spec(first, *cut)._check_equals(spec(second, *cut))
    assert spec((5,), R, Partial())._check_equals(spec((6,), R, Partial()), skip_shapes=True)
    assert not spec((4,), *cut)._check_equals(spec((4,), R, R), skip_shapes=True)
    one = spec((5, 3), *cut)
    assert (copy.deepcopy(one), pickle.loads(pickle.dumps(one))) == (one, one)
    assert type(pickle.loads(pickle.dumps(one))) is seam.DTensorSpec
