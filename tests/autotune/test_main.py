"""The program: its help, and how it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import run
from tests.autotune.programs import ROOT, python

COMMANDS = ("search", "report", "measure", "schema", "doctor")
HEAVY = {"torch", "matplotlib", "optuna", "pandas", "numpy", "rich", "pydantic", "jinja2"}


class TestHelp:
    """Help teaches, and comes at once."""

    @pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
    def test_loads_nothing_heavy(self, arguments: list[str]) -> None:
        code = (
            f"import sys; sys.argv = ['autotune', *{arguments!r}, '--help']\n"
            "from autotune.__main__ import main\n"
            "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
            "print(*sys.modules, file=sys.stderr)"
        )
        result = python("-c", code)
        assert result.returncode == 0, result.stderr
        assert set(result.stderr.split()) & HEAVY == set()

    def test_is_quick(self) -> None:
        """Processor time, which other work on the machine does not lengthen much."""
        times = []
        for _ in range(3):
            before = os.times()
            assert python("-m", "autotune", "--help").returncode == 0
            after = os.times()
            times.append(
                after.children_user + after.children_system
                - before.children_user - before.children_system
            )  # fmt: skip
        assert min(times) < 0.3

    def test_names_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["--help"]) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {command} " in text for command in COMMANDS)

    def test_search_shows_examples_units_and_defaults(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["search", "-h"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        for part in (
            "autotune search model.py --ranks 2 --memory-limit 2GiB --time-budget 3m",
            "activation_checkpointing (none, selective, full)",
            "such as 90s or 10m",
            "[default: 40]",
            "Exit codes:",
        ):
            assert part in text


class TestEntryPoint:
    """`python -m autotune`, wherever it is started."""

    @pytest.mark.parametrize("stray", ["runtime.py", "runtime/__init__.py"])
    def test_a_stray_runtime_beside_the_user_is_not_taken_for_ours(
        self, stray: str, tmp_path: Path
    ) -> None:
        (tmp_path / stray).parent.mkdir(exist_ok=True)
        (tmp_path / stray).write_text("raise SystemExit('the stray one')")
        result = python("-m", "autotune", "schema", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["title"] == "TrainConfig"

    def test_a_runtime_that_hides_ours_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "runtime.py").write_text("")
        code = (
            f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n"
            "from autotune.__main__ import main; main()"
        )
        result = python("-c", code, cwd=ROOT)
        assert result.returncode == 2
        assert f"{tmp_path / 'runtime.py'} hides this program's own package" in result.stderr

    def test_starts_within_a_folder_that_is_gone(self, tmp_path: Path) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        result = subprocess.run(
            ["/bin/sh", "-c", f'rmdir "{gone}"; exec "{sys.executable}" -m autotune --help'],
            capture_output=True,
            text=True,
            cwd=gone,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert result.returncode == 0, result.stderr
