"""Value and gradients of a function in one call, as HyperParallel's ``parallelize_value_and_grad`` gives them.

Gradients are those of the single-device program, laid out like the weights; no factor for the number of replicas is
needed or taken, since autograd here counts a replicated value once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from hp_dtensor._torch import TorchDTensor
from hp_dtensor.local import as_ours
from hp_dtensor.placements import gradient_placements

__all__ = ["parallelize_value_and_grad"]


def parallelize_value_and_grad(
    fn: Callable[..., object],
    weights: Tensor | Sequence[Tensor],
    sens: Sequence[float] | None = None,
) -> Callable[..., tuple[object, tuple[Tensor, ...]]]:
    """A function that gives what *fn* gives, and the gradients of *weights*; *fn* runs once.

    Args:
        fn: gives one tensor, or a tuple or list of tensors.
        weights: what to differentiate with respect to; plain or distributed.
        sens: for several results, the weight of each in the sum that is differentiated. None takes the first result
            alone. For one result it has to be None.

    Returns:
        ``g(*args, **kwargs) -> (value, gradients)``; a weight that *fn* does not use has a gradient of zeros.

    Raises:
        TypeError: (from the returned function) when *sens* does not fit the results.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> step = parallelize_value_and_grad(lambda x: (w * x).sum(), [w])
        >>> step(torch.tensor([3.0, 4.0]))
        (tensor(11., grad_fn=<SumBackward0>), (tensor([3., 4.]),))
    """
    wanted = (weights,) if isinstance(weights, Tensor) else tuple(weights)

    def value_and_grad(*args: object, **kwargs: object) -> tuple[object, tuple[Tensor, ...]]:
        value = fn(*args, **kwargs)
        several = isinstance(value, (tuple, list))
        results = [_whole(one) for one in cast("Sequence[object]", value if several else [value])]
        scales = _scales(len(results), sens, several=several)
        pairs = [
            (one, torch.full_like(one, scale))
            for one, scale in zip(results, scales, strict=True)
            if scale != 0 and one.requires_grad
        ]
        if pairs:
            found = torch.autograd.grad(
                [one for one, _ in pairs],
                wanted,
                [seed for _, seed in pairs],
                allow_unused=True,
                materialize_grads=True,
            )
        else:
            found = tuple(torch.zeros_like(weight) for weight in wanted)
        grads = tuple(_laid(grad, weight) for grad, weight in zip(found, wanted, strict=True))
        if not several:
            return results[0], grads
        return (list(results) if isinstance(value, list) else tuple(results)), grads

    return value_and_grad


def _whole(value: object) -> Tensor:
    """A result whose addends are combined, so that a seed of ones counts it once."""
    if isinstance(value, TorchDTensor):
        return as_ours(value).reduce_partial()
    if isinstance(value, Tensor):
        return value
    msg = f"the function gave a {type(value).__name__}; only tensors can be differentiated"
    raise TypeError(msg)


def _scales(count: int, sens: Sequence[float] | None, *, several: bool) -> list[float]:
    if not several:
        if sens is not None:
            msg = f"sens={sens!r} was given for a function with one result; it has to be None"
            raise TypeError(msg)
        return [1.0]
    if sens is None:
        return [1.0] + [0.0] * (count - 1)
    if not isinstance(sens, (tuple, list)) or len(sens) != count:
        msg = f"sens={sens!r} does not fit {count} results; give a list or tuple with one number for each"
        raise TypeError(msg)
    return [float(one) for one in sens]


def _laid(grad: Tensor, weight: Tensor) -> Tensor:
    """*grad* laid out like *weight*."""
    if isinstance(grad, TorchDTensor) and isinstance(weight, TorchDTensor):
        like = as_ours(weight)
        return as_ours(grad).redistribute(like.device_mesh, gradient_placements(like.placements))
    return grad
