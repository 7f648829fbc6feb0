"""The registry of process groups: one communicator per (ranks in order, backend, options).

The idea: an axis of a mesh is a set of ranks, and meshes and their views share many of these sets, so
groups belong to the process and not to a mesh. A group is made when it is first asked for.

The rule of lazy creation: *asking for a group the first time is a collective over the ranks of that
group, and over no others.* Ranks outside it take no part, so a sub-mesh, a pipeline stage or a branch
that only some ranks enter can make its groups alone. The groups along one axis have no rank in common;
a program that asks for axes in the same order on all ranks, which any program with blocking collectives
must do anyway, therefore cannot wait in a circle.

Before a group is made its members meet in the store of the world. There a member that is dead, late or
wants another group is noticed and named, where the backend would only hang: ranks that wait for each
other in two different groups raise at once on all members, a silent member raises after the timeout.
The meeting also numbers the group, so its name is the same on all members and free in the store.

Not taken: `dist.new_group`, collective over the world, so that a mesh of 8 in a world of 1,024 waits for
all; `split_group`, which HCCL and gloo lack and which is collective too; creation at construction, which
makes communicators (400 MB each on HCCL) that are never used.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from . import _torch
from .errors import BackendError, GroupError, NoGroupError

if TYPE_CHECKING:
    from ._torch import Options

_FIRST_LOOK = 1.0
"""Seconds a rank waits before it looks for the reason; then twice as long each time."""

_NAP_PER_RANK = 1 / 20_000
"""Members of large groups ask the store less often, so that it answers 20,000 questions a second."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How the groups of an axis are made; equal configurations share groups.

    Example:
        >>> GroupConfig(backend="gloo") == GroupConfig(backend="gloo")
        True
    """

    backend: str | None = None
    """Backend name; None is the world's. ``"fake"`` makes a group that does not communicate."""
    timeout: timedelta | None = None
    """Timeout of the group's collectives; None is the world's default."""
    options: Options | None = None
    """Backend options, compared by identity. The backend may write to them."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group of the registry, as `mesh.describe()` lists it."""

    ranks: tuple[int, ...]
    """Global ranks, in group-rank order."""
    backend: str
    """The backend it was made with."""
    label: str
    """What it was first asked for."""
    group: dist.ProcessGroup
    """The group."""


class GroupRegistry:
    """The process groups of this process, by ranks and configuration.

    One per process: `registry`. It empties itself when the world was destroyed or made anew.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._world: dist.ProcessGroup | None = None
        self._records: dict[tuple[tuple[int, ...], GroupConfig], GroupRecord] = {}
        self._heeded: dict[str, str] = {}
        self._listeners: list[Callable[[], None]] = []

    def __reduce__(self) -> str:
        """Pickle the registry by its name: another process has its own."""
        return "registry"

    def on_new_world(self, forget: Callable[[], None]) -> None:
        """Call *forget* whenever the world that groups were made in is gone."""
        self._listeners.append(forget)

    def refresh(self) -> dist.ProcessGroup | None:
        """Return the world; drop everything if it is not the one we knew."""
        world = _torch.world_group()
        if world is not self._world:
            with self._lock:
                if world is not self._world:
                    self._world = world
                    self._records.clear()
                    self._heeded.clear()
                    for forget in self._listeners:
                        forget()
        return world

    def records(self) -> tuple[GroupRecord, ...]:
        """Return the groups made so far, in order; those of one rank are no communicators."""
        self.refresh()
        return tuple(self._records.values())

    def get(self, ranks: Sequence[int], config: GroupConfig, label: str) -> dist.ProcessGroup:
        """Return the group of *ranks* in that order; make it if it is new.

        Args:
            ranks: global ranks, of which this process is one.
            config: backend, timeout and options.
            label: what the group is for, for errors and for the group's description.

        Raises:
            NoGroupError: if `torch.distributed` is not initialised, or this rank is not of the group.
            GroupError: if the members could not agree or the backend could not connect them.
        """
        world = self.refresh()
        if world is None:
            message = (
                f"{label}: torch.distributed is not initialized, so there is no process group. "
                "Call torch.distributed.init_process_group(), or init_device_mesh() with "
                "init_backend=True."
            )
            raise NoGroupError(message)
        key = (tuple(ranks), _normalized(config, world))
        with self._lock:
            record = self._records.get(key)
            if record is None or not _torch.is_alive(record.group):
                record = self._make(key[0], key[1], label, world)
                self._records[key] = record
        return record.group

    def put(self, group: dist.ProcessGroup, label: str) -> None:
        """Take up a group that was made elsewhere, so that equal rank sets share it."""
        self.refresh()
        ranks = tuple(dist.get_process_group_ranks(group))
        backend = dist.get_backend(group)
        with self._lock:
            self._records.setdefault(
                (ranks, GroupConfig()), GroupRecord(ranks, backend, label, group)
            )

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Abort and destroy *groups*, except the world's, and forget them."""
        with self._lock:
            self._records = {k: r for k, r in self._records.items() if r.group not in groups}
            for group in groups:
                if group is not self._world and _torch.is_alive(group):
                    group.abort()
                    dist.destroy_process_group(group)
            for forget in self._listeners:
                forget()

    def _make(
        self,
        ranks: tuple[int, ...],
        config: GroupConfig,
        label: str,
        world: dist.ProcessGroup,
    ) -> GroupRecord:
        rank = world.rank()
        if rank not in ranks:
            message = f"{label}: rank {rank} is not one of its ranks {_short(ranks)}."
            raise NoGroupError(message)
        backend = config.backend or _torch.default_backend()
        unknown = _torch.find_backend(backend)
        if unknown:
            legal = ", ".join(sorted(dist.Backend.backend_list))
            message = f"{label}: torch has no backend {unknown[0]!r}; it has {legal}."
            raise BackendError(message)
        is_world = ranks == tuple(range(world.size())) and config == GroupConfig()
        if is_world and len(ranks) == 1:
            return GroupRecord(ranks, backend, label, world)
        timeout = config.timeout or _default_timeout(backend, world)
        identity = self._identity(ranks, config)
        meet = Meeting(identity, ranks, rank, label, timeout, self._heeded)
        silent = len(ranks) == 1 or "fake" in (backend, _torch.default_backend())
        if is_world:
            if not silent:
                with meet.failures():
                    meet.gather()
            return GroupRecord(ranks, backend, label, world)
        with meet.failures():
            turn = self._free_turn(identity) if silent else meet.gather()
            group = _torch.create_group(
                ranks,
                rank,
                name=f"hp_{identity}_{turn}",
                label=label,
                backend=backend,
                options=config.options,
                timeout=timeout,
            )
        return GroupRecord(ranks, backend, label, group)

    def _identity(self, ranks: tuple[int, ...], config: GroupConfig) -> str:
        """Return a key for the group that its members share.

        Options have no value that processes could compare, so they are numbered: the first options that
        these ranks met, the second, and so on.
        """
        seen = [c.options for r, c in self._records if r == ranks and c.options is not None]
        number = 0
        if config.options is not None:
            number = 1 + (
                seen.index(config.options) if config.options in seen else len(set(map(id, seen)))
            )
        seconds = config.timeout.total_seconds() if config.timeout else None
        text = f"{ranks}|{config.backend}|{seconds}|{number}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]

    @staticmethod
    def _free_turn(identity: str) -> int:
        taken = set(_torch.process_group_names())
        turn = 0
        while f"hp_{identity}_{turn}" in taken:
            turn += 1
        return turn


def _normalized(config: GroupConfig, world: dist.ProcessGroup) -> GroupConfig:
    """Return *config* without what the world has anyway, so that it can share the world's groups."""
    backend, timeout = config.backend, config.timeout
    if backend is not None and backend == _torch.default_backend():
        backend = None
    if timeout is not None and backend is None and timeout == _torch.group_timeout(world):
        timeout = None
    return GroupConfig(backend, timeout, config.options)


def _default_timeout(backend: str, world: dist.ProcessGroup) -> timedelta:
    """Return the world's own timeout, which torch forgets for sub-groups, or torch's default."""
    return _torch.group_timeout(world) or _torch.default_timeout(backend)


def _short(ranks: Sequence[int]) -> str:
    """Write *ranks* in a line, whatever their number."""
    shown = list(ranks)
    if len(shown) <= 16:
        return str(shown)
    return f"[{', '.join(map(str, shown[:8]))}, ..., {shown[-1]}] ({len(shown)} ranks)"


class Meeting:
    """The members of a group meet in the world's store before they connect."""

    def __init__(
        self,
        identity: str,
        ranks: tuple[int, ...],
        rank: int,
        label: str,
        timeout: timedelta,
        heeded: dict[str, str],
    ) -> None:
        self._heeded = heeded
        self._prefix = f"hp_mesh/{identity}"
        self._identity = identity
        self._ranks = ranks
        self._rank = rank
        self._label = label
        self._timeout = timeout.total_seconds()
        self._store = _torch.default_store()

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Name the axis and the group in whatever the store or the backend raises."""
        try:
            yield
        except GroupError:
            raise
        except (RuntimeError, OSError) as error:
            message = (
                f"{self._label}: the process group of ranks {_short(self._ranks)} could not be made "
                f"on rank {self._rank}: {error}. A member may have died; look at the first error in "
                "the other ranks' logs."
            )
            raise GroupError(message, label=self._label, ranks=self._ranks) from error

    def gather(self) -> int:
        """Wait until all members are here; return how often this group was made before.

        An attempt that failed on one member fails on every member once, also on those that come later;
        then all may try again.
        """
        self._heed()
        size = len(self._ranks)
        arrived = int(self._store.add(f"{self._prefix}/arrived", 1))
        turn = (arrived - 1) // size
        if arrived == (turn + 1) * size:
            self._store.set(self._key(turn, "done"), "1")
            return turn
        try:
            self._wait(turn)
        except BaseException:
            self._leave()
            raise
        return turn

    def _leave(self) -> None:
        """Take our arrival back, so that a later attempt counts right; the store may be gone."""
        try:
            self._store.add(f"{self._prefix}/arrived", -1)
            self._store.set(f"hp_mesh/waits/{self._rank}", "")
        except (RuntimeError, OSError):
            return

    def _key(self, turn: int, word: object) -> str:
        return f"{self._prefix}/{turn}/{word}"

    def _wait(self, turn: int) -> None:
        done = self._key(turn, "done")
        start = time.monotonic()
        look = min(_FIRST_LOOK, self._timeout)
        nap = 0.0005
        told = False
        while not self._store.check([done]):
            waited = time.monotonic() - start
            if waited >= look:
                if not told:
                    told = True
                    self._tell(turn)
                self._look(turn, out_of_time=waited >= self._timeout)
                look = min(2 * waited, self._timeout)
            time.sleep(nap)
            nap = min(2 * nap, 0.05 + len(self._ranks) * _NAP_PER_RANK)
        if told:
            self._store.set(f"hp_mesh/waits/{self._rank}", "")

    def _tell(self, turn: int) -> None:
        """Leave word that we wait here, and for what."""
        ranks = ",".join(map(str, self._ranks))
        self._store.set(f"hp_mesh/waits/{self._rank}", f"{self._identity}\n{self._label}\n{ranks}")
        self._store.set(self._key(turn, self._rank), "1")

    def _look(self, turn: int, *, out_of_time: bool) -> None:
        """Find out why the group does not come together; raise if it never will."""
        self._heed()
        missing: list[int] = []
        for peer in self._ranks:
            if self._store.check([self._key(turn, peer)]):
                continue
            missing.append(peer)
            crossing = self._crossing(peer)
            if crossing is not None:
                other, message = crossing
                self._fail(message, also=other)
        if out_of_time and not self._store.check([self._key(turn, "done")]):
            self._fail(
                f"{self._label}: the process group of ranks {_short(self._ranks)} was not made within "
                f"{self._timeout:g} s: ranks {_short(missing)} never asked for it. A member may have "
                "died or never got here; a group is made when all its members ask for it.",
                missing,
            )

    def _crossing(self, peer: int) -> tuple[str, str] | None:
        """Return which group *peer* waits for, and a message, if it is another that has us in it."""
        key = f"hp_mesh/waits/{peer}"
        word = self._store.get(key).decode() if self._store.check([key]) else ""
        if not word:
            return None
        identity, label, listed = word.split("\n")
        ranks = [int(rank) for rank in listed.split(",")]
        if identity == self._identity or self._rank not in ranks:
            return None
        mine = f"the group of {self._label} with ranks {_short(self._ranks)}"
        theirs = f"the group of {label} with ranks {_short(ranks)}"
        sides = sorted(
            [f"rank {self._rank} asks for {mine}", f"rank {peer} asks for {theirs}"],
        )
        return identity, (
            f"Ranks wait for each other in two different process groups: {sides[0]}; {sides[1]}. "
            "Give every rank the same mesh shape and axis names, and ask for axes in the same order."
        )

    def _heed(self) -> None:
        """Raise the failure of another member, unless we raised it before."""
        key = f"{self._prefix}/failed"
        if not self._store.check([key]):
            return
        word = self._store.get(key).decode()
        if word != self._heeded.get(self._identity):
            self._raise(word)

    def _fail(self, message: str, missing: Sequence[int] = (), also: str = "") -> NoReturn:
        """Tell the other members, and those of group *also*, and raise; or raise what came first."""
        listed = ",".join(map(str, missing))
        word = f"{self._rank} {time.time_ns()}\n{listed}\n{message}"
        if also:
            self._heeded[also] = word
            self._store.set(f"hp_mesh/{also}/failed", word)
        before = self._heeded.get(self._identity, "")
        kept = self._store.compare_set(f"{self._prefix}/failed", before, word)
        self._raise(kept.decode())

    def _raise(self, word: str) -> NoReturn:
        self._heeded[self._identity] = word
        _, listed, message = word.split("\n", 2)
        missing = [int(rank) for rank in listed.split(",") if rank]
        raise GroupError(message, label=self._label, ranks=self._ranks, missing=missing)


registry = GroupRegistry()
"""The registry of this process."""
