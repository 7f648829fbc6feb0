"""The vendor's operators are called on an NPU: shown on a simulated one, in a process of its own.

The simulated device is a tensor subclass whose data lies on the CPU and whose device says ``npu``; the vendor's two
operators are registered for that device as torch_npu registers them, and count their calls.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import json
import types
import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

device = types.ModuleType("torch.npu")
device.is_available = lambda: True
device.is_initialized = lambda: True
device.device_count = lambda: 1
device.current_device = lambda: 0
device._is_in_bad_fork = lambda: False
device.manual_seed_all = lambda seed: None
_setup_privateuseone_for_python_backend("npu", backend_module=device)


class Npu(torch.Tensor):
    @staticmethod
    def __new__(cls, raw):
        made = torch.Tensor._make_wrapper_subclass(cls, raw.shape, strides=raw.stride(), dtype=raw.dtype, device="npu:0")
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace in ("hp", "npu"):
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
            return func.redispatch(keys, *args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(raw, (args, kwargs or {}))
        return pytree.tree_map(wrap, func(*args, **kwargs))


def raw(value):
    return value.raw if isinstance(value, Npu) else value


def wrap(value):
    return Npu(value) if isinstance(value, torch.Tensor) else value


calls = []
vendor = torch.library.Library("npu", "DEF")
vendor.define("npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)")
vendor.define("npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)")


def forward(input, gamma, epsilon=1e-06):
    calls.append(["npu_rms_norm", str(input.dtype), epsilon])
    x = input.raw.float()
    rstd = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return wrap((x * rstd * gamma.raw.float()).to(input.dtype)), wrap(rstd)


def backward(dy, input, gamma, rstd):
    calls.append(["npu_rms_norm_backward", str(input.dtype), str(rstd.dtype)])
    x, g, r = input.raw.float(), dy.raw.float() * gamma.raw.float(), rstd.raw
    dx = r * (g - x * r * r * (g * x).mean(-1, keepdim=True))
    return wrap(dx.to(input.dtype)), wrap((dy.raw.float() * x * r).sum((0, 1)))


vendor.impl("npu_rms_norm", forward, "PrivateUse1")
vendor.impl("npu_rms_norm_backward", backward, "PrivateUse1")

import hp_npu

torch.manual_seed(0)
out = {}
for dtype in (torch.bfloat16, torch.float64):
    calls.clear()
    x, weight, dy = (torch.randn(s, dtype=dtype) for s in ((2, 3, 8), (8,), (2, 3, 8)))
    here = [t.clone().requires_grad_() for t in (x, weight)]
    y = hp_npu.rms_norm(*here, 1e-5)
    y.backward(dy)
    assert not calls
    there = [Npu(t.clone()).requires_grad_() for t in (x, weight)]
    z = hp_npu.rms_norm(*there, 1e-5)
    z.backward(Npu(dy))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(raw(z.detach()), y.detach(), **tolerance)
    for a, b in zip(there, here):
        assert a.grad.dtype == dtype, a.grad.dtype
        torch.testing.assert_close(raw(a.grad), b.grad, **tolerance)
    out[str(dtype)] = {
        "calls": list(calls),
        "device": str(z.device),
        "why": hp_npu.KERNELS.why("rms_norm", *there, 1e-5),
    }
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, object]]:
    """What the program saw, for each dtype."""
    try:
        from torch.utils.backend_registration import (  # noqa: F401  # asked whether it is there
            _setup_privateuseone_for_python_backend,
        )
    except ImportError:
        pytest.skip(f"torch {torch.__version__} can't simulate a device in Python")
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_the_vendors_kernels_run_on_the_device(found: dict[str, dict[str, object]]) -> None:
    """Forward and backward call the vendor's operators by position, with a 32-bit rstd; values and dtypes are ours."""
    seen = found["torch.bfloat16"]
    assert seen["calls"] == [
        ["npu_rms_norm", "torch.bfloat16", 1e-5],
        ["npu_rms_norm_backward", "torch.bfloat16", "torch.float32"],
    ]
    assert seen["device"] == "npu:0"
    assert seen["why"] == "rms_norm runs npu::npu_rms_norm"


def test_what_the_vendor_does_not_take_runs_the_reference_there(
    found: dict[str, dict[str, object]],
) -> None:
    """64-bit tensors stay on the device and run the reference, and `why` names the dtype."""
    seen = found["torch.float64"]
    assert seen["calls"] == []
    assert seen["device"] == "npu:0"
    assert "x is torch.float64, and the vendor's kernel takes" in str(seen["why"])
