"""The interface: ``spmd`` for a test, ``run_spmd`` for a call.

One pool per world size lives until the process ends. A pytest plugin with a fixture was not taken:
a script that is no test needs ranks too, and a decorator shows in the test what it runs on.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from hp_mesh.testing._pickling import dumps
from hp_mesh.testing._pool import Pool
from hp_mesh.testing.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_spmd", "spmd"]

P = ParamSpec("P")
T = TypeVar("T")

_MOST_RANKS = 8
_pools: dict[int, Pool] = {}


def run_spmd(
    fn: Callable[..., T], *args: object, world_size: int = 4, timeout: float = 60.0
) -> list[T]:
    """Return ``fn(*args)`` of each rank, in rank order.

    The function runs in *world_size* processes whose default process group is gloo. It is sent by
    value, so that lambdas, closures and functions of modules that only the parent knows work.
    An exception of a rank is raised here as itself, its traceback as the cause; when several
    ranks fail, the first that is not an echo of another rank's failure wins.

    Args:
        fn: What each rank runs. Arguments, result and what it closes over must pickle.
        *args: Its arguments, the same on each rank.
        world_size: Number of ranks, 1 to 8.
        timeout: Seconds after which the ranks that still run are killed.

    Raises:
        ValueError: If *world_size* is not in 1..8 or *timeout* is not positive.
        RankTimeoutError: If a rank does not finish in time. The message holds the stacks.
        RankDiedError: If the process of a rank ends.

    Example:
        >>> import torch.distributed as dist
        >>> run_spmd(lambda: dist.get_rank(), world_size=2)
        [0, 1]
    """
    if not 1 <= world_size <= _MOST_RANKS:
        message = f"world_size is {world_size}; a pool has 1 to {_MOST_RANKS} ranks"
        raise ValueError(message)
    if not timeout > 0:
        message = f"timeout is {timeout}; it must be a positive number of seconds"
        raise ValueError(message)
    if multiprocessing.parent_process() is not None and _is_rank():
        message = "run_spmd was called on a rank; call it in the parent, or call the function"
        raise RankError(message)
    call = dumps(functools.partial(fn, *args))
    pool = _pools.get(world_size)
    if pool is None or not pool.usable:
        pool = _pools[world_size] = Pool(world_size)
    return pool.run(call, timeout)  # type: ignore[return-value]  # it runs fn, which returns T


def spmd(
    *, world_size: int = 4, timeout: float = 60.0
) -> Callable[[Callable[P, object]], Callable[P, None]]:
    """Run the decorated test on every rank of a pool.

    Pytest sees the signature of the test, so parameters and fixtures work as long as their values
    pickle. A skip on any rank skips the test.

    Args:
        world_size: Number of ranks, 1 to 8.
        timeout: Seconds for the body; the start of the pool is not counted.

    Example:
        >>> import torch, torch.distributed as dist
        >>> @spmd(world_size=2)
        ... def test_sum():
        ...     x = torch.ones(3)
        ...     dist.all_reduce(x)
        ...     assert x.tolist() == [2, 2, 2]
        >>> test_sum()
    """

    def decorate(test: Callable[P, object]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            call = functools.partial(test, *args, **kwargs)
            run_spmd(call, world_size=world_size, timeout=timeout)

        return run

    return decorate


def _is_rank() -> bool:
    """Whether this process is one of a pool's."""
    return multiprocessing.current_process().name.startswith("rank")


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        if pool.usable:
            pool.close()
