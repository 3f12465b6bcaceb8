from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import limits
from runtime.launch import GroupEnd, Launcher, RankEvent
from runtime.limits import MemoryBaseline
from runtime.measurement import Outcome
from tests.runtime.test_launch import JOBS, OK
from tests.runtime.test_launch_failures import finish

MIB = 1 << 20


def run(
    launcher: Launcher, limit: int, ranks: int = 1, job: str = "allocate", **payload: Any
) -> tuple[GroupEnd, list[RankEvent]]:
    return finish(
        launcher.start(
            f"{JOBS}:{job}",
            payload,
            ranks=ranks,
            threads_per_rank=1,
            memory_limit_bytes=limit,
            deadline_seconds=60,
        )
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("tensor", "could not allocate 2.00 GiB within the memory limit of 200.0 MiB"),
        ("many tensors", "could not allocate 256.0 KiB within the memory limit of 200.0 MiB"),
        ("python", "could not allocate memory within the memory limit of 200.0 MiB (MemoryError)"),
        ("numpy", "could not allocate 2.00 GiB within the memory limit of 200.0 MiB"),
        ("backward", "could not allocate 4.0 MiB within the memory limit of 200.0 MiB"),
        ("convolution", "within the memory limit of 200.0 MiB"),
    ],
)
def test_wanting_more_than_the_limit_is_out_of_memory(
    launcher: Launcher, how: str, words: str
) -> None:
    end, events = run(launcher, 200 * MIB, how=how, mib=2048)
    assert [event.name for event in events] == ["start"]
    assert end.outcome is Outcome.OUT_OF_MEMORY
    assert words in end.reason
    assert end.failed_rank == 0
    assert not end.user_error


def test_shared_memory_beyond_the_limit_is_seen_by_the_servers_polling(launcher: Launcher) -> None:
    end, _ = run(launcher, 200 * MIB, how="shared", mib=400)
    assert end.outcome is Outcome.OUT_OF_MEMORY
    assert end.reason.startswith("rank 0 held 2")
    assert end.reason.endswith("over the memory limit of 200.0 MiB")


def test_one_rank_out_of_memory_ends_the_group_and_is_the_cause(launcher: Launcher) -> None:
    end, _ = run(launcher, 200 * MIB, ranks=2, job="one_allocates", rank=1, mib=2048)
    assert end.outcome is Outcome.OUT_OF_MEMORY
    assert end.failed_rank == 1


@pytest.fixture(scope="module")
def peaks(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    file = tmp_path_factory.mktemp("peaks") / "data"
    file.write_bytes(os.urandom(64 * MIB))
    end, events = run(launcher, 1000 * MIB, job="peak", mib=300, file=str(file))
    assert end == OK
    return {event.name: event.data["bytes"] for event in events}


def test_the_reserved_peak_is_what_was_held_above_the_baseline(peaks: dict[str, int]) -> None:
    assert peaks["rest"] < 8 * MIB
    assert abs(peaks["tensor"] - 300 * MIB) < 16 * MIB
    assert peaks["reset"] < 24 * MIB


def test_pages_of_files_do_not_count_and_shared_memory_does(peaks: dict[str, int]) -> None:
    assert abs(peaks["file"] - peaks["reset"]) < 8 * MIB
    assert abs(peaks["shared"] - peaks["file"] - 300 * MIB) < 16 * MIB


def test_a_limit_leaves_what_is_within_it(launcher: Launcher) -> None:
    end, events = run(launcher, 350 * MIB, job="hold", mib=300)
    assert end == OK
    assert events[0].data == {"bytes": 300 * MIB}


def test_an_impossible_limit_is_refused() -> None:
    baseline = MemoryBaseline(device="cpu", anonymous_bytes=0, shared_bytes=0, data_bytes=0)
    with pytest.raises(ValueError, match="`limit_bytes > 0` must hold"):
        limits.apply_limit(baseline, 0)


def test_the_memory_of_a_process_is_that_of_the_kernel() -> None:
    import psutil

    here = limits.read_host_memory()
    assert here is not None
    resident = here.anonymous_bytes + here.file_bytes + here.shared_bytes
    assert resident == pytest.approx(psutil.Process().memory_info().rss, rel=0.02)
    assert here.peak_resident_bytes >= resident * 0.98
    assert limits.read_host_memory(1 << 22) is None


def _cgroup(folder: Path, **files: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_available_memory_is_the_smallest_over_the_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = limits._cgroup_folders
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    monkeypatch.setattr(limits, "_cgroup_folders", lambda: real(root, membership))
    monkeypatch.setattr(
        limits, "_meminfo", lambda: {"MemAvailable": 1000 * MIB, "MemTotal": 4000 * MIB}
    )
    membership.write_text("0::/a/b\n")
    assert limits.available_memory_bytes() == 1000 * MIB

    stat = f"anon 1\nactive_file {10 * MIB}\ninactive_file {20 * MIB}"
    _cgroup(root / "a", memory__max=900 * MIB, memory__current=730 * MIB, memory__stat=stat)
    _cgroup(root / "a/b", memory__max="max", memory__current=5 * MIB, memory__stat=stat)
    assert limits.available_memory_bytes() == 200 * MIB
    assert limits.total_memory_bytes() == 900 * MIB
    assert limits.host_reserve_bytes() == 45 * MIB
    assert limits.default_limit_bytes(2) == (200 - 45) * MIB // 2

    membership.write_text("3:cpu:/x\n4:memory:/of/the/host\n")
    stat = f"total_active_file 0\ntotal_inactive_file {50 * MIB}\nactive_file {999 * MIB}"
    _cgroup(
        root / "memory",
        memory__limit_in_bytes=600 * MIB,
        memory__usage_in_bytes=150 * MIB,
        memory__stat=stat,
    )
    assert limits.available_memory_bytes() == 500 * MIB
    _cgroup(root / "memory", memory__limit_in_bytes=9223372036854771712)
    assert limits.available_memory_bytes() == 1000 * MIB


def test_the_default_limit_of_a_device_is_a_share_of_it() -> None:
    assert limits.default_limit_bytes(8, device_memory_bytes=1000) == 900


def test_available_memory_of_this_host() -> None:
    assert 0 < limits.available_memory_bytes() <= limits.total_memory_bytes()
    assert not limits.is_low(0)
    assert limits.oom_kills() >= 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_limit_on_a_device(launcher: Launcher) -> None:
    end, _ = run(launcher, 2048 * MIB, job="allocate_on_device", mib=4096)
    assert end.outcome is Outcome.OUT_OF_MEMORY
    end, events = run(launcher, 4096 * MIB, job="allocate_on_device", mib=1024)
    assert end == OK
    assert 1024 * MIB <= events[0].data["bytes"] <= 4096 * MIB
