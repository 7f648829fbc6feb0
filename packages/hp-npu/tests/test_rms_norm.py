"""The norm on one device: values, gradients, dtypes, metadata, compilation, and what is refused."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hp_npu import (
    KERNELS,
    KernelArgumentError,
    KernelFallbackWarning,
    KernelUnavailableError,
    rms_norm,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

OP = torch.ops.hp.rms_norm.default
BACKWARD = torch.ops.hp.rms_norm_backward.default
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-12}
FLOATS = list(TOLERANCE)


def sample(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, dims: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight of its last *dims* dims, and a gradient from above; the first two require gradients."""
    generator = torch.Generator().manual_seed(5)

    def draw(size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(kind)

    x = draw(shape, dtype).requires_grad_()
    weight = draw(shape[len(shape) - dims :], weight_dtype).requires_grad_()
    return x, weight, draw(shape, dtype)


def torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What torch gives; it warns of mixed dtypes, which we take in our stride."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        return F.rms_norm(x, weight.shape, weight, eps)


def by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in 64 bits."""
    wide = x.double()
    dims = list(range(-weight.dim(), 0))
    return wide / torch.sqrt((wide**2).mean(dims, keepdim=True) + eps) * weight.double()


# --- against torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_values_gradients_and_dtypes_are_those_of_torch(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """For every pair of dtypes output and both gradients equal `F.rms_norm`'s, in value and dtype."""
    x, weight, dy = sample((3, 5, 8), dtype, weight_dtype)
    tolerance = max(TOLERANCE[dtype], TOLERANCE[weight_dtype])
    y = rms_norm(x, weight, 1e-5)
    reference = torch_norm(x, weight, 1e-5)
    torch.testing.assert_close(y, reference, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(y, (x, weight), dy)
    theirs = torch.autograd.grad(reference, (x, weight), dy)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=60)
@given(
    outer=st.lists(st.integers(0, 4), max_size=3),
    normalised=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    eps=st.sampled_from([0.0, 1e-6, 1e-2]),
)
def test_any_shape_follows_the_formula(
    outer: list[int], normalised: list[int], eps: float
) -> None:
    """No outer dims, empty ones, and several normalised dims give the formula and its gradients."""
    x, weight, dy = sample((*outer, *normalised), torch.float64, torch.float64, len(normalised))
    y = rms_norm(x, weight, eps)
    expected = by_hand(x, weight, eps)
    torch.testing.assert_close(y, expected)
    ours = torch.autograd.grad(y, (x, weight), dy)
    theirs = torch.autograd.grad(expected, (x, weight), dy)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 4)])
def test_empty_tensors_give_empty_results_and_zero_gradients(shape: tuple[int, ...]) -> None:
    """Nothing in gives nothing out; a weight that saw no rows has a gradient of zeros."""
    x, weight, dy = sample(shape, torch.float32, torch.float32)
    y = rms_norm(x, weight)
    assert y.shape == shape
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert dx.shape == shape
    assert torch.equal(dweight, torch.zeros_like(weight))


def test_gradients_pass_gradcheck() -> None:
    """The backward is the derivative of the forward, in 64 bits."""
    x, weight, _ = sample((2, 3, 4), torch.float64, torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, weight))
    x, weight, _ = sample((2, 3, 4), torch.float64, torch.float64, dims=2)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-6), (x, weight))


def test_half_inputs_are_computed_in_32_bits() -> None:
    """Squares that overflow 16 bits do not: the result is the formula's, rounded once."""
    x = torch.full((2, 64), 3e4, dtype=torch.float16)
    weight = torch.linspace(0.5, 2, 64, dtype=torch.float16)
    assert torch.equal(rms_norm(x, weight), by_hand(x, weight, 1e-6).half())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_second_result_is_the_reciprocal_root(dtype: torch.dtype) -> None:
    """The root has the outer dims, ones for the normalised, the arithmetic's dtype, and no gradient."""
    x, weight, _ = sample((3, 4, 5), dtype, dtype, dims=2)
    _, rstd = OP(x, weight, 1e-6)
    assert rstd.shape == (3, 1, 1)
    assert rstd.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    expected = (x.detach().double() ** 2).mean((1, 2), keepdim=True).add(1e-6).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=0)
    assert not rstd.requires_grad


def test_only_wanted_gradients_are_given() -> None:
    """Frozen weight: the input's gradient alone; frozen input: the weight's alone."""
    x, weight, dy = sample((3, 8), torch.float32, torch.float32)
    torch.autograd.backward(rms_norm(x, weight.detach()), dy)
    assert x.grad is not None
    x.grad = None
    torch.autograd.backward(rms_norm(x.detach(), weight), dy)
    assert x.grad is None
    assert weight.grad is not None


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    """Differentiating the gradient raises and names the operator."""
    x, weight, _ = sample((3, 8), torch.float32, torch.float32)
    (dx,) = torch.autograd.grad(rms_norm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(
        NotImplementedError, match=r"rms_norm_backward has no derivative.*plain torch"
    ):
        torch.autograd.backward(dx.sum())


# --- as an operator -----------------------------------------------------------------------------


# The check itself looks at gradients of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_the_operators_keep_torchs_contract(dtype: torch.dtype, layout: str) -> None:
    """Schema, metadata, gradient registration and tracing agree with what runs (`torch.library.opcheck`)."""
    x, weight, dy = sample((3, 4, 8), dtype, dtype)
    if layout == "transposed":
        x = x.detach().transpose(0, 1).requires_grad_()
        dy = dy.transpose(0, 1)
    if layout == "expanded":
        x = x.detach()[:1].expand(3, 4, 8).requires_grad_()
        dy = dy[:1].expand(3, 4, 8)
    torch.library.opcheck(OP, (x, weight, 1e-6))
    _, rstd = OP(x.detach(), weight.detach(), 1e-6)
    torch.library.opcheck(BACKWARD, (dy, x.detach(), weight.detach(), rstd))


def test_results_are_contiguous() -> None:
    """A transposed input gives a contiguous output and gradient, the same as its copy would."""
    x, weight, dy = sample((3, 4, 8), torch.float32, torch.float32)
    turned = x.detach().transpose(0, 1).requires_grad_()
    y = rms_norm(turned, weight)
    assert y.is_contiguous()
    (dx,) = torch.autograd.grad(y, turned, dy.transpose(0, 1))
    assert dx.is_contiguous()
    assert torch.equal(y, rms_norm(turned.detach().contiguous(), weight))


def test_it_compiles_whole_forward_and_backward() -> None:
    """`torch.compile(fullgraph=True)` gives the eager values and gradients, also for changing sizes."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x * 2, weight, policy="fallback") + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x, weight, dy = sample((rows, 8), torch.float32, torch.float32)
        y, expected = compiled(x, weight), block(x, weight)
        torch.testing.assert_close(y, expected)
        ours = torch.autograd.grad(y, (x, weight), dy)
        torch.testing.assert_close(ours, torch.autograd.grad(expected, (x, weight), dy))


def test_a_graph_holds_our_operator_once() -> None:
    """A compiler sees one node of the ``hp`` namespace, not the arithmetic inside."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(rms_norm, fullgraph=True, backend=keep)(torch.ones(2, 8), torch.ones(8))
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("hp.rms_norm" in target for target in targets) == 1


# --- policies and refusals ----------------------------------------------------------------------


def test_policy_error_raises_with_the_reason() -> None:
    """On a CPU there is no vendor kernel: the error says where the tensors are and what to pass."""
    with pytest.raises(
        KernelUnavailableError, match="pass policy='fallback' to run the reference"
    ) as caught:
        rms_norm(torch.ones(2, 8), torch.ones(8), policy="error")
    assert caught.value.kernel == "rms_norm"
    assert caught.value.reason == "its tensors are on cpu, and npu::npu_rms_norm runs on npu"


def test_policy_warn_once_warns_once_and_computes(recwarn: pytest.WarningsRecorder) -> None:
    """Two calls, one warning, at the caller's line; the values are the reference's."""
    x, weight = torch.randn(2, 8), torch.ones(8)
    with warnings.catch_warnings():
        warnings.simplefilter("always", KernelFallbackWarning)
        for _ in range(2):
            assert torch.equal(rms_norm(x, weight, policy="warn_once"), rms_norm(x, weight))
    found = [w for w in recwarn if w.category is KernelFallbackWarning]
    assert len(found) == 1
    assert "rms_norm runs its reference" in str(found[0].message)
    assert found[0].filename == __file__


def test_an_unknown_policy_is_refused() -> None:
    """The error lists the policies."""
    with pytest.raises(
        ValueError, match="policy is 'never'; it is one of error, warn_once, fallback"
    ):
        rms_norm(torch.ones(2, 8), torch.ones(8), policy="never")  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("x", "weight", "says"),
    [
        (
            torch.ones(3, 4),
            torch.ones(3),
            r"weight has shape \(3,\) and x has shape \(3, 4\).*\(3, 4\), \(4,\)",
        ),
        (torch.ones(3, 4), torch.ones(1), r"weight has shape \(1,\)"),
        (torch.ones(4), torch.ones(3, 4), r"must be that of x's last dims.*one of \(4,\)"),
        (torch.ones(3, 4), torch.ones(()), r"weight has shape \(\)"),
        (torch.ones(()), torch.ones(()), r"one of none, since x has no dims"),
        (
            torch.ones(3, 4, dtype=torch.int64),
            torch.ones(4),
            r"x is torch.int64; .*Convert it with .float",
        ),
        (torch.ones(3, 4), torch.ones(4, dtype=torch.bool), r"weight is torch.bool"),
        (torch.ones(3, 4, dtype=torch.complex64), torch.ones(4), r"x is torch.complex64"),
    ],
    ids=str,
)
def test_what_has_no_norm_is_refused(x: Tensor, weight: Tensor, says: str) -> None:
    """Shapes that don't fit and dtypes without a root raise one error, from the function and from the operator."""
    with pytest.raises(KernelArgumentError, match=says):
        rms_norm(x, weight)
    with pytest.raises(KernelArgumentError, match=says):
        OP(x, weight, 1e-6)


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (torch.ones(2, 4), torch.ones(4), None),
        (torch.ones(2, 4).half(), torch.ones(4), None),
        (torch.ones(2, 4).bfloat16(), torch.ones(4).bfloat16(), None),
        (torch.ones(2, 4).double(), torch.ones(4).double(), "x is torch.float64"),
        (torch.ones(2, 4), torch.ones(4).half(), "weight is torch.float16"),
        (torch.ones(2, 4).half(), torch.ones(4).bfloat16(), "weight is torch.bfloat16"),
        (torch.ones([1] * 8 + [4]), torch.ones(4), "x has 9 dims"),
        (torch.ones(0, 4), torch.ones(4), "x is empty"),
    ],
    ids=str,
)
def test_the_vendors_limits_are_known(x: Tensor, weight: Tensor, reason: str | None) -> None:
    """Dtypes, mixed dtypes, dims and empty tensors that the vendor's kernel does not take are told before the call."""
    forward = KERNELS["rms_norm"].constraint(x, weight, 1e-6)
    backward = KERNELS["rms_norm_backward"].constraint(x, x, weight, torch.ones(()))
    for found in (forward, backward):
        assert found is None if reason is None else (found or "").startswith(reason)
