"""Resolve the name of where an object lives to the name under which it is public.

`hp_mesh.mesh.DeviceMesh` is what an annotation says after Python has resolved it, and
`hp_mesh.DeviceMesh` is what users import and what the pages document. When Sphinx finds no
entry for the former, this looks whether the package exports the same object, and links to
that entry. The objects are compared: an equal name alone resolves nothing.

A recursive type alias names itself by a bare word; that is looked up in the modules of the
package whose page shows it.

Setting `__module__` on every export would do too, and would make tracebacks and pickles lie.
"""

import importlib
import sys

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PACKAGES = ("hp_dtensor", "hp_loss", "hp_mesh", "hp_npu", "hp_tp")
_ABSENT = object()


def _find(module: str, path: list[str]) -> object:
    """The object at a dotted path in a module, or `_ABSENT`."""
    try:
        found: object = importlib.import_module(module)
    except ImportError:
        return _ABSENT
    for part in path:
        found = getattr(found, part, _ABSENT)
    return found


def public_name(target: str) -> str | None:
    """The public name of what lives at *target*, or None if no package exports it."""
    parts = target.split(".")
    if parts[0] not in PACKAGES:
        return None
    for split in range(len(parts) - 1, 1, -1):
        path = parts[split:]
        living = _find(".".join(parts[:split]), path)
        if living is _ABSENT:
            continue
        for depth in range(1, split):
            package = ".".join(parts[:depth])
            if _find(package, path) is living:
                return ".".join([package, *path])
    return None


def homes(word: str, package: str) -> list[str]:
    """The full names under which the modules of a package know a bare word."""
    modules = sorted(name for name in sys.modules if f"{name}.".startswith(f"{package}."))
    return [f"{name}.{word}" for name in modules if hasattr(sys.modules[name], word)]


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    if node.get("refdomain") != "py":
        return None
    target = node.get("reftarget", "")
    if "." in target:
        names = [public_name(target)]
    else:
        names = [*homes(target, (node.get("py:module") or "").split(".")[0])]
    domain = env.get_domain("py")
    for name in filter(None, names):
        document = node.get("refdoc", "")
        found = domain.resolve_any_xref(env, document, app.builder, name, node, content)
        if found:
            return found[0][1]
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    """Ask here before a reference counts as missing."""
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
