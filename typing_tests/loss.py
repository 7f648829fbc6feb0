"""What a caller's type checker sees of hp-loss."""

from typing import assert_type

import torch
from hp_loss import (
    get_loss_parallel_count,
    is_loss_parallel_active,
    loss_parallel,
    vocab_parallel_cross_entropy,
)
from torch import Tensor

logits, labels = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)

assert_type(vocab_parallel_cross_entropy(logits, labels, reduction="sum"), Tensor)
with loss_parallel(strict=False):
    assert_type(is_loss_parallel_active(), bool)
assert_type(get_loss_parallel_count(), int)

vocab_parallel_cross_entropy(logits, labels, reduction="average")  # type: ignore[arg-type]
loss_parallel(None)  # type: ignore[call-arg]
