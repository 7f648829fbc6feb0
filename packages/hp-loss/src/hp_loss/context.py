"""`loss_parallel`: inside it, torch's `cross_entropy` of vocabulary-sharded logits is ours.

`torch.nn.functional.cross_entropy` asks the active torch-function modes before it does anything,
so a mode sees the call with its options whole, before it falls apart into operators. The mode
answers that one function and passes every other on untouched: a softmax over a sharded dimension
inside the context is a plain softmax. Nothing of torch is patched.

What the context says (mesh, strictness, depth) is a context variable: threads and async tasks
don't see each other's. The mode asks that variable, so that interleaved tasks may enter and leave
modes in any order; where a task runs on a thread that never entered one, `cross_entropy` is
torch's own: slower, and right.

Not taken: recognising the pieces, log_softmax and nll_loss, at dispatch. Options such as smoothing
are gone by then, and a log_softmax that no loss follows would come out wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from hp_dtensor import Replicate
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.overrides import TorchFunctionMode

from hp_loss.errors import LossLayoutError
from hp_loss.layout import class_dim_of_dtensor, layout_of
from hp_loss.options import LossOptions, Reduction
from hp_loss.vocab_parallel import cross_entropy_of

__all__ = ["get_loss_parallel_count", "is_loss_parallel_active", "loss_parallel"]


@dataclass(frozen=True, slots=True)
class _State:
    mesh: DeviceMesh | None
    strict: bool
    depth: int


_state: ContextVar[_State | None] = ContextVar("hp_loss.loss_parallel", default=None)


@contextmanager
def loss_parallel(*, mesh: DeviceMesh | None = None, strict: bool = True) -> Iterator[None]:
    """Compute `cross_entropy` of vocabulary-sharded DTensors where the shards are, inside this context.

    It holds for `torch.nn.functional.cross_entropy` and `torch.nn.CrossEntropyLoss`, with all
    their options. Plain tensors and all other functions are untouched. The backward may run inside
    or outside.

    Contexts nest: the inner one's arguments hold until it is left, be it by an exception.

    Args:
        mesh: the mesh that the logits must be on, or one of its axes' meshes; any if None.
        strict: refuse distributed logits that no mesh axis shards over the classes, and Partial
            logits, since a plan that was meant to shard the head and did not is found here. With
            False they are computed all the same, Partial logits after a reduction and a warning.

    Raises:
        LossLayoutError: (a `ValueError`) from `cross_entropy`, for logits on another mesh, or by
            *strict*.

    Example:
        >>> from hp_loss import is_loss_parallel_active, loss_parallel
        >>> with loss_parallel():
        ...     is_loss_parallel_active()
        True
        >>> is_loss_parallel_active()
        False
    """
    if torch.compiler.is_compiling():
        # A graph can neither read nor set context variables. Nothing interleaves in it: the mode
        # has the state.
        with _CrossEntropyMode(_State(mesh, strict, depth=1)):
            yield
        return
    state = _State(mesh, strict, get_loss_parallel_count() + 1)
    token = _state.set(state)
    try:
        with _CrossEntropyMode(state):
            yield
    finally:
        _state.reset(token)


def is_loss_parallel_active() -> bool:
    """Whether this thread or async task is inside `loss_parallel`.

    Example:
        >>> from hp_loss import is_loss_parallel_active
        >>> is_loss_parallel_active()
        False
    """
    return _state.get() is not None


def get_loss_parallel_count() -> int:
    """How many `loss_parallel` contexts this thread or async task is inside of; 0 outside.

    Example:
        >>> from hp_loss import get_loss_parallel_count, loss_parallel
        >>> with loss_parallel(), loss_parallel():
        ...     get_loss_parallel_count()
        2
    """
    state = _state.get()
    return 0 if state is None else state.depth


class _CrossEntropyMode(TorchFunctionMode):
    """Answers `cross_entropy` of DTensors.

    Args:
        state: what the context says that entered it. Only a graph, which can't read context
            variables, asks this; otherwise the variable decides, since the mode on top may be that
            of another task.
    """

    def __init__(self, state: _State) -> None:
        super().__init__()
        self._hp_state = state

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            state = self._hp_state if torch.compiler.is_compiling() else _state.get()
            logits = args[0] if args else kwargs.get("input")
            if state is not None and isinstance(logits, TorchDTensor):
                return _cross_entropy(state, *args, **kwargs)  # type: ignore[arg-type]  # what the caller gave torch
        return func(*args, **kwargs)


def _cross_entropy(
    state: _State,
    input: TorchDTensor,  # noqa: A002  # torch's name for it
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if size_average is not None or reduce is not None:
        reduction = _reduction_of_flags(size_average, reduce)
    options = LossOptions(ignore_index, cast("Reduction", reduction), label_smoothing)
    logits = _checked(state, input, target)
    return cross_entropy_of(logits, target, options, weight=weight)


def _checked(state: _State, logits: TorchDTensor, target: Tensor) -> TorchDTensor:
    """Refuse what *state* says is to be refused, and reduce Partial logits where it isn't."""
    if state.mesh is not None and not _is_of(logits.device_mesh, state.mesh):
        raise LossLayoutError(
            f"cross_entropy got logits on {logits.device_mesh} inside loss_parallel(mesh={state.mesh}): enter the context "
            "with the mesh of the logits, or one of its axes, or without one",
            placements=str(tuple(logits.placements)),
        )
    placements = tuple(logits.placements)
    if not state.strict and any(placement.is_partial() for placement in placements):
        fixed = tuple(
            Replicate() if placement.is_partial() else placement for placement in placements
        )
        warnings.warn(
            f"loss_parallel(strict=False) reduces logits with the placements {placements} to {fixed}: {logits.numel()} "
            "elements are summed over the ranks before the loss",
            stacklevel=2,
        )
        return logits.redistribute(placements=fixed)
    layout = layout_of(logits, class_dim_of_dtensor(logits, target, None))
    if (
        state.strict
        and not layout.vocabulary.groups
        and not _may_be_whole(logits, layout.class_dim)
    ):
        raise LossLayoutError(
            f"cross_entropy got logits with the placements {placements} inside loss_parallel(): no mesh axis shards "
            f"dimension {layout.class_dim}, that of the classes. Shard the head (ColwiseParallel with "
            "output_layouts=Shard(-1) and use_local_output=False), compute this loss outside the context, or enter it "
            "with strict=False",
            placements=str(placements),
        )
    return logits


def _may_be_whole(logits: TorchDTensor, class_dim: int) -> bool:
    """Whether logits that no axis of several ranks cuts over the classes are what the plan says all the same.

    So it is on one rank, and where the axis that would cut them has one rank.
    """
    mesh = logits.device_mesh
    if mesh.size() == 1:
        return True
    return any(placement.is_shard(class_dim) for placement in logits.placements)


def _is_of(mesh: DeviceMesh, wanted: DeviceMesh) -> bool:
    """Whether *wanted* is *mesh* or made of some of its axes."""
    if mesh == wanted:
        return True
    names, wanted_names = mesh.mesh_dim_names, wanted.mesh_dim_names
    if not names or not wanted_names or not set(wanted_names) <= set(names):
        return False
    return all(mesh[name].mesh.tolist() == wanted[name].mesh.tolist() for name in wanted_names)


def _reduction_of_flags(size_average: bool | None, reduce: bool | None) -> Reduction:
    """What torch's two old flags mean."""
    if reduce is False:
        found: Reduction = "none"
    else:
        found = "sum" if size_average is False else "mean"
    warnings.warn(
        f"size_average and reduce are deprecated: use reduction={found!r} instead",
        FutureWarning,
        stacklevel=2,
    )
    return found
