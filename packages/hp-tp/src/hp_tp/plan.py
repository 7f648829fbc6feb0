"""From names to styles: which modules of a model are laid out and how.

A plan maps paths to styles. A path is dotted, each segment a shell pattern (``*``, ``?``, ``[0-3]``) for the name of a child,
one segment for one level; ``""`` is the module itself. All of a plan is matched against the model before anything is
changed: a key that matches nothing is an error that names the nearest modules, since the layer that a typo leaves whole
still gives right numbers and is found weeks later, by its memory.

Ties are kept: where the model has one parameter in two places, both have the laid-out one afterwards, whichever style (of
ours or of torch's) replaced it.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeAlias, Union

from hp_dtensor.belongings import adopt
from hp_mesh import DeviceMesh, get_current_mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequence

from hp_tp._torch import apply_style, children_of, parameters_of
from hp_tp.errors import PlanError, UnmatchedKeyError
from hp_tp.placing import tie
from hp_tp.style import ParallelStyle

__all__ = ["Match", "ParallelPlan", "Unmatched", "match_plan", "parallelize_module"]

ParallelPlan: TypeAlias = Mapping[str, Union[TorchStyle, "ParallelPlan", None]]
"""Paths with a style each (of ours or of torch's), a plan for what is below, or None to leave it."""

Unmatched: TypeAlias = Literal["error", "warn", "ignore"]
"""What happens to a key that matches no module."""

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Children that stand for their parent: of a compiled module, and of checkpoint and FSDP wrappers."""


class Match(NamedTuple):
    """One module that a plan gives a style."""

    path: str
    """Its full name in the model."""
    key: str
    """The key of the plan that named it."""
    module: nn.Module
    style: TorchStyle


def parallelize_module(
    module: nn.Module,
    device_mesh: TorchMesh | None = None,
    parallelize_plan: TorchStyle | ParallelPlan | None = None,
    *,
    src_data_rank: int | None = 0,
    unmatched: Unmatched = "error",
    uncovered: Unmatched = "ignore",
) -> nn.Module:
    """Lay *module* out over a mesh axis, in place, as a plan says; return it.

    Plain buffers and attributes of the model may meet distributed activations: they count as replicated once the ranks
    were seen to agree about them.

    Args:
        module: the model, or a part of it. Its submodules keep their names, and tied parameters stay tied.
        device_mesh: a mesh of one axis; the current mesh when None.
        parallelize_plan: a style for the module itself, or a mapping from paths to styles. A value may also be a plan for
            what is below its path, or None. Styles of torch are taken as well.
        src_data_rank: the group rank whose parameter values count; None when each rank cuts its own, and nothing is sent.
        unmatched: what a key that matches no module is: an error, a warning, or nothing (a stage of a pipeline has only
            some of the modules).
        uncovered: what a parameter that no style of the plan lays out is: nothing (it stays plain, whole on every rank), a
            warning or an error.

    Raises:
        UnmatchedKeyError: for keys that match nothing; a ``ValueError``.
        PlanError: when a parameter would get two layouts; a ``ValueError``.
        ValueError: for a mesh of more than one axis.
        TypeError: when the plan is neither style nor mapping.

    Example:
        >>> from hp_dtensor import Shard
        >>> from hp_tp import ColwiseParallel, RowwiseParallel, SequenceParallel
        >>> plan = {
        ...     "layers.*.norm": SequenceParallel(),
        ...     "layers.*.mlp.up": ColwiseParallel(input_layouts=Shard(1)),
        ...     "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        ... }
        >>> def lay_out(model, mesh):
        ...     return parallelize_module(model, mesh["tp"], plan)
    """
    mesh = get_current_mesh() if device_mesh is None else DeviceMesh.from_torch(device_mesh)
    if mesh.ndim != 1 and not _takes_axes(parallelize_plan, mesh.ndim):
        names = mesh.mesh_dim_names
        message = (
            f"parallelize_module takes a mesh of one axis, and this one has {mesh.ndim}: {mesh}. Slice it first, for example "
            f"mesh[{(names[-1] if names else 'tp')!r}]."
        )
        raise ValueError(message)
    if parallelize_plan is None:
        warnings.warn(
            "No parallelize_plan is provided, so parallelize_module does nothing; pass a style or a mapping from paths to styles",
            stacklevel=2,
        )
        return module
    matches = match_plan(module, parallelize_plan, unmatched=unmatched, stacklevel=3)
    if uncovered != "ignore":
        _check_cover(module, matches, uncovered)
    root = module
    for match in _checked(matches, mesh):
        new = _apply(root, match, mesh, src_data_rank)
        if new is not match.module:
            root = _exchange(root, match.path, new)
    adopt(root)
    return root


def _takes_axes(plan: object, count: int) -> bool:
    """Whether all styles of *plan* are applied on meshes of *count* axes."""
    if isinstance(plan, Mapping):
        return bool(plan) and all(_takes_axes(below, count) for below in plan.values())
    return plan is not None and getattr(plan, "axes", 1) == count


def match_plan(
    module: nn.Module,
    plan: TorchStyle | ParallelPlan,
    *,
    unmatched: Unmatched = "error",
    stacklevel: int = 2,
) -> list[Match]:
    """Return which modules of *module* a plan gives which style, in the plan's order; change nothing.

    Raises:
        UnmatchedKeyError: for keys that match nothing, when *unmatched* is ``"error"``.
        TypeError: when the plan, or a value in it, is none.
    """
    if isinstance(plan, TorchStyle):
        return [Match("", "", module, plan)]
    missing: dict[str, None] = {}
    matches = list(_matches(module, plan, "", "", missing))
    if missing and unmatched != "ignore":
        error = UnmatchedKeyError(_nearest(module, missing))
        if unmatched == "error":
            raise error
        warnings.warn(str(error), stacklevel=stacklevel)
    return matches


def _matches(
    module: nn.Module, plan: object, path: str, prefix: str, missing: dict[str, None]
) -> Iterator[Match]:
    """What *plan* says about *module*, which is at *path* and was found by the keys in *prefix*."""
    if not isinstance(plan, Mapping):
        message = (
            f"a plan is a ParallelStyle or a mapping from paths to styles, got {plan!r:.80} of type {type(plan).__name__}"
            + (f" for {prefix!r}" if prefix else "")
        )
        raise TypeError(message)
    for key, style in plan.items():
        full_key = _join(prefix, key)
        tokens = [token for token in key.split(".") if token]
        found = list(_find(module, tokens, path))
        if not found:
            missing[full_key] = None
        for child_path, child in found:
            if style is None:
                continue
            if isinstance(style, TorchStyle):
                yield Match(child_path, full_key, child, style)
            else:
                yield from _matches(child, style, child_path, full_key, missing)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _find(module: nn.Module, tokens: list[str], path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules below *module* that *tokens* name, one token for one level; each module once."""
    if not tokens:
        yield path, module
        return
    token, *rest = tokens
    seen: set[int] = set()
    for name, child in _children(module, path):
        own = name.rpartition(".")[2]
        if fnmatchcase(own, token) and id(child) not in seen:
            seen.add(id(child))
            yield from _find(child, rest, name)


def _children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of *module* with their full names; those of what it wraps, when it is a wrapper."""
    for name, child in children_of(module).items():
        if child is None:
            continue
        full = _join(path, name)
        yield full, child
        if name in _WRAPPERS:
            yield from _children(child, full)


def _nearest(module: nn.Module, keys: Mapping[str, None]) -> dict[str, list[str]]:
    """For each key the names in *module* that are most like it, digits read as ``*`` where the key has patterns."""
    names = [name for name, _ in module.named_modules() if name]
    patterns = list(dict.fromkeys(_generic(name) for name in names))
    return {
        key: get_close_matches(
            key, patterns if any(c in key for c in "*?[") else names, n=3, cutoff=0.5
        )
        for key in keys
    }


def _generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _checked(matches: list[Match], mesh: DeviceMesh) -> list[Match]:
    """Let each style of ours look at its module, and refuse two that lay out the same one.

    A module that one key finds in several places is laid out once.
    """
    seen: dict[int, list[Match]] = {}
    kept = []
    for match in matches:
        others = seen.setdefault(id(match.module), [])
        if any(other.style is match.style and other.key == match.key for other in others):
            continue
        for other in others:
            if _lays_out(other.style) and _lays_out(match.style):
                raise PlanError(_twice(other, match))
        others.append(match)
        kept.append(match)
        if isinstance(match.style, ParallelStyle):
            match.style.check(match.module, mesh)
    return kept


def _check_cover(module: nn.Module, matches: list[Match], uncovered: Unmatched) -> None:
    """Say which parameters are in no module that a style lays out."""
    covered = {
        id(owner)
        for match in matches
        if _lays_out(match.style)
        for owner in match.module.modules()
    }
    plain = [
        f"{path}.{name}" if path else name
        for path, owner in module.named_modules()
        for name, parameter in parameters_of(owner).items()
        if parameter is not None and id(owner) not in covered
    ]
    if not plain:
        return
    message = (
        f"no style of the plan lays out {', '.join(plain)}, which stay whole and plain on every rank; give their modules "
        "NoParallel() or SequenceParallel(), or pass uncovered='ignore'"
    )
    if uncovered == "error":
        raise PlanError(message)
    warnings.warn(message, stacklevel=3)


def _lays_out(style: TorchStyle) -> bool:
    return isinstance(style, (TorchColwise, TorchRowwise, TorchSequence)) or (
        isinstance(style, ParallelStyle) and style.lays_out
    )


def _twice(first: Match, second: Match) -> str:
    names = " and ".join(type(match.style).__name__ for match in (first, second))
    where = (
        f"{first.path!r}"
        if first.path == second.path
        else f"{first.path!r}, also called {second.path!r},"
    )
    return (
        f"module {where} is matched twice, by the keys {first.key!r} and {second.key!r}, and both lay it out ({names}). Change "
        "one of the patterns so that one key matches it, or drop one of the entries."
    )


def _apply(
    root: nn.Module, match: Match, mesh: DeviceMesh, src_data_rank: int | None
) -> nn.Module:
    """Apply one style with its source rank, and give every place that shared a parameter the new one."""
    style = copy.copy(match.style)
    style.src_data_rank = src_data_rank
    before = [
        (owner, name, parameter)
        for owner in match.module.modules()
        for name, parameter in parameters_of(owner).items()
        if parameter is not None
    ]
    new = apply_style(style, match.module, mesh)
    after = {
        old: changed
        for owner, name, old in before
        if (changed := parameters_of(owner).get(name)) is not None and changed is not old
    }
    if after:
        for owner in root.modules():
            for name, parameter in list(parameters_of(owner).items()):
                if parameter is not None and parameter in after:
                    tie(owner, name, after[parameter])
    return new


def _exchange(root: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """Put *new* where *path* says, and return the root, which is *new* for the empty path."""
    if not path:
        return new
    parent, _, name = path.rpartition(".")
    children_of(root.get_submodule(parent))[name] = new
    return root


if __name__ == "__main__":
    # `python -m hp_tp.plan` shows what a plan does; the report is built on this module.
    from hp_tp.report import main

    sys.exit(main())
