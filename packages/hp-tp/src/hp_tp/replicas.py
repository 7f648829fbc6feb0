"""A module that every rank runs on plain tensors with its own replicas of the parameters.

What it costs is nothing forward; what has to be said is what the ranks' gradients are. Where each rank has other tokens or heads
they are addends, and are added up; where all ranks do the same work each has the whole gradient already. Through dispatch
that follows from layouts, but a forward that was written for plain tensors has none, and is faster.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hp_dtensor import Placement, Replicate, Shard
from torch import nn

from hp_tp.declared import DeclaredParallel
from hp_tp.sharding import LayoutLike, LocalMapConfig, ShardingConfig, SpmdType
from hp_tp.style import ParallelStyle

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh

__all__ = ["LocalReplicas", "declared_like"]


def declared_like(config: ShardingConfig, style: ParallelStyle) -> DeclaredParallel:
    """A style that carries *config* out with the values of the rank that *style* takes them from."""
    made = DeclaredParallel(config=config)
    made.src_data_rank = style.src_data_rank
    return made


@dataclass(kw_only=True, unsafe_hash=True)
class LocalReplicas(ParallelStyle):
    """Run a module on plain tensors, with replicas of its own parameters.

    Args:
        alike: whether all ranks do the same work, so that each has the whole gradient. By default each works on its own
            tokens or heads, and gradients are added up: a norm within heads, or on a piece of the sequence.
        input_layout: what the first input is, when it is to be made whole; it is taken as it is when None.
        gathers: the dim of the output that is cut over the ranks and gathered, if any.

    Example:
        >>> from hp_tp import LocalReplicas
        >>> plan = {"q_norm": LocalReplicas(), "router": LocalReplicas(alike=True)}
    """

    lays_out: ClassVar[bool] = True
    alike: bool = False
    input_layout: Placement | None = None
    gathers: int | None = None

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replicate the module's own parameters and let its forward see them as plain tensors."""
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        kind = SpmdType.I if self.alike else SpmdType.R
        whole: LayoutLike = {"tp": Replicate()}
        out: LayoutLike | None = None if self.gathers is None else {"tp": Shard(self.gathers)}
        first = self._first(module)
        config = ShardingConfig(
            state_shardings={name: {"tp": kind} for name, _ in own},
            in_src_shardings=None
            if self.input_layout is None
            else {first: {"tp": self.input_layout}},
            in_dst_shardings=None if self.input_layout is None else {first: {"tp": SpmdType.I}},
            local_map=LocalMapConfig(),
            out_src_shardings=out,
            out_dst_shardings=None if out is None else whole,
            use_local_output=out is not None,
        )
        return declared_like(config, self).apply(module, device_mesh)

    @staticmethod
    def _first(module: nn.Module) -> str:
        return next(iter(inspect.signature(module.forward).parameters))
