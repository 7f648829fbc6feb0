"""Scaled dot product attention: cut the batch, the heads, or the queries.

The idea: every batch entry and every head attends alone, and so does every query as long as no
mask depends on its position. Each kernel is a line that labels its arguments and results.

The rule: with fewer key heads than query heads (grouped queries) a cut of the heads is right if it
gives each coordinate the key heads of its query heads. With dropout nothing is cut: which
elements are dropped would depend on the layout. A kernel is never given an empty piece.

The design not taken: cutting keys and values. The results would have to be weighted by their
softmax denominators, which is what context parallelism does, on purpose and not in dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.rules._registry import (
    OpCall,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)
from hp_dtensor.rules.view import cuts

__all__: list[str] = []

REPLICATE = Replicate()

# b batch, h query heads, g key heads, q queries, s keys, d and e widths; a mask has its labels
# aligned to the right and is broadcast where its size is 1.
QUERY, KEY, VALUE, OUTPUT, STATISTIC, MASK = "bhqd", "bgsd", "bgse", "bhqe", "bhq", "bhqs"


@dataclass(frozen=True, slots=True)
class Kernel:
    """How one attention operator names its arguments and results."""

    arguments: tuple[str, ...]
    """Labels by argument position; empty for what is no tensor or is kept whole."""
    results: tuple[str, ...]
    """Labels by result; empty for what is kept whole."""
    dropout: int
    """Position of the dropout probability."""
    causal: int
    """Position of ``is_causal``."""
    keywords: Mapping[str, str] = field(default_factory=dict)
    """Labels by keyword."""
    queries: bool = False
    """Whether the queries may be cut."""

    def __call__(self, call: OpCall) -> Iterator[Strategy]:
        """Yield the strategies of *call*."""
        if call.arg(self.dropout, "dropout_p", 0.0) != 0.0:
            return
        inputs = self._inputs(call)
        labels = ["b", "h"]
        if self.queries and not call.arg(self.causal, "is_causal", False):
            labels.append("q")
        for label in labels:
            if _divides(call, inputs, label):
                yield Strategy(
                    outputs=tuple(
                        None if meta is None else _place(meta, dims, label, result=True)
                        for meta, dims in zip(call.outputs, self._results(call), strict=True)
                    ),
                    inputs=tuple(
                        _place(meta, dims, label)
                        for meta, dims in zip(call.tensors, inputs, strict=True)
                    ),
                )

    def _inputs(self, call: OpCall) -> list[str]:
        found = [
            self.arguments[position] if position < len(self.arguments) else ""
            for position, value in enumerate(call.args)
            if isinstance(value, TensorMeta)
        ]
        found += [
            self.keywords.get(name, "")
            for name, value in call.kwargs.items()
            if isinstance(value, TensorMeta)
        ]
        return found

    def _results(self, call: OpCall) -> Sequence[str]:
        return (*self.results, *[""] * (len(call.outputs) - len(self.results)))


def _aligned(meta: TensorMeta, dims: str) -> str:
    return dims[len(dims) - len(meta.shape) :] if dims == MASK else dims


def _place(meta: TensorMeta, dims: str, label: str, *, result: bool = False) -> Placement:
    """Cut the dim called *label* (query heads take their key heads along)."""
    if not dims:
        return REPLICATE
    names = {"h", "g"} if label == "h" else {label}
    for dim, name in enumerate(_aligned(meta, dims)):
        if name in names and (dims != MASK or meta.shape[dim] != 1):
            return Shard(dim)
    return Partial("sum") if result else REPLICATE


def _divides(call: OpCall, inputs: Sequence[str], label: str) -> bool:
    """Whether each coordinate gets a piece, and the key heads of its query heads."""
    sizes: dict[str, int] = {}
    for meta, dims in zip(call.tensors, inputs, strict=True):
        if dims and dims != MASK:
            # Statistics may be padded, or have dims of their own: what comes first counts.
            sizes = {**dict(zip(dims, meta.shape, strict=False)), **sizes}
    ends = cuts(sizes[label], call.axis_size)
    if any(end <= start for start, end in zip((0, *ends), ends, strict=False)):
        return False
    if label != "h":
        return True
    group, rest = divmod(sizes["h"], max(sizes["g"], 1))
    key_ends = cuts(sizes["g"], call.axis_size)
    return not rest and ends == tuple(group * end for end in key_ends)


_BIAS = {"attn_mask": MASK, "attn_bias": MASK}

register_rule(
    aten_ops("_scaled_dot_product_flash_attention_for_cpu.default"),
    Kernel((QUERY, KEY, VALUE), (OUTPUT, STATISTIC), 3, 4, _BIAS, queries=True),
)
register_rule(
    aten_ops("_scaled_dot_product_flash_attention_for_cpu_backward.default"),
    Kernel(
        (OUTPUT, QUERY, KEY, VALUE, OUTPUT, STATISTIC),
        (QUERY, KEY, VALUE),
        6,
        7,
        _BIAS,
        queries=True,
    ),
)
register_rule(
    aten_ops("_scaled_dot_product_efficient_attention.default"),
    Kernel((QUERY, KEY, VALUE, MASK), (OUTPUT, STATISTIC), 5, 6, _BIAS),
)
register_rule(
    aten_ops("_scaled_dot_product_efficient_attention_backward.default"),
    Kernel(
        (OUTPUT, QUERY, KEY, VALUE, MASK, OUTPUT, STATISTIC),
        (QUERY, KEY, VALUE, MASK),
        9,
        11,
    ),
)
register_rule(
    aten_ops("_scaled_dot_product_flash_attention.default"),
    Kernel((QUERY, KEY, VALUE), (OUTPUT, STATISTIC), 3, 4),
)
register_rule(
    aten_ops("_scaled_dot_product_flash_attention_backward.default"),
    Kernel((OUTPUT, QUERY, KEY, VALUE, OUTPUT, STATISTIC), (QUERY, KEY, VALUE), 10, 11),
)
register_rule(
    aten_ops(
        "_scaled_dot_product_cudnn_attention.default",
    ),
    Kernel((QUERY, KEY, VALUE, MASK), (OUTPUT, STATISTIC), 5, 6, _BIAS),
)
register_rule(
    aten_ops("_scaled_dot_product_cudnn_attention_backward.default"),
    Kernel(
        (OUTPUT, QUERY, KEY, VALUE, OUTPUT, STATISTIC, "", "", MASK),
        (QUERY, KEY, VALUE),
        13,
        14,
    ),
)
register_rule(
    aten_ops("_scaled_dot_product_fused_attention_overrideable.default"),
    Kernel((QUERY, KEY, VALUE, MASK), (OUTPUT, STATISTIC), 4, 5, _BIAS),
)
register_rule(
    aten_ops("_scaled_dot_product_fused_attention_overrideable_backward.default"),
    Kernel(
        (OUTPUT, QUERY, KEY, VALUE, MASK, "", OUTPUT, STATISTIC),
        (QUERY, KEY, VALUE, MASK),
        12,
        13,
    ),
)
