"""Run the code of the pages under pytest: what a page shows, a reader can type."""

from sybil import Sybil
from sybil.parsers.myst import DocTestDirectiveParser, PythonCodeBlockParser, SkipParser

# Sphinx runs these; imported as test modules they would run once more.
collect_ignore = ["conf.py", "_ext", "_build"]

pytest_collect_file = Sybil(
    parsers=[DocTestDirectiveParser(), PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
    excludes=["design/*"],
).pytest()
