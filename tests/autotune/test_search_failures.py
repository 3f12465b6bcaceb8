import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autotune.ranking import reserved_bytes
from autotune.study import load_result
from runtime.config import TrainConfig
from runtime.errors import ConfigError, RunError
from runtime.measurement import Outcome
from tests.autotune.factories import MIB
from tests.autotune.fakes import FakeRunner, options_in, run


class TestLimits:
    def test_the_winner_stays_below_the_memory_limit(self, tmp_path: Path) -> None:
        limit = 500 * MIB
        runner = FakeRunner()
        result = run(options_in(tmp_path, memory_limit_bytes=limit), runner)
        assert result.best is not None
        assert reserved_bytes(result.best) <= limit
        assert set(runner.limits) == {limit}
        assert sum(r.measurement.outcome is Outcome.OUT_OF_MEMORY for r in result.trials) <= 2

    def test_what_does_not_fit_at_all_says_what_it_needs(self, tmp_path: Path) -> None:
        result = run(options_in(tmp_path, memory_limit_bytes=60 * MIB))
        assert result.best is None
        assert "nothing fits into 60.0 MiB a rank: the smallest configuration" in (
            result.stopped_because
        )
        assert "--memory-limit" in result.stopped_because
        assert "optimizer" in result.stopped_because
        assert any("plain configuration" in note for note in result.notes)
        assert len(result.trials) <= 2
        assert load_result(tmp_path / "out") == replace(
            result, seconds=load_result(tmp_path / "out").seconds
        )

    def test_the_default_limit_is_90_percent_of_what_each_rank_can_have(
        self, tmp_path: Path
    ) -> None:
        result = run(options_in(tmp_path, memory_limit_bytes=None, max_trials=2))
        assert result.memory_limit_bytes == int(0.9 * 22 * 2**30 / 2)

    def test_a_resumed_search_keeps_its_default_limit_while_it_can(self, tmp_path: Path) -> None:
        options = options_in(tmp_path, memory_limit_bytes=None, max_trials=2)
        first = run(options)
        less = FakeRunner(hardware_facts={"host_memory_bytes": 21 * 2**30})
        assert run(options, less).memory_limit_bytes == first.memory_limit_bytes
        much_less = FakeRunner(hardware_facts={"host_memory_bytes": 4 * 2**30})
        assert run(options, much_less).memory_limit_bytes == int(0.9 * 2 * 2**30)

    def test_a_limit_above_what_there_is_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"at most 11\.0 GiB, what 2 ranks can have each"):
            run(options_in(tmp_path, memory_limit_bytes=12 * 2**30))

    def test_no_run_starts_that_would_not_end_in_time(self, tmp_path: Path) -> None:
        runner = FakeRunner(run_seconds=1000.0)
        result = run(options_in(tmp_path, time_budget_seconds=120.0), runner)
        assert len(runner.configs) == 1
        assert "time budget" in result.stopped_because
        assert any("before the leaders were confirmed" in note for note in result.notes)
        assert any(item.reason.startswith("not reached: the time") for item in result.untried)
        assert result.best is not None
        assert result.best.samples_per_second.processes == 1


class TestFailures:
    def test_some_configurations_may_crash(self, tmp_path: Path) -> None:
        def outcome(item: TrainConfig) -> Outcome | None:
            if item.zero_stage == 1:
                return Outcome.CRASHED
            return Outcome.NOT_FINITE if item.precision == "bf16" else None

        result = run(options_in(tmp_path), FakeRunner(outcome=outcome))
        assert result.best is not None
        assert result.best.config.zero_stage != 1
        assert result.best.config.precision == "fp32"
        outcomes = {record.measurement.outcome for record in result.trials}
        assert Outcome.CRASHED in outcomes or Outcome.NOT_FINITE in outcomes
        states = {trial.state for trial in _study(tmp_path).trials}
        assert optuna.trial.TrialState.FAIL in states

    @pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.NOT_FINITE])
    def test_what_always_fails_ends_the_search_with_the_first_traceback(
        self, tmp_path: Path, outcome: Outcome
    ) -> None:
        runner = FakeRunner(outcome=lambda item: outcome)
        with pytest.raises(RunError, match=r"gpt\.py: no run ended well") as caught:
            run(options_in(tmp_path), runner)
        assert len(runner.configs) == 2
        assert runner.configs[1].micro_batch_size == 1
        if outcome is Outcome.CRASHED:
            assert "in forward" in caught.value.detail
        mended = run(options_in(tmp_path))
        assert mended.best is not None

    def test_the_plain_baseline_may_fail_at_its_micro_batch_alone(self, tmp_path: Path) -> None:
        runner = FakeRunner(
            outcome=lambda item: Outcome.CRASHED if item.micro_batch_size > 2 else None
        )
        result = run(options_in(tmp_path), runner)
        assert result.best is not None
        assert result.best.config.micro_batch_size <= 2

    def test_a_noisy_machine_is_named(self, tmp_path: Path) -> None:
        result = run(options_in(tmp_path), FakeRunner(process_noise=0.15))
        assert any("too noisy to decide" in note for note in result.notes)
        assert result.best is not None
        assert result.best.samples_per_second.relative_half_width > 0.05

    def test_ctrl_c_ends_the_running_trial_and_keeps_the_rest(self, tmp_path: Path) -> None:
        runner = FakeRunner(before=_after(4, KeyboardInterrupt))
        result = run(options_in(tmp_path), runner)
        assert result.stopped_because.startswith("interrupted")
        assert len(result.trials) == 4
        assert result.best is not None
        assert any(item.reason.startswith("not reached: interrupted") for item in result.untried)
        resumed = FakeRunner()
        again = run(options_in(tmp_path), resumed)
        assert again.trials[:4] == result.trials
        assert resumed.configs[0] == runner.configs[-1]

    def test_ctrl_c_in_the_confirmation(self, tmp_path: Path) -> None:
        full = FakeRunner()
        run(options_in(tmp_path), full)
        folder = tmp_path / "second"
        folder.mkdir()
        runner = FakeRunner(before=_after(len(full.configs) - 2, KeyboardInterrupt))
        result = run(options_in(folder), runner)
        assert result.stopped_because.startswith("interrupted")
        assert len(result.trials) == len(full.configs) - 2

    def test_a_full_disk_in_mid_search_reports_what_there_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fill(_: TrainConfig) -> None:
            if len(runner.configs) == 4:
                monkeypatch.setattr(optuna.storages.RDBStorage, "set_trial_user_attr", _disk_full)

        runner = FakeRunner(before=fill)
        result = run(options_in(tmp_path), runner)
        assert len(result.trials) == 4
        assert "cannot be written: database or disk is full" in result.stopped_because
        assert any("in this report only" in note for note in result.notes)
        assert result.best is not None
        monkeypatch.undo()
        assert len(load_result(tmp_path / "out").trials) == 3


def _after(runs: int, error: type[BaseException]) -> Callable[[TrainConfig], None]:
    left = [runs]

    def before(_: TrainConfig) -> None:
        if not left[0]:
            raise error
        left[0] -= 1

    return before


def _disk_full(*arguments: object, **named: object) -> None:
    raise optuna.exceptions.StorageInternalError("commit") from OSError("database or disk is full")


def _study(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'out' / 'study.db'}")


def test_kill_minus_9_loses_no_finished_trial(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.autotune.fakes", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    with process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == "run\n"
        process.send_signal(signal.SIGKILL)
    before = load_result(tmp_path / "out")
    assert len(before.trials) == 3
    assert "killed" in before.stopped_because
    after = run(options_in(tmp_path))
    assert after.trials[:3] == before.trials
    assert after.best is not None
    assert all(trial.state.is_finished() for trial in _study(tmp_path).trials)
