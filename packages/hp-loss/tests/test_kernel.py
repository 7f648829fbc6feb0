"""The reference kernel: chunked as whole, in place as not, and replaceable."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch
from hp_loss import CrossEntropyKernel, find_kernel
from hp_loss.kernel import TorchKernel, accumulation_dtype


def _case(columns: int = 5, tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, columns, generator=generator)
    column = torch.randint(-1, columns, (tokens,), generator=generator)
    return logits, column, torch.rand(tokens, generator=generator)


@pytest.mark.parametrize("elements", [1, 5, 12, 1000])
@pytest.mark.parametrize("kind", ["none", "number", "vector", "matrix"])
def test_chunks_give_the_bits_of_the_whole(elements: int, kind: str) -> None:
    """How many tokens are worked on at a time changes no bit of the statistics and of the gradient."""
    logits, column, mass = _case()
    background = {
        "none": None,
        "number": torch.tensor(0.1),
        "vector": torch.arange(5.0),
        "matrix": torch.arange(35.0).view(7, 5),
    }[kind]
    whole, chunked = TorchKernel(10**6), TorchKernel(elements)
    assert torch.equal(
        whole.statistics(logits, column, mass, background),
        chunked.statistics(logits, column, mass, background),
    )
    rest = (logits.amax(1), torch.rand(7), torch.rand(7))
    assert torch.equal(
        whole.gradient(logits, column, mass, background, *rest, inplace=False),
        chunked.gradient(logits, column, mass, background, *rest, inplace=False),
    )


def test_in_place_gradient_is_written_over_the_logits() -> None:
    """The in-place gradient has the same bits, and the logits' memory."""
    logits, column, mass = _case()
    rest = (logits.amax(1), torch.rand(7), torch.rand(7))
    kernel = TorchKernel()
    expected = kernel.gradient(logits, column, mass, None, *rest, inplace=False)
    got = kernel.gradient(logits, column, mass, None, *rest, inplace=True)
    assert got.data_ptr() == logits.data_ptr()
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(("tokens", "columns"), [(0, 5), (7, 0), (0, 0)])
def test_nothing_has_statistics_and_a_gradient_of_its_shape(tokens: int, columns: int) -> None:
    """A shard without tokens or without classes is no special case for the caller."""
    logits, numbers = torch.zeros(tokens, columns), torch.ones(tokens)
    nowhere = torch.full((tokens,), -1)
    kernel = TorchKernel()
    assert kernel.statistics(logits, nowhere, numbers, None).shape == (tokens, 4)
    gradient = kernel.gradient(
        logits, nowhere, numbers, None, numbers, numbers, numbers, inplace=False
    )
    assert gradient.shape == (tokens, columns)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_arithmetic_is_in_32_bits_or_more(dtype: torch.dtype, expected: torch.dtype) -> None:
    """Statistics of 16-bit logits are 32-bit numbers; the gradient has the logits' dtype."""
    logits, column, mass = _case()
    kernel = TorchKernel()
    assert accumulation_dtype(dtype) == expected
    assert kernel.statistics(logits.to(dtype), column, mass.to(expected), None).dtype == expected
    rest = (logits.amax(1).to(expected), mass.to(expected), mass.to(expected))
    gradient = kernel.gradient(
        logits.to(dtype), column, mass.to(expected), None, *rest, inplace=False
    )
    assert gradient.dtype == dtype


class _Vendor(TorchKernel):
    """A kernel that somebody else ships."""


def test_a_registered_kernel_is_found_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point named after the device type wins over the reference, for that device type only."""
    entry = EntryPoint("npu", f"{__name__}:_Vendor", "hp_loss.kernels")
    monkeypatch.setattr(EntryPoint, "load", lambda self: _Vendor)
    monkeypatch.setattr(
        "hp_loss.kernel.entry_points",
        lambda group, name: [entry] if (group, name) == (entry.group, entry.name) else [],
    )
    monkeypatch.setattr("hp_loss.kernel._found", {})
    kernel: CrossEntropyKernel = find_kernel("npu")
    assert type(kernel) is _Vendor
    assert find_kernel("npu") is kernel
    assert type(find_kernel("cpu")) is TorchKernel
