"""Autograd functions of one's own on distributed tensors, and what they do to layouts, by name.

A `DFunction` is a ``torch.autograd.Function`` whose forward and backward see local tensors only. What its result is a
piece of is said by the `DistributedOp` of the same name: layouts in, layouts out. So a kernel is written once, for one
device, and what it means for layouts stands beside it.

Gradients come back by the package's contract. A local backward gives what one rank's piece of the result contributes; so
where an input is replicated over an axis that the result is cut over (or holds addends on), its gradient is a sum over
that axis, and it is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import torch

from hp_dtensor._torch import TorchDTensor, tree_flatten, tree_unflatten
from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import LayoutError
from hp_dtensor.layout import Layout
from hp_dtensor.local import as_ours
from hp_dtensor.placements import Partial, Placement, gradient_placements

__all__ = ["DFunction", "DistributedOp", "input_gradients"]

Inferred: TypeAlias = tuple[tuple[Layout, ...], object]
"""A layout for each result, and whatever else the operator wants to hand to its own later steps."""

_ops: dict[str, DistributedOp] = {}


class DistributedOp:
    """What an operator does to layouts, registered under a name by being made; the last one of a name counts.

    Override `infer_layout`, and the others as needed.

    Args:
        op_name: the name, a `DFunction`'s ``_op_name``.

    Example:
        >>> class Halve(DistributedOp):
        ...     def infer_layout(self, cache_values):
        ...         return (cache_values[0],), None  # laid out like its argument
        >>> DistributedOp.find(Halve("halve").op_name).op_name
        'halve'
    """

    allow_partial_inputs: bool = False
    """Whether inputs that are addends may come as they are; otherwise they are an error."""

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name
        _ops[op_name] = self

    @staticmethod
    def find(op_name: str) -> DistributedOp | None:
        """The operator that is registered as *op_name*, or None."""
        return _ops.get(op_name)

    def preprocess(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object], list[object]]:
        """Local arguments, local keyword arguments, and what `infer_layout` is asked about.

        By default the last is a list with the `Layout` of each distributed argument, and the other arguments as they are.
        """
        values = [*args, *kwargs.values()]
        cache_values = [
            as_ours(value).layout if isinstance(value, TorchDTensor) else value for value in values
        ]
        local_args, local_kwargs = _mapped(_local, args, kwargs)
        return local_args, local_kwargs, cache_values

    def infer_layout(self, cache_values: Sequence[object]) -> Inferred:
        """The layout of each result, from the layouts and values of the arguments.

        Raises:
            NotImplementedError: unless overridden.
        """
        msg = f"the DistributedOp {self.op_name!r} says no layout: override infer_layout(cache_values)"
        raise NotImplementedError(msg)

    def get_expand_impl(
        self, func: Callable[..., object], infer_result: Inferred, cache_values: Sequence[object]
    ) -> Callable[..., object] | None:
        """What to run on local arguments in place of *func*; None for *func* itself."""
        del func, infer_result, cache_values
        return None

    def wrap_output(self, output: object, layouts: Sequence[Layout]) -> object:
        """The distributed results, from local ones.

        Raises:
            LayoutError: when there is not one layout for each result.
        """
        several = isinstance(output, (tuple, list))
        values = list(cast("Sequence[object]", output)) if several else [output]
        if len(values) != len(layouts):
            msg = f"{self.op_name}: {len(values)} results for {len(layouts)} layouts from infer_layout; give one for each"
            raise LayoutError(msg)
        wrapped = [
            _wrapped(value, layout) if isinstance(value, torch.Tensor) else value
            for value, layout in zip(values, layouts, strict=True)
        ]
        return tuple(wrapped) if several else wrapped[0]


def _mapped(
    function: Callable[[object], object], args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments with *function* applied to each, inside lists and dictionaries too."""
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
    return cast(
        "tuple[tuple[object, ...], dict[str, object]]",
        tree_unflatten([function(leaf) for leaf in leaves], tree),
    )


def _local(value: object) -> object:
    return value.to_local() if isinstance(value, TorchDTensor) else value


def _wrapped(local: torch.Tensor, layout: Layout) -> DTensor:
    meta = layout.tensor_meta
    shape = None if meta is None else tuple(meta.shape)
    return DTensor.from_local(local, layout.device_mesh, layout, shape=shape)


def input_gradients(
    placements: Sequence[Placement], outputs: Sequence[Sequence[Placement] | None]
) -> tuple[Placement, ...]:
    """How the gradients fit together that ranks compute locally for an input laid out as *placements*.

    Example:
        >>> from hp_dtensor import Replicate, Shard
        >>> input_gradients((Replicate(),), [(Shard(1),)])
        (Partial(sum),)
        >>> input_gradients((Shard(0),), [(Shard(0),)])
        (Shard(dim=0),)
    """
    out = []
    for axis, placement in enumerate(gradient_placements(placements)):
        apart = any(laid is not None and not laid[axis].is_replicate() for laid in outputs)
        was_replica = placements[axis].is_replicate()
        out.append(Partial() if apart and was_replica else placement)
    return tuple(out)


class DFunction(torch.autograd.Function):
    """A ``torch.autograd.Function`` that takes distributed tensors, too; forward and backward see local ones.

    Set ``_op_name`` to the name of a `DistributedOp`, write ``forward(ctx, ...)`` and ``backward(ctx, ...)`` as for one
    device, and call ``apply``. Without a distributed argument it is an ordinary autograd function.

    Raises:
        LayoutError: (a `ValueError`) for distributed arguments without ``_op_name`` or without such an operator, and for
            an argument that is an addend where the operator does not allow it.

    Example:
        >>> class Double(DFunction):
        ...     _op_name = "double"
        ...
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad
        >>> Double.apply(torch.ones(2))
        tensor([2., 2.])
    """

    _op_name: str | None = None

    @staticmethod
    def forward(*args: object, **kwargs: object) -> object:
        """To be overridden."""
        msg = "a DFunction needs a forward(ctx, ...) of its own"
        raise NotImplementedError(msg)

    @staticmethod
    def backward(ctx: object, *grads: object) -> object:
        """To be overridden."""
        msg = "a DFunction needs a backward(ctx, ...) of its own to be differentiated"
        raise NotImplementedError(msg)

    @classmethod
    def apply(cls, *args: object, **kwargs: object) -> object:
        """Run it on local tensors, and wrap what comes back."""
        leaves, _ = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, TorchDTensor) for leaf in leaves):
            return super().apply(*cls._positional(args, kwargs))
        op = None if cls._op_name is None else DistributedOp.find(cls._op_name)
        if op is None:
            msg = (
                f"{cls.__name__} got a DTensor, but its _op_name {cls._op_name!r} names no DistributedOp: set it, and make "
                "the operator once, as in MyOp(name)"
            )
            raise LayoutError(msg)
        _refuse_addends(op, leaves)
        local_args, local_kwargs, cache_values = op.preprocess(args, kwargs)
        inferred = op.infer_layout(cache_values)
        layouts = inferred[0]
        if type(op).preprocess is DistributedOp.preprocess:
            outputs: list[Sequence[Placement] | None] = [one.placements for one in layouts]
            local_args, local_kwargs = _mapped(
                lambda value: _entered(value, outputs), args, kwargs
            )

        def run(*values: object, **named: object) -> object:
            return super(DFunction, cls).apply(*cls._positional(values, named))

        run.__name__ = op.op_name
        function = op.get_expand_impl(run, inferred, cache_values) or run
        return op.wrap_output(function(*local_args, **local_kwargs), layouts)

    @classmethod
    def _positional(cls, args: Sequence[object], kwargs: Mapping[str, object]) -> Sequence[object]:
        """Autograd takes positions only; names are looked up in ``forward``."""
        if not kwargs:
            return args
        bound = inspect.signature(cls.forward).bind(None, *args, **kwargs)
        bound.apply_defaults()
        return bound.args[1:]


def _refuse_addends(op: DistributedOp, leaves: Sequence[object]) -> None:
    for leaf in leaves:
        if isinstance(leaf, TorchDTensor) and not op.allow_partial_inputs:
            held = as_ours(leaf)
            if held.is_partial():
                msg = (
                    f"{op.op_name} got a DTensor laid out as {held.placements}: its pieces are addends, and the operator "
                    "does not say that it is linear. Call x.reduce_partial() first, or set allow_partial_inputs"
                )
                raise LayoutError(msg)


def _entered(value: object, outputs: Sequence[Sequence[Placement] | None]) -> object:
    if not isinstance(value, TorchDTensor):
        return value
    ours = as_ours(value)
    return ours.to_local(grad_placements=input_gradients(ours.placements, outputs))
