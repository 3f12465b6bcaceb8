"""Runs Python in a process of its own, with this repository's packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python *arguments`, in the folder `cwd`."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
