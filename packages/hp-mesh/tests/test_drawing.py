"""Drawings of the rank grid."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import torch
from hp_mesh import DeviceMesh


def mesh(*shape: int, rank: int = 0, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of consecutive ranks without groups."""
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def test_three_axes_are_blocks_of_a_grid() -> None:
    """Leading axes title blocks, the last two are rows and columns, this rank is bracketed."""
    assert mesh(2, 2, 2, rank=5, names=("pp", "dp", "tp")).draw().splitlines() == [
        "pp=0",
        "      tp=0  tp=1",
        "dp=0     0     1",
        "dp=1     2     3",
        "pp=1",
        "      tp=0  tp=1",
        "dp=0     4   [5]",
        "dp=1     6     7",
    ]


def test_a_slice_draws_its_own_ranks() -> None:
    """The drawing of a slice holds the ranks of the slice."""
    drawn = mesh(2, 2, rank=3, names=("dp", "tp"))["dp"].draw()
    assert re.findall(r"\d+(?=\]|\s|$)(?<!=\d)", drawn.splitlines()[1]) == ["1", "3"]


def test_long_axes_are_cut() -> None:
    """Axes of more than 16 show the first eight and the last coordinate."""
    drawn = mesh(2, 100, rank=-1).draw().splitlines()
    assert drawn[0].split() == [*(f"axis1={i}" for i in range(8)), "...", "axis1=99"]
    assert drawn[2].split() == ["axis0=1", *(str(100 + i) for i in range(8)), "...", "199"]
    assert len(mesh(300, 2, 2).draw().splitlines()) == 9 * 4 + 2
    assert "..." in mesh(40, 2).draw()


def test_svg_is_well_formed_and_has_a_cell_per_rank() -> None:
    """Each rank is one rectangle with its number; this rank's is filled."""
    svg = mesh(2, 2, 3, rank=7, names=("pp", "dp", "tp<")).draw_svg()
    root = ET.fromstring(svg)
    tag = "{http://www.w3.org/2000/svg}"
    cells = root.findall(f"{tag}rect")
    assert len(cells) == 12
    assert len([cell for cell in cells if cell.get("fill") != "#ffffff"]) == 1
    texts = [text.text for text in root.findall(f"{tag}text")]
    assert {str(i) for i in range(12)} <= set(texts)
    assert "pp=1" in texts
    assert "tp<=2" in texts


def test_describe_without_torch_distributed() -> None:
    """describe() of a layout-only mesh lists axes and says that there are no groups."""
    text = mesh(2, 4, rank=5, names=("dp", "tp")).describe()
    assert text.splitlines()[0] == "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))"
    assert re.search(r"tp +4 +1 +4,5,6,7 +none \(init_backend=False\)", text)
    assert "torch.distributed is not initialized: no process groups." in text
    outside = mesh(2, 4, rank=50, names=("dp", "tp")).describe()
    assert re.search(r"tp +4 +- +- +none", outside)
