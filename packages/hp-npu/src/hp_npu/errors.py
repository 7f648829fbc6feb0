"""Every error of this package, in one place.

The rule: an error extends the builtin that a caller of torch_npu catches today, says what is
missing, what was given and what to do, and carries those facts as attributes. A kernel that is not
there is no error by itself: its reference runs, unless the caller's policy asked to be told.

Not taken: letting the vendor's own errors through. They name a shared library or an operator that
the reader has never heard of, and not the step that was left out.
"""

from __future__ import annotations

__all__ = [
    "KernelArgumentError",
    "KernelFallbackWarning",
    "KernelUnavailableError",
    "NpuError",
    "NpuUnavailableError",
]


class NpuError(Exception):
    """Something about an Ascend device, its communication or its kernels."""


class NpuUnavailableError(NpuError, RuntimeError):
    """There is no Ascend device that this process can use; the message says which step is missing.

    Example:
        >>> from hp_npu import NpuUnavailableError
        >>> issubclass(NpuUnavailableError, RuntimeError)
        True
    """


class KernelUnavailableError(NpuError, NotImplementedError):
    """The vendor's kernel can't take this call, and the policy of the call is ``"error"``."""

    def __init__(self, message: str, *, kernel: str, reason: str) -> None:
        super().__init__(message)
        self.kernel = kernel
        """Name of the kernel, for example ``rms_norm``."""
        self.reason = reason
        """Why the vendor's operator can't take the call."""

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild with the facts, so that the error crosses processes."""
        return _rebuild_unavailable, (str(self), self.kernel, self.reason)


def _rebuild_unavailable(message: str, kernel: str, reason: str) -> KernelUnavailableError:
    return KernelUnavailableError(message, kernel=kernel, reason=reason)


class KernelArgumentError(NpuError, ValueError, RuntimeError):
    """Arguments that no kernel can take, on any device.

    A `RuntimeError` too, since that is what the same call of a `torch.nn.functional` function
    raises.
    """


class KernelFallbackWarning(UserWarning):
    """A call ran its reference; once per kernel and reason, under the policy ``"warn_once"``."""
