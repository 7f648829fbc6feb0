"""Settings of the documentation's build."""

import sys
import warnings
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from offline_inventory import pack  # noqa: E402  (found through the line above)

# torch says this at import when numpy is absent; the build turns warnings into errors.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

project = "Hyper-Parallel"
author = "The Hyper-Parallel maintainers"
copyright = "The Hyper-Parallel maintainers, Apache-2.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "checked_names",
    "public_names",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Hyper-Parallel"
nitpicky = True
# Type variables have no page of their own.
nitpick_ignore_regex = [("py:(class|obj)", r"(.*\.)?_?[A-Z]")]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

ADDRESSES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}
intersphinx_mapping = {
    name: (
        address,
        str(pack(HERE / "_inventories" / f"{name}.txt", HERE / "_build" / f"{name}.inv")),
    )
    for name, address in ADDRESSES.items()
}


COLON = "\ue000"
"""Stands for a colon while napoleon runs: a character that nobody writes."""


def hide_colons(
    _app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Keep the first sentence of an attribute whole.

    Napoleon reads what stands before a colon in it as a type; our types are annotations.
    """
    if what in {"attribute", "data", "property"} and lines:
        lines[0] = lines[0].replace(":", COLON)


def show_colons(
    _app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Put the colons back."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def show_factories(
    _app: Sphinx,
    _what: str,
    _name: str,
    _object: object,
    _options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Write the default of a field that has a factory as Python, so that Sphinx can read it."""
    return signature and signature.replace("<factory>", "..."), returns


def setup(app: Sphinx) -> None:
    """Run before and after napoleon, which has the usual priority of 500."""
    app.connect("autodoc-process-docstring", hide_colons, priority=100)
    app.connect("autodoc-process-docstring", show_colons, priority=900)
    app.connect("autodoc-process-signature", show_factories)
