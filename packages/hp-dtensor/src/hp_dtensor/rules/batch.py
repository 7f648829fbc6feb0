"""Operators that treat each leading index alone: images, matrices, signals in a batch.

The idea: these operators look at the last few dims and do the same for every index of the dims
before them. So the number of dims that must be whole is all there is to say about most of them.

The rule: pieces are never empty, since many of these kernels reject that. Sizes among the
arguments are those of whole tensors and are replaced. Which of them are linear is in the table.

The design not taken: cutting images in space. Neighbours would have to exchange their borders,
which is a communication of its own kind and belongs to a module that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hp_dtensor.placements import Placement, Replicate, Shard
from hp_dtensor.rules._labels import Dims, broadcast_dims, fills, label_strategies
from hp_dtensor.rules._registry import (
    LocalCall,
    Localizer,
    OpCall,
    Rule,
    Strategy,
    TensorMeta,
    aten_ops,
    register_rule,
)
from hp_dtensor.rules.pointwise import linear_in
from hp_dtensor.rules.softmax import along
from hp_dtensor.rules.view import as_dims

__all__ = ["leading"]

REPLICATE = Replicate()


def leading(trailing: int) -> Rule:
    """Return the rule of an operator that needs the last *trailing* dims of its first tensor whole.

    All other tensors and results have the same leading dims, and whatever dims after them.
    """

    def rule(call: OpCall) -> Iterator[Strategy]:
        batch = len(call.tensors[0].shape) - trailing
        shape = call.tensors[0].shape[: max(batch, 0)]
        metas = [*call.tensors, *(meta for meta in call.outputs if meta is not None)]
        if any(meta.shape[: len(shape)] != shape for meta in metas):
            return

        def dims(meta: TensorMeta) -> Dims:
            return [dim if dim < batch else None for dim in range(len(meta.shape))]

        yield from label_strategies(
            call,
            [dims(meta) for meta in call.tensors],
            [None if meta is None else dims(meta) for meta in call.outputs],
            reduce=None,
            empty=False,
        )

    return rule


def sized(position: int) -> Localizer:
    """Return what replaces the argument at *position* by the size of the local result."""

    def localize(local: LocalCall) -> Callable[..., object]:
        op = local.call.op
        size = local.output_local_shapes[0] or ()

        def run(*args: object) -> object:
            return op(*args[:position], size, *args[position + 1 :])

        return run

    return localize


def _linear(call: OpCall) -> Iterator[frozenset[int]]:
    return linear_in(call, [[0]])


# --- images -----------------------------------------------------------------------------------
# By the number of dims in space; the channel dim is a batch as well.

_POOLS = {
    1: ("adaptive_max_pool1d", "max_pool1d_with_indices", "avg_pool1d", "adaptive_avg_pool1d"),
    2: (
        *("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_unpool2d"),
        *("adaptive_max_pool2d", "adaptive_max_pool2d_backward"),
    ),
    3: (
        *("max_pool3d_with_indices", "max_pool3d_with_indices_backward", "max_unpool3d"),
        *("adaptive_max_pool3d", "adaptive_max_pool3d_backward"),
    ),
}
_LINEAR_POOLS = {
    1: ("avg_pool1d", "adaptive_avg_pool1d", "reflection_pad1d", "replication_pad1d"),
    2: (
        *("avg_pool2d", "avg_pool2d_backward", "reflection_pad2d", "replication_pad2d"),
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"),
    ),
    3: (
        *("avg_pool3d", "avg_pool3d_backward", "reflection_pad3d", "replication_pad3d"),
        *("_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward"),
        *("pixel_shuffle", "pixel_unshuffle"),
    ),
}
_PAD_BACKWARD = {
    space: (f"reflection_pad{space}d_backward", f"replication_pad{space}d_backward")
    for space in (1, 2, 3)
}
_UPSAMPLE = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: (
        *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d"),
        *("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        "_upsample_lanczos2d_aa",
    ),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}

for _space, _names in _POOLS.items():
    register_rule(aten_ops(*(f"{name}.default" for name in _names)), leading(_space))
for _space, _names in _LINEAR_POOLS.items():
    register_rule(
        aten_ops(*(f"{name}.default" for name in _names)),
        leading(_space),
        linear=_linear,
        overwrite=True,
    )
for _space, _names in _PAD_BACKWARD.items():
    register_rule(
        aten_ops(*(f"{name}.default" for name in _names)), leading(_space), linear=_linear
    )
for _space, _names in _UPSAMPLE.items():
    register_rule(
        aten_ops(*(f"{name}.default" for name in _names)), leading(_space), linear=_linear
    )
    register_rule(
        aten_ops(*(f"{name}_backward.default" for name in _names)),
        leading(_space),
        linear=_linear,
        local=sized(2),
    )


def _fractional_pool(call: OpCall) -> Iterator[Strategy]:
    """``(input, kernel, size, samples)``: a random number for each image, channel and dim in space."""
    image, samples = call.tensors
    channels: Dims = ["n", "c"] if len(image.shape) - len(call.arg(1)) == 2 else ["c"]  # type: ignore[arg-type]
    inside: Dims = [*channels, *[None] * (len(image.shape) - len(channels))]
    yield from label_strategies(
        call,
        [inside, ["n", "c", None][: len(samples.shape)]],
        [inside, inside],
        reduce=None,
        empty=False,
    )


register_rule(
    aten_ops("fractional_max_pool2d.default", "fractional_max_pool3d.default"), _fractional_pool
)
register_rule(aten_ops("fractional_max_pool2d_backward.default"), leading(2), linear=_linear)
register_rule(aten_ops("fractional_max_pool3d_backward.default"), leading(3), linear=_linear)
register_rule(aten_ops("channel_shuffle.default"), leading(3), linear=_linear)
register_rule(aten_ops("im2col.default"), leading(3), linear=_linear)
register_rule(aten_ops("col2im.default"), leading(2), linear=_linear)


# --- sampling ---------------------------------------------------------------------------------


def _grid_sampler(call: OpCall) -> Iterator[Strategy]:
    """``(input, grid, ...)``: the channels do not know of the grid."""
    yield from label_strategies(
        call,
        [_image(call.tensors[0]), ["n", *[None] * (len(call.tensors[1].shape) - 1)]],
        [_image(call.output)],
        reduce=None,
        empty=False,
    )


def _grid_sampler_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, input, grid, ...) -> (grad_input, grad_grid)``: a sum over channels for the grid."""
    grid: Dims = ["n", *[None] * (len(call.tensors[2].shape) - 1)]
    results = [_image(call.tensors[1]), grid]
    yield from label_strategies(
        call,
        [_image(call.tensors[0]), _image(call.tensors[1]), grid],
        [None if meta is None else dims for meta, dims in zip(call.outputs, results, strict=True)],
        empty=False,
    )


def _image(meta: TensorMeta) -> Dims:
    return ["n", "c", *[None] * (len(meta.shape) - 2)]


for _space in (2, 3):
    register_rule(aten_ops(f"grid_sampler_{_space}d.default"), _grid_sampler, linear=_linear)
    register_rule(
        aten_ops(f"grid_sampler_{_space}d_backward.default"),
        _grid_sampler_backward,
        linear=_linear,
    )


def _affine_grid_local(local: LocalCall) -> Callable[..., object]:
    """The size among the arguments begins with that of the batch."""
    op = local.call.op
    batch = local.input_local_shapes[0][0]

    def run(theta: object, size: Sequence[int], *static: object) -> object:
        return op(theta, [batch, *size[1:]], *static)

    return run


register_rule(
    aten_ops("affine_grid_generator.default"),
    leading(2),
    linear=_linear,
    local=_affine_grid_local,
)


# --- matrices ---------------------------------------------------------------------------------

_MATRICES = (
    *("linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "linalg_cholesky_ex", "linalg_qr"),
    *("_linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_eigvals"),
    *("linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_matrix_exp", "lu_unpack"),
    *("cholesky_inverse", "cholesky_solve", "_cholesky_solve_helper", "linalg_ldl_factor_ex"),
    *("linalg_ldl_solve", "_linalg_solve_ex", "linalg_solve_triangular", "triangular_solve"),
    *("linalg_householder_product", "ormqr", "geqrf", "linalg_polar", "linalg_matrix_sqrth"),
)

register_rule(aten_ops(*(f"{name}.default" for name in _MATRICES)), leading(2))


def _cross(call: OpCall) -> Iterator[Strategy]:
    """``linalg_cross(self, other, dim)``: broadcast, with one dim of three whole."""
    ndim = len(call.output.shape)
    (along_dim,) = as_dims(call.kwargs.get("dim", -1), ndim)

    def dims(meta: TensorMeta) -> Dims:
        return [None if dim == along_dim - ndim else dim for dim in broadcast_dims(meta)]

    yield from label_strategies(
        call, [dims(meta) for meta in call.tensors], [dims(call.output)], reduce=None
    )


def _each(call: OpCall) -> Iterator[frozenset[int]]:
    return linear_in(call, [[0], [1]])


register_rule(aten_ops("linalg_cross.default"), _cross, linear=_each)


def _cdist(call: OpCall) -> Iterator[Strategy]:
    """Distances between rows: the rows of both sides are batches of their own."""
    left, right = call.tensors
    yield from label_strategies(
        call,
        [[*broadcast_dims(left)[:-2], "p", None], [*broadcast_dims(right)[:-2], "r", None]],
        [[*broadcast_dims(call.output)[:-2], "p", "r"]],
        reduce=None,
    )


register_rule(aten_ops("_cdist_forward.default", "_euclidean_dist.default"), _cdist)


def _cdist_backward(call: OpCall) -> Iterator[Strategy]:
    """``(grad, x1, x2, p, distance)``: the gradient of the first rows, summed over the second ones."""
    batch = broadcast_dims(call.tensors[0])[:-2]
    pairs: Dims = [*batch, "p", "r"]
    yield from label_strategies(
        call,
        [
            pairs,
            [*broadcast_dims(call.tensors[1])[:-2], "p", None],
            [*broadcast_dims(call.tensors[2])[:-2], "r", None],
            pairs,
        ],
        [[*broadcast_dims(call.output)[:-2], "p", None]],
        empty=False,
    )


register_rule(aten_ops("_cdist_backward.default"), _cdist_backward, linear=_linear)


def _trilinear(call: OpCall) -> Iterator[Strategy]:
    """``(i1, i2, i3, expand1, expand2, expand3, sumdim)``: a product after new dims, summed over some."""
    expanded = [as_dims(call.arg(position), 1 << 30) for position in (3, 4, 5)]
    summed = as_dims(call.arg(6), 1 << 30)
    count = len(call.tensors[0].shape) + len(expanded[0])
    dims = [[dim for dim in range(count) if dim not in new] for new in expanded]
    yield from label_strategies(call, dims, [[dim for dim in range(count) if dim not in summed]])


register_rule(
    aten_ops("_trilinear.default"),
    _trilinear,
    linear=lambda call: linear_in(call, [[0], [1], [2]]),
)


def _loosely_batched(call: OpCall) -> Iterator[Strategy]:
    """Matrices in a batch, with tolerances that are numbers or have the batch's dims."""
    batch = len(call.tensors[0].shape) - 2

    def dims(meta: TensorMeta) -> Dims:
        alike = meta.shape[:batch] == call.tensors[0].shape[:batch]
        return [dim if alike and dim < batch else None for dim in range(len(meta.shape))]

    yield from label_strategies(
        call, [dims(meta) for meta in call.tensors], [dims(call.output)], reduce=None, empty=False
    )


register_rule(
    aten_ops("linalg_pinv.atol_rtol_tensor", "linalg_pinv.atol_rtol_float"), _loosely_batched
)


def _diagonal_matrix(call: OpCall) -> Iterator[Strategy]:
    """``diag_embed(self, offset, dim1, dim2)``: the last dim becomes two."""
    ndim = len(call.output.shape)
    new = as_dims([call.arg(2, "dim1", -2), call.arg(3, "dim2", -1)], ndim)
    names = [None if dim in new else dim for dim in range(ndim)]
    yield from label_strategies(
        call, [[*(name for name in names if name is not None), None]], [names], reduce=None
    )


register_rule(aten_ops("diag_embed.default"), _diagonal_matrix, linear=_linear)

# --- signals ----------------------------------------------------------------------------------

register_rule(
    aten_ops("_fft_c2c.default", "_fft_r2c.default", "_fft_c2r.default"),
    along(1, empty=False),
    linear=_linear,
)

# --- counting ---------------------------------------------------------------------------------


def _histogram(call: OpCall) -> Iterator[Strategy]:
    """``histc(self, bins, min, max)`` counts; without bounds it must see all values for them."""
    if call.arg(2, "min", 0) != call.arg(3, "max", 0):
        dims = range(len(call.tensors[0].shape))
        yield from label_strategies(call, [dims], [[None]])


def _take(call: OpCall) -> Iterator[Strategy]:
    """``take(self, index)`` picks from the flattened tensor, which is whole."""
    source, index = call.tensors
    dims = range(len(index.shape))
    yield from label_strategies(call, [[None] * len(source.shape), dims], [dims], reduce=None)


register_rule(aten_ops("histc.default"), _histogram)
register_rule(aten_ops("take.default"), _take, linear=_linear)


# --- weight norm ------------------------------------------------------------------------------


def _weight_norm(dim_position: int) -> Rule:
    """The norm is over all dims but one, which may be cut in all tensors."""

    def rule(call: OpCall) -> Iterator[Strategy]:
        ndim = len(call.tensors[0].shape)
        (dim,) = as_dims(call.arg(dim_position, "dim", 0), ndim)

        def place(meta: TensorMeta) -> Placement:
            return Shard(dim if len(meta.shape) == ndim else 0) if meta.shape else REPLICATE

        channels = call.tensors[0].shape[dim] if ndim else 0
        if channels == max(call.tensors[1].shape, default=0) and fills(channels, call.axis_size):
            yield Strategy(
                tuple(None if meta is None else place(meta) for meta in call.outputs),
                tuple(place(meta) for meta in call.tensors),
            )

    return rule


register_rule(aten_ops("_weight_norm_interface.default"), _weight_norm(2))
register_rule(aten_ops("_weight_norm_interface_backward.default"), _weight_norm(4))
