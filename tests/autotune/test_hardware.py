from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import hardware
from autotune.hardware import CudaDevice, measure_hardware, visible_devices


def test_this_machine() -> None:
    found = measure_hardware()
    assert found.device in ("cpu", "cuda")
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.host_memory_bytes > 2**20
    assert found.device_name
    assert found.torch.startswith("2.")
    assert (found.device_count > 0) == (found.device_memory_bytes > 0) == (found.device == "cuda")


def test_measuring_imports_no_torch() -> None:
    script = (
        "import sys; from autotune.hardware import measure_hardware; measure_hardware(); "
        "import autotune.space, autotune.memory, autotune.profile; "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, env=environment)


def test_torch_agrees_on_cuda() -> None:
    torch = pytest.importorskip("torch")
    assert (measure_hardware().device == "cuda") == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        (None, ["GPU-aa", "GPU-ab", "GPU-c"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-c", "GPU-aa"]),
        ("0,7,1", ["GPU-aa"]),
        ("1,1", ["GPU-ab"]),
        ("GPU-c, GPU-ab", ["GPU-c", "GPU-ab"]),
        ("GPU-a", []),
    ],
)
def test_visible_devices(setting: str | None, chosen: list[str]) -> None:
    assert visible_devices(setting, ["GPU-aa", "GPU-ab", "GPU-c"]) == chosen


@pytest.mark.parametrize(
    ("capability", "arithmetic"),
    [((5, 2), (False, False)), ((7, 0), (True, False)), ((9, 0), (True, True))],
)
def test_the_oldest_cuda_device_decides(
    capability: tuple[int, int], arithmetic: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [CudaDevice("new", 80 * 2**30, (9, 0)), CudaDevice("old", 16 * 2**30, capability)]
    monkeypatch.setattr(hardware, "cuda_devices", lambda: devices)
    monkeypatch.setattr(hardware, "_torch_has_cuda", lambda: True)
    found = measure_hardware()
    assert (found.fp16_arithmetic, found.bf16_arithmetic) == arithmetic
    assert (found.device, found.device_count) == ("cuda", 2)
    assert found.device_memory_bytes == 16 * 2**30


def test_no_compiler_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert measure_hardware().compiler is None
