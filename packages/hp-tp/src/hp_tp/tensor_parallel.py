"""The two styles of tensor parallelism: a layer cut by columns, and the one after it cut by rows.

Together they need one reduction forward and one backward, where the pair begins and ends. ``nn.Linear`` and
``nn.Embedding`` compute on local tensors (:mod:`hp_tp.linear`, :mod:`hp_tp.embedding`); a subclass with a forward of its
own keeps it, and gets distributed parameters and inputs instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from hp_dtensor import DTensor, Placement, Shard, StridedShard
from hp_mesh import DeviceMesh
from torch import nn

from hp_tp.boundary import REPLICATE, check_even, map_tensors, move, normal
from hp_tp.embedding import EmbeddingLayout, check_embedding, held_rows
from hp_tp.errors import BoundaryError, PlanError, StyleError, UnsupportedModuleError
from hp_tp.fused import FusedLayout, FusedRows, problem_of
from hp_tp.linear import LinearLayout
from hp_tp.placing import place
from hp_tp.style import ParallelStyle
from hp_tp.substitution import original_class, substitute

if TYPE_CHECKING:
    from torch import Tensor

    from hp_tp.substitution import Forward

__all__ = ["ColwiseParallel", "RowwiseParallel"]

_FIRST, _SECOND, _LAST = Shard(0), Shard(1), Shard(-1)


@dataclass(frozen=True, slots=True)
class _DispatchedLayout:
    """How a layer with a forward of its own runs: its first input and its output moved, all in between distributed."""

    mesh: DeviceMesh
    input_layout: Placement
    wanted: Placement
    output_layout: Placement
    use_local_output: bool

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        where = f"the input of {type(module).__name__}"

        def enter(value: Tensor) -> Tensor:
            return move(value, self.mesh, self.input_layout, self.wanted, local=False, where=where)

        if args:
            args = (map_tensors(enter, args[0]), *args[1:])
        elif "input" in kwargs:
            kwargs = {**kwargs, "input": map_tensors(enter, kwargs["input"])}
        return map_tensors(
            lambda value: self._leave(module, value), forward(module, *args, **kwargs)
        )

    def _leave(self, module: nn.Module, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            message = (
                f"the forward of {type(module).__name__} returned a plain tensor of shape {tuple(value.shape)}, so that nobody "
                "knows how it is laid out; let it return what its operators give, or give the module a style of its own"
            )
            raise BoundaryError(message)
        where = f"the output of {type(module).__name__}"
        if self.use_local_output:
            check_even(normal(self.output_layout, value.ndim), value.shape, self.mesh, where)
        return move(
            value,
            self.mesh,
            self.output_layout,
            self.output_layout,
            local=self.use_local_output,
            where=where,
            lazy=True,
        )


def _computes_like(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether *module* is a *kind* and has *kind*'s own forward, so that it may be computed on local tensors."""
    return original_class(module) is kind


@dataclass(kw_only=True, unsafe_hash=True)
class ColwiseParallel(ParallelStyle):
    """Cut a linear layer by its outputs, or an embedding by its features.

    Args:
        input_layouts: what a plain input is; ``Replicate()`` when None. A DTensor says itself what it is.
        output_layouts: what the output is; ``Shard(-1)`` when None, which is what the layer computes.
        use_local_output: whether the output is a plain tensor (the default) or a DTensor.
        blocks: how many blocks of equal size the outputs of a linear layer are made of, such as 2 for a gate and an up
            projection in one. Each rank gets its columns of every block, in order, so that code which splits the output
            into blocks works on them; the parameter and checkpoints keep the order of the single device.
        fused: the sizes of these blocks, when they differ: queries, keys and values with fewer heads, say. Each size has to
            be a multiple of the number of ranks, or all have to be equal. The output is this rank's columns, plain.

    Sizes that the number of ranks does not divide are fine: the pieces are those of ``torch.chunk``.

    Example:
        >>> from hp_tp import ColwiseParallel, RowwiseParallel
        >>> plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        >>> ColwiseParallel() == ColwiseParallel(use_local_output=True)
        True
    """

    lays_out: ClassVar[bool] = True
    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True
    blocks: int = 1
    fused: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.fused is None:
            return
        sizes = tuple(self.fused)
        self.__dict__["fused"] = sizes
        equal = len(set(sizes)) == 1
        if self.blocks != 1 or (
            not equal and (self.output_layouts is not None or not self.use_local_output)
        ):
            message = (
                f"fused={sizes} says how wide the blocks are, so that blocks={self.blocks} must be left out, and blocks of unequal "
                "size come out as this rank's plain columns: output_layouts and use_local_output must be left out too"
            )
            raise StyleError(message)
        if equal:
            self.__dict__["blocks"] = len(sizes)

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse what is neither linear layer nor embedding, and blocks that do not fit."""
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise _unsupported("ColwiseParallel", module)
        if isinstance(module, nn.Embedding):
            check_embedding(module)
        if self.fused is None:
            self._cuts(module, device_mesh)
            return
        if not isinstance(module, nn.Linear) or not _computes_like(module, nn.Linear):
            problem: str | None = (
                f"fused={self.fused} is for nn.Linear, not for {type(module).__name__}"
            )
        else:
            problem = problem_of(tuple(self.fused), module.out_features, device_mesh.size())
        if problem is not None:
            raise PlanError(problem)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the parameters of *module* and let it compute its columns.

        Raises:
            UnsupportedModuleError: when *module* is neither linear layer nor embedding.
            PlanError: when its outputs are not the blocks that the style says.
        """
        self.check(module, device_mesh)
        label = self.input_layouts or REPLICATE
        if self.fused is not None and self.blocks == 1:
            fused = FusedRows(device_mesh, tuple(self.fused))
            cut = {"weight": fused.layout(), "bias": fused.layout()}
            place(module, device_mesh, cut, self.src_data_rank)
            substitute(module, FusedLayout(fused, label))
            return module
        rows, columns = self._cuts(module, device_mesh)
        out = self.output_layouts or columns
        if isinstance(module, nn.Linear):
            place(module, device_mesh, {"weight": rows, "bias": rows}, self.src_data_rank)
            if _computes_like(module, nn.Linear):
                substitute(
                    module,
                    LinearLayout(
                        device_mesh, False, label, out, self.use_local_output, None, columns
                    ),
                )
                return module
        elif isinstance(module, nn.Embedding):
            place(module, device_mesh, {"weight": _SECOND}, self.src_data_rank)
            if _computes_like(module, nn.Embedding):
                substitute(
                    module,
                    EmbeddingLayout(
                        device_mesh, False, label, out, self.use_local_output, None, (0, 0)
                    ),
                )
                return module
        layout = _DispatchedLayout(device_mesh, label, REPLICATE, out, self.use_local_output)
        substitute(module, layout)
        return module

    def _cuts(self, module: nn.Module, mesh: DeviceMesh) -> tuple[Placement, Placement]:
        """How the rows of the weight and the columns of the output lie over the ranks."""
        if self.blocks == 1:
            return _FIRST, _LAST
        if (
            not isinstance(module, nn.Linear)
            or self.blocks < 1
            or module.out_features % self.blocks
        ):
            size = getattr(module, "out_features", "no")
            message = (
                f"blocks={self.blocks} cuts a linear layer whose outputs are that many blocks of equal size; this "
                f"{type(module).__name__} has {size} outputs"
            )
            raise PlanError(message)
        if mesh.size() == 1:
            return _FIRST, _LAST
        return StridedShard(0, split_factor=self.blocks), StridedShard(
            -1, split_factor=self.blocks
        )


@dataclass(kw_only=True, unsafe_hash=True)
class RowwiseParallel(ParallelStyle):
    """Cut a linear layer by its inputs, or an embedding by its vocabulary.

    Args:
        input_layouts: what a plain input is; when None, ``Shard(-1)`` for a linear layer (what a column-parallel layer
            hands out) and ``Replicate()`` for an embedding.
        output_layouts: what the output is; ``Replicate()`` when None. ``Shard(1)`` scatters the sequence.
        use_local_output: whether the output is a plain tensor (the default) or a DTensor.
        reduce_dtype: the dtype in which the ranks' addends are added up; the output has the dtype of the single device.

    The bias is added after the reduction, once.

    Example:
        >>> import torch
        >>> from hp_dtensor import Shard
        >>> from hp_tp import RowwiseParallel
        >>> style = RowwiseParallel(output_layouts=Shard(1), reduce_dtype=torch.float32)
    """

    lays_out: ClassVar[bool] = True
    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True
    reduce_dtype: torch.dtype | None = None

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse what is neither linear layer nor embedding."""
        del device_mesh
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise _unsupported("RowwiseParallel", module)
        if isinstance(module, nn.Embedding):
            check_embedding(module)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the parameters of *module* and let it compute its addend."""
        self.check(module, device_mesh)
        out = self.output_layouts or REPLICATE
        if isinstance(module, nn.Linear):
            wanted: Placement = _LAST
            label = self.input_layouts or wanted
            place(module, device_mesh, {"weight": _SECOND, "bias": REPLICATE}, self.src_data_rank)
            if _computes_like(module, nn.Linear):
                substitute(
                    module,
                    LinearLayout(
                        device_mesh, True, label, out, self.use_local_output, self.reduce_dtype
                    ),
                )
                return module
        elif isinstance(module, nn.Embedding):
            wanted = REPLICATE
            label = self.input_layouts or wanted
            place(module, device_mesh, {"weight": _FIRST}, self.src_data_rank)
            if _computes_like(module, nn.Embedding):
                substitute(
                    module,
                    EmbeddingLayout(
                        device_mesh,
                        True,
                        label,
                        out,
                        self.use_local_output,
                        self.reduce_dtype,
                        held_rows(module.num_embeddings, device_mesh),
                    ),
                )
                return module
        else:
            raise _unsupported("RowwiseParallel", module)
        layout = _DispatchedLayout(device_mesh, label, wanted, out, self.use_local_output)
        substitute(module, layout)
        return module


def _unsupported(style: str, module: nn.Module) -> UnsupportedModuleError:
    message = (
        f"{style} cuts nn.Linear and nn.Embedding (and subclasses), not {type(module).__name__}. For a norm or a dropout use "
        "SequenceParallel or NoParallel; for anything else give its submodules styles, or write a ParallelStyle."
    )
    return UnsupportedModuleError(message)
