"""Real searches, through the command line, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.config import load_config
from tests.end_to_end.commands import (
    AUTOTUNE,
    SMALL_MODEL,
    answer,
    finished_trials,
    run,
    search_command,
)

EXTERNAL = sorted((Path(__file__).parents[1] / "external").glob("*.py"))


def test_one_rank(tmp_path: Path) -> None:
    found = answer(search_command(SMALL_MODEL, tmp_path / "out", "--max-trials", "3"))
    assert found["ranks"] == 1
    assert found["best"]["config"]["zero_stage"] == 0
    assert found["outcomes"]["ok"] >= 3
    for name in ("best.json", "trials.csv", "report.html", "study.db"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    assert load_config(tmp_path / "out" / "best.json").ranks == 1


def test_two_ranks_the_same_command_again_and_measure(tmp_path: Path) -> None:
    command = search_command(
        SMALL_MODEL, tmp_path, "--ranks", "2", "--max-trials", "4", "--vary", "precision=fp32,bf16"
    )
    first = answer(command)
    assert first["best"]["config"]["ranks"] == 2
    assert first["plain"]["config"]["zero_stage"] == 0
    trials = finished_trials(tmp_path)
    assert sum(first["outcomes"].values()) == len(trials)

    again = answer(command)
    assert [record.number for record in finished_trials(tmp_path)][: len(trials)] == [
        record.number for record in trials
    ]
    assert again["study"] == first["study"]

    measure = [*AUTOTUNE, "measure", str(SMALL_MODEL), "--config", str(tmp_path / "best.json")]
    measured = run([*measure, "--repeats", "2", "--json"])
    assert measured.returncode == 0, measured.stderr
    assert len(json.loads(measured.stdout)["runs"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("model", EXTERNAL, ids=lambda path: path.stem)
def test_models_that_nobody_here_wrote(model: Path, tmp_path: Path) -> None:
    assert len(model.read_text().splitlines()) < 25
    found = answer(
        search_command(model, tmp_path, "--ranks", "2", "--max-trials", "6", "--time-budget", "60s")
    )
    assert found["best"] is not None
    assert found["outcomes"]["crashed"] == 0, (tmp_path / "trials.csv").read_text()


@pytest.mark.slow
def test_a_limit_between_two_configurations(tmp_path: Path) -> None:
    free = answer(
        search_command(
            SMALL_MODEL,
            tmp_path / "free",
            *("--ranks", "2", "--fix", "precision=fp32", "--fix", "zero_stage=0"),
            *("--fix", "activation_checkpointing=none", "--global-batch-size", "512"),
            *("--vary", "micro_batch_size=32,256"),
        )
    )
    assert free["best"] is not None
    peaks = {
        record.config.micro_batch_size: record.measurement.reserved_peak_bytes
        for record in finished_trials(tmp_path / "free")
    }
    small, large = peaks[32], peaks[256]
    assert small is not None
    assert large is not None
    assert large > 1.3 * small
    limit = (small + large) // 2

    # A fresh study that is told to run both: the large one must end out of memory, unharmed.
    found = answer(
        search_command(
            SMALL_MODEL,
            tmp_path / "limited",
            *("--ranks", "2", "--fix", "precision=fp32", "--fix", "zero_stage=0"),
            *("--fix", "activation_checkpointing=none", "--global-batch-size", "512"),
            *("--vary", "micro_batch_size=32,256"),
            *("--memory-limit", str(limit)),
        )
    )
    assert found["best"]["config"]["micro_batch_size"] == 32
    assert found["best"]["reserved_peak_bytes"] <= limit
    text = (tmp_path / "limited" / "trials.csv").read_text()
    assert "out of memory" in text or "does not fit" in text
