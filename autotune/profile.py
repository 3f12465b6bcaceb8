"""What a model is like: its sizes, its activations and its speed, from a short run in one rank.

No torch in this process; `autotune.profile_job` runs in the rank.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.hardware import measure_hardware
from autotune.records import ModelProfile
from autotune.units import format_bytes, format_seconds
from runtime.errors import ModelFileError, RunError
from runtime.measurement import Outcome

if TYPE_CHECKING:
    from runtime.launch import GroupEnd, Launcher

__all__ = ["measure_hardware", "profile_model"]

PROFILE_JOB = "autotune.profile_job:profile_job"
TRACE_JOB = "autotune.profile_job:trace_job"
_TRACE_SECONDS = 30.0
"""What a trace gets at least, however long the run before it took."""


def profile_model(
    launcher: Launcher,
    model_file: Path,
    *,
    threads: int,
    memory_limit_bytes: int | None,
    deadline_seconds: float,
) -> ModelProfile:
    """Profile the model unsharded in fp32; traced without memory where it does not fit the limit.

    Raises:
        ModelFileError: the model file breaks a rule or its code raised; `detail` is the traceback.
        RunError: the run failed in another way before it had told enough.
    """
    start = time.monotonic()
    found = _Found()
    run = functools.partial(
        _run,
        launcher,
        model_file,
        found,
        threads=threads,
        memory_limit_bytes=memory_limit_bytes,
    )
    end = run(PROFILE_JOB, deadline_seconds)
    if end.outcome is Outcome.OUT_OF_MEMORY and not found.complete:
        limit = "" if memory_limit_bytes is None else f" of {format_bytes(memory_limit_bytes)}"
        found.notes.append(
            f"One unsharded fp32 step does not fit the memory limit{limit} ({end.reason}): the "
            "model's bytes were traced, not measured."
        )
        left = max(_TRACE_SECONDS, deadline_seconds - (time.monotonic() - start))
        first, end = end, run(TRACE_JOB, left)
        if not found.counted:
            raise RunError(
                f"profile of {model_file}: {first.reason}; traced: {end.reason}", end.traceback
            )
    elif end.outcome is not Outcome.OK:
        if not found.complete:
            raise RunError(f"profile of {model_file}: {end.reason}", end.traceback)
        found.notes.append(
            f"The profile ended after {format_seconds(time.monotonic() - start)}, "
            f"before its last checks: {end.reason}."
        )
    return found.profile()


@dataclass
class _Found:
    """What the rank has reported so far."""

    facts: dict[str, Any] = field(default_factory=dict)
    activation_bytes: dict[int, int] = field(default_factory=dict)
    micro_batch_seconds: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def counted(self) -> bool:
        return "parameter_count" in self.facts and "optimizer_state_bytes" in self.facts

    @property
    def complete(self) -> bool:
        """Enough for a profile: the rest only sharpens the predictions."""
        return self.counted and bool(self.activation_bytes)

    def add(self, name: str, data: dict[str, Any]) -> None:
        if name == "facts":
            self.facts.update(data)
        elif name == "note":
            self.notes.append(data["text"])
        elif name == "micro_batch" and "bytes" in data:
            self.activation_bytes[data["size"]] = data["bytes"]
        elif name == "micro_batch":
            self.micro_batch_seconds[data["size"]] = data["seconds"]

    def profile(self) -> ModelProfile:
        return ModelProfile(
            **self.facts,
            activation_bytes=self.activation_bytes,
            micro_batch_seconds=self.micro_batch_seconds,
            notes=tuple(self.notes),
        )


def _run(
    launcher: Launcher,
    model_file: Path,
    found: _Found,
    job: str,
    deadline_seconds: float,
    *,
    threads: int,
    memory_limit_bytes: int | None,
) -> GroupEnd:
    with launcher.start(
        job,
        {"model_file": str(model_file)},
        ranks=1,
        threads_per_rank=threads,
        memory_limit_bytes=memory_limit_bytes,
        deadline_seconds=deadline_seconds,
    ) as group:
        for event in group.events():
            found.add(event.name, event.data)
    end = group.end
    if end is None:
        raise RunError(f"profile of {model_file}: the rank ended without a word")
    if end.user_error:
        raise ModelFileError(end.reason, end.traceback)
    return end
