"""Give modules the names that they import for type checkers only, so that autodoc can link them.

Under `if TYPE_CHECKING:` stand the imports that annotations need and the running program does
not, often because they would close a cycle. Autodoc reads the running program: it would print
such annotations as bare words that link nowhere. Here all modules are imported first, when no
cycle can hurt any more, and then those imports are run, each in its module.

Setting `typing.TYPE_CHECKING` before the import would be shorter; it closes the cycles.

A type alias that is written as a string for the same reason gets its value, so that a signature
shows what it stands for.
"""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import TypeAlias, get_type_hints

from public_names import PACKAGES
from sphinx.application import Sphinx


def modules(package: str) -> Iterator[ModuleType]:
    """A package and all modules under it, imported."""
    top = importlib.import_module(package)
    yield top
    for found in pkgutil.walk_packages(top.__path__, f"{package}."):
        yield importlib.import_module(found.name)


def checked_imports(source: str) -> ast.Module:
    """The imports that stand under `if TYPE_CHECKING:` at the top of a source text."""
    found: list[ast.stmt] = []
    for node in ast.parse(source).body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                found += [
                    each for each in node.body if isinstance(each, ast.Import | ast.ImportFrom)
                ]
    return ast.Module(body=found, type_ignores=[])


def complete(module: ModuleType) -> None:
    """Run the imports of a module that are meant for type checkers, in that module."""
    imports = checked_imports(inspect.getsource(module))
    exec(compile(imports, module.__name__, "exec"), vars(module))  # noqa: S102  (our own source)


def complete_tuples(module: ModuleType) -> None:
    """Evaluate the fields of named tuples, whose constructors forget the module they are from."""
    for value in list(vars(module).values()):
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            value.__new__.__annotations__.update(get_type_hints(value))


def evaluate_aliases(known: list[ModuleType]) -> None:
    """Replace the type aliases that are strings by what they say, wherever they were imported."""
    values = {
        (name, value): eval(value, vars(module))  # noqa: S307  (our own source)
        for module in known
        for name, value in list(vars(module).items())
        if isinstance(value, str) and _is_alias(module, name)
    }
    for module in known:
        for (name, text), value in values.items():
            if vars(module).get(name) == text:
                setattr(module, name, value)


def _is_alias(module: ModuleType, name: str) -> bool:
    return inspect.get_annotations(module).get(name) in {"TypeAlias", TypeAlias}


def _complete_all(_app: Sphinx) -> None:
    known = [module for package in PACKAGES for module in modules(package)]
    for module in known:
        complete(module)
    evaluate_aliases(known)
    for module in known:
        complete_tuples(module)


def setup(app: Sphinx) -> dict[str, bool]:
    """Complete the modules before the first page is read."""
    app.connect("builder-inited", _complete_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
