"""A linear layer of distributed tensors: one operator each way, whoever looks on, and the single device's numbers."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, strict
from hp_dtensor._torch import python_wants_a_snapshot
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

R, P = Replicate(), Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
needs_whole_layers = pytest.mark.skipif(
    python_wants_a_snapshot(), reason="this torch keeps a kernel of others from the layer"
)
IN, OUT = 6, 5  # no axis size divides both


def _draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def _layer(
    lead: tuple[int, ...] = (3, 4), *, bias: bool = True, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Input, weight and perhaps a bias."""
    tensors = [_draw(*lead, IN, dtype=dtype), _draw(OUT, IN, dtype=dtype)]
    return [*tensors, _draw(OUT, dtype=dtype)] if bias else tensors


def _laid(tensors: list[Tensor], mesh: DeviceMesh, *placements: object) -> list[Tensor]:
    """The tensors distributed; with one layout for each, or whole."""
    laid = placements or (R,) * len(tensors)
    return [
        distribute_tensor(t.detach(), mesh, p if isinstance(p, list) else [p]).requires_grad_(
            t.requires_grad
        )
        for t, p in zip(tensors, laid, strict=True)
    ]


def _whole(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def _saving(into: list[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Inside, what the graph saves is noted."""

    def note(tensor: Tensor) -> Tensor:
        into.append(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


def _check(given: list[Tensor], laid: list[Tensor]) -> None:
    """Values and gradients are the plain layer's."""
    for tensor in (*given, *laid):
        tensor.grad = None
    expected, out = F.linear(*given), F.linear(*laid)
    torch.testing.assert_close(_whole(out), expected)
    seed = _draw(*expected.shape, seed=3).detach().to(expected.dtype)
    assert isinstance(out, DTensor)
    expected.backward(seed)
    out.backward(distribute_tensor(seed, out.device_mesh, [R] * out.device_mesh.ndim))
    for plain, tensor in zip(given, laid, strict=True):
        torch.testing.assert_close(_whole(tensor.grad), plain.grad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(4,), (3, 4), (0,), (1, 3, 2)], ids=str)
@spmd(world_size=2)
def test_all_layouts_give_the_plain_layer(lead: tuple[int, ...], bias: bool) -> None:
    """Each placement of each argument, uneven and empty ones included."""
    mesh = init_device_mesh("cpu", (2,))
    given = _layer(lead, bias=bias)
    kinds = [[R, P, *map(Shard, range(tensor.dim()))] for tensor in given]
    for placements in product(*kinds):
        _check(given, _laid(given, mesh, *placements))


@spmd(world_size=4)
def test_two_axes_give_the_plain_layer() -> None:
    """Rows cut by one axis and features by the other, and both by both."""
    mesh = init_device_mesh("cpu", (2, 2))
    given = _layer()
    for x, weight, bias in (
        ([S0, R], [R, S0], [R, S0]),
        ([S0, S2], [R, S1], [R, R]),
        ([S1, R], [S0, S0], [S0, S0]),
        ([S0, S1], [R, R], [R, P]),
        ([S2, S2], [S1, S1], [P, R]),
    ):
        _check(given, _laid(given, mesh, x, weight, bias))


@spmd(world_size=2)
def test_what_needs_no_communication_has_none() -> None:
    """Cut by rows, by what comes out and by what goes in; rows of the second dim are cut where a flattened one could not be."""
    mesh = init_device_mesh("cpu", (2,))
    for x, weight, bias, out in (
        (S0, R, R, S0),
        (S1, R, R, S1),
        (R, S0, S0, S2),
        (S2, S1, P, P),
        (R, R, R, R),
    ):
        given = _layer((4, 2))
        laid = _laid(given, mesh, x, weight, bias)
        with strict():
            for leaf in laid:
                leaf.requires_grad_()
            made = F.linear(*laid)
            assert isinstance(made, DTensor)
            assert made.placements == (out,)
            grads = torch.autograd.grad(
                made,
                laid,
                torch.ones_like(made) if out != P else _laid([_draw(*made.shape)], mesh),
            )
        assert [type(grad) for grad in grads] == [DTensor] * 3


@needs_whole_layers
@spmd(world_size=1)
def test_one_node_and_one_operator_each_way() -> None:
    """The layer is one node of the graph, and what it saves is the input and the weight themselves."""
    mesh = init_device_mesh("cpu", (1,))
    for lead, bias in product(((4,), (3, 4)), (True, False)):
        laid = _laid(_layer(lead, bias=bias), mesh)
        saved: list[Tensor] = []
        with _saving(saved):
            out = F.linear(*laid)
        assert out.grad_fn is not None
        assert out.grad_fn.name() == "LinearBackward0"
        assert {id(t) for t in saved} == {id(t) for t in laid[:2]}


@spmd(world_size=1)
def test_a_frozen_weight_saves_no_input() -> None:
    """The gradients of the input and of the bias need none; it may be large."""
    mesh = init_device_mesh("cpu", (1,))
    for of_input, bias in ((True, True), (True, False), (False, True)):
        given = _layer(bias=bias)
        given[0].requires_grad_(of_input)
        given[1].requires_grad_(False)
        laid = _laid(given, mesh)
        saved: list[Tensor] = []
        with _saving(saved):
            F.linear(*laid).sum().backward()
        assert [sorted(t.shape) for t in saved] == [sorted((IN, OUT))] * of_input
        F.linear(*given).sum().backward()
        for plain, tensor in zip(given, laid, strict=True):
            if plain.requires_grad:
                torch.testing.assert_close(_whole(tensor.grad), plain.grad)


class Recorder(TorchDispatchMode):
    """Which operators run inside, on distributed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@spmd(world_size=1)
def test_a_mode_sees_the_product() -> None:
    """Who looks for products finds them: forward as an operator, and in the count of floating-point operations."""
    mesh = init_device_mesh("cpu", (1,))
    for lead, bias in product(((4,), (3, 4), (3, 2, 2)), (True, False)):
        given = _layer(lead, bias=bias)
        laid = _laid(given, mesh)
        with Recorder() as mode:
            F.linear(*laid)
        products = {"aten.mm.default", "aten.addmm.default"}.intersection(mode.seen)
        assert len(products) == 1, mode.seen
        assert not any("linear" in name or "matmul" in name for name in mode.seen)
        counts = []
        for tensors in (given, laid):
            with FlopCounterMode(display=False) as counter:
                F.linear(*tensors).sum().backward()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0
    x, weight, bias_ = _layer()
    turned = _laid([x.transpose(0, 1), weight, bias_], mesh)
    turned[0] = turned[0].transpose(0, 1)  # not contiguous
    with Recorder():
        torch.testing.assert_close(_whole(F.linear(*turned)), F.linear(x, weight, bias_))


@spmd(world_size=1)
def test_a_region_runs_again_unwatched_and_is_watched_again() -> None:
    """Whether a mode looks on changes nothing that a checkpointed region saves."""
    mesh = init_device_mesh("cpu", (1,))
    given = [*_layer(), _draw(IN, OUT)]
    laid = _laid(given, mesh)

    def region(x: Tensor, weight: Tensor, bias: Tensor, last: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight, bias).relu(), last)

    region(*given).sum().backward()
    for forward, backward in product((True, False), repeat=2):
        for leaf in laid:
            leaf.grad = None
        with FlopCounterMode(display=False) if forward else torch.enable_grad():
            out = checkpoint(region, *laid, use_reentrant=False)
        with FlopCounterMode(display=False) if backward else torch.enable_grad():
            out.sum().backward()
        for plain, leaf in zip(given, laid, strict=True):
            torch.testing.assert_close(_whole(leaf.grad), plain.grad)


@spmd(world_size=1)
def test_a_policy_may_keep_products() -> None:
    """Selective checkpointing by the names of products finds those of layers with a bias and without."""
    mesh = init_device_mesh("cpu", (1,))
    given = [*_layer(), _draw(IN, OUT)]
    laid = _laid(given, mesh)
    kept: list[str] = []

    def policy(_ctx: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            kept.append(str(op))
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def region(x: Tensor, weight: Tensor, bias: Tensor, last: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight, bias).relu(), last).square()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(region, *laid, use_reentrant=False, context_fn=contexts).sum().backward()
    region(*given).sum().backward()
    assert set(kept) == {"aten.mm.default", "aten.addmm.default"}
    for plain, leaf in zip(given, laid, strict=True):
        torch.testing.assert_close(_whole(leaf.grad), plain.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@spmd(world_size=2)
def test_gradients_of_gradients(dtype: torch.dtype) -> None:
    """The double backward of the layer, in real and complex numbers."""
    mesh = init_device_mesh("cpu", (2,))
    given = _layer(dtype=dtype)

    def penalty(*tensors: Tensor) -> Tensor:
        out = F.linear(*tensors)
        grads = torch.autograd.grad((out * out * out).sum().abs(), tensors, create_graph=True)
        return torch.stack([(grad * grad).sum().abs() for grad in grads]).sum()

    penalty(*given).backward()
    for x, weight, bias in ((R, R, R), (S0, R, R), (R, S0, S0), (S2, S1, R)):
        laid = _laid(given, mesh, x, weight, bias)
        penalty(*laid).backward()
        for plain, leaf in zip(given, laid, strict=True):
            torch.testing.assert_close(_whole(leaf.grad), plain.grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@spmd(world_size=1)
def test_transforms_and_autocast_see_the_layer_as_ever() -> None:
    """``torch.func``, forward-mode derivatives, batches of gradients, autocast, and modes without gradients."""
    mesh = init_device_mesh("cpu", (1,))
    given = _layer()
    laid = _laid(given, mesh)

    def both(function: object) -> None:
        one, other = (function(*tensors) for tensors in (given, laid))  # type: ignore[operator]  # a function
        torch.testing.assert_close(_whole(other.detach()), one.detach())

    both(lambda x, *rest: torch.func.grad(lambda x: F.linear(x, *rest).square().sum())(x))
    both(lambda x, *rest: torch.func.jvp(lambda x: F.linear(x, *rest), (x,), (x,))[1])
    both(lambda x, *rest: torch.vmap(lambda x: F.linear(x, *rest))(x))

    def dual(x: Tensor, *rest: Tensor) -> Tensor:
        with forward_ad.dual_level():
            out = F.linear(forward_ad.make_dual(x.detach(), x.detach()), *rest)
            return forward_ad.unpack_dual(out).tangent

    both(dual)
    seeds = torch.stack([torch.eye(12, OUT, dtype=torch.float64).view(3, 4, OUT)] * 2)

    def batched(x: Tensor, *rest: Tensor) -> Tensor:
        v = seeds if type(x) is Tensor else distribute_tensor(seeds, mesh, [R])
        return torch.autograd.grad(F.linear(x, *rest), x, v, is_grads_batched=True)[0]

    both(batched)

    def cast(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = F.linear(*[t.detach().float().requires_grad_() for t in tensors])
        assert out.dtype == torch.bfloat16
        return torch.autograd.grad(out.sum(), out)[0] + out

    both(cast)
    with torch.no_grad():
        both(F.linear)
    with torch.inference_mode():
        both(F.linear)


@spmd(world_size=2)
def test_other_shapes_of_weight_and_bias() -> None:
    """One row, one vector as the weight, and a bias of other dims take the composed way."""
    mesh = init_device_mesh("cpu", (2,))
    x, weight, bias = _layer((4,))
    row = _draw(IN)
    for given in (
        [row, weight, bias],
        [row, weight],
        [x, _draw(IN)],
        [x, weight, _draw(1, OUT)],
        [x, weight, _draw(4, OUT)],
        [x, weight, _draw(1)],
    ):
        for at, tensor in enumerate(given):
            placements: list[object] = [R] * len(given)
            for placements[at] in (R, P, *map(Shard, range(tensor.dim()))):
                laid = _laid(given, mesh, *placements)
                _check(given, laid)
                with torch.inference_mode():
                    torch.testing.assert_close(_whole(F.linear(*laid)), F.linear(*given))
    with pytest.raises(RuntimeError, match=r"\[4, 6\] X \[7, 5\]|4x6 and 7x5"):
        F.linear(*_laid([x, _draw(OUT, IN + 1)], mesh))


@spmd(world_size=1)
def test_layers_of_other_classes_go_on_as_ever() -> None:
    """Jagged tensors, other subclasses, plain tensors under a mode, and a compiled layer."""
    rows = [torch.randn(size, IN) for size in (2, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    weight = torch.randn(OUT, IN, requires_grad=True)
    F.linear(jagged, weight).values().sum().backward()
    torch.testing.assert_close(weight.grad, torch.cat(rows).sum(0).expand(OUT, IN))
    x, weight, bias = (t.detach().float() for t in _layer())
    pair = TwoTensor(x, x.clone()).requires_grad_()
    out = F.linear(pair, TwoTensor(weight, weight.clone()))
    assert isinstance(out, TwoTensor)
    out.sum().backward()
    assert pair.grad is not None
    with torch.inference_mode():
        assert type(F.linear(TwoTensor(x, x), TwoTensor(weight, weight))) is TwoTensor
    with Recorder():
        torch.testing.assert_close(F.linear(x, weight, bias), x @ weight.t() + bias)
    mesh = init_device_mesh("cpu", (1,))
    laid = _laid([t.requires_grad_() for t in (x, weight, bias)], mesh)
    compiled = torch.compile(F.linear, backend="aot_eager", fullgraph=True)
    expected, out = F.linear(x, weight, bias), compiled(*laid)
    torch.testing.assert_close(_whole(out), expected)
    expected.sum().backward()
    out.sum().backward()
    for plain, leaf in zip((x, weight, bias), laid, strict=True):
        torch.testing.assert_close(_whole(leaf.grad), plain.grad)
