"""The doctor: what it finds here, and that it notices what is broken."""

from __future__ import annotations

import json
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from autotune import doctor
from autotune.cli import run
from autotune.doctor import Check, examine, print_checks
from autotune.hardware import CudaDevice
from runtime.errors import RunError
from runtime.launch import Launcher
from tests.autotune.factories import hardware

_Usage = namedtuple("_Usage", ["total", "used", "free"])


def _named(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_can_search_and_every_problem_comes_with_advice() -> None:
    """Everything, two real ranks included."""
    found = examine()
    for check in found:
        assert bool(check.advice) == (check.status != "fine"), check
    checks = _named(found)
    assert [name for name, check in checks.items() if check.status == "broken"] == []
    assert checks["two ranks"].found == "started, and talked"
    assert checks["fork server"].found == "usable"
    assert {"Python", "packages", "GPU", "cores", "memory", "loopback"} <= set(checks)


def test_a_launcher_that_does_not_start_is_broken() -> None:
    def refuse() -> Launcher:
        raise RunError("the fork server did not start: no memory")

    (check,) = doctor._trial(refuse)
    assert (check.name, check.status) == ("two ranks", "broken")
    assert check.found == "the fork server did not start: no memory"


def test_ranks_that_fail_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TRIED_VALUE", 4.0)  # what no two ranks sum to
    checks = _named(doctor._trial())
    assert checks["two ranks"].status == "broken"
    assert checks["two ranks"].found == "they summed to [3.0, 3.0]"


def test_problems_of_the_fork_server_are_noted() -> None:
    check = doctor._fork_server(("preloading numpy failed: no such module", "forks hang"))
    assert check.status == "note"
    assert check.found == "preloading numpy failed: no such module; forks hang"


def test_a_missing_package_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("click", "no-such-package"))
    check = doctor._packages()[0]
    assert check.status == "broken"
    assert check.advice == "pip install no-such-package"


def test_no_loopback_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RunError("the interfaces are none: bring it up with `ip link set lo up`")

    monkeypatch.setattr(doctor, "loopback_interface", none)
    check = doctor._loopback()
    assert (check.status, check.advice) == ("broken", "bring it up with `ip link set lo up`")


def test_no_memory_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 2**28)
    assert doctor._memory().status == "broken"


def test_a_temporary_folder_that_is_missing_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    check = doctor._temporary_folder()
    assert (check.status, check.advice) == ("broken", "set TMPDIR to a folder that can")


def test_little_shared_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: _Usage(2**26, 0, 2**26))
    check = doctor._shared_memory()
    assert check.status == "note"
    assert "--shm-size" in check.advice


def test_other_work_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    assert doctor._cores(hardware(cores=2)).status == "note"
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (0.2, 0.0, 0.0))
    assert doctor._cores(hardware(cores=2)).status == "fine"


def test_a_gpu_that_torch_cannot_use_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(name="H200", memory_bytes=2**37, capability=(9, 0))
    monkeypatch.setattr(doctor, "cuda_devices", lambda: [device])
    check = doctor._device(hardware())
    assert check.status == "note"
    assert "has no CUDA" in check.found
    on_gpu = hardware(device="cuda", device_name="H200", device_count=1, device_memory_bytes=2**37)
    assert doctor._device(on_gpu).found == "1 × H200, 128 GiB each"


def test_without_a_compiler_it_says_what_is_lost() -> None:
    assert "torch.compile" in doctor._compiler(hardware(compiler=None)).advice


@pytest.mark.parametrize(("status", "code"), [("fine", 0), ("note", 0), ("broken", 1)])
def test_the_exit_code_follows_what_is_broken(
    status: doctor.Status, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check(name="memory", status=status, found="[12 MiB]", advice="add some")
    monkeypatch.setattr(doctor, "examine", lambda: [check])
    assert run(["doctor"]) == code


def test_prints_what_is_found_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check(name="memory", status="broken", found="[bold]12 MiB", advice="add [some]")]
    print_checks(checks, as_json=False)
    text = capsys.readouterr().out
    assert "[bold]12 MiB" in text
    assert "add [some]" in text
    assert "A search cannot run here: mend memory." in text
    print_checks(checks, as_json=True)
    assert json.loads(capsys.readouterr().out) == [
        {"name": "memory", "status": "broken", "found": "[bold]12 MiB", "advice": "add [some]"}
    ]
