"""Declarations of the parts of a decoder, for any order of its dims.

Activations have a batch dim and a sequence dim, or only tokens (``batch_dim=None``): then data-parallel, context and tensor
axes cut one dim, in this order. Each helper is a function of names and dims and returns a value; those called ``set_...``
put such values on the parts of a module (or of a config that builds one), as its attribute ``sharding_config``.

``enable_sp`` says whether activations between sub-layers are cut along the sequence by the tensor axis too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Protocol, cast

from hp_dtensor import Partial, Replicate, Shard
from torch import nn

from hp_tp.errors import PlanError
from hp_tp.sharding import (
    AxisType,
    LayoutLike,
    LocalMapConfig,
    ShardingConfig,
    SpmdLayout,
    SpmdType,
)

__all__ = [
    "attention_activation_placement",
    "colwise_config",
    "dense_activation_placement",
    "dense_param_placement",
    "dense_sequence_parallel_placement",
    "norm_config",
    "pre_lm_head_norm_config",
    "rowwise_config",
    "set_decoder_sharding_config",
    "set_dense_ffn_sharding",
    "set_gqa_attention_sharding",
    "set_gqa_inner_attention_local_map",
    "set_qkv_linear_sharding",
    "token_id_placement",
]

_R = Replicate()


class Declarable(Protocol):
    """What a declaration can be put on: a module, or a config that builds one."""

    sharding_config: ShardingConfig | None


def dense_param_placement(*, tp: AxisType) -> SpmdLayout:
    """Return the layout of a parameter that only the tensor axis treats specially.

    Example:
        >>> from hp_dtensor import Shard
        >>> from hp_tp import dense_param_placement
        >>> dense_param_placement(tp=Shard(0)).axes()
        ('dp', 'cp', 'tp')
    """
    return SpmdLayout({"dp": _R, "cp": _R, "tp": tp})


def dense_activation_placement(
    *,
    tp: AxisType,
    cp: AxisType | None = None,
    batch_dim: int | None = 0,
    seq_dim: int = 1,
    ndim: int | None = None,
) -> SpmdLayout:
    """Return the layout of an activation.

    Args:
        tp: what the tensor axis does: ``Shard`` of a dim, a replica or ``Partial()``.
        cp: what the context axis does; it cuts the sequence when None.
        batch_dim: the dim that data-parallel axes cut; None when batch and sequence are one dim of tokens.
        seq_dim: the dim of the sequence, or of the tokens.
        ndim: how many dims there are; 3, or 2 with tokens, when None.

    Example:
        >>> from hp_dtensor import Shard
        >>> from hp_tp import dense_activation_placement
        >>> dense_activation_placement(tp=Shard(1)).partition_spec
        ('dp', ('cp', 'tp'), None)
        >>> dense_activation_placement(tp=Shard(-1), batch_dim=None, seq_dim=0).partition_spec
        (('dp', 'cp'), 'tp')
    """
    count = ndim if ndim is not None else 2 if batch_dim is None else 3
    entries: list[list[str]] = [[] for _ in range(count)]
    entries[seq_dim if batch_dim is None else batch_dim].append("dp")
    types: dict[str, AxisType] = {}
    for axis, kind in (("cp", Shard(seq_dim) if cp is None else cp), ("tp", tp)):
        if isinstance(kind, Shard):
            entries[kind.dim].append(axis)
        else:
            types[axis] = kind
    spec = tuple(None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries)
    return SpmdLayout(types, partition_spec=spec)


def token_id_placement(*, batch_dim: int | None = 0, seq_dim: int = 1) -> SpmdLayout:
    """Return the layout of token ids, which the ranks of a tensor axis share."""
    ndim = 1 if batch_dim is None else 2
    return dense_activation_placement(tp=_R, batch_dim=batch_dim, seq_dim=seq_dim, ndim=ndim)


def dense_sequence_parallel_placement(
    *, batch_dim: int | None = 0, seq_dim: int = 1
) -> SpmdLayout:
    """Return the layout of an activation that the tensor axis cuts along the sequence."""
    return dense_activation_placement(tp=Shard(seq_dim), batch_dim=batch_dim, seq_dim=seq_dim)


def attention_activation_placement(
    *,
    cp: AxisType | None = None,
    head_dim: int = 1,
    batch_dim: int | None = 0,
    seq_dim: int = 2,
    ndim: int = 4,
) -> SpmdLayout:
    """Return the layout of queries, keys or values: heads over the tensor axis.

    Args:
        cp: what the context axis does; it cuts the sequence when None.
        head_dim: the dim of the heads.
        batch_dim: as in :func:`dense_activation_placement`.
        seq_dim: likewise.
        ndim: how many dims there are.
    """
    return dense_activation_placement(
        tp=Shard(head_dim), cp=cp, batch_dim=batch_dim, seq_dim=seq_dim, ndim=ndim
    )


def _between(*, enable_sp: bool, batch_dim: int | None, seq_dim: int) -> SpmdLayout:
    """The layout between sub-layers."""
    if enable_sp:
        return dense_sequence_parallel_placement(batch_dim=batch_dim, seq_dim=seq_dim)
    return dense_activation_placement(tp=SpmdType.I, batch_dim=batch_dim, seq_dim=seq_dim)


def _whole(*, batch_dim: int | None, seq_dim: int) -> SpmdLayout:
    """The layout inside a sub-layer: each rank uses the whole for other work."""
    return dense_activation_placement(tp=SpmdType.R, batch_dim=batch_dim, seq_dim=seq_dim)


def colwise_config(
    *, bias: bool = True, batch_dim: int | None = 0, seq_dim: int = 1
) -> ShardingConfig:
    """Return the declaration of a linear layer cut by its outputs.

    Args:
        bias: whether the layer may have one.
        batch_dim: as in :func:`dense_activation_placement`.
        seq_dim: likewise.

    Example:
        >>> from hp_tp import colwise_config
        >>> sorted(colwise_config().state_shardings)
        ['bias', 'weight']
    """
    rows = dense_param_placement(tp=Shard(0))
    return ShardingConfig(
        state_shardings={"weight": rows} | ({"bias": rows} if bias else {}),
        out_src_shardings=dense_activation_placement(
            tp=Shard(-1), batch_dim=batch_dim, seq_dim=seq_dim
        ),
    )


def rowwise_config(
    *,
    output_sp: bool = False,
    bias: bool = True,
    batch_dim: int | None = 0,
    seq_dim: int = 1,
) -> ShardingConfig:
    """Return the declaration of a linear layer cut by its inputs; the bias is added once.

    Args:
        output_sp: whether the output is cut along the sequence instead of whole.
        bias: whether the layer may have one.
        batch_dim: as in :func:`dense_activation_placement`.
        seq_dim: likewise.
    """
    states = {"weight": dense_param_placement(tp=Shard(1))}
    if bias:
        states["bias"] = dense_param_placement(tp=_R)
    return ShardingConfig(
        state_shardings=states,
        out_src_shardings=dense_activation_placement(
            tp=Partial(), batch_dim=batch_dim, seq_dim=seq_dim
        ),
        out_dst_shardings=_between(enable_sp=output_sp, batch_dim=batch_dim, seq_dim=seq_dim),
    )


def norm_config(
    *,
    enable_sp: bool,
    bias: bool = False,
    batch_dim: int | None = 0,
    seq_dim: int = 1,
) -> ShardingConfig:
    """Return the declaration of a norm between sub-layers.

    Args:
        enable_sp: whether it runs on a piece of the sequence; its gradient is then added up over the ranks.
        bias: whether it has one.
        batch_dim: as in :func:`dense_activation_placement`.
        seq_dim: likewise.
    """
    weight = dense_param_placement(tp=SpmdType.R if enable_sp else SpmdType.I)
    between = _between(enable_sp=enable_sp, batch_dim=batch_dim, seq_dim=seq_dim)
    return ShardingConfig(
        state_shardings={"weight": weight} | ({"bias": weight} if bias else {}),
        in_src_shardings={"input": between},
        out_dst_shardings=between,
    )


def pre_lm_head_norm_config(
    *,
    enable_sp: bool,
    bias: bool = False,
    batch_dim: int | None = 0,
    seq_dim: int = 1,
) -> ShardingConfig:
    """Return the declaration of the last norm, whose output is gathered once for all that the head does with it."""
    norm = norm_config(enable_sp=enable_sp, bias=bias, batch_dim=batch_dim, seq_dim=seq_dim)
    return ShardingConfig(
        state_shardings=norm.state_shardings,
        in_src_shardings=norm.in_src_shardings,
        out_dst_shardings=_whole(batch_dim=batch_dim, seq_dim=seq_dim),
    )


def _part(owner: object, *names: str) -> object | None:
    """The first of the parts *names* that *owner* has."""
    for name in names:
        part = getattr(owner, name, None)
        if part is not None:
            return cast("object", part)
    return None


def _set(part: object | None, config: ShardingConfig) -> None:
    """Put *config* on *part*, without what it declares and *part* lacks."""
    if part is None:
        return
    if isinstance(part, nn.Module):
        own = {name for name, _ in (*part.named_parameters(), *part.named_buffers())}
        states = {name: at for name, at in config.state_shardings.items() if name in own}
        inputs = config.in_src_shardings
        if inputs is not None and set(inputs) == {"input"}:
            inputs = {_inputs(part)[0]: inputs["input"]}
        config = ShardingConfig(
            state_shardings=states,
            in_src_shardings=inputs,
            in_dst_shardings=config.in_dst_shardings,
            out_src_shardings=config.out_src_shardings,
            out_dst_shardings=config.out_dst_shardings,
            local_map=config.local_map,
            use_local_output=config.use_local_output,
        )
    cast("Declarable", part).sharding_config = config


def _inputs(part: object) -> list[str]:
    """The names of the inputs of a part's forward; ``x`` for a config, whose module is not there yet."""
    if not isinstance(part, nn.Module):
        return ["x"]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(part.forward).parameters.values()
    return [p.name for p in parameters if p.kind not in kinds]


def _entering(
    part: object, *, enable_sp: bool, batch_dim: int | None, seq_dim: int
) -> ShardingConfig:
    """A sub-layer whose first input is gathered, and whose other inputs are replicas."""
    first, *others = _inputs(part)
    whole = _whole(batch_dim=batch_dim, seq_dim=seq_dim)
    shared: dict[str, LayoutLike] = {name: {"dp": _R, "cp": _R, "tp": _R} for name in others}
    return ShardingConfig(
        in_src_shardings={
            first: _between(enable_sp=enable_sp, batch_dim=batch_dim, seq_dim=seq_dim),
            **shared,
        },
        in_dst_shardings={first: whole},
    )


def set_qkv_linear_sharding(
    attention: object, *, batch_dim: int | None = 0, seq_dim: int = 1
) -> None:
    """Declare the projections in front of the heads: ``wq``, ``wk`` and ``wv``, or ``q_proj``, ``k_proj`` and ``v_proj``.

    Raises:
        PlanError: when *attention* has them under other names.
    """
    config = colwise_config(batch_dim=batch_dim, seq_dim=seq_dim)
    for names in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj")):
        part = _part(attention, *names)
        if part is None:
            message = (
                f"{type(attention).__name__} has neither {names[0]!r} nor {names[1]!r}; declare its projections with "
                "colwise_config(), or by path with parallelize(..., configs=...)"
            )
            raise PlanError(message)
        _set(part, config)


def set_gqa_attention_sharding(
    attention: object, *, enable_sp: bool, batch_dim: int | None = 0, seq_dim: int = 1
) -> None:
    """Declare an attention: its input gathered, projections cut by heads, the output projection by its inputs.

    Its other inputs (tables, masks) are replicas.

    Raises:
        PlanError: when *attention* has its projections under names that are not known.
    """
    set_qkv_linear_sharding(attention, batch_dim=batch_dim, seq_dim=seq_dim)
    _set(
        _part(attention, "wo", "o_proj"),
        rowwise_config(output_sp=enable_sp, batch_dim=batch_dim, seq_dim=seq_dim),
    )
    cast("Declarable", attention).sharding_config = _entering(
        attention, enable_sp=enable_sp, batch_dim=batch_dim, seq_dim=seq_dim
    )


def set_gqa_inner_attention_local_map(
    attention: object,
    *,
    head_dim: int = 1,
    batch_dim: int | None = 0,
    seq_dim: int = 2,
    ndim: int = 4,
) -> None:
    """Declare an attention over queries, keys and values as local work on heads, keys and values gathered over ``cp``.

    Args:
        attention: a module (or its config) whose first three inputs are queries, keys and values.
        head_dim: the dim of the heads.
        batch_dim: as in :func:`dense_activation_placement`.
        seq_dim: likewise.
        ndim: how many dims each of them has.
    """

    def layout(cp: AxisType | None) -> SpmdLayout:
        return attention_activation_placement(
            cp=cp, head_dim=head_dim, batch_dim=batch_dim, seq_dim=seq_dim, ndim=ndim
        )

    names = _inputs(attention)[:3] if isinstance(attention, nn.Module) else ["q", "k", "v"]
    cut, gathered, addends = layout(None), layout(_R), layout(Partial())
    cast("Declarable", attention).sharding_config = ShardingConfig(
        in_src_shardings=dict.fromkeys(names, cut),
        in_dst_shardings=dict(zip(names, (cut, gathered, gathered), strict=False)),
        out_src_shardings=cut,
        local_map=LocalMapConfig(in_grad_placements=(cut, addends, addends)),
    )


def set_dense_ffn_sharding(
    feed_forward: object,
    *,
    enable_sp: bool,
    attn_x_layout: LayoutLike | None = None,
    batch_dim: int | None = 0,
    seq_dim: int = 1,
) -> None:
    """Declare a feed-forward network: its input gathered, ``w1`` and ``w3`` cut by outputs, ``w2`` by inputs.

    Args:
        feed_forward: the network, or its config; ``gate_proj``, ``up_proj`` and ``down_proj`` are known too.
        enable_sp: whether activations between sub-layers are cut along the sequence.
        attn_x_layout: what the input is, when it is not what *enable_sp* says.
        batch_dim: as in :func:`dense_activation_placement`.
        seq_dim: likewise.
    """
    columns = colwise_config(batch_dim=batch_dim, seq_dim=seq_dim)
    for names in (("w1", "gate_proj"), ("w3", "up_proj")):
        _set(_part(feed_forward, *names), columns)
    rows = rowwise_config(output_sp=enable_sp, batch_dim=batch_dim, seq_dim=seq_dim)
    _set(_part(feed_forward, "w2", "down_proj"), rows)
    entering = _entering(feed_forward, enable_sp=enable_sp, batch_dim=batch_dim, seq_dim=seq_dim)
    if attn_x_layout is not None:
        first = _inputs(feed_forward)[0]
        entering = ShardingConfig(
            in_src_shardings={**(entering.in_src_shardings or {}), first: attn_x_layout},
            in_dst_shardings=entering.in_dst_shardings,
        )
    cast("Declarable", feed_forward).sharding_config = entering


def set_decoder_sharding_config(
    decoder: object,
    *,
    enable_sp: bool,
    norms: Iterable[object] = (),
    batch_dim: int | None = 0,
    seq_dim: int = 1,
) -> None:
    """Declare what is around the layers of a decoder: the embedding, the last norm and the head.

    Args:
        decoder: the model, or its config, with ``tok_embeddings`` or ``embed_tokens``, ``norm``, and ``output`` or
            ``lm_head``.
        enable_sp: whether activations between sub-layers are cut along the sequence.
        norms: norms within layers, declared too.
        batch_dim: as in :func:`dense_activation_placement`.
        seq_dim: likewise.
    """
    table = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=Shard(0))},
        in_src_shardings={"input": token_id_placement(batch_dim=batch_dim, seq_dim=seq_dim)},
        out_dst_shardings=_between(enable_sp=enable_sp, batch_dim=batch_dim, seq_dim=seq_dim),
    )
    _set(_part(decoder, "tok_embeddings", "embed_tokens"), table)
    for norm in norms:
        _set(
            norm,
            norm_config(enable_sp=enable_sp, bias=True, batch_dim=batch_dim, seq_dim=seq_dim),
        )
    _set(
        _part(decoder, "norm"),
        pre_lm_head_norm_config(
            enable_sp=enable_sp, bias=True, batch_dim=batch_dim, seq_dim=seq_dim
        ),
    )
    _set(
        _part(decoder, "output", "lm_head"),
        colwise_config(batch_dim=batch_dim, seq_dim=seq_dim),
    )
