"""What we use of torch that torch calls private, and nothing else.

The rule: one function per use, one line that says why, one seam test per function
(`tests/test_seams.py`) that runs on the oldest and the newest torch we support. When torch changes,
this file changes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from torch.distributed import _functional_collectives as functional
    from torch.distributed._mesh_layout import _MeshLayout

    from .axes import Axis

    GroupName = c10d.GroupName
    Options = C10dBackend.Options
    TorchLayout = _MeshLayout
else:
    GroupName = str
    TorchLayout = object
    Options = object

TorchMesh = torch_device_mesh.DeviceMesh


def world_group() -> dist.ProcessGroup | None:
    """Return the default group, or None before initialisation.

    `dist.group.WORLD` says the same but goes through a metaclass; this is asked on every group use.
    """
    return c10d._world.default_pg


def default_backend() -> str:
    """Return the backend string of the world, for example ``"cpu:gloo,cuda:nccl"``.

    `dist.get_backend` drops the device map of a world that was given one.
    """
    name, _ = c10d._world.pg_map[c10d._get_default_group()]
    return str(name)


def backend_devices(backend: str) -> dict[str, str]:
    """Return which backend serves which device type; torch has no public reader of the string."""
    return dict(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map())


def is_options(value: object) -> TypeGuard[Options]:
    """Say whether *value* is backend options; the class is public only on its backends."""
    return isinstance(value, C10dBackend.Options)


def default_store() -> dist.Store:
    """Return the store of the world: the one channel that works before a group does."""
    return c10d._get_default_store()


def default_timeout(backend: str) -> timedelta:
    """Return the timeout torch would give a new group; `new_group` resolves it the same way."""
    return c10d._get_default_timeout(c10d.Backend(backend))


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout a group was made with; torch stores it in its options, or nowhere."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def find_backend(backend: str) -> list[str]:
    """Return the backend names in *backend* that torch does not have; makes the fake one known.

    Torch registers its fake backend in a module of its test tools, which nothing imports by itself.
    """
    names = set(backend_devices(backend).values()) if ":" in backend else {backend}
    if "fake" in names:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers
    return sorted(name for name in names if name.lower() not in c10d.Backend.backend_list)


def create_group(
    ranks: Sequence[int],
    rank: int,
    *,
    name: str,
    label: str,
    backend: str,
    options: Options | None,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Make the group of *ranks* in that order, by its members alone, under a name that we choose.

    `dist.new_group` must be called by the whole world, or (with local synchronisation) salts its name
    with a per-process counter; made by members alone it would give members different names, and would
    shift the counter under later `new_group` calls of the user.
    A world bound to a device would make torch split the world's communicator, which is collective over
    the world and which HCCL lacks; so the binding is hidden while the group is made, and set on it after.
    """
    world = c10d._get_default_group()
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(rank),
            list(ranks),
            c10d.Backend(backend),
            default_store(),
            c10d.GroupName(name),
            backend_options=options,
            timeout=timeout,
            group_desc=label,
        )
    finally:
        world.bound_device_id = device
    group = cast("dist.ProcessGroup", group)
    if device is not None:
        group.bound_device_id = device
    c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group


def base_group(mesh: TorchMesh, mesh_dim: int | str | None) -> dist.ProcessGroup:
    """Return the group as torch's own method does, in words that torch.compile traces."""
    return TorchMesh.get_group(mesh, mesh_dim)


base_hash = cast("Callable[[TorchMesh], int]", TorchMesh.__hash__)
"""Torch's hash of a mesh, kept on the mesh; a mesh of ours and an equal one of torch's must agree."""


def group_name(group: dist.ProcessGroup) -> GroupName:
    """Return the name under which torch's functional collectives find *group*."""
    return group.group_name  # not through the NewType, which torch.compile cannot call


def is_alive(group: dist.ProcessGroup) -> bool:
    """Say whether torch still knows *group*; there is no public question for it."""
    return group in c10d._world.pg_map


def is_layout_flat() -> bool:
    """Say which of torch's two layout classes is there: one value per axis (2.13+), or nested tuples."""
    return hasattr(_layout_class(), "from_sizes_strides")


def _layout_class() -> type[TorchLayout]:
    """Return the class behind `mesh._layout`, which torch code and torch.compile read."""
    from torch.distributed._mesh_layout import _MeshLayout

    return _MeshLayout


def make_layout(axes: Sequence[Axis]) -> TorchLayout:
    """Return torch's layout of *axes*, equal to what torch builds for the same mesh."""
    layout = cast("Callable[..., TorchLayout]", _layout_class())
    if is_layout_flat():
        from torch.distributed._mesh_layout import _FlatLayout

        return layout(
            [
                _FlatLayout(tuple(s for s, _ in a.digits), tuple(d for _, d in a.digits))
                for a in axes
            ]
        )
    sizes = tuple(_nest([s for s, _ in a.digits], 1) for a in axes)
    strides = tuple(_nest([d for _, d in a.digits], a.unit_stride) for a in axes)
    if len(axes) == 1 and axes[0].merged and len(axes[0].digits) <= 1:
        return layout(sizes[0], strides[0])
    return layout(sizes, strides)


def _nest(values: list[int], unit: int) -> int | tuple[int, ...]:
    if not values:
        return unit
    return values[0] if len(values) == 1 else tuple(values)


def layout_digits(layout: TorchLayout) -> list[list[tuple[int, int]]]:
    """Return the ``(size, stride)`` digits of each axis of a torch mesh's layout."""
    return [list(layout[i].sizes_and_strides) for i in range(len(layout))]


def host_ranks(ranks: Sequence[int]) -> torch.Tensor:
    """Return *ranks* as an int32 tensor on the host, whatever modes are active.

    Under a fake-tensor or tracing mode a factory would give a fake tensor, which must not be kept; the
    guard that turns modes off has no public name that is free to import.
    """
    with torch._C._DisableTorchDispatch(), torch.inference_mode(mode=False):
        if isinstance(ranks, range):
            return torch.arange(ranks.start, ranks.stop, dtype=torch.int32, device="cpu")
        return torch.tensor(ranks, dtype=torch.int32, device="cpu")


def strided_view(
    ranks: torch.Tensor, digits: Sequence[tuple[int, int]], start: int, shape: Sequence[int]
) -> torch.Tensor:
    """Return the ranks at *digits* from *start* as a tensor of *shape*; modes off, as above."""
    with torch._C._DisableTorchDispatch(), torch.inference_mode(mode=False):
        sizes, strides = [s for s, _ in digits], [d for _, d in digits]
        return ranks.as_strided(sizes, strides, start).reshape(shape)


def plain_mesh(
    mesh: TorchMesh, root: TorchMesh | None, names: Sequence[GroupName] | None
) -> TorchMesh:
    """Return a base torch mesh equal to *mesh*; torch's constructor takes layout and rank map privately."""
    plain = TorchMesh(
        mesh._device_type,
        _layout=mesh._layout,
        _rank_map=mesh._rank_map,
        mesh_dim_names=mesh._mesh_dim_names,
        _root_mesh=root,
        _init_backend=False,
        _rank=mesh._rank,
    )
    plain._preserve_rank_order = mesh._preserve_rank_order
    if names is not None:
        plain._dim_group_names = list(names)
        plain._pg_registry.update(mesh._pg_registry)
    return plain


_twins: dict[int, tuple[weakref.ref[TorchMesh], TorchMesh]] = {}


def get_twin(mesh: TorchMesh) -> TorchMesh | None:
    """Return what `set_twin` kept for *mesh*; by identity, as hashing a torch mesh lists its world."""
    found = _twins.get(id(mesh))
    return found[1] if found is not None and found[0]() is mesh else None


def set_twin(mesh: TorchMesh, twin: TorchMesh) -> None:
    """Keep *twin* for as long as *mesh* lives."""
    key = id(mesh)
    _twins[key] = (weakref.ref(mesh, lambda _: _twins.pop(key, None)), twin)


def select_device(device_type: str) -> None:
    """Choose this process's device if the user has not, as torch does when it makes a mesh."""
    if device_type == "cpu" or default_backend() == "fake":
        return
    module = getattr(torch, device_type, None)
    if module is None or not hasattr(module, "set_device") or module.is_initialized():
        return
    count = module.device_count()
    if count:
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank() % count))
        module.set_device(local)


def allow_unpickling(objects: list[Callable[..., object]]) -> None:
    """Let `torch.load(weights_only=True)` read a DTensor checkpoint with our meshes in it."""
    torch.serialization.add_safe_globals([*objects])


def push_current(mesh: TorchMesh) -> None:
    """Make *mesh* current for torch's own functions that take none."""
    torch_device_mesh._mesh_resources.mesh_stack.append(mesh)


def pop_current(mesh: TorchMesh) -> None:
    """Undo `push_current`; by identity, since async tasks may leave in another order."""
    stack = torch_device_mesh._mesh_resources.mesh_stack
    for i in range(len(stack) - 1, -1, -1):
        if stack[i] is mesh:
            del stack[i]
            return


def is_compiling() -> bool:
    """Say whether Dynamo is tracing this very code; a method of our mesh is then inlined into the graph.

    Not `torch.compiler.is_compiling`, which also holds while the traced graph is lowered and our code
    really runs: the group must then be found, and made, as in an eager program.
    """
    return torch.compiler.is_dynamo_compiling()


# --- testing ----------------------------------------------------------------------------------


def process_group_names() -> tuple[str, ...]:
    """Return the names of all live groups: the pool of ranks must see what a test left behind."""
    return tuple(c10d._world.pg_names.values())


# --- collectives ------------------------------------------------------------------------------
# The functional collectives: the only ones that torch.compile and FakeTensor trace. Bound once,
# since the lookup through `torch.ops` costs as much as the rest of our call.

# They run below the autograd keys: torch 2.15 gives them autograd formulas in Python, which cost twice what the call does
# and record nothing here, since gradients are the business of those who call us.


def _without_autograd(op: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    def call(*args: object) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace the guard
            return cast("torch.Tensor", op(*args))
        with torch._C._AutoDispatchBelowAutograd():
            return cast("torch.Tensor", op(*args))

    return call


all_reduce = _without_autograd(torch.ops._c10d_functional.all_reduce.default)
all_gather = _without_autograd(torch.ops._c10d_functional.all_gather_into_tensor.default)
reduce_scatter = _without_autograd(torch.ops._c10d_functional.reduce_scatter_tensor.default)
all_to_all = _without_autograd(torch.ops._c10d_functional.all_to_all_single.default)
broadcast = _without_autograd(torch.ops._c10d_functional.broadcast.default)
wait_tensor = _without_autograd(torch.ops._c10d_functional.wait_tensor.default)


def load_functional() -> None:
    """Import torch's module of functional collectives, which registers how they trace.

    It costs 40 ms, half of what importing this package may; so only `hp_mesh.collectives` asks for it.
    """
    from torch.distributed import _functional_collectives

    globals()["functional"] = _functional_collectives


def lazily_waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return *tensor* so that its first use waits for it; a graph waits at once and overlaps later.

    The tensor class that does this is torch's; FSDP2, DCP and the compiler know it.
    """
    if functional._are_we_tracing():
        return wait_tensor(tensor)
    return functional.AsyncCollectiveTensor(tensor)


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor behind a lazily waited one, and any other tensor as it is."""
    if isinstance(tensor, functional.AsyncCollectiveTensor):
        return cast("Callable[[], torch.Tensor]", tensor.trigger_wait)()
    return tensor
