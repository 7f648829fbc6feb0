"""One draw on this rank's piece of a distributed tensor, under the policy in force.

The idea: everything that is drawn is drawn into a piece that is described by which indices of the whole it holds. A key
or a generator, the same on all ranks of the mesh, comes from `_source`; the rest is local.

The rule: what depends on the generator's state is an operator of ours as soon as a compiler looks on, so that each run of
the graph draws anew, and a replay draws again what was drawn. Only counters and what is made of them are traced, and fuse
with what uses them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Generator, Tensor

from hp_dtensor._torch import define_operator, group_by_name, is_traced, kept_for_replays
from hp_dtensor.random._distributions import Draw
from hp_dtensor.random._grid import Box, Key, counted
from hp_dtensor.random._policy import Policy
from hp_dtensor.random._source import Peers, key, lend, mixed, retire

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

__all__ = ["Piece", "cut", "fill", "pass_by", "permutation", "sample"]

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Piece:
    """Which part of a whole tensor is drawn here."""

    shape: tuple[int, ...]
    """The whole tensor's."""
    stride: tuple[int, ...]
    """The strides that the whole tensor would have on one device."""
    box: Box
    """The indices that this rank holds; all of them if nothing is cut."""
    number: int
    """Which of the different pieces this is; replicas have the same."""


def cut(whole: Tensor, box: Box) -> Tensor:
    """The part of *whole* in *box*.

    Example:
        >>> cut(torch.arange(6), [((0, 1), (4, 6))])
        tensor([0, 4, 5])
    """
    for dim, intervals in enumerate(box):
        if len(intervals) == 1:
            whole = whole.narrow(dim, intervals[0][0], intervals[0][1] - intervals[0][0])
        else:
            pieces = [whole.narrow(dim, a, b - a) for a, b in intervals]
            whole = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
    return whole


def fill(
    local: Tensor,
    piece: Piece,
    draw: Draw,
    policy: Policy,
    peers: Peers,
    generator: Generator | None = None,
) -> None:
    """Fill *local*, which is *piece* of a tensor, with what *draw* gives.

    Args:
        local: this rank's piece; on the meta device nothing happens.
        piece: which piece it is.
        draw: what to draw.
        policy: how.
        peers: the ranks of the mesh.
        generator: what the randomness comes from, torch's default CPU generator when None.

    Raises:
        RuntimeError: or another error that torch raises when the numbers or the dtype do not fit.
    """
    draw.draw(torch.empty(0, dtype=local.dtype), None)  # torch's own checks
    if local.is_meta or 0 in piece.shape:
        return
    if local.is_complex():
        inner = Piece(
            (*piece.shape, 2),
            (*(2 * step for step in piece.stride), 1),
            (*piece.box, ((0, 2),)),
            piece.number,
        )
        fill(
            torch.view_as_real(local), inner, _of_parts(draw), policy, peers, generator
        )  # both parts
        return
    if policy == "layout_free":
        made = _numbers(local, piece, draw, peers, generator)
    elif is_traced(local):
        made = _recorded(local, piece, draw, policy, peers)
    else:
        made = _native(piece, draw, policy, peers, generator, local.dtype, local.device)
    local.copy_(made)


def _of_parts(draw: Draw) -> Draw:
    """What real and imaginary parts are drawn from: normal ones share the variance."""
    if draw.name == "normal_":
        mean, std = draw.pair(0.0, 1.0)
        return Draw("normal_", (mean, std / math.sqrt(2.0)))
    return draw


def _numbers(
    like: Tensor, piece: Piece, draw: Draw, peers: Peers, generator: Generator | None
) -> Tensor:
    dtype = like.dtype
    return counted(
        piece.shape,
        piece.box,
        _key(like, peers, generator),
        draw.lanes(dtype),
        lambda words: draw.numbers(words, dtype),
        dtype=dtype,
        device=like.device,
        eager=not is_traced(like),
    )


def _key(like: Tensor, peers: Peers, generator: Generator | None) -> Key:
    """The key of a draw as two words: numbers in eager mode, tensors in a graph."""
    if is_traced(like) and generator is None:
        words = _recorded_key(peers).to(like.device)
        return words[0], words[1]
    number = key(peers, generator)
    return number & _MASK, number >> 32


def _recorded_key(peers: Peers) -> Tensor:
    """The key of a draw in a graph: two words."""
    with kept_for_replays():
        made = torch.ops.hp_dtensor.draw_key(*_reach(peers))
    return cast("Tensor", made)[0]


def _recorded(local: Tensor, piece: Piece, draw: Draw, policy: Policy, peers: Peers) -> Tensor:
    """What torch's own kernels draw, in a graph."""
    name = json.dumps([draw.name, draw.params])
    if policy == "device":
        words = _recorded_key(peers)
        made = torch.ops.hp_dtensor.draw_stream(
            words, name, list(local.shape), piece.number, local.dtype, local.device
        )
        return cast("Tensor", made)
    with kept_for_replays():
        made = torch.ops.hp_dtensor.draw_piece(
            name,
            *_reach(peers),
            piece.shape,
            piece.stride,
            _flat(piece.box),
            local.dtype,
            local.device,
        )
    return cast("Tensor", made)[0]


def _native(
    piece: Piece,
    draw: Draw,
    policy: str,
    peers: Peers,
    generator: Generator | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """What torch's own kernels draw: the whole, cut, under the policy "host", and this piece alone under "device"."""
    if policy == "host":
        lent = lend(peers, generator)
        whole = torch.empty_strided(piece.shape, piece.stride, dtype=dtype, device=lent.device)
        draw.draw(whole, lent)
        return cut(whole, piece.box).to(device)
    sizes = [sum(b - a for a, b in intervals) for intervals in piece.box]
    return _streamed(key(peers, generator), draw, sizes, piece.number, dtype, device)


def _streamed(
    number: int,
    draw: Draw,
    sizes: Sequence[int],
    piece: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A *draw* of the key *number* from the stream of a *piece*."""
    stream = Generator(device).manual_seed(mixed(number + piece) & (2**63 - 1))
    made = torch.empty(sizes, dtype=dtype, device=device)
    draw.draw(made, stream)
    return made


def pass_by(
    piece: Piece, draw: Draw, policy: Policy, dtype: torch.dtype, generator: Generator | None
) -> None:
    """Do to the generator what a draw does, on a rank that is not part of the mesh and holds no piece."""
    if 0 in piece.shape:
        return
    if policy != "host":
        retire(generator)
        return
    source = torch.default_generator if generator is None else generator
    whole = torch.empty_strided(piece.shape, piece.stride, dtype=dtype, device=source.device)
    draw.draw(whole, source)


# --- draws that need the whole ----------------------------------------------------------------


def _stream(
    policy: str, peers: Peers, generator: Generator | None, device: torch.device
) -> Generator:
    """A generator on *device* that stands alike on all ranks."""
    if policy == "host":
        lent = lend(peers, generator)
        if lent.device.type == device.type:
            return lent
    return Generator(device).manual_seed(key(peers, generator) & (2**63 - 1))


_SAMPLERS = (
    "bernoulli",
    "binomial",
    "multinomial",
    "poisson",
    "_standard_gamma",
    "_sample_dirichlet",
)
"""The ATen operators that :func:`sample` knows; beside them there is "rrelu"."""


def _rrelu(
    tensor: Tensor, low: float, high: float, *, generator: Generator | None = None
) -> Tensor:
    """The slopes of a randomised leaky ReLU, one where an element is above zero."""
    noise = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    torch.ops.aten.rrelu_with_noise(tensor.contiguous(), noise, low, high, True, generator)
    return noise


def _sampler(name: str) -> Callable[..., Tensor]:
    if name == "rrelu":
        return _rrelu
    if name not in _SAMPLERS:
        msg = f"sampler {name!r} does not exist; there are {', '.join(_SAMPLERS)}, rrelu"
        raise ValueError(msg)
    return cast("Callable[..., Tensor]", getattr(torch.ops.aten, name).default)


def sample(
    name: str,
    inputs: Sequence[Tensor],
    args: Sequence[float],
    policy: Policy,
    peers: Peers,
    generator: Generator | None = None,
) -> Tensor:
    """What torch's sampler *name* gives for whole plain *inputs*, the same on all *peers*.

    Args:
        name: the ATen operator's, such as ``"multinomial"``; or ``"rrelu"`` for the slopes that it multiplies by.
        inputs: the tensors that it samples by.
        args: its further arguments.
        policy: under "host" the numbers are those of the single-device program; otherwise they come from a generator of
            the device, seeded by the key of the draw.
        peers: the ranks of the mesh.
        generator: what the randomness comes from.
    """
    if is_traced(inputs[0]) and generator is None:
        with kept_for_replays():
            made = torch.ops.hp_dtensor.draw_sample(
                name, list(inputs), json.dumps(list(args)), policy, *_reach(peers)
            )
        return cast("Tensor", made)[0]
    stream = _stream(policy, peers, generator, inputs[0].device)
    return _sampler(name)(*inputs, *args, generator=stream)


def permutation(
    count: int,
    policy: Policy,
    peers: Peers,
    generator: Generator | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A random order of the first *count* integers, whole and the same on all *peers*."""
    if policy == "layout_free":
        words = Draw("random_", (0, 1 << 62))
        whole = Piece((count,), (1,), (((0, count),),) if count else ((),), 0)
        keys = _numbers(
            torch.empty(0, dtype=torch.int64, device=device), whole, words, peers, generator
        )
        return keys.argsort(stable=True).to(dtype)
    stream = lend(peers, generator) if policy == "host" else None
    if stream is None:
        stream = _stream(policy, peers, generator, device)
    made = torch.randperm(count, generator=stream, dtype=dtype, device=stream.device)
    return made.to(device)


# --- what a compiler sees ---------------------------------------------------------------------


_sites = itertools.count()
"""A number for each draw in a graph: two that are equal in all else would be merged into one."""


def _reach(peers: Peers) -> tuple[list[int], list[str], torch.device, int]:
    names = [str(group.group_name) for group in peers.groups()]
    return list(peers.ranks), names, peers.device, next(_sites)


def _peers(ranks: Sequence[int], names: Sequence[str], device: torch.device) -> Peers:
    def groups() -> list[ProcessGroup]:
        return [group_by_name(name) for name in names]

    return Peers(tuple(ranks), groups, device, _allow)


def _allow() -> None:
    """Let a graph communicate: whether it may was decided when it was traced."""


def _flat(box: Box) -> list[int]:
    """The intervals of each dim as numbers, each dim behind its count."""
    return [n for dim in box for n in (len(dim), *(end for interval in dim for end in interval))]


def _boxed(numbers: Sequence[int]) -> Box:
    source = iter(numbers)
    return tuple(tuple((next(source), next(source)) for _ in range(count)) for count in source)


# What takes from the generator returns its result as the one row of a tensor. Reading the row is a node of the region that
# the draw is in, and what passes from the draw to it is saved for a replay; the row itself might not pass on at all.


def _draw_key(
    ranks: Sequence[int], groups: Sequence[str], device: torch.device, _site: int
) -> Tensor:
    made = key(_peers(ranks, groups, device), None)
    return torch.tensor([[made & _MASK, made >> 32]])


def _fake_key(
    _ranks: Sequence[int], _groups: Sequence[str], _device: torch.device, _site: int
) -> Tensor:
    return torch.empty(1, 2, dtype=torch.int64)


def _draw_stream(
    words: Tensor,
    draw: str,
    sizes: Sequence[int],
    number: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    low, high = words.tolist()
    name, params = json.loads(draw)
    return _streamed(high << 32 | low, Draw(name, tuple(params)), sizes, number, dtype, device)


def _fake_stream(
    _words: Tensor,
    _draw: str,
    sizes: Sequence[int],
    _number: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device=device)


def _draw_piece(
    draw: str,
    ranks: Sequence[int],
    groups: Sequence[str],
    mesh_device: torch.device,
    _site: int,
    shape: Sequence[int],
    stride: Sequence[int],
    box: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    name, params = json.loads(draw)
    piece = Piece(tuple(shape), tuple(stride), _boxed(box), 0)
    peers = _peers(ranks, groups, mesh_device)
    made = _native(piece, Draw(name, tuple(params)), "host", peers, None, dtype, device)
    return made.contiguous().unsqueeze(0)


def _fake_piece(
    _draw: str,
    _ranks: Sequence[int],
    _groups: Sequence[str],
    _mesh_device: torch.device,
    _site: int,
    _shape: Sequence[int],
    _stride: Sequence[int],
    box: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    sizes = [sum(b - a for a, b in intervals) for intervals in _boxed(box)]
    return torch.empty([1, *sizes], dtype=dtype, device=device)


def _draw_sample(
    name: str,
    inputs: Sequence[Tensor],
    args: str,
    policy: str,
    ranks: Sequence[int],
    groups: Sequence[str],
    mesh_device: torch.device,
    _site: int,
) -> Tensor:
    stream = _stream(policy, _peers(ranks, groups, mesh_device), None, inputs[0].device)
    return _sampler(name)(*inputs, *json.loads(args), generator=stream).unsqueeze(0)


def _fake_sample(
    name: str,
    inputs: Sequence[Tensor],
    args: str,
    _policy: str,
    _ranks: Sequence[int],
    _groups: Sequence[str],
    _mesh_device: torch.device,
    _site: int,
) -> Tensor:
    return _sampler(name)(*inputs, *json.loads(args)).unsqueeze(0)


_PEERS = "int[] ranks, str[] groups, Device mesh_device, int site"
define_operator("draw_key", f"({_PEERS}) -> Tensor", _draw_key, _fake_key)
define_operator(
    "draw_stream",
    "(Tensor words, str draw, SymInt[] sizes, int number, ScalarType dtype, Device device) -> Tensor",
    _draw_stream,
    _fake_stream,
    seeded=False,
)
define_operator(
    "draw_piece",
    f"(str draw, {_PEERS}, int[] shape, int[] stride, int[] box, ScalarType dtype, Device device) -> Tensor",
    _draw_piece,
    _fake_piece,
)
define_operator(
    "draw_sample",
    f"(str name, Tensor[] inputs, str args, str policy, {_PEERS}) -> Tensor",
    _draw_sample,
    _fake_sample,
)
