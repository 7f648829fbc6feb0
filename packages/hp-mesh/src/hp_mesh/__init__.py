"""Name devices as a mesh of axes; process groups; parallel dimensions.

`mesh` holds the class, `groups` the process groups, `axes` the rank arithmetic, `backends` what
backends can do, `parallel_dims` the degrees of a training job, `testing` ranks for tests.
"""

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

__all__ = [
    "AxisError",
    "AxisRequiredError",
    "BackendError",
    "DeviceMesh",
    "GroupConfig",
    "GroupError",
    "MeshError",
    "MeshTypeError",
    "NoGroupError",
    "ParallelDimsError",
    "UnnamedMeshError",
    "get_current_mesh",
    "init_device_mesh",
]
