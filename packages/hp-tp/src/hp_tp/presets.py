"""Plans of the decoders that people train: which layer is cut how, given what the layers are called.

All share one shape. Each sub-layer takes the whole sequence and is a pair of column- and row-parallel layers; between
sub-layers the values are replicated, or with sequence parallelism cut along the sequence, which turns each reduction into a
gather and a scatter of the same bytes and cuts what the norms keep. The embedding is cut by its vocabulary and so is the
output, so that tied weights agree.

Names are data (:class:`DecoderNames`); a model with other names needs no other function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hp_dtensor import Placement, Replicate, Shard
from torch import nn

from hp_tp.errors import PlanError
from hp_tp.norm import SequenceParallel
from hp_tp.plan import match_plan
from hp_tp.prepare import PrepareModuleInput
from hp_tp.style import ParallelStyle
from hp_tp.tensor_parallel import ColwiseParallel, RowwiseParallel

__all__ = ["HUGGING_FACE_NAMES", "LLAMA_NAMES", "DecoderNames", "check_degree", "llama_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderNames:
    """What a decoder calls its modules; each is a path in the model, those of a layer are paths in the layer."""

    embedding: str = "tok_embeddings"
    """The token embedding."""
    layers: str = "layers.*"
    """All layers, as a pattern."""
    attention_norm: str = "attention_norm"
    """The norm before attention."""
    attention: str = "attention"
    """The attention, whose first input is the normed sequence."""
    queries_keys_values: tuple[str, ...] = ("wq", "wk", "wv")
    """The projections in front of the heads, in the attention."""
    attention_output: str = "wo"
    """The projection behind them."""
    feed_forward_norm: str = "ffn_norm"
    """The norm before the feed-forward network."""
    feed_forward: str = "feed_forward"
    """The feed-forward network."""
    gate_and_up: tuple[str, ...] = ("w1", "w3")
    """Its first projections."""
    down: str = "w2"
    """Its last one."""
    norm: str = "norm"
    """The last norm."""
    output: str = "output"
    """The projection to the vocabulary."""


LLAMA_NAMES = DecoderNames()
"""The names of Meta's and TorchTitan's Llama."""

HUGGING_FACE_NAMES = DecoderNames(
    embedding="model.embed_tokens",
    layers="model.layers.*",
    attention_norm="input_layernorm",
    attention="self_attn",
    queries_keys_values=("q_proj", "k_proj", "v_proj"),
    attention_output="o_proj",
    feed_forward_norm="post_attention_layernorm",
    feed_forward="mlp",
    gate_and_up=("gate_proj", "up_proj"),
    down="down_proj",
    norm="model.norm",
    output="lm_head",
)
"""The names of the Llama family in Hugging Face's transformers."""


def llama_plan(
    model: nn.Module | DecoderNames | None = None,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    sequence_dim: int = 1,
) -> dict[str, ParallelStyle]:
    """Return the plan of a Llama-like decoder.

    Args:
        model: the model, for which only the entries that it has are returned (a stage of a pipeline lacks some), in Meta's or
            Hugging Face's names; or the names; None for Meta's.
        sequence_parallel: whether values between sub-layers are cut along the sequence.
        loss_parallel: whether the output is a DTensor cut along the vocabulary, for a loss that takes it so; else it is the
            whole, plain.
        sequence_dim: the dim of the sequence; 0 for models that put tokens first.

    Raises:
        PlanError: when *model* has none of the modules.

    Example:
        >>> from hp_tp import llama_plan
        >>> list(llama_plan(sequence_parallel=False))[:3]
        ['tok_embeddings', 'layers.*.attention', 'layers.*.attention.wq']
    """
    if not isinstance(model, nn.Module):
        names = LLAMA_NAMES if model is None else model
        return dict(_entries(names, sequence_parallel, loss_parallel, sequence_dim))
    for names in (LLAMA_NAMES, HUGGING_FACE_NAMES):
        entries = dict(_entries(names, sequence_parallel, loss_parallel, sequence_dim))
        found = {match.key for match in match_plan(model, entries, unmatched="ignore")}
        if found:
            return {key: style for key, style in entries.items() if key in found}
    children = [name for name, _ in model.named_children()]
    message = (
        f"{type(model).__name__} has no module that Meta's or Hugging Face's Llama has; its children are {children}. Pass "
        "DecoderNames(...) with its names instead."
    )
    raise PlanError(message)


def _entries(
    names: DecoderNames, sequence_parallel: bool, loss_parallel: bool, sequence_dim: int
) -> Iterator[tuple[str, ParallelStyle]]:
    between: Placement = Shard(sequence_dim) if sequence_parallel else Replicate()
    norm = SequenceParallel(sequence_dim=sequence_dim)
    enter = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    leave = RowwiseParallel(output_layouts=between)
    yield names.embedding, leave
    for sub_norm, module, first, last in (
        (names.attention_norm, names.attention, names.queries_keys_values, names.attention_output),
        (names.feed_forward_norm, names.feed_forward, names.gate_and_up, names.down),
    ):
        path = f"{names.layers}.{module}"
        if sequence_parallel:
            yield f"{names.layers}.{sub_norm}", norm
        yield path, enter
        for name in first:
            yield f"{path}.{name}", ColwiseParallel()
        yield f"{path}.{last}", leave
    if sequence_parallel:
        yield names.norm, norm
    yield (
        names.output,
        ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    )


def check_degree(degree: int, **counts: int) -> None:
    """Refuse a tensor-parallel degree that does not divide what must not be cut within: heads, above all.

    Args:
        degree: the number of ranks.
        counts: what must be shared out whole, by name.

    Raises:
        PlanError: naming what does not divide, and the degrees that do.

    Example:
        >>> from hp_tp import check_degree
        >>> check_degree(4, heads=32, kv_heads=8)
        >>> check_degree(6, heads=32, kv_heads=8)
        Traceback (most recent call last):
        hp_tp.errors.PlanError: 6 ranks cannot share out heads=32, kv_heads=8 whole; degrees that can: 1, 2, 4, 8
    """
    bad = {name: count for name, count in counts.items() if count % degree}
    if not bad:
        return
    legal = [
        d for d in range(1, min(counts.values()) + 1) if not any(c % d for c in counts.values())
    ]
    listed = ", ".join(f"{name}={count}" for name, count in bad.items())
    message = f"{degree} ranks cannot share out {listed} whole; degrees that can: {', '.join(map(str, legal))}"
    raise PlanError(message)
