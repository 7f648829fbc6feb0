"""A Hugging Face model's own ``tp_plan`` and ``ep_plan`` as a plan of ours, and our styles under names that its library reads.

A ``tp_plan`` gives modules and parameters names of styles. What a name means there is kept: values between modules are plain,
and whole unless a column-parallel layer cut them. Kept as well is what is silent there: modules that no name covers run whole
on every rank.

Two things are added. Key and value projections with fewer heads than ranks are shared out by heads, and a number of heads that
does not divide is one error. With sequence parallelism the residual stream of each layer is cut along the sequence: it
begins at the first layer and ends at the last norm, since what is between the embedding and the layers (positions, masks) is
computed from the whole length.

Experts are cut each by its features, which is what a ``tp_plan`` says, or shared out whole, which is what an ``ep_plan`` says. All
ranks have all tokens either way: they are those of the attention before. So whole experts need no tokens sent: each rank runs
its own on the tokens that are for them, and the outputs are added up. Over ranks with tokens of their own they travel, which is
:class:`hp_tp.ExpertParallel`, or the library's own style for its loader; that is why its names are not registered for it.

The library itself is needed only by :func:`register_with_transformers`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, cast

from hp_dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
)
from hp_dtensor.placements import shard_dim
from hp_dtensor.spec import spec_of
from hp_mesh import DeviceMesh
from torch import nn

from hp_tp._torch import parameters_of
from hp_tp.attention import KVHeadParallel
from hp_tp.errors import PlanError, UnmatchedKeyError
from hp_tp.norm import SequenceParallel
from hp_tp.prepare import PrepareModuleInput, PrepareModuleOutput
from hp_tp.replicas import LocalReplicas, declared_like
from hp_tp.seams import EnteringParallel, LeavingParallel, SharedColumnsParallel
from hp_tp.sharding import LayoutLike, LocalMapConfig, ShardingConfig
from hp_tp.style import CombinedParallel, ParallelStyle
from hp_tp.substitution import exchange_attribute, original_class, substitute
from hp_tp.tensor_parallel import ColwiseParallel, RowwiseParallel

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    from hp_tp.substitution import Forward

__all__ = ["hugging_face_plan", "register_with_transformers"]

_R: LayoutLike = {"tp": Replicate()}
_P: LayoutLike = {"tp": Partial()}


def _linear(name: str) -> ParallelStyle | None:
    """The style of a linear layer or an embedding."""
    whole = Replicate()
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=whole),
        "colwise_rep": ColwiseParallel(output_layouts=whole),
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=whole),
        "rowwise_rep": RowwiseParallel(input_layouts=whole),
        "packed_colwise": ColwiseParallel(blocks=2),
        "embedding_rowwise": RowwiseParallel(input_layouts=whole),
        "embedding_colwise": ColwiseParallel(output_layouts=whole),
        "sequence_parallel": SequenceParallel(),
        "all_reduce": PrepareModuleOutput(
            output_layouts=Partial(), desired_output_layouts=Replicate()
        ),
    }
    return styles.get(name)


_SPECIAL = (
    "replicated_with_grad_allreduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "local_params",
    "mla_kv_a_proj",
    "replicate",
)
"""Styles that depend on the module they are given to."""

_NAMES = (
    *("colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input"),
    *("rowwise_rep", "packed_colwise", "packed_rowwise", "embedding_rowwise", "embedding_colwise"),
    *("sequence_parallel", "all_reduce"),
    *_SPECIAL,
)
_EXPERT_NAMES = ("grouped_gemm", "ep_dispatch_experts", "ep_router")
"""What an ``ep_plan`` calls a stacked parameter, its module and, in older ones, the router, which needs nothing from us."""


def _cut(style: str, ndim: int) -> Placement:
    """How a style cuts a parameter that it names itself; weights end with outputs and inputs, in this order."""
    rows = max(ndim - 2, 0)
    if style.startswith("colwise"):
        return Shard(rows)
    if style.startswith("rowwise"):
        return Shard(ndim - 1) if ndim > 1 else Replicate()
    if style == "packed_colwise":
        return StridedShard(rows, split_factor=2) if ndim > 1 else Shard(0)
    if style == "packed_rowwise":
        return StridedShard(ndim - 1, split_factor=2) if ndim > 1 else Replicate()
    if style in ("replicate", "sequence_parallel"):
        return Replicate()
    if style == "grouped_gemm":
        return Shard(0)
    message = f"style {style!r} is for a module, and the plan gives it to a parameter"
    raise PlanError(message)


@dataclass(kw_only=True)
class PackedParallel(ParallelStyle):
    """Cut the parameters of a module one by one and run its forward on the pieces: experts, above all.

    Args:
        cuts: how each parameter is cut; those without an entry are replicas.
        reduces: whether the first and the third input are whole (tokens and weights of routes, a list of experts between
            them) and each rank's output is an addend.
        chooses: whether experts are whole, and each rank runs its own: what goes to others is left out.
    """

    lays_out: ClassVar[bool] = True
    cuts: Mapping[str, Placement]
    reduces: bool = False
    chooses: bool = False

    def __hash__(self) -> int:
        return hash((tuple(self.cuts.items()), self.reduces, self.chooses))

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse parameters that the number of ranks does not divide, and replicas that would be added up."""
        for name, parameter in module.named_parameters(recurse=False):
            placement = self.cuts.get(name, Replicate())
            dim = shard_dim(placement)
            if dim is None:
                self._check_replica(module, name)
                continue
            blocks = placement.split_factor if isinstance(placement, StridedShard) else 1
            size = parameter.shape[dim]
            if size % (blocks * device_mesh.size()):
                legal = [d for d in range(1, size + 1) if size % (blocks * d) == 0]
                message = (
                    f"{type(module).__name__}.{name} has {size} entries in dim {dim}"
                    + (f" in {blocks} blocks" if blocks > 1 else "")
                    + f", which {device_mesh.size()} ranks do not divide; degrees that do: {legal}"
                )
                raise PlanError(message)

    def _check_replica(self, module: nn.Module, name: str) -> None:
        if self.reduces:
            message = (
                f"the outputs of {type(module).__name__} are added up over the ranks, and so would be its {name!r}, which the "
                "plan leaves whole; cut it too, or leave the module out of the plan"
            )
            raise PlanError(message)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Lay out the parameters, and add up what the ranks give."""
        self._keep_kernels_aligned(module, device_mesh)
        states: dict[str, LayoutLike] = {
            name: {"tp": self.cuts.get(name, Replicate())}
            for name, _ in module.named_parameters(recurse=False)
        }
        states.update((name, _R) for name, _ in module.named_buffers(recurse=False))
        if not self.reduces:
            config = ShardingConfig(state_shardings=states, local_map=LocalMapConfig())
            return declared_like(config, self).apply(module, device_mesh)
        names = list(inspect.signature(module.forward).parameters)
        if self.chooses:
            self._choose(module, device_mesh, names)
        config = ShardingConfig(
            state_shardings=states,
            in_src_shardings=dict.fromkeys((*names[:1], *names[2:3]), _R),
            local_map=LocalMapConfig(),
            out_src_shardings=_P,
            out_dst_shardings=_R,
            use_local_output=True,
        )
        return declared_like(config, self).apply(module, device_mesh)

    def _choose(self, module: nn.Module, mesh: DeviceMesh, names: list[str]) -> None:
        """Have the forward count this rank's experts, and give it their routes only."""
        stacked = next(iter(self.cuts))
        count = parameters_of(module)[stacked].shape[0] // mesh.size()  # type: ignore[union-attr]  # the plan has found it
        for attribute, value in (("num_experts", count), ("_is_expert_parallel", True)):
            if hasattr(module, attribute):  # names that the library's forwards read
                exchange_attribute(module, attribute, value)
        substitute(module, _OwnRoutes(mesh.get_local_rank(), count, tuple(names[:3])))

    def _keep_kernels_aligned(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Have the experts run one by one where a piece's rows are too short for the kernel that runs them together."""
        rows = [
            parameter.shape[-1]
            // (mesh.size() if shard_dim(cut) == parameter.ndim - 1 else 1)
            * parameter.element_size()
            for name, cut in self.cuts.items()
            if (parameter := parameters_of(module).get(name)) is not None
        ]
        config = getattr(module, "config", None)
        if config is not None and any(size % _KERNEL_ALIGNMENT for size in rows):
            own = copy.copy(config)
            own._experts_implementation = "eager"  # noqa: SLF001  # the name that transformers reads
            exchange_attribute(module, "config", own)


_KERNEL_ALIGNMENT = 16
"""Bytes that a grouped matrix product wants rows to be a multiple of."""


@dataclass(frozen=True, slots=True)
class _OwnRoutes:
    """Experts get the routes to this rank's, and all others lead behind the last with weight zero: a wrapper of their forward."""

    rank: int
    count: int
    """How many experts a rank has."""
    names: tuple[str, ...]
    """Of the tokens, the experts that each goes to, and the weights of these."""

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens, routes, weights = (cast("Tensor", given.pop(name)) for name in self.names)
        own = routes - self.rank * self.count
        elsewhere = (own < 0) | (own >= self.count)
        routes = own.masked_fill(elsewhere, self.count)
        weights = weights.masked_fill(elsewhere, 0.0)
        return forward(module, tokens, routes, weights, *args[3:], **given)


@dataclass(frozen=True, slots=True)
class _Share:
    """Each rank takes its share of what all of them will add up: a wrapper of its forward."""

    ranks: int

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        first, *rest = args
        return forward(module, cast("Tensor", first) / self.ranks, *rest, **kwargs)


@dataclass(kw_only=True, unsafe_hash=True)
class IdentityExpertParallel(ParallelStyle):
    """Divide the input of an expert that gives it back, since the ranks' outputs are added up."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Let the forward see this rank's share."""
        substitute(module, _Share(device_mesh.size()))
        return module


@dataclass(kw_only=True, unsafe_hash=True)
class HeadsParallel(ParallelStyle):
    """Tell an attention how many query heads a rank has for each of its key-value heads, and refuse what does not divide.

    Args:
        heads: how many query heads there are.
        kv_heads: how many key-value heads.
    """

    heads: int
    kv_heads: int

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Refuse a number of ranks that would need parts of heads."""
        ranks, kv = device_mesh.size(), self.kv_heads
        if self._fits(ranks):
            return
        legal = [degree for degree in range(1, self.heads + 1) if self._fits(degree)]
        message = (
            f"{ranks} ranks cannot share out the {self.heads} heads of {type(module).__name__} with {kv} key-value heads "
            f"whole; degrees that can: {legal}"
        )
        raise PlanError(message)

    def _fits(self, ranks: int) -> bool:
        return not self.heads % ranks and not (self.kv_heads % ranks and ranks % self.kv_heads)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Set the number of query heads to a key-value head."""
        ranks = device_mesh.size()
        if ranks > self.kv_heads and hasattr(module, "num_key_value_groups"):
            exchange_attribute(module, "num_key_value_groups", self.heads // ranks)
        return module


def hugging_face_plan(
    model: nn.Module,
    tp_plan: Mapping[str, str] | None = None,
    *,
    ep_plan: Mapping[str, str] | None = None,
    expert_parallel: bool = False,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
    loss_parallel: bool = False,
) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel plan that a Hugging Face model brings with it, for :func:`parallelize_module`.

    Args:
        model: the model; what counts is its ``tp_plan`` and the names and sizes of its modules.
        tp_plan: names of styles for module and parameter names, ``*`` standing for a number; the model's own when None.
            Entries of the model's own that it has no module for are left out, entries given here must match.
        ep_plan: names of styles for experts that are shared out whole; the model's own when None. It is used with
            *expert_parallel*, and goes before what the other plan says of the same modules and what is in them.
        expert_parallel: whether each rank has some experts whole, rather than a part of each. Their number must be a multiple of
            the number of ranks.
        sequence_parallel: whether the residual stream is cut along the sequence between the first layer and the last norm. Its
            length must then be a multiple of the number of ranks, or the model raises ``BoundaryError``.
        sequence_dim: the dim of the sequence.
        loss_parallel: whether logits stay a DTensor cut along the vocabulary.

    Raises:
        PlanError: without a plan, for a name that is no style, or when sequence parallelism does not know a module.
        UnmatchedKeyError: for entries of *tp_plan* or *ep_plan* that match nothing.

    Example:
        >>> from torch import nn
        >>> from hp_tp import hugging_face_plan
        >>> model = nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2)})
        >>> plan = hugging_face_plan(model, {"up": "colwise", "down": "rowwise"})
        >>> [type(style).__name__ for style in plan.values()]
        ['ColwiseParallel', 'RowwiseParallel']
    """
    given = getattr(model, "tp_plan", None) if tp_plan is None else tp_plan
    if not given:
        message = (
            f"{type(model).__name__} has no tp_plan; pass one, a mapping from names (* for a number) to names of styles: "
            f"{', '.join(_NAMES)}"
        )
        raise PlanError(message)
    must_match = set(tp_plan or ())
    if expert_parallel or ep_plan is not None:
        experts = _expert_plan(model, ep_plan)
        given = {key: style for key, style in given.items() if not _of_any(key, experts)}
        given.update(experts)
        must_match = (must_match & set(given)) | set(ep_plan or ())
    reader = _Reader(model, dict(given), must_match)
    entries = reader.entries()
    if loss_parallel:
        entries.update(_cut_logits(entries, reader))
    if sequence_parallel:
        entries.update(_Sequence(model, reader, entries, sequence_dim).entries())
    return _by_pattern(entries, reader)


def _expert_plan(model: nn.Module, ep_plan: Mapping[str, str] | None) -> Mapping[str, str]:
    plan = getattr(model, "ep_plan", None) if ep_plan is None else ep_plan
    if not plan:
        message = (
            f"{type(model).__name__} has no ep_plan; pass one, such as {{'layers.*.mlp.experts': 'ep_dispatch_experts', "
            "'layers.*.mlp.experts.gate_up_proj': 'grouped_gemm', 'layers.*.mlp.experts.down_proj': 'grouped_gemm'}, or "
            "expert_parallel=False"
        )
        raise PlanError(message)
    return cast("Mapping[str, str]", plan)


def _of_any(key: str, plan: Mapping[str, str]) -> bool:
    """Whether *plan* names *key*, or what it is in."""
    return any(_within(key, around) for around in plan)


def _cut_logits(entries: Mapping[str, ParallelStyle], reader: _Reader) -> dict[str, ParallelStyle]:
    head = ColwiseParallel(output_layouts=Replicate())
    vocabulary = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return {
        path: vocabulary
        for path, style in entries.items()
        if style == head and path.count(".") == 0 and isinstance(reader.modules[path], nn.Linear)
    }


def _generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class _Reader:
    """A ``tp_plan`` read against a model: the style of each module that it names, by the module's full name."""

    def __init__(self, model: nn.Module, plan: dict[str, str], must_match: Container[str]) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.pattern: dict[str, str] = {}
        """The key of the plan that names each module."""
        self.named: dict[str, str] = {}
        """What the plan calls each module's style."""
        self.cuts: dict[str, dict[str, Placement]] = {}
        """How it cuts parameters that it names, by module."""
        self.stacked: set[str] = set()
        """The modules whose parameters it cuts by experts."""
        parameters = {
            name: parameter.ndim
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        unmatched: dict[str, list[str]] = {}
        for key, style in plan.items():
            if style not in (*_NAMES, *_EXPERT_NAMES):
                near = get_close_matches(style, (*_NAMES, *_EXPERT_NAMES), 1)
                message = f"{key!r} has style {style!r}, which is none" + (
                    f"; did you mean {near[0]!r}?" if near else f"; styles are {', '.join(_NAMES)}"
                )
                raise PlanError(message)
            if not self._read(key, style, parameters) and key in must_match:
                names = list(dict.fromkeys(map(_generic, (*self.modules, *parameters))))
                unmatched[key] = get_close_matches(key, names, 3, 0.5)
        if unmatched:
            raise UnmatchedKeyError(unmatched)

    def _read(self, key: str, style: str, parameters: Mapping[str, int]) -> bool:
        modules = [name for name in self.modules if name and key in (name, _generic(name))]
        for name in modules:
            self.named[name] = style
            self.pattern[name] = key
        found = [name for name in parameters if key in (name, _generic(name))]
        for name in found:
            owner, _, own = name.rpartition(".")
            self.cuts.setdefault(owner, {})[own] = _cut(style, parameters[name])
            if style == "grouped_gemm":
                self.stacked.add(owner)
            self.pattern.setdefault(owner, key.rpartition(".")[0])
        return bool(modules or found)

    def entries(self) -> dict[str, ParallelStyle]:
        """One style for each module that the plan names."""
        made: dict[str, ParallelStyle] = {}
        paths = [path for path in self.modules if path in self.named or path in self.cuts]
        for path in paths:
            style = self._style(path)
            if style is not None:
                made[path] = style
        for path, heads in self._heads().items():
            self.pattern.setdefault(path, _generic(path))
            before = made.get(path)
            made[path] = heads if before is None else CombinedParallel(styles=(before, heads))
        return made

    def _style(self, path: str) -> ParallelStyle | None:
        name, cuts = self.named.get(path, "local_params"), self.cuts.get(path, {})
        if path in self.stacked:  # whatever the module is called: it has been several names
            return PackedParallel(cuts=cuts, reduces=True, chooses=True)
        if name == "ep_dispatch_experts":
            message = f"{path!r} has style {name!r}, and none of its parameters has 'grouped_gemm', which shares them out"
            raise PlanError(message)
        if cuts or name in ("local_params", "moe_tp_experts"):
            if name in ("local_params", "moe_tp_experts"):
                return (
                    PackedParallel(cuts=cuts, reduces=name == "moe_tp_experts") if cuts else None
                )
            message = f"{path!r} has style {name!r} and its parameters {list(cuts)} have others; give one or the other"
            raise PlanError(message)
        if name in ("replicate", "ep_router"):
            return None
        if name == "replicated_with_grad_allreduce":
            return LocalReplicas()
        if name == "moe_identity_expert":
            return IdentityExpertParallel()
        if name == "mla_kv_a_proj":
            return SharedColumnsParallel(columns=self._rotary_columns(path))
        if name == "packed_rowwise":
            message = f"{path!r} has style 'packed_rowwise', which is for a parameter that its module uses transposed"
            raise PlanError(message)
        heads = self._kv_heads(path)
        return heads if heads is not None and name == "colwise" else _linear(name)

    def _rotary_columns(self, path: str) -> int:
        config = getattr(self.model, "config", None)
        text = getattr(config, "get_text_config", lambda: config)()
        columns = getattr(text, "qk_rope_head_dim", None)
        if not isinstance(columns, int):
            message = f"{path!r} has style 'mla_kv_a_proj', which needs qk_rope_head_dim in the model's config"
            raise PlanError(message)
        return columns

    def _kv_heads(self, path: str) -> KVHeadParallel | None:
        """The style of a key or value projection whose heads are known."""
        parent, _, name = path.rpartition(".")
        found = _head_counts(self.modules[parent])
        module = self.modules[path]
        if found is None or name not in _KV or original_class(module) is not nn.Linear:
            return None
        _, kv_heads = found
        width = cast("nn.Linear", module).out_features
        return KVHeadParallel(head_dim=width // kv_heads, num_heads=kv_heads)

    def _heads(self) -> dict[str, HeadsParallel]:
        """The attentions whose heads the plan cuts."""
        made = {}
        for path in self.named:
            parent, _, name = path.rpartition(".")
            if name == _KV[0] and self.named[path] == "colwise":
                found = _head_counts(self.modules[parent])
                if found is not None:
                    made[parent] = HeadsParallel(heads=found[0], kv_heads=found[1])
        return made


_KV = ("k_proj", "v_proj")


def _head_counts(attention: nn.Module) -> tuple[int, int] | None:
    """How many query and key-value heads an attention has, if it says how wide they are."""
    width = getattr(attention, "head_dim", None)
    queries, keys = (getattr(attention, name, None) for name in ("q_proj", _KV[0]))
    if not isinstance(width, int) or not all(isinstance(m, nn.Linear) for m in (queries, keys)):
        return None
    heads, kv_heads = (cast("nn.Linear", m).out_features // width for m in (queries, keys))
    said = getattr(getattr(attention, "config", None), "num_attention_heads", None)
    if isinstance(said, int) and heads == 2 * said:  # with a gate beside each query
        heads = said
    return heads, kv_heads


_SIMPLE = ("colwise", "rowwise", "replicated_with_grad_allreduce")


@dataclass(frozen=True, slots=True)
class _Sequence:
    """What a plan needs besides for the residual stream to be cut along the sequence."""

    model: nn.Module
    reader: _Reader
    planned: Mapping[str, ParallelStyle]
    dim: int

    def entries(self) -> dict[str, ParallelStyle]:
        """The entries that are added or replaced."""
        stack = self._stack()
        layers = cast("nn.ModuleList", self.reader.modules[stack])
        made: dict[str, ParallelStyle] = {f"{stack}.0": EnteringParallel(dim=self.dim)}
        for name, layer in layers.named_children():
            made.update(self._layer(f"{stack}.{name}", layer))
        made[self._last_norm(stack)] = LocalReplicas(gathers=self.dim)
        return made

    def _stack(self) -> str:
        """The one list of layers that the plan speaks of."""
        stacks = {key.split(".*.")[0] for key in self.reader.pattern.values() if ".*." in key}
        found = sorted(
            stack for stack in stacks if isinstance(self.reader.modules.get(stack), nn.ModuleList)
        )
        if len(found) != 1:
            message = f"sequence parallelism is known for a decoder with one list of layers, and this plan speaks of {found}"
            raise PlanError(message)
        return found[0]

    def _layer(self, path: str, layer: nn.Module) -> Iterator[tuple[str, ParallelStyle]]:
        own = [name for name, _ in layer.named_parameters(recurse=False)]
        if own:
            raise PlanError(self._unknown(f"{path}.{own[0]}", "a parameter of the layer itself"))
        for name, child in layer.named_children():
            child_path = f"{path}.{name}"
            if not any(True for _ in child.parameters()):
                continue
            if any(_within(planned, child_path) for planned in self.planned):
                yield from self._sub_layer(child_path, child)
            elif _is_norm(child):
                yield child_path, LocalReplicas()
            else:
                raise PlanError(self._unknown(child_path, "neither norm nor in the plan"))

    def _sub_layer(self, path: str, module: nn.Module) -> Iterator[tuple[str, ParallelStyle]]:
        whole, cut = Replicate(), Shard(self.dim)
        last = self._output_of(path, module)
        before = self.planned.get(path)
        own = () if before is None else (before,)
        enter = PrepareModuleInput(
            input_layouts=cut,
            desired_input_layouts=whole,
            use_local_output=last is None,
            leave_others=True,
        )
        if last is not None:
            yield path, CombinedParallel(styles=(*own, enter)) if own else enter
            yield last, RowwiseParallel(output_layouts=cut)
            return
        yield path, CombinedParallel(styles=(*own, enter, LeavingParallel(dim=self.dim)))

    def _output_of(self, path: str, module: nn.Module) -> str | None:
        """The row-parallel layer that gives the output of a sub-layer without other parameters than the plan's."""
        rows = []
        for name, child in module.named_modules():
            full = f"{path}.{name}" if name else path
            if not any(True for _ in child.parameters(recurse=False)):
                continue
            style = self.reader.named.get(full)
            if style not in _SIMPLE:
                return None
            if style == "rowwise":
                rows.append(full)
        return rows[0] if len(rows) == 1 else None

    def _last_norm(self, stack: str) -> str:
        parent = stack.rpartition(".")[0]
        children = list(self.reader.modules[parent].named_children())
        names = [name for name, _ in children]
        after = children[names.index(stack.rpartition(".")[2]) + 1 :]
        found = [
            name
            for name, child in after
            if any(True for _ in child.parameters()) and _is_norm(child)
        ]
        if len(found) != 1:
            message = (
                f"sequence parallelism ends at the norm behind the layers, and behind {stack!r} there are {found}; pass "
                "sequence_parallel=False, or write the plan with DecoderNames"
            )
            raise PlanError(message)
        return f"{parent}.{found[0]}" if parent else found[0]

    @staticmethod
    def _unknown(path: str, what: str) -> str:
        return (
            f"{path!r} is {what}, so that nobody knows what it does to a piece of the sequence; pass sequence_parallel=False, or "
            "give it a style and merge the plans"
        )


def _within(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def _is_norm(module: nn.Module) -> bool:
    return all(p.ndim <= 1 for p in module.parameters()) and not any(
        True for _ in module.children()
    )


def _by_pattern(entries: Mapping[str, ParallelStyle], reader: _Reader) -> dict[str, ParallelStyle]:
    """The entries under the keys of the plan where all modules of a key have one style, else under full names."""
    members: dict[str, list[str]] = {}
    for path in reader.modules:
        members.setdefault(reader.pattern.get(path, _generic(path)), []).append(path)
    plan: dict[str, ParallelStyle] = {}
    for path, style in entries.items():
        key = reader.pattern.get(path, _generic(path))
        alike = all(entries.get(member) == style for member in members[key])
        plan[key if alike else path] = style
    return plan


class _Registered:
    """One of our styles with the methods that transformers calls on one of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def validate_param(
        self,
        module: nn.Module,
        param: str,
        mesh: TorchMesh,
        parameter_name: str | None = None,
    ) -> None:
        """Nothing to say before the module is seen as a whole."""

    def shard_param(self, module: nn.Module, param: str, mesh: TorchMesh) -> None:
        """Make a parameter without data the laid-out one that the loader fills."""
        parameter = parameters_of(module).get(param)
        if parameter is None or self.name in _SPECIAL:
            return
        ours = DeviceMesh.from_torch(mesh)
        placement = _own_cut(self.name, module, parameter.ndim)
        if ours.size() == 1 and isinstance(placement, StridedShard):
            placement = Shard(placement.dim)
        data = distribute_tensor(parameter.detach(), ours, (placement,), src_data_rank=None)
        parameters_of(module)[param] = nn.Parameter(data, requires_grad=parameter.requires_grad)

    def install_forward(self, module: nn.Module, mesh: TorchMesh) -> nn.Module:
        """Let our style run the module; its parameters are laid out already."""
        ours = DeviceMesh.from_torch(mesh)
        style = _module_style(self.name, module)
        if style is None:
            return module
        style.src_data_rank = None
        style.check(module, ours)
        return style.apply(module, ours)


def _own_cut(name: str, module: nn.Module, ndim: int) -> Placement:
    """How a named style cuts a parameter of *module*."""
    if name.startswith("embedding"):
        return Shard(0 if name == "embedding_rowwise" else 1)
    if name == "packed_colwise" and isinstance(module, nn.Linear):
        return StridedShard(0, split_factor=2)
    return _cut(name, ndim)


def _module_style(name: str, module: nn.Module) -> ParallelStyle | None:
    """Our style for a module whose parameters are laid out by name already."""
    if name in ("local_params", "moe_tp_experts"):
        cuts = {
            own: spec.placements[0]
            for own, parameter in module.named_parameters(recurse=False)
            if (spec := spec_of(parameter)) is not None
        }
        return PackedParallel(cuts=cuts, reduces=name == "moe_tp_experts")
    if name == "mla_kv_a_proj":
        columns = getattr(getattr(module, "config", None), "qk_rope_head_dim", None)
        if not isinstance(columns, int):
            message = "style 'mla_kv_a_proj' needs qk_rope_head_dim in the config of the model"
            raise PlanError(message)
        return SharedColumnsParallel(columns=columns)
    if name == "replicated_with_grad_allreduce":
        return LocalReplicas()
    if name == "moe_identity_expert":
        return IdentityExpertParallel()
    return None if name == "replicate" else _linear(name)


def register_with_transformers(*, replace: bool = False) -> tuple[str, ...]:
    """Let plans of the transformers library name our styles, and return the names.

    They are ``hp_colwise``, ``hp_rowwise`` and so on, for all that the library has, and can be mixed with its own in the
    ``tp_plan`` that ``from_pretrained`` takes. Parameters are laid out before they are loaded, so each rank reads its piece.

    Args:
        replace: take the library's own names as well, so that ``tp_plan="auto"`` uses our styles.

    Raises:
        ImportError: without the library, or with one older than 5.

    Example:
        >>> from hp_tp import register_with_transformers
        >>> def load(folder, config):
        ...     from transformers import AutoModelForCausalLM
        ...
        ...     register_with_transformers(replace=True)
        ...     return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    """
    library = importlib.import_module("transformers.integrations.tensor_parallel")
    names = []
    for name in _NAMES:
        style = _Registered(name)
        for known in (f"hp_{name}", *((name,) if replace else ())):
            library.ALL_PARALLEL_STYLES.register(known, style)
            names.append(known)
    return tuple(names)
