"""What holds for each package, read from its sources and from its metadata.

A package installs alone, so what it imports must be what it declares: torch or a
sibling may bring a module along today and not tomorrow. Each check is a function from a
package to what is wrong with it, so that a twin test can hand it a package that is
broken on purpose: a check that cannot fail proves nothing.
"""

import ast
import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
# Imported inside functions, on machines that have it; no index carries it for every platform.
OPTIONAL = {"hp-npu": {"torch-npu"}}
# These decide and never act: they know placement values, and no group, mesh or collective.
PURE = {
    "hp-mesh": ["axes.py"],
    "hp-dtensor": ["shards.py", "plan.py", "rules"],
}
PLACEMENT_VALUES = "torch.distributed.tensor.placement_types"


@dataclass(frozen=True, slots=True)
class Package:
    """A folder under packages/, and what it says about itself."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.path / "src" / self.module

    @property
    def project(self) -> dict[str, object]:
        project = tomllib.loads((self.path / "pyproject.toml").read_text())["project"]
        assert isinstance(project, dict)
        return project

    def requirements(self, extra: str | None = None) -> list[Requirement]:
        """The declared dependencies, or those of an extra."""
        if extra is None:
            declared = self.project.get("dependencies", [])
        else:
            extras = self.project.get("optional-dependencies", {})
            assert isinstance(extras, dict)
            declared = extras.get(extra, [])
        assert isinstance(declared, list)
        return [Requirement(line) for line in declared]

    def extras(self) -> set[str]:
        """The names of its extras."""
        extras = self.project.get("optional-dependencies", {})
        assert isinstance(extras, dict)
        return set(extras)

    def is_for_tests(self, path: Path) -> bool:
        """Whether a source file belongs to what the extra `testing` installs."""
        return path.relative_to(self.source).parts[0] in {"testing", "testing.py"}

    def files(self) -> Iterator[Path]:
        return self.source.rglob("*.py")


def imported(path: Path) -> set[str]:
    """The modules that a source file imports by absolute name, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def distributions(package: Package, *, for_tests: bool) -> set[str]:
    """The distributions that the imports of a package (or of its `testing`) come from."""
    roots = {
        name.split(".")[0]
        for path in package.files()
        if package.is_for_tests(path) is for_tests
        for name in imported(path)
    }
    return {
        root.replace("_", "-")
        for root in roots - set(sys.stdlib_module_names) - {package.module, "__future__"}
    }


def undeclared(package: Package) -> set[str]:
    """What a package imports and does not declare, as a dependency or in an extra (which it must then import late)."""
    runtime = {requirement.name for requirement in package.requirements()}
    for extra in package.extras() - {"testing"}:
        runtime |= {requirement.name for requirement in package.requirements(extra)}
    testing = {requirement.name for requirement in package.requirements("testing")}
    missing = distributions(package, for_tests=False) - runtime
    missing |= distributions(package, for_tests=True) - runtime - testing
    return missing - OPTIONAL.get(package.name, set())


def unused(package: Package) -> set[str]:
    """What a package declares and does not import."""
    runtime = {requirement.name for requirement in package.requirements()}
    return runtime - distributions(package, for_tests=False)


def unmet_siblings(package: Package) -> list[str]:
    """The sibling requirements that are unbounded, or that the sibling here does not meet."""
    wrong = []
    for requirement in package.requirements() + package.requirements("testing"):
        if requirement.name not in PACKAGES:
            continue
        operators = {specifier.operator for specifier in requirement.specifier}
        here = importlib.metadata.version(requirement.name)
        if operators != {">=", "<"} or not requirement.specifier.contains(Version(here)):
            wrong.append(f"{requirement} (here: {here})")
    return wrong


def impure(path: Path) -> set[str]:
    """What a pure module imports that acts: groups, meshes, collectives, and their friends."""
    return {
        name
        for name in imported(path)
        if name.startswith(("torch.distributed", "hp_mesh."))
        and not name.startswith(PLACEMENT_VALUES)
        and not PLACEMENT_VALUES.startswith(f"{name}.")
    }


def loaded_by(statement: str, *modules: str) -> list[str]:
    """Which of the modules a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted(set({modules!r}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout.split()


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Package:
    """Each package of the workspace in turn."""
    return Package(ROOT / "packages" / request.param)


@pytest.fixture
def broken(tmp_path: Path) -> Package:
    """A package that breaks every rule."""
    source = tmp_path / "hp-broken" / "src" / "hp_broken"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("import sympy\nimport torch.distributed.device_mesh\n")
    (source.parents[1] / "pyproject.toml").write_text(
        '[project]\nname = "hp-broken"\ndependencies = ["hp-mesh<0.1", "numpy"]\n'
    )
    return Package(source.parents[1])


def test_the_five_packages_are_there() -> None:
    """The checks below run over five packages, not over none."""
    assert PACKAGES == ["hp-dtensor", "hp-loss", "hp-mesh", "hp-npu", "hp-tp"]


def test_what_is_imported_is_declared(package: Package) -> None:
    """A package declares each distribution that its sources import."""
    assert undeclared(package) == set()


def test_what_is_declared_is_imported(package: Package) -> None:
    """A package imports each distribution that it declares."""
    assert unused(package) == set()


def test_siblings_are_wanted_within_bounds_that_they_meet(package: Package) -> None:
    """A requirement on a sibling has a floor and a ceiling, and the sibling here is between."""
    assert unmet_siblings(package) == []


def test_the_oldest_torch_is_the_same_everywhere(package: Package) -> None:
    """Each package wants torch>=2.12, with no ceiling that would hold users back."""
    torch = [str(wanted) for wanted in package.requirements() if wanted.name == "torch"]
    assert torch == ["torch>=2.12"]


def test_the_checks_find_a_broken_package(broken: Package) -> None:
    """The checks of imports and bounds fail for a package that breaks them."""
    assert undeclared(broken) == {"sympy", "torch"}
    assert unused(broken) == {"hp-mesh", "numpy"}
    assert len(unmet_siblings(broken)) == 1
    assert "torch.distributed.device_mesh" in impure(broken.source / "__init__.py")


def test_all_is_exact(package: Package) -> None:
    """`__all__` lists once each public name that is no module (ruff has its order)."""
    module = importlib.import_module(package.module)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - set(module.__all__) == set()
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(module.__all__) == len(set(module.__all__))


def test_a_package_tells_its_version(package: Package) -> None:
    """`__version__` is public, and is the version of the installed package."""
    module = importlib.import_module(package.module)
    assert "__version__" in module.__all__
    assert module.__version__ == importlib.metadata.version(package.name)


def test_a_package_is_typed(package: Package) -> None:
    """A package carries the marker that lets type checkers read its annotations."""
    assert (package.source / "py.typed").is_file()


def test_a_package_has_a_changelog(package: Package) -> None:
    """A package has a changelog to build into and a page that tells how."""
    marker = "<!-- towncrier release notes start -->"
    assert marker in (package.path / "CHANGELOG.md").read_text()
    assert (package.path / "changes" / "README.md").is_file()


@pytest.mark.parametrize(("name", "part"), [(n, p) for n, parts in PURE.items() for p in parts])
def test_what_decides_does_not_act(name: str, part: str) -> None:
    """The pure modules import placement values from torch.distributed, and nothing else of it."""
    path = Package(ROOT / "packages" / name).source / part
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    assert {file.name: impure(file) for file in files if impure(file)} == {}


def test_no_core_package_imports_torch_npu() -> None:
    """Only hp-npu names torch_npu; the others find it through entry points."""
    for name in set(PACKAGES) - {"hp-npu"}:
        package = Package(ROOT / "packages" / name)
        assert "torch-npu" not in distributions(package, for_tests=False)


@pytest.mark.parametrize("module", ["hp_mesh", "hp_dtensor", "hp_tp", "hp_loss"])
def test_importing_a_core_package_leaves_the_npu_alone(module: str) -> None:
    """Importing a core package loads neither hp-npu nor torch_npu."""
    assert loaded_by(f"import {module}", "hp_npu", "torch_npu") == []


def test_importing_hp_mesh_is_light() -> None:
    """`import hp_mesh` loads neither torch's DTensor nor sympy, which cost most of a second."""
    assert loaded_by("import hp_mesh", "torch.distributed.tensor", "sympy") == []


def test_the_import_check_can_fail() -> None:
    """The check above sees a module that is loaded."""
    assert loaded_by("import sympy", "torch.distributed.tensor", "sympy") == ["sympy"]
