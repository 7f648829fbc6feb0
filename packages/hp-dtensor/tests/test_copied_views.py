"""Slices along a cut dim are copies, and behave like the views that they stand for."""

import copy
import io
import pickle

import pytest
import torch
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn

WHOLE = torch.arange(24.0).reshape(6, 4)


@spmd(world_size=2)
def test_reads_and_writes_come_after_those_of_the_base() -> None:
    """A slice sees what was written to its base, to a slice that overlaps, and to what it was itself taken from."""

    def later(x: torch.Tensor) -> list[torch.Tensor]:
        y, other = x[1:5], x[2:]
        x.mul_(2)
        read = y + 0
        y.add_(1)
        inner = y[1:3]
        x.add_(10)
        inner.mul_(3)
        return [x, read, y, other, inner, inner.sum()]

    def by_lists(x: torch.Tensor) -> list[torch.Tensor]:
        y = x[1:5]
        torch._foreach_mul_([x], 2.0)
        torch._foreach_add_([y], 1.0)
        return [x, y]

    mesh = init_device_mesh("cpu", (2,))
    for program in (later, by_lists):
        expected = program(WHOLE.clone())
        for placement in (Shard(0), Shard(1), Replicate()):
            got = program(distribute_tensor(WHOLE.clone(), mesh, [placement]))
            for number, (a, b) in enumerate(zip(got, expected, strict=True)):
                assert torch.equal(a.full_tensor(), b), (number, placement)  # type: ignore[attr-defined]  # distributed


@spmd(world_size=2)
def test_what_is_read_without_an_operator_is_up_to_date() -> None:
    """The whole tensor, the piece, another layout, a copy and a pickle of a slice hold what a view would."""
    mesh = init_device_mesh("cpu", (2,))
    for read in (
        lambda t: t.full_tensor(),
        lambda t: t.redistribute(placements=[Replicate()]).to_local(),
        lambda t: copy.deepcopy(t).full_tensor(),
        lambda t: pickle.loads(pickle.dumps(t)).full_tensor(),  # our own bytes
        lambda t: torch.tensor(t.tolist()),
    ):
        x = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])
        y = x[1:5]
        x.add_(1)
        assert torch.equal(read(y), WHOLE[1:5] + 1)


@spmd(world_size=2)
def test_copies_of_a_slice_are_their_own() -> None:
    """A write to a deep copy, to what was pickled or saved, or to a clone of a slice leaves the base as it was."""

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        return torch.load(file, weights_only=False)  # type: ignore[no-any-return]  # what was saved

    mesh = init_device_mesh("cpu", (2,))
    for make in (
        copy.deepcopy,
        lambda t: copy.deepcopy(nn.Parameter(t)).data,
        lambda t: pickle.loads(pickle.dumps(t)),  # our own bytes
        saved,
        torch.clone,
    ):
        x = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])
        own = make(x[1:5])
        own.zero_()
        assert torch.equal(x.full_tensor(), WHOLE)
        assert not own.full_tensor().any()


@spmd(world_size=2)
def test_lists_of_slices_are_written_through() -> None:
    """Foreach and fused operators, and what optimizers and clipping do by them, reach the base of each slice."""

    def split(x: torch.Tensor) -> None:
        torch._foreach_zero_(list(x.split(4)))

    def copied(x: torch.Tensor) -> None:
        parts = list(x.split([1, 5]))
        torch._foreach_copy_(parts, [torch.zeros_like(part) for part in parts])

    def lerp(x: torch.Tensor) -> None:
        torch._foreach_lerp_(list(x.unbind(0))[1:3], [row * 2 for row in x.unbind(0)][3:5], 0.5)

    def clipped(x: torch.Tensor) -> None:
        weight = nn.Parameter(torch.zeros_like(x[1:5]))
        weight.grad = x[1:5]
        nn.utils.clip_grad_norm_([weight], 0.5, foreach=True)

    def step(x: torch.Tensor) -> None:
        weight = nn.Parameter(x[1:5])
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.5, foreach=True).step()

    mesh = init_device_mesh("cpu", (2,))
    for program in (split, copied, lerp, clipped, step):
        for _ in range(2):
            expected, x = WHOLE.clone(), distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])
            program(expected)
            program(x)
            torch.testing.assert_close(x.full_tensor(), expected)


@spmd(world_size=2)
def test_a_write_that_a_backward_would_miss_is_an_error() -> None:
    """As on one device: what was saved for backward must not be written to, by one operator or by one over lists."""
    mesh = init_device_mesh("cpu", (2,))
    for write in (lambda t: t.mul_(0), lambda t: torch._foreach_mul_([t], 0.0)):
        for _ in range(2):
            x = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)]).requires_grad_()
            out = x[1:5].square().sum() + x.square().sum()
            with torch.no_grad():
                write(x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward()


@spmd(world_size=2)
def test_lists_of_extrema_and_products_are_combined_first() -> None:
    """Only sums and means are linear: foreach operators on other addends equal those on one tensor."""
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    pieces = torch.tensor([[1.0, 5.0], [4.0, 2.0]]), torch.tensor([[7.0, 1.0], [3.0, 9.0]])
    for kind in ("sum", "avg", "max", "min", "product"):
        p, q = (DTensor.from_local(a[rank].clone(), mesh, [Partial(kind)]) for a in pieces)
        x, y = p.full_tensor(), q.full_tensor()
        for many, one in (
            (torch._foreach_neg([p]), -x),
            (torch._foreach_mul([p], -2.0), -2 * x),
            (torch._foreach_mul([p], [-2.0]), -2 * x),
            (torch._foreach_mul([p], torch.tensor(-2.0)), -2 * x),
            (torch._foreach_div([p], -2.0), x / -2),
            (torch._foreach_add([p], [q]), x + y),
            (torch._foreach_sub([p], [q]), x - y),
            (torch._foreach_mul([p], [q]), x * y),
        ):
            assert torch.equal(many[0].full_tensor(), one), kind
