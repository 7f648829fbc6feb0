"""Send functions by value, so that a test module need not be importable on a rank.

Rule: a module that a fresh interpreter would find on ``sys.path`` in the same file goes by
reference, everything else (test modules, conftests, scripts) by value. Sending only the function's
own module by value was not taken: helpers in a neighbouring file would not arrive.
"""

from __future__ import annotations

import importlib
import io
import sys
import sysconfig
from contextlib import ExitStack
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import cloudpickle  # type: ignore[import-untyped]

__all__ = ["dumps"]

_INSTALLED = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_judged: dict[str, tuple[str, bool]] = {}


def dumps(value: object) -> bytes:
    """Pickle *value*; functions and classes of modules that a rank cannot import go by value."""
    with ExitStack() as stack:
        for module in [m for m in list(sys.modules.values()) if _by_value(m)]:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        out = io.BytesIO()
        _Pickler(out).dump(value)
        return out.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Send an importable module by its name, also when its class is not the plain one (``torch.ops``)."""

    def reducer_override(self, value: object) -> object:
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            name = value.__name__
            if sys.modules.get(name) is value:
                return importlib.import_module, (name,)
        return super().reducer_override(value)


def _by_value(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    name = getattr(module, "__name__", None)
    if not isinstance(file, str) or not isinstance(name, str) or file.startswith(_INSTALLED):
        return False
    if name == "__main__" or sys.modules.get(name) is not module:
        return False
    known = _judged.get(name)
    if known is None or known[0] != file:
        known = _judged[name] = (file, not _importable(name, file))
    return known[1]


def _importable(name: str, file: str) -> bool:
    """Whether a fresh interpreter with this ``sys.path`` finds *name* in *file*."""
    where: list[str] | None = None
    origin: str | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), where)
        if spec is None or (end < len(parts) and spec.submodule_search_locations is None):
            return False
        where, origin = list(spec.submodule_search_locations or ()), spec.origin
    return origin is not None and Path(origin).resolve() == Path(file).resolve()
