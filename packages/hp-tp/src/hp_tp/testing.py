"""Prove a plan on your model: it must give what the single device gives, forward and backward.

The check runs the model twice from the same values, whole and laid out, with a random gradient of mixed signs (a plain
``sum`` hides addends that are counted twice in one place and lost in another), and compares the outputs, the gradient of
every input and the gradient of every parameter, and where each of them lives.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from hp_dtensor import DTensor, Placement, Replicate, distribute_tensor
from hp_dtensor.layout import resolve
from hp_dtensor.placements import gradient_placements
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_tp.plan import ParallelPlan, parallelize_module

if TYPE_CHECKING:
    from hp_mesh import DeviceMesh
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

__all__ = ["check_plan"]


def check_plan(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: TorchStyle | ParallelPlan,
    *args: object,
    given: Sequence[Placement | None] = (),
    distributed: bool = False,
    output: Placement | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **kwargs: object,
) -> nn.Module:
    """Compare *module* laid out by *plan* with itself on one device, and return the laid-out copy; call it on every rank.

    Args:
        module: the model, with equal parameters on every rank; it is not changed.
        device_mesh: a mesh of one axis.
        plan: as for :func:`hp_tp.parallelize_module`.
        args: whole inputs, equal on every rank.
        given: how the caller hands each input over: a layout, or None for the whole as it is. Missing ones are None.
        distributed: whether laid-out inputs are handed over as DTensors instead of plain pieces.
        output: what plain outputs are; replicated when None.
        rtol: relative tolerance.
        atol: absolute tolerance.
        kwargs: further inputs, handed over as they are.

    Raises:
        AssertionError: where something differs, naming it.

    Example:
        >>> import torch
        >>> from hp_mesh import init_device_mesh
        >>> from hp_mesh.testing import run_spmd
        >>> from hp_tp import ColwiseParallel, RowwiseParallel
        >>> from torch import nn
        >>> def prove():
        ...     torch.manual_seed(0)
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        ...     plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        ...     check_plan(model, mesh, plan, torch.randn(3, 4))
        >>> _ = run_spmd(prove, world_size=2)
    """
    laid_out = parallelize_module(copy.deepcopy(module), device_mesh, plan)
    reference = copy.deepcopy(module)
    layouts = (*given, *(None,) * (len(args) - len(given)))
    whole = [_fresh(arg) for arg in args]
    pieces = [
        _hand_over(arg, device_mesh, layout, distributed=distributed)
        for arg, layout in zip(args, layouts, strict=True)
    ]
    expected = _tensors(reference(*whole, **kwargs))
    actual = _tensors(laid_out(*pieces, **kwargs))
    check = _Check(device_mesh, rtol, atol)
    if len(expected) != len(actual):
        message = f"{len(actual)} outputs, and {len(expected)} on one device"
        raise AssertionError(message)
    label = output or Replicate()
    check.names(reference, laid_out)
    for position, (ours, right) in enumerate(zip(actual, expected, strict=True)):
        check.value(ours, right, label, f"output {position}")
    _backward(actual, expected, device_mesh, label)
    for position, (piece, tensor, layout) in enumerate(zip(pieces, whole, layouts, strict=True)):
        if isinstance(tensor, torch.Tensor) and tensor.grad is not None:
            check.gradient(piece, tensor.grad, layout or Replicate(), f"input {position}")
    rights = dict(reference.named_parameters())
    for name, parameter in laid_out.named_parameters():
        check.parameter(name, parameter, rights[name])
    return laid_out


class _Check:
    def __init__(self, mesh: DeviceMesh, rtol: float, atol: float) -> None:
        self.mesh = mesh
        self.rtol = rtol
        self.atol = atol

    def close(self, actual: Tensor, expected: Tensor, what: str) -> None:
        torch.testing.assert_close(
            actual.detach(),
            expected.detach(),
            rtol=self.rtol,
            atol=self.atol,
            msg=lambda text: f"{what} differs from one device: {text}",
        )

    def names(self, reference: nn.Module, laid_out: nn.Module) -> None:
        if list(reference.state_dict()) != list(laid_out.state_dict()):
            message = f"the names of the state are {list(laid_out.state_dict())}, and were {list(reference.state_dict())}"
            raise AssertionError(message)

    def value(self, actual: Tensor, expected: Tensor, layout: Placement, what: str) -> None:
        self.close(_whole(actual, self.mesh, layout, expected), expected, what)

    def gradient(self, piece: object, expected: Tensor, layout: Placement, what: str) -> None:
        tensor = cast("Tensor", piece)
        if tensor.grad is None:
            message = f"{what} has no gradient, and has one on one device"
            raise AssertionError(message)
        if isinstance(tensor, TorchDTensor):
            wanted = gradient_placements(tensor.placements)
            found = cast("TorchDTensor", tensor.grad).placements
            # Operators that go through dispatch may leave addends of a replica's gradient; their sum is compared.
            if any(a != b and not a.is_partial() for a, b in zip(found, wanted, strict=True)):
                message = f"the gradient of {what} is laid out as {found} and not as {wanted}"
                raise AssertionError(message)
        self.value(
            tensor.grad, expected, gradient_placements((layout,))[0], f"the gradient of {what}"
        )

    def parameter(self, name: str, parameter: Tensor, expected: Tensor) -> None:
        what = f"parameter {name!r}"
        if parameter.requires_grad != expected.requires_grad:
            message = f"{what} requires grad: {parameter.requires_grad}, and on one device: {expected.requires_grad}"
            raise AssertionError(message)
        self.value(parameter, expected, Replicate(), what)
        if expected.grad is not None:
            self.gradient(parameter, expected.grad, Replicate(), what)
        elif parameter.grad is not None:
            message = f"{what} has a gradient, and has none on one device"
            raise AssertionError(message)


def _fresh(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _hand_over(
    value: object, mesh: DeviceMesh, layout: Placement | None, *, distributed: bool
) -> object:
    if layout is None or not isinstance(value, torch.Tensor):
        return _fresh(value)
    whole = distribute_tensor(value.detach(), mesh, (layout,), src_data_rank=None)
    piece = whole if distributed else whole.to_local()
    return piece.detach().clone().requires_grad_(value.is_floating_point())


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _whole(value: Tensor, mesh: DeviceMesh, layout: Placement, like: Tensor) -> Tensor:
    if isinstance(value, TorchDTensor):
        return value.full_tensor()
    placements = resolve((layout,), mesh, value.ndim)
    return DTensor.from_local(value.detach(), mesh, placements, shape=like.shape).full_tensor()


def _backward(
    actual: Sequence[Tensor], expected: Sequence[Tensor], mesh: DeviceMesh, layout: Placement
) -> None:
    """Send the same gradient back through both."""
    generator = torch.Generator().manual_seed(0)
    for ours, right in zip(actual, expected, strict=True):
        if not right.requires_grad:
            continue
        grad = torch.randn(right.shape, generator=generator).to(right)
        right.backward(grad, retain_graph=True)
        placements = ours.placements if isinstance(ours, TorchDTensor) else (layout,)
        laid_out = distribute_tensor(
            grad, mesh, gradient_placements(placements), src_data_rank=None
        )
        ours.backward(
            laid_out if isinstance(ours, TorchDTensor) else laid_out.to_local(), retain_graph=True
        )
