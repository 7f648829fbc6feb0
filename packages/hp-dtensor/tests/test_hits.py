"""The hit path gives what the slow path gives, and its bindings are the operators that they stand for."""

import threading
from collections.abc import Mapping, Sequence

import hp_dtensor
import pytest
import torch
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, hits
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Which operators are called, with which arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[OpOverload, int]] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.seen.append((func, len(args)))
        return func(*args, **(kwargs or {}))


def arguments(op: OpOverload) -> list[object]:
    """Arguments that *op* takes, one for each that has no default."""
    made: dict[str, object] = {
        "Tensor": torch.rand(2, 2) + 1,
        "List[Tensor]": [torch.rand(2, 2) + 1, torch.rand(2, 2) + 1],
        "List[float]": [0.5, 0.25],
        "List[int]": [0],
        "Optional[List[int]]": [0],
        "number": 2.0,
        "List[number]": [2.0, 3.0],
        "int": 0,
        "bool": False,
        "Optional[Tensor]": None,
    }
    if op is aten.where.self:
        return [torch.tensor(True), *[torch.rand(2, 2)] * 2]
    if op is aten.bmm.default:
        return [torch.rand(2, 3, 3)] * 2
    if op is aten.baddbmm.default:
        return [torch.rand(2, 3, 3)] * 3
    if op is aten.masked_fill.Scalar:
        return [torch.rand(2), torch.tensor([True, False]), 2.0]
    if op in (aten.gather.default, aten.index_select.default):
        return [torch.rand(2), 0, torch.tensor([1])]
    if op is aten.embedding.default:
        return [torch.rand(3, 2), torch.tensor([2, 0])]
    if op is aten.native_layer_norm.default:
        return [torch.rand(3, 2), [2], torch.rand(2), torch.rand(2), 1e-5]
    if op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
        return [torch.rand(2), torch.rand(2), 0, torch.float32]
    if op is aten.clamp.default:
        return [torch.rand(2), 0.5]
    if op is aten.permute.default:
        return [torch.rand(2, 2), [1, 0]]
    if op is aten.expand.default:
        return [torch.rand(1, 2), [3, 2]]
    out: list[object] = []
    for argument in op._schema.arguments:
        if argument.kwarg_only or argument.has_default_value():
            continue
        out.append(made[str(argument.type)])
    return out


@pytest.mark.parametrize("op", list(hits.BINDINGS), ids=str)
def test_a_binding_is_its_operator(op: OpOverload) -> None:
    """Torch's binding dispatches the very operator, with all of its arguments, and nothing else."""
    args = arguments(op)
    with torch.inference_mode(), Recorder() as recorder:  # where composed ones stay whole
        hits.BINDINGS[op](*args)
    assert [func for func, _ in recorder.seen] == [op]
    assert recorder.seen[0][1] <= len(args)


def test_other_operators_are_called_directly() -> None:
    """An operator without a binding is called without a frame in between, and is the same."""
    x = torch.tensor([1.0, -1.0])
    assert torch.equal(hits.fastest(aten.sign.default)(x), x)  # type: ignore[arg-type]


@spmd(world_size=2)
def test_a_hit_is_what_a_miss_was() -> None:
    """Views, results in lists, writes, numbers by type and by value: the second call equals the first."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(4, 6)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    programs = [
        lambda t: t * t,
        lambda t: t * 3,
        lambda t: t * 2.5,
        lambda t: t > 2,
        lambda t: t.transpose(0, 1),
        lambda t: t.view(4, 2, 3),
        lambda t: t.sum(1, keepdim=True),
        lambda t: t.sum(1, dtype=torch.float64),
        lambda t: t.split(4, 1)[1],
        lambda t: t.clone().add_(1),
        lambda t: t.clone().mul_(torch.tensor(2.0)),
        lambda t: torch._foreach_mul([t, t], 2)[1],
        lambda t: torch._foreach_mul([t, t], [2, 0.5])[1],
        lambda t: torch.stack([t, t]),
    ]
    for number, program in enumerate(programs):
        first = program(x)
        before = hp_dtensor.cache_statistics()
        again = program(x)
        after = hp_dtensor.cache_statistics()
        assert after["misses"] == before["misses"], number
        assert isinstance(again, DTensor)
        assert again.placements == first.placements, number
        for result in (first, again):
            assert torch.equal(result.full_tensor(), program(whole)), number
            assert result.full_tensor().dtype == program(whole).dtype, number


@spmd(world_size=2)
def test_numbers_of_other_types_are_other_calls() -> None:
    """1, 1.0 and True are equal as keys and not as arguments; a number by value keeps its value."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(4)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    for _ in range(2):
        for number in (1, 1.0, True, 2, 2.0):
            assert (x + number).dtype == (whole + number).dtype
            assert torch.equal((x + number).full_tensor(), whole + number)
        for dim in (0, -1):
            assert x.sum(dim).item() == 6
        for fill in (1, 1.0, True):
            assert torch.full_like(x, fill).dtype == torch.full_like(whole, fill).dtype
            made = torch.full_like(x, fill, dtype=torch.float32).full_tensor()
            assert torch.equal(made, torch.ones(4))


@spmd(world_size=2)
def test_layouts_and_addends_are_keys() -> None:
    """The same operator on other layouts is planned anew, and what communicates is not answered here."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(16.0).view(4, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(whole, mesh, [placement])
        for _ in range(2):
            assert torch.equal((x @ x).full_tensor(), whole @ whole)
    addends = DTensor.from_local(whole / 2, mesh, [Partial()])
    for _ in range(2):
        assert torch.equal((addends + addends).full_tensor(), 2 * whole)
        assert torch.equal((addends * addends).full_tensor(), whole * whole)


@spmd(world_size=1)
def test_the_cache_is_bounded_and_may_be_used_by_threads() -> None:
    """More calls than fit drop the oldest; threads that fill it at once get right values."""
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
    kept, hits.MAX_HITS = hits.MAX_HITS, 64
    wrong: list[int] = []

    def work(start: int) -> None:
        sizes = range(start, start + 100)
        wrong.extend(i for i in sizes if x.unsqueeze(0).expand(i, 8).shape != (i, 8))

    try:
        hp_dtensor.clear_caches()
        threads = [threading.Thread(target=work, args=(100 * i + 1,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert hits.size() <= 64
    finally:
        hits.MAX_HITS = kept


class Counted(DTensor):
    """One that dispatches by itself."""

    seen: list[OpOverload] = []  # noqa: RUF012  # a test's own class

    @classmethod
    def __torch_dispatch__(
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        cls.seen.append(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Plain(DTensor):
    """One that leaves dispatch to ours."""


@spmd(world_size=1)
def test_a_class_that_dispatches_by_itself_sees_every_call() -> None:
    """The calls of a subclass go to its own ``__torch_dispatch__``, known or not, and their results are of the subclass."""
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.arange(4.0)
    for cls in (DTensor, Counted, Plain):
        x = cls(whole, mesh, [Shard(0)])
        for _ in range(3):
            assert type(x + x) is cls
            assert torch.equal((x + x).to_local(), 2 * whole)
    assert Counted.seen.count(torch.ops.aten.add.Tensor) == 6


@spmd(world_size=1)
def test_an_operator_that_is_defined_anew_is_another() -> None:
    """What was known of an operator does not answer for a later one of its name."""
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])

    def by_function(factor: int) -> None:
        @torch.library.custom_op("hp_hits::scaled", mutates_args=())
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        scaled.register_fake(torch.empty_like)
        hp_dtensor.register_sharding(torch.ops.hp_hits.scaled.default)(
            lambda _: [([Shard(0)], [Shard(0)])]
        )

    def by_library(factor: int) -> None:
        libraries[:] = [torch.library.Library("hp_hits", "FRAGMENT")]
        libraries[0].define("by(Tensor x) -> Tensor")
        libraries[0].impl("by", lambda x: x * factor, "CompositeExplicitAutograd")
        hp_dtensor.register_sharding(torch.ops.hp_hits.by.default)(
            lambda _: [([Shard(0)], [Shard(0)])]
        )

    libraries: list[torch.library.Library] = []
    for factor in (2, 3):
        by_function(factor)
        libraries.clear()
        by_library(factor)
        for _ in range(3):
            for op in (torch.ops.hp_hits.scaled, torch.ops.hp_hits.by):
                before = hits.answered()
                assert torch.equal(op(x).to_local(), factor * torch.arange(4.0))
        assert hits.answered() > before
