"""A function on local tensors as one on distributed tensors, layouts stated for each argument and result.

It is :func:`~hp_dtensor.local_map` with HyperParallel's signature and one promise more: the gradients of replicated
arguments are added up over the axes that the results are cut over, which ``local_map`` leaves to ``in_grad_placements``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hp_dtensor._torch import TorchDTensor
from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import LayoutError
from hp_dtensor.layout import Layout, PlacementsLike, are_aliases, resolve
from hp_dtensor.local import as_ours, whole_shape
from hp_dtensor.named_ops import input_gradients
from hp_dtensor.placements import Placement

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh

__all__ = ["custom_shard", "is_one_layout"]


def is_one_layout(value: object) -> bool:
    """Whether *value* is one layout (placements, aliases in a tuple, a `Layout`) and not a list of layouts.

    Example:
        >>> from hp_dtensor import Replicate
        >>> is_one_layout(("dp", "None")), is_one_layout([Replicate()])
        (True, True)
        >>> is_one_layout([("dp", "None"), None])
        False
    """
    if isinstance(value, (Placement, Layout)):
        return True
    if not isinstance(value, (tuple, list)) or not value:
        return False
    if all(isinstance(entry, Placement) for entry in value):
        return True
    names = all(isinstance(entry, str) for entry in value)
    return are_aliases(value) and (isinstance(value, tuple) or names)


def custom_shard(
    func: Callable[..., object] | None = None,
    device_mesh: DeviceMesh | None = None,
    out_placements: object = None,
    in_placements: Sequence[PlacementsLike | None] | None = None,
    redistribute_inputs: bool = True,
) -> Callable[..., object]:
    """Make *func*, written for local tensors, take and give distributed ones.

    Args:
        func: the function; left out when used as a decorator with arguments.
        device_mesh: the devices.
        out_placements: the layout of the result, or a tuple or list with one for each; None for a result that is no tensor.
        in_placements: one entry for each positional argument: the layout that a distributed one is moved to, None for
            one that is not distributed. Keyword arguments pass as they are.
        redistribute_inputs: whether arguments that are laid out differently are moved; False makes them an error.

    Returns:
        The wrapped function. Without a distributed argument it returns what *func* returns.

    Raises:
        RuntimeError: when there are distributed arguments and no *in_placements*.
        TypeError: when an entry and its argument, or a result and its layout, are not of one kind.
        LayoutError: (a `ValueError`) when counts differ, or a layout does where *redistribute_inputs* is False.

    Example:
        >>> import torch
        >>> from hp_dtensor import Shard
        >>> @custom_shard(out_placements=[Shard(0)], in_placements=(None,))
        ... def double(x):
        ...     return 2 * x
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """
    if func is None:
        return functools.partial(
            custom_shard,
            device_mesh=device_mesh,
            out_placements=out_placements,
            in_placements=in_placements,
            redistribute_inputs=redistribute_inputs,
        )

    @functools.wraps(func)
    def wrapped(*args: object, **kwargs: object) -> object:
        tensors = [as_ours(arg) for arg in args if isinstance(arg, TorchDTensor)]
        if in_placements is not None and len(in_placements) != len(args):
            msg = f"in_placements has {len(in_placements)} entries for {len(args)} positional arguments; give one for each"
            raise LayoutError(msg)
        if not tensors:
            return func(*args, **kwargs)
        mesh = tensors[0].device_mesh if device_mesh is None else device_mesh
        outputs = _outputs(out_placements)
        inputs = [
            _enter(arg, position, in_placements, mesh, redistribute_inputs)
            for position, arg in enumerate(args)
        ]
        laid = [None if one is None else _placements_of(one, mesh) for one in outputs]
        local = [
            one.to_local(grad_placements=input_gradients(one.placements, laid))
            if isinstance(one, DTensor)
            else one
            for one in inputs
        ]
        entered = [one for one in inputs if isinstance(one, DTensor)]
        return _leave(func(*local, **kwargs), outputs, mesh, entered)

    return wrapped


def _outputs(out_placements: object) -> list[PlacementsLike | None]:
    if out_placements is None or is_one_layout(out_placements):
        return [out_placements]  # type: ignore[list-item]  # checked by is_one_layout
    return list(out_placements)  # type: ignore[call-overload, no-any-return]  # a list of layouts


def _placements_of(layout: PlacementsLike, mesh: DeviceMesh) -> Sequence[Placement]:
    """What *layout* says about axes, before the number of dims is known."""
    if isinstance(layout, Placement):
        return (layout,)
    if isinstance(layout, Layout) or are_aliases(layout):
        count = layout.ndim if isinstance(layout, Layout) else len(layout)
        return resolve(layout, mesh, count or 0)
    return layout  # type: ignore[return-value]  # placements are what is left


def _enter(
    arg: object,
    position: int,
    in_placements: Sequence[PlacementsLike | None] | None,
    mesh: DeviceMesh,
    redistribute_inputs: bool,
) -> object:
    """The argument laid out as it shall be."""
    wanted = None if in_placements is None else in_placements[position]
    if not isinstance(arg, TorchDTensor):
        if wanted is not None:
            msg = f"in_placements[{position}] is {wanted}, but argument {position} is a {type(arg).__name__}, no DTensor; set it to None"
            raise TypeError(msg)
        return arg
    tensor = as_ours(arg)
    if in_placements is None:
        msg = f"argument {position} is a DTensor laid out as {tensor.placements}, but in_placements is None; give a layout for each argument"
        raise RuntimeError(msg)
    if wanted is None:
        msg = f"argument {position} is a DTensor laid out as {tensor.placements}, but in_placements[{position}] is None; give its layout"
        raise TypeError(msg)
    placements = resolve(wanted, mesh, tensor.ndim)
    if tensor.device_mesh == mesh and tensor.placements == placements:
        return tensor
    if not redistribute_inputs:
        msg = (
            f"argument {position} is laid out as {tensor.placements} on {tensor.device_mesh}, but in_placements asks for "
            f"{placements} on {mesh}; redistribute it first, or set redistribute_inputs=True"
        )
        raise LayoutError(msg)
    return tensor.redistribute(mesh, placements)


def _leave(
    result: object,
    outputs: Sequence[PlacementsLike | None],
    mesh: DeviceMesh,
    entered: Sequence[DTensor],
) -> object:
    several = isinstance(result, (tuple, list))
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(values) != len(outputs):
        msg = f"the function returned {len(values)} values, but out_placements has {len(outputs)} entries; give one for each"
        raise LayoutError(msg)
    out: list[object] = []
    for position, (value, layout) in enumerate(zip(values, outputs, strict=True)):
        if isinstance(value, torch.Tensor) is (layout is None):
            msg = (
                f"result {position} is a {type(value).__name__}, but its out_placements is {layout}: a tensor needs a "
                "layout, and anything else None"
            )
            raise TypeError(msg)
        if isinstance(value, torch.Tensor) and layout is not None:
            placements = resolve(layout, mesh, value.ndim)
            shape = whole_shape(value, mesh, placements, entered)
            out.append(DTensor.from_local(value, mesh, placements, shape=shape))
        else:
            out.append(value)
    if not several:
        return out[0]
    return out if isinstance(result, list) else tuple(out)
