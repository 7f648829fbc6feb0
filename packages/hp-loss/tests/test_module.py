"""The module, and the count of tokens that makes a mean out of many calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_loss import CrossEntropyLoss, LossLayoutError, LossOptionError, count_valid_tokens
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

R = Replicate()


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of what must be a DTensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


def _case(tokens: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 8, (tokens,), generator=generator)
    labels[::4] = -100
    return torch.randn(tokens, 8, generator=generator), labels


@spmd(world_size=4)
def test_the_module_needs_no_context() -> None:
    """On distributed and plain logits, with its options, it gives what torch's module gives."""
    mesh = init_device_mesh("cpu", (2, 2))
    logits, labels = _case()
    weight = torch.rand(8, generator=torch.Generator().manual_seed(1))
    ours = CrossEntropyLoss(weight, ignore_index=3, label_smoothing=0.1, reduction="sum")
    theirs = torch.nn.CrossEntropyLoss(
        weight, ignore_index=3, label_smoothing=0.1, reduction="sum"
    )
    labels = labels.clamp(min=3)
    sharded = distribute_tensor(logits, mesh, [Shard(0), Shard(1)])
    torch.testing.assert_close(ours(sharded, labels).full_tensor(), theirs(logits, labels))
    plain = CrossEntropyLoss(group=dist.group.WORLD, z_loss=0.0)
    shard = logits.chunk(4, 1)[dist.get_rank()]
    torch.testing.assert_close(plain(shard, labels), F.cross_entropy(logits, labels))


def test_the_module_moves_with_its_weight_and_says_what_it_is() -> None:
    """Class weights are a buffer; the repr has the options."""
    loss = CrossEntropyLoss(torch.ones(4), label_smoothing=0.1)
    assert "weight" in loss.state_dict()
    assert loss.double().weight is not None
    assert loss.weight is not None
    assert loss.weight.dtype == torch.float64
    assert repr(loss) == (
        "CrossEntropyLoss(ignore_index=-100, reduction='mean', label_smoothing=0.1, z_loss=0.0)"
    )
    assert CrossEntropyLoss().weight is None


@spmd(world_size=4)
def test_micro_batches_of_unequal_count_add_up_to_one_mean() -> None:
    """Losses and gradients of the micro-batches, each divided by the step's count, are those of all tokens at once."""
    mesh = init_device_mesh("cpu", (2, 2))
    batches = [_case(6, seed) for seed in range(3)]
    batches[1][1][:] = -100
    whole = torch.cat([logits for logits, _ in batches]).requires_grad_()
    expected = F.cross_entropy(whole, torch.cat([labels for _, labels in batches]))
    expected.backward()
    assert whole.grad is not None
    distributed = [distribute_tensor(labels, mesh, [Shard(0), R]) for _, labels in batches]
    tokens = count_valid_tokens(distributed)
    loss_fn, total = CrossEntropyLoss(), torch.zeros(())
    for (logits, _), labels, grad in zip(batches, distributed, whole.grad.split(6), strict=True):
        sharded = distribute_tensor(logits, mesh, [Shard(0), Shard(1)]).requires_grad_()
        loss = loss_fn(sharded, labels, global_valid_tokens=tokens)
        assert loss.placements == (Partial("sum"), R)
        loss.backward()
        assert sharded.grad is not None
        torch.testing.assert_close(_full(sharded.grad), grad)
        total += loss.detach().full_tensor()
    torch.testing.assert_close(total, expected.detach())


def test_a_given_count_may_be_a_number_or_a_tensor() -> None:
    """Both divide the sum."""
    logits, labels = _case()
    expected = F.cross_entropy(logits, labels, reduction="sum") / 20
    for count in (20, 20.0, torch.tensor(20)):
        torch.testing.assert_close(
            CrossEntropyLoss()(logits, labels, global_valid_tokens=count), expected
        )


@spmd(world_size=2)
def test_a_given_count_may_be_distributed() -> None:
    """A count that is a DTensor is read as the number it is."""
    mesh = init_device_mesh("cpu", (2,))
    logits, labels = _case()
    count = distribute_tensor(torch.tensor(20), mesh, [R])
    got = CrossEntropyLoss()(
        distribute_tensor(logits, mesh, [Shard(1)]), labels, global_valid_tokens=count
    )
    torch.testing.assert_close(_full(got), F.cross_entropy(logits, labels, reduction="sum") / 20)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_only_a_mean_divides(reduction: str) -> None:
    """A count for a sum is a mistake."""
    logits, labels = _case()
    with pytest.raises(LossOptionError, match="only a mean divides"):
        CrossEntropyLoss(reduction=reduction)(logits, labels, global_valid_tokens=3)  # type: ignore[arg-type]


@spmd(world_size=4)
def test_tokens_are_counted_over_the_ranks_that_have_others() -> None:
    """Plain labels over a mesh or a group, distributed ones over the axes that cut them; each token once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    labels = torch.tensor([1, -100, 2, 3, -100, -100, 7, 7])
    mine = labels.chunk(2)[mesh.get_local_rank("dp")]
    assert count_valid_tokens(mine, mesh=mesh["dp"]) == 5
    assert count_valid_tokens(mine, group=mesh.get_group("dp")) == 5
    assert count_valid_tokens([mine, mine], mesh=mesh["dp"]) == 10
    assert count_valid_tokens(labels.chunk(4)[dist.get_rank()], mesh=mesh) == 5
    for placements in ([Shard(0), R], [R, R], [R, Shard(0)], [Shard(0), Shard(0)]):
        count = count_valid_tokens(distribute_tensor(labels, mesh, placements))
        assert not isinstance(count, DTensor)
        assert count == 5
    assert count_valid_tokens(labels, ignore_index=7) == 6
    assert count_valid_tokens(labels).dtype == torch.int64


@spmd(world_size=2)
def test_labels_that_can_not_be_counted_are_refused() -> None:
    """Nothing, two kinds, two layouts, addends, or two ways to say where."""
    mesh = init_device_mesh("cpu", (2,))
    labels = torch.tensor([1, 2])
    sharded = distribute_tensor(labels, mesh, [Shard(0)])
    with pytest.raises(LossLayoutError, match="got no labels"):
        count_valid_tokens([])
    with pytest.raises(LossLayoutError, match="got DTensors and plain tensors"):
        count_valid_tokens([labels, sharded])
    with pytest.raises(LossLayoutError, match="lie differently"):
        count_valid_tokens([sharded, distribute_tensor(labels, mesh, [R])])
    with pytest.raises(LossLayoutError, match=r"are addends: call labels\.redistribute"):
        count_valid_tokens(DTensor.from_local(labels, mesh, [Partial()]))
    with pytest.raises(LossLayoutError, match="got mesh= and group="):
        count_valid_tokens(labels, mesh=mesh, group=dist.group.WORLD)
    with pytest.raises(LossLayoutError, match="a DTensor knows its mesh"):
        count_valid_tokens(sharded, mesh=mesh)
