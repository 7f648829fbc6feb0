"""Styles that only touch the boundary of a module: its inputs, its outputs, or both; and the one that leaves it whole.

Layouts belong to the parameters of the forward: the first to the first, and so on, whether the caller passes it by position
or by name. ``None`` leaves a value alone, and a value that is None stays so. One layout for an argument that is a list, tuple
or dict of tensors goes for each of them.

Values move lazily (see :mod:`hp_tp.boundary`): several inputs travel at once, and so does an output while what is independent of
it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from hp_dtensor import Placement
from hp_mesh import DeviceMesh
from torch import nn

from hp_tp.boundary import REPLICATE, check_even, map_tensors, move, normal
from hp_tp.errors import BoundaryError, StyleError
from hp_tp.placing import replicate
from hp_tp.style import ParallelStyle
from hp_tp.substitution import substitute

if TYPE_CHECKING:
    from torch import Tensor

    from hp_tp.substitution import Forward

__all__ = ["NoParallel", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]

Layouts = Placement | Sequence[Placement | None] | None
"""One layout, or one for each value."""


def _several(layouts: Layouts) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """What one value is, and what it shall be."""

    mesh: DeviceMesh
    label: Placement | None
    wanted: Placement | None
    local: bool
    dtype: torch.dtype | None = None

    def __call__(self, value: object, where: str) -> object:
        if value is None or self.label is None:
            return value
        label, wanted = self.label, self.wanted or self.label

        def cross(tensor: Tensor) -> Tensor:
            return self._cross(tensor, label, wanted, where)

        if not _has_tensors(value):
            message = (
                f"{where} has layout {self.label}, but it is {value!r:.60} of type {type(value).__name__}, which has no layout; "
                "give None as the layout of what is no tensor"
            )
            raise StyleError(message)
        return map_tensors(cross, value)

    def _cross(self, tensor: Tensor, label: Placement, wanted: Placement, where: str) -> Tensor:
        before = tensor.dtype
        if self.dtype is not None and before.is_floating_point:
            tensor = tensor.to(self.dtype)
        out = move(tensor, self.mesh, label, wanted, local=self.local, where=where, lazy=True)
        return out if out.dtype is before else out.to(before)


def _has_tensors(value: object) -> bool:
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return bool(found)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The inputs of a module, moved before its forward runs: a wrapper of it."""

    names: tuple[str, ...]
    by_position: tuple[_Crossing, ...]
    by_name: Mapping[str, _Crossing]
    leave_others: bool = False

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        if self.by_position and len(args) > len(self.by_position) and not self.leave_others:
            message = (
                f"module inputs and input_layouts should have same length! {type(module).__name__} got {len(args)} inputs by "
                f"position and input_layouts has {len(self.by_position)} entries; give one for each, None for what is left "
                "alone, or set leave_others=True"
            )
            raise BoundaryError(message)
        moved = [
            crossing(value, f"input {position} of {type(module).__name__}")
            for position, (value, crossing) in enumerate(zip(args, self.by_position, strict=False))
        ]
        named = {
            name: self.by_name[name](value, f"input {name!r} of {type(module).__name__}")
            if name in self.by_name
            else value
            for name, value in kwargs.items()
        }
        return forward(module, *moved, *args[len(moved) :], **named)

    def __hash__(self) -> int:
        return hash((self.names, self.by_position, tuple(self.by_name.items())))


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The outputs of a module, moved after its forward ran: a wrapper of it."""

    crossings: tuple[_Crossing, ...]

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        output = forward(module, *args, **kwargs)
        name = type(module).__name__
        if len(self.crossings) == 1 and not (
            isinstance(output, (tuple, list)) and len(output) == 1
        ):
            return self.crossings[0](output, f"the output of {name}")
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if len(outputs) != len(self.crossings):
            message = (
                "module outputs and output_layouts should have same length! "
                f"{name} returned {len(outputs)} outputs, but output_layouts has {len(self.crossings)} entries; give one for "
                "each output, None for those to be left alone"
            )
            raise BoundaryError(message)
        moved = [
            crossing(value, f"output {position} of {name}")
            for position, (value, crossing) in enumerate(zip(outputs, self.crossings, strict=True))
        ]
        if isinstance(output, list):
            return moved
        return type(output)(*moved) if hasattr(output, "_fields") else tuple(moved)


def _check_pair(
    first: Sequence[object] | None,
    second: Sequence[object] | None,
    first_name: str,
    second_name: str,
) -> None:
    """Refuse two lists of layouts that do not go together."""
    if first is None and second is None:
        return
    if first is None or second is None:
        given, missing = (second_name, first_name) if first is None else (first_name, second_name)
        message = f"{given} is given but {missing} is not; each layout needs the one it goes with"
        raise StyleError(message)
    if len(first) != len(second):
        message = (
            f"{first_name} and {second_name} should have same length! They have {len(first)} and {len(second)} entries; give one "
            "for each value"
        )
        raise StyleError(message)


@dataclass(kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """Label and move the inputs of a module.

    Args:
        input_layouts: what plain positional inputs are: one layout, or one for each, None for what is left alone.
        desired_input_layouts: what the module wants, entry by entry.
        input_kwarg_layouts: the same for inputs passed by name.
        desired_input_kwarg_layouts: likewise.
        use_local_output: whether the module gets plain tensors instead of DTensors.
        leave_others: leave positional inputs beyond the last entry alone, instead of an error when the module is called.

    Raises:
        StyleError: when the two lists of a pair have different lengths, or names differ.

    Example:
        >>> from hp_dtensor import Replicate, Shard
        >>> from hp_tp import PrepareModuleInput
        >>> style = PrepareModuleInput(
        ...     input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ... )
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: Mapping[str, Placement | None] | None = None
    desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None
    use_local_output: bool = False
    leave_others: bool = False

    def __post_init__(self) -> None:
        _check_pair(
            _several(self.input_layouts),
            _several(self.desired_input_layouts),
            "input_layouts",
            "desired_input_layouts",
        )
        given, wanted = self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {}
        if set(given) != set(wanted):
            message = (
                "input_kwarg_layouts and desired_input_kwarg_layouts should have same length! They name "
                f"{sorted(given)} and {sorted(wanted)}; both should name the same inputs"
            )
            raise StyleError(message)

    def __hash__(self) -> int:
        return hash((_several(self.input_layouts), tuple(self.input_kwarg_layouts or ())))

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Let the inputs of *module* be moved before its forward."""
        names, any_name = _input_names(module)
        labels = _several(self.input_layouts) or ()
        wanted = _several(self.desired_input_layouts) or ()
        by_position = tuple(
            _Crossing(device_mesh, a, b, self.use_local_output)
            for a, b in zip(labels, wanted, strict=True)
        )
        by_name = dict(zip(names, by_position, strict=False))
        for name, label in (self.input_kwarg_layouts or {}).items():
            if name not in names and not any_name:
                near = get_close_matches(name, names, 3)
                message = (
                    f"input_kwarg_layouts names {name!r}, which is no input of {type(module).__name__}.forward; its inputs are "
                    f"{names}" + (f". Did you mean {near[0]!r}?" if near else "")
                )
                raise StyleError(message)
            target = (self.desired_input_kwarg_layouts or {})[name]
            by_name[name] = _Crossing(device_mesh, label, target, self.use_local_output)
        substitute(module, _Inputs(names, by_position, by_name, self.leave_others))
        return module


def _input_names(module: nn.Module) -> tuple[tuple[str, ...], bool]:
    """The names of the forward's inputs, and whether it takes others."""
    parameters = inspect.signature(module.forward).parameters.values()
    names = tuple(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


@dataclass(kw_only=True, unsafe_hash=True)
class PrepareModuleOutput(ParallelStyle):
    """Label and move the outputs of a module.

    Args:
        output_layouts: what plain outputs are: one layout, or one for each, None for what is left alone.
        desired_output_layouts: what callers get, entry by entry.
        use_local_output: whether callers get plain tensors (the default) or DTensors.
        reduce_dtype: the dtype in which values travel; they come out in their own.

    A single output comes back bare, several in the tuple, named tuple or list they came in.

    Raises:
        StyleError: when the two lists have different lengths.

    Example:
        >>> from hp_dtensor import Partial, Replicate
        >>> from hp_tp import PrepareModuleOutput
        >>> style = PrepareModuleOutput(
        ...     output_layouts=Partial(), desired_output_layouts=Replicate()
        ... )
    """

    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        labels, wanted = _several(self.output_layouts), _several(self.desired_output_layouts)
        if labels is None or wanted is None:
            message = (
                "output_layouts and desired_output_layouts are both needed; None is no layout"
            )
            raise StyleError(message)
        _check_pair(labels, wanted, "output_layouts", "desired_output_layouts")

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Let the outputs of *module* be moved after its forward."""
        pairs = zip(
            _several(self.output_layouts) or (),
            _several(self.desired_output_layouts) or (),
            strict=True,
        )
        crossings = tuple(
            _Crossing(device_mesh, a, b, self.use_local_output, self.reduce_dtype)
            for a, b in pairs
        )
        substitute(module, _Outputs(crossings))
        return module


@dataclass(kw_only=True)
class PrepareModuleInputOutput(ParallelStyle):
    """Label and move the inputs and the outputs of a module; see the two styles it is made of.

    Args:
        input_layouts: as in :class:`PrepareModuleInput`.
        desired_input_layouts: likewise.
        input_kwarg_layouts: likewise.
        desired_input_kwarg_layouts: likewise.
        use_local_input: whether the module gets plain tensors instead of DTensors.
        output_layouts: as in :class:`PrepareModuleOutput`.
        desired_output_layouts: likewise.
        use_local_output: whether callers get plain tensors (the default) or DTensors.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: Mapping[str, Placement | None] | None = None
    desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None
    use_local_input: bool = False
    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def __post_init__(self) -> None:
        self._halves()  # they check what they are made of

    def __hash__(self) -> int:
        return hash(self._halves())

    def _halves(self) -> tuple[PrepareModuleInput, PrepareModuleOutput]:
        before = PrepareModuleInput(
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
            use_local_output=self.use_local_input,
        )
        after = PrepareModuleOutput(
            output_layouts=self.output_layouts,
            desired_output_layouts=self.desired_output_layouts,
            use_local_output=self.use_local_output,
        )
        return before, after

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Let the inputs of *module* be moved before its forward, and its outputs after it."""
        before, after = self._halves()
        return after.apply(before.apply(module, device_mesh), device_mesh)


@dataclass(frozen=True, slots=True)
class _Whole:
    """A module run with replicas of its parameters, through dispatch: a wrapper of its forward."""

    enter: _Crossing
    leave: _Crossing

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        name = type(module).__name__
        if args:
            args = (self.enter(args[0], f"the input of {name}"), *args[1:])
        elif kwargs:
            first = next(iter(kwargs))
            kwargs = {**kwargs, first: self.enter(kwargs[first], f"input {first!r} of {name}")}

        def out(value: Tensor) -> Tensor:
            where = f"the output of {name}"
            if self.leave.local:
                placement = normal(cast("Placement", self.leave.wanted), value.ndim)
                check_even(placement, value.shape, self.leave.mesh, where)
            return cast("Tensor", self.leave(value, where))

        return map_tensors(out, forward(module, *args, **kwargs))


@dataclass(kw_only=True, unsafe_hash=True)
class NoParallel(ParallelStyle):
    """Keep a module whole on every rank, with its parameters and buffers as replicas on the mesh.

    It puts a router, a norm or a small head on the same mesh as the rest, so that clipping and optimizers meet one kind
    of parameter.

    Args:
        input_layout: what the first input is when plain; ``Replicate()`` when None.
        output_layout: what the output is; ``Replicate()`` when None.
        desired_input_layout: what the module computes with; ``Replicate()`` when None.
        use_local_output: whether the output is a plain tensor (the default) or a DTensor.

    Other inputs are left alone.
    """

    lays_out: ClassVar[bool] = True
    input_layout: Placement | None = None
    output_layout: Placement | None = None
    desired_input_layout: Placement | None = None
    use_local_output: bool = True

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replicate the parameters and buffers of *module*."""
        replicate(module, device_mesh, self.src_data_rank)
        out = self.output_layout or REPLICATE
        enter = _Crossing(
            device_mesh,
            self.input_layout or REPLICATE,
            self.desired_input_layout or REPLICATE,
            local=False,
        )
        substitute(module, _Whole(enter, _Crossing(device_mesh, out, out, self.use_local_output)))
        return module
