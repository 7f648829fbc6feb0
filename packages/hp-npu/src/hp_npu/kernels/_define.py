"""Make an operator out of a spec: each part is put where torch and hp-dtensor look for it.

The rule: the operator exists once in a process and runs on every device. Which code it runs is
asked of the registry for every call, below autograd, so that a compiled graph or a distributed
tensor holds one operator of ours and never a vendor's.

An operator without a gradient raises when it is differentiated; torch itself would only warn, and
give no gradient.

Not taken: `torch.library.custom_op`. It checks on every call that results share no memory with
arguments, which costs more than the rest of the call; tests check it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from hp_dtensor import register_rule
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import FunctionCtx

from hp_npu.kernels.protocol import Gradient, KernelSpec
from hp_npu.kernels.registry import DeviceKernelRegistry

__all__ = ["define"]

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "hp"


def define(spec: KernelSpec[P, R], registry: DeviceKernelRegistry) -> OpOverload:
    """Define the operator of *spec* and return it; its calls ask *registry* what to run.

    Raises:
        ValueError: if *registry* has a kernel of that name.
    """
    registry.register(spec)
    name = f"{NAMESPACE}::{spec.name}"

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return registry.resolve(spec, "fallback", *args, **kwargs)(*args, **kwargs)

    torch.library.define(name, spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, spec.fake)
    gradient = spec.gradient or Gradient(_save_nothing, _refuse(spec.name))
    torch.library.register_autograd(name, gradient.backward, setup_context=gradient.setup_context)
    op = cast("OpOverload", getattr(torch.ops.hp, spec.name).default)
    register_rule(op, spec.rule)
    return op


def _save_nothing(
    ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]
) -> None:
    """Keep nothing: there is no backward."""


def _refuse(name: str) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(_ctx: FunctionCtx, *_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            f"{name} has no derivative. Where one is needed, write the computation in plain torch, "
            "for example with torch.nn.functional"
        )

    return backward
