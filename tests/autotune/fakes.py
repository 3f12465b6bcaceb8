"""A runner that measures nothing: a made-up machine with a cost table, noise and failures."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.observer import Silent
from autotune.records import (
    Hardware,
    ModelProfile,
    Prediction,
    Ranked,
    Role,
    SearchResult,
    TrialRecord,
)
from autotune.search import SearchOptions, search
from autotune.trial import KeepGoing
from runtime.config import TrainConfig
from runtime.measurement import Measurement, Outcome
from tests.autotune import factories
from tests.autotune.factories import GLOBAL_BATCH, LIMIT, memory_of, seconds_of

MODEL = "def build_model(): ...\ndef make_batch(micro_batch_size): ...\n"


@dataclass
class FakeRunner:
    """Stands for the machine, the launcher and the ranks."""

    seconds: Callable[[TrainConfig], float] = seconds_of
    process_noise: float = 0.003
    step_noise: float = 0.01
    outcome: Callable[[TrainConfig], Outcome | None] = lambda config: None
    before: Callable[[TrainConfig], None] = lambda config: None
    """Called as a run begins; may raise, or sleep."""
    hardware_facts: dict[str, Any] = field(default_factory=dict)
    profile_facts: dict[str, Any] = field(default_factory=dict)
    run_seconds: float = 6.0
    """What a run says it took."""
    configs: list[TrainConfig] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    profiled: int = 0
    generator: random.Random = field(default_factory=lambda: random.Random(0))

    def __enter__(self) -> FakeRunner:
        return self

    def __exit__(self, *arguments: object) -> None:
        pass

    def hardware(self) -> Hardware:
        return factories.hardware(**self.hardware_facts)

    def profile(self, *, threads: int, memory_limit_bytes: int) -> ModelProfile:
        self.profiled += 1
        return factories.profile(**{"global_batch_size": GLOBAL_BATCH, **self.profile_facts})

    def problems(self) -> Sequence[str]:
        return ()

    def run(
        self,
        config: TrainConfig,
        *,
        threads_per_rank: int,
        memory_limit_bytes: int,
        deadline_seconds: float,
        keep_going: KeepGoing,
        on_step: Callable[[float], None],
    ) -> Measurement:
        self.configs.append(config)
        self.limits.append(memory_limit_bytes)
        self.before(config)
        memory = memory_of(config)
        outcome = self.outcome(config)
        if outcome is None:
            fits = memory.charged_peak_bytes <= memory_limit_bytes
            outcome = Outcome.OK if fits else Outcome.OUT_OF_MEMORY
        steps: list[float] = []
        if outcome is Outcome.OK:
            process = self.generator.gauss(1, self.process_noise)
            while len(steps) < 40:
                noise = self.generator.gauss(1, self.step_noise)
                steps.append(self.seconds(config) * process * noise)
                on_step(steps[-1])
                if not keep_going(steps):
                    break
        self.steps.append(len(steps))
        full = factories.measurement_of(config, self.generator, outcome=outcome)
        return replace(
            full,
            step_seconds=tuple(steps),
            global_batch_size=config.global_batch_size,
            total_seconds=self.run_seconds,
        )


@dataclass
class Recorder(Silent):
    """An observer that keeps what it was told."""

    events: list[str] = field(default_factory=list)
    records: list[TrialRecord] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    best: list[Ranked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left: list[float] = field(default_factory=list)

    def on_phase(self, text: str) -> None:
        self.events.append(text)

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_trial_start(self, config: TrainConfig, role: Role, prediction: Prediction) -> None:
        self.events.append(f"start {role}")
        self.predictions.append(prediction)

    def on_trial_end(self, record: TrialRecord) -> None:
        self.records.append(record)

    def on_best(self, ranked: Ranked) -> None:
        self.best.append(ranked)

    def on_time_left(self, seconds: float) -> None:
        self.left.append(seconds)


def options_in(folder: Path, **changes: Any) -> SearchOptions:
    """A search of a model file in `folder`, on two ranks, its output beside it."""
    model_file = folder / "gpt.py"
    if not model_file.exists():
        model_file.write_text(MODEL, encoding="utf-8")
    values: dict[str, Any] = {
        "model_file": model_file,
        "ranks": 2,
        "memory_limit_bytes": LIMIT,
        "out": folder / "out",
        "command": "autotune search gpt.py",
    }
    return SearchOptions(**{**values, **changes})


def run(
    options: SearchOptions, runner: FakeRunner | None = None, observer: Recorder | None = None
) -> SearchResult:
    """Search on the made-up machine."""
    fake = runner or FakeRunner()
    return search(options, observer, make_runner=lambda model_file, packages: fake)


def roles(result: SearchResult, role: str) -> list[TrainConfig]:
    """Configurations of the runs of this role, in their order."""
    return [record.config for record in result.trials if record.role == role]


def _sleep(config: TrainConfig) -> None:
    print("run", flush=True)
    time.sleep(0.15)


if __name__ == "__main__":  # a search to be killed
    search(
        options_in(Path(sys.argv[1])),
        make_runner=lambda model_file, packages: FakeRunner(before=_sleep),
    )
