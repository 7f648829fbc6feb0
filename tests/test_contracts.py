"""The import contracts hold, and each of them fails for sources that break it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")

ROOT = Path(__file__).parents[1]
# The module that gets a line, the line, and what the linter then says is broken.
MUTANTS = [
    ("hp_mesh/errors.py", "import hp_dtensor", "packages import downwards only"),
    ("hp_tp/__init__.py", "import hp_loss", "packages import downwards only"),
    ("hp_mesh/errors.py", "import hp_mesh.mesh", "modules of hp_mesh"),
    ("hp_mesh/stray.py", "import hp_mesh.errors", "modules of hp_mesh"),
    ("hp_dtensor/stray.py", "import hp_dtensor.errors", "modules of hp_dtensor"),
    ("hp_mesh/axes.py", "import torch", "the arithmetic of ranks"),
]


def lint(sources: Path) -> str:
    """The names of the contracts that sources break."""
    result = subprocess.run(
        [
            *(
                sys.executable,
                "-c",
                "from importlinter.cli import lint_imports_command as run; run()",
            ),
            *("--config", str(ROOT / "pyproject.toml"), "--no-cache"),
        ],
        env={**os.environ, "PYTHONPATH": str(sources), "COLUMNS": "200"},
        cwd=sources,
        capture_output=True,
        text=True,
        check=False,
    )
    output = result.stdout + result.stderr
    assert "Contracts:" in output, output
    return "\n".join(line for line in output.splitlines() if " BROKEN" in line)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the sources of all packages."""
    for package in ROOT.glob("packages/*/src/*"):
        shutil.copytree(
            package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def test_the_sources_keep_the_contracts(sources: Path) -> None:
    """No contract is broken."""
    assert lint(sources) == ""


@pytest.mark.parametrize(("module", "line", "contract"), MUTANTS)
def test_a_contract_can_be_broken(sources: Path, module: str, line: str, contract: str) -> None:
    """An import that points up or sideways, or a module without a place, breaks its contract."""
    path = sources / module
    before = path.read_text() if path.exists() else ""
    path.write_text(f"{before}\n{line}\n")
    assert contract in lint(sources)
