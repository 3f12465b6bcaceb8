"""One configuration in, one `Measurement` out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config import TrainConfig
from runtime.measurement import Measurement, Outcome, RankMemory

if TYPE_CHECKING:
    from runtime.launch import GroupEnd, Launcher, RankEvent

MEASURE_JOB = "runtime.measure:measure_job"


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """How long one run lasts."""

    max_steps: int = 40
    """Timed optimizer steps, at most."""
    deadline_seconds: float = 300.0
    """The run is ended after this long, whatever it does."""


KeepGoing = Callable[[Sequence[float]], bool]
"""Given the seconds of the steps timed so far, whether another one is worth its time."""


def run_trial(
    launcher: Launcher,
    model_file: Path,
    config: TrainConfig,
    *,
    threads_per_rank: int,
    memory_limit_bytes: int | None,
    plan: TrialPlan,
    keep_going: KeepGoing,
    on_step: Callable[[float], None] = lambda seconds: None,
) -> Measurement:
    """Train `config` in fresh processes until `keep_going` says no, or the plan's end.

    Whatever happens in the ranks is told by the measurement's outcome; nothing is raised for it.
    `on_step` is called with the seconds of each timed step.
    """
    start = time.monotonic()
    log = _RankLog(config.ranks)
    payload = {
        "model_file": str(model_file),
        "config": config.model_dump(mode="json"),
        "max_steps": plan.max_steps,
    }
    not_finite = ""
    with launcher.start(
        MEASURE_JOB,
        payload,
        ranks=config.ranks,
        threads_per_rank=threads_per_rank,
        memory_limit_bytes=memory_limit_bytes,
        deadline_seconds=plan.deadline_seconds,
    ) as group:
        startup_seconds = time.monotonic() - start
        for event in group.events():
            if event.name == "imported" and event.rank == 0:
                startup_seconds = time.monotonic() - start
            timed = len(log.step_seconds)
            log.add(event)
            not_finite = log.not_finite()
            if not_finite:
                break
            if len(log.step_seconds) > timed:
                on_step(log.step_seconds[-1])
                if log.memory_complete and not keep_going(log.step_seconds):
                    break
        group.stop()
        end = group.end
    return _measurement(
        config, log, end, not_finite, startup_seconds, total_seconds=time.monotonic() - start
    )


@dataclass
class _RankLog:
    """What the ranks have reported; a step is complete once every rank has told of it."""

    ranks: int
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    memory: dict[int, dict[str, int]] = field(default_factory=dict)
    built: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    training_seconds: float = 0.0
    skipped_steps: int = 0

    def __post_init__(self) -> None:
        self.steps = [[] for _ in range(self.ranks)]

    def add(self, event: RankEvent) -> None:
        if event.name == "built":
            self.built[event.rank] = event.data
        elif event.name == "memory":
            self.memory[event.rank] = dict(event.data)
        elif event.name == "step":
            self._add_step(event)

    def _add_step(self, event: RankEvent) -> None:
        self.steps[event.rank].append(event.data)
        if event.data["timed"] and event.rank in self.memory:
            seen = self.memory[event.rank]
            seen["reserved_peak_bytes"] = max(
                seen["reserved_peak_bytes"], event.data["reserved_peak_bytes"]
            )
        index = len(self.losses)
        if any(len(steps) <= index for steps in self.steps):
            return
        step = [steps[index] for steps in self.steps]
        seconds = max(item["seconds"] for item in step)
        self.losses.append(sum(item["loss"] for item in step) / self.ranks)
        self.skipped_steps += bool(step[0]["skipped"])
        self.training_seconds += seconds
        if step[0]["timed"]:
            self.step_seconds.append(seconds)

    @property
    def memory_complete(self) -> bool:
        return len(self.memory) == self.ranks

    def not_finite(self) -> str:
        """The reason why training is not finite; empty while it is."""
        if self.losses and not math.isfinite(self.losses[-1]):
            return f"the loss is {self.losses[-1]} at optimizer step {len(self.losses)}"
        return ""


def _measurement(
    config: TrainConfig,
    log: _RankLog,
    end: GroupEnd | None,
    not_finite: str,
    startup_seconds: float,
    total_seconds: float,
) -> Measurement:
    outcome, reason = Outcome.OK, ""
    if not_finite:
        outcome, reason = Outcome.NOT_FINITE, not_finite
    elif end is not None and end.outcome is not Outcome.OK:
        outcome, reason = end.outcome, end.reason
    elif log.losses and log.skipped_steps == len(log.losses):
        outcome = Outcome.NOT_FINITE
        reason = f"the gradients overflowed in all of {log.skipped_steps} optimizer steps"
    elif not log.step_seconds:
        outcome, reason = Outcome.CRASHED, "the ranks ended before the first timed step"
    failed = end is not None and outcome is end.outcome and outcome is not Outcome.OK
    first = log.built.get(0, {})
    return Measurement(
        outcome=outcome,
        global_batch_size=config.global_batch_size,
        ranks=config.ranks,
        step_seconds=tuple(log.step_seconds),
        losses=tuple(log.losses),
        tokens_per_sample=first.get("tokens_per_sample"),
        memory=tuple(RankMemory(**log.memory[rank]) for rank in sorted(log.memory)),
        skipped_steps=log.skipped_steps,
        reason=reason,
        traceback=end.traceback if end is not None and failed else "",
        failed_rank=end.failed_rank if end is not None and failed else None,
        user_error=end.user_error if end is not None and failed else False,
        startup_seconds=startup_seconds,
        build_seconds=max((built["seconds"] for built in log.built.values()), default=0.0),
        training_seconds=log.training_seconds,
        total_seconds=total_seconds,
    )
