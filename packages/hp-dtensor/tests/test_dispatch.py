"""What dispatch decides: plans are found again, choices are cheap, what has no rule still runs, and errors speak."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    ImplicitCommunicationError,
    MixedTensorError,
    Partial,
    Replicate,
    Shard,
    cache_statistics,
    clear_caches,
    distribute_tensor,
    register_sharding,
    strict,
)
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd

R = Replicate()


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid(tensor: torch.Tensor | None) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


@spmd(world_size=2)
def test_a_repeated_call_hits_its_plan() -> None:
    """The second call of an operator on equal layouts finds the plan, whatever the numbers are; types matter."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    clear_caches()
    _ = d * 2.0
    before = cache_statistics()
    for number in (3.0, 4.0, 5.0):
        torch.testing.assert_close(_whole(d * number), torch.arange(4.0) * number)
    after = cache_statistics()
    assert after["hits"] - before["hits"] >= 3
    assert after["plans"] == before["plans"]
    i = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
    assert ((i * 2).dtype, (i * 2.0).dtype) == (torch.int64, torch.float32)
    for end in (1, 2, 3):
        torch.testing.assert_close(_whole(d.clamp(max=end)), torch.arange(4.0).clamp(max=end))


@spmd(world_size=4)
def test_batched_matmul_over_two_axes_sends_nothing() -> None:
    """Batch dims cut by two axes stay cut."""
    mesh = init_device_mesh("cpu", (2, 2))
    v, s = torch.randn(4, 4, 3), torch.randn(3, 1)
    with CommDebugMode() as comm:
        out = torch.matmul(
            distribute_tensor(v, mesh, [Shard(0), Shard(1)], src_data_rank=None),
            distribute_tensor(s, mesh, [R, R], src_data_rank=None),
        )
    assert comm.get_total_counts() == 0
    torch.testing.assert_close(_whole(out), v @ s)


@spmd(world_size=2)
def test_an_operator_without_a_rule_is_decomposed_or_replicated() -> None:
    """huber_loss decomposes; an operator of our own without a rule runs replicated, with one warning that names it."""
    mesh = init_device_mesh("cpu", (2,))
    x, y = torch.randn(6), torch.randn(6)
    a, b = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y))
    torch.testing.assert_close(_whole(F.huber_loss(a, b)), F.huber_loss(x, y))

    @torch.library.custom_op("hp_test::flip_sign", mutates_args=())
    def flip_sign(t: torch.Tensor) -> torch.Tensor:
        return -t

    flip_sign.register_fake(torch.empty_like)
    with pytest.warns(
        UserWarning,
        match=r"hp_test.flip_sign.default has no sharding rule: its inputs \(24 bytes\)",
    ):
        out = flip_sign(a)
    torch.testing.assert_close(_whole(out), -x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flip_sign(b)
    c = distribute_tensor(torch.randn(7), mesh, [Shard(0)])
    with strict(), pytest.raises(ImplicitCommunicationError, match=r"flip_sign.*no sharding rule"):
        flip_sign(c)

    @register_sharding(torch.ops.hp_test.flip_sign.default)
    def _(t: object) -> object:
        return [([Shard(0)], [Shard(0)]), ([Partial()], [Partial()])]

    clear_caches()
    with CommDebugMode() as comm:
        out = flip_sign(a)
    assert (comm.get_total_counts(), out.placements) == (0, (Shard(0),))
    torch.testing.assert_close(_whole(out), -x)


@spmd(world_size=2)
def test_shapes_that_depend_on_values_are_right() -> None:
    """nonzero, unique and masked_select give the single device's result, replicated."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.tensor([0.0, 3, 0, 5])
    d = distribute_tensor(x, mesh, [Shard(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for f in (
            torch.nonzero,
            torch.unique,
            lambda t: torch.masked_select(t, t > 0),
            lambda t: t[t > 0],
        ):
            out = f(d)
            torch.testing.assert_close(_whole(out), f(x))


@spmd(world_size=4)
def test_tensors_of_two_meshes_do_not_mix() -> None:
    """An operator over two meshes says so, with both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    a = distribute_tensor(torch.ones(4), mesh["dp"], [Shard(0)])
    b = distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)])
    with pytest.raises(MixedTensorError, match="live on different meshes"):
        a + b


@spmd(world_size=2)
def test_inference_mode_takes_the_same_rules() -> None:
    """Composite operators that reach dispatch only under inference_mode are right and stay sharded."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.randn(2, 3, 4), torch.randn(4, 4)
    d, dw = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [R])
    with torch.inference_mode():
        for f in (
            torch.matmul,
            F.linear,
            lambda a, b: a.reshape(6, 4) @ b,
            lambda a, _b: a.softmax(-1),
        ):
            with CommDebugMode() as comm:
                out = f(d, dw)
            assert comm.get_total_counts() == 0
            torch.testing.assert_close(_whole(out), f(x, w))


@spmd(world_size=2)
def test_size_one_axes_are_inert() -> None:
    """On a mesh of one rank an axis changes no value and sends nothing, whatever the placement says."""
    mesh = init_device_mesh("cpu", (1, 2))
    x = torch.randn(3, 4)
    for first in (R, Shard(0), Shard(1), Partial()):
        with CommDebugMode() as comm:
            d = distribute_tensor(x, mesh, [first, R], src_data_rank=None)
            out = (d @ d.t()).relu().view(-1).sum()
            whole = _whole(out)
        assert comm.get_total_counts() == 0
        torch.testing.assert_close(whole, (x @ x.t()).relu().sum())


@spmd(world_size=2)
def test_a_frozen_and_a_trained_argument_get_the_right_gradients() -> None:
    """Only what requires grad gets one, also when the other operand is Partial."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    a = distribute_tensor(x, mesh, [Shard(1)])
    b = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    out = a @ b
    assert out.is_partial()
    (out * 2 + 1).relu().sum().backward()
    ref = w.clone().requires_grad_()
    (x @ ref * 2 + 1).relu().sum().backward()
    assert isinstance(b.grad, DTensor)
    assert a.grad is None
    torch.testing.assert_close(_whole(b.grad), ref.grad)


@spmd(world_size=6)
def test_every_rank_decides_alike_where_axes_leave_different_sizes() -> None:
    """A dim that the first axis cuts unevenly leaves the second axis different sizes; no rank goes another way."""
    mesh = init_device_mesh("cpu", (3, 2))
    x = torch.arange(10.0).reshape(5, 2)
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(0), R], [R, Shard(0)]):
        d = distribute_tensor(x, mesh, placements)
        for f in (
            lambda t: t.reshape(10),
            lambda t: t.reshape(2, 5),
            lambda t: t.t().reshape(5, 2),
        ):
            torch.testing.assert_close(_whole(f(d)), f(x))


@spmd(world_size=4)
def test_a_tensor_never_holds_two_kinds_of_addends() -> None:
    """Reductions of different kinds over the two axes of a mesh combine the first before the second."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.randn(4, 6)
    d = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    torch.testing.assert_close(_whole(d.amax(1).sum(0)), x.amax(1).sum(0))
    torch.testing.assert_close(_whole(d.sum(1).amax(0)), x.sum(1).amax(0))
    torch.testing.assert_close(_whole(d.amin(0).amax(0)), x.amin(0).amax(0))


@spmd(world_size=2)
def test_softmax_and_norms_over_a_cut_dim_keep_it_cut() -> None:
    """A few numbers for each row travel instead of the tensor; forward and backward are right."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(3, 7)
    for f in (lambda t: t.softmax(-1), lambda t: t.log_softmax(-1)):
        d, ref = (
            distribute_tensor(x, mesh, [Shard(1)]).requires_grad_(),
            x.clone().requires_grad_(),
        )
        with CommDebugMode() as comm:
            out = f(d)
        assert comm.get_total_bytes() < x.numel() * 4 / 2  # a few numbers a row, not the rows
        assert out.placements == (Shard(1),)
        torch.testing.assert_close(_whole(out), f(ref))
        out.square().sum().backward()
        f(ref).square().sum().backward()
        torch.testing.assert_close(_whole(d.grad), ref.grad)


@spmd(world_size=2)
def test_batch_norm_keeps_its_running_statistics() -> None:
    """Training on a cut batch updates the statistics on every rank as on one device."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(6, 4)
    mean, var = torch.zeros(4), torch.ones(4)
    means, variances = (distribute_tensor(t, mesh, [R]) for t in (mean, var))
    out = F.batch_norm(distribute_tensor(x, mesh, [Shard(0)]), means, variances, training=True)
    torch.testing.assert_close(_whole(out), F.batch_norm(x, mean, var, training=True))
    torch.testing.assert_close(_whole(means), mean)
    torch.testing.assert_close(_whole(variances), var)


@spmd(world_size=2)
def test_a_rule_of_ones_own_comes_first() -> None:
    """It replaces the composition of smaller operators and the plans that were made before it."""
    from hp_dtensor.rules import _registry, composed

    op = torch.ops.aten._softmax.default
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 6)
    d = distribute_tensor(x, mesh, [Shard(1)])
    assert torch.softmax(d, 1).placements == (Shard(1),)
    old = _registry._table[op], set(_registry._replaced)
    assert composed._table[op] is not None
    try:

        @register_sharding(op)
        def whole(x: object, dim: int, half_to_float: bool) -> list[object]:
            return [([Replicate()], [Replicate(), None, None])]

        got = torch.softmax(d, 1)
        assert got.placements == (Replicate(),)
        torch.testing.assert_close(got.to_local(), torch.softmax(x, 1))
    finally:
        _registry._table[op] = old[0]
        _registry._replaced.clear()
        _registry._replaced.update(old[1])
        clear_caches()


@spmd(world_size=2)
def test_counts_are_found_under_both_names_of_a_collective() -> None:
    """Programs written for torch's mode look up ``torch.ops.c10d_functional``; what was not started counts as zero."""
    import torch.distributed._functional_collectives as functional

    mesh = init_device_mesh("cpu", (2,))
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    d = distribute_tensor(torch.ones(4, 2), mesh, [Partial()])
    net.register_forward_pre_hook(
        lambda _m, _x: (d.redistribute(placements=[Shard(0)]).to_local(),)
    )
    with CommDebugMode() as comm:
        net(torch.ones(1, 2))
        functional.all_reduce(torch.ones(2), "sum", mesh).wait()
    old, new = torch.ops.c10d_functional, torch.ops._c10d_functional
    counts = comm.get_comm_counts()
    assert counts == {new.reduce_scatter_tensor: 1, new.all_reduce: 1}
    assert (counts[old.all_reduce], counts[old.broadcast], counts.get(old.broadcast)) == (
        1,
        0,
        None,
    )
    assert old.all_reduce in counts
    assert old.broadcast not in counts
    assert comm.comm_counts == counts
    per_module = comm.comm_module_counts
    assert per_module["Global"]["forward"] == counts
    assert per_module["Global"]["backward"] == {}


@spmd(world_size=2)
def test_the_mode_knows_the_parameters_of_the_modules_that_ran() -> None:
    """By module and name, with the layouts of the distributed ones; modules that did not run are absent."""
    mesh = init_device_mesh("cpu", (2,))
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 4)))
    idle = torch.nn.Linear(2, 2)
    inner = net[1][0]  # type: ignore[index]  # modules that hold modules
    inner.weight = torch.nn.Parameter(distribute_tensor(inner.weight, mesh, [Shard(0)]))
    inner.bias = torch.nn.Parameter(distribute_tensor(inner.bias, mesh, [R]))
    net[1].register_forward_pre_hook(lambda _m, x: (DTensor.from_local(x[0], mesh, [R]),))
    comm = CommDebugMode()
    with comm:
        out = net(torch.ones(3, 2))
        _laid(out).redistribute(placements=[R])
    found = comm.get_parameter_info()
    assert {name: list(own) for name, own in found.items()} == {
        "Sequential.0": ["weight", "bias"],
        "Sequential.1.0": ["weight", "bias"],
    }
    assert found["Sequential.1.0"]["weight"] is inner.weight
    assert comm.get_sharding_info() == {
        "Sequential.1.0.weight": (Shard(0),),
        "Sequential.1.0.bias": (R,),
    }
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "log.json"
        comm.generate_json_dump(str(file))
        told = json.loads(file.read_text())
        comm.generate_json_dump(str(file), noise_level=0)
        assert json.loads(file.read_text()) == {"modules": told["modules"]}
    assert told["modules"]["Sequential.1.0"] == {
        "layouts": {"weight": ["S(0)"], "bias": ["R"]},
    }
    assert told["modules"]["Global"]["forward"] == {"all_gather_into_tensor": 1}
    assert [(c["op"], c["pass"], c["ranks"]) for c in told["collectives"]] == [
        ("all_gather_into_tensor", "forward", [0, 1])
    ]
    with comm:
        assert comm.get_parameter_info() == comm.get_sharding_info() == {}
        idle(torch.ones(1, 2))
    assert list(comm.get_parameter_info()) == ["Linear"]
    net(torch.ones(3, 2))
    assert list(comm.get_parameter_info()) == ["Linear"]


@spmd(world_size=2)
def test_a_rule_of_an_out_form_sees_what_is_written() -> None:
    """In torch's form the function gets the tensors of ``out=`` too, and lists a placement for each."""
    from hp_dtensor.rules import _registry

    op = torch.ops.aten.min.dim_min
    mesh = init_device_mesh("cpu", (2,))
    replaced = set(_registry._replaced)
    assert op not in _registry._table
    seen = []
    try:

        @register_sharding(op)
        def _least(
            x: object,
            dim: int,
            keepdim: bool,
            min: object,  # noqa: A002  # torch's name
            min_indices: object,
        ) -> list[object]:
            seen.append((min.shape, min_indices.dtype))  # type: ignore[attr-defined]
            return [([Shard(0), Shard(0)], [Shard(0), None, None, Shard(0), Shard(0)])]

        x = torch.randn(4, 6)
        out = tuple(
            distribute_tensor(torch.zeros(4, 1, dtype=dtype), mesh, [Shard(0)])
            for dtype in (torch.float32, torch.int64)
        )
        with CommDebugMode() as comm:
            torch.min(distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None), 1, True, out=out)
        assert comm.get_total_counts() == 0
        assert seen[0] == ((4, 1), torch.int64)
        for got, expected in zip(out, torch.min(x, 1, True), strict=True):
            torch.testing.assert_close(_whole(got), expected)
    finally:
        _registry._table.pop(op, None)
        _registry._replaced.clear()
        _registry._replaced.update(replaced)
        clear_caches()


@spmd(world_size=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_extreme_over_ranks_is_nan_where_one_of_them_has_it(dtype: torch.dtype) -> None:
    """Whichever rank it is on, as on one device; infinities and negative numbers keep their order."""
    mesh = init_device_mesh("cpu", (3,))
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [
            [1.0, -1.0, nan, -inf, -2.0, inf, -3.0],
            [2.0, -2.0, 0.0, 1.0, nan, 2.0, -inf],
            [3.0, -0.5, -1.0, -inf, -1.0, 5.0, nan],
        ],
        dtype=dtype,
    )
    d = distribute_tensor(x, mesh, [Shard(0)])
    for f in (
        lambda t: t.amax(0),
        lambda t: t.amin(0),
        lambda t: t.max(0).values,
        lambda t: t.argmin(0),
        lambda t: t.argmax(0),
        lambda t: t[:, :2].max(),
        lambda t: t.min(),
    ):
        torch.testing.assert_close(_whole(f(d)), f(x), equal_nan=True)
    scattered = d.amax(0).redistribute(placements=[Shard(0)])
    torch.testing.assert_close(_whole(scattered), x.amax(0), equal_nan=True)


@spmd(world_size=2)
def test_views_inside_inference_mode_of_tensors_from_outside() -> None:
    """They are no inference tensors, as torch has it, first and again; those of tensors from inside are."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 6)
    outside = distribute_tensor(x, mesh, [Shard(0)])
    with torch.inference_mode():
        inside = outside + 0
        for _ in range(2):
            for f in (
                lambda t: t.detach(),
                lambda t: t.t(),
                lambda t: t.view(4, 3, 2),
                lambda t: t.chunk(2, 1)[1],
                lambda t: t[1:3],
            ):
                torch.testing.assert_close(_whole(f(outside)), f(x))
                assert not f(outside).is_inference()
                assert f(inside).is_inference()


@spmd(world_size=4)
def test_numbers_of_several_meshes_are_put_together() -> None:
    """Norms of gradients on a mesh, on a slice of it and on none give one norm, by torch's own clipping."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    grads = [torch.randn(4, 4) for _ in range(3)]
    ps = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(3)]
    ps[0] = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Shard(1)]))
    ps[1] = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh["dp"], [Shard(0)]))
    ps[0].grad = distribute_tensor(grads[0], mesh, [Shard(0), Shard(1)])
    ps[1].grad = distribute_tensor(grads[1], mesh["dp"], [Shard(0)])
    ps[2].grad = grads[2].clone()
    total = torch.nn.utils.clip_grad_norm_(ps, 1.0)
    want = torch.cat(grads).norm()
    torch.testing.assert_close(_whole(total), want)
    torch.testing.assert_close(_whole(ps[1].grad), grads[1] / (want + 1e-6))


@spmd(world_size=2)
def test_a_mixed_error_says_where_the_plain_tensor_is() -> None:
    """The path of the module that is running, and the name of the parameter that nobody has distributed."""
    mesh = init_device_mesh("cpu", (2,))
    net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(torch.nn.LayerNorm(4)))
    x = distribute_tensor(torch.randn(2, 4), mesh, [Shard(0)])
    with pytest.raises(
        MixedTensorError, match=r"in module '1.0' \(LayerNorm\), where it is '1.0.weight'"
    ):
        net(x)
    with pytest.raises(MixedTensorError, match="float32, and nothing says"):
        x + torch.ones(2, 4)


@spmd(world_size=2)
@pytest.mark.parametrize("name", ["pinv", "solve", "polar", "svd"])
def test_kernels_that_conjugate_on_their_way_are_right(name: str) -> None:
    """Linear algebra of complex matrices makes conjugated views, which torch does not resolve below autograd."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 4, dtype=torch.complex64, generator=generator) for _ in range(2))
    programs: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "pinv": lambda x, _: torch.linalg.pinv(x),
        "solve": lambda x, y: torch.linalg.solve(x.mH, y),
        "polar": lambda x, y: torch.polar(x.abs(), y.real),
        "svd": lambda x, _: torch.linalg.svdvals(x @ x.mH),
    }
    program = programs[name]
    for placement in (Replicate(), Shard(0), Shard(1)):
        x, y = (distribute_tensor(t, mesh, [placement]) for t in (a, b))
        for _ in range(2):  # as planned, and as answered again
            got = program(x, y)
            assert isinstance(got, DTensor)
            torch.testing.assert_close(got.full_tensor(), program(a, b), rtol=1e-3, atol=1e-3)
