"""What errors are and carry."""

import pickle

import pytest
from hp_npu import KernelArgumentError, KernelUnavailableError, NpuError, NpuUnavailableError


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (NpuUnavailableError, RuntimeError),
        (KernelUnavailableError, NotImplementedError),
        (KernelArgumentError, ValueError),
        (KernelArgumentError, RuntimeError),
    ],
)
def test_errors_extend_what_callers_catch_today(
    error: type[Exception], builtin: type[Exception]
) -> None:
    """Each error is an `NpuError` and the builtin that the same failure raises elsewhere."""
    assert issubclass(error, NpuError)
    assert issubclass(error, builtin)


def test_kernel_errors_cross_processes_with_their_facts() -> None:
    """A pickled `KernelUnavailableError` keeps message, kernel and reason."""
    error = KernelUnavailableError("no", kernel="rms_norm", reason="x is empty")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.kernel, again.reason) == ("no", "rms_norm", "x is empty")
