"""The generator, the distributions and the pieces, without ranks: known answers, statistics, and one whole from any cut."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hp_dtensor import Placement, Replicate, Shard, StridedShard
from hp_dtensor.random import Draw, philox
from hp_dtensor.random._elementary import exponential, logarithm, root, sine_cosine
from hp_dtensor.random._grid import Box, counted
from hp_dtensor.shards import local_box
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")
COUNT = 1 << 17

# From the file of known answers that comes with Random123, for philox4x32 with ten rounds.
KNOWN = [
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def _drawn(
    draw: Draw,
    shape: tuple[int, ...],
    box: Box | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    key: int = 7,
    eager: bool = True,
) -> torch.Tensor:
    held = [((0, size),) if size else () for size in shape] if box is None else box
    return counted(
        shape,
        held,
        (key & 0xFFFFFFFF, key >> 32),
        draw.lanes(dtype),
        lambda words: draw.numbers(words, dtype),
        dtype=dtype,
        device=CPU,
        eager=eager,
    )


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: str
) -> None:
    """The words are those that Random123 publishes, from numbers and from tensors alike."""
    want = [int(word, 16) for word in answer.split()]
    assert list(philox(counter, key)) == want
    whole = tuple(torch.full((3,), word) for word in counter)
    got = philox((whole[0], whole[1], whole[2], whole[3]), key)
    assert [torch.as_tensor(word).unique().tolist() for word in got] == [[w] for w in want]
    mixed = philox((whole[0], *counter[1:]), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert [torch.as_tensor(word).unique().tolist() for word in mixed] == [[w] for w in want]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_elementary_functions(dtype: torch.dtype, limit: float) -> None:
    """Logarithm, root, sine and cosine agree with torch's to a few units of the last place."""
    x = (torch.arange(1, 50001, dtype=torch.float64) / 499.0).to(dtype)
    wide = x.double()
    assert float((logarithm(x).double() - wide.log()).abs().max()) < limit
    assert float(((root(x).double() - wide.sqrt()) / wide.sqrt()).abs().max()) < limit
    assert root(torch.zeros(1, dtype=dtype)).item() == 0.0
    words = torch.arange(0, 1 << 32, 99991)
    sine, cosine = sine_cosine(words, dtype)
    angle = words.double() * (2 * math.pi / (1 << 32))
    assert float((sine.double() - angle.sin()).abs().max()) < limit
    assert float((cosine.double() - angle.cos()).abs().max()) < limit


def test_exponential_function() -> None:
    """The exponential agrees with torch's over its range, and ends in zero and infinity."""
    x = torch.linspace(-700, 700, 10001, dtype=torch.float64)
    assert float(((exponential(x) - x.exp()) / x.exp()).abs().max()) < 1e-14
    ends = exponential(torch.tensor([-1e4, 1e4], dtype=torch.float64))
    assert ends.tolist() == [0.0, math.inf]


def _normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2.0))


CONTINUOUS: list[tuple[Draw, Callable[[torch.Tensor], torch.Tensor]]] = [
    (Draw("uniform_", (0.0, 1.0)), lambda x: x),
    (Draw("uniform_", (-2.0, 6.0)), lambda x: (x + 2) / 8),
    (Draw("normal_", (0.0, 1.0)), _normal_cdf),
    (Draw("normal_", (1.0, 3.0)), lambda x: _normal_cdf((x - 1) / 3)),
    (Draw("exponential_", (2.0,)), lambda x: 1 - (-2 * x).exp()),
    (Draw("log_normal_", (0.5, 0.7)), lambda x: _normal_cdf((x.log() - 0.5) / 0.7)),
    (Draw("cauchy_", (1.0, 2.0)), lambda x: ((x - 1) / 2).atan() / math.pi + 0.5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("draw", "cdf"), CONTINUOUS, ids=map(str, range(len(CONTINUOUS))))
def test_distributions(
    draw: Draw, cdf: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """Kolmogorov and Smirnov cannot tell the draws from the distribution that they are of."""
    level = cdf(_drawn(draw, (COUNT,), dtype=dtype).double().sort().values)
    steps = torch.arange(COUNT + 1, dtype=torch.float64) / COUNT
    distance = torch.maximum((level - steps[:-1]).abs(), (level - steps[1:]).abs()).max()
    assert float(distance) * math.sqrt(COUNT) < 1.63  # exceeded by one sample in a hundred


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli_frequency(chance: float) -> None:
    """Ones are as frequent as asked for, to four standard errors."""
    share = float(_drawn(Draw("bernoulli_", (chance,)), (COUNT,)).mean())
    assert abs(share - chance) <= 4 * math.sqrt(chance * (1 - chance) / COUNT)


def test_geometric_frequencies() -> None:
    """Trials up to the first success: P(k) = (1 - p)**(k - 1) p."""
    drawn = _drawn(Draw("geometric_", (0.3,)), (COUNT,))
    assert float(drawn.min()) == 1.0
    for k in range(1, 8):
        chance = 0.7 ** (k - 1) * 0.3
        share = float((drawn == k).double().mean())
        assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / COUNT)
    assert _drawn(Draw("geometric_", (1.0,)), (8,)).unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (3, 10), (-5, 1 << 20), (0, (1 << 20) + 1), (-(1 << 62), 1 << 62), (0, 1 << 63)],
)
def test_integers_stay_in_range_and_fill_it(low: int, high: int) -> None:
    """Short and long ranges, up to all of int64, are filled evenly: eight bins by chi squared."""
    drawn = _drawn(Draw("random_", (low, high)), (1 << 14,), dtype=torch.int64)
    assert int(drawn.min()) >= low
    assert int(drawn.max()) < high
    if high - low >= 1 << 20:
        bins = ((drawn.double() - low) / (high - low) * 8).long().clamp(0, 7).bincount(minlength=8)
        assert float(((bins - 2048.0) ** 2 / 2048.0).sum()) < 24.3  # one in a thousand


def test_integers_without_bounds() -> None:
    """``random_()`` and ``random_(low, None)`` reach as far as torch's: negative numbers of int64, all of a float's digits."""
    whole = _drawn(Draw("random_", (-(1 << 63), None)), (4096,), dtype=torch.int64)
    assert 1800 < int((whole < 0).sum()) < 2300
    digits = _drawn(Draw("random_"), (4096,), dtype=torch.float32)
    assert float(digits.min()) >= 0
    assert 1 << 23 < float(digits.max()) <= 1 << 24
    assert _drawn(Draw("random_"), (64,), dtype=torch.bool).unique().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_never_reaches_its_upper_end(dtype: torch.dtype) -> None:
    """Half precision rounds, and still no draw equals the end that is not part of the range."""
    for low, high in ((0.0, 1.0), (1.0, 3.0)):
        drawn = _drawn(Draw("uniform_", (low, high)), (COUNT,), dtype=dtype)
        assert low <= float(drawn.min())
        assert float(drawn.max()) < high


def test_pieces_and_successive_draws_are_uncorrelated() -> None:
    """Neighbouring pieces, lanes of one block and draws with neighbouring keys correlate no more than chance allows."""
    first = _drawn(Draw("normal_", (0.0, 1.0)), (4, COUNT // 4), key=1)
    other = _drawn(Draw("normal_", (0.0, 1.0)), (4, COUNT // 4), key=2)
    rows = torch.corrcoef(torch.cat([first, other]).double())
    assert float((rows - torch.eye(8)).abs().max()) < 5 / math.sqrt(COUNT // 4)
    line = first.flatten().double()
    for lag in (1, 2, 15, 16, 17, 64):
        together = float((line[:-lag] * line[lag:]).mean())
        assert abs(together) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("name", ["normal_", "uniform_", "bernoulli_", "random_", "cauchy_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_expression_gives_what_chunks_give(name: str, dtype: torch.dtype) -> None:
    """What a compiler sees computes the same bits as eager mode."""
    draw = Draw(name)
    for shape in ((70000,), (3, 5), (7, 1, 300), (2, 64)):
        eager, traced = (_drawn(draw, shape, dtype=dtype, eager=flag) for flag in (True, False))
        assert torch.equal(eager, traced)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 5, 64, 257]), min_size=1, max_size=3),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    data=st.data(),
    wide=st.booleans(),
)
def test_pieces_are_parts_of_one_whole(
    shape: list[int], mesh: list[int], data: st.DataObject, wide: bool
) -> None:
    """On every coordinate of every layout, uneven and strided ones too, the piece is the whole's part at its indices."""
    dims = st.integers(0, len(shape) - 1)
    cuts = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(
            lambda dim, factor: StridedShard(dim, split_factor=factor), dims, st.integers(2, 3)
        ),
    )
    placements: tuple[Placement, ...] = tuple(data.draw(cuts) for _ in mesh)
    dtype = torch.float64 if wide else torch.float32
    draw = Draw("normal_", (0.0, 1.0))
    whole = _drawn(draw, tuple(shape), dtype=dtype)
    for coordinate in (
        torch.cartesian_prod(*map(torch.arange, mesh)).reshape(-1, len(mesh)).tolist()
    ):
        box = local_box(tuple(shape), tuple(mesh), tuple(coordinate), placements)
        part = whole
        for dim, intervals in enumerate(box):
            index = [i for a, b in intervals for i in range(a, b)]
            part = part.index_select(dim, torch.tensor(index, dtype=torch.int64))
        assert torch.equal(_drawn(draw, tuple(shape), box, dtype=dtype), part)
