"""One operator call on distributed tensors: find the rule, move what must move, run locally, wrap.

What an operator does to given layouts is decided once and kept as a plan, under a key of the operator, the interned
specs and the static arguments. A hit costs one walk over the arguments and one dictionary lookup: no strategy is
weighed, no spec built, no message formatted. Plans never hold tensors, and there is a bound on how many are kept.

The order on a miss: a handler for the few operators that are no function of layouts (``item``, ``equal``, list
operators), else the rule table, else the operator's own decomposition, else everything replicated with one warning
that names the operator and the bytes.

Kept apart from the tensor class: it is handed in, so that rules, plans and this module can be tested without it.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, cast

import torch

from hp_dtensor import hits
from hp_dtensor._torch import (
    TorchDTensor,
    decompose,
    decomposition_of,
    disable_current_modes,
    is_traced,
    new_dtensor,
    schema_of,
    with_lazy_views,
)
from hp_dtensor.belongings import agreed, belongs, note_agreement
from hp_dtensor.calls import flat, signature, with_tensors, written_tensors
from hp_dtensor.choice import (
    as_computed,
    bytes_of,
    choose,
    infer_outputs,
    meta_of,
    meta_of_tensor,
)
from hp_dtensor.copied_views import is_copy, refresh_among, remember_source, write_to_base
from hp_dtensor.errors import (
    ImplicitCommunicationError,
    InPlaceError,
    MixedTensorError,
    NoRuleError,
)
from hp_dtensor.modes import (
    Move,
    implicit_replication,
    is_replication_implied,
    is_strict,
    note_moves,
    refuse_communication,
)
from hp_dtensor.out_forms import functional_form, must_resize, write_outs
from hp_dtensor.placements import REPLICATE
from hp_dtensor.redistribute import redistribute_tensor
from hp_dtensor.replicas import differing
from hp_dtensor.rules import (
    LocalCall,
    OpCall,
    OpRule,
    find_rule,
)
from hp_dtensor.rules._registry import on_change
from hp_dtensor.rules.composed import compose
from hp_dtensor.rules.rewritten import rewritten
from hp_dtensor.spec import Spec, make_spec, spec_of
from hp_dtensor.temporaries import alone, owns_memory
from hp_dtensor.whereabouts import whereabouts

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor
    from torch._ops import OpOverload

aten = torch.ops.aten

Handler = Callable[[type, "OpOverload", Sequence[object], Mapping[str, object]], object]

MAX_PLANS = 16384
"""How many plans are kept; the oldest half goes when more would be."""

_plans: dict[object, Plan] = {}
_statistics = {"hits": 0, "misses": 0, "evictions": 0}
_lock = threading.Lock()
_warned: set[str] = set()
_handlers: dict[OpOverload, Handler] = {}
_DRAW = "draw into a tensor with uniform_, normal_ or bernoulli_ and compute from that, or use to_local() first"
_families: list[tuple[tuple[str, ...], Handler]] = []
_by_rule: set[OpOverload] = set()
"""Operators that no family takes."""

# --------------------------------------------------------------------------------------------------------------------
# Plans
# --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Plan:
    """What to do for one operator on given layouts."""

    mesh: DeviceMesh
    """The devices of every distributed argument."""
    moves: tuple[tuple[int, Spec, Spec], ...]
    """(position among the tensor arguments, from, to) for each argument that must move first."""
    communicates: bool
    """Whether one of the moves needs the network."""
    local: Callable[..., object]
    """What to run on the local tensors."""
    outputs: tuple[Spec | None, ...]
    """A spec for each result, None for a result that is no tensor."""
    single: Spec | None
    """The spec when there is just one result."""
    written: int | None
    """The position of the tensor that is written to and returned, or None."""
    inside: bool
    """Whether this rank is part of the mesh."""
    writes_back: tuple[tuple[int, Spec, Spec], ...] = ()
    """(position among the tensor arguments, from, to) for each that is written to after a move: the way back."""
    copied: bool = False
    """Whether the result should be a view, and is a copy."""
    written_copies: tuple[int, ...] = ()
    """Positions among the tensor arguments of those that are written to and should be views, and are copies."""


def cache_statistics() -> dict[str, int]:
    """How often dispatch found a plan, made one, and dropped one, and how many it holds.

    Example:
        >>> sorted(cache_statistics())
        ['evictions', 'hits', 'misses', 'plans']
    """
    return {
        **_statistics,
        "hits": _statistics["hits"] + hits.answered(),
        "evictions": _statistics["evictions"] + hits.evicted.calls,
        "plans": len(_plans) + hits.size(),
    }


def clear_caches() -> None:
    """Forget all plans; the next call of each operator decides anew. For tests and for long-lived notebooks."""
    with _lock:
        _plans.clear()
        hits.clear()


on_change(clear_caches)


def _remember(key: object, plan: Plan) -> None:
    with _lock:
        _statistics["evictions"] += len(hits.keep(_plans, MAX_PLANS, key, plan))


# --------------------------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------------------------

_BY_TYPE = frozenset({bool, int, float, complex})


class _Arguments:
    """The arguments of one call, walked once: the key of the call, its tensors and their specs."""

    __slots__ = ("cacheable", "key", "mesh", "plain", "specs", "tensors", "trusted")

    def __init__(
        self, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self.tensors: list[Tensor] = []
        self.specs: list[Spec | None] = []
        self.plain = False
        self.cacheable = True
        self.mesh: DeviceMesh | None = None
        by_value = not hits.scalars_by_type(op)
        parts: list[object] = [op]
        for value in args:
            self._take(value, parts, by_value)
        for name, value in kwargs.items():
            parts.append(name)
            self._take(value, parts, by_value)
        if self.plain:
            # What is trusted counts as replicated, so that the same call with another's tensor is another key.
            value = None  # or this name would count as somebody who holds the last argument
            parts.append(self._trusted(args, kwargs))
        self.key = tuple(parts)

    def _trusted(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[bool, ...]:
        """For each tensor argument whether it is a plain tensor that ranks should agree about."""
        found: list[bool] = []
        for values in (args, kwargs.values()):
            for position, value in enumerate(values):
                if isinstance(value, torch.Tensor):
                    found.append(_trusted(value, values, position))
                elif type(value) in (list, tuple):
                    inner = cast("Sequence[object]", value)
                    found += [
                        _trusted(item, inner, at)
                        for at, item in enumerate(inner)
                        if isinstance(item, torch.Tensor)
                    ]
                del value
        self.trusted = tuple(found)
        return self.trusted

    def _take(self, value: object, parts: list[object], by_value: bool) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            spec = spec_of(value)
            self.specs.append(spec)
            if spec is None:
                self.plain = True
                parts.append((value.shape, value.stride(), value.dtype))
            else:
                if self.mesh is None:
                    self.mesh = spec.mesh
                parts.append(spec)
        elif kind in _BY_TYPE:
            parts.append((kind, value) if by_value else kind)
        elif kind is list or kind is tuple:
            inner: list[object] = []
            for item in cast("Sequence[object]", value):
                self._take(item, inner, by_value)
            parts.append(tuple(inner))
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self.cacheable = False
        else:
            parts.append(value)


def _unsafe(tensor: Tensor) -> bool:
    """Whether a plain tensor may hold other values on other ranks, for all we know."""
    return (
        tensor.numel() > 1
        and (tensor.is_floating_point() or tensor.is_complex())
        and not tensor.is_meta
    )


def _trusted(value: Tensor, values: Iterable[object], position: int) -> bool:
    """Whether ranks should agree about the plain *value*, at *position* of *values*.

    It is a temporary of torch's own (a constant, a window, zeros), or a distributed module holds it.
    """
    if is_traced(value) or not _unsafe(value) or value.requires_grad:
        return False
    return (alone(values, position, others=_HOLDERS) and owns_memory(value)) or belongs(value)


def _check_trusted(op: OpOverload, found: _Arguments) -> None:
    """Compare over the ranks what they should agree about, before it counts as replicated.

    A constant is the same everywhere. What torch computed from a plain tensor of the program's (a copy that it reshaped, a
    gradient) looks the same from here, and need not be; and a module may have been given another tensor on each rank.

    Raises:
        MixedTensorError: on every rank of the mesh.
    """
    mesh = found.mesh
    for position, (tensor, trusted) in enumerate(zip(found.tensors, found.trusted, strict=True)):
        if not trusted or mesh is None or agreed(tensor, mesh):
            continue
        refuse_communication(op, f"tensor argument {position} is plain, its ranks are compared")
        odd = differing(tensor, mesh, (REPLICATE,) * mesh.ndim)
        if odd is not None:
            msg = (
                f"{op}: got mixed torch.Tensor and DTensor: tensor argument {position} of shape {tuple(tensor.shape)}, made "
                f"on the way from plain tensors or held by a distributed module, differs between the ranks at mesh "
                f"coordinates {odd[1]} and {odd[2]}, and nothing says how it is laid out. Distribute it, or what it was made "
                "from (distribute_tensor, DTensor.from_local), or leave distributed tensors first with to_local()"
            )
            raise MixedTensorError(msg)
        if belongs(tensor):
            note_agreement(tensor, mesh)


_HOLDERS = 4
"""Our list of tensors, and the names and the call that the value goes through while we ask."""


def _numbers_for_a_plain_one(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], found: _Arguments
) -> list[Tensor] | None:
    """All tensor arguments as plain ones, where a plain tensor is written to and all distributed ones are single numbers.

    So a coefficient that was computed from distributed gradients scales a plain gradient.
    """
    written = written_tensors(op, args, kwargs)
    if not written or any(
        found.specs[i] is not None or found.tensors[i].numel() == 1 for i in written
    ):
        return None
    if any(spec is not None and math.prod(spec.shape) != 1 for spec in found.specs):
        return None
    return [whole_of(op, tensor) for tensor in found.tensors]


def _with_single_numbers(op: OpOverload, found: _Arguments) -> list[Tensor] | None:
    """The tensor arguments with plain numbers for those of one element that live on another mesh; None if there are none.

    Norms and losses of tensors on several meshes are put together so. The mesh of the result is that of the tensors of more
    elements, and of numbers alone the largest.
    """
    known = [spec for spec in found.specs if spec is not None]
    first = max(known, key=lambda spec: (math.prod(spec.shape) != 1, spec.mesh.size())).mesh
    if all(spec.mesh is first or spec.mesh == first for spec in known):
        return None
    if any(spec.mesh != first and math.prod(spec.shape) != 1 for spec in known):
        return None
    return [
        tensor if spec is None or spec.mesh == first else whole_of(op, tensor)
        for tensor, spec in zip(found.tensors, found.specs, strict=True)
    ]


def refuse_plain(op: OpOverload, tensor: Tensor, place: str, mesh: DeviceMesh) -> None:
    """Raise for a plain tensor of numbers that may differ between ranks, unless the caller said that they do not.

    Raises:
        MixedTensorError: naming the operator, *place* among its arguments, and the ways out.
    """
    if not _unsafe(tensor) or is_replication_implied():
        return
    msg = (
        f"{op}: got mixed torch.Tensor and DTensor: {place} is a plain tensor of shape "
        f"{tuple(tensor.shape)} and {tensor.dtype}{whereabouts(tensor)}, and nothing says how it is laid out over "
        f"the mesh {tuple(mesh.shape)}. Either distribute it (distribute_tensor, DTensor.from_local), or wrap the "
        "call in hp_dtensor.implicit_replication() if it is the same on every rank, or leave distributed "
        "tensors first with to_local()"
    )
    raise MixedTensorError(msg)


def _admit(op: OpOverload, found: _Arguments) -> list[Spec]:
    """A spec for each tensor argument, plain ones as replicated where that is safe or asked for."""
    mesh = cast("DeviceMesh", found.mesh)
    specs: list[Spec] = []
    for position, (tensor, own) in enumerate(zip(found.tensors, found.specs, strict=True)):
        if own is None:
            if not found.trusted[position]:
                refuse_plain(op, tensor, f"tensor argument {position}", mesh)
            specs.append(
                make_spec(
                    mesh, (REPLICATE,) * mesh.ndim, tensor.shape, tensor.stride(), tensor.dtype
                )
            )
            continue
        if own.mesh is not mesh and own.mesh != mesh:
            msg = (
                f"{op}: tensor arguments live on different meshes, {mesh} and {own.mesh}; redistribute one of them to "
                "the mesh of the other, or leave with to_local() first"
            )
            raise MixedTensorError(msg)
        specs.append(own)
    return specs


# --------------------------------------------------------------------------------------------------------------------
# Deciding
# --------------------------------------------------------------------------------------------------------------------


def _local_call(call: OpCall, inputs: Sequence[Spec], outputs: Sequence[Spec | None]) -> LocalCall:
    mesh = inputs[0].mesh
    return LocalCall(
        call=call,
        mesh_shape=tuple(mesh.shape),
        coordinate=mesh.get_coordinate() or (0,) * mesh.ndim,
        input_placements=tuple(spec.placements for spec in inputs),
        output_placements=tuple(None if spec is None else spec.placements for spec in outputs),
        input_local_shapes=tuple(spec.local_shape for spec in inputs),
        output_local_shapes=tuple(None if spec is None else spec.local_shape for spec in outputs),
        input_boxes=tuple(spec.local_box for spec in inputs),
        output_boxes=tuple(None if spec is None else spec.local_box for spec in outputs),
        group=mesh.get_group,
    )


def _make_plan(
    op: OpOverload,
    rule: OpRule | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    specs: list[Spec],
    result: object,
    *,
    relay: bool = False,
) -> Plan:
    """Decide how *op* runs; with *relay* what it writes to may move first, and is moved back after."""
    facts = signature(op)
    written = written_tensors(op, args, kwargs)
    outputs = [meta_of_tensor(value) for value in flat(result)]
    fixed = [] if relay else written
    choice = choose(op, rule, args, kwargs, specs, outputs, fixed)
    mesh = specs[0].mesh
    targets = [
        spec.with_placements(placements)
        for spec, placements in zip(specs, choice.inputs, strict=True)
    ]
    moves = tuple(
        (i, source, target)
        for i, (source, target) in enumerate(zip(specs, targets, strict=True))
        if source is not target and source.placements != target.placements
    )
    copied = facts.is_view and (bool(moves) or any(spec.copied_view for spec in specs))
    made: list[Spec | None] = [
        None
        if meta is None or placements is None
        else make_spec(mesh, placements, meta.shape, meta.stride, meta.dtype, copied_view=copied)
        for meta, placements in zip(outputs, choice.outputs, strict=True)
    ]
    local: Callable[..., object] = op
    if rule is not None and rule.local is not None and mesh.get_coordinate() is not None:
        filled, named = with_tensors(args, kwargs, [meta_of(spec) for spec in specs])
        call = OpCall(op, tuple(filled), named, tuple(outputs), 1)
        local = rule.local(_local_call(call, targets, made))
    local = hits.fastest(op) if local is op else local
    if any(meta is not None and meta.dtype.is_complex for meta in (*outputs, *specs)):
        local = _seeing_lazy_views(local)
    single = made[0] if isinstance(result, torch.Tensor) else None
    return Plan(
        mesh=mesh,
        moves=moves,
        communicates=any(needs_network(source, target) for _, source, target in moves),
        local=local,
        outputs=tuple(made),
        single=single,
        written=written[0] if written and schema_of(op).returns and len(written) == 1 else None,
        inside=mesh.get_coordinate() is not None,
        writes_back=tuple((i, target, source) for i, source, target in moves if i in written),
        copied=copied,
        written_copies=tuple(i for i in written if specs[i].copied_view),
    )


def _seeing_lazy_views(local: Callable[..., object]) -> Callable[..., object]:
    """*local* as it runs above autograd, where conjugated views that it makes on its way count."""

    @wraps(local)
    def run(*args: object, **kwargs: object) -> object:
        with with_lazy_views():
            return local(*args, **kwargs)

    return run


def needs_network(source: Spec, target: Spec) -> bool:
    """Whether a move from *source* to *target* takes more than what this rank has."""
    return any(
        size > 1 and a != b and not a.is_replicate()
        for size, a, b in zip(source.mesh.shape, source.placements, target.placements, strict=True)
    )


# --------------------------------------------------------------------------------------------------------------------
# Acting
# --------------------------------------------------------------------------------------------------------------------


def _wrap(cls: type, plan: Plan, result: object) -> object:
    if plan.single is not None:
        return new_dtensor(cls, cast("Tensor", result), plan.single, False)
    if isinstance(result, (tuple, list)):
        return hits.wrap(cls, plan.outputs, result)
    return result


def _outside(cls: type, plan: Plan, tensors: Sequence[Tensor]) -> object:
    """The results on a rank that is not part of the mesh: of the right description, without elements (0-d: zero)."""
    if plan.written is not None:
        return tensors[plan.written]
    device = next(local_of(t).device for t in tensors)
    made = [
        None
        if spec is None
        else new_dtensor(
            cls,
            torch.zeros((0,) if spec.shape else (), dtype=spec.dtype, device=device),
            spec,
            False,
        )
        for spec in plan.outputs
    ]
    return made[0] if plan.single is not None else tuple(made)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a distributed tensor of ours or of torch's; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, TorchDTensor) else tensor


def _run(
    cls: type,
    op: OpOverload,
    plan: Plan,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    tensors: list[Tensor],
) -> object:
    if not plan.inside:
        return _outside(cls, plan, tensors)
    locals_ = [local_of(tensor) for tensor in tensors]
    if plan.moves:
        if plan.writes_back and plan.written is not None:
            _refuse_seen(op, plan, args)
        if plan.communicates:
            note_moves(op, plan.moves)
        for position, source, target in plan.moves:
            locals_[position] = redistribute_tensor(
                locals_[position],
                plan.mesh,
                tuple(source.shape),
                source.placements,
                target.placements,
            )
    filled, named = with_tensors(args, kwargs, locals_)
    result = plan.local(*filled, **named)
    for position, source, target in plan.writes_back:
        write_back(tensors[position], locals_[position], source, target)
    for position in plan.written_copies:
        write_to_base(op, tensors[position])
    if plan.written is not None:
        return tensors[plan.written]
    if torch.is_inference_mode_enabled() and signature(op).is_view:
        wrapped = hits.view_in_inference(cls, tensors[0], plan.outputs, result)
    else:
        wrapped = _wrap(cls, plan, result)
    if plan.copied:
        remember_source(wrapped, op, args, kwargs)
    return wrapped


def write_back(tensor: Tensor, moved: Tensor, held: Spec, own: Spec) -> None:
    """Put what was written to the piece *moved*, laid out as *held*, into *tensor*, laid out as *own*."""
    piece = redistribute_tensor(
        moved, held.mesh, tuple(held.shape), held.placements, own.placements
    )
    local_of(tensor).copy_(piece)


def _refuse_seen(op: OpOverload, plan: Plan, args: Sequence[object]) -> None:
    """Raise if somebody holds the addends that *op* writes to, and which would have to be combined for that.

    Raises:
        InPlaceError: naming the layouts. Pieces, and a temporary of torch's own, are moved, written and moved back instead.
    """
    open_ = [move for move in plan.writes_back if move[2].is_partial]
    if not open_ or alone(args, 0, others=1):
        return
    position, target, source = open_[0]
    msg = (
        f"{op}: in-place operations that require placement changes are not supported: it writes to tensor argument "
        f"{position} of shape {tuple(source.shape)} laid out as {source.placements}, and runs on {target.placements}. Use "
        "the out-of-place operator, or redistribute the tensor first"
    )
    raise InPlaceError(msg)


def dispatch(
    cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Run *op* on distributed tensors; results are of type *cls*."""
    refresh_among(args, kwargs)
    handler = _handlers.get(op)
    if handler is None and op not in _by_rule:
        handler = _family(op)
    try:
        return (handler or dispatch_by_rule)(cls, op, args, kwargs)
    except ImplicitCommunicationError as error:
        # Whoever calls this operator can mend what happens inside of it from here only.
        for adviser in _advisers:
            raise adviser(error, op, args, kwargs) from None
        raise


def _family(op: OpOverload) -> Handler | None:
    """The handler of a whole family of operators, found by name once and then kept for this one."""
    for prefixes, handler in _families:
        if schema_of(op).name.startswith(prefixes):
            _handlers[op] = handler
            return handler
    _by_rule.add(op)
    return None


def dispatch_by_rule(
    cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Run *op* by its plan; on a miss make one from the rule table, a decomposition, or by replicating."""
    found = _Arguments(op, args, kwargs)
    vouched = is_replication_implied()
    if found.plain and not vouched:
        _check_trusted(op, found)
    key = (found.key, found.plain and vouched)
    if found.cacheable:
        try:
            plan = _plans.get(key)
        except TypeError:  # an argument without a hash, such as a symbolic size inside a list
            found.cacheable, plan = False, None
        if plan is not None:
            _statistics["hits"] += 1
            return _run(cls, op, plan, args, kwargs, found.tensors)
    _statistics["misses"] += 1
    if found.mesh is None:
        msg = f"{op}: no distributed tensor among the arguments"
        raise NoRuleError(msg)
    rule = find_rule(op)
    numbers = _numbers_for_a_plain_one(op, args, kwargs, found)
    if numbers is not None:
        given, named = with_tensors(args, kwargs, numbers)
        return op(*given, **named)
    single = _with_single_numbers(op, found)
    if single is not None:
        given, named = with_tensors(args, kwargs, single)
        return dispatch(cls, op, given, named)
    specs = _admit(op, found)
    form = functional_form(op)
    if form is not None and (rule is None or not schema_of(op).returns):
        return write_outs(op, form, args, kwargs)
    if rule is None:
        with implicit_replication():  # what is made on the way is the same on every rank
            decomposed = _decompose(op, args, kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        if torch.Tag.nondeterministic_seeded in op.tags:
            msg = f"{op}: draws random numbers in a way that no rule describes, so ranks would draw different ones; {_DRAW}"
            raise NoRuleError(msg)
    try:
        result = infer_outputs(op, args, kwargs, [meta_of(spec) for spec in specs])
        with disable_current_modes(), torch.no_grad():
            result = as_computed(op, args, result, specs[0].mesh.device_type)
    except (NotImplementedError, RuntimeError) as error:
        by_value = torch.Tag.dynamic_output_shape in op.tags
        if not by_value and not isinstance(error, NotImplementedError):
            raise
        return _run_replicated(cls, op, args, kwargs, found, specs)
    if form is not None and must_resize(op, kwargs, flat(result)):
        return write_outs(op, form, args, kwargs)
    composed = _compose(op, args, kwargs, specs, result)
    if composed is not None:
        return composed(*args, **kwargs)
    if rule is None:
        _warn_replicated(op, specs)
    try:
        plan = _make_plan(op, rule, args, kwargs, specs, result)
    except InPlaceError:
        held = signature(op).returns_written and not alone(args, 0, others=1)
        if held and any(specs[i].is_partial for i in written_tensors(op, args, kwargs)):
            raise
        plan = _make_plan(op, rule, args, kwargs, specs, result, relay=True)
    if found.cacheable and all(spec.interned for spec in specs):
        _remember(key, plan)
        _offer(cls, op, args, kwargs, found, plan)
    return _run(cls, op, plan, args, kwargs, found.tensors)


def moves_of(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], specs: Sequence[Spec]
) -> list[Move] | None:
    """What *op* would move over the network if its tensor arguments were laid out as *specs*; None if that is not known.

    Nothing runs. It is not known for operators that are made of others there.
    """
    rule = find_rule(op)
    try:
        result = infer_outputs(op, args, kwargs, [meta_of(spec) for spec in specs])
        if rule is None or _compose(op, args, kwargs, specs, result) is not None:
            return None
        outputs = [meta_of_tensor(value) for value in flat(result)]
        written = written_tensors(op, args, kwargs)
        choice = choose(op, rule, args, kwargs, specs, outputs, written)
    except (NotImplementedError, RuntimeError):
        return None
    found = (
        (spec, spec.with_placements(to)) for spec, to in zip(specs, choice.inputs, strict=True)
    )
    return [(i, a, b) for i, (a, b) in enumerate(found) if a is not b and needs_network(a, b)]


def _offer(
    cls: type,
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    found: _Arguments,
    plan: Plan,
) -> None:
    """Let the hit path answer the next such call, if *plan* is no more than a local call."""
    if not plan.inside or plan.moves or plan.copied or any(map(is_copy, found.tensors)):
        return
    returned = None
    if plan.written is not None:
        same = (i for i, value in enumerate(args) if value is found.tensors[plan.written])
        returned = next(same, None)
        if returned is None:
            return
    elif plan.single is None and len(plan.outputs) < 2:
        return
    hit = hits.Hit(plan.local, plan.single, plan.outputs, returned, is_view=signature(op).is_view)
    hits.remember(cls, op, args, kwargs, hit)


def _compose(
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    specs: Sequence[Spec],
    result: object,
) -> Callable[..., object] | None:
    """The operator in terms of smaller ones, where the dims that it needs whole are cut."""
    filled, named = with_tensors(args, kwargs, [meta_of(spec) for spec in specs])
    outputs = tuple(meta_of_tensor(value) for value in flat(result))
    cut = [
        [place for place, size in zip(spec.placements, spec.mesh.shape, strict=True) if size > 1]
        for spec in specs
    ]
    return compose(OpCall(op, tuple(filled), named, outputs, 1), cut)


def local_on(op: OpOverload, tensor: Tensor, source: Spec, target: Spec) -> Tensor:
    """The local piece of *tensor*, laid out as *source*, after a move to *target* that nobody asked for."""
    if source.placements == target.placements:
        return local_of(tensor)
    if needs_network(source, target):
        note_moves(op, ((0, source, target),))
    return redistribute_tensor(
        local_of(tensor), source.mesh, tuple(source.shape), source.placements, target.placements
    )


def whole_of(op: OpOverload, tensor: Tensor) -> Tensor:
    """All of *tensor* as a plain one, after a move that nobody asked for; a plain tensor is its own."""
    spec = spec_of(tensor)
    if spec is None:
        return tensor
    return local_on(op, tensor, spec, spec.with_placements((REPLICATE,) * spec.mesh.ndim))


Adviser = Callable[
    [ImplicitCommunicationError, "OpOverload", Sequence[object], Mapping[str, object]],
    ImplicitCommunicationError,
]
_advisers: list[Adviser] = []


def add_adviser(adviser: Adviser) -> None:
    """Let *adviser* say what to do about an error of :func:`strict`; it gets the call, and gives the error to raise."""
    _advisers.append(adviser)


def _decompose(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """*op* in terms of simpler operators, run under dispatch; NotImplemented when torch knows no decomposition."""
    other = rewritten(op)
    if other is not None:
        return other(*args, **kwargs)
    composed = decompose(op, args, kwargs)
    if composed is not NotImplemented:
        return composed
    if signature(op).written or signature(op).written_names:
        return NotImplemented
    python = decomposition_of(op)
    return NotImplemented if python is None else python(*args, **kwargs)


def _warn_replicated(op: OpOverload, specs: Sequence[Spec]) -> None:
    moved = sum(
        bytes_of(meta_of(spec))
        for spec in specs
        if not all(p.is_replicate() for p in spec.placements)
    )
    if not moved:
        return
    if is_strict():
        what = f"it has no sharding rule, and running it replicated gathers {int(moved)} bytes"
        refuse_communication(op, what)
    if str(op) not in _warned:
        _warned.add(str(op))
        why = "has no sharding rule"
        advice = "Register one with hp_dtensor.register_rule to keep it sharded"
        if torch.Tag.dynamic_output_shape in op.tags:
            why = "has no sharding rule, since the shape of its result depends on values"
            advice = "Where the shape is known, an operator with a fixed one (where, a mask) stays sharded"
        warnings.warn(
            f"{op} {why}: its inputs ({int(moved)} bytes) are replicated on every rank before it runs. {advice}",
            stacklevel=2,
        )


def _run_replicated(
    cls: type,
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    found: _Arguments,
    specs: Sequence[Spec],
) -> object:
    """Run an operator whose result's shape depends on its values: on whole tensors, the same on each rank."""
    written = written_tensors(op, args, kwargs)
    everywhere = [spec.with_placements((REPLICATE,) * spec.mesh.ndim) for spec in specs]
    if any(specs[i] is not everywhere[i] for i in written):
        msg = f"{op}: writes to a sharded tensor and has no sharding rule; use the out-of-place operator"
        raise NoRuleError(msg)
    _warn_replicated(op, specs)
    mesh = specs[0].mesh
    if mesh.get_coordinate() is None:
        msg = f"{op}: the shape of its result depends on values that this rank, outside of the mesh {mesh}, does not have"
        raise NoRuleError(msg)
    locals_ = [
        redistribute_tensor(
            local_of(tensor), mesh, tuple(spec.shape), spec.placements, target.placements
        )
        for tensor, spec, target in zip(found.tensors, specs, everywhere, strict=True)
    ]
    filled, named = with_tensors(args, kwargs, locals_)
    result = _seeing_lazy_views(op)(*filled, **named)

    def wrap(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        spec = make_spec(mesh, (REPLICATE,) * mesh.ndim, value.shape, value.stride(), value.dtype)
        return new_dtensor(cls, value, spec, False)

    if written:
        return found.tensors[written[0]]
    if isinstance(result, tuple):
        return tuple(wrap(value) for value in result)
    return [wrap(value) for value in result] if isinstance(result, list) else wrap(result)


def handles(*ops: OpOverload) -> Callable[[Handler], Handler]:
    """Register a handler for operators that are no function of layouts; it gets ``(cls, op, args, kwargs)``."""

    def register(handler: Handler) -> Handler:
        for op in ops:
            _handlers[op] = handler
        return handler

    return register


def add_handler_family(prefixes: tuple[str, ...], handler: Handler) -> None:
    """Let *handler* take every operator whose schema name starts with one of *prefixes* and that has none of its own."""
    _families.append((prefixes, handler))
    _by_rule.clear()
