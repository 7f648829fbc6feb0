"""Where in a model a program is, and what a tensor is called there: for the texts of errors.

The idea: the Python stack knows. A frame whose ``self`` is a module is the ``forward`` of it (or was called from there); the
outermost one is the model, which gives paths to its children and to their tensors.

The rule: asked for only when an error is raised, so that nothing is kept up to date for it; a program without modules
gets an empty answer.

The design not taken: hooks on all modules. They cost on every call what is wanted once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["whereabouts"]


def _modules_on_the_stack() -> Iterator[nn.Module]:
    """The modules whose methods are running, the innermost first."""
    frame = sys._getframe(1)  # noqa: SLF001  # there is no other way to the stack
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back  # type: ignore[assignment]  # None at the bottom


def whereabouts(tensor: torch.Tensor | None = None) -> str:
    """Return a clause such as ``in module 'layers.0.norm' (LayerNorm), where it is 'layers.0.norm.weight'``; empty outside of modules.

    Example:
        >>> whereabouts()
        ''
    """
    running = list(_modules_on_the_stack())
    if not running:
        return ""
    inner, root = running[0], running[-1]
    path = next((name for name, module in root.named_modules() if module is inner), "")
    told = (
        f" in module {path!r} ({type(inner).__name__})" if path else f" in {type(inner).__name__}"
    )
    for name, held in (*root.named_parameters(), *root.named_buffers()):
        if held is tensor:
            return f"{told}, where it is {name!r}"
    return told
