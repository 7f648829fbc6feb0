"""Operators on the pieces alone: inside ``SkipDTensorDispatch()`` a distributed tensor is its local tensor.

An optimizer step on sharded parameters, or a gradient hook, is elementwise on pieces; layouts have nothing to say there.
The context unwraps at the level of torch functions, so that autograd, where it is on, records the local operator between
the tensor's exit (`to_local`) and what comes after: gradients stay right. In-place operators write to the tensor's own
memory. A switch inside dispatch was not taken: below autograd, a plain result for a distributed argument would leave a
node in the graph whose gradient has the wrong shape, and each operator outside would pay for the question.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self, cast

import torch
from torch.overrides import TorchFunctionMode

from hp_dtensor._torch import TorchDTensor, tree_flatten, tree_unflatten
from hp_dtensor.local import to_local

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["SkipDTensorDispatch"]

_exempt: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "hp_skip_exempt", default=frozenset()
)

_OF_THE_TENSOR = frozenset(
    {
        "__get__",
        "__set__",
        "__delete__",
        "__repr__",
        "__format__",
        "__deepcopy__",
        "__reduce_ex__",
        "_make_subclass",
        "_make_wrapper_subclass",
        "backward",
        "detach_",
        "dim",
        "is_floating_point",
        "is_complex",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "size",
        "stride",
    }
)
"""Names that ask or tell something about the tensor itself, which its local tensor does not know."""


class SkipDTensorDispatch(TorchFunctionMode):
    """Inside, operators act on local tensors and give plain tensors.

    Args:
        no_skip: operators, by name or as functions, that go on being dispatched. Contexts inside each other add up.

    Raises:
        RuntimeError: when one instance is entered while it is entered.

    Example:
        >>> import torch
        >>> with SkipDTensorDispatch(no_skip=["matmul", torch.add]):
        ...     torch.ones(2) * 2
        tensor([2., 2.])
    """

    def __init__(self, no_skip: Sequence[str | Callable[..., object]] | str | None = None) -> None:
        super().__init__()
        given = (no_skip,) if isinstance(no_skip, str) else no_skip or ()
        self._own = frozenset(_name(one) for one in given)
        self._token: contextvars.Token[frozenset[str]] | None = None

    def __enter__(self) -> Self:
        if self._token is not None:
            msg = (
                "this SkipDTensorDispatch is entered already; make another one for a context inside, "
                "with SkipDTensorDispatch():"
            )
            raise RuntimeError(msg)
        self._token = _exempt.set(_exempt.get() | self._own)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch declares it untyped
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch declares it untyped
        if self._token is not None:
            _exempt.reset(self._token)
            self._token = None

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        name = _name(func)
        if name in _OF_THE_TENSOR or name in _exempt.get():
            return func(*args, **named)
        leaves, tree = tree_flatten((tuple(args), named))
        if not any(isinstance(leaf, TorchDTensor) for leaf in leaves):
            return func(*args, **named)
        local = [_piece(leaf) if isinstance(leaf, TorchDTensor) else leaf for leaf in leaves]
        unwrapped, named = cast(
            "tuple[tuple[object, ...], dict[str, object]]", tree_unflatten(local, tree)
        )
        return func(*unwrapped, **named)


def _piece(tensor: TorchDTensor) -> torch.Tensor:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return to_local(tensor)
    return tensor._local_tensor


def _name(operator: str | Callable[..., object]) -> str:
    return operator if isinstance(operator, str) else getattr(operator, "__name__", str(operator))
