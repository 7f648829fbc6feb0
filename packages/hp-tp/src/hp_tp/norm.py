"""Sequence parallelism: a module that treats each token alone runs on this rank's piece of the sequence.

Its parameters are replicated and each rank's gradient is an addend, from its own tokens; they are added up in the backward,
so that the replicas stay equal with no help from the training loop. A plain input is taken as the local piece (that is what
the layer before hands out), and then the output is plain as well: the module changes neither length nor layout. A
distributed input is moved to the sequence layout if need be, and gives a distributed output.

Layer norm and RMS norm run on local tensors. Other modules run through dispatch on distributed ones, which is right for any
module and slower; so does dropout, whose mask must be that of the single device and not repeat on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import torch.nn.functional as F
from hp_dtensor import Placement, Shard, to_local
from hp_mesh import DeviceMesh
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp.boundary import PARTIAL, hand_out, map_tensors, move, normal
from hp_tp.errors import BoundaryError
from hp_tp.placing import replicate
from hp_tp.style import ParallelStyle
from hp_tp.substitution import original_class, substitute

if TYPE_CHECKING:
    from torch import Tensor

    from hp_tp.substitution import Forward

__all__ = ["SequenceParallel"]

_Compute = Callable[[nn.Module, "Tensor"], "Tensor"]
"""A module run on this rank's piece: the module and the piece."""


@dataclass(frozen=True, slots=True)
class _SequenceLayout:
    """How a module runs on a piece of the sequence: a wrapper of its forward."""

    mesh: DeviceMesh
    cut: Placement
    input_layout: Placement
    use_local_output: bool | None
    compute: _Compute | None
    """How to run it on plain pieces; None goes through dispatch."""

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        if not args:
            if "input" not in kwargs:
                return forward(module, *args, **kwargs)
            args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
        first, *rest = args
        if not isinstance(first, torch.Tensor):
            message = (
                f"SequenceParallel expects a tensor as the first input of {type(module).__name__}, got "
                f"{type(first).__name__}"
            )
            raise BoundaryError(message)
        compute = None if self._is_averaged(module, first.ndim) else self.compute
        local_output = self.use_local_output
        if local_output is None:
            local_output = not isinstance(first, TorchDTensor)
        where = f"the input of {type(module).__name__}"
        if compute is None and not _is_identity(module):
            whole = move(first, self.mesh, self.input_layout, self.cut, local=False, where=where)
            output = forward(module, whole, *rest, **kwargs)
            return map_tensors(self._piece, output) if local_output else output
        whole_shape = tuple(first.shape) if isinstance(first, TorchDTensor) else None
        piece = move(first, self.mesh, self.input_layout, self.cut, local=True, where=where)
        output = piece if compute is None else compute(module, piece)
        return hand_out(
            output, self.mesh, normal(self.cut, piece.ndim), whole_shape, local=local_output
        )

    def _piece(self, value: Tensor) -> Tensor:
        """A plain piece of the sequence of *value*."""
        return move(value, self.mesh, self.cut, self.cut, local=True, where="a normed sequence")

    def _is_averaged(self, module: nn.Module, ndim: int) -> bool:
        """Whether *module* is a norm over dims of which the sequence is one: it needs the whole sequence."""
        normalized: tuple[int, ...] = getattr(module, "normalized_shape", ())
        return cast("Shard", normal(self.cut, ndim)).dim >= ndim - len(normalized)


def _is_identity(module: nn.Module) -> bool:
    """Whether *module* is a dropout that drops nothing now."""
    return isinstance(module, nn.Dropout) and not (module.training and module.p > 0)


def _layer_norm(module: nn.Module, piece: Tensor) -> Tensor:
    norm = cast("nn.LayerNorm", module)
    return F.layer_norm(
        piece, norm.normalized_shape, _replica(norm.weight), _replica(norm.bias), norm.eps
    )


def _rms_norm(module: nn.Module, piece: Tensor) -> Tensor:
    norm = cast("nn.RMSNorm", module)
    return F.rms_norm(piece, norm.normalized_shape, _replica(norm.weight), norm.eps)


def _replica(parameter: Tensor | None) -> Tensor | None:
    """This rank's replica of *parameter*; the ranks' gradients are added up."""
    return None if parameter is None else to_local(parameter, grad_placements=(PARTIAL,))


_LOCAL: dict[type[nn.Module], _Compute] = {nn.LayerNorm: _layer_norm, nn.RMSNorm: _rms_norm}


@dataclass(kw_only=True, unsafe_hash=True)
class SequenceParallel(ParallelStyle):
    """Run a norm, a dropout or another module that treats tokens alone on a piece of the sequence.

    The parameters are replicated, and their gradients are those of the single device on every rank.

    A plain input counts as this rank's piece of the sequence, as torch has it, and nothing can tell a whole sequence from a piece.
    The output then is a plain piece of the same length, so that a module that was given whole sequences by mistake still computes
    what it did; torch hands out a DTensor of as many times the length, which is ``use_local_output=False`` here.

    Args:
        sequence_dim: the dim of the input that the ranks share out.
        input_layouts: what a plain input is; by default this rank's piece of the sequence. ``Replicate()`` takes the whole
            sequence on every rank and cuts it.
        use_local_output: whether the output is a plain tensor; None gives a plain tensor for a plain input and a DTensor
            for a DTensor.

    Example:
        >>> from hp_tp import SequenceParallel
        >>> plan = {"norm": SequenceParallel(), "dropout": SequenceParallel(use_local_output=True)}
    """

    lays_out: ClassVar[bool] = True
    sequence_dim: int = 1
    input_layouts: Placement | None = None
    use_local_output: bool | None = None

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replicate the parameters of *module* and let it run on a piece of the sequence."""
        replicate(module, device_mesh, self.src_data_rank)
        cut = Shard(self.sequence_dim)
        layout = cut if self.input_layouts is None else self.input_layouts
        compute = _LOCAL.get(original_class(module))
        substitute(
            module, _SequenceLayout(device_mesh, cut, layout, self.use_local_output, compute)
        )
        return module
