"""The answer, first on the page and in the terminal: what wins, by how much, at what memory."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from markupsafe import Markup

from autotune.intervals import LEVEL, paired_difference
from autotune.ranking import CONFIRMED_PROCESSES, rates
from autotune.records import Interval, Ranked, SearchResult
from autotune.report.configurations import tried_configurations
from autotune.report.differences import Difference, differences
from autotune.report.render import render
from autotune.units import format_bytes, significant
from runtime.config import TrainConfig
from runtime.measurement import Outcome

NOISY_HALF_WIDTH = 0.05
"""Above this relative half-width the machine is too noisy to decide."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The winner against one named baseline."""

    baseline: Ranked
    rate: Interval
    """Winner's samples per second ÷ the baseline's, with its confidence interval."""
    paired: bool
    """The interval is over rounds in which both ran in turn, so that the machine's drift cancels;
    else its bounds come from the far ends of both intervals."""
    memory_ratio: float | None
    """Winner's reserved peak ÷ the baseline's."""
    differences: tuple[Difference, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search found, in figures. `best` and all that follows from it are None without one."""

    headline: str
    sentence: str
    best: Ranked | None = None
    tokens_per_second: float | None = None
    reserved_peak_bytes: int | None = None
    memory_limit_bytes: int
    versus_plain: Comparison | None = None
    versus_own: Comparison | None = None
    confirmed: bool = False
    """The winner's interval rests on the scatter of at least three fresh processes."""
    noisy: bool = False
    """Confirmed, and still wider than ±5%."""
    tied_with: Ranked | None = None
    """The runner-up, where its interval overlaps the winner's."""
    advice: str = ""
    """What to do where there is no winner."""
    model_file: str
    device: str
    command: str
    use_command: str = ""
    """Runs the winner again, in fresh processes."""
    stopped_because: str
    """Empty where `sentence` says it."""
    notes: tuple[str, ...]

    @property
    def warning(self) -> str:
        """Why the winner's figure cannot be trusted to 5%; empty where it can."""
        if self.best is None:
            return ""
        width = f"±{self.best.samples_per_second.relative_half_width:.1%}"
        if self.noisy:
            return (
                f"this machine is too noisy to decide: the winner's interval is {width} (up to 5% "
                "is sound); search again when nothing else runs on it"
            )
        if not self.confirmed:
            return (
                f"the winner is not confirmed: its interval of {width} assumes how far fresh "
                f"processes differ, since fewer than {CONFIRMED_PROCESSES} ran it; give the search "
                "more time"
            )
        return ""

    @property
    def step_seconds(self) -> float | None:
        """Of the winner, from its throughput."""
        if self.best is None:
            return None
        return self.best.config.global_batch_size / self.best.samples_per_second.value


def describe(config: TrainConfig) -> str:
    """A configuration as half a sentence."""
    parts = [f"ZeRO stage {config.zero_stage}"] if config.ranks > 1 else []
    steps = config.gradient_accumulation_steps
    parts.append(
        f"micro-batch {config.micro_batch_size}"
        + (f" × {steps} accumulation steps" if steps > 1 else " without accumulation")
    )
    parts.append(config.precision)
    if config.ranks > 1 and config.precision != "fp32":
        travel = config.precision if config.reduce_dtype == "compute" else "fp32"
        parts[-1] += f" with gradients reduced in {travel}"
    kind = config.activation_checkpointing
    parts.append(f"{kind if kind != 'none' else 'no'} activation checkpointing")
    if config.compile:
        parts.append("compiled blocks")
    return ", ".join(parts)


def peak_bytes(ranked: Ranked) -> int | None:
    """Largest reserved peak of one rank over the runs."""
    peaks = [run.reserved_peak_bytes for run in ranked.measurements]
    return max((peak for peak in peaks if peak is not None), default=None)


def answer(result: SearchResult) -> Answer:
    """The answer to `result`, or why there is none."""
    if result.best is None:
        return _no_answer(result)
    best = result.best
    versus_plain = _comparison(result, result.plain)
    headline, sentence = _headline(result, best, versus_plain)
    runner_up = result.runner_up
    rate = best.samples_per_second
    tied = runner_up is not None and runner_up.samples_per_second.high >= rate.low
    confirmed = rate.processes >= CONFIRMED_PROCESSES
    tokens = next((run.tokens_per_sample for run in best.measurements), None)
    return Answer(
        headline=headline,
        sentence=sentence,
        best=best,
        tokens_per_second=rate.value * tokens if tokens else None,
        reserved_peak_bytes=peak_bytes(best),
        memory_limit_bytes=result.memory_limit_bytes,
        versus_plain=versus_plain,
        versus_own=_comparison(result, result.own),
        confirmed=confirmed,
        noisy=confirmed and rate.relative_half_width > NOISY_HALF_WIDTH,
        tied_with=runner_up if tied else None,
        model_file=result.model_file,
        device=result.hardware.device,
        command=result.command,
        use_command=f"autotune measure {shlex.quote(result.model_file)} --config best.json",
        stopped_because=result.stopped_because,
        notes=_notes(result),
    )


def draw_answer(record: Answer) -> Markup:
    """The section that opens the page."""
    return render("answer.html", answer=record, describe=describe)


def _notes(result: SearchResult) -> tuple[str, ...]:
    """Without those on noise: `Answer.warning` says it, in its own place."""
    told = [note for note in result.notes if "too noisy" not in note]
    return tuple(dict.fromkeys((*told, *result.profile.notes)))


def _comparison(result: SearchResult, baseline: Ranked | None) -> Comparison | None:
    if baseline is None or result.best is None:
        return None
    best = result.best
    our_peak, their_peak = peak_bytes(best), peak_bytes(baseline)
    paired = best.in_turn and baseline.in_turn
    return Comparison(
        baseline=baseline,
        rate=_paired_speed_up(best, baseline) if paired else _speed_up(best, baseline),
        paired=paired,
        memory_ratio=our_peak / their_peak if our_peak and their_peak else None,
        differences=differences(baseline.config, best.config, tried_configurations(result)),
    )


def _paired_speed_up(best: Ranked, baseline: Ranked) -> Interval:
    """Over the confirmation rounds that both took part in, in the order of their runs."""
    ours, theirs = rates(best), rates(baseline)
    rounds = min(len(ours), len(theirs))
    mean, half_width = paired_difference(ours[:rounds], theirs[:rounds])
    return Interval(
        value=math.exp(mean),
        low=math.exp(mean - half_width),
        high=math.exp(mean + half_width),
        level=LEVEL,
        processes=rounds,
    )


def _speed_up(best: Ranked, baseline: Ranked) -> Interval:
    ours, theirs = best.samples_per_second, baseline.samples_per_second
    same = baseline.config == best.config
    return Interval(
        value=ours.value / theirs.value,
        low=1.0 if same else ours.low / theirs.high,
        high=1.0 if same else ours.high / theirs.low,
        level=min(ours.level, theirs.level),
        processes=min(ours.processes, theirs.processes),
    )


def _headline(result: SearchResult, best: Ranked, plain: Comparison | None) -> tuple[str, str]:
    rate = best.samples_per_second.value
    sentence = describe(best.config)
    sentence = sentence[0].upper() + sentence[1:] + "."
    if plain is None:
        return f"{significant(rate, 4)} samples/s", sentence
    if plain.baseline.config == best.config:
        quality = "the leanest" if result.objective == "memory" else "as fast as any"
        return "The plain configuration wins", f"It is {quality} that was measured. {sentence}"
    if result.objective == "memory" and plain.memory_ratio is not None:
        return f"{plain.memory_ratio:.2f}× the memory of plain", sentence
    unsure = ", within noise" if plain.rate.low < 1 < plain.rate.high else ""
    return f"{plain.rate.value:.2f}× the throughput of plain{unsure}", sentence


def _no_answer(result: SearchResult) -> Answer:
    headline, sentence, advice = _why_none(result)
    told = result.stopped_because in sentence
    return Answer(
        headline=headline,
        sentence=sentence[:1].upper() + sentence[1:],
        advice=advice,
        memory_limit_bytes=result.memory_limit_bytes,
        model_file=result.model_file,
        device=result.hardware.device,
        command=result.command,
        stopped_because="" if told else result.stopped_because,
        notes=_notes(result),
    )


def _why_none(result: SearchResult) -> tuple[str, str, str]:
    """Headline, sentence and advice where there is no best."""
    outcomes = [trial.measurement.outcome for trial in result.trials]
    if result.stopped_because.startswith("nothing fits"):  # it says what is needed, and what to do
        return "Nothing fits", result.stopped_because, ""
    smallest = _smallest(result)
    if not outcomes and smallest is not None and smallest[1] <= result.memory_limit_bytes:
        sentence = f"the search ended before its first run did: {result.stopped_because}."
        advice = "Run the same command again: it goes on where it stopped."
        return "Nothing was measured", sentence, advice
    if all(outcome is Outcome.OUT_OF_MEMORY for outcome in outcomes):
        limit = format_bytes(result.memory_limit_bytes)
        sentence = f"no configuration stays below the limit of {limit} a rank."
        advice = "Raise --memory-limit, use more ranks, or shorten the samples."
        if smallest is not None:
            config, need = smallest
            needs = format_bytes(need)
            sentence += f" The smallest, {config.label()}, is predicted to need {needs}."
            if need > result.memory_limit_bytes:
                enough = format_bytes(need * 1.1)
                advice = advice.replace("--memory-limit", f"--memory-limit to {enough} or more")
        return "Nothing fits", sentence, advice
    kinds = ", ".join(
        f"{outcomes.count(kind)} {kind.value}" for kind in Outcome if outcomes.count(kind)
    )
    first = next((trial.measurement for trial in result.trials if trial.measurement.reason), None)
    sentence = f"{kinds}." + (f" First reason: {first.reason}" if first else "")
    advice = "Mend that first; the report has every traceback, in its table of runs."
    return "No run ended well", sentence, advice


def _smallest(result: SearchResult) -> tuple[TrainConfig, float] | None:
    """The configuration predicted to need least, with its reserved bytes of one rank."""
    predictions = [(item.config, item.prediction) for item in result.untried]
    predictions += [(trial.config, trial.prediction) for trial in result.trials]
    needs = [(config, known.reserved_bytes) for config, known in predictions if known is not None]
    return min(needs, key=lambda need: need[1]) if needs else None
