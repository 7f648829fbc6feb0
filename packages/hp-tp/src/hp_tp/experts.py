"""Experts shared out over ranks: whole ones, their features, or both.

A module of experts has stacked weights, the first dim of which counts the experts, and takes tokens **sorted by expert** with
the number of them for each: ``forward(tokens [R, d], counts [E]) -> [R, d']``. Its own forward is kept; it runs on this
rank's pieces and on the tokens that are for them.

* :class:`ExpertParallel`: each rank has ``E / ranks`` experts. Tokens travel to their experts and back, as many as there are:
  nothing is padded and nothing dropped. How they travel is a :class:`TokenDispatcher`.
* :class:`TensorParallel`: each rank has a part of every expert's hidden features; tokens are whole on every rank and the
  outputs are added up.
* :class:`ExpertTensorParallel`: both, over a mesh of two axes.

Tokens cross with an all-to-all whose backward is the all-to-all the other way, so that the gradients of tokens, and through
the scores of the router, are those of the single device. The gradient of an expert is complete where the expert is: all
tokens for it were there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from hp_dtensor import Partial, Placement, Replicate, Shard, StridedShard, redistribute_local
from hp_mesh.collectives import all_gather, all_to_all
from torch import nn

from hp_tp._torch import parameters_of
from hp_tp.errors import PlanError, StyleError
from hp_tp.local_states import local_states
from hp_tp.placing import place_state
from hp_tp.style import ParallelStyle
from hp_tp.substitution import substitute

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup

    from hp_tp.substitution import Forward

__all__ = [
    "AllToAllDispatcher",
    "ExpertParallel",
    "ExpertTensorParallel",
    "TensorParallel",
    "TokenDispatcher",
]

T = TypeVar("T")
"""What a dispatcher has to remember to bring tokens back."""


class TokenDispatcher(Protocol[T]):
    """How tokens travel to the ranks that have their experts, and back.

    Implementations are values that keep nothing between calls: what the way back needs is in the receipt.
    """

    def dispatch(
        self, tokens: Tensor, counts: Tensor, mesh: DeviceMesh
    ) -> tuple[Tensor, Tensor, T]:
        """Send tokens to their experts.

        Args:
            tokens: sorted by expert, ``[R, d]``.
            counts: how many are for each of all experts, integers, ``[E]``.
            mesh: the one axis over which the experts are shared out, in order.

        Returns:
            What came here, sorted by expert; how many are for each expert of this rank, ``[E / ranks]``; the receipt.
        """
        ...

    def combine(self, tokens: Tensor, receipt: T, mesh: DeviceMesh) -> Tensor:
        """Send the experts' outputs back: the order in which the tokens were given."""
        ...


class _Exchange(torch.autograd.Function):
    """Pieces of rows to every rank; the gradients take the same way back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, come: list[int], go: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.way = (come, go, group)  # type: ignore[attr-defined]  # torch leaves these open
        return all_to_all(rows, come, go, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        come, go, group = ctx.way  # type: ignore[attr-defined]  # set in forward
        back: Tensor = _Exchange.apply(grads[0], go, come, group)
        return back, None, None, None


@dataclass(frozen=True, slots=True)
class Way:
    """The way of some tokens: how many came from and went to each rank, and where each was put."""

    come: list[int]
    go: list[int]
    order: Tensor


@dataclass(frozen=True, slots=True)
class AllToAllDispatcher:
    """Each token to the rank of its expert by one all-to-all, and back by another.

    The counts are exchanged first, and read on the host: a collective with uneven pieces needs to know them.

    Example:
        >>> from hp_tp import AllToAllDispatcher, ExpertParallel
        >>> ExpertParallel() == ExpertParallel(dispatcher=AllToAllDispatcher())
        True
    """

    def dispatch(
        self, tokens: Tensor, counts: Tensor, mesh: DeviceMesh
    ) -> tuple[Tensor, Tensor, Way]:
        """Send tokens to their experts; see :class:`TokenDispatcher`."""
        group, ranks = mesh.get_group(), mesh.size()
        with torch.no_grad():
            wide = counts.detach().to(torch.int64)
            table = all_gather(wide, group).view(ranks, ranks, -1)  # [from, to, expert there]
            here = table[:, mesh.get_local_rank()]
            go = wide.view(ranks, -1).sum(1).tolist()
            come = here.sum(1).tolist()
            order = _by_expert(here)
        arrived: Tensor = _Exchange.apply(tokens, come, go, group)
        return arrived.index_select(0, order), here.sum(0).to(counts.dtype), Way(come, go, order)

    def combine(self, tokens: Tensor, receipt: Way, mesh: DeviceMesh) -> Tensor:
        """Send outputs back; see :class:`TokenDispatcher`."""
        by_source = tokens.index_select(0, torch.argsort(receipt.order))
        back: Tensor = _Exchange.apply(by_source, receipt.go, receipt.come, mesh.get_group())
        return back


def _by_expert(counts: Tensor) -> Tensor:
    """The order that sorts by expert what lies by rank and, for each rank, by expert; ``[ranks, experts]`` counts."""
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return torch.argsort(experts.repeat_interleave(counts.reshape(-1)), stable=True)


# How the parameters lie.


_HIDDEN: Mapping[str, int] = {"w1": 1, "w3": 1, "w2": 2, "gate_up_proj": 1, "down_proj": 2}
"""Which dim of a stacked weight has the hidden features, by the names in use: ``y = w2(silu(w1 x) * (w3 x))``."""


def _stacked(module: nn.Module) -> dict[str, nn.Parameter]:
    """The stacked weights of a module of experts."""
    return {
        name: parameter
        for name, parameter in parameters_of(module).items()
        if parameter is not None
    }


def _check_shared(module: nn.Module, ranks: int) -> None:
    """Refuse experts that *ranks* ranks cannot share out whole.

    Raises:
        PlanError: when a parameter's first dim does not divide, or does not count experts.
    """
    sizes = {
        name: parameter.shape[0] if parameter.ndim else 0
        for name, parameter in _stacked(module).items()
    }
    experts = set(sizes.values())
    if len(experts) != 1 or 0 in experts:
        message = (
            f"the parameters of {type(module).__name__} should be stacked with the experts as their first dim, and have "
            f"{sizes} there"
        )
        raise PlanError(message)
    (count,) = experts
    if count % ranks:
        legal = [degree for degree in range(1, count + 1) if count % degree == 0]
        message = f"{ranks} ranks cannot share out {count} experts; degrees that can: {legal}"
        raise PlanError(message)


def _check_features(module: nn.Module, hidden: Mapping[str, int], ranks: int) -> None:
    """Refuse weights of which nobody knows where the hidden features are, or whose features do not divide.

    Raises:
        PlanError: naming the parameter.
    """
    for name, parameter in _stacked(module).items():
        dim = hidden.get(name)
        if dim is None or not 1 <= dim < parameter.ndim:
            message = (
                f"{type(module).__name__}.{name} of shape {tuple(parameter.shape)}: which dim has the hidden features? Known "
                f"names are {dict(hidden)}; pass hidden={{{name!r}: DIM}}"
            )
            raise PlanError(message)
        size = parameter.shape[dim] // _blocks(name)
        if size % ranks:
            legal = [degree for degree in range(1, size + 1) if size % degree == 0]
            message = f"{ranks} ranks cannot share out the {size} hidden features of {name}; degrees that can: {legal}"
            raise PlanError(message)


@dataclass(frozen=True, slots=True)
class _Features:
    """Experts of which each rank has some hidden features (all of them, where they are not shared out): a wrapper of their forward."""

    features: DeviceMesh | None
    """The axis over which hidden features are shared out, if they are."""
    names: tuple[str, ...]

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Tensor:
        return self.run(module, forward, *_tokens_and_counts(module, args, kwargs))

    def run(self, module: nn.Module, forward: Forward, tokens: Tensor, counts: Tensor) -> Tensor:
        """Run the experts on whole tokens, and add up what the ranks' features give."""
        mesh = self.features
        whole, addends = (Replicate(),), (Partial(),)
        if mesh is not None and mesh.size() > 1:
            tokens = redistribute_local(tokens, mesh, whole, whole, grad_placements=addends)
        with local_states(module, dict.fromkeys(self.names)):
            output = cast("Tensor", forward(module, tokens, counts))
        if mesh is not None and mesh.size() > 1:
            output = redistribute_local(output, mesh, addends, whole)
        return output


@dataclass(frozen=True, slots=True)
class _Travelling(Generic[T]):
    """Experts run on the tokens that travelled to them: a wrapper of their forward."""

    mesh: DeviceMesh
    dispatcher: TokenDispatcher[T]
    experts: _Features

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Tensor:
        tokens, counts = _tokens_and_counts(module, args, kwargs)
        if self.mesh.size() == 1:
            return self.experts.run(module, forward, tokens, counts)
        arrived, own, receipt = self.dispatcher.dispatch(tokens, counts, self.mesh)
        output = self.experts.run(module, forward, arrived, own)
        return self.dispatcher.combine(output, receipt, self.mesh)


def _tokens_and_counts(
    module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Tensor, Tensor]:
    given = (*args, *kwargs.values())
    if len(given) != 2 or not all(isinstance(value, torch.Tensor) for value in given):
        kinds = [type(value).__name__ for value in given]
        message = (
            f"{type(module).__name__} got {kinds}; a module of experts takes tokens sorted by expert and the number of them for "
            "each expert, both plain tensors"
        )
        raise PlanError(message)
    return cast("tuple[Tensor, Tensor]", given)


@dataclass(frozen=True, slots=True)
class _Choosing:
    """Experts of whose whole tokens each rank takes those for its own: a wrapper of their forward."""

    mesh: DeviceMesh
    names: tuple[str, ...]

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Tensor:
        tokens, counts = _tokens_and_counts(module, args, kwargs)
        ranks, own = self.mesh.size(), self.mesh.get_local_rank()
        whole, addends = (Replicate(),), (Partial(),)
        cut = ranks > 1
        if cut:
            tokens = redistribute_local(tokens, self.mesh, whole, whole, grad_placements=addends)
        by_rank = counts.view(ranks, -1)
        sizes = by_rank.sum(1).tolist()
        start = sum(sizes[:own])
        with local_states(module, dict.fromkeys(self.names)):
            chosen = tokens.narrow(0, start, sizes[own])
            output = cast("Tensor", forward(module, chosen, by_rank[own]))
        rows = (0, 0) * (output.ndim - 1)
        output = F.pad(output, (*rows, start, sum(sizes[own + 1 :])))
        return redistribute_local(output, self.mesh, addends, whole) if cut else output


@dataclass(kw_only=True, unsafe_hash=True)
class ExpertParallel(ParallelStyle):
    """Share out whole experts: stacked weights cut along their first dim, tokens sent to their experts and back.

    Args:
        input_layouts: what the tokens are. ``Shard(0)``, when None: each rank routes its own (over a data axis, or where the
            sequence is cut over the tensor axis), and they travel. ``Replicate()``: all ranks have routed all tokens; each
            takes those for its experts, and the outputs are added up.
        dispatcher: how tokens travel; an :class:`AllToAllDispatcher` unless another is given.

    Example:
        >>> from hp_tp import ExpertParallel
        >>> plan = {"layers.*.moe.experts": ExpertParallel()}
    """

    lays_out: ClassVar[bool] = True
    input_layouts: Placement | None = None
    dispatcher: TokenDispatcher[Any] = field(
        default_factory=AllToAllDispatcher
    )  # each has its own receipt

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse experts that cannot be shared out whole.

        Raises:
            PlanError: when the number of ranks does not divide the experts.
            StyleError: when tokens are neither cut by rows nor whole.
        """
        if self.input_layouts not in (None, Shard(0), Replicate()):
            message = (
                f"input_layouts={self.input_layouts} of ExpertParallel: tokens are cut by rows, Shard(0), or whole, "
                "Replicate()"
            )
            raise StyleError(message)
        _check_shared(module, device_mesh.size())

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the stacked weights by experts, and let tokens travel."""
        self.check(module, device_mesh)
        names = tuple(_stacked(module))
        for name in names:
            place_state(module, name, device_mesh, (Shard(0),), self.src_data_rank)
        if self.input_layouts == Replicate():
            substitute(module, _Choosing(device_mesh, names))
        else:
            substitute(module, _Travelling(device_mesh, self.dispatcher, _Features(None, names)))
        return module


@dataclass(kw_only=True)
class TensorParallel(ParallelStyle):
    """Share out the hidden features of every expert; tokens are whole on every rank, and so is the output.

    Args:
        hidden: which dim of each stacked weight has the hidden features; known names need none.

    Example:
        >>> from hp_tp import TensorParallel
        >>> plan = {"layers.*.moe.experts": TensorParallel(hidden={"up": 2, "down": 1})}
    """

    lays_out: ClassVar[bool] = True
    hidden: Mapping[str, int] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(tuple(self.hidden.items()))

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse weights whose hidden features are unknown or do not divide.

        Raises:
            PlanError: naming the weight.
        """
        _check_features(module, {**_HIDDEN, **self.hidden}, device_mesh.size())

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the stacked weights by hidden features, and add up the outputs."""
        self.check(module, device_mesh)
        dims = {**_HIDDEN, **self.hidden}
        names = tuple(_stacked(module))
        for name in names:
            place_state(
                module, name, device_mesh, _cut(name, dims[name], device_mesh), self.src_data_rank
            )
        substitute(module, _Features(device_mesh, names))
        return module


@dataclass(kw_only=True)
class ExpertTensorParallel(ParallelStyle):
    """Share out whole experts over one axis, and the hidden features of each over another.

    Args:
        dispatcher: how tokens travel over the first axis.
        hidden: which dim of each stacked weight has the hidden features; known names need none.

    It is applied on a mesh of two axes, experts first. Tokens are cut over the first, and equal on the ranks of the second.

    Example:
        >>> from hp_tp import ExpertTensorParallel
        >>> def lay_out(experts, mesh):
        ...     return ExpertTensorParallel().apply(experts, mesh["ep", "etp"])
    """

    lays_out: ClassVar[bool] = True
    axes: ClassVar[int] = 2
    dispatcher: TokenDispatcher[Any] = field(
        default_factory=AllToAllDispatcher
    )  # each has its own receipt
    hidden: Mapping[str, int] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.dispatcher, tuple(self.hidden.items())))

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse a mesh of another number of axes, and what does not divide.

        Raises:
            PlanError: naming the mesh or the weight.
        """
        if device_mesh.ndim != 2:
            message = (
                f"ExpertTensorParallel takes a mesh of two axes, experts and their features, and got {device_mesh}; for example "
                'mesh["ep", "etp"]'
            )
            raise PlanError(message)
        _check_shared(module, device_mesh.size(0))
        _check_features(module, {**_HIDDEN, **self.hidden}, device_mesh.size(1))

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the stacked weights by experts and features."""
        self.check(module, device_mesh)
        experts, features = (device_mesh[name] for name in _axis_names(device_mesh))
        dims = {**_HIDDEN, **self.hidden}
        names = tuple(_stacked(module))
        for name in names:
            layout = (Shard(0), *_cut(name, dims[name], features))
            place_state(module, name, device_mesh, layout, self.src_data_rank)
        substitute(module, _Travelling(experts, self.dispatcher, _Features(features, names)))
        return module


def _axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    if names is None:
        message = f"ExpertTensorParallel needs a mesh whose axes have names, and got {mesh}"
        raise PlanError(message)
    return tuple(names)


def _cut(name: str, dim: int, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """How a stacked weight lies; one with gate and up in it is cut block by block."""
    if _blocks(name) > 1 and mesh.size() > 1:
        return (StridedShard(dim, split_factor=_blocks(name)),)
    return (Shard(dim),)


def _blocks(name: str) -> int:
    """How many projections a weight of this name holds, one after the other."""
    return 2 if name == "gate_up_proj" else 1
