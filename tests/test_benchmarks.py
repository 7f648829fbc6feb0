"""The benchmarks run: short, and for what they print rather than for how fast it was."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


def test_there_are_benchmarks() -> None:
    """The test below runs something."""
    assert BENCHMARKS


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_a_benchmark_runs(script: Path, tmp_path: Path) -> None:
    """A benchmark takes --quick, ends well and prints a table."""
    command = [sys.executable, str(script), "--quick"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) > 1
