"""Name devices as a mesh of axes; process groups; parallel dimensions.

`mesh` holds the class, `groups` the process groups, `axes` the rank arithmetic, `backends` what
backends can do, `parallel_dims` the degrees of a training job, `drawing` pictures of the rank grid,
`collectives` communication on plain tensors, `testing` ranks for tests.

What only some programs ask for (`backends`, `parallel_dims`, `drawing`) is imported when it is first
asked for: where Python may not keep compiled files, these modules would be half of the import.
"""

import importlib
import typing

from ._version import __version__
from .current import get_current_mesh
from .errors import (
    AxisError,
    AxisRequiredError,
    BackendError,
    GroupError,
    MeshError,
    MeshTypeError,
    NoGroupError,
    ParallelDimsError,
    UnnamedMeshError,
)
from .groups import GroupConfig
from .mesh import DeviceMesh, init_device_mesh

if typing.TYPE_CHECKING:
    from .backends import Capability, Collective, Reduction, Support, get_capability
    from .parallel_dims import ParallelDims, SeqLenDivisor, unflatten_mesh

__all__ = [
    "AxisError",
    "AxisRequiredError",
    "BackendError",
    "Capability",
    "Collective",
    "DeviceMesh",
    "GroupConfig",
    "GroupError",
    "MeshError",
    "MeshTypeError",
    "NoGroupError",
    "ParallelDims",
    "ParallelDimsError",
    "Reduction",
    "SeqLenDivisor",
    "Support",
    "UnnamedMeshError",
    "__version__",
    "get_capability",
    "get_current_mesh",
    "init_device_mesh",
    "unflatten_mesh",
]

_LATE = {
    "Capability": "backends",
    "Collective": "backends",
    "ParallelDims": "parallel_dims",
    "Reduction": "backends",
    "SeqLenDivisor": "parallel_dims",
    "Support": "backends",
    "get_capability": "backends",
    "unflatten_mesh": "parallel_dims",
}
"""Public names that are imported when they are first asked for, and the modules they come from."""


def __getattr__(name: str) -> object:
    """Import the module of a late name."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, those not imported yet included."""
    return sorted({*globals(), *_LATE})
