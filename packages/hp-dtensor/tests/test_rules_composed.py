"""Compositions: the same numbers as the operator, used only where it would have to gather."""

from collections.abc import Iterable

import pytest
import torch
from hp_dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.rules import OpCall, TensorMeta
from hp_dtensor.rules.composed import compose
from hp_dtensor.testing import draw

aten = torch.ops.aten
X, G, W, B = draw((2, 5, 3), (2, 5, 3), (3,), (3,))
ROWS, WEIGHT = draw((5, 4), (4,))
TARGET = torch.tensor([1, 0, 3, 2, 1])
INF = torch.tensor([[1.0, -torch.inf], [-torch.inf, -torch.inf]], dtype=torch.float64)
NAN = torch.tensor([[1.0, torch.nan, 2.0], [3.0, 3.0, -1.0]], dtype=torch.float64)


def _call(
    op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> OpCall:
    result = op(*args, **kwargs)
    results = result if isinstance(result, tuple) else (result,)

    def meta(value: object) -> object:
        return TensorMeta.of(value) if isinstance(value, torch.Tensor) else value

    return OpCall(
        op,
        tuple(map(meta, args)),
        {name: meta(value) for name, value in kwargs.items()},
        tuple(
            TensorMeta.of(value) if isinstance(value, torch.Tensor) else None for value in results
        ),
        1,
    )


def _norm_backward(dims: list[int], mask: list[bool]) -> tuple[object, ...]:
    weight, bias = draw(dims, dims)
    _, mean, scale = aten.native_layer_norm(X, dims, weight, bias, 1e-5)
    return (G, X, dims, mean, scale, weight, bias, mask)


CASES: list[tuple[str, int, tuple[object, ...], dict[str, object]]] = [
    ("_softmax", 1, (X, 1, False), {}),
    ("_softmax", 2, (X, -1, False), {}),
    ("_log_softmax", 1, (X, 1, False), {}),
    ("_softmax_backward_data", 1, (G, X.softmax(1), 1, torch.float64), {}),
    ("_log_softmax_backward_data", 1, (G, X.log_softmax(1), 1, torch.float64), {}),
    ("logsumexp", 1, (X, [1]), {}),
    ("logsumexp", 0, (X, [0, 2], True), {}),
    ("logsumexp", 1, (INF, [1]), {}),
    ("logsumexp", 1, (torch.complex(X, G), [1]), {}),
    ("var.correction", 1, (X, [1]), {}),
    ("var.correction", 1, (X, None), {"correction": 0, "keepdim": True}),
    ("std.correction", 2, (X, [0, 2]), {"correction": 2}),
    ("var_mean.correction", 1, (X, [1]), {"keepdim": True}),
    ("std_mean.correction", 1, (X, None), {}),
    ("linalg_vector_norm", 1, (X, 2), {}),
    ("linalg_vector_norm", 1, (X, 3.5, [1], True), {}),
    ("linalg_vector_norm", 1, (X.float(), 2, [1]), {"dtype": torch.float64}),
    ("norm.ScalarOpt_dim", 1, (X, None, [1]), {}),
    ("norm.ScalarOpt_dim", 1, (X, 3, [1], True), {}),
    ("aminmax", 1, (X,), {"dim": 1}),
    ("aminmax", 1, (X,), {}),
    ("argmax", 1, (X, 1), {}),
    ("argmax", 1, (X,), {}),
    ("argmax", 1, (NAN, 1), {}),
    ("argmin", 1, (NAN, 1, True), {}),
    ("argmin", 0, (X, None, True), {}),
    ("max.dim", 1, (X, 1), {}),
    ("max.dim", 1, (NAN, 1, True), {}),
    ("min.dim", 0, (X, 0), {}),
    ("native_layer_norm", 2, (X, [3], W, B, 1e-5), {}),
    ("native_layer_norm", 1, (X, [5, 3], None, None, 1e-5), {}),
    ("native_layer_norm_backward", 2, _norm_backward([3], [True, True, True]), {}),
    ("native_layer_norm_backward", 1, _norm_backward([5, 3], [True, False, True]), {}),
    ("native_layer_norm_backward", 0, _norm_backward([2, 5, 3], [False, True, True]), {}),
    ("_fused_rms_norm", 2, (X, [3], W, 1e-5), {}),
    ("_fused_rms_norm", 2, (X, [3], None, None), {}),
    ("nll_loss_forward", 0, (ROWS, TARGET, WEIGHT.abs(), 1, -100), {}),
    ("nll_loss_forward", 0, (ROWS, TARGET, None, 1, 1), {}),
]


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    found: torch._ops.OpOverload = getattr(getattr(aten, packet), overload or "default")
    return found


def _results(value: object) -> Iterable[object]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda at: f"{at}-{CASES[at][0]}")
def test_a_composition_has_the_numbers_of_its_operator(case: int) -> None:
    """Values, shapes and dtypes agree on whole tensors, where both can run."""
    name, dim, args, kwargs = CASES[case]
    op = _overload(name)
    call = _call(op, args, kwargs)
    placements: list[list[Placement]] = [[Replicate()] for _ in call.tensors]
    placements[0] = [Shard(dim)]
    run = compose(call, placements)
    assert run is not None
    expected, found = _results(op(*args, **kwargs)), _results(run(*args, **kwargs))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("_softmax", (X.bfloat16(), 1, False)),
        ("_log_softmax", (X.half(), 1, False)),
        ("logsumexp", (X.bfloat16(), [1])),
        ("var.correction", (X.bfloat16(), [1])),
        ("linalg_vector_norm", (X.bfloat16() * 100, 2, [1])),
        ("native_layer_norm", (X.bfloat16(), [5, 3], None, None, 1e-5)),
    ],
)
def test_half_precision_is_computed_wide(name: str, args: tuple[object, ...]) -> None:
    """In half precision the results have the operator's dtypes, and one rounding of its values."""
    op = _overload(name)
    run = compose(_call(op, args, {}), [[Shard(1)]])
    assert run is not None
    for one, other in zip(_results(op(*args)), _results(run(*args)), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "placements",
    [[Shard(0)], [Shard(2), Replicate()], [Partial("sum")], [StridedShard(0, split_factor=2)], []],
)
def test_where_nothing_would_be_gathered_the_operator_itself_runs(
    placements: list[Placement],
) -> None:
    """A cut of another dim, a replica or a sum is no reason to leave the fused kernel."""
    assert compose(_call(aten._softmax.default, (X, 1, False), {}), [placements]) is None


def test_orders_that_combine_are_not_composed() -> None:
    """Norms of order 0, 1 and infinity have strategies for cut dims already."""
    for order in (0, 1, float("inf"), float("-inf")):
        call = _call(aten.linalg_vector_norm.default, (X, order, [1]), {})
        assert compose(call, [[Shard(1)]]) is None


def test_operators_without_a_composition_have_none() -> None:
    """Everything else is left to the rules."""
    assert compose(_call(aten.mm.default, draw((5, 4), (4, 3)), {}), [[Shard(1)], []]) is None
    assert compose(_call(aten._softmax.default, (X[:0], 1, False), {}), [[Shard(1)]]) is None


def test_the_gradient_of_rms_norm_is_right() -> None:
    """The kernel runs on accelerators alone; autograd over the composition is the other answer."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    (x * rstd * w).backward(G)
    metas = [TensorMeta.of(tensor) for tensor in (G, X, rstd, W)]
    call = OpCall(
        aten._fused_rms_norm_backward.default,
        (metas[0], metas[1], [3], metas[2], metas[3], [True, True]),
        {},
        (metas[1], metas[3]),
        1,
    )
    run = compose(call, [[Shard(2)], [Shard(2)], [Replicate()], [Shard(0)]])
    assert run is not None
    found = run(G, X, [3], rstd.detach(), W, [True, True])
    assert isinstance(found, tuple)
    torch.testing.assert_close(found, (x.grad, w.grad))
