"""The command `measure`: the same configuration again, in fresh processes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from autotune import remeasure
from autotune.cli import run
from autotune.intervals import fresh_run_interval
from runtime.config import save_config
from runtime.measurement import Measurement, Outcome
from tests.autotune import factories

CONFIG = factories.config(8, zero_stage=1)
MODEL = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 4))


def make_batch(micro_batch_size):
    return torch.randn(micro_batch_size, 32)


def compute_loss(model, batch):
    {body}
"""


class _Runner:
    """Gives what was measured elsewhere."""

    def __init__(self, runs: list[Measurement | BaseException]) -> None:
        self.runs = runs
        self.asked: list[dict[str, Any]] = []

    def __call__(self, model: Path, preload: list[str]) -> _Runner:
        return self

    def __enter__(self) -> _Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def run(self, config: object, **given: Any) -> Measurement:
        self.asked.append(given)
        run = self.runs[len(self.asked) - 1]
        if isinstance(run, BaseException):
            raise run
        return run


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[Measurement | BaseException]], _Runner]:
    """Work in a folder with model.py and best.json, on a machine that measured this."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL.format(body="return model(batch).sum()"))
    save_config(CONFIG, Path("best.json"))
    monkeypatch.setattr(remeasure, "measure_hardware", factories.hardware)

    def install(runs: list[Measurement | BaseException]) -> _Runner:
        runner = _Runner(runs)
        monkeypatch.setattr(remeasure, "ProcessRunner", runner)
        return runner

    return install


def _runs(count: int) -> list[Measurement | BaseException]:
    generator = random.Random(0)
    return [factories.measurement_of(CONFIG, generator) for _ in range(count)]


ARGUMENTS = ["measure", "model.py", "--config", "best.json", "--repeats", "3"]


def test_prints_the_rate_with_its_interval(
    install: Callable[[list[Measurement | BaseException]], _Runner],
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = _runs(3)
    runner = install(runs)
    assert run([*ARGUMENTS, "--memory-limit", "900MiB", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    rates = [item.samples_per_second for item in runs if isinstance(item, Measurement)]
    expected = fresh_run_interval([rate for rate in rates if rate is not None])
    assert found["runs"] == rates
    assert found["samples_per_second"]["low"] == expected.low
    assert found["memory_limit_bytes"] == 900 * 2**20
    assert [line[:11] for line in captured.err.splitlines()] == [
        f"run {number} of 3:" for number in (1, 2, 3)
    ]
    assert {given["memory_limit_bytes"] for given in runner.asked} == {900 * 2**20}
    assert {given["threads_per_rank"] for given in runner.asked} == {CONFIG.threads_per_rank}


def test_says_it_in_a_line(
    install: Callable[[list[Measurement | BaseException]], _Runner],
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(_runs(3))
    assert run([*ARGUMENTS, "--memory-limit", "900MiB"]) == 0
    text = capsys.readouterr().out
    assert "samples/s (" in text
    assert ", 3 runs)  z1 mb8x4 fp32" in text
    assert "of 900 MiB a rank" in text


def test_an_interruption_still_prints_what_was_measured(
    install: Callable[[list[Measurement | BaseException]], _Runner],
    capsys: pytest.CaptureFixture[str],
) -> None:
    install([*_runs(1), KeyboardInterrupt()])
    assert run(ARGUMENTS) == 0
    assert ", 1 run)" in capsys.readouterr().out
    install([KeyboardInterrupt()])
    assert run(ARGUMENTS) == 130


def test_a_run_that_fails_is_named(
    install: Callable[[list[Measurement | BaseException]], _Runner],
    capsys: pytest.CaptureFixture[str],
) -> None:
    generator = random.Random(0)
    lost = factories.measurement_of(CONFIG, generator, outcome=Outcome.OUT_OF_MEMORY)
    install([lost])
    assert run(ARGUMENTS) == 1
    error = capsys.readouterr().err
    assert error == (
        "autotune: z1 mb8x4 fp32: out of memory: rank 1 asked for 42 MiB above its limit of "
        "900 MiB\n"
    )
    crashed = factories.measurement_of(CONFIG, generator, outcome=Outcome.CRASHED)
    install([crashed])
    assert run([*ARGUMENTS, "--debug"]) == 1
    assert 'File "/home/ada/gpt/model.py", line 71' in capsys.readouterr().err
    install([replace(crashed, user_error=True)])
    assert run(ARGUMENTS) == 2


def test_more_ranks_than_devices_are_refused(
    install: Callable[[list[Measurement | BaseException]], _Runner],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install([])
    one = factories.hardware(device="cuda", device_count=1, device_memory_bytes=2**30)
    monkeypatch.setattr(remeasure, "measure_hardware", lambda: one)
    assert run(ARGUMENTS) == 2
    assert (
        "at most as many ranks as there are CUDA devices, 1, but has 2" in capsys.readouterr().err
    )


def test_really_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank and two, in processes of their own."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL.format(body="return model(batch).square().mean()"))
    for ranks in (1, 2):
        config = factories.config(8, ranks=ranks, threads_per_rank=1)
        save_config(config, Path("config.json"))
        assert run(["measure", "model.py", "--config", "config.json", "--repeats", "1",
                    "--memory-limit", "500MiB", "--json"]) == 0  # fmt: skip
        found = json.loads(capsys.readouterr().out)
        assert found["samples_per_second"]["processes"] == 1
        assert math.isfinite(found["samples_per_second"]["value"])
        assert 0 < found["reserved_peak_bytes"] < 500 * 2**20


def test_the_users_own_error_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL.format(body="raise ValueError('no loss today')"))
    save_config(factories.config(8, ranks=1), Path("config.json"))
    assert run(["measure", "model.py", "--config", "config.json", "--repeats", "1"]) in (1, 2)
    error = capsys.readouterr().err
    assert "ValueError: no loss today" in error
    assert "Traceback" not in error
