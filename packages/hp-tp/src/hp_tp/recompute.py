"""Layers that compute their activations again in the backward, under the names that they have.

The wrapper goes where the parallel forward is (:mod:`hp_tp.substitution`), so that there is no wrapper module, and names in
checkpoints and plans stay as they are. The forward that runs again is the parallel one: its collectives run again too, in the
same order on all ranks.

``"selective"`` keeps the results of matrix products, attention and collectives, and recomputes what is cheap between them:
no collective runs twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hp_tp._torch import GRAPHS_RECOMPUTE
from hp_tp.substitution import enclose, substitute

if TYPE_CHECKING:
    from torch import nn

    from hp_tp.substitution import Forward, Wrapper

__all__ = ["Recompute", "recompute", "recompute_and_compile"]

Recompute: TypeAlias = Literal["none", "selective", "full"]
"""What a layer computes again in the backward: nothing, what is cheap, or everything."""

_KEPT_NAMESPACES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_KEPT = (
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    "_scaled_dot_product_attention_math",
)


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Keep what is dear."""
    del context, args, kwargs
    namespace = getattr(op, "namespace", "")
    name = getattr(getattr(op, "overloadpacket", op), "__name__", "")
    kept = namespace in _KEPT_NAMESPACES or (namespace == "aten" and name in _KEPT)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True, slots=True)
class _Recomputed:
    """A module whose activations are computed again: a wrapper of its forward."""

    selective: bool

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        run = functools.partial(forward, module, **kwargs)
        if self.selective:
            contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
            return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)
        return checkpoint(run, *args, use_reentrant=False)


def recompute(module: nn.Module, what: Recompute = "full") -> nn.Module:
    """Let *module* compute activations again in the backward, in place.

    Args:
        module: a layer, laid out or not.
        what: ``"full"``, ``"selective"`` or ``"none"``.

    Returns:
        The module.
    """
    if what != "none":
        substitute(module, _Recomputed(what == "selective"))
    return module


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled forward: a wrapper in place of another."""

    inner: Wrapper | None
    backend: str
    made: dict[str, Forward] = field(default_factory=dict, compare=False, repr=False)

    def __call__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        run = self.made.get("run")
        if run is None:
            run = torch.compile(_run, backend=self.backend, fullgraph=True)
            self.made["run"] = run
        return run(self.inner, module, forward, args, kwargs)

    def __reduce__(self) -> tuple[type[_Compiled], tuple[Wrapper | None, str]]:
        return _Compiled, (self.inner, self.backend)  # compiled anew where it is loaded


def _run(
    inner: Wrapper | None,
    module: nn.Module,
    forward: Forward,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    if inner is None:
        return forward(module, *args, **kwargs)
    return inner(module, forward, args, kwargs)


def recompute_and_compile(module: nn.Module, what: Recompute, backend: str | None) -> None:
    """Let *module* compute activations again and compile it as one graph, in place.

    Where the graph may hold what is recomputed it does, so that the compiler decides what to keep; otherwise the compiled
    forward is what runs again.

    Args:
        module: a layer, laid out or not.
        what: as for :func:`recompute`.
        backend: of ``torch.compile``; None does not compile.
    """
    if backend is None:
        recompute(module, what)
    elif GRAPHS_RECOMPUTE or what == "none":
        recompute(module, what)
        module.compile(backend=backend, fullgraph=True)
    else:
        enclose(module, lambda before: _Compiled(before, backend))
        recompute(module, what)
