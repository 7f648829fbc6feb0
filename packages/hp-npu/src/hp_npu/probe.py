"""Whether this process can use an Ascend device, and if not, which step is missing.

The idea: four facts in the order in which an installation fails (installed, imports, sees a
device), taken when they are asked for and kept. The rule: looking never raises and never happens
at import; only `require_npu` raises. Nothing here starts the device, so that a process may still
fork afterwards.

The design not taken: a flag set when this package is imported. It would import torch_npu in
programs that never use an NPU, and where CANN is not set up that import fails.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from hp_npu.errors import NpuUnavailableError

__all__ = ["NpuStatus", "initialised_device_name", "npu_status", "require_npu"]

DEVICE_TYPE = "npu"


@dataclass(frozen=True, slots=True)
class NpuStatus:
    """What was found of torch_npu and its devices.

    Example:
        >>> from hp_npu import NpuStatus
        >>> NpuStatus(version=None, failure=None, devices=0).ready
        False
    """

    version: str | None
    """Version of the installed torch_npu, ``"unknown"`` if it has none; None without torch_npu."""
    failure: str | None
    """What its import raised; None if it imports or is not installed."""
    devices: int
    """How many devices it sees."""

    @property
    def ready(self) -> bool:
        """Whether a tensor can be put on a device."""
        return self.devices > 0

    def __str__(self) -> str:
        """Say what there is, and if it is not enough, what to do."""
        if self.version is None:
            return (
                f"torch_npu is not installed. On a machine with an Ascend device, set up CANN and install the release of "
                f"torch-npu that was built for torch {torch.__version__}"
            )
        if self.failure is not None:
            return (
                f"torch_npu {self.version} is installed and does not import ({self.failure}). If the machine has an "
                "Ascend device, source CANN's set_env.sh first, so that its libraries are found, and see that torch_npu "
                f"was built for torch {torch.__version__}. If it has none, uninstall torch-npu or set "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0, so that `import torch` does not load it"
            )
        if not self.devices:
            return (
                f"torch_npu {self.version} sees no device. Check that `npu-smi info` lists one and that "
                "ASCEND_RT_VISIBLE_DEVICES does not hide it"
            )
        return f"torch_npu {self.version} sees {self.devices} device(s)"


@lru_cache(maxsize=1)
def npu_status() -> NpuStatus:
    """Return what this process has of torch_npu; imports it if it is installed, and never raises.

    The answer is kept; ``npu_status.cache_clear()`` makes the next call look again.

    Example:
        >>> from hp_npu import npu_status
        >>> isinstance(npu_status().ready, bool)
        True
    """
    if not _is_installed():
        return NpuStatus(version=None, failure=None, devices=0)
    try:
        import_module("torch_npu")
        devices = _device_count()
    except Exception as error:  # noqa: BLE001  # a library that does not load, a wrong torch, another accelerator
        return NpuStatus(version=_version(), failure=f"{type(error).__name__}: {error}", devices=0)
    return NpuStatus(version=_version(), failure=None, devices=devices)


def require_npu() -> None:
    """Return if an Ascend device can be used.

    Raises:
        NpuUnavailableError: if not; the message names the step that is missing.
    """
    status = npu_status()
    if not status.ready:
        raise NpuUnavailableError(f"no Ascend device can be used: {status}")


def initialised_device_name() -> str | None:
    """Return the name of the current device if it has been started; start nothing."""
    if "torch_npu" not in sys.modules:
        return None
    module = torch.get_device_module(DEVICE_TYPE)
    return str(module.get_device_name()) if module.is_initialized() else None


def _is_installed() -> bool:
    try:
        return find_spec("torch_npu") is not None
    except ValueError:  # a module put into sys.modules by hand, without a spec
        return True


def _version() -> str:
    try:
        return version("torch-npu")
    except PackageNotFoundError:
        return "unknown"


def _device_count() -> int:
    module = torch.get_device_module(DEVICE_TYPE)
    return int(module.device_count()) if module.is_available() else 0
