"""Where the randomness of a draw comes from, and how the ranks of a mesh come to the same.

The idea: torch's default CPU generator is the one clock. Each draw takes a key from it, so ``torch.manual_seed``,
``torch.random.fork_rng``, ``torch.get_rng_state`` and activation checkpointing act on distributed tensors as on plain ones,
with nothing of our own to save or to restore.

The rule: a draw on a mesh takes the key of the mesh's first rank, which costs a broadcast of a few bytes, unless
:func:`agree` said that the ranks are seeded alike; then nothing is sent. That they agree is written into the generator's
state itself (the field that remembers the seed, whose upper bits no seed of torch's own sets): seeding it otherwise takes
the mark away, saving and restoring the state keeps it. In a marked generator that field also counts our draws, so they stay
in step on ranks whose plain draws do not.

A generator of our own with a seed sent once was not taken: nothing would tie it to what torch saves for a replay, and a
rank that is not part of the mesh would be waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hp_mesh.collectives import broadcast, wait
from torch import Generator, Tensor
from torch.distributed import ProcessGroup

from hp_dtensor._torch import read_seed_field, write_seed_field

__all__ = ["Peers", "agree", "is_agreed", "key", "lend", "mixed", "retire", "seeded_alike"]


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that must draw the same, and how to reach them."""

    ranks: tuple[int, ...]
    """All of them."""
    groups: Callable[[], Sequence[ProcessGroup]]
    """This rank's group along each mesh axis of more than one rank; asked for only when something is to be sent."""
    device: torch.device
    """Where the groups work."""
    refuse: Callable[[], None]
    """Called before something is sent; may raise."""


_MARK = 0xA5C3 << 48
_FIELD = (1 << 48) - 1
_GOLDEN = 0x9E3779B97F4B  # odd: the 48-bit counter visits every value
_MASK = (1 << 64) - 1

_lock = threading.RLock()
_agreed: list[frozenset[int] | None] = [frozenset()]


def mixed(value: int) -> int:
    """A 64-bit number whose bits all depend on all of *value*'s (the finaliser of SplitMix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def agree(ranks: Sequence[int] | None) -> None:
    """Note that torch's default CPU generator was just seeded alike on *ranks* (all ranks when None)."""
    with _lock:
        default = torch.default_generator
        seed = read_seed_field(default)
        write_seed_field(default, _MARK | (mixed(seed + 1) & _FIELD))
        _agreed[0] = None if ranks is None else frozenset(ranks)


@contextmanager
def seeded_alike(seed: int, ranks: Sequence[int]) -> Iterator[None]:
    """Inside, torch is seeded with *seed*, as on all *ranks*. What the generators were is the caller's to restore."""
    before = _agreed[0]
    torch.manual_seed(seed)
    agree(ranks)
    try:
        yield
    finally:
        _agreed[0] = before


def is_agreed(ranks: Sequence[int], generator: Generator | None = None) -> bool:
    """Whether draws on a mesh of *ranks* need no broadcast."""
    source = torch.default_generator if generator is None else generator
    if source is not torch.default_generator or (read_seed_field(source) & ~_FIELD) != _MARK:
        return False
    known = _agreed[0]
    return known is None or known.issuperset(ranks)


def _shared(value: Tensor, peers: Peers) -> Tensor:
    """*value* of the first of *peers*, on every rank of them."""
    peers.refuse()
    for group in peers.groups():
        value = wait(broadcast(value, 0, group))
    return value


def _own_key(generator: Generator) -> int:
    """63 bits of *generator*, which moves on."""
    made = torch.empty((), dtype=torch.int64, device=generator.device)
    return int(made.random_(generator=generator).item())


def key(peers: Peers, generator: Generator | None) -> int:
    """A 64-bit key for one draw, the same on all *peers*, from *generator* (torch's default CPU generator when None)."""
    source = torch.default_generator if generator is None else generator
    with _lock:
        if is_agreed(peers.ranks, generator):
            field = read_seed_field(source)
            write_seed_field(source, _MARK | ((field + _GOLDEN) & _FIELD))
            return mixed(field)
        own = _own_key(source)
    if len(peers.ranks) == 1:
        return own
    return int(_shared(torch.tensor(own, device=peers.device), peers).item())


def lend(peers: Peers, generator: Generator | None) -> Generator:
    """A generator that stands alike on all *peers*, to be drawn from once for the whole tensor.

    On a rank whose own generator stands as the first rank's it is that generator; elsewhere a copy of the first rank's, and
    the own one moves on by a key's worth of numbers.
    """
    source = torch.default_generator if generator is None else generator
    if len(peers.ranks) == 1 or is_agreed(peers.ranks, generator):
        return source
    mine = source.get_state()
    first = _shared(mine.to(peers.device), peers).cpu()
    if torch.equal(mine, first):
        return source
    _own_key(source)
    copy = Generator(source.device)
    copy.set_state(first)
    return copy


def retire(generator: Generator | None) -> None:
    """Move on by one draw on a rank that is not part of the mesh of the draw, as far as that is known there.

    A marked generator counts like those of the mesh. Any other takes a key's worth of numbers.
    """
    source = torch.default_generator if generator is None else generator
    with _lock:
        field = read_seed_field(source) if source.device.type == "cpu" else 0
        if (field & ~_FIELD) == _MARK:
            write_seed_field(source, _MARK | ((field + _GOLDEN) & _FIELD))
        else:
            _own_key(source)
