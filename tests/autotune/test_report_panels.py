"""The small records that the panels of a report are drawn from."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autotune.records import Ranked, SearchResult
from autotune.report.answer import answer, describe
from autotune.report.configurations import tried_configurations
from autotune.report.differences import differences
from autotune.report.memory_parts import draw_memory_parts, memory_parts
from autotune.report.micro_batches import draw_micro_batches, micro_batches
from autotune.report.runs import SHOWN_OF_A_GROUP, runs
from autotune.report.setting import setting
from autotune.report.tradeoff import draw_tradeoff, tradeoff
from runtime.measurement import Outcome
from tests.autotune import factories

RESULT = factories.search_result()


def _runs(ranked: Ranked, *rates: float) -> Ranked:
    """`ranked` as if its runs had had these rates."""
    size = ranked.measurements[0].global_batch_size
    runs = tuple(replace(ranked.measurements[0], step_seconds=(size / rate,)) for rate in rates)
    interval = replace(ranked.samples_per_second, processes=len(runs))
    return replace(ranked, measurements=runs, samples_per_second=interval)


def _drifting(*speeds: float) -> SearchResult:
    """A winner 1.5 times as fast as plain, on a machine whose speed drifts from round to round."""
    assert RESULT.best is not None
    assert RESULT.plain is not None
    wobble = [0.995, 1.0, 1.005]
    return replace(
        RESULT,
        best=_runs(RESULT.best, *(60 * s * w for s, w in zip(speeds, wobble, strict=True))),
        plain=_runs(RESULT.plain, *(40 * s for s in speeds)),
    )


class TestAnswer:
    """The figures that everything else is read against."""

    def test_drift_that_both_runs_of_a_round_share_cancels(self) -> None:
        found = answer(_drifting(1.0, 2.0, 1.2)).versus_plain
        assert found is not None
        assert found.paired
        assert found.rate.processes == 3
        assert found.rate.value == pytest.approx(1.5, rel=0.02)
        assert found.rate.relative_half_width < 0.05

    def test_without_rounds_in_common_it_is_bounded_by_the_far_ends_of_both_intervals(self) -> None:
        assert RESULT.plain is not None
        result = replace(RESULT, plain=replace(RESULT.plain, in_turn=False))
        found = answer(result).versus_plain
        assert found is not None
        assert not found.paired
        assert RESULT.best is not None
        best, plain = RESULT.best.samples_per_second, RESULT.plain.samples_per_second
        assert found.rate.value == best.value / plain.value
        assert found.rate.low == best.low / plain.high
        assert found.rate.high == best.high / plain.low

    def test_the_runner_up_is_named_where_the_intervals_overlap(self) -> None:
        assert answer(RESULT).tied_with == RESULT.runner_up
        assert answer(factories.search_result(half_width=0.001)).tied_with is None

    def test_a_speed_up_that_may_be_none_is_not_claimed(self) -> None:
        assert RESULT.best is not None
        noisy = replace(_drifting(1.0, 2.0, 1.2), best=_runs(RESULT.best, 60.0, 20.0, 44.0))
        assert answer(noisy).headline.endswith(", within noise")
        assert not answer(RESULT).headline.endswith("noise")

    def test_plain_may_win(self) -> None:
        found = answer(factories.one_trial())
        assert found.headline == "The plain configuration wins"
        assert found.versus_plain is not None
        assert found.versus_plain.differences == ()

    def test_the_objective_memory_is_answered_in_memory(self) -> None:
        found = answer(replace(RESULT, objective="memory"))
        assert re.fullmatch(r"1\.07× the memory of plain", found.headline)

    def test_where_every_run_failed_the_first_reason_is_given(self) -> None:
        crashed = tuple(
            replace(trial, measurement=replace(trial.measurement, outcome=Outcome.CRASHED,
                                               reason=f"reason {trial.number}"))
            for trial in RESULT.trials[:2]
        )  # fmt: skip
        found = answer(replace(RESULT, trials=crashed, best=None, runner_up=None, plain=None))
        assert found.headline == "No run ended well"
        assert found.sentence == "2 crashed. First reason: reason 0"

    def test_what_the_search_says_of_memory_is_said_once(self) -> None:
        said = "nothing fits into 60.0 MiB a rank: the smallest configuration needs about 132 MiB"
        found = answer(replace(factories.nothing_fits(), stopped_because=said))
        assert (found.headline, found.advice) == ("Nothing fits", "")
        assert found.sentence == said[0].upper() + said[1:]
        assert found.stopped_because == ""

    def test_a_configuration_in_words(self) -> None:
        config = factories.config(16, zero_stage=1, precision="bf16", reduce_dtype="compute")
        assert describe(config) == (
            "ZeRO stage 1, micro-batch 16 × 2 accumulation steps, bf16 with gradients reduced in "
            "bf16, no activation checkpointing"
        )
        alone = factories.config(64, ranks=1)
        assert describe(alone) == (
            "micro-batch 64 without accumulation, fp32, no activation checkpointing"
        )


class TestDifferences:
    """One change apart, or not at all."""

    before = factories.config(8, zero_stage=0)
    after = factories.config(16, zero_stage=1, precision="bf16", reduce_dtype="compute")

    def _result(self, *configs: object, lost: object = None) -> SearchResult:
        template = RESULT.trials[0]
        rates = {config: index + 1.0 for index, config in enumerate(configs)}
        trials = tuple(
            replace(
                template,
                config=config,
                measurement=replace(
                    template.measurement,
                    step_seconds=(1 / rates[config],) * 3,
                    outcome=Outcome.OUT_OF_MEMORY if config == lost else Outcome.OK,
                ),
            )
            for config in configs
        )
        return replace(RESULT, trials=trials, best=None, plain=None, own=None, runner_up=None)  # type: ignore[arg-type]

    def _found(self, *configs: object, lost: object = None) -> dict[str, object]:
        tried = tried_configurations(self._result(*configs, lost=lost))
        return {item.setting: item for item in differences(self.before, self.after, tried)}

    def test_names_every_setting_that_differs(self) -> None:
        found = differences(self.before, self.after, [])
        assert [(item.setting, item.before, item.after) for item in found] == [
            ("micro-batch × accumulation", "8 × 4", "16 × 2"),
            ("ZeRO stage", "0", "1"),
            ("precision", "fp32", "bf16"),
            ("gradients travel in", "fp32", "bf16"),
        ]
        assert not any(item.told for item in found)

    def test_prices_a_setting_by_the_winner_without_it(self) -> None:
        without = self.after.model_copy(update={"zero_stage": 0})
        item = self._found(without, self.after)["ZeRO stage"]
        assert item.rate_ratio == pytest.approx(2.0)  # type: ignore[attr-defined]
        assert item.pair == (without.label(), self.after.label())  # type: ignore[attr-defined]

    def test_two_changes_apart_prices_nothing(self) -> None:
        other = self.after.model_copy(update={"zero_stage": 0, "activation_checkpointing": "full"})
        assert not any(item.told for item in self._found(other, self.after).values())  # type: ignore[attr-defined]

    def test_in_fp32_gradients_have_no_dtype_of_their_own(self) -> None:
        in_fp32 = self.after.model_copy(update={"precision": "fp32", "reduce_dtype": "fp32"})
        found = self._found(in_fp32, self.after)
        assert found["precision"].rate_ratio == pytest.approx(2.0)  # type: ignore[attr-defined]
        assert not found["gradients travel in"].told  # type: ignore[attr-defined]

    def test_the_pair_closest_to_the_winner_counts(self) -> None:
        near = self.after.model_copy(update={"zero_stage": 0})
        far = [self.before, self.before.model_copy(update={"zero_stage": 1})]
        item = self._found(*far, near, self.after)["ZeRO stage"]
        assert item.pair == (near.label(), self.after.label())  # type: ignore[attr-defined]

    def test_says_what_was_needed_to_fit(self) -> None:
        without = self.after.model_copy(update={"zero_stage": 0})
        item = self._found(without, self.after, lost=without)["ZeRO stage"]
        assert item.needed_to_fit  # type: ignore[attr-defined]


class TestTradeoff:
    """Throughput against memory."""

    def test_nothing_measured_beats_the_front_in_both(self) -> None:
        record = tradeoff(RESULT)
        measured = [point for point in record.points if point.samples_per_second is not None]
        assert record.front
        for front in record.front:
            assert not any(
                other.reserved_bytes <= front.reserved_bytes
                and (other.samples_per_second or 0) > (front.samples_per_second or 0)
                for other in measured
            )
        assert record.front[-1].samples_per_second == max(p.samples_per_second for p in measured)  # type: ignore[type-var]

    def test_out_of_memory_stands_beyond_the_limit(self) -> None:
        lost = [point for point in tradeoff(RESULT).points if point.samples_per_second is None]
        assert len(lost) == 4
        assert all(point.reserved_bytes >= RESULT.memory_limit_bytes for point in lost)

    def test_marks_say_what_they_are(self) -> None:
        svg = draw_tradeoff(tradeoff(RESULT))
        assert "<title>winner: z1 mb16x2 bf16/bf16: 109.4 samples/s, 603 MiB</title>" in svg
        assert "var(--orange)" in svg
        assert "DejaVu" not in svg

    def test_empty_without_a_good_run(self) -> None:
        assert draw_tradeoff(tradeoff(factories.nothing_fits())) == ""


class TestMicroBatches:
    """Throughput by micro-batch size."""

    def test_lines_join_the_best_of_each_size(self) -> None:
        for line in micro_batches(RESULT).lines:
            best = {size: rate for size, rate, _ in line.best}
            assert list(best) == sorted(best)
            assert all(rate <= best[size] for size, rate, _ in line.others)

    def test_one_rank_is_told_apart_by_precision(self) -> None:
        record = micro_batches(factories.search_result(ranks=1))
        assert not record.by_stage
        assert {line.series for line in record.lines} == {"fp32", "bf16"}

    def test_a_single_size_is_no_line(self) -> None:
        assert draw_micro_batches(micro_batches(factories.one_trial())) == ""


class TestMemoryParts:
    """Bytes by part."""

    def test_parts_add_up_to_the_reserved_peak(self) -> None:
        peaks = {item.config.label(): item for item in tried_configurations(RESULT)}
        for stack in memory_parts(RESULT).stacks:
            item = peaks[stack.label]
            assert item.prediction is not None
            assert stack.predicted is not None
            assert stack.predicted.total == pytest.approx(item.prediction.reserved_bytes)
            assert (stack.measured is None) == (item.reserved_peak_bytes is None)
            if stack.measured is not None:
                assert stack.measured.total == pytest.approx(item.reserved_peak_bytes)

    def test_shows_the_named_ones_and_one_that_was_lost(self) -> None:
        stacks = memory_parts(RESULT).stacks
        assert [stack.name for stack in stacks][:4] == ["winner", "yours", "plain", "runner-up"]
        assert stacks[-1].note == "out of memory"

    def test_empty_where_nothing_ran(self) -> None:
        assert draw_memory_parts(memory_parts(factories.nothing_measured())) == ""


class TestRuns:
    """Every run, and the untried."""

    def test_untried_are_grouped_by_reason_without_its_figures(self) -> None:
        groups = runs(RESULT).groups
        reasons = [group.reason for group in groups]
        assert "predicted to need … of …" in reasons
        assert sum(group.count for group in groups) == len(RESULT.untried)
        assert all(len(group.shown) <= SHOWN_OF_A_GROUP for group in groups)

    def test_the_most_promising_come_first(self) -> None:
        for group in runs(RESULT).groups:
            seconds = [item.prediction.step_seconds for item in group.shown if item.prediction]
            assert seconds == sorted(seconds)  # type: ignore[type-var]

    def test_outcomes_are_counted(self) -> None:
        counted = dict(runs(RESULT).outcomes)
        assert sum(counted.values()) == len(RESULT.trials)
        assert counted["out of memory"] == 4


def test_the_setting_says_how_each_figure_is_known() -> None:
    record = setting(RESULT)
    rows = {name: (value, known) for name, value, known in (*record.model, *record.search)}
    assert rows["optimizer states"] == ("82.6 MiB", "measured")
    assert rows["parameters, gradients and states"] == ("165 MiB", "derived")
    assert rows["took"] == ("2 min 56 s", "measured")
    assert record.dropped == tuple(RESULT.dropped_dimensions.items())
