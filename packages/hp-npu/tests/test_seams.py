"""A test per use of what torch calls private; run on the oldest and the newest torch that we support."""

import pytest
import torch
from hp_npu._torch import signatures_of

pytestmark = pytest.mark.seam


def test_schemas_of_an_operator_are_found() -> None:
    """Types, defaults, positional arguments and results are read from an operator's schema."""
    schema = "(Tensor a, float b=1e-6, *, str? c=None) -> (Tensor, Tensor)"
    torch.library.define("hp_npu_seam::probe", schema)
    (found,) = signatures_of("hp_npu_seam::probe")
    assert found.arguments == ("Tensor", "float", "Optional[str]")
    assert (found.required, found.positional, found.results) == (1, 2, 2)
    assert found.text.startswith("hp_npu_seam::probe(")


def test_every_overload_is_found() -> None:
    """An operator with overloads gives a schema for each."""
    assert len(signatures_of("aten::add")) > 1


def test_an_unknown_operator_has_no_schema() -> None:
    """No error, an empty answer."""
    assert signatures_of("npu::npu_no_such_operator") == ()
