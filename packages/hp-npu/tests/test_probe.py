"""What is found of torch_npu in processes that have none, a broken one, or one without devices."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hp_npu import NpuStatus, NpuUnavailableError, npu_status, require_npu

needs_absence = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here"
)


def run_python(code: str, *paths: Path, arguments: tuple[str, ...] = ()) -> str:
    """Run *code* in a new process with *paths* in front of the import path, and return what it prints."""
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path.rstrip(os.pathsep),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_no_torch_npu(tmp_path: Path) -> None:
    """`import hp_npu`, a kernel on the CPU and the entry point leave torch_npu alone even where it is installed."""
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('torch_npu was imported')\n")
    code = (
        "import sys, torch, hp_npu, hp_npu.hccl\n"
        "hp_npu.rms_norm(torch.ones(2, 4), torch.ones(4))\n"
        "hp_npu.hccl.capabilities()\n"
        "print('torch_npu' in sys.modules)\n"
    )
    assert run_python(code, tmp_path).split() == ["False"]


@needs_absence
def test_absence_is_reported_with_what_to_install() -> None:
    """Without torch_npu the status says so and names the package, and only `require_npu` raises."""
    status = npu_status()
    assert status == NpuStatus(version=None, failure=None, devices=0)
    assert not status.ready
    assert str(status).startswith("torch_npu is not installed.")
    with pytest.raises(NpuUnavailableError, match="install the release of torch-npu"):
        require_npu()


STAGES = """
import importlib, pathlib, sys, torch, hp_npu
from hp_npu import hccl

sys.dont_write_bytecode = True
module = pathlib.Path(sys.argv[1]) / "torch_npu.py"

module.write_text("raise ImportError('libhccl.so: cannot open shared object file')")
importlib.invalidate_caches()
print(hp_npu.npu_status())
print(hp_npu.KERNELS.why("rms_norm", torch.ones(2, 4), torch.ones(4), 1e-6))

hp_npu.npu_status.cache_clear()
module.write_text(
    "import types, torch\\n"
    "device = types.ModuleType('torch.npu')\\n"
    "device.is_available = lambda: device.count > 0\\n"
    "device.device_count = lambda: device.count\\n"
    "device.is_initialized = lambda: device.started\\n"
    "device.get_device_name = lambda: 'Ascend950PR'\\n"
    "device.count, device.started = 0, False\\n"
    "torch.utils.rename_privateuse1_backend('npu')\\n"
    "torch._register_device_module('npu', device)\\n"
)
importlib.invalidate_caches()
print(hp_npu.npu_status())

hp_npu.npu_status.cache_clear()
torch.npu.count = 8
hp_npu.require_npu()
print(hp_npu.npu_status())
print(hccl.capabilities()[0] is hccl.HCCL)
torch.npu.started = True
print(hccl.capabilities()[0] is hccl.HCCL_ASCEND950)
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process prints while its torch_npu is broken, then has no device, then has eight."""
    folder = tmp_path_factory.mktemp("torch_npu")
    return run_python(STAGES, folder, arguments=(str(folder),)).splitlines()


def test_a_broken_installation_is_reported_with_the_way_out(stages: list[str]) -> None:
    """A torch_npu whose libraries are missing gives its error, the CANN script and the switch that skips it."""
    status, why = stages[:2]
    assert "does not import (ImportError: libhccl.so: cannot open shared object file)" in status
    assert "set_env.sh" in status
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in status
    assert status in why


def test_an_installation_without_devices_is_reported(stages: list[str]) -> None:
    """A torch_npu that imports and sees no device points at `npu-smi` and the variable that hides devices."""
    assert stages[2].startswith("torch_npu unknown sees no device.")
    assert "ASCEND_RT_VISIBLE_DEVICES" in stages[2]


def test_devices_make_it_ready(stages: list[str]) -> None:
    """With devices `require_npu` returns and the status counts them."""
    assert stages[3] == "torch_npu unknown sees 8 device(s)"


def test_the_table_of_the_chip_is_used_once_its_device_runs(stages: list[str]) -> None:
    """Before the device is started the lesser table holds, afterwards that of its name."""
    assert stages[4:] == ["True", "True"]
