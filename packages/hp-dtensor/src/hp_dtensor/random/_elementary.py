"""Logarithm, root, exponential, sine and cosine from sums and products, so that all devices agree on every bit.

The idea: IEEE arithmetic rounds each single sum and product in one way only, while a library's ``log`` or ``cos`` differs
between processors, and on one processor between the vector loop and what is left over at its end; then the bits of an
element would depend on which rank holds it. Compilers take quotients and roots from tables where they may, so these are
Newton steps here. In float64 series have exact coefficients and are cut where the next term is below the last bit; in
float32, where speed counts, polynomials are fitted at Chebyshev nodes and summed as trees, to 3e-8.

The rule: arguments are words of the generator and never special, so no infinities, no NaN, no overflow are looked after.

Tables with interpolation were not taken: gathering is slow in eager mode and does not vectorise when compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

__all__ = ["exponential", "logarithm", "root", "sine_cosine"]

_LN2_HIGH = 0.693359375  # nine bits, so that its products with exponents are exact
_LN2_LOW = (
    -0.00021219444005469058
)  # log(2) less that, to more digits than their difference in float64 has


def _series(x: Tensor, coefficients: list[float]) -> Tensor:
    """The polynomial in *x* with these coefficients, the constant first."""
    out = x * coefficients[-1]
    for coefficient in reversed(coefficients[1:-1]):
        out = (out + coefficient) * x
    return out + coefficients[0]


_LOG = (
    *(0.9999999743, -0.4999998703, 0.3333418334, -0.2500215346, 0.1995697748),
    *(-0.1656069599, 0.1494909548, -0.1437733057, 0.08743945352),
)
"""log(1 + t) / t between the roots of a half and of two."""
_SINE = (3.14159265, -2.026119615, 0.5240371359, -0.07518972292, 0.006862794568, -0.0003869258841)
"""sin(pi x) / (x - x**3) by x**2, for x from -1 to 1."""
_COSINE = (
    0.9999999952,
    -0.9348015831,
    0.3194951404,
    -0.05721213372,
    0.006257115373,
    -0.0004052132703,
)
"""cos(pi x) / (1 - 4 x**2) by x**2, for x from -1 to 1."""


def _tree(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """The polynomial in *x* with these coefficients, the constant first, with few operators one after the other."""
    terms: list[Tensor | float] = [*coefficients]
    while len(terms) > 1:
        pairs: list[Tensor | float] = [
            high * x + low for low, high in zip(terms[::2], terms[1::2], strict=False)
        ]
        terms = pairs + terms[len(terms) - len(terms) % 2 :]
        if len(terms) > 1:
            x = x * x
    return cast("Tensor", terms[0])


_ROOT_OF_HALF = 0x3F3504F3
"""As the bits of a float32; the mantissas of logarithms are counted from here."""
_ROOT_OF_HALF_64 = 0x3FE6A09E667F3BCD


def _logarithm_32(x: Tensor, shift: int) -> Tensor:
    """``log(x) - shift * log(2)`` in float32.

    The mantissa becomes a number by conversion rather than by reading its bits as one. The difference to one comes from it
    without rounding, and compilers for CPUs, which reinterpret element by element, are twice as fast.
    """
    above = x.view(torch.int32) - _ROOT_OF_HALF
    exponent = (above >> 23).to(x.dtype)
    if shift:
        exponent = exponent - shift
    steps = ((above & 0x7FFFFF) - (0x3F800000 - _ROOT_OF_HALF)).to(x.dtype)
    offset = (steps + steps.relu()) * 2.0**-24  # below one the steps are half as long
    return exponent * _LN2_HIGH + (offset * _tree(offset, _LOG) + exponent * _LN2_LOW)


def logarithm(x: Tensor, *, shift: int = 0) -> Tensor:
    """``log(x) - shift * log(2)`` of positive normal float32 or float64 numbers.

    Example:
        >>> bool(abs(logarithm(torch.tensor([10.0]))[0] - 2.302585) < 1e-6)
        True
    """
    if x.dtype == torch.float32:
        return _logarithm_32(x, shift)
    bits = x.view(torch.int64)
    whole = (bits - _ROOT_OF_HALF_64) >> 52
    mantissa, exponent = (bits - (whole << 52)).view(x.dtype), whole.to(x.dtype)
    if shift:
        exponent = exponent - shift
    above = mantissa + 1.0
    inverse = above * -0.2424 + 0.9878  # 1 / above, to a percent where the mantissa is
    for _ in range(4):
        inverse = inverse * (2.0 - above * inverse)
    ratio = (mantissa - 1.0) * inverse
    inner = _series(ratio * ratio, [2.0 / (2 * k + 1) for k in range(11)])
    return exponent * _LN2_HIGH + (ratio * inner + exponent * _LN2_LOW)


def root(x: Tensor) -> Tensor:
    """The square root of float32 or float64 numbers that are normal or zero.

    Example:
        >>> [round(float(value), 6) for value in root(torch.tensor([0.0, 2.0]))]
        [0.0, 1.414214]
    """
    wide = x.dtype == torch.float64
    whole, magic = (torch.int64, 0x5FE6EB50C7B537A9) if wide else (torch.int32, 0x5F376908)
    inverse = (magic - (x.view(whole) >> 1)).view(x.dtype)
    half = x * 0.5
    # The first guess is too small on average; steps that start a little above a half more make up for it.
    for start in (1.5,) * 5 if wide else (1.5008789, 1.5000006):
        inverse = inverse * (start - half * inverse * inverse)
    return x * inverse


def sine_cosine(words: Tensor, dtype: torch.dtype, bits: int = 32) -> tuple[Tensor, Tensor]:
    """Sine and cosine of ``words / 2**bits`` of a full turn.

    Args:
        words: int64 numbers from 0 up to ``2**bits``.
        dtype: float32 or float64.
        bits: at most 55, so that what is left of a word in a quarter is exact in float64.

    Example:
        >>> [
        ...     round(abs(float(value)), 4)
        ...     for value in sine_cosine(torch.tensor(1 << 30), torch.float64)
        ... ]
        [1.0, 0.0]
    """
    if dtype == torch.float32:
        half = 1 << (bits - 1)
        x = (half - words).to(dtype) * (1.0 / half)
        square = x * x
        return (x - x * square) * _tree(square, _SINE), (square * 4.0 - 1.0) * _tree(
            square, _COSINE
        )
    eighth = 1 << (bits - 3)
    moved = words + eighth
    quarter = (moved >> (bits - 2)) & 3
    angle = ((moved & (2 * eighth - 1)) - eighth).to(dtype) * (math.pi / (4 * eighth))
    square = angle * angle
    sine = angle * _series(square, [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(9)])
    cosine = _series(square, [(-1.0) ** k / math.factorial(2 * k) for k in range(10)])
    swapped = (quarter & 1) == 1
    first = torch.where(swapped, cosine, sine)
    second = torch.where(swapped, sine, cosine)
    return (
        torch.where(quarter >= 2, -first, first),
        torch.where((quarter == 1) | (quarter == 2), -second, second),
    )


def exponential(x: Tensor) -> Tensor:
    """``exp(x)`` of float64 numbers; above 709 and below -708 it gives infinity and zero.

    Example:
        >>> float(exponential(torch.tensor([0.0], dtype=torch.float64)))
        1.0
    """
    kept = x.clamp(-708.0, 709.0)
    exponent = (kept * (1.0 / math.log(2.0)) + 0.5).floor()
    rest = (kept - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    mantissa = _series(rest, [1.0 / math.factorial(k) for k in range(15)])
    scale = ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    out = mantissa * scale
    out = torch.where(x > 709.0, math.inf, out)
    return torch.where(x < -708.0, 0.0, out)
