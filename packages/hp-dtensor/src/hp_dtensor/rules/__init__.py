"""The rule table: how each operator may run on the pieces of one mesh axis.

- `_registry`  what a rule is told and answers; the table
"""

from hp_dtensor.rules._registry import (
    Box,
    LocalCall,
    Localizer,
    OpCall,
    OpRule,
    Rule,
    Strategy,
    TensorMeta,
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
    "find_rule",
    "register_rule",
    "registered_ops",
]
