"""The abstract style: how one module is laid out over one mesh axis, as an immutable value.

A style is a description. Everything that depends on the module or the mesh is bound when it is applied, in an object
that belongs to the module; so one instance may be shared by any number of entries and plans, and applying it changes
nothing about it. The one attribute that can be set is ``src_data_rank``, because torch's own ``parallelize_module``
sets it; ours applies a copy instead.

It *is a* torch ``ParallelStyle``, so that plans may mix styles of both libraries, and either ``parallelize_module`` takes
them.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

from hp_mesh import DeviceMesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

__all__ = ["CombinedParallel", "ParallelStyle"]


class ParallelStyle(TorchStyle):
    """How a module is laid out: what its parameters become, and what goes in and comes out.

    To write one, give it the method :meth:`apply`, and make it a value (a dataclass, say): attributes are set once.
    """

    src_data_rank: int | None = 0
    """The group rank whose parameter values count; None when each rank cuts its own, and nothing is sent."""

    lays_out: ClassVar[bool] = False
    """Whether the style decides what a module's parameters become: a module takes one such style."""

    axes: ClassVar[int] = 1
    """How many axes the mesh has that the style is applied on."""

    @abstractmethod
    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Lay out *module* over the one axis of *device_mesh*, in place, and return it (or what stands for it)."""

    def check(
        self, module: nn.Module, device_mesh: DeviceMesh
    ) -> None:  # nothing to check is the default
        """Refuse a *module* that the style cannot lay out over *device_mesh*; change and send nothing.

        All of a plan is checked before any of it is applied, so that an error leaves the model as it was.
        """

    @final
    def _apply(self, module: nn.Module, device_mesh: TorchMesh) -> nn.Module:
        """Apply under the name that torch calls."""
        return self.apply(module, DeviceMesh.from_torch(device_mesh))

    def __setattr__(self, name: str, value: object) -> None:
        if name != "src_data_rank" and name in self.__dict__:
            message = (
                f"{type(self).__name__}.{name} cannot be set: a style is a value that several modules may share. "
                "Make another style instead."
            )
            raise AttributeError(message)
        super().__setattr__(name, value)


@dataclass(kw_only=True, unsafe_hash=True)
class CombinedParallel(ParallelStyle):
    """Several styles for one module, the innermost first: a plan has one entry for each path.

    Args:
        styles: at most one of them lays out the module's own parameters.

    Example:
        >>> from hp_dtensor import Replicate, Shard
        >>> from hp_tp import CombinedParallel, PrepareModuleInput, PrepareModuleOutput
        >>> whole, cut = Replicate(), Shard(1)
        >>> style = CombinedParallel(
        ...     styles=(
        ...         PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole),
        ...         PrepareModuleOutput(output_layouts=whole, desired_output_layouts=cut),
        ...     )
        ... )
    """

    lays_out: ClassVar[bool] = True
    styles: tuple[ParallelStyle, ...]

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Let each of the styles check *module*."""
        for style in self.styles:
            style.check(module, device_mesh)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Apply one after the other."""
        for style in self.styles:
            bound = copy.copy(style)
            bound.src_data_rank = self.src_data_rank
            module = bound.apply(module, device_mesh)
        return module
