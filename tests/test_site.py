"""The two extensions of the documentation's build do what the build relies on."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

sphinx_inventory = pytest.importorskip("sphinx.util.inventory")

EXTENSIONS = Path(__file__).parents[1] / "docs" / "_ext"


def load(name: str) -> ModuleType:
    """An extension as a module; Sphinx finds it by path, and so do we."""
    spec = importlib.util.spec_from_file_location(name, EXTENSIONS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sphinx_reads_a_packed_inventory(tmp_path: Path) -> None:
    """Sphinx finds in a packed inventory the names of the text, with their addresses."""
    source = tmp_path / "other.txt"
    source.write_text("# a comment\n\npy:class other.Thing things.html#$\n")
    packed = load("offline_inventory").pack(source, tmp_path / "build" / "other.inv")
    inventory = sphinx_inventory.InventoryFile.loads(packed.read_bytes(), uri="https://other")
    assert inventory["py:class", "other.Thing"].uri == "https://other/things.html#other.Thing"


@pytest.mark.parametrize("line", ["py:class other.Thing", "class other.Thing things.html"])
def test_a_line_of_another_form_is_refused(tmp_path: Path, line: str) -> None:
    """A line that is not `py:role name address` stops the build, with its number."""
    source = tmp_path / "other.txt"
    source.write_text(f"# a comment\n{line}\n")
    with pytest.raises(ValueError, match=r"other\.txt:2: .* is not `py:role name address`"):
        load("offline_inventory").read(source)


@pytest.mark.parametrize(
    ("lives", "public"),
    [
        ("hp_mesh.mesh.DeviceMesh", "hp_mesh.DeviceMesh"),
        ("hp_mesh.mesh.DeviceMesh.size", "hp_mesh.DeviceMesh.size"),
        ("hp_mesh.testing._spmd.spmd", "hp_mesh.testing.spmd"),
        ("hp_mesh.mesh.NoSuchName", None),
        ("hp_mesh.DeviceMesh", None),
        ("torch.distributed.device_mesh.DeviceMesh", None),
    ],
)
def test_where_an_object_lives_gives_where_it_is_public(lives: str, public: str | None) -> None:
    """The home of an exported object gives its public name; anything else gives nothing."""
    assert load("public_names").public_name(lives) == public
