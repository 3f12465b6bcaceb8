"""What the fork server imports, and when it does without forking."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from runtime.errors import RunError
from runtime.launch import Launcher
from tests.runtime.test_launch import OK, start
from tests.runtime.test_launch_failures import finish

STARTS_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages: the user's site-packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = tmp_path / "lib" / version / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_preloads_that_fail_are_reported_and_those_that_start_threads_left_out(
    installed: Path,
) -> None:
    (installed / "good.py").write_text("text = 'good'\n")
    (installed / "broken.py").write_text("raise ImportError('needs a part\\nand more')\n")
    (installed / "threaded.py").write_text(STARTS_THREAD)
    beside = installed.parent / "beside"
    beside.mkdir()
    (beside / "helpers.py").write_text("raise ImportError('must not be preloaded')\n")
    sys.path.insert(0, str(beside))  # undone by the fixture's monkeypatch
    preload = ["good", "broken", "threaded", "helpers", "no_such_module"]
    with Launcher(preload=preload) as launcher:
        assert launcher.problems == (
            "preloading broken failed: ImportError: needs a part",
            "each rank imports threaded itself, since importing it started 1 thread",
        )
        end, events = finish(start(launcher, "loaded", names=["good", "threaded", "torch._dynamo"]))
        assert end == OK
        assert events[0].data["loaded"] == ["good", "torch._dynamo"]
        assert events[0].data["parent"] == launcher.server_pid
        assert finish(start(launcher, "total", ranks=2))[0] == OK


def test_a_preload_that_ends_the_server_is_left_out(installed: Path) -> None:
    (installed / "deadly.py").write_text("import os\nos.abort()\n")
    with Launcher(preload=["deadly"]) as launcher:
        assert launcher.problems == (
            "preloading deadly ended the fork server: it was killed by SIGABRT",
        )
        assert finish(start(launcher, "total", ranks=2))[0] == OK


def test_where_torch_itself_starts_a_thread_ranks_are_new_processes(
    installed: Path, tmp_path: Path
) -> None:
    # Stands for a torch build that starts threads: imported before any of ours.
    (installed / "sitecustomize.py").write_text(STARTS_THREAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(installed))
        with Launcher() as launcher:
            assert launcher.problems == (
                "each rank is a new process (slower), since importing torch started 1 thread",
            )
            assert finish(start(launcher, "loaded", names=[]))[0] == OK


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.server_process._BOOTSTRAP", "import no_such_module")
    with (
        Launcher() as launcher,
        pytest.raises(RunError, match=r"did not start: it exited with code 1 .*no_such_module"),
    ):
        start(launcher, "echo")


def test_the_server_is_one_idle_thread_with_nothing_open_but_what_it_needs(
    launcher: Launcher,
) -> None:
    pid = launcher.server_pid
    finish(start(launcher, "total", ranks=2))
    before = len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(3):
        finish(start(launcher, "total", ranks=2))
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    assert len(os.listdir(f"/proc/{pid}/fd")) == before
