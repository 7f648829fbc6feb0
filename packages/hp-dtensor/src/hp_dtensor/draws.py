"""Operators that draw random numbers, on distributed tensors.

The idea: each is a few draws into tensors made after the model of its arguments, and arithmetic that has rules of its own.
So only the in-place operators (``normal_``, ``bernoulli_``, ...) draw, each once, into this rank's piece, by
:mod:`hp_dtensor.random`; what has to see all values to sample (``poisson``, ``multinomial`` with replacement) samples on the whole,
alike on every rank.

The rule: nothing is ever drawn into addends. A tensor like a Partial one is replicated, and drawing into a Partial one is an
error, as is an operator that draws and is not known here: it would draw other numbers on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Generator, Tensor

from hp_dtensor import random
from hp_dtensor._torch import is_traced, new_dtensor, schema_of
from hp_dtensor.dispatch import dispatch_by_rule, handles, local_of, local_on
from hp_dtensor.errors import InPlaceError, LayoutError
from hp_dtensor.modes import refuse_communication
from hp_dtensor.out_forms import functional_form
from hp_dtensor.placements import (
    REPLICATE,
    Placement,
    Shard,
    StridedShard,
    gradient_placements,
    shard_dim,
)
from hp_dtensor.random import Draw, Peers, Piece, policy_of
from hp_dtensor.rules._registry import aten_ops
from hp_dtensor.spec import Spec, make_spec, spec_of

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch._ops import OpOverload

__all__ = ["draw_into", "peers_of", "piece_of"]

aten = torch.ops.aten


# --- one draw ---------------------------------------------------------------------------------


def peers_of(mesh: DeviceMesh, what: object) -> Peers:
    """The ranks of *mesh*, as those that must draw the same; *what* is named if they may not talk about it."""

    def refuse() -> None:
        refuse_communication(
            cast("OpOverload", what),
            "the ranks of the mesh were not seeded by hp_dtensor.manual_seed or seed_everything, so each draw begins with "
            "a broadcast of what its numbers come from",
        )

    return Peers(
        mesh.rank_list,
        lambda: [mesh.get_group(axis) for axis, size in enumerate(mesh.shape) if size > 1],
        torch.device(mesh.device_type),
        refuse,
    )


def piece_of(spec: Spec) -> Piece:
    """What this rank holds of the tensor that *spec* describes; nothing outside of the mesh."""
    number = 0
    for axis, (size, placement) in enumerate(zip(spec.mesh.shape, spec.placements, strict=True)):
        if size > 1 and shard_dim(placement) is not None:
            number = number * size + (spec.coordinate or (0,) * spec.mesh.ndim)[axis]
    return Piece(tuple(spec.shape), spec.stride, spec.local_box, number)


def draw_into(
    local: Tensor, spec: Spec, draw: Draw, generator: Generator | None, what: object
) -> None:
    """Fill *local*, this rank's piece of the tensor that *spec* describes; *what* is named in errors.

    Raises:
        LayoutError: when an axis holds addends.
    """
    if spec.is_partial:
        msg = (
            f"{what}: cannot draw into a tensor laid out as {spec.placements}: its ranks hold addends, and a sum of draws is "
            "not a draw. Redistribute it to Replicate() or Shard(dim) first"
        )
        raise LayoutError(msg)
    policy = policy_of(spec.mesh.device_type)
    if spec.coordinate is None:
        random.pass_by(piece_of(spec), draw, policy, spec.dtype, generator)
        return
    random.fill(local, piece_of(spec), draw, policy, peers_of(spec.mesh, what), generator)


# --- in place ---------------------------------------------------------------------------------


def _arguments(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """All arguments of a call by name, with the defaults of the schema."""
    declared = schema_of(op).arguments
    found = {argument.name: argument.default_value for argument in declared}
    found.update(zip((argument.name for argument in declared), args, strict=False))
    found.update(kwargs)
    return found


def _written(op: OpOverload, tensor: Tensor) -> Spec:
    spec = cast("Spec", spec_of(tensor))
    if spec.copied_view:
        msg = (
            f"{op}: the tensor it writes to is a slice that had to be copied to this rank, so the write would not reach the "
            "tensor it was taken from. Draw into the whole tensor, or redistribute so that the slice is local"
        )
        raise InPlaceError(msg)
    return spec


def _generator(named: Mapping[str, object]) -> Generator | None:
    return cast("Generator | None", named.get("generator"))


_IN_PLACE = aten_ops(
    "bernoulli_.float",
    "cauchy_.default",
    "exponential_.default",
    "geometric_.default",
    "log_normal_.default",
    "normal_.default",
    "random_.default",
    "random_.from",
    "random_.to",
    "uniform_.default",
)


@handles(*cast("Sequence[OpOverload]", _IN_PLACE))
def _in_place(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    tensor = cast("Tensor", named.pop("self"))
    generator = cast("Generator | None", named.pop("generator"))
    draw = Draw(str(op).split(".")[1], cast("tuple[float, ...]", tuple(named.values())))
    draw_into(local_of(tensor), _written(op, tensor), draw, generator, op)
    return tensor


def _whole(op: OpOverload, tensor: Tensor) -> Tensor:
    """The whole of *tensor*, plain."""
    spec = spec_of(tensor)
    if spec is None:
        return tensor
    return local_on(op, tensor, spec, spec.with_placements((REPLICATE,) * spec.mesh.ndim))


@handles(aten.bernoulli_.Tensor)
def _bernoulli_by_tensor(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    tensor, chance = cast("tuple[Tensor, Tensor]", (named["self"], named["p"]))
    spec = spec_of(tensor)
    if spec is None:
        msg = f"{op}: a plain tensor cannot take draws by distributed probabilities; give probabilities.full_tensor()"
        raise LayoutError(msg)
    _written(op, tensor)
    local = local_of(tensor)
    # As the kernel does: a uniform number for each element, of a precision that the chances decide.
    kind = torch.float64 if chance.dtype == torch.float64 else torch.float32
    level = torch.empty(local.shape, dtype=kind, device=local.device)
    draw_into(level, spec.with_dtype(kind), Draw("uniform_", (0.0, 1.0)), _generator(named), op)
    if spec.coordinate is None:
        return tensor
    own = spec_of(chance)
    if own is not None and own.shape == spec.shape:
        held = local_on(op, chance, own, own.with_placements(spec.placements))
    else:
        held = random.cut(_whole(op, chance).expand(spec.shape), spec.local_box)
    _check_chances(held)
    local.copy_(level < held)
    return tensor


def _has_values(tensor: Tensor) -> bool:
    """Whether the values of *tensor* may be looked at without waiting for a device or breaking a graph."""
    return tensor.device.type == "cpu" and tensor.numel() > 0 and not is_traced(tensor)


def _check_chances(held: Tensor) -> None:
    """Let torch raise its own error for *held* that are no probabilities."""
    known = held.is_floating_point()
    if not known or (_has_values(held) and not bool(((held >= 0) & (held <= 1)).all())):
        torch.empty(held.shape).bernoulli_(held, generator=Generator())


# --- out of place -----------------------------------------------------------------------------


def _like(model: Tensor, named: Mapping[str, object], draw: Draw) -> Tensor:
    """A tensor like *model*, drawn."""
    keys = ("dtype", "layout", "device", "pin_memory", "memory_format")
    options = {name: named[name] for name in keys if named.get(name) is not None}
    made = cast("Callable[..., Tensor]", torch.empty_like)(model, **options)
    method = getattr(made, draw.name)
    return cast("Tensor", method(*draw.params, generator=_generator(named)))


def _model(tensor: Tensor) -> Tensor:
    """What to make results after: *tensor*, without its addends."""
    spec = spec_of(tensor)
    return tensor if spec is None or not spec.is_partial else torch.empty_like(tensor)


@handles(*cast("Sequence[OpOverload]", aten_ops("rand_like.default", "rand_like.generator")))
def _rand_like(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    return _like(cast("Tensor", named["self"]), named, Draw("uniform_", (0.0, 1.0)))


@handles(*cast("Sequence[OpOverload]", aten_ops("randn_like.default", "randn_like.generator")))
def _randn_like(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    return _like(cast("Tensor", named["self"]), named, Draw("normal_", (0.0, 1.0)))


_RANDINT_LIKE = aten_ops(
    *(f"randint_like.{name}" for name in ("default", "generator", "Tensor", "Tensor_generator")),
    *("randint_like.low_dtype", "randint_like.low_generator_dtype"),
)


@handles(*cast("Sequence[OpOverload]", _RANDINT_LIKE))
def _randint_like(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    low, high = named.get("low", 0), named["high"]
    if isinstance(high, Tensor):
        high = int(high.item())
    draw = Draw("random_", cast("tuple[float, float]", (low, high)))
    return _like(cast("Tensor", named["self"]), named, draw)


_FUNCTIONAL = aten_ops(
    *("bernoulli.p", "cauchy.default", "exponential.default", "geometric.default"),
    *("log_normal.default", "normal_functional.default", "uniform.default"),
    *("random.default", "random.from", "random.to"),
)


@handles(*cast("Sequence[OpOverload]", _FUNCTIONAL))
def _functional(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    model = cast("Tensor", named.pop("self"))
    generator = named.pop("generator")
    name = str(op).split(".")[1].removesuffix("_functional") + "_"
    draw = Draw(name, cast("tuple[float, ...]", tuple(named.values())))
    return _like(model, {"generator": generator}, draw)


@handles(*cast("Sequence[OpOverload]", aten_ops("bernoulli.default", "bernoulli.Tensor")))
def _bernoulli(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    model = cast("Tensor", named["self"])
    if "p" in named:
        chance = cast("Tensor", named["p"])
        return torch.empty_like(model).bernoulli_(chance, generator=_generator(named))
    # Torch makes a contiguous result, whatever the strides are, and draws in its order.
    made = torch.empty_like(model, memory_format=torch.contiguous_format)
    return made.bernoulli_(model, generator=_generator(named))


@handles(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def _normal(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    mean, std = cast("tuple[Tensor | float, Tensor | float]", (named["mean"], named["std"]))
    generator = _generator(named)
    if not isinstance(std, Tensor):
        made = torch.empty_like(cast("Tensor", mean))
        return made.normal_(0.0, std, generator=generator).add_(mean)
    if isinstance(mean, Tensor) and mean.shape != std.shape:
        mean, std = torch.broadcast_tensors(mean, std)
    made = torch.empty_like(std if not isinstance(mean, Tensor) else mean)
    made = made.contiguous().normal_(0.0, 1.0, generator=generator)
    return made.mul_(std).add_(mean)


@handles(aten.native_dropout.default)
def _native_dropout(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[Tensor, Tensor]:
    named = _arguments(op, args, kwargs)
    tensor, chance, train = cast("tuple[Tensor, float, bool | None]", tuple(named.values()))
    if train is False or not tensor.numel():
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    kept = 1.0 - chance
    # Zeros and ones of the tensor's own dtype: a compiler turns them into vectors, which it does not do with bools.
    mask = torch.empty_like(tensor).bernoulli_(kept)
    return tensor * mask * (1.0 / kept if kept else 0.0), mask.to(torch.bool)


def _slopes(
    op: OpOverload,
    tensor: Tensor,
    noise: Tensor,
    bounds: tuple[float, float],
    generator: Generator | None,
) -> None:
    """Write into *noise* what elements are multiplied by: a draw where *tensor* is not above zero, one elsewhere.

    On one device a number is drawn for each such element only, in order. Which they are no piece knows, so under "host" the
    whole is looked at on every rank; other policies draw for all elements.
    """
    spec, held = spec_of(tensor), spec_of(noise)
    if spec is None or held is None or policy_of(spec.mesh.device_type) != "host":
        drawn = torch.empty_like(tensor).uniform_(*bounds, generator=generator)
        noise.copy_(torch.where(tensor <= 0, drawn, 1.0))
        return
    made, _ = _sampled(op, "rrelu", [tensor], bounds, generator)
    if held.coordinate is not None:
        local_of(noise).copy_(random.cut(made, held.local_box))


@handles(
    *cast(
        "Sequence[OpOverload]", aten_ops("rrelu_with_noise.default", "rrelu_with_noise_.default")
    )
)
def _rrelu(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    tensor, noise = cast("tuple[Tensor, Tensor]", (named["self"], named["noise"]))
    lower, upper = cast("tuple[float, float]", (named["lower"], named["upper"]))
    if not named["training"]:
        slope = (lower + upper) / 2
        out = torch.where(tensor > 0, tensor, tensor * slope)
    else:
        _slopes(op, tensor, noise, (lower, upper), _generator(named))
        out = tensor * noise
    return tensor.copy_(out) if str(op).split(".")[1].endswith("_") else out


# --- samplers that need the whole -------------------------------------------------------------


def _sampled(
    op: OpOverload,
    name: str,
    inputs: Sequence[Tensor],
    args: Sequence[float],
    generator: Generator | None,
) -> tuple[Tensor, Spec]:
    """What the sampler gives for the whole of *inputs*, and the description of the first that is distributed."""
    spec = next(found for found in map(spec_of, inputs) if found is not None)
    if spec.coordinate is None:
        random.retire(generator)
        return torch.empty(0), spec
    whole = [_whole(op, tensor) for tensor in inputs]
    policy = policy_of(spec.mesh.device_type)
    made = random.sample(name, whole, args, policy, peers_of(spec.mesh, op), generator)
    return made, spec


@handles(aten.multinomial.default)
def _multinomial(
    cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    tensor = cast("Tensor", named["self"])
    count = cast("int", named["num_samples"])
    replacement = count != 1 and bool(named["replacement"])
    spec = spec_of(tensor)
    if spec is not None and not replacement and _may_pick(spec, count):
        piece, out = _ranked(op, tensor, spec, count, _generator(named))
    else:
        sampled = (count, bool(named["replacement"]))
        made, spec = _sampled(op, "multinomial", [tensor], sampled, _generator(named))
        out = _picked(spec, count)
        piece = made if out.coordinate is None else random.cut(made, out.local_box).contiguous()
    return new_dtensor(cls, piece.to(torch.int64), out, False)


def _may_pick(spec: Spec, count: int) -> bool:
    """Whether *count* different places can be picked from each row; what cannot be is left to torch to refuse."""
    known = spec.dtype.is_floating_point and len(spec.shape) in {1, 2} and 0 not in spec.shape
    return known and 0 < count <= spec.shape[-1] <= 1 << 24


def _picked(spec: Spec, count: int) -> Spec:
    """What describes *count* places for each row of the tensor that *spec* describes."""
    shape = (*spec.shape[:-1], count)
    stride = torch.empty(shape, device="meta").stride()
    return make_spec(spec.mesh, _rows(spec), shape, stride, torch.int64)


def _ranked(
    op: OpOverload, tensor: Tensor, spec: Spec, count: int, generator: Generator | None
) -> tuple[Tensor, Spec]:
    """*count* different places for each row: those where a weight divided by its own draw is largest, as torch has it.

    The draws do not depend on the weights, so that rows stay where they are. With replacement torch draws one number for
    each result and looks it up in running sums, of which only its own kernel has the bits.
    """
    rows, out = spec.with_placements(_rows(spec)), _picked(spec, count)
    like = torch.empty_strided(spec.shape, spec.stride, device="meta")
    drawn = make_spec(
        spec.mesh, rows.placements, spec.shape, torch.empty_like(like).stride(), spec.dtype
    )
    if spec.coordinate is None:
        draw_into(local_of(tensor), drawn, Draw("exponential_", (1.0,)), generator, op)
        return torch.empty(0), out
    held = local_on(op, tensor, spec, rows)
    noise = torch.empty(held.shape, dtype=held.dtype, device=held.device)
    draw_into(noise, drawn, Draw("exponential_", (1.0,)), generator, op)
    _check_weights(held, count)
    score = held / noise
    return score.argmax(-1, keepdim=True) if count == 1 else score.topk(count)[1], out


def _check_weights(held: Tensor, count: int) -> None:
    """Let torch raise its own error for *held* that are no weights to pick by."""
    if not _has_values(held):
        return
    fine = held.isfinite().all() & (held >= 0).all() & (held.sum(-1) != 0).all()
    if not bool(fine):
        torch.multinomial(held, count, generator=Generator())


def _rows(spec: Spec) -> tuple[Placement, ...]:
    """The layout of *spec* as far as it cuts rows, of which each is sampled alone; replicated elsewhere."""
    rows = len(spec.shape) == 2
    return tuple(
        p if rows and isinstance(p, Shard | StridedShard) and p.dim == 0 else REPLICATE
        for p in spec.placements
    )


_POINTWISE = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


@handles(*cast("Sequence[OpOverload]", aten_ops(*(f"{name}.default" for name in _POINTWISE))))
def _sampler(
    cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    inputs = [value for value in named.values() if isinstance(value, Tensor)]
    made, spec = _sampled(op, str(op).split(".")[1], inputs, (), _generator(named))
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in inputs))
    laid = spec.placements if tuple(spec.shape) == tuple(shape) else (REPLICATE,) * spec.mesh.ndim
    stride = torch.empty(shape, device="meta").stride()
    out = make_spec(spec.mesh, gradient_placements(laid), shape, stride, inputs[-1].dtype)
    piece = made if out.coordinate is None else random.cut(made, out.local_box).contiguous()
    return new_dtensor(cls, piece, out, False)


# --- into a tensor that the caller gives ------------------------------------------------------

_OUT = aten_ops(
    *("bernoulli.out", "multinomial.out"),
    *("normal.Tensor_float_out", "normal.float_Tensor_out", "normal.Tensor_Tensor_out"),
)


@handles(*cast("Sequence[OpOverload]", _OUT))
def _sampled_into(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    out, plain = cast("Tensor", kwargs["out"]), cast("OpOverload", functional_form(op))
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    made = cast("Tensor", plain(*args, **rest))
    return out.resize_(made.shape).copy_(made)


_MADE = aten_ops(
    *("rand.out", "rand.generator_out", "randint.out", "randint.generator_out"),
    *("randint.low_out", "randint.low_generator_out", "normal.float_float_out"),
)


@handles(*cast("Sequence[OpOverload]", _MADE))
def _made_into(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    out = cast("Tensor", named["out"]).resize_(cast("Sequence[int]", named["size"]))
    if str(op).startswith("aten.rand."):
        return out.uniform_(generator=_generator(named))
    if op is aten.normal.float_float_out:
        mean, std = cast("tuple[float, float]", (named["mean"], named["std"]))
        return out.normal_(mean, std, generator=_generator(named))
    low, high = cast("tuple[int, int]", (named.get("low", 0), named["high"]))
    return out.random_(low, high, generator=_generator(named))


@handles(*cast("Sequence[OpOverload]", aten_ops("randperm.out", "randperm.generator_out")))
def _permutation_into(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    named = _arguments(op, args, kwargs)
    count, generator = cast("int", named["n"]), _generator(named)
    out = cast("Tensor", named["out"]).resize_((count,))
    spec = _written(op, out)
    if spec.is_partial:
        draw_into(local_of(out), spec, Draw("random_"), generator, op)
    if spec.coordinate is None:
        random.retire(generator)
        return out
    policy, local = policy_of(spec.mesh.device_type), local_of(out)
    peers = peers_of(spec.mesh, op)
    whole = random.permutation(count, policy, peers, generator, out.dtype, local.device)
    local.copy_(random.cut(whole, spec.local_box))
    return out


# --- attention with dropout -------------------------------------------------------------------


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: object, scale: object
) -> Tensor:
    """Scaled scores in the precision in which kernels compute."""
    factor = query.shape[-1] ** -0.5 if scale is None else cast("float", scale)
    scores = (query * factor).matmul(key.transpose(-2, -1))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias
    if causal:
        shape = scores.shape[-2:]
        later = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _attend(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Attention whose dropout is drawn by index. The mask takes the place of the kernel's random state among the results."""
    named = _arguments(op, args, kwargs)
    chance = cast("float", named["dropout_p"])
    if not chance:
        return dispatch_by_rule(_cls, op, args, kwargs)
    query, key, value = (cast("Tensor", named[name]) for name in ("query", "key", "value"))
    bias = cast("Tensor | None", named.get("attn_bias"))
    scores = _scores(query, key, bias, named["is_causal"], named["scale"])
    weights, total = scores.softmax(-1), scores.logsumexp(-1)
    kept = 1.0 - chance
    mask = torch.empty_like(weights, dtype=torch.bool).bernoulli_(kept)
    dropped = weights * mask * (1.0 / kept if kept else 0.0)
    out = dropped.to(value.dtype).matmul(value)
    unused = torch.empty_like(total)
    if len(schema_of(op).returns) == 4:
        return out, total, mask, unused
    lengths = query.shape[-2], key.shape[-2]
    return out, total, None, None, *lengths, mask, unused, torch.empty_like(total)


def _attend_backward(
    _cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    named = _arguments(op, args, kwargs)
    chance = cast("float", named["dropout_p"])
    if not chance:
        return dispatch_by_rule(_cls, op, args, kwargs)
    query, key, value = (cast("Tensor", named[name]) for name in ("query", "key", "value"))
    grad = cast("Tensor", named.get("grad_out", named.get("grad_out_")))
    bias = cast("Tensor | None", named.get("attn_bias"))
    mask, total = cast("Tensor", named["philox_seed"]), cast("Tensor", named["logsumexp"])
    weights = (
        _scores(query, key, bias, named["is_causal"], named["scale"]) - total.unsqueeze(-1)
    ).exp()
    kept = 1.0 - chance
    share = mask * (1.0 / kept if kept else 0.0)
    grad_value = (weights * share).to(value.dtype).transpose(-2, -1).matmul(grad)
    inner = grad.matmul(value.transpose(-2, -1)) * share
    scores = weights * (inner - (inner * weights).sum(-1, keepdim=True))
    factor = named["scale"] if named["scale"] is not None else query.shape[-1] ** -0.5
    scaled = (scores * cast("float", factor)).to(query.dtype)
    found: list[object] = [scaled.matmul(key), scaled.transpose(-2, -1).matmul(query), grad_value]
    wanted = cast("Sequence[bool] | None", named.get("grad_input_mask"))
    if wanted is not None:
        found = [value if needed else None for value, needed in zip(found, wanted, strict=False)]
        needed = bias is not None and wanted[3]
        found.append(
            scores.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and needed else None
        )
    return tuple(found)


_KERNELS = tuple(
    f"_scaled_dot_product_{name}"
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)

handles(*cast("Sequence[OpOverload]", aten_ops(*(f"{name}.default" for name in _KERNELS))))(
    _attend
)
handles(
    *cast("Sequence[OpOverload]", aten_ops(*(f"{name}_backward.default" for name in _KERNELS)))
)(_attend_backward)
