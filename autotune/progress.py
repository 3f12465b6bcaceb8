"""Progress of a search on standard error: a live view on a terminal, plain lines elsewhere.

Each finished run becomes a line that stays. On a terminal a few lines below them say what is being
tried, what is best so far and how long it may take; they vanish when the search ends.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autotune.observer import Observer
from autotune.records import Prediction, Ranked, Role, TrialRecord
from autotune.units import format_bytes, format_seconds, significant
from runtime.config import TrainConfig
from runtime.measurement import Outcome

_REFRESHES_PER_SECOND = 4
_LABEL_COLUMNS = 34
"""The longest common label: `z3 mb32x1 bf16/bf16 ckpt=selective`."""
_FIGURES_COLUMNS = 31
"""`999 ` before the label and `  123.4 samples/s   123 MiB` behind it."""


class Progress(Observer):
    """An observer that prints to `console`; use it in a `with` statement. `clock` gives seconds."""

    def __init__(
        self,
        console: Console,
        *,
        title: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._start = clock()
        self._live: Live | None = None
        self._phase = "starting"
        self._trying: TrainConfig | None = None
        self._role: Role = "search"
        self._steps: list[float] = []
        self._outcomes: Counter[Outcome] = Counter()
        self._left_until: float | None = None
        self._best: Ranked | None = None
        self._plain: TrainConfig | None = None
        self._plain_rates: list[float] = []

    def __enter__(self) -> Progress:
        self._start = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                self,
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_phase(self, text: str) -> None:
        """The search does something else now, such as profiling the model."""
        self._phase = text
        self._trying = None
        if self._live is None:
            self._print(Text(text))

    def on_trial_start(self, config: TrainConfig, role: Role, prediction: Prediction) -> None:
        """A run begins."""
        self._trying, self._role, self._steps = config, role, []

    def on_step(self, seconds: float) -> None:
        """A step of the run was timed."""
        self._steps.append(seconds)

    def on_trial_end(self, record: TrialRecord) -> None:
        """A run has ended, in whatever way."""
        run = record.measurement
        self._trying = None
        self._outcomes[run.outcome] += 1
        if record.role == "plain" and run.samples_per_second:
            self._plain, self._plain_rates = record.config, []
        if record.config == self._plain and run.samples_per_second:
            self._plain_rates.append(run.samples_per_second)
        self._print(self._finished(record))

    def on_best(self, ranked: Ranked) -> None:
        """Another configuration leads, or its figure has changed."""
        self._best = ranked

    def on_time_left(self, seconds: float) -> None:
        """A rough guess."""
        self._left_until = self._clock() + seconds if math.isfinite(seconds) else None

    def on_note(self, text: str) -> None:
        """Something worth saying once."""
        self._print(Text(f"note: {text}", style="yellow"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The live view."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True, min_width=6)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row("search", Text(self._title, style="bold"))
        grid.add_row("now", self._now())
        grid.add_row("best", self._best_so_far())
        grid.add_row("runs", self._counts())
        grid.add_row("time", self._time())
        yield Text("")
        yield grid

    def _print(self, text: Text) -> None:
        if self._console.is_terminal:
            text.truncate(self._console.width, overflow="ellipsis")
        self._console.print(text, soft_wrap=True, highlight=False)

    def _finished(self, record: TrialRecord) -> Text:
        run = record.measurement
        columns = max(20, min(_LABEL_COLUMNS, self._console.width - _FIGURES_COLUMNS))
        text = Text(f"{record.number:>3} {record.config.label():<{columns}} ")
        if run.outcome is not Outcome.OK:
            text.append(run.outcome.value, style="red")
            text.append(f": {run.reason}" if run.reason else "")
            return text
        rate, peak = run.samples_per_second, run.reserved_peak_bytes
        text.append(f"{significant(rate, 4):>6} samples/s" if rate else "", style="green")
        text.append(f"{format_bytes(peak):>10}" if peak else "")
        if run.stopped_early:
            text.append("  stopped early")
        elif record.role != "search":
            text.append(f"  {record.role}")
        return text

    def _now(self) -> Text:
        if self._trying is None:
            return Text(self._phase)
        text = Text(f"{self._trying.label()}", style="cyan")
        if self._role != "search":
            text.append(f" ({self._role})")
        if self._steps:
            last = format_seconds(self._steps[-1])
            text.append(f"  step {len(self._steps)}, {last}", style="default")
        return text

    def _best_so_far(self) -> Text:
        if self._best is None:
            return Text("none yet", style="dim")
        rate = self._best.samples_per_second.value
        text = Text(f"{significant(rate, 4)} samples/s", style="bold green")
        if self._plain_rates:
            plain = statistics.median(self._plain_rates)
            text.append(f", {rate / plain:.2f}x plain", style="green")
        text.append(f"  {self._best.config.label()}", style="default")
        return text

    def _counts(self) -> Text:
        if not self._outcomes:
            return Text("none yet", style="dim")
        parts = [f"{self._outcomes[kind]} {kind.value}" for kind in Outcome if self._outcomes[kind]]
        return Text(f"{sum(self._outcomes.values())}: {', '.join(parts)}")

    def _time(self) -> Text:
        now = self._clock()
        text = Text(_whole_seconds(now - self._start))
        if self._left_until is not None and self._left_until > now:
            text.append(f", about {_whole_seconds(self._left_until - now)} left")
        return text


def _whole_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
