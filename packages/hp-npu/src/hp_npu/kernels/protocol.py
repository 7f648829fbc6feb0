"""What a kernel is made of, and what a caller may ask of the registry.

The idea: a kernel is one value, `KernelSpec`: an operator of ours, its reference in plain torch,
its metadata, gradient and sharding rule, and the vendor's operator that may stand in for the
reference. Everything about a kernel is checked by types here and tested on a CPU; only the call of
the vendor's operator needs a device.

The rule: the vendor's operator is recognised by its schema, never by a version. Arguments are
passed by position, since the vendor's names differ between its own files.

The design not taken: rules and gradients for the vendor's operators themselves. Most have no
gradient and do not say so, and another package may register rules for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, ParamSpec, Protocol, TypeVar

import torch
from hp_dtensor import OpCall, Strategy
from torch.autograd.function import FunctionCtx

from hp_npu._torch import signatures_of

__all__ = ["Gradient", "KernelRegistry", "KernelSpec", "Policy", "VendorOp"]

P = ParamSpec("P")
R = TypeVar("R")

Policy = Literal["error", "warn_once", "fallback"]
"""What happens when the vendor's kernel can't take a call: raise, or run the reference with one
warning or without."""


@dataclass(frozen=True, slots=True)
class VendorOp:
    """The vendor's operator behind a kernel, as far as we call it.

    Example:
        >>> VendorOp("npu::npu_no_such_op", ("Tensor",), 1, since="2.1.0").problem()
        'this process has no operator npu::npu_no_such_op (torch_npu has it since 2.1.0)'
    """

    name: str
    """Its qualified name, for example ``npu::npu_rms_norm``."""
    arguments: tuple[str, ...]
    """Schema types of what we pass, all by position."""
    results: int
    """How many results we take."""
    since: str
    """The oldest torch_npu that is known to have it, for messages only."""

    def problem(self) -> str | None:
        """Return why the operator of this process can't be called as we call it, or None."""
        found = signatures_of(self.name)
        if not found:
            return (
                f"this process has no operator {self.name} (torch_npu has it since {self.since})"
            )
        count = len(self.arguments)
        for signature in found:
            if (
                signature.arguments[:count] == self.arguments
                and signature.required <= count <= signature.positional
                and signature.results == self.results
            ):
                return None
        wanted = f"({', '.join(self.arguments)}) by position and {self.results} result(s)"
        return f"we call {self.name} with {wanted}, and it is {'; '.join(s.text for s in found)}"


@dataclass(frozen=True, slots=True)
class Gradient:
    """The two functions that `torch.library.register_autograd` takes."""

    setup_context: Callable[[FunctionCtx, tuple[object, ...], tuple[torch.Tensor, ...]], None]
    """Saves what the backward needs: ``(ctx, inputs, output)``."""
    backward: Callable[..., tuple[torch.Tensor | None, ...]]
    """Takes ``ctx`` and a gradient per result, gives one per input; calls an operator of ours."""


@dataclass(frozen=True, slots=True)
class KernelSpec(Generic[P, R]):
    """A kernel: all that is needed to make it an operator, run it, shard it and test it."""

    name: str
    """Name of the operator in the ``hp`` namespace."""
    schema: str
    """Its arguments and results, as `torch.library.define` takes them."""
    reference: Callable[P, R]
    """The kernel in plain torch, for any device; results share no memory with arguments."""
    fake: Callable[P, R]
    """Shapes, strides and dtypes of the results, nothing computed."""
    vendor: VendorOp
    """The operator that may replace the reference."""
    call_vendor: Callable[P, R]
    """Calls the vendor's operator with our arguments and gives our results."""
    constraint: Callable[P, str | None]
    """Says why the vendor's operator can't take these arguments, or None if it can."""
    rule: Callable[[OpCall], Iterator[Strategy]]
    """How the operator runs on the pieces of one mesh axis."""
    gradient: Gradient | None = None
    """How to differentiate it; None for an operator that has no gradient, and says so."""
    tolerance: Mapping[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    """Relative and absolute distance from the reference that the vendor's results may have."""


class KernelRegistry(Protocol):
    """Which code a call runs. `DeviceKernelRegistry` is the one of this package."""

    def register(self, spec: KernelSpec[P, R], /) -> KernelSpec[P, R]:
        """Add a kernel and give it back."""
        ...

    def resolve(
        self, spec: KernelSpec[P, R], policy: Policy, /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[P, R]:
        """Give what runs the call: the vendor's operator or the reference."""
        ...

    def why(self, name: str, /, *args: object) -> str:
        """Say which code a call of the kernel *name* runs, and why."""
        ...
