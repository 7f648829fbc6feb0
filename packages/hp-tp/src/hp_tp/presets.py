"""Plans of the decoders that people train: which layer is cut how, given what the layers are called.

All share one shape. Each sub-layer takes the whole sequence and is a pair of column- and row-parallel layers; between
sub-layers the values are replicated, or with sequence parallelism cut along the sequence, which turns each reduction into a
gather and a scatter of the same bytes and cuts what the norms keep. The embedding is cut by its vocabulary and so is the
output, so that tied weights agree.

Names are data (:class:`DecoderNames`); a model with other names needs no other function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from hp_dtensor import Placement, Replicate, Shard
from torch import nn

from hp_tp.attention import KVHeadParallel
from hp_tp.errors import PlanError
from hp_tp.experts import TensorParallel
from hp_tp.linear_attention import GatedDeltaNetParallel
from hp_tp.norm import SequenceParallel
from hp_tp.plan import match_plan
from hp_tp.prepare import PrepareModuleInput
from hp_tp.replicas import LocalReplicas
from hp_tp.seams import LeavingParallel, SharedColumnsParallel
from hp_tp.style import CombinedParallel, ParallelStyle
from hp_tp.tensor_parallel import ColwiseParallel, RowwiseParallel

__all__ = [
    "HUGGING_FACE_NAMES",
    "LLAMA_NAMES",
    "DecoderNames",
    "check_degree",
    "gqa_plan",
    "linear_attention_plan",
    "llama_plan",
    "mla_plan",
    "moe_plan",
]


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
    experts_block: str = "moe"
    """The mixture of experts of a layer, whose first input is the normed sequence."""
    experts: str = "experts"
    """The experts, in it: a module of stacked weights that takes tokens and counts."""
    shared_experts: str = "shared_experts"
    """The experts that all tokens pass, in it; with the names of the feed-forward network."""
    latent_queries: tuple[str, str, str] = ("wq_a", "q_norm", "wq_b")
    """The projection to latent queries, their norm and the projection to heads, in a latent attention."""
    latent_keys_values: tuple[str, str, str] = ("wkv_a", "kv_norm", "wkv_b")
    """The same for keys and values; the first also gives the rotary key that all heads share."""
    queries: str = "wq"
    """The projection of queries when these are not latent."""
    linear_attention: str = "linear_attn"
    """The linear attention of a layer, whose first input is the normed sequence."""


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
    latent_queries=("q_a_proj", "q_a_layernorm", "q_b_proj"),
    latent_keys_values=("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
    queries="q_proj",
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
    return _plan(
        model,
        lambda names: _entries(names, sequence_parallel, loss_parallel, sequence_dim),
    )


Entries: TypeAlias = Iterable[tuple[str, ParallelStyle]]


def _plan(
    model: nn.Module | DecoderNames | None, entries: Callable[[DecoderNames], Entries]
) -> dict[str, ParallelStyle]:
    """The entries for some names; of a model those that it has, in the names that it has."""
    if not isinstance(model, nn.Module):
        return dict(entries(LLAMA_NAMES if model is None else model))
    for names in (LLAMA_NAMES, HUGGING_FACE_NAMES):
        made = dict(entries(names))
        found = {match.key for match in match_plan(model, made, unmatched="ignore")}
        if found:
            return {key: style for key, style in made.items() if key in found}
    children = [name for name, _ in model.named_children()]
    message = (
        f"{type(model).__name__} has no module that Meta's or Hugging Face's Llama has; its children are {children}. Pass "
        "DecoderNames(...) with its names instead."
    )
    raise PlanError(message)


def gqa_plan(
    model: nn.Module | DecoderNames | None = None,
    *,
    head_dim: int,
    num_kv_heads: int,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    sequence_dim: int = 1,
) -> dict[str, ParallelStyle]:
    """Return the plan of a decoder whose query heads share key-value heads, of which there may be fewer than ranks.

    Args:
        model: as in :func:`llama_plan`.
        head_dim: the width of a head.
        num_kv_heads: how many key-value heads there are.
        sequence_parallel: as in :func:`llama_plan`.
        loss_parallel: likewise.
        sequence_dim: likewise.

    Raises:
        PlanError: when *model* has none of the modules.

    Example:
        >>> from hp_tp import gqa_plan
        >>> plan = gqa_plan(head_dim=128, num_kv_heads=8)
        >>> type(plan["layers.*.attention.wk"]).__name__
        'KVHeadParallel'
    """
    heads = KVHeadParallel(head_dim=head_dim, num_heads=num_kv_heads)

    def entries(names: DecoderNames) -> Entries:
        path = f"{names.layers}.{names.attention}"
        shared = {f"{path}.{name}" for name in names.queries_keys_values[1:]}
        for key, style in _entries(names, sequence_parallel, loss_parallel, sequence_dim):
            yield key, heads if key in shared else style

    return _plan(model, entries)


def moe_plan(
    model: nn.Module | DecoderNames | None = None,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    sequence_dim: int = 1,
    experts: ParallelStyle | None = None,
) -> dict[str, ParallelStyle]:
    """Return the plan of a decoder some of whose layers have a mixture of experts in place of a feed-forward network.

    Inside the mixture values are whole on every rank, so that routers and what mixes the experts are right as they are; the
    hidden features of every expert are cut.

    Args:
        model: as in :func:`llama_plan`; the experts take tokens sorted by expert and their counts.
        sequence_parallel: as in :func:`llama_plan`.
        loss_parallel: likewise.
        sequence_dim: likewise.
        experts: another style for the experts, such as :class:`ExpertParallel`.

    Raises:
        PlanError: when *model* has none of the modules.

    Example:
        >>> from hp_tp import moe_plan
        >>> [key for key in moe_plan() if "moe" in key][:2]
        ['layers.*.moe', 'layers.*.moe.experts']
    """
    style = TensorParallel() if experts is None else experts

    def entries(names: DecoderNames) -> Entries:
        yield from _entries(names, sequence_parallel, loss_parallel, sequence_dim)
        path = f"{names.layers}.{names.experts_block}"
        if sequence_parallel:
            yield path, _whole_inside(sequence_dim)
        yield f"{path}.{names.experts}", style
        for name in names.gate_and_up:
            yield f"{path}.{names.shared_experts}.{name}", ColwiseParallel()
        yield f"{path}.{names.shared_experts}.{names.down}", RowwiseParallel()

    return _plan(model, entries)


def _whole_inside(dim: int) -> ParallelStyle:
    """A piece of the sequence outside, plain whole values inside."""
    cut = Shard(dim)
    enter = PrepareModuleInput(
        input_layouts=cut,
        desired_input_layouts=Replicate(),
        use_local_output=True,
        leave_others=True,
    )
    return CombinedParallel(styles=(enter, LeavingParallel(dim=dim)))


def mla_plan(
    model: nn.Module | DecoderNames | None = None,
    *,
    qk_rope_head_dim: int,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    sequence_dim: int = 1,
) -> dict[str, ParallelStyle]:
    """Return the plan of a decoder with latent attention, mixtures of experts included.

    The projections to latents are whole on every rank, those from latents to heads are cut by heads. The rotary key comes from
    the first and is used by all heads, so that its gradient is added up.

    Args:
        model: as in :func:`llama_plan`.
        qk_rope_head_dim: the width of the rotary key: the last columns of the projection to latent keys and values.
        sequence_parallel: as in :func:`llama_plan`.
        loss_parallel: likewise.
        sequence_dim: likewise.

    Raises:
        PlanError: when *model* has none of the modules.

    Example:
        >>> from hp_tp import mla_plan
        >>> type(mla_plan(qk_rope_head_dim=64)["layers.*.attention.wkv_b"]).__name__
        'ColwiseParallel'
    """
    same = LocalReplicas(alike=True)
    shared = CombinedParallel(styles=(same, SharedColumnsParallel(columns=qk_rope_head_dim)))
    whole = PrepareModuleInput(
        input_layouts=Shard(sequence_dim) if sequence_parallel else Replicate(),
        desired_input_layouts=Replicate(),
        use_local_output=True,
        leave_others=True,
    )

    def entries(names: DecoderNames) -> Entries:
        path = f"{names.layers}.{names.attention}"
        skipped = {f"{path}.{name}" for name in names.queries_keys_values}
        others = moe_plan(
            names,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            sequence_dim=sequence_dim,
        )
        for key, style in others.items():
            if key not in skipped:
                yield key, whole if key == path else style
        to_queries, query_norm, from_queries = names.latent_queries
        to_keys, key_norm, from_keys = names.latent_keys_values
        for name in (to_queries, query_norm, key_norm):
            yield f"{path}.{name}", same
        yield f"{path}.{to_keys}", shared
        for name in (names.queries, from_queries, from_keys):
            yield f"{path}.{name}", ColwiseParallel()

    return _plan(model, entries)


def linear_attention_plan(
    model: nn.Module | DecoderNames | None = None,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    sequence_dim: int = 1,
) -> dict[str, ParallelStyle]:
    """Return the plan of a decoder some of whose layers have a gated delta net in place of attention.

    Args:
        model: as in :func:`llama_plan`.
        sequence_parallel: as in :func:`llama_plan`.
        loss_parallel: likewise.
        sequence_dim: likewise.

    Raises:
        PlanError: when *model* has none of the modules.

    Example:
        >>> from hp_tp import linear_attention_plan
        >>> type(linear_attention_plan()["layers.*.linear_attn"]).__name__
        'GatedDeltaNetParallel'
    """
    between: Placement = Shard(sequence_dim) if sequence_parallel else Replicate()

    def entries(names: DecoderNames) -> Entries:
        yield from _entries(names, sequence_parallel, loss_parallel, sequence_dim)
        yield (
            f"{names.layers}.{names.linear_attention}",
            GatedDeltaNetParallel(input_layouts=between, output_layouts=between),
        )

    return _plan(model, entries)


def _entries(
    names: DecoderNames, sequence_parallel: bool, loss_parallel: bool, sequence_dim: int
) -> Iterator[tuple[str, ParallelStyle]]:
    between: Placement = Shard(sequence_dim) if sequence_parallel else Replicate()
    norm = SequenceParallel(sequence_dim=sequence_dim)
    enter = PrepareModuleInput(
        input_layouts=between, desired_input_layouts=Replicate(), leave_others=True
    )
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
