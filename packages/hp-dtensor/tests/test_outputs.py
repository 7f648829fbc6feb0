"""The metadata of results that is said without torch's kernels is what these kernels say."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hp_dtensor.outputs import plain_outputs
from hp_dtensor.rules import TensorMeta
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload

aten = torch.ops.aten
BINARY = [
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.eq.Tensor,
    aten.maximum.default,
    aten.where.self,
]
UNARY = [aten.neg.default, aten.rsqrt.default, aten.sigmoid.default, aten.logical_not.default]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float64]


def outputs(op: OpOverload, args: Sequence[object], tensors: Sequence[torch.Tensor]) -> object:
    """What `plain_outputs` says of *op* on *args*, whose tensors are *tensors*."""

    def run(other: OpOverload, others: Sequence[torch.Tensor]) -> object:
        left = iter(others)

        def fill(value: object) -> object:
            if isinstance(value, list):
                return [fill(item) for item in value]
            return next(left) if isinstance(value, torch.Tensor) else value

        return other(*[fill(value) for value in args])

    return plain_outputs(op, args, run, [TensorMeta.of(tensor) for tensor in tensors])


def _on_a_cpu(value: object) -> object:
    """*value* with tensors of ones that lie in memory as those on the meta device would."""
    if isinstance(value, list):
        return [_on_a_cpu(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).fill_(1)


def _told_by_torch(op: OpOverload, args: Sequence[object]) -> torch.Tensor:
    """The result of the kernel itself. The meta device has another order of dims for some views (``where`` of such)."""
    try:
        result: torch.Tensor = op(*[_on_a_cpu(value) for value in args])
    except RuntimeError:  # no kernel for the dtype
        result = op(*args)
    return result


def agree(op: OpOverload, args: Sequence[object], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the metadata is torch's own; no answer is an answer too."""
    said = outputs(op, args, tensors)
    if said is None:
        return False
    right = _told_by_torch(op, args)
    assert isinstance(said, torch.Tensor)
    assert (said.shape, said.dtype) == (right.shape, right.dtype)
    strides = zip(said.shape, said.stride(), right.stride(), strict=True)
    assert all(size == 1 or one == other for size, one, other in strides), (
        said.stride(),
        right.stride(),
    )
    return True


@st.composite
def tensors(draw: st.DrawFn, count: int) -> list[torch.Tensor]:
    """Tensors that broadcast, with dims in any order in memory."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    out = []
    for _ in range(count):
        own = [size if draw(st.booleans()) or draw(st.booleans()) else 1 for size in shape]
        own = own[draw(st.integers(0, len(own))) :] if draw(st.booleans()) else own
        order = draw(st.permutations(range(len(own))))
        dtype = draw(st.sampled_from(DTYPES))
        made = torch.ones([own[dim] for dim in order], dtype=dtype, device="meta")
        back = sorted(range(len(own)), key=lambda dim: order[dim])
        out.append(made.permute(back) if own else made)
    return out


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_elementwise_operators(data: st.DataObject) -> None:
    """Shapes, dtypes and the order of dims in memory are the kernel's."""
    op = data.draw(st.sampled_from([*BINARY, *UNARY]))
    count = 3 if op is aten.where.self else 2 if op in BINARY else 1
    args = data.draw(tensors(count))
    if op is aten.where.self:
        args[0] = args[0].bool()
    try:
        made = op(*args)
    except RuntimeError:
        return
    answered = agree(op, args, args)
    refused = op is aten.maximum.default and any(arg.is_complex() for arg in args)
    # A bfloat16 beside a complex number without dims: torch names the dtype, and has no kernel for it.
    refused = refused or str(made.dtype) == "torch.bcomplex32"
    assert answered or refused


def test_the_order_of_dims_that_no_argument_decides() -> None:
    """Two dims that no argument has both of are ordered through dims of size one, as the kernel does."""
    args = [torch.ones(1, dtype=torch.bool, device="meta")]
    args += [
        torch.empty_strided(s, d, device="meta")
        for s, d in (((2, 1, 1), (1, 1, 1)), ((1, 1, 1, 2), (1, 2, 1, 1)))
    ]
    assert agree(aten.where.self, args, args)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concatenation(dim: int) -> None:
    """Row-major, whatever the parts are; parts that do not fit are left to torch."""
    parts = [torch.ones(3, 2, 4, device="meta").transpose(0, 1) for _ in range(3)]
    assert agree(aten.cat.default, [parts, dim], parts)
    parts[1] = parts[1][:1, :1, :1]
    assert outputs(aten.cat.default, [parts, dim], parts) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_and_softmax_backward(dtype: torch.dtype) -> None:
    """A mean is like a sum; the backward of a softmax is like the gradient."""
    x = torch.ones(2, 3, 4, dtype=dtype, device="meta")
    assert agree(aten.mean.default, [x], [x])
    assert agree(aten.mean.dim, [x, [1, -1], True], [x])
    assert agree(aten._softmax_backward_data.default, [x, x, -1, dtype], [x, x])
    assert outputs(aten.mm.default, [x, x], [x, x]) is None


@pytest.mark.slow
def test_a_first_step_does_not_import_the_compiler() -> None:
    """What a decoder block is made of, forward and backward, is planned without torch._dynamo."""
    code = """
import sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import hp_dtensor as hp, hp_mesh
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = hp_mesh.init_device_mesh("cpu", (2,))
lay = lambda t, p: hp.distribute_tensor(t, mesh, [p], src_data_rank=None).requires_grad_()
x, w = lay(torch.randn(2, 4, 8), hp.Replicate()), lay(torch.randn(16, 8), hp.Shard(0))
g = lay(torch.ones(8), hp.Replicate())
h = torch.nn.functional.rms_norm(x, (8,), g) @ w.t()
q = h.view(2, 4, 4, 4).transpose(1, 2)
a, b = q.chunk(2, dim=-1)
q = torch.cat([-b, a], dim=-1) * 2 + q
s = torch.softmax(q @ q.transpose(-1, -2) / 3, dim=-1) @ q
torch.nn.functional.silu(s).square().mean().backward()
print("torch._dynamo" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True
    )
    assert ran.stdout.split() == ["False"]
