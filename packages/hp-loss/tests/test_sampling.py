"""A draw from shards is the inverse of the whole distribution, at a number that all ranks share."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_loss import LossOptionError, TargetError, vocab_parallel_sample
from hp_mesh import init_device_mesh
from hp_mesh.testing import run_spmd, spmd
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of what must be a DTensor."""
    assert isinstance(tensor, TorchDTensor)
    return tensor.full_tensor()


def _placements(tensor: Tensor | None) -> tuple[object, ...]:
    """How what must be a DTensor lies on its mesh."""
    assert isinstance(tensor, TorchDTensor)
    return tuple(tensor.placements)


def _logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def _shard(logits: Tensor) -> Tensor:
    size, rank = logits.shape[-1], dist.get_rank()
    step = -(-size // dist.get_world_size())
    start = min(rank * step, size)
    return logits[..., start : start + step]


def _reference(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> tuple[Tensor, Tensor]:
    """By sorting the whole, in 64 bits; also how near the number is to the edge of a class."""
    scaled = logits.double() / temperature
    if top_k is not None:
        edge = scaled.topk(min(top_k, scaled.shape[-1])).values[..., -1:]
        scaled = torch.where(scaled < edge, -math.inf, scaled)
    probabilities = scaled.softmax(-1)
    if top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        dropped = ordered.cumsum(-1) - ordered >= top_p
        probabilities = probabilities.masked_fill(dropped.gather(-1, order.argsort(-1)), 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    running = probabilities.cumsum(-1)
    aim = uniform.double().unsqueeze(-1)
    return (running <= aim).sum(-1), (running - aim).abs().amin(-1)


FILTERS = [
    (1.0, None, None),
    (0.7, 5, None),
    (1.3, None, 0.8),
    (1.0, 6, 0.5),
    (1.0, None, 1.0),
    (1.0, 1, None),
]


def test_a_draw_is_the_inverse_of_the_distribution_on_every_rank() -> None:
    """Temperatures, top-k, top-p and both, over even, uneven and empty shards: the class of one device."""

    def body() -> list[list[int]]:
        drawn = []
        for number, (temperature, top_k, top_p) in enumerate(FILTERS):
            for classes in (16, 13, 3):
                logits = _logits(200, classes, seed=number)
                uniform = torch.rand(200, generator=torch.Generator().manual_seed(number))
                got = vocab_parallel_sample(
                    _shard(logits),
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    uniform=uniform,
                    group=dist.group.WORLD,
                    vocab_size=classes,
                )
                expected, margin = _reference(logits, uniform, temperature, top_k, top_p)
                clear = margin > 1e-5
                assert clear.sum() > 150
                assert torch.equal(got[clear], expected[clear])
                drawn.append(got.tolist())
        return drawn

    results = run_spmd(body, world_size=4)
    assert all(result == results[0] for result in results)


def test_ranks_whose_generators_differ_draw_the_same() -> None:
    """The number is the first rank's; so it is without a generator and with one."""

    def body() -> list[int]:
        torch.manual_seed(dist.get_rank())
        logits = _logits(50, 16)
        mine = torch.Generator().manual_seed(100 + dist.get_rank())
        first = vocab_parallel_sample(_shard(logits), group=dist.group.WORLD)
        second = vocab_parallel_sample(_shard(logits), group=dist.group.WORLD, generator=mine)
        return [*first.tolist(), *second.tolist()]

    results = run_spmd(body, world_size=4)
    assert all(result == results[0] for result in results)
    assert results[0][:50] != results[0][50:]


@spmd(world_size=4)
def test_replicas_of_distributed_logits_draw_the_same() -> None:
    """Over a replicated axis the draw is equal too, whatever the generators; shards of tokens draw their own."""
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (2, 2))
    logits = _logits(64, 16)
    for placements in ([Replicate(), Shard(1)], [Replicate(), Replicate()], [Shard(1), Shard(1)]):
        got = vocab_parallel_sample(distribute_tensor(logits, mesh, placements))
        assert isinstance(got, DTensor)
        everyone = [torch.empty_like(got.to_local()) for _ in range(4)]
        dist.all_gather(everyone, got.to_local())
        assert all(torch.equal(one, everyone[0]) for one in everyone)
    cut = vocab_parallel_sample(distribute_tensor(torch.zeros(64, 16), mesh, [Shard(0), Shard(1)]))
    assert _placements(cut) == (Shard(0), Replicate())
    upper, lower = _full(cut).chunk(2)
    assert not torch.equal(upper, lower)


@spmd(world_size=2)
def test_frequencies_are_the_probabilities() -> None:
    """Of twenty thousand draws, each class has its share within five standard deviations."""
    torch.manual_seed(0)
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0])
    logits = probabilities.log().expand(20_000, 6)
    drawn = vocab_parallel_sample(_shard(logits), group=dist.group.WORLD)
    counts = torch.bincount(drawn, minlength=6)
    deviation = (20_000 * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - 20_000 * probabilities).abs() <= 5 * deviation).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-24])
def test_a_class_without_probability_is_never_drawn(uniform: float) -> None:
    """Also not at the ends of the interval, where rounding might reach for it."""
    logits = torch.full((1, 9), -math.inf)
    logits[0, 4] = 1.0
    for options in ({}, {"top_p": 0.9}, {"top_k": 3}):
        assert (
            vocab_parallel_sample(logits, uniform=torch.tensor([uniform]), **options).item() == 4
        )


def test_classes_at_the_edge_of_the_nucleus_are_all_kept() -> None:
    """Four equal classes and top_p of a half: each of them can be drawn."""
    uniform = torch.tensor([0.1, 0.3, 0.6, 0.9])
    drawn = vocab_parallel_sample(torch.zeros(4, 4), uniform=uniform, top_p=0.5)
    assert drawn.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0: it must be above 0.0 and finite"),
        ({"temperature": math.inf}, "temperature is inf: it must be above 0.0 and finite"),
        ({"top_k": 0}, "top_k is 0: it must be 1 or more"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be above 0.0 and at most 1.0"),
        ({"top_p": 1.5}, "top_p is 1.5: it must be above 0.0 and at most 1.0"),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, float], message: str) -> None:
    """The error says what it may be."""
    with pytest.raises(LossOptionError) as caught:
        vocab_parallel_sample(torch.zeros(1, 3), **options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_numbers_of_another_shape_are_refused() -> None:
    """One per token."""
    with pytest.raises(
        TargetError,
        match=r"uniform has the shape \(2,\): give one number per token of this rank, \(3,\)",
    ):
        vocab_parallel_sample(torch.zeros(3, 4), uniform=torch.rand(2))


def test_no_classes_are_refused() -> None:
    """There is nothing to draw."""
    with pytest.raises(LossOptionError, match="there are no classes to draw from"):
        vocab_parallel_sample(torch.zeros(3, 0))
