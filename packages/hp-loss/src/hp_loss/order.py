"""Floats as integers that sort alike, so that a maximum and where it was can travel and be compared as one block.

The bits of a float, with those of negative numbers turned over, are an integer of the same order.
As integers, different values are never equal and equal ones always are, minus zero and zero
included; NaN is above everything, as torch's `argmax` and `topk` have it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LOWEST", "from_order", "to_order"]

LOWEST = -(2**63)
"""Below every float."""


def to_order(values: Tensor) -> Tensor:
    """The integers, int64, that sort as the 32 or 64-bit floats *values* do.

    Example:
        >>> import torch
        >>> from hp_loss.order import from_order, to_order
        >>> order = to_order(torch.tensor([-2.0, -0.0, 0.0, 1.0, float("nan")]))
        >>> (order.diff() > 0).tolist(), from_order(order, torch.float32).tolist()
        ([True, False, True, True], [-2.0, 0.0, 0.0, 1.0, nan])
    """
    canonical = torch.where(values.isnan(), torch.nan, values + 0.0)
    if values.dtype == torch.float64:
        return _turn_negative(canonical.view(torch.int64), 2**63 - 1)
    return _turn_negative(canonical.view(torch.int32).to(torch.int64), 2**31 - 1)


def from_order(order: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats of *dtype*, 32 or 64 bits, that `to_order` made *order* of."""
    if dtype == torch.float64:
        return _turn_negative(order, 2**63 - 1).view(torch.float64)
    return _turn_negative(order, 2**31 - 1).to(torch.int32).view(torch.float32)


def _turn_negative(bits: Tensor, all_but_sign: int) -> Tensor:
    return torch.where(bits < 0, bits ^ all_but_sign, bits)
