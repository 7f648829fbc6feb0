"""What one draw is: the in-place operator that torch has for it, and how to make its numbers from words.

The idea: an element gets a fixed number of words, however many a rejection method would want, so that where its words
come from depends on its index alone. A block of the generator serves four elements, or two where an element needs more
than 32 bits: 64-bit floats, and integers from long ranges.

The rule: numbers are made in float32 for elements of at most that width where torch does so too (uniform, normal) and in
float64 elsewhere, then rounded to the dtype. Normal numbers are made in pairs, both of one block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hp_dtensor.random._elementary import exponential, logarithm, root, sine_cosine

__all__ = ["Draw", "Numbers", "Words"]

Words = tuple[Tensor, Tensor, Tensor, Tensor]
Numbers = tuple[Tensor, ...]
"""One tensor for each element that a block serves."""

_SHORT = 1 << 20
"""Ranges up to here are filled from 32 bits; the bias of one value against another stays below a thousandth."""
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


@dataclass(frozen=True, slots=True)
class Draw:
    """One kind of draw with its numbers, such as ``Draw("normal_", (0.0, 1.0))``.

    Example:
        >>> Draw("uniform_", (0.0, 1.0)).lanes(torch.float32)
        4
    """

    name: str
    """The in-place method of a tensor that draws this."""
    params: tuple[float | None, ...] = ()
    """What that method takes, in order."""

    def draw(self, tensor: Tensor, generator: Generator | None) -> None:
        """Fill *tensor* as torch does.

        Raises:
            RuntimeError: or another error of torch's, when the numbers or the dtype do not fit.
        """
        getattr(tensor, self.name)(*self.params, generator=generator)

    def lanes(self, dtype: torch.dtype) -> int:
        """How many elements of *dtype* a block of four words serves: 4 or 2."""
        if self.name == "bernoulli_":
            return 4
        if self.name == "random_":
            low, high = self.span(dtype)
            return 4 if high - low <= _SHORT else 2
        return 2 if dtype == torch.float64 else 4

    def numbers(self, words: Words, dtype: torch.dtype) -> Numbers:
        """The elements that *words* serve, one tensor a lane, ready to be rounded to *dtype*."""
        return _MAKERS[self.name](self, words, dtype)

    def pair(self, first: float, second: float) -> tuple[float, float]:
        """The two numbers, or these where none are given."""
        if not self.params:
            return first, second
        low, high = self.params
        return float(low or 0), float(high or 0)

    def single(self, default: float) -> float:
        """The one number, or *default*."""
        return float(self.params[0] or 0) if self.params else default

    def span(self, dtype: torch.dtype) -> tuple[int, int]:
        """The half-open range of integers for ``random_``; up to torch's own end where none is given."""
        if len(self.params) == 1:
            return 0, int(self.params[0] or 0)
        low, high = self.params or (0, None)
        if high is not None:
            return int(low or 0), int(high)
        if dtype.is_floating_point:
            return int(low or 0), (1 << _DIGITS[dtype]) + 1
        return int(low or 0), 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


def _wide(words: Words) -> tuple[Tensor, Tensor]:
    """53 random bits an element, two elements a block."""
    w0, w1, w2, w3 = words
    return ((w0 & 0x1FFFFF) << 32) | w1, ((w2 & 0x1FFFFF) << 32) | w3


def _open(words: Words, dtype: torch.dtype) -> Numbers:
    """Float64 numbers strictly between 0 and 1, symmetric around a half."""
    if dtype == torch.float64:
        return tuple(((w >> 1).to(torch.float64) + 0.5) * 2.0**-52 for w in _wide(words))
    return tuple((w.to(torch.float64) + 0.5) * 2.0**-32 for w in words)


def _uniform(draw: Draw, words: Words, dtype: torch.dtype) -> Numbers:
    low, high = draw.pair(0.0, 1.0)
    digits = _DIGITS[dtype]
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    source: Sequence[Tensor] = (
        _wide(words) if digits == 53 else tuple(w >> (32 - digits) for w in words)
    )
    unit = [w.to(kind) * 2.0**-digits for w in source]
    if (low, high) == (0.0, 1.0):
        return tuple(unit)
    moved = [(u * (high - low) + low).to(dtype) for u in unit]
    # Rounding may reach the end that is not part of the range.
    return tuple(torch.where(v == high, low, v) if high != low else v for v in moved)


def _normal(draw: Draw, words: Words, dtype: torch.dtype) -> Numbers:
    mean, std = draw.pair(0.0, 1.0)
    if dtype == torch.float64:
        first, second = _wide(words)
        pairs: Numbers = _box_muller(first, second, torch.float64, 53)
    else:
        w0, w1, w2, w3 = words
        pairs = (
            *_box_muller(w0, w1, torch.float32, 32),
            *_box_muller(w2, w3, torch.float32, 32),
        )
    if (mean, std) == (0.0, 1.0):
        return pairs
    return tuple(z * std + mean for z in pairs)


def _box_muller(
    radius: Tensor, angle: Tensor, dtype: torch.dtype, bits: int
) -> tuple[Tensor, Tensor]:
    """Two independent standard normal numbers from two words."""
    length = root(logarithm((radius + 1).to(dtype), shift=bits) * -2.0)
    sine, cosine = sine_cosine(angle, dtype, bits)
    return length * cosine, length * sine


def _log_normal(draw: Draw, words: Words, dtype: torch.dtype) -> Numbers:
    mean, std = draw.pair(1.0, 2.0)
    plain = _normal(Draw("normal_"), words, dtype)
    return tuple(exponential(z.to(torch.float64) * std + mean) for z in plain)


def _exponential(draw: Draw, words: Words, dtype: torch.dtype) -> Numbers:
    rate = draw.single(1.0)
    return tuple(logarithm(u) * (-1.0 / rate) for u in _open(words, dtype))


def _geometric(draw: Draw, words: Words, dtype: torch.dtype) -> Numbers:
    chance = draw.single(0.5)
    scale = 0.0 if chance >= 1 else 1.0 / math.log1p(-chance)
    return tuple((logarithm(u) * scale).floor() + 1.0 for u in _open(words, dtype))


def _cauchy(draw: Draw, words: Words, dtype: torch.dtype) -> Numbers:
    median, sigma = draw.pair(0.0, 1.0)
    bits = 53 if dtype == torch.float64 else 32
    out = []
    for w in _wide(words) if bits == 53 else words:
        # An angle between minus and plus a quarter of a turn, never either; the tangent of it.
        half = 1 << (bits - 1)
        sine, cosine = sine_cosine((w << 1) + 1 + 2 * half * 3, torch.float64, bits + 2)
        out.append(sine / cosine * sigma + median)
    return tuple(out)


def _bernoulli(draw: Draw, words: Words, _dtype: torch.dtype) -> Numbers:
    chance = draw.single(0.5)
    limit = round(chance * 2.0**32)
    return tuple(w < limit for w in words)


def _random(draw: Draw, words: Words, dtype: torch.dtype) -> Numbers:
    low, high = draw.span(dtype)
    span = high - low
    if span <= _SHORT:
        return tuple(((w * span) >> 32) + low for w in words)
    w0, w1, w2, w3 = words
    return tuple(_modulo(a, b, span) + low for a, b in ((w0, w1), (w2, w3)))


def _modulo(high: Tensor, low: Tensor, span: int) -> Tensor:
    """The remainder of a random number by *span*, which may need all 64 bits."""
    if span <= 1 << 63:
        whole = ((high >> 1) << 32) | low
        return whole if span == 1 << 63 else whole % span
    # Read as signed, the numbers from `span` on are the negative ones from here on.
    limit = span - (1 << 64)
    whole = (high << 32) | low
    return torch.where((whole < 0) & (whole >= limit), whole - limit, whole) if limit else whole


_MAKERS = {
    "bernoulli_": _bernoulli,
    "cauchy_": _cauchy,
    "exponential_": _exponential,
    "geometric_": _geometric,
    "log_normal_": _log_normal,
    "normal_": _normal,
    "random_": _random,
    "uniform_": _uniform,
}
