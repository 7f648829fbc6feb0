"""What this package uses of torch that torch calls private works as assumed; also run on the oldest torch."""

from __future__ import annotations

import pytest
import torch
from hp_loss._torch import assert_async, fsdp_flags
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

pytestmark = pytest.mark.seam


def test_an_assertion_on_the_device_fails_with_its_text() -> None:
    """True passes; false raises with the message, on a CPU at once."""
    assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        assert_async(torch.tensor(False), "not fine")


def test_an_assertion_on_the_device_stays_in_a_graph() -> None:
    """A compiler neither breaks the graph at it nor drops it for having no result."""

    def program(x: torch.Tensor) -> torch.Tensor:
        assert_async((x > 0).all(), "not positive")
        return x * 2

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="not positive"):
        compiled(-torch.ones(2))


@spmd(world_size=2)
def test_what_fsdp2_was_told_can_be_read_and_put_back() -> None:
    """Each public setter changes what is read, and putting it back undoes each."""
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module[0], mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    assert isinstance(module, FSDPModule)
    before = fsdp_flags(module)
    assert before.wants_sync
    for change in (
        lambda: module.set_reshard_after_forward(False),
        lambda: module.set_reshard_after_backward(False),
        lambda: module.set_requires_gradient_sync(False),
        lambda: module.set_requires_all_reduce(False),
        lambda: module.set_is_last_backward(False),
    ):
        change()  # type: ignore[no-untyped-call]  # torch leaves the setters untyped
        assert fsdp_flags(module) != before
        before.put_back()
        assert fsdp_flags(module) == before
