"""Cross entropy over a sharded vocabulary.

Layout, bottom up: `errors`, `_torch` (private torch); `options`, `vocabulary` (who holds which class), `statistics`
(four numbers per token, and how they add up), `exchange` (the one collective); `kernel` (the local arithmetic, which a
vendor may replace), `_autograd`, `targets`, `cross_entropy` (all of it on local tensors); `layout` (distributed logits),
`vocab_parallel` (the function), `context` (`loss_parallel`).
"""

from hp_loss._version import __version__
from hp_loss.context import get_loss_parallel_count, is_loss_parallel_active, loss_parallel
from hp_loss.errors import LossError, LossLayoutError, LossOptionError, TargetError, TargetRangeError
from hp_loss.kernel import CrossEntropyKernel, find_kernel
from hp_loss.vocab_parallel import vocab_parallel_cross_entropy

__all__ = [
    "CrossEntropyKernel",
    "LossError",
    "LossLayoutError",
    "LossOptionError",
    "TargetError",
    "TargetRangeError",
    "__version__",
    "find_kernel",
    "get_loss_parallel_count",
    "is_loss_parallel_active",
    "loss_parallel",
    "vocab_parallel_cross_entropy",
]
