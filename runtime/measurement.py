"""The records of one measured run: what a rank saw, and what it amounts to over all ranks.

No torch here: the process that searches reads these, and only the ranks import torch.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import Enum


class Outcome(str, Enum):
    """How a run ended."""

    OK = "ok"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"
    NOT_FINITE = "not finite"


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank. The parts are those held just before the optimizer step."""

    parameter_bytes: int = 0
    """Parameters and buffers as held between steps: whole, or this rank's shard."""
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    allocated_peak_bytes: int = 0
    """Largest sum of live tensor bytes within one step."""
    reserved_peak_bytes: int = 0
    """Largest amount charged by the device or the kernel in the steps, above the baseline of a
    rank that has only imported."""
    startup_peak_bytes: int = 0
    """The same, while the model was built and sharded."""

    @property
    def other_bytes(self) -> int:
        """Activations, gathered parameters, communication buffers, batches: the peak's rest."""
        parts = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return max(0, self.allocated_peak_bytes - parts)

    @property
    def charged_peak_bytes(self) -> int:
        """What a memory limit is compared with."""
        return max(self.reserved_peak_bytes, self.startup_peak_bytes)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One configuration, run once in fresh processes."""

    outcome: Outcome
    global_batch_size: int
    ranks: int
    step_seconds: tuple[float, ...] = ()
    """Seconds of each timed optimizer step, from one batch's fetch to the next, slowest rank."""
    losses: tuple[float, ...] = ()
    """Loss of each optimizer step, warm-up included, averaged over the ranks."""
    tokens_per_sample: int | None = None
    memory: tuple[RankMemory, ...] = field(default=())
    skipped_steps: int = 0
    """Optimizer steps skipped because a gradient was not finite (fp16 loss scaling)."""
    stopped_early: bool = False
    """The run was ended before its full length because it could not win."""
    reason: str = ""
    """One line that says why the outcome is not ok; empty where it is."""
    traceback: str = ""
    """The failing rank's traceback; empty where there is none."""
    failed_rank: int | None = None
    user_error: bool = False
    """The reason is a rule that the model file broke, or an exception of its own code."""
    startup_seconds: float = 0.0
    """From the request to the ranks' first line of our code: fork and process group."""
    build_seconds: float = 0.0
    """Model, optimizer, sharding and batches."""
    training_seconds: float = 0.0
    """All optimizer steps, warm-up included."""
    total_seconds: float = 0.0
    """From the request until every process has gone."""

    @property
    def overhead_seconds(self) -> float:
        """What the run cost beyond building the model and training it."""
        return self.total_seconds - self.build_seconds - self.training_seconds

    @property
    def median_step_seconds(self) -> float | None:
        """Median of `step_seconds`; None where no step was timed."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def samples_per_second(self) -> float | None:
        """Over all ranks, from the median step."""
        median = self.median_step_seconds
        return self.global_batch_size / median if median else None

    @property
    def tokens_per_second(self) -> float | None:
        """Over all ranks; None where samples are not sequences of tokens."""
        samples = self.samples_per_second
        return samples * self.tokens_per_sample if samples and self.tokens_per_sample else None

    @property
    def allocated_peak_bytes(self) -> int | None:
        """Of the rank with the largest."""
        return max((rank.allocated_peak_bytes for rank in self.memory), default=None)

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Of the rank with the largest, start-up included: what a memory limit is compared with."""
        return max((rank.charged_peak_bytes for rank in self.memory), default=None)
