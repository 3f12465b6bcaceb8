"""Where every byte of one rank goes, for any configuration of a traced model.

Nothing runs and nothing is allocated: the engine's own steps are replayed in arithmetic
(`autotune.replay`). What is sharded at which stage is ZeRO's (Rajbhandari et al.,
arXiv:1910.02054); in which dtype, and what lies in buffers meanwhile, is this engine's.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.model_trace import ModelTrace, arithmetic, timeline_key
from autotune.replay import TERMS, Replay, Replicated
from autotune.replay_sharded import Sharded
from runtime.config import TrainConfig


@dataclass(frozen=True)
class Entry:
    """One term at the peak."""

    name: str
    bytes: float
    tier: str
    """Where the bytes lie: `device` or `host`. Offloading a term changes this column."""


@dataclass(frozen=True)
class Ledger:
    """What one rank holds at its peak, and at which point of an optimizer step that is."""

    entries: tuple[Entry, ...]
    """Terms above zero."""
    segment: str
    lingering_bytes: float = 0.0
    """Of a buffer that a communication thread may let go of late: in some runs it adds to the
    peak, in most it does not."""

    @property
    def peak_bytes(self) -> float:
        """Allocated bytes at the peak, over all tiers."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def terms(self) -> dict[str, float]:
        """Name → bytes."""
        return {entry.name: entry.bytes for entry in self.entries}


def ledger(trace: ModelTrace, config: TrainConfig) -> Ledger:
    """The ledger of the rank that holds most (rank 0, whose shards are never the smaller ones).

    Raises:
        KeyError: the trace lacks the timeline of this arithmetic and checkpointing.
    """
    kind = arithmetic(config)
    timeline = trace.timelines[
        timeline_key(kind, config.precision, config.activation_checkpointing)
    ]
    if config.ranks == 1:
        replay = Replay(trace, config)
    elif config.zero_stage == 0:
        replay = Replicated(trace, config)
    else:
        replay = Sharded(trace, config)
    replay.start_step()
    # Between the first micro-batch and the last all are alike.
    count = min(3, config.gradient_accumulation_steps)
    for index in range(count):
        replay.start_micro_batch(first=index == 0, last=index == count - 1)
        for moment in timeline.moments:
            replay.advance(moment)
    replay.step_optimizer()
    tier = "host" if trace.device == "cpu" else "device"
    return Ledger(
        entries=tuple(
            Entry(name, size, tier) for name in TERMS if (size := replay.peak.get(name, 0.0)) > 0
        ),
        segment=replay.segment,
        lingering_bytes=replay.lingering_bytes(),
    )
