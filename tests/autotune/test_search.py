from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.candidates import HOPELESS
from autotune.ranking import reserved_bytes
from autotune.runner import installed_packages
from autotune.study import load_result
from runtime.errors import ConfigError, UserError
from tests.autotune.factories import LIMIT, config, memory_of, seconds_of
from tests.autotune.fakes import MODEL, FakeRunner, Recorder, options_in, roles, run
from tests.autotune.tables import space_of

FITTING = [item for item in space_of().configs if memory_of(item).charged_peak_bytes <= LIMIT]
OPTIMUM = min(map(seconds_of, FITTING))


def test_a_search_finds_the_optimum_and_confirms_it(tmp_path: Path) -> None:
    observer = Recorder()
    result = run(options_in(tmp_path), observer=observer)
    assert result.best is not None
    assert seconds_of(result.best.config) <= 1.02 * OPTIMUM
    assert len(roles(result, "search")) <= 20
    assert "expected to gain 1%" in result.stopped_because
    interval = result.best.samples_per_second
    assert interval.processes >= 3
    assert interval.low < 64 / seconds_of(result.best.config) < interval.high
    assert interval.relative_half_width <= 0.05
    assert observer.events[0] == "profiling the model"
    assert observer.records == list(result.trials)
    assert observer.best[-1] == result.best
    assert observer.predictions[-1].step_seconds is not None
    assert all(seconds > 0 for seconds in observer.left)


def test_the_plain_baseline_is_the_largest_power_of_two_that_fits_and_is_confirmed(
    tmp_path: Path,
) -> None:
    result = run(options_in(tmp_path))
    fitting = [
        size
        for size in (1, 2, 4, 8, 16, 32)
        if memory_of(config(micro_batch_size=size)).charged_peak_bytes <= LIMIT
    ]
    assert result.plain is not None
    assert result.plain.config == config(micro_batch_size=max(fitting))
    assert result.plain.samples_per_second.processes >= 3
    assert max(fitting) < 32


def test_every_configuration_is_measured_or_has_its_reason(tmp_path: Path) -> None:
    result = run(options_in(tmp_path))
    measured = {record.config for record in result.trials}
    left = {item.config for item in result.untried}
    assert not measured & left
    assert measured | left >= set(space_of().configs)
    kinds = ("does not fit: needs ", "cannot win: predicted ", "not reached: ")
    assert all(item.reason.startswith(kinds) for item in result.untried)
    assert {item.reason.partition(":")[0] for item in result.untried} >= {
        "does not fit",
        "cannot win",
    }
    for item in result.untried:
        if item.reason.startswith("does not fit"):
            assert item.prediction is not None
            assert item.prediction.fit_probability < HOPELESS


def test_confirmations_are_interleaved_and_rounds_alternate(tmp_path: Path) -> None:
    result = run(options_in(tmp_path))
    confirmed = roles(result, "confirm")
    first = list(dict.fromkeys(confirmed))
    assert confirmed[: 2 * len(first)] == [*first, *reversed(first)]


def test_the_result_is_in_the_study(tmp_path: Path) -> None:
    result = run(options_in(tmp_path))
    stored = load_result(tmp_path / "out")
    assert replace(stored, seconds=result.seconds) == result
    assert stored.seconds == pytest.approx(result.seconds, abs=0.5)


def test_trials_that_cannot_win_end_early(tmp_path: Path) -> None:
    result = run(options_in(tmp_path, sampler="brute-force", max_trials=30))
    given_up = [record for record in result.trials if record.measurement.stopped_early]
    assert given_up
    assert all(len(record.measurement.step_seconds) <= 5 for record in given_up)
    assert not any(record.role != "search" for record in given_up)
    assert result.best is not None
    assert result.best.config not in {record.config for record in given_up}


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_other_samplers_go_on_to_the_number_of_trials(tmp_path: Path, sampler: str) -> None:
    result = run(options_in(tmp_path, sampler=sampler, max_trials=14))
    assert sum(record.role == "search" for record in result.trials) == 14
    assert result.stopped_because == "--max-trials 14 was reached"


def test_the_same_command_again_measures_nothing_twice(tmp_path: Path) -> None:
    first = run(options_in(tmp_path))
    runner = FakeRunner()
    again = run(options_in(tmp_path), runner)
    assert runner.configs == []
    assert runner.profiled == 0
    assert again.trials == first.trials
    assert again.best == first.best


def test_more_trials_go_on_where_the_search_stopped(tmp_path: Path) -> None:
    first = run(options_in(tmp_path, max_trials=3))
    runner = FakeRunner()
    second = run(options_in(tmp_path, max_trials=6), runner)
    assert second.trials[: len(first.trials)] == first.trials
    assert len(roles(second, "search")) > len(roles(first, "search"))
    assert not set(roles(second, "search")[len(roles(first, "search")) :]) & {
        record.config for record in first.trials
    }


def test_the_users_own_configuration_is_a_second_baseline(tmp_path: Path) -> None:
    own = config(micro_batch_size=1, zero_stage=3, threads_per_rank=None)
    result = run(options_in(tmp_path, own=own))
    assert result.own is not None
    assert result.own.config == config(micro_batch_size=1, zero_stage=3)
    assert result.own.samples_per_second.processes >= 3
    with pytest.raises(ConfigError, match="must have the search's ranks and global batch size"):
        run(options_in(tmp_path, own=config(micro_batch_size=1, ranks=4)))


def test_least_memory_as_the_objective(tmp_path: Path) -> None:
    result = run(options_in(tmp_path, objective="memory"))
    assert result.best is not None
    least = min(memory_of(item).charged_peak_bytes for item in FITTING)
    assert reserved_bytes(result.best) <= 1.01 * least
    steps = [
        len(record.measurement.step_seconds) for record in result.trials if record.role == "search"
    ]
    assert max(steps, default=0) <= 3


class TestAnotherStudy:
    def test_a_changed_model_file_is_noticed_and_said(self, tmp_path: Path) -> None:
        options = options_in(tmp_path, max_trials=2)
        first = run(options)
        options.model_file.write_text(MODEL + "# changed\n", encoding="utf-8")
        observer = Recorder()
        second = run(options, observer=observer)
        assert second.study_name != first.study_name
        assert second.model_hash != first.model_hash
        assert any("the model file has changed" in note for note in second.notes)
        assert observer.notes[0] == second.notes[0]
        assert load_result(tmp_path / "out").study_name == second.study_name

    @pytest.mark.parametrize(
        "changes",
        [{"fix": {"zero_stage": "3"}}, {"global_batch_size": 32}, {"objective": "memory"}],
    )
    def test_a_changed_space_is_another_study_and_the_old_one_goes_on(
        self, tmp_path: Path, changes: dict[str, Any]
    ) -> None:
        options = options_in(tmp_path, max_trials=2)
        first = run(options)
        second = run(replace(options, **changes))
        assert second.study_name != first.study_name
        assert any("this is a new study" in note for note in second.notes)
        runner = FakeRunner()
        third = run(options, runner)
        assert third.study_name == first.study_name
        assert runner.configs == []
        assert any("an earlier study goes on" in note for note in third.notes)

    def test_a_fixed_dimension_is_fixed(self, tmp_path: Path) -> None:
        runner = FakeRunner(seconds=lambda config: 1.0 + config.zero_stage)
        result = run(options_in(tmp_path, fix={"zero_stage": "3"}), runner)
        assert result.best is not None
        assert result.best.config.zero_stage == 3
        assert {item.zero_stage for item in roles(result, "search")} == {3}
        assert result.plain is not None
        assert result.plain.config.zero_stage == 0


class TestOptions:
    def test_the_global_batch_of_the_option_wins_and_is_said(self, tmp_path: Path) -> None:
        result = run(options_in(tmp_path, global_batch_size=32, max_trials=2))
        assert result.global_batch_size == 32
        assert "--global-batch-size 32 is used, not the model file's 64" in result.notes

    def test_the_default_global_batch_is_a_multiple_of_the_ranks_and_said(
        self, tmp_path: Path
    ) -> None:
        runner = FakeRunner(profile_facts={"global_batch_size": None})
        result = run(options_in(tmp_path, ranks=3, max_trials=1), runner)
        assert result.global_batch_size == 33
        assert any("the global batch size is 33, a default" in note for note in result.notes)

    def test_one_rank(self, tmp_path: Path) -> None:
        result = run(options_in(tmp_path, ranks=None))
        assert result.ranks == 1
        assert "zero_stage" in result.dropped_dimensions
        assert result.best is not None

    def test_more_ranks_than_devices_are_refused(self, tmp_path: Path) -> None:
        runner = FakeRunner(hardware_facts={"device": "cuda", "device_count": 1})
        with pytest.raises(ConfigError, match="at most the number of CUDA devices, 1, but got 2"):
            run(options_in(tmp_path), runner)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sampler": "x"}, "--sampler must be one of"),
            ({"fix": {"zero": "3"}}, "unknown dimension 'zero'"),
            ({"global_batch_size": 33}, "multiple of the ranks"),
            ({"storage": "nonsense"}, "database URL"),
            ({"model_file": Path("missing.py")}, "does not exist"),
        ],
    )
    def test_wrong_options_are_refused_before_anything_runs(
        self, tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        runner = FakeRunner()
        with pytest.raises(UserError, match=message):
            run(options_in(tmp_path, **changes), runner)
        assert runner.configs == []


def test_only_installed_packages_are_preloaded(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("", encoding="utf-8")
    names = ["json", "numpy", "optuna", "pydantic", "no_such_module", "tests"]
    assert installed_packages(names, tmp_path / "model.py") == ["numpy", "optuna"]
