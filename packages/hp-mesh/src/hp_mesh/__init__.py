"""Name devices as a mesh of axes; process groups; parallel dimensions.

`mesh` holds the class, `groups` the process groups, `axes` the rank arithmetic, `backends` what
backends can do, `parallel_dims` the degrees of a training job, `drawing` pictures of the rank grid,
`collectives` communication on plain tensors, `testing` ranks for tests.

What only some programs ask for, `parallel_dims` and `drawing`, is imported when it is first asked for:
where Python may not keep compiled files, compiling these modules would be a third of the import.
"""

from typing import TYPE_CHECKING

from ._version import __version__
from .backends import Capability, Collective, Reduction, Support, get_capability
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

if TYPE_CHECKING:
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

_LATE = frozenset({"ParallelDims", "SeqLenDivisor", "unflatten_mesh"})


def __getattr__(name: str) -> object:
    """Import `parallel_dims` when one of its names is first asked for."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import parallel_dims

    value: object = getattr(parallel_dims, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, those not imported yet included."""
    return sorted({*globals(), *_LATE})
