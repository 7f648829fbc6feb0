"""Drawings of layouts against tables by hand, and what a recorded collective tells."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from pathlib import Path

import pytest
import torch
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    visualize_sharding,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

R = Replicate()


def _printed(tensor: DTensor, header: str = "") -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        visualize_sharding(tensor, header)
    return out.getvalue().splitlines()


@spmd(world_size=4)
def test_one_to_three_dims_as_text() -> None:
    """Uneven, strided, replicated and empty pieces, on the first rank alone."""
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    cases = [
        (line, (5,), [Shard(0)], ["  Col 0-1  Col 2-3  Col 4", "  cpu:0    cpu:1    cpu:2"]),
        (
            square,
            (4, 4),
            [Shard(0), R],
            ["         Col 0-3", "Row 0-1  cpu:0,1", "Row 2-3  cpu:2,3"],
        ),
        (
            square,
            (4, 2),
            [StridedShard(0, split_factor=2), Shard(1)],
            [
                "       Col 0  Col 1",
                *(f"Row {i}  cpu:{i % 2 * 2}  cpu:{i % 2 * 2 + 1}" for i in range(4)),
            ],
        ),
        (
            square,
            (2, 2, 2),
            [Shard(0), Shard(2)],
            [
                "[0, :, :]",
                "         Col 0  Col 1",
                "Row 0-1  cpu:0  cpu:1",
                "[1, :, :]",
                "         Col 0  Col 1",
                "Row 0-1  cpu:2  cpu:3",
            ],
        ),
    ]
    for mesh, shape, placements, want in cases:
        d = distribute_tensor(torch.ones(shape), mesh, placements)
        first = torch.distributed.get_rank() == 0
        assert _printed(d, "title") == (["title", *want] if first else [])
    with pytest.raises(LayoutError, match="one to three dims"):
        visualize_sharding(distribute_tensor(torch.ones(1, 1, 1, 1), line, [R]))
    with pytest.raises(LayoutError, match="lies on no mesh"):
        visualize_sharding(torch.ones(2))


@spmd(world_size=2)
def test_a_table_and_a_picture_where_the_extras_are_there() -> None:
    """Rich prints the same cells; matplotlib writes a file."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        visualize_sharding(d, use_rich=True)
    first = torch.distributed.get_rank() == 0
    assert ("cpu:1" in out.getvalue()) is first
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layout.png"
        visualize_sharding(d, "a layout", picture=path)
        assert path.exists() is first


@spmd(world_size=4)
def test_a_recorded_collective_tells_axis_bytes_module_and_phase() -> None:
    """Ours and torch's, forward and backward; the counts are those of torch's mode."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    class Head(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(x, DTensor)
            return x.redistribute(placements=[R, R]).to_local()

    net = nn.Sequential(nn.Identity(), Head())
    x = distribute_tensor(torch.ones(4, 8), mesh, [R, Shard(0)]).requires_grad_()
    with CommDebugMode() as comm:
        net(x).sum().backward()
        back = DTensor.from_local(torch.ones(4), mesh, [Partial(), R])
        back.redistribute(placements=[Shard(0), R])
        theirs = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
        TorchDTensor.from_local(torch.ones(2), theirs, [Shard(0)], run_check=False).full_tensor()
    gather, scatter, other = comm.records
    functional = torch.ops._c10d_functional
    assert gather.op == functional.all_gather_into_tensor
    assert (gather.module, gather.backward, gather.payload) == ("Sequential.1", False, 64)
    assert "'tp'" in gather.axis
    assert len(gather.ranks) == 2
    assert scatter.op == functional.reduce_scatter_tensor
    assert "'dp'" in scatter.axis
    assert other.op == functional.all_gather_into_tensor
    assert other.ranks == (0, 1, 2, 3)
    assert comm.get_comm_counts() == {
        functional.all_gather_into_tensor: 2,
        functional.reduce_scatter_tensor: 1,
    }
    assert comm.get_total_counts() == 3
    table = comm.generate_comm_debug_tracing_table()
    assert "Sequential.1" in table
    assert "all_gather_into_tensor: 1" in table
    assert "'tp'" in table
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.txt"
        comm.log_comm_debug_tracing_table_to_file(str(path), noise_level=0)
        assert "FORWARD PASS" in path.read_text()


@spmd(world_size=4)
def test_asynchronous_moves_are_safe_to_use_drop_save_and_copy() -> None:
    """Whatever is done with a result that was not waited for: the value and the gradient of the synchronous move."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(32.0).reshape(4, 8)
    pairs = [
        ([Partial(), Partial()], [R, R]),
        ([Shard(0), R], [R, R]),
        ([Shard(1), R], [R, R]),
        ([Partial(), R], [Shard(0), R]),
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
    ]
    for source, target in pairs:
        x = distribute_tensor(whole, mesh, source, src_data_rank=None).requires_grad_()
        x.redistribute(placements=target, async_op=True)  # dropped
        out = x.redistribute(placements=target, async_op=True)
        y = (out * out) * 3 + out.view(-1).sum()  # saved for backward, viewed
        y.sum().backward()
        ref = whole.clone().requires_grad_()
        (ref * ref * 3 + ref.sum()).sum().backward()
        assert isinstance(x.grad, DTensor)
        assert ref.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), ref.grad)
        again = x.detach().redistribute(placements=target, async_op=True)
        for use in (
            copy.deepcopy,
            lambda t: t.to(torch.float64).to(torch.float32),
            lambda t: torch._foreach_mul([t], 1.0)[0],
            lambda t: torch.zeros_like(t).copy_(t),
            lambda t: t.clone().mul_(1),
        ):
            torch.testing.assert_close(use(again).full_tensor(), whole)
        assert torch.equal(again.to_local() + 0, out.detach().to_local() + 0)
        buffer = io.BytesIO()
        torch.save(x.detach().redistribute(placements=target, async_op=True), buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True).full_tensor(), whole)
