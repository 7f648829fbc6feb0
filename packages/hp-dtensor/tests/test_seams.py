"""Each private name of torch that we use does what we rely on; run on the oldest and on the newest torch.

Then the compositions that decided the design: FSDP2 over tensor parallel, checkpoints across layouts, and compilation.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from hp_dtensor import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    clip_grad_norm_,
    distribute_tensor,
)
from hp_dtensor import _torch as seam
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

R = Replicate()


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, TorchDTensor) else tensor


def _laid(tensor: torch.Tensor | None) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


aten = torch.ops.aten
pytestmark = pytest.mark.seam


def test_the_owners_of_memory_are_counted() -> None:
    """A tensor that is alone has two, itself and the handle that asks; a view is one more."""
    tensor = torch.ones(2, 3)
    assert seam.storage_owners(tensor) == 2
    view = tensor.t()
    assert seam.storage_owners(view) == seam.storage_owners(tensor) == 3
    with torch.inference_mode():
        assert seam.storage_owners(torch.ones(2).view(1, 2).clone()) == 2


def test_transforms_are_seen_and_left() -> None:
    """A value of a transform is known as such, and what is made outside of transforms has memory."""

    def square(x: torch.Tensor) -> torch.Tensor:
        assert seam.is_transformed(x)
        with seam.outside_transforms():
            made = torch.ones(2)
        assert not seam.is_transformed(made)
        assert made.data_ptr()
        return (x * x * made).sum()

    torch.testing.assert_close(torch.func.grad(square)(torch.tensor(3.0)), torch.tensor(12.0))
    assert not seam.is_transformed(torch.ones(2))


def test_writes_are_counted() -> None:
    """Each write in place counts, through a view as well; reading does not."""
    tensor = torch.zeros(3)
    before = seam.writes_to(tensor)
    assert seam.writes_to(tensor + 1) == 0
    tensor.add_(1)
    tensor[:2].mul_(2)
    assert seam.writes_to(tensor) == before + 2
    with torch.inference_mode():
        assert seam.writes_to(tensor + 1) == 0


def test_a_generator_remembers_any_seed_without_drawing_otherwise() -> None:
    """The state of a CPU generator begins with its seed, which survives saving, and which nothing drawn depends on."""
    generator = torch.Generator().manual_seed(5)
    assert seam.read_seed_field(generator) == 5
    seam.write_seed_field(generator, 0xA5C3_0000_0000_0001)
    state = generator.get_state()
    drawn = torch.rand(700, generator=generator)
    assert torch.equal(drawn, torch.rand(700, generator=torch.Generator().manual_seed(5)))
    assert seam.read_seed_field(generator) == 0xA5C3_0000_0000_0001
    other = torch.Generator()
    other.set_state(state)
    assert seam.read_seed_field(other) == 0xA5C3_0000_0000_0001
    assert torch.equal(drawn, torch.rand(700, generator=other))
    generator.manual_seed(5)
    assert seam.read_seed_field(generator) == 5


def test_operators_that_draw_are_recorded_as_such() -> None:
    """A tensor under a tracer is told from one that is run, and the operators of ours are tagged and have no tensors to run on."""
    assert not seam.is_traced(torch.zeros(1))
    seen = []

    def record(x: torch.Tensor) -> torch.Tensor:
        seen.append(seam.is_traced(x))
        return x * 2

    torch.fx.experimental.proxy_tensor.make_fx(record)(torch.zeros(1))
    assert seen == [True]
    op = torch.ops.hp_dtensor.draw_key.default
    assert torch.Tag.nondeterministic_seeded in op.tags
    key = op([0], [], torch.device("cpu"), 0)
    assert key.shape == (1, 2)
    assert int(key.min()) >= 0
    assert int(key.max()) < 1 << 32
    drawn = torch.ops.hp_dtensor.draw_stream.default
    assert torch.Tag.nondeterministic_seeded not in drawn.tags


def test_a_node_of_a_checkpointed_region_can_count_as_made_before_it() -> None:
    """The region that torch notes on new nodes is another inside, and what it was afterwards; elsewhere there is none."""
    meta = torch.fx.traceback.get_current_meta()
    with seam.kept_for_replays():
        assert "ac_graph_id" not in meta
    with torch.fx.traceback.preserve_node_meta():
        meta = torch.fx.traceback.get_current_meta()
        meta["ac_graph_id"] = 3

        def record(x: torch.Tensor) -> torch.Tensor:
            with seam.kept_for_replays():
                y = x * 2
            return y + 1

        graph = torch.fx.experimental.proxy_tensor.make_fx(record)(torch.zeros(1)).graph
        assert meta.pop("ac_graph_id") == 3
    regions = [node.meta["ac_graph_id"] for node in graph.nodes if node.op == "call_function"]
    assert regions == [-1, 3]


@spmd(world_size=2)
def test_a_group_is_found_by_its_name() -> None:
    """What a graph can hold of a group leads back to it."""
    group = init_device_mesh("cpu", (2,)).get_group()
    assert seam.group_by_name(group.group_name) is group


def test_a_view_knows_its_base() -> None:
    """Also where no gradient is recorded; a tensor that is none has none."""
    tensor = torch.ones(2, 3)
    with torch.no_grad():
        assert seam.base_of(tensor.t()[0]) is tensor
    assert seam.base_of(tensor) is None


@spmd(world_size=2)
def test_the_outside_of_a_subclass_is_reshaped_alone() -> None:
    """The operator changes shape and strides that torch shows, and not the local tensor."""
    d = distribute_tensor(torch.ones(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
    seam.update_metadata(torch.ops.aten.transpose_.default, (d, 0, 1))
    assert (d.shape, d.stride()) == ((6, 4), (1, 6))
    assert d._local_tensor.shape == (2, 6)


def test_a_torch_spec_has_the_fields_that_others_read() -> None:
    """DTensorSpec takes mesh, placements and metadata, and derives an axis order."""
    meta = seam.TensorMeta(torch.Size([4]), (1,), torch.float32)
    assert (meta.shape, meta.stride, meta.dtype) == (torch.Size([4]), (1,), torch.float32)
    fields = set(seam.DTensorSpec.__dataclass_fields__)
    assert {
        "mesh",
        "placements",
        "tensor_meta",
        "shard_order",
        "use_strided_shard_as_shard_order",
    } <= fields


def test_an_operator_has_a_direct_call() -> None:
    """What `direct` gives takes the operator's arguments, by position and by name, and is dispatched alike."""
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    total = seam.direct(aten.sum.dim_IntList)(x, [0], dtype=torch.float64)
    assert isinstance(total, torch.Tensor)
    assert torch.equal(total, torch.tensor([4.0, 2.0], dtype=torch.float64))
    with pytest.raises(RuntimeError):
        seam.direct(aten.mm.default)(x, x[:1])


class _Below(torch.Tensor):
    """A subclass without data; what it is asked to run, it runs on a tensor of its own below autograd."""

    __torch_function__ = seam.disabled_torch_function  # type: ignore[assignment]
    seen: list[bool]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> torch.Tensor:
        del func, types, args, kwargs
        turned = torch.tensor([1 + 2j]).conj()
        with seam.with_lazy_views():
            cls.seen.append(torch.equal(turned + 0, torch.tensor([1 - 2j])))
        return turned


def test_lazy_views_count_below_autograd() -> None:
    """A conjugated view is added as what it stands for, also where torch leaves such keys out."""
    _Below.seen = []
    below = torch.Tensor._make_wrapper_subclass(_Below, (1,), dtype=torch.complex64)
    below.neg()
    assert _Below.seen == [True]


def test_strided_shard_is_a_value() -> None:
    """The private placement compares by dim and factor, and is no plain shard."""
    assert seam.StridedShard(0, split_factor=2) == seam.StridedShard(0, split_factor=2)
    assert seam.StridedShard(0, split_factor=2) != seam.StridedShard(0, split_factor=3)
    assert seam.StridedShard(0, split_factor=2) != Shard(0)
    assert issubclass(seam.MaskPartial, Partial)


def test_metadata_runs_escape_a_mode() -> None:
    """disable_current_modes hides what runs inside from a dispatch mode at work."""
    with CommDebugMode(), seam.disable_current_modes():
        assert torch.empty(2, device="meta").shape == (2,)


def test_decompositions_are_found() -> None:
    """The table knows an operator that has a decomposition and none for one that has not."""
    assert callable(seam.decomposition_of(aten.huber_loss.default))
    assert seam.decomposition_of(aten.mm.default) is None


def test_nested_arguments_flatten_and_come_back() -> None:
    """tree_flatten and tree_unflatten are inverse on nested containers."""
    value = ({"a": [1, 2]}, (3,))
    leaves, tree = seam.tree_flatten(value)
    assert leaves == [1, 2, 3]
    assert seam.tree_unflatten(leaves, tree) == value


@spmd(world_size=2)
def test_collectives_are_recognised() -> None:
    """A c10d collective counts as its functional twin, with the size of its group."""
    with CommDebugMode() as comm:
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.all_gather([torch.empty(4), torch.empty(4)], x)
    functional = torch.ops._c10d_functional
    assert comm.get_comm_counts() == {
        functional.all_reduce: 1,
        functional.all_gather_into_tensor: 1,
    }
    assert comm.get_total_bytes() == 16 + 16


def test_collectives_have_one_name_in_all_namespaces() -> None:
    """The older namespace and the c10d operators stand for the functional collective; another packet for itself."""
    functional, ops = torch.ops._c10d_functional, torch.ops
    for packet in (ops.c10d_functional.all_reduce, ops.c10d.allreduce_, functional.all_reduce):
        assert seam.functional_packet(packet) is functional.all_reduce
    for packet in (ops.aten.add, ops.c10d.scatter_):
        assert seam.functional_packet(packet) is packet


@spmd(world_size=2)
def test_lists_of_ours_go_to_list_operators_by_default() -> None:
    """Torch's clipping and optimizers look the exact class up in lists of their own."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(1.0, 7.0).view(3, 2)
    d = distribute_tensor(x, mesh, [Shard(0)])
    norm = torch.nn.utils.get_total_norm([d, d], foreach=True)
    assert isinstance(norm, DTensor)
    torch.testing.assert_close(norm.full_tensor(), (2 * (x * x).sum()).sqrt())
    assert type(d) in seam._optimizer_types


@spmd(world_size=2)
def test_the_fast_constructor_makes_one_of_ours() -> None:
    """_dtensor__new__ stores our spec, and torch's own spec is made from it on demand."""
    mesh = init_device_mesh("cpu", (2,))
    d = distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])
    assert type(d) is DTensor
    assert isinstance(d, TorchDTensor)
    assert isinstance(d._spec, seam.DTensorSpec)
    assert d._spec is d._spec
    assert (d._spec.placements, d._spec.mesh) == ((Shard(0),), mesh)


@spmd(world_size=2)
def test_our_dispatch_wins_over_the_base_class() -> None:
    """Mixed with one of torch's tensors, in both orders, the operator comes to us and gives one of ours."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 2)
    ours = distribute_tensor(x, mesh, [Shard(0)])
    base = TorchDTensor.from_local(ours.to_local(), mesh, [Shard(0)], run_check=False)
    for out in (ours + base, base + ours, torch.mul(base, ours)):
        assert type(out) is DTensor
    torch.testing.assert_close(_whole(ours + base), 2 * x)


def _parameters(module: nn.Module, mesh: object, plan: dict[str, object]) -> None:
    for name, placement in plan.items():
        path, _, leaf = name.rpartition(".")
        child = module.get_submodule(path)
        child.register_parameter(
            leaf, nn.Parameter(distribute_tensor(getattr(child, leaf).detach(), mesh, [placement]))
        )


class Block(nn.Module):
    """A feed-forward block that stays on distributed tensors from start to end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


PLAN = {
    "norm.weight": R,
    "norm.bias": R,
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
}


@spmd(world_size=4)
def test_fsdp2_over_tensor_parallel_trains_like_one_device() -> None:
    """Three AdamW steps with clipping on a (dp, tp) mesh give the single device's losses, norms and weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model, alone = Block(), Block()
    model.load_state_dict(alone.state_dict())
    _parameters(model, mesh["tp"], PLAN)
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True) for m in (model, alone)]
    data = torch.randn(3, 8, 5, 8)
    for x in data:
        mine = x.chunk(2)[mesh["dp"].get_local_rank()]
        out = model(distribute_tensor(mine, mesh["tp"], [R], src_data_rank=None))
        loss = _whole(out).square().mean()
        loss.backward()
        want = alone(x).square().mean()
        want.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        torch.testing.assert_close(mean / 2, want.detach())
        norm = clip_grad_norm_(model.parameters(), 0.05)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.05))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert got.device_mesh.ndim == 2, name
        torch.testing.assert_close(_whole(got), want, msg=name)


@spmd(world_size=2)
def test_torch_scatters_an_uneven_strided_shard() -> None:
    """Torch's distribute_tensor cuts pieces of different lengths; the day its own code does, ours can go."""
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(10.0).view(5, 2)
    laid = torch_distribute_tensor(rows, mesh, [StridedShard(0, split_factor=2)])
    mine = [rows[[0, 1, 3]], rows[[2, 4]]][mesh.get_local_rank()]
    torch.testing.assert_close(laid.to_local(), mine)
    torch_code = StridedShard._shard_tensor.__wrapped__
    with pytest.raises(AssertionError):
        torch_code(StridedShard(0, split_factor=2), rows, mesh, 0)


@spmd(world_size=4)
@pytest.mark.parametrize("shape", [(1, 17), (5,), (7, 3), (0, 3), (2, 1)])
def test_a_whole_state_dict_loads_into_any_layout(shape: tuple[int, ...]) -> None:
    """Whole to FSDP2 over tensor parallel and back is the identity, bit for bit, from each rank's own or from rank 0."""
    pytest.importorskip("numpy")  # torch's object collectives
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.Parameter(torch.zeros(shape))
            self.whole = nn.Parameter(torch.zeros(shape))
            self.register_buffer("scalar", torch.tensor(0.0))

    values = torch.arange(float(math.prod(shape))).view(shape) + 1
    for from_one in (False, True):
        model = Holder()
        _parameters(model, mesh["tp"], {"cut": Shard(0), "whole": R})
        fully_shard(model, mesh=mesh["dp"])
        whole = {"cut": values.clone(), "whole": -values, "scalar": torch.tensor(3.0)}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_one)
        given = {} if from_one and dist.get_rank() else dict(whole)
        set_model_state_dict(model, given, options=options)
        back = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert set(back) == set(whole)
        for name, value in whole.items():
            assert torch.equal(back[name], value), name


@spmd(world_size=4)
def test_a_checkpoint_loads_into_any_layout() -> None:
    """What one layout saves another loads, bit for bit, uneven and 2-D layouts included."""
    pytest.importorskip("numpy", reason="torch's checkpoints exchange objects through numpy")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,))
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    whole = torch.arange(35.0).reshape(7, 5)
    layouts = [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [StridedShard(0, split_factor=2), Shard(0)]),
        (mesh, [R, Shard(0)]),
        (flat, [R]),
    ]
    for number, (where, placements) in enumerate(layouts):
        folder = f"{path[0]}/{number}"
        dcp.save({"w": distribute_tensor(whole, where, placements)}, checkpoint_id=folder)
        for other, wanted in layouts:
            target = distribute_tensor(torch.zeros(7, 5), other, wanted)
            dcp.load({"w": target}, checkpoint_id=folder)
            assert torch.equal(_whole(target), whole)
        plain = torch.zeros(7, 5)
        dcp.load({"w": plain}, checkpoint_id=folder)
        assert torch.equal(plain, whole)


@spmd(world_size=2, timeout=170)
def test_a_block_compiles_in_one_graph_forward_and_backward() -> None:
    """torch.compile(fullgraph=True) of a block on distributed tensors gives the eager value and gradients."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model, alone = Block(), Block()
    model.load_state_dict(alone.state_dict())
    _parameters(model, mesh, PLAN)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4, 8)
    for placement in (R, Shard(0)):
        model.zero_grad()
        alone.zero_grad()
        d = distribute_tensor(x, mesh, [placement]).requires_grad_()
        ref = x.clone().requires_grad_()
        out = compiled(d)
        assert type(out) is DTensor
        torch.testing.assert_close(_whole(out), alone(ref))
        _whole(out.square().mean()).backward()
        alone(ref).square().mean().backward()
        torch.testing.assert_close(_whole(d.grad), ref.grad)
        for got, want in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(_whole(got.grad), want.grad)


@spmd(world_size=2, timeout=170)
def test_moves_compile_inside_the_graph() -> None:
    """redistribute, to_local, from_local and the local move are part of one graph, with gradients."""
    from hp_dtensor import redistribute_local

    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 4)

    def moves(d: DTensor) -> torch.Tensor:
        y = (d * 2).redistribute(placements=[R]).to_local()
        return redistribute_local(y, mesh, [R], [R], grad_placements=[R]) + 1

    d = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    out = torch.compile(moves, backend="aot_eager", fullgraph=True)(d)
    torch.testing.assert_close(out, 2 * x + 1)
    out.square().sum().backward()
    torch.testing.assert_close(_whole(d.grad), 4 * (2 * x + 1))


def test_a_kernel_above_autograd_is_for_subclasses_alone() -> None:
    """The key of snapshots lies above autograd; plain tensors lack it, and what is left of an operator's keys."""
    key = torch._C.DispatchKey.PythonTLSSnapshot
    op = torch.ops.aten.tensor_split.tensor_indices_or_sections
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
    plain = torch.arange(4.0, requires_grad=True)
    assert not torch._C._dispatch_keys(plain).has(key)
    assert not seam._BELOW_SNAPSHOTS.has(key)
    assert seam._BELOW_SNAPSHOTS.has(torch._C.DispatchKey.AutogradCPU)
    assert seam._BELOW_SNAPSHOTS.has(torch._C.DispatchKey.Python)


def test_the_derivative_of_a_whole_linear_layer() -> None:
    """Torch keeps it for nested tensors; all others take the layer apart, and no tensor meets the kernel that does so here."""
    table = torch._C._dispatch_dump_table("aten::linear").splitlines()
    kinds = dict(line.split(": ", 1) for line in table)
    assert kinds["AutogradNestedTensor"].endswith("[autograd kernel]")
    assert kinds["AutogradCPU"].endswith("[math kernel]")
    assert kinds["CPU"].endswith("[math kernel]")
    x, weight, grad = torch.randn(2, 3), torch.randn(4, 3), torch.randn(2, 4)
    assert isinstance(seam.python_wants_a_snapshot(), bool)
    if seam.python_wants_a_snapshot():
        return
    op = torch.ops.aten.linear_backward.default
    found = op.decompose(x, grad, weight, [True, True, True])
    leaves = [t.clone().requires_grad_() for t in (x, weight, weight[:, 0])]
    expected = torch.autograd.grad(torch.nn.functional.linear(*leaves), leaves, grad)
    torch.testing.assert_close(found, expected)


def test_the_forms_that_write_and_are_composed() -> None:
    """By name, for all operators that torch has; forms with a kernel, and operators without ``out=``, are not among them."""
    names = seam.composed_out_forms()
    assert {"kron.out", "linalg_matrix_rank.out", "quantile.scalar_out"} < set(names)
    assert not {"add.out", "kron", "to.dtype_layout"} & set(names)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_who_looks_on_at_an_operator() -> None:
    """The number of dispatch modes, and the level of forward-mode derivatives, inside ``torch.func`` as well."""
    assert not torch._C._len_torch_dispatch_stack()
    with Counting(), FakeTensorMode():
        assert torch._C._len_torch_dispatch_stack() == 2
    assert forward_ad._current_level < 0
    with forward_ad.dual_level():
        assert forward_ad._current_level == 0

    def level(x: torch.Tensor) -> torch.Tensor:
        assert forward_ad._current_level >= 0
        return x

    one = torch.ones(1)
    torch.func.jvp(level, (one,), (one,))
    assert forward_ad._current_level < 0


class Counting(TorchDispatchMode):
    """Counts the operators that run inside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inference", [False, True])
@spmd(world_size=1, timeout=100)
def test_other_subclasses_go_on_below_our_kernel(inference: bool) -> None:
    """Fake tensors, other classes and modes split at a tensor of indices as without us, and autograd sees it."""
    x, at = torch.arange(6.0), torch.tensor([2, 3])
    with torch.inference_mode(inference):
        pair = TwoTensor(x.clone(), x.clone()).requires_grad_(not inference)
        parts = torch.tensor_split(pair, at)
        assert [type(part) for part in parts] == [TwoTensor] * 3
        assert [part.a.tolist() for part in parts] == [[0, 1], [2], [3, 4, 5]]
        with Counting() as mode:
            assert [len(part) for part in torch.tensor_split(x, at)] == [2, 1, 3]
        assert mode.count
    if inference:
        return
    parts[1].sum().backward()
    assert pair.grad.b.tolist() == [0, 0, 1, 0, 0, 0]
    with FakeTensorMode() as fakes:
        assert [len(part) for part in torch.tensor_split(fakes.from_tensor(x), at)] == [2, 1, 3]
    split = torch.compile(lambda t: torch.tensor_split(t, at)[1] + 1, backend="aot_eager")
    assert split(x).tolist() == [3]
