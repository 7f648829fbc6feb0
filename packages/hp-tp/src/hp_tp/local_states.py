"""A module's own forward on this rank's pieces of its parameters.

Code that was written for one device reads ``self.w1`` and multiplies; where each rank has whole experts, heads or features,
the same code is right for a piece, if it sees the piece. While the forward runs the pieces stand where the distributed
parameters do; gradients reach the parameters, and how those of replicas fit together is said for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from hp_dtensor import Placement, to_local
from hp_dtensor.local import own_piece
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp._torch import buffers_of, parameters_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["local_states", "owner_of"]


@contextmanager
def local_states(
    module: nn.Module, states: Mapping[str, tuple[Placement, ...] | None]
) -> Iterator[None]:
    """Let *module* see its pieces of the named parameters and buffers.

    Args:
        module: what runs inside.
        states: paths, each with how the gradients of the piece fit together; None for like the parameter.
    """
    before: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for path, grad in states.items():
        owner, name = owner_of(module, path)
        held = cast(
            "dict[str, Tensor | None]",
            parameters_of(owner) if name in parameters_of(owner) else buffers_of(owner),
        )
        state = held.get(name)
        if isinstance(state, TorchDTensor):
            before.append((held, name, state))
            held[name] = (
                own_piece(state) if grad is None else to_local(state, grad_placements=grad)
            )
    try:
        yield
    finally:
        for held, name, state in before:
            held[name] = state


def owner_of(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that has the state at *path*, and its name there."""
    below, _, name = path.rpartition(".")
    return (module.get_submodule(below) if below else module), name
