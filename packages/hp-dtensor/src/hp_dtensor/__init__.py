"""Distributed tensors: placements, layouts, dispatch, redistribution.

General layout, bottom up: ``errors``, ``placements`` (what one mesh axis does to a tensor), ``shards`` (which indices a
rank holds), ``spec`` (one tensor described), ``layout`` (aliases), ``plan`` and ``redistribute`` (moving), ``rules`` (what
operators do to layouts), ``dispatch`` with ``special`` and ``lists`` (one operator call), ``dtensor`` (the class),
``local`` (computing on pieces), ``distribute`` (from whole to distributed), ``norms`` and ``comm_debug`` (tools).
"""

# Imported for what they register with dispatch.
from hp_dtensor import draws as _draws  # noqa: F401
from hp_dtensor import early as _early  # noqa: F401
from hp_dtensor import lists as _lists  # noqa: F401
from hp_dtensor import special as _special  # noqa: F401
from hp_dtensor._torch import DTensorSpec, TensorMeta
from hp_dtensor._version import __version__
from hp_dtensor.advice import Fix
from hp_dtensor.checks import check_tensor_meta
from hp_dtensor.comm_debug import Collective, CommDebugMode
from hp_dtensor.custom_shard import custom_shard
from hp_dtensor.dispatch import cache_statistics, clear_caches
from hp_dtensor.distribute import distribute_module, distribute_tensor, spmd_distribute_tensor
from hp_dtensor.drawing import visualize_sharding
from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import (
    ImplicitCommunicationError,
    InPlaceError,
    LayoutError,
    MixedTensorError,
    NoRuleError,
    RedistributeError,
    ReplicaError,
)
from hp_dtensor.explanation import Communication, Explanation, explain
from hp_dtensor.factories import (
    arange,
    empty,
    eye,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from hp_dtensor.gradients import accumulate_gradients
from hp_dtensor.initialisation import init_empty_weights, init_on_device, init_parameters
from hp_dtensor.layout import Layout
from hp_dtensor.local import from_torch, local_map, redistribute_local, to_local, to_torch
from hp_dtensor.modes import implicit_replication, strict
from hp_dtensor.named_ops import DFunction, DistributedOp
from hp_dtensor.norms import clip_grad_norm_, get_total_norm
from hp_dtensor.op_placements import OpPlacements, strategies
from hp_dtensor.placements import (
    Cut,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)
from hp_dtensor.plan import Link
from hp_dtensor.preview import PlannedStep, RedistributePlan, redistribute_plan
from hp_dtensor.queries import (
    compute_local_shape_and_global_offset,
    global_slices,
    local_shard_size_and_offset,
)
from hp_dtensor.random import Policy, random_policy, set_random_policy
from hp_dtensor.registration import register_sharding
from hp_dtensor.replicas import ReplicaCheck, check_replicas
from hp_dtensor.rules import OpCall, OpRule, Strategy, find_rule, register_rule
from hp_dtensor.seeding import (
    SeedReport,
    is_rng_supported_mesh,
    manual_seed,
    seed_everything,
)
from hp_dtensor.sharding_plan import ShardingPlan, shard_module
from hp_dtensor.skipping import SkipDTensorDispatch
from hp_dtensor.spec import Spec
from hp_dtensor.value_and_grad import parallelize_value_and_grad

__all__ = [
    "Collective",
    "CommDebugMode",
    "Communication",
    "Cut",
    "DFunction",
    "DTensor",
    "DTensorSpec",
    "DistributedOp",
    "Explanation",
    "Fix",
    "ImplicitCommunicationError",
    "InPlaceError",
    "Layout",
    "LayoutError",
    "Link",
    "MixedTensorError",
    "NoRuleError",
    "OpCall",
    "OpPlacements",
    "OpRule",
    "Partial",
    "Placement",
    "PlannedStep",
    "Policy",
    "RaggedShard",
    "RedistributeError",
    "RedistributePlan",
    "ReplicaCheck",
    "ReplicaError",
    "Replicate",
    "SeedReport",
    "Shard",
    "ShardingPlan",
    "SkipDTensorDispatch",
    "Spec",
    "Strategy",
    "StridedShard",
    "TensorMeta",
    "__version__",
    "accumulate_gradients",
    "arange",
    "cache_statistics",
    "check_replicas",
    "check_tensor_meta",
    "clear_caches",
    "clip_grad_norm_",
    "compute_local_shape_and_global_offset",
    "custom_shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "eye",
    "find_rule",
    "from_torch",
    "full",
    "get_total_norm",
    "global_slices",
    "implicit_replication",
    "init_empty_weights",
    "init_on_device",
    "init_parameters",
    "is_rng_supported_mesh",
    "linspace",
    "local_map",
    "local_shard_size_and_offset",
    "logspace",
    "manual_seed",
    "ones",
    "parallelize_value_and_grad",
    "rand",
    "randint",
    "randn",
    "random_policy",
    "randperm",
    "redistribute_local",
    "redistribute_plan",
    "register_rule",
    "register_sharding",
    "seed_everything",
    "set_random_policy",
    "shard_module",
    "spmd_distribute_tensor",
    "strategies",
    "strict",
    "to_local",
    "to_torch",
    "visualize_sharding",
    "zeros",
]
