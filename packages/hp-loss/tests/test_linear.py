"""`linear_cross_entropy` equals the loss of the logits that it never makes: value and all gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_loss import (
    LossLayoutError,
    LossOptionError,
    TargetError,
    TargetRangeError,
    linear_cross_entropy,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._python_dispatch import TorchDispatchMode

R = Replicate()
REDUCTIONS = ("none", "sum", "mean")


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of what must be a DTensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


def _placements(tensor: Tensor | None) -> tuple[object, ...]:
    """How what must be a DTensor lies on its mesh."""
    assert isinstance(tensor, TorchDTensor)
    return tuple(tensor.placements)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operator makes, and the collectives; independent of what is tested."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.elements = 0
        self.collectives: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.name().startswith(("_c10d_functional::", "c10d::")) and "wait" not in func.name():
            self.collectives.append(func.name())
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def _case(classes: int, *tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, tokens, generator=generator)
    labels.view(-1)[::3] = -100
    return (
        torch.randn(*tokens, 4, generator=generator),
        torch.randn(classes, 4, generator=generator),
        torch.randn(classes, generator=generator),
        labels,
    )


def _seed(loss: Tensor) -> Tensor:
    return torch.arange(1.0, loss.numel() + 1).view(loss.shape).to(loss.dtype)


def _expected(
    hidden: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, **options: Any
) -> tuple[Tensor, list[Tensor | None]]:
    """One device's loss, and the gradients of the sum of the losses weighted by 1, 2, 3, ..."""
    leaves = [
        None if leaf is None else leaf.clone().requires_grad_() for leaf in (hidden, head, bias)
    ]
    logits = F.linear(leaves[0], leaves[1], leaves[2])  # type: ignore[arg-type]
    loss = F.cross_entropy(logits.movedim(-1, min(1, logits.dim() - 1)), target, **options)
    (loss * _seed(loss)).sum().backward()
    return loss.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 4, 100])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"class_weight": True, "label_smoothing": 0.1}]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_one_shard_in_chunks_gives_the_whole_loss(
    chunk_size: int | None, reduction: str, options: dict[str, Any], with_bias: bool
) -> None:
    """Chunks that divide the tokens, don't, or are all of them: loss and the three gradients."""
    hidden, weight, bias, labels = _case(7, 5)
    options = dict(options, reduction=reduction)
    class_weight = torch.rand(7) if options.pop("class_weight", None) else None
    expected, grads = _expected(
        hidden, weight, bias if with_bias else None, labels, weight=class_weight, **options
    )
    ours = [leaf.clone().requires_grad_() for leaf in (hidden, weight, bias)]
    loss = linear_cross_entropy(
        ours[0],
        ours[1],
        labels,
        ours[2] if with_bias else None,
        class_weight=class_weight,
        chunk_size=chunk_size,
        **options,
    )
    torch.testing.assert_close(loss.detach(), expected)
    (loss * _seed(loss)).sum().backward()
    for our, grad in zip(ours, grads, strict=True):
        torch.testing.assert_close(our.grad, grad)


@spmd(world_size=4)
def test_plain_shards_of_a_head() -> None:
    """Even, uneven and empty shards; the gradient of the hidden states is whole on every rank."""
    group, rank = dist.group.WORLD, dist.get_rank()
    for classes, reduction in itertools.product((8, 7, 3), REDUCTIONS):
        hidden, weight, bias, labels = _case(classes, 5)
        expected, grads = _expected(
            hidden, weight, bias, labels, reduction=reduction, label_smoothing=0.1
        )
        step = -(-classes // 4)
        rows = slice(min(rank * step, classes), min(rank * step + step, classes))
        ours = [leaf.clone().requires_grad_() for leaf in (hidden, weight[rows], bias[rows])]
        loss = linear_cross_entropy(
            ours[0],
            ours[1],
            labels,
            ours[2],
            reduction=reduction,  # type: ignore[arg-type]
            label_smoothing=0.1,
            group=group,
            vocab_size=classes,
            chunk_size=2,
        )
        torch.testing.assert_close(loss.detach(), expected)
        (loss * _seed(loss)).sum().backward()
        assert grads[1] is not None
        assert grads[2] is not None
        for our, grad in zip(ours, (grads[0], grads[1][rows], grads[2][rows]), strict=True):
            torch.testing.assert_close(our.grad, grad)


LAYOUTS: list[tuple[list[Any], list[Any], list[Any]]] = [
    ([Shard(0), R], [R, Shard(0)], [R, Shard(0)]),
    ([R, R], [R, Shard(0)], [R, R]),
    ([Shard(0), Shard(1)], [R, Shard(0)], [R, Shard(0)]),  # sequence parallel
    ([Shard(1), R], [R, Shard(0)], [R, Shard(0)]),
    ([Shard(0), R], [Shard(0), Shard(0)], [Shard(0), Shard(0)]),  # the head cut over both axes
    ([Shard(0), Shard(0)], [R, R], [R, R]),
]


@spmd(world_size=4)
def test_distributed_tensors_in_any_layout() -> None:
    """Tokens and head cut over two axes: the loss, and the gradients with the placements of what they are of."""
    mesh = init_device_mesh("cpu", (2, 2))
    for layouts, classes, reduction in itertools.product(LAYOUTS, (8, 5), REDUCTIONS):
        hidden, weight, bias, labels = _case(classes, 4, 6)
        expected, grads = _expected(hidden, weight, bias, labels, reduction=reduction)
        ours = [
            distribute_tensor(leaf, mesh, placements).requires_grad_()
            for leaf, placements in zip((hidden, weight, bias), layouts, strict=True)
        ]
        loss = linear_cross_entropy(
            ours[0],
            ours[1],
            labels,
            ours[2],
            reduction=reduction,
            chunk_size=5,
        )
        assert isinstance(loss, DTensor)
        torch.testing.assert_close(_full(loss).detach(), expected)
        if reduction == "none":
            loss = (loss * distribute_tensor(_seed(expected), mesh, loss.placements)).sum()
        loss.backward()
        for our, grad in zip(ours, grads, strict=True):
            assert our.grad is not None
            assert _placements(our.grad) == _placements(our)
            torch.testing.assert_close(_full(our.grad), grad)


@spmd(world_size=2)
def test_the_logits_never_exist() -> None:
    """Forward and backward make no tensor as large as this rank's logits, and exchange once and reduce once."""
    hidden, weight, _, labels = _case(64, 48)
    shard = weight.chunk(2)[dist.get_rank()].clone().requires_grad_()
    with _Largest() as seen:
        linear_cross_entropy(
            hidden.requires_grad_(), shard, labels, group=dist.group.WORLD, chunk_size=6
        ).backward()
    assert seen.elements < 48 * 32 / 2
    assert len(seen.collectives) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_heads_add_their_chunks_in_32_bits(dtype: torch.dtype) -> None:
    """The head's gradient doesn't depend on how many chunks it was added up from."""
    hidden, weight, _, labels = _case(8, 256)
    grads = []
    for chunk_size in (1, 256):
        head = weight.to(dtype).requires_grad_()
        linear_cross_entropy(
            hidden.to(dtype), head, labels, chunk_size=chunk_size, reduction="sum"
        ).backward()
        assert head.grad is not None
        assert head.grad.dtype == dtype
        grads.append(head.grad.float())
    wide = weight.to(dtype).float().requires_grad_()
    F.cross_entropy(hidden.to(dtype).float() @ wide.t(), labels, reduction="sum").backward()
    for grad in grads:
        torch.testing.assert_close(grad, wide.grad, rtol=2e-2, atol=5e-2)


def test_under_autocast_the_head_is_that_of_one_device() -> None:
    """Operands are cast as autocast casts them, in the backward as well; gradients have the parameters' dtype."""
    hidden, weight, bias, labels = _case(8, 6)
    ours = [leaf.clone().requires_grad_() for leaf in (hidden, weight, bias)]
    theirs = [leaf.clone().requires_grad_() for leaf in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_cross_entropy(ours[0], ours[1], labels, ours[2], chunk_size=4)
        expected = F.cross_entropy(F.linear(*theirs).float(), labels)
    got.backward()
    expected.backward()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2, check_dtype=False)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=3e-2, atol=1e-2)


def test_frozen_parts_get_no_gradient() -> None:
    """What doesn't require grad gets none, and the rest gets the right one."""
    hidden, weight, bias, labels = _case(8, 6)
    _, grads = _expected(hidden, weight, bias, labels)
    states = hidden.clone().requires_grad_()
    linear_cross_entropy(states, weight, labels, bias).backward()
    torch.testing.assert_close(states.grad, grads[0])
    head = weight.clone().requires_grad_()
    linear_cross_entropy(hidden, head, labels, bias).backward()
    torch.testing.assert_close(head.grad, grads[1])


def test_probabilities_as_targets() -> None:
    """Soft targets of the logits' shape."""
    hidden, weight, bias, _ = _case(8, 6)
    soft = torch.rand(6, 8, generator=torch.Generator().manual_seed(1)).softmax(1)
    expected, grads = _expected(hidden, weight, bias, soft)
    head = weight.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, head, soft, bias, chunk_size=4)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(head.grad, grads[1])


def test_z_loss_is_that_of_the_logits() -> None:
    """The z-loss' value and gradient."""
    hidden, weight, _, labels = _case(8, 6)
    ours, theirs = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, ours, labels, z_loss=0.01, chunk_size=4)
    logits = hidden @ theirs.t()
    valid = labels != -100
    expected = F.cross_entropy(logits, labels) + 0.01 * logits.logsumexp(1)[valid].square().mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_does_not_fit_is_refused() -> None:
    """Shapes, chunk sizes, labels and targets that require grad."""
    hidden, weight, bias, labels = _case(8, 6)
    with pytest.raises(LossOptionError, match="chunk_size is 0: it must be 1 or more"):
        linear_cross_entropy(hidden, weight, labels, chunk_size=0)
    with pytest.raises(
        LossLayoutError, match=r"weight is \(classes, features\) and bias \(classes,\)"
    ):
        linear_cross_entropy(hidden, weight[:, :3], labels)
    with pytest.raises(
        LossLayoutError, match=r"weight is \(classes, features\) and bias \(classes,\)"
    ):
        linear_cross_entropy(hidden, weight, labels, bias[:3])
    with pytest.raises(TargetError, match="don't fit logits of shape"):
        linear_cross_entropy(hidden, weight, labels[:3])
    with pytest.raises(TargetError, match="probabilities that require grad get none"):
        linear_cross_entropy(hidden, weight, torch.rand(6, 8, requires_grad=True))
    with pytest.raises(TargetRangeError, match="1 of the targets are out of bounds"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 3, 4, 8]))


@spmd(world_size=2)
def test_layouts_that_do_not_fit_are_refused() -> None:
    """A head cut over its features, a mix of plain and distributed, and two meshes."""
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    hidden, weight, _, labels = _case(8, 6)
    states = distribute_tensor(hidden, mesh, [R])
    with pytest.raises(
        LossLayoutError, match=r"on mesh axis 0 hidden is .* the features can't be cut"
    ):
        linear_cross_entropy(states, distribute_tensor(weight, mesh, [Shard(1)]), labels)
    with pytest.raises(LossLayoutError, match="weight is a plain tensor and hidden a DTensor"):
        linear_cross_entropy(states, weight, labels)
    with pytest.raises(LossLayoutError, match=r"weight is on .* and hidden on"):
        linear_cross_entropy(states, distribute_tensor(weight, other, [R, Shard(0)]), labels)
    with pytest.raises(LossLayoutError, match="a DTensor knows its mesh"):
        linear_cross_entropy(states, distribute_tensor(weight, mesh, [R]), labels, vocab_size=8)
