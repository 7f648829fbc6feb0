"""Experts shared out over ranks, against all of them on one device."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import CommDebugMode, Replicate, Shard
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    AllToAllDispatcher,
    ExpertParallel,
    ExpertTensorParallel,
    PlanError,
    StyleError,
    TensorParallel,
    parallelize_module,
)
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS, CHOICES = 6, 8, 4, 2


class Experts(nn.Module):
    """Stacked SwiGLU experts; tokens come sorted by expert."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.w1, self.w3 = (
            nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 2) for _ in range(2)
        )
        self.w2 = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 2)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        groups = tokens.split(counts.tolist())
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, a)) * F.linear(x, c), b)
                for x, a, b, c in zip(groups, self.w1, self.w2, self.w3, strict=True)
            ]
        )


class MoE(nn.Module):
    """A router, experts, and the sum of what the chosen ones say, weighted by the router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        scores, chosen = torch.softmax(self.router(tokens), -1).topk(CHOICES)
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        routed = self.experts(tokens[order // CHOICES], counts)
        weighted = routed * scores.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // CHOICES, weighted).view_as(x)


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = ("ep", "etp")[: len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def named(name: str, text: str) -> str:
    """A message that says which tensor differs."""
    return f"{name}: {text}"


def compare(model: MoE, laid_out: Any, own: Tensor, whole: Tensor, cut: Any, mesh: Any) -> None:
    """Outputs, gradients of tokens, of the router and of every expert; *cut* gives this rank's rows."""
    x = whole.clone().requires_grad_()
    piece = own.clone().requires_grad_()
    right, ours = model(x), laid_out(piece)
    torch.testing.assert_close(ours, cut(right))
    grad = torch.randn_like(right)
    right.backward(grad)
    ours.backward(cut(grad))
    torch.testing.assert_close(piece.grad, cut(x.grad))
    router = laid_out.router.weight.grad
    if mesh is not None:
        router = router.clone()
        torch.distributed.all_reduce(router, group=mesh.get_group())
    torch.testing.assert_close(router, model.router.weight.grad)
    for name in ("w1", "w2", "w3"):
        parameter = getattr(laid_out.experts, name)
        assert parameter.grad.placements == parameter.placements
        expected = getattr(model.experts, name).grad
        torch.testing.assert_close(
            parameter.grad.full_tensor(), expected, msg=functools.partial(named, name)
        )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_shared_out_whole(ranks: int) -> None:
    """Each rank routes its own tokens; each piece of the output and every gradient is the single device's."""

    @spmd(world_size=ranks, timeout=60)
    def run() -> None:
        mesh = mesh_of(ranks)
        model = MoE()
        laid_out = parallelize_module(copy.deepcopy(model), mesh, {"experts": ExpertParallel()})
        assert laid_out.experts.w1.to_local().shape[0] == EXPERTS // ranks  # type: ignore[operator, union-attr]  # modules return Any
        whole = torch.randn(8, 3, WIDTH)
        own = whole.chunk(ranks)[mesh.get_local_rank()]

        def cut(tensor: Tensor) -> Tensor:
            return tensor.chunk(ranks)[mesh.get_local_rank()]

        compare(model, laid_out, own, whole, cut, mesh)

    run()


@spmd(world_size=2, timeout=60)
def test_an_expert_that_nobody_chooses() -> None:
    """All tokens of all ranks go to one rank: the other computes on no token, and its experts get zeros."""
    mesh = mesh_of(2)
    experts = Experts()
    laid_out = parallelize_module(copy.deepcopy(experts), mesh, ExpertParallel())
    tokens = torch.randn(5, WIDTH, requires_grad=True)
    counts = torch.tensor([5, 0, 0, 0]) if mesh.get_local_rank() else torch.tensor([2, 3, 0, 0])
    out = laid_out(tokens, counts)
    torch.testing.assert_close(out, experts(tokens, counts))
    out.sum().backward()
    grad: Any = laid_out.w1.grad
    assert torch.equal(grad.full_tensor()[2:], torch.zeros(2, HIDDEN, WIDTH))
    assert not torch.equal(grad.full_tensor()[:2], torch.zeros(2, HIDDEN, WIDTH))


@spmd(world_size=2, timeout=60)
def test_features_shared_out() -> None:
    """Tokens are whole on every rank; outputs are added up once, and so are the gradients of tokens."""
    mesh = mesh_of(2)
    model = MoE()
    laid_out = parallelize_module(copy.deepcopy(model), mesh, {"experts": TensorParallel()})
    assert laid_out.experts.w2.to_local().shape == (EXPERTS, WIDTH, HIDDEN // 2)  # type: ignore[operator, union-attr]  # modules return Any
    whole = torch.randn(4, 3, WIDTH)
    with CommDebugMode() as comms:
        laid_out(whole)
    assert comms.get_total_counts() == 1
    compare(model, laid_out, whole, whole, lambda tensor: tensor, None)


@spmd(world_size=2, timeout=60)
def test_whole_tokens_and_experts_shared_out() -> None:
    """Where all ranks have all tokens none travels: each takes those of its experts, and every gradient counts once."""
    mesh = mesh_of(2)
    model = MoE()
    style = ExpertParallel(input_layouts=Replicate())
    laid_out = parallelize_module(copy.deepcopy(model), mesh, {"experts": style})
    whole = torch.randn(4, 3, WIDTH)
    with CommDebugMode() as comms:
        laid_out(whole)
    assert comms.get_total_counts() == 1
    compare(model, laid_out, whole, whole, lambda tensor: tensor, None)
    with pytest.raises(StyleError, match=r"cut by rows, Shard\(0\), or whole"):
        parallelize_module(Experts(), mesh, ExpertParallel(input_layouts=Shard(1)))


@spmd(world_size=4, timeout=60)
def test_experts_and_features_shared_out() -> None:
    """Two axes: tokens cut over the first and equal on the second."""
    mesh = mesh_of(2, 2)
    model = MoE()
    laid_out = parallelize_module(copy.deepcopy(model), mesh, {"experts": ExpertTensorParallel()})
    assert laid_out.experts.w1.to_local().shape == (EXPERTS // 2, HIDDEN // 2, WIDTH)  # type: ignore[operator, union-attr]  # modules return Any
    whole = torch.randn(4, 3, WIDTH)

    def cut(tensor: Tensor) -> Tensor:
        return tensor.chunk(2)[mesh.get_local_rank("ep")]

    compare(model, laid_out, cut(whole), whole, cut, mesh["ep"])


@spmd(world_size=2, timeout=60)
def test_a_packed_gate_and_up_keeps_its_order() -> None:
    """Gate and up in one weight are cut block by block, and the whole is in the order of the single device."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(2, 2 * HIDDEN, WIDTH))
            self.down_proj = nn.Parameter(torch.randn(2, WIDTH, HIDDEN))

        def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
            outs = []
            groups = tokens.split(counts.tolist())
            for x, up, down in zip(groups, self.gate_up_proj, self.down_proj, strict=True):
                gate, value = F.linear(x, up).chunk(2, -1)
                outs.append(F.linear(F.silu(gate) * value, down))
            return torch.cat(outs)

    mesh = mesh_of(2)
    experts = Packed()
    laid_out: Any = parallelize_module(copy.deepcopy(experts), mesh, TensorParallel())
    tokens, counts = torch.randn(5, WIDTH), torch.tensor([2, 3])
    torch.testing.assert_close(laid_out(tokens, counts), experts(tokens, counts))
    assert torch.equal(laid_out.gate_up_proj.full_tensor(), experts.gate_up_proj)


@spmd(world_size=2, timeout=60)
def test_a_dispatcher_of_ones_own() -> None:
    """Any value with the two methods: the style calls them around the experts."""
    mesh = mesh_of(2)

    class Doubling:
        def dispatch(self, tokens: Tensor, counts: Tensor, mesh: DeviceMesh) -> Any:
            arrived, own, receipt = AllToAllDispatcher().dispatch(tokens * 2, counts, mesh)
            return arrived, own, receipt

        def combine(self, tokens: Tensor, receipt: Any, mesh: DeviceMesh) -> Tensor:
            return AllToAllDispatcher().combine(tokens, receipt, mesh)

    experts = Experts()
    laid_out = parallelize_module(
        copy.deepcopy(experts), mesh, ExpertParallel(dispatcher=Doubling())
    )
    tokens, counts = torch.randn(4, WIDTH), torch.tensor([1, 1, 2, 0])
    torch.testing.assert_close(laid_out(tokens, counts), experts(tokens * 2, counts))


@spmd(world_size=2, timeout=60)
def test_what_cannot_be_shared_out_is_refused() -> None:
    """Counts, features, names and meshes that do not fit: one error on every rank, and nothing is laid out."""
    mesh, both = mesh_of(2), mesh_of(1, 2)
    odd = Experts(3)
    with pytest.raises(PlanError, match=r"2 ranks cannot share out 3 experts.*\[1, 3\]"):
        parallelize_module(odd, mesh, ExpertParallel())
    assert not hasattr(odd.w1, "placements")
    unknown = nn.Module()
    unknown.up = nn.Parameter(torch.ones(2, 4, 4))
    with pytest.raises(
        PlanError, match=r"which dim has the hidden features.*hidden=\{'up': DIM\}"
    ):
        parallelize_module(unknown, mesh, TensorParallel())
    with pytest.raises(PlanError, match="cannot share out the 4 hidden features"):
        TensorParallel(hidden={"up": 1}).check(unknown, _Wide())  # type: ignore[arg-type]  # all it asks for
    unknown.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(PlanError, match="stacked with the experts as their first dim"):
        parallelize_module(unknown, mesh, ExpertParallel())
    with pytest.raises(PlanError, match="mesh of two axes"):
        ExpertTensorParallel().apply(Experts(), mesh)
    with pytest.raises(ValueError, match="mesh of one axis"):
        parallelize_module(Experts(), both, ExpertParallel())
    laid_out = parallelize_module(Experts(), mesh, ExpertParallel())
    with pytest.raises(PlanError, match="tokens sorted by expert"):
        laid_out(torch.ones(2, WIDTH))


class _Wide:
    """Three ranks, for a check that only asks how many there are."""

    def size(self) -> int:
        return 3
