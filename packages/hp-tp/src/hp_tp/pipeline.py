"""From a single-device decoder to a training one, in five steps that have one right order.

Context parallel, tensor parallel, recomputation, compilation, fully sharded data parallel. Each wraps what the ones before made:
the tensor-parallel boundary is outside the attention that context parallelism replaced, what is recomputed includes its
collectives, what is compiled includes the recomputation, and FSDP's hooks run outside the compiled layer.

Everything that can be wrong is found first: the degrees, the model's heads, layers and buffers, the length and the options are
facts that need no process group, and all that is wrong is told in one error. What the steps then do to the model is in place,
and its parameters keep their names, so that a checkpoint of one layout loads in any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from hp_dtensor import Shard
from hp_mesh import DeviceMesh, ParallelDims
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp._torch import GRAPHS_RECOMPUTE
from hp_tp.attention import KVHeadParallel
from hp_tp.context_attention import AttentionMethod
from hp_tp.context_parallel import ContextParallel, ContextParallelInput
from hp_tp.errors import PipelineError, PlanError
from hp_tp.hugging_face import hugging_face_plan
from hp_tp.linear_attention import GatedDeltaNetParallel, head_problems
from hp_tp.plan import match_plan, parallelize_module
from hp_tp.presets import HUGGING_FACE_NAMES, LLAMA_NAMES, DecoderNames, llama_plan
from hp_tp.recompute import Recompute, recompute_and_compile
from hp_tp.replicas import LocalReplicas
from hp_tp.style import ParallelStyle

__all__ = ["parallelize_llama", "parallelize_qwen3_5"]

Plan: TypeAlias = dict[str, ParallelStyle]

_DELTA_NET = "linear_attn"
_HEAD_NORMS = ("q_norm", "k_norm")
_RECOMPUTE = ("none", "selective", "full")
_METHODS = ("ring", "gather", "ulysses")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What the caller wants."""

    names: DecoderNames | None
    sequence_parallel: bool
    loss_parallel: bool
    seq_len: int | None
    context_method: AttentionMethod
    rotary_tables: Mapping[str, int]
    activation_checkpoint: Recompute
    compile_backend: str | None
    mixed_precision: MixedPrecisionPolicy | None
    reshard_after_forward: bool | None
    src_data_rank: int | None


@dataclass(frozen=True, slots=True)
class _Family:
    """What is special about a kind of decoder."""

    plan: Callable[[nn.Module, DecoderNames, _Options, int], Plan]
    """The tensor-parallel plan, for a number of ranks."""
    problems: Callable[[nn.Module, ParallelDims], Iterator[str]] = field(
        default=lambda _model, _dims: iter(())
    )
    """What else is wrong."""


def parallelize_llama(
    model: nn.Module,
    parallel_dims: ParallelDims | TorchMesh,
    *,
    names: DecoderNames | None = None,
    sequence_parallel: bool = True,
    loss_parallel: bool = False,
    seq_len: int | None = None,
    context_method: AttentionMethod = "ring",
    rotary_tables: Mapping[str, int] | None = None,
    activation_checkpoint: Recompute = "none",
    compile: bool | str = False,  # noqa: A002  # what TorchTitan's configuration calls it
    mixed_precision: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelise a Llama-like decoder: context, tensor, recomputation, compilation, FSDP2; in this order, in place.

    Args:
        model: the decoder, or a stage of a pipeline; in Meta's or Hugging Face's names, or in *names*. Fewer key-value heads
            than tensor-parallel ranks are fine.
        parallel_dims: the degrees; or a mesh of the whole world whose axes are called ``dp_replicate``, ``dp_shard`` (or
            ``dp``, ``fsdp``), ``cp`` and ``tp``, in this order.
        names: what the model calls its modules.
        sequence_parallel: whether values between sub-layers are cut along the sequence over the tensor axis.
        loss_parallel: whether logits stay a DTensor that is cut along the vocabulary.
        seq_len: the whole length of samples, to check that it divides.
        context_method: how attention gets at other ranks' tokens, where the sequence is cut over ``cp``. The model then takes
            this rank's tokens, as :func:`hp_tp.split_sequence` cuts them.
        rotary_tables: paths of buffers with a row for each position, each with the dim of positions; known names need none.
        activation_checkpoint: ``"none"``, ``"full"``, or ``"selective"``, which keeps matrix products, attention and what came
            over the wire.
        compile: whether each layer is compiled (as one graph), or the backend that does it.
        mixed_precision: what FSDP computes and reduces in.
        reshard_after_forward: whether FSDP frees layers between forward and backward; its default when None.
        src_data_rank: the tensor-parallel rank whose parameter values count; None when each cuts its own.

    Returns:
        The model.

    Raises:
        PipelineError: (a ``ValueError``) lists everything that does not fit, before any process group is made.

    Example:
        >>> from hp_mesh import ParallelDims
        >>> from hp_tp import parallelize_llama
        >>> def lay_out(model):
        ...     dims = ParallelDims(dp_shard=2, tp=2, world_size=4)
        ...     return parallelize_llama(model, dims, activation_checkpoint="full", compile=True)
    """
    options = _Options(
        names=names,
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
        seq_len=seq_len,
        context_method=context_method,
        rotary_tables=rotary_tables or {},
        activation_checkpoint=activation_checkpoint,
        compile_backend=_backend(compile),
        mixed_precision=mixed_precision,
        reshard_after_forward=reshard_after_forward,
        src_data_rank=src_data_rank,
    )
    return _run(model, parallel_dims, options, _Family(_llama))


def parallelize_qwen3_5(
    model: nn.Module,
    parallel_dims: ParallelDims | TorchMesh,
    *,
    names: DecoderNames | None = None,
    sequence_parallel: bool = True,
    loss_parallel: bool = False,
    seq_len: int | None = None,
    activation_checkpoint: Recompute = "none",
    compile: bool | str = False,  # noqa: A002  # what TorchTitan's configuration calls it
    mixed_precision: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelise a decoder like Qwen3.5, in which most layers have linear attention with a gated delta rule.

    Both kinds of layers are tensor parallel: heads of attention, and heads of the delta rule with their convolution, decay
    and state. A linear attention carries a state along the sequence, so that there is no context parallelism.

    Args:
        model: the decoder, in Hugging Face's names (``self_attn``, ``linear_attn``) or in *names*.
        parallel_dims: as for :func:`parallelize_llama`.
        names: what the model calls its modules.
        sequence_parallel: whether values between sub-layers are cut along the sequence over the tensor axis.
        loss_parallel: whether logits stay a DTensor that is cut along the vocabulary.
        seq_len: the whole length of samples, to check that it divides.
        activation_checkpoint: as for :func:`parallelize_llama`.
        compile: likewise.
        mixed_precision: likewise.
        reshard_after_forward: likewise.
        src_data_rank: likewise.

    Returns:
        The model.

    Raises:
        PipelineError: (a ``ValueError``) lists everything that does not fit, before any process group is made.
    """
    options = _Options(
        names=names,
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
        seq_len=seq_len,
        context_method="ring",
        rotary_tables={},
        activation_checkpoint=activation_checkpoint,
        compile_backend=_backend(compile),
        mixed_precision=mixed_precision,
        reshard_after_forward=reshard_after_forward,
        src_data_rank=src_data_rank,
    )
    return _run(model, parallel_dims, options, _Family(_qwen3_5, _qwen3_5_problems))


def _backend(wanted: bool | str) -> str | None:
    if isinstance(wanted, str):
        return wanted
    return "inductor" if wanted else None


def _run(
    model: nn.Module,
    parallel_dims: ParallelDims | TorchMesh,
    options: _Options,
    family: _Family,
) -> nn.Module:
    """Check everything, then take the steps."""
    dims, device_type = _degrees(model, parallel_dims)
    names = options.names or _names_of(model)
    violations = list(_violations(model, dims, names, options, family))
    if violations or names is None:
        raise PipelineError(violations)
    if device_type is not None:
        dims.build_mesh(device_type)
    _context(model, dims, names, options)
    _tensor(model, dims, names, options, family)
    layers = _modules(model, names.layers)
    for layer in layers:
        recompute_and_compile(layer, options.activation_checkpoint, options.compile_backend)
    _fully_shard(model, layers, dims, options)
    return model


# What is given.


def _degrees(model: nn.Module, given: ParallelDims | TorchMesh) -> tuple[ParallelDims, str | None]:
    """The degrees, and the kind of device where the mesh or the parameters tell it.

    Raises:
        PipelineError: for a mesh whose axes say something else.
    """
    if isinstance(given, ParallelDims):
        kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
        return given, kinds.pop() if len(kinds) == 1 else None
    mesh = DeviceMesh.from_torch(given)
    names = tuple(mesh.mesh_dim_names or ())
    known = {"dp": "dp_shard", "fsdp": "dp_shard"}
    degrees = {known.get(name, name): mesh.size(axis) for axis, name in enumerate(names)}
    order = [name for name in ("dp_replicate", "dp_shard", "cp", "tp") if name in degrees]
    whole = mesh.mesh.flatten().tolist() == list(range(mesh.size()))
    if list(degrees) != order or len(degrees) != mesh.ndim or not whole:
        message = (
            f"{mesh} is no mesh of the whole world with the axes dp_replicate, dp_shard (dp, fsdp), cp and tp, in this order "
            "with the last one fastest; pass ParallelDims(...) instead"
        )
        raise PipelineError([message])
    sizes = {"dp_shard": 1, **degrees}
    return ParallelDims(**sizes, world_size=mesh.size()), mesh.device_type  # type: ignore[arg-type]  # ints only


def _names_of(model: nn.Module) -> DecoderNames | None:
    """The names that *model* uses, if they are known."""
    for names in (LLAMA_NAMES, HUGGING_FACE_NAMES):
        if _modules(model, names.layers):
            return names
    return None


def _modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    """The modules that *pattern* names."""
    some_style = ContextParallel()
    return [match.module for match in match_plan(model, {pattern: some_style}, unmatched="ignore")]


# What can be wrong.


def _violations(
    model: nn.Module,
    dims: ParallelDims,
    names: DecoderNames | None,
    options: _Options,
    family: _Family,
) -> Iterator[str]:
    if dist.is_initialized() and dist.get_world_size() != dims.world_size:
        yield f"the degrees are for {dims.world_size} ranks, and {dist.get_world_size()} run"
    if options.activation_checkpoint not in _RECOMPUTE:
        yield f"activation_checkpoint={options.activation_checkpoint!r} is none of {_RECOMPUTE}"
    if options.context_method not in _METHODS:
        yield f"context_method={options.context_method!r} is none of {_METHODS}"
    if options.compile_backend is not None:
        known = torch.compiler.list_backends(exclude_tags=())
        if options.compile_backend not in known:
            yield f"compile={options.compile_backend!r} is no backend; there are {known}"
    if (
        options.activation_checkpoint == "selective"
        and options.compile_backend is not None
        and not GRAPHS_RECOMPUTE
    ):
        yield "activation_checkpoint='selective' of compiled layers needs torch 2.15 or later; use 'full', or do not compile"
    if any(isinstance(parameter, TorchDTensor) for parameter in model.parameters()):
        yield "the model has distributed parameters already; pass it as it is on one device"
    if dims.ep > 1:
        yield f"ep={dims.ep}, and the model's plan shares out no experts; set ep=1"
    yield from _length_problems(dims, options)
    if names is None:
        children = [name for name, _ in model.named_children()]
        yield (
            f"{type(model).__name__} has no layers by Meta's or Hugging Face's names; its children are {children}. Pass "
            "names=DecoderNames(...)"
        )
        return
    yield from _head_problems(model, dims, names, options)
    if dims.cp > 1:
        style = ContextParallelInput(tables=options.rotary_tables)
        yield from style.problems(model)
    yield from family.problems(model, dims)
    if dims.tp > 1:
        try:
            match_plan(model, family.plan(model, names, options, dims.tp), unmatched="ignore")
        except PlanError as error:
            yield str(error)


def _length_problems(dims: ParallelDims, options: _Options) -> Iterator[str]:
    if options.seq_len is None:
        return
    step = (2 * dims.cp if dims.cp > 1 else 1) * (dims.tp if options.sequence_parallel else 1)
    if options.seq_len % step:
        why = [
            *(["2 * cp for head and tail"] if dims.cp > 1 else []),
            *(["tp for sequence parallelism"] if options.sequence_parallel else []),
        ]
        yield (
            f"seq_len={options.seq_len} must be a multiple of {step} ({' times '.join(why)}); the next is "
            f"{-(-options.seq_len // step) * step}"
        )


@dataclass(frozen=True, slots=True)
class _Heads:
    """How many heads the attentions have."""

    head_dim: int
    queries: int
    keys: int


def _heads_of(model: nn.Module, names: DecoderNames) -> _Heads | None:
    """The heads of the first attention, when its projections and ``head_dim`` tell."""
    for attention in _modules(model, f"{names.layers}.{names.attention}"):
        head_dim = getattr(attention, "head_dim", None)
        # What the output takes; a query projection may give gates besides.
        queries = getattr(getattr(attention, names.attention_output, None), "in_features", None)
        key = names.queries_keys_values[1] if len(names.queries_keys_values) == 3 else ""
        keys = getattr(getattr(attention, key, None), "out_features", None)
        if isinstance(head_dim, int) and isinstance(queries, int) and isinstance(keys, int):
            return _Heads(head_dim, queries // head_dim, keys // head_dim)
    return None


def _head_problems(
    model: nn.Module, dims: ParallelDims, names: DecoderNames, options: _Options
) -> Iterator[str]:
    heads = _heads_of(model, names)
    if heads is None:
        return
    ranks = dims.tp
    groups = heads.keys % ranks and ranks % heads.keys
    if heads.queries % ranks or groups:
        legal = [
            degree
            for degree in range(1, heads.queries + 1)
            if not heads.queries % degree and not (heads.keys % degree and degree % heads.keys)
        ]
        yield (
            f"tp={ranks} cannot share out {heads.queries} query heads and {heads.keys} key-value heads; degrees that can: {legal}"
        )
        return
    held = max(heads.keys // ranks, 1)
    if options.context_method == "ulysses" and dims.cp > 1 and held % dims.cp:
        yield (
            f"context_method='ulysses' cannot share out the {held} key-value heads of a rank over cp={dims.cp}; "
            "use 'ring' or 'gather'"
        )


# The plans.


def _llama(model: nn.Module, names: DecoderNames, options: _Options, ranks: int) -> Plan:
    """The plan that the model brings with it, or the preset; key-value heads are shared where they are few."""
    if getattr(model, "tp_plan", None):
        return hugging_face_plan(
            model,
            sequence_parallel=options.sequence_parallel,
            loss_parallel=options.loss_parallel,
        )
    preset = llama_plan(
        names,
        sequence_parallel=options.sequence_parallel,
        loss_parallel=options.loss_parallel,
    )
    found = {match.key for match in match_plan(model, preset, unmatched="ignore")}
    plan = {key: style for key, style in preset.items() if key in found}
    heads = _heads_of(model, names)
    if heads is not None and heads.keys % ranks:
        shared = KVHeadParallel(head_dim=heads.head_dim, num_heads=heads.keys)
        for name in names.queries_keys_values[1:]:
            plan[f"{names.layers}.{names.attention}.{name}"] = shared
    return plan


def _qwen3_5(model: nn.Module, names: DecoderNames, options: _Options, ranks: int) -> Plan:
    """The plan of the attention layers, with the delta nets' heads shared out and norms within heads as they are."""
    plan = {
        key: style
        for key, style in _llama(model, names, options, ranks).items()
        if f".{_DELTA_NET}" not in key
    }
    cut = Shard(1) if options.sequence_parallel else None
    delta_net = GatedDeltaNetParallel(input_layouts=cut, output_layouts=cut)
    plan[f"{names.layers}.{_DELTA_NET}"] = delta_net
    for name in _HEAD_NORMS:
        path = f"{names.layers}.{names.attention}.{name}"
        if _modules(model, path):
            plan.setdefault(path, LocalReplicas())
    return plan


def _qwen3_5_problems(model: nn.Module, dims: ParallelDims) -> Iterator[str]:
    if dims.cp > 1:
        yield (
            f"cp={dims.cp}: linear attention carries a state along the sequence, which cannot be cut; set cp=1 and give the "
            "ranks to dp_shard or tp"
        )
    for module in model.modules():
        keys, values = getattr(module, "num_k_heads", None), getattr(module, "num_v_heads", None)
        if isinstance(keys, int) and isinstance(values, int):
            yield from head_problems(dims.tp, key_heads=keys, value_heads=values)
            return


# The steps.


def _context(model: nn.Module, dims: ParallelDims, names: DecoderNames, options: _Options) -> None:
    """Let attention see all ranks' tokens, and the model know where its tokens are."""
    if dims.cp == 1:
        return
    plan: Plan = {
        "": ContextParallelInput(tables=options.rotary_tables),
        f"{names.layers}.{names.attention}": ContextParallel(
            method=options.context_method, causal=True
        ),
    }
    parallelize_module(model, dims.get_mesh("cp"), plan)


def _tensor(
    model: nn.Module, dims: ParallelDims, names: DecoderNames, options: _Options, family: _Family
) -> None:
    if dims.tp == 1:
        return
    plan = family.plan(model, names, options, dims.tp)
    parallelize_module(
        model,
        dims.get_mesh("tp"),
        plan,
        src_data_rank=options.src_data_rank,
        unmatched="ignore",
    )


def _fully_shard(
    model: nn.Module, layers: Sequence[nn.Module], dims: ParallelDims, options: _Options
) -> None:
    """FSDP2 over the data and context ranks, layer by layer; HSDP where there are replicas of the model."""
    if not dims.fsdp_enabled and not dims.dp_replicate_enabled:
        return
    axes = ["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]
    mesh = dims.get_mesh(axes)
    keywords: dict[str, object] = {"mesh": mesh}
    if options.mixed_precision is not None:
        keywords["mp_policy"] = options.mixed_precision
    if options.reshard_after_forward is not None:
        keywords["reshard_after_forward"] = options.reshard_after_forward
    for layer in layers:
        fully_shard(layer, **keywords)  # type: ignore[call-overload]  # what was set, by name
    fully_shard(model, **keywords)  # type: ignore[call-overload]  # as above
