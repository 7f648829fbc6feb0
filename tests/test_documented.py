"""Every public name has its entry in the built documentation.

The site is built here as `.ci/run` builds it, into the same folder, so that a second build
only reads what has changed. Sphinx then says itself what it documents: its inventory is
what other projects link to.
"""

import importlib
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = ["hp_dtensor", "hp_loss", "hp_mesh", "hp_mesh.testing", "hp_npu", "hp_tp"]


def entries(inventory: Path) -> set[str]:
    """The Python names of a Sphinx inventory: a text header of four lines, then zlib."""
    _, _, _, _, packed = inventory.read_bytes().split(b"\n", 4)
    lines = [line.split(" ", 2) for line in zlib.decompress(packed).decode().splitlines()]
    return {name for name, role, _ in lines if role.startswith("py:")}


def undocumented(module: str, names: list[str], documented: set[str]) -> list[str]:
    """The public names of a module that have no entry, the version aside."""
    return [
        name for name in names if name != "__version__" and f"{module}.{name}" not in documented
    ]


@pytest.mark.timeout(600)
def test_every_public_name_is_documented() -> None:
    """The site has an entry for each name in the `__all__` of each package."""
    pytest.importorskip("sphinx")
    site = ROOT / "docs" / "_build" / "html"
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-n",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(site),
    ]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    documented = entries(site / "objects.inv")
    missing = {
        module: undocumented(module, importlib.import_module(module).__all__, documented)
        for module in MODULES
    }
    assert missing == {module: [] for module in MODULES}


def test_a_name_without_an_entry_is_found() -> None:
    """The check above names what is public and has no entry."""
    assert undocumented("hp", ["__version__", "a", "b"], {"hp.a", "other.b"}) == ["b"]
