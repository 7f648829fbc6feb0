"""A release changes one package: its version, its changelog, one commit, one tag."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("hatchling")
pytest.importorskip("towncrier")

ROOT = Path(__file__).parents[1]


def git(root: Path, *arguments: str) -> str:
    """What git prints."""
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def tool() -> ModuleType:
    """tools/release.py as a module."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two of our packages at 0.1.0, and one fragment each."""
    for name in ("hp-mesh", "hp-loss"):
        shutil.copytree(
            ROOT / "packages" / name,
            tmp_path / "packages" / name,
            ignore=shutil.ignore_patterns("__pycache__", "tests", "*.*.md"),
        )
        package = tmp_path / "packages" / name
        version = package / "src" / name.replace("-", "_") / "_version.py"
        version.write_text('__version__ = "0.1.0"\n')
        (package / "changes" / "+mesh.fixed.md").write_text("A mesh of one rank works.\n")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Someone")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "someone@example.com")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "Start")
    return tmp_path


def test_a_release_is_a_version_a_changelog_a_commit_and_a_tag(
    tool: ModuleType, repository: Path
) -> None:
    """Releasing hp-mesh as a minor gives 0.2.0 with its notes, and uses up the fragment."""
    assert tool.release(repository, "hp-mesh", "minor") == "hp-mesh-v0.2.0"
    package = repository / "packages" / "hp-mesh"
    assert '"0.2.0"' in (package / "src" / "hp_mesh" / "_version.py").read_text()
    changelog = (package / "CHANGELOG.md").read_text()
    assert "## 0.2.0 (" in changelog
    assert "A mesh of one rank works." in changelog
    assert not (package / "changes" / "+mesh.fixed.md").exists()
    assert (package / "changes" / "README.md").exists()
    assert git(repository, "tag", "--points-at", "HEAD") == "hp-mesh-v0.2.0"
    assert git(repository, "status", "--porcelain") == ""


def test_a_release_leaves_the_other_packages_alone(tool: ModuleType, repository: Path) -> None:
    """Releasing hp-mesh changes no file of hp-loss."""
    tool.release(repository, "hp-mesh", "patch")
    changed = git(repository, "diff", "--name-only", "HEAD~1").splitlines()
    assert changed
    assert [name for name in changed if not name.startswith("packages/hp-mesh/")] == []


def test_a_release_refuses_uncommitted_changes(tool: ModuleType, repository: Path) -> None:
    """With a changed file the release stops before it writes anything."""
    (repository / "stray.txt").write_text("stray")
    with pytest.raises(SystemExit, match="commit these changes first"):
        tool.release(repository, "hp-mesh", "minor")
    assert git(repository, "tag") == ""


def test_a_release_needs_something_to_release(tool: ModuleType, repository: Path) -> None:
    """Without fragments there is no release."""
    git(repository, "rm", "--quiet", "packages/hp-mesh/changes/+mesh.fixed.md")
    git(repository, "commit", "--quiet", "--message", "Forget the fragment")
    with pytest.raises(SystemExit, match="nothing to release"):
        tool.release(repository, "hp-mesh", "minor")
