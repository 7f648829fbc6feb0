"""A chunked loss trains as an unchunked one does, and leaves FSDP2 as it found it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_loss import (
    ChunkedLoss,
    CrossEntropyLoss,
    GradAccumulator,
    LossLayoutError,
    LossOptionError,
    TargetError,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._python_dispatch import TorchDispatchMode

R = Replicate()


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of what must be a DTensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


class _Model(nn.Module):
    """A body and a head that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8))
        self.lm_head = nn.Linear(8, 12)

    def forward(self, x: Tensor, *, skip_head: bool) -> Tensor:
        hidden = self.body(x)
        return hidden if skip_head else self.lm_head(hidden)


def _data(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 12, (tokens,), generator=generator)
    labels[::3] = -100
    return torch.randn(tokens, 4, generator=generator), labels


def _grads(model: nn.Module) -> dict[str, Tensor]:
    out = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        out[name] = _full(grad) if hasattr(grad, "full_tensor") else grad
    return out


def _reference(tokens: int, factor: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    model, (x, labels) = _Model(), _data(tokens)
    loss = F.cross_entropy(model(x, skip_head=False), labels) * factor
    loss.backward()
    return loss.detach(), _grads(model)


@pytest.mark.parametrize("tokens", [8, 7, 3])
@pytest.mark.parametrize("num_chunks", [1, 2, 4, 5])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(
    tokens: int, num_chunks: int, scale: float
) -> None:
    """Chunks that don't divide the tokens, more chunks than tokens, and a factor."""
    expected, grads = _reference(tokens, scale)
    model, (x, labels) = _Model(), _data(tokens)
    loss_fn = ChunkedLoss(CrossEntropyLoss(), num_chunks=num_chunks, lm_head=model.lm_head)
    valid = int((labels != -100).sum())
    loss = loss_fn(model(x, skip_head=True), labels, scale=scale, global_valid_tokens=valid)
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    torch.testing.assert_close(_grads(model), grads)


def test_only_one_chunks_logits_exist() -> None:
    """No operator makes a tensor as large as all logits."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(
            self,
            func: Any,
            types: object,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    head, hidden = nn.Linear(8, 64), torch.randn(48, 8, requires_grad=True)
    labels = torch.zeros(48, dtype=torch.int64)
    with Largest() as seen:  # type: ignore[no-untyped-call]  # torch leaves it untyped
        loss = ChunkedLoss(CrossEntropyLoss(), num_chunks=4, lm_head=head)(
            hidden, labels, global_valid_tokens=48
        )
        loss.backward()
    assert seen.elements <= 48 * 64 / 4


def test_without_gradients_nothing_is_differentiated() -> None:
    """Under no_grad, the loss alone."""
    expected, _ = _reference(8)
    model, (x, labels) = _Model(), _data(8)
    loss_fn = ChunkedLoss(CrossEntropyLoss(), num_chunks=3)
    loss_fn.set_lm_head(model.lm_head)
    with torch.no_grad():
        loss = loss_fn(
            model(x, skip_head=True), labels, global_valid_tokens=(labels != -100).sum()
        )
    torch.testing.assert_close(loss, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_frozen_body_trains_its_head() -> None:
    """Hidden states without gradient: the head's gradients, and a loss whose backward is no error."""
    _, grads = _reference(8)
    model, (x, labels) = _Model(), _data(8)
    hidden = model(x, skip_head=True).detach()
    loss = ChunkedLoss(CrossEntropyLoss(), num_chunks=3, lm_head=model.lm_head)(
        hidden, labels, global_valid_tokens=(labels != -100).sum()
    )
    loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, grads["lm_head.weight"])


def test_a_scaled_backward_is_refused() -> None:
    """The head's gradients can't be scaled any more, so a gradient other than one is an error."""
    model, (x, labels) = _Model(), _data(8)
    loss_fn = ChunkedLoss(CrossEntropyLoss(), num_chunks=2, lm_head=model.lm_head)
    loss = loss_fn(model(x, skip_head=True), labels, global_valid_tokens=5)
    assert isinstance(loss, Tensor)
    with pytest.raises(LossOptionError, match="pass a factor as scale="):
        (loss / 2).backward()


def test_metrics_are_merged_by_their_names() -> None:
    """Means and sums add up, maxima and minima are what they say, and other names are refused."""

    def loss_fn(
        logits: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
        return loss, {"loss/mean": loss, "logit_max": logits.max(), "logit/min": logits.min()}

    head, hidden = nn.Linear(4, 6), torch.randn(5, 4, requires_grad=True)
    labels, weights = torch.tensor([0, 1, 2, 3, 5]), torch.rand(5)
    loss, metrics = ChunkedLoss(loss_fn, num_chunks=2, lm_head=head)(hidden, labels, weights)
    logits = head(hidden)
    torch.testing.assert_close(metrics["loss/mean"], loss.detach())
    assert metrics["logit_max"] == pytest.approx(logits.max().item())
    assert metrics["logit/min"] == pytest.approx(logits.min().item())
    with pytest.raises(LossOptionError, match="the metric 'loss' doesn't say how"):
        ChunkedLoss(lambda x, y: (x.sum(), {"loss": x.sum()}), lm_head=head)(hidden, labels)


def test_what_does_not_fit_is_refused() -> None:
    """No head, no chunks, labels of another length."""
    hidden, labels = torch.randn(4, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(LossOptionError, match="num_chunks is 0"):
        ChunkedLoss(CrossEntropyLoss(), num_chunks=0)
    with pytest.raises(LossOptionError, match="ChunkedLoss has no head"):
        ChunkedLoss(CrossEntropyLoss())(hidden, labels)
    with pytest.raises(
        TargetError, match=r"of the lengths \[4, 3\] on this rank, along dimension 0"
    ):
        ChunkedLoss(CrossEntropyLoss(), lm_head=nn.Linear(8, 4))(hidden, labels)


@spmd(world_size=4)
def test_distributed_hidden_states_are_cut_on_each_rank() -> None:
    """Tokens cut over dp, the head over tp: the loss and all gradients are those of one device."""
    mesh = init_device_mesh("cpu", (2, 2))
    hidden = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    _, labels = _data(8)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = F.cross_entropy(F.linear(*leaves), labels)
    expected.backward()
    head = nn.Linear(4, 12, bias=False)
    head.weight = nn.Parameter(distribute_tensor(weight, mesh, [R, Shard(0)]))
    states = distribute_tensor(hidden, mesh, [Shard(0), R]).requires_grad_()
    loss = ChunkedLoss(CrossEntropyLoss(), num_chunks=3, lm_head=head)(
        states,
        distribute_tensor(labels, mesh, [Shard(0), R]),
        global_valid_tokens=(labels != -100).sum(),
    )
    loss.backward()
    assert isinstance(loss, Tensor)
    torch.testing.assert_close(_full(loss).detach(), expected.detach())
    torch.testing.assert_close(_full(states.grad), leaves[0].grad)
    torch.testing.assert_close(_full(head.weight.grad), leaves[1].grad)


@spmd(world_size=2)
def test_uneven_distributed_hidden_states_are_refused() -> None:
    """Their chunks would have no layout in common; the error says what to pad."""
    mesh = init_device_mesh("cpu", (2,))
    states = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)])
    labels = distribute_tensor(torch.zeros(5, dtype=torch.int64), mesh, [Shard(0)])
    with pytest.raises(LossLayoutError, match="Pad that dimension to a multiple of 2"):
        ChunkedLoss(CrossEntropyLoss(), num_chunks=2, lm_head=nn.Linear(4, 4))(states, labels)


# --- FSDP2 ---------------------------------------------------------------------------------------------------------


class _HeadCollectives(TorchDispatchMode):
    """Counts FSDP2's gathers and reductions that have the size of the head; it may gather the body ahead, too."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.size = sum(parameter.numel() for parameter in head.parameters())
        self.gathers = 0
        self.reductions = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        whole = self.size in [arg.numel() for arg in args if isinstance(arg, Tensor)]
        self.gathers += func.name().startswith("c10d::_allgather_base") and whole
        self.reductions += func.name().startswith("c10d::_reduce_scatter_base") and whole
        return func(*args, **(kwargs or {}))


def _flags(module: nn.Module) -> list[object]:
    """What FSDP2 was told, read here without the code under test."""
    assert isinstance(module, FSDPModule)
    out: list[object] = []
    for group in module._get_fsdp_state()._fsdp_param_groups:
        out += [
            group.post_forward_mesh_info is None,
            group.reshard_after_backward,
            group.reduce_grads,
            group.all_reduce_grads,
        ]
    return [*out, module._get_fsdp_state()._state_ctx.is_last_backward]


def _sharded_model() -> _Model:
    model, mesh = _Model(), init_device_mesh("cpu", (2,))
    for layer in (model.body, model.lm_head):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@spmd(world_size=2)
def test_under_fsdp2_the_head_is_gathered_once_and_its_gradient_reduced_once() -> None:
    """The collectives of the loss don't grow with the chunks, two steps train as one device does, flags are kept."""
    x, labels = _data(8)
    rank = dist.get_rank()
    mine, my_labels = x.chunk(2)[rank], labels.chunk(2)[rank]
    valid = int((labels != -100).sum())
    counts = []
    for num_chunks in (1, 4):
        model, single = _sharded_model(), _Model()
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, single))
        loss_fn = ChunkedLoss(CrossEntropyLoss(), num_chunks=num_chunks, lm_head=model.lm_head)
        for _ in range(2):
            before = _flags(model.lm_head)
            hidden = model(mine, skip_head=True)
            with _HeadCollectives(model.lm_head) as collectives:
                # FSDP2 averages over ranks; the sum over ranks is what the global count asks for.
                loss = loss_fn(hidden, my_labels, scale=2.0, global_valid_tokens=valid)
            counts.append((collectives.gathers, collectives.reductions))
            assert _flags(model.lm_head) == before
            loss.backward()
            F.cross_entropy(single(x, skip_head=False), labels).backward()
            torch.testing.assert_close(_grads(model), _grads(single))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert counts == [(1, 1)] * 4


@spmd(world_size=2)
def test_an_exception_leaves_fsdp2_as_it_was() -> None:
    """A loss that fails in its second chunk: what FSDP2 was told is put back, and the head is sharded again."""
    model = _sharded_model()
    x, labels = _data(8)
    hidden = model(x, skip_head=True)
    before, calls = _flags(model.lm_head), []

    def failing(logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(logits.shape)
        if len(calls) == 2:
            raise ZeroDivisionError
        return logits.sum()

    with pytest.raises(ZeroDivisionError):
        ChunkedLoss(failing, num_chunks=4, lm_head=model.lm_head)(hidden, labels)
    assert _flags(model.lm_head) == before
    assert all(
        isinstance(parameter, torch.distributed.tensor.DTensor)
        for parameter in model.lm_head.parameters()
    )


# --- the accumulator
# ---------------------------------------------------------------------------------------------


def test_accumulated_chunks_are_the_whole() -> None:
    """Along any dimension, chunks of any sizes, in another dtype if wanted."""
    whole = torch.randn(2, 7, 3)
    accumulator = GradAccumulator(whole, num_chunks=3, seq_dim=1, dtype=torch.float64)
    for chunk in whole.split([3, 3, 1], 1):
        accumulator.add(chunk)
    assert torch.equal(accumulator.result(), whole.double())


@spmd(world_size=2)
def test_the_result_lies_as_the_gradients_do() -> None:
    """A replicated activation with Partial gradients has a Partial gradient."""
    mesh = init_device_mesh("cpu", (2,))
    accumulator = GradAccumulator(distribute_tensor(torch.zeros(4, 2), mesh, [R]), num_chunks=2)
    for _ in range(2):
        accumulator.add(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    result = accumulator.result()
    assert isinstance(result, DTensor)
    assert result.placements == (Partial("sum"),)
    assert torch.equal(_full(result), torch.full((4, 2), 2.0))


@spmd(world_size=2)
def test_chunks_that_do_not_fit_are_refused() -> None:
    """Too many, too long, too few, of two kinds, or in two layouts."""
    mesh = init_device_mesh("cpu", (2,))
    accumulator = GradAccumulator(torch.zeros(3, 2), num_chunks=2)
    accumulator.add(torch.ones(2, 2))
    with pytest.raises(
        LossLayoutError, match=r"has 2 of 3 entries along dimension 0, from 1 of 2 chunks"
    ):
        accumulator.result()
    with pytest.raises(
        LossLayoutError,
        match=r"chunk 1 has the shape \(2, 2\), and what is left of the gradient is 1",
    ):
        accumulator.add(torch.ones(2, 2))
    with pytest.raises(LossLayoutError, match="the chunks' gradients must be one kind"):
        accumulator.add(distribute_tensor(torch.ones(1, 2), mesh, [R]))
    accumulator.add(torch.ones(1, 2))
    with pytest.raises(LossLayoutError, match="got a chunk after all 2 of them"):
        accumulator.add(torch.ones(0, 2))
    other = GradAccumulator(distribute_tensor(torch.zeros(4, 2), mesh, [R]), num_chunks=2)
    other.add(distribute_tensor(torch.ones(2, 2), mesh, [R]))
    with pytest.raises(LossLayoutError, match="chunk 1 has a gradient with the placements"):
        other.add(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
