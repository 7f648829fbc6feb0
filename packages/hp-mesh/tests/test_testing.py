"""The pool of ranks: answers in order, faults told within seconds, a new pool after a fault."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import unittest
import warnings

import pytest
import torch
import torch.distributed as dist
from hp_mesh.testing import RankDiedError, RankError, RankTimeoutError, run_spmd, spmd

_MODULE_STATE = {"offset": 10}


class _OwnError(Exception):
    """An exception that only this module knows."""


class _OwnWarning(UserWarning):
    """A warning that only this module knows."""


def _offset_rank() -> int:
    return _MODULE_STATE["offset"] + dist.get_rank()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    """Entry i of the result is rank i's."""
    assert run_spmd(dist.get_rank, world_size=world_size) == list(range(world_size))


def test_ranks_are_joined_by_gloo() -> None:
    """A collective of the default group works and sums over all ranks."""

    def body(scale: float) -> list[float]:
        x = torch.full((2,), scale * dist.get_rank())
        dist.all_reduce(x)
        return x.tolist()

    assert run_spmd(body, 0.5, world_size=4) == [[3.0, 3.0]] * 4


def test_closures_and_module_helpers_arrive() -> None:
    """A lambda over a local and a helper of this module run on ranks that cannot import it."""
    local = 100
    assert run_spmd(lambda: local + _offset_rank(), world_size=2) == [110, 111]


@spmd(world_size=2)
def test_decorated_test_runs_on_ranks() -> None:
    """The decorator alone makes a test of several ranks."""
    assert dist.get_world_size() == 2
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("n", [1, 3])
@spmd(world_size=2)
def test_decorated_test_takes_parameters_and_fixtures(n: int, plain: str) -> None:
    """Pytest sees through the decorator."""
    assert (n in {1, 3}, plain) == (True, "plain")


@pytest.fixture
def plain() -> str:
    """Return a value that pickles."""
    return "plain"


@pytest.mark.parametrize("error", [ValueError, AssertionError, KeyError, _OwnError])
def test_a_ranks_exception_is_raised_as_itself(error: type[Exception]) -> None:
    """Type and text survive; the cause names the rank and holds its traceback."""

    def body() -> None:
        if dist.get_rank() == 1:
            raise error("of rank 1")
        dist.get_rank()

    with pytest.raises(error, match="of rank 1") as caught:
        run_spmd(body, world_size=2)
    text = str(caught.value.__cause__)
    assert "rank 1 of 2" in text
    assert "in body" in text


def test_the_first_real_error_wins() -> None:
    """Ranks that lose their peer do not hide the error of the one that failed."""

    def body() -> None:
        if dist.get_rank() == 0:
            message = "Connection reset by peer"
            raise RuntimeError(message)
        time.sleep(0.2)
        message = "the real one" if dist.get_rank() == 2 else "a later one"
        time.sleep(0.2 * (dist.get_rank() != 2))
        raise ValueError(message)

    with pytest.raises(ValueError, match="the real one") as caught:
        run_spmd(body, world_size=4)
    assert "rank 3: ValueError: a later one" in str(caught.value.__cause__)


def test_an_error_frees_ranks_that_wait_for_it() -> None:
    """The others sit in a collective for ever; the error still comes at once."""

    def body() -> None:
        if dist.get_rank() == 1:
            message = "left alone"
            raise ValueError(message)
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(ValueError, match="left alone"):
        run_spmd(body, world_size=2)
    assert time.monotonic() - start < 20
    assert run_spmd(dist.get_rank, world_size=2) == [0, 1]


def test_an_exception_that_does_not_pickle_is_told_as_text() -> None:
    """Only the type is lost."""

    class NeedsTwoError(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"sum is {a + b}")

    def body() -> None:
        raise NeedsTwoError(1, 2)

    with pytest.raises(RankError, match="NeedsTwoError: sum is 3"):
        run_spmd(body, world_size=1)


def _end_by_exit() -> None:
    os._exit(3)


def _end_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize("end", [_end_by_exit, _end_by_signal])
def test_a_dead_rank_fails_and_the_pool_is_rebuilt(end: object) -> None:
    """Its peers wait in a collective, and are not waited for."""

    def body() -> None:
        if dist.get_rank() == 1:
            assert callable(end)
            end()
        dist.barrier()

    before = run_spmd(os.getpid, world_size=2)
    start = time.monotonic()
    with pytest.raises(RankDiedError, match="rank 1 of 2 died with exit code") as caught:
        run_spmd(body, world_size=2)
    assert time.monotonic() - start < 20
    assert caught.value.ranks == (1,)
    assert not set(run_spmd(os.getpid, world_size=2)) & set(before)


def test_a_hung_rank_fails_within_the_timeout_with_its_stack() -> None:
    """The message shows where the rank sleeps, and which ranks are done."""

    def sleeping_body() -> None:
        if dist.get_rank() == 1:
            time.sleep(1000)

    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"rank 1 of 2 did not finish in 0\.5 s") as caught:
        run_spmd(sleeping_body, world_size=2, timeout=0.5)
    assert time.monotonic() - start < 15
    assert "in sleeping_body" in str(caught.value)
    assert "rank 0: result" in str(caught.value)
    assert run_spmd(dist.get_rank, world_size=2) == [0, 1]


def test_a_rank_that_ignores_exceptions_in_a_collective_is_killed() -> None:
    """A hang in native code is no different."""

    def body() -> None:
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            time.sleep(1000)

    with pytest.raises(TimeoutError, match=r"ranks 0, 1 of 2 did not finish"):
        run_spmd(body, world_size=2, timeout=0.5)


def test_the_pool_is_used_again_even_after_an_exception() -> None:
    """Processes stay as long as every rank answers."""

    def fail() -> None:
        raise _OwnError

    before = run_spmd(os.getpid, world_size=2)
    with pytest.raises(_OwnError):
        run_spmd(fail, world_size=2)
    assert run_spmd(os.getpid, world_size=2) == before


def test_process_groups_of_a_job_are_gone_in_the_next() -> None:
    """Groups, a destroyed default group and seeds are put back; processes stay."""

    def make_groups() -> int:
        dist.new_group([0])
        dist.new_group([0, 1])
        return os.getpid()

    def use_new_group() -> tuple[int, str]:
        group = dist.new_group([0, 1])
        assert isinstance(group, dist.ProcessGroup)
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        dist.destroy_process_group()
        return int(x), group.group_name

    def first_draws() -> tuple[float, float, int]:
        draws = (torch.rand(()).item(), random.random(), dist.get_world_size())
        torch.set_num_threads(2)
        return draws

    pids = run_spmd(make_groups, world_size=2)
    assert run_spmd(use_new_group, world_size=2) == run_spmd(use_new_group, world_size=2)
    assert run_spmd(first_draws, world_size=2) == run_spmd(first_draws, world_size=2)
    assert run_spmd(torch.get_num_threads, world_size=2) == [1, 1]
    assert run_spmd(os.getpid, world_size=2) == pids


def test_a_skip_on_a_rank_skips_the_test() -> None:
    """Both spellings of a skip do, with their reason."""

    def skip_by_pytest() -> None:
        if dist.get_rank() == 1:
            pytest.skip("not today")

    def skip_by_unittest() -> None:
        raise unittest.SkipTest("nor tomorrow")

    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_spmd(skip_by_pytest, world_size=2)
    with pytest.raises(pytest.skip.Exception, match="nor tomorrow"):
        run_spmd(skip_by_unittest, world_size=2)


def test_an_error_beats_a_skip() -> None:
    """A rank that skips does not hide one that failed."""

    def body() -> None:
        if dist.get_rank() == 0:
            pytest.skip("easy way out")
        raise _OwnError

    with pytest.raises(_OwnError):
        run_spmd(body, world_size=2)


def test_warning_filters_are_the_parents() -> None:
    """An error filter raises on the rank; otherwise the parent hears rank 0's warnings."""

    def body() -> int:
        warnings.warn("from a rank", _OwnWarning, stacklevel=1)
        return 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(_OwnWarning, match="from a rank"):
            run_spmd(body, world_size=2)
    with pytest.warns(_OwnWarning, match="from a rank") as caught:
        assert run_spmd(body, world_size=2) == [1, 1]
    assert len(caught) == 1


def test_output_of_rank_0_is_shown_on_failure_only(capsys: pytest.CaptureFixture[str]) -> None:
    """What rank 0 printed helps to understand a failure."""

    def body(*, fail: bool) -> None:
        print(f"hello of {dist.get_rank()}")
        if fail:
            raise _OwnError

    run_spmd(lambda: body(fail=False), world_size=2)
    assert capsys.readouterr().out == ""
    with pytest.raises(_OwnError):
        run_spmd(lambda: body(fail=True), world_size=2)
    assert capsys.readouterr().out == "hello of 0\n"


@pytest.mark.parametrize("world_size", [0, 9])
def test_world_size_out_of_range_is_refused(world_size: int) -> None:
    """Nothing is started."""
    with pytest.raises(ValueError, match=f"world_size is {world_size}; a pool has 1 to 8 ranks"):
        run_spmd(dist.get_rank, world_size=world_size)


def test_a_timeout_that_is_not_positive_is_refused() -> None:
    """Zero would kill the pool before it had a chance."""
    with pytest.raises(ValueError, match="timeout is 0; it must be a positive number"):
        run_spmd(dist.get_rank, world_size=1, timeout=0)


def test_a_rank_cannot_start_ranks() -> None:
    """Nested use says so instead of starting processes."""

    def body() -> None:
        run_spmd(dist.get_rank, world_size=1)

    with pytest.raises(RankError, match="was called on a rank"):
        run_spmd(body, world_size=1)


_SCRIPT = """
import os, sys, threading, time
import torch
import torch.distributed as dist
from hp_mesh.testing import run_spmd
from torch._subclasses import FakeTensorMode

def body():
    torch.ones(1, requires_grad=True).sum().backward()
    return dist.get_rank(), os.getpid()

if __name__ == "__main__":
    if "autograd" in sys.argv:
        with FakeTensorMode():
            pass
        torch.ones(1, requires_grad=True).sum().backward()
    if "threads" in sys.argv:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    print(*(pid for _, pid in run_spmd(body, world_size=2)), flush=True)
    if "die" in sys.argv:
        os._exit(1)
"""


@pytest.mark.parametrize("how", ["end", "die", "threads", "autograd"])
def test_a_script_works_and_takes_its_ranks_along(how: str, tmp_path: os.PathLike[str]) -> None:
    """Forked or, beside threads, autograd's included, from a fork server; ranks end with the script, however it ends."""
    script = os.path.join(tmp_path, "script.py")  # noqa: PTH118
    with open(script, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:Failed to init", script, how],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    pids = [int(word) for word in done.stdout.split()]
    assert (len(pids), done.returncode) == (2, int(how == "die")), done.stderr
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "ranks outlive their parent"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"
