"""Styles for the seam between whole and cut values, where a module's own parameters are none of their business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from hp_dtensor import Partial, Replicate, Shard, redistribute_local
from torch import nn

from hp_tp.boundary import check_even
from hp_tp.style import ParallelStyle
from hp_tp.substitution import substitute

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor

    from hp_tp.substitution import Forward

__all__ = ["EnteringParallel", "LeavingParallel", "SharedColumnsParallel"]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The last columns of an output are used by each rank for its own heads: a wrapper of its forward."""

    mesh: DeviceMesh
    columns: int

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Tensor:
        output = cast("Tensor", forward(module, *args, **kwargs))
        first, last = output.split([output.shape[-1] - self.columns, self.columns], -1)
        whole = (Replicate(),)
        last = redistribute_local(last, self.mesh, whole, whole, grad_placements=(Partial(),))
        return torch.cat([first, last], -1)


@dataclass(kw_only=True, unsafe_hash=True)
class SharedColumnsParallel(ParallelStyle):
    """Add up the gradient of an output's last columns, which the heads of all ranks use as they are.

    Args:
        columns: how many.
    """

    columns: int

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Leave the parameters as they are."""
        substitute(module, _Columns(device_mesh, self.columns))
        return module


@dataclass(frozen=True, slots=True)
class _Entering:
    """The first input is whole on every rank, and the module gets a piece of it: a wrapper of its forward."""

    mesh: DeviceMesh
    dim: int

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        if args:
            return forward(module, self._cut(args[0]), *args[1:], **kwargs)
        first = next(iter(kwargs))
        return forward(module, **{**kwargs, first: self._cut(kwargs[first])})

    def _cut(self, value: object) -> Tensor:
        whole = cast("Tensor", value)
        cut = Shard(self.dim)
        check_even(
            cut,
            whole.shape,
            self.mesh,
            "a sequence that is to be cut over the ranks",
            "pass sequence_parallel=False (as for generating token by token)",
        )
        return redistribute_local(whole, self.mesh, (Replicate(),), (cut,))


@dataclass(kw_only=True, unsafe_hash=True)
class EnteringParallel(ParallelStyle):
    """Give a module a piece of its first input, which is whole on every rank.

    Args:
        dim: the dim that is cut.

    The module raises ``BoundaryError`` on every rank when the ranks do not divide the dim.
    """

    dim: int

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Leave the parameters as they are."""
        substitute(module, _Entering(device_mesh, self.dim))
        return module


@dataclass(frozen=True, slots=True)
class _Leaving:
    """The first output is whole on every rank, and callers get a piece of it: a wrapper of its forward."""

    mesh: DeviceMesh
    dim: int

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        output = forward(module, *args, **kwargs)
        if isinstance(output, tuple):
            return (self._cut(output[0]), *output[1:])
        return self._cut(cast("Tensor", output))

    def _cut(self, value: Tensor) -> Tensor:
        return redistribute_local(value, self.mesh, (Replicate(),), (Shard(self.dim),))


@dataclass(kw_only=True, unsafe_hash=True)
class LeavingParallel(ParallelStyle):
    """Hand out a piece of a module's first output, which is whole on every rank.

    Args:
        dim: the dim that is cut.
    """

    dim: int

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Leave the parameters as they are."""
        substitute(module, _Leaving(device_mesh, self.dim))
        return module
