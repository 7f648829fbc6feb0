"""What this package uses of torch that torch calls private: one reason per use, one seam test per use."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_async(condition: Tensor, message: str) -> None:
    """Fail on the device when *condition* is false.

    `torch._assert_async` is the one assertion that neither waits for the device nor breaks a graph.
    """
    torch._assert_async(condition, message)
