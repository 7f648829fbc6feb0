"""Modules without memory, and how their parameters get values: each rank's piece alone, the same whole on any layout.

The idea: a model is described first (:func:`init_empty_weights`), laid out then, and filled last
(:func:`init_parameters`), so that nothing larger than a piece ever exists.

The rule: parameters are caught as modules register them, by torch's own hook, and only on the thread (or task) that asked.
A parameter that was moved is remembered as long as it lives, so tied ones stay tied.

Patching ``register_parameter`` was not taken: it acts on all threads and on whoever else patches.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from hp_mesh import DeviceMesh
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from hp_dtensor._torch import TorchDTensor, new_dtensor
from hp_dtensor.distribute import like_parameter
from hp_dtensor.draws import peers_of
from hp_dtensor.dtensor import DTensor
from hp_dtensor.random import chosen_policy, key, mixed, random_policy, seeded_alike
from hp_dtensor.spec import spec_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["init_empty_weights", "init_on_device", "init_parameters"]


# --- where parameters are made ----------------------------------------------------------------


@dataclass(slots=True)
class _Place:
    """Where the parameters of the modules made in this context go."""

    device: torch.device
    include_buffers: bool
    moved: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = field(default_factory=dict)
    """What became of a parameter, by its id; the reference tells whether the id is still its."""


_place: contextvars.ContextVar[_Place | None] = contextvars.ContextVar("hp_place", default=None)
_lock = threading.Lock()
_users = [0]
_hooks: list[RemovableHandle] = []


def _parameter(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> object:
    place = _place.get()
    if place is None or parameter is None or not _movable(parameter, place.device):
        return None
    found = place.moved.get(id(parameter))
    if found is not None and found[0]() is parameter:
        return found[1]
    moved = like_parameter(parameter, parameter.detach().to(place.device))
    place.moved[id(parameter)] = weakref.ref(parameter), moved
    return moved


def _buffer(_module: nn.Module, _name: str, buffer: Tensor | None) -> object:
    place = _place.get()
    if place is None or not place.include_buffers or buffer is None:
        return None
    return buffer.to(place.device) if _movable(buffer, place.device) else None


def _movable(tensor: Tensor, device: torch.device) -> bool:
    if nn.parameter.is_lazy(tensor):
        return False
    if isinstance(tensor, TorchDTensor) and device.type not in (
        "meta",
        tensor.device_mesh.device_type,
    ):
        return False
    return tensor.device != device


@contextmanager
def _hooked() -> Iterator[None]:
    """Torch's registration hooks are set while anyone is inside."""
    with _lock:
        _users[0] += 1
        if _users[0] == 1:
            # Torch declares that hooks return nothing, and takes what they return.
            _hooks.append(register_module_parameter_registration_hook(_parameter))  # type: ignore[arg-type]
            _hooks.append(register_module_buffer_registration_hook(_buffer))  # type: ignore[arg-type]
    try:
        yield
    finally:
        with _lock:
            _users[0] -= 1
            while _hooks and not _users[0]:
                _hooks.pop().remove()


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool = False
) -> Iterator[None]:
    """Inside, parameters that modules register go to *device* at once; ties and attributes are kept.

    It holds for this thread and task only. A parameter is made where its module makes it, and moves when it is registered:
    ``torch.empty`` gives addresses without memory until somebody writes there, so one of a standard module costs no memory.

    Args:
        device: where to; ``"meta"`` for shapes without memory.
        include_buffers: whether buffers go there too.

    Example:
        >>> import torch
        >>> from hp_dtensor import init_on_device
        >>> with init_on_device("meta"):
        ...     layer = torch.nn.Linear(4, 2)
        >>> layer.weight.device, tuple(layer.weight.shape)
        (device(type='meta'), (2, 4))
    """
    with _hooked():
        token = _place.set(_Place(torch.device(device), include_buffers))
        try:
            yield
        finally:
            _place.reset(token)


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Inside, parameters that modules register have a shape and no memory: :func:`init_on_device` with ``"meta"``.

    Lay them out with :func:`hp_dtensor.distribute_tensor`, and give them values with :func:`init_parameters` or from a
    checkpoint.

    Args:
        include_buffers: whether buffers lose their memory too. They have values that no initialiser may know.

    Example:
        >>> import torch
        >>> from hp_dtensor import init_empty_weights
        >>> with init_empty_weights():
        ...     layer = torch.nn.Linear(1 << 13, 1 << 13)
        >>> layer.weight.is_meta
        True
    """
    with init_on_device("meta", include_buffers):
        yield


# --- how they get values ----------------------------------------------------------------------


def _own_meta(module: nn.Module) -> list[str]:
    """The names of the module's own parameters and buffers that have no memory."""
    named = (
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    )
    return [name for name, tensor in named if tensor.is_meta]


def _initialiser(module: nn.Module) -> object:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor as *tensor*, this rank's piece of it if it is distributed, with memory and no values yet."""
    spec = spec_of(tensor)
    if spec is None:
        return torch.empty_like(tensor, device=device)
    local = torch.empty_like(cast("DTensor", tensor)._local_tensor, device=spec.mesh.device_type)
    return new_dtensor(DTensor, local, spec, False)


def _device_for_plain(module: nn.Module) -> torch.device:
    """Where parameters that are not distributed go: to the device of a mesh of the module's, else to the default one."""
    for tensor in module.parameters():
        spec = spec_of(tensor)
        if spec is not None:
            return torch.device(spec.mesh.device_type)
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def _give_memory(module: nn.Module, tied: dict[int, nn.Parameter]) -> None:
    device = _device_for_plain(module)
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            found = tied.get(id(parameter))
            if found is None:
                found = like_parameter(parameter, _with_memory(parameter.detach(), device))
                tied[id(parameter)] = found
            child.register_parameter(name, found)
        for name, buffer in list(child.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                setattr(child, name, _with_memory(buffer, device))


def init_parameters(module: nn.Module, stage_index: int = 0) -> nn.Module:
    """Give memory and values to what has none: each rank's piece only, the same whole whatever the layout.

    Every submodule with parameters or buffers on the meta device runs its ``reset_parameters``; what has values already
    keeps them, so that a second call does nothing. Each submodule draws from a stream of its own, given by the seed, its
    name and *stage_index*: values depend neither on the order of submodules nor on which others there are. Draws are
    "layout_free" unless a policy was chosen with :func:`hp_dtensor.set_random_policy`.

    The streams start from torch's default CPU generator. On ranks seeded by :func:`hp_dtensor.manual_seed` nothing is sent;
    elsewhere each mesh begins with a broadcast of a few bytes.

    Args:
        module: its parameters may be distributed or plain; plain ones are equal on all ranks of the
            mesh that their submodule is on, or of the largest one.
        stage_index: which pipeline stage this is; stages with different numbers draw different values.

    Returns:
        *module*.

    Raises:
        ValueError: when *module* is no module, *stage_index* no integer, or a submodule has something to initialise and no
            ``reset_parameters``; then nothing was changed.

    Example:
        >>> import torch
        >>> from hp_dtensor import init_empty_weights, init_parameters
        >>> with init_empty_weights():
        ...     layer = torch.nn.Linear(4, 2)
        >>> init_parameters(layer).weight.device
        device(type='cpu')
    """
    given: object = module
    if not isinstance(given, nn.Module):
        msg = f"init_parameters takes a module, not {type(module).__name__}: {module!r}"
        raise ValueError(msg)  # noqa: TRY004  # the contract
    if type(stage_index) is not int:
        msg = f"stage_index={stage_index!r} must be an integer: the number of the pipeline stage, 0 without pipelines"
        raise ValueError(msg)
    wanting = {name: child for name, child in module.named_modules() if _own_meta(child)}
    helpless = {
        name: _own_meta(child)
        for name, child in wanting.items()
        if not callable(_initialiser(child))
    }
    if helpless:
        msg = (
            f"these submodules have parameters or buffers without memory and no reset_parameters() to give them values: "
            f"{helpless}. Write one, or load them from a checkpoint after to_empty()"
        )
        raise ValueError(msg)
    if not wanting:
        return module
    held = {name: _values(child) for name, child in wanting.items()}
    keep = list(module.parameters())  # ids stay unique while the replaced parameters are alive
    _give_memory(module, {})
    del keep
    bases = _bases(module)
    with random_policy(chosen_policy() or "layout_free"), torch.no_grad():
        for name, child in wanting.items():
            mesh = next(iter(_meshes(child)), next(iter(bases), None))
            with _stream(bases[mesh], stage_index, name, mesh):
                cast("Callable[[], object]", _initialiser(child))()
            for tensor, values in held[name]:
                tensor.copy_(values)
    return module


def _meshes(module: nn.Module) -> list[DeviceMesh]:
    """The meshes of the module's distributed parameters, the largest first."""
    found = {spec.mesh: None for spec in map(spec_of, module.parameters()) if spec is not None}
    return sorted(found, key=lambda mesh: -mesh.size())


def _bases(module: nn.Module) -> dict[DeviceMesh | None, int]:
    """A number for each mesh, the same on its ranks, which the streams of the modules on it start from."""
    meshes = _meshes(module)
    if meshes:
        return {mesh: key(peers_of(mesh, "hp_dtensor.init_parameters"), None) for mesh in meshes}
    return {None: int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())}


def _values(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The module's own tensors that have values, with a copy of these."""
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [(tensor, tensor.detach().clone()) for _, tensor in named if not tensor.is_meta]


@contextmanager
def _stream(base: int, stage: int, name: str, mesh: DeviceMesh | None) -> Iterator[None]:
    """Torch's generators at the beginning of a stream of their own, alike on the mesh; they stand as before afterwards."""
    seed = mixed(base)
    for value in (stage, *name.encode()):
        seed = mixed(seed ^ value)
    kind = "cpu" if mesh is None else mesh.device_type
    devices = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
    with (
        torch.random.fork_rng(devices, device_type=kind if devices else "cuda"),
        seeded_alike(seed >> 1, () if mesh is None else mesh.rank_list),
    ):
        yield
