"""Cross entropy over a sharded vocabulary, and what else is asked of its logits.

Layout, bottom up:

* `errors`, `_torch` (private torch), `options`, `order` (floats as integers that sort alike);
* `vocabulary` (who holds which class), `statistics` (four numbers per token, and how they add up),
  `exchange` (the one collective), `kernel` (the local arithmetic, which a vendor may replace),
  `_autograd`, `targets`;
* `cross_entropy` (all of it, on local tensors), `layout` (how distributed logits lie on a mesh),
  `logits_shard`;
* the entry points: `vocab_parallel`, `context`, `module`, `counting`, `linear`, `chunked`,
  `scores`, `inference`, `sampling`.
"""

from hp_loss._version import __version__
from hp_loss.chunked import ChunkedLoss, GradAccumulator
from hp_loss.context import get_loss_parallel_count, is_loss_parallel_active, loss_parallel
from hp_loss.counting import count_valid_tokens
from hp_loss.errors import (
    LossError,
    LossLayoutError,
    LossOptionError,
    TargetError,
    TargetRangeError,
)
from hp_loss.inference import (
    GatherConfig,
    TopK,
    gather_tensor_parallel_logits,
    vocab_parallel_argmax,
    vocab_parallel_topk,
)
from hp_loss.kernel import CrossEntropyKernel, find_kernel
from hp_loss.linear import linear_cross_entropy
from hp_loss.module import CrossEntropyLoss
from hp_loss.options import Reduction
from hp_loss.sampling import vocab_parallel_sample
from hp_loss.scores import vocab_parallel_entropy, vocab_parallel_log_probs
from hp_loss.vocab_parallel import vocab_parallel_cross_entropy

__all__ = [
    "ChunkedLoss",
    "CrossEntropyKernel",
    "CrossEntropyLoss",
    "GatherConfig",
    "GradAccumulator",
    "LossError",
    "LossLayoutError",
    "LossOptionError",
    "Reduction",
    "TargetError",
    "TargetRangeError",
    "TopK",
    "__version__",
    "count_valid_tokens",
    "find_kernel",
    "gather_tensor_parallel_logits",
    "get_loss_parallel_count",
    "is_loss_parallel_active",
    "linear_cross_entropy",
    "loss_parallel",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_log_probs",
    "vocab_parallel_sample",
    "vocab_parallel_topk",
]
