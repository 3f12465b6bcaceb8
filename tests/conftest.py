"""Fixtures for every test: one shared fork server, and a check that no test leaves anything."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runtime import processes
from runtime.launch import Launcher

# Kept alive on purpose by the libraries that start them, until the test process ends.
_LASTING_CHILDREN = (
    "multiprocessing.resource_tracker",
    "multiprocessing.spawn",  # the session's two ranks of tests.runtime.ranks
    "torch._inductor",
    "torch_shm_manager",
)
# Set by libraries when they are imported or first used.
_LASTING_VARIABLES = ("PYTEST_", "TORCHINDUCTOR_", "KMP_", "TRITON_", "CUDA_MODULE_LOADING")
_LASTING_FILES = ("torchinductor_", "pymp-", "matplotlib-")
_GRACE_SECONDS = 2.0


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of the tests go where no other process of this machine writes."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def launcher(_own_temporary_folder: None) -> Iterator[Launcher]:
    """A fork server for the whole session: a run on it costs a fork, not the imports."""
    with Launcher() as launcher:
        assert launcher.problems == ()
        yield launcher


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Fails a test that leaves a process, process group, port, variable or temporary file."""
    environment = _environment()
    before = (set(_children()), _ports(), _temporary_files())
    yield
    leaks: list[str] = []
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        leaks.append("a process group: call torch.distributed.destroy_process_group()")
        distributed.destroy_process_group()
    for name, found, known in (
        ("process", _children, before[0]),
        ("listening port", _ports, before[1]),
        ("temporary file", _temporary_files, before[2]),
    ):
        until = time.monotonic() + _GRACE_SECONDS
        while (new := set(found()) - known) and time.monotonic() < until:
            time.sleep(0.01)
        leaks.extend(f"{name} {item}" for item in sorted(new, key=str))
    now = _environment()
    for name in sorted(environment.keys() | now.keys()):
        if environment.get(name) != now.get(name):
            leaks.append(f"variable {name}: {environment.get(name)!r} became {now.get(name)!r}")
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]
    assert not leaks, "the test left " + "; ".join(leaks)


def _children() -> set[str]:
    found = set()
    for pid in processes.descendants(os.getpid()):
        try:
            command = " ".join(psutil.Process(pid).cmdline())
        except psutil.NoSuchProcess:
            continue
        except psutil.ZombieProcess:
            command = "(ended, not waited for)"
        if not any(name in command for name in _LASTING_CHILDREN):
            found.add(f"{pid}: {command[:200]}")
    return found


def _ports() -> set[str]:
    connections = psutil.Process().net_connections(kind="inet")
    return {str(item.laddr) for item in connections if item.status == psutil.CONN_LISTEN}


def _temporary_files() -> set[str]:
    names = (path.name for path in Path(tempfile.gettempdir()).iterdir())
    return {name for name in names if not name.startswith(_LASTING_FILES)}


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_LASTING_VARIABLES)
    }
