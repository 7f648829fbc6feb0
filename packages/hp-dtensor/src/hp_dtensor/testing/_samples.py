"""Tensors to check rules with, of the sizes at which rules go wrong.

The idea: a rule that holds for sizes that divide, that do not divide, that are smaller than the
axis, that are 1 and that are 0 holds for all. The rule: values are drawn from a seed, in float64,
so that a failure repeats and sums in another order agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["SHAPES", "draw"]

SHAPES: tuple[tuple[int, ...], ...] = ((4, 6), (5, 3), (2, 1, 3), (1, 4), (0, 3), (7,), ())
"""Even, uneven, of size 1, smaller than the axis, empty, one dim and none."""


def draw(
    *shapes: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Return a random tensor of each shape: normal, small integers, or coin tosses, by *dtype*.

    Example:
        >>> first, second = draw((2, 3), (3,))
        >>> first.shape, second.dtype
        (torch.Size([2, 3]), torch.float64)
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return tuple(
            torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype)
            for shape in shapes
        )
    low, high = (0, 2) if dtype == torch.bool else (-9, 10)
    return tuple(
        torch.randint(low, high, tuple(shape), generator=generator).to(dtype) for shape in shapes
    )
