"""The rule table: how each operator may run on the pieces of one mesh axis.

- `_registry`  what a rule is told and answers; the table
- `_labels`    sharding by names of dims, the language of most rules
- `composed`   operators over a cut dim, in terms of smaller ones
- `rewritten`  operators without strategies, in terms of others
- one module per family of operators, which fills the table when it is imported
"""

from importlib import import_module

from hp_dtensor.rules._registry import (
    Box,
    LocalCall,
    Localizer,
    OpCall,
    OpRule,
    Rule,
    Strategy,
    TensorMeta,
    common_strategies,
    find_rule,
    register_rule,
    registered_ops,
)

__all__ = [
    "Box",
    "LocalCall",
    "Localizer",
    "OpCall",
    "OpRule",
    "Rule",
    "Strategy",
    "TensorMeta",
    "common_strategies",
    "find_rule",
    "register_rule",
    "registered_ops",
]

FAMILIES = (
    *("attention", "batch", "concatenate", "convolution", "embedding", "factory", "indexing"),
    *("loss", "matmul"),
    *("norm", "ordering", "pointwise", "reduction", "softmax", "view"),
)

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
