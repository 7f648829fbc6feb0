"""What torch calls private and we use, in one place; each name with the reason why the public surface does not do.

``tests/test_seams.py`` has a test for each, which runs on the oldest and on the newest torch that we support.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # a functional collective names its group, and only torch knows which it is
)
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._collective_utils import (
    mesh_scatter,  # what torch's own scatter of a shard ends in; the public one knows no mesh
)
from torch.distributed.tensor._dtensor_spec import (  # the type that FSDP2 and DCP read from `_spec`; public nowhere
    DTensorSpec,
    TensorMeta,
)
from torch.distributed.tensor._ops._embedding_ops import (  # a placement that others name although it is private
    _MaskPartial as MaskPartial,
)
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import (
    _StridedShard as StridedShard,  # what FSDP2 over TP produces; our public name for it is StridedShard
)
from torch.optim.optimizer import (
    _foreach_supported_types as _optimizer_types,  # the classes whose lists optimizers take; public nowhere
)
from torch.utils._foreach_utils import (
    _foreach_supported_types as _foreach_types,  # the same for clipping
)
from torch.utils._python_dispatch import (  # metadata runs must not be recorded by a tracer that is at work
    _disable_current_modes as disable_current_modes,
)
from torch.utils._pytree import (  # torch.utils.pytree is not public in 2.12
    tree_flatten,
    tree_unflatten,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C import FunctionSchema
    from torch._ops import OpOverload, OpOverloadPacket
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import GroupName

__all__ = [
    "DTensorSpec",
    "GuardedSpec",
    "MaskPartial",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "TensorMeta",
    "TorchDTensor",
    "above_autograd",
    "base_of",
    "composed_out_forms",
    "decompose",
    "decomposition_of",
    "define_operator",
    "direct",
    "disable_current_modes",
    "disabled_torch_function",
    "functional_packet",
    "functional_twin",
    "group_by_name",
    "group_of",
    "hint",
    "is_traced",
    "is_transformed",
    "keep_linear_whole",
    "kept_for_replays",
    "local_scalar",
    "mark_parameter",
    "mask_of",
    "new_dtensor",
    "outside_transforms",
    "python_wants_a_snapshot",
    "read_seed_field",
    "scatter_uneven_strided_shards",
    "schema_of",
    "storage_owners",
    "support_foreach",
    "tree_flatten",
    "tree_unflatten",
    "update_metadata",
    "with_lazy_views",
    "write_seed_field",
    "writes_to",
]

# The fast constructor of torch's own class: 0.9 us less a wrap than `_make_wrapper_subclass`, and the only one that
# gives a subclass of DTensor the C++ state it expects.
new_dtensor = cast("Callable[[type, Tensor, object, bool], Tensor]", torch.Tensor._dtensor__new__)

# A subclass that acts at the ATen level says so with this, or each operator first takes a detour through Python.
disabled_torch_function = torch._C._disabled_torch_function_impl


def decomposition_of(op: OpOverload) -> Callable[..., object] | None:
    """Torch's Python decomposition of *op* into simpler operators, or None; the table is public only in parts."""
    from torch._decomp import (
        decomposition_table,  # heavy, and wanted only for operators without a rule
    )

    return cast("Callable[..., object] | None", decomposition_table.get(op))


def schema_of(op: OpOverload) -> FunctionSchema:
    """The schema of *op*: its name, arguments and aliasing; the public ``torch.ops`` objects offer it nowhere."""
    return op._schema


def direct(op: OpOverload) -> Callable[..., object]:
    """What calling *op* ends in, without a Python frame in between: half a microsecond a call."""
    return cast("Callable[..., object]", op._op)


# Below autograd torch leaves these keys out, and with them what makes a conjugated view more than its bits. A kernel that makes
# such views on its way, as those of linear algebra do, is then silently wrong; the switch is public nowhere.
_VIEWS_BY_A_BIT = (
    torch._C.DispatchKey.Conjugate,
    torch._C.DispatchKey.Negative,
    torch._C.DispatchKey.ZeroTensor,
)


@contextmanager
def with_lazy_views() -> Iterator[None]:
    """Let kernels see conjugated and negated views for what they are."""
    with ExitStack() as stack:
        for key in _VIEWS_BY_A_BIT:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


def decompose(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """*op* in terms of the operators that it is composed of, run at once; NotImplemented for one that is not composed.

    ``decompose`` itself is public, the question whether it may be called is not.
    """
    return op.decompose(*args, **kwargs) if op._can_decompose() else NotImplemented


def storage_owners(tensor: Tensor) -> int:
    """How many tensors share the memory of *tensor*, the handle made here included; two for one that is alone.

    The count is public nowhere, and ``is_view`` does not see views made under ``inference_mode``.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that *tensor* is a view of, which autograd notes and offers under a private name only."""
    return tensor._base


def update_metadata(op: OpOverload, args: Sequence[object]) -> None:
    """Let *op*, which changes the shape of its first argument in place, do so to the outside of a tensor subclass.

    The subclass holds no memory of its own; only with its dispatch switched off does the operator reach it.
    """
    with torch._C._DisableTorchDispatch():
        op(*args)


def mark_parameter(tensor: Tensor) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` hold for a tensor subclass, as ``nn.Parameter`` itself does it."""
    tensor._is_param = True


def hint(size: int) -> int:
    """What a symbolic *size* is while the graph is made, without a guard on it; a plain size is its own.

    For estimates only: the graph will be used for other sizes. Torch offers the number under no public name.
    """
    if type(size) is int:
        return size
    found = cast("torch.SymInt", size).node.hint
    return 4096 if found is None else int(found)


class GuardedSpec(DTensorSpec):
    """Torch's spec, with the guard that a graph compiled for a distributed tensor needs.

    Dynamo guards the piece's sizes itself and compares specs by this method, without sizes: but two sizes of the whole may
    have the same piece on one rank (5 and 6 over two ranks), and a graph for one gives wrong numbers for the other.
    """

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        if not super()._check_equals(other, skip_shapes):
            return False
        return not skip_shapes or self._tells_by_piece(cast("DTensorSpec", other))

    def _tells_by_piece(self, other: DTensorSpec) -> bool:
        """Whether the sizes that differ are those that the pieces of all ranks show."""
        if self.tensor_meta is None or other.tensor_meta is None:
            return True
        mine, theirs = self.tensor_meta.shape, other.tensor_meta.shape
        pieces = [1] * len(mine)
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, (Shard, StridedShard)):
                factor = getattr(placement, "split_factor", 1)
                pieces[placement.dim] *= self.mesh.size(axis) * factor
        return len(mine) == len(theirs) and all(
            a == b or (a % count == 0 and b % count == 0)
            for a, b, count in zip(mine, theirs, pieces, strict=True)
        )

    def __reduce__(self) -> tuple[object, ...]:
        return DTensorSpec, (self.mesh, self.placements, self.tensor_meta)


# What ``item()`` is called at the ATen level.
local_scalar = torch.ops.aten._local_scalar_dense.default

# The traceable collectives; their namespace is private, their names are stable.
_functional = torch.ops._c10d_functional
_TWINS = {
    "allgather_": "all_gather_into_tensor",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "alltoall_": "all_to_all_single",
    "alltoall_base_": "all_to_all_single",
    "broadcast_": "broadcast",
    "reduce_scatter_": "reduce_scatter_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
}


def functional_twin(op: OpOverload) -> OpOverloadPacket | None:
    """The functional collective that *op* is, or that a c10d operator stands for; None when it is no collective."""
    if op.namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
        return op._overloadpacket
    if op.namespace == "c10d":
        twin = _TWINS.get(op._schema.name.split("::")[1])
        return cast(
            "OpOverloadPacket", op._overloadpacket if twin is None else getattr(_functional, twin)
        )
    return None


def functional_packet(packet: OpOverloadPacket) -> OpOverloadPacket:
    """The functional collective that *packet* stands for, by its older namespace or as a c10d operator; else as it is.

    ``torch.ops.c10d_functional`` is the namespace that programs written for torch's own mode look up.
    """
    namespace, _, name = str(packet).partition(".")
    if namespace == "c10d":
        name = _TWINS.get(name, "")
    elif namespace != "c10d_functional":
        return packet
    return cast("OpOverloadPacket", getattr(_functional, name, packet))


def outside_transforms() -> AbstractContextManager[None]:
    """Run as if no transform of ``torch.func`` were at work: what it makes of a buffer has no memory to send."""
    return cast("AbstractContextManager[None]", torch._C._DisableFuncTorch())


def is_transformed(tensor: Tensor) -> bool:
    """Whether *tensor* is a value of a transform of ``torch.func`` that is at work."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def writes_to(tensor: Tensor) -> int:
    """How often *tensor* was written to in place, as autograd counts it; 0 for an inference tensor, which has no such count."""
    return 0 if tensor.is_inference() else tensor._version


def support_foreach(kind: type) -> None:
    """Let optimizers and clipping take lists of *kind* by default, as torch does for its own class.

    Both ask whether the exact class is in a private list; a subclass would fall back to one tensor at a time.
    """
    for names in (cast("list[type]", _optimizer_types), cast("list[type]", _foreach_types)):
        if kind not in names:
            names.append(kind)


def scatter_uneven_strided_shards() -> None:
    """Let torch's ``distribute_tensor`` cut a ``StridedShard`` into pieces of different lengths.

    Its scatter says that it pads them, does not, and stops at an assertion of its own. FSDP2 over an uneven tensor-parallel
    parameter has such pieces, and loading a whole state dict cuts them so. Where the pieces are equal, torch's code runs.
    """
    # Torch's own class calls the method by this name, and offers no place to put another.
    even = StridedShard._shard_tensor

    @wraps(even)
    def shard_tensor(
        self: StridedShard,
        tensor: Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        src_data_rank: int | None = 0,
    ) -> Tensor:
        where = mesh.get_coordinate()
        if src_data_rank is None or where is None:
            return even(self, tensor, mesh, mesh_dim, src_data_rank)
        pieces, missing = self._split_tensor(tensor, mesh.size(mesh_dim))
        if len({piece.shape for piece in pieces}) == 1:
            return even(self, tensor, mesh, mesh_dim, src_data_rank)
        dim = self.dim
        padded = [
            torch.cat((piece, piece.new_zeros(sized(piece.shape, dim, gap))), dim)
            for piece, gap in zip(pieces, missing, strict=True)
        ]
        out = torch.empty_like(padded[0])
        mesh_scatter(out, padded, mesh, mesh_dim=mesh_dim, group_src=src_data_rank)
        length = out.size(dim) - missing[where[mesh_dim]]
        return out.narrow(dim, 0, length).contiguous()

    def sized(shape: torch.Size, dim: int, size: int) -> tuple[int, ...]:
        return (*shape[:dim], size, *shape[dim + 1 :])

    if not hasattr(even, "__wrapped__"):
        StridedShard._shard_tensor = shard_tensor  # type: ignore[method-assign]  # see above


def group_of(args: Sequence[object]) -> ProcessGroup | None:
    """The process group among the arguments of a collective: given as a group, or by its name; None where there is none."""
    for value in reversed(args):
        if isinstance(value, torch.distributed.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            # How c10d's operators take a group.
            return torch.distributed.ProcessGroup.unbox(value)
        if isinstance(value, str):
            try:
                return _resolve_process_group(cast("GroupName", value))
            except (LookupError, RuntimeError, ValueError):
                continue
    return None


def mask_of(placement: Placement) -> Tensor | None:
    """Which rows a MaskPartial addend does not own; None for other placements. Only the placement's buffer knows."""
    if isinstance(placement, MaskPartial):
        return placement.mask_buffer.data
    return None


def group_by_name(name: str) -> torch.distributed.ProcessGroup:
    """The process group called *name*; a graph can hold only the name."""
    return _resolve_process_group(cast("GroupName", name))


_TRACERS = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")
)


def is_traced(tensor: Tensor) -> bool:
    """Whether operators on *tensor* are recorded rather than run: torch has no public word for it below autograd."""
    return type(tensor) is not torch.Tensor or any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACERS
    )


@contextmanager
def kept_for_replays() -> Iterator[None]:
    """Inside, what is recorded from a checkpointed region counts as made before it, and is saved rather than made again.

    When torch parts a graph into forward and backward, it reads from each node which region that is of, and saves what
    passes from an earlier region to a later one. Nodes get the number from here; it has no public name.
    """
    meta = torch.fx.traceback.get_current_meta()
    region = meta.get("ac_graph_id")
    if region is None:
        yield
        return
    meta["ac_graph_id"] = -1
    try:
        yield
    finally:
        meta["ac_graph_id"] = region


# The state of a CPU generator begins with the seed that `initial_seed` reports. Nothing that is drawn depends on it, and
# the layout of the state is written down nowhere.
_SEED_BYTES = 8


def read_seed_field(generator: torch.Generator) -> int:
    """The seed that a CPU generator remembers, 64 bits without sign."""
    return generator.initial_seed() & (2**64 - 1)


def write_seed_field(generator: torch.Generator, value: int) -> None:
    """Let a CPU generator remember *value* as its seed, and go on drawing what it would have drawn."""
    state = generator.get_state()
    state[:_SEED_BYTES] = torch.tensor(
        list(value.to_bytes(_SEED_BYTES, "little")), dtype=torch.uint8
    )
    generator.set_state(state)


_library = torch.library.Library("hp_dtensor", "FRAGMENT")


# What is left of an operator's keys once its snapshot of thread-local state is taken.
_BELOW_SNAPSHOTS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.PythonTLSSnapshot)


def above_autograd(
    namespace: str, name: str
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Let the decorated function answer an operator for distributed tensors, before autograd sees it.

    It gets the arguments of the call, and may return NotImplemented to let it go on. One that this torch lacks is never called.
    The dispatch key is one that tensor subclasses alone carry, so that plain tensors do not pay; other subclasses go on as before.
    """
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    packet, _, overload = name.partition(".")

    def register(function: Callable[..., object]) -> Callable[..., object]:
        def kernel(keys: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> object:
            if any(isinstance(value, TorchDTensor) for value in (*args, *kwargs.values())):
                answer = function(*args, **kwargs)
                if answer is not NotImplemented:
                    return answer
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            return _below_snapshots(op, keys & _BELOW_SNAPSHOTS, args, kwargs)

        library.impl(name, kernel, "PythonTLSSnapshot", with_keyset=True)
        return function

    return register


def composed_out_forms() -> list[str]:
    """The names (``kron.out``) of the operators of ``aten`` that write to ``out=`` and are composed of others."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(
        name
        for name in names
        if re.search(r"^\w+\.(out|out_\w+|\w+_out)$", name)
        and torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", "CompositeImplicitAutograd"
        )
    )


def _below_snapshots(
    op: OpOverload,
    below: torch._C.DispatchKeySet,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    """Go on with a call that met our kernel at the keys *below* it, without hiding its key from the operators inside.

    Torch 2.12 wants the snapshot that our kernel stands in for where an operator goes straight to ``__torch_dispatch__``,
    as under ``inference_mode``. It says so before anything has run; there the operator falls apart first.
    """
    try:
        return op._handle.redispatch_boxed(below, *args, **kwargs)
    except RuntimeError as error:
        if not _wants_a_snapshot(error) or not op._can_decompose():
            raise
    return op.decompose(*args, **kwargs)


def _wants_a_snapshot(error: RuntimeError) -> bool:
    return "tls_on_entry" in str(error)


# Where torch keeps the derivative of a whole linear layer, and where a call goes on below it: to `__torch_dispatch__`, or to a
# kernel of ours, at a key that torch keeps for prototypes of devices.
_AUTOGRAD_OF_NESTED = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradNestedTensor)
_THEN_PYTHON = _AUTOGRAD_OF_NESTED | torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_THEN_APART = _AUTOGRAD_OF_NESTED | torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3)


class _Probe(torch.Tensor):
    """A tensor that operators leave as it is."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's hook
        return args[0]


def python_wants_a_snapshot() -> bool:
    """Whether this torch refuses to go from autograd to ``__torch_dispatch__`` past the kernel that takes the snapshot."""
    with disable_current_modes():
        probe = torch.Tensor._make_wrapper_subclass(_Probe, (1, 1))
        try:
            torch.ops.aten.linear.default.redispatch(_THEN_PYTHON, probe, probe, None)
        except RuntimeError as error:
            return _wants_a_snapshot(error)
    return False


def keep_linear_whole(kind: type, gradients: Callable[..., object]) -> None:
    """Let a linear layer of tensors of the exact class *kind* be one node of the graph, and one operator for dispatch.

    Torch has a derivative for the whole layer, which nested tensors take; for all others the layer falls apart above autograd
    into transposes, views and a product. A call that is the program's own, and seen by no transform and no autocast, is sent
    to that derivative. Where a dispatch mode looks at operators, the layer falls apart below it: the graph must not depend on
    who looks, or a checkpointed region would save other tensors when it runs again.

    Two calls take the other way: one with a frozen weight, for the derivative saves the input even if only the gradient of the
    weight needs it; and one of complex numbers, which the derivative of the derivative forgets to conjugate.

    *gradients* says what ``linear_backward`` is composed of, for modes that count products. Torch 2.12 does not let a call past
    the kernel that ours stands in for; layers fall apart there as ever.
    """
    if python_wants_a_snapshot():
        return
    op = torch.ops.aten.linear.default
    # What `redispatch` ends in, without a frame of Python in between.
    redispatch = op._handle.redispatch_boxed
    ways: dict[int, tuple[torch._C.DispatchKeySet, bool]] = {}
    watchers = torch._C._len_torch_dispatch_stack

    def layer(
        keys: torch._C.DispatchKeySet, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> object:
        number = keys.raw_repr()
        if number not in ways:
            rest = keys & _BELOW_SNAPSHOTS
            ways[number] = rest, rest.highestPriorityTypeId().name.startswith("Autograd")
        below, is_next_autograd = ways[number]
        if (
            type(x) is kind is type(weight)
            and is_next_autograd
            and (bias is None or (type(bias) is kind and bias.dim() == 1))
            and x.dim() > 1
            and weight.dim() == 2  # a matrix
            and (weight.requires_grad or not torch.is_grad_enabled())
            and not x.dtype.is_complex
            and forward_ad._current_level < 0
        ):
            return redispatch(_THEN_APART if watchers() else _THEN_PYTHON, x, weight, bias)
        return redispatch(below, x, weight, bias)

    def layer_apart(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> object:
        """The operators that autograd would meet; below it a composed one is seen whole, and said in others here."""
        if bias is not None and (x.dim() == 2 or x.is_contiguous()):  # rows
            return op.decompose(x, weight, bias)
        product = torch.ops.aten.matmul.default.decompose(x, weight.t())
        return product if bias is None else product.add_(bias)

    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    library.impl("linear", layer, "PythonTLSSnapshot", with_keyset=True)
    library.impl("linear", layer_apart, "PrivateUse3")
    backward = torch.ops.aten.linear_backward.default
    backward.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(gradients)


_libraries: list[torch.library.Library] = []
"""What is registered with torch holds as long as these live."""


def define_operator(
    name: str,
    schema: str,
    run: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    *,
    seeded: bool = True,
) -> None:
    """Make ``torch.ops.hp_dtensor.<name>``; torch's public function gives it no kernel without tensors.

    One that is *seeded* takes from a generator.
    """
    tags = (torch.Tag.nondeterministic_seeded,) if seeded else ()
    _library.define(name + schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hp_dtensor::{name}", fake, lib=_library)
