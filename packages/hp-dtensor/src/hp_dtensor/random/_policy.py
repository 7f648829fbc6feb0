"""The three ways to draw, and which is in force.

The rule: one setting for the process, not one for each context, since backward passes draw again (under activation
checkpointing) on threads of their own. Nobody having chosen, the device of the mesh decides: on a CPU the single-device
program has a generator whose draws can be had bit for bit, so they are; elsewhere the draws are those of the counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

__all__ = ["Policy", "policy_of", "random_policy", "set_random_policy"]

Policy = Literal["layout_free", "host", "device"]
"""How random numbers on distributed tensors are drawn."""

_POLICIES = get_args(Policy)
_chosen: list[Policy | None] = [None]


def set_random_policy(policy: Policy | None) -> None:
    """Choose how random numbers on distributed tensors are drawn in this process; the same on every rank.

    With ``"layout_free"`` and ``"host"`` the whole tensor holds the same numbers however it is laid out and on however
    many ranks; with all three, replicas are equal.

    Args:
        policy: ``"layout_free"``: a number is a function of a key, which torch's default CPU generator gives once for a
            draw, and of the element's index in the whole tensor; each rank computes its own piece, and any device gives
            the same bits. ``"host"``: what torch draws for the whole tensor on one device with the default CPU generator,
            cut; each rank draws the whole. ``"device"``: each rank draws its piece with the kernels of its device, from
            a stream that depends on which piece it is; fastest on accelerators, and other layouts give other numbers.
            None: ``"host"`` on meshes of CPUs, ``"layout_free"`` elsewhere.

    A compiled graph keeps the policy it was compiled under.

    Raises:
        ValueError: when *policy* is none of these.

    Example:
        >>> set_random_policy("layout_free")
        >>> set_random_policy(None)
    """
    if policy is not None and policy not in _POLICIES:
        msg = f"random policy {policy!r} does not exist; choose one of {', '.join(map(repr, _POLICIES))}, or None"
        raise ValueError(msg)
    _chosen[0] = policy


@contextmanager
def random_policy(policy: Policy | None) -> Iterator[None]:
    """Inside, draws are made by *policy*; see :func:`set_random_policy`.

    It holds for all threads. A backward pass that draws again belongs inside as well.

    Example:
        >>> import hp_dtensor
        >>> with hp_dtensor.random_policy("host"):
        ...     pass
    """
    before = _chosen[0]
    set_random_policy(policy)
    try:
        yield
    finally:
        _chosen[0] = before


def policy_of(device_type: str) -> Policy:
    """The policy in force for meshes of *device_type*.

    Example:
        >>> policy_of("cpu"), policy_of("cuda")
        ('host', 'layout_free')
    """
    return _chosen[0] or ("host" if device_type == "cpu" else "layout_free")


def chosen_policy() -> Policy | None:
    """What was chosen, or None."""
    return _chosen[0]
