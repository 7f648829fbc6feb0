"""Every rule of the table, by brute force: each strategy on each coordinate against the whole.

The samples are sized to hurt: uneven, of size 1, smaller than the axis, and empty dims. A rule that
is not run here is listed with the reason.
"""

# ruff: noqa: D103 - most functions here are data, the samples of the operators above them

from collections.abc import Callable, Iterable

import pytest
import torch
from hp_dtensor import strategies
from hp_dtensor.rules import find_rule, registered_ops
from hp_dtensor.testing import Sample, check_rule, draw

aten = torch.ops.aten
torch.set_num_threads(1)

Make = Callable[[], Iterable[Sample]]
SAMPLES: dict[str, Make] = {}


def samples(*names: str) -> Callable[[Make], Make]:
    """Let the decorated function make the samples of these operators."""

    def add(make: Make) -> Make:
        for name in names:
            assert name not in SAMPLES, name
            SAMPLES[name] = make
        return make

    return add


def s(*args: object, **kwargs: object) -> Sample:
    return Sample(args, kwargs)


def ints(*shapes: tuple[int, ...], high: int = 5, low: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(low, high, shape, generator=generator) for shape in shapes]


def positive(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [tensor.abs() + 0.5 for tensor in draw(*shapes)]


A, B, ROW, COLUMN, ONE, EMPTY, CUBE = draw((5, 4), (5, 4), (4,), (5, 1), (1, 4), (0, 4), (2, 5, 3))
(BOOL,) = draw((5, 4), dtype=torch.bool)
(INT,) = draw((5, 4), dtype=torch.int64)
Z, W = draw((5, 4), (4,), dtype=torch.complex128)
SCALAR = torch.tensor(1.5, dtype=torch.float64)

# --- one tensor, element by element -----------------------------------------------------------


@samples(
    *(
        "abs_.default",
        "neg.default",
        "neg_.default",
        "_neg_view.default",
        "clone.default",
        "detach.default",
    ),
    *("alias.default", "lift.default", "lift_fresh.default", "positive.default"),
    *("conj_physical.default", "conj_physical_.default", "_conj_physical.default"),
    *("resolve_conj.default", "resolve_neg.default", "contiguous.default", "detach_.default"),
    *("zero_.default", "zero.default", "hardswish.default", "hardswish_.default"),
    *("gelu_.default", "mish_.default", "zeros_like.default", "ones_like.default"),
    *("relu.default", "exp.default", "sin_.default", "round.default", "logical_not.default"),
    *("sgn.default", "isnan.default", "sigmoid.default", "silu_.default", "trunc.default"),
    *("log_sigmoid_forward.default", "frexp.Tensor", "nan_to_num.default", "square.default"),
)
def one_tensor() -> Iterable[Sample]:
    return [s(A.clone()), s(CUBE.clone()), s(ONE.clone()), s(EMPTY.clone()), s(SCALAR.clone())]


@samples("_conj.default", "angle.default", "view_as_real.default", "view_as_real_copy.default")
def one_complex() -> Iterable[Sample]:
    return [s(Z), s(W)]


@samples("view_as_complex.default", "view_as_complex_copy.default")
def pairs_as_complex() -> Iterable[Sample]:
    return [s(draw((5, 3, 2))[0]), s(draw((2,))[0])]


@samples("_to_copy.default")
def casts() -> Iterable[Sample]:
    return [
        s(A, dtype=torch.float32),
        s(A, dtype=torch.complex128),
        s(A, dtype=torch.int64),
        s(A, dtype=torch.bool),
        s(INT, dtype=torch.float64),
        s(BOOL, dtype=torch.int64),
        s(BOOL),
    ]


@samples("empty_like.default")
def undefined() -> Iterable[Sample]:
    return [s(A), s(BOOL)]


@samples("full_like.default", "fill.Scalar", "fill_.Scalar")
def filled() -> Iterable[Sample]:
    return [s(A.clone(), 3), s(INT.clone(), 3), s(CUBE.clone(), -1.5), s(EMPTY.clone(), 2)]


@samples("fill.Tensor", "fill_.Tensor")
def filled_by_tensor() -> Iterable[Sample]:
    return [s(A.clone(), SCALAR), s(CUBE.clone(), SCALAR)]


@samples("threshold_.default")
def thresholds() -> Iterable[Sample]:
    return [s(A.clone(), 0.1, 2.0)]


@samples("fake_quantize_per_tensor_affine_cachemask.default")
def quantised() -> Iterable[Sample]:
    return [s(A.float(), 0.1, 3, 0, 255)]


@samples("_prelu_kernel.default")
def prelu() -> Iterable[Sample]:
    return [s(A, ROW), s(A, ONE)]


@samples("_prelu_kernel_backward.default")
def prelu_backward() -> Iterable[Sample]:
    return [s(A, B, ROW)]


# --- two and more -----------------------------------------------------------------------------


@samples("add.Tensor", "sub.Tensor", "rsub.Tensor")
def sums() -> Iterable[Sample]:
    return [
        *(s(A, other) for other in (B, ROW, COLUMN, ONE, SCALAR, INT)),
        s(A, B, alpha=2.5),
        s(INT, INT, alpha=3),
        s(INT, A),
        s(Z, A),
        s(EMPTY, ROW),
        s(ROW, CUBE[:, :, :1]),
    ]


@samples("mul.Tensor", "div.Tensor", "maximum.default", "minimum.default", "atan2.default")
def products() -> Iterable[Sample]:
    (four,) = draw((5, 4), dtype=torch.int32)
    return [
        *(s(A, other) for other in (B, ROW, COLUMN, ONE, SCALAR)),
        s(four, four.clamp_min(1)),
        s(A, four.clamp_min(1)),
        s(EMPTY, ROW),
    ]


@samples(
    "eq.Tensor", "lt.Tensor", "logical_and.default", "hypot.default", "max.other", "min.other"
)
def comparisons() -> Iterable[Sample]:
    return [s(A, B), s(A, ROW), s(ONE, COLUMN)]


@samples(
    *("add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor", "copy_.default"),
    *("eq_.Tensor", "ne_.Tensor", "ge_.Tensor", "gt_.Tensor", "le_.Tensor", "lt_.Tensor"),
    *("copysign_.Tensor", "atan2_.default", "heaviside_.default", "copy.default"),
)
def written_pairs() -> Iterable[Sample]:
    return [s(A.clone(), other) for other in (B, ROW, COLUMN, ONE, SCALAR)]


@samples(
    *("add.Scalar", "sub.Scalar", "sub_.Scalar", "mul.Scalar", "div.Scalar"),
    *("pow.Tensor_Scalar", "rsub.Scalar"),
    *("eq_.Scalar", "ne_.Scalar", "ge_.Scalar", "gt_.Scalar", "le_.Scalar", "lt_.Scalar"),
    *("copysign_.Scalar", "floor_divide.Scalar", "floor_divide_.Scalar", "add_.Scalar"),
)
def numbers() -> Iterable[Sample]:
    return [s(A.clone(), 2), s(CUBE.clone(), 2)]


@samples("div.Tensor_mode")
def rounded() -> Iterable[Sample]:
    return [s(A, ROW, rounding_mode=mode) for mode in (None, "floor", "trunc")]


@samples("floor_divide.default", "floor_divide_.Tensor", "xlogy_.Tensor")
def quotients() -> Iterable[Sample]:
    return [s(A.clone(), positive((5, 4))[0]), s(A.clone(), positive((4,))[0])]


@samples("xlogy_.Scalar_Other")
def by_number() -> Iterable[Sample]:
    return [s(A.clone(), 2.0)]


@samples("gcd_.default", "lcm_.default")
def divisors() -> Iterable[Sample]:
    return [s(INT.clone(), ints((4,), low=1)[0]), s(INT.clone(), ints((5, 1), low=1)[0])]


@samples("__irshift__.Tensor")
def shifted() -> Iterable[Sample]:
    return [s(INT.clone(), ints((4,), low=1)[0])]


@samples("__irshift__.Scalar")
def shifted_by_number() -> Iterable[Sample]:
    return [s(INT.clone(), 1)]


@samples("polar.default")
def polar() -> Iterable[Sample]:
    return [s(positive((5, 4))[0], ROW)]


@samples("complex.default")
def parts() -> Iterable[Sample]:
    return [s(A, B), s(A, ROW)]


@samples("lerp.Scalar", "lerp_.Scalar")
def mixed_by_number() -> Iterable[Sample]:
    return [s(A.clone(), B, 0.3), s(A.clone(), ROW, 0.7)]


@samples("lerp.Tensor", "addcmul.default", "addcdiv.default", "lerp_.Tensor", "addcmul_.default")
def three() -> Iterable[Sample]:
    return [s(A.clone(), B, B + 3), s(A.clone(), ROW, COLUMN), s(A.clone(), B, ROW)]


@samples("where.self")
def choices() -> Iterable[Sample]:
    return [s(BOOL, A, B), s(BOOL, A, ROW), s(BOOL[:1], A, SCALAR), s(BOOL, INT, A)]


@samples("masked_fill.Tensor", "masked_fill_.Tensor")
def masked() -> Iterable[Sample]:
    return [s(A.clone(), BOOL, SCALAR), s(A.clone(), BOOL[0], SCALAR)]


@samples("masked_fill.Scalar", "masked_fill_.Scalar")
def masked_by_number() -> Iterable[Sample]:
    return [s(A.clone(), BOOL, 0), s(A.clone(), BOOL[0], 2.5), s(CUBE.clone(), BOOL[:, :1], 1)]


@samples("clamp.Tensor")
def clamped() -> Iterable[Sample]:
    return [s(A, ROW, ROW + 1), s(A, None, COLUMN)]


# --- gradients, element by element ------------------------------------------------------------


@samples(
    *("gelu_backward.default", "silu_backward.default", "sigmoid_backward.default"),
    *("tanh_backward.default", "hardswish_backward.default", "hardsigmoid_backward.default"),
    *("mish_backward.default",),
)
def gradients() -> Iterable[Sample]:
    return [s(A, B), s(CUBE, CUBE + 1), s(EMPTY, EMPTY)]


@samples(
    *("threshold_backward.default", "hardshrink_backward.default"),
    *("softshrink_backward.default",),
)
def gradients_with_number() -> Iterable[Sample]:
    return [s(A, B, 0.1)]


@samples("hardtanh_backward.default", "softplus_backward.default")
def gradients_with_numbers() -> Iterable[Sample]:
    return [s(A, B, 0.5, 1.5)]


@samples("leaky_relu_backward.default")
def leaky() -> Iterable[Sample]:
    return [s(A, B, 0.1, False)]


@samples("elu_backward.default")
def elu() -> Iterable[Sample]:
    return [s(A, 1.0, 1.0, 1.0, False, B)]


@samples("log_sigmoid_backward.default")
def log_sigmoid() -> Iterable[Sample]:
    return [s(A, B, torch.exp(-B.abs()))]


@samples("rrelu_with_noise_backward.default")
def rrelu() -> Iterable[Sample]:
    return [s(A, B, B.abs(), 0.1, 0.3, True, False), s(A, B, B.abs(), 0.1, 0.3, False, False)]


@samples("native_dropout_backward.default")
def dropout() -> Iterable[Sample]:
    return [s(A, BOOL, 2.0)]


# --- products of matrices ---------------------------------------------------------------------

MATRICES = draw((5, 4), (4, 3), (0, 4), (4, 0), (1, 4), (2, 1), (1, 5))


@samples("mm.default")
def mm() -> Iterable[Sample]:
    a, b, none, nothing, one, thin, flat = MATRICES
    return [s(a, b), s(none, b), s(a, nothing), s(one, b), s(thin, flat)]


@samples("mm.dtype", "addmm.dtype", "bmm.dtype", "baddbmm.dtype")
def only_on_accelerators() -> Iterable[Sample]:
    return []


@samples("_int_mm.default")
def int_mm() -> Iterable[Sample]:
    a, b = draw((5, 4), (4, 3), dtype=torch.int8)
    return [s(a, b)]


@samples("bmm.default")
def bmm() -> Iterable[Sample]:
    return [s(*draw((3, 5, 4), (3, 4, 2))), s(*draw((1, 5, 4), (1, 4, 2)))]


@samples("mv.default")
def mv() -> Iterable[Sample]:
    return [s(*draw((5, 4), (4,))), s(*draw((1, 7), (7,)))]


@samples("dot.default", "vdot.default")
def dot() -> Iterable[Sample]:
    return [s(*draw((5,), (5,))), s(*draw((7,), (7,), dtype=torch.complex128))]


@samples("outer.default", "ger.default")
def outer() -> Iterable[Sample]:
    return [s(*draw((5,), (3,)))]


@samples("addmm.default")
def addmm() -> Iterable[Sample]:
    a, b = draw((5, 4), (4, 3))
    added = [s(bias, a, b) for bias in draw((3,), (5, 3), (1, 3), (5, 1), ())]
    return [*added, s(draw((3,))[0], a, b, beta=0.5, alpha=2)]


@samples("addmm_.default")
def addmm_() -> Iterable[Sample]:
    return [s(*draw((5, 3), (5, 4), (4, 3)))]


@samples("baddbmm.default")
def baddbmm() -> Iterable[Sample]:
    a, b = draw((3, 5, 4), (3, 4, 2))
    return [s(bias, a, b, alpha=2) for bias in draw((3, 5, 2), (5, 2), (3, 1, 2), (2,))]


@samples("baddbmm_.default")
def baddbmm_() -> Iterable[Sample]:
    return [s(*draw((3, 5, 2), (3, 5, 4), (3, 4, 2)))]


@samples("addbmm.default")
def addbmm() -> Iterable[Sample]:
    a, b = draw((3, 5, 4), (3, 4, 2))
    return [s(bias, a, b) for bias in draw((5, 2), (2,), (1, 2))]


@samples("addbmm_.default")
def addbmm_() -> Iterable[Sample]:
    return [s(*draw((5, 2), (3, 5, 4), (3, 4, 2)))]


@samples("addmv.default")
def addmv() -> Iterable[Sample]:
    a, b = draw((5, 4), (4,))
    return [s(bias, a, b) for bias in draw((5,), (1,))]


@samples("addmv_.default")
def addmv_() -> Iterable[Sample]:
    return [s(*draw((5,), (5, 4), (4,)))]


@samples("addr.default")
def addr() -> Iterable[Sample]:
    a, b = draw((5,), (4,))
    return [s(bias, a, b) for bias in draw((5, 4), (4,), (5, 1))]


@samples("addr_.default")
def addr_() -> Iterable[Sample]:
    return [s(*draw((5, 4), (5,), (4,)))]


@samples("linear.default")
def linear() -> Iterable[Sample]:
    x, flat, row, weight, bias = draw((2, 5, 4), (5, 4), (4,), (3, 4), (3,))
    others = [s(flat, weight, other) for other in draw((1, 3), (5, 3), (1,))]
    return [s(x, weight), s(x, weight, bias), s(flat, weight, bias), s(row, weight, bias), *others]


@samples("linear_backward.default")
def linear_backward() -> Iterable[Sample]:
    weight = draw((3, 4))[0]
    masks = ([True, True, True], [True, False, False], [False, True, True], [True, True, False])
    return [
        s(*draw((*lead, 4), (*lead, 3)), weight, mask) for lead in ((2, 5), (5,)) for mask in masks
    ]


def gradients_of_a_layer(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    """What autograd finds, for torch has no kernel of ``linear_backward`` on dense tensors."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, weight[:, 0])]
    found = torch.autograd.grad(torch.nn.functional.linear(*leaves), leaves, grad)
    return tuple(t if wanted else None for t, wanted in zip(found, mask, strict=True))


REFERENCES = {"linear_backward.default": gradients_of_a_layer}


@samples("matmul.default")
def matmul() -> Iterable[Sample]:
    return [
        s(*draw(left, right))
        for left, right in (
            ((5, 4), (4, 3)),
            ((4,), (4, 3)),
            ((5, 4), (4,)),
            ((4,), (4,)),
            ((2, 5, 4), (4, 3)),
            ((2, 5, 4), (3, 1, 4, 2)),
            ((2, 5, 4), (4,)),
            ((4,), (2, 4, 3)),
        )
    ]


# --- views ------------------------------------------------------------------------------------

RESHAPES = (
    ((5, 4), (20,)),
    ((20,), (5, 4)),
    ((4, 6), (24,)),
    ((2, 6, 4), (12, 4)),
    ((12, 4), (2, 6, 4)),
    ((2, 5, 4), (10, 4)),
    ((10, 4), (2, 5, 4)),
    ((6, 4), (2, 3, 4)),
    ((6, 4), (3, 8)),
    ((5, 4), (1, 5, 1, 4)),
    ((1, 5, 1, 4), (5, 4)),
    ((5, 2), (10,)),
    ((3, 3), (9,)),
    ((0, 4), (4, 0)),
    ((0, 4), (0, 2, 2)),
    ((), (1, 1)),
    ((1,), ()),
    ((2, 3, 4, 5), (6, 20)),
    ((7, 4), (28, 1)),
)


@samples("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default")
def views() -> Iterable[Sample]:
    return [s(draw(source)[0], list(target)) for source, target in RESHAPES]


@samples("_reshape_alias.default")
def aliases() -> Iterable[Sample]:
    return [
        s(draw(source)[0], list(target), list(torch.empty(target).stride()))
        for source, target in RESHAPES
    ]


@samples("flatten.using_ints")
def flattened() -> Iterable[Sample]:
    return [s(CUBE, 0, 1), s(CUBE, 1, 2), s(CUBE), s(SCALAR)]


@samples("unflatten.int")
def unflattened() -> Iterable[Sample]:
    return [s(draw((6, 4))[0], 0, [2, 3]), s(draw((6, 4))[0], -1, [4, 1])]


@samples("squeeze.default", "squeeze_copy.default")
def squeezed() -> Iterable[Sample]:
    return [s(draw(shape)[0]) for shape in ((1, 5, 1, 4), (5, 4), (1, 1), (1, 0), ())]


@samples("squeeze.dim", "squeeze_copy.dim")
def squeezed_dim() -> Iterable[Sample]:
    return [s(draw((1, 5, 1, 4))[0], dim) for dim in (0, 1, -2)]


@samples("squeeze.dims", "squeeze_copy.dims")
def squeezed_dims() -> Iterable[Sample]:
    return [s(draw((1, 5, 1, 4))[0], [0, -2]), s(draw((1, 5, 1, 4))[0], [0, 1])]


@samples("unsqueeze.default", "unsqueeze_copy.default")
def unsqueezed() -> Iterable[Sample]:
    return [*(s(CUBE, dim) for dim in (0, 1, -1)), s(SCALAR, 0)]


@samples("permute.default", "permute_copy.default")
def permuted() -> Iterable[Sample]:
    return [s(CUBE, [2, 0, 1]), s(CUBE, [-1, 1, 0]), s(SCALAR, [])]


@samples("transpose.int", "transpose_copy.int")
def transposed() -> Iterable[Sample]:
    return [s(CUBE, 0, -1), s(CUBE, 1, 1), s(SCALAR, 0, -1)]


@samples("t.default", "t_copy.default")
def turned() -> Iterable[Sample]:
    return [s(A), s(ROW), s(SCALAR)]


@samples("expand.default", "expand_copy.default")
def expanded() -> Iterable[Sample]:
    return [
        s(COLUMN, [5, 3]),
        s(ROW, [2, 5, 4]),
        s(COLUMN, [-1, 3]),
        s(SCALAR, [2, 2]),
        s(A, [5, 4]),
    ]


@samples("select.int", "select_copy.int")
def selected() -> Iterable[Sample]:
    return [s(CUBE, 0, 1), s(CUBE, 1, -2), s(CUBE, -1, 0)]


@samples("slice.Tensor", "slice_copy.Tensor")
def sliced() -> Iterable[Sample]:
    return [
        s(CUBE, 1, 1, 4),
        s(CUBE, 1, 0, 9223372036854775807),
        s(CUBE, 1, 0, 5, 2),
        s(CUBE, 1, -3, -1),
        s(CUBE),
        s(CUBE, -1, -9, 3),
        s(CUBE, 1, 3, 3),
    ]


@samples("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor")
def split() -> Iterable[Sample]:
    return [s(CUBE, 2, 1), s(CUBE, 5, 1), s(CUBE, 1), s(CUBE, 2, -1)]


@samples("split_with_sizes.default", "split_with_sizes_copy.default")
def split_sizes() -> Iterable[Sample]:
    return [s(CUBE, [1, 4], 1), s(CUBE, [2])]


@samples("unsafe_split_with_sizes.default")
def unsafe_split_sizes() -> Iterable[Sample]:
    return [s(CUBE, [1, 4], 1)]


@samples("chunk.default", "unsafe_chunk.default")
def chunks() -> Iterable[Sample]:
    return [s(CUBE, 2, 1), s(CUBE, 3, -1)]


@samples("unbind.int", "unbind_copy.int")
def unbound() -> Iterable[Sample]:
    return [s(CUBE), s(CUBE, 1), s(CUBE, -1)]


@samples("unfold.default", "unfold_copy.default")
def unfolded() -> Iterable[Sample]:
    return [s(CUBE, 1, 3, 2), s(CUBE, -1, 2, 1)]


@samples("diagonal.default", "diagonal_copy.default")
def diagonal() -> Iterable[Sample]:
    return [s(A), s(CUBE, 1, 0, 2), s(CUBE, -1, 1, 2)]


@samples("view.dtype", "view_copy.dtype")
def bits() -> Iterable[Sample]:
    return [s(A, torch.int64), s(A, torch.int32), s(A, torch.complex128)]


# --- reductions -------------------------------------------------------------------------------


@samples("sum.default", "mean.default")
def totals() -> Iterable[Sample]:
    return [s(x) for x in (A, CUBE, EMPTY, SCALAR, ROW)]


@samples(
    *("nansum.default", "prod.default", "any.default", "all.default", "_is_any_true.default"),
    *("_is_all_true.default", "count_nonzero.default"),
)
def other_totals() -> Iterable[Sample]:
    return [s(BOOL), s(BOOL[:, :1]), s(BOOL[:0])]


@samples("sum.dim_IntList", "mean.dim", "amax.default", "amin.default")
def along_dims() -> Iterable[Sample]:
    return [
        s(CUBE, [0]),
        s(CUBE, [1], True),
        s(CUBE, [-1, 1]),
        s(CUBE, []),
        s(CUBE, [0, 1, 2], True),
        s(SCALAR, [0]),
        s(draw((1, 4))[0], [0]),
        s(A.float(), [0]),
    ]


@samples("max.default", "min.default")
def extremes() -> Iterable[Sample]:
    return [s(CUBE), s(INT), s(SCALAR), s(ONE), s(BOOL)]


@samples("prod.dim_int", "any.dim", "all.dim")
def along_dim() -> Iterable[Sample]:
    return [s(CUBE, 1), s(CUBE, -1, True), s(BOOL, 0), s(INT, 1)]


@samples("any.dims", "all.dims")
def along_some() -> Iterable[Sample]:
    return [s(BOOL, [0]), s(BOOL, [0, 1], True), s(BOOL, None), s(INT > 8, [1])]


@samples("count_nonzero.dim_IntList")
def counted() -> Iterable[Sample]:
    return [s(INT, [0]), s(INT, [0, 1])]


@samples("linalg_vector_norm.default")
def vector_norms() -> Iterable[Sample]:
    orders = (2, 1, 0, 3.5, float("inf"), float("-inf"))
    return [
        *(s(CUBE, order) for order in orders),
        *(s(CUBE, order, [1], True) for order in orders),
        s(CUBE.float(), 1, [0], False, dtype=torch.float64),
    ]


@samples("norm.ScalarOpt_dim")
def norms() -> Iterable[Sample]:
    return [s(CUBE, order, [1]) for order in (None, 2, 1, 0, float("inf"), float("-inf"))]


@samples("norm.ScalarOpt_dim_dtype")
def norms_in() -> Iterable[Sample]:
    return [s(CUBE.float(), 1, [1], True, dtype=torch.float64)]


@samples("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def variances() -> Iterable[Sample]:
    return [s(CUBE, [1], correction=1), s(CUBE, [0, 2], correction=0, keepdim=True), s(CUBE)]


@samples("var.default", "std.default", "var_mean.default", "std_mean.default")
def whole_variances() -> Iterable[Sample]:
    return [s(CUBE)]


@samples("var.dim", "std.dim", "var_mean.dim", "std_mean.dim")
def dim_variances() -> Iterable[Sample]:
    return [s(CUBE, [1]), s(CUBE, [0], False, True)]


@samples("logsumexp.default")
def logsumexp() -> Iterable[Sample]:
    return [s(CUBE, [1]), s(CUBE, [0, 2], True)]


@samples("argmax.default", "argmin.default")
def positions() -> Iterable[Sample]:
    return [s(CUBE), s(CUBE, 1), s(CUBE, -1, True)]


@samples("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode.default")
def with_positions() -> Iterable[Sample]:
    return [s(CUBE, 1), s(CUBE, -1, True), s(SCALAR, 0)]


@samples("median.default", "nanmedian.default")
def medians() -> Iterable[Sample]:
    return [s(CUBE)]


@samples("kthvalue.default")
def kthvalue() -> Iterable[Sample]:
    return [s(CUBE, 2, 1), s(CUBE, 1)]


@samples("aminmax.default")
def aminmax() -> Iterable[Sample]:
    return [s(CUBE), s(CUBE, dim=1), s(CUBE, dim=0, keepdim=True)]


# --- along one dim ----------------------------------------------------------------------------


@samples("_softmax.default", "_log_softmax.default")
def softmax() -> Iterable[Sample]:
    return [s(CUBE, 1, False), s(CUBE, -1, False), s(SCALAR, 0, False)]


@samples("_safe_softmax.default", "softmax.int", "log_softmax.int", "logcumsumexp.default")
def other_softmax() -> Iterable[Sample]:
    return [s(CUBE, 1), s(CUBE, -1)]


@samples("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def softmax_backward() -> Iterable[Sample]:
    return [s(CUBE, CUBE.softmax(1), 1, torch.float64)]


@samples("_masked_softmax.default")
def masked_softmax() -> Iterable[Sample]:
    return [s(CUBE, CUBE > 0, 1, 2)]


@samples("glu.default")
def glu() -> Iterable[Sample]:
    return [s(A), s(A, 1), s(draw((4, 3))[0], 0)]


@samples("glu_backward.default")
def glu_backward() -> Iterable[Sample]:
    return [s(A[:, :2].clone(), A, 1)]


@samples(
    *("cumsum.default", "cumprod.default", "cummax.default", "cummin.default"),
    *("_logcumsumexp.default",),
)
def running() -> Iterable[Sample]:
    return [s(CUBE, 1), s(CUBE, -1), s(SCALAR, 0)]


@samples("cumsum_.default", "cumprod_.default")
def running_written() -> Iterable[Sample]:
    return [s(CUBE.clone(), 1)]


@samples("sort.default")
def sort() -> Iterable[Sample]:
    return [s(CUBE), s(CUBE, 1, True), s(SCALAR)]


@samples("sort.stable")
def stable_sort() -> Iterable[Sample]:
    return [s(CUBE, stable=True), s(CUBE, stable=True, dim=0, descending=True)]


@samples("topk.default")
def topk() -> Iterable[Sample]:
    return [s(CUBE, 2), s(CUBE, 3, 1, False)]


@samples("flip.default")
def flip() -> Iterable[Sample]:
    return [s(CUBE, [1]), s(CUBE, [0, -1]), s(CUBE, [])]


@samples("roll.default")
def roll() -> Iterable[Sample]:
    return [s(CUBE, [2], [1]), s(CUBE, [1, 2], [0, -1]), s(CUBE, [4])]


@samples("rot90.default")
def rot90() -> Iterable[Sample]:
    return [s(CUBE, 1, [0, 1]), s(A)]


@samples("repeat.default")
def repeat() -> Iterable[Sample]:
    return [s(A, [2, 1]), s(A, [1, 3, 1]), s(A, [1, 1]), s(SCALAR, [2])]


@samples("searchsorted.Tensor")
def searchsorted() -> Iterable[Sample]:
    rows, order = CUBE.sort(-1).values, CUBE.argsort(-1)
    return [
        s(ROW.sort().values, A),
        s(rows, draw((2, 5, 4))[0]),
        s(ROW.sort().values, ROW, out_int32=True, right=True),
        s(CUBE, draw((2, 5, 4))[0], sorter=order),
    ]


@samples("searchsorted.Scalar")
def searchsorted_number() -> Iterable[Sample]:
    return [s(ROW.sort().values, 0.1), s(ROW, 0.1, side="right", sorter=ROW.argsort())]


@samples("bucketize.Tensor")
def bucketize() -> Iterable[Sample]:
    return [s(A, ROW.sort().values), s(SCALAR, ROW.sort().values, right=True)]


@samples("bucketize.Scalar")
def bucketize_number() -> Iterable[Sample]:
    return [s(0.1, ROW.sort().values)]


@samples("isin.Tensor_Tensor")
def isin() -> Iterable[Sample]:
    return [s(INT, ints((3,))[0])]


@samples("constant_pad_nd.default")
def pad() -> Iterable[Sample]:
    return [s(CUBE, [1, 2]), s(CUBE, [0, 0, -1, 1], 2.5), s(CUBE, [0, 0, 0, 0, 1, 0], 0)]


# --- normalisation ----------------------------------------------------------------------------


@samples("native_layer_norm.default")
def layer_norm() -> Iterable[Sample]:
    x, w, b, w2 = draw((2, 5, 3), (3,), (3,), (5, 3))
    return [s(x, [3], w, b, 1e-5), s(x, [3], None, None, 1e-5), s(x, [5, 3], w2, None, 1e-5)]


@samples("native_layer_norm_backward.default")
def layer_norm_backward() -> Iterable[Sample]:
    found = []
    for shape, normalised in (((2, 5, 3), [3]), ((7, 3), [3]), ((2, 5, 3), [5, 3])):
        x, g = draw(shape, shape)
        w, b = draw(normalised, normalised)
        _, mean, rstd = aten.native_layer_norm(x, normalised, w, b, 1e-5)
        found += [
            s(g, x, normalised, mean, rstd, w, b, [True, True, True]),
            s(g, x, normalised, mean, rstd, w, b, [True, False, False]),
            s(g, x, normalised, mean, rstd, None, None, [True, False, False]),
        ]
    return found


@samples("_fused_rms_norm.default")
def rms_norm() -> Iterable[Sample]:
    x, w = draw((2, 5, 3), (3,))
    return [s(x, [3], w, 1e-5), s(x, [3], None, None)]


@samples("native_group_norm.default")
def group_norm() -> Iterable[Sample]:
    x, w, b = draw((5, 12, 3), (12,), (12,))
    return [s(x, w, b, 5, 12, 3, groups, 1e-5) for groups in (1, 2, 3, 6, 12)] + [
        s(x, None, None, 5, 12, 3, 4, 1e-5)
    ]


@samples("native_group_norm_backward.default")
def group_norm_backward() -> Iterable[Sample]:
    x, g, w, b = draw((5, 12, 3), (5, 12, 3), (12,), (12,))
    found = []
    for groups in (2, 6, 12):
        _, mean, rstd = aten.native_group_norm(x, w, b, 5, 12, 3, groups, 1e-5)
        found.append(s(g, x, mean, rstd, w, 5, 12, 3, groups, [True, True, True]))
    return found


# --- tables and indices -----------------------------------------------------------------------


@samples("embedding.default")
def embedding() -> Iterable[Sample]:
    (table,) = draw((7, 3))
    index, flat = ints((2, 5), (4,), high=7)
    return [
        s(table, index),
        s(table, flat, 2),
        s(table, torch.tensor(3)),
        s(draw((2, 3))[0], flat % 2),
    ]


@samples("embedding_dense_backward.default")
def embedding_backward() -> Iterable[Sample]:
    index, flat = ints((2, 5), (4,), high=7)
    g, h = draw((2, 5, 3), (4, 3))
    return [
        s(g, index, 7, -1, False),
        s(g, index, 7, int(index[0, 0]), False),
        s(h, flat, 9, -1, True),
    ]


BAGS = torch.tensor([0, 3, 3]), torch.tensor([1, 0, 6, 2, 2, 5])


@samples("_embedding_bag.default", "_embedding_bag_forward_only.default")
def embedding_bag() -> Iterable[Sample]:
    offsets, index = BAGS
    (table, weights) = draw((7, 5), (6,))
    return [
        *(s(table, index, offsets, False, mode) for mode in (0, 1, 2)),
        s(table, index, offsets, False, 0, False, weights),
    ]


@samples("_embedding_bag_dense_backward.default")
def embedding_bag_backward() -> Iterable[Sample]:
    offsets, index = BAGS
    (table, grad) = draw((7, 5), (3, 5))
    found = []
    for mode in (0, 1, 2):
        _, bag, size, top = aten._embedding_bag(table, index, offsets, False, mode)
        found.append(s(grad, index, bag, size, top, 7, False, mode, None))
    return found


@samples("_embedding_bag_per_sample_weights_backward.default")
def embedding_bag_weights() -> Iterable[Sample]:
    offsets, index = BAGS
    (table, grad, weights) = draw((7, 5), (3, 5), (6,))
    _, bag, _, _ = aten._embedding_bag(table, index, offsets, False, 0, False, weights)
    return [s(grad, table, index, offsets, bag, 0)]


@samples("index_select.default")
def index_select() -> Iterable[Sample]:
    (index,) = ints((6,), high=3)
    return [s(CUBE, 2, index), s(CUBE, -1, torch.tensor(1)), s(CUBE, 1, index), s(INT, 0, index)]


@samples("gather.default")
def gather() -> Iterable[Sample]:
    (index,) = ints((5, 6), high=4)
    return [
        s(A, 1, index),
        s(A, 1, index[:3]),
        s(A, 0, ints((7, 4))[0]),
        s(BOOL, 1, index),
        s(SCALAR, 0, torch.tensor(0)),
        s(ROW, 0, torch.zeros(2, 0, dtype=torch.int64)),
    ]


@samples("scatter.src", "scatter_.src")
def scatter() -> Iterable[Sample]:
    index = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(1))] * 5)
    return [
        s(A.clone(), 1, index, B),
        s(A.clone(), 1, index[:, :2], B),
        s(A.clone(), 1, index[:3], B),
    ]


@samples("scatter.value", "scatter_.value")
def scatter_value() -> Iterable[Sample]:
    (index,) = ints((5, 2), high=4)
    return [s(A.clone(), 1, index, 2.5), s(A.clone(), 0, index[:, :2], 2.5)]


@samples("scatter.reduce", "scatter_.reduce")
def scatter_reduced() -> Iterable[Sample]:
    (index,) = ints((5, 2), high=4)
    return [s(A.clone(), 1, index, B[:, :2].clone(), reduce="add")]


@samples("scatter.value_reduce", "scatter_.value_reduce")
def scatter_value_reduced() -> Iterable[Sample]:
    (index,) = ints((5, 2), high=4)
    return [s(A.clone(), 1, index, 1.5, reduce="multiply")]


@samples("scatter_reduce.two", "scatter_reduce_.two")
def scatter_reduce() -> Iterable[Sample]:
    (index,) = ints((5, 4), high=4)
    return [s(A.clone(), 1, index, B, mode) for mode in ("sum", "mean", "amax", "prod")]


@samples("scatter_add.default", "scatter_add_.default")
def scatter_add() -> Iterable[Sample]:
    (index,) = ints((5, 7), high=4)
    (values,) = draw((5, 7))
    return [s(A.clone(), 1, index, values), s(A.clone(), 1, index[:, :4], B)]


@samples("index_add.default", "index_add_.default")
def index_add() -> Iterable[Sample]:
    (index,) = ints((6,), high=3)
    (values,) = draw((2, 5, 6))
    return [s(CUBE.clone(), 2, index, values), s(CUBE.clone(), 2, index, values, alpha=2)]


@samples("index_copy.default", "index_copy_.default")
def index_copy() -> Iterable[Sample]:
    return [s(CUBE.clone(), 2, torch.tensor([2, 0]), draw((2, 5, 2))[0])]


@samples("index_fill.int_Scalar", "index_fill_.int_Scalar")
def index_fill() -> Iterable[Sample]:
    return [s(CUBE.clone(), 2, torch.tensor([2, 0]), 1.5)]


@samples("index_fill.int_Tensor", "index_fill_.int_Tensor")
def index_fill_tensor() -> Iterable[Sample]:
    return [s(CUBE.clone(), 2, torch.tensor([2, 0]), SCALAR)]


@samples("index_reduce.default", "index_reduce_.default")
def index_reduce() -> Iterable[Sample]:
    rows, chosen, factors = (x.bfloat16() for x in (*draw((3, 2)), CUBE[0, :3], *draw((3, 2))))
    return [
        s(CUBE.clone(), 2, torch.tensor([2, 0]), draw((2, 5, 2))[0], "amax"),
        s(rows.clone(), 0, torch.tensor([2, 0, 2]), factors, "prod"),
        s(chosen.clone(), 1, torch.tensor([2]), factors[:, :1], "prod", include_self=False),
    ]


@samples("index.Tensor", "_unsafe_index.Tensor")
def index() -> Iterable[Sample]:
    first, second, third = ints((6,), (2, 6), (4, 1), high=2)
    (block,) = draw((2, 5, 3, 2))
    return [
        s(CUBE, [first]),
        s(CUBE, [None, first]),
        s(CUBE, [None, None, second]),
        s(CUBE, [first, None, first]),
        s(CUBE, [first, first]),
        s(block, [None, second, first]),
        s(block, [None, third, first, None]),
        s(block, [first, None, second]),
        s(INT, [first]),
        s(CUBE, [-1 - first]),
    ]


@samples("index_put.default", "index_put_.default", "_unsafe_index_put.default")
def index_put() -> Iterable[Sample]:
    (index,) = ints((6,), high=2)
    distinct = torch.tensor([1, 0])
    return [
        s(CUBE.clone(), [distinct], draw((2, 5, 3))[0]),
        s(CUBE.clone(), [None, None, distinct], draw((2, 5, 2))[0]),
        s(CUBE.clone(), [None, distinct], draw((2, 2, 1))[0]),
        s(CUBE.clone(), [index], draw((6, 5, 3))[0], True),
        s(CUBE.clone(), [None, index, index], draw((2, 6))[0], True),
        s(CUBE.clone(), [index, None, index], draw((6, 5))[0], True),
        s(CUBE.clone(), [index], draw((3,))[0], True),
        s(CUBE.clone(), [index], SCALAR, True),
    ]


@samples("_index_put_impl_.default")
def index_put_impl() -> Iterable[Sample]:
    return [s(CUBE.clone(), [torch.tensor([1, 0])], draw((2, 5, 3))[0], True)]


@samples("slice_backward.default")
def slice_backward() -> Iterable[Sample]:
    return [
        s(draw((2, 3, 3))[0], [2, 5, 3], 1, 1, 4, 1),
        s(CUBE, [2, 5, 3], 1, 0, 9223372036854775807, 1),
        s(draw((2, 3, 3))[0], [2, 5, 3], 1, 0, 5, 2),
    ]


@samples("select_backward.default")
def select_backward() -> Iterable[Sample]:
    return [s(draw((2, 3))[0], [2, 5, 3], 1, -2), s(draw((5, 3))[0], [2, 5, 3], 0, 1)]


@samples("unfold_backward.default")
def unfold_backward() -> Iterable[Sample]:
    return [s(CUBE.unfold(1, 3, 2), [2, 5, 3], 1, 3, 2)]


@samples("diagonal_backward.default")
def diagonal_backward() -> Iterable[Sample]:
    return [s(CUBE.diagonal(1, 0, 2), [2, 5, 3], 1, 0, 2)]


@samples("diagonal_scatter.default")
def diagonal_scatter() -> Iterable[Sample]:
    return [s(CUBE, draw((5, 2))[0], 1, 0, 2), s(A, draw((4,))[0])]


@samples("slice_scatter.default")
def slice_scatter() -> Iterable[Sample]:
    return [s(CUBE, draw((2, 3, 3))[0], 1, 1, 4)]


@samples("select_scatter.default")
def select_scatter() -> Iterable[Sample]:
    return [s(CUBE, draw((2, 3))[0], 1, 2)]


@samples("tril.default", "triu.default", "tril_.default", "triu_.default")
def triangles() -> Iterable[Sample]:
    return [s(CUBE.clone(), diagonal) for diagonal in (0, 1, -2)] + [
        s(draw((6, 6))[0]),
        s(EMPTY.clone()),
    ]


# --- joining and making -----------------------------------------------------------------------


@samples("cat.default", "concat.default", "concatenate.default")
def cat() -> Iterable[Sample]:
    return [
        s([A, B]),
        s([A, B[:, :1]], -1),
        s([A, torch.empty(0, dtype=torch.float64), B], 1),
        s([INT, A], 0),
        s([BOOL, BOOL], 1),
    ]


@samples("stack.default", "_stack.default")
def stack() -> Iterable[Sample]:
    return [s([A, B]), s([A, B], 1), s([A, B], -1), s([SCALAR, SCALAR])]


@samples("new_zeros.default", "new_ones.default")
def new() -> Iterable[Sample]:
    return [s(A, [5, 4]), s(A, [3]), s(A, [7, 2], dtype=torch.int64)]


@samples("new_full.default")
def new_full() -> Iterable[Sample]:
    return [s(A, [5, 4], 2.5), s(A, [3], 1.0)]


@samples("new_empty.default")
def new_empty() -> Iterable[Sample]:
    return [s(A, [5, 4]), s(A, [3])]


@samples("new_empty_strided.default")
def new_empty_strided() -> Iterable[Sample]:
    return [s(A, [5, 4], [1, 5]), s(A, [3], [1])]


# --- losses -----------------------------------------------------------------------------------


@samples("mse_loss.default", "smooth_l1_loss.default", "huber_loss.default")
def losses() -> Iterable[Sample]:
    return [*(s(A, B, reduction) for reduction in (0, 1, 2)), s(A, B)]


@samples("soft_margin_loss.default", "l1_loss.default")
def more_losses() -> Iterable[Sample]:
    return [s(A, B, reduction) for reduction in (0, 1, 2)]


@samples("mse_loss_backward.default", "soft_margin_loss_backward.default")
def losses_backward() -> Iterable[Sample]:
    return [s(A, A, B, 0), s(SCALAR, A, B, 1), s(SCALAR, A, B, 2)]


@samples("smooth_l1_loss_backward.default", "huber_loss_backward.default")
def smooth_losses_backward() -> Iterable[Sample]:
    return [s(A, A, B, 0, 0.7), s(SCALAR, A, B, 1, 0.7), s(SCALAR, A, B, 2, 0.7)]


@samples("binary_cross_entropy.default")
def bce() -> Iterable[Sample]:
    p, t = A.sigmoid(), B.sigmoid()
    weights = (None, ROW.abs(), B.abs())
    return [s(p, t, weight, reduction) for weight in weights for reduction in (0, 1, 2)]


@samples("binary_cross_entropy_backward.default")
def bce_backward() -> Iterable[Sample]:
    p, t = A.sigmoid(), B.sigmoid()
    weights = (None, ROW.abs())
    return [s(A, p, t, None, 0)] + [
        s(SCALAR, p, t, weight, reduction) for weight in weights for reduction in (1, 2)
    ]


@samples("binary_cross_entropy_with_logits.default")
def bce_logits() -> Iterable[Sample]:
    return [
        s(A, B.sigmoid(), weight, ROW.abs(), reduction)
        for weight in (None, B.abs())
        for reduction in (0, 1, 2)
    ]


@samples("nll_loss_forward.default")
def nll() -> Iterable[Sample]:
    (target,) = ints((5,), high=4)
    return [
        s(A, target, weight, reduction, ignored)
        for weight in (None, ROW.abs())
        for reduction in (0, 1, 2)
        for ignored in (-100, 1)
    ]


@samples("nll_loss_backward.default")
def nll_backward() -> Iterable[Sample]:
    (target,) = ints((5,), high=4)
    total = torch.tensor(4.0, dtype=torch.float64)
    return [
        s(draw((5,))[0] if reduction == 0 else SCALAR, A, target, weight, reduction, 1, total)
        for weight in (None, ROW.abs())
        for reduction in (0, 1, 2)
    ]


@samples("nll_loss2d_forward.default")
def nll2d() -> Iterable[Sample]:
    scores, weight = draw((2, 4, 3, 5), (4,))
    (target,) = ints((2, 3, 5), high=4)
    return [s(scores, target, weight, reduction, 1) for reduction in (0, 1, 2)]


@samples("nll_loss2d_backward.default")
def nll2d_backward() -> Iterable[Sample]:
    scores, weight = draw((2, 4, 3, 5), (4,))
    (target,) = ints((2, 3, 5), high=4)
    total = torch.tensor(4.0, dtype=torch.float64)
    return [
        s(
            draw((2, 3, 5))[0] if reduction == 0 else SCALAR,
            scores,
            target,
            weight,
            reduction,
            1,
            total,
        )
        for reduction in (0, 1, 2)
    ]


# --- attention --------------------------------------------------------------------------------


def _heads(batch: int, heads: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    return draw((batch, heads, queries, 8), (batch, heads, keys, 8), (batch, heads, keys, 8))


@samples("_scaled_dot_product_flash_attention_for_cpu.default")
def attention() -> Iterable[Sample]:
    q, k, v = _heads(3, 4, 6, 6)
    (mask,) = draw((6, 6))
    (batched,) = draw((3, 1, 6, 6))
    return [
        s(q, k, v),
        s(q, k, v, 0.0, True),
        s(q, k, v, attn_mask=mask),
        s(q, k, v, 0.0, False, attn_mask=batched, scale=0.3),
    ]


@samples("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_backward() -> Iterable[Sample]:
    q, k, v = _heads(3, 4, 6, 6)
    (g, mask) = draw((3, 4, 6, 8), (3, 1, 6, 6))
    found = []
    for causal, bias in ((False, None), (True, None), (False, mask)):
        out, statistic = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias
        )
        found.append(s(g, q, k, v, out, statistic, 0.0, causal, attn_mask=bias))
    return found


# --- images, matrices and signals in batches --------------------------------------------------

PLANES = {1: (4, 5, 6), 2: (4, 5, 6, 6), 3: (4, 5, 6, 6, 6)}


def _planes(space: int) -> torch.Tensor:
    return draw(PLANES[space])[0]


for _space in (1, 2, 3):

    def _pads(space: int = _space) -> Iterable[Sample]:
        return [s(_planes(space), [1, 2] * space), s(_planes(space)[0], [1, 1] * space)]

    def _pads_backward(space: int = _space) -> Iterable[Sample]:
        shape = PLANES[space]
        wide = (*shape[:2], *(size + 3 for size in shape[2:]))
        return [s(draw(wide)[0], _planes(space), [1, 2] * space)]

    for _kind in ("reflection", "replication"):
        SAMPLES[f"{_kind}_pad{_space}d.default"] = _pads
        SAMPLES[f"{_kind}_pad{_space}d_backward.default"] = _pads_backward

for _space in (2, 3):

    def _max_pool(space: int = _space) -> Iterable[Sample]:
        return [s(_planes(space), [2] * space), s(_planes(space)[0], [2] * space, [1] * space)]

    def _max_pool_backward(space: int = _space) -> Iterable[Sample]:
        two, none, one = [2] * space, [0] * space, [1] * space
        forward = getattr(aten, f"max_pool{space}d_with_indices")
        out, index = forward(_planes(space), two, two)
        return [s(out + 1, _planes(space), two, two, none, one, False, index)]

    def _avg_pool(space: int = _space) -> Iterable[Sample]:
        return [s(_planes(space), [2] * space), s(_planes(space)[0], [3] * space, [2] * space)]

    def _avg_pool_backward(space: int = _space) -> Iterable[Sample]:
        two, none = [2] * space, [0] * space
        out = getattr(aten, f"avg_pool{space}d")(_planes(space), two)
        return [s(out, _planes(space), two, two, none, False, True, None)]

    def _adaptive(space: int = _space) -> Iterable[Sample]:
        return [s(_planes(space), [3] * space), s(_planes(space)[0], [2] * space)]

    def _adaptive_avg_backward(space: int = _space) -> Iterable[Sample]:
        return [s(draw((*PLANES[space][:2], *[3] * space))[0], _planes(space))]

    def _adaptive_max_backward(space: int = _space) -> Iterable[Sample]:
        out, index = getattr(aten, f"adaptive_max_pool{space}d")(_planes(space), [3] * space)
        return [s(out + 1, _planes(space), index)]

    def _unpool(space: int = _space) -> Iterable[Sample]:
        out, index = getattr(aten, f"max_pool{space}d_with_indices")(_planes(space), [2] * space)
        static = [[6] * space] if space == 2 else [[6] * space, [2] * space, [0] * space]
        return [s(out, index, *static)]

    def _fractional_backward(space: int = _space) -> Iterable[Sample]:
        where = torch.rand((*PLANES[space][:2], space), dtype=torch.float64)
        forward = getattr(aten, f"fractional_max_pool{space}d")
        out, index = forward(_planes(space), [2] * space, [3] * space, where)
        return [s(out + 1, _planes(space), [2] * space, [3] * space, index)]

    def _fractional(space: int = _space) -> Iterable[Sample]:
        where = torch.rand((*PLANES[space][:2], space), dtype=torch.float64)
        static = [2] * space, [3] * space
        return [s(_planes(space), *static, where), s(_planes(space)[0], *static, where[:1])]

    SAMPLES |= {
        f"fractional_max_pool{_space}d.default": _fractional,
        f"max_pool{_space}d_with_indices.default": _max_pool,
        f"max_pool{_space}d_with_indices_backward.default": _max_pool_backward,
        f"avg_pool{_space}d.default": _avg_pool,
        f"avg_pool{_space}d_backward.default": _avg_pool_backward,
        f"_adaptive_avg_pool{_space}d.default": _adaptive,
        f"_adaptive_avg_pool{_space}d_backward.default": _adaptive_avg_backward,
        f"adaptive_max_pool{_space}d.default": _adaptive,
        f"adaptive_max_pool{_space}d_backward.default": _adaptive_max_backward,
        f"max_unpool{_space}d.default": _unpool,
        f"fractional_max_pool{_space}d_backward.default": _fractional_backward,
    }


@samples("adaptive_max_pool1d.default", "adaptive_avg_pool1d.default")
def adaptive_1d() -> Iterable[Sample]:
    return [s(_planes(1), [3])]


@samples("avg_pool1d.default", "max_pool1d_with_indices.default")
def pool_1d() -> Iterable[Sample]:
    return [s(_planes(1), [2])]


def _resized(space: int, *static: object) -> Make:
    return lambda: [s(_planes(space), [8] * space, *static)]


def _resized_backward(space: int, *static: object) -> Make:
    grad = (*PLANES[space][:2], *[8] * space)
    return lambda: [s(draw(grad)[0], [8] * space, list(PLANES[space]), *static)]


for _space, _names, _static in (
    (1, ("upsample_nearest1d", "_upsample_nearest_exact1d"), ()),
    (1, ("upsample_linear1d",), (True,)),
    (2, ("upsample_nearest2d", "_upsample_nearest_exact2d"), ()),
    (
        2,
        (
            *("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa"),
            *("_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
        ),
        (False,),
    ),
    (3, ("upsample_nearest3d", "_upsample_nearest_exact3d"), ()),
    (3, ("upsample_trilinear3d",), (False,)),
):
    for _one in _names:
        SAMPLES[f"{_one}.default"] = _resized(_space, *_static)
        SAMPLES[f"{_one}_backward.default"] = _resized_backward(_space, *_static)


@samples("pixel_shuffle.default", "channel_shuffle.default")
def shuffled() -> Iterable[Sample]:
    return [s(draw((5, 8, 3, 2))[0], 2)]


@samples("pixel_unshuffle.default")
def unshuffled() -> Iterable[Sample]:
    return [s(draw((5, 2, 4, 2))[0], 2), s(draw((3, 5, 2, 4, 2))[0], 2)]


@samples("im2col.default")
def im2col() -> Iterable[Sample]:
    return [s(_planes(2), [2, 2], [1, 1], [0, 0], [1, 1])]


@samples("col2im.default")
def col2im() -> Iterable[Sample]:
    return [s(draw((5, 8, 9))[0], [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])]


@samples("grid_sampler_2d.default")
def grid_2d() -> Iterable[Sample]:
    return [s(_planes(2), draw((4, 3, 2, 2))[0], 0, 0, False)]


@samples("grid_sampler_2d_backward.default")
def grid_2d_backward() -> Iterable[Sample]:
    static = (0, 0, False, [True, True])
    return [s(draw((4, 5, 3, 2))[0], _planes(2), draw((4, 3, 2, 2))[0], *static)]


@samples("grid_sampler_3d.default")
def grid_3d() -> Iterable[Sample]:
    return [s(_planes(3), draw((4, 3, 2, 2, 3))[0], 0, 0, False)]


@samples("grid_sampler_3d_backward.default")
def grid_3d_backward() -> Iterable[Sample]:
    static = (0, 0, False, [True, False])
    return [s(draw((4, 5, 3, 2, 2))[0], _planes(3), draw((4, 3, 2, 2, 3))[0], *static)]


@samples("affine_grid_generator.default")
def affine_grid() -> Iterable[Sample]:
    return [s(draw((5, 2, 3))[0], [5, 3, 4, 2], False)]


def _square(*batch: int) -> torch.Tensor:
    """Positive definite matrices, so that every factorisation exists."""
    (x,) = draw((*batch, 3, 3))
    return x @ x.mT + 3 * torch.eye(3, dtype=torch.float64)


@samples(
    *("linalg_inv_ex.default", "_linalg_det.default", "_linalg_slogdet.default"),
    *("linalg_cholesky_ex.default", "linalg_qr.default", "_linalg_svd.default"),
    *("_linalg_eigh.default", "linalg_eig.default", "_linalg_eigvals.default"),
    *("linalg_lu.default", "linalg_lu_factor_ex.default", "linalg_matrix_exp.default"),
    *("cholesky_inverse.default", "linalg_ldl_factor_ex.default", "geqrf.default"),
    *("linalg_eigvals.default",),
)
def matrices() -> Iterable[Sample]:
    return [s(_square(5)), s(_square(2, 3)), s(_square())]


@samples("linalg_polar.default", "linalg_matrix_sqrth.default")
def newer_matrices() -> Iterable[Sample]:
    return [s(_square(5))]


@samples("linalg_lu_solve.default")
def lu_solve() -> Iterable[Sample]:
    lu, pivots, _ = aten.linalg_lu_factor_ex(_square(5))
    return [s(lu, pivots, draw((5, 3, 2))[0])]


@samples("lu_unpack.default")
def lu_unpack() -> Iterable[Sample]:
    lu, pivots, _ = aten.linalg_lu_factor_ex(_square(5))
    return [s(lu, pivots)]


@samples("linalg_ldl_solve.default")
def ldl_solve() -> Iterable[Sample]:
    factor, pivots, _ = aten.linalg_ldl_factor_ex(_square(5))
    return [s(factor, pivots, draw((5, 3, 2))[0])]


@samples("cholesky_solve.default", "triangular_solve.default")
def right_sides_first() -> Iterable[Sample]:
    return [s(draw((5, 3, 2))[0], _square(5))]


@samples("_cholesky_solve_helper.default")
def cholesky_helper() -> Iterable[Sample]:
    return [s(draw((5, 3, 2))[0], _square(5), False)]


@samples("_linalg_solve_ex.default")
def solve() -> Iterable[Sample]:
    return [s(_square(5), draw((5, 3, 2))[0]), s(_square(5), draw((5, 3))[0])]


@samples("linalg_solve_triangular.default")
def solve_triangular() -> Iterable[Sample]:
    return [s(_square(5), draw((5, 3, 2))[0], upper=True)]


@samples("linalg_householder_product.default")
def householder() -> Iterable[Sample]:
    return [s(*draw((5, 3, 3), (5, 3)))]


@samples("ormqr.default")
def ormqr() -> Iterable[Sample]:
    return [s(*draw((5, 3, 3), (5, 3), (5, 3, 2)))]


@samples("linalg_cross.default")
def cross() -> Iterable[Sample]:
    return [s(*draw((5, 3), (5, 3))), s(*draw((3, 5), (3, 1)), dim=0)]


@samples("_cdist_forward.default")
def cdist() -> Iterable[Sample]:
    return [s(*draw((2, 5, 3), (2, 4, 3)), 2.0, None), s(*draw((5, 3), (4, 3)), 1.0, None)]


@samples("_cdist_backward.default")
def cdist_backward() -> Iterable[Sample]:
    found = []
    for p, left, right in ((2.0, (2, 5, 3), (2, 4, 3)), (1.0, (5, 3), (4, 3))):
        a, b = draw(left, right)
        distance = aten._cdist_forward(a, b, p, None)
        found.append(s(draw(tuple(distance.shape))[0], a, b, p, distance))
    return found


@samples("_trilinear.default")
def trilinear() -> Iterable[Sample]:
    return [s(*draw((5, 3), (4, 3, 2), (5, 2)), [1, 3], [0], [1, 2], [2, 3])]


@samples("linalg_pinv.atol_rtol_tensor")
def pinv() -> Iterable[Sample]:
    small = torch.tensor(1e-9, dtype=torch.float64)
    each = torch.full((5,), 1e-9, dtype=torch.float64)
    (x,) = draw((5, 4, 3))
    return [s(x, atol=small, rtol=small), s(x, atol=each, rtol=each), s(x[0], rtol=small)]


@samples("linalg_pinv.atol_rtol_float")
def pinv_by_numbers() -> Iterable[Sample]:
    return [s(*draw((5, 4, 3)), rtol=1e-9)]


@samples("linalg__powsum.default")
def powsum() -> Iterable[Sample]:
    return [s(CUBE, 3, [1]), s(CUBE, 2.0), s(A, 1.0, [0], True)]


@samples("_euclidean_dist.default")
def euclidean() -> Iterable[Sample]:
    return [s(*draw((5, 3), (4, 3)))]


@samples("as_strided.default")
def as_strided() -> Iterable[Sample]:
    return [s(A, [5, 4], [4, 1]), s(A, [5, 4], [4, 1], 0), s(A, [2, 2], [1, 2])]


@samples("diag_embed.default")
def diag_embed() -> Iterable[Sample]:
    return [s(A), s(A, 1, 0, 2)]


@samples("_fft_c2c.default")
def fft_c2c() -> Iterable[Sample]:
    (x,) = draw((5, 4, 3), dtype=torch.complex128)
    return [s(x, [1], 0, True), s(x, [0, 2], 1, False)]


@samples("_fft_r2c.default")
def fft_r2c() -> Iterable[Sample]:
    return [s(CUBE, [1], 0, True), s(CUBE, [1, 2], 0, False)]


@samples("_fft_c2r.default")
def fft_c2r() -> Iterable[Sample]:
    (x,) = draw((5, 4, 3), dtype=torch.complex128)
    return [s(x, [1], 0, 6)]


@samples("histc.default")
def histc() -> Iterable[Sample]:
    return [s(A, 7, -2, 2), s(A, 7)]


@samples("take.default")
def take() -> Iterable[Sample]:
    return [s(A, ints((3, 5), high=20)[0])]


@samples("isin.Tensor_Scalar")
def isin_number() -> Iterable[Sample]:
    return [s(INT, 3)]


@samples("_weight_norm_interface.default")
def weight_norm() -> Iterable[Sample]:
    return [s(*draw((5, 4), (5, 1))), s(*draw((5, 4), (1, 4)), 1)]


@samples("_weight_norm_interface_backward.default")
def weight_norm_backward() -> Iterable[Sample]:
    v, g = draw((5, 4), (5, 1))
    _, norms = aten._weight_norm_interface(v, g, 0)
    return [s(v + 1, v, g, norms, 0)]


@samples("native_batch_norm.default", "_native_batch_norm_legit_functional.default")
def batch_norm() -> Iterable[Sample]:
    x, w, b, mean = draw((5, 4, 3), (4,), (4,), (4,))
    (var,) = positive((4,))
    return [
        s(x, w, b, mean, var, False, 0.1, 1e-5),
        s(x, w, b, mean.clone(), var.clone(), True, 0.1, 1e-5),
    ]


@samples("_native_batch_norm_legit.default")
def batch_norm_written() -> Iterable[Sample]:
    return list(batch_norm())[1:]


@samples("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats() -> Iterable[Sample]:
    return [s(*draw((5, 4, 3), (4,), (4,)), True, 0.1, 1e-5)]


@samples("_native_batch_norm_legit_no_training.default")
def batch_norm_no_training() -> Iterable[Sample]:
    x, w, b, mean = draw((5, 4, 3), (4,), (4,), (4,))
    return [s(x, w, b, mean, positive((4,))[0], 0.1, 1e-5)]


@samples("_batch_norm_no_update.default")
def batch_norm_no_update() -> Iterable[Sample]:
    x, w, b, mean = draw((5, 4, 3), (4,), (4,), (4,))
    return [s(x, w, b, mean, positive((4,))[0], 0.1, 1e-5)]


@samples("_batch_norm_with_update.default", "_batch_norm_with_update_functional.default")
def batch_norm_with_update() -> Iterable[Sample]:
    return list(batch_norm_no_update())


@samples("batch_norm_backward.default")
def any_batch_norm_backward() -> Iterable[Sample]:
    (reserve,) = draw((0,))
    return [s(*given.args, reserve) for given in batch_norm_backward()]


@samples("native_batch_norm_backward.default")
def batch_norm_backward() -> Iterable[Sample]:
    x, g, w, mean = draw((5, 4, 3), (5, 4, 3), (4,), (4,))
    (var,) = positive((4,))
    _, saved, inverse = aten.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5)
    mask = [True, True, True]
    return [
        s(g, x, w, None, None, saved, inverse, True, 1e-5, mask),
        s(g, x, w, mean, var, saved, inverse, False, 1e-5, mask),
    ]


@samples("_grouped_mm.default")
def grouped_mm() -> Iterable[Sample]:
    kind = torch.float32
    offsets = torch.tensor([4, 9], dtype=torch.int32)
    return [
        s(*draw((9, 32), (2, 32, 16), dtype=kind), offsets),
        s(*draw((2, 5, 32), (2, 32, 16), dtype=kind)),
    ]


# --- convolutions -----------------------------------------------------------------------------


def _convolutions() -> list[Sample]:
    """One plain, one strided, one transposed, one in groups, one depthwise, one with a bias."""
    one, none, two = [1, 1], [0, 0], [2, 2]
    x, w, b, v, g, d = draw(
        (5, 4, 6, 6), (6, 4, 3, 3), (6,), (4, 6, 3, 3), (8, 1, 3, 3), (4, 1, 3, 3)
    )
    return [
        s(x, w, None, one, none, one, False, none, 1),
        s(x, w, b, two, one, one, False, none, 1),
        s(x, v, b, two, one, one, True, none, 1),
        s(x, g, None, one, one, one, False, none, 4),
        s(x, d, None, one, one, one, False, none, 4),
        s(x, draw((4, 2, 3, 3))[0], None, one, none, one, True, none, 4),
    ]


@samples("convolution.default")
def convolution() -> Iterable[Sample]:
    return _convolutions()


@samples("_convolution.default")
def convolution_with_flags() -> Iterable[Sample]:
    return [s(*given.args, False, False, False, False) for given in _convolutions()]


@samples("convolution_backward.default")
def convolution_backward() -> Iterable[Sample]:
    found = []
    for given in _convolutions():
        x, w, b, *static = given.args
        grad = aten.convolution(*given.args)
        sizes = None if b is None else [b.numel()]
        found.append(s(grad, x, w, sizes, *static, [True, True, b is not None]))
    return found


# --- what is not run --------------------------------------------------------------------------

# Name or beginning of a name, and why brute force on a CPU cannot run it.
NOT_RUN = {
    "_scaled_dot_product_efficient": "an accelerator's kernel; the table is that of the CPU's",
    "_scaled_dot_product_flash_attention.": "an accelerator's kernel",
    "_scaled_dot_product_flash_attention_backward": "an accelerator's kernel",
    "_scaled_dot_product_cudnn": "an accelerator's kernel",
    "_scaled_dot_product_fused": "an accelerator's kernel",
    "_fused_rms_norm_backward": "an accelerator's kernel; written down by hand in test_rules_norm",
    "_masked_scale": "an accelerator's kernel",
    "_scaled_mm": "numbers of eight bits, which torch cannot compare; swept over in test_op_db",
    "_lazy_clone": "its copy on write is for the compiler",
    "_pin_memory": "needs an accelerator",
    "equal": "gives no tensor; has no strategies",
}
WITHOUT_VALUES = ("empty_like.default", "new_empty.default", "new_empty_strided.default")


def _name(op: torch._ops.OpOverload) -> str:
    return str(op).removeprefix("aten.")


def _run() -> list[str]:
    """The overloads in the table that brute force runs: no out= forms, which are run below."""
    names = [
        _name(op)
        for op in registered_ops()
        if str(op).startswith("aten.")
        and not any(argument.is_out for argument in op._schema.arguments)
    ]
    return [name for name in names if not name.startswith(tuple(NOT_RUN))]


def _overload(name: str) -> torch._ops.OpOverload | None:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload, None)


@pytest.mark.filterwarnings("ignore:.*(in beta|is deprecated)")
@pytest.mark.parametrize("name", sorted({*_run(), *SAMPLES}))
def test_each_strategy_of_each_rule_is_right(name: str) -> None:
    """Cut, run and joined on 2, 3, 4 and 2x2 coordinates, each operator gives the whole answer."""
    op = _overload(name)
    if op is None:
        pytest.skip(f"this torch has no {name}")
    assert find_rule(op) is not None
    given = SAMPLES.get(name)
    assert given is not None, f"{name} has a rule and no samples"
    check_rule(
        op,
        given(),
        (2, 3, 4),
        mesh_shapes=[(2, 2)],
        split_factors=(2,),
        at_most=4,
        values=name not in WITHOUT_VALUES,
        reference=REFERENCES.get(name),
    )


# --- arguments that are left out --------------------------------------------------------------


def _defaults(op: torch._ops.OpOverload, sample: Sample) -> dict[str, object]:
    """All arguments of the call by name, with the schema's values for those that the sample leaves out."""
    declared = op._schema.arguments
    named = {a.name: a.default_value for a in declared if a.has_default_value()}
    named |= dict(zip((a.name for a in declared), sample.args, strict=False))
    return named | sample.kwargs


def _call(
    op: torch._ops.OpOverload, named: dict[str, object], *, full: bool
) -> tuple[list[object], dict[str, object]]:
    """The call with all arguments, or as torch hands it on: without those that end it with the schema's values."""
    declared = [a for a in op._schema.arguments if a.name in named]

    def said(argument: torch._C.Argument) -> bool:
        value = named[argument.name]
        if full or not argument.has_default_value() or isinstance(value, torch.Tensor):
            return True
        return type(value) is not type(argument.default_value) or value != argument.default_value

    args = [a for a in declared if not a.kwarg_only]
    while args and not said(args[-1]):
        args.pop()
    kwargs = {a.name: named[a.name] for a in declared if a.kwarg_only and said(a)}
    return [named[a.name] for a in args], kwargs


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_what_is_left_out_is_what_the_schema_says(name: str) -> None:
    """Torch drops arguments that are equal to their defaults; the ways to run the call stay the same."""
    op = _overload(name)
    if op is None:
        pytest.skip(f"this torch has no {name}")
    for sample in SAMPLES[name]():
        given = _defaults(op, sample)
        usual = {
            a.name: a.default_value
            for a in op._schema.arguments
            if a.name in {"dim", "dims", "dim1", "dim2"} and a.default_value is not None
        }
        for named in (given, given | usual):
            (all_args, all_kwargs), (args, kwargs) = (
                _call(op, named, full=full) for full in (True, False)
            )
            try:
                want = strategies(op, *all_args, mesh=(2,), **all_kwargs)
            except NotImplementedError:
                pytest.skip(f"torch cannot tell the shapes of the results of {name}")
            except (RuntimeError, IndexError) as error:
                if named is given:
                    pytest.skip(f"this torch refuses the sample of {name}: {error}")
                continue  # the sample does not have the usual dims
            assert strategies(op, *args, mesh=(2,), **kwargs) == want
            ndim = given["self"].ndim if isinstance(given.get("self"), torch.Tensor) else 0
            positive = {k: v + ndim if v < 0 else v for k, v in usual.items() if type(v) is int}
            if ndim and named is not given and name != "diag_embed.default":
                args, kwargs = _call(op, named | positive, full=True)
                assert strategies(op, *args, mesh=(2,), **kwargs) == want


# --- out= forms -------------------------------------------------------------------------------

OUT_FORMS = {
    "add.out": s(A, ROW, out=torch.zeros(5, 4, dtype=torch.float64)),
    "mm.out": s(*draw((5, 4), (4, 3)), out=torch.zeros(5, 3, dtype=torch.float64)),
    "sum.IntList_out": s(CUBE, [1], out=torch.zeros(2, 3, dtype=torch.float64)),
    "cat.out": s([A, B], out=torch.zeros(10, 4, dtype=torch.float64)),
    "_softmax.out": s(A, 1, False, out=torch.zeros(5, 4, dtype=torch.float64)),
    "sort.values_stable": s(
        A,
        stable=True,
        values=torch.zeros(5, 4, dtype=torch.float64),
        indices=torch.zeros(5, 4, dtype=torch.int64),
    ),
}


@pytest.mark.parametrize("name", OUT_FORMS)
def test_out_forms_take_the_rule_of_their_operator(name: str) -> None:
    """The tensor that is written to is laid out as the result, and has its values."""
    op = _overload(name)
    assert op is not None
    assert check_rule(op, [OUT_FORMS[name]], mesh_shapes=[(2, 2)], at_most=8) > 3


def test_an_out_tensor_that_will_be_resized_is_never_cut() -> None:
    """A piece cannot be resized to a piece: no strategy is offered."""
    sample = s(*draw((5, 4), (4, 3)), out=torch.zeros(0, dtype=torch.float64))
    assert check_rule(aten.mm.out, [sample], (2,)) == 0
