"""The parent's side: start ranks, hand out a job, collect the answers, judge them.

Rule: a job ends with one answer per rank or with an error, within the timeout. After the first
error the other ranks get a short grace; who has not answered then is killed, and so is the pool,
for a rank that sits in a collective cannot be called back. The next job finds a new pool.

Ranks are forked from the parent, which has torch loaded already, so that a pool starts in a
fraction of a second. Where forking is not safe (threads, an accelerator in use, process groups)
a fork server imports torch once. Spawning each rank was not taken: it costs an import per rank.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hp_mesh import _torch
from hp_mesh.testing._worker import DUMP_SIGNAL, Filter, Job, Reply, serve
from hp_mesh.testing.errors import RankDiedError, RankError, RankTimeoutError, RankTraceback

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkContext, ForkServerContext
    from multiprocessing.process import BaseProcess

    from hp_mesh.testing._worker import Caught

__all__ = ["Pool"]

_START_SECONDS = 180.0
_GRACE_SECONDS = 1.0
_DUMP_SECONDS = 2.0
_TAIL_CHARACTERS = 8000
# What a rank says when it is another one that failed.
_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (is )?closed|read error|timed out",
    re.IGNORECASE,
)


class Pool:
    """Gloo ranks that wait for jobs."""

    def __init__(self, world_size: int) -> None:
        """Start *world_size* ranks and wait until their default group stands."""
        self.world_size = world_size
        """The number of ranks."""
        self.usable = True
        """Whether another job can be run; false after a rank was lost."""
        self._jobs = 0
        self._dirty = False
        self._folder = tempfile.mkdtemp(prefix="hp_mesh_testing_")
        self._processes: list[BaseProcess] = []
        self._channels: list[Connection] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def run(self, call: bytes, timeout: float) -> list[object]:
        """Return each rank's result of the pickled *call*, or raise the first real error."""
        self._jobs += 1
        job = Job(call, _current_filters(), self._dirty, self._jobs)
        marks = [self._log(rank).stat().st_size for rank in range(self.world_size)]
        try:
            replies, stacks = self._collect(job, time.monotonic() + timeout)
        except BaseException:  # Ctrl-C and the like: the ranks are still at work
            self.close()
            raise
        self._dirty = any(reply.dirty for reply in replies.values())
        lost = [rank for rank in range(self.world_size) if rank not in replies]
        dead = tuple(rank for rank in lost if rank not in stacks)
        try:
            return self._judge(replies, dead, stacks, timeout, marks)
        finally:
            if lost:
                self.close()

    def close(self) -> None:
        """Kill the ranks and remove their logs."""
        self.usable = False
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = _context()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            self._log(rank).touch()
            process = context.Process(
                target=serve,
                args=(rank, self.world_size, theirs, str(self._log(rank))),
                name=f"rank{rank}of{self.world_size}",
                daemon=True,
            )
            with warnings.catch_warnings():
                # Python 3.12 warns of native threads; `_context` has looked at what matters.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._processes.append(process)
            self._channels.append(ours)
        deadline = time.monotonic() + _START_SECONDS
        port = self._hear(0, deadline)
        for channel in self._channels[1:]:
            channel.send(port)
        for rank in range(self.world_size):
            self._hear(rank, deadline)

    def _hear(self, rank: int, deadline: float) -> object:
        """Return what *rank* says while the pool starts."""
        if self._channels[rank].poll(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(EOFError, OSError):
                said: object = self._channels[rank].recv()
                return said
        message = f"rank {rank} of {self.world_size} did not start:\n{self._output(rank)}"
        raise RankError(message, ranks=(rank,))

    def _collect(self, job: Job, deadline: float) -> tuple[dict[int, Reply], dict[int, str]]:
        """Replies of the ranks that answered, stacks of those that live and did not."""
        waiting = {channel: rank for rank, channel in enumerate(self._channels)}
        replies: dict[int, Reply] = {}
        failed = False
        for channel in self._channels:
            with contextlib.suppress(OSError):  # a rank that died before: noticed below
                channel.send(job)
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = connection.wait(list(waiting), left)
            for channel in [c for c in waiting if c in ready]:
                rank = waiting.pop(channel)
                try:
                    replies[rank] = channel.recv()
                except (EOFError, OSError):
                    failed = True
                else:
                    failed = failed or replies[rank].kind != "result"
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                failed = False
        return replies, {rank: self._stack(rank) for rank in waiting.values()}

    def _stack(self, rank: int) -> str:
        """Ask a rank that hangs where it is."""
        start = self._log(rank).stat().st_size
        pid = self._processes[rank].pid
        if pid is None or not self._processes[rank].is_alive():
            return ""
        os.kill(pid, DUMP_SIGNAL)
        deadline = time.monotonic() + _DUMP_SECONDS
        text, before = "", None
        while time.monotonic() < deadline and (not text or text != before):
            time.sleep(0.05)
            before, text = text, self._output(rank, start)
        return text or "(no stack: the rank does not react to signals)"

    def _judge(
        self,
        replies: dict[int, Reply],
        dead: tuple[int, ...],
        stacks: dict[int, str],
        timeout: float,
        marks: list[int],
    ) -> list[object]:
        """Return the results, or raise what tells most about the failure."""
        errors = {rank: reply for rank, reply in replies.items() if reply.kind == "error"}
        real = {rank: r for rank, r in errors.items() if not _ECHO.search(r.summary)}
        skips = {rank: reply for rank, reply in replies.items() if reply.kind == "skip"}
        if len(replies) == self.world_size and not errors and not skips:
            _give_warnings(replies[0])
            return [pickle.loads(replies[rank].payload) for rank in range(self.world_size)]  # noqa: S301
        if not errors and not dead and skips:
            _skip(next(iter(skips.values())).payload.decode())
        if 0 in replies or 0 in dead or 0 in stacks:
            sys.stdout.write(self._output(0, marks[0]))
        states = self._states(replies, dead, stacks, marks)
        if real or (errors and not dead):
            self._raise_first(real or errors, states)
        if dead:
            codes = [self._exit_code(rank) for rank in dead]
            message = f"{_ranks(dead)} of {self.world_size} died with exit code {codes}\n{states}"
            raise RankDiedError(message, ranks=dead)
        hung = tuple(sorted(stacks))
        message = f"{_ranks(hung)} of {self.world_size} did not finish in {timeout:g} s\n{states}"
        raise RankTimeoutError(message, ranks=hung)

    def _raise_first(self, errors: dict[int, Reply], states: str) -> None:
        rank = min(errors, key=lambda r: errors[r].when)
        text = f"rank {rank} of {self.world_size}:\n{errors[rank].text}\n{states}"
        error: BaseException = pickle.loads(errors[rank].payload)  # noqa: S301 - from our rank
        raise error from RankTraceback(text.rstrip())

    def _states(
        self,
        replies: dict[int, Reply],
        dead: tuple[int, ...],
        stacks: dict[int, str],
        marks: list[int],
    ) -> str:
        """One paragraph per rank."""
        lines = []
        for rank in range(self.world_size):
            if rank in dead:
                lines.append(f"rank {rank}: died\n{self._output(rank, marks[rank])}")
            elif rank in stacks:
                lines.append(f"rank {rank}: still running\n{stacks[rank]}")
            elif replies[rank].kind == "error":
                lines.append(f"rank {rank}: {replies[rank].summary}")
            else:
                lines.append(f"rank {rank}: {replies[rank].kind}")
        return "\n".join(lines)

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(_DUMP_SECONDS)
        return self._processes[rank].exitcode

    def _log(self, rank: int) -> Path:
        return Path(self._folder) / f"rank{rank}.log"

    def _output(self, rank: int, start: int = 0) -> str:
        """What *rank* wrote since its log had *start* bytes; of a long text, the end."""
        with self._log(rank).open("rb") as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
        return text if len(text) <= _TAIL_CHARACTERS else f"...{text[-_TAIL_CHARACTERS:]}"


_HEAVY = ("torch._dynamo", "torch.distributed.tensor")
"""What torch imports at the first step of an optimizer or of a compiler: seconds, once here or once on every rank."""


def _context() -> ForkContext | ForkServerContext:
    if sys.platform != "darwin" and _fork_is_safe():
        for name in _HEAVY:
            importlib.import_module(name)
        if _fork_is_safe():  # the imports must not have started a thread
            return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "hp_mesh.testing", *_HEAVY])
    return context


def _fork_is_safe() -> bool:
    """Whether nothing in this process would be broken in a forked child.

    A timer (pytest-timeout has one per test) sleeps and holds no lock that a child could need.
    """
    accelerator_in_use: bool = torch.cuda.is_initialized()
    threads = [t for t in threading.enumerate() if not isinstance(t, threading.Timer)]
    return (
        len(threads) == 1
        and not accelerator_in_use
        and not _autograd_has_threads()
        and _torch.world_group() is None
    )


def _autograd_has_threads() -> bool:
    """Whether a backward here has started threads; each backward of a forked child would then raise.

    It starts one for each accelerator, and for the pretended one that a fake tensor has left behind. Torch offers no
    question for it; Linux tells their names.
    """
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            if name.read_text().startswith("pt_autograd_"):
                return True
    return False


def _current_filters() -> tuple[Filter, ...]:
    def text(pattern: object) -> str:
        return str(getattr(pattern, "pattern", pattern) or "")

    return tuple(
        (action, text(message), category, text(module), line)
        for action, message, category, module, line in warnings.filters
    )


def _give_warnings(reply: Reply) -> None:
    """Warn here of what rank 0 was warned of, so that the parent's recorders see it."""
    caught: list[Caught] = pickle.loads(reply.warned)  # noqa: S301 - from our rank
    for message, category, file, line in caught:
        warnings.warn_explicit(message, category, file, line)


def _skip(reason: str) -> None:
    pytest = sys.modules.get("pytest")
    if pytest is not None:
        pytest.skip(reason)
    from unittest import SkipTest

    raise SkipTest(reason)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
