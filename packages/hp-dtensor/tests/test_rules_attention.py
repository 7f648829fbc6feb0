"""Attention: heads with their groups, no dropout, and the tables of accelerators by hand."""

import pytest
import torch
from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.rules import OpCall, Strategy, TensorMeta, find_rule

aten = torch.ops.aten
R, SUM = Replicate(), Partial("sum")
S0, S1, S2 = Shard(0), Shard(1), Shard(2)


def _meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32)


def _qkv(heads: int = 4, keys: int = 4, batch: int = 2) -> tuple[TensorMeta, ...]:
    return _meta(batch, heads, 6, 8), _meta(batch, keys, 5, 8), _meta(batch, keys, 5, 8)


def _found(
    op: torch._ops.OpOverload,
    args: tuple[object, ...],
    outputs: tuple[TensorMeta | None, ...],
    size: int = 2,
    **kwargs: object,
) -> list[Strategy]:
    entry = find_rule(op)
    assert entry is not None
    return list(entry.strategies(OpCall(op, args, kwargs, outputs, size)))


OUT, STATISTIC = _meta(2, 4, 6, 8), _meta(2, 4, 6)
CPU = aten._scaled_dot_product_flash_attention_for_cpu.default


def test_batch_heads_and_queries_may_be_cut() -> None:
    """Without a mask that depends on positions, queries are a batch as well."""
    assert _found(CPU, _qkv(), (OUT, STATISTIC)) == [
        Strategy((S0, S0), (S0, S0, S0)),
        Strategy((S1, S1), (S1, S1, S1)),
        Strategy((S2, S2), (S2, R, R)),
    ]
    causal = _found(CPU, (*_qkv(), 0.0, True), (OUT, STATISTIC))
    assert all(strategy.inputs[0] != S2 for strategy in causal)


def test_a_mask_is_cut_where_it_is_not_broadcast() -> None:
    """A mask of all heads is cut with the batch alone; a flat one with the queries."""
    per_batch = _found(CPU, _qkv(), (OUT, STATISTIC), attn_mask=_meta(2, 1, 6, 5))
    assert [strategy.inputs[3] for strategy in per_batch] == [S0, R, S2]
    flat = _found(CPU, _qkv(), (OUT, STATISTIC), attn_mask=_meta(6, 5))
    assert [strategy.inputs[3] for strategy in flat] == [R, R, S0]


@pytest.mark.parametrize(
    ("heads", "keys", "size", "expected"),
    [
        (8, 2, 2, True),
        (8, 4, 2, True),
        (8, 2, 4, False),
        (8, 1, 2, False),
        (6, 3, 3, True),
        (6, 3, 2, False),
        (6, 2, 3, False),
        (4, 4, 3, False),
        (5, 5, 3, True),
    ],
)
def test_grouped_heads(heads: int, keys: int, size: int, expected: bool) -> None:
    """Heads are cut exactly if each coordinate gets some, and the key heads of its query heads."""
    outputs = (_meta(2, heads, 6, 8), _meta(2, heads, 6))
    found = _found(CPU, _qkv(heads, keys), outputs, size)
    assert (Strategy((S1, S1), (S1, S1, S1)) in found) is expected


def test_with_dropout_nothing_is_cut() -> None:
    """Which elements are dropped must not depend on the layout."""
    assert _found(CPU, (*_qkv(), 0.1), (OUT, STATISTIC)) == []


WHOLE = _meta()
FLASH = (OUT, STATISTIC, None, None, None, None, WHOLE, WHOLE, _meta(0))
KERNELS: list[
    tuple[torch._ops.OpOverload, tuple[object, ...], tuple[TensorMeta | None, ...], int]
] = [
    (aten._scaled_dot_product_flash_attention.default, (*_qkv(), 0.0, True), FLASH, 3),
    (
        aten._scaled_dot_product_efficient_attention.default,
        (*_qkv(), None, True, 0.0, True),
        (OUT, _meta(2, 4, 32), WHOLE, WHOLE),
        3,
    ),
    (
        aten._scaled_dot_product_cudnn_attention.default,
        (*_qkv(), None, True, 0.0, True),
        (OUT, _meta(2, 4, 6, 1), None, None, None, None, WHOLE, WHOLE, _meta(0)),
        3,
    ),
    (
        aten._scaled_dot_product_fused_attention_overrideable.default,
        (*_qkv(), None, 0.0, True),
        FLASH,
        3,
    ),
]


@pytest.mark.parametrize("case", range(len(KERNELS)), ids=lambda at: str(KERNELS[at][0]))
def test_kernels_of_accelerators(case: int) -> None:
    """Output and statistics are cut by batch or heads; seeds and masks for debugging are whole."""
    op, args, outputs, inputs = KERNELS[case]
    rest = tuple(None if meta is None else R for meta in outputs[2:])
    assert _found(op, args, outputs) == [
        Strategy((cut, cut, *rest), (cut,) * inputs) for cut in (S0, S1)
    ]


Q, K, V = _qkv()
BIAS = _meta(2, 1, 6, 5)
BACKWARD: list[tuple[torch._ops.OpOverload, tuple[object, ...], int, tuple[Placement, ...]]] = [
    (
        aten._scaled_dot_product_flash_attention_backward.default,
        (OUT, Q, K, V, OUT, STATISTIC, None, None, 6, 5, 0.0, True, WHOLE, WHOLE),
        3,
        (S1,) * 6 + (R, R),
    ),
    (
        aten._scaled_dot_product_efficient_attention_backward.default,
        (OUT, Q, K, V, BIAS, OUT, STATISTIC, WHOLE, WHOLE, 0.0, [True] * 4, True),
        4,
        (S1,) * 4 + (R,) + (S1, S1) + (R, R),
    ),
    (
        aten._scaled_dot_product_cudnn_attention_backward.default,
        (OUT, Q, K, V, OUT, STATISTIC, WHOLE, WHOLE, BIAS, None, None, 6, 5, 0.0, True),
        3,
        (S1,) * 6 + (R, R, R),
    ),
    (
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
        (
            *(OUT, Q, K, V, BIAS, [True] * 4, OUT, STATISTIC),
            *(None, None, 6, 5, 0.0, True, WHOLE, WHOLE),
        ),
        4,
        (S1,) * 4 + (R,) + (S1, S1) + (R, R),
    ),
]


@pytest.mark.parametrize("case", range(len(BACKWARD)), ids=lambda at: str(BACKWARD[at][0]))
def test_gradients_of_accelerators(case: int) -> None:
    """By heads, gradients are cut like what they are of; that of a broadcast bias is a sum."""
    op, args, results, inputs = BACKWARD[case]
    outputs = (Q, K, V, BIAS)[:results]
    expected = (S1, S1, S1, SUM)[:results]
    assert Strategy(expected, inputs) in _found(op, args, outputs)
