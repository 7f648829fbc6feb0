"""The loss on real ranks equals one device: plain shards with a group, and DTensors on meshes of one to three axes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Replicate, Shard, StridedShard, distribute_tensor
from hp_loss import (
    LossLayoutError,
    Reduction,
    TargetError,
    TargetRangeError,
    vocab_parallel_cross_entropy,
)
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import RankError, run_spmd, spmd
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

REDUCTIONS = ("none", "sum", "mean")
R = Replicate()


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of what must be a DTensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


def _placements(tensor: Tensor | None) -> tuple[object, ...]:
    """How what must be a DTensor lies on its mesh."""
    assert isinstance(tensor, TorchDTensor)
    return tuple(tensor.placements)


def _logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4


def _labels(classes: int, *shape: int) -> Tensor:
    labels = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(7))
    labels.view(-1)[::3] = -100
    return labels


def _expected(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The loss of one device, and the gradient of the sum of the losses weighted by 1, 2, 3, ..."""
    whole = logits.clone().requires_grad_()
    loss = F.cross_entropy(whole, target, **options)
    (loss * _seed(loss)).sum().backward()
    assert whole.grad is not None
    return loss.detach(), whole.grad


def _seed(loss: Tensor) -> Tensor:
    return torch.arange(1.0, loss.numel() + 1).view(loss.shape).to(loss.dtype)


def _check(
    logits: Tensor,
    target: Tensor,
    mesh: DeviceMesh,
    placements: list[Any],
    tolerance: float = 1e-6,
    **options: Any,
) -> DTensor:
    """A DTensor's loss and gradient equal those of one device; the gradient lies as the logits do."""
    class_dim = options.pop("class_dim", None)
    plain = _full(target) if isinstance(target, DTensor) else target
    weight = options.get("weight")
    plain_weight = _full(weight) if isinstance(weight, DTensor) else weight
    moved = logits if class_dim is None else logits.movedim(class_dim, 1)
    expected, gradient = _expected(moved, plain, **{**options, "weight": plain_weight})
    if class_dim is not None:
        gradient = gradient.movedim(1, class_dim)
    sharded = distribute_tensor(logits, mesh, placements).requires_grad_()
    loss = vocab_parallel_cross_entropy(sharded, target, class_dim=class_dim, **options)
    assert isinstance(loss, DTensor)
    assert (loss.shape, loss.dtype) == (expected.shape, expected.dtype)
    if options.get("reduction") == "none":
        seed = distribute_tensor(_seed(expected), mesh, loss.placements)
        (loss * seed).sum().backward()
    else:
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(_full(loss).detach(), expected, **close)
    assert sharded.grad is not None
    assert _placements(sharded.grad) == _placements(sharded)
    torch.testing.assert_close(_full(sharded.grad), gradient, **close)
    return loss


def test_plain_shards_give_the_loss_and_their_part_of_the_gradient() -> None:
    """With a group, each rank gives its columns: uneven and empty shards, all reductions, weights, smoothing."""

    def body() -> list[float]:
        group, losses = dist.group.WORLD, []
        for classes, reduction, weighted, smoothing in itertools.product(
            (8, 7, 5, 3), REDUCTIONS, (False, True), (0.0, 0.1)
        ):
            logits, target = _logits(6, classes), _labels(classes, 6)
            weight = (
                torch.rand(classes, generator=torch.Generator().manual_seed(1))
                if weighted
                else None
            )
            options: dict[str, Any] = {
                "weight": weight,
                "reduction": reduction,
                "label_smoothing": smoothing,
            }
            expected, gradient = _expected(logits, target, **options)
            columns = logits.split(-(-classes // 4), 1)
            start = -(-classes // 4) * dist.get_rank()
            mine = columns[dist.get_rank()] if dist.get_rank() < len(columns) else logits[:, :0]
            shard = mine.clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(
                shard, target, group=group, vocab_size=classes, **options
            )
            torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=1e-6)
            (loss * _seed(loss)).sum().backward()
            part = gradient[:, start : start + mine.shape[1]]
            torch.testing.assert_close(shard.grad, part, rtol=1e-6, atol=1e-6)
            losses.append(loss.sum().item())
        return losses

    results = run_spmd(body, world_size=4)
    assert all(result == results[0] for result in results)


MESHES = {
    "tp": ((4,), [[Shard(1)]]),
    "dp, tp": (
        (2, 2),
        [[Shard(0), Shard(1)], [R, Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)]],
    ),
    "dp, no tp": ((2, 2), [[Shard(0), Shard(0)], [R, R], [Shard(0), R]]),
    "one of one": ((1, 4), [[Shard(0), Shard(1)], [Shard(1), Shard(0)]]),
    "dp, cp, tp": ((2, 1, 2), [[Shard(0), Shard(0), Shard(1)]]),
}


@pytest.mark.parametrize("shape_and_layouts", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_logits_on_a_mesh_give_what_one_device_gives(
    shape_and_layouts: tuple[tuple[int, ...], list[list[Any]]], reduction: str
) -> None:
    """Any axis may cut classes or tokens, evenly or not: value, shape, dtype, gradient and its placements."""
    shape, layouts = shape_and_layouts

    def body() -> None:
        mesh = init_device_mesh("cpu", shape)
        for placements, classes, weighted, smoothing in itertools.product(
            layouts, (8, 5, 3), (False, True), (0.0, 0.1)
        ):
            weight = (
                torch.rand(classes, generator=torch.Generator().manual_seed(1))
                if weighted
                else None
            )
            options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
            _check(_logits(7, classes), _labels(classes, 7), mesh, placements, **options)

    run_spmd(body, world_size=4)


@spmd(world_size=4)
def test_tokens_and_classes_may_be_any_dimensions() -> None:
    """`(N, C, d)` with torch's class dimension, and `(batch, sequence, classes)` with the last; dp and cp axes."""
    mesh = init_device_mesh("cpu", (2, 2))
    for reduction in REDUCTIONS:
        for placements in ([Shard(0), Shard(1)], [Shard(2), Shard(1)], [Shard(1), Shard(0)]):
            _check(_logits(3, 5, 4), _labels(5, 3, 4), mesh, placements, reduction=reduction)
        for placements in ([Shard(0), Shard(2)], [Shard(1), Shard(2)]):
            _check(
                _logits(3, 4, 5),
                _labels(5, 3, 4),
                mesh,
                placements,
                reduction=reduction,
                class_dim=2,
            )


@spmd(world_size=8)
def test_three_axes_cut_batch_sequence_and_classes() -> None:
    """A mean over dp, cp and tp is the mean over all tokens, whatever was ignored where."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    placements = [Shard(0), Shard(1), Shard(2)]
    for reduction in REDUCTIONS:
        _check(
            _logits(3, 4, 5), _labels(5, 3, 4), mesh, placements, reduction=reduction, class_dim=-1
        )


@spmd(world_size=4)
def test_16_bit_logits_give_a_16_bit_loss() -> None:
    """The result has the logits' dtype; arithmetic is in 32 bits."""
    mesh = init_device_mesh("cpu", (2, 2))
    for dtype, tolerance in (
        (torch.bfloat16, 2e-2),
        (torch.float16, 4e-3),
        (torch.float64, 1e-12),
    ):
        for reduction in REDUCTIONS:
            logits = _logits(6, 8).to(dtype)
            _check(
                logits, _labels(8, 6), mesh, [Shard(0), Shard(1)], tolerance, reduction=reduction
            )


@spmd(world_size=4)
def test_soft_targets_lie_as_they_like() -> None:
    """Probabilities that are plain, replicated or cut like the logits give the same."""
    mesh = init_device_mesh("cpu", (2, 2))
    soft = _logits(6, 5, seed=3).softmax(1)
    placements = [Shard(0), Shard(1)]
    for target in (
        soft,
        distribute_tensor(soft, mesh, [R, R]),
        distribute_tensor(soft, mesh, placements),
    ):
        for reduction in REDUCTIONS:
            _check(
                _logits(6, 5), target, mesh, placements, reduction=reduction, label_smoothing=0.1
            )


@spmd(world_size=4)
def test_labels_lie_as_they_like() -> None:
    """Labels: plain and whole, plain and this rank's, DTensors with the logits' cut, another, or none."""
    mesh = init_device_mesh("cpu", (2, 2))
    logits, labels = _logits(6, 5), _labels(5, 6)
    for placements in ([R, R], [Shard(0), R], [R, Shard(0)]):
        _check(logits, distribute_tensor(labels, mesh, placements), mesh, [Shard(0), Shard(1)])
    expected, _ = _expected(logits, labels)
    sharded = distribute_tensor(logits, mesh, [Shard(0), Shard(1)])
    mine = labels.chunk(2)[mesh.get_local_rank(0)]
    torch.testing.assert_close(_full(vocab_parallel_cross_entropy(sharded, mine)), expected)


@spmd(world_size=4)
def test_this_ranks_labels_are_understood_in_three_dimensions() -> None:
    """Plain labels of this rank's batch, with the classes last."""
    mesh = init_device_mesh("cpu", (2, 2))
    logits, labels = _logits(2, 3, 5), _labels(5, 2, 3)
    expected = F.cross_entropy(logits.movedim(-1, 1), labels)
    for placements in ([Shard(0), Shard(2)], [Shard(1), Shard(2)]):
        mine = labels.chunk(2, placements[0].dim)
        sharded = distribute_tensor(logits, mesh, placements)
        if mesh.get_local_rank(0) < len(mine):
            got = vocab_parallel_cross_entropy(sharded, mine[mesh.get_local_rank(0)])
        torch.testing.assert_close(_full(got), expected)


@spmd(world_size=4)
def test_class_weights_lie_as_they_like() -> None:
    """Class weights: plain, replicated, cut like the classes, or cut over the other axis."""
    mesh = init_device_mesh("cpu", (2, 2))
    weight = torch.rand(5, generator=torch.Generator().manual_seed(1))
    for placements in ([R, R], [R, Shard(0)], [Shard(0), R]):
        for smoothing in (0.0, 0.1):
            _check(
                _logits(6, 5),
                _labels(5, 6),
                mesh,
                [Shard(0), Shard(1)],
                weight=distribute_tensor(weight, mesh, placements),
                label_smoothing=smoothing,
            )


@spmd(world_size=4)
def test_a_strided_cut_of_the_classes_is_understood() -> None:
    """Classes that a fused head holds in two pieces per rank are found where they are."""
    mesh = init_device_mesh("cpu", (4,))
    for smoothing in (0.0, 0.1):
        _check(
            _logits(6, 16),
            _labels(16, 6),
            mesh,
            [StridedShard(1, split_factor=2)],
            label_smoothing=smoothing,
        )


@spmd(world_size=4)
def test_torchs_own_dtensors_are_taken() -> None:
    """Logits and labels of torch's class give the same loss, and a gradient of the right layout."""
    mesh = init_device_mesh("cpu", (2, 2))
    logits, labels = _logits(6, 5), _labels(5, 6)
    expected, gradient = _expected(logits, labels)
    sharded = torch_distribute_tensor(logits, mesh, [Shard(0), Shard(1)]).requires_grad_()
    assert type(sharded) is TorchDTensor
    loss = vocab_parallel_cross_entropy(
        sharded, torch_distribute_tensor(labels, mesh, [Shard(0), R])
    )
    loss.backward()
    torch.testing.assert_close(_full(loss).detach(), expected)
    torch.testing.assert_close(_full(sharded.grad), gradient)


@spmd(world_size=4)
def test_a_sum_is_addends_over_the_batch_and_a_mean_is_whole() -> None:
    """A sum needs no communication over the batch; what it is worth is read as a plain number all the same."""
    mesh = init_device_mesh("cpu", (2, 2))
    logits, labels = _logits(6, 5), _labels(5, 6)
    sharded = distribute_tensor(logits, mesh, [Shard(0), Shard(1)])
    total = vocab_parallel_cross_entropy(sharded, labels, reduction="sum")
    mean = vocab_parallel_cross_entropy(sharded, labels)
    rows = vocab_parallel_cross_entropy(sharded, labels, reduction="none")
    assert _placements(total) == (Partial("sum"), R)
    assert _placements(mean) == (R, R)
    assert _placements(rows) == (Shard(0), R)
    assert total.item() == pytest.approx(
        float(F.cross_entropy(logits, labels, reduction="sum")), rel=1e-6
    )
    assert mean.item() == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-6)


@spmd(world_size=4)
def test_everything_ignored_is_nan_with_a_zero_gradient() -> None:
    """As on one device: the mean of no tokens is NaN; and one valid token is the mean."""
    mesh = init_device_mesh("cpu", (2, 2))
    nothing = torch.full((6,), -100)
    loss = _check(_logits(6, 5), nothing, mesh, [Shard(0), Shard(1)], reduction="mean")
    assert _full(loss).isnan()
    one = nothing.clone()
    one[4] = 2
    _check(_logits(6, 5), one, mesh, [Shard(0), Shard(1)], reduction="mean")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_label_that_is_no_class_raises_on_all_ranks_that_have_it(reduction: Reduction) -> None:
    """Each rank of the vocabulary axis raises, with one text, before it communicates."""

    def body() -> str:
        mesh = init_device_mesh("cpu", (4,))
        sharded = distribute_tensor(_logits(3, 5), mesh, [Shard(1)])
        with pytest.raises(TargetRangeError) as caught:
            vocab_parallel_cross_entropy(sharded, torch.tensor([0, 5, 1]), reduction=reduction)
        return str(caught.value)

    texts = run_spmd(body, world_size=4)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        "1 of the targets are out of bounds: a class index is at least 0 and less than 5"
    )


def test_a_mean_raises_on_all_ranks_of_the_mesh() -> None:
    """The ranks of another batch shard hear of a bad label too, instead of waiting for a rank that is gone."""

    def body() -> str:
        mesh = init_device_mesh("cpu", (2, 2))
        sharded = distribute_tensor(_logits(4, 5), mesh, [Shard(0), Shard(1)])
        labels = distribute_tensor(torch.tensor([0, 1, 2, 77]), mesh, [Shard(0), R])
        with pytest.raises(TargetRangeError) as caught:
            vocab_parallel_cross_entropy(sharded, labels)
        return str(caught.value)

    assert len(set(run_spmd(body, world_size=4))) == 1


@spmd(world_size=4)
def test_partial_logits_are_refused_with_what_to_do() -> None:
    """A softmax of addends is no number; the error names the redistribution that helps."""
    mesh = init_device_mesh("cpu", (2, 2))
    sharded = distribute_tensor(_logits(4, 6), mesh, [Partial(), Shard(1)])
    with pytest.raises(LossLayoutError, match="are addends on at least one mesh axis") as caught:
        vocab_parallel_cross_entropy(sharded, torch.zeros(4, dtype=torch.int64))
    assert "logits.redistribute(placements=[Replicate(), Shard(dim=1)])" in str(caught.value)


@spmd(world_size=4)
def test_what_does_not_belong_together_is_refused() -> None:
    """Meshes that differ, a group for a DTensor, DTensor labels for plain logits, labels of no known shape."""
    mesh, other = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    sharded = distribute_tensor(_logits(4, 6), mesh, [Shard(0), Shard(1)])
    labels = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(LossLayoutError, match=r"the targets are on .* and the logits on"):
        vocab_parallel_cross_entropy(sharded, distribute_tensor(labels, other, [R]))
    with pytest.raises(LossLayoutError, match=r"the class weights are on .* and the logits on"):
        vocab_parallel_cross_entropy(
            sharded, labels, weight=distribute_tensor(torch.ones(6), other, [R])
        )
    with pytest.raises(LossLayoutError, match="a DTensor knows its mesh"):
        vocab_parallel_cross_entropy(sharded, labels, group=dist.group.WORLD)
    with pytest.raises(
        LossLayoutError, match=r"the targets are a DTensor .* and the logits a plain tensor"
    ):
        vocab_parallel_cross_entropy(_logits(4, 6), distribute_tensor(labels, other, [R]))
    with pytest.raises(TargetError, match=r"targets of shape \(3,\) don't fit"):
        vocab_parallel_cross_entropy(sharded, labels[:3])
    with pytest.raises(
        LossLayoutError,
        match=r"class weights have the shape \(5,\): give one number per class, \(6,\)",
    ):
        vocab_parallel_cross_entropy(sharded, labels, weight=torch.ones(5))


@spmd(world_size=4)
def test_a_shard_of_the_wrong_size_is_refused() -> None:
    """With vocab_size, a rank's shard must be what the shard rule gives it."""
    size = 2 if dist.get_rank() == 0 else 3
    with pytest.raises(
        LossLayoutError, match="a vocabulary of 16 classes over 4 ranks gives rank"
    ) as caught:
        vocab_parallel_cross_entropy(
            torch.zeros(1, size), torch.tensor([0]), group=dist.group.WORLD, vocab_size=16
        )
    assert f"its logits have {size}" in str(caught.value)


def test_a_failing_rank_is_told_by_the_runner() -> None:
    """The guard of these tests: a body that is wrong on one rank fails the test."""

    def body() -> None:
        got = vocab_parallel_cross_entropy(
            torch.zeros(2, 2), torch.tensor([0, 1]), group=dist.group.WORLD
        )
        torch.testing.assert_close(got, torch.tensor(float(dist.get_rank())))

    with pytest.raises((AssertionError, RankError)):
        run_spmd(body, world_size=2)
