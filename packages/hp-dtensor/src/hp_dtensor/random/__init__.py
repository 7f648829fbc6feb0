"""Random numbers that are a function of a key and of where an element stands in the whole tensor.

- `_philox`         the generator: four words from a counter and a key, in integer operators
- `_elementary`     logarithm, root, exponential, sine and cosine whose bits are the same everywhere
- `_distributions`  from words to uniform, normal, ... numbers: what one draw is
- `_grid`           which counters the piece of a rank needs, and the draw over them
- `_source`         where the key of a draw comes from, and how ranks agree on it
- `_policy`         which of the three ways to draw is in force
- `_filling`        a draw on this rank's piece, under the policy

Nothing here knows of operators or of the tensor class; `hp_dtensor.draws` brings them together.
"""

from hp_dtensor.random._distributions import Draw
from hp_dtensor.random._filling import Piece, cut, fill, pass_by, permutation, sample
from hp_dtensor.random._philox import philox
from hp_dtensor.random._policy import (
    Policy,
    chosen_policy,
    policy_of,
    random_policy,
    set_random_policy,
)
from hp_dtensor.random._source import Peers, agree, is_agreed, key, mixed, retire, seeded_alike

__all__ = [
    "Draw",
    "Peers",
    "Piece",
    "Policy",
    "agree",
    "chosen_policy",
    "cut",
    "fill",
    "is_agreed",
    "key",
    "mixed",
    "pass_by",
    "permutation",
    "philox",
    "policy_of",
    "random_policy",
    "retire",
    "sample",
    "seeded_alike",
    "set_random_policy",
]
