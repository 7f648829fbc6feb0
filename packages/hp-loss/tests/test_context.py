"""`loss_parallel`: what it intercepts, what it leaves alone, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_loss import (
    LossLayoutError,
    get_loss_parallel_count,
    is_loss_parallel_active,
    loss_parallel,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

R = Replicate()


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of what must be a DTensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


def _case(classes: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (6,), generator=generator)
    labels[1] = -100
    return torch.randn(6, classes, generator=generator) * 3, labels


class _Collectives(TorchDispatchMode):
    """Collects the collectives that run, with the elements that go in; independent of ours and of torch's counter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.seen: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name()
        if name.startswith(("_c10d_functional::", "c10d::")) and "wait" not in name:
            tensor = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.seen.append(tensor.numel())
        return func(*args, **(kwargs or {}))


def test_contexts_nest_and_end() -> None:
    """The depth goes up and down again, an exception included; outside it is zero."""
    depths = [get_loss_parallel_count()]
    with loss_parallel():
        depths.append(get_loss_parallel_count())
        with contextlib.suppress(ZeroDivisionError), loss_parallel(strict=False):
            depths.append(get_loss_parallel_count())
            raise ZeroDivisionError
        depths.append(get_loss_parallel_count())
        assert is_loss_parallel_active()
    depths.append(get_loss_parallel_count())
    assert depths == [0, 1, 2, 1, 0]
    assert not is_loss_parallel_active()


def test_no_mode_is_left_behind() -> None:
    """After the context, also one left by an exception, torch's stack of modes is as it was."""

    class Spy(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Any,
            types: object,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    before = torch.overrides._len_torch_function_stack()
    with pytest.raises(ValueError, match="stop"), loss_parallel():
        raise ValueError("stop")
    assert torch.overrides._len_torch_function_stack() == before
    with loss_parallel(), Spy():
        torch.zeros(1).sum()
    assert torch.overrides._len_torch_function_stack() == before
    assert seen


def test_threads_do_not_see_each_other() -> None:
    """A context entered in one thread is not there in another."""
    seen = []
    with loss_parallel():
        thread = threading.Thread(target=lambda: seen.append(get_loss_parallel_count()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_async_tasks_do_not_see_each_other() -> None:
    """Tasks that enter and leave in turns each see their own depth, and nothing is left at the end."""

    async def task(depth: int, steps: int) -> list[int]:
        seen = []
        for _ in range(depth):
            loss_parallel_context = loss_parallel()
            loss_parallel_context.__enter__()
            contexts.setdefault(id(asyncio.current_task()), []).append(loss_parallel_context)
            await asyncio.sleep(0)
        for _ in range(steps):
            seen.append(get_loss_parallel_count())
            await asyncio.sleep(0)
        while contexts.get(id(asyncio.current_task())):
            contexts[id(asyncio.current_task())].pop().__exit__(None, None, None)
            await asyncio.sleep(0)
        return seen

    async def main() -> list[list[int]]:
        return list(await asyncio.gather(task(1, 4), task(3, 2), task(0, 5)))

    contexts: dict[int, list[Any]] = {}
    before = torch.overrides._len_torch_function_stack()
    assert asyncio.run(main()) == [[1] * 4, [3] * 2, [0] * 5]
    assert torch.overrides._len_torch_function_stack() == before


def test_a_copied_context_carries_the_state() -> None:
    """The state is a context variable: a copy of the context has it, wherever it runs."""
    with loss_parallel():
        copied = contextvars.copy_context()
    assert copied.run(get_loss_parallel_count) == 1


def test_plain_tensors_are_torchs() -> None:
    """Inside the context, plain logits give the bits that torch gives."""
    logits, labels = _case()
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1)
    with loss_parallel():
        assert torch.equal(F.cross_entropy(logits, labels, label_smoothing=0.1), expected)
        assert torch.equal(nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels), expected)


@spmd(world_size=2)
def test_the_function_and_the_module_are_intercepted() -> None:
    """Both give one device's value and gradient with one exchange and nothing else; the gradient's placement is kept."""
    mesh = init_device_mesh("cpu", (2,))
    logits, labels = _case()
    weight = torch.rand(8, generator=torch.Generator().manual_seed(1))
    for reduction, smoothing in itertools.product(("none", "sum", "mean"), (0.0, 0.2)):
        options: dict[str, Any] = {
            "weight": weight,
            "reduction": reduction,
            "label_smoothing": smoothing,
        }
        whole = logits.clone().requires_grad_()
        expected = F.cross_entropy(whole, labels, **options)
        expected.sum().backward()
        for call in (
            lambda x, y, options=options: F.cross_entropy(x, y, **options),
            lambda x, y, options=options: F.cross_entropy(input=x, target=y, **options),
            lambda x, y, options=options: nn.CrossEntropyLoss(**options)(x, y),
        ):
            sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
            with _Collectives() as collectives, loss_parallel():
                loss = call(sharded, labels)
            assert len(collectives.seen) == 1
            assert isinstance(loss, DTensor)
            assert (loss.shape, loss.dtype) == (expected.shape, expected.dtype)
            with _Collectives() as collectives:
                loss.sum().backward()  # outside of the context
            assert collectives.seen == []
            torch.testing.assert_close(_full(loss).detach(), expected.detach())
            assert sharded.grad is not None
            torch.testing.assert_close(_full(sharded.grad), whole.grad)


@spmd(world_size=2)
def test_torchs_dtensors_are_intercepted() -> None:
    """Logits of torch's own class are vocabulary-parallel too."""
    mesh = init_device_mesh("cpu", (2,))
    logits, labels = _case()
    sharded = torch_distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel(), _Collectives() as collectives:
        loss = F.cross_entropy(sharded, labels)
    assert len(collectives.seen) == 1
    loss.backward()
    torch.testing.assert_close(_full(loss).detach(), F.cross_entropy(logits, labels))


@spmd(world_size=2)
def test_other_functions_are_left_alone() -> None:
    """A softmax over a sharded last dimension, as attention has it, gives in the context what it gives outside."""
    mesh = init_device_mesh("cpu", (2,))
    scores = distribute_tensor(
        torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), mesh, [Shard(1)]
    )
    with loss_parallel():
        inside = torch.softmax(scores, -1)
        log_inside = F.log_softmax(scores, -1)
    torch.testing.assert_close(_full(inside), torch.softmax(_full(scores), -1))
    torch.testing.assert_close(_full(log_inside), F.log_softmax(_full(scores), -1))


@spmd(world_size=2)
def test_outside_the_context_nothing_is_intercepted() -> None:
    """After the context, cross_entropy is dispatched as ever, and right."""
    mesh = init_device_mesh("cpu", (2,))
    logits, labels = _case()
    sharded = distribute_tensor(logits, mesh, [Shard(1)])
    with loss_parallel():
        pass
    loss = F.cross_entropy(sharded, distribute_tensor(labels, mesh, [R]))
    torch.testing.assert_close(_full(loss), F.cross_entropy(logits, labels))


@spmd(world_size=4)
def test_logits_that_no_axis_cuts_over_the_classes_are_refused() -> None:
    """Strict: a head that was meant to be sharded and isn't is an error with what to do; not strict: it is computed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    logits, labels = _case()
    for placements in ([R, R], [Shard(0), R]):
        sharded = distribute_tensor(logits, mesh, placements)
        with loss_parallel(), pytest.raises(LossLayoutError) as caught:
            F.cross_entropy(sharded, labels)
        assert isinstance(caught.value, ValueError)
        assert "no mesh axis shards dimension 1, that of the classes" in str(caught.value)
        with loss_parallel(strict=False):
            loss = F.cross_entropy(sharded, labels)
        torch.testing.assert_close(_full(loss), F.cross_entropy(logits, labels))


@spmd(world_size=4)
def test_an_axis_of_one_rank_may_be_the_vocabularys() -> None:
    """The same program with tp=1 is no error: the plan did shard the head."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    logits, labels = _case()
    with loss_parallel(mesh=mesh["tp"]):
        loss = F.cross_entropy(distribute_tensor(logits, mesh, [Shard(0), Shard(1)]), labels)
    torch.testing.assert_close(_full(loss), F.cross_entropy(logits, labels))


@spmd(world_size=2)
def test_partial_logits_are_an_error_or_reduced_with_a_warning() -> None:
    """Strict refuses a hidden reduction of the logits; not strict does it and says how much it moves."""
    mesh = init_device_mesh("cpu", (2,))
    logits, labels = _case()
    partial = distribute_tensor(logits, mesh, [Partial()])
    with (
        loss_parallel(),
        pytest.raises(LossLayoutError, match="are addends on at least one mesh axis"),
    ):
        F.cross_entropy(partial, labels)
    with (
        loss_parallel(strict=False),
        pytest.warns(UserWarning, match="48 elements are summed over the ranks"),
    ):
        loss = F.cross_entropy(partial, labels)
    torch.testing.assert_close(_full(loss), F.cross_entropy(logits, labels))


@spmd(world_size=4)
def test_the_mesh_of_the_context_must_be_that_of_the_logits() -> None:
    """The logits' mesh, or one of its axes, will do; another is an error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    logits, labels = _case()
    sharded = distribute_tensor(logits, mesh, [Shard(0), Shard(1)])
    for wanted in (mesh, mesh["tp"]):
        with loss_parallel(mesh=wanted):
            loss = F.cross_entropy(sharded, labels)
        torch.testing.assert_close(_full(loss), F.cross_entropy(logits, labels))
    with (
        loss_parallel(mesh=other),
        pytest.raises(LossLayoutError, match="enter the context with the mesh of the logits"),
    ):
        F.cross_entropy(sharded, labels)
    with loss_parallel(mesh=other), loss_parallel(mesh=mesh):
        F.cross_entropy(sharded, labels)


@spmd(world_size=2)
def test_the_old_flags_mean_what_they_meant() -> None:
    """size_average and reduce still choose the reduction, with a warning that names the new option."""
    mesh = init_device_mesh("cpu", (2,))
    logits, labels = _case()
    sharded = distribute_tensor(logits, mesh, [Shard(1)])
    for flags, reduction in (
        ({"reduce": False}, "none"),
        ({"size_average": False}, "sum"),
        ({"reduce": True}, "mean"),
    ):
        with (
            loss_parallel(),
            pytest.warns(FutureWarning, match=f"use reduction='{reduction}' instead"),
        ):
            loss = F.cross_entropy(sharded, labels, **flags)  # type: ignore[arg-type]
        torch.testing.assert_close(
            _full(loss), F.cross_entropy(logits, labels, reduction=reduction)
        )


@spmd(world_size=2)
def test_a_linear_head_of_distributed_tensors_trains() -> None:
    """Through `F.linear`: loss and the gradients of hidden states and head, with no collective as large as the logits."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(16, 4, generator=generator), torch.randn(8, 4, generator=generator)
    labels = torch.randint(0, 8, (16,), generator=generator)
    ours = [
        distribute_tensor(hidden, mesh, [R]).requires_grad_(),
        distribute_tensor(head, mesh, [Shard(0)]).requires_grad_(),
    ]
    theirs = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    with _Collectives() as collectives, loss_parallel():
        loss = F.cross_entropy(F.linear(*ours), labels)
        loss.backward()
    expected = F.cross_entropy(F.linear(*theirs), labels)
    expected.backward()
    torch.testing.assert_close(_full(loss).detach(), expected.detach())
    for our, their in zip(ours, theirs, strict=True):
        assert our.grad is not None
        torch.testing.assert_close(_full(our.grad), their.grad)
    assert max(collectives.seen) <= 16 * 4 * dist.get_world_size()
