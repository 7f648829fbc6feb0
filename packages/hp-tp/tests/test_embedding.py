"""Embeddings cut by vocabulary and by features, against the single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hp_dtensor import Placement, Replicate, Shard
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    BoundaryError,
    ColwiseParallel,
    RowwiseParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from hp_tp.testing import check_plan
from torch import nn

R, S = Replicate(), Shard


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


@pytest.mark.parametrize("vocabulary", [12, 9, 3, 1])
@spmd(world_size=4, timeout=120)
def test_both_cuts_for_any_vocabulary(vocabulary: int) -> None:
    """Even, uneven and empty shards of the table; ids of any number of dims."""
    mesh = tp(4)
    for shape in ((2, 5), (3,), ()):
        ids = torch.randint(0, vocabulary, shape)
        check_plan(nn.Embedding(vocabulary, 6), mesh, RowwiseParallel(), ids)
        check_plan(nn.Embedding(vocabulary, 6), mesh, ColwiseParallel(output_layouts=R), ids)


@pytest.mark.parametrize("padding", [0, 1, 6, 8, -1])
@pytest.mark.parametrize("by_frequency", [False, True])
@spmd(world_size=2, timeout=120)
def test_padding_is_a_global_id(padding: int, by_frequency: bool) -> None:
    """The padding row gives its value and takes no gradient, on whichever rank it is; frequencies are global."""
    mesh = tp(2)
    ids = torch.tensor([[0, 1, 5, 6], [8, 2, 5, 1]])
    for style in (RowwiseParallel(), ColwiseParallel(output_layouts=R)):
        table = nn.Embedding(9, 4, padding_idx=padding, scale_grad_by_freq=by_frequency)
        with torch.no_grad():
            table.weight.normal_()
        check_plan(table, mesh, style, ids)


@pytest.mark.parametrize("layout", [R, S(0), S(1), S(-1)])
@spmd(world_size=2, timeout=120)
def test_output_layouts(layout: Placement) -> None:
    """The output goes where the style says, plain and distributed."""
    mesh = tp(2)
    ids = torch.randint(0, 9, (2, 4))
    for style in (RowwiseParallel, ColwiseParallel):
        for local in (True, False):
            check_plan(
                nn.Embedding(9, 6),
                mesh,
                style(output_layouts=layout, use_local_output=local),
                ids,
                output=layout,
            )


@pytest.mark.parametrize("given", [R, S(0), S(1)])
@spmd(world_size=2, timeout=120)
def test_distributed_ids(given: Placement) -> None:
    """Ids laid out in any way are gathered from their own layout."""
    mesh = tp(2)
    ids = torch.randint(0, 9, (2, 4))
    for style in (RowwiseParallel(), ColwiseParallel(output_layouts=R)):
        check_plan(nn.Embedding(9, 6), mesh, style, ids, given=[given], distributed=True)


@spmd(world_size=4, timeout=120)
def test_uneven_sequence_is_refused_as_a_plain_tensor() -> None:
    """The length that the pieces could not tell is in the message."""
    table = parallelize_module(nn.Embedding(8, 4), tp(4), RowwiseParallel(output_layouts=S(1)))
    with pytest.raises(BoundaryError, match="the output of an embedding has 6 elements in dim 1"):
        table(torch.zeros(2, 6, dtype=torch.long))


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(8, width) for width in (4, 4, 6))

    def forward(self, a: Any, b: Any, c: Any) -> Any:
        outs = [table(ids) for table, ids in zip(self.tables, (a, b, c), strict=True)]
        return outs[0] + outs[1], outs[2]


@spmd(world_size=2, timeout=120)
def test_tables_do_not_share_masks() -> None:
    """Several tables of one size, all looked up before any backward."""
    ids = [torch.randint(0, 8, (2, 5)) for _ in range(3)]
    check_plan(Tables(), tp(2), {"tables.*": RowwiseParallel()}, *ids)


@spmd(world_size=2, timeout=120)
def test_options_that_need_the_whole_table_are_refused() -> None:
    """``max_norm`` and ``sparse``, before anything is cut."""
    mesh = tp(2)
    for style in (RowwiseParallel(), ColwiseParallel()):
        for options in ({"max_norm": 1.0}, {"sparse": True}):
            table = nn.Embedding(8, 4, **options)
            with pytest.raises(
                UnsupportedModuleError, match=f"an Embedding with {next(iter(options))}"
            ):
                parallelize_module(table, mesh, style)
            assert type(table.weight) is nn.Parameter


@spmd(world_size=4, timeout=120)
def test_reduce_dtype_keeps_the_dtype() -> None:
    """Addends travel in float32, the output is in the dtype of the table."""
    table = nn.Embedding(8, 4, dtype=torch.bfloat16)
    style = RowwiseParallel(reduce_dtype=torch.float32)
    out = parallelize_module(table, tp(4), style)(torch.tensor([1, 7]))
    assert out.dtype == torch.bfloat16
