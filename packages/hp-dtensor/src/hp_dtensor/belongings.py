"""Plain tensors that a distributed module holds: masks, rotary caches, biases that a program set as attributes.

The idea: such a tensor was one tensor on the single device, so it is meant to be one here. Where it meets a distributed
tensor it counts as replicated, once the ranks were seen to agree about its values; a write to it asks again.

The rule: buffers and attributes, of a module that was distributed as a whole and of all below it, when they are met; so
one that is set afterwards belongs as well. Parameters do not: what they need is a layout, and a gradient that has it.
Inside ``torch.compile`` nothing does, because there stand-ins are seen instead of tensors: lay such a tensor out yourself.

The design not taken: to make them distributed tensors when they are set. That takes another ``__setattr__`` for other
people's classes, and turns what they do with plain tensors into something else.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hp_dtensor._torch import writes_to

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh

__all__ = ["adopt", "agreed", "belongs", "note_agreement"]

_adopted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_agreed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""For each tensor about which ranks agreed: the mesh of these ranks, and how often it had been written to."""


def adopt(module: nn.Module) -> None:
    """From now on the plain tensors of *module* and of what is below it may meet distributed tensors."""
    _adopted.add(module)


def belongs(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is a buffer or an attribute of a module that was distributed."""
    if not _adopted or tensor.requires_grad or isinstance(tensor, nn.Parameter):
        return False
    return tensor in _agreed or any(
        held is tensor
        for root in tuple(_adopted)
        for module in root.modules()
        for held in (*vars(module).values(), *module.buffers(recurse=False))
    )


def agreed(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether the ranks of *mesh* were seen to agree about *tensor* as it is now."""
    found: object = _agreed.get(tensor)
    return found is not None and found == (mesh, writes_to(tensor))


def note_agreement(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Remember that the ranks of *mesh* agree about *tensor*, until it is written to."""
    if not tensor.is_inference():  # of which nobody counts how often they are written to
        _agreed[tensor] = (mesh, writes_to(tensor))
