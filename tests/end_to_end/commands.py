"""Runs the command line as a user does, and looks at what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import psutil
from sqlalchemy.exc import SQLAlchemyError

from autotune.records import TrialRecord
from autotune.study import headers, open_storage, read_study
from runtime.errors import UserError

SMALL_MODEL = Path(__file__).with_name("small_model.py")
AUTOTUNE = [sys.executable, "-m", "autotune"]


def search_command(model: Path, out: Path, *options: str) -> list[str]:
    """`autotune search model --out out ... --json`."""
    return [*AUTOTUNE, "search", str(model), "--out", str(out), "--json", *options]


def run(command: Sequence[str], seconds: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


def answer(command: Sequence[str]) -> dict[str, Any]:
    """The JSON object of a search that succeeds."""
    done = run(command)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def finished_trials(out: Path) -> list[TrialRecord]:
    """What the studies in `out` hold, read as another process would."""
    if not (out / "study.db").exists():
        return []
    try:
        with open_storage(f"sqlite:///{out / 'study.db'}") as storage:
            return [
                record
                for header in headers(storage)
                for record in read_study(storage, header.study_name).records
            ]
    except (UserError, SQLAlchemyError, optuna.exceptions.StorageInternalError):
        return []  # read while the search was creating it


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.2)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Every process that has `mark` as the value of the environment variable TEST_MARK."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_MARK") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found if process.is_running()]


def start_marked(command: Sequence[str], mark: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=os.environ | {"TEST_MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
