"""Functions and autograd functions of one's own on distributed tensors, against the single device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hp_dtensor import (
    DFunction,
    DistributedOp,
    DTensor,
    Layout,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    custom_shard,
    distribute_tensor,
    parallelize_value_and_grad,
    register_sharding,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd

R = Replicate()


class Scaled(DFunction):
    """x @ w.T times a number, with a gradient by hand."""

    _op_name = "test_scaled_linear"

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, w: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        assert type(x) is torch.Tensor
        ctx.save_for_backward(x, w)  # type: ignore[attr-defined]
        ctx.scale = scale  # type: ignore[attr-defined]
        return x @ w.T * scale

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert type(grad) is torch.Tensor
        x, w = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = ctx.scale  # type: ignore[attr-defined]
        return grad @ w * scale, grad.T @ x * scale, None


class ScaledLayout(DistributedOp):
    """Rows of the weight are columns of the result; rows of the input are its rows; a cut inner dim gives addends."""

    def infer_layout(self, cache_values: Sequence[object]) -> tuple[tuple[Layout, ...], object]:
        x, w = cache_values[:2]
        assert isinstance(x, Layout)
        assert isinstance(w, Layout)
        assert x.placements is not None
        assert w.placements is not None
        out = []
        for a, b in zip(x.placements, w.placements, strict=True):
            if a.is_shard(1):
                out.append(Partial())
            elif b.is_shard(0):
                out.append(Shard(1))
            else:
                out.append(a)
        return (Layout.from_device_mesh(x.device_mesh)(out),), None


def _reference(x: torch.Tensor, w: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = a @ b.T * 3.0
    (y * weight).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    return y.detach(), a.grad, b.grad


@spmd(world_size=2)
def test_a_dfunction_has_the_single_devices_value_and_gradients() -> None:
    """Cut by columns, by rows and along the batch; a number and a tensor by keyword."""
    ScaledLayout("test_scaled_linear")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, w, weight = torch.randn(4, 6), torch.randn(8, 6), torch.randn(4, 8)
    want = _reference(x, w, weight)
    for px, pw in ((R, Shard(0)), (Shard(1), Shard(1)), (Shard(0), R), (R, R)):
        dx = distribute_tensor(x, mesh, [px]).requires_grad_()
        dw = distribute_tensor(w, mesh, [pw]).requires_grad_()
        y = Scaled.apply(dx, w=dw, scale=3.0)
        assert isinstance(y, DTensor)
        torch.testing.assert_close(y.full_tensor(), want[0])
        (y.full_tensor() * weight).sum().backward()
        assert isinstance(dx.grad, DTensor)
        assert isinstance(dw.grad, DTensor)
        torch.testing.assert_close(dx.grad.full_tensor(), want[1])
        torch.testing.assert_close(dw.grad.full_tensor(), want[2])
    plain = Scaled.apply(x, w, 3.0)
    assert type(plain) is torch.Tensor
    torch.testing.assert_close(plain, want[0])


@spmd(world_size=2)
def test_a_dfunction_says_what_is_missing() -> None:
    """No name, no operator, no layout, and addends that the operator does not allow."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(2, 2), mesh, [R])

    class Nameless(Scaled):
        _op_name = None

    class Unknown(Scaled):
        _op_name = "test_unknown"

    for function, words in ((Nameless, "_op_name None"), (Unknown, "'test_unknown' names no")):
        with pytest.raises(ValueError, match=words):
            function.apply(x, x)
    ScaledLayout("test_scaled_linear")
    with pytest.raises(LayoutError, match=r"pieces are addends.*reduce_partial"):
        Scaled.apply(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]), x)

    silent = DistributedOp("test_silent").op_name

    class Silent(Scaled):
        _op_name = silent

    with pytest.raises(NotImplementedError, match="override infer_layout"):
        Silent.apply(x, x)


@spmd(world_size=2)
def test_an_operator_may_run_something_else_locally() -> None:
    """get_expand_impl replaces the function: a row-parallel bias that one rank adds."""
    mesh = init_device_mesh("cpu", (2,))

    class Once(ScaledLayout):
        def get_expand_impl(self, func: object, infer_result: object, cache_values: object):  # noqa: ANN202
            return lambda x, w, scale: Scaled.apply(x, w, scale) / scale

    Once("test_scaled_linear")
    x = distribute_tensor(torch.ones(2, 2), mesh, [R])
    y = Scaled.apply(x, x, 3.0)
    assert isinstance(y, DTensor)
    assert torch.equal(y.to_local(), torch.full((2, 2), 2.0))
    ScaledLayout("test_scaled_linear")


@spmd(world_size=2)
def test_custom_shard_adds_up_the_gradients_of_replicas() -> None:
    """A column-parallel product: the replicated input gets the sum over ranks; uneven columns keep their number."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x, w, weight = torch.randn(4, 6), torch.randn(7, 6), torch.randn(4, 7)
    want = _reference(x, w, weight)

    @custom_shard(
        device_mesh=mesh, out_placements=("None", "tp"), in_placements=([R], ("tp", "None"), None)
    )
    def product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        return a @ b.T * scale

    dx = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    dw = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    y = product(dx, dw, 3.0)
    assert isinstance(y, DTensor)
    assert y.shape == (4, 7)
    torch.testing.assert_close(y.full_tensor(), want[0])
    (y.full_tensor() * weight).sum().backward()
    assert isinstance(dx.grad, DTensor)
    assert isinstance(dw.grad, DTensor)
    assert dx.grad.placements == (Shard(0),)
    torch.testing.assert_close(dx.grad.full_tensor(), want[1])
    torch.testing.assert_close(dw.grad.full_tensor(), want[2])
    plain = product(x, w, 3.0)
    assert type(plain) is torch.Tensor


@spmd(world_size=2)
def test_custom_shard_checks_what_it_is_told() -> None:
    """Counts, kinds, layouts that differ, and results."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    pair = lambda a, b=None: (a, 1)  # noqa: E731
    out = custom_shard(pair, mesh, ([Shard(0)], None), ([Shard(0)],))(d, b=3)
    assert isinstance(out, tuple)
    assert out[1] == 1
    for make, error, words in (
        (lambda: custom_shard(pair, mesh, [R], None)(d), RuntimeError, "in_placements is None"),
        (lambda: custom_shard(pair, mesh, [R], ([R], None))(d), LayoutError, "2 entries for 1"),
        (lambda: custom_shard(pair, mesh, [R], (None,))(d), TypeError, "give its layout"),
        (lambda: custom_shard(pair, mesh, [R], ([R], [R]))(d, 1), TypeError, "no DTensor"),
        (lambda: custom_shard(pair, mesh, [R], ([R],))(d), LayoutError, "returned 2 values"),
        (lambda: custom_shard(pair, mesh, ([R], [R]), ([R],))(d), TypeError, "result 1 is a int"),
        (
            lambda: custom_shard(pair, mesh, ([R], None), ([R],), False)(d),
            LayoutError,
            "redistribute_inputs=True",
        ),
    ):
        with pytest.raises(error, match=words):
            make()


@spmd(world_size=2)
def test_value_and_gradients_are_those_of_one_device() -> None:
    """One result, several, weights of each, a weight that is not used; no factor for replicas."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, -2.0, 3.0])
    dx = distribute_tensor(x, mesh, [Shard(0)])
    for placement in (R, Shard(0)):
        dw = distribute_tensor(w, mesh, [placement]).requires_grad_()
        idle = torch.ones(2, requires_grad=True)
        calls = []

        def loss(a: torch.Tensor) -> torch.Tensor:
            calls.append(1)  # noqa: B023
            return (a * dw).sum()  # noqa: B023

        value, (grad, none) = parallelize_value_and_grad(loss, [dw, idle])(dx)
        assert isinstance(value, DTensor)
        assert isinstance(grad, DTensor)
        assert (value.item(), len(calls)) == ((x * w).sum().item(), 1)
        assert grad.placements == (placement,)
        torch.testing.assert_close(grad.full_tensor(), x.sum(0))
        assert none.tolist() == [0, 0]
        two = lambda a: ((a * dw).sum(), (dw * dw).sum())  # noqa: B023, E731
        for sens, want in (
            (None, x.sum(0)),
            ([2.0, 3.0], 2 * x.sum(0) + 6 * w),
            ((0.0, 1.0), 2 * w),
        ):
            _, grads = parallelize_value_and_grad(two, dw, sens)(dx)
            assert isinstance(grads[0], DTensor)
            torch.testing.assert_close(grads[0].full_tensor(), want)
        for function, sens in ((loss, [1.0]), (two, [1.0]), (two, 1.0)):
            with pytest.raises(TypeError, match="sens="):
                parallelize_value_and_grad(function, dw, sens)(dx)  # type: ignore[arg-type]


@spmd(world_size=2)
def test_a_rule_may_list_all_arguments_of_an_operator_without_results() -> None:
    """Placements in the order of the schema, whichever arguments a call passes, and none for results that are not there."""
    mesh = init_device_mesh("cpu", (2,))
    library = torch.library.Library("hp_test_lists", "FRAGMENT")
    library.define(
        "add_rows(Tensor x, Tensor(a!) y, Tensor index, Tensor? scale=None, bool twice=False, *, float by=1.0) -> ()"
    )

    def add_rows(
        x: torch.Tensor,
        y: torch.Tensor,
        index: torch.Tensor,
        scale: torch.Tensor | None = None,
        twice: bool = False,
        *,
        by: float = 1.0,
    ) -> None:
        y.index_add_(0, index, x if scale is None else x * scale, alpha=by * (1 + twice))

    library.impl("add_rows", add_rows, "CompositeExplicitAutograd")

    @register_sharding(torch.ops.hp_test_lists.add_rows.default)
    def _columns(*values: object, **_named: object) -> list[object]:
        scaled = len(values) > 3 and values[3] is not None
        return [([], [Shard(1), Shard(1), R, R if scaled else None, None, None])]

    x, index, scale = torch.randn(3, 6), torch.tensor([0, 2, 4]), torch.randn(3, 1)
    for given, named in (
        ((), {}),
        ((scale,), {}),
        ((None, True), {}),
        ((), {"by": 0.5}),
        ((scale, True), {"by": 0.5}),
        ((), {"by": 2.0, "scale": scale}),
    ):
        y = torch.randn(5, 6)
        cut = distribute_tensor(y, mesh, [Shard(1)])
        laid = distribute_tensor(x, mesh, [Shard(1)]), cut, distribute_tensor(index, mesh, [R])

        def whole(value: object) -> object:
            tensor = isinstance(value, torch.Tensor)
            return distribute_tensor(value, mesh, [R]) if tensor else value

        op = torch.ops.hp_test_lists.add_rows
        op(*laid, *map(whole, given), **{key: whole(value) for key, value in named.items()})
        add_rows(x, y, index, *given, **named)
        torch.testing.assert_close(cut.full_tensor(), y)
