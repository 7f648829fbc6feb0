"""The current mesh: what ``with mesh:`` sets and `get_current_mesh` reads.

The rule: the stack belongs to the thread and to the async task (a context variable), so two tasks do
not see each other's mesh. torch's own stack, which is per thread, is kept in step for torch functions
that take no mesh.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from . import _torch
from .errors import NoGroupError

if TYPE_CHECKING:
    from .mesh import DeviceMesh

_stack: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("hp_mesh_stack", default=())


def push(mesh: DeviceMesh) -> None:
    """Make *mesh* the current one."""
    _stack.set((*_stack.get(), mesh))
    _torch.push_current(mesh)


def pop(mesh: DeviceMesh) -> None:
    """Make the mesh that was current before *mesh* current again."""
    stack = _stack.get()
    for i in range(len(stack) - 1, -1, -1):
        if stack[i] is mesh:
            _stack.set(stack[:i] + stack[i + 1 :])
            break
    _torch.pop_current(mesh)


def get_current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` of this thread or async task.

    Raises:
        NoGroupError: (a `RuntimeError`) outside of any ``with mesh:``.

    Example:
        >>> from hp_mesh import get_current_mesh, init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2,), rank_list=(0, 1), init_backend=False)
        >>> with mesh:
        ...     get_current_mesh() is mesh
        True
    """
    stack = _stack.get()
    if not stack:
        message = (
            "No device mesh is currently active! Enter one with `with mesh:`, or pass the mesh as an "
            "argument. The current mesh is per thread and per async task."
        )
        raise NoGroupError(message)
    return stack[-1]
