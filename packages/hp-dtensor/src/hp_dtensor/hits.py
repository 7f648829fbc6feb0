"""The hit path: an operator that met these layouts before, and needs nothing but a local call.

Most calls of a training step are such: nothing moves, and what comes out was decided when the first one was planned. They
are answered from a dictionary that the operator carries. Its key is read off the arguments in one walk, which collects the
local tensors as it goes: specs are interned, so their identity says all about a layout; numbers count by value, or by type
where the operator's result depends on no more. What the walk does not know (plain tensors, torch's own DTensors, symbolic
sizes, objects) makes it give up at once, and :mod:`~hp_dtensor.dispatch` decides.

An operator with a hit has the ``__torch_dispatch__`` of the class registered as its rule for this class
(:func:`torch.library.register_torch_dispatch`). Torch calls the same function either way. But it looks for a rule in any case,
and only where there is none does it find out, at 0.5 us a call, whether a subclass of its DTensor leaves dispatch to that one's
C++. Operators that write to an argument have no rule: a call by rule holds the argument once more, and dispatch counts who
does (:mod:`~hp_dtensor.temporaries`).

The local call goes through torch's own binding of the operator where there is one of the same arguments (``torch.mul`` for
``aten.mul.Tensor``): it parses arguments in two thirds of the time that ``torch.ops`` takes.

Not taken: a C++ extension, which buys a few microseconds and costs every user a compiler or a wheel per torch release.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.autograd.graph import increment_version
from torch.nn import functional

from hp_dtensor._torch import direct, new_dtensor, schema_of

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from hp_dtensor.spec import Spec

aten = torch.ops.aten

Slow = Callable[[type, "OpOverload", Sequence[object], Mapping[str, object]], object]
Key = tuple[object, ...]
T = TypeVar("T")

MAX_HITS = 16384
"""How many are kept; the oldest half goes when more would be."""


@dataclass(slots=True)
class Hit:
    """What to do when a key is met again."""

    local: Callable[..., object]
    """What to run on the local tensors."""
    single: Spec | None
    """The spec of the result, when it is one tensor."""
    outputs: tuple[Spec | None, ...]
    """The specs of the results when they are several, None for one that is no tensor; empty when nothing is returned."""
    returned: int | None
    """The position of the argument that is written to and returned."""
    is_view: bool = False
    """Whether results may share memory with an argument."""
    constants: bool = False
    """Whether no argument that is passed by name is a tensor or a list."""
    as_list: bool = False
    """Whether what is returned is one list of tensors."""
    written_lists: tuple[int, ...] = ()
    """The positions of the lists that are written to, those passed by name after the others."""


class _Count:
    """A number of events."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


Known = tuple[dict[Key, Hit], bool, set[type]]
"""What an operator carries: its hits, the answer of `scalars_by_type`, and the classes that it has a rule for."""

_hits: dict[tuple[int, Key], dict[Key, Hit]] = {}
"""Where each hit is kept, by the identity of its operator and its key."""
_lock = threading.Lock()
_counts: list[_Count] = []
evicted = _Count()
"""How many were dropped to keep the bound."""


def _bindings() -> Iterator[tuple[OpOverload, Callable[..., object]]]:
    """Operators with what torch's own argument parser calls them; of the same arguments in the same order."""
    functions = {
        "Tensor": "add sub mul div eq ne lt gt le ge",
        "Scalar": "eq ne lt gt le ge masked_fill rsub",
        "Tensor_Scalar": "pow",
        "int": "transpose select unbind",
        "dim": "squeeze mean",
        "dim_IntList": "sum",
        "self": "where",
        "default": "mm bmm addmm baddbmm t permute unsqueeze cat stack sum mean amax logsumexp cumsum ones_like zeros_like "
        "empty_like tril triu maximum minimum clamp gather index_select embedding native_layer_norm _softmax _log_softmax "
        "_softmax_backward_data _log_softmax_backward_data",
    }
    methods = {
        "Tensor": "add_ sub_ mul_ div_",
        "default": "zero_ expand neg exp log sqrt rsqrt cos sin abs relu sigmoid tanh clone detach",
    }
    yield aten.linear.default, functional.linear
    for owner, names in ((torch, functions), (torch.Tensor, methods)):
        for overload, listed in names.items():
            for name in listed.split():
                yield getattr(getattr(aten, name), overload), getattr(owner, name)
    for name in ("add", "sub", "mul", "div", "sqrt", "neg", "lerp", "addcmul", "addcdiv"):
        for form in (f"_foreach_{name}", f"_foreach_{name}_"):
            packet = getattr(aten, form)
            for overload in packet.overloads():
                # A list beside one tensor would be taken for a list beside a number.
                if "out" not in overload and overload != "Tensor":
                    yield getattr(packet, overload), getattr(torch, form)


BINDINGS: dict[OpOverload, Callable[..., object]] = dict(_bindings())
"""Torch's own bindings of operators, of the same arguments in the same order."""


def fastest(op: OpOverload) -> Callable[..., object]:
    """What to call instead of *op*: the same, sooner."""
    return BINDINGS.get(op) or direct(op)


_NUMBERS = frozenset({bool, float, complex})
_CONSTANTS = frozenset(
    {bool, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_NO_NAMES: dict[str, object] = {}
_NOTHING: Known = ({}, False, set())


@cache
def scalars_by_type(op: OpOverload) -> bool:
    """Whether the numbers among the arguments of *op* may change without changing its plan (their types may not)."""
    return (
        torch.Tag.pointwise in op.tags
        or op is aten.fill_.Scalar
        or schema_of(op).name.startswith(("aten::_foreach_", "aten::_fused_"))
    )


def _read_into(
    cls: type, values: Sequence[object], by_type: bool, key: list[object], filled: list[object]
) -> bool:
    """Add what says which call this is to *key*, and the local arguments to *filled*; False when something is unknown."""
    for value in values:
        kind = type(value)
        if kind is cls:
            key.append(value._own)  # type: ignore[attr-defined]  # each has one
            filled.append(value._local_tensor)  # type: ignore[attr-defined]  # as above
            continue
        if kind is int:
            key.append(int if by_type else value)
        elif value is None:
            key.append(None)
        elif kind is list or kind is tuple:
            if value and type(value[0]) is int and not by_type:  # type: ignore[index]  # a list or a tuple
                # Sizes, dims: whole numbers all, or symbolic ones, which cannot be hashed.
                key.append(tuple(value))  # type: ignore[arg-type]  # as above
            else:
                inner: list[object] = []
                key.append(len(value))  # type: ignore[arg-type]  # as above
                key.append(kind)
                if not _read_into(cls, value, by_type, key, inner):  # type: ignore[arg-type]  # as above
                    return False
                value = inner  # noqa: PLW2901  # the same with local tensors
        elif kind in _CONSTANTS:
            key.append(kind)
            if not (by_type and kind in _NUMBERS):
                key.append(value)
        elif kind is torch.Tensor and not value.dim():  # type: ignore[attr-defined]  # a tensor
            # A plain number in a tensor is the same everywhere, and its own local tensor.
            key.append(torch.Tensor)
            key.append(value.dtype)  # type: ignore[attr-defined]  # as above
        else:
            return False
        filled.append(value)
    return True


def keep(table: dict[Any, T], most: int, key: object, value: T) -> list[tuple[Any, T]]:
    """Put *value* into *table* of at most *most* entries; the oldest half goes when it is full, and is returned."""
    old = list(table.items())[: most // 2] if len(table) >= most else []
    for gone, _ in old:
        del table[gone]
    table[key] = value
    return old


def remember(
    cls: type, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], hit: Hit
) -> None:
    """Keep *hit* for the next call of *op* on such arguments, if these make a key."""
    by_type = scalars_by_type(op)
    parts: list[object] = []
    if not _read_into(cls, args, by_type, parts, []):
        return
    parts.extend(kwargs)
    if not _read_into(cls, tuple(kwargs.values()), by_type, parts, []):
        return
    key = tuple(parts)
    hit.constants = not any(isinstance(v, (torch.Tensor, list, tuple)) for v in kwargs.values())
    returns = schema_of(op).returns
    hit.as_list = len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
    with _lock:
        known: Known = vars(op).setdefault("hp_dtensor_hits", ({}, by_type, set()))
        dropped = keep(_hits, MAX_HITS, (id(op), key), known[0])
        for (_, gone), table in dropped:
            table.pop(gone, None)
        evicted.calls += len(dropped)
        known[0][key] = hit
        has_rule = cls in known[2]
        known[2].add(cls)
    if not has_rule:
        _make_rule(op, cls)


@cache
def _library(namespace: str) -> torch.library.Library:
    """What is registered with torch holds as long as this lives."""
    return torch.library.Library(namespace, "FRAGMENT")


def _make_rule(op: OpOverload, cls: type) -> None:
    """Have torch call the ``__torch_dispatch__`` of *cls* for *op* without looking for it."""
    rule = getattr(cls.__torch_dispatch__, "__func__", None)  # type: ignore[attr-defined]  # each has one
    if rule is None or schema_of(op).is_mutable:  # a static method is called without the class
        return
    with suppress(RuntimeError):  # there is one, by an operator which had this name before
        torch.library.register_torch_dispatch(op, cls, rule, lib=_library(op.namespace))


def clear() -> None:
    """Forget all."""
    with _lock:
        for (_, key), table in _hits.items():
            table.pop(key, None)
        _hits.clear()


def size() -> int:
    """How many are kept."""
    return len(_hits)


def answered() -> int:
    """How many calls were answered here."""
    return sum(count.calls for count in _counts)


def wrap(cls: type, outputs: Sequence[Spec | None], results: object) -> object:
    """Several *results* as distributed tensors of *outputs*, in a list or a tuple as they came."""
    wrapped = [
        new_dtensor(cls, value, spec, False)
        if isinstance(value, torch.Tensor) and spec is not None
        else value
        for value, spec in zip(cast("Sequence[object]", results), outputs, strict=True)
    ]
    return tuple(wrapped) if isinstance(results, tuple) else wrapped


def count_writes(values: Sequence[object], lists: Sequence[int]) -> None:
    """Tell autograd that the tensors in these lists among *values* were written to; torch tells it of single ones alone."""
    for i in lists:
        tensors = cast("Sequence[torch.Tensor]", values[i])
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def view_in_inference(
    cls: type, base: object, outputs: Sequence[Spec | None], results: object
) -> object:
    """Views made inside ``torch.inference_mode``: of a tensor that is from outside they are from outside too, as torch has it."""
    several = isinstance(results, (tuple, list))
    with torch.inference_mode(isinstance(base, torch.Tensor) and base.is_inference()):
        wrapped = wrap(cls, outputs, results if several else (results,))
    return wrapped if several else cast("tuple[object, ...]", wrapped)[0]


def dispatcher(slow: Slow) -> Callable[..., object]:
    """The ``__torch_dispatch__`` of a class: answer from what is known, else ask *slow*."""
    wrap_one, in_inference_mode = new_dtensor, torch.is_inference_mode_enabled
    answered = _Count()

    def torch_dispatch(
        cls: type,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        try:
            known, by_type, _ = func.hp_dtensor_hits  # type: ignore[attr-defined]  # ours
        except AttributeError:
            known, by_type, _ = _NOTHING
        # The keys of one tensor, of two, and of one with two whole numbers are what `remember` says, without its loop.
        count = 0 if kwargs else len(args)
        if count == 2 and type(args[0]) is cls is type(args[1]):
            left, right = args
            hit = known.get((left._own, right._own))  # type: ignore[attr-defined]  # each has one
            if hit is None:
                # Dispatch counts who holds an argument (`hp_dtensor.temporaries`), and these names would count.
                del left, right
                return slow(cls, func, args, _NO_NAMES)
            result = hit.local(left._local_tensor, right._local_tensor)  # type: ignore[attr-defined]  # as above
        elif count == 1 and type(args[0]) is cls:
            (only,) = args
            hit = known.get((only._own,))  # type: ignore[attr-defined]  # as above
            if hit is None:
                del only
                return slow(cls, func, args, _NO_NAMES)
            result = hit.local(only._local_tensor)  # type: ignore[attr-defined]  # as above
        elif (
            count == 3
            and type(args[0]) is cls
            and type(args[1]) is int is type(args[2])
            and (hit := known.get((args[0]._own, args[1], args[2])))  # type: ignore[attr-defined]  # as above
        ):
            result = hit.local(args[0]._local_tensor, args[1], args[2])  # type: ignore[attr-defined]  # as above
        else:
            key: list[object] = []
            filled: list[object] = []
            if not known or not _read_into(cls, args, by_type, key, filled):
                return slow(cls, func, args, kwargs or _NO_NAMES)
            named: list[object] = []
            if kwargs:
                key.extend(kwargs)
                if not _read_into(cls, tuple(kwargs.values()), by_type, key, named):
                    return slow(cls, func, args, kwargs)
            try:
                hit = known.get(tuple(key))
            except TypeError:  # a symbolic size
                hit = None
            if hit is None:
                return slow(cls, func, args, kwargs or _NO_NAMES)
            if not kwargs:
                result = hit.local(*filled)
            elif hit.constants:
                result = hit.local(*filled, **kwargs)
            else:
                result = hit.local(*filled, **dict(zip(kwargs, named, strict=True)))
        answered.calls += 1
        if hit.written_lists:
            count_writes((*args, *(kwargs or _NO_NAMES).values()), hit.written_lists)
        if hit.is_view and in_inference_mode():
            outputs = hit.outputs if hit.single is None else (hit.single,)
            return view_in_inference(cls, args[0], outputs, result)
        if hit.single is not None:
            return wrap_one(cls, result, hit.single, False)
        if hit.returned is not None:
            return args[hit.returned]
        if hit.as_list:
            return list(map(wrap_one, repeat(cls), result, hit.outputs, repeat(False)))
        return wrap(cls, hit.outputs, result) if hit.outputs else None

    _counts.append(answered)
    return torch_dispatch
