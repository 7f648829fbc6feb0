"""What this package uses of torch that torch calls private: one reason per use, one seam test per use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["FsdpFlags", "assert_async", "fsdp_flags"]


def assert_async(condition: Tensor, message: str) -> None:
    """Fail on the device when *condition* is false.

    `torch._assert_async` is the one assertion that neither waits for the device nor breaks a
    graph.
    """
    torch._assert_async(condition, message)


@dataclass(frozen=True, slots=True)
class _GroupFlags:
    group: Any
    post_forward_mesh_info: Any
    reshard_after_backward: bool
    reduce_grads: bool
    all_reduce_grads: bool


@dataclass(frozen=True, slots=True)
class FsdpFlags:
    """What FSDP2 was told about a module and those in it, to be put back."""

    states: tuple[tuple[Any, Any], ...]
    groups: tuple[_GroupFlags, ...]
    context: Any
    is_last_backward: bool

    @property
    def wants_sync(self) -> bool:
        """Whether any gradient was to be reduced."""
        return any(flags.reduce_grads or flags.all_reduce_grads for flags in self.groups)

    def put_back_sync(self) -> None:
        """Tell FSDP2 again which gradients to reduce."""
        for flags in self.groups:
            flags.group.reduce_grads = flags.reduce_grads
            flags.group.all_reduce_grads = flags.all_reduce_grads

    def put_back(self) -> None:
        """Tell FSDP2 all of it again."""
        self.put_back_sync()
        for state, auto in self.states:
            state._auto_reshard_after_forward = auto
        for flags in self.groups:
            flags.group.post_forward_mesh_info = flags.post_forward_mesh_info
            flags.group.reshard_after_backward = flags.reshard_after_backward
        self.context.is_last_backward = self.is_last_backward


def fsdp_flags(module: FSDPModule) -> FsdpFlags:
    """Read what FSDP2 was told about *module* and those in it.

    FSDP2 has setters (`set_reshard_after_forward`, `set_requires_gradient_sync`, ...) and no
    getters, so what was set can be put back only from its state: `_get_fsdp_state()`, the state's
    `_fsdp_param_groups` and `_state_ctx`.
    """
    inner = [
        m._get_fsdp_state()
        for m in cast("nn.Module", module).modules()
        if isinstance(m, FSDPModule)
    ]
    groups = tuple(
        _GroupFlags(
            group,
            group.post_forward_mesh_info,
            group.reshard_after_backward,
            group.reduce_grads,
            group.all_reduce_grads,
        )
        for state in inner
        for group in state._fsdp_param_groups
    )
    context = module._get_fsdp_state()._state_ctx
    states = tuple((state, state._auto_reshard_after_forward) for state in inner)
    return FsdpFlags(states, groups, context, context.is_last_backward)
