"""What the READMEs show runs, and what they tell a newcomer to type is what CI runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """What the console blocks of a page tell to type."""
    lines = "".join(blocks(text, "console")).splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def test_there_are_two_commands_and_ci_runs_both() -> None:
    """The README has exactly two commands, and `.ci/run` has both word for word."""
    found = commands((ROOT / "README.md").read_text())
    assert len(found) == 2
    checks = (ROOT / ".ci" / "run").read_text()
    assert [command for command in found if f"'{command}'" not in checks] == []


def test_commands_are_found() -> None:
    """The reader of console blocks sees commands, and neither output nor other blocks."""
    page = "```console\n$ one\noutput\n$ two\n```\n\n```python\n$ three\n```\n"
    assert commands(page) == ["one", "two"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_readme_runs(page: Path, tmp_path: Path) -> None:
    """Each README has code, and each block of it runs with plain python in an empty folder."""
    found = blocks(page.read_text(), "python")
    assert found
    for number, block in enumerate(found):
        script = tmp_path / f"block{number}.py"
        script.write_text(block)
        command = [sys.executable, "-W", "error", str(script)]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


def test_the_first_example_is_short() -> None:
    """The first example takes fifteen lines of code at most, blank lines and imports aside."""
    example = blocks((ROOT / "README.md").read_text(), "python")[0]
    lines = [line for line in example.splitlines() if line and not re.match("import|from", line)]
    assert 5 <= len(lines) <= 15
