"""Exhaustive tables: every configuration of a model's space, measured on this machine.

    python studies/benchmarks/search_quality/measure.py [--models gpt bert]

Two rounds over the whole space in different random orders, then the leaders again, in turn. Two
ranks of one thread, fp32 and bf16, no memory limit: what would not fit into one follows from the
reserved bytes. Writes tables/MODEL.csv beside this file, a row a run as it ends, and resumes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from autotune.hardware import measure_hardware
from autotune.profile import profile_model
from autotune.runner import installed_packages
from autotune.space import build_space
from autotune.trial import TrialPlan, run_trial
from runtime.config import TrainConfig
from runtime.launch import Launcher
from runtime.measurement import Measurement
from runtime.model_file import check_model_file, imported_modules

HERE = Path(__file__).resolve().parent
STUDIES = HERE.parents[1]
OTHERS = HERE.parent / "memory_accuracy" / "models"
MODELS = {
    "gpt": STUDIES / "gpt" / "model.py",
    **{name: OTHERS / f"{name}.py" for name in ("bert", "t5", "vit", "mixtral")},
}
RANKS, THREADS, GLOBAL_BATCH_SIZE = 2, 1, 8
VARY = {"precision": ("fp32", "bf16")}
ROUNDS = 2
LEADERS, LEADER_ROUNDS = 8, 4
"""Configurations measured again in turn, and how many further times each."""
PLAN = TrialPlan(max_steps=12, deadline_seconds=120.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lock", type=Path, help="file to hold locked while a run is timed")
    options = parser.parse_args()
    packages = {
        name
        for model in options.models
        for name in installed_packages(
            imported_modules(check_model_file(MODELS[model])), MODELS[model]
        )
    }
    with Launcher(preload=sorted(packages)) as launcher:
        for model in options.models:
            _Table(launcher, model, options.lock).fill()


class _Table:
    def __init__(self, launcher: Launcher, model: str, lock: Path | None) -> None:
        self._launcher = launcher
        self._model = model
        self._lock = lock
        self._path = HERE / "tables" / f"{model}.csv"
        self._path.parent.mkdir(exist_ok=True)
        self._rows: list[dict[str, object]] = []
        if self._path.exists():
            self._rows = pd.read_csv(self._path).to_dict("records")  # type: ignore[assignment]
        self._done = {(str(row["config"]), str(row["round"])) for row in self._rows}

    def fill(self) -> None:
        configs = space_of(self._launcher, self._model)
        print(f"{self._model}: {len(configs)} configurations, {len(self._rows)} runs", flush=True)
        for number in range(ROUNDS):
            order = list(configs)
            random.Random(number).shuffle(order)
            for config in order:
                self._measure(config, f"all {number}")
        # Whoever leads after some rounds is among the leaders of the next.
        for number in range(LEADER_ROUNDS):
            leading = self._leaders(configs)
            for config in leading if number % 2 else reversed(leading):
                self._measure(config, f"leaders {number}")

    def _leaders(self, configs: Sequence[TrainConfig]) -> list[TrainConfig]:
        seconds: dict[str, list[float]] = defaultdict(list)
        for row in self._rows:
            if row["outcome"] == "ok":
                seconds[str(row["config"])].append(float(str(row["median_step_seconds"])))
        known = [config for config in configs if config.model_dump_json() in seconds]
        return sorted(
            known, key=lambda config: statistics.fmean(seconds[config.model_dump_json()])
        )[:LEADERS]

    def _measure(self, config: TrainConfig, when: str) -> None:
        text = config.model_dump_json()
        if (text, when) in self._done:
            return
        with _alone(self._lock):
            run = run_trial(
                self._launcher,
                MODELS[self._model],
                config,
                threads_per_rank=THREADS,
                memory_limit_bytes=None,
                plan=PLAN,
                keep_going=lambda steps: len(steps) < 3 or sum(steps) < 0.6,
            )
        self._rows.append({"label": config.label(), "round": when, **row_of(run), "config": text})
        self._done.add((text, when))
        part = self._path.with_suffix(".part")
        pd.DataFrame(self._rows).to_csv(part, index=False)
        part.replace(self._path)


def row_of(run: Measurement) -> dict[str, object]:
    """What the replays need of a run; bytes are those of the rank with most."""
    return {
        "outcome": run.outcome.value,
        "median_step_seconds": run.median_step_seconds,
        "step_seconds": json.dumps([round(step, 5) for step in run.step_seconds]),
        "total_seconds": round(run.total_seconds, 3),
        "allocated_bytes": run.allocated_peak_bytes,
        "reserved_bytes": max((rank.reserved_peak_bytes for rank in run.memory), default=None),
        "startup_bytes": max((rank.startup_peak_bytes for rank in run.memory), default=None),
        "at": round(time.time(), 1),
    }


def space_of(launcher: Launcher, model: str) -> tuple[TrainConfig, ...]:
    """The space that a search of the model has, with the settings above."""
    profile = profile_model(
        launcher, MODELS[model], threads=THREADS, memory_limit_bytes=None, deadline_seconds=300.0
    )
    return build_space(
        measure_hardware(),
        profile,
        ranks=RANKS,
        global_batch_size=GLOBAL_BATCH_SIZE,
        threads_per_rank=THREADS,
        fix={},
        vary=VARY,
    ).configs


@contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.1)  # or whoever waits never gets it


if __name__ == "__main__":
    main()
