"""One rank of the pool: take a job, run it, answer.

A rank keeps its process and its default group between jobs. What a job leaves behind (groups,
seeds, number of threads, warning filters) is put back before the next one; groups are made anew
only after a job that changed them, because that is the part that costs milliseconds.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import unittest
import warnings
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from hp_mesh import _torch
from hp_mesh.testing._pickling import dumps
from hp_mesh.testing.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from torch.distributed import Store

__all__ = ["DUMP_SIGNAL", "Caught", "Filter", "Job", "Reply", "serve"]

DUMP_SIGNAL = signal.SIGUSR1
"""The signal on which a rank writes the stack of each of its threads to its log."""

Filter = tuple[str, str, type[Warning] | tuple[type[Warning], ...], str, int]
"""A warning filter as `warnings.filterwarnings` takes it."""

Caught = tuple[Warning, type[Warning], str, int]
"""A warning as `warnings.warn_explicit` takes it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the parent asks of each rank."""

    call: bytes
    """The pickled function of no arguments."""
    filters: tuple[Filter, ...]
    """The parent's warning filters, first match first."""
    reset: bool
    """Whether the default group must be made anew before the call."""
    number: int
    """Counts jobs, the same on every rank."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a rank answers."""

    kind: str
    """``result``, ``error`` or ``skip``."""
    payload: bytes
    """The pickled result or exception, or the reason of a skip in UTF-8."""
    text: str
    """The traceback, empty for a result."""
    summary: str
    """Type of the exception and the first line of its message, empty for a result."""
    when: float
    """Monotonic seconds at which the function ended."""
    dirty: bool
    """Whether the job left process groups behind, or destroyed the default one."""
    warned: bytes
    """The pickled warnings that the job gave, in order."""


def serve(rank: int, world_size: int, channel: Connection, log: str) -> None:
    """Run jobs from *channel* until it closes; output goes to the file *log*."""
    _redirect_output(log)
    threading.Thread(target=_die_with_parent, args=(Path(log).parent,), daemon=True).start()
    torch.set_num_threads(1)
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = _open_store(rank, world_size, channel)
    _init_group(rank, world_size, store, 0)
    clean = frozenset(_torch.process_group_names())
    channel.send(os.getpid())
    while (job := _receive(channel)) is not None:
        if job.reset:
            _destroy_groups()
            _init_group(rank, world_size, store, job.number)
            clean = frozenset(_torch.process_group_names())
        _put_back()
        channel.send(_run(job, clean))
    os._exit(0)  # no interpreter shutdown: a peer that is gone must not keep this rank waiting


def _receive(channel: Connection) -> Job | None:
    try:
        job: Job | None = channel.recv()
    except (EOFError, OSError):
        return None
    return job


def _redirect_output(log: str) -> None:
    """Send everything that this process writes, native code included, to *log*."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _die_with_parent(folder: Path) -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _open_store(rank: int, world_size: int, channel: Connection) -> Store:
    """Rank 0 hosts the store on a free port and tells the parent, who tells the others."""
    port = 0 if rank == 0 else channel.recv()
    store = TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        channel.send(store.port)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
    )
    return store


def _init_group(rank: int, world_size: int, store: Store, number: int) -> None:
    dist.init_process_group(
        "gloo", store=PrefixStore(f"job{number}", store), rank=rank, world_size=world_size
    )


def _destroy_groups() -> None:
    registry = sys.modules.get("hp_mesh.groups")
    if registry is not None and hasattr(registry, "reset"):
        registry.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def _put_back() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _run(job: Job, clean: frozenset[str]) -> Reply:
    kind, payload, text, summary = "result", b"", "", ""
    with warnings.catch_warnings(record=True) as caught:
        _apply_filters(job.filters)
        try:
            call: Callable[[], object] = pickle.loads(job.call)  # noqa: S301 - from our parent
            payload = dumps(call())
        except unittest.SkipTest as skip:
            kind, payload = "skip", str(skip).encode()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent shall have it
            kind, payload, text = _describe(error)
            summary = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        when = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    dirty = frozenset(_torch.process_group_names()) != clean
    return Reply(kind, payload, text, summary, when, dirty, _pickle_warnings(caught))


def _describe(error: BaseException) -> tuple[str, bytes, str]:
    """Kind, payload and text of an exception."""
    if type(error).__name__ == "Skipped":  # pytest.skip, without needing pytest here
        return "skip", str(error).encode(), ""
    frames = error.__traceback__
    if frames is not None and frames.tb_next is not None:
        error.__traceback__ = frames.tb_next  # leave out our own frame
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = None
    try:
        payload = dumps(error)
        pickle.loads(payload)  # noqa: S301 - some exceptions pickle but do not come back
    except Exception:  # noqa: BLE001 - any failure has the same remedy
        payload = dumps(RankError(f"{type(error).__name__}: {error}"))
    return "error", payload, text


def _apply_filters(filters: Sequence[Filter]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]


def _pickle_warnings(caught: Sequence[warnings.WarningMessage]) -> bytes:
    given: list[Caught] = []
    for entry in caught:
        message = entry.message if isinstance(entry.message, Warning) else Warning(entry.message)
        given.append((message, entry.category, entry.filename, entry.lineno))
    try:
        return dumps(given)
    except Exception:  # noqa: BLE001 - a warning that cannot travel is told as text
        return dumps(
            [(UserWarning(str(m)), UserWarning, file, line) for m, _, file, line in given]
        )
