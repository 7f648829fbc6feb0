"""Context parallelism for modules that were written for one device.

Two wrappers. Around an attention: ``scaled_dot_product_attention`` is replaced, while the module's forward runs, by attention
over the whole sequence (:mod:`hp_tp.context_attention`). Around the model: what depends on where a token is in the sequence
(a rotary table in a buffer, an input of positions) is cut like the tokens, so that the model, which sees a short sequence,
turns each token by its true angle.

``nn.MultiheadAttention`` hands its whole computation to one function, inside of which no mode is asked: it gets a forward of its
own, and ``nn.TransformerEncoderLayer`` is kept from the kernel that it would run in place of its attention.

The replacement is a function mode and not a patch of torch: it holds for one thread while one forward runs, and an attention
that never calls the function is an error instead of attention within a piece, which would train and be wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.overrides import TorchFunctionMode

from hp_tp._torch import buffers_of
from hp_tp.attention import no_fast_path, project_heads
from hp_tp.context_attention import AttentionMethod, context_parallel_attention
from hp_tp.context_shards import SequenceCut, sequence_positions
from hp_tp.errors import ContextParallelError
from hp_tp.local_states import owner_of
from hp_tp.style import ParallelStyle
from hp_tp.substitution import original_class, substitute, wrapper_of

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor

    from hp_tp.substitution import Forward

__all__ = ["ContextParallel", "ContextParallelInput"]


class _Attention(TorchFunctionMode):
    """Replaces torch's attention by that over all ranks' tokens, and counts how often."""

    def __init__(self, layout: _AttentionLayout) -> None:
        super().__init__()
        self.layout = layout
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Replace one function, and let all others be."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.layout.attend(*args, **(kwargs or {}))  # type: ignore[arg-type]  # the function's own arguments


@dataclass(frozen=True, slots=True)
class _AttentionLayout:
    """How an attention runs on a piece of the sequence: a wrapper of its forward."""

    mesh: DeviceMesh
    method: AttentionMethod
    balanced: bool
    causal: bool | None

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        if self.causal is not None:
            # A module may do other things for a mask than for none, such as repeating keys, and models make one for some ranks only.
            kwargs = {name: None if name in _MASKS else value for name, value in kwargs.items()}
        mode = _Attention(self)
        with mode:
            output = forward(module, *args, **kwargs)
        if not torch.compiler.is_compiling() and mode.calls == 0:  # a graph keeps no count
            message = (
                f"{type(module).__name__} never called torch's scaled_dot_product_attention, so that its tokens attended within "
                "this rank's piece only; let it use that function (transformers: attn_implementation='sdpa'), or call "
                "hp_tp.context_parallel_attention in it"
            )
            raise ContextParallelError(message)
        return output

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend over all ranks' tokens; takes what torch's function takes."""
        if dropout_p > 0:
            message = (
                f"dropout_p={dropout_p} on attention weights is not defined over pieces of a sequence; set it to 0, or drop the "
                "output instead"
            )
            raise ContextParallelError(message)
        if any(isinstance(tensor, TorchDTensor) for tensor in (query, key, value)):
            message = (
                "context parallelism takes plain queries, keys and values (this rank's heads); let the projections hand out "
                "plain tensors (use_local_output=True)"
            )
            raise ContextParallelError(message)
        if self.causal is not None:
            attn_mask, is_causal = None, self.causal
        return context_parallel_attention(
            query,
            key,
            value,
            self.mesh,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            method=self.method,
            balanced=self.balanced,
        )


@dataclass(frozen=True, slots=True)
class _MultiheadLayout:
    """How an ``nn.MultiheadAttention`` runs on a piece of the sequence: a wrapper of its forward."""

    attention: _AttentionLayout

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> tuple[Tensor, None]:
        del forward
        return self._run(module, *args, **kwargs)  # type: ignore[arg-type]  # forward's own arguments

    def _run(
        self,
        module: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        del average_attn_weights
        causal = is_causal if self.attention.causal is None else self.attention.causal
        masked = attn_mask is not None and not is_causal and self.attention.causal is None
        refused = {
            "need_weights=True (pass False: no rank has all weights)": need_weights,
            "key_padding_mask (pad at the end of causal sequences)": key_padding_mask is not None,
            "attn_mask without is_causal=True (a mask for a piece does not speak of other ranks)": masked,
            "bias_k, bias_v or add_zero_attn": module.bias_k is not None or module.add_zero_attn,
            "an input that is not [batch, length, features]": query.dim() != 3,
        }
        found = [what for what, present in refused.items() if present]
        if found:
            message = (
                f"nn.MultiheadAttention under context parallelism cannot have {'; '.join(found)}"
            )
            raise ContextParallelError(message)
        if not module.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = project_heads(module, query, key, value, module.num_heads)
        dropped = module.dropout if module.training else 0.0
        mixed = self.attention.attend(q, k, v, None, dropped, causal)
        output: Tensor = module.out_proj(mixed.transpose(1, 2).flatten(2))
        return output if module.batch_first else output.transpose(0, 1), None


@dataclass(kw_only=True, unsafe_hash=True)
class ContextParallel(ParallelStyle):
    """Let an attention that calls torch's function attend over a sequence that is cut over the ranks.

    Args:
        method: ``"ring"``, ``"gather"`` or ``"ulysses"``; see :func:`hp_tp.context_parallel_attention`.
        balanced: whether the sequence is cut head and tail.
        causal: what the attention is, whatever mask was made for the piece that it sees, which then does not reach it; None lets
            the module say.

    Parameters stay as they are; so it goes together with styles for the projections. An ``nn.MultiheadAttention`` attends so too,
    with all of its heads, causally where its caller passes ``is_causal=True``.

    Example:
        >>> from hp_tp import ContextParallel
        >>> plan = {"layers.*.attention": ContextParallel(method="gather")}
    """

    method: AttentionMethod = "ring"
    balanced: bool = True
    causal: bool | None = None

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replace torch's attention while the forward of *module* runs."""
        layout = _AttentionLayout(device_mesh, self.method, self.balanced, self.causal)
        if original_class(module) is nn.MultiheadAttention and wrapper_of(module) is None:
            substitute(module, _MultiheadLayout(layout))
            module.register_forward_pre_hook(no_fast_path)
        else:
            substitute(module, layout)
        return module


@dataclass(frozen=True, slots=True)
class _InputLayout:
    """A model that sees this rank's tokens at their positions: a wrapper of its forward."""

    mesh: DeviceMesh
    balanced: bool
    dim: int
    tables: tuple[tuple[str, int], ...]
    positions: str | None
    forbidden: tuple[str, ...]
    names: tuple[str, ...]

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for name in self.forbidden:
            if given.get(name) is not None:
                message = (
                    f"{type(module).__name__} got {name!r} under context parallelism: a mask for this rank's tokens does not say "
                    "what they may see of other ranks' tokens. Pad at the end and ignore the labels of the padding, which a "
                    "causal model never looks at"
                )
                raise ContextParallelError(message)
        tokens = next(value for value in given.values() if isinstance(value, torch.Tensor))
        length = tokens.shape[self.dim] * self.mesh.size()
        SequenceCut(self.mesh.size(), self.balanced).check(length)
        own = sequence_positions(length, self.mesh, balanced=self.balanced, device=tokens.device)
        if self.positions is not None and given.get(self.positions) is None:
            wide = own.expand(*tokens.shape[: self.dim], -1)
            kwargs = {**kwargs, self.positions: wide}
        with _rows_of(module, self.tables, own):
            return forward(module, *args, **kwargs)


@contextmanager
def _rows_of(
    module: nn.Module, tables: tuple[tuple[str, int], ...], positions: Tensor
) -> Iterator[None]:
    """Let *module* see the rows of *positions* of its tables."""
    before: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for path, dim in tables:
        owner, name = owner_of(module, path)
        table = cast("Tensor", buffers_of(owner)[name])
        before.append((buffers_of(owner), name, table))
        buffers_of(owner)[name] = table.index_select(dim, positions)
    try:
        yield
    finally:
        for held, name, table in before:
            held[name] = table


_POSITIONS = ("position_ids", "positions", "input_pos")
"""What models call the input of positions."""

_MASKS = ("attention_mask", "attention_masks", "mask")
"""What they call that of masks."""

_TABLES: Mapping[str, int] = {"freqs_cis": 0, "rope_cache": 0, "rotary_table": 0}
"""What they call a table with a row for each position, and its dim of positions."""


@dataclass(kw_only=True)
class ContextParallelInput(ParallelStyle):
    """Let a model that gets this rank's tokens know where they are in the sequence.

    Args:
        tables: paths of buffers with a row for each position, each with the dim of positions. Those that are called
            ``freqs_cis``, ``rope_cache`` or ``rotary_table`` are found without.
        balanced: whether the sequence is cut head and tail.
        dim: the dim of the sequence in the tokens.

    A model whose forward has an input of positions gets those, unless the caller passes them.

    Example:
        >>> from hp_tp import ContextParallelInput
        >>> style = ContextParallelInput(tables={"rope.table": 1})
    """

    tables: Mapping[str, int] = field(default_factory=dict)
    balanced: bool = True
    dim: int = 1

    def __hash__(self) -> int:
        return hash((tuple(self.tables.items()), self.balanced, self.dim))

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse a model that would take each piece for a whole sequence.

        Raises:
            ContextParallelError: when there is neither a table nor an input of positions, or a table is missing.
        """
        del device_mesh
        self.problems(module, raises=True)

    def problems(self, module: nn.Module, *, raises: bool = False) -> list[str]:
        """What is wrong with *module*, as sentences; nothing when it will do."""
        buffers = dict(module.named_buffers())
        found = [
            f"{path!r} is no buffer of {type(module).__name__}; it has {list(buffers)}"
            for path in self.tables
            if path not in buffers
        ]
        if not found and not self._tables(module) and _position_input(module) is None:
            found.append(
                f"{type(module).__name__} has no input of positions ({', '.join(_POSITIONS)}) and no known rotary table, so that "
                "each rank would count its tokens from 0; name the buffers with a row for each position: tables={PATH: DIM}"
            )
        if found and raises:
            raise ContextParallelError("; ".join(found))
        return found

    def _tables(self, module: nn.Module) -> tuple[tuple[str, int], ...]:
        known = {
            path: _TABLES[path.rpartition(".")[2]]
            for path, _ in module.named_buffers()
            if path.rpartition(".")[2] in _TABLES
        }
        return tuple({**known, **self.tables}.items())

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut what depends on positions whenever *module* runs."""
        self.check(module, device_mesh)
        names = tuple(inspect.signature(module.forward).parameters)
        layout = _InputLayout(
            device_mesh,
            self.balanced,
            self.dim,
            self._tables(module),
            _position_input(module),
            tuple(name for name in names if name in _MASKS),
            names,
        )
        substitute(module, layout)
        return module


def _position_input(module: nn.Module) -> str | None:
    names = inspect.signature(module.forward).parameters
    return next((name for name in _POSITIONS if name in names), None)
