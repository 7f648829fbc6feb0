"""Linear attention with a gated delta rule, its heads shared out.

Such a layer (Qwen3-Next, Qwen3.5) projects to queries, keys and values in one matrix, runs a short convolution over each of
their channels, and keeps a state for each value head. Everything between the projections treats heads apart, so that a rank
computes its value heads and the key heads that they use with the module's own forward, on pieces, and with its sizes set to
what a rank has.

The packed projection is the hard part: its rows are queries, keys and values, blocks of unequal size, and no shard of the
whole gives a rank a piece of each. Where the three are equal it is cut block by block. Otherwise its rows lie in contiguous
shards, as parameters at rest, and are gathered when the layer runs, of which the rank keeps the rows of its heads; the
gradient is scattered back. That moves the weight once each way, as FSDP does, and leaves checkpoints in the order of the
single device; copies on every rank would save the gather and cost the memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from hp_dtensor import (
    Placement,
    Shard,
    to_local,
)
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp._torch import parameters_of
from hp_tp.boundary import PARTIAL, REPLICATE, move
from hp_tp.errors import PlanError, UnsupportedModuleError
from hp_tp.fused import FusedRows
from hp_tp.local_states import owner_of
from hp_tp.placing import place
from hp_tp.style import ParallelStyle
from hp_tp.substitution import exchange_attribute, substitute
from hp_tp.tensor_parallel import RowwiseParallel

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor

    from hp_tp.substitution import Forward

__all__ = ["GatedDeltaNetParallel"]

_SIZES = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
"""The attributes that count heads or channels."""

_PACKED = ("in_proj_qkv", "conv1d")
_BY_VALUE_HEADS = ("in_proj_z", "in_proj_b", "in_proj_a")
_OF_HEADS = ("dt_bias", "A_log")


@dataclass(frozen=True, slots=True)
class _Heads:
    """A layer that runs with this rank's heads: a wrapper of its forward."""

    rows: FusedRows
    input_layout: Placement
    input_name: str
    own: tuple[str, ...]
    """Paths of parameters whose piece is what a rank uses."""
    packed: tuple[str, ...]
    """Paths of those with rows of queries, keys and values."""
    shared: tuple[str, ...]
    """Paths of those that every head uses."""

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        if args:
            args = (self._enter(args[0]), *args[1:])
        else:
            kwargs = {**kwargs, self.input_name: self._enter(kwargs.get(self.input_name))}
        before: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]] = []
        try:
            for path, piece in self._pieces(module):
                owner, name = owner_of(module, path)
                held = parameters_of(owner)
                before.append((held, name, held[name]))
                held[name] = cast("nn.Parameter", piece)
            return forward(module, *args, **kwargs)
        finally:
            for held, name, parameter in before:
                held[name] = parameter

    def _enter(self, value: object) -> object:
        """The whole sequence, whose gradients are addends: each rank's come from its heads."""
        if not isinstance(value, torch.Tensor):
            return value
        return move(
            value,
            self.rows.mesh,
            self.input_layout,
            REPLICATE,
            local=True,
            grad=PARTIAL if self.rows.mesh.size() > 1 else None,
            where="the input of a gated delta net",
        )

    def _pieces(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for path in self.own:
            yield path, to_local(module.get_parameter(path))
        for path in self.packed:
            yield path, self.rows.local(module.get_parameter(path))
        for path in self.shared:
            yield path, to_local(module.get_parameter(path), grad_placements=(PARTIAL,))


@dataclass(kw_only=True, unsafe_hash=True)
class GatedDeltaNetParallel(ParallelStyle):
    """Share out the heads of a gated delta net: projections, convolution, decay and state.

    The module has Qwen3.5's parts: ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b``, ``in_proj_a``, ``conv1d``, ``dt_bias``,
    ``A_log``, ``norm`` (over the features of a head) and ``out_proj``, and the sizes ``num_k_heads``, ``num_v_heads``,
    ``key_dim`` and ``value_dim``.

    Args:
        input_layouts: what a plain input is; ``Replicate()`` when None.
        output_layouts: what the output is; ``Replicate()`` when None. ``Shard(1)`` scatters the sequence.

    The output is plain.

    Example:
        >>> from hp_tp import GatedDeltaNetParallel
        >>> plan = {"layers.*.linear_attn": GatedDeltaNetParallel()}
    """

    lays_out: ClassVar[bool] = True
    input_layouts: Placement | None = None
    output_layouts: Placement | None = None

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse another kind of module, and heads that the number of ranks does not divide.

        Raises:
            UnsupportedModuleError: when the module lacks one of the parts.
            PlanError: when key or value heads do not divide, or heads are shared out already.
        """
        missing = [
            name
            for name in (*_PACKED, *_BY_VALUE_HEADS, *_OF_HEADS, "norm", "out_proj", *_SIZES[:4])
            if not hasattr(module, name)
        ]
        if missing:
            message = f"GatedDeltaNetParallel is for gated delta nets; this {type(module).__name__} has no {missing}"
            raise UnsupportedModuleError(message)
        if isinstance(module.A_log, TorchDTensor):
            message = f"the heads of this {type(module).__name__} are shared out already; apply the style once"
            raise PlanError(message)
        problems = head_problems(
            device_mesh.size(),
            key_heads=cast("int", module.num_k_heads),
            value_heads=cast("int", module.num_v_heads),
        )
        if problems:
            raise PlanError(problems[0])

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Lay out the parameters, and set the sizes to those of a rank."""
        self.check(module, device_mesh)
        key, value = cast("int", module.key_dim), cast("int", module.value_dim)
        rows = FusedRows(device_mesh, (key, key, value))
        packed = self._place(module, _PACKED, rows.layout(), device_mesh)
        own = self._place(module, _BY_VALUE_HEADS, Shard(0), device_mesh)
        shared = self._place(module, ("norm",), REPLICATE, device_mesh)
        place(module, device_mesh, dict.fromkeys(_OF_HEADS, Shard(0)), self.src_data_rank)
        out = RowwiseParallel(output_layouts=self.output_layouts)
        out.src_data_rank = self.src_data_rank
        out.apply(module.get_submodule("out_proj"), device_mesh)
        _set_sizes(module, device_mesh.size())
        label = self.input_layouts or REPLICATE
        name = next(iter(inspect.signature(module.forward).parameters))
        substitute(module, _Heads(rows, label, name, (*own, *_OF_HEADS), packed, shared))
        return module

    def _place(
        self, module: nn.Module, names: Sequence[str], layout: Placement, mesh: DeviceMesh
    ) -> tuple[str, ...]:
        """Lay out all parameters of the named children, and return their paths."""
        paths = []
        for name in names:
            for path, _ in list(module.get_submodule(name).named_parameters(name)):
                owner, own = owner_of(module, path)
                place(owner, mesh, {own: layout}, self.src_data_rank)
                paths.append(path)
        return tuple(paths)


def _set_sizes(module: nn.Module, ranks: int) -> None:
    """Let the module's forward count what a rank has."""
    for name in _SIZES:
        if hasattr(module, name):
            exchange_attribute(module, name, getattr(module, name) // ranks)
    convolution = module.get_submodule("conv1d")
    for name in ("in_channels", "out_channels", "groups"):
        exchange_attribute(convolution, name, getattr(convolution, name) // ranks)


def head_problems(ranks: int, *, key_heads: int, value_heads: int) -> Sequence[str]:
    """What keeps *ranks* ranks from sharing out the heads, as sentences."""
    if not key_heads % ranks and not value_heads % ranks:
        return []
    both = min(key_heads, value_heads)
    legal = [d for d in range(1, both + 1) if not key_heads % d and not value_heads % d]
    return [
        (
            f"{ranks} ranks cannot share out the {key_heads} key heads and {value_heads} value heads of a gated delta net "
            f"whole; degrees that can: {legal}"
        )
    ]
