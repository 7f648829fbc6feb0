"""Plain pieces that stand for distributed parameters, for data parallelism that knows plain tensors only.

DDP and torch's composable ``replicate`` collect parameters when they are made, and reduce gradients where those of what they
collected arrive. So while they collect, a module has *pieces*: plain parameters that share the memory of the distributed ones.
While a forward runs it has distributed tensors made of the pieces, through which gradients reach them. Otherwise it has its
distributed parameters, the same objects as before, whose ``.grad`` shares the memory of the piece's: names stay, optimizers
made before and after go on, a norm for clipping is that of the whole.

Torch exchanges the parameters itself, and then loses them: what it puts back for the forward is no parameter, so that after the
forward it finds none to exchange. A parallel module therefore looks at what is registered (:func:`admit`), and keeps both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from hp_dtensor import DTensor
from hp_dtensor.distribute import like_parameter
from hp_dtensor.local import wrapped_like
from hp_dtensor.spec import spec_of
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp._torch import localized_by_torch, parameters_of
from hp_tp.errors import BoundaryError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LINKED", "OWNERS", "admit", "link", "note_deleted", "piece_of", "whole_parameters"]

LINKED: list[None] = []
"""Empty as long as no parameter of this process has a piece: what a forward looks at first."""

OWNERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that look at what is registered."""

_found: list[dict[int, list[tuple[nn.Module, str]]]] = []
"""Where each of their distributed parameters is, found once while torch exchanges all of a model's; empty otherwise."""

_PIECE, _WHOLE, _WATCHED = "_piece", "_whole", "_watched"
_DELETED = "_deleted_parameter"


def link(whole: nn.Parameter, piece: nn.Parameter | None = None) -> nn.Parameter:
    """Let *piece* (a new one when None) stand for the distributed parameter *whole*, whose memory it shares; return it."""
    local = _local(whole)
    local.requires_grad_(False)  # torch has turned it on
    if piece is None:
        piece = like_parameter(whole, local.detach())
    piece.requires_grad_(whole.requires_grad)
    whole.__dict__[_PIECE], piece.__dict__[_WHOLE] = piece, whole
    if whole.requires_grad:
        whole.register_hook(_refuse)
    LINKED[:] = [None]
    return piece


def piece_of(parameter: Tensor) -> nn.Parameter | None:
    """The piece that stands for a distributed *parameter*, if one does; a copy of a parameter has none."""
    piece: nn.Parameter | None = parameter.__dict__.get(_PIECE)
    return piece if piece is not None and piece.__dict__.get(_WHOLE) is parameter else None


def note_deleted(module: nn.Module, name: str) -> None:
    """Remember a distributed parameter that is about to be deleted, in case that its piece comes next."""
    held: Tensor | None = parameters_of(module).get(name)
    if isinstance(held, TorchDTensor):
        module.__dict__[_DELETED] = (name, held)


def admit(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """What to register as *name* when *parameter* is given: a piece that torch makes is linked, or not needed any more."""
    deleted, before = module.__dict__.pop(_DELETED, (None, None))
    if parameter is None:
        return None
    if deleted != name or not localized_by_torch(parameter):
        return parameter
    whole = cast("nn.Parameter", before)
    if piece_of(whole) is None:
        link(whole, parameter)
        for owner, its_name in _places().get(id(whole), ()):
            if parameters_of(owner).get(its_name) is whole:  # torch exchanges one of those tied
                parameters_of(owner)[its_name] = parameter
        return parameter
    _local(whole).requires_grad_(False)  # torch has turned it on
    return whole


def _places() -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules and names of each distributed parameter, by its id: several when it is tied."""
    if not _found:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in OWNERS:
            held: Mapping[str, Tensor | None] = parameters_of(owner)
            for name, parameter in held.items():
                if isinstance(parameter, TorchDTensor):
                    places.setdefault(id(parameter), []).append((owner, name))
        _found.append(places)
    return _found[0]


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """While a forward runs, let *module* and those below have distributed tensors made of pieces; parameters afterwards."""
    _found.clear()
    made: dict[nn.Parameter, Tensor] = {}
    before: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for owner in module.modules():
        held = parameters_of(owner)
        for name, parameter in held.items():
            if parameter is None:
                continue
            whole = cast("nn.Parameter", parameter.__dict__.get(_WHOLE, parameter))
            piece = piece_of(whole)
            if piece is None:
                continue
            if piece not in made:  # a tied parameter stays one
                made[piece] = _made_of(piece, whole)
            before.append((held, name, whole))
            held[name] = cast("nn.Parameter", made[piece])
    try:
        yield
    finally:
        for held, name, whole in before:
            held[name] = whole


def _made_of(piece: nn.Parameter, whole: nn.Parameter) -> Tensor:
    """A distributed tensor made of *piece*, whose gradients reach the piece and show on *whole*."""
    spec = spec_of(whole)
    if spec is None:  # only to tell the type checker
        return whole
    if piece.requires_grad:
        if _WATCHED not in piece.__dict__:
            _watch(piece, whole)
        if piece.grad is not None and whole.grad is not None:
            whole.grad = wrapped_like(piece.grad, whole)  # DDP may have moved it to another bucket
    return DTensor.from_local(
        piece, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
    )


def _watch(piece: nn.Parameter, whole: nn.Parameter) -> None:
    """Keep the gradients of *piece* and *whole* in the same memory, from the time on that both are there."""

    def drop(grad: Tensor) -> None:
        """Before a gradient is added: one that was dropped from either is dropped from both."""
        del grad
        if piece.grad is None or whole.grad is None:
            piece.grad = whole.grad = None

    def show(*_: object) -> None:
        """After it was added, and after DDP has moved it to a bucket: show it."""
        if piece.grad is not None:
            held = whole.grad
            if held is None or _local(held).data_ptr() != piece.grad.data_ptr():
                whole.grad = wrapped_like(piece.grad, whole)

    piece.register_hook(drop)
    with torch.enable_grad():
        node = cast("torch.autograd.graph.Node", piece.view_as(piece).grad_fn).next_functions[0][0]
    cast("torch.autograd.graph.Node", node).register_hook(show)
    piece.__dict__[_WATCHED] = node  # hooks live as long as their node


def _refuse(grad: Tensor) -> Tensor:
    message = (
        f"a parameter of shape {tuple(grad.shape)} was used outside of its module's forward (or in a compiled one), under data "
        "parallelism that holds its piece: this gradient would not be averaged over the replicas. Use it inside of the eager "
        "forward of its module, or take FSDP2 (fully_shard, or replicate of torch.distributed._composable.replicate_with_fsdp), which needs no pieces."
    )
    raise BoundaryError(message)


def _local(tensor: Tensor) -> Tensor:
    """This rank's piece of a distributed *tensor*, without history."""
    return cast("Tensor", tensor._local_tensor)  # type: ignore[attr-defined]  # every DTensor has one
