"""Bytes of a rank above its baseline, the limit on them, and what the host can still give.

A rank's *reserved* bytes are what the kernel or the device charges it for: on CPU the resident
anonymous and shared memory, on CUDA the caching allocator's segments plus the context and NCCL.
Pages of files (libraries that are touched late, memory-mapped data) can be dropped at any time
and do not count. No torch at import: the process that searches reads `available_memory_bytes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEFAULT_SHARE = 0.9
"""Of the memory that can be had, what the ranks of a trial may use together."""

_KIB = 1024
_MIB = 1024 * _KIB
_GIB = 1024 * _MIB


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc


def steady_allocator() -> None:
    """Have glibc's malloc keep what is freed in one place, by fixed rules; nothing elsewhere.

    By default each thread keeps its own freed pages and the thresholds move with the history, so
    that one configuration is charged differently from run to run. On two ranks of a 10M GPT this
    took the reserved bytes at stage 2 from 2.1 (1.9 to 2.3) to 1.8 (1.7 to 1.8) times the
    allocated ones, and changed no step's time. Call it before the process allocates much.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_TRIM_THRESHOLD, 64 * _MIB)
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # the largest that it takes


@dataclass(frozen=True, kw_only=True)
class MemoryBaseline:
    """What a rank holds once it has imported and joined its group, before the user's code."""

    device: str
    """Such as "cpu" or "cuda:0": where the rank's limit and its peak are counted."""
    anonymous_bytes: int
    """Resident private memory; pages shared with the fork server included."""
    shared_bytes: int
    """Resident shared memory (not files)."""
    data_bytes: int
    """Virtual size of the private writable mappings, which RLIMIT_DATA limits."""
    device_bytes: int = 0
    """Device memory outside the caching allocator: context, NCCL, other processes. 0 on CPU."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory of one process, in bytes."""

    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    peak_resident_bytes: int
    """Largest sum of the three since the process began or `reset_peak`."""
    data_bytes: int


def read_host_memory(pid: int | None = None) -> HostMemory | None:
    """Memory of process `pid` (None: this one); None where it has gone or is a zombie."""
    try:
        text = Path(f"/proc/{'self' if pid is None else pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    sizes = dict(_kib_lines(text))
    if "RssAnon" not in sizes:
        return None
    return HostMemory(
        anonymous_bytes=sizes["RssAnon"],
        file_bytes=sizes["RssFile"],
        shared_bytes=sizes["RssShmem"],
        peak_resident_bytes=sizes["VmHWM"],
        data_bytes=sizes["VmData"],
    )


def take_baseline(device: torch.device) -> MemoryBaseline:
    """The baseline of this process; starts a new peak.

    On CUDA the context must exist (a process group or a tensor has been on the device).
    """
    device_bytes = 0
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        device_bytes = total - free - torch.cuda.memory_reserved(device)
    host = _own_host_memory()
    baseline = MemoryBaseline(
        device=str(device),
        anonymous_bytes=host.anonymous_bytes,
        shared_bytes=host.shared_bytes,
        data_bytes=host.data_bytes,
        device_bytes=device_bytes,
    )
    reset_peak(baseline)
    return baseline


def reset_peak(baseline: MemoryBaseline) -> None:
    """Start a new peak for `reserved_peak`, at what this process holds now."""
    if baseline.device != "cpu":
        import torch

        torch.cuda.reset_peak_memory_stats(baseline.device)
    else:
        # "5" sets VmHWM to the present resident set (man 5 proc_pid_clear_refs).
        Path("/proc/self/clear_refs").write_text("5")


def reserved_peak(baseline: MemoryBaseline) -> int:
    """Largest reserved bytes of this process above `baseline` since the last `reset_peak`.

    CPU: VmHWM - RssFile - (RssAnon + RssShmem of the baseline). VmHWM counts file pages too, and
    only their present number is known: pages first touched after the peak make the figure too
    low by their size (some 10 MiB of library code), files unmapped after it too high. CUDA: the
    allocator's peak, plus what the device has handed out beside it now.
    """
    if baseline.device != "cpu":
        import torch

        free, total = torch.cuda.mem_get_info(baseline.device)
        beside = total - free - torch.cuda.memory_reserved(baseline.device)
        return max(0, beside) + torch.cuda.max_memory_reserved(baseline.device)
    host = _own_host_memory()
    above = host.peak_resident_bytes - host.file_bytes
    return max(0, above - baseline.anonymous_bytes - baseline.shared_bytes)


def charged_bytes(host: HostMemory, *, anonymous_bytes: int, shared_bytes: int) -> int:
    """What a process holds now above a baseline of `anonymous_bytes` and `shared_bytes`."""
    return host.anonymous_bytes + host.shared_bytes - anonymous_bytes - shared_bytes


def polling_margin_bytes(limit_bytes: int) -> int:
    """How far beyond its limit a rank must be seen to be ended from outside.

    RLIMIT_DATA should strike first, since it tells the rank; the kernel's counts of resident
    pages are off by some MiB on hosts with many cores.
    """
    return 16 * _MIB + limit_bytes // 32


def apply_limit(baseline: MemoryBaseline, limit_bytes: int) -> None:
    """Make allocations of this process beyond `limit_bytes` above `baseline` fail.

    CPU: a soft RLIMIT_DATA, which counts private memory when it is mapped, not when it is
    touched. CUDA: a share of the device for the caching allocator, less what lies beside it.
    """
    if limit_bytes <= 0:
        raise ValueError(f"`limit_bytes > 0` must hold, but got ({limit_bytes=}).")
    if baseline.device != "cpu":
        import torch

        total = torch.cuda.get_device_properties(baseline.device).total_memory
        share = (limit_bytes - baseline.device_bytes) / total
        # The allocator refuses a share of 0: one block's worth makes its first tensor fail.
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, max(share, 1 / total)), torch.device(baseline.device)
        )
        return
    soft = baseline.data_bytes + limit_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lift_limit() -> None:
    """Undo `apply_limit` on CPU, so that a failure can still be reported."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def available_memory_bytes() -> int:
    """Host memory that can be had without swapping.

    The smallest of MemAvailable and, for the control group of this process and each above it,
    the limit less what is used (file pages, which can be dropped, are not used).
    """
    return min([_meminfo()["MemAvailable"], *(limit - used for limit, used in _cgroups())])


def total_memory_bytes() -> int:
    """Host memory that this process could have at most: the machine's, or its control group's."""
    return min([_meminfo()["MemTotal"], *(limit for limit, _ in _cgroups())])


def host_reserve_bytes() -> int:
    """Below this much available memory the ranks are ended, before the host swaps or kills."""
    return min(_GIB, total_memory_bytes() // 20)


def default_limit_bytes(ranks: int, device_memory_bytes: int = 0) -> int:
    """The limit of one of `ranks` ranks where the user gave none.

    90% of one device's memory where there is one (a rank has it to itself), else 90% of the
    available host memory over the ranks, less their share of the host's reserve.
    """
    if device_memory_bytes:
        return int(device_memory_bytes * DEFAULT_SHARE)
    available = available_memory_bytes()
    usable = min(available * DEFAULT_SHARE, available - host_reserve_bytes())
    return max(_MIB, int(usable / ranks))


def _own_host_memory() -> HostMemory:
    host = read_host_memory()
    if host is None:
        raise OSError("/proc/self/status must list RssAnon (Linux 4.5 or later), but it does not")
    return host


def _kib_lines(text: str) -> Iterator[tuple[str, int]]:
    """Name and bytes of each "Name:  123 kB" line."""
    for line in text.splitlines():
        if line.endswith(" kB"):
            name, _, size = line[:-3].partition(":")
            yield name, int(size) * _KIB


def _meminfo() -> dict[str, int]:
    return dict(_kib_lines(Path("/proc/meminfo").read_text()))


def _cgroups() -> Iterator[tuple[int, int]]:
    """Limit and used bytes of each control group over this process that limits memory."""
    for folder, limit_name, usage_name in _cgroup_folders():
        limit = _read_number(folder / limit_name)
        usage = _read_number(folder / usage_name)
        if limit is None or usage is None or limit >= 1 << 60:  # "max", or version 1's 2^63 - 4096
            continue
        try:
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            lines = []
        stat = dict(line.split(maxsplit=1) for line in lines)
        prefix = "total_" if "total_inactive_file" in stat else ""
        files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        yield limit, max(0, usage - files)


def _cgroup_folders(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[Path, str, str]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be that of the host: then only the root is mounted.
        folder = base / path.lstrip("/")
        for candidate in (folder, *folder.parents):
            if candidate.is_relative_to(base) and (candidate / names[1]).exists():
                yield (candidate, *names)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def is_low(reserve_bytes: int) -> bool:
    """Whether the host has less than `reserve_bytes` left."""
    return available_memory_bytes() < reserve_bytes


def oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended since boot."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def volunteer_for_oom_killer() -> None:
    """Should the kernel run out of memory after all, this process goes first, not the search."""
    try:
        Path("/proc/self/oom_score_adj").write_text(f"{1000}\n")
    except OSError as error:
        # Locked-down containers refuse the write; the reserve still guards the host.
        os.write(2, f"oom_score_adj: {error}\n".encode())
