"""Distributed tensors: placements, layouts, dispatch, redistribution.

General layout, bottom up: ``errors``, ``placements`` (what one mesh axis does to a tensor), ``shards`` (which indices a
rank holds), ``spec`` (one tensor described), ``layout`` (aliases), ``plan`` and ``redistribute`` (moving), ``rules`` (what
operators do to layouts), ``dispatch`` with ``special`` and ``lists`` (one operator call), ``dtensor`` (the class),
``local`` (computing on pieces), ``distribute`` (from whole to distributed), ``norms`` and ``comm_debug`` (tools).
"""

# Imported for what they register with dispatch.
from hp_dtensor import draws as _draws  # noqa: F401
from hp_dtensor import lists as _lists  # noqa: F401
from hp_dtensor import special as _special  # noqa: F401
from hp_dtensor._torch import DTensorSpec, TensorMeta
from hp_dtensor._version import __version__
from hp_dtensor.comm_debug import Collective, CommDebugMode
from hp_dtensor.dispatch import cache_statistics, clear_caches, implicit_replication, strict
from hp_dtensor.distribute import distribute_module, distribute_tensor, empty, full, ones, zeros
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
from hp_dtensor.layout import Layout
from hp_dtensor.local import local_map, redistribute_local, to_local
from hp_dtensor.norms import clip_grad_norm_, get_total_norm
from hp_dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard
from hp_dtensor.preview import PlannedStep, RedistributePlan, redistribute_plan
from hp_dtensor.queries import (
    compute_local_shape_and_global_offset,
    global_slices,
    local_shard_size_and_offset,
)
from hp_dtensor.registration import register_sharding
from hp_dtensor.replicas import ReplicaCheck, check_replicas
from hp_dtensor.rules import OpCall, OpRule, Strategy, find_rule, register_rule
from hp_dtensor.spec import Spec

__all__ = [
    "Collective",
    "CommDebugMode",
    "DTensor",
    "DTensorSpec",
    "ImplicitCommunicationError",
    "InPlaceError",
    "Layout",
    "LayoutError",
    "MixedTensorError",
    "NoRuleError",
    "OpCall",
    "OpRule",
    "Partial",
    "Placement",
    "PlannedStep",
    "RedistributeError",
    "RedistributePlan",
    "ReplicaCheck",
    "ReplicaError",
    "Replicate",
    "Shard",
    "Spec",
    "Strategy",
    "StridedShard",
    "TensorMeta",
    "__version__",
    "cache_statistics",
    "check_replicas",
    "clear_caches",
    "clip_grad_norm_",
    "compute_local_shape_and_global_offset",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "find_rule",
    "full",
    "get_total_norm",
    "global_slices",
    "implicit_replication",
    "local_map",
    "local_shard_size_and_offset",
    "ones",
    "redistribute_local",
    "redistribute_plan",
    "register_rule",
    "register_sharding",
    "strict",
    "to_local",
    "zeros",
]
