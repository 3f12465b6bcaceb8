"""Progress: plain lines where nobody watches, a live view on a terminal of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autotune.observer import Observer
from autotune.progress import Progress
from runtime.measurement import Outcome
from tests.autotune.factories import search_result

RESULT = search_result()


def _watch(console: Console, *, clock: float = 0.0) -> Progress:
    """A whole search, as an observer is told of it; returns with the progress still open."""
    times = iter([0.0, 0.0])
    progress = Progress(console, title="gpt", clock=lambda: next(times, clock))
    progress.__enter__()
    assert RESULT.best is not None
    progress.on_phase("profiling the model")
    for trial in RESULT.trials:
        assert trial.prediction is not None
        progress.on_trial_start(trial.config, trial.role, trial.prediction)
        for seconds in trial.measurement.step_seconds:
            progress.on_step(seconds)
        progress.on_trial_end(trial)
        progress.on_best(RESULT.best)
    progress.on_note("dropout makes losses differ")
    progress.on_time_left(75.0)
    return progress


def _live_text(progress: Progress, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(progress)
    return capture.get().splitlines()


def test_hears_of_everything_that_a_search_tells() -> None:
    told = {name for name in vars(Observer) if name.startswith("on_")}
    assert told
    assert told <= set(vars(Progress))


def test_plain_lines_hold_no_control_codes() -> None:
    stream = io.StringIO()
    _watch(Console(file=stream, width=80)).__exit__(None, None, None)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "profiling the model"
    assert lines[-1] == "note: dropout makes losses differ"
    assert len(lines) == len(RESULT.trials) + 2


def test_every_run_is_a_line_with_its_figures_or_its_reason() -> None:
    stream = io.StringIO()
    _watch(Console(file=stream, width=80)).__exit__(None, None, None)
    lines = stream.getvalue().splitlines()[1:-1]
    for trial, line in zip(RESULT.trials, lines, strict=True):
        assert trial.config.label() in line
        if trial.measurement.outcome is Outcome.OK:
            assert "samples/s" in line
            assert ("stopped early" in line) == trial.measurement.stopped_early
        else:
            assert f"{trial.measurement.outcome.value}: {trial.measurement.reason}" in line


@pytest.mark.parametrize("width", [30, 80, 200])
def test_the_live_view_fits_the_terminal(width: int) -> None:
    progress = _watch(Console(file=io.StringIO()), clock=42.0)
    assert RESULT.best is not None
    progress.on_trial_start(RESULT.best.config, "confirm", RESULT.trials[0].prediction)  # type: ignore[arg-type]
    progress.on_step(0.5)
    lines = _live_text(progress, width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 6


def test_the_live_view_says_what_is_tried_what_is_best_and_how_long() -> None:
    progress = _watch(Console(file=io.StringIO()), clock=42.0)
    assert RESULT.best is not None
    progress.on_trial_start(RESULT.best.config, "confirm", RESULT.trials[0].prediction)  # type: ignore[arg-type]
    progress.on_step(0.5)
    text = "\n".join(_live_text(progress, 120))
    assert f"{RESULT.best.config.label()} (confirm)  step 1, 500 ms" in text
    assert "samples/s, 1.43x plain" in text
    assert f"{len(RESULT.trials)}: 25 ok, 4 out of memory, 1 timed out, 1 crashed" in text
    assert "42 s, about 1 min 15 s left" in text


def test_a_terminal_sees_the_live_view_and_gets_it_back_clean() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system="standard")
    progress = _watch(console)
    progress.__exit__(None, None, None)
    text = stream.getvalue()
    assert "\x1b[?25l" in text  # the cursor hides,
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # and comes back


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True)
    _watch(console).__exit__(None, None, None)
    for colour in range(30, 38):
        assert f"[{colour}m" not in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO()
    _watch(Console(file=stream, width=80, force_terminal=True)).__exit__(None, None, None)
    assert "\x1b[?25l" not in stream.getvalue()
