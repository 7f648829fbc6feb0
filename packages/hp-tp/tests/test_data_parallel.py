"""Tensor parallelism under DDP, the hooks of the first FSDP, and inputs kept in pieces; against the single device."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.collectives import all_reduce
from hp_mesh.testing import spmd
from hp_tp import (
    BoundaryError,
    ColwiseParallel,
    DTensorExtensions,
    NoParallel,
    PlanError,
    RowwiseParallel,
    input_reshard,
    parallelize_module,
    pre_dp_module_transform,
    sync_grad_hook,
)
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Mlp(nn.Module):
    """A norm that no style covers, and a pair of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(self.norm(x))))


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh whose last axis is tp, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


class Nested(nn.Module):
    """A pair of linear layers, one bias frozen, and a replicated module with parameters below it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.down.bias.requires_grad_(False)
        self.router = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Any:
        return self.router(self.down(F.gelu(self.up(x))))


def beside(kind: str, model: nn.Module, mesh: DeviceMesh, **options: bool) -> nn.Module:
    """*model* under data parallelism of a *kind*."""
    if kind == "replicate":
        return replicate(model, device_mesh=mesh["dp"], **options)
    if kind == "device_mesh":
        return DistributedDataParallel(model, device_mesh=mesh["dp"], **options)
    pre_dp_module_transform(model)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"), **options)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("kind", ["replicate", "device_mesh", "transform"])
@spmd(world_size=4, timeout=60)
def test_ddp_over_tp_trains_like_one_device(kind: str, views: bool) -> None:
    """Names, objects, gradients, the clipped norm and parameters over some steps; whichever parameters the optimizer has."""
    mesh = mesh_of(2, 2)
    for when in ("before", "after", "between"):
        reference = Nested()
        model: Any = copy.deepcopy(reference)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "router": NoParallel()}
        parallelize_module(model, mesh["tp"], plan)
        before = dict(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped = beside(kind, model, mesh, gradient_as_bucket_view=views)
        if when == "after":
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        right_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for count in range(3):
            x = torch.randn(4, 6)
            wrapped(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
            reference(x).square().mean().backward()
            if when == "between" and count == 0:
                optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
            now = dict(model.named_parameters())
            assert list(now) == list(before)
            for name, parameter in now.items():
                right = reference.get_parameter(name)
                assert parameter is before[name]
                assert parameter.requires_grad == right.requires_grad
                if right.requires_grad:
                    torch.testing.assert_close(parameter.grad.full_tensor(), right.grad)
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            right_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            torch.testing.assert_close(norm.full_tensor(), right_norm)
            for step in (optimizer, right_optimizer):
                step.step()
                step.zero_grad(set_to_none=count > 0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.full_tensor(), reference.get_parameter(name))


@spmd(world_size=4, timeout=60)
def test_accumulated_gradients_are_reduced_once() -> None:
    """Two halves of a batch, the first without reduction, give the gradients of the batch."""
    mesh = mesh_of(2, 2)
    reference = Nested()
    model: Any = copy.deepcopy(reference)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrapped: Any = beside("device_mesh", model.requires_grad_(), mesh)  # all of them now
    reference.requires_grad_()
    x = torch.randn(4, 6)
    first, second = x.chunk(2)[mesh.get_local_rank("dp")]
    with wrapped.no_sync():
        (wrapped(first).square().mean() / 2).backward()
    (wrapped(second).square().mean() / 2).backward()
    reference(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        found = parameter.grad
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, reference.get_parameter(name).grad)


@spmd(world_size=4, timeout=60)
def test_a_parameter_used_outside_of_its_module_is_refused_under_ddp() -> None:
    """Its gradient would stay this replica's; before there was DDP it is the whole one."""
    mesh = mesh_of(2, 2)
    model: Any = parallelize_module(Mlp(), mesh["tp"], PLAN)
    model.up.weight.square().sum().backward()
    wrapped = beside("replicate", model, mesh)
    wrapped(torch.randn(2, 6)).sum().backward()
    with pytest.raises(BoundaryError, match="not be averaged over the replicas"):
        model.up.weight.square().sum().backward()


@spmd(world_size=2, timeout=60)
def test_a_tie_stays_a_tie_under_ddp() -> None:
    """One plain parameter in both places, and its gradient is the sum of both uses."""
    mesh = mesh_of(2)
    model: Any = nn.ModuleDict({"emb": nn.Embedding(6, 4), "out": nn.Linear(4, 6, bias=False)})
    model.out.weight = model.emb.weight
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh, {"emb": RowwiseParallel(), "out": ColwiseParallel()})
    holder = Holder(model)
    pre_dp_module_transform(holder)
    assert model.out.weight is model.emb.weight
    ids = torch.tensor([1, 5, 2])
    piece = model.emb.weight
    holder(ids).square().sum().backward()
    assert isinstance(model.emb.weight, DTensor)
    assert model.out.weight is model.emb.weight
    right = reference.out(reference.emb(ids))
    own = mesh.get_local_rank()
    right.chunk(2, -1)[own].square().sum().backward()
    total = all_reduce(reference.emb.weight.grad, "sum", mesh.get_group())
    torch.testing.assert_close(model.emb.weight.grad.full_tensor(), total)
    torch.testing.assert_close(piece.grad, total.chunk(2)[own])


@spmd(world_size=4, timeout=60)
def test_a_tie_stays_a_tie_under_replicate() -> None:
    """Torch exchanges one of the two names; both modules use the piece, and its gradient is averaged."""
    mesh = mesh_of(2, 2)
    model: Any = nn.ModuleDict({"emb": nn.Embedding(6, 4), "out": nn.Linear(4, 6, bias=False)})
    model.out.weight = model.emb.weight
    reference = Holder(copy.deepcopy(model))
    plan = {"emb": RowwiseParallel(), "out": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    holder = replicate(Holder(model), device_mesh=mesh["dp"])
    ids = torch.tensor([[1, 5], [2, 2]])
    holder(ids[mesh.get_local_rank("dp")]).square().mean().backward()
    reference(ids).square().mean().backward()
    assert model.out.weight is model.emb.weight
    assert [name for name, _ in holder.named_parameters()] == ["parts.emb.weight"]
    right = reference.get_parameter("parts.emb.weight").grad
    torch.testing.assert_close(model.emb.weight.grad.full_tensor(), right)


class Holder(nn.Module):
    """Calls both halves of a tied model."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, ids: Tensor) -> Any:
        return self.parts.out(self.parts.emb(ids))


@spmd(world_size=2, timeout=60)
def test_a_module_without_distributed_parameters_is_refused() -> None:
    """Before parallelize_module, and the second time."""
    model = Mlp()
    with pytest.raises(PlanError, match="call parallelize_module first, and this once"):
        pre_dp_module_transform(model)
    parallelize_module(model, mesh_of(2), PLAN)
    pre_dp_module_transform(model)
    with pytest.raises(PlanError, match="and this once"):
        pre_dp_module_transform(model)


@spmd(world_size=2, timeout=60)
def test_a_gradient_on_its_way_is_waited_for() -> None:
    """The hook gives the finished plain tensor; one that nobody brings comes back as it is."""
    mesh = mesh_of(2)
    coming = all_reduce(torch.ones(3), "sum", mesh.get_group(), async_op=True)
    assert torch.equal(sync_grad_hook(coming), torch.full((3,), 2.0))
    there = torch.ones(2)
    assert sync_grad_hook(there) is there
    assert sync_grad_hook(there, device_handle=torch.cpu, compute_stream=None) is there  # type: ignore[arg-type]  # a module


@pytest.mark.seam
@spmd(world_size=4, timeout=60)
def test_the_hooks_of_the_first_fsdp() -> None:
    """A parameter flattened and made whole again has its layout, its gradient and the mark; a checkpoint's pieces are right.

    FSDP itself refuses to run on a host; these are the calls that it makes.
    """
    mesh = mesh_of(2, 2)
    hooks = DTensorExtensions(torch.cpu)
    whole = torch.arange(30.0).reshape(5, 6)
    weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    flat, spec = hooks.pre_flatten_transform(weight)
    assert torch.equal(flat, whole.chunk(2)[mesh.get_local_rank("tp")])
    assert hooks.pre_flatten_transform(whole) == (whole, None)
    view = flat.detach().clone().requires_grad_()
    again: Any = hooks.post_unflatten_transform(view, spec)  # type: ignore[arg-type]  # it has one
    assert again._fsdp_flattened
    assert isinstance(again, DTensor)
    assert torch.equal(again.full_tensor(), whole)
    (again * 2).sum().backward()
    assert torch.equal(view.grad, torch.full_like(view, 2.0))  # type: ignore[arg-type]  # there is one now
    chunk: Any = hooks.chunk_dtensor(weight, 0, mesh["dp"])
    assert chunk.placements == (Shard(0), Shard(0))
    assert torch.equal(chunk.full_tensor(), whole)
    assert torch.equal(hooks.all_gather_dtensor(chunk, mesh), flat)
    plain: Any = hooks.chunk_dtensor(whole, 0, mesh["dp"])
    assert plain.placements == (Shard(0), Replicate())
    with pytest.raises(ValueError, match="no slice of a mesh"):
        hooks.chunk_dtensor(whole, 0, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    with pytest.raises(ValueError, match="parent mesh"):
        hooks.all_gather_dtensor(chunk, mesh["dp"])


class Recomputed(nn.Module):
    """A block that keeps its input and computes the rest again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that a forward keeps of anything of the input's size or of its piece's."""

    def alive() -> dict[int, int]:
        gc.collect()
        found = {}
        for thing in gc.get_objects():
            if type(thing) is torch.Tensor and thing.is_floating_point() and thing.numel() >= 64:
                found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        return found

    before = alive()
    out = model(x * 1)
    after = alive()
    own = out.untyped_storage().data_ptr()
    kept = sum(size for key, size in after.items() if key not in before and key != own)
    out.sum().backward()
    return kept


@pytest.mark.parametrize("dim", [0, 1, -1])
@spmd(world_size=2, timeout=60)
def test_inputs_kept_in_pieces(dim: int) -> None:
    """Recomputed with its input cut: the same gradients, and half of the bytes kept, for even and uneven lengths."""
    mesh = mesh_of(2)
    for length in (32, 33):
        reference = Mlp()
        model: Any = parallelize_module(copy.deepcopy(reference), mesh, PLAN)
        block = input_reshard(Recomputed(model), mesh, dim)
        x = torch.randn(4, length, 6)
        piece, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, right = block(piece), reference(whole)
        torch.testing.assert_close(out, right)
        grad = torch.randn_like(right)
        out.backward(grad)
        right.backward(grad)
        torch.testing.assert_close(piece.grad, whole.grad)
        for ours, its in zip(model.parameters(), reference.parameters(), strict=True):
            found = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            torch.testing.assert_close(found, its.grad)


@spmd(world_size=2, timeout=60)
def test_what_differs_between_ranks_is_not_cut() -> None:
    """Without recomputation hidden features are kept too, this rank's own: only the input is cut, and gradients are right."""
    mesh = mesh_of(2)
    reference = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    model: Any = parallelize_module(
        copy.deepcopy(reference), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    input_reshard(model, mesh, 0)
    x = torch.randn(16, 6)
    out, right = model(x), reference(x)
    grad = torch.randn_like(right)
    out.backward(grad)
    right.backward(grad)
    for ours, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), its.grad)


@spmd(world_size=2, timeout=60)
def test_half_of_the_input_is_kept() -> None:
    """The bytes alive between forward and backward: the input without, its piece with."""
    mesh = mesh_of(2)
    x = torch.randn(64, 6)
    model = parallelize_module(Mlp(), mesh, PLAN)
    without = kept_bytes(Recomputed(model), x)
    with_pieces = kept_bytes(input_reshard(Recomputed(model), mesh, 0), x)
    assert without == 64 * 6 * 4
    assert with_pieces == without // 2


def test_no_dim_leaves_the_module() -> None:
    """None is what sequence parallelism passes: nothing to do."""
    model = Mlp()
    assert input_reshard(model, None, None) is model  # type: ignore[arg-type]  # the mesh is not looked at
    assert type(model) is Mlp
