"""Run a function on real ranks, from a test or a script.

``spmd`` decorates a test, ``run_spmd`` calls a function; both use a pool of gloo processes that is
started once per world size and kept until the parent ends.

Layout: ``_spmd`` is the interface, ``_pool`` the parent's side (start, collect, judge, rebuild),
``_worker`` a rank's side, ``_pickling`` the way a function gets across, ``errors`` what a test
sees when a rank does not answer. Needs the extra ``hp-mesh[testing]``.
"""

from hp_mesh.testing._spmd import run_spmd, spmd
from hp_mesh.testing.errors import RankDiedError, RankError, RankTimeoutError, RankTraceback

__all__ = [
    "RankDiedError",
    "RankError",
    "RankTimeoutError",
    "RankTraceback",
    "run_spmd",
    "spmd",
]
