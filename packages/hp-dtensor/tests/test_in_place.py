"""Writing into distributed tensors: the layout stays, and what a write needs from elsewhere is fetched and sent back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hp_dtensor import (
    DTensor,
    ImplicitCommunicationError,
    InPlaceError,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    strict,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

R = Replicate()
Write = Callable[[torch.Tensor], object]
ROWS = torch.tensor([6, 0, 3])
VALUES = torch.arange(12).view(3, 4)

WRITES: dict[str, Write] = {
    "rows": lambda t: t.__setitem__(ROWS, t[:3].clone()),
    "columns": lambda t: t.__setitem__((slice(None), torch.tensor([3, 1])), 7.0),
    "entries": lambda t: t.__setitem__((ROWS, ROWS % 4), 5.0),
    "a mask": lambda t: t.__setitem__(t > 0, 0.0),
    "rows of a mask": lambda t: t.__setitem__(t[:, 0] > 0, -1.0),
    "a slice": lambda t: t[1:5].mul_(2),
    "a slice of a slice": lambda t: t[1:6][::2, 1:].t()[0].add_(3),
    "the diagonal": lambda t: t.diagonal().zero_(),
    "accumulate": lambda t: t.index_put_((ROWS % 2,), t[:3].clone(), accumulate=True),
    "index_add": lambda t: t.index_add_(0, ROWS, t[:3].clone(), alpha=2),
    "index_copy": lambda t: t.index_copy_(0, ROWS, t[:3].clone()),
    "index_fill": lambda t: t.index_fill_(0, ROWS, 4.0),
    "index_fill of columns": lambda t: t.index_fill_(1, torch.tensor([0, 2]), 4.0),
    "scatter": lambda t: t.scatter_(0, VALUES % 7, 2.0),
    "scatter_add": lambda t: t.scatter_add_(0, VALUES % 7, t[:3].clone()),
    "scatter_reduce": lambda t: t.scatter_reduce_(1, VALUES % 4, t[:3].clone(), "amax"),
    "put": lambda t: t.put_(ROWS, t[:3, 0].clone()),
    "masked_fill": lambda t: t.masked_fill_(t < 0, 0.5),
    "masked_scatter": lambda t: t.masked_scatter_(t > 0, t.flip(0).clone()),
    "cumsum": lambda t: t.cumsum_(0),
    "cumprod": lambda t: t.cumprod_(1),
    "renorm": lambda t: t.renorm_(2, 0, 1.0),
    "addmm": lambda t: t.addmm_(t.clone(), t.T @ t),
    "broadcast": lambda t: t.sub_(t.mean(0, keepdim=True)),
    "the lower triangle": lambda t: t.tril_(),
    "a flip": lambda t: t.copy_(t.flip(0)),
    "ones on the diagonal": nn.init.eye_,
    "zeros in a slice": lambda t: nn.init.zeros_(t[:2]),
}


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@spmd(world_size=4)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2), [R, Shard(0)]),
    ],
)
def test_a_write_gives_the_whole_tensors_value_and_keeps_the_layout(
    shape: tuple[int, ...], layout: list[Placement]
) -> None:
    """Indices, masks, slices, scans and initialisers, with 7 rows; and the gradient of what was there before."""
    mesh = init_device_mesh("cpu", shape)
    start = torch.linspace(-2, 3, 28).view(7, 4).roll(5)
    for name, write in WRITES.items():
        d = distribute_tensor(start, mesh, layout, src_data_rank=None)
        alias, want = d.view(7, 4), start.clone()
        write(d)
        write(want)
        torch.testing.assert_close(_whole(d), want, msg=lambda m, case=name: f"{case}: {m}")
        torch.testing.assert_close(_whole(alias), want, msg=lambda m, case=name: f"{case}: {m}")
        assert d.placements == tuple(layout), name
    for name in ("rows", "entries", "index_fill", "scatter", "renorm", "cumsum"):
        mine = distribute_tensor(start, mesh, layout, src_data_rank=None).requires_grad_()
        alone = start.clone().requires_grad_()
        for leaf in (mine, alone):
            written = leaf * 2
            WRITES[name](written)
            written.square().sum().backward()
        torch.testing.assert_close(
            _whole(mine.grad), alone.grad, msg=lambda m, case=name: f"{case}: {m}"
        )


class Operators(TorchDispatchMode):
    """The operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@spmd(world_size=2)
def test_a_write_to_addends_is_right_or_refused() -> None:
    """A sum that is still to be taken keeps its value under what is linear; anything else says what to do."""
    mesh = init_device_mesh("cpu", (2,))
    start = torch.linspace(-2, 3, 28).view(7, 4)
    refused = set()
    for name, write in WRITES.items():
        d, want = distribute_tensor(start, mesh, [Partial()]), start.clone()
        try:
            write(d)
        except InPlaceError:
            refused.add(name)
            continue
        write(want)
        torch.testing.assert_close(_whole(d), want, msg=lambda m, case=name: f"{case}: {m}")
    assert {"masked_fill", "renorm"} <= refused
    with Operators() as operators:
        WRITES["a mask"](start.clone())
    # Before 2.15 torch writes through a mask entry by entry, and entries know where they belong.
    assert ("a mask" in refused) == (torch.ops.aten.masked_fill_ in operators.seen)
    assert not {"a slice", "the diagonal", "the lower triangle", "cumsum"} & refused


@spmd(world_size=2)
def test_a_write_that_communicates_is_seen_by_strict() -> None:
    """Rows of a tensor cut along its rows are fetched, which strict forbids; columns are not."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    with strict():
        d.index_fill_(1, torch.tensor([0]), 3.0)
        with pytest.raises(ImplicitCommunicationError, match="index_fill_"):
            d.index_fill_(0, torch.tensor([0]), 3.0)
