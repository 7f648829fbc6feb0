"""Which code a call runs: the vendor's operator where it can take the call, else the reference.

The rule: four questions in order of their price: are the tensors on the vendor's device, can the
operator take their dtypes and shapes, does the operator exist with the schema that we call, and
what does the policy of the call say. The third is asked once per operator. A kernel that exists
and fails raises its own error: an answer that came from somewhere else than the reader believes is
worse than none.

The design not taken: trying the vendor's operator and catching what it raises. After an
asynchronous device has failed nothing can be trusted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar, cast

import torch

from hp_npu.errors import KernelFallbackWarning, KernelUnavailableError
from hp_npu.kernels.protocol import KernelRegistry, KernelSpec, Policy
from hp_npu.probe import DEVICE_TYPE, npu_status

__all__ = ["KERNELS", "DeviceKernelRegistry"]

P = ParamSpec("P")
R = TypeVar("R")

POLICIES = ("error", "warn_once", "fallback")


class DeviceKernelRegistry(Mapping[str, KernelSpec[..., object]]):
    """Kernels by name, whose vendor operators run on one type of device.

    Args:
        device_type: where the vendor's operators run.

    Example:
        >>> import torch
        >>> from hp_npu.kernels import KERNELS
        >>> "rms_norm" in KERNELS
        True
        >>> print(KERNELS.why("rms_norm", torch.ones(2, 4), torch.ones(4), 1e-6).split(".")[0])
        rms_norm runs its reference: its tensors are on cpu, and npu::npu_rms_norm runs on npu
    """

    def __init__(self, device_type: str = DEVICE_TYPE) -> None:
        self.device_type = device_type
        """Where the vendor's operators run."""
        self._specs: dict[str, KernelSpec[..., object]] = {}
        self._problems: dict[str, str | None] = {}

    def __getitem__(self, name: str) -> KernelSpec[..., object]:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def register(self, spec: KernelSpec[P, R], /) -> KernelSpec[P, R]:
        """Add *spec* and give it back.

        Raises:
            ValueError: if there is a kernel of that name.
        """
        if spec.name in self._specs:
            raise ValueError(
                f"there is a kernel {spec.name!r} already; registered are {', '.join(self._specs)}"
            )
        self._specs[spec.name] = cast("KernelSpec[..., object]", spec)
        return spec

    def resolve(
        self, spec: KernelSpec[P, R], policy: Policy, /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[P, R]:
        """Give what runs this call of *spec*: the vendor's operator or the reference.

        Args:
            spec: the kernel.
            policy: what to do when the vendor's operator can't take the call.
            *args: the arguments of the call.
            **kwargs: the same.

        Raises:
            KernelUnavailableError: if it can't, and *policy* is ``"error"``.
            ValueError: if *policy* is none.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; it is one of {', '.join(POLICIES)}")
        reason = self._reason(spec, *args, **kwargs)
        if reason is None:
            return spec.call_vendor
        if policy == "error":
            message = (
                f"{_sentence(spec.name, reason)}. Make the call one that the vendor's kernel takes, or pass "
                "policy='fallback' to run the reference"
            )
            raise KernelUnavailableError(message, kernel=spec.name, reason=reason)
        if policy == "warn_once":
            _warn_once(spec.name, reason)
        return spec.reference

    def why(self, name: str, /, *args: object) -> str:
        """Say which code a call of the kernel *name* with *args* runs, and why.

        Raises:
            KeyError: if there is no such kernel; names are those of this mapping.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise KeyError(f"there is no kernel {name!r}; registered are {', '.join(self._specs)}")
        reason = self._reason(spec, *args)
        if reason is None:
            return f"{name} runs {spec.vendor.name}"
        return str(_sentence(name, reason))

    def _reason(self, spec: KernelSpec[P, R], *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Why the vendor's operator can't take the call, or None."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.device.type != self.device_type:
                return f"its tensors are on {value.device.type}, and {spec.vendor.name} runs on {self.device_type}"
        return spec.constraint(*args, **kwargs) or self._problem(spec)

    def _problem(self, spec: KernelSpec[P, R]) -> str | None:
        name = spec.vendor.name
        # Only what is there is kept: torch_npu may be loaded later.
        if name not in self._problems:
            problem = spec.vendor.problem()
            if problem is not None:
                return problem
            self._problems[name] = None
        return self._problems[name]


_warned: set[tuple[str, str]] = set()


# Neither can be traced, and both are for the reader: a compiler does them once, while it traces.
# Torch leaves the decorator untyped.


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _sentence(name: str, reason: str) -> str:
    status = npu_status()
    hint = "" if status.ready else f". {status}"
    return f"{name} runs its reference: {reason}{hint}"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_once(name: str, reason: str) -> None:
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(_sentence(name, reason), KernelFallbackWarning, stacklevel=4)


KERNELS: DeviceKernelRegistry = DeviceKernelRegistry()
"""The kernels of this package."""

_: KernelRegistry = KERNELS  # the class satisfies the Protocol
