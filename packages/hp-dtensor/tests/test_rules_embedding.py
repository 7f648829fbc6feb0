"""Embedding over a cut table: global indices, global padding, and the errors of one device."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, distribute_tensor, shards
from hp_dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.rules import LocalCall, OpCall, Strategy, TensorMeta, find_rule
from hp_dtensor.rules.embedding import localize_index
from hp_dtensor.testing import Sample, check_rule, draw
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd

aten = torch.ops.aten
R, SUM = Replicate(), Partial("sum")


def _call(op: torch._ops.OpOverload, args: tuple[object, ...], size: int = 2) -> OpCall:
    metas = tuple(TensorMeta.of(v) if isinstance(v, torch.Tensor) else v for v in args)
    result = op(*args)
    return OpCall(op, metas, {}, (TensorMeta.of(result),), size)


def _lookup(
    table: torch.Tensor, index: torch.Tensor, place: Placement, size: int
) -> list[Callable[..., torch.Tensor]]:
    """What each coordinate runs for a table that is cut as *place*."""
    entry = find_rule(aten.embedding.default)
    assert entry is not None
    assert entry.local is not None
    safe = index.clamp(0, table.shape[0] - 1)
    call = _call(aten.embedding.default, (table, safe))
    found = []
    for coordinate in range(size):
        where = (tuple(table.shape), (size,), (coordinate,), (place,))
        local = LocalCall(
            call=call,
            mesh_shape=(size,),
            coordinate=(coordinate,),
            input_placements=((place,), (R,)),
            output_placements=((SUM,),),
            input_local_shapes=(shards.local_shape(*where), tuple(index.shape)),
            output_local_shapes=(call.output.shape,),
            input_boxes=(shards.local_box(*where), tuple(((0, n),) for n in index.shape)),
            output_boxes=(tuple(((0, n),) for n in call.output.shape),),
        )
        found.append(entry.local(local))
    return found


def _rows(table: torch.Tensor, place: Placement, size: int, at: int) -> torch.Tensor:
    box = shards.local_box(tuple(table.shape), (size,), (at,), (place,))
    pieces = [table[start:end] for start, end in box[0]]
    return torch.cat(pieces) if pieces else table[:0]


def test_the_strategies_of_a_lookup() -> None:
    """Indices, width and rows may be cut; cut rows give a sum, and so does a summed table."""
    entry = find_rule(aten.embedding.default)
    assert entry is not None
    table, index = draw((7, 3))[0], torch.zeros(2, 5, dtype=torch.int64)
    found = entry.strategies(_call(aten.embedding.default, (table, index)))
    assert set(found) == {
        Strategy((Shard(0),), (R, Shard(0))),
        Strategy((Shard(1),), (R, Shard(1))),
        Strategy((Shard(2),), (Shard(1), R)),
        Strategy((SUM,), (Shard(0), R)),
        Strategy((SUM,), (SUM, R)),
        Strategy((Partial("avg"),), (Partial("avg"), R)),
    }


def test_a_gradient_of_unknown_use_is_whole_before_it_is_cut() -> None:
    """Of two strategies without communication the replicated result comes first."""
    entry = find_rule(aten.embedding_dense_backward.default)
    assert entry is not None
    (grad,) = draw((2, 5, 3))
    index = torch.zeros(2, 5, dtype=torch.int64)
    call = _call(aten.embedding_dense_backward.default, (grad, index, 7, -1, False))
    free = [s.outputs[0] for s in entry.strategies(call) if s.inputs == (R, R)]
    assert free == [R, Shard(0)]


def test_a_frequency_is_counted_over_all_indices() -> None:
    """With ``scale_grad_by_freq`` the indices stay whole."""
    entry = find_rule(aten.embedding_dense_backward.default)
    assert entry is not None
    (grad,) = draw((2, 5, 3))
    index = torch.zeros(2, 5, dtype=torch.int64)
    call = _call(aten.embedding_dense_backward.default, (grad, index, 7, -1, True))
    assert all(s.inputs[1] == R for s in entry.strategies(call))


@pytest.mark.parametrize("bad", [7, 100, -8])
@pytest.mark.parametrize("size", [2, 4])
def test_an_index_outside_the_table_raises_on_every_coordinate(bad: int, size: int) -> None:
    """What raises on one device raises wherever the table is cut, also where no row is held."""
    (table,) = draw((5 if size == 4 else 7, 3))
    index = torch.tensor([0, bad, 1])
    for at, run in enumerate(_lookup(table, index, Shard(0), size)):
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            run(_rows(table, Shard(0), size, at), index)


def test_a_foreign_index_gives_zeros_even_where_the_rows_are_not_numbers() -> None:
    """Rows are chosen, not multiplied by a mask: no NaN leaks from a row that was not asked for."""
    table = torch.full((4, 2), torch.nan)
    table[3] = 1.0
    index = torch.tensor([3, 3])
    runs = _lookup(table, index, Shard(0), 2)
    found = [run(_rows(table, Shard(0), 2, at), index) for at, run in enumerate(runs)]
    assert torch.equal(sum(found[1:], found[0]), torch.ones(2, 2))


def test_rows_in_several_runs() -> None:
    """A StridedShard of the rows holds several intervals, and every index finds its row."""
    (table,) = draw((11, 2))
    index = torch.arange(11)
    place = StridedShard(0, split_factor=2)
    runs = _lookup(table, index, place, 3)
    found = [run(_rows(table, place, 3, at), index) for at, run in enumerate(runs)]
    torch.testing.assert_close(sum(found[1:], found[0]), table)


@pytest.mark.parametrize("padding", [0, 3, 6])
def test_the_padding_row_is_global(padding: int) -> None:
    """Its gradient is zero wherever it is held, and the other rows get theirs."""
    (grad,) = draw((6, 2))
    index = torch.tensor([0, 3, 6, 6, 3, 1])
    sample = Sample((grad, index, 7, padding, False))
    assert check_rule(aten.embedding_dense_backward.default, [sample], (2, 3, 7)) > 6
    assert (
        check_rule(aten.embedding_dense_backward.default, [sample], (), mesh_shapes=[(2, 2)]) > 4
    )


def test_localised_indices() -> None:
    """Local positions, a mask of what is elsewhere, and a position that is nowhere."""
    index = torch.tensor([0, 4, 5, 9, -1, 10, -11])
    position, foreign = localize_index(index, ((4, 6), (8, 10)), 10, negative=True)
    assert position.tolist() == [0, 0, 1, 3, 3, 4, 4]
    assert foreign.tolist() == [True, False, False, False, False, False, False]
    position, _ = localize_index(index, ((4, 6), (8, 10)), 10)
    assert position.tolist() == [0, 0, 1, 3, 4, 4, 4]
    position, _ = localize_index(index, (), 10)
    assert position.tolist() == [0, 0, 0, 0, 1, 1, 1]


@spmd(world_size=2)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_rows_that_are_looked_up_are_renormed_in_place(norm: float) -> None:
    """However the table is laid out, held by a name or not; rows that are not looked up stay."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    table, index = torch.randn(7, 3) * 2, torch.tensor([[1, 6], [1, 3]])
    plain = table.clone()
    expected = F.embedding(index, plain, max_norm=1.5, norm_type=norm)
    for place in (R, Shard(0), Shard(1), SUM):
        weight = distribute_tensor(table, mesh, [place])
        found = F.embedding(index, weight, max_norm=1.5, norm_type=norm)
        assert isinstance(found, DTensor)
        assert weight.placements == (place,)
        torch.testing.assert_close(weight.full_tensor(), plain)
        torch.testing.assert_close(found.full_tensor(), expected)
