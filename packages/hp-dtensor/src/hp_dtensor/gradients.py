"""What a leaf keeps in ``.grad``: a gradient laid out as the contract says, at once or after several backward passes.

A hook on the leaf lays the gradient out like the leaf (replicated where the leaf holds addends), whatever layout the last
operator of the backward left it in. :func:`accumulate_gradients` holds the hooks of some leaves back: then addends stay
addends, torch adds those of the next backward to them on each rank alone, and one reduction settles the sum.

Not taken: a gradient that says it is replicated and reduces itself when somebody looks at it. Whoever looks on one rank
alone (to print a norm) would wait for the others forever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from hp_dtensor import _autograd
from hp_dtensor.placements import gradient_placements
from hp_dtensor.spec import spec_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from hp_dtensor.spec import Spec

__all__ = ["Settle", "accumulate_gradients"]


class Settle:
    """The hook of one leaf.

    It knows the leaf's layout and not the leaf, not even weakly: torch refuses to swap tensors that somebody refers to so.
    """

    __slots__ = ("_cls", "_done", "_handle", "_mesh", "_wanted", "held")

    def __init__(self, cls: type, leaf: Tensor, spec: Spec) -> None:
        self._cls = cls
        self._mesh = spec.mesh
        self._wanted = gradient_placements(spec.placements)
        self._done = None if spec.is_partial else spec
        self.held = 0
        """How many callers hold it back."""
        self._handle: RemovableHandle = leaf.register_hook(self)

    def remove(self) -> None:
        """Stop looking after the leaf."""
        self._handle.remove()

    def __call__(self, grad: Tensor) -> Tensor | None:  # noqa: D102  # torch calls it: what should stand instead of *grad*
        if self.held:
            return None
        if type(grad) is self._cls and grad._own is self._done:  # type: ignore[attr-defined]  # each has one
            return None
        return self.settled(grad)

    def settled(self, grad: Tensor) -> Tensor | None:
        """*grad* laid out as the leaf wants it; None where it is so already."""
        spec = spec_of(grad)
        if spec is None or spec.placements == self._wanted or spec.mesh != self._mesh:
            return None
        return _autograd.redistribute(self._cls, grad, self._mesh, self._wanted)


@contextmanager
def accumulate_gradients(parameters: nn.Module | Iterable[Tensor]) -> Iterator[None]:
    """Several backward passes inside, one reduction of each gradient at the end.

    Without it every ``backward()`` leaves each gradient reduced: a replicated parameter costs one all-reduce a
    micro-batch. Inside, gradients stay as the backward made them (``Partial`` for such a parameter) and are added up on
    each rank; on the way out each is laid out like its parameter, with one collective for a gradient. Clip and step after
    the context.

    The result is the same as without up to the order of the sum. A gradient that was there before is added to in its own
    layout, so that its parameter saves nothing: set gradients to None first. Inside a compiled graph the reduction
    stays where it was compiled to. Parameters that are no leaves of ours (FSDP2's: use ``set_requires_gradient_sync``)
    and plain ones are left alone. After an exception nothing is communicated and the gradients stay as they are, each of
    a layout that says what it holds.

    Args:
        parameters: a module, for all of its parameters, or the tensors themselves.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(4, 4)
        >>> with accumulate_gradients(model):
        ...     for _ in range(3):
        ...         model(torch.ones(2, 4)).sum().backward()
        >>> model.weight.grad[0, 0].item()
        6.0
    """
    leaves = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    hooks = [(leaf, settle) for leaf in leaves if (settle := _autograd.settle_of(leaf))]
    for _, settle in hooks:
        settle.held += 1
    try:
        yield
    finally:
        for _, settle in hooks:
            settle.held -= 1
    with torch.no_grad():
        for leaf, settle in hooks:
            if leaf.grad is not None and not settle.held:
                grad = settle.settled(leaf.grad)
                leaf.grad = leaf.grad if grad is None else grad
