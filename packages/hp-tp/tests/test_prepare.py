"""Styles of the boundary: inputs, outputs, and a module that stays whole."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.collectives import wait
from hp_mesh.testing import spmd
from hp_tp import (
    BoundaryError,
    ColwiseParallel,
    NoParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    StyleError,
    parallelize_module,
)
from hp_tp.testing import check_plan
from torch import Tensor, nn

R, P, S = Replicate(), Partial(), Shard


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


class Takes(nn.Module):
    """Takes a tensor, an optional one, a named one and a flag."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, pos: Any, flag: bool = True
    ) -> Any:
        assert mask is None
        assert flag is True
        self.seen = (x, pos)
        return x + pos


@spmd(world_size=2, timeout=120)
def test_inputs_by_position_and_name() -> None:
    """Plain or distributed, by position or name, each is moved; None and flags are left alone."""
    mesh, x, p = tp(2), torch.randn(4, 2), torch.randn(4, 2)
    style = PrepareModuleInput(
        input_layouts=(S(0), None),
        desired_input_layouts=(R, None),
        input_kwarg_layouts={"pos": R},
        desired_input_kwarg_layouts={"pos": S(1)},
    )
    module = parallelize_module(Takes(), mesh, style)
    whole = distribute_tensor(x, mesh, [S(0)])
    for args, kwargs in (
        ((whole.to_local(), None), {"pos": p}),
        ((whole, None), {"pos": distribute_tensor(p, mesh, [S(0)])}),
        ((whole,), {"pos": p, "flag": True}),
        ((), {"x": whole, "pos": p}),
    ):
        torch.testing.assert_close(module(*args, **kwargs).full_tensor(), x + p)
        assert [t.placements for t in module.seen] == [(R,), (S(1),)]


@spmd(world_size=2, timeout=120)
def test_local_inputs() -> None:
    """With ``use_local_output`` the module gets plain tensors."""
    mesh, x = tp(2), torch.randn(4, 2)
    style = PrepareModuleInput(input_layouts=S(0), desired_input_layouts=R, use_local_output=True)
    module = parallelize_module(nn.Identity(), mesh, style)
    assert torch.equal(module(distribute_tensor(x, mesh, [S(0)]).to_local()), x)


@spmd(world_size=2, timeout=120)
def test_wrong_inputs() -> None:
    """A kind and a name that do not fit, each with what was found."""
    mesh = tp(2)
    pair = PrepareModuleInput(input_layouts=R, desired_input_layouts=R)
    with pytest.raises(AssertionError, match=r"has layout R, but it is 3 of type int"):
        parallelize_module(nn.Identity(), mesh, pair)(3)
    named = PrepareModuleInput(
        input_kwarg_layouts={"poss": R}, desired_input_kwarg_layouts={"poss": R}
    )
    with pytest.raises(StyleError, match=r"'poss', which is no input of .*Did you mean 'pos'"):
        parallelize_module(Takes(), mesh, named)


def test_layouts_that_do_not_pair() -> None:
    """Lists of different lengths, a missing list and different names."""
    with pytest.raises(
        AssertionError, match="input_layouts and desired_input_layouts should have same length!"
    ):
        PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=R)
    with pytest.raises(
        StyleError, match="input_layouts is given but desired_input_layouts is not"
    ):
        PrepareModuleInput(input_layouts=R)
    with pytest.raises(StyleError, match=r"\['a'\] and .*\['b'\]"):
        PrepareModuleInput(input_kwarg_layouts={"a": R}, desired_input_kwarg_layouts={"b": R})
    with pytest.raises(StyleError, match="both needed"):
        PrepareModuleOutput(output_layouts=None, desired_output_layouts=R)
    with pytest.raises(ValueError, match="same length"):
        PrepareModuleInputOutput(output_layouts=(R,), desired_output_layouts=(R, R))


class Pair(NamedTuple):
    a: object
    b: object


class Gives(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, y: Any) -> Any:
        return self.kind(x, y)


@spmd(world_size=2, timeout=120)
def test_outputs_keep_their_container() -> None:
    """A tuple, a named tuple and a list come back as such, each output moved by its entry."""
    mesh, x = tp(2), torch.randn(4, 2)
    style = PrepareModuleOutput(output_layouts=(P, None), desired_output_layouts=(S(0), None))
    for kind, expected in (
        (lambda a, b: (a, b), tuple),
        (Pair, Pair),
        (lambda a, b: [a, b], list),
    ):
        module = parallelize_module(Gives(kind), mesh, style)
        out = module(x, "text")
        assert type(out) is expected
        rank = mesh.get_local_rank()
        torch.testing.assert_close(out[0], 2 * x[2 * rank : 2 * rank + 2])
        assert out[1] == "text"
    with pytest.raises(BoundaryError, match="returned 3 outputs, but output_layouts has 2"):
        parallelize_module(Gives(lambda a, b: (a, b, a)), mesh, style)(x, x)


@spmd(world_size=2, timeout=120)
def test_one_layout_for_a_nest_of_tensors() -> None:
    """A dict of tensors as the single output or input takes the one layout for each of them."""
    mesh, x = tp(2), torch.randn(4, 2)
    style = PrepareModuleInputOutput(
        input_layouts=(R, None),
        desired_input_layouts=(S(0), None),
        output_layouts=S(0),
        desired_output_layouts=R,
        use_local_input=True,
    )
    module = parallelize_module(Gives(lambda a, b: {"x": a["x"], "n": (a["x"],)}), mesh, style)
    out = module({"x": x}, None)
    assert torch.equal(out["x"], x)
    assert torch.equal(out["n"][0], x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, scale: float) -> Any:
        return self.down(torch.relu(self.up(x) * scale))


@spmd(world_size=2, timeout=120)
def test_around_a_pair_of_layers() -> None:
    """Sequence pieces in and out of a whole MLP, an extra input untouched, with all gradients."""
    plan = {
        "": PrepareModuleInputOutput(
            input_layouts=(S(1), None),
            desired_input_layouts=(R, None),
            output_layouts=P,
            desired_output_layouts=S(1),
        ),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=P),
    }
    check_plan(Inner(), tp(2), plan, torch.randn(2, 4, 8), 0.5, given=[S(1)], output=S(1))


@spmd(world_size=2, timeout=120)
def test_reduce_dtype_of_outputs() -> None:
    """Addends travel in float32 and come out in bfloat16."""
    mesh = tp(2)
    style = PrepareModuleOutput(
        output_layouts=P, desired_output_layouts=R, reduce_dtype=torch.float32
    )
    module = parallelize_module(nn.Identity(), mesh, style)
    addend = torch.tensor([256.0 if mesh.get_local_rank() == 0 else 1.5], dtype=torch.bfloat16)
    assert module(addend).dtype == torch.bfloat16


@pytest.mark.parametrize("desired", [None, S(0), S(1)])
@pytest.mark.parametrize("given", [R, S(1), S(0)])
@spmd(world_size=2, timeout=120)
def test_no_parallel(given: Placement, desired: Any) -> None:
    """Whole parameters, whatever comes in and whatever the module computes with."""
    mesh = tp(2)
    style = NoParallel(desired_input_layout=desired)
    for module in (nn.Linear(8, 4), nn.LayerNorm(8)):
        check_plan(module, mesh, style, torch.randn(2, 4, 8), given=[given], distributed=True)
    laid_out = check_plan(
        nn.Linear(8, 4), mesh, NoParallel(input_layout=given), torch.randn(2, 4, 8), given=[given]
    )
    assert laid_out.weight.placements == (R,)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.offset: Tensor
        self.register_buffer("offset", torch.randn(4))

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        self.rest = (rest, named)
        return x * self.weight + self.offset


@spmd(world_size=2, timeout=120)
def test_no_parallel_keeps_buffers_and_extras() -> None:
    """Buffers become replicas too; other inputs pass; the output goes where it shall."""
    mesh = tp(2)
    module = Counting()
    reference = copy.deepcopy(module)
    parallelize_module(module, mesh, NoParallel(output_layout=S(0), use_local_output=False))
    x = torch.randn(2, 4)
    out = module(x, "extra", flag=3)
    assert module.rest == (("extra",), {"flag": 3})
    assert out.placements == (S(0),)
    torch.testing.assert_close(out.full_tensor(), reference(x))
    assert isinstance(module.offset, DTensor)


@spmd(world_size=2, timeout=120)
def test_whole_between_columns_and_rows() -> None:
    """A module that stays whole between a column- and a row-parallel layer."""
    plan = {
        "0": ColwiseParallel(),
        "1": NoParallel(input_layout=S(-1), output_layout=S(-1)),
        "2": RowwiseParallel(),
    }
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    check_plan(model, tp(2), plan, torch.randn(2, 4))


@spmd(world_size=2, timeout=120)
def test_inputs_beyond_the_layouts() -> None:
    """More inputs by position than layouts are an error, unless others are to be left alone; fewer are none."""

    class Pair(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            return x if y is None else x + y

    mesh, x = tp(2), torch.ones(2, 2)
    one = PrepareModuleInput(input_layouts=S(0), desired_input_layouts=R, use_local_output=True)
    with pytest.raises(
        ValueError, match="module inputs and input_layouts should have same length!"
    ):
        parallelize_module(Pair(), mesh, one)(x, x)
    lenient = PrepareModuleInput(
        input_layouts=S(0), desired_input_layouts=R, use_local_output=True, leave_others=True
    )
    assert parallelize_module(Pair(), mesh, lenient)(x, torch.ones(4, 2)).shape == (4, 2)
    two = PrepareModuleInput(input_layouts=(S(0), R), desired_input_layouts=(R, R))
    assert parallelize_module(Pair(), mesh, two)(x).shape == (4, 2)


def under_way(value: Tensor) -> bool:
    """Whether a collective may still be bringing *value*: nobody has used it yet."""
    piece = value._local_tensor if isinstance(value, DTensor) else value
    return wait(piece) is not piece


class Watches(nn.Module):
    """Notes whether its input is under way, and gives one that is not."""

    def forward(self, x: Tensor) -> Any:
        self.lazy = under_way(x)
        return x.cos()


WHOLE = {"input_layouts": S(0), "desired_input_layouts": R}
INPUTS = [
    PrepareModuleInput(**WHOLE),
    PrepareModuleInput(**WHOLE, use_local_output=True),
    PrepareModuleInputOutput(
        **WHOLE, use_local_input=True, output_layouts=R, desired_output_layouts=R
    ),
    NoParallel(input_layout=S(0)),
]


@pytest.mark.parametrize("number", range(len(INPUTS)))
@spmd(world_size=2, timeout=60)
def test_inputs_come_while_others_work(number: int) -> None:
    """A gathered input waits for its first use, unless it is plain and has a gradient; numbers and gradients are right."""
    mesh, style = tp(2), INPUTS[number]
    module: Any = parallelize_module(Watches(), mesh, style)
    whole = torch.randn(4, 3)
    given = whole.chunk(2)[mesh.get_local_rank()].clone()
    for wants in (False, True):
        given.requires_grad_(wants)
        out = module(given)
        plain = number in {1, 2}
        assert module.lazy is not (plain and wants)
        piece = out.to_local() if isinstance(out, DTensor) else out
        torch.testing.assert_close(piece, whole.cos())
    out.sum().backward()
    assert type(given.grad) is Tensor
    torch.testing.assert_close(given.grad, -given.sin())


@spmd(world_size=2, timeout=60)
def test_outputs_leave_while_others_work() -> None:
    """Scattered sums and gathered pieces, of modules and embeddings: who uses one first waits for it."""
    mesh = tp(2)
    scattered = RowwiseParallel(output_layouts=S(1))
    ids = torch.randint(8, (2, 4))
    for module, style, value in (
        (nn.Embedding(8, 4), scattered, ids),
        (nn.Tanh(), PrepareModuleOutput(output_layouts=P, desired_output_layouts=S(1)), ids),
        (nn.Tanh(), PrepareModuleOutput(output_layouts=S(0), desired_output_layouts=R), ids),
    ):
        laid_out = parallelize_module(module, mesh, style)
        with torch.no_grad():
            out = laid_out(value)
        assert under_way(out)
        assert type(out + 1) is Tensor
        assert not laid_out(value).requires_grad or not under_way(laid_out(value))


@spmd(world_size=2, timeout=120)
def test_what_leaves_a_style_keeps_its_gradient_in_a_compiled_module() -> None:
    """Scattered rows that a compiled function takes: the gradients of the eager one."""
    mesh, x = tp(2), torch.randn(2, 4, 4)
    found = []
    for compiled in (False, True):
        torch.manual_seed(1)
        style = RowwiseParallel(output_layouts=S(1))
        layer: Any = parallelize_module(nn.Linear(8, 4, bias=False), mesh, style)
        after: Any = nn.Tanh()
        if compiled:
            after = torch.compile(after, backend="aot_eager")
        with warnings.catch_warnings():
            # The compiler asks what comes in for its gradient, and hides what torch says to that.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            after(layer(x)).square().sum().backward()
        found.append(layer.weight.grad.full_tensor())
    torch.testing.assert_close(found[0], found[1])
    assert found[0].abs().sum() > 0
