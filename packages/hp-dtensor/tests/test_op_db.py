"""Each operator that torch has samples for, on layouts of its inputs: the table of what is right.

The rule: output and gradient equal the program on whole tensors, or the operator is random or its
result has a form that depends on values, and stands in ``LISTED`` with its reason. An operator that
runs on replicas of everything stands in ``WHOLE``, of which there may be 40. A new operator of torch
is in neither list, and must be right. Random ones are compared number by number, since on a CPU the
draws are those of one device.

Run as a script, ``python test_op_db.py [MESH [DTYPE [OPERATOR ...]]]``, it prints the table
operator by operator, and survives hangs; as a test it draws a few samples and layouts of each by a
seed. The nightly form takes all samples, and many more layouts.
"""

from __future__ import annotations

import collections
import json
import random
import sys
import tempfile
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hp_mesh.testing import RankTimeoutError, run_spmd
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("numpy", reason="torch's samples are made with it")

LISTED = {
    "nn.functional.rrelu": "draws one number for each negative element, in the order of one device",
    **dict.fromkeys(
        ("cauchy", "exponential", "geometric", "log_normal", "normal.in_place", "uniform"),
        "draws into its argument; addends of one are no draw, and refused with an error",
    ),
    "to_sparse": "how many entries it has depends on values, and no layout describes a sparse tensor",
}
"""Operators that are random, or have a form that depends on values, and are not right for each layout."""

WITHOUT_VALUES = frozenset(
    {
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"),
        "new_empty_strided",
    }
)
"""Operators whose values are not defined: shapes, dtypes and strides are compared."""


class _Operators(TorchDispatchMode):
    """The operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def _combines_by_a_mask() -> bool:
    """Whether this torch, as 2.12 does, selects combinations among all tuples by values of a mask."""
    with _Operators() as operators:
        torch.combinations(torch.arange(3))
    return torch.ops.aten.masked_select in operators.seen


SIZED_BY_VALUES = frozenset(
    {
        *("masked_select", "nonzero", "argwhere", "unique", "unique_consecutive", "bincount"),
        *("linalg.lstsq", "linalg.lstsq.grad_oriented", "repeat_interleave", "index_fill"),
        *("index_put", *(("combinations",) if _combines_by_a_mask() else ())),
    }
)
"""Operators in one of whose forms the shape of a result depends on values: they gather, and are right."""

WHOLE = frozenset(
    {
        *("as_strided", "as_strided.partial_views", "as_strided_copy", "as_strided_scatter"),
        *("histogram", "histogramdd", "hash_tensor", "nn.functional.ctc_loss", "nonzero_static"),
        *("nn.functional.embedding_bag", "_segment_reduce.lengths", "_segment_reduce.offsets"),
        *("torch._scaled_mm", "torch._scaled_mm_v2", "geqrf"),
    }
)
"""Operators that run on replicas of everything, in one of their forms at least."""

SEED = 11
PARTS = 6
OTHER_NUMBERS = {torch.complex64: 140, torch.bfloat16: 120}
"""How many operators are drawn for each dtype beside float32, of which some do not have it."""


def _name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def _op_db() -> dict[str, Any]:
    """Torch's operators with samples, by name; their module wants a library that it hardly uses."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stub = types.ModuleType("expecttest")
            stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {_name(info): info for info in op_db}


def _dtype_for(info: Any, wanted: torch.dtype) -> torch.dtype | None:
    """*wanted*, or for operators of other numbers what they are made for."""
    held = info.supported_dtypes("cpu")
    if wanted in held:
        return wanted
    others = (torch.int64, torch.bool, torch.complex64, torch.float64, torch.float16)
    return next((d for d in others if d in held), None) if wanted == torch.float32 else None


def _samples(info: Any, dtype: torch.dtype, gradient: bool) -> list[Any]:
    torch.manual_seed(SEED)
    random.seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch makes samples with
        return list(info.sample_inputs("cpu", dtype, requires_grad=gradient))


def _compares(sample: Any) -> bool:
    """Whether a sample has dims to cut, and a value."""

    def fits(value: object) -> bool:
        if isinstance(value, torch.Tensor):
            return value.layout == torch.strided
        if isinstance(value, list | tuple):
            return all(map(fits, value))
        return True

    drawn = sample.kwargs.get("dropout_p")
    return not drawn and fits([sample.input, *sample.args, *sample.kwargs.values()])


def _program(name: str, operator: Callable[..., object]) -> Callable[..., object]:
    """What is run and compared: the operator, and for those without values the form of their result."""
    if name not in WITHOUT_VALUES:
        return operator

    def form(*args: object, **kwargs: object) -> object:
        made = operator(*args, **kwargs)
        assert isinstance(made, torch.Tensor)
        with torch.no_grad():
            return made.fill_(1)

    return form


def _sweep(
    names: Sequence[str],
    shape: tuple[int, ...],
    wanted: torch.dtype,
    samples: int | None,
    layouts: int | None,
    log: str = "",
) -> dict[str, dict[str, Any]]:
    """On each rank: for each operator how often it came out how, and what was not right."""
    import torch.distributed as dist
    from hp_dtensor import dispatch
    from hp_dtensor.testing import check_program
    from hp_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", shape)
    known = _op_db()
    found: dict[str, dict[str, Any]] = {}

    def tell(line: str) -> None:
        if log and dist.get_rank() == 0:
            with Path(log).open("a") as file:
                file.write(line + "\n")

    for name in names:
        tell(f"start {name}")
        info = known[name]
        dtype = _dtype_for(info, wanted)
        counts: collections.Counter[str] = collections.Counter()
        faults: list[str] = []
        if dtype is not None:
            differentiable = info.supports_autograd and name not in WITHOUT_VALUES
            gradient = differentiable and dtype in info.supported_backward_dtypes("cpu")
            picked = [sample for sample in _samples(info, dtype, gradient) if _compares(sample)]
            if samples is not None and len(picked) > samples:
                picked = random.Random(f"{SEED} {name}").sample(picked, samples)
            for number, sample in enumerate(picked):
                dispatch._warned.clear()
                try:
                    outcomes = check_program(
                        _program(name, info.op),
                        [sample.input, *sample.args],
                        sample.kwargs,
                        mesh=mesh,
                        at_most=layouts,
                        gradient=gradient,
                        seed=number,
                    )
                except Exception as error:  # noqa: BLE001
                    # The sample does not run on plain tensors either, as those for CUDA do not.
                    counts["no program"] += 1
                    faults.append(f"plain: {error}"[:300])
                    continue
                for outcome in outcomes:
                    counts[outcome.verdict] += 1
                    if outcome.verdict != "right" and len(faults) < 3:
                        faults.append(f"{outcome.layout}: {outcome.message}"[:400])
        found[name] = {"counts": dict(counts), "faults": faults}
        tell(f"done {name} {json.dumps(found[name])}")
    return found


def _verdict(name: str, result: dict[str, Any]) -> str:
    """The line of the table in which an operator stands."""
    counts = result["counts"]
    if name in LISTED:
        return "listed"
    for verdict in ("error", "wrong", "fell back", "right"):
        if counts.get(verdict):
            by_values = verdict == "fell back" and name in SIZED_BY_VALUES
            return "listed" if by_values else verdict
    return "not here"  # it does not run on a CPU, or not on these numbers


def _judge(results: dict[str, dict[str, Any]]) -> None:
    bad = [
        f"{name}: {result['counts']} {result['faults']}"
        for name, result in results.items()
        if _verdict(name, result) in {"error", "wrong"}
        or (_verdict(name, result) == "fell back" and name not in WHOLE)
    ]
    assert not bad, "\n".join(bad)


def _part(part: int, parts: int) -> list[str]:
    names = [name for name in _op_db() if name not in LISTED]
    return names[part::parts]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_are_right_on_two_ranks(part: int) -> None:
    """Output and gradient equal the program on whole tensors, for a drawn sample on drawn layouts."""
    results = run_spmd(
        _sweep, _part(part, PARTS), (2,), torch.float32, 1, 3, world_size=2, timeout=240
    )
    _judge(results[0])


@pytest.mark.slow
def test_operators_are_right_on_a_mesh_of_two_axes() -> None:
    """As on one axis, for a sixth of the operators."""
    results = run_spmd(_sweep, _part(0, 6), (2, 2), torch.float32, 1, 2, world_size=4, timeout=240)
    _judge(results[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", OTHER_NUMBERS)
def test_operators_are_right_on_other_numbers(dtype: torch.dtype) -> None:
    """As on float32, for drawn operators: conjugates count, and halves are off by their rounding alone."""
    names = random.Random(SEED).sample(_part(0, 1), OTHER_NUMBERS[dtype])
    results = run_spmd(_sweep, names, (2,), dtype, 1, 3, world_size=2, timeout=240)
    _judge(results[0])
    right = sum(_verdict(name, result) == "right" for name, result in results[0].items())
    assert right > 40, f"only {right} of the drawn operators have {dtype}"


def test_few_operators_run_on_replicas() -> None:
    """At most 40 operators need all inputs whole, beside those whose results have a shape by values."""
    assert len(WHOLE) <= 40
    assert not WHOLE & (LISTED.keys() | SIZED_BY_VALUES)


def _alike(plain: object, tensors: list[Any]) -> object:
    """The *tensors* as an operator takes them that gave *plain*: in a tuple, or one alone."""
    return tuple(tensors) if isinstance(plain, tuple) else tensors[0]


def _sweep_outs(names: Sequence[str]) -> tuple[int, list[str]]:
    """On each rank: how many calls with ``out=`` were made, and what was not right; on drawn layouts of all tensors."""
    from hp_dtensor import Replicate, Shard, distribute_tensor
    from hp_mesh import init_device_mesh
    from torch.utils._pytree import tree_map

    mesh = init_device_mesh("cpu", (2,))
    known = _op_db()
    made, faults = 0, []
    for name in names:
        info = known[name]
        if not info.supports_out or name in WITHOUT_VALUES:
            continue
        samples = [s for s in _samples(info, torch.float32, False) if _compares(s)]
        draw = random.Random(f"{SEED} {name}")

        def laid(value: object, draw: random.Random = draw) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            places = [Replicate(), *map(Shard, range(value.dim()))]
            return distribute_tensor(value, mesh, [draw.choice(places)], src_data_rank=None)

        for sample in draw.sample(samples, min(3, len(samples))):
            given = (sample.input, *sample.args)
            try:
                plain = info.op(*given, **sample.kwargs)
                expected = list(plain) if isinstance(plain, tuple) else [plain]
                zeros = [torch.zeros_like(one) for one in expected]
                info.op(*given, **sample.kwargs, out=_alike(plain, zeros))
            except Exception:  # noqa: BLE001
                continue  # no tensors, a sample for another device, or one of a form without out=
            outs = [laid(torch.zeros_like(one)) for one in expected]
            args, kwargs = tree_map(laid, given), tree_map(laid, sample.kwargs)
            made += 1
            try:
                info.op(*args, **kwargs, out=_alike(plain, outs))
                whole = [out.full_tensor() for out in outs]  # type: ignore[attr-defined]  # distributed
                torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
            except Exception as error:  # noqa: BLE001
                faults.append(f"{name}: {type(error).__name__}: {error}"[:400])
    return made, faults


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_written_to_out_is_right() -> None:
    """Each operator that takes ``out=`` fills a tensor of any layout with what it gives on whole tensors."""
    names = [name for name, info in _op_db().items() if torch.float32 in info.dtypes]
    made, faults = run_spmd(_sweep_outs, names, world_size=2, timeout=240)[0]
    assert made > 500
    assert not faults, "\n".join(faults)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_operators_are_right_on_many_layouts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """All samples as shipped, on all layouts, or 64 of them where there are more."""
    ranks = 2 if len(shape) == 1 else 4
    for part in range(60):
        results = run_spmd(
            _sweep, _part(part, 60), shape, dtype, None, 64, world_size=ranks, timeout=3600
        )
        _judge(results[0])


# --- the table --------------------------------------------------------------------------------


def _table(
    names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What came of each of *names*; one that hangs is left out, with a new pool for the rest."""
    ranks = 1
    for size in shape:
        ranks *= size
    left = list(names)
    while left:
        with tempfile.NamedTemporaryFile(mode="r") as log:
            try:
                run_spmd(
                    _sweep, left[:8], shape, dtype, 6, 6, log.name, world_size=ranks, timeout=120
                )
            except RankTimeoutError as error:
                hung: str | None = str(error)
            else:
                hung = None
            last = ""
            for line in log.read().splitlines():
                kind, name, *rest = line.split(" ", 2)
                last = name if kind == "start" else ""
                if rest:
                    left.remove(name)
                    yield name, json.loads(rest[0])
            if hung is not None and last:
                left.remove(last)
                yield last, {"counts": {"hang": 1}, "faults": [hung[:300]]}


def main(arguments: Sequence[str]) -> None:
    """Print the table: operator; right, fell back, listed, not here, wrong, error, hang; how often which."""
    shape = tuple(int(size) for size in (arguments[0] if arguments else "2").split("x"))
    dtype = getattr(torch, arguments[1]) if len(arguments) > 1 else torch.float32
    names = arguments[2:] or list(_op_db())
    totals: collections.Counter[str] = collections.Counter()
    for name, result in _table(names, shape, dtype):
        verdict = "hang" if "hang" in result["counts"] else _verdict(name, result)
        totals[verdict] += 1
        note = (
            LISTED.get(name, "the shape of a result depends on values, so all are gathered")
            if verdict == "listed"
            else "; ".join(result["faults"])
        )
        print(f"{name:60} {verdict:10} {result['counts']} {note}", flush=True)
    print(f"{tuple(shape)} {dtype}: {dict(totals)}")


if __name__ == "__main__":
    main(sys.argv[1:])
