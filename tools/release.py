"""Cut a release of one package: version, changelog, commit, tag.

    uv run --group release tools/release.py hp-mesh minor

The version lives in one file that hatchling reads and writes. Each package has its own tags,
`hp-mesh-v0.2.0`, so that packages are released apart. Nothing is pushed or uploaded: look at
the commit first. A bound of a sibling on the new version is a change of that sibling, with a
fragment of its own, and no part of a release.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path) -> str:
    """What a command prints; if it fails, so do we, with what it said."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout.strip()


def release(root: Path, name: str, bump: str) -> str:
    """Release a package of the repository at *root*, and return the tag.

    Raises:
        SystemExit: If the tree has changes, there is nothing to release, or a tool fails.
    """
    package = root / "packages" / name
    if changed := run("git", "status", "--porcelain", cwd=root):
        raise SystemExit(
            f"commit these changes first, a release has a commit of its own:\n{changed}"
        )
    fragments = list((package / "changes").glob("*.*.md"))
    if not fragments:
        raise SystemExit(f"{package / 'changes'} has no fragments: there is nothing to release")
    run(sys.executable, "-m", "hatchling", "version", bump, cwd=package)
    version = run(sys.executable, "-m", "hatchling", "version", cwd=package)
    run(sys.executable, "-m", "towncrier", "build", "--yes", "--version", version, cwd=package)
    tag = f"{name}-v{version}"
    run("git", "add", "--all", str(package), cwd=root)
    run("git", "commit", "--message", f"Release {name} {version}", cwd=root)
    run("git", "tag", "--annotate", tag, "--message", f"{name} {version}", cwd=root)
    return tag


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=sorted(p.name for p in (ROOT / "packages").iterdir()))
    parser.add_argument("bump", help="major, minor, patch, rc, or a version such as 0.2.0")
    arguments = parser.parse_args()
    print(f"{release(ROOT, arguments.name, arguments.bump)}: now look, and push with its tag")


if __name__ == "__main__":
    main()
