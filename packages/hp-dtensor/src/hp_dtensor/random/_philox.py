"""Philox 4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key, in integer operators alone.

The idea: a word is a function of its counter, so any rank can compute the words of any elements, in any order, and every
device and compiler that multiplies integers gives the same bits.

The rule: 32-bit words live in int64 tensors, where the product of two of them wraps but loses no bit. Of the four words
that go from round to round two are masked only when they are used, which saves a sixth of the work. A part of the counter
or of the key may be a Python number; the first rounds are then half as long.

Torch's own generators were not taken: what they draw depends on how many elements are drawn at once, and on the device.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["Word", "philox"]

Word = int | Tensor
"""A 32-bit word: a number, or an int64 tensor of them."""

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _times(word: Word, factor: int) -> Word:
    """The 64-bit product, in a new tensor or as a number below 2**64."""
    return word * factor


def _mixed(product: Word, other: Word, key: Word) -> Word:
    """The high half of *product*, mixed with another word and the key; of *other* only the low half counts."""
    high = product >> 32
    if isinstance(high, Tensor) and high.ndim:
        high ^= other
        high ^= key
        high &= MASK
        return high
    return (high ^ (other & MASK) ^ key) & MASK


def _low(product: Word) -> Word:
    """What carries the low half on; numbers must stay within what a tensor takes."""
    return product & MASK if isinstance(product, int) else product


def philox(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Four words for *counter* under *key*.

    Args:
        counter: four words, the first the lowest; tensors of one shape, 0-d tensors or numbers.
        key: two words, as numbers or 0-d tensors.

    Returns:
        Four words, as int64 tensors of the counter's shape with values below 2**32.

    Example:
        >>> [f"{word:08x}" for word in philox((0, 0, 0, 0), (0, 0))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(_ROUNDS):
        if turn:
            k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
        p0, p1 = _times(c0, _MULTIPLIERS[0]), _times(c2, _MULTIPLIERS[1])
        c0, c2 = _mixed(p1, c1, k0), _mixed(p0, c3, k1)
        c1, c3 = _low(p1), _low(p0)
    return c0, c1 & MASK, c2, c3 & MASK
