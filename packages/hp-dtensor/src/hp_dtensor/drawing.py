"""Which rank holds what, drawn: as text for a terminal, as a table of rich's, or as a picture.

The cells are the boxes that all ranks' intervals cut the tensor into, so that uneven, strided, empty and replicated layouts
are drawn as they are. A tensor of three dims is drawn as a grid for each part of its first dim. Rich and matplotlib are
extras (``hp-dtensor[drawing]``) and are imported when asked for.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hp_dtensor import shards
from hp_dtensor.errors import LayoutError
from hp_dtensor.placements import folded, folded_dims
from hp_dtensor.spec import Spec, spec_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Cell", "Grid", "grids", "visualize_sharding"]

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of the tensor and who holds it."""

    rows: Span
    """Half-open, of the last dim but one."""
    columns: Span
    """Half-open, of the last dim."""
    ranks: tuple[int, ...]
    """Global ranks that hold the box or, where the layout is partial, an addend of it."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of one part of the first dim; of the whole tensor when it has at most two."""

    title: str
    """``""``, or which part of the first dim it is."""
    cells: tuple[tuple[Cell, ...], ...]
    """Row by row."""


def grids(spec: Spec) -> list[Grid]:
    """What every rank holds of the tensor that *spec* describes. Nothing is communicated.

    Raises:
        LayoutError: for a tensor of no dims or of more than three.
    """
    shape, placements = tuple(spec.shape), spec.placements
    count = folded_dims(placements)
    if count > 1:
        shape, placements = folded(shape, placements, count)
    if not 1 <= len(shape) <= 3:
        msg = f"a tensor of shape {tuple(spec.shape)} cannot be drawn; one to three dims can"
        raise LayoutError(msg)
    mesh_shape = tuple(spec.mesh.shape)
    held = {
        rank: shards.local_box(shape, mesh_shape, where, placements)
        for rank, where in zip(
            spec.mesh.rank_list, itertools.product(*map(range, mesh_shape)), strict=True
        )
    }
    cuts: list[list[Span]] = []
    for dim, size in enumerate(shape):
        ends = {0, size}
        for box in held.values():
            ends.update(end for span in box[dim] for end in span)
        cuts.append(list(itertools.pairwise(sorted(ends))))
    depth = cuts[0] if len(shape) == 3 else [None]
    rows = cuts[-2] if len(shape) > 1 else [(0, 1)]
    out = []
    for part in depth:
        lines = []
        for row in rows:
            line = []
            for column in cuts[-1]:
                spans = [span for span in (part, row, column) if span is not None][-len(shape) :]
                ranks = tuple(rank for rank, box in held.items() if _inside(spans, box))
                line.append(Cell(row, column, ranks))
            lines.append(tuple(line))
        title = "" if part is None else f"[{_span(part)}, :, :]"
        out.append(Grid(title, tuple(lines)))
    return out


def _inside(spans: list[Span], box: shards.Box) -> bool:
    return all(
        any(low <= start and stop <= high for low, high in intervals)
        for (start, stop), intervals in zip(spans, box, strict=True)
    )


def _span(span: Span) -> str:
    start, stop = span
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _text(grid: Grid, device: str, ndim: int) -> str:
    """A grid as lines of text."""
    table = [["", *(f"Col {_span(cell.columns)}" for cell in grid.cells[0])]]
    for line in grid.cells:
        name = f"Row {_span(line[0].rows)}" if ndim > 1 else ""
        table.append([name, *(_holders(cell, device) for cell in line)])
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    rows = (
        "  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
    return "\n".join([grid.title, *rows] if grid.title else rows)


def _holders(cell: Cell, device: str) -> str:
    return f"{device}:{','.join(map(str, cell.ranks))}" if cell.ranks else "-"


def visualize_sharding(
    dtensor: Tensor,
    header: str = "",
    use_rich: bool = False,
    *,
    picture: str | Path | None = None,
) -> None:
    """Print, on the first rank of the mesh, which ranks hold which part of *dtensor*.

    Args:
        dtensor: a distributed tensor of one to three dims.
        header: printed above.
        use_rich: print a coloured table; needs the extra ``hp-dtensor[drawing]``.
        picture: a file to draw a picture to instead, of any type that matplotlib writes; needs the same extra.

    Raises:
        LayoutError: for a plain tensor, or another number of dims.

    Example:
        >>> import torch
        >>> from hp_dtensor import LayoutError, visualize_sharding
        >>> try:
        ...     visualize_sharding(torch.ones(2))
        ... except LayoutError:
        ...     print("plain")
        plain
    """
    spec = spec_of(dtensor)
    if spec is None:
        msg = f"a plain tensor of shape {tuple(dtensor.shape)} lies on no mesh; pass a DTensor"
        raise LayoutError(msg)
    drawn = grids(spec)
    where = spec.coordinate
    if where is None or any(where):
        return
    if picture is not None:
        _picture(drawn, header, Path(picture))
        return
    device = spec.mesh.device_type
    if use_rich:
        _rich(drawn, header, device, spec.ndim)
        return
    if not all(dtensor.shape):
        drawn = []
    parts = [_text(grid, device, spec.ndim) for grid in drawn] or ["no elements"]
    print("\n".join([header, *parts] if header else parts))  # noqa: T201  # what was asked for


_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white", "bright_black")


def _rich(drawn: list[Grid], header: str, device: str, ndim: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for grid in drawn:
        table = Table(
            title=" ".join(part for part in (header, grid.title) if part), show_lines=True
        )
        table.add_column("")
        for cell in grid.cells[0]:
            table.add_column(f"Col {_span(cell.columns)}")
        for line in grid.cells:
            name = f"Row {_span(line[0].rows)}" if ndim > 1 else ""
            table.add_row(
                name, *(f"[{_colour(cell)}]{_holders(cell, device)}[/]" for cell in line)
            )
        console.print(table)


def _colour(cell: Cell) -> str:
    return _COLOURS[cell.ranks[0] % len(_COLOURS)] if cell.ranks else "white"


def _picture(drawn: list[Grid], header: str, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(4 * len(drawn), 4))
    figure.suptitle(header)
    for axes, grid in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        for cell in itertools.chain(*grid.cells):
            (top, bottom), (left, right) = cell.rows, cell.columns
            colour = f"C{cell.ranks[0] % 10}" if cell.ranks else "white"
            axes.add_patch(
                Rectangle(
                    (left, top),
                    right - left,
                    bottom - top,
                    facecolor=colour,
                    edgecolor="black",
                    alpha=0.5,
                )
            )
            axes.text(
                (left + right) / 2,
                (top + bottom) / 2,
                ",".join(map(str, cell.ranks)),
                ha="center",
                va="center",
            )
        axes.set_xlim(0, max(grid.cells[-1][-1].columns[1], 1))
        axes.set_ylim(max(grid.cells[-1][-1].rows[1], 1), 0)
        axes.set_title(grid.title)
    figure.savefig(path)
