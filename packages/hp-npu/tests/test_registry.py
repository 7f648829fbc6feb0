"""Which code a call runs, with vendor operators made up in the test."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hp_npu import (
    KERNELS,
    DeviceKernelRegistry,
    KernelFallbackWarning,
    KernelRegistry,
    KernelSpec,
    KernelUnavailableError,
    VendorOp,
)
from torch import Tensor

SCHEMAS = {
    "half": "(Tensor input, float scale=1.0, *, str mode='') -> Tensor",
    "needs_more": "(Tensor input, Tensor other) -> Tensor",
    "two": "(Tensor input) -> (Tensor, Tensor)",
    "keyword": "(Tensor input, *, float scale) -> Tensor",
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"hp_npu_vendor::{_name}", _schema)
torch.library.impl("hp_npu_vendor::half", "cpu", lambda x, scale=1.0, mode="": x * scale * 0.5)


def reference(x: Tensor, scale: float) -> Tensor:
    """Half of *x*, times *scale*."""
    return x / 2 * scale


def fake(x: Tensor, scale: float) -> Tensor:
    """Give the result's metadata."""
    return torch.empty_like(x)


def constraint(x: Tensor, scale: float) -> str | None:
    """Refuse integers."""
    return None if x.is_floating_point() else "x is integer"


def no_rule(_call: object) -> Iterator[object]:
    """Answer with nothing."""
    return iter(())


SPEC = KernelSpec(
    name="half",
    schema="(Tensor x, float scale) -> Tensor",
    reference=reference,
    fake=fake,
    vendor=VendorOp("hp_npu_vendor::half", ("Tensor", "float"), results=1, since="2.1.0"),
    call_vendor=torch.ops.hp_npu_vendor.half,
    constraint=constraint,
    rule=no_rule,  # type: ignore[arg-type]  # never asked
)


def registry_of(
    spec: KernelSpec[..., Tensor] = SPEC, device_type: str = "cpu"
) -> DeviceKernelRegistry:
    """A registry with one kernel, whose vendor's operators run on the CPU."""
    registry = DeviceKernelRegistry(device_type)
    registry.register(spec)
    return registry


def test_the_vendors_operator_runs_where_it_can() -> None:
    """Device, dtype and schema fit: the vendor's code is chosen, and gives its result."""
    x = torch.ones(3)
    run = registry_of().resolve(SPEC, "error", x, 4.0)
    assert run is SPEC.call_vendor
    assert torch.equal(run(x, 4.0), torch.full((3,), 2.0))
    assert registry_of().why("half", x, 4.0) == "half runs hp_npu_vendor::half"


@pytest.mark.parametrize(
    ("registry", "x", "reason"),
    [
        (
            registry_of(device_type="npu"),
            torch.ones(3),
            "its tensors are on cpu, and hp_npu_vendor::half runs on npu",
        ),
        (registry_of(), torch.ones(3, dtype=torch.int64), "x is integer"),
        (
            registry_of(replace(SPEC, vendor=replace(SPEC.vendor, name="hp_npu_vendor::gone"))),
            torch.ones(3),
            "this process has no operator hp_npu_vendor::gone (torch_npu has it since 2.1.0)",
        ),
    ],
    ids=["device", "constraint", "absent"],
)
def test_the_reference_runs_where_it_cannot(
    registry: DeviceKernelRegistry, x: Tensor, reason: str
) -> None:
    """Each reason falls back, warns once or raises, as the policy says, and `why` tells it."""
    spec = registry["half"]
    assert registry.resolve(spec, "fallback", x, 1.0) is SPEC.reference
    with pytest.raises(KernelUnavailableError) as caught:
        registry.resolve(spec, "error", x, 1.0)
    assert caught.value.reason == reason
    assert registry.why("half", x, 1.0).startswith(f"half runs its reference: {reason}")


def test_a_reason_is_warned_of_once() -> None:
    """The second call with the same reason is silent, another reason is not."""
    registry = registry_of(replace(SPEC, name="half_warned"))
    spec = registry["half_warned"]
    with pytest.warns(KernelFallbackWarning, match="x is integer"):
        registry.resolve(spec, "warn_once", torch.ones(3, dtype=torch.int64), 1.0)
    registry.resolve(spec, "warn_once", torch.ones(3, dtype=torch.int64), 1.0)
    with pytest.warns(KernelFallbackWarning, match="its tensors are on meta"):
        registry.resolve(spec, "warn_once", torch.ones(3, device="meta"), 1.0)


@pytest.mark.parametrize(
    ("vendor", "says"),
    [
        (VendorOp("hp_npu_vendor::half", ("Tensor", "float"), 1, "1"), None),
        (VendorOp("hp_npu_vendor::half", ("Tensor",), 1, "1"), None),
        (VendorOp("hp_npu_vendor::half", ("Tensor", "int"), 1, "1"), "(Tensor, int) by position"),
        (
            VendorOp("hp_npu_vendor::half", ("Tensor", "float", "str"), 1, "1"),
            "(Tensor, float, str) by position",
        ),
        (
            VendorOp("hp_npu_vendor::needs_more", ("Tensor",), 1, "1"),
            "needs_more(Tensor input, Tensor other)",
        ),
        (
            VendorOp("hp_npu_vendor::keyword", ("Tensor",), 1, "1"),
            "keyword(Tensor input, *, float scale)",
        ),
        (VendorOp("hp_npu_vendor::two", ("Tensor",), 1, "1"), "1 result(s)"),
        (VendorOp("hp_npu_vendor::gone", ("Tensor",), 1, "2.9.0"), "torch_npu has it since 2.9.0"),
    ],
    ids=["all", "fewer", "type", "count", "required", "keyword", "results", "absent"],
)
def test_operators_are_recognised_by_their_schema(vendor: VendorOp, says: str | None) -> None:
    """Leading types, defaults, positional arguments and the number of results must be what we call."""
    problem = vendor.problem()
    assert problem is None if says is None else says in (problem or "")


def test_an_operator_that_appears_later_is_found() -> None:
    """An absence is not remembered: torch_npu may be loaded after the first call."""
    late = replace(SPEC, vendor=VendorOp("hp_npu_vendor::late", ("Tensor", "float"), 1, "1"))
    registry = registry_of(late)
    assert registry.resolve(late, "fallback", torch.ones(3), 1.0) is late.reference
    torch.library.define("hp_npu_vendor::late", "(Tensor input, float scale) -> Tensor")
    assert registry.resolve(late, "fallback", torch.ones(3), 1.0) is late.call_vendor


def test_a_name_is_taken_once() -> None:
    """Registering a second kernel under a name is an error that lists what there is."""
    registry = registry_of()
    with pytest.raises(ValueError, match="there is a kernel 'half' already; registered are half"):
        registry.register(SPEC)


def test_an_unknown_kernel_is_refused_with_the_known() -> None:
    """`why` of a name that is not there lists those that are."""
    with pytest.raises(KeyError, match=r"there is no kernel 'halve'; registered are half"):
        registry_of().why("halve")


def test_the_registry_is_a_mapping_and_satisfies_the_protocol() -> None:
    """Kernels are looked up and listed by name."""
    protocol: KernelRegistry = registry_of()
    assert protocol.why("half", torch.ones(1), 1.0)
    assert set(KERNELS) == {"rms_norm", "rms_norm_backward"}
    assert len(KERNELS) == 2


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_is_an_operator_with_a_rule_and_tolerances(name: str) -> None:
    """Each spec has its operator, its vendor's counterpart, and a tolerance per dtype that the vendor takes."""
    spec = KERNELS[name]
    assert hasattr(torch.ops.hp, name)
    assert spec.vendor.name == f"npu::npu_{name}"
    assert set(spec.tolerance) == {torch.float16, torch.bfloat16, torch.float32}
