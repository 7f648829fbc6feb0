"""Tensor parallelism for PyTorch modules: styles, plans, and the boundaries between local and distributed.

General layout, bottom up: ``errors``; ``substitution`` (another forward for a module), ``partial_gradient`` and ``boundary``
(a value crosses), ``placing`` (parameters), ``style`` (the abstract style); ``linear``, ``embedding`` (local computation);
``tensor_parallel``, ``norm``, ``prepare``, ``attention`` (the styles); ``plan`` (names to styles),
``presets`` (plans of known models), ``report`` (what a plan will do), ``testing`` (prove a plan).
"""

from hp_tp._version import __version__
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
from hp_tp.declared import DeclaredParallel
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
from hp_tp.linear_attention import (
    GatedDeltaNetParallel,
)
from hp_tp.norm import SequenceParallel
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
    llama_plan,
)
from hp_tp.recompute import (
    recompute,
)
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

__all__ = [
    "HUGGING_FACE_NAMES",
    "LLAMA_NAMES",
    "AllToAllDispatcher",
    "BoundaryError",
    "CollectiveRow",
    "ColwiseParallel",
    "CombinedParallel",
    "ContextParallel",
    "ContextParallelError",
    "ContextParallelInput",
    "DeclaredParallel",
    "DecoderNames",
    "ExpertParallel",
    "ExpertTensorParallel",
    "GatedDeltaNetParallel",
    "KVHeadParallel",
    "LocalMapConfig",
    "Match",
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
    "__version__",
    "check_degree",
    "context_parallel_attention",
    "hugging_face_plan",
    "join_sequence",
    "llama_plan",
    "match_plan",
    "parallelize_llama",
    "parallelize_module",
    "parallelize_qwen3_5",
    "plan_report",
    "recompute",
    "register_with_transformers",
    "resolve_placements",
    "sequence_positions",
    "split_sequence",
]
