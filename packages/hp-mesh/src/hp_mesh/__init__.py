"""Name devices as a mesh of axes; process groups; parallel dimensions.

`mesh` holds the class, `groups` the process groups, `axes` the rank arithmetic, `backends` what
backends can do, `parallel_dims` the degrees of a training job, `drawing` pictures of the rank grid,
`collectives` communication on plain tensors, `testing` ranks for tests.
"""

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
