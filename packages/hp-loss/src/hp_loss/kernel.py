"""The local half of a loss: what a shard of logits contributes, and its gradient. A vendor may replace it.

A kernel sees one shard of logits as `(tokens, columns)` and each token's target as four plain
tensors; it never sees a group, a mesh or an option. `TorchKernel` is the reference, in torch
operators, for any device. A fused one registers under the entry-point group ``hp_loss.kernels``
with the device type as its name, and needs no import of this package: the Protocol is structural.

The reference works on a few tokens at a time. On a CPU that keeps the shard's rows in cache while
they are shifted, exponentiated and summed; everywhere it bounds what is held beside the logits.
Under a compiler it works on the whole, which the compiler cuts better than we do.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Protocol, cast

import torch
from torch import Tensor

from hp_loss.statistics import DOT, EXP_SUM, MASS, MAXIMUM, WIDTH, empty_statistics, floor_of

__all__ = ["CrossEntropyKernel", "TorchKernel", "accumulation_dtype", "find_kernel"]

ENTRY_POINTS = "hp_loss.kernels"

CHUNK_ELEMENTS = {"cpu": 2**18}
"""How many logits are worked on at a time, by device type: a megabyte on a CPU, which its cache holds."""
CHUNK_ELEMENTS_ELSEWHERE = 2**26
"""On an accelerator a launch must have something to do."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic for logits of *dtype*: 32 bits, and 64 for 64.

    Example:
        >>> import torch
        >>> from hp_loss.kernel import accumulation_dtype
        >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


class CrossEntropyKernel(Protocol):
    """The arithmetic of one shard of logits.

    A token's target on this shard has the weight `mass[token]` at column `column[token]` (nowhere,
    where that is -1) and `background` everywhere: no dimension for one number, `(columns,)` for
    one per class, `(tokens, columns)` for one per logit.
    """

    def statistics(
        self, logits: Tensor, column: Tensor, mass: Tensor, background: Tensor | None
    ) -> Tensor:
        """The shard's four numbers per token.

        Args:
            logits: shape `(tokens, columns)`, any floating dtype.
            column: shape `(tokens,)`, int64; the target's column here, or -1.
            mass: shape `(tokens,)`, accumulation dtype; the target's weight.
            background: the weight of every class, or None.

        Returns:
            Shape `(tokens, 4)`, accumulation dtype: see `hp_loss.statistics`.
        """
        ...

    def gradient(
        self,
        logits: Tensor,
        column: Tensor,
        mass: Tensor,
        background: Tensor | None,
        maximum: Tensor,
        softmax_scale: Tensor,
        target_scale: Tensor,
        *,
        inplace: bool,
    ) -> Tensor:
        """Give `exp(logits - maximum) * softmax_scale - target_scale * target` in the logits' dtype.

        Args:
            logits: as for `statistics`.
            column: as for `statistics`.
            mass: as for `statistics`.
            background: as for `statistics`.
            maximum: shape `(tokens,)`; over all shards.
            softmax_scale: shape `(tokens,)`.
            target_scale: shape `(tokens,)`.
            inplace: write the gradient over the logits.
        """
        ...


class TorchKernel:
    """The reference kernel, in torch operators, for any device.

    Args:
        chunk_elements: how many logits to work on at a time; by device type if None.

    Example:
        >>> import torch
        >>> from hp_loss.kernel import TorchKernel
        >>> kernel = TorchKernel()
        >>> kernel.statistics(
        ...     torch.tensor([[1.0, 3.0]]), torch.tensor([0]), torch.tensor([1.0]), None
        ... )
        tensor([[ 3.0000,  1.1353, -2.0000,  1.0000]])
    """

    __slots__ = ("_chunk_elements",)

    def __init__(self, chunk_elements: int | None = None) -> None:
        self._chunk_elements = chunk_elements

    def statistics(
        self, logits: Tensor, column: Tensor, mass: Tensor, background: Tensor | None
    ) -> Tensor:
        """See `CrossEntropyKernel.statistics`."""
        dtype = accumulation_dtype(logits.dtype)
        if logits.shape[1] == 0:
            return empty_statistics(logits.shape[0], dtype, logits.device)
        parts = [
            _statistics(logits[rows].to(dtype), column[rows], mass[rows], _rows(background, rows))
            for rows in self._chunks(logits)
        ]
        return torch.cat(parts) if parts else empty_statistics(0, dtype, logits.device)

    def gradient(
        self,
        logits: Tensor,
        column: Tensor,
        mass: Tensor,
        background: Tensor | None,
        maximum: Tensor,
        softmax_scale: Tensor,
        target_scale: Tensor,
        *,
        inplace: bool,
    ) -> Tensor:
        """See `CrossEntropyKernel.gradient`."""
        out = logits if inplace else torch.empty_like(logits)
        if logits.shape[1] == 0:
            return out
        dtype = accumulation_dtype(logits.dtype)
        for rows in self._chunks(logits):
            gradient = (logits[rows].to(dtype) - maximum[rows].unsqueeze(1)).exp_()
            gradient.mul_(softmax_scale[rows].unsqueeze(1))
            _subtract_target(
                gradient,
                column[rows],
                mass[rows] * target_scale[rows],
                _rows(background, rows),
                target_scale[rows],
            )
            out[rows] = gradient
        return out

    def _chunks(self, logits: Tensor) -> Iterator[slice]:
        tokens, columns = logits.shape
        if torch.compiler.is_compiling():
            step = max(tokens, 1)
        else:
            elements = self._chunk_elements or CHUNK_ELEMENTS.get(
                logits.device.type, CHUNK_ELEMENTS_ELSEWHERE
            )
            step = max(elements // columns, 1)
        return (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))


def _rows(background: Tensor | None, rows: slice) -> Tensor | None:
    return background[rows] if background is not None and background.dim() == 2 else background


def _statistics(logits: Tensor, column: Tensor, mass: Tensor, background: Tensor | None) -> Tensor:
    maximum = logits.amax(1).clamp_(min=floor_of(logits.dtype))
    shifted = logits - maximum.unsqueeze(1)
    held = column >= 0
    picked = shifted.gather(1, column.clamp(min=0).unsqueeze(1)).squeeze(1)
    # A product with a zero mass stays: zero times infinity is NaN on one device too.
    dot = torch.where(held, picked * mass, 0.0)
    weight = torch.where(held, mass, 0.0)
    if background is not None:
        if background.dim() == 0:
            dot = dot + shifted.sum(1) * background
            weight = weight + background * logits.shape[1]
        else:
            dot = dot + (shifted * background).sum(1)
            weight = weight + background.sum(-1)
    columns: list[Tensor] = [maximum] * WIDTH
    columns[MAXIMUM], columns[EXP_SUM], columns[DOT], columns[MASS] = (
        maximum,
        shifted.exp_().sum(1),
        dot,
        weight,
    )
    return torch.stack(columns, dim=1)


def _subtract_target(
    gradient: Tensor, column: Tensor, mass: Tensor, background: Tensor | None, scale: Tensor
) -> None:
    weight = torch.where(column >= 0, mass, 0.0)
    gradient.scatter_add_(1, column.clamp(min=0).unsqueeze(1), weight.neg().unsqueeze(1))
    if background is not None:
        gradient.sub_(scale.unsqueeze(1) * background)


_REFERENCE = TorchKernel()

_found: dict[str, CrossEntropyKernel] = {}


def find_kernel(device_type: str) -> CrossEntropyKernel:
    """The kernel for *device_type*: a registered one if there is any, else `TorchKernel`.

    A package registers a class or a function without arguments that gives a `CrossEntropyKernel`,
    in the entry-point group ``hp_loss.kernels``, under the device type as its name. It is looked
    up once.

    Example:
        >>> from hp_loss import find_kernel
        >>> type(find_kernel("cpu")).__name__
        'TorchKernel'
    """
    kernel = _found.get(device_type)
    return _look_up(device_type) if kernel is None else kernel


def _look_up(device_type: str) -> CrossEntropyKernel:
    for entry in entry_points(group=ENTRY_POINTS, name=device_type):
        return _found.setdefault(device_type, cast("CrossEntropyKernel", entry.load()()))
    return _found.setdefault(device_type, _REFERENCE)


# For these the answer is needed inside a graph as well, where entry points can't be asked.
for _device_type in ("cpu", "cuda"):
    _look_up(_device_type)
