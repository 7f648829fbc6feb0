"""Another forward for a module that stays what it is: same object, same parameters, same names.

The class of the module is exchanged for a subclass whose ``forward`` hands over to a *wrapper*, a picklable value kept in
the module's dictionary. Reasons, each a test: FSDP2 puts its own subclass on top; ``isinstance`` holds; deep copies, pickles
and ``state_dict`` carry on; a compiler sees a method; hooks of users run outside, on what the caller passed.

The subclass also looks at parameters that are exchanged from outside: see :mod:`hp_tp.pieces`.

Not taken: hooks for the boundary (the outgoing one does not know what came in, and closures do not pickle), and an
instance attribute ``forward`` (a copy of the module would call the original).
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import torch
from torch import nn

from hp_tp.errors import PlanError
from hp_tp.pieces import LINKED, OWNERS, admit, note_deleted, whole_parameters

__all__ = [
    "Forward",
    "Wrapper",
    "enclose",
    "enroll",
    "exchange_attribute",
    "original_class",
    "restore",
    "substitute",
    "wrapper_of",
]

Forward: TypeAlias = Callable[..., object]
"""The unbound forward that a wrapper stands in front of: the module is its first argument."""

_WRAPPER = "_tensor_parallel"
_BASE = "_tensor_parallel_base"
_BEFORE = "_before_tensor_parallel"


class Wrapper(Protocol):
    """What runs in place of a forward. Immutable, comparable and picklable."""

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Return the module's output for *args* and *kwargs*; call *forward* or compute without it."""
        ...


@dataclass(frozen=True, slots=True)
class _Stacked:
    """One wrapper around another, for a module that two styles were applied to."""

    outer: Wrapper
    inner: Wrapper

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        def within(module: nn.Module, *args: object, **kwargs: object) -> object:
            return self.inner(module, forward, args, kwargs)

        return self.outer(module, within, args, kwargs)


@dataclass(frozen=True, slots=True)
class _AsItIs:
    """No wrapper: the module's own forward."""

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        return forward(module, *args, **kwargs)


_AS_IT_IS = _AsItIs()


def substitute(module: nn.Module, wrapper: Wrapper) -> None:
    """Let *wrapper* run in front of the forward of *module*, and of wrappers put there before.

    Raises:
        PlanError: when somebody has set ``forward`` on the module itself, which would hide ours.
    """
    if "forward" in vars(module):
        message = (
            f"this {type(module).__name__} has a forward of its own in its attributes (set by another library, perhaps), "
            "which would run instead of the parallel one; remove it first, and set it again after parallelize_module"
        )
        raise PlanError(message)
    enclose(module, lambda before: wrapper if before is None else _Stacked(wrapper, before))


def enroll(module: nn.Module) -> None:
    """Let *module*, which has distributed parameters, look at those that are exchanged; its forward stays what it is."""
    if wrapper_of(module) is None and "forward" not in vars(module):
        _make_parallel(module)
        module.__dict__[_WRAPPER] = _AS_IT_IS


def exchange_attribute(module: nn.Module, name: str, value: object) -> None:
    """Set an attribute of *module*, and remember what it was for :func:`restore`."""
    before: dict[str, object] = module.__dict__.setdefault(_BEFORE, {})
    before.setdefault(name, getattr(module, name))
    setattr(module, name, value)


def restore(module: nn.Module) -> None:
    """Give *module* its own class, forward and attributes back."""
    for name, value in module.__dict__.pop(_BEFORE, {}).items():
        setattr(module, name, value)
    if wrapper_of(module) is not None:
        del module.__dict__[_WRAPPER]
        module.__class__ = original_class(module)


def enclose(module: nn.Module, make: Callable[[Wrapper | None], Wrapper]) -> None:
    """Exchange what runs in place of the forward of *module* for what *make* makes of it."""
    before = wrapper_of(module)
    if before is None:
        _make_parallel(module)
    module.__dict__[_WRAPPER] = make(None if before is _AS_IT_IS else before)


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """What runs in place of the forward of *module*, if anything does."""
    return cast("Wrapper | None", vars(module).get(_WRAPPER))


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that *module* had before a style was applied to it."""
    return cast("type[nn.Module]", getattr(type(module), _BASE, type(module)))


def _make_parallel(module: nn.Module) -> None:
    module.__class__ = _parallel_class(type(module))  # type: ignore[arg-type]  # a class has a hash
    OWNERS.add(module)


@functools.lru_cache(maxsize=1024)
def _parallel_class(base: type[nn.Module]) -> type[nn.Module]:
    inherited = base.forward

    @functools.wraps(inherited)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        if LINKED and not torch.compiler.is_compiling():
            with whole_parameters(self):
                return self._tensor_parallel(self, inherited, args, kwargs)  # type: ignore[operator]  # kept in the dictionary
        return self._tensor_parallel(self, inherited, args, kwargs)  # type: ignore[operator]  # as above

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        base.register_parameter(self, name, admit(self, name, param))

    def __delattr__(self: nn.Module, name: str) -> None:  # noqa: N807  # it becomes a method of the class
        note_deleted(self, name)
        base.__delattr__(self, name)

    def __reduce_ex__(self: nn.Module, protocol: int) -> object:  # noqa: N807  # it becomes a method of the class
        made, arguments, *rest = cast("tuple[object, ...]", base.__reduce_ex__(self, protocol))
        if type(self) is made_class and made is copyreg.__newobj__:  # type: ignore[attr-defined]  # typeshed leaves it out
            return (_blank, (base,), *rest)
        return (made, arguments, *rest)

    made_class = type(
        f"Parallel{base.__name__}",
        (base,),
        {
            "__module__": base.__module__,
            "__doc__": base.__doc__,
            "forward": forward,
            "register_parameter": register_parameter,
            "__delattr__": __delattr__,
            "__reduce_ex__": __reduce_ex__,
            _BASE: base,
        },
    )
    return made_class


def _blank(base: type[nn.Module]) -> nn.Module:
    """An instance to load a pickled state into."""
    made = _parallel_class(base)  # type: ignore[arg-type]  # a class has a hash
    blank = made.__new__(made)
    OWNERS.add(blank)
    return blank
