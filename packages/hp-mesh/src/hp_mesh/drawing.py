"""Drawings of a mesh: where the ranks sit, and what its groups are.

The idea: the last two axes are rows and columns, the axes before them are blocks. A text drawing is
for a terminal and an SVG for a document; both show the same cells, and mark this process's rank.
Big meshes are cut in the middle of an axis, where the pattern is clear.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from . import _torch
from .backends import get_capability
from .errors import BackendError, NoGroupError
from .groups import registry

if TYPE_CHECKING:
    from .groups import GroupRecord
    from .mesh import DeviceMesh

_SHOWN = 8
"""Coordinates shown of a long axis; the rest is an ellipsis before the last."""


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of a drawing: fixed coordinates of the leading axes, and a grid of cells."""

    title: str
    rows: tuple[tuple[str, ...], ...]


def draw(mesh: DeviceMesh) -> str:
    """Return the grid of ranks as text; this process's rank is in brackets.

    Example:
        >>> from hp_mesh import DeviceMesh
        >>> print(
        ...     DeviceMesh(
        ...         "cpu",
        ...         [[0, 1], [2, 3]],
        ...         mesh_dim_names=("dp", "tp"),
        ...         _init_backend=False,
        ...         _rank=2,
        ...     ).draw()
        ... )
             tp=0  tp=1
        dp=0    0     1
        dp=1  [2]     3
    """
    lines: list[str] = []
    for block in _blocks(mesh):
        if block.title:
            lines.append(block.title)
        widths = [max(len(row[i]) for row in block.rows) for i in range(len(block.rows[0]))]
        for row in block.rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def draw_svg(mesh: DeviceMesh) -> str:
    """Return the grid of ranks as an SVG image; this process's rank is filled."""
    width, height, gap = 64, 28, 16
    parts: list[str] = []
    top = gap
    right = 0
    for block in _blocks(mesh):
        if block.title:
            parts.append(_text(gap, top + height // 2, block.title, "start"))
            top += height
        for r, row in enumerate(block.rows):
            for c, cell in enumerate(row):
                x, y = gap + c * width, top + r * height
                if r and c and cell:
                    fill = "#cfe3ff" if cell.startswith("[") else "#ffffff"
                    parts.append(
                        f'<rect x="{x}" y="{y}" width="{width - 4}" height="{height - 4}" rx="4" '
                        f'fill="{fill}" stroke="#5b6b7f"/>'
                    )
                label = cell.strip("[]")
                parts.append(_text(x + (width - 4) // 2, y + (height - 4) // 2, label, "middle"))
        top += len(block.rows) * height + gap
        right = max(right, gap + len(block.rows[0]) * width + gap)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{top}" '
        f'viewBox="0 0 {right} {top}" font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def _text(x: int, y: int, text: str, anchor: str) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" dominant-baseline="central">'
        f"{escape(text)}</text>"
    )


def _blocks(mesh: DeviceMesh) -> Iterator[_Block]:
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    shape = mesh.shape
    ranks = mesh.rank_list
    me = None if _coordinate(mesh) is None else mesh.rank
    leading = shape[:-2]
    for outer in itertools.product(*(_shown(size) for size in leading)):
        title = ", ".join(
            f"{name}={'...' if i is None else i}"
            for name, i in zip(names[:-2], outer, strict=True)
        )
        if None in outer:
            yield _Block(title, (("...",),))
            continue
        start = 0
        for size, i in zip(leading, outer, strict=True):
            start = start * size + (i or 0)
        yield _Block(title, tuple(_rows(names, shape, ranks, start, me)))


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Return this rank's coordinate; None as well if nothing says which rank this is."""
    try:
        return mesh.get_coordinate()
    except NoGroupError:
        return None


def _rows(
    names: Sequence[str],
    shape: Sequence[int],
    ranks: Sequence[int],
    block: int,
    me: int | None,
) -> Iterator[tuple[str, ...]]:
    columns = shape[-1]
    rows = shape[-2] if len(shape) > 1 else 1
    shown = list(_shown(columns))
    yield ("", *("..." if c is None else f"{names[-1]}={c}" for c in shown))
    for r in _shown(rows):
        head = "" if len(shape) == 1 else f"{names[-2]}={'...' if r is None else r}"
        if r is None:
            yield (head, *("..." for _ in shown))
            continue
        start = (block * rows + r) * columns
        cells = ("..." if c is None else _cell(ranks[start + c], me) for c in shown)
        yield (head, *cells)


def _cell(rank: int, me: int | None) -> str:
    return f"[{rank}]" if rank == me else str(rank)


def _shown(size: int) -> Iterator[int | None]:
    if size <= 2 * _SHOWN:
        yield from range(size)
        return
    yield from range(_SHOWN)
    yield None
    yield size - 1


def describe(mesh: DeviceMesh) -> str:
    """Return what the mesh is and which process groups exist, as text; makes no group."""
    lines = [repr(mesh), ""]
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    coordinate = _coordinate(mesh)
    table = [("axis", "size", "coordinate", "ranks of this rank's group", "group")]
    for index, name in enumerate(names):
        place = "-" if coordinate is None else str(coordinate[index])
        ranks = "-" if coordinate is None else _short(mesh.get_rank_list_along_axis(index))
        table.append((name, str(mesh.shape[index]), place, ranks, mesh.group_state(index)))
    lines += _aligned(table)
    lines += ["", draw(mesh), ""]
    lines += _registry_lines()
    return "\n".join(lines)


def _registry_lines() -> list[str]:
    world = _torch.world_group()
    if world is None:
        return ["torch.distributed is not initialized: no process groups."]
    made = [r for r in registry.records() if len(r.ranks) > 1 and r.group is not world]
    known = {id(record.group) for record in made}
    lines = [f"Process groups made by meshes in this process, beside the world: {len(known)}"]
    total = 0
    table = [("made for", "ranks", "backend", "device memory, about")]
    for record in made:
        memory = _memory(record)
        total += memory
        size = f"{memory // 2**20} MB" if memory else "-"
        table.append((record.label, _short(record.ranks), record.backend, size))
    if made:
        lines += _aligned(table)
        lines.append(f"Device memory of these communicators, about: {total // 2**20} MB")
    return lines


def _memory(record: GroupRecord) -> int:
    """Return what the group's communicators take on the device, once it has communicated."""
    total = 0
    for backend in set(_torch.backend_devices(record.backend).values()):
        try:
            total += get_capability(backend).communicator_bytes
        except BackendError:
            continue
    return total


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) <= _SHOWN:
        return ",".join(map(str, ranks))
    return f"{','.join(map(str, ranks[:4]))},...,{ranks[-1]} ({len(ranks)})"


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
