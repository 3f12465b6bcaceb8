"""What the machine is like, found out without importing torch or touching a device.

A CUDA context in the searching process would take device memory from the trials, so devices are
asked through NVML, the driver's own library.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from autotune.records import Hardware
from runtime.limits import available_memory_bytes

_FP16_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp"}
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""CPU flags (x86, Arm) of instructions that compute in a format, not only convert to it."""
_FP16_CAPABILITY, _BF16_CAPABILITY = (5, 3), (8, 0)
"""First CUDA compute capability with each arithmetic (CUDA C++ Programming Guide,
"Compute Capabilities")."""


@dataclass(frozen=True)
class CudaDevice:
    """One visible CUDA device."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


def measure_hardware() -> Hardware:
    """The machine that this process runs on."""
    devices = cuda_devices() if _torch_has_cuda() else []
    flags, name = _cpu_facts()
    if devices:
        capability = min(device.capability for device in devices)
        fp16, bf16 = capability >= _FP16_CAPABILITY, capability >= _BF16_CAPABILITY
        compiler = find_compiler() if importlib.util.find_spec("triton") else None
    else:
        fp16, bf16 = bool(flags & _FP16_FLAGS), bool(flags & _BF16_FLAGS)
        compiler = find_compiler()
    return Hardware(
        device="cuda" if devices else "cpu",
        device_name=devices[0].name if devices else name,
        device_count=len(devices),
        cores=usable_cores(),
        host_memory_bytes=available_memory_bytes(),
        device_memory_bytes=min((device.memory_bytes for device in devices), default=0),
        fp16_arithmetic=fp16,
        bf16_arithmetic=bf16,
        compiler=compiler,
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        platform=platform.platform(),
    )


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity, less what the control group allows."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return max(1, min(cores, round(quota))) if quota else cores


def find_compiler() -> str | None:
    """Path of the C++ compiler that torch.compile calls; None where it, or Python.h, is missing.

    The choice is that of `torch._inductor.config.cpp.cxx`.
    """
    default = "clang++" if platform.system() == "Darwin" else "g++"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(os.environ.get("CXX") or default) if header.is_file() else None


def cuda_devices() -> list[CudaDevice]:
    """The CUDA devices visible to this process, in the order of `CUDA_VISIBLE_DEVICES`."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        found = [_nvml_device(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()
    named = dict(found)
    order = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), list(named))
    return [named[uuid] for uuid in order]


def visible_devices(setting: str | None, uuids: list[str]) -> list[str]:
    """The `uuids` that `CUDA_VISIBLE_DEVICES` selects; as CUDA does, it stops at a wrong entry."""
    if setting is None:
        return uuids
    chosen: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit():
            matches = uuids[int(entry) : int(entry) + 1]
        else:
            matches = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen.extend(matches)
    return chosen


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _nvml_device(nvml: ctypes.CDLL, index: int) -> tuple[str, CudaDevice]:
    handle = ctypes.c_void_p()
    text, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    memory, major, minor = _NvmlMemory(), ctypes.c_int(), ctypes.c_int()
    calls = (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)),
        nvml.nvmlDeviceGetName(handle, text, len(text)),
        nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid)),
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
    )
    if any(calls):
        raise OSError(f"NVML must answer for CUDA device {index}, but its calls returned {calls}")
    device = CudaDevice(text.value.decode(), memory.total, (major.value, minor.value))
    return uuid.value.decode(), device


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA; its version file says so."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def _cpu_facts() -> tuple[set[str], str]:
    """The CPU's flags and its name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return flags, facts.get("model name") or platform.processor() or platform.machine()


def _cpu_quota() -> float | None:
    """Cores that the control group (version 2, then 1) allows; None where it sets no limit."""
    root = Path("/sys/fs/cgroup")
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    if quota.strip() == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)
