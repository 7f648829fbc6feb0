"""Tensor parallelism for PyTorch modules: styles, plans, and the boundaries between local and distributed.

General layout, bottom up: ``errors``; ``pieces`` (under DDP); ``substitution`` (another forward for a module), ``partial_gradient`` and ``boundary``
(a value crosses), ``placing`` and ``local_states`` (parameters), ``style`` (the abstract style); ``linear``, ``embedding``,
``fused`` (local computation); ``tensor_parallel``, ``norm``, ``prepare``, ``attention``, ``experts``, ``linear_attention``,
``seams``, ``replicas`` (the styles); ``sharding`` (declarations) and ``declared`` (carried out); ``plan`` (names to styles),
``conversion`` (between plans and declarations), ``protocol`` (modules that declare themselves) and ``decoder_sharding``;
``presets``, ``adapters`` and ``hugging_face`` (plans of known models), ``report`` (what a plan will do), ``testing`` (prove a
plan); ``context_shards``, ``context_attention``, ``context_parallel``, ``hugging_face_context``, ``recompute`` and ``pipeline`` (whole recipes);
``overlap``, ``input_reshard``, ``data_parallel`` and ``wire`` (between stages of a pipeline) beside them.
"""

from hp_tp._version import __version__
from hp_tp.adapters import adapter_plan
from hp_tp.attention import KVHeadParallel, MultiheadAttentionParallel
from hp_tp.context_attention import (
    context_parallel_attention,
)
from hp_tp.context_parallel import (
    ContextParallel,
    ContextParallelInput,
)
from hp_tp.context_shards import (
    SequenceCut,
    join_sequence,
    sequence_positions,
    split_sequence,
)
from hp_tp.conversion import configs_of_plan, plan_of_configs
from hp_tp.data_parallel import (
    DTensorExtensions,
    pre_dp_module_transform,
    sync_grad_hook,
)
from hp_tp.declared import DeclaredParallel
from hp_tp.decoder_sharding import (
    attention_activation_placement,
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    pre_lm_head_norm_config,
    rowwise_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
    set_gqa_attention_sharding,
    set_gqa_inner_attention_local_map,
    set_qkv_linear_sharding,
    token_id_placement,
)
from hp_tp.errors import (
    BoundaryError,
    ContextParallelError,
    PipelineError,
    PlanError,
    StyleError,
    UnmatchedKeyError,
    UnsupportedModuleError,
)
from hp_tp.experts import (
    AllToAllDispatcher,
    ExpertParallel,
    ExpertTensorParallel,
    TensorParallel,
    TokenDispatcher,
)
from hp_tp.hugging_face import hugging_face_plan, register_with_transformers
from hp_tp.hugging_face_context import hugging_face_context_plan
from hp_tp.input_reshard import (
    input_reshard,
)
from hp_tp.linear_attention import (
    GatedDeltaNetParallel,
)
from hp_tp.norm import SequenceParallel
from hp_tp.overlap import (
    AsyncTPReport,
    all_gather_matmul,
    matmul_reduce_scatter,
    maybe_enable_async_tp,
    overlap,
)
from hp_tp.pipeline import (
    parallelize_llama,
    parallelize_qwen3_5,
)
from hp_tp.plan import Match, ParallelPlan, match_plan, parallelize_module
from hp_tp.prepare import (
    NoParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from hp_tp.presets import (
    HUGGING_FACE_NAMES,
    LLAMA_NAMES,
    DecoderNames,
    check_degree,
    gqa_plan,
    linear_attention_plan,
    llama_plan,
    mla_plan,
    moe_plan,
)
from hp_tp.protocol import Module, parallelize, unparallelize
from hp_tp.recompute import (
    recompute,
)
from hp_tp.replicas import LocalReplicas
from hp_tp.report import CollectiveRow, PlanReport, StateRow, plan_report
from hp_tp.sharding import (
    LocalMapConfig,
    ShardingConfig,
    SpmdLayout,
    SpmdType,
    resolve_placements,
)
from hp_tp.style import CombinedParallel, ParallelStyle
from hp_tp.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_tp.wire import WireMeta, pack_meta, unpack

__all__ = [
    "HUGGING_FACE_NAMES",
    "LLAMA_NAMES",
    "AllToAllDispatcher",
    "AsyncTPReport",
    "BoundaryError",
    "CollectiveRow",
    "ColwiseParallel",
    "CombinedParallel",
    "ContextParallel",
    "ContextParallelError",
    "ContextParallelInput",
    "DTensorExtensions",
    "DeclaredParallel",
    "DecoderNames",
    "ExpertParallel",
    "ExpertTensorParallel",
    "GatedDeltaNetParallel",
    "KVHeadParallel",
    "LocalMapConfig",
    "LocalReplicas",
    "Match",
    "Module",
    "MultiheadAttentionParallel",
    "NoParallel",
    "ParallelPlan",
    "ParallelStyle",
    "PipelineError",
    "PlanError",
    "PlanReport",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceCut",
    "SequenceParallel",
    "ShardingConfig",
    "SpmdLayout",
    "SpmdType",
    "StateRow",
    "StyleError",
    "TensorParallel",
    "TokenDispatcher",
    "UnmatchedKeyError",
    "UnsupportedModuleError",
    "WireMeta",
    "__version__",
    "adapter_plan",
    "all_gather_matmul",
    "attention_activation_placement",
    "check_degree",
    "colwise_config",
    "configs_of_plan",
    "context_parallel_attention",
    "dense_activation_placement",
    "dense_param_placement",
    "dense_sequence_parallel_placement",
    "gqa_plan",
    "hugging_face_context_plan",
    "hugging_face_plan",
    "input_reshard",
    "join_sequence",
    "linear_attention_plan",
    "llama_plan",
    "match_plan",
    "matmul_reduce_scatter",
    "maybe_enable_async_tp",
    "mla_plan",
    "moe_plan",
    "norm_config",
    "overlap",
    "pack_meta",
    "parallelize",
    "parallelize_llama",
    "parallelize_module",
    "parallelize_qwen3_5",
    "plan_of_configs",
    "plan_report",
    "pre_dp_module_transform",
    "pre_lm_head_norm_config",
    "recompute",
    "register_with_transformers",
    "resolve_placements",
    "rowwise_config",
    "sequence_positions",
    "set_decoder_sharding_config",
    "set_dense_ffn_sharding",
    "set_gqa_attention_sharding",
    "set_gqa_inner_attention_local_map",
    "set_qkv_linear_sharding",
    "split_sequence",
    "sync_grad_hook",
    "token_id_placement",
    "unpack",
    "unparallelize",
]
